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
    if (const TensorView& x = params.ctx_hidden, &fc = params.fc_weight; x.device.type == DeviceType::kCuda && x.ndim == 2) {
      const DType io = params.io.value_or(x.dtype);
      const TensorView &norm = params.k_norm_weight, &table = params.cos_sin_cache, &w = params.kv_weight;
      const bool whole = norm.ndim == 2 && table.ndim >= 2 && w.ndim == 3 && (!fc.given() || fc.ndim == 2) && !params.v_pool.empty() &&
                         params.v_pool[0].ndim >= 1;
      if (!whole) return cuda::workspace_bytes(x.sizes[0], fc.ndim > 0 ? fc.sizes[0] : x.sizes[1], fc.ndim > 0 ? size_of(io) : 0);
      const NormRope nr{norm, params.eps, table, norm.sizes[1], table.size(-1), params.is_neox_style, params.round_after_norm, io};
      return cuda::workspace_bytes(nr, params.v_pool[0].size(-1), x, w, fc);
    }
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
