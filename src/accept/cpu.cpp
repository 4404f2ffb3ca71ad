#include "accept/args.hpp"

namespace specstate::accept::cpu {

namespace {

template <class Token>
void greedy(const VerifyGreedyArgs& x) {
  const auto* candidates = static_cast<const Token*>(x.candidates);
  const auto* target = static_cast<const Token*>(x.target_argmax);
  auto* out = static_cast<Token*>(x.out_tokens);
  for (std::int64_t r = 0; r < x.batch; ++r) {
    const Token* c = candidates + r * x.candidates_stride[0];
    const Token* t = target + r * x.target_stride[0];
    Token* o = out + r * x.out_stride[0];
    std::int64_t a = 0;
    while (a + 1 < x.width && c[(a + 1) * x.candidates_stride[1]] == t[a * x.target_stride[1]]) ++a;
    for (std::int64_t j = 0; j < x.width; ++j) {
      Token token = 0;
      if (j < a) token = c[(j + 1) * x.candidates_stride[1]];
      if (j == a) token = t[a * x.target_stride[1]];
      o[j * x.out_stride[1]] = token;
    }
    x.accept_lens[r * x.accept_stride] = static_cast<std::int32_t>(a + 1);
  }
}

}  // namespace

void run(const VerifyGreedyArgs& args, Stream) { args.is_int64 ? greedy<std::int64_t>(args) : greedy<std::int32_t>(args); }

}  // namespace specstate::accept::cpu
