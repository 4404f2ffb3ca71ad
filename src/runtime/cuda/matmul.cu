// The row-invariant product. A lane is an output and never a part of a sum, as on the CPU: acc = fma(x[i], w[j][i], acc) over rising i, so the
// bits are the CPU's, and what a speculative step computes for a row is what plain decoding computes.
//
// A block takes 32 outputs (two panels), a warp 1 to 4 rows of them: 1 as long as the blocks are fewer than multiprocessors, because then the chain's
// latency, 4 cycles a k, is the whole time. The weights of up to 576 k (all, in the models here) come into shared memory before the kernel's turn; then a
// warp fetches its own rows with all loads in flight, norms or activates them on the way (the operations of rows.cu), and runs its chains without waiting for any
// other warp.
#include <algorithm>

#include "core/numeric.hpp"
#include "runtime/cuda/math.cuh"
#include "runtime/cuda/memory.hpp"
#include "runtime/cuda/ops.hpp"
#include "runtime/cuda/turn.cuh"

namespace specstate::runtime::cuda {

namespace {

using i64 = std::int64_t;
constexpr int kWarps = 8, kThreads = 32 * kWarps, kPanel = 16, kColumns = 2 * kPanel, kMostDepth = 576, kHeads = 16;

struct Heads {
  const std::uint32_t* w[kHeads];
  i64 x_step, y_step;
};

/// `depth` k at a time, a multiple of 4. kGated: a block's second panel are the rows n / 2 below those of its first, and y = swiglu of the two.
template <int kRows, Input::As kAs, bool kGated>
__global__ void __launch_bounds__(kThreads) product(Heads heads, i64 n, i64 k, int depth, i64 rows, const float* x, i64 x_stride,
                                                    const float* norm, float eps, float* y, i64 y_stride, const float* add, Also also) {
  SPECSTATE_DYNAMIC_SHARED(memory);
  std::uint32_t* const w_tile = reinterpret_cast<std::uint32_t*>(memory);         // [depth / 2, 32 outputs], two k a word
  float* const x_tile = reinterpret_cast<float*>(w_tile + depth / 2 * kColumns);  // [rows of the block, depth]
  constexpr int kAtOnce = 8 / kRows;                                              // elements of a row that a lane has in flight
  const int t = static_cast<int>(threadIdx.x), lane = t % 32, warp = t / 32;
  const i64 panel_words = (k + 1) / 2 * kPanel, first_panel = i64{blockIdx.x} * (kGated ? 1 : 2),
            panel_step = kGated ? n / 2 / kPanel * panel_words : panel_words, row0 = (i64{blockIdx.y} * kWarps + warp) * kRows,
            column = first_panel * kPanel + lane;
  const std::uint32_t* w = heads.w[blockIdx.z] + first_panel * panel_words;
  x += blockIdx.z * heads.x_step, y += blockIdx.z * heads.y_step;
  float* const mine = x_tile + warp * kRows * depth;         // this warp's rows
  float* const norm_tile = x_tile + kWarps * kRows * depth;  // [depth] where rows are normed
  const auto fetch = [&](i64 k0) {
    if constexpr (kAs == Input::As::kNormed)
      for (int c = t; c < min(i64{depth}, k - k0); c += kThreads) norm_tile[c] = norm[k0 + c];
    const int quads = static_cast<int>((min(i64{depth}, k - k0) + 1) / 2 * (kPanel / 4)),
              panels = kGated || (first_panel + 1) * kPanel < n ? 2 : 1;
    for (int i0 = t; i0 < 2 * quads; i0 += 4 * kThreads) {
      uint4 some[4];
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        const int i = i0 + u * kThreads, panel = i >= quads, quad = i - panel * quads;
        some[u] = {0, 0, 0, 0};
        if (i < panels * quads) some[u] = *reinterpret_cast<const uint4*>(w + panel * panel_step + k0 / 2 * kPanel + 4 * quad);
      }
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        const int i = i0 + u * kThreads, panel = i >= quads, quad = i - panel * quads;
        if (i < 2 * quads) *reinterpret_cast<uint4*>(w_tile + quad / 4 * kColumns + panel * kPanel + quad % 4 * 4) = some[u];
      }
    }
  };
  fetch(0);
  __syncthreads();
  my_turn();
  const int here = static_cast<int>(max(i64{0}, min(i64{kRows}, rows - row0)));  // rows of this warp
  float plus[kRows] = {}, scale[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (add && r < here && column < n) plus[r] = add[(row0 + r) * y_stride + column];
    if (kAs == Input::As::kNormed && r < here) {
      const float* row = x + (row0 + r) * x_stride;
      scale[r] = 1.0f / sqrtf(sum_squares(lane, k, [&](i64 i) { return row[i]; }) / static_cast<float>(k) + eps);
    }
  }
  float acc[kRows] = {};
  for (i64 k0 = 0; k0 < k; k0 += depth) {
    const int deep = static_cast<int>(min(i64{depth}, k - k0));
    if (k0 > 0) {
      __syncthreads();
      fetch(k0);
      __syncthreads();
    }
    for (int c0 = lane; here > 0 && c0 < deep; c0 += 32 * kAtOnce) {
      float v[kRows][kAtOnce], up[kRows][kAtOnce], weight[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int c = min(c0 + 32 * u, deep - 1);
        if constexpr (kAs == Input::As::kNormed) weight[u] = norm_tile[c];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float* from = x + (row0 + min(r, here - 1)) * x_stride + k0 + c;
          v[r][u] = *from;
          if constexpr (kAs == Input::As::kSwiglu) up[r][u] = from[k];
        }
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u)
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if constexpr (kAs == Input::As::kNormed) v[r][u] = v[r][u] * scale[r] * weight[u];
          if constexpr (kAs == Input::As::kSwiglu) v[r][u] = v[r][u] * sigmoid(v[r][u]) * up[r][u];
          if (c0 + 32 * u < deep) mine[r * depth + c0 + 32 * u] = v[r][u];
        }
    }
    __syncwarp();
    if (here == 0) continue;
    const std::uint32_t* words = w_tile + lane;
    int i = 0;
#pragma unroll 8
    for (; i + 4 <= deep; i += 4) {
      const std::uint32_t first = words[i / 2 * kColumns], second = words[(i / 2 + 1) * kColumns];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 v = *reinterpret_cast<const float4*>(mine + r * depth + i);
        acc[r] = fmaf(v.x, __uint_as_float(first << 16), acc[r]);
        acc[r] = fmaf(v.y, __uint_as_float(first & 0xFFFF0000u), acc[r]);
        acc[r] = fmaf(v.z, __uint_as_float(second << 16), acc[r]);
        acc[r] = fmaf(v.w, __uint_as_float(second & 0xFFFF0000u), acc[r]);
      }
    }
    for (; i < deep; ++i) {
      const std::uint32_t word = words[i / 2 * kColumns];
#pragma unroll
      for (int r = 0; r < kRows; ++r) acc[r] = fmaf(mine[r * depth + i], __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16), acc[r]);
    }
    __syncwarp();
  }
  if constexpr (kGated) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float up = __shfl_xor_sync(kAllLanes, acc[r], kPanel);
      if (lane < kPanel && row0 + r < rows) y[(row0 + r) * y_stride + column] = acc[r] * sigmoid(acc[r]) * up;
    }
    return;
  }
  if (column >= n) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const i64 row = row0 + r;
    if (row >= rows) break;
    const float v = add ? acc[r] + plus[r] : acc[r];
    y[row * y_stride + column] = v;
    if (also.y) also.y[row * also.stride + column] = v;
  }
}

template <Input::As kAs, bool kGated = false>
void enqueue_as(const Heads& heads, i64 count, const Matrix& shape, const Input& in, i64 rows, float* y, i64 y_stride, const float* add,
                const Also& also, Stream stream) {
  const i64 chunks = (shape.k + kMostDepth - 1) / kMostDepth, depth = ((shape.k + chunks - 1) / chunks + 3) / 4 * 4;
  const i64 columns = (shape.n + kColumns - 1) / kColumns, one = (rows + kWarps - 1) / kWarps * columns * count;  // blocks of a row a warp
  const i64 most = specstate::cuda::device_info().multiprocessors;
  const int each = one <= most ? 1 : one <= 2 * most ? 2 : 4;
  const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>((rows + kWarps * each - 1) / (kWarps * each)),
                  static_cast<unsigned>(count));
  auto* const kernel = each == 1 ? product<1, kAs, kGated> : each == 2 ? product<2, kAs, kGated> : product<4, kAs, kGated>;
  const std::size_t shared = static_cast<std::size_t>(depth) * 4 * (kColumns / 2 + kWarps * each + (kAs == Input::As::kNormed));
  launch(kernel, {grid, kThreads, shared}, stream, heads, shape.n, shape.k, static_cast<int>(depth), rows, in.x, in.stride, in.norm, in.eps,
         y, y_stride, add, also);
}

void enqueue(const Heads& heads, i64 count, const Matrix& shape, const Input& in, i64 rows, float* y, i64 y_stride, const float* add,
             const Also& also, Stream stream) {
  if (in.as == Input::As::kNormed)
    enqueue_as<Input::As::kNormed>(heads, count, shape, in, rows, y, y_stride, add, also, stream);
  else if (in.as == Input::As::kSwiglu)
    enqueue_as<Input::As::kSwiglu>(heads, count, shape, in, rows, y, y_stride, add, also, stream);
  else
    enqueue_as<Input::As::kPlain>(heads, count, shape, in, rows, y, y_stride, add, also, stream);
}

}  // namespace

Matrix upload(Memory& memory, const cpu::PackedMatrix& m, specstate::cuda::CublasLt* lt) {
  if (m.dtype() != DType::kBFloat16) throw Error(ErrorKind::kInternal, "internal error: the GPU's product takes bfloat16 weights");
  const i64 words = cpu::PackedMatrix::bytes(m.n(), m.k(), m.dtype()) / 4;
  Matrix w{memory.upload(static_cast<const std::uint32_t*>(m.data()), words, "weights"), m.n(), m.k()};
  if (!lt) return w;
  std::vector<float> dense(static_cast<std::size_t>(m.n() * m.k()));
  for (i64 r = 0; r < m.n(); ++r)
    for (i64 c = 0; c < m.k(); ++c) dense[static_cast<std::size_t>(r * m.k() + c)] = m.at(r, c);
  w.dense = memory.upload(dense.data(), m.n() * m.k(), "weights"), w.lt = lt;
  return w;
}

Matrix upload_rows(Memory& memory, const cpu::PackedMatrix& m, const std::vector<Part>& rows, specstate::cuda::CublasLt* lt) {
  i64 n = 0;
  for (const Part& p : rows) n += p.count;
  if (n == m.n()) return upload(memory, m, lt);
  cpu::PackedMatrix some(n, m.k(), m.dtype());
  std::vector<core::bfloat16> dense;
  n = 0;
  for (const Part& p : rows) {
    dense.clear();
    for (i64 r = p.begin; r < p.begin + p.count; ++r)
      for (i64 c = 0; c < m.k(); ++c) dense.push_back(core::from_float<core::bfloat16>(m.at(r, c)));
    some.set_rows(n, p.count, dense.data(), m.k());
    n += p.count;
  }
  return upload(memory, some, lt);
}

Matrix upload_split(Memory& memory, const cpu::PackedMatrix& m, const Exchange& exchange, specstate::cuda::CublasLt* lt) {
  if (!exchange.group || m.n() < exchange.group->size()) return upload(memory, m, lt);
  Matrix w = upload_rows(memory, m, {exchange.group->part_of(m.n())}, lt);
  w.split = &exchange, w.whole = m.n();
  return w;
}

void matmul(const Matrix& w, const Input& in, i64 rows, float* y, i64 y_stride, Stream stream, const float* add, const Also& also) {
  if (w.split) {
    Matrix own = w;
    own.split = nullptr;
    matmul(own, in, rows, w.split->part, w.n, stream);
    gather_columns(*w.split, w.split->part, rows, w.whole, 1, y, y_stride, add != nullptr, stream);
    if (also.y) copy_columns(y, y_stride, rows, w.whole, also.y, also.stride, stream);
    return;
  }
  if (w.lt && (add == nullptr || add == y)) {
    Input dense = in;
    if (in.as != Input::As::kPlain) dense.x = in.room, dense.stride = w.k;
    if (in.as == Input::As::kNormed) rms_norm(in.x, in.stride, rows, w.k, in.norm, in.eps, in.room, w.k, stream);
    if (in.as == Input::As::kSwiglu) swiglu(in.x, rows, w.k, in.room, stream);
    w.lt->product(w.dense, w.n, w.k, dense.x, dense.stride, rows, y, y_stride, add != nullptr, stream);
    if (also.y) copy_columns(y, y_stride, rows, w.n, also.y, also.stride, stream);
    return;
  }
  Heads heads{};
  heads.w[0] = w.words;
  enqueue(heads, 1, w, in, rows, y, y_stride, add, also, stream);
}

void mlp(const Matrix& gate_up, const Matrix& down, const Input& h, i64 rows, i64 F, float* wide, float* act, float* x, i64 d,
         const Exchange& exchange, Stream stream, const Also& also) {
  const i64 part = gate_up.n / 2;  // of F
  float* const mine = part == F ? act : exchange.part;
  if (!gate_up.lt && part % kPanel == 0 && h.as == Input::As::kNormed) {  // gate and up of a column in one block
    Heads heads{};
    heads.w[0] = gate_up.words;
    enqueue_as<Input::As::kNormed, true>(heads, 1, gate_up, h, rows, mine, part, nullptr, {}, stream);
  } else {
    matmul(gate_up, h, rows, wide, gate_up.n, stream);
    if (part == F) return matmul(down, swiglu_of(wide, 2 * F, act), rows, x, d, stream, x, also);
    swiglu(wide, rows, part, mine, stream);
  }
  if (part < F) gather_columns(exchange, mine, rows, F, 1, act, F, false, stream);
  matmul(down, plain(act, F), rows, x, d, stream, x, also);
}

void matmul_heads(const std::vector<Matrix>& w, const float* x, i64 x_stride, i64 x_step, i64 rows, float* y, i64 y_stride, i64 y_step,
                  Stream stream) {
  const i64 H = static_cast<i64>(w.size());
  for (i64 h = 0; h < H; h += kHeads) {
    Heads heads{};
    const i64 count = std::min<i64>(kHeads, H - h);
    for (i64 i = 0; i < count; ++i) heads.w[i] = w[static_cast<std::size_t>(h + i)].words;
    heads.x_step = x_step, heads.y_step = y_step;
    enqueue(heads, count, w[0], plain(x + h * x_step, x_stride), rows, y + h * y_step, y_stride, nullptr, {}, stream);
  }
}

}  // namespace specstate::runtime::cuda
