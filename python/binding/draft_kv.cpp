#include "specstate/draft_kv.hpp"

#include <tvm/ffi/container/array.h>

#include <vector>

#include "common.hpp"
#include "specstate/supports.hpp"

namespace specstate::binding {

namespace {

using Pools = ffi::Array<ffi::Optional<ffi::Tensor>>;

/// A scale that crosses as an array, or as a number (which `number` then holds).
TensorView scale(const char* name, const Opt& array, const ffi::Optional<double>& value, double& number) {
  if (array.has_value()) return view(name, array);
  if (!value.has_value()) return {};
  number = value.value();
  return TensorView(&number, DType::kFloat64, {});
}

std::vector<TensorView> pool_views(const char* name, const Pools& pools) {
  std::vector<TensorView> views;
  for (const ffi::Optional<ffi::Tensor> t : pools) {
    views.emplace_back();
    if (!t.has_value()) continue;
    views.back() = view(name, t.value());
  }
  return views;
}

}  // namespace

/// Packed weights as Python holds them: opaque, made by `draft_kv_pack`, passed back to `draft_kv_materialize_into_pool`.
class ProjectionObj : public ffi::Object {
 public:
  explicit ProjectionObj(draft_kv::KvProjection p) : projection(std::move(p)) {}
  draft_kv::KvProjection projection;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("specstate.KvProjection", ProjectionObj, ffi::Object);
};

class Projection : public ffi::ObjectRef {
 public:
  explicit Projection(draft_kv::KvProjection p) { data_ = ffi::make_object<ProjectionObj>(std::move(p)); }
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(Projection, ffi::ObjectRef, ProjectionObj);
};

TVM_FFI_DLL_EXPORT_TYPED_FUNC(draft_kv_pack, [](Opt kv_weight, Opt kv_bias) {
  return guard([&] { return Projection(draft_kv::KvProjection(view("kv_weight", kv_weight), view("kv_bias", kv_bias))); });
});

/// Where `asks` and a workspace is needed, nothing is done, and the result says how large it has to be; else 0.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(draft_kv_materialize_into_pool,
                              [](Opt ctx_hidden, ffi::Optional<Projection> projection, Opt kv_weight, Opt k_norm_weight, Opt eps,
                                 Opt cos_sin_cache, Opt positions, Opt slot_mapping, Pools k_pool, Pools v_pool, Opt kv_bias,
                                 Opt commit_lens, Opt k_scale, ffi::Optional<double> k_scale_number, Opt v_scale,
                                 ffi::Optional<double> v_scale_number, bool is_neox_style, bool round_after_norm, Opt fc_weight,
                                 Opt hidden_norm_weight, double hidden_norm_eps, bool round_to_weight_dtype, Opt workspace, bool asks,
                                 std::int64_t s) {
                                return guard([&]() -> std::int64_t {
                                  draft_kv::MaterializeIntoPoolParams p;
                                  double k_number = 1, v_number = 1;
                                  const std::vector<TensorView> k = pool_views("k_pool", k_pool), v = pool_views("v_pool", v_pool);
                                  p.ctx_hidden = view("ctx_hidden", ctx_hidden);
                                  if (projection.has_value()) p.projection = projection.value()->projection;
                                  SPECSTATE_SET(p, kv_weight, kv_bias, k_norm_weight, eps, cos_sin_cache, positions, slot_mapping,
                                                commit_lens, fc_weight, hidden_norm_weight, workspace);
                                  p.k_pool = k, p.v_pool = v;
                                  p.k_scale = scale("k_scale", k_scale, k_scale_number, k_number);
                                  p.v_scale = scale("v_scale", v_scale, v_scale_number, v_number);
                                  p.is_neox_style = is_neox_style;
                                  p.round_after_norm = round_after_norm;
                                  p.hidden_norm_eps = static_cast<float>(hidden_norm_eps);
                                  if (round_to_weight_dtype) p.io = p.projection.given() ? p.projection.dtype() : p.kv_weight.dtype;
                                  if (const std::int64_t bytes = asks ? draft_kv::materialize_workspace_bytes(p) : 0; bytes > 0) {
                                    const CheckOnly only;  // nobody makes room for a call that will be refused
                                    p.workspace = TensorView(reinterpret_cast<void*>(16), DType::kUInt8, {bytes}, p.ctx_hidden.device);
                                    draft_kv::materialize_into_pool(p);
                                    return bytes;
                                  }
                                  draft_kv::materialize_into_pool(p, stream(s));
                                  return 0;
                                });
                              });

TVM_FFI_DLL_EXPORT_TYPED_FUNC(draft_kv_workspace_bytes, [](In ctx_hidden, Opt fc_weight) {
  return guard([&] {
    draft_kv::MaterializeIntoPoolParams p;
    p.ctx_hidden = view("ctx_hidden", ctx_hidden), p.fc_weight = view("fc_weight", fc_weight);
    return draft_kv::materialize_workspace_bytes(p);
  });
});

TVM_FFI_DLL_EXPORT_TYPED_FUNC(draft_kv_raise_pending_error,
                              [](In like) { guard([&] { draft_kv::raise_pending_error(view("like", like).device); }); });

TVM_FFI_DLL_EXPORT_TYPED_FUNC(draft_kv_fused_norm_rope_stacked,
                              [](Opt kv, Opt k_norm_weight, Opt eps, Opt cos_sin_cache, Opt positions, std::int64_t num_kv_heads,
                                 std::int64_t head_dim, std::int64_t rotary_dim, Opt k_out, Opt v_out, std::int64_t s) {
                                guard([&] {
                                  draft_kv::FusedNormRopeStackedParams p;
                                  SPECSTATE_SET(p, kv, k_norm_weight, eps, cos_sin_cache, positions);
                                  p.num_kv_heads = num_kv_heads;
                                  p.head_dim = head_dim;
                                  p.rotary_dim = rotary_dim;
                                  SPECSTATE_SET(p, k_out, v_out);
                                  draft_kv::fused_norm_rope_stacked(p, stream(s));
                                });
                              });

}  // namespace specstate::binding
