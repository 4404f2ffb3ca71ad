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

}  // namespace specstate::accept
