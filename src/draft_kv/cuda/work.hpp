#pragma once
// Which blocks of bulk_rows multiply what. Plain arithmetic, so that a test without a GPU can look at it.
//
// Blocks work in pairs: a "block" here is a pair of them (a cluster), and a row tile the two tiles of 128 rows that they multiply by the same weights.
// The product is row_tiles x places tiles (deal.hpp), each a number of runs (problem.hpp) of features. Tile t is the block's of number t % blocks, in groups of kGroupPairs row
// tiles, so that their rows and the weights stay in L2; in a group the places outside. Where the last round of tiles would leave most blocks idle, each of its tiles is shared by
// 2 to 4 blocks that stand side by side: by their runs. Every block but the first of a tile adds its own to what the block before hands on, and the last one finishes. It may
// keep two runs apart until then (its accumulators and its sums), so nobody waits in the middle, if no block but the first has more than two. Nobody waits for a block of a
// higher number, and nothing comes after such a part.
#include <cstdint>

#include "core/numeric.hpp"

namespace specstate::draft_kv::cuda {

inline constexpr int kGroupTiles = 12, kGroupPairs = kGroupTiles / 2, kMostParts = 4;
inline constexpr int kTileRows = 128;
/// The first row of a tile: the last tile lies so that it ends with the last row (its first rows are the tile's before, too). Rows beyond the last, be it zeros of the copy engine or one
/// row many times, cost more than rows: 67 instead of 54 us at 144 rows.
SPECSTATE_HD constexpr int first_row_of(int row_tile, int count) {
  const int first = row_tile * kTileRows, last = count > kTileRows ? count - kTileRows : 0;
  return first < last ? first : last;
}

/// Some runs of one tile.
struct Piece {
  int row_tile, place, begin, end;
};

/// The pieces of one block, in order. Where piece.begin > 0, block - 1 has the runs before, and leaves them as part() - 1.
struct Work {
  int row_tiles, places, runs, block, blocks;
  int pieces = 0;

  SPECSTATE_HD static constexpr int later_runs(int parts, int runs) { return runs / parts < 2 ? 1 : 2; }
  SPECSTATE_HD static constexpr int first_runs(int parts, int runs) { return runs - (parts - 1) * later_runs(parts, runs); }

  /// `share`: may the tiles of the last round be shared?
  SPECSTATE_HD static constexpr Work of(int row_tiles, int places, int runs, int block, int blocks, bool share) {
    Work w{row_tiles, places, runs, block, blocks};
    const int tiles = row_tiles * places, rounds = tiles / blocks, left = tiles - rounds * blocks;
    w.rounds_ = rounds;
    for (int parts = 2; share && left > 0 && parts <= kMostParts && parts <= runs && left * parts <= blocks; ++parts)
      if (first_runs(parts, runs) < first_runs(w.parts_, runs)) w.parts_ = parts;
    w.pieces = rounds + (block < left * w.parts_);
    return w;
  }
  /// The runs of piece i.
  struct Range {
    int begin, end;
  };
  SPECSTATE_HD constexpr Range range(int i) const {
    if (i < rounds_) return {0, runs};
    const int part = block % parts_, first = first_runs(parts_, runs), later = later_runs(parts_, runs);
    return {part ? first + (part - 1) * later : 0, first + part * later};
  }
  /// The number of what this block hands on, of all.
  SPECSTATE_HD constexpr int part() const { return block - block / parts_; }
  SPECSTATE_HD constexpr Piece piece(int i) const {
    const bool last = i == rounds_;
    const int t = i * blocks + (last ? block / parts_ : block);
    const Range range = this->range(i);
    const int group_size = kGroupPairs * places, g = t / group_size, rest = t - g * group_size;
    const int left = row_tiles - g * kGroupPairs, in_group = left < kGroupPairs ? left : kGroupPairs, column = rest / in_group;
    return {g * kGroupPairs + rest - column * in_group, column, range.begin, range.end};
  }

  int rounds_ = 0, parts_ = 1;  // of whole tiles; blocks that share a tile of the round after
};

}  // namespace specstate::draft_kv::cuda
