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
  return workspace_bytes(core::Checker("materialize_workspace_bytes"), params);
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
