// Acceptance on the GPU. What it decides equals the CPU's to the bit: the same comparisons on the same float64 values, sums in the same
// order (RunningSum of layout.hpp, whose blocks and groups are summed by different threads here). A row that the CPU would refuse for
// what it holds is a padding row: length 0, tokens 0. One launch a call; every output is written.
#include <algorithm>
#include <string>
#include <type_traits>

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

// A cluster a row; its blocks take the row's groups of 4096 ids in turns, each block up to six at a time, two warps a group. A warp brings
// its 32 sum blocks of both rows into shared memory by copies that are all in flight at once, then each thread sums one block of 64 ids in
// id order. So nobody waits for anybody until the sums of the groups are known; those are
// written into every block of the cluster, each block finds for itself in which group the draw falls, and the one that holds that group
// finds the sum block in the running sums that it has kept, and the id in one more chain of 64 additions. An addition of float64 takes 16
// cycles and the chains are what the time goes into: a warp runs one as a whole and every lane keeps its part of the results. How many
// blocks share a row changes no bit.

constexpr int kSlots = 6;         // groups that a block has at a time
constexpr int kOfGroup = 64;      // threads a group, sum blocks of a group, and ids of a sum block
constexpr int kMaxGroups = 1024;  // of a row: 4.2 million ids
static_assert(kSumBlock == kOfGroup && kSumGroup == kOfGroup * kOfGroup);

template <class T>
constexpr int kPitch = kOfGroup* static_cast<int>(sizeof(T)) + 16;  // bytes of a sum block: 16-byte reads of 8 neighbours take all banks
template <class T>
constexpr std::size_t kSlotBytes = std::size_t{2} * kOfGroup* kPitch<T>;  // target, then drafter

struct RejectionShared {
  double block[kSlots * kOfGroup];  // of the groups in hand: sums of the blocks, then running sums over them
  double term[kOfGroup];            // weights of the sum block that is walked
  double threshold, before, uniform;
  std::int64_t accepted;  // proposals that stand, -1: a padding row
  std::int64_t proposal;  // the one that fell
  int warp_last[2 * kSlots];
  int last;         // the last id with weight, -1: none
  int drawn_group;  // -1: u * total was rounded up to the total
  bool fell;
};

/// `kConvert`: the two rows differ in dtype, and T is double.
template <class T, bool kConvert>
__device__ __forceinline__ T element(const TensorView& t, std::int64_t offset) {
  if constexpr (kConvert)
    return real_at(t, offset);
  else
    return t.as<T>()[offset];
}
template <class T>
using Wide = std::conditional_t<sizeof(T) == 8, double, float>;
template <class T>
__device__ __forceinline__ Wide<T> widened(T x) {
  if constexpr (sizeof(T) == 2)
    return core::to_float(x);
  else
    return x;
}

/// One warp: how many proposals of row r stand. Loads that do not depend on each other are all issued before the first is looked at.
template <class T, bool kConvert>
__device__ void judge(const VerifyRejectionArgs& x, std::int64_t r, RejectionShared& s) {
  const int lane = static_cast<int>(threadIdx.x);
  std::int64_t a = -1, fallen_proposal = -1;
  bool bad = false;
  for (std::int64_t begin = 0; begin < x.width; begin += kWarp) {
    const std::int64_t j = begin + lane;
    std::int64_t d = -1;
    T p{}, q{};
    if (j + 1 < x.width) d = index_at(x.candidates, element_offset(x.candidates, r, j + 1));
    if (d >= 0 && d < x.vocab) {
      p = element<T, kConvert>(x.target_probs, element_offset(x.target_probs, r, j) + d * x.target_probs.strides[2]);
      if (x.draft_probs.given())
        q = element<T, kConvert>(x.draft_probs, element_offset(x.draft_probs, r, j) + d * x.draft_probs.strides[2]);
    }
    const double u = j < x.width ? real_at(x.uniforms, element_offset(x.uniforms, r, j)) : 0;
    const std::int64_t width = x.verify_lens.given() ? index_at(x.verify_lens, r * x.verify_lens.strides[0]) : x.width;
    bad = bad || width < 1 || width > x.width || !(u >= 0 && u <= 1);
    const double of_draft = x.draft_probs.given() ? mass(widened(q)) : 1;
    const bool falls = j + 1 < width && !(d >= 0 && d < x.vocab && u * of_draft < mass(widened(p)));
    if (j + 1 == x.width) s.uniform = u;
    const unsigned fallen = __ballot_sync(~0u, falls);
    if (fallen && a < 0) {
      const int at = __ffs(static_cast<int>(fallen)) - 1;
      a = begin + at, fallen_proposal = __shfl_sync(~0u, d, at);
    }
  }
  const bool padding = __any_sync(~0u, bad);
  if (lane == 0) {
    s.fell = a >= 0, s.proposal = fallen_proposal;
    const std::int64_t width = x.verify_lens.given() ? index_at(x.verify_lens, r * x.verify_lens.strides[0]) : x.width;
    s.accepted = padding ? -1 : a >= 0 ? a : width - 1;
  }
}

/// The 32 sum blocks from `begin` on of a row of probabilities, by one warp, to shared memory; ids beyond the row are 0.
template <class T, bool kConvert>
__device__ __forceinline__ void bring(const TensorView& t, std::int64_t row, std::int64_t begin, std::int64_t vocab, char* to) {
  constexpr int kIds = kWarp * kOfGroup, kOf16 = 16 / static_cast<int>(sizeof(T)), kPieces = kOfGroup / kOf16;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto count = static_cast<int>(max(std::int64_t{0}, min(static_cast<std::int64_t>(kIds), vocab - begin)));
  const std::int64_t stride = t.strides[2], offset = row + begin * stride;
  if (const T* from = t.as<T>() + offset; !kConvert && stride == 1 && reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int piece = k * kWarp + lane, of_block = piece % kPieces;
      const int id = piece / kPieces * kOfGroup + of_block * kOf16;
      const int bytes = min(16, max(0, (count - id) * static_cast<int>(sizeof(T))));
      ptx::copy_async_part(to + piece / kPieces * kPitch<T> + of_block * 16, bytes > 0 ? from + id : from, bytes);
    }
    return;
  }
  constexpr int kFlight = 16;
  for (int base = lane; base < kIds; base += kWarp * kFlight) {
    T x[kFlight];
#pragma unroll
    for (int k = 0; k < kFlight; ++k) {
      const int id = base + k * kWarp;
      x[k] = T{};
      if (id < count) {
        if constexpr (kConvert)
          x[k] = real_at(t, offset + id * stride);
        else
          x[k] = t.as<T>()[offset + id * stride];
      }
    }
#pragma unroll
    for (int k = 0; k < kFlight; ++k) {
      const int id = base + k * kWarp;
      *reinterpret_cast<T*>(to + id / kOfGroup * kPitch<T> + id % kOfGroup * sizeof(T)) = x[k];
    }
  }
}

/// What is drawn from at an id: the target's mass, less the drafter's. Compared before they are subtracted, in the type that they came in.
template <class F>
__device__ __forceinline__ double weight(F p, F q, bool* some) {
  q = q > 0 ? q : 0;
  *some = p > q;
  return static_cast<double>(*some ? p : 0) - static_cast<double>(*some ? q : 0);
}
/// This thread's sum block: the sum of its 64 weights in id order, and the place of the last with weight (-1: none). `point`: where the
/// drafter's mass is 1 in place of a row of its own (-1: nowhere).
template <class T, bool kDraft>
__device__ __forceinline__ double sum_block(const char* p, const char* q, int point, int* last) {
  constexpr int kOf16 = 16 / static_cast<int>(sizeof(T));
  double sum = 0;
#pragma unroll 4
  for (int k = 0; k < kOfGroup / kOf16; ++k) {
    alignas(16) T ps[kOf16], qs[kOf16];
    const uint4 of_target = *reinterpret_cast<const uint4*>(p + k * 16);
    memcpy(ps, &of_target, sizeof ps);
    if constexpr (kDraft) {
      const uint4 of_draft = *reinterpret_cast<const uint4*>(q + k * 16);
      memcpy(qs, &of_draft, sizeof qs);
    }
#pragma unroll
    for (int i = 0; i < kOf16; ++i) {
      const int id = k * kOf16 + i;
      bool some;
      Wide<T> of_draft = id == point ? 1 : 0;
      if constexpr (kDraft) of_draft = widened(qs[i]);
      sum += weight<Wide<T>>(widened(ps[i]), of_draft, &some);
      if (some) *last = id;
    }
  }
  return sum;
}

/// One warp: `terms` in shared memory become their running sums; returns the last of them. Every lane runs the one chain of additions as far
/// as its own term, so that nothing stands between two of them.
__device__ __forceinline__ double run_up(double* terms, int count) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  double before = 0;
  for (int begin = 0; begin < count; begin += kWarp) {
    const int end = min(kWarp, count - begin);
    double sum = before;
    if (end == kWarp) {
#pragma unroll
      for (int i = 0; i < kWarp; ++i)
        if (i <= lane) sum += terms[begin + i];
    } else {
#pragma unroll 8
      for (int i = 0; i < end; ++i)
        if (i <= lane) sum += terms[begin + i];
    }
    __syncwarp();
    if (lane < end) terms[begin + lane] = sum;
    before = __shfl_sync(~0u, sum, end - 1);
  }
  __syncwarp();
  return before;
}

/// One warp: the first of `count` running sums with which base + (before + sum) is beyond the threshold; `count` if there is none.
__device__ __forceinline__ int first_beyond(const double* sums, int count, double threshold, double base, double before) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int begin = 0; begin < count; begin += kWarp)
    if (const unsigned beyond = __ballot_sync(~0u, begin + lane < count && base + (before + sums[begin + lane]) > threshold))
      return begin + __ffs(static_cast<int>(beyond)) - 1;
  return count;
}

/// One warp: the running sum over the groups, in place; then where the draw falls.
__device__ __forceinline__ void find_group(double* group, const int* last_of, int groups, RejectionShared& s) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int last = -1;
  for (int g = lane; g < groups; g += kWarp) last = max(last, last_of[g]);
  last = __reduce_max_sync(~0u, last);
  const double threshold = s.uniform * run_up(group, groups);
  const int drawn = first_beyond(group, groups, threshold, 0, 0);
  if (lane == 0) {
    s.last = last, s.threshold = threshold;
    s.drawn_group = last < 0 || drawn == groups ? -1 : drawn, s.before = drawn > 0 && drawn < groups ? group[drawn - 1] : 0;
  }
}

template <class T, bool kConvert>
__global__ void __launch_bounds__(kSlots* kOfGroup, 1) rejection(const VerifyRejectionArgs x, int cluster, int slots) {
  extern __shared__ __align__(16) char memory[];
  __shared__ RejectionShared s;
  const int groups = static_cast<int>((x.vocab + kSumGroup - 1) / kSumGroup);
  auto* group = reinterpret_cast<double*>(memory + slots * kSlotBytes<T>);  // sums of the groups of the row
  auto* last_of = reinterpret_cast<int*>(group + groups);                   // the last id with weight of each
  ptx::cluster_arrive();                                                    // no block writes into one that has not begun
  ptx::wait_for_previous();
  ptx::let_next_start();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int slot = thread / kOfGroup, mine = thread % kOfGroup;
  const std::int64_t r = blockIdx.x / static_cast<unsigned>(cluster);
  const int rank = static_cast<int>(blockIdx.x % static_cast<unsigned>(cluster));
  if (warp == 0) judge<T, kConvert>(x, r, s);
  __syncthreads();
  ptx::cluster_wait();

  // Group g's weights into this pair's slot, its blocks' sums into s.block. Each warp reads what it has brought, so no barrier but its own.
  char* const p = memory + slot * kSlotBytes<T>;
  char* const q = p + kOfGroup * kPitch<T>;
  const auto weigh = [&](int g, bool residual) {
    const std::int64_t begin = g * kSumGroup, half = begin + warp % 2 * (kWarp * kOfGroup);
    const bool draft = residual && x.draft_probs.given();
    const int rows = warp % 2 * kWarp * kPitch<T>;
    bring<T, kConvert>(x.target_probs, element_offset(x.target_probs, r, s.accepted), half, x.vocab, p + rows);
    if (draft) bring<T, kConvert>(x.draft_probs, element_offset(x.draft_probs, r, s.accepted), half, x.vocab, q + rows);
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    __syncwarp();
    int last = -1;
    const std::int64_t point = residual && !x.draft_probs.given() ? s.proposal - begin - mine * kOfGroup : -1;
    const auto at = static_cast<int>(point >= 0 && point < kOfGroup ? point : -1);
    const char *of_target = p + mine * kPitch<T>, *of_draft = q + mine * kPitch<T>;
    s.block[thread] = draft ? sum_block<T, true>(of_target, of_draft, -1, &last) : sum_block<T, false>(of_target, of_draft, at, &last);
    last = __reduce_max_sync(~0u, last < 0 ? -1 : static_cast<int>(begin) + mine * kOfGroup + last);
    if (lane == 0) s.warp_last[warp] = last;
    ptx::barrier_of(1 + slot, kOfGroup);
  };

  bool residual = s.fell;
  for (int pass = 0; pass < 2 && s.accepted >= 0; ++pass) {  // a residual without mass: a second pass over the target itself
    if (pass > 0) residual = false, ptx::cluster_sync();     // the sums are read everywhere
    for (int g = slot * cluster + rank; g < groups; g += slots * cluster) {
      weigh(g, residual);
      if (warp % 2 == 0) {
        const double sum = run_up(s.block + slot * kOfGroup, kOfGroup);
        if (lane < cluster) {
          *ptx::in_block(group + g, lane) = sum;
          *ptx::in_block(last_of + g, lane) = max(s.warp_last[warp], s.warp_last[warp + 1]);
        }
      }
      if (g + slots * cluster < groups) ptx::barrier_of(1 + slot, kOfGroup);  // s.block is read
    }
    ptx::cluster_sync();
    if (warp == 0) find_group(group, last_of, groups, s);
    __syncthreads();
    if (s.last >= 0 || !residual) break;
  }

  const int owner = s.accepted >= 0 ? max(s.drawn_group, 0) % cluster : 0;
  if (rank != owner) return;
  std::int64_t token = -1;
  if (s.accepted >= 0 && s.drawn_group >= 0) {
    const int g = s.drawn_group;
    int held = g / cluster % slots;
    if (g + slots * cluster < groups) {  // another one came after it
      held = 0;
      __syncthreads();
      if (slot == 0) weigh(g, residual);
      if (warp == 0) run_up(s.block, kOfGroup);
    }
    if (warp == 0) {
      const double* blocks = s.block + held * kOfGroup;
      const int b = min(first_beyond(blocks, kOfGroup, s.threshold, s.before, 0), kOfGroup - 1);
      const double before = b > 0 ? blocks[b - 1] : 0;
      const char* of_block = memory + held * kSlotBytes<T> + b * kPitch<T>;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int id = half * kWarp + lane;
        bool some;
        Wide<T> of_draft = 0;
        if (residual && x.draft_probs.given())
          of_draft = widened(reinterpret_cast<const T*>(of_block + kOfGroup * kPitch<T>)[id]);
        else if (residual && g * kSumGroup + b * kOfGroup + id == s.proposal)
          of_draft = 1;
        s.term[id] = weight<Wide<T>>(widened(reinterpret_cast<const T*>(of_block)[id]), of_draft, &some);
      }
      __syncwarp();
      run_up(s.term, kOfGroup);
      token = g * kSumGroup + b * kOfGroup + min(first_beyond(s.term, kOfGroup, s.threshold, s.before, before), kOfGroup - 1);
    }
  } else if (s.accepted >= 0) {
    token = s.last;
  }
  if (warp != 0) return;
  const bool written = token >= 0;
  for (std::int64_t j = lane; j < x.width; j += kWarp) {
    std::int64_t out = 0;
    if (written && j < s.accepted) out = index_at(x.candidates, element_offset(x.candidates, r, j + 1));
    if (written && j == s.accepted) out = token;
    const std::int64_t at = element_offset(x.out_tokens, r, j);
    if (x.out_tokens.dtype == DType::kInt64)
      x.out_tokens.as<std::int64_t>()[at] = out;
    else
      x.out_tokens.as<std::int32_t>()[at] = static_cast<std::int32_t>(out);
  }
  if (lane == 0) x.accept_lens.as<std::int32_t>()[r * x.accept_lens.strides[0]] = written ? static_cast<std::int32_t>(s.accepted + 1) : 0;
}

// ------------------------------------------------------------------------------------------------------------- verify lengths

// One block: the whole batch competes for one budget. Everything that is in global memory is asked for at the start; then both lists (the
// lagged one that the budget comes from, this step's that it is spent on) are sorted side by side by one half of the block each.

constexpr int kMaxEntries = 16384;
constexpr int kMaxPlanThreads = 1024;
constexpr int kChunk = 2 * kWarp;  // entries that a warp sorts in registers

/// A list in shared memory: key = the survival's bits, inverted so that the best is first (not choosable: the largest key); place =
/// proposal * batch + row breaks ties.
struct Ranks {
  std::uint64_t* key;
  std::uint32_t* place;
  int capacity;  // a power of two, at least kChunk

  __device__ double survival(int i) const { return __longlong_as_double(static_cast<long long>(~key[i])); }
};

/// The threads that work on a list.
struct Team {
  int thread, size, barrier;
  __device__ void sync() const { ptx::barrier_of(barrier, size); }
};

struct Entry {
  std::uint64_t key;
  std::uint32_t place;
  /// One subtraction of 96 bits: does it borrow?
  __device__ __forceinline__ bool after(const Entry& o) const {
    std::uint32_t borrow;
    asm("{\n"
        ".reg .u32 t;\n"
        "sub.cc.u32 t, %1, %4;\n"
        "subc.cc.u32 t, %2, %5;\n"
        "subc.cc.u32 t, %3, %6;\n"
        "subc.u32 %0, 0, 0;\n"
        "}\n"
        : "=r"(borrow)
        : "r"(o.place), "r"(static_cast<std::uint32_t>(o.key)), "r"(static_cast<std::uint32_t>(o.key >> 32)), "r"(place),
          "r"(static_cast<std::uint32_t>(key)), "r"(static_cast<std::uint32_t>(key >> 32)));
    return borrow != 0;
  }
};

/// One step of the network between lanes `step` apart; `i` is the entry's place in the list.
__device__ __forceinline__ void exchange(Entry& e, int i, int size, int step) {
  const Entry other{__shfl_xor_sync(~0u, e.key, step), __shfl_xor_sync(~0u, e.place, step)};
  const bool first = (i & step) == 0, rising = (i & size) == 0;
  if (e.after(other) == (first == rising)) e = other;
}

/// A bitonic sort. Partners up to 32 apart meet in the registers of a warp that has 64 neighbours; the others in shared memory.
__device__ void sort(const Ranks& e, const Team& team) {
  const int warp = team.thread / kWarp, lane = team.thread % kWarp;
  const auto in_registers = [&](int first_size, int last_size) {
    for (int chunk = warp * kChunk; chunk < e.capacity; chunk += team.size / kWarp * kChunk) {
      const int i = chunk + lane, j = i + kWarp;
      Entry a{e.key[i], e.place[i]}, b{e.key[j], e.place[j]};
      for (int size = first_size; size <= last_size; size *= 2) {
        if (size > kWarp && a.after(b) == ((i & size) == 0)) {
          const Entry t = a;
          a = b, b = t;
        }
        for (int step = min(size / 2, kWarp / 2); step > 0; step /= 2) exchange(a, i, size, step), exchange(b, j, size, step);
      }
      e.key[i] = a.key, e.place[i] = a.place, e.key[j] = b.key, e.place[j] = b.place;
    }
    team.sync();
  };
  in_registers(2, kChunk);
  for (int size = 2 * kChunk; size <= e.capacity; size *= 2) {
    for (int step = size / 2; step > kWarp; step /= 2) {
      for (int t = team.thread; t < e.capacity / 2; t += team.size) {
        const int i = 2 * t - (t & (step - 1)), j = i + step;
        const Entry a{e.key[i], e.place[i]}, b{e.key[j], e.place[j]};
        if (a.after(b) == ((i & size) == 0)) e.key[i] = b.key, e.place[i] = b.place, e.key[j] = a.key, e.place[j] = a.place;
      }
      team.sync();
    }
    in_registers(size, size);
  }
}

/// The list of `confidences`, ranked; `count` becomes how many entries are choosable. `caps` [batch]: how many proposals a row may have.
__device__ void rank(const PlanVerifyLengthsArgs& x, const TensorView& confidences, const Ranks& e, int* count, const Team& team) {
  const auto batch = static_cast<unsigned>(x.batch), n = static_cast<unsigned>(x.batch * x.proposals);
  if (team.thread == 0) *count = 0;
  // Confidences first, all at once; each is replaced by its survival below.
  for (unsigned i = team.thread; i < static_cast<unsigned>(e.capacity); i += team.size) {
    double c = 1;
    if (confidences.given() && i < n) {
      c = real_at(confidences, element_offset(confidences, i % batch, i / batch));
      if (!(c >= 0 && c <= 1)) c = 1;  // unknown
    }
    e.key[i] = i < n ? static_cast<std::uint64_t>(__double_as_longlong(c)) : ~0ull;
    e.place[i] = ~0u;
  }
  team.sync();
  for (unsigned r = team.thread; r < batch; r += team.size) {
    std::int64_t limit = x.proposals;
    if (x.max_lens.given()) limit = min(limit, index_at(x.max_lens, r * x.max_lens.strides[0]) - 1);
    double survival = 1;
    int chosen = 0;
    for (unsigned k = 0; k < static_cast<unsigned>(x.proposals); ++k) {
      const unsigned place = k * batch + r;
      survival *= __longlong_as_double(static_cast<long long>(e.key[place]));
      const bool good = k < limit && !(survival < kLeastSurvival);
      e.key[place] = good ? ~static_cast<std::uint64_t>(__double_as_longlong(survival)) : ~0ull;
      if (good) e.place[place] = place, ++chosen;
    }
    if (chosen > 0) atomicAdd(count, chosen);
  }
  team.sync();
  sort(e, team);
}

/// The cost table, in shared memory where it fits.
constexpr std::int64_t kMaxStaged = 256;
struct Table {
  std::int64_t tokens[kMaxStaged];
  double speed[kMaxStaged];
};

/// The m of the highest (batch + sum of the m best) * speed(batch + m), the smallest of equals. The keys become the running sums.
__device__ int budget(const PlanVerifyLengthsArgs& x, const Ranks& e, int entries, double* block, const Table* table, double* rates,
                      int* counts) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x), warps = threads / kWarp;
  constexpr int kBlock = static_cast<int>(kSumBlock);
  auto* running = reinterpret_cast<double*>(e.key);
  const bool staged = x.probes <= kMaxStaged;
  // A sum block a thread: its own running sum first, then what the blocks before it come to.
  for (int b = thread; b * kBlock < entries; b += threads) {
    double sum = 0;
    const int end = min((b + 1) * kBlock, entries);
#pragma unroll 16
    for (int i = b * kBlock; i < end; ++i) {
      sum += e.survival(i);
      running[i] = sum;
    }
    block[b] = sum;
  }
  __syncthreads();
  double best_rate = -1;
  int best = 0;
  const auto speed = [&](int probe) { return staged ? table->speed[probe] : real_at(x.speed, probe * x.speed.strides[0]); };
  const auto tokens = [&](int probe) {
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
    int probe = 0;
    for (int low = 1, high = static_cast<int>(x.probes); low < high;) {  // the last probe <= batch + m
      const int middle = (low + high) / 2;
      if (tokens(middle) <= x.batch + m) {
        probe = middle, low = middle + 1;
      } else {
        high = middle;
      }
    }
    const double rate = (static_cast<double>(x.batch) + sum) * speed(probe);
    if (rate > best_rate) best_rate = rate, best = m;
  }
  const auto take_better = [&](double rate, int m) {
    if (rate > best_rate || (rate == best_rate && m < best)) best_rate = rate, best = m;
  };
  for (int step = kWarp / 2; step > 0; step /= 2) take_better(__shfl_xor_sync(~0u, best_rate, step), __shfl_xor_sync(~0u, best, step));
  if (thread % kWarp == 0) rates[thread / kWarp] = best_rate, counts[thread / kWarp] = best;
  __syncthreads();
  const int of_warp = thread % kWarp % warps;
  best_rate = rates[of_warp], best = counts[of_warp];
  for (int step = kWarp / 2; step > 0; step /= 2) take_better(__shfl_xor_sync(~0u, best_rate, step), __shfl_xor_sync(~0u, best, step));
  return best;
}

__global__ void __launch_bounds__(kMaxPlanThreads, 1) plan(const PlanVerifyLengthsArgs x, int capacity, bool side_by_side) {
  extern __shared__ std::uint64_t entries[];
  __shared__ double block[kMaxEntries / kSumBlock], rates[kMaxPlanThreads / kWarp];
  __shared__ int counts[kMaxPlanThreads / kWarp], count[2];
  __shared__ Table table;
  ptx::wait_for_previous();
  ptx::let_next_start();
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  auto* lens = x.verify_lens.as<std::int32_t>();
  for (std::int64_t i = thread; i < min(x.probes, kMaxStaged); i += threads) {
    table.tokens[i] = index_at(x.probe_tokens, i * x.probe_tokens.strides[0]);
    table.speed[i] = real_at(x.speed, i * x.speed.strides[0]);
  }
  for (std::int64_t r = thread; r < x.batch; r += threads) {
    const std::int64_t cap = x.max_lens.given() ? index_at(x.max_lens, r * x.max_lens.strides[0]) : x.proposals + 1;
    lens[r * x.verify_lens.strides[0]] = cap < 1 ? 0 : x.probes == 0 ? static_cast<std::int32_t>(min(cap, x.proposals + 1)) : 1;
  }
  if (x.probes == 0) return;  // nothing is known of the cost: everything is verified

  const auto list = [&](int which) {
    std::uint64_t* key = entries + (side_by_side ? which : 0) * (capacity + capacity / 2);
    return Ranks{key, reinterpret_cast<std::uint32_t*>(key + capacity), capacity};
  };
  int m;
  if (side_by_side) {
    const int half = threads / 2, which = thread / half;
    rank(x, which == 0 ? x.lagged : x.confidences, list(which), &count[which], {thread % half, half, 1 + which});
    __syncthreads();
    m = budget(x, list(0), count[0], block, &table, rates, counts);
  } else {
    const Team all{thread, threads, 1};
    rank(x, x.lagged, list(0), &count[0], all);
    __syncthreads();
    m = budget(x, list(0), count[0], block, &table, rates, counts);
    __syncthreads();
    rank(x, x.confidences, list(1), &count[1], all);
  }
  const Ranks e = list(1);
  const auto batch = static_cast<unsigned>(x.batch);
  const int chosen = min(m, count[1]);
  for (int i = thread; i < chosen; i += threads)  // a row's share is a prefix: its farthest proposal tells
    atomicMax(&lens[e.place[i] % batch * x.verify_lens.strides[0]], static_cast<int>(e.place[i] / batch + 2));
}

}  // namespace

void run(const VerifyGreedyArgs& args, Stream stream) {
  launch(args.is_int64 ? greedy<std::int64_t> : greedy<std::int32_t>,
         {.grid = blocks_for(args.batch, kGreedyWarps), .block = kWarp * kGreedyWarps, .overlap = true}, stream, args);
}

namespace {
template <class T, bool kConvert = false>
void launch_rejection(const VerifyRejectionArgs& args, Stream stream) {
  // As many blocks a row as fill the GPU, and as the row has groups. Clusters fit into a GPC each, so some SMs stay over for large ones.
  const specstate::cuda::DeviceInfo& gpu = specstate::cuda::device_info();
  const std::int64_t groups = (args.vocab + kSumGroup - 1) / kSumGroup;
  int cluster = 1;
  while (gpu.major >= 9 && cluster < 8 && 2 * cluster * args.batch <= gpu.multiprocessors - (cluster > 1 ? 12 : 0) && cluster < groups)
    cluster *= 2;
  const std::size_t of_groups = groups * (sizeof(double) + sizeof(int));
  const auto fit = static_cast<std::int64_t>((gpu.shared_bytes - sizeof(RejectionShared) - of_groups) / kSlotBytes<T>);
  const auto slots = static_cast<int>(std::min({std::int64_t{kSlots}, (groups + cluster - 1) / cluster, fit}));
  launch(rejection<T, kConvert>,
         {.grid = blocks_for(args.batch * cluster, 1),
          .block = static_cast<unsigned>(slots * kOfGroup),
          .shared = slots * kSlotBytes<T> + of_groups,
          .cluster = static_cast<unsigned>(cluster),
          .overlap = true},
         stream, args, cluster, slots);
}
}  // namespace

void run(const VerifyRejectionArgs& args, Stream stream) {
  if (args.vocab > kMaxGroups * kSumGroup)
    core::throw_not_implemented("verify_rejection: target_probs: expected at most " + std::to_string(kMaxGroups * kSumGroup) +
                                " ids on CUDA, got " + std::to_string(args.vocab) + ".");
  const DType dtype = args.target_probs.dtype;
  if (args.draft_probs.given() && args.draft_probs.dtype != dtype) return launch_rejection<double, true>(args, stream);
  if (dtype == DType::kFloat64) return launch_rejection<double>(args, stream);
  if (dtype == DType::kBFloat16) return launch_rejection<core::bfloat16>(args, stream);
  if (dtype == DType::kFloat16) return launch_rejection<core::float16>(args, stream);
  launch_rejection<float>(args, stream);
}

void run(const PlanVerifyLengthsArgs& args, Stream stream) {
  const std::int64_t n = args.batch * args.proposals;
  if (args.probes > 0 && n > kMaxEntries)
    core::throw_not_implemented("plan_verify_lengths: confidences: expected at most " + std::to_string(kMaxEntries) +
                                " proposals on CUDA, got " + std::to_string(n) + ".");
  int capacity = kChunk;
  while (capacity < n && capacity < kMaxEntries) capacity *= 2;
  const bool side_by_side = capacity <= kMaxPlanThreads;
  const int threads = std::clamp(side_by_side ? capacity : capacity / 2, 4 * kWarp, kMaxPlanThreads);
  launch(plan,
         {.grid = args.batch > 0 ? 1u : 0u,
          .block = static_cast<unsigned>(threads),
          .shared = (side_by_side ? 2 : 1) * capacity * std::size_t{12},
          .overlap = true},
         stream, args, capacity, side_by_side);
}

}  // namespace specstate::accept::cuda
