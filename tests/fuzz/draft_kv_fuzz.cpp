// Calls of the draft KV family.
#include "fuzz.hpp"
#include "specstate/draft_kv.hpp"

using namespace specstate;
using namespace specstate::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  Call call(input);
  const DType io = input.pick({DType::kFloat32, DType::kBFloat16, DType::kFloat16}),
              weights = input.pick({DType::kFloat32, DType::kBFloat16});
  const DType ids = input.pick({DType::kInt32, DType::kInt64}), places = input.pick({DType::kInt32, DType::kInt64});
  const std::int64_t L = input.integer(1, 3), N = input.integer(1, 2), D = input.integer(2, 9), P = input.integer(1, 6);
  const std::int64_t R = 2 * input.integer(1, D / 2);
  if (input.flip()) {
    const std::int64_t T = input.integer(0, 5);
    draft_kv::FusedNormRopeStackedParams p;
    p.kv = call.in(io, {T, L, 2 * N * D});
    p.k_norm_weight = call.in(weights, {L, D});
    p.eps = call.unit(DType::kFloat32, {L});
    p.cos_sin_cache = call.in(weights, {P, R});
    p.positions = call.in(ids, {T}, {0, P - 1});
    p.num_kv_heads = N, p.head_dim = D, p.rotary_dim = R;
    if (input.chance(32)) p.num_kv_heads = input.pick<std::int64_t>({0, -1, 1, 3, INT64_MAX});
    if (input.chance(32)) p.head_dim = input.pick<std::int64_t>({0, -1, 1, 3, INT64_MAX});
    if (input.chance(32)) p.rotary_dim = input.pick<std::int64_t>({0, -1, 1, 3, INT64_MAX});
    p.k_out = call.out(io, {L, T, N, D});
    p.v_out = call.out(io, {L, T, N, D});
    return call.run([&] { draft_kv::fused_norm_rope_stacked(p); });
  }
  const std::int64_t b = input.integer(0, 3), W = input.integer(1, 3), T = b * W, Dv = input.flip() ? D : input.integer(1, 9);
  const std::int64_t hidden = input.integer(1, 9), S = input.integer(1, 9);
  const bool fp8 = input.chance(4), grid = input.flip();
  const DType pool =
      fp8 ? input.pick({DType::kFloat8E4M3FN, DType::kUInt8}) : input.pick({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  draft_kv::MaterializeIntoPoolParams p;
  p.ctx_hidden = call.in(io, {T, hidden});
  p.kv_weight = call.in(weights, {L, N * (D + Dv), hidden});
  if (input.flip()) p.kv_bias = call.in(weights, {L, N * (D + Dv)});
  p.k_norm_weight = call.in(weights, {L, D});
  p.eps = call.unit(DType::kFloat32, {L});
  if (input.chance(4))
    p.cos_sin_cache = call.in(DType::kFloat32, {L, P, R});
  else
    p.cos_sin_cache = call.in(DType::kFloat32, {P, R});
  p.positions = call.in(ids, grid && input.flip() ? std::vector{b, W} : std::vector{T}, {0, P - 1});
  p.slot_mapping = call.in(places, grid ? std::vector{b, W} : std::vector{T}, {-1, S - 1});
  if (grid && input.flip()) p.commit_lens = call.in(ids, {b}, {0, W});
  std::vector<TensorView> k, v;
  if (input.flip()) {
    k.push_back(call.inout(pool, {L, S, N, D}));
    v.push_back(call.inout(pool, {L, S, N, Dv}));
  } else {
    for (std::int64_t l = 0; l < L; ++l) {
      k.push_back(call.inout(pool, {S, N, D}));
      v.push_back(call.inout(pool, {S, N, Dv}));
    }
  }
  if (input.chance(32)) k.pop_back();
  p.k_pool = k, p.v_pool = v;
  if (fp8 && input.flip()) p.k_scale = call.unit(DType::kFloat32, input.flip() ? std::vector<std::int64_t>{} : std::vector{L});
  if (fp8 && input.flip()) p.v_scale = call.unit(DType::kFloat32, {L});
  p.is_neox_style = input.flip();
  p.round_after_norm = input.flip();
  if (input.chance(4)) p.io = input.pick({DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt32});
  return call.run([&] { draft_kv::materialize_into_pool(p); });
}
