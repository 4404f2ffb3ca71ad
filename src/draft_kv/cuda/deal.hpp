#pragma once
// Who multiplies which columns. Plain arithmetic, so that a test without a GPU can look at it.
#include "core/numeric.hpp"

namespace specstate::draft_kv::cuda {

/// Of few_rows: layer by layer. The first `heads` places of a layer have a head of K and width - 4 quarters of V (32 columns) each, the others up to `width` quarters of V. So a
/// place's columns lie in two pieces, of 128 and of 32, that one box each brings. (A place whose quarters lie here and there, before and behind a layer's K, needs five boxes a
/// stage; its cluster ended 2 us after all others.)
struct LayerPlaces {
  int heads = 1, width = 4, in_layer = 1, used = 0;
  float per_layer = 1;  // 1 / in_layer

  constexpr LayerPlaces() = default;
  constexpr LayerPlaces(int layers, int n, int w) : heads(n), width(w) {
    in_layer = n + (n * (8 - w) + w - 1) / w, used = layers * in_layer;
    per_layer = 1.0f / static_cast<float>(in_layer);
  }
  /// As wide as makes the fewest rounds of clusters x columns.
  static constexpr LayerPlaces of(int layers, int n, int clusters) {
    const auto cost = [&](int w) { return w * ((LayerPlaces(layers, n, w).used + clusters - 1) / clusters); };
    const int w = cost(4) < cost(5) ? 4 : 5;
    return {layers, n, cost(6) < cost(w) ? 6 : w};
  }

  /// Of pair_rows: 5 quarters, or 6 where they make fewer rounds.
  static constexpr LayerPlaces of_pairs(int layers, int n, int clusters) {
    const LayerPlaces a(layers, n, 5), b(layers, n, 6);
    const auto rounds = [&](const LayerPlaces& p) { return (p.used + clusters - 1) / clusters; };
    return 5 * rounds(a) <= 6 * rounds(b) ? a : b;
  }

  /// What one place has: a head of K (-1: none), counted with those of V through all layers, `count` quarters of V from number v on, counted through all layers' V, and where
  /// these columns are in the weights: 128 from `wide` on (what is not the place's is nobody's), and 32 from `narrow` on (-1: none).
  struct Place {
    int head, v, count, wide, narrow;
  };
  SPECSTATE_HD constexpr Place operator[](int place) const {
    // place / in_layer for place < 2^20: half of a unit is further from both neighbours than the product's error
    const int layer = static_cast<int>((static_cast<float>(place) + 0.5f) * per_layer), i = place - layer * in_layer;
    const int column = layer * heads * 256, of_v = column + heads * 128;
    if (i < heads) {
      const int quarter = i * (width - 4);
      return {layer * 2 * heads + i, layer * 4 * heads + quarter, width - 4, column + 128 * i, width > 4 ? of_v + 32 * quarter : -1};
    }
    const int quarter = heads * (width - 4) + (i - heads) * width, left = 4 * heads - quarter, count = left < width ? left : width;
    return {-1, layer * 4 * heads + quarter, count, of_v + 32 * quarter, count > 4 ? of_v + 32 * (quarter + 4) : -1};
  }
};

/// Of bulk_rows: `slots` places of up to `width` quarters each: a place has at most one head of K, and then quarters of V, which are counted through all layers. Heads of 64: places
/// of four quarters in the order of heads.
struct Places {
  int k_heads = 0, slots = 0, width = 0;
  float per_head = 0;  // 1 / heads

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
};

}  // namespace specstate::draft_kv::cuda
