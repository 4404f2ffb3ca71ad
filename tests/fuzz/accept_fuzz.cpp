// Calls of the acceptance family.
#include "fuzz.hpp"
#include "specstate/accept.hpp"

using namespace specstate;
using namespace specstate::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  Call call(input);
  const std::int64_t b = input.integer(0, 5), W = input.integer(1, 8);
  const DType ids = input.pick({DType::kInt32, DType::kInt64});
  accept::VerifyGreedyParams p;
  p.candidates = call.in(ids, {b, W});
  p.target_argmax = call.in(ids, {b, W});
  p.accept_lens = call.out(DType::kInt32, {b});
  p.out_tokens = call.out(ids, {b, W});
  return call.run([&] { accept::verify_greedy(p); });
}
