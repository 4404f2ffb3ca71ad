// Rows and tables between two swaps: staging, the window of a verify, acceptance. Everything is read on the GPU, nothing on the host.
//
// Accepting is one launch and one cluster a request. A warp takes a (position, layer): it reads what the tables say, moves the row (read once
// from the tail, stored to its host row and, where the slot of the position's own number is free, to that slot), and when all of the cluster
// have read, the warps of the last layer of each group write its tables. What a launch costs is latencies of memory one after the other, so
// all that hangs on the same is asked for together: ids and counts, then the length, then the tables, then the rows. Stores to the host do not wait for the link.
#include <algorithm>

#include "cuda/launch.hpp"
#include "hisparse/cuda/rows.cuh"
#include "hisparse/life.hpp"

namespace specstate::hisparse::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kAcceptThreads = 512;
constexpr int kMostLayers = 64, kMostGroups = 64;  // of one launch

// ------------------------------------------------------------------------------------------------------- rows by index

struct Ends {  // of one layer's rows
  const std::byte* src;
  std::byte* dst;
  i64 src_pitch, dst_pitch, src_rows, dst_rows;
};
struct CopyLayers {
  Ends at[kMostLayers];
  i64 count, item;
  int vec;
  bool paged;
};

__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const __grid_constant__ CopyRowsArgs x, const __grid_constant__ CopyLayers layers) {
  ptx::wait_for_previous();
  ptx::let_next_start();
  const u64 warps = gridDim.x * kWarps, work = static_cast<u64>(x.count) * static_cast<u64>(layers.count);
  for (u64 start = (threadIdx.x / 32) * gridDim.x + blockIdx.x; start < work; start += 32 * warps) {
    const u64 w = start + lane_id() * warps;
    Way way{};
    if (w < work) {
      const u64 i = w / static_cast<u64>(layers.count);
      const Ends& e = layers.at[w - i * static_cast<u64>(layers.count)];
      const i64 src = load_wide(x.src, static_cast<i64>(i), 0), dst = load_wide(x.dst, static_cast<i64>(i), 0);
      if (src >= 0 && dst >= 0 && src < e.src_rows && dst < e.dst_rows)
        way = way_between(layers.paged, e.src, e.src_pitch, src, e.dst, e.dst_pitch, dst);
    }
    go_ways(layers.vec, layers.item, way, static_cast<u32>(min(u64{32}, (work - start + warps - 1) / warps)));
  }
}

// -------------------------------------------------------------------------------------------------------------- windows

/// One batch row, judged as far as it can be without the tables: does it take part, and with what. Positions have 32 bits.
struct Row {
  i64 r;
  u32 length, width, taken;
  bool valid;
};
/// Of whole warps: a request that stands twice in the batch is looked for by all lanes.
__device__ __forceinline__ Row row_of(const WindowArgs& x, i64 b) {
  const i64 r = load_wide(x.requests, b, 0), width = load_wide(x.widths, b, 0), taken = x.accepted.data ? load_wide(x.accepted, b, 0) : 0;
  const i64 first = lane_id() < x.batch ? load_wide(x.requests, lane_id(), 0) : -1;
  const i64 real = x.num_real ? min(max(static_cast<i64>(*x.num_real), i64{0}), x.batch) : x.batch;
  const bool inside = b < real && r >= 0 && r < x.request_slots;
  const i64 length = inside ? x.lengths(r) : -1;
  bool twice = lane_id() < real && lane_id() != b && first == r;
#pragma unroll 1
  for (i64 other = 32 + lane_id(); other < real; other += 32) twice |= other != b && load_wide(x.requests, other, 0) == r;
  twice = __any_sync(kFull, twice);
  const bool valid = !twice && length >= 0 && length <= x.context && width >= 0 && width <= min(x.tail, x.context - length) && taken >= 0 &&
                     taken <= width;
  return {r, static_cast<u32>(length), static_cast<u32>(width), static_cast<u32>(taken), valid};
}
__device__ __forceinline__ i64 tail_column(const WindowArgs& x, u32 p) { return x.hot + p % static_cast<u32>(x.tail); }
/// Is the slot of the position's own number free?
__device__ __forceinline__ bool moves(const WindowArgs& x, const WindowTables& g, i64 r, i64 p) {
  return p < x.hot && g.slot_locs(r, p) >= 0 && g.slot_locs(r, p) < x.device_rows && g.slot_tokens(r, p) < 0;
}

struct BackupLayer {
  PairGeometry pair[2];
  i64 item;
  int pairs, vec, group;
};
struct Groups {
  WindowTables at[kMostGroups];
  i64 count;
  bool first, last;  // of the launches
};
struct BackupLayers {
  BackupLayer at[kMostLayers];
  WindowTables groups[kMostLayers];  // those of the layers
  i64 count;
  bool paged;
};
/// What one launch accepts. All that a warp needs of its layer stands together.
struct AcceptLayer {
  WindowTables tables;
  PairGeometry pair[2];
  i64 item;
  std::int32_t pairs, vec;  // no pairs: a group without layers
  bool last, hosts;         // of its group: changes its tables; and, of the first group, the table of host rows
};
struct Accepts {
  AcceptLayer layer[kMostLayers];
  u32 layers, cluster;
  bool paged, last;  // of the launches
};

template <class T>
__device__ __forceinline__ void copy_twice(const std::byte* from, std::byte* first, std::byte* second, i64 bytes) {
  for (i64 j = lane_id(); j < bytes / static_cast<i64>(sizeof(T)); j += 32) {
    const T piece = reinterpret_cast<const T*>(from)[j];
    reinterpret_cast<T*>(first)[j] = piece;
    if (second) reinterpret_cast<T*>(second)[j] = piece;
  }
}
__device__ __forceinline__ void copy_twice(int vec, const std::byte* from, std::byte* first, std::byte* second, i64 bytes) {
  if (vec == 16)
    copy_twice<uint4>(from, first, second, bytes);
  else if (vec >= 4)
    copy_twice<u32>(from, first, second, bytes);
  else
    copy_twice<std::uint8_t>(from, first, second, bytes);
}

/// One row from the GPU to the host and perhaps (null: not) to a second place on the GPU. A warp; pieces are aligned to the lines of the first
/// destination, since that is over the link.
template <class T>
__device__ __forceinline__ void back_up(const std::byte* from, std::byte* first, std::byte* second, u32 bytes) {
  constexpr u32 kSteps = sizeof(T) == 16 ? 2 : 4;
  const u32 skip = sizeof(T) > 1 ? static_cast<u32>(reinterpret_cast<u64>(first) / sizeof(T)) & (128 / sizeof(T) - 1) : 0;
  const u32 pieces = bytes / static_cast<u32>(sizeof(T));
#pragma unroll 1
  for (u32 j = lane_id() - skip; static_cast<std::int32_t>(j - lane_id()) < static_cast<std::int32_t>(pieces); j += 32 * kSteps) {
    T piece[kSteps];
#pragma unroll
    for (u32 q = 0; q < kSteps; ++q) piece[q] = reinterpret_cast<const T*>(from)[j + 32 * q < pieces ? j + 32 * q : 0];
#pragma unroll
    for (u32 q = 0; q < kSteps; ++q)
      if (j + 32 * q < pieces) {
        reinterpret_cast<T*>(first)[j + 32 * q] = piece[q];
        if (second != nullptr) reinterpret_cast<T*>(second)[j + 32 * q] = piece[q];
      }
  }
}
__device__ __forceinline__ void back_up(int vec, const std::byte* from, std::byte* first, std::byte* second, u32 bytes) {
  if (vec == 16)
    back_up<uint4>(from, first, second, bytes);
  else if (vec >= 4)
    back_up<u32>(from, first, second, bytes);
  else
    back_up<std::uint8_t>(from, first, second, bytes);
}

/// Batch row b, by a cluster.
__device__ __forceinline__ void accept_row(const WindowArgs& x, const Accepts& all, u32 b, u32 rank) {
  const u32 warps = all.cluster * kAcceptThreads / 32;
  u32 w = threadIdx.x / 32 * all.cluster + rank;
  const Row row = row_of(x, b);
  if (!row.valid) return;  // the same in all blocks of the cluster
  // What does not stand leaves the tail. By the warps that have rows last, if at all.
  const u32 others = (row.width - row.taken) * all.layers;
  if (threadIdx.x >= kAcceptThreads - 64)
    for (u32 i = rank * 64 + threadIdx.x - (kAcceptThreads - 64); i < others; i += all.cluster * 64) {
      const u32 j = i / all.layers;
      const AcceptLayer& l = all.layer[i - j * all.layers];
      if (l.last) l.tables.slot_tokens(row.r, tail_column(x, row.length + row.taken + j)) = -1;
    }
  const u32 work = row.taken * all.layers;
  // A group's last layer comes last of those of a position, so in no earlier round.
#pragma unroll 1
  for (u32 round = 0; round < work; round += warps, w += warps) {
    const u32 j = w / all.layers, p = row.length + j;
    const AcceptLayer& l = all.layer[w - j * all.layers];
    const WindowTables& t = l.tables;
    const i64 r = row.r, column = tail_column(x, p);
    bool stands = false, promote = false;
    std::int32_t tail = -1, there = -1, clock = 0;
    i64 host = -1;
    if (w < work) {
      const bool low = p < x.hot;
      const u32 page = static_cast<u32>(min(x.page, i64{INT32_MAX})), entry = p / page;
      const i64 reserved = load_wide(x.reserved, r, entry), own = low ? p : 0;
      const std::int32_t held = t.slot_tokens(r, own);
      tail = t.slot_locs(r, column), there = t.slot_locs(r, own), clock = t.clock(r);
      if (reserved >= 0 && reserved <= x.most_entry) host = reserved * x.page + (p - entry * page);
      stands = host >= 0 && host < x.host_rows && tail >= 0 && tail < x.device_rows;
      promote = stands && low && there >= 0 && there < x.device_rows && held < 0;
    }
    cluster_arrive_quietly();
    if (stands)
#pragma unroll 1
      for (int i = 0; i < l.pairs; ++i) {
        const PairGeometry& pool = l.pair[i];
        const std::byte* const from = value_at(pool.device, pool.device_pitch, all.paged, tail);
        std::byte *const to = value_at(pool.host, pool.host_pitch, all.paged, host), *const also =
                                                                                         promote ? value_at(pool.device, pool.device_pitch,
                                                                                                            all.paged, there)
                                                                                                 : nullptr;
        if (all.paged && lane_id() < layout::kScaleBytes) {
          const std::byte scale = scale_at(pool.device, tail)[lane_id()];
          scale_at(pool.host, host)[lane_id()] = scale;
          if (promote) scale_at(pool.device, there)[lane_id()] = scale;
        }
        back_up(l.vec, from, to, also, static_cast<u32>(l.item));
      }
    cluster_wait();  // all have read the tables, and the length
    if (w >= work || !l.last || lane_id() != 0) continue;
    if (promote) {
      t.slot_tokens(r, p) = static_cast<std::int32_t>(p);
      t.stamps(r, p) = layout::hit_stamp(clock);
      t.hints.store(r, p, p);
    }
    if (!stands || promote) t.slot_tokens(r, column) = -1;
    if (stands && l.hosts) x.host_locs.store(r, p, host);
  }
  if (all.last && row.taken > 0 && rank == 0 && threadIdx.x == 0) x.lengths(row.r) = static_cast<std::int32_t>(row.length + row.taken);
}

/// A cluster a batch row, or, of a call with a budget, some rows one behind the other. Stores to the host are slow, and what else lies on a multiprocessor waits
/// behind them; few multiprocessors write as fast as the link takes it.
__global__ void __launch_bounds__(kAcceptThreads) accept_kernel(const __grid_constant__ WindowArgs x, const __grid_constant__ Accepts all) {
  const u32 first = blockIdx.x / all.cluster, rank = blockIdx.x - first * all.cluster, clusters = gridDim.x / all.cluster;
  ptx::wait_for_previous();
  ptx::let_next_start();
#pragma unroll 1
  for (u32 b = first; b < x.batch; b += clusters) accept_row(x, all, b, rank);
}

/// One block a batch row: opens its window in the tail columns of all groups.
__global__ void __launch_bounds__(kThreads) open_kernel(const __grid_constant__ WindowArgs x, const __grid_constant__ Groups groups) {
  ptx::wait_for_previous();
  ptx::let_next_start();
  const i64 b = blockIdx.x;
  const Row row = row_of(x, b);
  if (x.locs && groups.first)
    for (i64 j = threadIdx.x; j < x.locs_width; j += kThreads)
      x.locs(b, j) = row.valid && j < row.width ? groups.at[0].slot_locs(row.r, tail_column(x, row.length + static_cast<u32>(j))) : -1;
  if (!row.valid) return;
  const u32 count = static_cast<u32>(groups.count);
  for (u32 w = threadIdx.x; w < row.width * count; w += kThreads) {
    const u32 j = w / count, p = row.length + j;
    groups.at[w - j * count].slot_tokens(row.r, tail_column(x, p)) = static_cast<std::int32_t>(p);
  }
}

// ----------------------------------------------------------------------------------- the life of a request (life.hpp)

constexpr int kMostValues = 960;  // of one launch: they travel as its argument, so nobody waits for a copy of them
struct Values {
  std::int32_t at[kMostValues];
  std::int32_t* to;
  int count;
};
__global__ void put_kernel(const __grid_constant__ Values x) {
  ptx::wait_for_previous();
  for (int i = threadIdx.x; i < x.count; i += blockDim.x) x.to[i] = x.at[i];
}

/// Hot slots [first, last) of request r are empty. Block (x): a group.
__global__ void empty_slots_kernel(const __grid_constant__ Groups groups, i64 r, i64 first, i64 last) {
  ptx::wait_for_previous();
  const WindowTables& g = groups.at[blockIdx.x];
  for (i64 c = first + threadIdx.x; c < last; c += blockDim.x) {
    g.slot_tokens(r, c) = -1;
    g.stamps(r, c) = 0;
  }
}

struct DropArgs {
  WindowArgs window;
  Strided2<std::int32_t> pages, scratch;
  i64 scratch_rows, page_entries, first, requests;
  bool whole;
};
/// Block (x, y, z): columns x, requests y, and z either a group or, the last of the first launch, the tables of all.
__global__ void __launch_bounds__(kThreads) drop_kernel(const __grid_constant__ DropArgs x, const __grid_constant__ Groups groups) {
  ptx::wait_for_previous();
  const WindowArgs& a = x.window;
  const i64 first = blockIdx.x * static_cast<i64>(kThreads) + threadIdx.x, step = gridDim.x * static_cast<i64>(kThreads);
  for (i64 r = x.first + blockIdx.y; r < x.first + x.requests; r += gridDim.y) {
    if (blockIdx.z < groups.count) {
      const WindowTables& g = groups.at[blockIdx.z];
      for (i64 c = first; c < a.hot + a.tail; c += step) g.slot_tokens(r, c) = -1;
      for (i64 c = first; c < a.hot; c += step) g.stamps(r, c) = 0;
      for (i64 t = first; t < a.context; t += step) g.hints.store(r, t, -1);
      if (first == 0) g.clock(r) = 0;
      continue;
    }
    for (i64 c = first; c < a.hot + a.tail; c += step) groups.at[0].slot_locs(r, c) = -1;
    for (i64 c = first; c < x.scratch_rows; c += step) x.scratch(r, c) = -1;
    if (!x.whole) continue;
    for (i64 t = first; t < a.context; t += step) a.host_locs.store(r, t, -1);
    for (i64 c = first; c < x.page_entries; c += step) x.pages(r, c) = -1;
    if (first == 0) a.lengths(r) = 0;
  }
}

struct StageArgs {
  WindowArgs window;
  WindowTables tables;
  BackupLayer layer;
  GivenRows rows;
  i64 r, first, count;
  bool to_window, paged;
};
/// A warp a row.
__global__ void __launch_bounds__(kThreads) stage_kernel(const __grid_constant__ StageArgs x) {
  ptx::wait_for_previous();
  const WindowArgs& a = x.window;
  for (i64 k = blockIdx.x * kWarps + threadIdx.x / 32; k < x.count; k += gridDim.x * kWarps) {
    const i64 row = x.to_window ? x.tables.slot_locs(x.r, tail_column(a, a.lengths(x.r) + x.first + k)) : a.reserved_row(x.r, x.first + k);
    if (row < 0 || row >= (x.to_window ? a.device_rows : a.host_rows)) continue;
    for (int i = 0; i < x.layer.pairs; ++i) {
      const PairGeometry& pool = x.layer.pair[i];
      const std::byte *const from = x.rows.from[i] + k * x.rows.pitch[i], *const base = x.to_window ? pool.device : pool.host;
      copy_twice(x.layer.vec, from, value_at(base, x.to_window ? pool.device_pitch : pool.host_pitch, x.paged, row), nullptr, x.layer.item);
      if (x.paged) copy_twice<std::uint8_t>(from + layout::kValueBytes, scale_at(base, row), nullptr, layout::kScaleBytes);
    }
  }
}

/// Positions [first, last) below the hot slots; a lane finds a (position, layer, pair), the warp moves them.
__global__ void __launch_bounds__(kThreads)
    load_kernel(const __grid_constant__ WindowArgs x, const __grid_constant__ BackupLayers layers, i64 r, i64 first, i64 last) {
  ptx::wait_for_previous();
  for (i64 l = blockIdx.y; l < layers.count; l += gridDim.y) {
    const BackupLayer& layer = layers.at[l];
    const WindowTables& g = layers.groups[layer.group];
    for (i64 p = first + 32 * (blockIdx.x * kWarps + threadIdx.x / 32); p < last; p += 32 * gridDim.x * kWarps) {
      const i64 mine = p + lane_id(), host = mine < last ? x.host_locs(r, mine) : -1;
      const i64 slot = mine < last && host >= 0 && host < x.host_rows && moves(x, g, r, mine) ? g.slot_locs(r, mine) : -1;
      for (int i = 0; i < layer.pairs; ++i) {
        const PairGeometry& pool = layer.pair[i];
        Way way{};
        if (slot >= 0) {
          way = way_of(pool, layers.paged, host, slot);
        }
        go_ways(layer.vec, layer.item, way, static_cast<u32>(min(i64{32}, last - p)));
      }
    }
  }
}
__global__ void __launch_bounds__(kThreads)
    loaded_kernel(const __grid_constant__ WindowArgs x, const __grid_constant__ Groups groups, i64 r, i64 first, i64 last) {
  ptx::wait_for_previous();
  const WindowTables& g = groups.at[blockIdx.y];
  for (i64 p = first + blockIdx.x * static_cast<i64>(kThreads) + threadIdx.x; p < last; p += gridDim.x * static_cast<i64>(kThreads)) {
    const i64 host = x.host_locs(r, p);
    if (host < 0 || host >= x.host_rows || !moves(x, g, r, p)) continue;
    g.slot_tokens(r, p) = static_cast<std::int32_t>(p);
    g.stamps(r, p) = layout::hit_stamp(g.clock(r));
    g.hints.store(r, p, p);
  }
}

/// Block (x, y): positions x; y a group or, the last of the first launch, host rows and the length.
__global__ void __launch_bounds__(kThreads)
    commit_kernel(const __grid_constant__ WindowArgs x, const __grid_constant__ Groups groups, i64 r, i64 first, i64 last) {
  ptx::wait_for_previous();
  const bool all = blockIdx.y == groups.count;
  for (i64 p = first + blockIdx.x * static_cast<i64>(kThreads) + threadIdx.x; p < last; p += gridDim.x * static_cast<i64>(kThreads))
    if (all)
      x.host_locs.store(r, p, x.reserved_row(r, p));
    else if (p >= last - x.tail)  // the tail is a ring over positions: what these push out of it must not stay findable
      groups.at[blockIdx.y].slot_tokens(r, tail_column(x, p)) = -1;
  if (all && blockIdx.x == 0 && threadIdx.x == 0) x.lengths(r) = static_cast<std::int32_t>(last);
}

/// The launches of `each`(groups of one launch).
template <class Each>
void by_groups(const std::vector<WindowTables>& groups, Each&& each) {
  for (std::size_t first = 0; first < groups.size(); first += kMostGroups) {
    Groups some{};
    some.count = static_cast<i64>(std::min<std::size_t>(kMostGroups, groups.size() - first));
    std::copy_n(groups.begin() + static_cast<std::ptrdiff_t>(first), some.count, some.at);
    some.first = first == 0;
    some.last = first + kMostGroups >= groups.size();
    each(some);
  }
}
BackupLayer layer_of(const WindowLayer& from, int group) {
  const CopyGeometry g = geometry(from.copy);
  return {{g.pair[0], g.pair[1]}, g.item, g.pairs, g.vec, group};
}
template <class Each>
void by_layers(const std::vector<WindowTables>& groups, const std::vector<WindowLayer>& all, Each&& each) {
  for (std::size_t first = 0; first < all.size(); first += kMostLayers) {
    BackupLayers layers{};
    layers.count = static_cast<i64>(std::min<std::size_t>(kMostLayers, all.size() - first));
    i64 group = -1;
    int groups_here = 0;
    for (i64 l = 0; l < layers.count; ++l) {
      const WindowLayer& from = all[first + static_cast<std::size_t>(l)];
      if (from.group != group) layers.groups[groups_here++] = groups[static_cast<std::size_t>(group = from.group)];
      layers.at[l] = layer_of(from, groups_here - 1);
      layers.paged = from.copy.paged;
    }
    each(layers);
  }
}
specstate::cuda::Launch after_previous(dim3 grid, int threads = kThreads) {
  specstate::cuda::Launch shape;
  shape.grid = grid;
  shape.block = static_cast<unsigned>(threads);
  shape.overlap = true;
  return shape;
}
/// Blocks along x for n entries, some of which a thread takes one after another.
unsigned entry_blocks(i64 n) { return static_cast<unsigned>(std::clamp<i64>((n + 4 * kThreads - 1) / (4 * kThreads), 1, 64)); }

}  // namespace

void run(const CopyRowsArgs& x, const std::vector<CopyRowsLayer>& all, Stream stream) {
  if (x.count == 0) return;
  for (std::size_t first = 0; first < all.size(); first += kMostLayers) {
    CopyLayers layers{};
    layers.count = static_cast<i64>(std::min<std::size_t>(kMostLayers, all.size() - first));
    layers.paged = x.paged;
    layers.item = x.paged ? layout::kValueBytes : x.item_bytes;
    u64 together = static_cast<u64>(layers.item);
    for (i64 l = 0; l < layers.count; ++l) {
      const CopyRowsLayer& c = all[first + static_cast<std::size_t>(l)];
      layers.at[l] = {c.src.base, c.dst.base, c.src.pitch, c.dst.pitch, c.src.rows, c.dst.rows};
      together |= reinterpret_cast<u64>(c.src.base) | reinterpret_cast<u64>(c.dst.base);
      if (!x.paged) together |= static_cast<u64>(c.src.pitch) | static_cast<u64>(c.dst.pitch);
    }
    layers.vec = together % 16 == 0 ? 16 : together % 8 == 0 ? 8 : together % 4 == 0 ? 4 : 1;
    specstate::cuda::Launch shape;
    shape.grid = copy_blocks(x.count * layers.count, kWarps, 64, x.sm_budget);
    shape.block = kThreads;
    shape.overlap = true;
    specstate::cuda::launch(&copy_rows_kernel, shape, stream, x, layers);
  }
}

void run(const WindowArgs& x, const std::vector<WindowTables>& groups, const std::vector<WindowLayer>& all, Stream stream) {
  if (x.batch == 0) return;
  if (!x.accepted.data) {
    by_groups(groups, [&](const Groups& some) {
      specstate::cuda::launch(&open_kernel, after_previous(specstate::cuda::blocks_for(x.batch, 1)), stream, x, some);
    });
    return;
  }
  std::vector<std::vector<const WindowLayer*>> of(groups.size());
  for (const WindowLayer& l : all) of[static_cast<std::size_t>(l.group)].push_back(&l);
  Accepts now{};
  now.paged = !all.empty() && all[0].copy.paged;
  const auto go = [&](bool last) {
    now.last = last;
    specstate::cuda::Launch shape;
    // A warp a row of windows as they mostly are; it takes more where there are more.
    const i64 rows = now.layers * std::min<i64>(x.tail, 4);
    const i64 budget = x.sm_budget > 0 ? x.sm_budget : INT32_MAX;
    shape.cluster = now.cluster = static_cast<u32>(std::clamp<i64>(rows * 32 / kAcceptThreads, 1, std::min<i64>(8, budget)));
    shape.grid = specstate::cuda::blocks_for(std::min(x.batch, budget / shape.cluster) * shape.cluster, 1);
    shape.block = kAcceptThreads;
    shape.overlap = true;
    specstate::cuda::launch(&accept_kernel, shape, stream, x, now);
    now.layers = 0;
  };
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (std::size_t l = 0, n = std::max<std::size_t>(of[g].size(), 1); l < n; ++l) {
      if (now.layers == kMostLayers) go(false);
      AcceptLayer& to = now.layer[now.layers++] = {};
      to.tables = groups[g];
      to.last = l + 1 == n;
      to.hosts = to.last && g == 0;
      if (of[g].empty()) continue;
      const CopyGeometry from = geometry(of[g][l]->copy);
      to.pair[0] = from.pair[0], to.pair[1] = from.pair[1], to.item = from.item, to.pairs = from.pairs, to.vec = from.vec;
    }
  go(true);
}

void put(std::int32_t* to, std::span<const std::int32_t> values, Stream stream) {
  for (std::size_t first = 0; first < values.size(); first += kMostValues) {
    Values x;
    x.to = to + first;
    x.count = static_cast<int>(std::min<std::size_t>(kMostValues, values.size() - first));
    std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(first), x.count, x.at);
    specstate::cuda::launch(&put_kernel, after_previous(1), stream, x);
  }
}

void give_rows(const Life& life, std::int64_t r, std::int64_t column, std::span<const std::int32_t> rows, Stream stream) {
  if (rows.empty()) return;
  put(&life.groups[0].slot_locs.data[r * life.groups[0].slot_locs.s0 + column], rows, stream);
  const i64 last = std::min(column + static_cast<i64>(rows.size()), life.window.hot);
  if (column < last)
    by_groups(life.groups, [&](const Groups& some) {
      specstate::cuda::launch(&empty_slots_kernel, after_previous(static_cast<unsigned>(some.count)), stream, some, r, column, last);
    });
}

void drop(const Life& life, std::int64_t r, std::int64_t n, bool whole, Stream stream) {
  const DropArgs x{life.window, life.pages, life.scratch, life.scratch_rows, life.page_entries, r, n, whole};
  by_groups(life.groups, [&](const Groups& some) {
    const dim3 grid(entry_blocks(life.window.context), static_cast<unsigned>(std::clamp<i64>(n, 1, 1024)),
                    static_cast<unsigned>(some.count + some.first));
    specstate::cuda::launch(&drop_kernel, after_previous(grid), stream, x, some);
  });
}

namespace {
void stage(const Life& life, i64 layer, i64 r, i64 first, i64 n, const GivenRows& rows, bool to_window, Stream stream) {
  if (n == 0) return;
  const WindowLayer& from = life.layers[static_cast<std::size_t>(layer)];
  StageArgs x{life.window, life.groups[0], layer_of(from, 0), rows, r, first, n, to_window, from.copy.paged};
  u64 together = x.layer.item;
  for (int i = 0; i < x.layer.pairs; ++i) together |= reinterpret_cast<u64>(rows.from[i]) | (n > 1 ? static_cast<u64>(rows.pitch[i]) : 0);
  while (together % static_cast<u64>(x.layer.vec) != 0) x.layer.vec /= 2;
  specstate::cuda::launch(&stage_kernel, after_previous(copy_blocks(n, kWarps, 64, 0)), stream, x);
}
}  // namespace

void stage(const Life& life, std::int64_t layer, std::int64_t r, std::int64_t first, std::int64_t n, const GivenRows& rows, Stream stream) {
  stage(life, layer, r, first, n, rows, false, stream);
}
void write(const Life& life, std::int64_t layer, std::int64_t r, std::int64_t j, const GivenRows& row, Stream stream) {
  stage(life, layer, r, j, 1, row, true, stream);
}

void load(const Life& life, std::int64_t r, std::int64_t first, std::int64_t last, Stream stream) {
  last = std::min(last, life.window.hot);
  if (first >= last) return;
  by_layers(life.groups, life.layers, [&](const BackupLayers& layers) {
    const dim3 grid(copy_blocks(last - first, 32 * kWarps, 16, 0), static_cast<unsigned>(layers.count));
    specstate::cuda::launch(&load_kernel, after_previous(grid), stream, life.window, layers, r, first, last);
  });
  by_groups(life.groups, [&](const Groups& some) {
    const dim3 grid(entry_blocks(last - first), static_cast<unsigned>(some.count));
    specstate::cuda::launch(&loaded_kernel, after_previous(grid), stream, life.window, some, r, first, last);
  });
}

void commit(const Life& life, std::int64_t r, std::int64_t first, std::int64_t last, Stream stream) {
  by_groups(life.groups, [&](const Groups& some) {
    const dim3 grid(entry_blocks(last - first), static_cast<unsigned>(some.count + some.first));
    specstate::cuda::launch(&commit_kernel, after_previous(grid), stream, life.window, some, r, first, last);
  });
}

void copy_table(void* to, const void* from, std::int64_t bytes, Stream stream) {
  SPECSTATE_CUDA_CHECK(
      cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice, specstate::cuda::native(stream)));
}

}  // namespace specstate::hisparse::cuda
