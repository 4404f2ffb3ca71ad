#include "accept/check.hpp"

#include <cmath>
#include <limits>

#include "accept/layout.hpp"
#include "core/match.hpp"

namespace specstate::accept {

using core::Checker;
using core::Sym;

namespace {

constexpr auto kInt = {DType::kInt32, DType::kInt64};

// What the arguments hold is read after all of them have the right dtype, shape and place, and only where the host may read it.

/// Optional lengths [b], each in low..high.
void read_lengths(const Checker& check, const char* name, const TensorView& t, std::int64_t low, std::int64_t high) {
  if (!t.given() || !core::host_reads(t)) return;
  for (std::int64_t r = 0; r < t.sizes[0]; ++r) {
    const std::int64_t n = core::load_index(t, r);
    if (n >= low && n <= high) continue;
    const std::string bounds = high == kNoLimit ? " >= " + std::to_string(low) : " in " + std::to_string(low) + ".." + std::to_string(high);
    check.fail(name, "lengths" + bounds, std::to_string(n) + " at row " + std::to_string(r));
  }
}

constexpr std::int64_t kMostLength = std::numeric_limits<std::int32_t>::max();  // what the int32 results hold

void check_width(const Checker& check, std::int64_t width, const TensorView& candidates) {
  if (width < 1) check.fail("candidates", "at least one column (the last emitted token)", "shape " + shape_text(candidates));
  if (width > kMostLength) check.fail("candidates", "at most 2147483647 columns", "shape " + shape_text(candidates));
}

/// Every entry of a matrix within [low, high]; NaN is outside.
void read_range(const Checker& check, const char* name, const TensorView& t, double low, double high, const char* expected) {
  if (!t.given() || !core::host_reads(t)) return;
  for (std::int64_t r = 0; r < t.sizes[0]; ++r)
    for (std::int64_t j = 0; j < t.sizes[1]; ++j) {
      const double x = real_at(t, element_offset(t, r, j));
      if (!(x >= low && x <= high))  // NaN too
        check.fail(name, expected, core::number_text(x) + " at [" + std::to_string(r) + ", " + std::to_string(j) + "]");
    }
}

}  // namespace

VerifyGreedyArgs check(const VerifyGreedyParams& p) {
  Checker check("verify_greedy");
  Sym b("b"), W("W");
  check.arg("candidates", p.candidates).required().dtype(kInt).shape({b, W}).same_device();
  check_width(check, W, p.candidates);
  check.arg("target_argmax", p.target_argmax).required().dtype_of("candidates", p.candidates).shape({b, W}).same_device();
  check.arg("verify_lens", p.verify_lens).dtype(kInt).shape({b}).same_device();
  check.arg("accept_lens", p.accept_lens).required().dtype(DType::kInt32).shape({b}).same_device().written();
  check.arg("out_tokens", p.out_tokens).required().dtype_of("candidates", p.candidates).shape({b, W}).same_device().written();
  check.outputs_apart();
  read_lengths(check, "verify_lens", p.verify_lens, 1, W);

  VerifyGreedyArgs a{};
  a.candidates = p.candidates.data;
  a.target_argmax = p.target_argmax.data;
  a.verify_lens = p.verify_lens;
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

VerifyRejectionArgs check(const VerifyRejectionParams& p) {
  Checker check("verify_rejection");
  Sym b("b"), W("W"), V("V");
  const auto probabilities = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};
  check.arg("candidates", p.candidates).required().dtype(kInt).shape({b, W}).same_device();
  check_width(check, W, p.candidates);
  check.arg("target_probs", p.target_probs).required().dtype(probabilities).shape({b, W, V}).same_device();
  if (V < 1) check.fail("target_probs", "at least one id", "shape " + shape_text(p.target_probs));
  check.arg("draft_probs", p.draft_probs).dtype(probabilities).shape({b, W.value() - 1, V}).same_device();
  check.arg("uniforms", p.uniforms).required().dtype({DType::kFloat32, DType::kFloat64}).shape({b, W}).same_device();
  check.arg("verify_lens", p.verify_lens).dtype(kInt).shape({b}).same_device();
  check.arg("accept_lens", p.accept_lens).required().dtype(DType::kInt32).shape({b}).same_device().written();
  check.arg("out_tokens", p.out_tokens).required().dtype_of("candidates", p.candidates).shape({b, W}).same_device().written();
  check.outputs_apart();
  read_range(check, "uniforms", p.uniforms, 0, 1, "numbers in [0, 1]");
  read_lengths(check, "verify_lens", p.verify_lens, 1, W);
  return {p.candidates, p.draft_probs, p.target_probs, p.uniforms, p.verify_lens, p.accept_lens, p.out_tokens, b, W, V};
}

PlanVerifyLengthsArgs check(const PlanVerifyLengthsParams& p) {
  Checker check("plan_verify_lengths");
  Sym b("b"), G("G"), n("n");
  const auto reals = {DType::kFloat32, DType::kFloat64};
  check.arg("confidences", p.confidences).required().dtype(reals).shape({b, G}).same_device();
  if (G >= kMostLength) check.fail("confidences", "at most 2147483646 proposals a row", "shape " + shape_text(p.confidences));
  check.arg("lagged_confidences", p.lagged_confidences).dtype(reals).shape({b, G}).same_device();
  const bool table = p.probe_tokens.given() || p.steps_per_second.given();
  if (table) {
    check.arg("probe_tokens", p.probe_tokens).required().dtype(kInt).shape({n}).same_device();
    if (n < 1) check.fail("probe_tokens", "at least one probe", "shape " + shape_text(p.probe_tokens));
    check.arg("steps_per_second", p.steps_per_second).required().dtype(reals).shape({n}).same_device();
  }
  check.arg("max_lens", p.max_lens).dtype(kInt).shape({b}).same_device();
  check.arg("out", p.out).required().dtype(DType::kInt32).shape({b}).same_device().written();
  check.outputs_apart();
  read_range(check, "confidences", p.confidences, 0, 1, "numbers in [0, 1]");
  read_range(check, "lagged_confidences", p.lagged_confidences, -HUGE_VAL, 1, "numbers up to 1 (below 0: unknown)");
  read_lengths(check, "max_lens", p.max_lens, 1, kNoLimit);
  if (table && core::host_reads(p.probe_tokens))
    for (std::int64_t i = 0; i < n; ++i) {
      const double speed = real_at(p.steps_per_second, i * p.steps_per_second.strides[0]);
      if (!(speed > 0 && speed < HUGE_VAL))
        check.fail("steps_per_second", "finite numbers > 0", core::number_text(speed) + " at " + std::to_string(i));
      if (i > 0 && core::load_index(p.probe_tokens, i - 1) >= core::load_index(p.probe_tokens, i))
        check.fail("probe_tokens", "ascending counts", std::to_string(core::load_index(p.probe_tokens, i)) + " at " + std::to_string(i));
    }
  return {p.confidences, p.lagged_confidences, p.probe_tokens, p.steps_per_second, p.max_lens, p.out, b, G, table ? n.value() : 0};
}

}  // namespace specstate::accept
