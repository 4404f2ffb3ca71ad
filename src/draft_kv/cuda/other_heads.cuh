#pragma once
// Heads that no epilogue knows: of other widths than 64 and 128, V of another width than K, rotary widths that are no power of two. The tensor cores make their projection as they make
// target features (few_rows<0>, many_features: 8 runs, those of either half added apart), with the bias, rounded, some rows and layers at a time into the workspace; finish_heads reads it back.
#include "draft_kv/cuda/any_norm_rope.cuh"
#include "draft_kv/cuda/many_rows.cuh"

namespace specstate::draft_kv::cuda {

inline constexpr int kOtherThreads = 256, kOtherWarps = kOtherThreads / 32;

struct OtherShape {
  const std::uint16_t* projected;  // [rows, layers of the launch, N D + N Dv] of Io
  const Row* list;  // made by plan_kernel: row i of what is projected is row i of it. Or null: up to kFewRows rows, projected as they lie
  const int* list_count;
  AnyNormRope norm_rope;
  int v_head_dim;
};

/// A warp a head of a row.
template <class Io>
__global__ void __launch_bounds__(kOtherThreads) finish_heads(const __grid_constant__ Problem p, const __grid_constant__ OtherShape s) {
  extern __shared__ float heads[];  // [kOtherWarps][widest head]
  __shared__ struct {
    Row list[kFewRows];
    int bucket[2 * kFewRows], warp_count[kOtherWarps];
  } few;
  int count = 0;
  if (!s.list)  // slots and positions were there before the product began
    count = plan_rows<kOtherThreads, 1, 2 * kFewRows>(p.rows, few.list, few.bucket, few.warp_count, blockIdx.x == 0);
  ptx::wait_for_previous();
  if (s.list) count = *s.list_count;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = s.norm_rope.head_dim;
  const int of_row = 2 * p.heads * p.layers;
  const std::int64_t layer_columns = static_cast<std::int64_t>(p.heads) * (dim + s.v_head_dim);
  float* const x = heads + warp * max(dim, s.v_head_dim);
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kOtherWarps + warp; i < static_cast<std::int64_t>(count) * of_row;
       i += static_cast<std::int64_t>(gridDim.x) * kOtherWarps) {
    const int at = static_cast<int>(i / of_row);
    const Head head = head_of(static_cast<int>(i - static_cast<std::int64_t>(at) * of_row), p.heads);
    const Row row = s.list ? s.list[at] : few.list[at];
    const int channels = head.is_v ? s.v_head_dim : dim;
    const auto* const from = s.projected + (static_cast<std::int64_t>(s.list ? at : row.row) * p.layers + head.layer) * layer_columns +
                             static_cast<std::int64_t>(head.is_v ? p.heads : 0) * dim + static_cast<std::int64_t>(head.index) * channels;
    for (int c = lane; c < channels; c += 32) x[c] = core::to_float(Io{from[c]});
    __syncwarp();
    if (!head.is_v) norm_rope(s.norm_rope, p.first_layer + head.layer, row.position, x, lane);
    const LayerPool& pool = p.target[head.is_v][head.layer].pool;
    const std::int64_t offset = pool_offset(pool, row.slot, head.index);
    const float scale = scale_of(p, head);
    for (int c = lane; c < channels; c += 32)
      store_channel(pool.data, head.is_v ? p.v_dtype : p.k_dtype, offset + c * pool.channel_stride, scale,
                    head.is_v ? x[c] : round_to(s.norm_rope.io, x[c]));
    __syncwarp();
  }
}

}  // namespace specstate::draft_kv::cuda
