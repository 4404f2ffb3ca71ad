// The row-invariant product. A lane is an output and never a part of a sum, as on the CPU: acc = fma(x[i], w[j][i], acc) over rising i, so the
// bits are the CPU's, and what a speculative step computes for a row is what plain decoding computes.
//
// A block takes 32 outputs (two panels) and 8 or 32 rows, a warp 1 or 4 of them. The weights of 192 k come into shared memory with all loads in
// flight at once, because the chain that follows cannot wait for each, and the next ones while that chain runs; rows are broadcasts from shared memory. With few rows a warp has one: then the chain's latency,
// 4 cycles a k, is the whole time, and more rows a warp would only add to it. Norms and activations are computed on the way into shared memory, with the
// operations of rows.cu.
#include <algorithm>

#include "core/numeric.hpp"
#include "runtime/cuda/math.cuh"
#include "runtime/cuda/memory.hpp"
#include "runtime/cuda/ops.hpp"
#include "runtime/cuda/turn.cuh"

namespace specstate::runtime::cuda {

namespace {

using i64 = std::int64_t;
constexpr int kWarps = 8, kThreads = 32 * kWarps, kPanel = 16, kColumns = 2 * kPanel, kChunk = 192, kHeads = 16;

struct Heads {
  const std::uint32_t* w[kHeads];
  i64 x_step, y_step;
};

template <int kRows, Input::As kAs>
__global__ void __launch_bounds__(kThreads) product(Heads heads, i64 n, i64 k, i64 rows, const float* x, i64 x_stride, const float* norm,
                                                    float eps, float* y, i64 y_stride, const float* add, Also also) {
  __shared__ std::uint32_t w_tile[2][kChunk / 2][kPanel];
  __shared__ float x_tile[kWarps * kRows][kChunk];
  const int t = static_cast<int>(threadIdx.x), lane = t % 32, warp = t / 32;
  const i64 panel_words = (k + 1) / 2 * kPanel, first_panel = i64{blockIdx.x} * 2, row0 = i64{blockIdx.y} * kWarps * kRows;
  const std::uint32_t* w = heads.w[blockIdx.z];
  x += blockIdx.z * heads.x_step, y += blockIdx.z * heads.y_step;
  __shared__ float scales[kWarps * kRows];
  // The next chunk's weights are on their way while this one is multiplied; the first ones before the kernel's turn.
  constexpr int kQuads = kChunk / 2 * kPanel / 4, kLoads = 2 * kQuads / kThreads;
  uint4 ahead[kLoads];
  const auto fetch = [&](i64 k0) {
    const int quads = static_cast<int>((min(i64{kChunk}, k - k0) + 1) / 2 * kPanel / 4);
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      const int panel = (t + l * kThreads) / kQuads, quad = (t + l * kThreads) % kQuads;
      ahead[l] = {0, 0, 0, 0};
      if (quad < quads && (first_panel + panel) * kPanel < n)
        ahead[l] = *reinterpret_cast<const uint4*>(w + (first_panel + panel) * panel_words + k0 / 2 * kPanel + 4 * quad);
    }
  };
  fetch(0);
  my_turn();
  if constexpr (kAs == Input::As::kNormed) {
    for (int r = warp * kRows; r < (warp + 1) * kRows && row0 + r < rows; ++r) {
      const float* row = x + (row0 + r) * x_stride;
      const float sum = sum_squares(lane, k, [&](i64 i) { return row[i]; });
      if (lane == 0) scales[r] = 1.0f / sqrtf(sum / static_cast<float>(k) + eps);
    }
  }
  float acc[kRows] = {};
  for (i64 k0 = 0; k0 < k; k0 += kChunk) {
    const int depth = static_cast<int>(min(i64{kChunk}, k - k0));
    __syncthreads();
#pragma unroll
    for (int l = 0; l < kLoads; ++l) *reinterpret_cast<uint4*>(&w_tile[0][0][0] + 4 * (t + l * kThreads)) = ahead[l];
    for (int i = t; i < kWarps * kRows * kChunk; i += kThreads) {
      const int r = i / kChunk, c = i % kChunk;
      if (row0 + r >= rows || c >= depth) continue;
      float v = x[(row0 + r) * x_stride + k0 + c];
      if constexpr (kAs == Input::As::kNormed) v = v * scales[r] * norm[k0 + c];
      if constexpr (kAs == Input::As::kSwiglu) v = v * sigmoid(v) * x[(row0 + r) * x_stride + k + k0 + c];
      x_tile[r][c] = v;
    }
    __syncthreads();
    if (k0 + kChunk < k) fetch(k0 + kChunk);
    if (row0 + warp * kRows >= rows) continue;
    const std::uint32_t* mine = &w_tile[lane / kPanel][0][lane % kPanel];
#pragma unroll 8
    for (int i = 0; i + 1 < depth; i += 2) {
      const std::uint32_t pair = mine[i / 2 * kPanel];
      const float even = __uint_as_float(pair << 16), odd = __uint_as_float(pair & 0xFFFF0000u);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float* row = x_tile[warp * kRows + r];
        acc[r] = fmaf(row[i + 1], odd, fmaf(row[i], even, acc[r]));
      }
    }
    if (depth % 2)
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        acc[r] = fmaf(x_tile[warp * kRows + r][depth - 1], __uint_as_float(mine[depth / 2 * kPanel] << 16), acc[r]);
  }
  const i64 column = first_panel * kPanel + lane;
  if (column >= n) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const i64 row = row0 + warp * kRows + r;
    if (row >= rows) break;
    const float v = add ? acc[r] + add[row * y_stride + column] : acc[r];
    y[row * y_stride + column] = v;
    if (also.y) also.y[row * also.stride + column] = v;
  }
}

void enqueue(const Heads& heads, i64 count, const Matrix& shape, const Input& in, i64 rows, float* y, i64 y_stride, const float* add,
             const Also& also, Stream stream) {
  constexpr auto kPlain = Input::As::kPlain, kNormed = Input::As::kNormed, kSwiglu = Input::As::kSwiglu;
  const bool few = rows <= kWarps;
  const i64 rows_of_block = few ? kWarps : 4 * kWarps;
  const dim3 grid(static_cast<unsigned>((shape.n + kColumns - 1) / kColumns),
                  static_cast<unsigned>((rows + rows_of_block - 1) / rows_of_block), static_cast<unsigned>(count));
  auto* const kernel = in.as == kNormed   ? (few ? product<1, kNormed> : product<4, kNormed>)
                       : in.as == kSwiglu ? (few ? product<1, kSwiglu> : product<4, kSwiglu>)
                                          : (few ? product<1, kPlain> : product<4, kPlain>);
  launch(kernel, {grid, kThreads}, stream, heads, shape.n, shape.k, rows, in.x, in.stride, in.norm, in.eps, y, y_stride, add, also);
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
  matmul(gate_up, h, rows, wide, gate_up.n, stream);
  if (gate_up.n == 2 * F) {
    matmul(down, swiglu_of(wide, 2 * F, act), rows, x, d, stream, x, also);
    return;
  }
  swiglu(wide, rows, gate_up.n / 2, exchange.part, stream);
  gather_columns(exchange, exchange.part, rows, F, 1, act, F, false, stream);
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
