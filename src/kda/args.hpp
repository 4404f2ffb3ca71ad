#pragma once
// What crosses from check.cpp to a backend: raw pointers, 64-bit strides in elements, sizes, and the requests' indices. The CPU reads
// those once, so that it never re-reads the caller's index memory; on a GPU they stay where they are and a kernel reads them (`Index`).
//
// The part of a call without the copied indices (VerifyCall, FoldCall, RollbackCall) is plain data that a kernel takes by value.
#include <cstdint>
#include <span>
#include <vector>

#include "specstate/stream.hpp"

namespace specstate::kda {

/// A tensor whose dimensions are addressed by `at` of layout.hpp; float32 or bfloat16.
struct Array {
  /// Of a conv window, for the CUDA backend: any strides; the channels of a tap dense; the taps of a channel and these one after another.
  enum Layout : std::uint8_t { kAny, kTapRows, kInterleaved };

  void* data = nullptr;
  std::int64_t stride[5] = {};
  bool bf16 = false;
  bool vec = false;  // noted by the CUDA backend: four neighbours from a multiple of four may be accessed as one
  Layout layout = kAny;

  constexpr explicit operator bool() const { return data != nullptr; }
  bool operator==(const Array&) const = default;
};

/// int32 or int64 indices in device memory; read by `index` of layout.hpp.
struct Index {
  const void* data = nullptr;
  std::int64_t stride[2] = {};
  bool wide = false;  // int64

  constexpr explicit operator bool() const { return data != nullptr; }
  bool operator==(const Index&) const = default;
};

/// How many tokens of a slot's record are accepted and not yet in its state: [layers, slots] int32, read and set to 0.
struct Pending {
  std::int32_t* data = nullptr;
  std::int64_t stride[2] = {};

  constexpr explicit operator bool() const { return data != nullptr; }
};

/// q, k or v before the recurrence.
struct Channel {
  Array x;        // [T, heads, D], D dense
  Array weight;   // [C, 4]; not given: x is already convolved
  Array window;   // [pool, C, 3]
  Array windows;  // [rows, steps, C, 3] out, or not given
};

struct Request {
  std::int64_t slot;  // -1: padding
  std::int64_t row;   // of snapshots and windows; -1: none
  std::int64_t begin, tokens;
  std::int64_t pending = 0;  // tokens to fold before
};

struct FoldRequest {
  std::int64_t layer, slot, tokens, track, track_step;  // track -1: none
};

struct FoldCall {
  Array state;                             // [layers, pool, HV], V*K dense
  Array rawv, rawk, ring_g, ring_beta;     // [layers, slots, heads, L, D]
  Index slots, accept, track, track_step;  // [N]
  Pending pending;                         // given: in the place of accept
  Index cu;                                // [N + 1] with pending, or not given: requests without tokens have nothing to fold
  std::int64_t N, pool, L, null_slot;
  std::int64_t layers, H, HV, K, V;
  bool scalar_gate, l2norm;
};
struct FoldArgs : FoldCall {
  std::vector<FoldRequest> requests;  // only those with something to commit
};

struct VerifyCall {
  Channel q, k, v;
  Array g;                                                     // [T, HV, K] or [T, HV]
  Array beta;                                                  // [T, HV]
  Array a_log;                                                 // [HV]
  Array dt_bias;                                               // [HV, K] or [HV]
  Array state;                                                 // [pool, HV], V*K dense
  Array gate;                                                  // [T, HV, V], V dense; not given: no output norm
  Array norm_weight;                                           // [V]
  Array out;                                                   // [T, HV, V], V dense
  Array rawv, rawk, ring_g, ring_beta;                         // [slots, heads, L, D]
  Array snapshots;                                             // [rows, steps, HV], V*K dense
  Pending pending;                                             // of the rings: folded into the state first
  Index slots, cu, rows, parents;                              // [N], [N + 1], [N], [N, columns]; cu not given: T / N tokens each
  std::int64_t N, pool, row_count, steps, columns, null_slot;  // steps: the fewest that snapshots and windows have
  std::int64_t T, H, HV, K, V, L;
  bool scalar_gate, safe_gate, l2norm, round_before_norm;
  bool update_state, update_windows, null_from_zero;
  float lower_bound, softplus_beta, softplus_threshold, scale, norm_eps;
  bool exact;  // the form of the recurrence whose bits all modes share, also where another is faster
};
struct VerifyArgs : VerifyCall {
  std::vector<Request> requests;
  std::vector<std::int32_t> parents_of;  // [T], index within the request, -1: the request's own state; empty: chains
  std::int64_t tokens_end;               // cu_seqlens[N]
  FoldCall deferred;                     // with `pending`: that fold, of the same requests
};

struct Deferral {
  std::int64_t slot, accept;
};

struct DeferCall {
  Pending pending;
  Index slots, accept;  // [N]
  std::int64_t N, layers, slot_count, null_slot;
};
struct DeferArgs : DeferCall {
  std::vector<Deferral> requests;  // only those with something to commit
};

struct WindowCopy {
  std::int64_t slot, row, step;
};

struct RollbackCall {
  Array pool;                                             // [pool, C, 3]
  Array windows;                                          // [rows, steps, C, 3]
  Index slots, steps_of, rows, track_slots, track_steps;  // [N]
  std::int64_t channels, N, slot_count, row_count, steps;

  bool operator==(const RollbackCall&) const = default;
};
struct RollbackArgs : RollbackCall {
  std::vector<WindowCopy> copies;
};

namespace cpu {
void run(const VerifyArgs& args, Stream stream);
void run(const FoldArgs& args, Stream stream);
void run(const DeferArgs& args, Stream stream);
void run(std::span<const RollbackArgs> pools, Stream stream);
}  // namespace cpu

namespace cuda {
void run(const VerifyArgs& args, Stream stream);
void run(const FoldArgs& args, Stream stream);
void run(const DeferArgs& args, Stream stream);
void run(std::span<const RollbackArgs> pools, Stream stream);
}  // namespace cuda

}  // namespace specstate::kda
