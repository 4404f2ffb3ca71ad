#pragma once
// What crosses from check.cpp to a backend: raw pointers, 64-bit strides in elements, sizes, and the requests' indices, which are
// copied once so that a backend never re-reads the caller's index memory.
#include <cstdint>
#include <vector>

#include "specstate/stream.hpp"

namespace specstate::kda {

/// A tensor whose dimensions are addressed by `at` of layout.hpp; float32 or bfloat16.
struct Array {
  void* data = nullptr;
  std::int64_t stride[5] = {};
  bool bf16 = false;

  explicit operator bool() const { return data != nullptr; }
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
};

struct VerifyArgs {
  Channel q, k, v;
  Array g;                              // [T, HV, K] or [T, HV]
  Array beta;                           // [T, HV]
  Array a_log;                          // [HV]
  Array dt_bias;                        // [HV, K] or [HV]
  Array state;                          // [pool, HV], V*K dense
  Array gate;                           // [T, HV, V], V dense; not given: no output norm
  Array norm_weight;                    // [V]
  Array out;                            // [T, HV, V], V dense
  Array rawv, rawk, ring_g, ring_beta;  // [slots, heads, L, D]
  Array snapshots;                      // [rows, steps, HV], V*K dense
  std::vector<Request> requests;
  std::vector<std::int32_t> parents;           // [T], index within the request, -1: the request's own state; empty: chains
  std::int64_t T, H, HV, K, V, L, tokens_end;  // tokens_end = cu_seqlens[N]
  bool scalar_gate, safe_gate, l2norm, round_before_norm;
  bool update_state, update_windows, null_from_zero;
  float lower_bound, softplus_beta, softplus_threshold, scale, norm_eps;
};

struct FoldRequest {
  std::int64_t slot, tokens, track, track_step;  // track -1: none
};

struct FoldArgs {
  Array state;                          // [layers, pool, HV], V*K dense
  Array rawv, rawk, ring_g, ring_beta;  // [layers, slots, heads, L, D]
  std::vector<FoldRequest> requests;    // only those with something to commit
  std::int64_t layers, H, HV, K, V;
  bool scalar_gate, l2norm;
};

struct WindowCopy {
  std::int64_t slot, row, step;
};

struct RollbackArgs {
  Array pool;     // [pool, C, 3]
  Array windows;  // [rows, steps, C, 3]
  std::vector<WindowCopy> copies;
  std::int64_t channels;
};

namespace cpu {
void run(const VerifyArgs& args, Stream stream);
void run(const FoldArgs& args, Stream stream);
void run(const RollbackArgs& args, Stream stream);
}  // namespace cpu

}  // namespace specstate::kda
