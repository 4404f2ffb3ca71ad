// Parameters -> check once -> Args -> the backend.
#include "accept/check.hpp"
#include "core/dispatch.hpp"
#include "specstate/accept.hpp"

namespace specstate::accept {

namespace {

template <class Args>
void dispatch(const char* op, const Device& device, const Args& args, Stream stream) {
  core::on_backend(
      op, device, [&] { cpu::run(args, stream); }, [&] { cuda::run(args, stream); });
}

}  // namespace

void verify_greedy(const VerifyGreedyParams& params, Stream stream) {
  dispatch("verify_greedy", params.candidates.device, check(params), stream);
}

void verify_rejection(const VerifyRejectionParams& params, Stream stream) {
  dispatch("verify_rejection", params.candidates.device, check(params), stream);
}

void plan_verify_lengths(const PlanVerifyLengthsParams& params, Stream stream) {
  dispatch("plan_verify_lengths", params.confidences.device, check(params), stream);
}

}  // namespace specstate::accept
