// Parameters -> check once -> Args -> the backend.
#include "accept/check.hpp"
#include "core/dispatch.hpp"
#include "specstate/accept.hpp"

namespace specstate::accept {

void verify_greedy(const VerifyGreedyParams& params, Stream stream) {
  const VerifyGreedyArgs args = check(params);
  if (params.candidates.device.type == DeviceType::kCuda) core::no_cuda("verify_greedy");
  cpu::run(args, stream);
}

void verify_rejection(const VerifyRejectionParams& params, Stream stream) {
  const VerifyRejectionArgs args = check(params);
  if (params.candidates.device.type == DeviceType::kCuda) core::no_cuda("verify_rejection");
  cpu::run(args, stream);
}

void plan_verify_lengths(const PlanVerifyLengthsParams& params) { cpu::run(check(params)); }

}  // namespace specstate::accept
