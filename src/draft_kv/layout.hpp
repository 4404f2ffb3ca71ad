#pragma once
// Every address of the draft-KV family, once, in 64 bits, on host and device.
#include <cstdint>
#include <utility>

#include "core/numeric.hpp"

namespace specstate::draft_kv {

/// One layer's K or V pool [slots, heads, channels]: base and strides in elements. Pools of different layers need not be of one block.
struct LayerPool {
  void* data;
  std::int64_t slot_stride, head_stride, channel_stride;
};

/// Element offset of (slot, head, channel 0) in a layer's pool.
SPECSTATE_HD inline std::int64_t pool_offset(const LayerPool& pool, std::int64_t slot, std::int64_t head) {
  return slot * pool.slot_stride + head * pool.head_stride;
}

/// One row of the call that reaches the pool.
struct WrittenRow {
  std::int64_t row, slot, position;
};

/// Compaction: is row (r, j) of a window written? `commit` is the row's commit length (rows without one pass the window's width).
SPECSTATE_HD inline bool is_written(std::int64_t slot, std::int64_t j, std::int64_t commit) { return slot >= 0 && j < commit; }

/// Output columns of the projection: per layer K head-major, then V head-major.
SPECSTATE_HD inline std::int64_t layer_columns(std::int64_t heads, std::int64_t head_dim, std::int64_t v_head_dim) {
  return heads * (head_dim + v_head_dim);
}
SPECSTATE_HD inline std::int64_t k_column(std::int64_t layer_width, std::int64_t layer, std::int64_t head, std::int64_t head_dim) {
  return layer * layer_width + head * head_dim;
}
SPECSTATE_HD inline std::int64_t v_column(std::int64_t layer_width, std::int64_t layer, std::int64_t heads, std::int64_t head_dim,
                                          std::int64_t head, std::int64_t v_head_dim) {
  return layer * layer_width + heads * head_dim + head * v_head_dim;
}

struct RotaryPair {
  std::int64_t first, second;
};
/// Channels that frequency i of `half` turns: split halves (NeoX) or neighbours. Its cosine is at table column i, its sine at half + i.
SPECSTATE_HD inline RotaryPair rotary_pair(std::int64_t i, std::int64_t half, bool is_neox_style) {
  return is_neox_style ? RotaryPair{i, i + half} : RotaryPair{2 * i, 2 * i + 1};
}

// ------------------------------------------------------------------------ how a GPU deals out the columns of a launch

/// Head number h of a launch (layers * 2 * N, per layer the K heads and then the V heads), taken apart.
struct Head {
  int layer, index;
  bool is_v;
};
SPECSTATE_HD inline Head head_of(int h, int heads) {
  const int layer = h / (2 * heads), rest = h - layer * 2 * heads;
  return {layer, rest >= heads ? rest - heads : rest, rest >= heads};
}

}  // namespace specstate::draft_kv
