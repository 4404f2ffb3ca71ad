#pragma once
// Moving rows: one warp a row, a few rows of each warp under way, since a row in host memory is more than a microsecond away.
#include <algorithm>
#include <string>

#include "hisparse/args.hpp"
#include "hisparse/cuda/bits.cuh"
#include "hisparse/layout.hpp"
#include "specstate/error.hpp"

namespace specstate::hisparse::cuda {

/// One pair of a CopyArgs for a kernel.
struct PairGeometry {
  const std::byte* host;
  std::byte* device;
  i64 host_pitch, device_pitch;
};
struct CopyGeometry {
  PairGeometry pair[2];
  i64 host_rows, device_rows, item;
  int pairs, vec;  // vec: bytes that every row's place and size are a multiple of: 16, 8, 4, 1
  bool paged, skip;
};

inline CopyGeometry geometry(const CopyArgs& c) {
  CopyGeometry g{};
  g.pairs = c.pairs;
  g.paged = c.paged;
  g.skip = c.skip_io;
  g.item = c.paged ? layout::kValueBytes : c.item_bytes;
  g.host_rows = c.host_rows();
  g.device_rows = c.device_rows();
  std::uint64_t all = static_cast<std::uint64_t>(g.item);
  for (int i = 0; i < c.pairs; ++i) {
    g.pair[i] = {c.host[i].base, c.device[i].base, c.host[i].pitch, c.device[i].pitch};
    all |= reinterpret_cast<std::uint64_t>(c.host[i].base) | reinterpret_cast<std::uint64_t>(c.device[i].base);
    if (!c.paged) all |= static_cast<std::uint64_t>(c.host[i].pitch) | static_cast<std::uint64_t>(c.device[i].pitch);
  }
  g.vec = all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : all % 4 == 0 ? 4 : 1;
  return g;
}

/// Pairs of buffers with rows of one kind that all get the same rows.
template <int kMost>
struct Streams {
  PairGeometry at[kMost];
  i64 host_rows, device_rows, item;
  int count, vec;
  bool paged;
};
/// Whether the pairs of `g` are of that kind too and have room; then they are in. The first ones say which kind it is.
template <int kMost>
bool join(Streams<kMost>& to, const CopyGeometry& g, bool first) {
  if (first)
    to.item = g.item, to.vec = g.vec, to.paged = g.paged;
  else if (g.item != to.item || g.paged != to.paged)
    return false;
  const int pairs = g.skip ? 0 : g.pairs;
  if (to.count + pairs > kMost) return false;
  to.vec = std::min(to.vec, g.vec);
  for (int i = 0; i < pairs; ++i) to.at[to.count++] = g.pair[i];
  return true;
}
/// Rows that exist in all buffers.
template <class To>
void rows_of(To& to, const CopyArgs* followers, i64 n) {
  to.host_rows = to.device_rows = INT64_MAX;
  for (i64 f = 0; f < n; ++f) {
    to.host_rows = std::min(to.host_rows, followers[f].host_rows());
    to.device_rows = std::min(to.device_rows, followers[f].device_rows());
  }
}

/// What the kernels keep in 32 bits.
inline void check_rows(const char* op, const CopyGeometry& g) {
  if (g.host_rows >= 0xFFFFFFFFll || g.item > INT32_MAX)
    throw Error(ErrorKind::kNotImplemented, std::string(op) +
                                                ": host_cache: expected fewer than 2^32 - 1 rows of less than 2^31 bytes, got " +
                                                std::to_string(g.host_rows) + " of " + std::to_string(g.item) + ".");
}

/// Blocks of a launch that only copies: `rows` for each to begin with, and no more than help, or than the caller's budget of SMs allows.
inline unsigned copy_blocks(i64 rows, i64 rows_a_block, i64 most, i64 sm_budget) {
  const i64 limit = sm_budget > 0 && sm_budget < most ? sm_budget : most, blocks = (rows + rows_a_block - 1) / rows_a_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < limit ? blocks : limit);
}

/// A row of a pool of rows or DSv4 pages, and its scales (pages only).
__device__ __forceinline__ std::byte* value_at(const std::byte* base, i64 pitch, bool paged, i64 row) {
  return const_cast<std::byte*>(base) + (paged ? layout::paged_value_offset(row) : layout::linear_offset(row, pitch));
}
__device__ __forceinline__ std::byte* scale_at(const std::byte* base, i64 row) {
  return const_cast<std::byte*>(base) + layout::paged_scale_offset(row);
}
__device__ __forceinline__ const std::byte* host_at(const CopyGeometry& g, int pair, i64 row) {
  return value_at(g.pair[pair].host, g.pair[pair].host_pitch, g.paged, row);
}
__device__ __forceinline__ std::byte* device_at(const CopyGeometry& g, int pair, i64 row) {
  return value_at(g.pair[pair].device, g.pair[pair].device_pitch, g.paged, row);
}

__device__ __forceinline__ void store_global(uint4* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
template <class T>
__device__ __forceinline__ void store_global(T* p, T v) {
  *p = v;
}
// Plain loads: as .nc with L1::no_allocate rows of the host come 2 % slower, from few blocks 15 %.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load_once(const uint2* p) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ u32 load_once(const u32* p) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ std::uint8_t load_once(const std::uint8_t* p) {
  u32 v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p));
  return static_cast<std::uint8_t>(v);
}

__device__ __forceinline__ void store_shared(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

/// What a lane reads that has nothing to read.
__device__ const uint4 nothing = {};

/// kRows rows on their way through the registers of a warp, kSteps pieces of T a lane each. The pieces are aligned to the 128-byte lines of
/// the source, so that no line is asked for twice: over PCIe every request counts (measured: 18 % with few warps, 3 % with many).
template <class T, int kRows, int kSteps>
struct Flight {
  static constexpr u32 kLine = sizeof(T) > 1 ? 128 / sizeof(T) : 1;                   // single bytes are not aligned to anything
  static constexpr u32 kCover = 32 * kSteps * sizeof(T) - (sizeof(T) > 1 ? 128 : 0);  // bytes of a row that one flight surely takes
  T piece[kRows][kSteps];

  static __device__ __forceinline__ u32 first(const std::byte* from) {
    return lane_id() - (static_cast<u32>(reinterpret_cast<u64>(from) / sizeof(T)) & (kLine - 1));  // wraps below 0: out of range
  }
  /// Lane l < kRows brings the address of row l, null for none. No load has a predicate: the compiler would load into other registers and
  /// move the value from there, and so wait for every load before the next one.
  __device__ __forceinline__ void load(const std::byte* mine, u32 pieces) {
    const std::byte* from[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) from[i] = reinterpret_cast<const std::byte*>(__shfl_sync(kFull, reinterpret_cast<u64>(mine), i));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const u32 j = first(from[i]), end = from[i] != nullptr ? pieces : 0;
#pragma unroll
      for (u32 q = 0; q < kSteps; ++q)
        piece[i][q] =
            load_once(j + 32 * q < end ? reinterpret_cast<const T*>(from[i]) + (j + 32 * q) : reinterpret_cast<const T*>(&nothing));
    }
  }
  /// The same addresses again; into shared memory, a row every `pitch` bytes.
  __device__ __forceinline__ void keep(const std::byte* mine, u32 address, u32 bytes, u32 pitch) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const auto* from = reinterpret_cast<const std::byte*>(__shfl_sync(kFull, reinterpret_cast<u64>(mine), i));
      const u32 j = first(from), end = from != nullptr ? bytes / static_cast<u32>(sizeof(T)) : 0;
#pragma unroll
      for (u32 q = 0; q < kSteps; ++q)
        if (j + 32 * q < end) store_shared(address + i * pitch + (j + 32 * q) * static_cast<u32>(sizeof(T)), piece[i][q]);
    }
  }
  /// The same addresses again, and the destinations; null drops a row.
  __device__ __forceinline__ void store(const std::byte* mine, std::byte* target, u32 pieces) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      auto* to = reinterpret_cast<std::byte*>(__shfl_sync(kFull, reinterpret_cast<u64>(target), i));
      const u32 j = first(reinterpret_cast<const std::byte*>(__shfl_sync(kFull, reinterpret_cast<u64>(mine), i)));
      const u32 end = to != nullptr ? pieces : 0;
#pragma unroll
      for (u32 q = 0; q < kSteps; ++q)
        if (j + 32 * q < end) store_global(reinterpret_cast<T*>(to) + (j + 32 * q), piece[i][q]);
    }
  }
};

/// Lane l brings the addresses of row l (null: none), up to 32 of them; the warp moves them.
template <class T, int kRows, int kSteps>
static __device__ __noinline__ void move_rows(const std::byte* from, std::byte* to, u32 rows, u32 bytes) {
  using Group = Flight<T, kRows, kSteps>;
#pragma unroll 1
  for (u32 done = 0; done < bytes; done += Group::kCover) {
    const u32 pieces = min(bytes - done, Group::kCover) / static_cast<u32>(sizeof(T));
#pragma unroll 1
    for (u32 i = 0; i < rows; i += kRows) {
      const u64 f = __shfl_sync(kFull, reinterpret_cast<u64>(from), (i + lane_id()) & 31u),
                t = __shfl_sync(kFull, reinterpret_cast<u64>(to), (i + lane_id()) & 31u);
      const bool some = i + lane_id() < rows && f != 0 && t != 0;
      const std::byte* const source = some ? reinterpret_cast<const std::byte*>(f) + done : nullptr;
      Group group;
      group.load(source, pieces);
      group.store(source, some ? reinterpret_cast<std::byte*>(t) + done : nullptr, pieces);
    }
  }
}
__device__ __forceinline__ void move_any(int vec, const std::byte* from, std::byte* to, u32 rows, u32 bytes) {
  if (vec == 16 && bytes <= Flight<uint4, 4, 2>::kCover)
    move_rows<uint4, 4, 2>(from, to, rows, bytes);
  else if (vec == 16)
    move_rows<uint4, 2, 4>(from, to, rows, bytes);
  else if (vec == 8)
    move_rows<uint2, 2, 4>(from, to, rows, bytes);
  else if (vec == 4)
    move_rows<u32, 2, 4>(from, to, rows, bytes);
  else
    move_rows<std::uint8_t, 2, 4>(from, to, rows, bytes);
}

/// The scales of a DSv4 row lie in the same page, behind its values. One lane.
__device__ __forceinline__ void copy_scale(int vec, const std::byte* from, std::byte* to) {
  static_assert(layout::kScaleBytes == sizeof(uint2));
  if (vec >= 8)
    *reinterpret_cast<uint2*>(to) = load_once(reinterpret_cast<const uint2*>(from));
  else
    for (int i = 0; i < layout::kScaleBytes; ++i)
      reinterpret_cast<std::uint8_t*>(to)[i] = load_once(reinterpret_cast<const std::uint8_t*>(from) + i);
}

/// From where to where a row goes.
struct Way {
  const std::byte* from;
  std::byte* to;
  const std::byte* scale;
  std::byte* scale_to;
};
__device__ __forceinline__ Way way_between(bool paged, const std::byte* from, i64 from_pitch, i64 src, std::byte* to, i64 to_pitch,
                                           i64 dst) {
  Way way{value_at(from, from_pitch, paged, src), value_at(to, to_pitch, paged, dst), nullptr, nullptr};
  if (paged) way.scale = scale_at(from, src), way.scale_to = scale_at(to, dst);
  return way;
}
__device__ __forceinline__ Way way_of(const PairGeometry& g, bool paged, i64 src, i64 dst) {
  return way_between(paged, g.host, g.host_pitch, src, g.device, g.device_pitch, dst);
}
/// Lane l brings the l-th of up to 32 ways; the warp goes them. Scales are asked for before the values and stored behind them: a load
/// from the host that is waited for on its own costs as much as a row.
__device__ __forceinline__ void go_ways(int vec, i64 item, const Way& mine, u32 count) {
  const bool wide = mine.scale != nullptr && vec >= 8;
  uint2 scale{};
  if (wide)
    scale = load_once(reinterpret_cast<const uint2*>(mine.scale));
  else if (mine.scale != nullptr)
    copy_scale(vec, mine.scale, mine.scale_to);
  move_any(vec, mine.from, mine.to, count, static_cast<u32>(item));
  if (wide) *reinterpret_cast<uint2*>(mine.scale_to) = scale;
}
/// Lane l brings one pair of rows of the pools (dst < 0: none), up to 32 of them; the warp moves them in every pair of buffers, a row's two
/// (keys and values) beside each other.
__device__ __forceinline__ void move_pool_rows(const CopyGeometry& g, i64 src, i64 dst, u32 rows) {
  const u32 two = g.pairs == 2, ways = rows << two;
#pragma unroll 1
  for (u32 first = 0; first < ways; first += 32) {
    const u32 w = first + lane_id(), lane = w >> two & 31u;
    const i64 from = __shfl_sync(kFull, src, lane), to = __shfl_sync(kFull, dst, lane);
    Way way{};
    if (w < ways && to >= 0) way = way_of(g.pair[two ? w & 1u : 0], g.paged, from, to);
    go_ways(g.vec, g.item, way, min(32u, ways - first));
  }
}

}  // namespace specstate::hisparse::cuda
