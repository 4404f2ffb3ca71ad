#pragma once
// Which cluster of few_rows multiplies what. Plain arithmetic, so that a test without a GPU can look at it.
#include "core/numeric.hpp"

namespace specstate::draft_kv::cuda {

/// How the columns of a launch are dealt out to `slots` places of `width` quarters (32 columns) each: a place has at most one head of K, and then quarters of V, which are
/// counted through all layers. Heads of 64: places of four quarters in the order of heads.
struct Places {
  int k_heads = 0, slots = 0, width = 0;
  float per_head = 0;  // 1 / heads

  constexpr Places() = default;
  constexpr Places(int layers, int heads, int clusters) : k_heads(layers * heads), per_head(1.0f / static_cast<float>(heads)) {
    const int all = 8 * k_heads, passes = (all + 5 * clusters - 1) / (5 * clusters);
    slots = passes * clusters;
    width = (all + slots - 1) / slots;
    if (width < 4) width = 4;
  }
  /// As many places as that many quarters each need.
  static constexpr Places of_width(int layers, int heads, int width) {
    Places p;
    p.k_heads = layers * heads, p.per_head = 1.0f / static_cast<float>(heads);
    p.width = width, p.slots = (8 * p.k_heads + width - 1) / width;
    return p;
  }
  SPECSTATE_HD constexpr int v_begin(int slot) const {
    const int at = slot < k_heads ? slot * (width - 4) : k_heads * (width - 4) + (slot - k_heads) * width;
    return at < 4 * k_heads ? at : 4 * k_heads;
  }
  /// n / heads and n / (4 heads), for n < 2^20: half of a unit is further from both neighbours than the product's error.
  SPECSTATE_HD constexpr int by_heads(int n) const { return static_cast<int>((static_cast<float>(n) + 0.5f) * per_head); }
  SPECSTATE_HD constexpr int by_quarters(int n) const { return static_cast<int>((static_cast<float>(n) + 0.5f) * (0.25f * per_head)); }
  SPECSTATE_HD constexpr int v_count(int slot) const { return v_begin(slot + 1) - v_begin(slot); }
  /// Places that have any columns.
  SPECSTATE_HD constexpr int used() const {
    int n = k_heads;
    while (n < slots && v_count(n) > 0) ++n;
    return n;
  }
};

}  // namespace specstate::draft_kv::cuda
