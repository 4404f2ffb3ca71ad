// Parameters -> check once -> Args -> the backend.
#include "core/dispatch.hpp"
#include "draft_kv/check.hpp"

namespace specstate::draft_kv {

void materialize_into_pool(const MaterializeIntoPoolParams& params, Stream stream) {
  const MaterializeArgs args = check(params);
  if (params.ctx_hidden.device.type == DeviceType::kCuda) core::no_cuda("materialize_into_pool");
  cpu::run(args, stream);
}

void fused_norm_rope_stacked(const FusedNormRopeStackedParams& params, Stream stream) {
  const FusedNormRopeStackedArgs args = check(params);
  if (params.kv.device.type == DeviceType::kCuda) core::no_cuda("fused_norm_rope_stacked");
  cpu::run(args, stream);
}

}  // namespace specstate::draft_kv
