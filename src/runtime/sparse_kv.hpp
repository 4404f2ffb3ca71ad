#pragma once
// The compressed KV rows of all sparse-MLA layers of the engine: buffers on both sides and the selections of a step, around a
// hisparse::Coordinator, which owns the tables and the life of the requests.
//
//   prefill:  reserve -> per layer: stage -> append       rows go straight to the host, and those that fit become resident
//   a step:   open_window -> per layer: write, then at an anchor plan, then round by round: enter_round, attention -> commit
//
// A step selects more positions than the hot buffer has slots when many rows ask for different ones. Its rows are then served in
// rounds: as many rows at a time as fit, each round one swap and its own attention. Results do not depend on the cut, so no memory
// beyond the hot buffer is ever needed.
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/config.hpp"
#include "specstate/hisparse_coordinator.hpp"

namespace specstate::runtime {

/// The rows of one step: request `slots[b]` verifies `lens[b]` tokens at positions starts[b], starts[b] + 1, ...
struct Window {
  std::vector<int> slots, lens, starts;
  std::int64_t rows() const;
};

class SparseKv {
 public:
  /// `context`: positions a request can have; `window`: most rows of a request in one step; layers are named by their number in the model.
  SparseKv(const TargetConfig& config, int requests, int hot_slots, int window, int context);

  /// An empty request in this slot, whatever was there.
  void reset(int request);

  void reserve(int request, int count) { coordinator_->reserve(request, count); }
  /// `count` rows from `position` on, dense.
  void stage(int l, int request, int position, std::int64_t count, const std::uint16_t* rows);
  /// Of all layers the next `count` positions are staged.
  void append(int request, int count) { coordinator_->append(request, count); }
  /// A staged or committed row.
  const std::uint16_t* host_row(int l, int request, std::int64_t position) const;

  void open_window(const Window& window);
  /// Row j of a request's window.
  void write(int l, int request, int j, const std::uint16_t* row);
  /// Cuts the open window into rounds for anchor `l`. selected [rows][top_k], -1 behind counts[row].
  void plan(int l, const std::int32_t* selected, const std::int32_t* counts);
  int rounds(int l) const { return static_cast<int>(selections_[group(l)].rounds); }
  /// Makes the rows of a round resident in layer `l`: by a swap at an anchor, by replay at a follower.
  void enter_round(int l, int round);
  /// Window rows of a round.
  std::vector<int> rows_of(int l, int round) const;
  /// Where a row of the current round finds its `count` selected positions.
  void pointers(int l, int row, std::int64_t count, const std::uint16_t** out) const;
  /// Of the open window the first accept[b] rows stand.
  void commit(const std::vector<int>& accept);

  int row_values() const { return row_; }
  const hisparse::CoordinatorStats& stats() const { return coordinator_->stats(); }

 private:
  struct Layer {
    std::vector<std::uint16_t> host, device;  // [host rows, row], [device rows, row]
  };
  /// What an anchor selected for the open window: B requests of S steps, one step a window row.
  struct Selection {
    std::int64_t rounds = 0;
    std::vector<std::int32_t> tokens, locs;        // [B, S, top_k]
    std::vector<std::int32_t> seq_lens, round_of;  // [B, S]
  };
  std::size_t sparse(int l) const { return sparse_of_[static_cast<std::size_t>(l)]; }
  std::size_t group(int l) const { return sparse(anchor_of_[static_cast<std::size_t>(l)]); }
  hisparse::SwapInParams params(Selection& s);
  void log_selection(int l, const Selection& s) const;

  int top_k_, row_;
  std::vector<int> anchor_of_;          // [model layers]
  std::vector<std::size_t> sparse_of_;  // [model layers] the coordinator's number of a layer
  std::vector<Layer> layers_;           // [sparse layers]
  std::vector<Selection> selections_;   // [sparse layers], of anchors
  std::unique_ptr<hisparse::Coordinator> coordinator_;
  // The open window.
  std::vector<std::int64_t> ids_, widths_, place_;  // [B], [B], [rows] a row's number among the B * S steps
  std::vector<std::int32_t> slots_, ends_;          // [B], [rows] positions that a row sees
  std::int64_t steps_ = 0;
  std::vector<std::int32_t> masked_, answer_;  // [B, S, top_k]
};

}  // namespace specstate::runtime
