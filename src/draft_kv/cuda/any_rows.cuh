#pragma once
// Any shape, dtype and stride, without tensor cores: what many_rows does not take (float32, head dims other than 64 and 128, odd
// widths, strided features). The projection is one fused multiply-add chain over the features in rising order, the CPU's, so V is equal to the CPU's to the bit.
//
// A block makes one head of 16 rows: 256 threads, each four columns of one row at a time, features and weights by way of shared memory as float32, the
// finished head in shared memory; then a warp a row for the epilogue.
#include "draft_kv/cuda/any_norm_rope.cuh"

namespace specstate::draft_kv::cuda {

inline constexpr int kAnyThreads = 256, kAnyRows = 16, kAnyColumns = 64, kAnyDepth = 32;

struct AnyShape {
  TensorView ctx, weight, bias;  // [T, hidden], [L, C, hidden], [L, C]
  AnyNormRope norm_rope;
  int v_head_dim;
  const Row* list;  // or null
  const int* list_count;
  bool listed;  // row i of ctx is row i of the list
};
struct AnyShared {
  float x[kAnyRows][kAnyDepth + 1], w[kAnyColumns][kAnyDepth + 1];
  Row list[kAnyThreads * 4];
  int bucket[2 * kAnyThreads * 4], warp_count[kAnyThreads / 32];
};

/// Several values whose loads are in flight together; `where` says whether there is a u-th, and at which element (else it is 0).
template <int kCount, class Where>
__device__ __forceinline__ void values_at(const void* data, DType dtype, float (&to)[kCount], Where where) {
  const auto all = [&](auto read) {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      std::int64_t at = 0;
      to[u] = where(u, at) ? read(at) : 0.0f;
    }
  };
  if (dtype == DType::kBFloat16)
    all([&](std::int64_t i) { return core::to_float(static_cast<const core::bfloat16*>(data)[i]); });
  else if (dtype == DType::kFloat32)
    all([&](std::int64_t i) { return static_cast<const float*>(data)[i]; });
  else
    all([&](std::int64_t i) { return value_at(data, dtype, i); });
}

/// The block's rows are kAnyRows of the list from blockIdx.x * kAnyRows on, its head is blockIdx.y.
__global__ void __launch_bounds__(kAnyThreads) any_rows(const __grid_constant__ Problem p, const __grid_constant__ AnyShape s) {
  extern __shared__ unsigned char shared_memory[];
  auto& m = *reinterpret_cast<AnyShared*>(shared_memory);
  float* const out = reinterpret_cast<float*>(shared_memory + sizeof(AnyShared));  // [kAnyRows][channels]
  ptx::wait_for_previous();
  const Row* list = s.list;
  int count;
  if (list) {
    count = *s.list_count;
  } else {
    list = m.list;
    count = plan_rows<kAnyThreads, 4, 2 * kAnyThreads * 4>(p.rows, m.list, m.bucket, m.warp_count, blockIdx.x == 0 && blockIdx.y == 0);
  }
  const int first = blockIdx.x * kAnyRows, rows = min(count - first, kAnyRows);
  if (rows <= 0) return;
  const Head head = head_of(blockIdx.y, p.heads);
  const int layer = p.first_layer + head.layer, dim = s.norm_rope.head_dim, channels = head.is_v ? s.v_head_dim : dim;
  const std::int64_t column = head.is_v ? static_cast<std::int64_t>(p.heads) * dim + static_cast<std::int64_t>(head.index) * channels
                                        : static_cast<std::int64_t>(head.index) * channels;
  const int thread = threadIdx.x, row = thread / 16, quarter = thread % 16;
  const std::int64_t hidden = s.ctx.sizes[1];
  for (int c0 = 0; c0 < channels; c0 += kAnyColumns) {
    float sum[4] = {}, x_ahead[kAnyRows * kAnyDepth / kAnyThreads], w_ahead[kAnyColumns * kAnyDepth / kAnyThreads];
    // The next values are on their way while these are multiplied: few rows are a chain of latencies.
    const auto fetch = [&](std::int64_t k0) {
      const int k = thread % kAnyDepth, line = thread / kAnyDepth;
      constexpr int kLines = kAnyThreads / kAnyDepth;
      values_at(s.ctx.data, s.ctx.dtype, x_ahead, [&](int u, std::int64_t& at) {
        const int r = line + u * kLines;
        if (r >= rows || k0 + k >= hidden) return false;
        at = (s.listed ? first + r : p.rows.first + list[first + r].row) * s.ctx.strides[0] + (k0 + k) * s.ctx.strides[1];
        return true;
      });
      values_at(s.weight.data, s.weight.dtype, w_ahead, [&](int u, std::int64_t& at) {
        const int c = c0 + line + u * kLines;
        if (c >= channels || k0 + k >= hidden) return false;
        at = layer * s.weight.strides[0] + (column + c) * s.weight.strides[1] + (k0 + k) * s.weight.strides[2];
        return true;
      });
    };
    fetch(0);
    for (std::int64_t k0 = 0; k0 < hidden; k0 += kAnyDepth) {
      const int depth = static_cast<int>(min(hidden - k0, static_cast<std::int64_t>(kAnyDepth)));
      __syncthreads();
#pragma unroll
      for (int u = 0; u < kAnyRows * kAnyDepth / kAnyThreads; ++u)
        m.x[thread / kAnyDepth + u * (kAnyThreads / kAnyDepth)][thread % kAnyDepth] = round_to(s.norm_rope.io, x_ahead[u]);
#pragma unroll
      for (int u = 0; u < kAnyColumns * kAnyDepth / kAnyThreads; ++u)
        m.w[thread / kAnyDepth + u * (kAnyThreads / kAnyDepth)][thread % kAnyDepth] = w_ahead[u];
      __syncthreads();
      if (k0 + kAnyDepth < hidden) fetch(k0 + kAnyDepth);
      for (int k = 0; k < depth; ++k)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] = fmaf(m.x[row][k], m.w[quarter + 16 * j][k], sum[j]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c = c0 + quarter + 16 * j;
      if (c >= channels) continue;
      if (s.bias.given()) sum[j] += value_at(s.bias.data, s.bias.dtype, layer * s.bias.strides[0] + (column + c) * s.bias.strides[1]);
      out[row * channels + c] = round_to(s.norm_rope.io, sum[j]);
    }
  }
  __syncthreads();
  const int lane = thread % 32;
  const float scale = scale_of(p, head);
  const LayerPool& pool = p.target[head.is_v][head.layer].pool;
  for (int r = thread / 32; r < rows; r += kAnyThreads / 32) {
    const Row at = list[first + r];
    float* const x = out + r * channels;
    if (!head.is_v) norm_rope(s.norm_rope, layer, at.position, x, lane);
    const std::int64_t offset = pool_offset(pool, at.slot, head.index);
    for (int i = lane; i < channels; i += 32) {
      store_channel(pool.data, head.is_v ? p.v_dtype : p.k_dtype, offset + i * pool.channel_stride, scale,
                    head.is_v ? x[i] : round_to(s.norm_rope.io, x[i]));
    }
  }
}

/// The product of target features, kAnyRows rows x kAnyColumns columns a block: rounded, into the dense `context`.
__global__ void __launch_bounds__(kAnyThreads) any_features(std::int64_t first_row, const TensorView x, const TensorView weight,
                                                            const TensorView context, const Row* list, const int* count) {
  __shared__ float xs[kAnyRows][kAnyDepth + 1], ws[kAnyColumns][kAnyDepth + 1];
  ptx::wait_for_previous();
  const int first = blockIdx.x * kAnyRows, rows = min(*count - first, kAnyRows);
  if (rows <= 0) return;
  const std::int64_t c0 = static_cast<std::int64_t>(blockIdx.y) * kAnyColumns, columns = context.sizes[1], features = x.sizes[1];
  const int thread = threadIdx.x, row = thread / 16, quarter = thread % 16;
  float sum[4] = {};
  for (std::int64_t k0 = 0; k0 < features; k0 += kAnyDepth) {
    const int depth = static_cast<int>(min(features - k0, static_cast<std::int64_t>(kAnyDepth)));
    __syncthreads();
    for (int i = thread; i < kAnyRows * kAnyDepth; i += kAnyThreads) {
      const int r = i / kAnyDepth, k = i % kAnyDepth;
      xs[r][k] = r < rows && k < depth
                     ? round_to(context.dtype,
                                value_at(x.data, x.dtype, (first_row + list[first + r].row) * x.strides[0] + (k0 + k) * x.strides[1]))
                     : 0.0f;
    }
    for (int i = thread; i < kAnyColumns * kAnyDepth; i += kAnyThreads) {
      const int c = i / kAnyDepth, k = i % kAnyDepth;
      ws[c][k] = c0 + c < columns && k < depth
                     ? value_at(weight.data, weight.dtype, (c0 + c) * weight.strides[0] + (k0 + k) * weight.strides[1])
                     : 0.0f;
    }
    __syncthreads();
    for (int k = 0; k < depth; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] = fmaf(xs[row][k], ws[quarter + 16 * j][k], sum[j]);
  }
  if (row >= rows) return;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (const std::int64_t c = c0 + quarter + 16 * j; c < columns) {
      store_channel(context.data, context.dtype, (first + row) * columns + c, 1.0f, round_to(context.dtype, sum[j]));
    }
}

/// A block a row of `context`, in place: its norm.
__global__ void __launch_bounds__(kAnyThreads) any_normalize(const TensorView context, const Values norm, float eps, const int* count) {
  __shared__ float part[kAnyThreads / 32];
  ptx::wait_for_previous();
  if (static_cast<int>(blockIdx.x) >= *count) return;
  const std::int64_t hidden = context.sizes[1], row = blockIdx.x * hidden;
  float squares = 0;
  for (std::int64_t i = threadIdx.x; i < hidden; i += kAnyThreads) {
    const float x = value_at(context.data, context.dtype, row + i);
    squares = fmaf(x, x, squares);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = part[0];
  for (int w = 1; w < kAnyThreads / 32; ++w) squares += part[w];
  const float s = norm_factor(squares, hidden, eps);
  for (std::int64_t i = threadIdx.x; i < hidden; i += kAnyThreads) {
    const float x = value_at(context.data, context.dtype, row + i) * s * value_at(norm.data, norm.dtype, i * norm.stride);
    store_channel(context.data, context.dtype, row + i, 1.0f, round_to(context.dtype, x));
  }
}

}  // namespace specstate::draft_kv::cuda
