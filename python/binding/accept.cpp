#include "specstate/accept.hpp"

#include "common.hpp"

namespace specstate::binding {

TVM_FFI_DLL_EXPORT_TYPED_FUNC(accept_verify_greedy,
                              [](In candidates, In target_argmax, Opt verify_lens, In accept_lens, In out_tokens, std::int64_t s) {
                                guard([&] {
                                  accept::VerifyGreedyParams p;
                                  p.candidates = view("candidates", candidates);
                                  p.target_argmax = view("target_argmax", target_argmax);
                                  p.verify_lens = view("verify_lens", verify_lens);
                                  p.accept_lens = view("accept_lens", accept_lens);
                                  p.out_tokens = view("out_tokens", out_tokens);
                                  accept::verify_greedy(p, stream(s));
                                });
                              });

TVM_FFI_DLL_EXPORT_TYPED_FUNC(accept_verify_rejection, [](In candidates, Opt draft_probs, In target_probs, In uniforms, Opt verify_lens,
                                                          In accept_lens, In out_tokens, std::int64_t s) {
  guard([&] {
    accept::VerifyRejectionParams p;
    p.candidates = view("candidates", candidates);
    p.draft_probs = view("draft_probs", draft_probs);
    p.target_probs = view("target_probs", target_probs);
    p.uniforms = view("uniforms", uniforms);
    p.verify_lens = view("verify_lens", verify_lens);
    p.accept_lens = view("accept_lens", accept_lens);
    p.out_tokens = view("out_tokens", out_tokens);
    accept::verify_rejection(p, stream(s));
  });
});

TVM_FFI_DLL_EXPORT_TYPED_FUNC(accept_plan_verify_lengths, [](In confidences, Opt lagged_confidences, Opt probe_tokens, Opt steps_per_second,
                                                             Opt max_lens, In verify_lens, std::int64_t s) {
  guard([&] {
    accept::PlanVerifyLengthsParams p;
    p.confidences = view("confidences", confidences);
    p.lagged_confidences = view("lagged_confidences", lagged_confidences);
    p.probe_tokens = view("probe_tokens", probe_tokens);
    p.steps_per_second = view("steps_per_second", steps_per_second);
    p.max_lens = view("max_lens", max_lens);
    p.verify_lens = view("verify_lens", verify_lens);
    accept::plan_verify_lengths(p, stream(s));
  });
});

}  // namespace specstate::binding
