#include "specstate/accept.hpp"

#include "common.hpp"

namespace specstate::binding {

TVM_FFI_DLL_EXPORT_TYPED_FUNC(accept_verify_greedy,
                              [](Opt candidates, Opt target_argmax, Opt verify_lens, Opt accept_lens, Opt out_tokens, std::int64_t s) {
                                guard([&] {
                                  accept::VerifyGreedyParams p;
                                  SPECSTATE_SET(p, candidates, target_argmax, verify_lens, accept_lens, out_tokens);
                                  accept::verify_greedy(p, stream(s));
                                });
                              });

TVM_FFI_DLL_EXPORT_TYPED_FUNC(accept_verify_rejection, [](Opt candidates, Opt draft_probs, Opt target_probs, Opt uniforms, Opt verify_lens,
                                                          Opt accept_lens, Opt out_tokens, std::int64_t s) {
  guard([&] {
    accept::VerifyRejectionParams p;
    SPECSTATE_SET(p, candidates, draft_probs, target_probs, uniforms, verify_lens, accept_lens, out_tokens);
    accept::verify_rejection(p, stream(s));
  });
});

TVM_FFI_DLL_EXPORT_TYPED_FUNC(accept_plan_verify_lengths, [](Opt confidences, Opt lagged_confidences, Opt probe_tokens,
                                                             Opt steps_per_second, Opt max_lens, Opt out, std::int64_t s) {
  guard([&] {
    accept::PlanVerifyLengthsParams p;
    SPECSTATE_SET(p, confidences, lagged_confidences, probe_tokens, steps_per_second, max_lens, out);
    accept::plan_verify_lengths(p, stream(s));
  });
});

}  // namespace specstate::binding
