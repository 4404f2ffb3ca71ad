// The multi-step swaps, one launch: a cluster of CTAs resolves one batch row, chooses the victims and moves the rows.
//
// What the time goes into, and hence the shape. A row of the host is two microseconds away and the link brings a hundred rows in one more, so
// the link must be asked as early as can be, and for each missing token once; where a row goes can be settled while it travels. A warp's
// scattered access costs a cycle a lane wherever it goes, so each CTA has the request's slot tables in its own shared memory (bulk copies:
// no instructions). The occurrences are dealt to the CTAs 32 at a time:
//
//   tokens, lengths, request -> hints, and the slot tables into shared memory -> resident or not. If not the host row, and the token is
//   claimed in a hash table that lies over the shared memory of the cluster; there the smallest occurrence of each token stays. Who was
//   first to claim a token lists its row; four warps of each CTA (movers) do nothing but ask the link for what is listed, while the others
//   are still resolving, and put the rows into a stash in shared memory -> half of the others (the thinking warps) tell all CTAs which
//   columns were hit (one box to each peer: a bulk copy, counted by a barrier in the receiver's shared memory) -> now all claims are in: each
//   CTA looks up the smallest occurrences of its tokens, and tells all which of its own occurrences these are -> all know the same and do
//   the same: the misses are numbered (ranks in the set of first occurrences), the victims chosen (a histogram of the keys, a threshold, one
//   compaction); each CTA writes tables, plan and answers of the tokens that it claimed -> the stash goes where the victims were (bulk
//   copies), rows that did not fit follow.
//
// Sixteen rows a CTA are on their way at once, not more: requests for host rows queue in front of everything else that an SM asks for, its peers'
// memory included, and with twice as many the thinking took longer than the rows.
//
// A call without a miss needs no boxes: each CTA sees whatever makes the row invalid (the movers look through the whole table meanwhile) and stamps
// what it saw hit, and all that it must hear is that nobody misses anything, one arrival from each peer. Answers and stamps are written while that is on
// its way. (Where hits are counted, once in 2^30 calls, and in sglang's state it ends behind the boxes.) Nobody writes anything else in a table before all
// have sent theirs, hence have read the tables. Very large tables stay in global memory (kOrdinary false): then the CTAs also meet between the choice of
// the victims and the writing.
//
// Arguments are cold memory: a line of 64 bytes is 80 cycles of all warps. What is read first lies in front, in the order of its use (Front).
//
// The movers copy the tables, map the tail and look for what makes the row invalid; then they meet nobody before the end: an entry is handed over by
// an exchange of its row, taken by a compare-and-swap of the count of rows taken, and where it goes is told by a barrier that counts (an mbarrier). The
// others meet at a barrier of their own.
//
// Where each part stands: swap_row.cuh is the table of contents. swap_shape.cuh and swap_plan.cuh: what lies where, worked out by the host. Then as a call goes:
// swap_tables.cuh (the slot tables), swap_resolve.cuh (resident or not), swap_claims.cuh (who brings a missing token), swap_bring.cuh (rows), swap_agree.cuh
// (what the CTAs tell each other), swap_victims.cuh (which slots are taken), swap_commit.cuh (what is written), swap_sglang.cuh (its index). Here: a row from its
// begin to its end, by role; the kernel; which of them a call gets.
#include <array>
#include <mutex>

#include "cuda/launch.hpp"
#include "hisparse/cuda/swap_agree.cuh"
#include "hisparse/cuda/swap_bring.cuh"
#include "hisparse/cuda/swap_claims.cuh"
#include "hisparse/cuda/swap_commit.cuh"
#include "hisparse/cuda/swap_plan.cuh"
#include "hisparse/cuda/swap_resolve.cuh"
#include "hisparse/cuda/swap_sglang.cuh"
#include "hisparse/cuda/swap_tables.cuh"
#include "hisparse/cuda/swap_victims.cuh"

namespace specstate::hisparse::cuda {
namespace swap {

/// The movers. They meet nobody between the second barrier and the end: their rows may be on their way for long. Whether anything moves.
template <class Form>
__device__ __forceinline__ bool Swap<Form>::move(const Tail& tail, Wide other, int width, i64 real, const Clock& clock, u32 page) {
  map_tail(tail);
  bool bad = twice(other, width, real);
  await_copies();
  arrive_at(3);
  await_table(1);
  bad |= bad_table();
  if (bad) atomicOr(&s().bad, 1u);
  asm volatile("" ::"r"(page));
  arrive_at(2);
  u32 taken = 0;
  bring_early(taken);
  if constexpr (kLate) {
    (void)read_clock(clock);
    if (alone() && s().bad == 0 && !somebody_misses()) return false;
  }
  bring(taken);
  return s().busy != 0;
}

/// A call that decides by itself, once the lists of this CTA are complete. True: nobody misses anything, the row is done. `late`: the last round is
/// still to be answered.
template <class Form>
__device__ __forceinline__ bool Swap<Form>::quiet(const Found& found, bool& late) const {
  if (threadIdx.x / 32 == 0) say();
  const bool mine = s().lists == 0;
  if (mine || threadIdx.x >= kPolicyThreads) {
    answer_found(found.round, found);
    late = false;
  }
  if (mine)
    stamp_mine(threadIdx.x, kResolvers);
  else if (threadIdx.x >= kPolicyThreads)
    stamp_mine(threadIdx.x - kPolicyThreads, kResolvers - kPolicyThreads);
  if (rank == 0 && threadIdx.x == 32) {
    if (x.plan.src) x.plan.count(b) = 0;
    if constexpr (kNative<Args>)
      if (x.unique_misses) x.unique_misses(b) = 0;
  }
  if (somebody_misses()) return false;
  if constexpr (kNative<Args>)
    if (rank == 0 && threadIdx.x == 0) const_cast<std::int32_t*>(f.clock)[i64{f.clock_row} * r] = static_cast<std::int32_t>(now.call);
  await_table(2);  // no copy comes here once this CTA is gone
  return true;
}

/// The others: they resolve, and half of them think. Whether anything moves.
template <class Form>
__device__ __forceinline__ bool Swap<Form>::serve(Look& l, std::int32_t spare, const Clock& clock) {
  Found found;
  resolve(l, found);
  bool bad = !read_clock(clock);
  if (kLate && !alone()) answer_found(found.round, found);
  bad |= bad_scratch(spare);
  if (bad) atomicOr(&s().bad, 1u);
  ptx::fence_async();
  ptx::barrier_of(2, kThreads);
  if (threadIdx.x == kResolvers - 1) ptx::barrier_arrive(&s().resolved);
  if constexpr (!kNative<Args>) ask_slots();
  bool late = kLate && alone() && s().bad == 0;
  if (alone() && s().bad == 0 && quiet(found, late)) return false;
  bool busy;
  if (threadIdx.x >= kPolicyThreads) {
    ptx::barrier_wait(&s().placed, phase);
    busy = s().busy != 0;
    if constexpr (!kNative<Args>)
      if (busy) index_loaded();
  } else {
    pack_hits();
    if (threadIdx.x == 0) head(rank) = {moves() + again(), s().bad, {}};
    ptx::fence_async();
    await_table(2);
    policy_barrier();
    tell(plan.box + rank * plan.box_bytes, kOrdinary ? plan.box_bytes : sizeof(Head), &s().told);
    if (late) answer_found(found.round, found);
    busy = learn();
    if (threadIdx.x == 0) s().busy = busy;
    if (!busy) ptx::let_next_start();  // nothing to move: all are about to leave
    if (busy)
      decide();
    else
      ptx::barrier_arrive(&s().placed);
    ptx::barrier_wait(&s().placed, phase);
  }
  return busy;
}

template <class Form>
__device__ __forceinline__ void Swap<Form>::row(const Begin& begin) {
  clear();
  __syncthreads();  // everything is clear, all barriers are ready
  arrive_in_cluster();
  const int width = kOrdinary ? (f.flags & kWideRequests ? 8 : 4) : x.requests.bytes;
  r = begin.request.value(width);
  const i64 batch = kOrdinary ? i64{f.batch} : x.batch;
  const i64 real = (kOrdinary ? (f.flags & kGivenReal) != 0 : x.num_real != nullptr) ? min(max(i64{begin.real}, i64{0}), batch) : batch;
  answers = kOrdinary ? f.out + b * f.out_row : &x.out(b, 0, 0);
  if (b >= real || r < 0 || r >= (kOrdinary ? i64{f.slots} : x.request_slots)) {
    cluster_wait();
    padding(b >= real && !kNative<Args> ? 0 : -1, kThreads);
    return;
  }
  if constexpr (kOrdinary) {
    r = factor(static_cast<u32>(r));
    if constexpr (kNative<Args>) hints = f.hints + r * f.hint_row;
    hosts = f.hosts + r * f.host_row;
  } else {
    if constexpr (kNative<Args>) hints = static_cast<const std::byte*>(x.token_slots.data) + r * x.token_slots.s0 * x.token_slots.bytes;
    hosts = static_cast<const std::byte*>(x.host_locs.data) + r * x.host_locs.s0 * x.host_locs.bytes;
  }
  asm("" : "+l"(hints), "+l"(hosts));  // in registers, not from their factors for each token
  __builtin_assume(__isGlobal(hints)), __builtin_assume(__isGlobal(hosts));
  const bool mover = threadIdx.x >= kResolvers;
  Look l;
  Tail tail;
  u32 page = 0;
  std::int32_t spare = -1;
  Clock clock;
  if (kOrdinary ? (f.flags & kEarly) != 0 : plan.next_early) ptx::let_next_start();
  if (mover) {
    stage();
    tail = ask_tail();
    clock = ask_clock();
    if (threadIdx.x == kThreads - 1)
      page = *reinterpret_cast<const volatile u32*>(hosts);  // its page's address will be known when it is needed
    // Arguments that are read next: cold lines of 64 bytes.
    asm volatile("" ::"l"(copy.pair[0].host), "l"(copy.pair[0].host_pitch), "l"(copy.host_rows), "l"(copy.item), "r"(plan.slice),
                 "r"(plan.context), "r"(plan.box), "r"(plan.bins), "r"(plan.stash), "l"(&nothing));
    if constexpr (kAhead) cluster_wait();
  } else {
    look(0, begin.asked, l);
    clock = ask_clock();  // (beside the hints: who waits for them waits for all that this warp has asked for until then)
    spare = ask_scratch();
    if constexpr (kAhead) cluster_wait();
  }
  // All parts of the table of claims are empty. (Not earlier: who publishes that waits for what the SM has asked for until then. Behind two roles that share
  // registers each would wait for what the other has asked for; where there can be clusters of one CTA it is a barrier of the block, and stands in one place.)
  if constexpr (!kAhead) cluster_wait();
  const bool busy = mover ? move(tail, begin.other, width, real, clock, page) : serve(l, spare, clock);
  phase ^= 1;
  busy_phase ^= busy;
  if (!busy || copy.skip) return;
  bring_rest();
  if constexpr (kNative<Args> && kOrdinary && !kRows) bring_followers();
  ptx::bulk_wait_read<0>();
}

/// kRows: a cluster serves several rows, one after the other. Most launches have a cluster for each; their kernel is one without a loop, since the
/// compiler moves what all rounds of a loop share to its front, and that was hundreds of cycles before the first load.
template <class Form>
__global__ void __launch_bounds__(kThreads, 1)
    swap_kernel(const __grid_constant__ Front f, const __grid_constant__ typename Form::Args x, const __grid_constant__ CopyGeometry copy,
                const __grid_constant__ Plan plan, const __grid_constant__ Followed followed) {
  extern __shared__ __align__(16) std::byte dynamic[];
  std::byte* memory = dynamic;
  asm("" : "+l"(memory));  // in a register: as an address of its own it is made anew from the number of the CTA (S2R) for each access
  __builtin_assume(__isShared(memory));
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const u32 cluster = Form::kOrdinary ? f.cluster : plan.cluster;
  if (threadIdx.x == kResolvers) {
    for (u64& staged : s.staged) ptx::barrier_init(&staged, 1);  // by who uses it first
    ptx::barrier_init(&s.told, max(cluster - 1, 1u));
    ptx::barrier_init(&s.ranked, max(cluster - 1, 1u));
    ptx::barrier_init(&s.quiet, max(cluster - 1, 1u));
    ptx::barrier_init(&s.placed, kPolicyThreads);
    ptx::barrier_init(&s.resolved, 1);
    ptx::barrier_init(&s.firsts, kFirst);
    ptx::barrier_init(&s.met, cluster);
    ptx::fence_barriers();
    ptx::fence_async();
  }
  Swap<Form> swap{f, x, copy, plan, followed, memory, ptx::cluster_rank(), 0, 0, 0, 0, 0, {}, nullptr, nullptr, nullptr, nullptr, nullptr};
  ptx::wait_for_previous();
#pragma unroll 1
  for (i64 b = (blockIdx.x - swap.rank >> f.cluster_shift) * f.cluster_inverse;;) {  // an exact division
    swap.row(swap.begin(b));
    if (!Form::kRows || (b += gridDim.x / cluster) >= x.batch) break;
    ptx::fence_async();  // the next row's tables come where this one's were
    __syncthreads();
    cluster_leave();  // nobody reads what the next row will clear
  }
  cluster_leave();  // or a CTA that is gone
}

// -------------------------------------------------------------------------------------------------------------- launch

/// By the occurrences that one thread has; `quads`: four in a row can be read and answered at once; `rows`: clusters serve several rows.
template <class Args>
auto kernel_for(u32 slice, bool ordinary, bool quads, bool rows) {
  if (!ordinary) return &swap_kernel<Form<Args, 4, false, true>>;
  if (rows) return quads ? &swap_kernel<Form<Args, 4, true, true>> : &swap_kernel<Form<Args, 2, true, true>>;
  if (slice <= kResolvers) return &swap_kernel<Form<Args, 1, true, false>>;
  return slice <= 2 * kResolvers || !quads ? &swap_kernel<Form<Args, 2, true, false>> : &swap_kernel<Form<Args, 4, true, false>>;
}
/// How many clusters of so many CTAs fit on the current GPU at once. What a kernel may have, and how many fit, is said and asked once for each GPU.
template <class Args>
i64 clusters_at_once(u32 cluster) {
  constexpr int kMaxDevices = 64;  // as device_info() has it
  struct Fit {
    std::once_flag once;
    i64 clusters[kMostCluster + 1] = {};
  };
  static std::array<Fit, kMaxDevices> known;
  const specstate::cuda::DeviceInfo& device = specstate::cuda::device_info();
  Fit& fit = known[static_cast<std::size_t>(device.index)];
  std::call_once(fit.once, [&] {
    const int most = device.shared_bytes - 1024;
    for (const auto kernel : {kernel_for<Args>(1, true, true, false), kernel_for<Args>(2 * kResolvers, true, true, false),
                              kernel_for<Args>(4 * kResolvers, true, true, false), kernel_for<Args>(1, true, true, true),
                              kernel_for<Args>(1, true, false, true), kernel_for<Args>(1, false, true, true)}) {
      SPECSTATE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
      SPECSTATE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    }
    for (const u32 size : kClusters) {
      cudaLaunchAttribute attribute{};
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = size, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
      cudaLaunchConfig_t config{};
      config.gridDim = size, config.blockDim = kThreads, config.dynamicSmemBytes = static_cast<std::size_t>(most);
      config.attrs = &attribute, config.numAttrs = 1;
      int clusters = 0;
      SPECSTATE_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel_for<Args>(1, true, true, false), &config));
      fit.clusters[size] = clusters;
    }
  });
  return fit.clusters[cluster];
}
/// CTAs a batch row: as many as fit beside each other for all rows, since look-ups are latency; of a small call, no more than have work.
template <class Args>
const u32* cluster_of(const Args& x) {
  const auto at_once = [&](u32 cluster) {
    const i64 most = clusters_at_once<Args>(cluster);
    return x.sm_budget > 0 ? std::min(most, x.sm_budget / cluster) : most;
  };
  const u32* size = x.steps * x.top_k > 4096 ? kClusters : kClusters + 1;
  while (*size > 1 && x.batch > at_once(*size)) ++size;
  return size;
}

/// `followers`: brings their rows too, if they are few, of one kind, and each batch row has a cluster. Whether it does.
template <class Args>
bool run_swap(const Args& x, Stream stream, const CopyArgs* followers = nullptr, i64 num_followers = 0) {
  if (x.batch == 0) return false;
  const CopyGeometry copy = geometry(x.copy);
  check_rows(x.op, copy);
  if (x.steps * x.top_k > kMostOccurrences) too_large(x.op, x.hot, x.steps * x.top_k);
  const u32 most = static_cast<u32>(specstate::cuda::device_info().shared_bytes - 1024);
  // As many CTAs as fit, more if one has not enough memory, tables in global memory if there is no room for them.
  const u32* const wanted = cluster_of(x);
  const u32* size = wanted;
  bool ordinary = is_ordinary(x), spare = false;
  Plan plan = make_plan(x, *size, ordinary, spare);
  while (plan.bytes > most) {
    if (!spare) {
      spare = true;
    } else if (size != kClusters && clusters_at_once<Args>(size[-1]) > 0) {
      --size;
      spare = false;
    } else if (ordinary) {
      ordinary = spare = false;
      size = wanted;
    } else {
      too_large(x.op, x.hot, x.steps * x.top_k);
    }
    plan = make_plan(x, *size, ordinary, spare);
  }
  const u32 cluster = *size;
  const auto fours = [](const auto& v) {
    return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && v.s0 % 4 == 0 && v.s1 % 4 == 0 && v.s2 == 1;
  };
  const bool quads = x.top_k % 4 == 0 && fours(x.tokens) && fours(x.out);
  add_stash(plan, copy, most);
  add_first(plan, copy);
  specstate::cuda::Launch shape;
  shape.grid = clusters_for(x.batch, cluster, x.sm_budget) * cluster;
  // Blocks of the next kernel that came early would crowd on the few multiprocessors that this one leaves.
  plan.next_early = shape.grid.x + 32 <= static_cast<unsigned>(specstate::cuda::device_info().multiprocessors);
  shape.block = kThreads;
  shape.shared = plan.bytes;
  shape.cluster = cluster;
  shape.overlap = true;
  // (One CTA by itself takes no form that looks ahead: those are for clusters.)
  const bool rows = shape.grid.x < x.batch * cluster || (cluster == 1 && (plan.slice <= 2 * kResolvers || !quads));
  Followed to{};
  bool follow = num_followers > 0 && ordinary && !rows && !copy.skip;
  for (i64 i = 0; follow && i < num_followers; ++i) follow = join(to, geometry(followers[i]), i == 0);
  if (!follow) to.count = 0;
  rows_of(to, followers, num_followers);
  specstate::cuda::launch(kernel_for<Args>(plan.slice, ordinary, quads, rows), shape, stream, make_front(x, plan, ordinary), x, copy, plan,
                          to);
  return follow;
}

}  // namespace swap

void run(const SwapInArgs& args, const CopyArgs* followers, std::int64_t num_followers, Stream stream) {
  if (!swap::run_swap(args, stream, followers, num_followers)) run(plan_of(args), followers, num_followers, stream);
}
void run(const SwapInArgs& args, Stream stream) { swap::run_swap(args, stream); }
void run(const SpecSwapArgs& args, Stream stream) { swap::run_swap(args, stream); }

}  // namespace specstate::hisparse::cuda
