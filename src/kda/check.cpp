#include "kda/check.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>

#include "core/match.hpp"
#include "kda/layout.hpp"

namespace specstate::kda {

using core::Checker;
using core::Dim;
using core::host_reads;
using core::load_index;
using core::Sym;

namespace {

Array array(const TensorView& t) {
  Array a;
  if (!t.given()) return a;
  static float nothing;  // a given tensor without elements stays "given"
  a.data = t.data ? t.data : &nothing;
  a.bf16 = t.dtype == DType::kBFloat16;
  for (int i = 0; i < std::min(t.ndim, 5); ++i) a.stride[i] = t.strides[i];
  return a;
}

/// Indices for a kernel; nothing for those on the host, which are read here.
Index device_index(const TensorView& t) {
  Index a;
  if (!t.given() || t.device.type != DeviceType::kCuda) return a;
  static std::int64_t nothing;
  a.data = t.data ? t.data : &nothing;
  a.wide = t.dtype == DType::kInt64;
  for (int i = 0; i < std::min(t.ndim, 2); ++i) a.stride[i] = t.strides[i];
  return a;
}

/// [.., n*k] as [.., n, k], without copying.
TensorView split_last(const TensorView& t, std::int64_t n, std::int64_t k) {
  TensorView r = t;
  r.ndim = t.ndim + 1;
  r.sizes[t.ndim - 1] = n;
  r.sizes[t.ndim] = k;
  r.strides[t.ndim - 1] = t.strides[t.ndim - 1] * k;
  r.strides[t.ndim] = t.strides[t.ndim - 1];
  return r;
}

/// Slots, lengths and other counts of a call's requests, read once.
void check_index(Checker& check, const char* name, const TensorView& t, Sym& n) {
  check.arg(name, t).required().dtype({DType::kInt32, DType::kInt64}).shape({n}).same_device();
  // A broadcast list may be longer than anyone waits for, and than a kernel counts.
  if (n > std::numeric_limits<std::int32_t>::max()) check.fail(name, "at most 2147483647 entries", "shape " + shape_text(t));
}

void all_or_none(const Checker& check, std::initializer_list<std::pair<const char*, bool>> given) {
  bool any = false;
  for (const auto& g : given) any = any || g.second;
  for (const auto& g : given)
    if (any && !g.second)
      check.fail(g.first,
                 std::string("to be given together with ") + (g.first == given.begin()->first ? (given.end() - 1) : given.begin())->first,
                 "none");
}

Pending pending_of(const TensorView& t) {
  Pending p;
  if (!t.given()) return p;
  static std::int32_t nothing;
  p.data = t.data ? static_cast<std::int32_t*>(t.data) : &nothing;
  if (t.ndim == 2) p.stride[0] = t.strides[0];
  p.stride[1] = t.strides[t.ndim - 1];
  return p;
}

/// The recurrent state: dense inside a slot, a slot pitch of whole 16 bytes.
void check_state(Checker& check, const char* name, const TensorView& t, int slot_dim) {
  check.arg(name, t).inner_contiguous(3).aligned(16);
  if (t.sizes[slot_dim] > 1 && t.strides[slot_dim] % 4 != 0)
    check.fail(name, "a slot pitch that is a multiple of 4 elements", "stride " + std::to_string(t.strides[slot_dim]));
}

void check_head_dim(const Checker& check, const char* name, const char* what, std::int64_t n) {
  if (n != 64 && n != 128) check.fail(name, std::string(what) + " of 64 or 128", std::to_string(n));
}

class SeenOnce {
 public:
  SeenOnce(const Checker& check, const char* name, const char* what) : check_(check), name_(name), what_(what) {}
  void add(std::int64_t id) { ids_.push_back(id); }
  void finish() {
    std::sort(ids_.begin(), ids_.end());
    const auto twice = std::adjacent_find(ids_.begin(), ids_.end());
    if (twice != ids_.end()) check_.fail(name_, what_, std::to_string(*twice) + " twice");
  }

 private:
  const Checker& check_;
  const char* name_;
  const char* what_;
  std::vector<std::int64_t> ids_;
};

/// A track slot is nobody's: not even that of a request of the call that commits nothing, whose past would be lost.
class TrackApart {
 public:
  TrackApart(const Checker& check, const char* name) : check_(check), name_(name) {}
  void request(std::int64_t slot) { slots_.push_back(slot); }
  void track(std::int64_t slot, std::int64_t at) { tracks_.emplace_back(slot, at); }
  void finish() {
    if (tracks_.empty()) return;
    std::sort(slots_.begin(), slots_.end());
    for (const auto& [slot, at] : tracks_)
      if (std::binary_search(slots_.begin(), slots_.end(), slot))
        check_.fail(name_, "slots that are no request's of the call", std::to_string(slot) + " at " + std::to_string(at));
  }

 private:
  const Checker& check_;
  const char* name_;
  std::vector<std::int64_t> slots_;
  std::vector<std::pair<std::int64_t, std::int64_t>> tracks_;  // slot, place
};

/// One place for what verify and decode share. After it `a` holds everything but the outputs of verify.
struct StepCheck {
  StepCheck(Checker& c, const StepParams& params, VerifyArgs& args) : check(c), p(params), a(args) {}
  Checker& check;
  const StepParams& p;
  VerifyArgs& a;
  DType act = DType::kFloat32;
  bool leading = false;
  Sym T{"T"}, H{"H"}, K{"K"}, HV{"HV"}, V{"V"}, N{"N"}, pool{"pool"};
  TensorView x_q, x_k, x_v, g, beta, gate, out;

  /// Drops the leading 1 of [1, T, ...] where x_q has it.
  TensorView packed(const char* name, const TensorView& t) const {
    if (!leading || !t.given()) return t;
    if (t.ndim < 1 || t.sizes[0] != 1) check.fail(name, "a leading dimension of 1, as x_q has", "shape " + shape_text(t));
    return t[0];
  }

  void tensors() {
    const std::initializer_list<DType> floats = {DType::kBFloat16, DType::kFloat32};
    check.arg("x_q", p.x_q).required().dtype(floats);
    act = p.x_q.dtype;
    leading = p.x_q.ndim == 4;
    x_q = packed("x_q", p.x_q), x_k = packed("x_k", p.x_k), x_v = packed("x_v", p.x_v);
    g = packed("g", p.g), beta = packed("beta", p.beta), gate = packed("onorm_gate", p.onorm_gate), out = packed("out", p.out);
    check.arg("x_q", x_q).shape({T, H, K}).same_device().inner_contiguous(1);
    check.arg("x_k", x_k).required().dtype(act).shape({T, H, K}).same_device().inner_contiguous(1);
    check.arg("x_v", x_v).required().dtype(act).shape({T, HV, V}).same_device().inner_contiguous(1);
    check_head_dim(check, "x_q", "a head dimension K", K);
    check_head_dim(check, "x_v", "a head dimension V", V);
    if (H < 1) check.fail("x_q", "at least one head", "shape " + shape_text(x_q));
    if (HV < 1 || HV % H != 0) check.fail("x_v", "a number of heads that is a multiple of H=" + std::to_string(H), std::to_string(HV));

    all_or_none(check, {{"w_q", p.w_q.given()},
                        {"w_k", p.w_k.given()},
                        {"w_v", p.w_v.given()},
                        {"cs_q", p.cs_q.given()},
                        {"cs_k", p.cs_k.given()},
                        {"cs_v", p.cs_v.given()}});
    check.arg("w_q", p.w_q).dtype(DType::kFloat32).shape({H * K, kWindow + 1}).same_device();
    check.arg("w_k", p.w_k).dtype(DType::kFloat32).shape({H * K, kWindow + 1}).same_device();
    check.arg("w_v", p.w_v).dtype(DType::kFloat32).shape({HV * V, kWindow + 1}).same_device();

    check.arg("g", g).required().dtype(floats).same_device();
    a.scalar_gate = g.ndim == 2 && g.sizes[1] == HV;
    if (!a.scalar_gate && g.ndim == 2 && g.sizes[1] == HV * K) g = split_last(g, HV, K);
    if (a.scalar_gate)
      check.arg("g", g).shape({T, HV});
    else
      check.arg("g", g).shape({T, HV, K}).inner_contiguous(1);
    check.arg("beta", beta).required().dtype(floats).shape({T, HV}).same_device();
    check.arg("A_log", p.A_log).required().dtype(floats).shape({HV}).same_device();
    TensorView bias = p.dt_bias;
    check.arg("dt_bias", bias).required().dtype(floats).same_device();
    if (a.scalar_gate) {
      check.arg("dt_bias", bias).shape({HV});
    } else {
      if (bias.ndim == 1 && bias.sizes[0] == HV * K) bias = split_last(bias, HV, K);
      check.arg("dt_bias", bias).shape({HV, K});
    }

    check.arg("state", p.state).required().dtype({DType::kFloat32, DType::kBFloat16}).shape({pool, HV, V, K}).same_device();
    check_state(check, "state", p.state, 0);
    for (const auto& [name, t, channels] : {std::tuple<const char*, const TensorView*, std::int64_t>{"cs_q", &p.cs_q, H * K},
                                            {"cs_k", &p.cs_k, H * K},
                                            {"cs_v", &p.cs_v, HV * V}})
      check.arg(name, *t).dtype(act).shape({Dim::at_least(pool, "pool"), channels, kWindow}).same_device();

    check_index(check, "slots", p.slots, N);
    check.arg("cu_seqlens", p.cu_seqlens).dtype({DType::kInt32, DType::kInt64}).shape({N + 1}).same_device();
    if (!p.cu_seqlens.given())
      if (N == 0 ? T != 0 : T % N != 0)
        check.fail("slots", "a number that divides T=" + std::to_string(T) + " where cu_seqlens is not given", std::to_string(N));

    all_or_none(check,
                {{"onorm_gate", p.onorm_gate.given()}, {"onorm_weight", p.onorm_weight.given()}, {"onorm_eps", p.onorm_eps.has_value()}});
    check.arg("onorm_gate", gate).dtype(floats).shape({T, HV, V}).same_device().inner_contiguous(1);
    check.arg("onorm_weight", p.onorm_weight).dtype(DType::kFloat32).shape({V}).same_device();
    const auto number = [&](const char* name, double x, bool ok, const char* expected) {
      if (!ok) check.fail(name, expected, core::number_text(x));
    };
    // Computed with as float32: what is finite or positive there.
    const auto finite = [](double x) { return std::isfinite(static_cast<float>(x)); };
    if (p.onorm_eps) number("onorm_eps", *p.onorm_eps, finite(*p.onorm_eps) && *p.onorm_eps >= 0, "a finite float32 >= 0");
    if (p.lower_bound)
      number("lower_bound", *p.lower_bound, finite(*p.lower_bound) && static_cast<float>(*p.lower_bound) < 0, "a finite float32 < 0");
    if (p.scale) number("scale", *p.scale, finite(*p.scale) && static_cast<float>(*p.scale) > 0, "a finite float32 > 0");
    number("softplus_beta", p.softplus_beta, finite(p.softplus_beta) && static_cast<float>(p.softplus_beta) > 0, "a finite float32 > 0");
    number("softplus_threshold", p.softplus_threshold, !std::isnan(p.softplus_threshold), "a number");

    check.arg("out", out).required().dtype(act).shape({T, HV, V}).same_device().inner_contiguous(1).written();

    a.q = {array(x_q), array(p.w_q), array(p.cs_q), {}};
    a.k = {array(x_k), array(p.w_k), array(p.cs_k), {}};
    a.v = {array(x_v), array(p.w_v), array(p.cs_v), {}};
    a.g = array(g), a.beta = array(beta), a.a_log = array(p.A_log), a.dt_bias = array(bias), a.state = array(p.state);
    a.gate = array(gate), a.norm_weight = array(p.onorm_weight), a.out = array(out);
    a.T = T, a.H = H, a.HV = HV, a.K = K, a.V = V;
    a.safe_gate = p.lower_bound.has_value();
    a.lower_bound = static_cast<float>(p.lower_bound.value_or(0));
    a.softplus_beta = static_cast<float>(p.softplus_beta), a.softplus_threshold = static_cast<float>(p.softplus_threshold);
    a.scale = static_cast<float>(p.scale.value_or(1.0 / std::sqrt(static_cast<double>(K.value()))));
    a.norm_eps = static_cast<float>(p.onorm_eps.value_or(0));
    a.l2norm = p.l2norm, a.round_before_norm = p.round_before_norm;
    a.slots = device_index(p.slots), a.cu = device_index(p.cu_seqlens);
    a.N = N, a.pool = pool, a.null_slot = p.null_slot;
  }

  /// Slots and lengths; `longest` is the most tokens that a request may have.
  void requests() {
    a.tokens_end = p.cu_seqlens.given() ? load_index(p.cu_seqlens, 0) : 0;
    if (a.tokens_end != 0) check.fail("cu_seqlens", "0 as its first entry", std::to_string(a.tokens_end));
    a.requests.reserve(static_cast<std::size_t>(N.value()));
    for (std::int64_t r = 0; r < N; ++r) {
      const std::int64_t slot = load_index(p.slots, r);
      if (slot > p.null_slot && (slot < 0 || slot >= pool))
        check.fail("slots", "slots below pool=" + std::to_string(pool) + ", or <= " + std::to_string(p.null_slot) + " for padding",
                   std::to_string(slot) + " at " + std::to_string(r));
      const std::int64_t end = p.cu_seqlens.given() ? load_index(p.cu_seqlens, r + 1) : a.tokens_end + T / N;
      if (end < a.tokens_end || end > T)
        check.fail("cu_seqlens", "entries that never decrease and stay within T=" + std::to_string(T),
                   std::to_string(end) + " at " + std::to_string(r + 1));
      a.requests.push_back({slot <= p.null_slot ? -1 : slot, -1, a.tokens_end, end - a.tokens_end});
      a.tokens_end = end;
    }
  }

  std::int64_t longest() const {
    std::int64_t n = 0;
    for (const Request& r : a.requests) n = std::max(n, r.tokens);
    return n;
  }
};

/// A window tensor may hold every input once: [.., step, .., tap] on one stride, since entry (step, tap) is input step - 2 + tap.
TensorView distinct_inputs(const TensorView& t) {
  if (t.ndim != 4 || t.strides[1] != t.strides[3]) return t;
  TensorView r = t;
  r.ndim = 3;
  r.sizes[1] = t.sizes[1] + kWindow - 1;
  return r;
}

void check_rings(Checker& check, const Rings& r, DType act, bool scalar_gate, int layer_dims, Sym& layers, Sym& slots, Sym& HV, Sym& H,
                 Sym& L, Sym& V, Sym& K, bool writes) {
  const auto shape = [&](const char* name, const TensorView& t, DType dtype, Sym& heads, Sym* channels) {
    core::ArgCheck c = check.arg(name, t);
    c.required().dtype(dtype);
    if (layer_dims && channels)
      c.shape({layers, slots, heads, L, *channels});
    else if (layer_dims)
      c.shape({layers, slots, heads, L});
    else if (channels)
      c.shape({slots, heads, L, *channels});
    else
      c.shape({slots, heads, L});
    c.same_device();
    if (channels) c.inner_contiguous(1);
    if (writes) c.written();
  };
  shape("rings.rawv", r.rawv, act, HV, &V);
  shape("rings.rawk", r.rawk, act, H, &K);
  shape("rings.g", r.g, DType::kFloat32, HV, scalar_gate ? nullptr : &K);
  shape("rings.beta", r.beta, DType::kFloat32, HV, nullptr);
}

/// An accepted entry that no verify has recorded: beta is a sigmoid, so never NaN, and a log decay is minus something, so never +0
/// (a gate that closed to nothing is -0): an entry of +0 alone is memory that nobody has written.
void check_recorded(const Checker& check, const FoldCall& a, const FoldRequest& r) {
  for (std::int64_t t = 0; t < r.tokens; ++t) {
    bool blank = true;
    for (std::int64_t h = 0; h < a.HV; ++h) {
      const float beta = load(a.ring_beta, at(a.ring_beta, r.layer, r.slot, h, t));
      if (std::isnan(beta))
        check.fail("rings.beta", "recorded values for the accepted tokens (verify in ring mode comes first)",
                   "nan in slot " + std::to_string(r.slot) + ", entry " + std::to_string(t));
      blank = blank && beta == 0;
    }
    for (std::int64_t h = 0; h < a.HV && blank; ++h)
      for (std::int64_t d = 0; d < (a.scalar_gate ? 1 : a.K) && blank; ++d)
        blank = core::bits_of(load(a.ring_g, at(a.ring_g, r.layer, r.slot, h, t, d))) == 0;
    for (std::int64_t h = 0; h < a.H && blank; ++h)
      for (std::int64_t d = 0; d < a.K && blank; ++d) blank = load(a.rawk, at(a.rawk, r.layer, r.slot, h, t, d)) == 0;
    if (blank)
      check.fail("rings.beta", "recorded values for the accepted tokens (verify in ring mode comes first)",
                 "only zeros in slot " + std::to_string(r.slot) + ", entry " + std::to_string(t));
  }
}

/// The array with a layer in front, of which there is one.
Array one_layer(const Array& a) {
  Array r = a;
  for (int i = 4; i > 0; --i) r.stride[i] = a.stride[i - 1];
  r.stride[0] = 0;
  return r;
}

/// Waiting tokens of a slot, within the ring.
std::int64_t load_pending(const Checker& check, const FoldCall& a, std::int64_t layer, std::int64_t slot) {
  const std::int64_t n = at(a.pending, layer, slot);
  if (n < 0 || n > a.L)
    check.fail("pending", "counts from 0 to L=" + std::to_string(a.L), std::to_string(n) + " for slot " + std::to_string(slot));
  return n;
}

}  // namespace

VerifyArgs check(const VerifyParams& p, const char* op) {
  Checker check(op);
  VerifyArgs a{};
  StepCheck step(check, p, a);
  step.tensors();

  const Rings& r = p.rings;
  all_or_none(check,
              {{"rings.rawv", r.rawv.given()}, {"rings.rawk", r.rawk.given()}, {"rings.g", r.g.given()}, {"rings.beta", r.beta.given()}});
  const bool rings = r.rawv.given();
  if (rings) {
    Sym layers("layers"), slots("slots"), L("L");
    check_rings(check, r, step.act, a.scalar_gate, 0, layers, slots, step.HV, step.H, L, step.V, step.K, true);
    if (slots < step.pool) check.fail("rings.rawv", "at least pool=" + std::to_string(step.pool) + " slots", std::to_string(slots));
    a.L = L;
    a.rawv = array(r.rawv), a.rawk = array(r.rawk), a.ring_g = array(r.g), a.ring_beta = array(r.beta);
  }
  Sym rows("rows"), steps("steps");
  check.arg("snapshots", p.snapshots)
      .dtype(p.state.dtype)
      .shape({rows, steps, step.HV, step.V, step.K})
      .same_device()
      .inner_contiguous(2)
      .written();
  a.snapshots = array(p.snapshots);
  all_or_none(check, {{"conv_q", p.conv_q.given()}, {"conv_k", p.conv_k.given()}, {"conv_v", p.conv_v.given()}});
  if (p.conv_q.given()) {
    check.require(p.w_q.given(), "conv_q", "the convolution's w_* and cs_* with it", "none");
    for (const auto& [name, t, channels, channel] :
         {std::tuple<const char*, const TensorView*, std::int64_t, Channel*>{"conv_q", &p.conv_q, step.H * step.K, &a.q},
          {"conv_k", &p.conv_k, step.H * step.K, &a.k},
          {"conv_v", &p.conv_v, step.HV * step.V, &a.v}}) {
      check.arg(name, *t).dtype(step.act).shape({rows, Dim::any("steps"), channels, kWindow}).same_device();
      check.arg(name, distinct_inputs(*t)).written();
      channel->windows = array(*t);
    }
  }
  check.arg("rows", p.rows).dtype({DType::kInt32, DType::kInt64}).shape({Dim::at_least(step.N, "N")}).same_device();
  check.arg("parents", p.parents)
      .dtype({DType::kInt32, DType::kInt64})
      .shape({Dim::at_least(step.N, "N"), Dim::any("tokens")})
      .same_device();
  check.arg("pending", p.pending).dtype(DType::kInt32).shape({Dim::at_least(step.pool, "pool")}).same_device().written();
  check.require(rings || !p.pending.given(), "pending", "rings with it, which hold the pending tokens", "none");
  if (p.update_state || p.pending.given()) check.arg("state", p.state).written();
  check.outputs_apart();
  if (p.pending.given()) {
    FoldCall& f = a.deferred;
    f.state = one_layer(a.state), f.rawv = one_layer(a.rawv), f.rawk = one_layer(a.rawk);
    f.ring_g = one_layer(a.ring_g), f.ring_beta = one_layer(a.ring_beta);
    f.pending = a.pending = pending_of(p.pending), f.slots = a.slots, f.cu = a.cu;
    f.N = a.N, f.pool = a.pool, f.L = a.L, f.null_slot = a.null_slot;
    f.layers = 1, f.H = a.H, f.HV = a.HV, f.K = a.K, f.V = a.V;
    f.scalar_gate = a.scalar_gate, f.l2norm = a.l2norm;
  }
  a.update_state = p.update_state;
  a.null_from_zero = p.null_from_zero;
  a.exact = p.exact;
  a.rows = device_index(p.rows), a.parents = device_index(p.parents);
  a.row_count = rows.bound() ? rows.value() : 0;
  a.columns = p.parents.given() ? p.parents.sizes[1] : 0;
  a.steps = std::numeric_limits<std::int64_t>::max();
  if (a.snapshots) a.steps = steps;
  for (const TensorView* t : {&p.conv_q, &p.conv_k, &p.conv_v})
    if (t->given()) a.steps = std::min(a.steps, t->sizes[1]);
  if (!host_reads(p.x_q)) return a;

  step.requests();
  const bool uses_rows = a.snapshots || a.q.windows;
  SeenOnce slots_once(check, "slots", "each slot at most once where rings or the state are written");
  SeenOnce rows_once(check, "rows", "each row of snapshots and conv windows at most once");
  for (std::size_t i = 0; i < a.requests.size(); ++i) {
    Request& q = a.requests[i];
    if (uses_rows && (q.slot >= 0 || (p.null_from_zero && a.snapshots))) {
      q.row = p.rows.given() ? load_index(p.rows, static_cast<std::int64_t>(i)) : static_cast<std::int64_t>(i);
      const bool none = p.null_from_zero && q.row < 0;
      if (none) q.row = -1;
      if (!none && (q.row < 0 || q.row >= rows))
        check.fail("rows", "rows below " + std::to_string(rows), std::to_string(q.row) + " at " + std::to_string(i));
      if (q.tokens > 0 && !none) rows_once.add(q.row);
    }
    if (q.tokens == 0 || q.slot < 0) continue;
    if (rings || p.update_state) slots_once.add(q.slot);
    if (a.pending) {
      q.pending = load_pending(check, a.deferred, 0, q.slot);
      check_recorded(check, a.deferred, {0, q.slot, q.pending, -1, -1});
    }
  }
  slots_once.finish();
  rows_once.finish();
  const std::int64_t longest = step.longest();
  const std::string needed = "at least " + std::to_string(longest) + " steps, the tokens of the longest request";
  if (a.snapshots) check.require(steps >= longest, "snapshots", needed, std::to_string(steps));
  for (const auto& [name, t] : {std::pair{"conv_q", &p.conv_q}, {"conv_k", &p.conv_k}, {"conv_v", &p.conv_v}})
    if (t->given()) check.require(t->sizes[1] >= longest, name, needed, std::to_string(t->sizes[1]));
  if (p.parents.given()) {
    if (p.parents.sizes[1] < longest)
      check.fail("parents", "at least " + std::to_string(longest) + " columns, the tokens of the longest request",
                 std::to_string(p.parents.sizes[1]));
    a.parents_of.assign(static_cast<std::size_t>(a.T), -1);
    for (std::size_t i = 0; i < a.requests.size(); ++i)
      for (std::int64_t t = 0; t < a.requests[i].tokens; ++t) {
        const std::int64_t parent = load_index(p.parents[static_cast<std::int64_t>(i)], t);
        if (a.requests[i].slot < 0 && !p.null_from_zero) continue;  // padding: may hold anything
        if (parent >= t && t > 0)
          check.fail("parents", "a parent before its child",
                     std::to_string(parent) + " for token " + std::to_string(t) + " of request " + std::to_string(i));
        a.parents_of[static_cast<std::size_t>(a.requests[i].begin + t)] =
            static_cast<std::int32_t>(t == 0 ? -1 : std::max<std::int64_t>(parent, -1));
      }
  }
  return a;
}

VerifyArgs check(const DecodeParams& p, const char* op) {
  Checker check(op);
  VerifyArgs a{};
  StepCheck step(check, p, a);
  step.tensors();
  check.arg("state", p.state).written();
  for (const auto& [name, t] : {std::pair{"cs_q", &p.cs_q}, {"cs_k", &p.cs_k}, {"cs_v", &p.cs_v}}) check.arg(name, *t).written();
  check.outputs_apart();
  a.update_state = true;
  a.update_windows = p.w_q.given();
  a.steps = std::numeric_limits<std::int64_t>::max();
  if (!host_reads(p.x_q)) return a;

  step.requests();
  SeenOnce once(check, "slots", "each slot at most once");
  for (const Request& r : a.requests)
    if (r.slot >= 0 && r.tokens > 0) once.add(r.slot);
  once.finish();
  return a;
}

namespace {

/// The same tensor with a leading layer dimension.
TensorView layered(const TensorView& t, bool has) {
  if (has || !t.given() || t.ndim >= kMaxDims) return t;
  TensorView r = t;
  r.ndim = t.ndim + 1;
  for (int i = t.ndim; i > 0; --i) r.sizes[i] = t.sizes[i - 1], r.strides[i] = t.strides[i - 1];
  r.sizes[0] = 1;
  r.strides[0] = 0;
  return r;
}

}  // namespace

FoldArgs check(const FoldParams& p, const char* op) {
  Checker check(op);
  FoldArgs a{};
  check.arg("state", p.state).required().dtype({DType::kFloat32, DType::kBFloat16}).same_device();
  const bool has_layers = p.state.ndim == 5;
  Sym layers("layers"), pool("pool"), HV("HV"), V("V"), K("K"), H("H"), L("L"), slots("slots"), N("N");
  if (has_layers)
    check.arg("state", p.state).shape({layers, pool, HV, V, K});
  else
    check.arg("state", p.state).shape({pool, HV, V, K});
  check_head_dim(check, "state", "a head dimension K", K);
  check_head_dim(check, "state", "a head dimension V", V);
  check_state(check, "state", p.state, has_layers ? 1 : 0);
  check.arg("state", p.state).written();
  if (has_layers)
    if (layers > 1 && p.state.strides[0] % 4 != 0)
      check.fail("state", "a layer pitch that is a multiple of 4 elements", "stride " + std::to_string(p.state.strides[0]));
  check.arg("rings.rawv", p.rings.rawv).required().dtype({DType::kBFloat16, DType::kFloat32});
  a.scalar_gate = p.rings.g.given() && p.rings.g.ndim == (has_layers ? 4 : 3);
  check_rings(check, p.rings, p.rings.rawv.dtype, a.scalar_gate, has_layers ? 1 : 0, layers, slots, HV, H, L, V, K, false);
  if (HV < 1) check.fail("state", "at least one head", "shape " + shape_text(p.state));
  if (H < 1 || HV % H != 0) check.fail("rings.rawk", "a number of heads that divides HV=" + std::to_string(HV), std::to_string(H));
  if (slots < pool) check.fail("rings.rawv", "at least pool=" + std::to_string(pool) + " slots", std::to_string(slots));
  check_index(check, "slots", p.slots, N);
  check.arg("pending", p.pending).dtype(DType::kInt32).same_device();
  if (!p.pending.given())
    check_index(check, "accept", p.accept, N);
  else if (has_layers)
    check.arg("pending", p.pending).shape({layers, Dim::at_least(pool, "pool")}).written();
  else
    check.arg("pending", p.pending).shape({Dim::at_least(pool, "pool")}).written();
  check.require(!p.pending.given() || !p.accept.given(), "accept", "none where pending says how many tokens", "both");
  all_or_none(check, {{"track", p.track.given()}, {"track_step", p.track_step.given()}});
  if (p.track.given()) {
    check_index(check, "track", p.track, N);
    check_index(check, "track_step", p.track_step, N);
  }
  check.outputs_apart();
  a.state = array(layered(p.state, has_layers));
  a.rawv = array(layered(p.rings.rawv, has_layers)), a.rawk = array(layered(p.rings.rawk, has_layers));
  a.ring_g = array(layered(p.rings.g, has_layers)), a.ring_beta = array(layered(p.rings.beta, has_layers));
  a.layers = has_layers ? layers.value() : 1;
  a.H = H, a.HV = HV, a.K = K, a.V = V;
  a.l2norm = p.l2norm;
  a.slots = device_index(p.slots), a.accept = device_index(p.accept);
  a.track = device_index(p.track), a.track_step = device_index(p.track_step);
  a.pending = pending_of(p.pending);
  a.N = N, a.pool = pool, a.L = L, a.null_slot = p.null_slot;
  if (!host_reads(p.state)) return a;

  SeenOnce once(check, "slots", "slots and track slots that are written at most once");
  TrackApart apart(check, "track");
  const std::string range = "slots below pool=" + std::to_string(pool) + ", or <= " + std::to_string(p.null_slot) + " to skip";
  for (std::int64_t i = 0; i < N; ++i) {
    const std::int64_t slot = load_index(p.slots, i);
    if (slot > p.null_slot && (slot < 0 || slot >= pool)) check.fail("slots", range, std::to_string(slot) + " at " + std::to_string(i));
    const bool padding = slot <= p.null_slot;
    std::int64_t accept = 0;
    if (!a.pending) {
      accept = load_index(p.accept, i);
      if (!padding && accept > L)
        check.fail("accept", "at most L=" + std::to_string(L) + " tokens", std::to_string(accept) + " at " + std::to_string(i));
    }
    if (padding) continue;
    apart.request(slot);
    bool writes = false, tracks = false;
    for (std::int64_t layer = 0; layer < a.layers; ++layer) {
      FoldRequest r{layer, slot, a.pending ? load_pending(check, a, layer, slot) : accept, -1, -1};
      if (r.tokens <= 0) continue;
      writes = true;
      if (p.track.given()) {
        const std::int64_t track = load_index(p.track, i), at_step = load_index(p.track_step, i);
        if (track > p.null_slot && (track < 0 || track >= pool))
          check.fail("track", range, std::to_string(track) + " at " + std::to_string(i));
        if (track > p.null_slot && at_step >= 0 && at_step < r.tokens) {
          r.track = track, r.track_step = at_step;
          if (!tracks) once.add(track), apart.track(track, i);
          tracks = true;
        }
      }
      a.requests.push_back(r);
    }
    if (writes) once.add(slot);
  }
  once.finish();
  apart.finish();
  for (const FoldRequest& r : a.requests) check_recorded(check, a, r);
  return a;
}

DeferArgs check(const DeferFoldParams& p) {
  Checker check("defer_fold");
  DeferArgs a{};
  Sym N("N");
  check.arg("pending", p.pending).required().dtype(DType::kInt32).same_device();
  const bool has_layers = p.pending.ndim == 2;
  if (has_layers)
    check.arg("pending", p.pending).shape({Dim::any("layers"), Dim::any("slots")}).written();
  else
    check.arg("pending", p.pending).shape({Dim::any("slots")}).written();
  check_index(check, "slots", p.slots, N);
  check_index(check, "accept", p.accept, N);
  check.outputs_apart();
  a.pending = pending_of(p.pending), a.slots = device_index(p.slots), a.accept = device_index(p.accept);
  a.N = N, a.layers = has_layers ? p.pending.sizes[0] : 1, a.slot_count = p.pending.size(-1), a.null_slot = p.null_slot;
  if (!host_reads(p.pending)) return a;

  SeenOnce once(check, "slots", "each slot at most once");
  for (std::int64_t i = 0; i < N; ++i) {
    const std::int64_t slot = load_index(p.slots, i), accept = load_index(p.accept, i);
    if (slot <= p.null_slot || accept <= 0) continue;
    if (slot < 0 || slot >= a.slot_count)
      check.fail("slots", "slots below " + std::to_string(a.slot_count) + ", or <= " + std::to_string(p.null_slot) + " for padding",
                 std::to_string(slot) + " at " + std::to_string(i));
    if (accept > std::numeric_limits<std::int32_t>::max())
      check.fail("accept", "an int32", std::to_string(accept) + " at " + std::to_string(i));
    for (std::int64_t layer = 0; layer < a.layers; ++layer)
      if (at(a.pending, layer, slot) != 0)
        check.fail("pending", "0 for the slots of the call (a verify or a fold takes in what waits)",
                   std::to_string(at(a.pending, layer, slot)) + " for slot " + std::to_string(slot));
    once.add(slot);
    a.requests.push_back({slot, accept});
  }
  once.finish();
  return a;
}

namespace {
/// What the indices of one item hold, and the copies that they ask for.
void read_rollback(const Checker& check, const RollbackConvWindowsParams& p, RollbackArgs& a) {
  SeenOnce once(check, "slots", "slots and track slots that are written at most once");
  TrackApart apart(check, "track_slots");
  const auto add = [&](const char* slot_name, const char* step_name, std::int64_t n, std::int64_t slot, std::int64_t step) {
    if (slot < 0 || step < 0) return false;
    const std::int64_t row = p.rows.given() ? load_index(p.rows, n) : n;
    if (slot >= a.slot_count)
      check.fail(slot_name, "slots below pool=" + std::to_string(a.slot_count) + ", or < 0 to skip",
                 std::to_string(slot) + " at " + std::to_string(n));
    if (step >= a.steps)
      check.fail(step_name, "steps below " + std::to_string(a.steps) + ", or < 0 to skip",
                 std::to_string(step) + " at " + std::to_string(n));
    if (row < 0 || row >= a.row_count)
      check.fail("rows", "rows below " + std::to_string(a.row_count), std::to_string(row) + " at " + std::to_string(n));
    once.add(slot);
    a.copies.push_back({slot, row, step});
    return true;
  };
  for (std::int64_t n = 0; n < a.N; ++n) {
    add("slots", "last_correct_step", n, load_index(p.slots, n), load_index(p.last_correct_step, n));
    apart.request(load_index(p.slots, n));
    if (!p.track_slots.given()) continue;
    const std::int64_t track = load_index(p.track_slots, n);
    if (add("track_slots", "track_steps", n, track, load_index(p.track_steps, n))) apart.track(track, n);
  }
  once.finish();
  apart.finish();
}
}  // namespace

std::vector<RollbackArgs> check(const RollbackConvWindowsParams* params, std::int64_t count) {
  std::vector<RollbackArgs> all;
  Checker check("rollback_conv_windows");  // of all items: no pool may hold what another one's windows or indices are read from
  check.array("params", params, "count", count);
  all.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const RollbackConvWindowsParams& p = params[i];
    check.next_item();
    Sym pool("pool"), C("C"), rows("rows"), steps("steps"), N("N");
    check.arg("conv_pools", p.pool).required().dtype({DType::kBFloat16, DType::kFloat32}).shape({pool, C, kWindow}).same_device().written();
    check.arg("intermediate_windows", p.windows).required().dtype(p.pool.dtype).shape({rows, steps, C, kWindow}).same_device();
    check_index(check, "slots", p.slots, N);
    check_index(check, "last_correct_step", p.last_correct_step, N);
    if (p.rows.given()) check.arg("rows", p.rows).dtype({DType::kInt32, DType::kInt64}).shape({Dim::at_least(N, "N")}).same_device();
    all_or_none(check, {{"track_slots", p.track_slots.given()}, {"track_steps", p.track_steps.given()}});
    if (p.track_slots.given()) {
      check_index(check, "track_slots", p.track_slots, N);
      check_index(check, "track_steps", p.track_steps, N);
    }
    RollbackArgs a{};
    a.pool = array(p.pool), a.windows = array(p.windows);
    a.channels = C, a.N = N, a.slot_count = pool, a.row_count = rows, a.steps = steps;
    a.slots = device_index(p.slots), a.steps_of = device_index(p.last_correct_step), a.rows = device_index(p.rows);
    a.track_slots = device_index(p.track_slots), a.track_steps = device_index(p.track_steps);
    all.push_back(std::move(a));
  }
  check.outputs_apart();
  for (std::int64_t i = 0; i < count; ++i)
    if (host_reads(params[i].pool)) read_rollback(check, params[i], all[i]);
  return all;
}

}  // namespace specstate::kda
