#pragma once
// The shape of a multi-step swap (swap.cu): how many threads do what, where everything lies in shared memory (Plan), what a launch brings with it
// (Front), what the warps of a CTA share (Shared). The host works it out (swap_plan.cuh), the kernel follows it.
#include "hisparse/cuda/missing.cuh"
#include "hisparse/cuda/rows.cuh"

namespace specstate::hisparse::cuda::swap {

constexpr u32 kPolicyThreads = 256, kPolicyWarps = kPolicyThreads / 32;  // these do the thinking
constexpr u32 kResolvers = 512;                                          // these and as many others resolve
constexpr u32 kThreads = kResolvers + 32 * 4, kWarps = kThreads / 32;    // the last warps bring rows
constexpr u32 kTaken = 0xFFFFFFFFu;                                      // key of a slot that cannot be a victim
constexpr u32 kBinBits = 11, kBins = 1u << kBinBits;
constexpr u32 kMostTailMap = 2048;
constexpr i64 kMostOccurrences = 65536;  // a number fits into 16 bits
constexpr u32 kBatch = 4;                // slots that a thread looks at at once
constexpr u32 kGroup = 4;                // rows that a warp has under way; two if they are large
constexpr u32 kMostStash = 256;
constexpr u32 kClusters[] = {16, 8, 6, 4, 3, 2, 1}, kMostCluster = 16;
constexpr u32 kPlaceBits = 20;  // of a place in one CTA's part of the table of claims
using Group = Flight<uint4, kGroup, 2>;
using Pair = Flight<uint4, 2, 4>;
// What served() says of an occurrence in a list: its token's place in the table of claims, later the token's first occurrence; or
constexpr u32 kNowhere = 0x3FFFFFFFu;                       // sglang's state: no host row
constexpr u32 kInSlot = 0x40000000u, kLastSlot = 0xFFFFFu;  // sglang's state: kInSlot + kLastSlot - slot, found in spite of its index
constexpr u32 kAnswered = 0xFFFFFFFFu;
constexpr u32 kFirst = 4;     // rows of a CTA that who lists them asks for, see list()
constexpr int kFollowed = 8;  // pairs of buffers of followers that a swap brings itself

/// Sizes and places in shared memory, the same for all CTAs of a launch.
struct Plan {
  u32 cluster;       // CTAs of a batch row
  u32 slice, words;  // occurrences of a CTA, a multiple of 128; words of a set of all occurrences
  u32 part;          // entries of the table of claims that a CTA has, a multiple of 4
  u32 rows_kept;     // of the lists' rows of the host; the others are read again when it is their turn
  bool tokens_kept;  // so are tokens
  bool next_early;   // the next kernel finds room beside this one
  u32 columns_words, hot_words, tail_mask, scratch_words, filter_mask;
  u32 stash_rows, stash_pitch;  // that fit into what is left; bytes of one
  u32 first_rows;               // of them that who lists them asks for
  u32 context, tail;
  // Ordinary calls: strides of the selection and the answers in elements (step, place).
  std::int32_t token_step, token_place, out_step, out_place;
  bool bulk;                    // tables can be copied in bulk
  layout::PolicyWord clock{1};  // sglang's
  Divider by_step, by_cluster;
  u32 hit_bytes, zeros, zero_words, ones, one_words;
  u32 box, box_bytes, firsts;              // one a CTA each: what it saw hit; which of its occurrences were first
  u32 claims;                              // their table
  u32 token, target, row, served, number;  // the lists
  u32 tokens, locs, ages;                  // the slot tables
  u32 first, first_before, hits, victims, victims_before, bins, tail_key, tail_column, scratch, scratch_before, filter, stash, bytes;
};

/// What an ordinary call reads first, in the order of its use: the arguments of a launch are cold, and each line of 64 bytes of them is a miss that all
/// warps wait for. (The first line has 48 bytes for it.)
struct Front {
  const void *requests, *lengths;
  const std::int32_t *tokens, *real;                  // real: of requests, if it is not given
  std::int32_t request_bytes, length_row, token_row;  // bytes, bytes, elements
  u32 flags;                                          // kWideRequests ...
  u64 by_step;                                        // Divider
  u32 top_k, occurrences;
  std::int32_t length_step, token_step, token_place;
  u32 batch, cluster, cluster_shift, cluster_inverse;  // cluster: odd * 2^shift; the inverse of the odd factor modulo 2^32
  u32 zeros, zero_words, ones, one_words;              // what is cleared, in fours of words
  u32 hot, columns, slots;
  // Of the request.
  const std::byte *hints, *hosts;
  const std::int32_t *slot_tokens, *slot_locs, *ages, *clock;
  std::int32_t* out;
  std::int32_t hint_row, host_row, slot_row, loc_row, age_row, clock_row, out_row;  // bytes (hints, hosts), elements
  std::int32_t hint_bytes, host_bytes;
  u32 tokens_at, locs_at, ages_at, context, tail;
  u32 scratch;
  std::int32_t slot_step, loc_step;
};
/// Its flags. kAlone: see alone(); kEarly: Plan's next_early.
constexpr u32 kWideRequests = 1, kWideLengths = 2, kGivenReal = 4, kBulk = 8, kWideHosts = 16, kWideHints = 32, kAlone = 64, kEarly = 128;

/// The followers of a layer that get the same rows.
using Followed = Streams<kFollowed>;

template <class Args>
constexpr bool kNative = false;
template <>
constexpr bool kNative<SwapInArgs> = true;

struct Shared {             // the fixed part
  u64 told, ranked;         // barriers: all CTAs have told what they saw hit, which occurrences were first
  u64 staged[3];            // the tables are here: tokens, rows, ages
  u64 placed, met;          // it is known where the rows go; the thinking warps of all CTAs have come here
  u64 resolved;             // the lists are complete
  u64 quiet;                // all others miss nothing
  u64 firsts;               // the first rows are in the stash
  u32 lists;                // lengths of mine: moves() | again() << 16
  u32 taken;                // so many rows behind the first ones have a warp that brings them
  u32 followed;             // so many rows of followers
  u32 bad;                  // something that makes the row invalid
  u32 busy;                 // there is something to move
  u32 loud;                 // somebody else misses something
  u32 low, high;            // range of the keys
  u32 bucket, bucket_rest;  // of the n-th smallest key
  u32 warp_sum[kWarps];
};

/// What every CTA tells every other one: this, and the set of the columns that it saw hit.
struct Head {
  u32 count, bad, unused[2];
};

struct Now {
  u32 call;                            // native: its number; sglang's: its epoch
  u32 epoch_mask, origin, generation;  // sglang's
  bool restart;                        // native
};

/// What a thread reads that has no tokens to read: a load without a predicate.
__device__ const int4 no_tokens = {-1, -1, -1, -1};

/// One kernel of the swap: whose state it works in, the occurrences that a thread has in a round, whether the slot tables lie in shared memory and
/// strides fit into 32 bits (all but very large calls), whether a cluster serves several batch rows one after the other.
template <class Args_, u32 kDeep_, bool kOrdinary_, bool kRows_>
struct Form {
  using Args = Args_;
  static constexpr u32 kDeep = kDeep_;
  static constexpr bool kOrdinary = kOrdinary_, kRows = kRows_;
};

}  // namespace specstate::hisparse::cuda::swap
