// Calls of the KDA family.
#include "fuzz.hpp"
#include "specstate/kda.hpp"

using namespace specstate;
using namespace specstate::fuzz;
using namespace specstate::kda;

namespace {

struct Sizes {
  std::int64_t N, T, H, HV, K, V, pool, L;
  DType act, state, ids;
  bool scalar_gate, leading;
};

std::vector<std::int64_t> packed(const Sizes& n, std::vector<std::int64_t> sizes) {
  if (n.leading) sizes.insert(sizes.begin(), 1);
  return sizes;
}

/// Requests of one to three tokens each, over the random numbers that are in a tensor of [N + 1].
void ascend(Input& input, const TensorView& t) {
  if (!t.given() || t.ndim != 1 || input.chance(16)) return;
  std::int64_t at = 0;
  for (std::int64_t i = 0; i < t.sizes[0]; ++i) {
    if (t.dtype == DType::kInt32)
      t.as<std::int32_t>()[i * t.strides[0]] = static_cast<std::int32_t>(at);
    else if (t.dtype == DType::kInt64)
      t.as<std::int64_t>()[i * t.strides[0]] = at;
    at += input.integer(0, 2);
  }
}

void step(Input& input, Call& call, const Sizes& n, StepParams& p, bool in_place) {
  const auto state = [&](DType dtype, std::vector<std::int64_t> sizes) {
    return in_place ? call.inout(dtype, sizes) : call.in(dtype, sizes);
  };
  const DType side = input.pick({DType::kFloat32, DType::kBFloat16});
  p.x_q = call.in(n.act, packed(n, {n.T, n.H, n.K}));
  p.x_k = call.in(n.act, packed(n, {n.T, n.H, n.K}));
  p.x_v = call.in(n.act, packed(n, {n.T, n.HV, n.V}));
  if (input.flip()) {
    p.w_q = call.in(DType::kFloat32, {n.H * n.K, 4});
    p.w_k = call.in(DType::kFloat32, {n.H * n.K, 4});
    p.w_v = call.in(DType::kFloat32, {n.HV * n.V, 4});
    p.cs_q = state(n.act, {n.pool, n.H * n.K, 3});
    p.cs_k = state(n.act, {n.pool, n.H * n.K, 3});
    p.cs_v = state(n.act, {n.pool, n.HV * n.V, 3});
  }
  const bool flat = input.flip();
  p.g = call.in(side, packed(n, n.scalar_gate ? std::vector{n.T, n.HV}
                                : flat        ? std::vector{n.T, n.HV * n.K}
                                              : std::vector{n.T, n.HV, n.K}));
  p.beta = call.in(side, packed(n, {n.T, n.HV}));
  p.A_log = call.in(DType::kFloat32, {n.HV});
  p.dt_bias = call.in(DType::kFloat32, n.scalar_gate ? std::vector{n.HV} : flat ? std::vector{n.HV * n.K} : std::vector{n.HV, n.K});
  p.state = state(n.state, {n.pool, n.HV, n.V, n.K});
  p.slots = call.in(n.ids, {n.N}, {.lowest = input.chance(4) ? -1 : 0, .highest = n.pool - 1, .distinct = true});
  if (input.flip()) {
    p.onorm_gate = call.in(side, packed(n, {n.T, n.HV, n.V}));
    p.onorm_weight = call.in(DType::kFloat32, {n.V});
    p.onorm_eps = input.chance(16) ? -1.0 : 1e-6;
  }
  p.out = call.out(n.act, packed(n, {n.T, n.HV, n.V}));
  if (input.flip()) p.lower_bound = input.chance(16) ? 1.0 : -5.0;
  if (input.chance(16)) p.softplus_beta = input.pick({0.0, -1.0, 2.0, 1e300});
  if (input.chance(16)) p.scale = input.pick({0.0, -1.0, 2.0, 1e300});
  p.l2norm = input.flip();
  p.round_before_norm = input.flip();
  if (input.chance(8)) p.null_slot = input.integer(-2, 1);
}

int verify_call(Input& input, Call& call, const Sizes& n) {
  VerifyParams p;
  p.update_state = input.chance(4);
  const bool deferred = input.chance(4);
  step(input, call, n, p, p.update_state || deferred);
  if (deferred) p.pending = call.inout(DType::kInt32, {n.pool}, {0, 1});
  p.cu_seqlens = call.in(n.ids, {n.N + 1}, {0, 0});
  ascend(input, p.cu_seqlens);
  const std::int64_t steps = 2 + input.integer(0, 1), rows = n.N + input.integer(0, 1);
  const int mode = static_cast<int>(input.integer(0, 2));
  if (mode == 1) {
    p.rings = {call.inout(n.act, {n.pool, n.HV, n.L, n.V}), call.inout(n.act, {n.pool, n.H, n.L, n.K}),
               call.inout(DType::kFloat32, n.scalar_gate ? std::vector{n.pool, n.HV, n.L} : std::vector{n.pool, n.HV, n.L, n.K}),
               call.inout(DType::kFloat32, {n.pool, n.HV, n.L})};
  }
  if (mode == 2) p.snapshots = call.inout(n.state, {rows, steps, n.HV, n.V, n.K});
  if (p.w_q.given() && input.flip()) {
    p.conv_q = call.inout(n.act, {rows, steps, n.H * n.K, 3});
    p.conv_k = call.inout(n.act, {rows, steps, n.H * n.K, 3});
    p.conv_v = call.inout(n.act, {rows, steps, n.HV * n.V, 3});
  }
  if (input.chance(4)) p.rows = call.in(n.ids, {n.N}, {.lowest = 0, .highest = rows > 0 ? rows - 1 : 0, .distinct = true});
  if (input.chance(4)) p.parents = call.in(n.ids, {n.N, steps}, {-1, 0});
  p.null_from_zero = input.chance(4);
  if (input.chance(8)) return call.run([&] { fused_kda_decode_mtp_dspark(p); });
  return call.run([&] { verify(p); });
}

int decode_call(Input& input, Call& call, const Sizes& n) {
  DecodeParams p;
  step(input, call, n, p, true);
  if (input.flip()) {
    p.cu_seqlens = call.in(n.ids, {n.N + 1}, {0, 0});
    ascend(input, p.cu_seqlens);
  }
  return call.run([&] { decode(p); });
}

int fold_call(Input& input, Call& call, const Sizes& n) {
  CommitParams p;
  const bool layers = input.flip();
  const auto with = [&](std::vector<std::int64_t> sizes) {
    if (layers) sizes.insert(sizes.begin(), 2);
    return sizes;
  };
  p.state = call.inout(n.state, with({n.pool, n.HV, n.V, n.K}));
  p.rings = {call.in(n.act, with({n.pool, n.HV, n.L, n.V})), call.in(n.act, with({n.pool, n.H, n.L, n.K})),
             call.in(DType::kFloat32, with(n.scalar_gate ? std::vector{n.pool, n.HV, n.L} : std::vector{n.pool, n.HV, n.L, n.K})),
             call.unit(DType::kFloat32, with({n.pool, n.HV, n.L}))};
  p.slots = call.in(n.ids, {n.N}, {.lowest = 0, .highest = n.pool - 1, .distinct = true});
  if (input.chance(4))
    p.pending = call.inout(DType::kInt32, with({n.pool}), {0, n.L});
  else
    p.accept = call.in(n.ids, {n.N}, {-1, n.L});
  if (input.chance(4)) {
    p.track = call.in(n.ids, {n.N}, {-1, n.pool - 1});
    p.track_step = call.in(n.ids, {n.N}, {-1, n.L});
  }
  p.l2norm = input.flip();
  if (input.chance(8)) p.null_slot = input.integer(-2, 1);
  p.max_cache_len = input.chance(8) ? input.integer(-1, 9) : n.L;
  p.num_k_heads = input.chance(8) ? input.integer(-1, 3) : n.H;
  const int name = static_cast<int>(input.integer(0, 2));
  return call.run([&] {
    if (name == 0)
      fold(p);
    else if (layers)
      commit_kda_replayssm_spec_all_layers(p);
    else
      commit_kda_replayssm_spec(p);
  });
}

int defer_call(Input& input, Call& call, const Sizes& n) {
  DeferFoldParams p;
  p.pending = call.inout(DType::kInt32, input.flip() ? std::vector{n.pool} : std::vector<std::int64_t>{2, n.pool}, {0, 1});
  p.slots = call.in(n.ids, {n.N}, {.lowest = 0, .highest = n.pool - 1, .distinct = true});
  p.accept = call.in(n.ids, {n.N}, {-1, n.L});
  return call.run([&] { defer_fold(p); });
}

int rollback_call(Input& input, Call& call, const Sizes& n) {
  RollbackConvWindowsParams p[2];
  const std::int64_t count = input.integer(1, 2), rows = n.N + input.integer(0, 2), C = input.integer(1, 20);
  for (std::int64_t i = 0; i < count; ++i) {
    p[i].pool = call.inout(n.act, {n.pool, C, 3});
    p[i].windows = call.in(n.act, {rows, n.L, C, 3});
    p[i].slots = call.in(n.ids, {n.N}, {.lowest = 0, .highest = n.pool - 1, .distinct = true});
    p[i].last_correct_step = call.in(n.ids, {n.N}, {-1, n.L - 1});
    if (input.flip()) p[i].rows = call.in(n.ids, {n.N}, {0, rows > 0 ? rows - 1 : 0});
    if (input.chance(4)) {
      p[i].track_slots = call.in(n.ids, {n.N}, {-1, n.pool - 1});
      p[i].track_steps = call.in(n.ids, {n.N}, {-1, n.L - 1});
    }
  }
  return call.run([&] { rollback_conv_windows(p, count); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  Call call(input);
  Sizes n{};
  n.N = input.integer(0, 2), n.H = 1 + input.chance(4), n.HV = n.H * (1 + input.chance(4));
  n.K = input.chance(8) ? 128 : 64, n.V = input.chance(8) ? 128 : 64;
  if (input.chance(64)) n.K = input.integer(1, 130);
  n.T = 2 * n.N + input.integer(0, 1), n.pool = n.N + 1, n.L = input.integer(1, 3);
  n.act = input.pick({DType::kFloat32, DType::kBFloat16}), n.state = input.pick({DType::kFloat32, DType::kBFloat16});
  n.ids = input.pick({DType::kInt32, DType::kInt64});
  n.scalar_gate = input.chance(4), n.leading = input.chance(4);
  const std::int64_t op = input.integer(0, 7);
  if (op < 3) return verify_call(input, call, n);
  if (op < 5) {
    if (input.flip()) n.T = n.N;
    return decode_call(input, call, n);
  }
  if (op < 7) return fold_call(input, call, n);
  return input.flip() ? defer_call(input, call, n) : rollback_call(input, call, n);
}
