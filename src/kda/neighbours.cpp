// The tensors of sglang's two gating updates as those of verify and decode: views only.
#include <string>

#include "core/match.hpp"
#include "kda/check.hpp"

namespace specstate::kda {

using core::Checker;

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
