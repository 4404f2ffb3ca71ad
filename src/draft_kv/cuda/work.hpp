#pragma once
// Which blocks of bulk_rows multiply what. Plain arithmetic, so that a test without a GPU can look at it.
//
// Blocks work in pairs: a "block" here is a pair of them (a cluster), and a row tile the two tiles of 128 rows that they multiply by the same weights.
// The product is row_tiles x places tiles (deal.hpp), each a number of runs (problem.hpp) of features. Tile t is the block's of number t % blocks, in groups of kGroupPairs row
// tiles, so that their rows and the weights stay in L2; in a group the places outside. Where the last round of tiles would leave most blocks idle, each of its tiles is shared by
// 2 to 4 blocks that stand side by side: by their runs. Every block but the first of a tile adds its own to what the block before hands on, and the last one finishes. It may
// keep two runs apart until then (its accumulators and its sums), so nobody waits in the middle, if no block but the first has more than two.
// Where it would leave a third of them idle, three blocks share two tiles: the first and the last have most of a tile each, the one in the middle the first runs of the last one's
// tile, and then the last runs of the first one's.
// Nobody waits for a block of a higher number.
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

/// The pieces of one block, in order. A piece that does not end with the tile's last run is handed on, as number given(); one that does not begin with the first is added to number
/// taken(), of the block before.
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
    if (share && 2 * left > blocks && left / 2 * 3 + left % 2 * 2 <= blocks && runs >= 3) w.threes_ = left / 2, w.parts_ = 2;
    const int in_threes = 3 * w.threes_;
    w.pieces = block < in_threes ? rounds + 1 + (block % 3 == 1) : rounds + (block - in_threes < (left - 2 * w.threes_) * w.parts_);
    return w;
  }
  /// The runs of piece i.
  struct Range {
    int begin, end;
  };
  SPECSTATE_HD constexpr Range range(int i) const {
    if (i < rounds_) return {0, runs};
    if (block < 3 * threes_) {
      const int third = runs / 3, place = block % 3;
      return place == 0     ? Range{0, runs - third}
             : place == 2   ? Range{third, runs}
             : i == rounds_ ? Range{0, third}
                            : Range{runs - third, runs};
    }
    const int part = (block - 3 * threes_) % parts_, first = first_runs(parts_, runs), later = later_runs(parts_, runs);
    return {part ? first + (part - 1) * later : 0, first + part * later};
  }
  SPECSTATE_HD constexpr int given() const {
    const int t = block / 3, beyond = block - 3 * threes_;
    return beyond < 0 ? 2 * t + (block - 3 * t) : 2 * threes_ + beyond - beyond / parts_;
  }
  SPECSTATE_HD constexpr int taken() const { return given() - 1; }
  SPECSTATE_HD constexpr Piece piece(int i) const {
    const int beyond = block - 3 * threes_;
    int t = i * blocks + block;
    if (i >= rounds_)
      t = rounds_ * blocks +
          (beyond >= 0 ? 2 * threes_ + beyond / parts_ : block / 3 * 2 + (block % 3 == 2 || (block % 3 == 1 && i == rounds_)));
    const Range range = this->range(i);
    const int group_size = kGroupPairs * places, g = t / group_size, rest = t - g * group_size;
    const int left = row_tiles - g * kGroupPairs, in_group = left < kGroupPairs ? left : kGroupPairs, column = rest / in_group;
    return {g * kGroupPairs + rest - column * in_group, column, range.begin, range.end};
  }

  int rounds_ = 0, parts_ = 1,
      threes_ = 0;  // of whole tiles; of the round after: blocks that share a tile, and before these, threes that share two
};

}  // namespace specstate::draft_kv::cuda
