// Acceptance on the GPU. What it decides equals the CPU's to the bit: the same comparisons on the same float64 values, sums in the same
// order (RunningSum of layout.hpp, whose blocks and groups are summed by different threads here). A row that the CPU would refuse for
// what it holds is a padding row: length 0, tokens 0. One launch a call; every output is written.
#include <algorithm>
#include <string>

#include "accept/args.hpp"
#include "accept/layout.hpp"
#include "core/match.hpp"
#include "cuda/launch.hpp"
#include "cuda/ptx.cuh"

namespace specstate::accept::cuda {

namespace ptx = specstate::cuda::ptx;
using specstate::cuda::blocks_for;
using specstate::cuda::launch;

namespace {

constexpr int kWarp = 32;

// ------------------------------------------------------------------------------------------------------------------- greedy

constexpr int kGreedyWarps = 4;

/// A warp a row. Lane i looks at columns i, i + 32, ...: a ballot finds the first proposal that falls, then the row is written whole.
template <class Token>
__global__ void __launch_bounds__(kWarp* kGreedyWarps) greedy(const VerifyGreedyArgs x) {
  ptx::wait_for_previous();
  ptx::let_next_start();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t r = std::int64_t{blockIdx.x} * kGreedyWarps + threadIdx.x / kWarp;
  if (r >= x.batch) return;
  const Token* c = static_cast<const Token*>(x.candidates) + r * x.candidates_stride[0];
  const Token* t = static_cast<const Token*>(x.target_argmax) + r * x.target_stride[0];
  Token* o = static_cast<Token*>(x.out_tokens) + r * x.out_stride[0];
  const std::int64_t width = x.verify_lens.given() ? index_at(x.verify_lens, r * x.verify_lens.strides[0]) : x.width;
  const bool padding = width < 1 || width > x.width;

  std::int64_t a = padding ? -1 : width - 1;  // proposals that stand
  for (std::int64_t begin = 0; begin + 1 < width && !padding; begin += kWarp) {
    const std::int64_t j = begin + lane;
    bool falls = false;
    if (j + 1 < width) {
      const Token proposal = c[(j + 1) * x.candidates_stride[1]];
      falls = proposal < 0 || proposal != t[j * x.target_stride[1]];
    }
    if (const unsigned fallen = __ballot_sync(~0u, falls)) {
      a = begin + __ffs(static_cast<int>(fallen)) - 1;
      break;
    }
  }
  for (std::int64_t j = lane; j < x.width; j += kWarp) {
    Token token = 0;
    if (j < a) token = c[(j + 1) * x.candidates_stride[1]];
    if (j == a) token = t[a * x.target_stride[1]];
    o[j * x.out_stride[1]] = token;
  }
  if (lane == 0) x.accept_lens[r * x.accept_stride] = static_cast<std::int32_t>(a + 1);
}

// ---------------------------------------------------------------------------------------------------------------- rejection

constexpr int kThreads = 512, kBlocks = 256;         // a tile: 256 sum blocks, one a thread of the first 256
constexpr std::int64_t kTile = kBlocks * kSumBlock;  // ids
constexpr std::int64_t kGroupsOfTile = kTile / kSumGroup;
constexpr int kPitch = kSumBlock + 1;  // a sum block in shared memory: neighbours start on other banks
constexpr int kMaxGroups = 1024;       // of a row: 4.2 million ids
constexpr std::size_t kTileBytes = sizeof(double) * kBlocks * kPitch;

struct RejectionShared {
  double group[kMaxGroups];  // in the first block of the cluster: sums of the groups of the row
  double block[kBlocks];
  double threshold, before;  // of the draw; the sum of what stands before the group in hand
  std::int64_t accepted;     // proposals that stand, -1: a padding row
  std::int64_t proposal;     // the one that fell
  std::int64_t token;
  int last;  // in the first block: the last id with mass, -1: none
  int drawn_group;
  bool fell;
};

/// Does proposal j + 1 fall?
__device__ bool falls(const VerifyRejectionArgs& x, std::int64_t r, std::int64_t j) {
  const std::int64_t d = index_at(x.candidates, element_offset(x.candidates, r, j + 1));
  if (d < 0 || d >= x.vocab) return true;
  const auto probability = [&](const TensorView& t) { return mass(real_at(t, element_offset(t, r, j) + d * t.strides[2])); };
  const double q = x.draft_probs.given() ? probability(x.draft_probs) : 1;
  return !(real_at(x.uniforms, element_offset(x.uniforms, r, j)) * q < probability(x.target_probs));
}

/// One warp: how many proposals of row r stand.
__device__ void judge(const VerifyRejectionArgs& x, std::int64_t r, RejectionShared& s) {
  const int lane = static_cast<int>(threadIdx.x);
  const std::int64_t width = x.verify_lens.given() ? index_at(x.verify_lens, r * x.verify_lens.strides[0]) : x.width;
  bool bad = width < 1 || width > x.width;
  for (std::int64_t j = lane; j < x.width; j += kWarp) {
    const double u = real_at(x.uniforms, element_offset(x.uniforms, r, j));
    bad = bad || !(u >= 0 && u <= 1);
  }
  const bool padding = __any_sync(~0u, bad);
  std::int64_t a = padding ? -1 : width - 1;
  bool fell = false;
  for (std::int64_t begin = 0; begin + 1 < width && !padding && !fell; begin += kWarp) {
    const unsigned fallen = __ballot_sync(~0u, begin + lane + 1 < width && falls(x, r, begin + lane));
    if (fallen) a = begin + __ffs(static_cast<int>(fallen)) - 1, fell = true;
  }
  if (lane == 0) {
    s.accepted = a, s.fell = fell, s.token = -1;
    s.proposal = fell ? index_at(x.candidates, element_offset(x.candidates, r, a + 1)) : -1;
  }
}

/// Masses of `t` at `count` ids from `begin` on, added to the tile with this sign; neighbouring threads take neighbouring ids.
template <class T>
__device__ __forceinline__ void add_masses(const T* row, std::int64_t stride, std::int64_t begin, int count, double sign, bool first,
                                           double* tile) {
  constexpr int kFlight = 16;  // loads before the first is used
  const T* from = row + begin * stride;
  for (int base = static_cast<int>(threadIdx.x); base < count; base += kThreads * kFlight) {
    T x[kFlight];
#pragma unroll
    for (int k = 0; k < kFlight; ++k)
      if (base + k * kThreads < count) x[k] = from[(base + k * kThreads) * stride];
#pragma unroll
    for (int k = 0; k < kFlight; ++k) {
      const int i = base + k * kThreads;
      if (i >= count) break;
      double m;
      if constexpr (sizeof(T) == 2)
        m = mass(core::to_float(x[k]));
      else
        m = mass(x[k]);
      double& to = tile[i / kSumBlock * kPitch + i % kSumBlock];
      to = first ? m : to + sign * m;
    }
  }
}
__device__ void add_masses(const TensorView& t, std::int64_t offset, std::int64_t begin, int count, double sign, bool first, double* tile) {
  const std::int64_t stride = t.strides[2];
  switch (t.dtype) {
    case DType::kFloat64: return add_masses(t.as<double>() + offset, stride, begin, count, sign, first, tile);
    case DType::kBFloat16: return add_masses(t.as<core::bfloat16>() + offset, stride, begin, count, sign, first, tile);
    case DType::kFloat16: return add_masses(t.as<core::float16>() + offset, stride, begin, count, sign, first, tile);
    default: return add_masses(t.as<float>() + offset, stride, begin, count, sign, first, tile);
  }
}

/// The weights that are drawn from, of ids begin.. as one tile (each thread gets the sum of its block in s.block): the target's masses,
/// or what is left of them when the drafter's are taken away. Returns the last id with weight that this thread saw, or -1.
__device__ int weigh(const VerifyRejectionArgs& x, std::int64_t r, bool residual, std::int64_t begin, int count, double* tile,
                     RejectionShared& s) {
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();  // the tile is free
  add_masses(x.target_probs, element_offset(x.target_probs, r, s.accepted), begin, count, 1, true, tile);
  if (residual && x.draft_probs.given())
    add_masses(x.draft_probs, element_offset(x.draft_probs, r, s.accepted), begin, count, -1, false, tile);
  __syncthreads();
  if (residual && !x.draft_probs.given() && thread == 0 && s.proposal >= begin && s.proposal < begin + count) {
    const int i = static_cast<int>(s.proposal - begin);
    tile[i / kSumBlock * kPitch + i % kSumBlock] -= 1;
  }
  __syncthreads();
  int last = -1;
  if (thread < kBlocks) {
    double sum = 0;
    const double* of_block = tile + thread * kPitch;
    const int mine = min(static_cast<int>(kSumBlock), count - thread * static_cast<int>(kSumBlock));
    const auto add = [&](int i) {
      const double w = mass(of_block[i]);
      if (w > 0) last = static_cast<int>(begin) + thread * static_cast<int>(kSumBlock) + i;
      sum += w;
    };
    if (mine == kSumBlock) {
#pragma unroll 16
      for (int i = 0; i < static_cast<int>(kSumBlock); ++i) add(i);
    } else {
      for (int i = 0; i < mine; ++i) add(i);
    }
    s.block[thread] = sum;
  }
  __syncthreads();
  return last;
}

/// Walks 64 terms of a running sum: the first with which base + (before + sum) is beyond the threshold, and the sum before it. No
/// early exit: one chain of additions, with everything else beside it.
__device__ __forceinline__ int first_beyond(double threshold, double base, double before, const double* terms, double* sum_before) {
  double sum = 0;
  int found = static_cast<int>(kSumBlock);
#pragma unroll 16
  for (int i = 0; i < static_cast<int>(kSumBlock); ++i) {
    const double next = sum + mass(terms[i]);
    if (found == static_cast<int>(kSumBlock) && base + (before + next) > threshold) found = i, *sum_before = sum;
    sum = next;
  }
  return found;
}

/// A cluster a row. Every block finds by itself how many proposals stand (a few loads), then takes tiles of the row that is drawn from;
/// the sums of the groups meet in the first block's shared memory. It finds the group where the draw falls, weighs that once more,
/// and walks its 64 blocks and the 64 ids of one of them. How many blocks share a row changes no bit.
__global__ void __launch_bounds__(kThreads) rejection(const VerifyRejectionArgs x, int cluster) {
  extern __shared__ double tile[];
  __shared__ RejectionShared s;
  ptx::wait_for_previous();
  ptx::let_next_start();
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t r = blockIdx.x / static_cast<unsigned>(cluster);
  const auto rank = blockIdx.x % static_cast<unsigned>(cluster);
  RejectionShared* first = ptx::in_block(&s, 0);
  const int groups = static_cast<int>((x.vocab + kSumGroup - 1) / kSumGroup);
  if (thread < kWarp) judge(x, r, s);
  __syncthreads();

  for (int pass = 0; pass < 2 && s.accepted >= 0; ++pass) {  // a residual without mass: a second pass over the target itself
    const bool residual = s.fell && pass == 0;
    if (thread == 0) s.last = -1;
    ptx::cluster_sync();
    for (std::int64_t begin = rank * kTile; begin < x.vocab; begin += cluster * kTile) {
      const int count = static_cast<int>(min(static_cast<std::int64_t>(kTile), x.vocab - begin));
      const int last = __reduce_max_sync(~0u, weigh(x, r, residual, begin, count, tile, s));
      if (thread % kWarp == 0 && last >= 0) atomicMax(&first->last, last);
      if (thread < kGroupsOfTile && begin + thread * kSumGroup < x.vocab) {
        double sum = 0;
#pragma unroll 16
        for (int i = 0; i < 64; ++i) sum += s.block[thread * 64 + i];  // blocks beyond the row are 0
        first->group[begin / kSumGroup + thread] = sum;
      }
    }
    ptx::cluster_sync();
    const int last = first->last;
    if (rank == 0 && last >= 0) {
      if (thread == 0) {
        double total = 0;
#pragma unroll 8
        for (int g = 0; g < groups; ++g) total += s.group[g];
        const double threshold = real_at(x.uniforms, element_offset(x.uniforms, r, x.width - 1)) * total;
        double before = 0, sum = 0;
        int drawn = -1;
#pragma unroll 8
        for (int g = 0; g < groups; ++g) {
          const double next = sum + s.group[g];
          if (drawn < 0 && next > threshold) drawn = g, before = sum;
          sum = next;
        }
        s.threshold = threshold, s.before = before, s.drawn_group = drawn;
        s.token = last;  // stays where u * total was rounded up to the total: the last with mass
      }
      __syncthreads();
      if (s.drawn_group >= 0) {
        const std::int64_t begin = s.drawn_group * kSumGroup;
        weigh(x, r, residual, begin, static_cast<int>(min(static_cast<std::int64_t>(kSumGroup), x.vocab - begin)), tile, s);
        if (thread == 0) {
          double blocks = 0, ids = 0;
          const int b = first_beyond(s.threshold, s.before, 0, s.block, &blocks);
          const int i = first_beyond(s.threshold, s.before, blocks, tile + b * kPitch, &ids);
          s.token = begin + b * kSumBlock + i;
        }
      }
    }
    ptx::cluster_sync();  // the first block's shared memory is read to the end
    if (last >= 0 || !residual) break;
  }

  __syncthreads();
  if (rank != 0) return;
  const bool written = s.accepted >= 0 && s.token >= 0;
  for (std::int64_t j = thread; j < x.width; j += kThreads) {
    std::int64_t token = 0;
    if (written && j < s.accepted) token = index_at(x.candidates, element_offset(x.candidates, r, j + 1));
    if (written && j == s.accepted) token = s.token;
    const std::int64_t at = element_offset(x.out_tokens, r, j);
    if (x.out_tokens.dtype == DType::kInt64)
      x.out_tokens.as<std::int64_t>()[at] = token;
    else
      x.out_tokens.as<std::int32_t>()[at] = static_cast<std::int32_t>(token);
  }
  if (thread == 0) x.accept_lens.as<std::int32_t>()[r * x.accept_lens.strides[0]] = written ? static_cast<std::int32_t>(s.accepted + 1) : 0;
}

// ------------------------------------------------------------------------------------------------------------- verify lengths

constexpr int kMaxEntries = 16384;
constexpr unsigned kMaxPlanThreads = 1024;

/// Entries of all rows in shared memory, ranked by a bitonic sort: key = the survival's bits, falling (beyond the cap: the largest key),
/// place = proposal * batch + row breaks ties.
struct Ranks {
  std::uint64_t* key;
  std::uint32_t* place;
  int capacity;  // a power of two

  __device__ double survival(int i) const { return __longlong_as_double(static_cast<long long>(~key[i])); }
};

/// Returns how many entries are choosable.
__device__ int rank(const PlanVerifyLengthsArgs& x, const TensorView& confidences, const Ranks& e, int* count) {
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (thread == 0) *count = 0;
  for (int i = thread; i < e.capacity; i += static_cast<int>(blockDim.x)) {
    // Confidences first, all at once; each is replaced by its survival below.
    double c = 1;
    if (confidences.given() && i < x.batch * x.proposals) {
      c = real_at(confidences, element_offset(confidences, i % x.batch, i / x.batch));
      if (!(c >= 0 && c <= 1)) c = 1;  // unknown
    }
    e.key[i] = static_cast<std::uint64_t>(__double_as_longlong(c)), e.place[i] = ~0u;
  }
  __syncthreads();
  for (std::int64_t r = thread; r < x.batch; r += blockDim.x) {
    std::int64_t limit = x.proposals;
    if (x.max_lens.given()) limit = min(limit, index_at(x.max_lens, r * x.max_lens.strides[0]) - 1);
    double survival = 1;
    int chosen = 0;
    for (std::int64_t k = 0; k < x.proposals; ++k) {
      const auto place = static_cast<std::uint32_t>(k * x.batch + r);
      survival *= __longlong_as_double(static_cast<long long>(e.key[place]));
      const bool good = k < limit && !(survival < kLeastSurvival);
      e.key[place] = good ? ~static_cast<std::uint64_t>(__double_as_longlong(survival)) : ~0ull;
      if (good) e.place[place] = place, ++chosen;
    }
    if (chosen > 0) atomicAdd(count, chosen);
  }
  for (int i = static_cast<int>(x.batch * x.proposals) + thread; i < e.capacity; i += static_cast<int>(blockDim.x)) e.key[i] = ~0ull;
  // Where the partners are at most 32 apart, a warp's 32 pairs are 64 neighbours that nobody else touches.
  bool alone = false;
  for (int size = 2; size <= e.capacity; size *= 2)
    for (int step = size / 2; step > 0; step /= 2) {
      if (step <= kWarp && alone)
        __syncwarp();
      else
        __syncthreads();
      alone = step <= kWarp;
      for (int t = thread; t < e.capacity / 2; t += static_cast<int>(blockDim.x)) {
        const int i = 2 * t - (t & (step - 1)), j = i + step;
        const std::uint64_t a = e.key[i], b = e.key[j];
        const std::uint32_t u = e.place[i], v = e.place[j];
        const bool greater = a != b ? a > b : u > v;
        if (greater == ((i & size) == 0)) e.key[i] = b, e.place[i] = v, e.key[j] = a, e.place[j] = u;
      }
    }
  __syncthreads();
  return *count;
}

/// The cost table, in shared memory where it fits.
constexpr std::int64_t kMaxStaged = 256;
struct Table {
  std::int64_t tokens[kMaxStaged];
  double speed[kMaxStaged];
};

/// The m of the highest (batch + sum of the m best) * speed(batch + m), the smallest of equals. The keys become the running sums.
__device__ int budget(const PlanVerifyLengthsArgs& x, const Ranks& e, int entries, double* block, Table* table, double* rates,
                      int* counts) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  constexpr int kBlock = static_cast<int>(kSumBlock);
  auto* running = reinterpret_cast<double*>(e.key);
  const bool staged = x.probes <= kMaxStaged;
  for (int i = thread; staged && i < x.probes; i += threads) {
    table->tokens[i] = index_at(x.probe_tokens, i * x.probe_tokens.strides[0]);
    table->speed[i] = real_at(x.speed, i * x.speed.strides[0]);
  }
  // A sum block a thread: its own running sum first, then what the blocks before it come to.
  for (int b = thread; b * kBlock < entries; b += threads) {
    double sum = 0;
    const int end = min((b + 1) * kBlock, entries);
#pragma unroll 8
    for (int i = b * kBlock; i < end; ++i) {
      sum += e.survival(i);
      running[i] = sum;
    }
    block[b] = sum;
  }
  __syncthreads();
  double best_rate = -1;
  int best = 0;
  const auto speed = [&](std::int64_t probe) { return staged ? table->speed[probe] : real_at(x.speed, probe * x.speed.strides[0]); };
  const auto tokens = [&](std::int64_t probe) {
    return staged ? table->tokens[probe] : index_at(x.probe_tokens, probe * x.probe_tokens.strides[0]);
  };
  double groups = 0, blocks = 0;
  int passed = 0;  // blocks in the two sums
  for (int m = thread; m <= entries; m += threads) {
    double sum = 0;
    if (m > 0) {
      for (; passed < (m - 1) / kBlock; ++passed) {
        blocks += block[passed];
        if ((passed + 1) % 64 == 0) groups += blocks, blocks = 0;
      }
      sum = groups + (blocks + running[m - 1]);
    }
    std::int64_t probe = 0;
    for (std::int64_t low = 1, high = x.probes; low < high;) {  // the last probe <= batch + m
      const std::int64_t middle = (low + high) / 2;
      if (tokens(middle) <= x.batch + m) {
        probe = middle, low = middle + 1;
      } else {
        high = middle;
      }
    }
    const double rate = (static_cast<double>(x.batch) + sum) * speed(probe);
    if (rate > best_rate) best_rate = rate, best = m;
  }
  rates[thread] = best_rate, counts[thread] = best;
  for (int step = threads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (thread < step &&
        (rates[thread + step] > rates[thread] || (rates[thread + step] == rates[thread] && counts[thread + step] < counts[thread])))
      rates[thread] = rates[thread + step], counts[thread] = counts[thread + step];
  }
  __syncthreads();
  return counts[0];
}

/// One block: the whole batch competes for one budget.
__global__ void __launch_bounds__(kMaxPlanThreads, 1) plan(const PlanVerifyLengthsArgs x, int capacity) {
  extern __shared__ std::uint64_t entries[];
  __shared__ double block[kMaxEntries / kSumBlock], rates[kMaxPlanThreads];
  __shared__ int counts[kMaxPlanThreads], count;
  __shared__ Table table;
  ptx::wait_for_previous();
  ptx::let_next_start();
  const int thread = static_cast<int>(threadIdx.x);
  const Ranks e{entries, reinterpret_cast<std::uint32_t*>(entries + capacity), capacity};
  auto* lens = x.verify_lens.as<std::int32_t>();
  for (std::int64_t r = thread; r < x.batch; r += blockDim.x) {
    const std::int64_t cap = x.max_lens.given() ? index_at(x.max_lens, r * x.max_lens.strides[0]) : x.proposals + 1;
    lens[r * x.verify_lens.strides[0]] = cap < 1 ? 0 : x.probes == 0 ? static_cast<std::int32_t>(min(cap, x.proposals + 1)) : 1;
  }
  if (x.probes == 0) return;  // nothing is known of the cost: everything is verified
  const int m = budget(x, e, rank(x, x.lagged, e, &count), block, &table, rates, counts);
  const int chosen = min(m, rank(x, x.confidences, e, &count));
  for (int i = thread; i < chosen; i += static_cast<int>(blockDim.x)) {  // a row's share is a prefix: its farthest proposal tells
    const auto r = static_cast<std::int64_t>(e.place[i]) % x.batch, k = static_cast<std::int64_t>(e.place[i]) / x.batch;
    atomicMax(&lens[r * x.verify_lens.strides[0]], static_cast<int>(k + 2));
  }
}

}  // namespace

void run(const VerifyGreedyArgs& args, Stream stream) {
  launch(args.is_int64 ? greedy<std::int64_t> : greedy<std::int32_t>,
         {.grid = blocks_for(args.batch, kGreedyWarps), .block = kWarp * kGreedyWarps, .overlap = true}, stream, args);
}

void run(const VerifyRejectionArgs& args, Stream stream) {
  if (args.vocab > kMaxGroups * kSumGroup)
    core::throw_not_implemented("verify_rejection: target_probs: expected at most " + std::to_string(kMaxGroups * kSumGroup) +
                                " ids on CUDA, got " + std::to_string(args.vocab) + ".");
  // As many blocks a row as fill the GPU, and as the row has tiles.
  const specstate::cuda::DeviceInfo& gpu = specstate::cuda::device_info();
  int cluster = 1;
  while (gpu.major >= 9 && cluster < 8 && 2 * cluster * args.batch <= gpu.multiprocessors && cluster * kTile < args.vocab) cluster *= 2;
  launch(rejection,
         {.grid = blocks_for(args.batch * cluster, 1),
          .block = kThreads,
          .shared = kTileBytes,
          .cluster = static_cast<unsigned>(cluster),
          .overlap = true},
         stream, args, cluster);
}

void run(const PlanVerifyLengthsArgs& args, Stream stream) {
  const std::int64_t n = args.batch * args.proposals;
  if (args.probes > 0 && n > kMaxEntries)
    core::throw_not_implemented("plan_verify_lengths: confidences: expected at most " + std::to_string(kMaxEntries) +
                                " proposals on CUDA, got " + std::to_string(n) + ".");
  int capacity = 2;
  while (capacity < n && capacity < kMaxEntries) capacity *= 2;
  const unsigned threads = std::clamp(static_cast<unsigned>(capacity / 2), 128u, kMaxPlanThreads);  // a power of two
  launch(plan, {.grid = args.batch > 0 ? 1u : 0u, .block = threads, .shared = capacity * std::size_t{12}, .overlap = true}, stream, args,
         capacity);
}

}  // namespace specstate::accept::cuda
