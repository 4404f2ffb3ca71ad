// Parameters -> check once -> Args -> the backend.
#include "core/dispatch.hpp"
#include "draft_kv/check.hpp"

namespace specstate::draft_kv {

void materialize_into_pool(const MaterializeIntoPoolParams& params, Stream stream) {
  const MaterializeArgs args = check(params);
  core::on_backend(
      "materialize_into_pool", params.ctx_hidden.device, [&] { cpu::run(args, stream); }, [&] { cuda::run(args, stream); });
}

std::int64_t materialize_workspace_bytes(const MaterializeIntoPoolParams& params) {
  if constexpr (core::cuda_built())
    if (const TensorView& x = params.ctx_hidden, &fc = params.fc_weight; x.device.type == DeviceType::kCuda && x.ndim == 2)
      return cuda::workspace_bytes(x.sizes[0], fc.ndim > 0 ? fc.sizes[0] : x.sizes[1],
                                   fc.ndim > 0 ? size_of(params.io.value_or(x.dtype)) : 0);
  return 0;
}

void raise_pending_error(const Device& device) {
  core::on_backend(
      "raise_pending_error", device, [] {}, [] { cuda::raise_flags(); });
}

void fused_norm_rope_stacked(const FusedNormRopeStackedParams& params, Stream stream) {
  const FusedNormRopeStackedArgs args = check(params);
  core::on_backend(
      "fused_norm_rope_stacked", params.kv.device, [&] { cpu::run(args, stream); }, [&] { cuda::run(args, stream); });
}

}  // namespace specstate::draft_kv
