#include "draft_kv/check.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/dispatch.hpp"
#include "core/match.hpp"
#include "draft_kv/projection.hpp"

namespace specstate::draft_kv {

using core::Checker;
using core::Dim;
using core::Sym;

namespace {

constexpr std::initializer_list<DType> kFloats = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr std::initializer_list<DType> kIndices = {DType::kInt32, DType::kInt64};
constexpr std::initializer_list<DType> kPoolTypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3FN,
                                                     DType::kUInt8};

bool is_fp8(DType t) { return t == DType::kFloat8E4M3FN || t == DType::kUInt8; }

std::string at(std::int64_t i) { return " at row " + std::to_string(i); }

void check_eps(const Checker& check, const TensorView& eps) {
  if (!core::host_reads(eps)) return;
  for (std::int64_t l = 0; l < eps.sizes[0]; ++l) {
    const float e = eps.as<float>()[l * eps.strides[0]];
    if (!(e >= 0 && e < HUGE_VALF)) check.fail("eps", "finite numbers >= 0", core::number_text(e) + " at layer " + std::to_string(l));
  }
}

/// Entry i of an index tensor of one or two dimensions, row-major.
std::int64_t index_at(const TensorView& t, std::int64_t i) {
  if (t.ndim == 1) return core::load_index(t, i);
  const std::int64_t offset = i / t.sizes[1] * t.strides[0] + i % t.sizes[1] * t.strides[1];
  return t.dtype == DType::kInt64 ? t.as<std::int64_t>()[offset] : t.as<std::int32_t>()[offset];
}

/// A pool argument as one view a layer, all of one dtype.
std::vector<TensorView> layer_views(Checker& check, const char* name, std::span<const TensorView> pools, std::int64_t layers, Sym& slots,
                                    Sym& heads, Sym& channels) {
  check.require(!pools.empty() && pools[0].given(), name, "a tensor", "none");
  std::vector<TensorView> views;
  if (pools.size() == 1 && pools[0].ndim == 4) {
    check.arg(name, pools[0]).dtype(kPoolTypes).shape({layers, slots, heads, channels}).same_device().written();
    for (std::int64_t l = 0; l < layers; ++l) views.push_back(pools[0][l]);
    return views;
  }
  if (static_cast<std::int64_t>(pools.size()) != layers)
    check.fail(name, "one tensor [L, slots, N, D] or one [slots, N, D] for each of " + std::to_string(layers) + " layers",
               pools.size() == 1 ? "shape " + shape_text(pools[0]) : std::to_string(pools.size()) + " tensors");
  for (const TensorView& pool : pools) {
    const bool first = views.empty();
    check.arg(name, pool).required().dtype(kPoolTypes).shape({slots, heads, channels}).same_device().written();
    if (!first) check.arg(name, pool).dtype(views[0].dtype);
    for (const TensorView& other : views)
      check.require(!core::may_overlap(pool, other), name, "a tensor of its own for each layer", "memory that overlaps another layer's");
    views.push_back(pool);
  }
  return views;
}

std::vector<LayerPool> layer_pools(const std::vector<TensorView>& views) {
  std::vector<LayerPool> pools;
  for (const TensorView& t : views) pools.push_back({t.data, t.strides[0], t.strides[1], t.strides[2]});
  return pools;
}

/// A scale that comes as a CPU scalar is one of the call's numbers.
bool is_number(const TensorView& scale) { return scale.ndim == 0 && scale.device.type == DeviceType::kCpu; }

void check_scale(Checker& check, const char* name, const TensorView& t, std::int64_t layers) {
  if (!t.given()) return;
  check.arg(name, t).dtype({DType::kFloat32, DType::kFloat64});
  if (t.ndim > 1 || (t.ndim == 1 && t.sizes[0] != layers))
    check.fail(name, "a number or shape [L=" + std::to_string(layers) + "]", shape_text(t));
  if (is_number(t))
    check.arg(name, t).memory();
  else
    check.arg(name, t).same_device();
}

/// The divisor of each layer: 1 where none is given; anything else needs an fp8 pool.
std::vector<float> scales(const Checker& check, const char* name, const TensorView& t, std::int64_t layers, DType pool) {
  std::vector<float> values(layers, 1.0f);
  if (!t.given() || (!is_number(t) && !core::host_reads(t))) return values;  // read by the kernel
  for (std::int64_t l = 0; l < layers; ++l) {
    const std::int64_t offset = t.ndim == 0 ? 0 : l * t.strides[0];
    const double scale = t.dtype == DType::kFloat64 ? t.as<double>()[offset] : t.as<float>()[offset];
    values[l] = static_cast<float>(scale);
    if (!(values[l] > 0 && values[l] < HUGE_VALF)) check.fail(name, "a finite float32 > 0", core::number_text(scale));
    if (!is_fp8(pool) && scale != 1.0) check.fail(name, std::string("1 for a pool of ") + name_of(pool), core::number_text(scale));
  }
  return values;
}

/// Rows that are written, in row order, with their slots and positions checked. Of rows that name one slot only the last is left: it
/// is what a serial writer would leave behind, and it does not depend on threads.
std::vector<WrittenRow> written_rows(const Checker& check, const MaterializeIntoPoolParams& p, std::int64_t tokens, std::int64_t slots,
                                     std::int64_t table) {
  const std::int64_t width = p.slot_mapping.ndim == 2 ? p.slot_mapping.sizes[1] : std::max<std::int64_t>(tokens, 1);
  std::vector<WrittenRow> rows;
  for (std::int64_t i = 0; i < tokens; ++i) {
    const std::int64_t slot = p.slot_mapping.given() ? index_at(p.slot_mapping, i) : i;
    const std::int64_t commit = p.commit_lens.given() ? core::load_index(p.commit_lens, i / width) : width;
    if (!is_written(slot, i % width, commit)) continue;
    const std::int64_t position = index_at(p.positions, i);
    if (slot >= slots) check.fail("slot_mapping", "slots below " + std::to_string(slots), std::to_string(slot) + at(i));
    if (position < 0 || position >= table)
      check.fail("positions", "rows of cos_sin_cache, 0.." + std::to_string(table - 1), std::to_string(position) + at(i));
    rows.push_back({i, slot, position});
  }
  std::vector<std::size_t> order(rows.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return rows[a].slot != rows[b].slot ? rows[a].slot < rows[b].slot : a < b; });
  bool repeated = false;
  for (std::size_t i = 0; i + 1 < order.size(); ++i)
    if (rows[order[i]].slot == rows[order[i + 1]].slot) rows[order[i]].row = -1, repeated = true;
  if (repeated) std::erase_if(rows, [](const WrittenRow& r) { return r.row < 0; });
  return rows;
}

/// Sizes that may come from anywhere, and no data: only how many bytes a call would want is asked.
void check_sizes(const Checker& check, const char* name, const TensorView& t, int from) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;  // a workspace has some thousand rows of them
  for (int i = 0; i < std::min(t.ndim, kMaxDims); ++i) {
    if (t.sizes[i] < 0) check.fail(name, "sizes of 0 or more", "shape " + shape_text(t));
    if (i >= from && t.sizes[i] > kMost) check.fail(name, "sizes of which 64 bits can count a workspace", "shape " + shape_text(t));
  }
}

/// The caller's workspace, if the call needs one.
void* workspace(Checker& check, const MaterializeIntoPoolParams& p) {
  const std::int64_t bytes = workspace_bytes(check, p);
  if (bytes == 0) return nullptr;
  const std::string expected = "at least " + std::to_string(bytes) + " dense bytes on " + name_of(p.ctx_hidden.device);
  const TensorView& w = p.workspace;
  check.require(w.given() && w.data != nullptr, "workspace", expected, "none");
  check.arg("workspace", w).same_device().written();
  if (!w.contiguous() || w.numel() * size_of(w.dtype) < bytes)
    check.fail("workspace", expected,
               std::to_string(w.numel() * size_of(w.dtype)) + " bytes on " + name_of(w.device) +
                   (w.contiguous() ? "" : " with gaps between them"));
  const auto beyond = reinterpret_cast<std::uintptr_t>(w.data) % 16;
  check.require(beyond == 0, "workspace", "an address that is a multiple of 16",
                "another (" + std::to_string(beyond) + " bytes beyond one)");
  return w.data;
}

}  // namespace

std::int64_t workspace_bytes(const Checker& check, const MaterializeIntoPoolParams& p) {
  if constexpr (core::cuda_built())
    if (const TensorView& x = p.ctx_hidden, &fc = p.fc_weight; x.device.type == DeviceType::kCuda && x.ndim == 2) {
      const TensorView &norm = p.k_norm_weight, &table = p.cos_sin_cache, &w = p.kv_weight;
      if (fc.given() && fc.ndim != 2) check.fail("fc_weight", "shape [hidden, features]", std::to_string(fc.ndim) + " dimensions");
      check_sizes(check, "ctx_hidden", x, 1), check_sizes(check, "fc_weight", fc, 0), check_sizes(check, "kv_weight", w, 0);
      if (x.sizes[0] == 0) return 0;
      const DType io = p.io.value_or(x.dtype);
      const auto dims = [](const TensorView& t, int least, int most) { return t.ndim >= least && t.ndim <= most; };
      const bool whole = dims(norm, 2, 2) && dims(table, 2, 3) && dims(w, 3, 3) && !p.v_pool.empty() && dims(p.v_pool[0], 3, 4);
      if (!whole) return cuda::workspace_bytes(x.sizes[0], fc.ndim > 0 ? fc.sizes[0] : x.sizes[1], fc.ndim > 0 ? size_of(io) : 0);
      const NormRope nr{norm, p.eps, table, norm.sizes[1], table.size(-1), p.is_neox_style, p.round_after_norm, io};
      return cuda::workspace_bytes(nr, p.v_pool[0].size(-1), x, w, fc);
    }
  return 0;
}

MaterializeArgs check(const MaterializeIntoPoolParams& p) {
  Checker check("materialize_into_pool");
  Sym T("T"), hidden("hidden"), features("features"), L("L"), C("N*D + N*Dv"), N("N"), D("D"), Dv("Dv"), slots("slots"), P("P"), R("R"),
      b("b"), W("W");
  check.arg("ctx_hidden", p.ctx_hidden).required().dtype(kFloats).shape({T, p.fc_weight.given() ? features : hidden}).same_device();
  if (p.fc_weight.given()) {
    check.arg("fc_weight", p.fc_weight).dtype(kFloats).shape({hidden, features}).same_device();
    check.arg("hidden_norm_weight", p.hidden_norm_weight).required().dtype(kFloats).shape({hidden}).same_device();
    if (!(p.hidden_norm_eps >= 0 && p.hidden_norm_eps < HUGE_VALF))
      check.fail("hidden_norm_eps", "a finite number >= 0", core::number_text(p.hidden_norm_eps));
  } else {
    check.require(!p.hidden_norm_weight.given(), "hidden_norm_weight", "none without fc_weight", "a tensor");
  }
  const DType io = p.io.value_or(p.ctx_hidden.dtype);
  check.require(io == DType::kFloat32 || io == DType::kBFloat16 || io == DType::kFloat16, "io", "float32, bfloat16 or float16",
                name_of(io));
  if (p.projection.given()) {
    const auto& packed = *p.projection.get();
    check.require(!p.kv_weight.given() && !p.kv_bias.given(), "projection", "either packed or plain weights", "both");
    check.require(p.ctx_hidden.device.type == DeviceType::kCpu, "ctx_hidden", "a CPU tensor (where the projection was packed)",
                  name_of(p.ctx_hidden.device));
    if (packed.hidden != hidden)
      check.fail(p.fc_weight.given() ? "fc_weight" : "ctx_hidden",
                 std::string("shape ") + (p.fc_weight.given() ? "[hidden=" : "[T, hidden=") + std::to_string(packed.hidden) +
                     (p.fc_weight.given() ? ", features]" : "]"),
                 shape_text(p.fc_weight.given() ? p.fc_weight : p.ctx_hidden));
    L = Sym("L", packed.layers), C = Sym("N*D + N*Dv", packed.columns);
  } else {
    check.arg("kv_weight", p.kv_weight).required().dtype(kFloats).shape({L, C, hidden}).same_device();
    if (L < 1) check.fail("kv_weight", "at least one layer", "shape " + shape_text(p.kv_weight));
    check.arg("kv_bias", p.kv_bias).dtype(kFloats).shape({L, C}).same_device();
  }
  check.arg("k_norm_weight", p.k_norm_weight).required().dtype(kFloats).shape({L, D}).same_device();
  check.arg("eps", p.eps).required().dtype(DType::kFloat32).shape({L}).same_device();
  auto table = check.arg("cos_sin_cache", p.cos_sin_cache).required().dtype(kFloats);
  p.cos_sin_cache.ndim == 3 ? table.shape({L, P, R}) : table.shape({P, R});
  table.same_device();
  if (R < 2 || R % 2 != 0 || R > D)
    check.fail("cos_sin_cache", "an even rotary width of 2.." + std::to_string(D.value()), "shape " + shape_text(p.cos_sin_cache));

  auto slot_mapping = check.arg("slot_mapping", p.slot_mapping).dtype(kIndices);
  if (p.commit_lens.given()) slot_mapping.required();
  if (p.commit_lens.given() || p.slot_mapping.ndim == 2) {
    slot_mapping.shape({b, W});
    if (W == 0 ? T != 0 : T % W != 0 || T / W != b)
      check.fail("slot_mapping", "shape [b, W] with b * W = " + std::to_string(T.value()) + " rows of ctx_hidden",
                 shape_text(p.slot_mapping));
  } else {
    slot_mapping.shape({T});
  }
  slot_mapping.same_device();
  auto positions = check.arg("positions", p.positions).required().dtype(kIndices);
  p.positions.ndim == 2 && p.slot_mapping.ndim == 2 ? positions.shape({b, W}) : positions.shape({T});
  positions.same_device();
  check.arg("commit_lens", p.commit_lens).dtype(kIndices).shape({b}).same_device();

  const std::vector<TensorView> k = layer_views(check, "k_pool", p.k_pool, L, slots, N, D);
  const std::vector<TensorView> v = layer_views(check, "v_pool", p.v_pool, L, slots, N, Dv);
  if (hidden < 1 || p.ctx_hidden.sizes[1] < 1)
    check.fail(p.fc_weight.given() && hidden < 1 ? "fc_weight" : "ctx_hidden", "at least one feature",
               "shape " + shape_text(p.fc_weight.given() && hidden < 1 ? p.fc_weight : p.ctx_hidden));
  if (N < 1) check.fail("k_pool", "at least one head", std::to_string(N));
  if (Dv < 1) check.fail("v_pool", "at least one channel", std::to_string(Dv));
  if (layer_columns(N, D, Dv) != C)
    check.fail(p.projection.given() ? "projection" : "kv_weight",
               "N*D + N*Dv = " + std::to_string(layer_columns(N, D, Dv)) + " rows a layer", std::to_string(C.value()));

  MaterializeArgs a{};
  a.ctx_hidden = p.ctx_hidden, a.fc_weight = p.fc_weight, a.hidden_norm_weight = p.hidden_norm_weight;
  a.hidden_norm_eps = p.hidden_norm_eps;
  a.norm_rope = {p.k_norm_weight, p.eps, p.cos_sin_cache, D, R, p.is_neox_style, p.round_after_norm, io};
  a.k = layer_pools(k), a.v = layer_pools(v);
  a.k_dtype = k[0].dtype, a.v_dtype = v[0].dtype;
  check_scale(check, "k_scale", p.k_scale, L);
  check_scale(check, "v_scale", p.v_scale, L);
  a.layers = L, a.heads = N, a.v_head_dim = Dv;
  if (p.ctx_hidden.device.type == DeviceType::kCuda) a.workspace = workspace(check, p);
  check.outputs_apart();
  check_eps(check, p.eps);  // from here on what the tensors hold
  a.k_scale = scales(check, "k_scale", p.k_scale, L, a.k_dtype);
  a.v_scale = scales(check, "v_scale", p.v_scale, L, a.v_dtype);
  a.tokens = T, a.window = p.slot_mapping.ndim == 2 ? W.value() : std::max<std::int64_t>(T, 1), a.slots = slots;
  if (!core::host_reads(p.ctx_hidden)) {
    a.kv_weight = p.kv_weight, a.kv_bias = p.kv_bias;
    a.slot_mapping = p.slot_mapping, a.positions = p.positions, a.commit_lens = p.commit_lens;
    if (p.k_scale.given() && p.k_scale.device.type != DeviceType::kCpu) a.k_scale_values = p.k_scale;
    if (p.v_scale.given() && p.v_scale.device.type != DeviceType::kCpu) a.v_scale_values = p.v_scale;
    return a;
  }
  if (p.commit_lens.given())
    for (std::int64_t r = 0; W > 0 && r < b; ++r) {
      const std::int64_t n = core::load_index(p.commit_lens, r);
      if (n < 0 || n > W) check.fail("commit_lens", "lengths in 0.." + std::to_string(W.value()), std::to_string(n) + at(r));
    }
  a.rows = written_rows(check, p, T, slots, P);
  a.projection = p.projection.given() || a.rows.empty() ? p.projection : KvProjection(p.kv_weight, p.kv_bias);
  return a;
}

FusedNormRopeStackedArgs check(const FusedNormRopeStackedParams& p) {
  Checker check("fused_norm_rope_stacked");
  check.arg("kv", p.kv)
      .required()
      .text("Invalid stacked fused KV projection shape: got " + shape_text(p.kv) + ", expected 3D [total_ctx, n_layers, kv_size*2].")
      .ndim(3);
  FusedNormRopeStackedArgs a{};
  a.kv = p.kv;
  a.positions = p.positions;
  a.k_out = p.k_out, a.v_out = p.v_out;
  a.tokens = p.kv.sizes[0], a.layers = p.kv.sizes[1], a.heads = p.num_kv_heads;
  a.norm_rope = {p.k_norm_weight, p.eps, p.cos_sin_cache, p.head_dim, p.rotary_dim, true, false, p.kv.dtype};
  if (a.tokens == 0) return a;

  const std::int64_t T = a.tokens, L = a.layers, N = p.num_kv_heads, D = p.head_dim, R = p.rotary_dim;
  if (N < 1) check.fail("num_kv_heads", "at least 1", std::to_string(N));
  if (D < 1) check.fail("head_dim", "at least 1", std::to_string(D));
  if (N > INT64_MAX / 2 / D) check.fail("num_kv_heads", "2 * num_kv_heads * head_dim within 64 bits", std::to_string(N));
  const auto tuple = [](std::initializer_list<std::int64_t> sizes) { return shape_text(TensorView(nullptr, DType::kFloat32, sizes)); };
  check.arg("kv", p.kv)
      .text("Invalid fused KV projection shape: got " + shape_text(p.kv) + ", expected trailing dim " + std::to_string(2 * N * D) + ".")
      .shape({T, L, 2 * N * D});
  if (R <= 0 || R > D || R % 2 != 0)
    core::throw_value("Invalid fused KV rotary/head dim pair: rotary_dim=" + std::to_string(R) + ", head_dim=" + std::to_string(D) + ".");
  check.arg("k_norm_weight", p.k_norm_weight)
      .required()
      .text("Invalid stacked k_norm_weight shape for fused KV materialization: got " + shape_text(p.k_norm_weight) + ", expected " +
            tuple({L, D}) + ".")
      .shape({L, D});
  check.arg("eps", p.eps)
      .required()
      .text("Invalid stacked eps shape for fused KV materialization: got " + shape_text(p.eps) + ", expected " + tuple({L}) + ".")
      .shape({L});
  for (const auto& [name, out] : {std::pair{"k_out", &p.k_out}, std::pair{"v_out", &p.v_out}}) {
    const std::string begin = std::string("Invalid ") + name;
    check.arg(name, *out)
        .required()
        .text(begin + " shape for fused KV materialization: got " + shape_text(*out) + ", expected " + tuple({L, T, N, D}) + ".")
        .shape({L, T, N, D});
    if (!(out->device == p.kv.device) || out->dtype != p.kv.dtype)
      core::throw_value(begin + " device/dtype for fused KV materialization: got device=" + name_of(out->device) + ", dtype=" +
                        name_of(out->dtype) + ", expected device=" + name_of(p.kv.device) + ", dtype=" + name_of(p.kv.dtype) + ".");
  }
  // What SGLang leaves to the kernel.
  Sym P("P");
  check.arg("kv", p.kv).dtype(kFloats).same_device();
  check.arg("k_norm_weight", p.k_norm_weight).dtype(kFloats).same_device();
  check.arg("eps", p.eps).dtype(DType::kFloat32).same_device();
  check.arg("cos_sin_cache", p.cos_sin_cache).required().dtype(kFloats).shape({P, R}).same_device();
  check.arg("positions", p.positions).required().dtype(kIndices).shape({T}).same_device();
  check.arg("k_out", p.k_out).written();
  check.arg("v_out", p.v_out).written();
  check.outputs_apart();
  check_eps(check, p.eps);
  if (core::host_reads(p.kv))
    for (std::int64_t t = 0; t < T; ++t) {
      const std::int64_t position = core::load_index(p.positions, t);
      if (position < 0 || position >= P)
        check.fail("positions", "rows of cos_sin_cache, 0.." + std::to_string(P.value() - 1), std::to_string(position) + at(t));
    }
  return a;
}

}  // namespace specstate::draft_kv
