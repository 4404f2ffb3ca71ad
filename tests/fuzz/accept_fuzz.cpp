// Calls of the acceptance family.
#include "fuzz.hpp"
#include "specstate/accept.hpp"

using namespace specstate;
using namespace specstate::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  Call call(input);
  const std::int64_t b = input.integer(0, 5), W = input.integer(1, 8), V = input.integer(1, 9);
  const DType ids = input.pick({DType::kInt32, DType::kInt64}), lens = input.pick({DType::kInt32, DType::kInt64});
  const DType real = input.pick({DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16});
  const DType uniform = input.pick({DType::kFloat32, DType::kFloat64});
  switch (input.integer(0, 2)) {
    case 0: {
      accept::VerifyGreedyParams p;
      p.candidates = call.in(ids, {b, W});
      p.target_argmax = call.in(ids, {b, W});
      if (input.flip()) p.verify_lens = call.in(lens, {b}, {1, W});
      p.accept_lens = call.out(DType::kInt32, {b});
      p.out_tokens = call.out(ids, {b, W});
      return call.run([&] { accept::verify_greedy(p); });
    }
    case 1: {
      accept::VerifyRejectionParams p;
      p.candidates = call.in(ids, {b, W}, {0, V - 1});
      if (input.flip()) p.draft_probs = call.in(real, {b, W - 1, V});
      p.target_probs = call.in(real, {b, W, V});
      p.uniforms = call.unit(uniform, {b, W});
      if (input.flip()) p.verify_lens = call.in(lens, {b}, {1, W});
      p.accept_lens = call.out(DType::kInt32, {b});
      p.out_tokens = call.out(ids, {b, W});
      return call.run([&] { accept::verify_rejection(p); });
    }
    default: {
      accept::PlanVerifyLengthsParams p;
      const std::int64_t n = input.integer(1, 6);
      p.confidences = call.unit(uniform, {b, W});
      if (input.flip()) p.lagged_confidences = call.unit(uniform, {b, W});
      if (input.flip()) {
        p.probe_tokens = call.in(lens, {n}, {1, 64});
        if (p.probe_tokens.given() && p.probe_tokens.ndim == 1 && p.probe_tokens.dtype == DType::kInt32 && input.flip())
          for (std::int64_t i = 0; i < p.probe_tokens.sizes[0]; ++i)  // ascending, as it must be
            p.probe_tokens.as<std::int32_t>()[i * p.probe_tokens.strides[0]] = static_cast<std::int32_t>(3 * i + 1);
        p.steps_per_second = call.unit(uniform, {n});
      }
      if (input.flip()) p.max_lens = call.in(lens, {b}, {1, W + 2});
      p.out = call.out(DType::kInt32, {b});
      return call.run([&] { accept::plan_verify_lengths(p); });
    }
  }
}
