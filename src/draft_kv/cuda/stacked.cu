// fused_norm_rope_stacked: norm and rotary of K, and V as it is, for a projection that was made elsewhere.
//
// Bound by memory: every value of kv [T, L, 2 * KV] is read once and written once, in another order. A run of lanes (a power of two, at least
// D / 16) has one head of one token: a lane holds channels 8 t .. 8 t + 7 of K and their partners half a head further, and the same of V, so all loads
// and stores of the tensors are 16 bytes, four of them under way a thread, and heads, layers and tokens follow each other as they lie in kv. With a rotary
// over the whole head the partners are the lane's own; a partial one fetches them from the lane that has them.
// The sum of squares has the order of the materialization's epilogue (finish.cuh): both leave the same bytes for the same projection.
#include <algorithm>

#include "core/match.hpp"
#include "cuda/launch.hpp"
#include "draft_kv/cuda/any_norm_rope.cuh"

namespace specstate::draft_kv::cuda {

using specstate::cuda::blocks_for;
using specstate::cuda::device_info;
using specstate::cuda::launch;

namespace {

/// One launch. Strides are elements.
struct Stacked {
  const void* kv;
  std::int64_t kv_token, kv_layer;
  void *k, *v;
  std::int64_t k_layer, k_token, k_head, v_layer, v_token, v_head;
  Values norm, eps;
  std::int64_t norm_layer;
  bool norm_pieces;    // eight norm weights may be read as 16 bytes
  const float* table;  // [P, R], a row dense
  std::int64_t table_row, table_rows;
  Indices positions;
  std::int64_t first_token;
  std::uint32_t total, layers, heads;  // heads of this launch: tokens * layers * heads
  int dim, rotary, lanes_log2;
  int* flag;
};

/// Eight neighbouring values.
template <class Io>
struct Piece {
  uint4 raw[sizeof(Io) / 2];
  __device__ __forceinline__ void load(const Io* p) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Io) / 2); ++i) raw[i] = ptx::load_streaming(reinterpret_cast<const uint4*>(p) + i);
  }
  __device__ __forceinline__ void load_kept(const Io* p) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Io) / 2); ++i) raw[i] = __ldg(reinterpret_cast<const uint4*>(p) + i);
  }
  __device__ __forceinline__ void store(Io* p) const {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Io) / 2); ++i) ptx::store_streaming(reinterpret_cast<uint4*>(p) + i, raw[i]);
  }
  __device__ __forceinline__ void get(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (sizeof(Io) == 4) {
        const uint4 w = raw[i / 4];
        x[i] = __uint_as_float(i % 4 == 0 ? w.x : i % 4 == 1 ? w.y : i % 4 == 2 ? w.z : w.w);
      } else {
        const std::uint32_t w = i / 2 == 0 ? raw[0].x : i / 2 == 1 ? raw[0].y : i / 2 == 2 ? raw[0].z : raw[0].w;
        x[i] = core::to_float(Io{static_cast<std::uint16_t>(w >> (16 * (i % 2)))});
      }
    }
  }
  __device__ __forceinline__ void set(const float (&x)[8]) {
    if constexpr (sizeof(Io) == 4) {
      raw[0] = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
      raw[1] = make_uint4(__float_as_uint(x[4]), __float_as_uint(x[5]), __float_as_uint(x[6]), __float_as_uint(x[7]));
    } else if constexpr (std::is_same_v<Io, core::bfloat16>) {
      raw[0] = make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7]));
    } else {
      raw[0] = make_uint4(fp16_pair(x[0], x[1]), fp16_pair(x[2], x[3]), fp16_pair(x[4], x[5]), fp16_pair(x[6], x[7]));
    }
  }
};

/// Eight norm weights: `piece` where they were read as one.
template <class Io>
__device__ __forceinline__ void norm_weights(const Stacked& s, const Piece<Io>& piece, int layer, int channel, float (&w)[8]) {
  if (s.norm_pieces) return piece.get(w);
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = value_at(s.norm.data, s.norm.dtype, layer * s.norm_layer + (channel + i) * s.norm.stride);
}

__device__ __forceinline__ void angles_at(const float* p, float (&x)[8]) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(p)), b = __ldg(reinterpret_cast<const float4*>(p) + 1);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

/// Piece `piece` of a head by a rotary over fewer channels: its partner is rotary / 16 pieces away, in another lane or this one.
__device__ __forceinline__ void turn_apart(int piece, int pieces, int rotary, const float* angles, const float (&low)[8],
                                           const float (&high)[8], int first_lane, float (&out)[8]) {
  const int apart = rotary / 16, partner = piece < apart ? piece + apart : piece - apart;
  const bool turned = piece < 2 * apart, from_high = partner >= pieces;
  const int lane = first_lane + (turned ? (from_high ? partner - pieces : partner) : 0);
  float c[8] = {}, sine[8] = {};
  if (turned) angles_at(angles + 8 * (piece % apart), c), angles_at(angles + rotary / 2 + 8 * (piece % apart), sine);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = __shfl_sync(~0u, low[i], lane), b = __shfl_sync(~0u, high[i], lane);
    const float other = from_high ? b : a;
    if (turned) out[i] = piece < apart ? out[i] * c[i] - other * sine[i] : out[i] * c[i] + other * sine[i];
  }
}

constexpr int kThreads = 128;

template <class Io>
__global__ void __launch_bounds__(kThreads) norm_rope_pieces(const __grid_constant__ Stacked s) {
  ptx::wait_for_previous();
  const int lanes = 1 << s.lanes_log2, t = threadIdx.x & (lanes - 1), pieces = s.dim / 16;
  std::uint32_t head = (blockIdx.x * kThreads + threadIdx.x) >> s.lanes_log2;
  // Whoever has no head (or no piece of it) stays for the exchanges, with zeros.
  bool here = head < s.total && t < pieces;
  head = head < s.total ? head : 0;
  const std::uint32_t row = head / s.heads, n = head - row * s.heads, in_launch = row / s.layers, layer = row - in_launch * s.layers;
  const std::int64_t token = s.first_token + in_launch;
  const std::int64_t position = s.positions.wide ? static_cast<const std::int64_t*>(s.positions.data)[token * s.positions.inner]
                                                 : static_cast<const int*>(s.positions.data)[token * s.positions.inner];
  const int half = s.dim / 2;
  const Io* from = static_cast<const Io*>(s.kv) + token * s.kv_token + layer * s.kv_layer + static_cast<std::int64_t>(n) * s.dim + 8 * t;
  Piece<Io> k0{}, k1{}, v0, v1, n0{}, n1{};
  if (here) {  // nothing of this waits for the position
    k0.load(from), k1.load(from + half);
    from += static_cast<std::int64_t>(s.heads) * s.dim;
    v0.load(from), v1.load(from + half);
    if (s.norm_pieces) {
      const Io* const norm = static_cast<const Io*>(s.norm.data) + layer * s.norm_layer + 8 * t;
      n0.load_kept(norm), n1.load_kept(norm + half);
    }
  }
  const float eps = static_cast<const float*>(s.eps.data)[layer * s.eps.stride];
  if (position < 0 || position >= s.table_rows) {
    if (here) s.flag[kPositionFlag] = 1;
    here = false;
  }
  const float* const angles = s.table + (here ? position : 0) * s.table_row;
  const bool whole = s.rotary == s.dim;
  float c[8] = {}, sine[8] = {};
  if (whole && here) angles_at(angles + 8 * t, c), angles_at(angles + half + 8 * t, sine);
  float x[8], y[8], chunk[4];
  k0.get(x), k1.get(y);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float words[4] = {x[2 * j], x[2 * j + 1], y[2 * j], y[2 * j + 1]};
    chunk[j] = chunk_squares(words);
  }
  for (int d = 1; d < lanes; d *= 2)
#pragma unroll
    for (int j = 0; j < 4; ++j) chunk[j] += __shfl_xor_sync(~0u, chunk[j], d);
  const float squares = (chunk[0] + chunk[1]) + (chunk[2] + chunk[3]);
  const float factor = norm_factor(squares, s.dim, eps);
  if (here) {
    float w[8];
    norm_weights(s, n0, static_cast<int>(layer), 8 * t, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = x[i] * factor * w[i];
    norm_weights(s, n1, static_cast<int>(layer), half + 8 * t, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = y[i] * factor * w[i];
  }
  if (whole) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = x[i], b = y[i];
      x[i] = a * c[i] - b * sine[i];
      y[i] = b * c[i] + a * sine[i];
    }
  } else {
    float low[8], high[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) low[i] = x[i], high[i] = y[i];
    const int first_lane = static_cast<int>(threadIdx.x % 32) - t;
    turn_apart(here ? t : 2 * pieces, pieces, s.rotary, angles, low, high, first_lane, x);
    turn_apart(here ? t + pieces : 2 * pieces, pieces, s.rotary, angles, low, high, first_lane, y);
  }
  if (!here) return;
  k0.set(x), k1.set(y);
  Io* const k = static_cast<Io*>(s.k) + layer * s.k_layer + token * s.k_token + static_cast<std::int64_t>(n) * s.k_head + 8 * t;
  Io* const v = static_cast<Io*>(s.v) + layer * s.v_layer + token * s.v_token + static_cast<std::int64_t>(n) * s.v_head + 8 * t;
  k0.store(k), k1.store(k + half);
  v0.store(v), v1.store(v + half);
}

/// Any shape, dtype and stride: a warp a head, by way of shared memory.
struct AnyStacked {
  TensorView kv, k_out, v_out;
  AnyNormRope norm_rope;
  Indices positions;
  std::int64_t table_rows, heads_of_all;
  int layers, heads;
  int* flag;
};
constexpr int kAnyWarps = 8;
__global__ void __launch_bounds__(32 * kAnyWarps) norm_rope_any(const __grid_constant__ AnyStacked s) {
  extern __shared__ float shared_head[];
  const int dim = s.norm_rope.head_dim, lane = threadIdx.x % 32;
  float* const x = shared_head + threadIdx.x / 32 * dim;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kAnyWarps + threadIdx.x / 32;
  ptx::wait_for_previous();
  if (i >= s.heads_of_all) return;
  const std::int64_t row = i / s.heads, token = row / s.layers;
  const int head = static_cast<int>(i - row * s.heads), layer = static_cast<int>(row - token * s.layers);
  const std::int64_t position = index_at(s.positions, token, 1);
  if (position < 0 || position >= s.table_rows) {
    if (lane == 0) s.flag[kPositionFlag] = 1;
    return;
  }
  const std::int64_t from = token * s.kv.strides[0] + layer * s.kv.strides[1];
  for (int part = 0; part < 2; ++part) {
    const TensorView& out = part ? s.v_out : s.k_out;
    const std::int64_t first = static_cast<std::int64_t>(part * s.heads + head) * dim;
    const std::int64_t to = layer * out.strides[0] + token * out.strides[1] + head * out.strides[2];
    for (int c = lane; c < dim; c += 32) x[c] = value_at(s.kv.data, s.kv.dtype, from + (first + c) * s.kv.strides[2]);
    __syncwarp();
    if (!part) norm_rope(s.norm_rope, layer, position, x, lane);
    for (int c = lane; c < dim; c += 32) store_channel(out.data, out.dtype, to + c * out.strides[3], 1.0f, x[c]);
    __syncwarp();
  }
}

bool aligned(const TensorView& t, std::int64_t outer) {
  const std::int64_t piece = 16 / size_of(t.dtype);
  if (reinterpret_cast<std::uintptr_t>(t.data) % 16 != 0 || t.stride(-1) != 1) return false;
  for (std::int64_t d = 0; d < outer; ++d)
    if (t.strides[d] % piece != 0) return false;
  return true;
}

bool in_pieces(const FusedNormRopeStackedArgs& a) {
  const NormRope& nr = a.norm_rope;
  return nr.head_dim % 16 == 0 && nr.head_dim <= 512 && nr.rotary_dim % 16 == 0 && aligned(a.kv, 2) && aligned(a.k_out, 3) &&
         aligned(a.v_out, 3) && nr.cos_sin_cache.dtype == DType::kFloat32 && aligned(nr.cos_sin_cache, 1) &&
         a.layers * a.heads < (std::int64_t{1} << 26);
}

template <class Io>
void launch_pieces(const FusedNormRopeStackedArgs& a, Stream stream) {
  const NormRope& nr = a.norm_rope;
  const TensorView& norm = nr.k_norm_weight;
  Stacked s{};
  s.kv = a.kv.data, s.kv_token = a.kv.strides[0], s.kv_layer = a.kv.strides[1];
  s.k = a.k_out.data, s.k_layer = a.k_out.strides[0], s.k_token = a.k_out.strides[1], s.k_head = a.k_out.strides[2];
  s.v = a.v_out.data, s.v_layer = a.v_out.strides[0], s.v_token = a.v_out.strides[1], s.v_head = a.v_out.strides[2];
  s.norm = {norm.data, norm.dtype, norm.strides[1]}, s.norm_layer = norm.strides[0];
  s.norm_pieces = norm.dtype == a.kv.dtype && aligned(norm, 1);
  s.eps = {nr.eps.data, nr.eps.dtype, nr.eps.strides[0]};
  s.table = nr.cos_sin_cache.as<float>(), s.table_row = nr.cos_sin_cache.strides[0], s.table_rows = nr.cos_sin_cache.sizes[0];
  s.positions = {a.positions.data, a.positions.dtype == DType::kInt64, false, 0, a.positions.strides[0]};
  s.layers = static_cast<std::uint32_t>(a.layers), s.heads = static_cast<std::uint32_t>(a.heads);
  s.dim = static_cast<int>(nr.head_dim), s.rotary = static_cast<int>(nr.rotary_dim), s.flag = device_flags();
  while ((1 << s.lanes_log2) < s.dim / 16) ++s.lanes_log2;
  const std::int64_t of_token = a.layers * a.heads,
                     round = (std::int64_t{1} << 26) / of_token;  // threads of a launch are counted in 32 bits
  for (std::int64_t first = 0; first < a.tokens; first += round) {
    s.first_token = first, s.total = static_cast<std::uint32_t>(std::min(a.tokens - first, round) * of_token);
    launch(norm_rope_pieces<Io>,
           {.grid = blocks_for(static_cast<std::int64_t>(s.total) << s.lanes_log2, kThreads), .block = kThreads, .overlap = true}, stream,
           s);
  }
}

}  // namespace

void run(const FusedNormRopeStackedArgs& a, Stream stream) {
  raise_flags();
  if (a.tokens == 0 || a.layers == 0) return;
  if (in_pieces(a)) {
    if (a.kv.dtype == DType::kBFloat16) return launch_pieces<core::bfloat16>(a, stream);
    if (a.kv.dtype == DType::kFloat16) return launch_pieces<core::float16>(a, stream);
    return launch_pieces<float>(a, stream);
  }
  const std::size_t shared = kAnyWarps * static_cast<std::size_t>(a.norm_rope.head_dim) * sizeof(float);
  if (shared > static_cast<std::size_t>(device_info().shared_bytes))
    core::throw_not_implemented("fused_norm_rope_stacked: heads of " + std::to_string(a.norm_rope.head_dim) +
                                " channels are more than the CUDA kernel holds.");
  const AnyStacked s{a.kv,
                     a.k_out,
                     a.v_out,
                     any_norm_rope(a.norm_rope),
                     {a.positions.data, a.positions.dtype == DType::kInt64, false, 0, a.positions.strides[0]},
                     a.norm_rope.cos_sin_cache.sizes[0],
                     a.tokens * a.layers * a.heads,
                     static_cast<int>(a.layers),
                     static_cast<int>(a.heads),
                     device_flags()};
  launch(norm_rope_any, {.grid = blocks_for(s.heads_of_all, kAnyWarps), .block = 32 * kAnyWarps, .shared = shared, .overlap = true}, stream,
         s);
}

}  // namespace specstate::draft_kv::cuda
