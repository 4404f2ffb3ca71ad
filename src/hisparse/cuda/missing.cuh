#pragma once
// What a cluster knows about the tokens that one batch row asks for: the occurrences, cut into one slice a CTA, and a hash table of the tokens
// that are not known to be resident, cut into one part a CTA. All of it lies in (distributed) shared memory; peers read it.
#include <algorithm>
#include <string>

#include "cuda/launch.hpp"
#include "hisparse/cuda/bits.cuh"
#include "specstate/error.hpp"

namespace specstate::hisparse::cuda {

constexpr u32 kEmpty = 0xFFFFFFFFu;
constexpr u32 kResident = 0x80000000u;  // in the table: the token is in a slot (or LRU position) after all; its number is in the low bits

/// n / divisor for n <= 65536 + 4096 and divisor <= 65536, by a multiplication.
struct Divider {
  u64 factor;
  Divider(u32 divisor = 1) : factor(((u64{1} << 40) + divisor - 1) / (divisor == 0 ? 1 : divisor)) {}
  __device__ __forceinline__ u32 operator()(u32 n) const { return static_cast<u32>(n * factor >> 40); }
};

/// Sizes and places in shared memory, the same for all CTAs of a launch.
struct SlicePlan {
  u32 cluster, slice, words;   // CTAs; occurrences a CTA, a multiple of 32; words of a set of all occurrences
  u32 part_bits, shift, mask;  // log2 of the entries a CTA; of the hash; all entries - 1
  u32 token, code, place;      // [slice]
  u32 table, targets;          // [entries a CTA]; its second half
  u32 first, first_before;     // [words], [words + 1]: occurrences that were the first to miss their token, and their ranks
  Divider by_slice, by_step;   // occurrence -> CTA, step
};

/// Hands out shared memory, 16 bytes aligned.
struct Carve {
  u32 bytes = 0;
  u32 operator()(u32 words) {
    const u32 here = bytes;
    bytes += (4 * words + 15) / 16 * 16;
    return here;
  }
};

/// For `occurrences` of at most `distinct` tokens.
inline SlicePlan plan_slices(Carve& carve, u32 cluster, i64 occurrences, i64 distinct, u32 top_k) {
  SlicePlan p{};
  p.cluster = cluster;
  p.slice = static_cast<u32>((occurrences + 32 * cluster - 1) / (32 * cluster) * 32);
  if (p.slice == 0) p.slice = 32;
  p.words = p.slice * cluster / 32;
  u32 bits = 8;
  while ((i64{1} << bits) < 2 * (occurrences < distinct ? occurrences : distinct)) ++bits;
  u32 cluster_bits = 0;
  while ((1u << cluster_bits) < cluster) ++cluster_bits;
  p.part_bits = bits - cluster_bits;
  p.shift = 32 - bits;
  p.mask = (1u << bits) - 1;
  p.token = carve(p.slice);
  p.code = carve(p.slice);
  p.place = carve(p.slice);
  p.table = carve(1u << p.part_bits);
  p.targets = p.table + 2 * (1u << p.part_bits);
  p.first = carve(p.words);
  p.first_before = carve(p.words + 1);
  p.by_slice = Divider(p.slice);
  p.by_step = Divider(top_k);
  return p;
}

/// CTAs a batch row: as many as the batch leaves SMs for, since look-ups are latency and the rows of one CTA cannot fill the link.
inline u32 cluster_for(i64 batch, i64 sm_budget) {
  u32 cluster = batch <= 8 ? 8 : batch <= 32 ? 4 : batch <= 64 ? 2 : 1;
  while (sm_budget > 0 && cluster > 1 && cluster > sm_budget) cluster /= 2;
  return cluster;
}
/// Clusters of a launch: one a row, or as many as the budget holds, which then walk the rows.
inline u32 clusters_for(i64 batch, u32 cluster, i64 sm_budget) {
  if (sm_budget > 0) batch = std::clamp<i64>(sm_budget / cluster, 1, batch);
  return specstate::cuda::blocks_for(batch, 1);
}

[[noreturn]] inline void too_large(const char* op, i64 hot, i64 occurrences) {
  throw Error(ErrorKind::kNotImplemented, std::string(op) + ": " + std::to_string(hot) + " hot slots with " + std::to_string(occurrences) +
                                              " selected tokens need more shared memory than the GPU has.");
}

struct Slices {
  const SlicePlan& plan;
  std::byte* memory;
  u32 rank;

  template <class T>
  __device__ __forceinline__ T* at(u32 offset) const {
    return reinterpret_cast<T*>(memory + offset);
  }
  __device__ __forceinline__ u32* words(u32 offset) const { return at<u32>(offset); }
  __device__ __forceinline__ std::int32_t* token() const { return at<std::int32_t>(plan.token); }
  __device__ __forceinline__ u32* code() const { return words(plan.code); }    // host row of a missing token, kEmpty none
  __device__ __forceinline__ u32* place() const { return words(plan.place); }  // in the table, kEmpty: answered

  __device__ __forceinline__ void clear() const {
#pragma unroll 1
    for (u32 i = threadIdx.x; i >> plan.part_bits == 0; i += blockDim.x) words(plan.table)[i] = kEmpty;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < plan.words; i += blockDim.x) words(plan.first)[i] = 0;
  }

  /// Number of the i-th occurrence of my slice.
  __device__ __forceinline__ u32 occurrence(u32 i) const { return rank * plan.slice + i; }
  /// How many of all are mine.
  __device__ __forceinline__ u32 mine(u32 all) const {
    const u32 first = rank * plan.slice;
    return first < all ? min(plan.slice, all - first) : 0;
  }

  __device__ __forceinline__ u32 home(std::int32_t t) const { return static_cast<u32>(t) * 2654435769u >> plan.shift; }
  __device__ __forceinline__ u32 next(u32 p) const { return (p + 1) & plan.mask; }
  __device__ __forceinline__ u32* entry(u32 p) const {
    return ptx::in_block(words(plan.table) + (p & below(plan.part_bits)), p >> plan.part_bits);
  }
  __device__ __forceinline__ std::int32_t token_of(u32 occurrence) const {
    const u32 owner = plan.by_slice(occurrence);
    return *ptx::in_block(token() + (occurrence - owner * plan.slice), owner);
  }
  __device__ __forceinline__ u32 host_row_of(u32 occurrence) const {
    const u32 owner = plan.by_slice(occurrence);
    return *ptx::in_block(code() + (occurrence - owner * plan.slice), owner);
  }

  /// Two halves of an insertion, so that a thread can have several under way. The entry of a token is its smallest occurrence.
  __device__ __forceinline__ u32 try_insert(u32 p, u32 occurrence) const { return atomicCAS(entry(p), kEmpty, occurrence); }
  __device__ __forceinline__ u32 finish_insert(u32 p, u32 found, std::int32_t t, u32 occurrence) const {
    while (found != kEmpty) {
      if (token_of(found) == t) {
        atomicMin(entry(p), occurrence);
        break;
      }
      p = next(p);
      found = try_insert(p, occurrence);
    }
    return p;
  }

  /// After all insertions: the place of t, kEmpty if nobody asks. `holds(number, t)` says whether the resident `number` is t.
  template <class Holds>
  __device__ __forceinline__ u32 find(std::int32_t t, Holds&& holds) const {
    for (u32 p = home(t);; p = next(p)) {
      const u32 value = *reinterpret_cast<volatile u32*>(entry(p));
      if (value == kEmpty) return kEmpty;
      if (value & kResident ? holds(value & ~kResident, t) : token_of(value) == t) return p;
    }
  }
  /// The entry becomes resident; the smallest number wins.
  __device__ __forceinline__ void make_resident(u32 p, u32 number) const {
    u32 value = *reinterpret_cast<volatile u32*>(entry(p));
    while ((value & kResident) == 0 || (value & ~kResident) > number) {
      const u32 old = atomicCAS(entry(p), value, kResident | number);
      if (old == value) break;
      value = old;
    }
  }

  /// The ballot of a warp over 32 occurrences of its slice, the first of which is the warp's own first, to all CTAs.
  __device__ __forceinline__ void push_first(u32 occurrence, bool first) const {
    const u32 word = __ballot_sync(kFull, first);
    if (word != 0 && lane_id() < plan.cluster) *ptx::in_block(words(plan.first) + (occurrence >> 5), lane_id()) = word;
  }
  /// One warp, once all have pushed.
  __device__ __forceinline__ void rank_first() const { rank_words(words(plan.first), words(plan.first_before), plan.words); }
  __device__ __forceinline__ u32 misses() const { return words(plan.first_before)[plan.words]; }
  /// First occurrence of miss u, and the number of the miss whose first occurrence is o.
  __device__ __forceinline__ u32 first_of(u32 u) const { return select_bit(words(plan.first), words(plan.first_before), plan.words, u); }
  __device__ __forceinline__ u32 number_of(u32 o) const { return rank_of(words(plan.first), words(plan.first_before), o); }
};

}  // namespace specstate::hisparse::cuda
