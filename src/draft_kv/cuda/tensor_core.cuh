#pragma once
// What the products need of Hopper beyond cuda/ptx.cuh: tiles by tensor map, and the warpgroup matrix products of 64 rows.
//
// Tiles in shared memory hold 64 values of the summed dimension a row, 128 bytes, in the 128-byte swizzle: the 16-byte piece p of row r lies at
// piece p ^ (r % 8). A tile starts at a multiple of 1024 bytes.
#include <cuda.h>

#include <type_traits>

#include "core/numeric.hpp"
#include "cuda/ptx.cuh"
#include "draft_kv/cuda/problem.hpp"

namespace specstate::draft_kv::cuda {

namespace ptx = specstate::cuda::ptx;

/// One box of a tensor map into shared memory, from element c0 of row c1 on; `barrier` counts the bytes.
__device__ __forceinline__ void tile_load(void* to, const CUtensorMap& map, int c0, int c1, std::uint64_t* barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::
          "r"(ptx::shared(to)),
      "l"(&map), "r"(c0), "r"(c1), "r"(ptx::shared(barrier)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

/// The descriptor of a swizzled tile: 8 rows every 1024 bytes. 16 values further along the rows: + 2.
__device__ __forceinline__ std::uint64_t tile_descriptor_at(std::uint32_t tile) {
  return (static_cast<std::uint64_t>(1) << 62) | (static_cast<std::uint64_t>(64) << 32) | (static_cast<std::uint64_t>(1) << 16) |
         ((tile & 0x3FFFF) >> 4);
}
__device__ __forceinline__ std::uint64_t tile_descriptor(const void* tile) { return tile_descriptor_at(ptx::shared(tile)); }

/// Registers and shared memory as earlier code left them, for the products that follow.
__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Until all groups are finished. The accumulators pass through, so that no use of them moves before the wait.
template <int kN>
__device__ __forceinline__ void product_wait_for(float (&d)[kN]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int j = 0; j < kN; ++j) asm volatile("" : "+f"(d[j])::"memory");
}

/// Until at most one group is unfinished: the tiles that the others read are free again. Nobody may look at accumulators yet.
__device__ __forceinline__ void product_wait_all_but_one() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

// An instruction's registers are text: %0 to %7, and so on, and what they are, eight at a time.
#define SPECSTATE_EIGHT(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define SPECSTATE_NAMES_16 SPECSTATE_EIGHT(0, 1, 2, 3, 4, 5, 6, 7) ", " SPECSTATE_EIGHT(8, 9, 10, 11, 12, 13, 14, 15)
#define SPECSTATE_NAMES_32 \
  SPECSTATE_NAMES_16 ", " SPECSTATE_EIGHT(16, 17, 18, 19, 20, 21, 22, 23) ", " SPECSTATE_EIGHT(24, 25, 26, 27, 28, 29, 30, 31)
#define SPECSTATE_NAMES_40 SPECSTATE_NAMES_32 ", " SPECSTATE_EIGHT(32, 33, 34, 35, 36, 37, 38, 39)
#define SPECSTATE_NAMES_48 SPECSTATE_NAMES_40 ", " SPECSTATE_EIGHT(40, 41, 42, 43, 44, 45, 46, 47)
#define SPECSTATE_NAMES_64 \
  SPECSTATE_NAMES_48 ", " SPECSTATE_EIGHT(48, 49, 50, 51, 52, 53, 54, 55) ", " SPECSTATE_EIGHT(56, 57, 58, 59, 60, 61, 62, 63)
#define SPECSTATE_NAMES_80 \
  SPECSTATE_NAMES_64 ", " SPECSTATE_EIGHT(64, 65, 66, 67, 68, 69, 70, 71) ", " SPECSTATE_EIGHT(72, 73, 74, 75, 76, 77, 78, 79)
#define SPECSTATE_NAMES_96 \
  SPECSTATE_NAMES_80 ", " SPECSTATE_EIGHT(80, 81, 82, 83, 84, 85, 86, 87) ", " SPECSTATE_EIGHT(88, 89, 90, 91, 92, 93, 94, 95)
#define SPECSTATE_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SPECSTATE_D_16 SPECSTATE_D8(0), SPECSTATE_D8(8)
#define SPECSTATE_D_32 SPECSTATE_D_16, SPECSTATE_D8(16), SPECSTATE_D8(24)
#define SPECSTATE_D_40 SPECSTATE_D_32, SPECSTATE_D8(32)
#define SPECSTATE_D_48 SPECSTATE_D_40, SPECSTATE_D8(40)
#define SPECSTATE_D_64 SPECSTATE_D_48, SPECSTATE_D8(48), SPECSTATE_D8(56)
#define SPECSTATE_D_80 SPECSTATE_D_64, SPECSTATE_D8(64), SPECSTATE_D8(72)
#define SPECSTATE_D_96 SPECSTATE_D_80, SPECSTATE_D8(80), SPECSTATE_D8(88)
// Of `columns` columns, half as many registers; `a`, `b` and `add` are the operands behind these.
#define SPECSTATE_PRODUCT(columns, io, registers, a_, b_, add_)                                                   \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add_                                                     \
               ", 0;\n"                                                                                           \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." io "." io " {" SPECSTATE_NAMES_##registers \
               "}, %" #a_ ", %" #b_ ", add, 1, 1, 0, 0;\n}\n"                                                     \
               : SPECSTATE_D_##registers                                                                          \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define SPECSTATE_PRODUCTS(columns, registers, a_, b_, add_)       \
  if constexpr (kN == columns) {                                   \
    if constexpr (std::is_same_v<Io, core::bfloat16>)              \
      SPECSTATE_PRODUCT(columns, "bf16", registers, a_, b_, add_); \
    else                                                           \
      SPECSTATE_PRODUCT(columns, "f16", registers, a_, b_, add_);  \
  }

/// d (+)= a b^T for a [64, 16] and b [kN, 16]; `add` false: d [kN / 2] is overwritten. A thread of lane l in warp w of the group holds, for the
/// columns 8 j + 2 (l % 4) + {0, 1}, d[4 j + {0, 1}] of row 16 w + l / 4 and d[4 j + {2, 3}] of the row 8 further.
template <class Io, int kN>
__device__ __forceinline__ void product_of(float* d, std::uint64_t a, std::uint64_t b, bool add) {
  static_assert(kN == 32 || kN == 64 || kN == 80 || kN == 96 || kN == 128 || kN == 160 || kN == 192);
  SPECSTATE_PRODUCTS(32, 16, 16, 17, 18)
  SPECSTATE_PRODUCTS(64, 32, 32, 33, 34)
  SPECSTATE_PRODUCTS(80, 40, 40, 41, 42)
  SPECSTATE_PRODUCTS(96, 48, 48, 49, 50)
  SPECSTATE_PRODUCTS(128, 64, 64, 65, 66)
  SPECSTATE_PRODUCTS(160, 80, 80, 81, 82)
  SPECSTATE_PRODUCTS(192, 96, 96, 97, 98)
}

#undef SPECSTATE_PRODUCTS
#undef SPECSTATE_PRODUCT

// ----------------------------------------------------------------------------------------------------- other blocks of a cluster

__device__ __forceinline__ std::uint32_t address_in_block(const void* p, std::uint32_t rank) {
  std::uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(ptx::shared(p)), "r"(rank));
  return address;
}

/// The same of an address.
__device__ __forceinline__ std::uint32_t address_in_block(std::uint32_t p, std::uint32_t rank) {
  std::uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(p), "r"(rank));
  return address;
}
/// Arrives at a barrier of any block of the cluster. No `.release.cluster`: that waits for all of this thread's accesses to memory, at every stage (MEMBAR.ALL.GPU).
__device__ __forceinline__ void release_in_block(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// tile_load() to the same place of all blocks of the cluster that `blocks` has a bit of; the barrier at the same place of each counts the bytes.
__device__ __forceinline__ void tile_load_to_all(void* to, const CUtensorMap& map, int c0, int c1, std::uint64_t* barrier,
                                                 std::uint16_t blocks, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%2, "
      "%3}], [%4], %5, %6;" ::"r"(ptx::shared(to)),
      "l"(&map), "r"(c0), "r"(c1), "r"(ptx::shared(barrier)), "h"(blocks), "l"(policy)
      : "memory");
}

// ------------------------------------------------------------------------------------------------------- products by a ring of stages

/// One group of four warps that multiplies stage by stage: 64 rows of Io by kN columns, from a ring that others fill. A stage's `full` barrier says that it is there; each warp arrives
/// at `empty` when the products that read the stage have ended, which it knows when at most the next stage's are unfinished. Where kBlocks fill each other's rings by multicast, lane r arrives
/// at block r's.
template <class Io, int kN, int kBlocks = 1>
struct StageProducts {
  std::uint32_t ring, stage_bytes;  // address; within a stage, the group's rows lie at `rows`, the columns at `columns`
  std::uint32_t rows, columns;
  std::uint32_t full, empty;  // addresses, 8 bytes a stage
  int stages;
  bool copied;  // by threads: what their barrier has made visible to this one becomes so to the tensor cores
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void multiply(float (&d)[kN / 2], bool add) {  // by the stage that is next
    const std::uint32_t m = ring + stage * stage_bytes;
    ptx::barrier_wait_at(full + 8 * stage, parity);
    if (copied) ptx::fence_async();
    const std::uint64_t a = tile_descriptor_at(m + rows), b = tile_descriptor_at(m + columns);
    product_fence();
#pragma unroll
    for (int s = 0; s < kDepth / 16; ++s) product_of<Io, kN>(d, a + 2 * s, b + 2 * s, add || s > 0);
    product_commit();
  }
  __device__ __forceinline__ void release() const {  // the stage before the newest one
    const std::uint32_t at = empty + 8 * (stage > 0 ? stage - 1 : stages - 1);
    if constexpr (kBlocks == 1) {
      if (threadIdx.x % 32 == 0) ptx::barrier_arrive_at(at);
    } else {
      if (threadIdx.x % 32 < kBlocks) release_in_block(address_in_block(at, threadIdx.x % 32));
    }
  }
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void others(float (&d)[kN / 2], int count) {  // all stages of a run but the first
#pragma unroll 1
    for (int k = 1; k < count; ++k) multiply(d, true), product_wait_all_but_one(), release(), next();
  }
  __device__ __forceinline__ void run(float (&d)[kN / 2], int count) {  // a run of so many stages, from zero; all its stages are free again
    multiply(d, false), next(), others(d, count);
    product_wait_for(d), release();
  }
  /// Adds the runs from `begin` to `end` to `sum`, in rising order.
  __device__ __forceinline__ void add_runs(float (&sum)[kN / 2], float (&d)[kN / 2], const Runs& runs, int begin, int end) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      run(d, runs.length(i));
#pragma unroll
      for (int j = 0; j < kN / 2; ++j) sum[j] += d[j];
    }
  }
};

}  // namespace specstate::draft_kv::cuda
