#pragma once
// The cached rows [c, kr] of the sparse-MLA layers: complete in a host store, a few of them in a hot buffer on the "device" (on this
// backend both are CPU memory), and moved between the two by specstate::hisparse alone.
//
// A request's life (spec section 6 of HiSparse, section 5.2 of the speculative loop):
//   prefill  rows wait in a staging area on the device; finish_prefill() copies them to the host, the hot buffer starts empty
//   window   open_window() gives each row of a step a tail slot; write() fills it, layer by layer; the host knows nothing of it
//   resolve  rows are cut into rounds whose distinct older positions fit the hot buffer (8 rows may want more than it holds);
//            each round is one swap_in at the anchor, and one replay of its recorded plan at every follower
//   commit   accepted rows are copied to the host; tail slots of rejected rows are cleared
// Tail slots form a ring over positions, so that the newest committed positions still hit there until a later window needs the slot.
// What a row reads never depends on where it was found: results are the same for every hot buffer of at least top_k slots.
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/config.hpp"
#include "specstate/hisparse.hpp"

namespace specstate::runtime {

struct SparseStats {
  std::int64_t hits = 0, misses = 0;   // distinct positions of each swap
  std::int64_t host_bytes_copied = 0;  // host -> device, all layers
};

/// The rows of one step: request `slots[b]` verifies `lens[b]` tokens at positions starts[b], starts[b] + 1, ...
struct Window {
  std::vector<int> slots, lens, starts;
  std::int64_t rows() const;
};

class SparseKv {
 public:
  /// `context`: positions a request can have; `window`: most rows of a request in one step.
  SparseKv(const TargetConfig& config, int requests, int hot_slots, int window, int context);

  void reset(int request);
  /// Prefill: appends a row of layer `l` (of the model) to the staging area; staged() finds it again.
  void stage(int l, int request, const std::uint16_t* row);
  const std::uint16_t* staged(int l, int request, std::int64_t position) const;
  /// Staging -> host, for the first `n` positions of all layers.
  void finish_prefill(int request, int n);

  void open_window(const Window& window);
  void write(int l, int request, int position, const std::uint16_t* row);
  /// Cuts the open window into rounds for anchor `l`. selected [rows][top_k] ascending, -1 behind counts[row].
  void plan(int l, const std::int32_t* selected, const std::int32_t* counts);
  int rounds(int l) const { return static_cast<int>(groups_[group_of_[static_cast<std::size_t>(l)]].rounds.size()); }
  /// Makes the rows of a round resident in layer `l`: by a swap at an anchor, by replay at a follower.
  void enter_round(int l, int round);
  /// Window rows of a round, and where its row i finds its counts[row] selected positions.
  const std::vector<int>& rows_of(int l, int round) const;
  void pointers(int l, int round, int i, std::int64_t count, const std::uint16_t** out) const;

  /// Of the open window the first accept[b] rows stand.
  void commit(const std::vector<int>& accept);

  /// Committed row of a layer, as the host has it.
  const std::uint16_t* host_row(int l, int request, int position) const;
  int row_values() const { return row_; }
  const SparseStats& stats() const { return stats_; }

 private:
  struct Layer {
    std::vector<std::uint16_t> host, device;          // [host rows, row], [requests * columns, row]
    std::vector<std::vector<std::uint16_t>> staging;  // [requests]
  };
  struct Round {
    std::vector<int> rows;  // numbers of window rows
    int requests = 0, steps = 0;
    std::vector<std::int64_t> place;         // of each row: its entry in locs, in units of top_k
    std::vector<std::int32_t> tokens, locs;  // [requests, steps, top_k]
    std::vector<std::int32_t> seq_lens;      // [requests, steps]
    std::vector<std::int32_t> slots;         // [requests]
    std::vector<std::int64_t> miss_src;      // [requests, steps * top_k]
    std::vector<std::int32_t> miss_dst, miss_count;
  };
  /// An anchor with its followers: one selection, one residency.
  struct Group {
    int anchor = 0;
    std::vector<std::uint8_t> memory;
    hisparse::SwapState state;
    std::vector<Round> rounds;
  };
  hisparse::KvBuffers buffers(int l);
  std::uint16_t* device_row(int l, std::int64_t loc) { return layers_[static_cast<std::size_t>(l)].device.data() + loc * row_; }
  std::int64_t tail_loc(int request, int position) const { return std::int64_t{request} * (hot_ + tail_) + hot_ + position % tail_; }
  std::int64_t host_place(int request, int position);
  void set_tail_token(int request, int position, std::int32_t token);

  const TargetConfig& config_;
  int requests_, hot_, tail_, context_, top_k_, row_;
  std::vector<Layer> layers_;          // [model layers], empty for KDA
  std::vector<std::size_t> group_of_;  // [model layers]
  std::vector<Group> groups_;
  std::vector<std::int64_t> host_locs_;  // [requests, context]
  std::vector<std::int64_t> free_pages_;
  Window window_;
  SparseStats stats_;
};

}  // namespace specstate::runtime
