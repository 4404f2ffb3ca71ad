// What sglang calls by other names: its own checks of the fused verify and of the commits, and the tensors of its two gating updates as those of
// verify and decode (views only).
#include <algorithm>
#include <string>

#include "core/match.hpp"
#include "kda/check.hpp"

namespace specstate::kda {

using core::Checker;
using core::Dim;

void check_fused_contract(const VerifyParams& p) {
  const char* op = "fused_kda_decode_mtp_dspark";
  Checker check(op);
  const auto fail = [](const std::string& text) { core::throw_value(text); };
  const auto shape_is = [](const TensorView& t, std::initializer_list<std::int64_t> want) {
    return t.ndim == static_cast<int>(want.size()) && std::equal(want.begin(), want.end(), t.sizes);
  };
  const auto tail_is = [](const TensorView& t, int from, std::initializer_list<std::int64_t> want) {
    return t.ndim == from + static_cast<int>(want.size()) && std::equal(want.begin(), want.end(), t.sizes + from);
  };
  check.arg("x_q", p.x_q).required().ndim(4);
  for (const auto& [name, t] :
       {std::pair{"x_k", &p.x_k}, {"x_v", &p.x_v}, {"g", &p.g}, {"beta", &p.beta}, {"cu_seqlens", &p.cu_seqlens}, {"state", &p.state}})
    check.arg(name, *t).required();
  const std::int64_t T = p.x_q.sizes[1], H = p.x_q.sizes[2], D = 128;
  const std::string tokens = "(1, " + std::to_string(T) + ", " + std::to_string(H);
  if (!shape_is(p.x_q, {1, T, H, D}) || !shape_is(p.x_k, {1, T, H, D})) fail("expected q/k shape " + tokens + ", 128)");
  if (!shape_is(p.x_v, {1, T, H, D}) || !shape_is(p.g, {1, T, H, D})) fail("expected v/g shape " + tokens + ", 128)");
  if (!shape_is(p.beta, {1, T, H})) fail("expected beta shape " + tokens + ")");
  check.arg("cu_seqlens", p.cu_seqlens).ndim(1);
  const std::int64_t N = p.cu_seqlens.sizes[0] - 1;
  if (N <= 0 || T % N != 0 || T / N < 1)
    fail("DSpARK KDA MTP requires a fixed 1 + num_spec dense tokens per request; got T=" + std::to_string(T) + ", N=" + std::to_string(N));
  const std::int64_t W = T / N;
  const TensorView& s = p.state;
  if (!tail_is(s, 1, {H, D, D})) fail("expected recurrent state layout [pool, H, V=128, K=128]");
  const bool placed = reinterpret_cast<std::uintptr_t>(s.data) % 16 == 0 || s.numel() == 0;
  if (s.dtype != DType::kFloat32 || !s.inner_contiguous(3) || (s.sizes[0] > 1 && s.strides[0] % 4 != 0) || !placed)
    fail("cp.async recurrent state requires fp32 contiguous [H, V, K] inner layout and 16-byte-aligned slot offsets");
  const Rings& r = p.rings;
  const bool any = r.rawv.given() || r.rawk.given() || r.g.given() || r.beta.given();
  const bool all = r.rawv.given() && r.rawk.given() && r.g.given() && r.beta.given();
  if (any && !all) fail("ReplaySSM requires all four replayssm_* rings");
  const DType act = p.x_q.dtype;
  if (all) {
    const std::int64_t L = r.rawv.ndim == 4 ? r.rawv.sizes[2] : 0;
    if (L < W || !tail_is(r.rawv, 1, {H, L, D}) || !tail_is(r.rawk, 1, {H, L, D}) || !tail_is(r.g, 1, {H, L, D}) ||
        !tail_is(r.beta, 1, {H, L}))
      fail("expected ReplaySSM ring layouts [slots, H=" + std::to_string(H) + ", L>=" + std::to_string(W) + ", 128] / [slots, H, L]");
    // Float32 activations bring float32 rings: they hold what was used, without loss.
    const bool known = act == DType::kBFloat16 || act == DType::kFloat32;  // else x_q is at fault
    if ((known && r.rawv.dtype != act) || r.rawk.dtype != r.rawv.dtype || r.g.dtype != DType::kFloat32 || r.beta.dtype != DType::kFloat32)
      fail("expected ReplaySSM ring dtypes rawv/rawk=bf16, g/beta=fp32");
  } else if (!p.snapshots.given() || p.snapshots.ndim != 5 || p.snapshots.sizes[1] < W || !tail_is(p.snapshots, 2, {H, D, D})) {
    fail("expected intermediate SSM layout [scratch, >=" + std::to_string(W) + ", H, V=128, K=128]");
  }
  const bool any_norm = p.onorm_gate.given() || p.onorm_weight.given() || p.onorm_eps.has_value();
  if (any_norm) {
    if (!p.onorm_gate.given() || !p.onorm_weight.given() || !p.onorm_eps)
      fail("fused output norm requires onorm_gate, onorm_weight, and onorm_eps");
    if (!shape_is(p.onorm_gate, {1, T, H, D})) fail("expected output-norm gate shape " + tokens + ", 128)");
    if (!shape_is(p.onorm_weight, {D})) fail("expected output-norm weight shape (128,)");
    if ((p.onorm_gate.dtype != DType::kBFloat16 && p.onorm_gate.dtype != DType::kFloat32) || p.onorm_weight.dtype != DType::kFloat32)
      fail("expected output-norm gate=bf16 and weight=fp32");
  }
  // From here on what sglang leaves unchecked; `check` does the rest.
  for (const auto& [name, t] : {std::pair{"w_q", &p.w_q},
                                {"w_k", &p.w_k},
                                {"w_v", &p.w_v},
                                {"cs_q", &p.cs_q},
                                {"cs_k", &p.cs_k},
                                {"cs_v", &p.cs_v},
                                {"conv_q", &p.conv_q},
                                {"conv_k", &p.conv_k},
                                {"conv_v", &p.conv_v},
                                {"rows", &p.rows},
                                {"slots", &p.slots}})
    check.arg(name, *t).required();
  check.require(p.lower_bound.has_value(), "lower_bound", "a finite float32 < 0", "none");
  for (const auto& [name, t] : {std::pair{"conv_q", &p.conv_q}, {"conv_k", &p.conv_k}, {"conv_v", &p.conv_v}})
    check.arg(name, *t).shape({Dim::any("scratch"), Dim::at_least(W, "steps"), H * D, kWindow});
}

void check_fused_lengths(const VerifyArgs& a, const char* op) {
  if (a.requests.empty()) return;
  const std::int64_t W = a.T / static_cast<std::int64_t>(a.requests.size());
  for (std::size_t i = 0; i < a.requests.size(); ++i)
    if (a.requests[i].tokens > W)
      Checker(op).fail("cu_seqlens", "at most T/N=" + std::to_string(W) + " tokens a request",
                       std::to_string(a.requests[i].tokens) + " for request " + std::to_string(i));
}

void check_commit_contract(const CommitParams& p, const char* op, int state_dims) {
  Checker check(op);
  check.arg("state", p.state).required().ndim(state_dims);
  check.arg("rings.rawv", p.rings.rawv).required().ndim(state_dims);
  check.arg("rings.rawk", p.rings.rawk).required().ndim(state_dims);
  const std::int64_t L = p.rings.rawv.size(-2), H = p.rings.rawk.size(-3);
  check.require(p.max_cache_len == L, "max_cache_len", "the rings' length " + std::to_string(L), std::to_string(p.max_cache_len));
  check.require(p.num_k_heads == H, "num_k_heads", "the rings' key heads " + std::to_string(H), std::to_string(p.num_k_heads));
}

namespace {

/// Dimensions first .. first+count-1 as one; they must lie in memory as one.
TensorView collapse(const Checker& check, const char* name, const TensorView& t, int first, int count) {
  TensorView r = t;
  std::int64_t size = 1, stride = 0;
  for (int i = first + count - 1; i >= first; --i) {
    if (t.sizes[i] == 1) continue;
    check.require(size <= 1 || t.strides[i] == stride * size, name, "dimensions that can be read as one",
                  "stride " + std::to_string(t.strides[i]) + " for shape " + shape_text(t));
    if (size <= 1) stride = t.strides[i];
    size *= t.sizes[i];
  }
  r.ndim = t.ndim - count + 1;
  r.sizes[first] = size;
  r.strides[first] = stride;
  for (int i = first + 1; i < r.ndim; ++i) r.sizes[i] = t.sizes[i + count - 1], r.strides[i] = t.strides[i + count - 1];
  return r;
}

TensorView flat(const Checker& check, const char* name, const TensorView& t) {
  if (!t.given() || t.ndim <= 1) return t;
  return collapse(check, name, t, 0, t.ndim);
}

/// [.., inner dims] as [T, inner dims].
TensorView tokens(const Checker& check, const char* name, const TensorView& t, int inner) {
  if (!t.given() || t.ndim <= inner + 1) return t;
  return collapse(check, name, t, 0, t.ndim - inner);
}

template <class Params>
void fill(const Checker& check, const GatingUpdateParams& u, bool is_kda, Params& p) {
  check.require(u.q.given() && u.q.ndim == 4, "q", "shape [B, T, H, K]", u.q.given() ? shape_text(u.q) : "none");
  check.require(u.k.given() && u.k.ndim == 4, "k", "shape [B, T, H, K]", u.k.given() ? shape_text(u.k) : "none");
  check.require(u.v.given() && u.v.ndim == 4, "v", "shape [B, T, HV, V]", u.v.given() ? shape_text(u.v) : "none");
  const std::int64_t HV = u.v.sizes[2], K = u.q.sizes[3];
  p.x_q = tokens(check, "q", u.q, 2), p.x_k = tokens(check, "k", u.k, 2), p.x_v = tokens(check, "v", u.v, 2);
  p.out = u.out.ndim == 4 ? tokens(check, "out", u.out, 2) : u.out;
  check.require(!u.a.given() || u.a.ndim >= 1, "a", "at least one dimension", "shape ()");
  const bool split = is_kda && u.a.given() && u.a.ndim >= 3 && u.a.size(-1) == K && u.a.size(-2) == HV;
  p.g = tokens(check, "a", u.a, split ? 2 : 1);
  check.require(!is_kda || split || !p.g.given() || p.g.size(-1) == HV * K, "a", "HV*K=" + std::to_string(HV * K) + " or (HV, K) last",
                shape_text(u.a));
  p.beta = tokens(check, "b", u.b, 1);
  p.A_log = flat(check, "A_log", u.A_log);
  p.dt_bias = flat(check, "dt_bias", u.dt_bias);
  p.state = u.initial_state_source;
  p.slots = u.initial_state_indices, p.cu_seqlens = u.cu_seqlens;
  p.softplus_beta = u.softplus_beta, p.softplus_threshold = u.softplus_threshold;
  p.scale = u.scale;
  p.l2norm = u.use_qk_l2norm_in_kernel;
}

}  // namespace

VerifyParams as_verify(const GatingUpdateParams& u, const char* op) {
  const Checker check(op);
  if (u.scale && !(*u.scale > 0)) core::throw_value("scale must be positive");
  const Rings& r = u.rings;
  if (u.cache_ring && !(r.rawv.ndim == 4 && r.rawk.ndim == 4 && r.g.ndim == (u.is_kda ? 4 : 3) && r.beta.ndim == 3))
    core::throw_value("cache_ring expects per-layer ring views");
  VerifyParams p;
  fill(check, u, u.is_kda, p);
  if (!u.cu_seqlens.given() && u.initial_state_indices.given() && u.initial_state_indices.ndim == 1)
    check.require(u.initial_state_indices.sizes[0] == u.q.sizes[0], "slots",
                  "one entry for each of the B=" + std::to_string(u.q.sizes[0]) + " rows of q",
                  std::to_string(u.initial_state_indices.sizes[0]));
  p.lower_bound = u.lower_bound;
  p.snapshots = u.intermediate_states_buffer, p.rows = u.intermediate_state_indices;
  p.parents = u.retrieve_parent_token;
  if (u.cache_ring) p.rings = r;
  p.update_state = !u.disable_state_update;
  p.null_from_zero = true;
  return p;
}

DecodeParams as_decode(const GatingUpdateParams& u, const char* op) {
  const Checker check(op);
  DecodeParams p;
  fill(check, u, true, p);
  const TensorView& s = u.initial_state_source;
  if (s.given() && s.ndim == 1) {  // flat: slots one behind the other
    const std::int64_t HV = u.v.sizes[2], V = u.v.sizes[3], K = u.q.sizes[3], slot = HV * V * K;
    check.require(slot > 0 && s.sizes[0] % slot == 0 && s.inner_contiguous(1), "state",
                  "a dense multiple of HV*V*K=" + std::to_string(slot) + " elements", shape_text(s));
    p.state = TensorView(s.data, s.dtype, {s.sizes[0] / slot, HV, V, K}, s.device);
  }
  return p;
}

}  // namespace specstate::kda
