#pragma once
// Every address formula of the family, once, for host and device, in 64 bits.
#include <cstdint>

#include "core/numeric.hpp"

namespace specstate::hisparse::layout {

// ------------------------------------------------------------------------------------------------- rows of a buffer

/// Byte offset of row `row` in a linear buffer.
SPECSTATE_HD inline std::int64_t linear_offset(std::int64_t row, std::int64_t pitch) { return row * pitch; }

// DeepSeek-V4 pages: 64 value records, then their 64 scale records, then padding to a multiple of the value size.
inline constexpr std::int64_t kPageRows = 64;
inline constexpr std::int64_t kValueBytes = 576;
inline constexpr std::int64_t kScaleBytes = 8;
inline constexpr std::int64_t kPagedRowBytes = kValueBytes + kScaleBytes;
inline constexpr std::int64_t kScaleStart = kPageRows * kValueBytes;
inline constexpr std::int64_t kPageBytes = (kPagedRowBytes * kPageRows + kValueBytes - 1) / kValueBytes * kValueBytes;
static_assert(kPageBytes == 37440 && kScaleStart == 36864);

SPECSTATE_HD inline std::int64_t paged_value_offset(std::int64_t row) {
  return row / kPageRows * kPageBytes + row % kPageRows * kValueBytes;
}
SPECSTATE_HD inline std::int64_t paged_scale_offset(std::int64_t row) {
  return row / kPageRows * kPageBytes + kScaleStart + row % kPageRows * kScaleBytes;
}

// ---------------------------------------------------------------------------------------- one block of native state

/// Byte offsets of the five arrays of a SwapState in one block; each starts on a cache line.
struct StateBlock {
  std::int64_t slot_tokens, slot_locs, slot_stamps, token_slots, clock, total;
};
inline constexpr std::int64_t kBlockAlign = 64;
inline constexpr std::int64_t kMaxShortSlots = 32767;  // hot slots that an int16 table can name

SPECSTATE_HD inline std::int64_t align_up(std::int64_t n) { return (n + kBlockAlign - 1) / kBlockAlign * kBlockAlign; }
SPECSTATE_HD inline StateBlock state_block(std::int64_t requests, std::int64_t hot, std::int64_t tail, std::int64_t context) {
  const std::int64_t table = requests * (hot + tail) * 4, entry = hot <= kMaxShortSlots ? 2 : 4;
  StateBlock b{};
  b.slot_locs = align_up(table);
  b.slot_stamps = b.slot_locs + align_up(table);
  b.token_slots = b.slot_stamps + align_up(requests * hot * 4);
  b.clock = b.token_slots + align_up(requests * context * entry);
  b.total = b.clock + align_up(requests * 4);
  return b;
}

/// Stamps of call `clock`; a hit counts as newer than a row that was just loaded. At kMaxClock the order of a request starts anew.
inline constexpr std::int32_t kMaxClock = (1 << 30) - 1;
SPECSTATE_HD inline std::int32_t load_stamp(std::int32_t clock) { return 2 * clock; }
SPECSTATE_HD inline std::int32_t hit_stamp(std::int32_t clock) { return 2 * clock + 1; }

// ------------------------------------------------------------------------------- sglang's speculative state (1.3)

/// Packed clock of one request, cache_policy[0, r]: cursor in the low ceil(log2 H) bits, epoch above.
struct PolicyWord {
  int cursor_bits, epoch_bits;
  SPECSTATE_HD explicit PolicyWord(std::int64_t hot) : cursor_bits(0) {
    while (cursor_bits < 31 && (std::int64_t{1} << cursor_bits) < hot) ++cursor_bits;
    epoch_bits = 32 - cursor_bits < 23 ? 32 - cursor_bits : 23;
  }
  SPECSTATE_HD std::uint32_t epoch_mask() const { return (std::uint32_t{1} << epoch_bits) - 1; }
  SPECSTATE_HD std::uint32_t cursor(std::uint32_t word) const { return word & ((std::uint32_t{1} << cursor_bits) - 1); }
  SPECSTATE_HD std::uint32_t epoch(std::uint32_t word) const { return (word >> cursor_bits) & epoch_mask(); }
  /// The epoch of the next call: never 0, which stands for "never used".
  SPECSTATE_HD std::uint32_t next_epoch(std::uint32_t word) const {
    const std::uint32_t e = (epoch(word) + 1) & epoch_mask();
    return e == 0 ? 1 : e;
  }
  SPECSTATE_HD std::uint32_t pack(std::uint32_t cursor, std::uint32_t epoch) const { return epoch << cursor_bits | cursor; }
};

/// scratch_state row 0: four banks of R counters.
enum class Counter : std::int64_t { kPublishedMisses = 0, kRunningMisses = 1, kRunningHits = 2, kGeneration = 3 };
SPECSTATE_HD inline std::int64_t counter_column(Counter bank, std::int64_t requests, std::int64_t r) {
  return static_cast<std::int64_t>(bank) * requests + r;
}
inline constexpr std::uint32_t kDegraded = 0x80000000u;
/// 31 bits, skips 0; the sign bit ("index degraded") stays.
SPECSTATE_HD inline std::uint32_t next_generation(std::uint32_t word) {
  const std::uint32_t g = (word & ~kDegraded) == 0x7FFFFFFFu ? 1 : (word & ~kDegraded) + 1;
  return g | (word & kDegraded);
}

/// The two hash banks of cache_index: places of `token` in a bank of `size` entries (a power of two).
SPECSTATE_HD inline std::int64_t bank_place(int bank, std::uint32_t token, std::int64_t size) {
  std::uint32_t x = token;
  if (bank == 0) {
    x *= 2654435761u;
  } else {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
  }
  return static_cast<std::int64_t>(x) & (size - 1);
}
inline constexpr std::int64_t kIndexDeleted = -2;
SPECSTATE_HD inline std::int64_t index_entry(std::int64_t slot, std::uint32_t token) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(slot) << 32 | token);
}
SPECSTATE_HD inline std::int64_t entry_slot(std::int64_t entry) { return entry >> 32; }
SPECSTATE_HD inline std::uint32_t entry_token(std::int64_t entry) { return static_cast<std::uint32_t>(entry); }

}  // namespace specstate::hisparse::layout
