#pragma once
// The host's part of a multi-step swap (swap.cu) before its launch: where everything lies in the shared memory of a CTA, what the stash gets of the rest,
// and the arguments that the kernel reads first, in the order in which it reads them.
#include <algorithm>
#include <bit>

#include "hisparse/cuda/swap_shape.cuh"

namespace specstate::hisparse::cuda::swap {

/// `spare`: as little memory as does it.
template <class Args>
Plan make_plan(const Args& x, u32 cluster, bool ordinary, bool spare) {
  Plan p{};
  const u32 O = static_cast<u32>(x.steps * x.top_k), W = static_cast<u32>(x.hot + x.tail), H = static_cast<u32>(x.hot);
  p.cluster = cluster;
  p.slice = std::max<u32>(128, (O + 128 * cluster - 1) / (128 * cluster) * 128);
  p.words = p.slice * cluster / 32;
  p.clock = layout::PolicyWord(x.hot);
  p.columns_words = (W + 31) / 32;
  p.hot_words = (H + 31) / 32;
  p.scratch_words = static_cast<u32>((x.scratch + 31) / 32);
  if (x.tail > 0 && x.tail <= kMostTailMap) {
    p.tail_mask = 3;
    while (p.tail_mask + 1 < 2 * static_cast<u32>(x.tail)) p.tail_mask = 2 * p.tail_mask + 1;
  }
  // Twice as many entries as there can be tokens with a host row, or a quarter more: chains of a full table are long.
  const i64 most = std::min<i64>(O, x.context);
  p.part = static_cast<u32>((spare ? most + most / 4 : 2 * most) / (4 * cluster) + 4) * 4;
  p.tokens_kept = !kNative<Args> || !spare;
  p.rows_kept = spare ? std::min(p.slice, kMostStash) : p.slice;
  p.by_step = Divider(static_cast<u32>(x.top_k));
  p.by_cluster = Divider(cluster);
  p.context = static_cast<u32>(std::min<i64>(x.context, i64{1} << 31));
  p.tail = static_cast<u32>(x.tail);
  p.token_step = static_cast<std::int32_t>(x.tokens.s1), p.token_place = static_cast<std::int32_t>(x.tokens.s2);
  p.out_step = static_cast<std::int32_t>(x.out.s1), p.out_place = static_cast<std::int32_t>(x.out.s2);
  const auto aligned = [](const void* base, i64 row, i64 step) {
    return reinterpret_cast<std::uintptr_t>(base) % 16 == 0 && row % 4 == 0 && step == 1;
  };
  p.bulk = W % 4 == 0 && H % 4 == 0 && aligned(x.slot_tokens.data, x.slot_tokens.s0, x.slot_tokens.s1) &&
           aligned(x.slot_locs.data, x.slot_locs.s0, x.slot_locs.s1);
  if constexpr (kNative<Args>)
    p.bulk = p.bulk && aligned(x.stamps.data, x.stamps.s0, x.stamps.s1);
  else
    p.bulk = p.bulk && aligned(x.policy.data, x.policy.s0, x.policy.s1);
  Carve take;
  take(sizeof(Shared) / 4);
  p.box_bytes = static_cast<u32>(sizeof(Head)) + (ordinary ? (p.columns_words + 3) / 4 * 16 : 0);
  const u32 zeros = take.bytes;
  p.hit_bytes = take(kNative<Args> && ordinary ? (W + 15) / 16 * 4 : 0);
  p.box = take(p.box_bytes / 4 * cluster + (ordinary ? 0 : (p.columns_words + 3) / 4 * 4));
  p.firsts = take(p.words);
  if constexpr (!kNative<Args>) {
    p.filter_mask = 4095;
    while (p.filter_mask + 1 < 32 * p.slice) p.filter_mask = 2 * p.filter_mask + 1;
    p.filter = take((p.filter_mask + 1) / 32);
  }
  const u32 ones = take.bytes;
  p.claims = take(2 * p.part);
  p.tail_key = take(p.tail_mask ? p.tail_mask + 1 : 0);
  p.tail_column = take(p.tail_mask ? p.tail_mask + 1 : 0);
  p.zeros = zeros, p.zero_words = (ones - zeros) / 4;
  p.ones = ones;  // to the rows that fit into the stash, see add_stash()
  const u32 rows = take.bytes;
  p.one_words = (rows - ones) / 4;
  p.row = take(p.rows_kept);
  p.token = take(p.tokens_kept ? p.slice : 0);
  p.served = take(p.slice);
  p.target = kNative<Args> ? p.served : take(p.slice);
  p.number = take(p.slice / 2);
  if (ordinary) {
    p.tokens = take(W);
    p.locs = take(W);
    p.ages = take(H);
  }
  p.first = take(p.words);
  p.first_before = take(p.words);
  p.hits = take(p.columns_words);
  p.victims = take(p.hot_words);
  p.victims_before = take(p.hot_words + 1);
  p.bins = take(kBins);
  p.scratch = take(p.scratch_words);
  p.scratch_before = take(p.scratch_words + 1);
  p.stash = take.bytes;
  p.bytes = take.bytes;
  return p;
}
/// What is left becomes the stash.
inline void add_stash(Plan& p, const CopyGeometry& copy, u32 most) {
  if (copy.vec != 16 || copy.item > Pair::kCover || copy.pairs != 1 || copy.skip) return;
  p.stash_pitch = static_cast<u32>(copy.item) + (copy.paged ? 16 : 0);
  p.stash_rows = std::min({p.slice, kMostStash, (most - p.bytes) / p.stash_pitch});
  p.bytes += p.stash_rows * p.stash_pitch;
  p.one_words += (p.stash_rows + 3) & ~3u;
}
/// Rows that who lists them asks for: bulk copies, so they have no scales.
inline void add_first(Plan& p, const CopyGeometry& copy) { p.first_rows = copy.paged ? 0 : std::min(kFirst, p.stash_rows); }
template <class Args>
Front make_front(const Args& x, const Plan& p, bool ordinary) {
  Front f{};
  f.cluster_shift = static_cast<u32>(std::countr_zero(p.cluster));
  const u32 odd = p.cluster >> f.cluster_shift;
  f.cluster_inverse = 1;
  for (int i = 0; i < 5; ++i) f.cluster_inverse *= 2 - odd * f.cluster_inverse;  // (each round doubles the bits that are right)
  f.zeros = p.zeros, f.zero_words = p.zero_words, f.ones = p.ones, f.one_words = p.one_words;
  if (!ordinary) return f;
  const auto narrow = [](i64 n) { return static_cast<std::int32_t>(n); };
  f.requests = x.requests.data, f.lengths = x.seq_lens.data, f.tokens = x.tokens.data;
  f.real = x.num_real ? x.num_real : static_cast<const std::int32_t*>(x.requests.data);
  f.request_bytes = narrow(x.requests.s0 * x.requests.bytes);
  f.length_row = narrow(x.seq_lens.s0 * x.seq_lens.bytes), f.length_step = narrow(x.seq_lens.s1 * x.seq_lens.bytes);
  f.token_row = narrow(x.tokens.s0), f.token_step = narrow(x.tokens.s1), f.token_place = narrow(x.tokens.s2);
  f.by_step = Divider(static_cast<u32>(x.top_k)).factor;
  f.top_k = static_cast<u32>(x.top_k), f.occurrences = static_cast<u32>(x.steps * x.top_k);
  f.batch = static_cast<u32>(x.batch), f.cluster = p.cluster, f.slots = static_cast<u32>(x.request_slots);
  f.hot = static_cast<u32>(x.hot), f.columns = static_cast<u32>(x.hot + x.tail), f.tail = p.tail, f.context = p.context;
  f.scratch = static_cast<u32>(x.scratch);
  f.hosts = static_cast<const std::byte*>(x.host_locs.data);
  f.slot_tokens = x.slot_tokens.data, f.slot_locs = x.slot_locs.data, f.out = x.out.data;
  f.host_row = narrow(x.host_locs.s0 * x.host_locs.bytes), f.host_bytes = narrow(x.host_locs.s1 * x.host_locs.bytes);
  f.slot_step = narrow(x.slot_tokens.s1), f.loc_step = narrow(x.slot_locs.s1);
  f.slot_row = narrow(x.slot_tokens.s0), f.loc_row = narrow(x.slot_locs.s0), f.out_row = narrow(x.out.s0);
  f.tokens_at = p.tokens, f.locs_at = p.locs, f.ages_at = p.ages;
  f.flags = (x.requests.bytes == 8 ? kWideRequests : 0) | (x.seq_lens.bytes == 8 ? kWideLengths : 0) | (x.num_real ? kGivenReal : 0) |
            (p.bulk ? kBulk : 0) | (x.host_locs.bytes == 8 ? kWideHosts : 0) | (p.next_early ? kEarly : 0);
  if constexpr (kNative<Args>) {
    f.hints = static_cast<const std::byte*>(x.token_slots.data);
    f.hint_row = narrow(x.token_slots.s0 * x.token_slots.bytes), f.hint_bytes = narrow(x.token_slots.s1 * x.token_slots.bytes);
    f.ages = x.stamps.data, f.age_row = narrow(x.stamps.s0), f.clock = x.clock.data, f.clock_row = narrow(x.clock.s0);
    if (x.token_slots.bytes == 4) f.flags |= kWideHints;
    if (!x.unique_hits && x.scratch <= kResolvers) f.flags |= kAlone;
  } else {
    f.ages = &x.policy(1, 0), f.age_row = narrow(x.policy.s0), f.clock = x.policy.data, f.clock_row = narrow(x.policy.s1);
  }
  return f;
}

/// Few steps and strides of 32 bits (and tables that fit into shared memory, see below).
template <class Args>
bool is_ordinary(const Args& x) {
  const auto narrow = [](auto... strides) { return ((-(i64{1} << 28) < strides && strides < (i64{1} << 28)) && ...); };
  bool yes =
      narrow(x.batch, x.request_slots, x.requests.s0, x.seq_lens.s0, x.seq_lens.s1, x.tokens.s0, x.tokens.s1, x.tokens.s2, x.out.s0,
             x.out.s1, x.out.s2, x.host_locs.s0, x.host_locs.s1, x.slot_tokens.s0, x.slot_tokens.s1, x.slot_locs.s0, x.slot_locs.s1) &&
      x.context > 0 && x.hot > 0;
  if constexpr (kNative<Args>)
    yes = yes && narrow(x.token_slots.s0, x.token_slots.s1, x.stamps.s0, x.clock.s0);
  else
    yes = yes && narrow(x.policy.s0, x.policy.s1);
  return yes;
}

}  // namespace specstate::hisparse::cuda::swap
