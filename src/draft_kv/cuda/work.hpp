#pragma once
// Which block of bulk_rows multiplies what. Plain arithmetic, so that a test without a GPU can look at it.
//
// The product is row_tiles x head_tiles tiles, each a number of runs (problem.hpp) of features.
//   whole tiles   t = block, block + blocks, ...: groups of kGroupTiles row tiles, so that their rows and the weights stay in L2; in a group the columns outside.
//   dealt         Few row tiles would not fill the last round of blocks: 160 tiles of 256 rows on 132 multiprocessors are two rounds of which the second is nearly empty. So as
//                 many blocks as there are row tiles (a "set") do the same columns at the same time, and weights come from memory once; sets share out not tiles but units of
//                 runs, evenly. A share is the last units of one tile, whole tiles, and the first units of another. Those first units are done first and their sums are
//                 handed on to the set after this one, which takes them up in its last piece, long after (a share has at least as many units as a tile). Nobody waits for
//                 a block of a higher number, and nobody waits before its own sums are handed on.
#include <algorithm>
#include <cstdint>

#include "core/numeric.hpp"

namespace specstate::draft_kv::cuda {

inline constexpr int kGroupTiles = 12, kDealtTiles = 8;
inline constexpr int kTileRows = 128;
/// The first row of a tile: the last tile lies so that it ends with the last row (its first rows are the tile's before, too). Rows beyond the last, be it zeros of the copy engine or one
/// row many times, cost more than rows: 67 instead of 54 us at 144 rows.
SPECSTATE_HD constexpr int first_row_of(int row_tile, int count) {
  const int first = row_tile * kTileRows, last = count > kTileRows ? count - kTileRows : 0;
  return first < last ? first : last;
}

/// Some runs of one tile.
struct Piece {
  int row_tile, head_tile, begin, end;
};

/// The pieces of one block, in order. Of a tile of which several blocks have a part, block - row_tiles has the part before.
struct Work {
  int row_tiles, head_tiles, runs, block, blocks;
  int pieces = 0;
  int handed_on = 0;  // 1 if the first piece is

  /// `units` of a tile may be handed on apart; 0: whole tiles, each block by itself.
  SPECSTATE_HD static constexpr Work of(int row_tiles, int head_tiles, int runs, int block, int blocks, int units) {
    Work d{row_tiles, head_tiles, runs, block, blocks};
    if (row_tiles == 0) return d;
    if (units > 0 && row_tiles <= (kDealtTiles < blocks ? kDealtTiles : blocks)) {
      const int most = blocks / row_tiles, sets = most < head_tiles ? most : head_tiles;
      // Whole tiles where the longest share is hardly longer for it: handing on costs about half of a run.
      if ((head_tiles + sets - 1) / sets * runs <= (head_tiles * units + sets - 1) / sets * (runs / units) + 1) units = 1;
      const std::int64_t all = static_cast<std::int64_t>(head_tiles) * units;
      d.unit_ = runs / units, d.set_ = block / row_tiles;
      d.begin_ = static_cast<int>(d.set_ * all / sets) * d.unit_, d.end_ = static_cast<int>((d.set_ + 1) * all / sets) * d.unit_;
      if (d.set_ < sets)
        d.handed_on = d.end_ % runs > 0, d.pieces = d.handed_on + d.end_ / runs - (d.begin_ + runs - 1) / runs + (d.begin_ % runs > 0);
    } else {
      d.pieces = (row_tiles * head_tiles - block + blocks - 1) / blocks;
    }
    return d;
  }
  SPECSTATE_HD constexpr Piece piece(int i) const {
    if (unit_ > 0) {
      const int row_tile = block - set_ * row_tiles;
      if (i < handed_on) return {row_tile, end_ / runs, 0, end_ % runs};
      const int tile = (begin_ + runs - 1) / runs + i - handed_on;
      if (tile < end_ / runs) return {row_tile, tile, 0, runs};
      return {row_tile, begin_ / runs, begin_ % runs, runs};
    }
    const int t = block + i * blocks, group_size = kGroupTiles * head_tiles, g = t / group_size, rest = t - g * group_size;
    const int left = row_tiles - g * kGroupTiles, in_group = left < kGroupTiles ? left : kGroupTiles, column = rest / in_group;
    return {g * kGroupTiles + rest - column * in_group, column, 0, runs};
  }

  int unit_ = 0, set_ = 0, begin_ = 0, end_ = 0;  // runs in a unit; the share, in runs counted through all columns
};

}  // namespace specstate::draft_kv::cuda
