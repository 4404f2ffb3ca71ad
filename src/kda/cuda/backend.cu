// KDA on CUDA: from the arguments to the form of a kernel and its launch.
#include <algorithm>
#include <array>
#include <atomic>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "kda/cuda/backend.hpp"
#include "kda/cuda/fold.cuh"
#include "kda/cuda/verify.cuh"

namespace specstate::kda::cuda {

namespace launching = specstate::cuda;

Forced& forced() {
  static Forced f;
  return f;
}

namespace {

/// Whether quads may be accessed as a whole: the pointer and the given strides are multiples of four elements, the dense one is 1.
/// `unit` 16 bytes: also whether rows may be moved by bulk copies.
void note(Array& a, std::initializer_list<int> strides, int dense, std::int64_t unit = 0) {
  if (!a) return;
  const std::int64_t size = a.bf16 ? 2 : 4;
  if (!unit) unit = 4 * size;
  a.vec = reinterpret_cast<std::uintptr_t>(a.data) % static_cast<std::uintptr_t>(unit) == 0 && a.stride[dense] == 1;
  for (int i : strides) a.vec = a.vec && a.stride[i] * size % unit == 0;
}

/// [.., C, 3] with `channel` the dimension of C.
void note_window(Array& a, int channel) {
  if (!a) return;
  note(a, {}, channel);
  const std::int64_t c = a.stride[channel], tap = a.stride[channel + 1];
  a.layout = c == 1 && tap % 4 == 0 ? Array::kTapRows : c == 3 && tap == 1 ? Array::kInterleaved : Array::kAny;
  a.vec = reinterpret_cast<std::uintptr_t>(a.data) % (a.bf16 ? 8u : 16u) == 0 && a.layout != Array::kAny;
  for (int i = 0; i < channel; ++i) a.vec = a.vec && a.stride[i] % 4 == 0;
}

void note_rings(Array& rawv, Array& rawk, Array& g, bool scalar_gate, bool layers) {
  if (layers) {
    note(rawv, {0, 1, 2, 3}, 4), note(rawk, {0, 1, 2, 3}, 4);
    if (!scalar_gate) note(g, {0, 1, 2, 3}, 4);
  } else {
    note(rawv, {0, 1, 2}, 3), note(rawk, {0, 1, 2}, 3);
    if (!scalar_gate) note(g, {0, 1, 2}, 3);
  }
}

VerifyCall noted(const VerifyCall& call) {
  VerifyCall a = call;
  for (Channel* c : {&a.q, &a.k, &a.v}) {
    note(c->x, {0, 1}, 2, 16);
    note(c->weight, {}, 1);
    c->weight.vec = c->weight.vec && c->weight.stride[0] == 4;
    note_window(c->window, 1);
    note_window(c->windows, 2);
  }
  if (!a.scalar_gate) note(a.g, {0, 1}, 2, 16), note(a.dt_bias, {0}, 1);
  note(a.gate, {0, 1}, 2, 16), note(a.norm_weight, {}, 0), note(a.out, {0, 1}, 2);
  note_rings(a.rawv, a.rawk, a.ring_g, a.scalar_gate, false);
  note(a.snapshots, {0, 1, 2}, 4);
  return a;
}

/// See verify_kernel.
bool is_plain(const VerifyCall& a) {
  const auto ok = [](std::initializer_list<const Array*> arrays) {
    return std::all_of(arrays.begin(), arrays.end(), [](const Array* x) { return !*x || x->vec; });
  };
  bool plain = a.out.bf16 && !a.parents && !a.scalar_gate && a.g.bf16 && !a.dt_bias.bf16 && (!a.gate || a.gate.bf16) &&
               ok({&a.g, &a.dt_bias, &a.gate, &a.norm_weight, &a.out, &a.rawv, &a.rawk, &a.ring_g, &a.snapshots}) &&
               reinterpret_cast<std::uintptr_t>(a.state.data) % 16 == 0 && a.state.stride[0] % (a.state.bf16 ? 8 : 4) == 0;
  for (const Channel* c : {&a.q, &a.k, &a.v}) {
    plain = plain && ok({&c->x, &c->weight, &c->window, &c->windows});
    for (const Array* window : {&c->window, &c->windows}) plain = plain && (!*window || window->layout == Array::kTapRows);
    // bulk copies read windows
    plain = plain && (!c->window || (reinterpret_cast<std::uintptr_t>(c->window.data) % 16 == 0 && c->window.stride[0] % 8 == 0 &&
                                     c->window.stride[2] % 8 == 0));
  }
  return plain;
}

HeadsCall heads_call(const VerifyCall& a) {
  HeadsCall c = {};
  const auto put = [&](int i, const Array& x, std::int64_t first, std::int64_t head) {
    const std::int64_t size = x.bf16 ? 2 : 4;
    c.places.of[i] = {static_cast<char*>(x.data), first * size, head * size};
  };
  int i = 0;
  for (const Channel* x : {&a.q, &a.k, &a.v}) {
    put(kX + i, x->x, x->x.stride[0], x->x.stride[1]);
    put(kWindow + i, x->window, x->window.stride[0], 128 * x->window.stride[1]);
    put(kWindows + i, x->windows, x->windows.stride[0], 128 * x->windows.stride[2]);
    put(kTaps + i, x->weight, 0, 128 * 4);
    c.places.rows[kRowsX + i] = x->x.stride[0], c.places.rows[kRowsWindow + i] = x->window.stride[2];
    c.windows_step[i] = x->windows.stride[1], c.windows_tap[i] = x->windows.stride[3];
    ++i;
  }
  put(kBias, a.dt_bias, 0, a.dt_bias.stride[0]);
  put(kState, a.state, a.state.stride[0], a.state.stride[1]);
  put(kSnapshots, a.snapshots, a.snapshots.stride[0], a.snapshots.stride[2]);
  put(kG, a.g, a.g.stride[0], a.g.stride[1]);
  put(kGate, a.gate, a.gate.stride[0], a.gate.stride[1]);
  put(kOut, a.out, a.out.stride[0], a.out.stride[1]);
  put(kRawK, a.rawk, a.rawk.stride[0], a.rawk.stride[1]);
  put(kRawV, a.rawv, a.rawv.stride[0], a.rawv.stride[1]);
  put(kRingG, a.ring_g, a.ring_g.stride[0], a.ring_g.stride[1]);
  put(kRingBeta, a.ring_beta, a.ring_beta.stride[0], a.ring_beta.stride[1]);
  put(kLogit, a.beta, a.beta.stride[0], a.beta.stride[1]);
  c.places.rows[kRowsG] = a.g.stride[0], c.places.rows[kRowsGate] = a.gate.stride[0];
  c.slots = ShortIndex(a.slots), c.cu = ShortIndex(a.cu), c.rows = ShortIndex(a.rows);
  const auto narrow = [](std::int64_t x) {
    return static_cast<int>(std::clamp<std::int64_t>(x, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()));
  };
  c.null_slot = narrow(a.null_slot);
  c.N = narrow(a.N), c.HV = narrow(a.HV), c.H = narrow(a.H), c.T = narrow(a.T), c.L = narrow(a.L), c.pool = narrow(a.pool);
  c.row_count = narrow(a.row_count), c.steps = narrow(a.steps), c.each = static_cast<int>(a.T / a.N);
  c.by_heads = Divisor(static_cast<unsigned>(a.HV)), c.by_group = Divisor(static_cast<unsigned>(a.HV / a.H));
  c.conv = static_cast<bool>(a.q.weight), c.gate = static_cast<bool>(a.gate), c.windows = static_cast<bool>(a.q.windows);
  c.snapshots = static_cast<bool>(a.snapshots);
  c.safe_gate = a.safe_gate, c.l2norm = a.l2norm, c.round_before_norm = a.round_before_norm, c.update_state = a.update_state;
  c.null_from_zero = a.null_from_zero, c.logit_bf16 = a.beta.bf16, c.a_log_bf16 = a.a_log.bf16, c.weight_bf16 = a.norm_weight.bf16;
  c.lower_bound = a.lower_bound, c.softplus_beta = a.softplus_beta, c.inverse_beta = 1.0f / a.softplus_beta;
  c.softplus_threshold = std::min(a.softplus_threshold, 80.0f);
  c.scale = a.scale, c.norm_eps = a.norm_eps;
  c.a_log = a.a_log.data, c.a_log_head = a.a_log.stride[0], c.weight = a.norm_weight.data;
  c.out_token = a.out.stride[0], c.out_head = a.out.stride[1];
  c.logit_token = a.beta.stride[0], c.snapshots_step = a.snapshots.stride[1], c.rawk_step = a.rawk.stride[2];
  c.rawv_step = a.rawv.stride[2], c.ring_g_step = a.ring_g.stride[2], c.ring_beta_step = a.ring_beta.stride[2];
  return c;
}

/// Whether strides fit 32 bits; if so, the call in them.
bool narrowed(const HeadsCall& a, SpreadCall& c) {
  bool fits = true;
  const auto narrow = [&](std::int64_t bytes) {
    fits = fits && bytes == static_cast<std::int32_t>(bytes);
    return static_cast<std::int32_t>(bytes);
  };
  const auto index = [&](const ShortIndex& x, std::int64_t behind, bool moves, int without_step, int without) {
    return SpreadCall::Index{x ? x.data + behind * x.step : nullptr, moves ? narrow(x.step * 4) : 0, x && x.wide, without_step, without};
  };
  const bool rows = a.windows;
  c = {};
  c.index[SpreadCall::kSlot] = index(a.slots, 0, true, 0, 0);
  c.index[SpreadCall::kRow] = index(rows ? a.rows : ShortIndex(), 0, true, rows, 0);
  c.index[SpreadCall::kBegin] = index(a.cu, 0, true, a.each, 0);
  c.index[SpreadCall::kEnd] = index(a.cu, 1, true, a.each, a.each);
  c.index[SpreadCall::kBehind] = index(a.cu, a.N, false, 0, a.T);
  c.T = a.T, c.L = a.L, c.steps = a.steps, c.each = a.each, c.by_group = a.by_group;
  c.null_slot = std::max(a.null_slot, -1), c.pool = a.pool, c.row_count = rows ? a.row_count : 1;
  const auto at = [&](int i) { return a.places.of[i]; };
  for (int i = 0; i < 3; ++i) {
    const Place x = at(kX + i), taps = at(kTaps + i), window = at(kWindow + i), windows = at(kWindows + i),
                raw = i == 1   ? at(kRawK)
                      : i == 2 ? at(kRawV)
                               : Place{};
    c.channels[i] = {x.base,
                     taps.base,
                     window.base,
                     windows.base,
                     raw.base,
                     narrow(x.first),
                     narrow(x.head),
                     narrow(taps.head),
                     narrow(window.first),
                     narrow(window.head),
                     narrow(a.places.rows[kRowsWindow + i] * 2),
                     narrow(windows.first),
                     narrow(windows.head),
                     narrow(a.windows_step[i] * 2),
                     narrow(a.windows_tap[i] * 2),
                     narrow(raw.first),
                     narrow(raw.head),
                     narrow((i == 1 ? a.rawk_step : a.rawv_step) * 2)};
  }
  const Place g = at(kG), bias = at(kBias), gate = at(kGate), logit = at(kLogit), state = at(kState), ring_g = at(kRingG),
              beta = at(kRingBeta), out = at(kOut);
  c.g = g.base, c.bias = bias.base, c.gate = gate.base, c.logit = logit.base, c.state = state.base, c.ring_g = ring_g.base;
  c.ring_beta = beta.base, c.out = out.base, c.a_log = static_cast<const char*>(a.a_log), c.weight = static_cast<const char*>(a.weight);
  c.g_token = narrow(g.first), c.g_head = narrow(g.head), c.bias_head = narrow(bias.head);
  c.gate_token = narrow(gate.first), c.gate_head = narrow(gate.head), c.logit_token = narrow(logit.first),
  c.logit_head = narrow(logit.head);
  c.state_slot = narrow(state.first), c.state_head = narrow(state.head);
  c.ring_g_slot = narrow(ring_g.first), c.ring_g_head = narrow(ring_g.head), c.ring_g_step = narrow(a.ring_g_step * 4);
  c.ring_beta_slot = narrow(beta.first), c.ring_beta_head = narrow(beta.head), c.ring_beta_step = narrow(a.ring_beta_step * 4);
  c.out_token = narrow(out.first), c.out_head = narrow(out.head), c.a_log_head = narrow(a.a_log_head * (a.a_log_bf16 ? 2 : 4));
  c.conv = a.conv, c.safe_gate = a.safe_gate, c.l2norm = a.l2norm, c.round_before_norm = a.round_before_norm;
  c.logit_bf16 = a.logit_bf16, c.weight_bf16 = a.weight_bf16, c.a_log_bf16 = a.a_log_bf16;
  c.lower_bound = a.lower_bound, c.softplus_beta = a.softplus_beta, c.inverse_beta = a.inverse_beta;
  c.softplus_threshold = a.softplus_threshold, c.scale = a.scale, c.norm_eps = a.norm_eps;
  return fits;
}

/// Does fold_rows_kernel take it? `a` has its rings noted.
bool in_rows(const FoldCall& a) {
  const auto rows = [](const Array& x) { return x.vec && x.stride[3] == 128; };
  return a.K == 128 && a.V == 128 && !a.scalar_gate && a.rawk.bf16 && a.rawv.bf16 && !a.ring_g.bf16 && !a.ring_beta.bf16 && rows(a.rawk) &&
         rows(a.rawv) && rows(a.ring_g) && a.ring_beta.stride[3] == 1 && std::max(a.N, a.layers) < 65536;
}

/// CTAs for so many heads of `parts` CTAs each: as many as the GPU holds at once, `each` a multiprocessor. Where a few less take as many turns (384
/// heads on 132 or on 128), a few less: copies beside them (sm_budget) then find a place, and no CTA has to wait for theirs and take its turns late.
std::int64_t resident(std::int64_t heads, int parts, const launching::DeviceInfo& device, int each = 2) {
  const std::int64_t most = std::max<std::int64_t>(1, each * device.multiprocessors / parts), turns = (heads + most - 1) / most,
                     enough = (heads + turns - 1) / turns;
  return (16 * enough >= 15 * most ? enough : std::min(heads, most)) * parts;
}

unsigned blocks(std::int64_t n) { return launching::blocks_for(n, 1); }

FoldRowsCall rows_call(const FoldCall& a) {
  const auto place = [](const Array& x) {
    const std::int64_t size = x.bf16 ? 2 : 4;
    return FoldRowsCall::Place{static_cast<char*>(x.data), x.stride[0] * size, x.stride[1] * size, x.stride[2] * size};
  };
  FoldRowsCall c = {};
  c.state = place(a.state), c.rawk = place(a.rawk), c.rawv = place(a.rawv), c.g = place(a.ring_g), c.beta = place(a.ring_beta);
  c.slots = a.slots, c.accept = a.accept, c.track = a.track, c.track_step = a.track_step, c.cu = a.cu, c.pending = a.pending;
  c.null_slot = std::max<std::int64_t>(a.null_slot, -1), c.pool = std::min<std::int64_t>(a.pool, std::int64_t{1} << 32), c.L = a.L;
  c.group = static_cast<unsigned>(a.HV / a.H), c.l2norm = a.l2norm;
  return c;
}

void launch_fold(FoldCall a, Stream stream) {
  note_rings(a.rawv, a.rawk, a.ring_g, a.scalar_gate, true);
  Form f = {a.rawv.bf16, a.state.bf16, static_cast<int>(a.K), static_cast<int>(a.V / kRowUnit), false};
  const std::int64_t items = a.layers * a.N * a.HV;
  const launching::DeviceInfo& device = launching::device_info();
  if (in_rows(a) && !forced().rows) {
    const int rows = items <= 3 * device.multiprocessors ? 2 : 4;  // few heads: in smaller parts
    const dim3 grid(blocks(a.HV * 128 / (kRowUnit * rows)), static_cast<unsigned>(a.N), static_cast<unsigned>(a.layers));
    launching::launch(fold_rows(f.state_bf16, rows), {.grid = grid, .block = kThreads, .overlap = forced().overlap}, stream, rows_call(a));
    return;
  }
  while (f.rows > 2 && items * (a.V / kRowUnit / f.rows) * 2 <= device.multiprocessors) f.rows /= 2;
  if (forced().rows) f.rows = std::max(2, std::min(f.rows, forced().rows));
  const int parts = static_cast<int>(a.V) / (kRowUnit * f.rows);
  const std::size_t shared = fold_bytes(f.rows, f.K, f.state_bf16 ? 2 : 4);
  launching::launch(fold_form(f), {.grid = blocks(items * parts), .block = kThreads, .shared = shared, .overlap = forced().overlap}, stream,
                    a, parts);
}

/// All of a fold, the counts of pending tokens with it.
void run_fold(const FoldCall& a, Stream stream) {
  if (a.N == 0 || a.layers == 0) return;
  launch_fold(a, stream);
  if (a.pending) settle_pending(a, stream);
}

/// Whether heads.cuh runs the recurrence of a call that it could take, as measured: exact ring mode, and snapshots of heads for two thirds of the
/// multiprocessors (fewer are cut among CTAs by verify.cuh, which also runs decode).
bool in_frame(const VerifyCall& a, const launching::DeviceInfo& device) {
  if (forced().frame >= 0) return forced().frame != 0;
  if (forced().rows || a.update_state) return false;
  return a.snapshots ? 3 * a.N * a.HV >= 2 * device.multiprocessors : a.exact && !a.null_from_zero;
}
/// Warps of a CTA in ring mode: two CTAs of 8 a multiprocessor, or one of 16, which is faster for a head a multiprocessor, and for three of four
/// tokens or more.
int ring_warps(const VerifyCall& a, const launching::DeviceInfo& device) {
  const std::int64_t heads = a.N * a.HV, each = device.multiprocessors;
  return heads <= each || (2 * each < heads && heads <= 3 * each && a.T >= 4 * a.N) ? 16 : 8;
}

/// Clusters of spread.cuh that this GPU holds at once, one CTA a multiprocessor: their number depends on how its multiprocessors are grouped.
int clusters_at_once(const launching::DeviceInfo& device) {
  static std::array<std::atomic<int>, 64> known;
  std::atomic<int>& n = known[static_cast<std::size_t>(device.index) % known.size()];
  if (n == 0) {
    const SpreadKernel kernel = verify_spread(8);
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {SpreadCall::kParts, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = SpreadCall::kParts, config.blockDim = static_cast<unsigned>(kernel.threads), config.dynamicSmemBytes = kernel.bytes;
    config.attrs = &cluster, config.numAttrs = 1;
    int found = 0;
    SPECSTATE_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&found, kernel.run, &config));
    n = std::max(found, 1);
  }
  return n;
}
/// Whether spread.cuh is the fastest: where all heads are worked on at once.
bool spreads(const VerifyCall& a, const launching::DeviceInfo& device) {
  return forced().warps ? forced().warps == 4 && a.N < 65536 : a.N * a.HV <= clusters_at_once(device);
}
/// Whether third.cuh is, as measured: where multiprocessors have two or three heads each, and up to twelve of more than four tokens. Its windows
/// leave by bulk copies.
bool in_thirds(const VerifyCall& a, const SpreadCall& narrow, const launching::DeviceInfo& device) {
  const bool bulk = std::ranges::all_of(narrow.channels, [](const SpreadCall::Channel& c) {
    return (reinterpret_cast<std::uintptr_t>(c.windows) |
            static_cast<std::uintptr_t>(c.windows_row | c.windows_head | c.windows_step | c.windows_tap)) %
               16 ==
           0;
  });
  const std::int64_t heads = a.N * a.HV, each = device.multiprocessors;
  return bulk && a.N < 65536 && (forced().warps ? forced().warps == 3 : each < heads && heads <= (a.T > 4 * a.N ? 12 : 3) * each);
}

/// Whether third.cuh folds what waits itself: where a head's records are three bulk copies that no other head overwrites.
bool folds_inside(const VerifyCall& a, const SpreadCall& narrow) {
  const auto bulk = [](const char* p, int slot, int head) {
    return (reinterpret_cast<std::uintptr_t>(p) | static_cast<std::uintptr_t>(slot | head)) % 16 == 0;
  };
  const SpreadCall::Channel &k = narrow.channels[1], &v = narrow.channels[2];
  return forced().inside && a.pending && a.H == a.HV && a.HV < 2048 && a.L <= 8 && k.raw_step == 256 && v.raw_step == 256 &&
         narrow.ring_g_step == 512 && bulk(k.raw, k.raw_slot, k.raw_head) && bulk(v.raw, v.raw_slot, v.raw_head) &&
         bulk(narrow.ring_g, narrow.ring_g_slot, narrow.ring_g_head);
}

}  // namespace

void run(const VerifyArgs& args, Stream stream) {
  VerifyCall a = noted(args);
  if (std::max({a.T, a.pool, a.row_count, a.N * a.HV}) > std::numeric_limits<std::int32_t>::max())
    throw Error(ErrorKind::kNotImplemented, "verify: more than 2147483647 tokens, slots, rows or heads of requests on CUDA.");
  const launching::DeviceInfo& device = launching::device_info();
  if (a.N == 0) {
    if (a.T > 0) clear(a, stream);
    return;
  }
  // No request has more tokens than this.
  const std::int64_t longest = std::min({a.T, a.steps, a.cu ? a.T : a.T / a.N});
  const bool tree = static_cast<bool>(a.parents);
  if (tree) a.steps = std::min<std::int64_t>(a.steps, kMaxTree);
  Form f = {a.out.bf16, a.state.bf16, static_cast<int>(a.K), static_cast<int>(a.V / kRowUnit), is_plain(a)};
  const bool splits = f.plain && f.act_bf16 && !f.state_bf16 && a.K == 128;
  const bool whole = splits && a.V == 128 && device.major >= 9;
  const bool frozen = whole && !a.exact && !a.snapshots && !a.update_state && !a.null_from_zero && forced().frozen != 0;
  if (frozen || (whole && in_frame(a, device))) {
    HeadsCall call = heads_call(a);
    SpreadCall narrow;
    const bool narrows = frozen && longest > 0 && a.N < 65536 && narrowed(call, narrow),
               spread = narrows && longest <= 16 && spreads(a, device),
               third = narrows && !spread && longest <= 8 && in_thirds(a, narrow, device), inside = third && folds_inside(a, narrow);
    if (a.pending && !inside) run_fold(args.deferred, stream);
    const auto launch = [&](const SpreadKernel& kernel, int parts) {
      launching::launch(kernel.run,
                        {.grid = dim3(blocks(a.HV * parts), static_cast<unsigned>(a.N)),
                         .block = static_cast<unsigned>(kernel.threads),
                         .shared = kernel.bytes,
                         .cluster = static_cast<unsigned>(parts),
                         .overlap = forced().overlap},
                        stream, narrow);
    };
    if (spread) {
      launch(verify_spread(longest > 8 ? 16 : 8), SpreadCall::kParts);
    } else if (third) {
      const ThirdKernel kernel = verify_third(inside);
      launching::launch(kernel.run,
                        {.grid = dim3(blocks(a.HV), static_cast<unsigned>(a.N)),
                         .block = static_cast<unsigned>(kernel.threads),
                         .shared = kernel.bytes,
                         .overlap = forced().overlap},
                        stream, narrow, static_cast<unsigned>(device.multiprocessors), Waiting{a.pending.data, a.pending.stride[1]});
    } else {
      // More than 8 tokens: those of up to 16 from one frozen state, those of more by the recurrence. Which a request has may be known to cu_seqlens alone.
      const int warps = forced().warps >= 8 ? forced().warps : ring_warps(a, device);
      if (narrows && longest > 8 && (longest <= 16 || a.cu)) {
        launch(verify_sixteen(forced().warps >= 8 ? warps : a.N * a.HV <= device.multiprocessors ? 16 : 8), 1);
        call.fewest = 17;
      }
      if (longest <= 8 || longest > 16 || !narrows) {
        const HeadsKernel kernel = verify_heads(frozen && longest <= 8, warps);
        launching::launch(kernel.run,
                          {.grid = blocks(resident(a.N * a.HV, 1, device, kernel.each)),
                           .block = static_cast<unsigned>(kernel.threads),
                           .shared = kernel.bytes,
                           .overlap = forced().overlap},
                          stream, call);
      }
    }
    if (a.update_windows) advance_windows(a, stream);
    return;
  }
  if (splits && device.major >= 9) {
    const std::int64_t items = a.N * a.HV;
    while (f.rows > 1 && items * (a.V / kRowUnit / f.rows) * 2 <= device.multiprocessors) f.rows /= 2;
    if (forced().rows) f.rows = std::min(f.rows, forced().rows);
  }
  const int parts = static_cast<int>(a.V) / (kRowUnit * f.rows);
  const int block = static_cast<int>(tree ? std::min({longest, a.columns, std::int64_t{kMaxTree}}) : kBlock);
  if (tree && !a.exact && !a.snapshots && !a.update_state && !f.state_bf16 && forced().frozen != 0) {
    const VerifyKernel kernel = verify_tree(f);
    if (kernel.bytes(block) <= static_cast<std::size_t>(device.shared_bytes)) {
      if (a.pending) run_fold(args.deferred, stream);
      launching::launch(kernel.run,
                        {.grid = blocks(a.N * a.HV), .block = kThreads, .shared = kernel.bytes(block), .overlap = forced().overlap}, stream,
                        a, block, 1);
      return;
    }
  }
  VerifyKernel kernel = splits ? verify_split(f) : f.plain ? verify_plain(f) : VerifyKernel{};
  if (!kernel.run) kernel = f.act_bf16 ? verify_bf16(f) : verify_float(f);
  if (kernel.bytes(block) > static_cast<std::size_t>(device.shared_bytes))
    throw Error(ErrorKind::kNotImplemented, "verify: " + (tree ? "a tree of " + std::to_string(block) + " tokens" : std::string("a head")) +
                                                " does not fit the shared memory of this GPU.");
  if (a.pending) run_fold(args.deferred, stream);
  launching::launch(kernel.run,
                    {.grid = blocks(resident(a.N * a.HV, parts, device)),
                     .block = kThreads,
                     .shared = kernel.bytes(block),
                     .cluster = static_cast<unsigned>(parts),
                     .overlap = forced().overlap},
                    stream, a, block, parts);
  if (a.update_windows) advance_windows(a, stream);
}

void run(const FoldArgs& args, Stream stream) { run_fold(args, stream); }

void run(std::span<const RollbackArgs> pools, Stream stream) {
  // The layers of a model in one launch: whatever is alike but for its place, in whatever order (no pool overlaps another or its windows).
  std::vector<bool> done(pools.size());
  const auto without_places = [](RollbackCall a) {
    note_window(a.pool, 1), note_window(a.windows, 2);
    a.pool.data = a.windows.data = nullptr;
    return a;
  };
  for (std::size_t i = 0; i < pools.size(); ++i) {
    if (done[i] || pools[i].N == 0 || pools[i].channels == 0) continue;
    RollbackPools group = {.each = without_places(pools[i]), .at = {}, .count = 0};
    for (std::size_t j = i; j < pools.size() && group.count < RollbackPools::kMost; ++j) {
      if (done[j] || without_places(pools[j]) != group.each) continue;
      group.at[group.count++] = {pools[j].pool.data, pools[j].windows.data};
      done[j] = true;
    }
    rollback(group, stream);
  }
}

}  // namespace specstate::kda::cuda
