#pragma once
// HiSparse: sparse attention over a KV cache that lives in host memory, with a small hot buffer of rows on the device.
//
// Before a layer's sparse attention one swap receives the positions that its queries selected and returns, for each, a device
// row that holds that position's KV: resident positions as they are, missing ones copied from the host over the least recently
// used rows. The speculative form resolves all steps of a verify window at once and copies each missing position once. Shared
// index layers replay the recorded plan of copies on their own buffers. Idea and state: HiSparse of the sglang project
// (LMSYS 2026-04-10); what each call does exactly: src/hisparse/SEMANTICS.md.
//
// Words. "token": a position inside its request. "row": a row of a physical pool ("loc"). "slot": a column of a request's
// tables; columns 0..H-1 are hot slots, columns H..H+P-1 the tail, which holds rows that exist nowhere else yet (drafts).
// B batch rows, R request slots, S steps, K top-k, H hot slots, P tail slots, L positions a request can have,
// Nh host rows, Nd device rows. Rows may be strided in every tensor; all products are computed in 64 bits.
//
// The life of a request around these calls (admission, growth, acceptance, freeing) is `hisparse_coordinator.hpp`.
//
// Every function throws Error(kValue) naming the argument before anything is written; B = 0 does nothing. On the CPU backend
// the host and the device buffer are both CPU memory. Calls on disjoint state may run in parallel.
#include "specstate/stream.hpp"
#include "specstate/tensor.hpp"

namespace specstate::hisparse {

/// The most occurrences (steps * top-k) of one request in one call.
inline constexpr std::int64_t kMaxOccurrences = 65536;

/// "Take it from the tensors", for the sizes that sglang's calls spell out.
inline constexpr std::int64_t kInfer = INT64_MIN;

enum class RowLayout : std::uint8_t {
  kLinear,     ///< row r of a buffer is entry r of its first dimension
  kDsv4Paged,  ///< DeepSeek-V4 pages of 64 rows: 64 values of 576 bytes, 64 scales of 8 bytes, padding to 37440 bytes
};

/// The two ends of the copies. MLA and other single-buffer caches give the first pair only; a K-and-V cache gives both, and one
/// resolve moves both rows.
struct KvBuffers {
  TensorView host_cache;       ///< [Nh, ...] any dtype, each row dense (kDsv4Paged: dense pages)
  TensorView device_buffer;    ///< [Nd, ...] any dtype, rows of the same number of bytes
  TensorView host_cache_v;     ///< second pair, or not given
  TensorView device_buffer_v;  ///< second pair, or not given
};

/// The copies that a swap did, for `replay_plan`: row b holds miss_count[b] pairs, in the order of the misses; what lies beyond is
/// unspecified. All three or none.
struct MissPlan {
  TensorView miss_src;    ///< out [>=B, >=S*K] int64, host rows
  TensorView miss_dst;    ///< out [>=B, >=S*K] int32, device rows
  TensorView miss_count;  ///< out [>=B] int32, served misses; 0 for padded rows
};

// ---------------------------------------------------------------------------------------------------- native state

/// Sizes of a native swap state.
struct SwapShape {
  std::int64_t requests;  ///< R
  std::int64_t hot;       ///< H >= 1
  std::int64_t tail;      ///< P >= 0
  std::int64_t context;   ///< L >= 1
};

/// The native swap state of one layer (or of an anchor layer and its followers). Every row that the request owns is a hot slot and
/// can be a hit: there is no scratch and no rotation, slot_locs never changes in a swap. Memory belongs to the caller.
struct SwapState {
  TensorView slot_tokens;  ///< [R, H+P] int32, the token that each slot holds, -1 empty. The truth about residency
  TensorView slot_locs;    ///< [R, H+P] int32, the device row of each slot, -1 none. Written by the caller only
  TensorView slot_stamps;  ///< [R, H] int32, when a hot slot was last used: 2c for a row loaded by call c, 2c+1 for a hit
  TensorView token_slots;  ///< [R, L] int32 (int16 if H <= 32767): where a token was last seen. A hint that slot_tokens confirms
  TensorView clock;        ///< [R] int32, number of the request's last call
};

/// Bytes of a native state in one block (alignment 64). Uses int16 token_slots wherever H allows it.
SPECSTATE_API std::int64_t swap_state_bytes(const SwapShape& shape);
/// The views into such a block. Nothing is written.
SPECSTATE_API SwapState swap_state_view(const SwapShape& shape, void* memory, Device device = {});
/// Makes requests empty: no token resident, clock 0, hints cleared; slot_locs is left alone. `requests` [n] int32 or int64, n at most R,
/// or not given: all. The members of the state share no memory. Call it once for all before first use, and for a request whenever its slot gets a new occupant.
SPECSTATE_API void reset_swap_state(const SwapState& state, const TensorView& requests = {}, Stream stream = {});

// ------------------------------------------------------------------------------------------------------- operations

/// Swap-in of any number of steps with the native state.
///
/// A token is visible to step s if 0 <= token < seq_lens[b, s]. A visible token is answered by the first tail slot that holds it (if
/// token >= seq_lens[b, s] - P and that slot has a row), else by its hot slot, else it is a miss if it has a host row; everything
/// else gives -1. Distinct misses, in the order of their first occurrence (step by step), take the least recently used slots that no
/// step of this call hit; the rows of one call are thus all valid at once. Misses beyond the rows that are left get -1.
struct SwapInParams {
  TensorView top_k_tokens;      ///< [B, S, K] int32
  TensorView seq_lens;          ///< [B, S] int32 or int64, visible length of each step, its own newest token included
  TensorView req_pool_indices;  ///< [B] int32 or int64, distinct request slots
  TensorView num_real_reqs;     ///< [1] int32, rows from there on are padding; clamped to 0..B; not given: all rows are real
  TensorView host_cache_locs;   ///< [R, L] int64 or int32, host row of each token, < 0 none
  KvBuffers buffers;
  SwapState state;          ///< in/out
  TensorView scratch_locs;  ///< optional [R, C] int32: rows (>= 0) for misses that find no hot slot; forgotten after the call
  RowLayout layout = RowLayout::kLinear;
  TensorView top_k_device_locs;  ///< out [B, S, K] int32: device rows; -1 for invisible, unserved and padded entries
  MissPlan plan;                 ///< optional
  TensorView unique_misses;      ///< optional out [>=B] int32: distinct misses, served or not; 0 for padded rows
  TensorView unique_hits;        ///< optional out [>=B] int32: distinct tokens answered by hot or tail slots; 0 for padded rows
  bool skip_io = false;          ///< all bookkeeping, no bytes moved
  std::int64_t sm_budget = 0;    ///< CUDA: most SMs that the call may occupy beside other work, 0: as many as help
  /// Layers in lockstep that get the same rows of their own pools: as `replay_plan` of `plan`, which must be given, behind this call. On a GPU their
  /// rows are asked for as soon as the plan stands, while this layer's are still on their way.
  const KvBuffers* followers = nullptr;
  std::int64_t num_followers = 0;
};
SPECSTATE_API void swap_in(const SwapInParams& params, Stream stream = {});

/// Swap-in of one step with exact LRU, in the single-step state of sglang (which this operation shares).
///
/// seq_len <= H: slot t holds token t; nothing is moved. Else: token seq_len-1 is column H, never moved; the others are looked up in
/// the H hot slots; misses take the oldest slots in order. New order, oldest first: untouched slots, loaded slots, hit slots.
/// A token < 0 or >= seq_len, or one without a host row, gives -1. With `sparse_block_size` > 1 the selection names blocks of
/// that many tokens, and K below counts tokens.
struct SwapInSingleParams {
  TensorView top_k_tokens;          ///< [B, K] int32 ([B, K / sparse_block_size] block ids)
  TensorView device_buffer_tokens;  ///< in/out [R, >=H+1] int32
  TensorView host_cache_locs;       ///< [R, L] int64
  TensorView device_buffer_locs;    ///< [R, >=H+1] int32
  KvBuffers buffers;
  TensorView top_k_device_locs;           ///< out [B, K] int32; blocks: [B, >=K], columns beyond K are left alone
  TensorView req_pool_indices;            ///< [B] int32 or int64
  TensorView seq_lens;                    ///< [B] int32 or int64
  TensorView lru_slots;                   ///< in/out [R, H] int16 (int32 beyond 32767 slots), a permutation, oldest first
  std::int64_t item_size_bytes = kInfer;  ///< of flat pools; kInfer: the bytes of a row of host_cache, which all buffers then have
  std::int64_t num_top_k = kInfer;        ///< selected entries a row; kInfer: top_k_tokens' width
  std::int64_t hot_buffer_size = kInfer;  ///< H >= K; kInfer: lru_slots' width
  TensorView num_real_reqs;               ///< [1] int32, optional
  RowLayout layout = RowLayout::kLinear;
  MissPlan plan;  ///< optional
  std::int64_t sparse_block_size = 1;
  bool skip_io = false;
  std::int64_t sm_budget = 0;         ///< as in swap_in
  const char* op = "swap_in_single";  ///< the name that error texts use
  bool one_plan_stride = false;       ///< refuse plans whose row strides differ, as sglang does
};
SPECSTATE_API void swap_in_single(const SwapInSingleParams& params, Stream stream = {});

/// sglang's speculative swap inside sglang's own state tensors (HiSparseSpecState). Results as `swap_in`, except: padded rows give 0,
/// misses beyond the free hot slots land in scratch rows, and scratch_state[0, r] publishes the distinct misses.
struct SpecSwapParams {
  TensorView top_k_tokens;          ///< [B, S, K] int32
  TensorView device_buffer_tokens;  ///< in/out [R, H+P] int32
  TensorView host_cache_locs;       ///< [R, L] int64
  TensorView device_buffer_locs;    ///< in/out [R, H+P] int32 (never changed by this implementation)
  KvBuffers buffers;
  TensorView top_k_device_locs;  ///< out [B, S, K] int32
  TensorView req_pool_indices;   ///< [B] int64
  TensorView seq_lens;           ///< [B*S] int32
  TensorView cache_index;        ///< in/out [R, 2, Z] int64, kept valid for sglang's kernel, never trusted
  TensorView cache_policy;       ///< in/out [R+1, H] int32; its width is H, so R <= H
  TensorView scratch_locs;       ///< in/out [R, C] int32 (never changed by this implementation)
  TensorView scratch_state;      ///< in/out [R+1, >=max(4R, 5*S*K)] int32
  TensorView num_real_reqs;      ///< [1] int32
  MissPlan plan;                 ///< optional
  /// How many of sglang's limits stand: its documented contract (steps 2..4); also those of its compiled kernel; none.
  enum class Limits : std::uint8_t { kContract, kStrict, kNone } limits = Limits::kContract;
  std::int64_t sm_budget = 0;  ///< as in swap_in
};
SPECSTATE_API void swap_in_spec(const SpecSwapParams& params, Stream stream = {});

/// Replays rows 0..num_real_reqs-1 of a recorded plan on one or many follower layers, whose buffers are in lockstep with the anchor's.
/// Copies only. Entries beyond a row's miss_count are never read; entries with a negative miss_dst are skipped; any other bad row, also a negative miss_src, is an error on the CPU, skipped on a GPU.
struct ReplayPlanParams {
  TensorView miss_src;       ///< [>=B, M] int64
  TensorView miss_dst;       ///< [>=B, M] int32
  TensorView miss_count;     ///< [B] int32, each 0..M
  TensorView num_real_reqs;  ///< [1] int32, clamped to 0..B; not given: all rows
  const KvBuffers* followers = nullptr;
  std::int64_t num_followers = 0;
  std::int64_t item_size_bytes = kInfer;  ///< the same, for each host_cache
  RowLayout layout = RowLayout::kLinear;
  bool skip_io = false;
  std::int64_t sm_budget = 0;  ///< CUDA: most SMs that the copies may occupy, 0: as many as help
  const char* op = "replay_plan";
  bool one_plan_stride = false;  ///< refuse plans whose row strides differ, as sglang does
  /// Optional, in/out [num_followers] int32, dense or strided, 0 before the first use: the followers' rows come one follower behind the other, each to be
  /// awaited by `await_follower`. So one call beside the layers, on few SMs, serves a layer as soon as its own rows are there.
  TensorView arrived;
};
SPECSTATE_API void replay_plan(const ReplayPlanParams& params, Stream stream = {});

/// Work behind this call in `stream` finds the rows of one follower of a `replay_plan` that was given `arrived` there. The replay may be in another stream; it
/// has been called before this, and each of its followers is awaited once before the next replay with the same `arrived` (else an error on the CPU, undefined on a GPU). On a GPU one warp waits, so
/// kernels of the two streams must be able to run at the same time; after 20 seconds it gives up, which is an error of the launch. On the CPU a follower that has not
/// arrived, or a sign that no replay has set, is an error.
struct AwaitFollowerParams {
  TensorView arrived;         ///< in/out [num_followers] int32; that of the follower is 0 again afterwards
  std::int64_t follower = 0;  ///< 0..num_followers-1
};
SPECSTATE_API void await_follower(const AwaitFollowerParams& params, Stream stream = {});

/// For every layer l and entry i: the 584-byte row src_indices[i] of src[l] goes to row dst_indices[i] of dst[l], both DSv4-paged.
/// A dst is the src of its layer, whole, or lies apart from everything else. A destination named twice, or that is also a source of the same
/// buffer, is undefined.
struct TransferPagedParams {
  const TensorView* src = nullptr;  ///< num_layers tensors of whole pages (a multiple of 37440 bytes each, dense)
  const TensorView* dst = nullptr;
  std::int64_t num_layers = 0;
  TensorView src_indices;      ///< [N] int64 or int32
  TensorView dst_indices;      ///< [N] same dtype
  std::int64_t sm_budget = 0;  ///< as in replay_plan
};
SPECSTATE_API void transfer_paged(const TransferPagedParams& params, Stream stream = {});

/// The same by addresses: the caller vouches for them, so only negative indices can be refused.
struct TransferPagedPointersParams {
  TensorView src_ptrs;         ///< [num_layers] uint64 (or int64) addresses
  TensorView dst_ptrs;         ///< [num_layers] same
  TensorView src_indices;      ///< [N] int64
  TensorView dst_indices;      ///< [N] int64
  std::int64_t sm_budget = 0;  ///< as in replay_plan
};
SPECSTATE_API void transfer_paged_pointers(const TransferPagedPointersParams& params, Stream stream = {});

}  // namespace specstate::hisparse
