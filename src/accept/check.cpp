#include "accept/check.hpp"

#include "core/match.hpp"

namespace specstate::accept {

using core::Checker;
using core::Dim;
using core::Sym;

VerifyGreedyArgs check(const VerifyGreedyParams& p) {
  Checker check("verify_greedy");
  Sym b("b"), W("W");
  check.arg("candidates", p.candidates).required().dtype({DType::kInt32, DType::kInt64}).shape({b, W}).same_device();
  check.require(W >= 1, "candidates", "at least one column (the last emitted token)", "shape " + shape_text(p.candidates));
  check.arg("target_argmax", p.target_argmax).required().dtype(p.candidates.dtype).shape({b, W}).same_device();
  check.arg("accept_lens", p.accept_lens).required().dtype(DType::kInt32).shape({b}).same_device().no_self_overlap();
  check.arg("out_tokens", p.out_tokens).required().dtype(p.candidates.dtype).shape({b, W}).same_device().no_self_overlap();
  for (const auto& [name, out] : {std::pair{"accept_lens", &p.accept_lens}, std::pair{"out_tokens", &p.out_tokens}})
    for (const TensorView* in : {&p.candidates, &p.target_argmax})
      check.require(!core::may_overlap(*out, *in), name, "memory of its own", "memory that overlaps an input");
  check.require(!core::may_overlap(p.accept_lens, p.out_tokens), "out_tokens", "memory of its own", "memory that overlaps accept_lens");

  VerifyGreedyArgs a{};
  a.candidates = p.candidates.data;
  a.target_argmax = p.target_argmax.data;
  a.accept_lens = p.accept_lens.as<std::int32_t>();
  a.out_tokens = p.out_tokens.data;
  for (int i = 0; i < 2; ++i) {
    a.candidates_stride[i] = p.candidates.strides[i];
    a.target_stride[i] = p.target_argmax.strides[i];
    a.out_stride[i] = p.out_tokens.strides[i];
  }
  a.accept_stride = p.accept_lens.strides[0];
  a.batch = b;
  a.width = W;
  a.is_int64 = p.candidates.dtype == DType::kInt64;
  return a;
}

}  // namespace specstate::accept
