#pragma once
// What crosses from check.cpp to a backend: raw pointers, 64-bit strides in elements, sizes.
#include <cstddef>
#include <cstdint>

#include "core/numeric.hpp"
#include "specstate/hisparse.hpp"
#include "specstate/stream.hpp"

namespace specstate::hisparse {

template <class T>
struct Strided1 {
  T* data = nullptr;
  std::int64_t s0 = 0;
  SPECSTATE_HD T& operator()(std::int64_t i) const { return data[i * s0]; }
  SPECSTATE_HD explicit operator bool() const { return data != nullptr; }
};
template <class T>
struct Strided2 {
  T* data = nullptr;
  std::int64_t s0 = 0, s1 = 0;
  SPECSTATE_HD T& operator()(std::int64_t i, std::int64_t j) const { return data[i * s0 + j * s1]; }
  SPECSTATE_HD Strided1<T> row(std::int64_t i) const { return {data + i * s0, s1}; }
  SPECSTATE_HD explicit operator bool() const { return data != nullptr; }
};
template <class T>
struct Strided3 {
  T* data = nullptr;
  std::int64_t s0 = 0, s1 = 0, s2 = 0;
  SPECSTATE_HD T& operator()(std::int64_t i, std::int64_t j, std::int64_t k) const { return data[i * s0 + j * s1 + k * s2]; }
};

/// Integers of either width (bytes = 2, 4 or 8), read as int64: up to two strided dimensions.
struct Integers {
  const void* data = nullptr;
  std::int64_t s0 = 0, s1 = 0;
  int bytes = 8;
  SPECSTATE_HD std::int64_t operator()(std::int64_t i, std::int64_t j = 0) const {
    const std::int64_t at = i * s0 + j * s1;
    if (bytes == 8) return static_cast<const std::int64_t*>(data)[at];
    if (bytes == 4) return static_cast<const std::int32_t*>(data)[at];
    return static_cast<const std::int16_t*>(data)[at];
  }
  SPECSTATE_HD void store(std::int64_t i, std::int64_t j, std::int64_t value) const {
    void* p = const_cast<void*>(data);
    const std::int64_t at = i * s0 + j * s1;
    if (bytes == 8)
      static_cast<std::int64_t*>(p)[at] = value;
    else if (bytes == 4)
      static_cast<std::int32_t*>(p)[at] = static_cast<std::int32_t>(value);
    else
      static_cast<std::int16_t*>(p)[at] = static_cast<std::int16_t>(value);
  }
};

/// One physical pool: row r starts at base + linear_offset(r, pitch), or by the paged formulas.
struct RowBuffer {
  std::byte* base = nullptr;
  std::int64_t pitch = 0;  // bytes
  std::int64_t rows = 0;
};
/// Host and device ends of one or two pairs that a plan moves.
struct CopyArgs {
  RowBuffer host[2], device[2];
  int pairs = 0;
  std::int64_t item_bytes = 0;
  bool paged = false, skip_io = false;
  /// Rows that exist in every pair.
  SPECSTATE_HD std::int64_t host_rows() const { return pairs == 2 && host[1].rows < host[0].rows ? host[1].rows : host[0].rows; }
  SPECSTATE_HD std::int64_t device_rows() const { return pairs == 2 && device[1].rows < device[0].rows ? device[1].rows : device[0].rows; }
};

struct PlanArgs {
  Strided2<std::int64_t> src;    // [>=B, >=occurrences]; null: not recorded
  Strided2<std::int32_t> dst;    // same
  Strided1<std::int32_t> count;  // [>=B]
};

/// What the two multi-step swaps share.
struct SwapCommon {
  Strided3<const std::int32_t> tokens;  // [B, S, K]
  Strided3<std::int32_t> out;           // [B, S, K]
  Integers seq_lens;                    // (b, s)
  Integers requests;                    // [B]
  const std::int32_t* num_real;         // [1] or null
  Integers host_locs;                   // [R, L]
  Strided2<std::int32_t> slot_tokens;   // [R, H+P]
  Strided2<std::int32_t> slot_locs;     // [R, H+P]
  Strided2<std::int32_t> scratch_locs;  // [R, C]
  CopyArgs copy;
  PlanArgs plan;
  std::int64_t batch, steps, top_k;
  std::int64_t request_slots, context;  // R that every table has, L
  std::int64_t hot, tail;               // H, P
  std::int64_t scratch;                 // C
  std::int64_t sm_budget;               // SMs that the call may occupy, 0: any number
  const char* op;
  const char *locs_name, *scratch_name;  // what error texts call slot_locs and scratch_locs
};

struct SwapInArgs : SwapCommon {
  Strided2<std::int32_t> stamps;                      // [R, H]
  Integers token_slots;                               // [R, L] int16 or int32, written
  Strided1<std::int32_t> clock;                       // [R]
  Strided1<std::int32_t> unique_misses, unique_hits;  // [>=B] or null
};

struct SpecSwapArgs : SwapCommon {
  Strided3<std::int64_t> index;          // [R, 2, Z]
  Strided2<std::int32_t> policy;         // [R+1, H]
  Strided2<std::int32_t> scratch_state;  // [R+1, ...]
  std::int64_t hash_size;                // Z
  std::int64_t counter_requests;         // R of scratch_locs: width of a counter bank
};

struct SwapInSingleArgs {
  Strided2<const std::int32_t> selection;  // [B, K / block]
  Strided2<std::int32_t> out;              // [B, >=K]
  Integers seq_lens, requests;             // [B]
  const std::int32_t* num_real;
  Integers host_locs;                             // [R, L]
  Strided2<std::int32_t> slot_tokens, slot_locs;  // [R, >=H+1]
  Integers lru;                                   // [R, H] int16 or int32, written
  CopyArgs copy;
  PlanArgs plan;
  std::int64_t batch, top_k, block;  // K in tokens, tokens a selected entry
  std::int64_t request_slots, context, hot;
  std::int64_t sm_budget;
  const char* op;
};

struct ReplayPlanArgs {
  Strided2<const std::int64_t> src;
  Strided2<const std::int32_t> dst;
  Strided1<const std::int32_t> count;
  const std::int32_t* num_real;
  std::int64_t batch, capacity;
  std::int64_t sm_budget;
  const char* op;
  Strided1<std::int32_t> arrived = {};  // [followers], if each is awaited
};
struct AwaitFollowerArgs {
  std::int32_t* arrived;  // the follower's
  const char* op = "await_follower";
};
/// What a swap records, for its followers.
inline ReplayPlanArgs plan_of(const SwapInArgs& a) {
  ReplayPlanArgs r{};
  r.src = {a.plan.src.data, a.plan.src.s0, a.plan.src.s1};
  r.dst = {a.plan.dst.data, a.plan.dst.s0, a.plan.dst.s1};
  r.count = {a.plan.count.data, a.plan.count.s0};
  r.num_real = a.num_real;
  r.batch = a.batch, r.capacity = a.steps * a.top_k;
  r.sm_budget = a.sm_budget;
  r.op = a.op;
  return r;
}

struct TransferArgs {
  Integers src, dst;  // [N]
  std::int64_t count;
  const char* op;
  std::int64_t sm_budget = 0;
  Integers src_ptrs = {}, dst_ptrs = {};  // [pointer_layers] addresses that only a kernel may read (on a GPU), else null
  std::int64_t pointer_layers = 0;
};
/// One layer of a transfer; rows < 0: unknown.
struct TransferLayer {
  const std::byte* src;
  std::byte* dst;
  std::int64_t src_rows, dst_rows;
};

namespace cpu {
void run(const SwapInArgs& args, Stream stream);
void run(const SwapInArgs& args, const CopyArgs* followers, std::int64_t num_followers, Stream stream);
void run(const SpecSwapArgs& args, Stream stream);
void run(const SwapInSingleArgs& args, Stream stream);
void run(const ReplayPlanArgs& args, const CopyArgs* followers, std::int64_t num_followers, Stream stream);
void run(const AwaitFollowerArgs& args, Stream stream);
void run(const TransferArgs& args, const TransferLayer* layers, std::int64_t num_layers, Stream stream);
void reset(const SwapState& state, const TensorView& requests);
}  // namespace cpu

namespace cuda {
void run(const SwapInArgs& args, Stream stream);
void run(const SwapInArgs& args, const CopyArgs* followers, std::int64_t num_followers, Stream stream);
void run(const SpecSwapArgs& args, Stream stream);
void run(const SwapInSingleArgs& args, Stream stream);
void run(const ReplayPlanArgs& args, const CopyArgs* followers, std::int64_t num_followers, Stream stream);
void run(const AwaitFollowerArgs& args, Stream stream);
void run(const TransferArgs& args, const TransferLayer* layers, std::int64_t num_layers, Stream stream);
void reset(const SwapState& state, const TensorView& requests, Stream stream);
}  // namespace cuda

}  // namespace specstate::hisparse
