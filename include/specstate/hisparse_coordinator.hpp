#pragma once
// The life of requests around the HiSparse swap: admission, staging to the host, growth, verify, acceptance, freeing. It owns the
// tables and the free lists; the KV buffers belong to the caller. Life cycle as in sglang's HiSparse coordinator, with the native
// swap state: rows never rotate, so one table of device rows serves all layers, and an accepted row stays where it was verified.
//
// How an engine drives it (one object a worker; layers are named by global id):
//
//   Coordinator c(config, buffers);                   // buffers[l]: host_cache, device_buffer (, _v) of local layer l
//   c.admit(r, prompt_tokens);                        // host rows for the prompt, device rows for good; throws if either is short
//   for each prefill chunk of n tokens:
//     c.reserve(r, n);                                // host rows for [length, length + n); nothing to do right after admit
//     for each layer: c.stage(layer, r, length, n, rows, pitch);   // colocated: copied to the host,
//                                                     // and resident where it fits
//     c.append(r, n);                                 // these positions are committed now
//   (direct: the rows are written to host rows c.host_row(r, position) by someone else, then c.append(r, n, Source::kHost))
//   for each step:
//     c.prepare_verify(requests, widths, locs);       // device rows for positions length .. length + width - 1: the draft window
//     for each layer:
//       write the window's rows to device_buffer rows locs (or c.write(layer, r, j, row));
//       an anchor layer:   c.swap(layer, params);     // top-k positions -> device rows; window positions are found by themselves
//       a follower layer:  c.follow(layer);           // same bytes moved for this layer; the anchor's device rows are valid here too
//       attention over the returned device rows
//     c.accept(requests, accepted);                   // the first accepted[i] window rows are backed up to the host and stand; the
//                                                     // others are forgotten. 0: all rejected
//   c.finish(r) or c.abort(r);                        // all rows go back to the free lists
//
// At every moment: no resident position >= length (outside a prepared window); in each group of layers a position sits in at most one
// slot and a slot's row holds its bytes; host rows of [0, length) are complete; every pool row is free or owned by one request.
// Errors are thrown before anything changes. Not thread-safe; calls on different coordinators are independent.
//
// On a GPU (device buffers there, host caches pinned, `CoordinatorConfig::tables` given) the tables live in GPU memory. Every call that
// touches them or rows takes a stream, enqueues its work there and returns; none waits, allocates GPU memory or reads it. Free lists, pages
// and what the caller said of lengths stay on the host. The calls of one coordinator are ordered by the caller: on one stream, or by
// events; follow and follow_all may run on a side stream that waits for the swap, if the anchor's next swap waits for them.
//
// Accepted counts that only the GPU knows: the same step in three parts, of which the middle one can be captured in a graph and replayed.
//   c.begin_step(requests, stream);                   // host: rows for `window` more positions than each may have by then
//   -- from here to close_step: one CUDA graph, whose tensors change between replays
//   c.open_step(batch, locs, stream);                 // windows of widths[b] positions at the lengths that the GPU knows
//   per layer: c.swap(...), c.follow(...), attention; the target's choice; acceptance
//   c.close_step(batch, accepted, stream);            // as accept
//   -- at any time later, perhaps some steps later, when the host has read the counts:
//   c.end_step(requests, accepted);                   // host: lengths. Enqueues nothing
#include <memory>
#include <span>
#include <vector>

#include "specstate/hisparse.hpp"

namespace specstate::hisparse {

struct CoordinatorConfig {
  std::int64_t requests = 0;     ///< R request slots
  std::int64_t hot = 0;          ///< H hot slots a request, >= top_k
  std::int64_t window = 0;       ///< W, most positions of a verify window
  std::int64_t tail = 0;         ///< P >= W tail slots a request, a ring over positions; 0: 2 * W. Positions that were accepted are found
                                 ///< there without a copy until a later window needs the slot
  std::int64_t scratch = 0;      ///< rows a request for calls that want more than H rows at once; max(0, S * K - H) is always enough
  std::int64_t context = 0;      ///< L, most positions of a request, an open window included
  std::int64_t top_k = 0;        ///< K; 0: not checked against hot
  std::int64_t page_size = 64;   ///< hot slots grow, and host rows are taken, by this many
  std::int64_t device_rows = 0;  ///< rows of the device pool that may be handed out; 0: all of the smallest device buffer
  std::int64_t host_rows = 0;    ///< rows of the host pool, whole pages are used; 0: all of the smallest host cache
  RowLayout layout = RowLayout::kLinear;
  std::int64_t first_layer = 0;  ///< global id of local layer 0 (pipeline parallelism)
  std::int64_t sm_budget = 0;    ///< CUDA: most SMs that swaps and followers' copies may occupy, 0: as many as help
  /// Global id of the layer whose selection a local layer uses: its own id for an anchor, a preceding one for a follower. Empty: all are anchors.
  std::vector<std::int64_t> anchor_of;
  /// On a GPU: uint8, at least `Coordinator::table_bytes` of memory of the device buffers' GPU, aligned to 64 bytes, kept by the caller.
  TensorView tables;
};

/// A step whose counts are where the tables are.
struct StepBatch {
  TensorView requests;       ///< [B] int32 or int64, distinct
  TensorView widths;         ///< [B] int32 or int64, 0 to window positions, no more than the context has left
  TensorView num_real_reqs;  ///< [1] int32, rows from there on are padding; not given: all rows are real
};

enum class RequestState : std::uint8_t { kFree, kActive, kVerifying, kRetracted };

/// Totals since construction. On a GPU only what the host knows: `swaps` counts padded rows too, hits, misses and what they moved are in the
/// tensors that each swap is given.
struct CoordinatorStats {
  std::int64_t swaps = 0;            ///< anchor calls times real rows
  std::int64_t unique_hits = 0;      ///< distinct positions that were resident
  std::int64_t unique_misses = 0;    ///< distinct positions that were not
  std::int64_t unserved = 0;         ///< misses for which no row was left (their answer was -1)
  std::int64_t bytes_to_device = 0;  ///< host -> device by swaps and replays
  std::int64_t bytes_to_host = 0;    ///< backups
};

class SPECSTATE_API Coordinator {
 public:
  /// `layers`: buffers of each local layer, kept alive by the caller, all apart from each other (they may be woven into one array), all on the
  /// CPU or all on one GPU with pinned host caches. A row may have another size in each layer.
  /// Memory of the tables: about requests * (anchors * (2..4 bytes * L + 8 bytes * H) + 8 bytes * L).
  Coordinator(const CoordinatorConfig& config, std::span<const KvBuffers> layers, Stream stream = {});
  /// Bytes of `CoordinatorConfig::tables` for so many local layers on a GPU.
  static std::int64_t table_bytes(const CoordinatorConfig& config, std::int64_t layers);
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // ------------------------------------------------------------------------------------------------------ admission
  /// Would `admit` succeed?
  bool can_admit(std::int64_t tokens) const;
  /// Takes the free request slot `request` with device rows for hot, tail and scratch and host rows for `tokens` positions. Length 0.
  void admit(std::int64_t request, std::int64_t tokens, Stream stream = {});
  /// Host rows for `count` more positions than are committed.
  void reserve(std::int64_t request, std::int64_t count, Stream stream = {});
  /// Copies rows of positions [position, position + count) of one layer to their host rows, in order. Not visible before `append`. `rows`: count
  /// rows, `pitch` bytes apart, where the tables are, not from the layer's host cache; `rows_v` for a second pair.
  void stage(std::int64_t layer, std::int64_t request, std::int64_t position, std::int64_t count, const void* rows, std::int64_t pitch,
             const void* rows_v = nullptr, std::int64_t pitch_v = 0, Stream stream = {});
  /// The same with rows as a tensor [count, ...], each row dense.
  void stage(std::int64_t layer, std::int64_t request, std::int64_t position, const TensorView& rows, const TensorView& rows_v = {},
             Stream stream = {});
  enum class Source : std::uint8_t {
    kStaged,  ///< every layer was staged; positions below hot become resident in the slots of their number
    kHost,    ///< host rows were filled by others; the same, but only if the whole request fits the hot slots, else nothing is loaded
  };
  /// Commits `count` positions: length += count.
  void append(std::int64_t request, std::int64_t count, Source source = Source::kStaged, Stream stream = {});
  /// Host row of a position below length or reserved.
  std::int64_t host_row(std::int64_t request, std::int64_t position) const;
  /// The host pages of a request, in order: position p has row pages[p / page_size] * page_size + p % page_size. For whoever reads or
  /// fills many rows (a prefill that attends to what it staged, a remote writer). Until the next call that is not const.
  std::span<const std::int64_t> host_pages(std::int64_t request) const;

  // --------------------------------------------------------------------------------------------------------- a step
  /// Opens a window of widths[i] >= 1 positions at the end of each request. `locs` (optional): out [B, >= max width] int32, the device
  /// rows of the window; -1 beyond a request's width.
  void prepare_verify(std::span<const std::int64_t> requests, std::span<const std::int64_t> widths, const TensorView& locs = {},
                      Stream stream = {});
  /// Device row of window position j.
  std::int64_t verify_loc(std::int64_t request, std::int64_t j) const;
  /// Copies one row, not from the layer's device buffer, into window position j of one layer.
  void write(std::int64_t layer, std::int64_t request, std::int64_t j, const void* row, const void* row_v = nullptr, Stream stream = {});
  /// The same with a dense tensor of a row's bytes.
  void write(std::int64_t layer, std::int64_t request, std::int64_t j, const TensorView& row, const TensorView& row_v = {},
             Stream stream = {});
  /// Swap of an anchor layer. Of `params` the selection, lengths, requests and outputs are used; tables, buffers, plan and state are the
  /// coordinator's, and what the call writes lies apart from all of them and from the buffers of every layer. The copies stay owed to each
  /// follower until it follows, whatever becomes of other requests; what is owed when round 0 starts anew, or when a request ends,
  /// is copied then. On a GPU rows whose request holds no rows are answered by -1.
  /// `round`: 0, or the next one of plan_rounds. A selection [B, K] counts as one step ([B, 1, K], seq_lens [B]).
  void swap(std::int64_t layer, const SwapInParams& params, std::int64_t round = 0, Stream stream = {});
  /// The copies of its anchor's swap for a follower layer, once each; with several rounds, round by round in the same order.
  void follow(std::int64_t layer, std::int64_t round = 0, Stream stream = {});
  /// The same for all followers of an anchor, in one launch.
  void follow_all(std::int64_t anchor, std::int64_t round = 0, Stream stream = {});
  /// Cuts the steps of a selection into rounds whose positions fit the rows of a request at once: round_of [B, S] int32. Returns the
  /// number of rounds; one if S * K <= hot + scratch, as it must be on a GPU, where round_of is left alone. A caller that gets more swaps and attends round by round, with the other steps' tokens
  /// replaced by -1.
  std::int64_t plan_rounds(std::int64_t layer, const SwapInParams& params, const TensorView& round_of) const;
  /// Ends the window of each request: its first accepted[i] rows (0..width) are backed up to the host and committed; a position below hot
  /// moves to the hot slot of its number if that is free; the rest of the window is forgotten.
  void accept(std::span<const std::int64_t> requests, std::span<const std::int64_t> accepted, Stream stream = {});

  // ---------------------------------------------------------------------- a step whose counts are where the tables are
  /// Host rows and hot slots for `window` positions beyond every one that each request may have when all steps that were begun are done.
  /// Copies that followers owe are done here, so that a captured step, which holds its own followers' copies too, can be replayed at any time.
  /// Several steps may be under way; until the last has ended, the request is kVerifying and only steps, finish and abort take it.
  void begin_step(std::span<const std::int64_t> requests, Stream stream = {});
  /// Opens the windows. `locs` as in prepare_verify. Can be captured. On a GPU a row with a bad id or width is left alone.
  void open_step(const StepBatch& batch, const TensorView& locs = {}, Stream stream = {});
  /// Ends them: `accepted` [B] int32 or int64, 0 to width. Can be captured.
  void close_step(const StepBatch& batch, const TensorView& accepted, Stream stream = {});
  /// Tells the host what the earliest step of each request that has not ended accepted. Enqueues nothing.
  void end_step(std::span<const std::int64_t> requests, std::span<const std::int64_t> accepted);

  // ------------------------------------------------------------------------------------------------------------ end
  /// Frees everything of a request.
  void finish(std::int64_t request, Stream stream = {});
  /// The same from any state, any number of times.
  void abort(std::int64_t request, Stream stream = {});
  /// Gives the device rows back and keeps the host rows; an open window is lost. `resume` takes device rows again.
  void retract(std::int64_t request, Stream stream = {});
  void resume(std::int64_t request, Stream stream = {});

  // --------------------------------------------------------------------------------------------------------- looking
  RequestState state(std::int64_t request) const;
  std::int64_t length(std::int64_t request) const;
  /// Most positions that a request may ever have: the context, or the host pool if that is smaller. Device rows do not bound it.
  std::int64_t max_length() const;
  std::int64_t free_device_rows() const;
  std::int64_t free_host_rows() const;
  const CoordinatorStats& stats() const;
  /// The tables of an anchor's group, for tests and tools: read only.
  SwapState tables(std::int64_t layer) const;
  /// [R, L] int64 (on a GPU int32) host rows, -1 none: read only.
  TensorView host_cache_locs() const;
  /// [R] int32 committed positions, where the tables are: read only.
  TensorView lengths() const;
  /// Copies of slot_tokens and slot_locs of the layer's group into dense tensors [R, H+P] int32 where the tables are.
  void copy_tables(std::int64_t layer, const TensorView& tokens, const TensorView& locs, Stream stream = {}) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace specstate::hisparse
