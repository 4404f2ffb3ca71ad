// Row by row: embedding, norms, activation. A warp owns a row, its lanes are the CPU's 32 chains (math.cuh).
#include "runtime/cuda/math.cuh"
#include "runtime/cuda/ops.hpp"
#include "runtime/cuda/turn.cuh"

namespace specstate::runtime::cuda {

using specstate::cuda::blocks_for;

namespace {

using i64 = std::int64_t;
constexpr int kThreads = 128, kRowsOfBlock = kThreads / 32;

__device__ i64 my_row() { return i64{blockIdx.x} * kRowsOfBlock + threadIdx.x / 32; }
__device__ i64 my_element() { return i64{blockIdx.x} * kThreads + threadIdx.x; }

__global__ void __launch_bounds__(kThreads) embed_rows(const float* table, i64 d, const i64* ids, i64 rows, float* x) {
  my_turn();
  const i64 i = my_element();
  if (i < rows * d) x[i] = table[ids[i / d] * d + i % d];
}

__global__ void __launch_bounds__(kThreads)
    norm_rows(const float* x, i64 x_stride, i64 rows, i64 n, const float* w, float eps, float* y, i64 y_stride) {
  my_turn();
  const i64 row = my_row();
  if (row >= rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  x += row * x_stride, y += row * y_stride;
  const float sum = sum_squares(lane, n, [&](i64 i) { return x[i]; });
  const float s = 1.0f / sqrtf(sum / static_cast<float>(n) + eps);
  for (i64 i = lane; i < n; i += 32) y[i] = x[i] * s * w[i];
}

__global__ void __launch_bounds__(kThreads) swiglu_rows(const float* wide, i64 rows, i64 F, float* act) {
  my_turn();
  const i64 i = my_element();
  if (i >= rows * F) return;
  const float gate = wide[i / F * 2 * F + i % F], up = wide[i / F * 2 * F + F + i % F];
  act[i] = gate * sigmoid(gate) * up;
}

__global__ void __launch_bounds__(kThreads) copy_rows(const float* from, i64 from_stride, i64 rows, i64 d, float* to, i64 to_stride) {
  my_turn();
  const i64 i = my_element();
  if (i < rows * d) to[i / d * to_stride + i % d] = from[i / d * from_stride + i % d];
}

// parts [size, rows, most]: the head of a column says whose it is (group.hpp: part_of), and where among that rank's.
template <bool kAdd>
__global__ void __launch_bounds__(kThreads)
    merge_columns(const float* parts, i64 size, i64 part_step, i64 rows, i64 units, i64 unit, float* to, i64 to_stride) {
  my_turn();
  const i64 i = my_element(), n = units * unit;
  if (i >= rows * n) return;
  const i64 row = i / n, c = i % n, r = ((c / unit + 1) * size - 1) / units, begin = r * units / size * unit,
            width = (r + 1) * units / size * unit - begin;
  const float v = parts[r * part_step + row * width + c - begin];
  to[row * to_stride + c] = kAdd ? v + to[row * to_stride + c] : v;
}

__global__ void __launch_bounds__(kThreads) add_ranks(const std::uint64_t* parts, i64 size, i64 n, std::uint64_t* values) {
  my_turn();
  const i64 i = my_element();
  if (i >= n) return;
  std::uint64_t sum = 0;
  for (i64 r = 0; r < size; ++r) sum += parts[r * n + i];
  values[i] = sum;
}

}  // namespace

void gather_columns(const Exchange& e, const float* mine, i64 rows, i64 units, i64 unit, float* to, i64 to_stride, bool add,
                    Stream stream) {
  const i64 size = e.group->size(), step = rows * e.group->largest_part_of(units) * unit;
  if (step > e.most) throw Error(ErrorKind::kInternal, "internal error: an exchange is larger than its room");
  e.group->all_gather(mine, e.parts, step * 4, stream);
  launch(add ? merge_columns<true> : merge_columns<false>, {blocks_for(rows * units * unit, kThreads), kThreads}, stream, e.parts, size,
         step, rows, units, unit, to, to_stride);
}
void sum_over_ranks(Group& group, std::uint64_t* values, i64 n, std::uint64_t* room, Stream stream) {
  group.all_gather(values, room, n * 8, stream);
  launch(add_ranks, {blocks_for(n, kThreads), kThreads}, stream, room, group.size(), n, values);
}
void embed(const float* table, i64 d, const i64* ids, i64 rows, float* x, Stream stream) {
  launch(embed_rows, {blocks_for(rows * d, kThreads), kThreads}, stream, table, d, ids, rows, x);
}
void rms_norm(const float* x, i64 x_stride, i64 rows, i64 n, const float* w, float eps, float* y, i64 y_stride, Stream stream) {
  launch(norm_rows, {blocks_for(rows, kRowsOfBlock), kThreads}, stream, x, x_stride, rows, n, w, eps, y, y_stride);
}
void swiglu(const float* wide, i64 rows, i64 F, float* act, Stream stream) {
  launch(swiglu_rows, {blocks_for(rows * F, kThreads), kThreads}, stream, wide, rows, F, act);
}
void copy_columns(const float* from, i64 from_stride, i64 rows, i64 d, float* to, i64 to_stride, Stream stream) {
  launch(copy_rows, {blocks_for(rows * d, kThreads), kThreads}, stream, from, from_stride, rows, d, to, to_stride);
}

}  // namespace specstate::runtime::cuda
