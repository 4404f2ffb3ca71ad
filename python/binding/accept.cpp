#include "specstate/accept.hpp"

#include "common.hpp"

namespace specstate::binding {

TVM_FFI_DLL_EXPORT_TYPED_FUNC(accept_verify_greedy, [](In candidates, In target_argmax, In accept_lens, In out_tokens, std::int64_t s) {
  guard([&] {
    accept::VerifyGreedyParams p;
    p.candidates = view("candidates", candidates);
    p.target_argmax = view("target_argmax", target_argmax);
    p.accept_lens = view("accept_lens", accept_lens);
    p.out_tokens = view("out_tokens", out_tokens);
    accept::verify_greedy(p, stream(s));
  });
});

}  // namespace specstate::binding
