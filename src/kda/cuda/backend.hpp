#pragma once
// What the files of this folder know of each other: the compiled forms of the kernels, and which one a call gets.
#include "cuda/launch.hpp"
#include "kda/args.hpp"
#include "specstate/export.hpp"

namespace specstate::kda::cuda {

/// Form of the recurrence, and value rows of the state that a lane holds (a CTA has 16 times as many).
struct Form {
  bool act_bf16, state_bf16;
  int K, rows;
  bool plain;  // see verify.cuh
};

struct VerifyKernel {
  void (*run)(VerifyCall, int block, int parts) = nullptr;
  std::size_t (*bytes)(int block) = nullptr;  // of shared memory
  int threads = 0;
};
/// Where a head's part of a tensor begins, in bytes: `first` a slot, a row or a token (as the tensor has them), `head` a value head or a key
/// head.
struct Place {
  char* base = nullptr;
  std::int64_t first = 0, head = 0;
};
/// kX, kWindow, kWindows and kTaps are three each: of q, k and v.
enum {
  kX = 0,
  kWindow = 3,
  kWindows = 6,
  kTaps = 9,
  kBias = 12,
  kState,
  kSnapshots,
  kG,
  kGate,
  kOut,
  kRawK,
  kRawV,
  kRingG,
  kRingBeta,
  kLogit,
  kPlaces
};
/// To divide by what the host knows, without a division.
struct Divisor {
  unsigned by = 1, inverse = 0xFFFFFFFFu;  // 2^32 / by, rounded down

  Divisor() = default;
  explicit Divisor(unsigned d) : by(d), inverse(d > 1 ? static_cast<unsigned>((std::uint64_t{1} << 32) / d) : 0xFFFFFFFFu) {}
};
/// An Index in steps of 32 bits.
struct ShortIndex {
  const int* data = nullptr;
  std::int64_t step = 0;
  bool wide = false;

  ShortIndex() = default;
  explicit ShortIndex(const Index& a) : data(static_cast<const int*>(a.data)), step(a.stride[0] * (a.wide ? 2 : 1)), wide(a.wide) {}
  constexpr explicit operator bool() const { return data != nullptr; }
};
/// Rows of 128 bfloat16 that a stage has, by kind: how far apart they are in memory. kRowsX and kRowsWindow are three each.
enum { kRowsX = 0, kRowsG = 3, kRowsGate, kRowsWindow, kRowKinds = 8 };
/// What the kernels of heads.cuh need of a VerifyCall, and no more: parameters are cold at every launch, 64 bytes a miss. What finds a head
/// comes first. Strides in elements.
struct HeadsCall {
  ShortIndex slots, cu, rows;
  int N, HV, H, T, L, pool, row_count, steps, null_slot, each;  // each: tokens of a request, without cu
  int fewest;                                                   // requests of fewer tokens are left to another kernel
  Divisor by_heads, by_group;                                   // HV, HV / H
  const void* a_log;
  std::int64_t a_log_head;
  bool a_log_bf16, windows, snapshots, null_from_zero;
  struct {
    Place of[kPlaces];
    std::int64_t rows[kRowKinds];
  } places;
  bool conv, gate, safe_gate, l2norm, round_before_norm, update_state, logit_bf16, weight_bf16;
  float lower_bound, softplus_beta, inverse_beta, softplus_threshold, scale, norm_eps;
  const void* weight;
  std::int64_t windows_step[3], windows_tap[3];
  std::int64_t out_token, out_head, logit_token, snapshots_step, rawk_step, rawv_step, ring_g_step, ring_beta_step;

  static constexpr bool parents = false;
  static constexpr int columns = 0;
};
struct HeadsKernel {
  void (*run)(HeadsCall) = nullptr;
  std::size_t bytes = 0;      // of shared memory
  int threads = 0, each = 0;  // of a CTA; CTAs of a multiprocessor
};
/// bfloat16 activations, float32 state, K = V = 128, plain: heads.cuh; Hopper and later. frozen: ring mode from a frozen state, with 8 or 16
/// warps beside the one that directs; else the recurrence.
HeadsKernel verify_heads(bool frozen, int warps);
/// What spread.cuh, third.cuh and sixteen.cuh need of a HeadsCall. Strides in bytes, in 32 bits.
struct SpreadCall {
  static constexpr int kParts = 4;  // CTAs of a head
  /// The indices of a request. Request r's is at data + r step; without data it is r without_step + without.
  enum { kSlot, kRow, kBegin, kEnd, kBehind, kIndices };
  struct Index {
    const int* data;
    int step, wide, without_step, without;
  } index[kIndices];
  int T, L, steps, each, null_slot, pool, row_count;  // null_slot: -1 at least
  Divisor by_group;
  struct Channel {
    char *x, *taps, *window, *windows, *raw;
    int x_token, x_head, taps_head, window_slot, window_head, window_tap, windows_row, windows_head, windows_step, windows_tap, raw_slot,
        raw_head, raw_step;
  } channels[3];
  char *g, *bias, *gate, *logit, *state, *ring_g, *ring_beta, *out;
  const char *a_log, *weight;
  int g_token, g_head, bias_head, gate_token, gate_head, logit_token, logit_head, state_slot, state_head, ring_g_slot, ring_g_head,
      ring_g_step, ring_beta_slot, ring_beta_head, ring_beta_step, out_token, out_head, a_log_head;
  bool conv, safe_gate, l2norm, round_before_norm, logit_bf16, weight_bf16, a_log_bf16;
  float lower_bound, softplus_beta, inverse_beta, softplus_threshold, scale, norm_eps;
};
struct SpreadKernel {
  void (*run)(SpreadCall) = nullptr;
  std::size_t bytes = 0;  // of shared memory
  int threads = 0;
};
SpreadKernel verify_spread(int block);  // ring mode of few heads, of 8 or 16 tokens at most: spread.cuh
/// Of any number of heads, 16 warps each or 8 (three CTAs a multiprocessor); requests of more than 16 tokens are left to others: sixteen.cuh.
SpreadKernel verify_sixteen(int warps);
/// Counts of tokens that wait to be folded; whoever reads one adds kReader, so that the last of a request's heads can tell.
struct Waiting {
  int* counts = nullptr;
  std::int64_t step = 0;
};
constexpr int kReader = 1 << 20;
/// Of 8 tokens at most, where up to three heads share a multiprocessor: third.cuh. fold: with a deferred fold of 8 tokens at most inside.
struct ThirdKernel {
  void (*run)(SpreadCall, unsigned multiprocessors, Waiting) = nullptr;
  int threads = 0;
  std::size_t bytes = 0;  // of shared memory
};
ThirdKernel verify_third(bool fold);

using FoldKernel = void (*)(FoldCall, int parts);

VerifyKernel verify_split(const Form& form);  // bfloat16 activations, float32 state, K = 128, plain: the forms that are cut among CTAs
VerifyKernel verify_plain(const Form& form);  // the other plain ones, of bfloat16 activations; null where there is none
VerifyKernel verify_bf16(const Form& form);   // any strides, trees
VerifyKernel verify_float(const Form& form);
VerifyKernel verify_tree(const Form& form);  // trees from a frozen state: a CTA a head; float32 states
FoldKernel fold_form(const Form& form);
/// What fold_rows_kernel needs of a FoldCall, and no more: parameters are cold at every launch. Strides in bytes.
struct FoldRowsCall {
  struct Place {
    char* base;
    std::int64_t layer, slot, head;
  } state, rawk, rawv, g, beta;
  Index slots, accept, track, track_step, cu;
  Pending pending;
  std::int64_t null_slot, pool, L;  // null_slot: -1 at least
  unsigned group;                   // value heads of a key head
  bool l2norm;
};
using FoldRowsKernel = void (*)(FoldRowsCall);
/// K = V = 128, bfloat16 rings in quads; 2 or 4 rows of a lane.
FoldRowsKernel fold_rows(bool state_bf16, int rows);

/// No request: out is zeros.
void clear(const VerifyCall& a, Stream stream);
/// Pools that differ in nothing but where they and their windows are.
struct RollbackPools {
  static constexpr int kMost = 96;  // of a launch; parameters are cold at every launch, so few bytes a pool
  RollbackCall each;
  struct {
    void* pool;
    void* windows;
  } at[kMost];
  int count;
};
void rollback(const RollbackPools& a, Stream stream);
void advance_windows(const VerifyCall& a, Stream stream);
/// After a fold by pending counts: those that it has folded become 0.
void settle_pending(const FoldCall& a, Stream stream);

/// For tests and benchmarks: what the choice would be overridden with.
struct Forced {
  int rows = 0;        // of a lane; 0: free
  int frozen = -1;     // -1: free
  int frame = -1;      // the recurrence in heads.cuh where it applies, or in verify.cuh; -1: free
  int warps = 0;       // of a CTA of heads.cuh or sixteen.cuh in ring mode, or 4: spread.cuh, 3: third.cuh, where they apply; 0: free
  bool inside = true;  // the deferred fold in third.cuh where it applies
  bool overlap = true;
};
SPECSTATE_API Forced& forced();

}  // namespace specstate::kda::cuda
