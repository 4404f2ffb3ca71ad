// Parameters -> check once -> Args -> the backend.
#include "accept/check.hpp"
#include "core/dispatch.hpp"
#include "specstate/accept.hpp"

namespace specstate::accept {

void verify_greedy(const VerifyGreedyParams& params, Stream stream) {
  const VerifyGreedyArgs args = check(params);
  core::on_backend(
      "verify_greedy", params.candidates.device, [&] { cpu::run(args, stream); }, [&] { cuda::run(args, stream); });
}

void verify_rejection(const VerifyRejectionParams& params, Stream stream) {
  const VerifyRejectionArgs args = check(params);
  core::on_backend("verify_rejection", params.candidates.device, [&] { cpu::run(args, stream); });
}

void plan_verify_lengths(const PlanVerifyLengthsParams& params) {
  const PlanVerifyLengthsArgs args = check(params);
  core::on_backend("plan_verify_lengths", params.confidences.device, [&] { cpu::run(args); });
}

}  // namespace specstate::accept
