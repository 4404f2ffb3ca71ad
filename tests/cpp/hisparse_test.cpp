// The native swap against a naive model, its state and limits, the address formulas.
#include "specstate/hisparse.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "hisparse/layout.hpp"
#include "specstate/error.hpp"

namespace {

using namespace specstate;
using namespace specstate::hisparse;

using i64 = std::int64_t;
using i32 = std::int32_t;

std::size_t at(i64 i) { return static_cast<std::size_t>(i); }
TensorView view(std::vector<i32>& v, std::initializer_list<i64> sizes) { return TensorView(v.data(), DType::kInt32, sizes); }
TensorView view(std::vector<i64>& v, std::initializer_list<i64> sizes) { return TensorView(v.data(), DType::kInt64, sizes); }

// ---------------------------------------------------------------------------------------------------- the naive model

/// A world with R requests whose rows lie scattered in both pools, driven through swap_in and through maps and sorted lists.
struct World {
  i64 R, H, P, L, C, item;
  bool two;
  std::mt19937 rng;
  std::vector<std::uint8_t> host, device, host_v, device_v;
  i64 host_rows, device_rows;
  std::vector<i64> host_locs;
  std::vector<i32> scratch;
  std::vector<std::byte> memory;
  SwapState state;

  // The model: what each slot holds, when it was used; the bytes of every device row.
  std::vector<std::vector<i32>> token, stamp;
  std::vector<i32> clock;
  std::vector<std::uint8_t> model, model_v;

  World(unsigned seed, i64 R, i64 H, i64 P, i64 L, i64 C, i64 item, bool two)
      : R(R), H(H), P(P), L(L), C(C), item(item), two(two), rng(seed) {
    host_rows = R * L + 3;
    device_rows = R * (H + P + C) + 2;
    for (auto* v : {&host, &host_v}) v->resize(at(host_rows * item));
    for (auto* v : {&device, &device_v}) v->resize(at(device_rows * item));
    for (auto* v : {&host, &host_v, &device, &device_v})
      for (auto& b : *v) b = static_cast<std::uint8_t>(rng());
    model = device;
    model_v = device_v;
    std::vector<i64> places(at(host_rows));
    std::iota(places.begin(), places.end(), 0);
    std::shuffle(places.begin(), places.end(), rng);
    host_locs.assign(places.begin(), places.begin() + R * L);
    for (auto& h : host_locs)
      if (rng() % 8 == 0) h = -1;
    memory.assign(at(swap_state_bytes({R, H, P, L}) + 64), std::byte{0xA5});
    auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    state = swap_state_view({R, H, P, L}, memory.data() + (64 - address % 64) % 64);
    std::vector<i32> rows(at(device_rows));
    std::iota(rows.begin(), rows.end(), 0);
    std::shuffle(rows.begin(), rows.end(), rng);
    for (i64 i = 0; i < R * (H + P); ++i) state.slot_locs.as<i32>()[i] = rows[at(i)];
    scratch.assign(rows.begin() + R * (H + P), rows.begin() + R * (H + P + C));
    for (i64 r = 0; r < R; ++r)
      for (i64 s = 0; s < H; ++s)
        if (rng() % 16 == 0) state.slot_locs.as<i32>()[r * (H + P) + s] = -1;  // a slot without a row
    reset_swap_state(state);
    token.assign(at(R), std::vector<i32>(at(H + P), -1));
    stamp.assign(at(R), std::vector<i32>(at(H), 0));
    clock.assign(at(R), 0);
  }

  i32 loc(i64 r, i64 s) const { return state.slot_locs.as<i32>()[r * (H + P) + s]; }
  void set_tail(i64 r, i64 column, i32 t) {
    token[at(r)][at(H + column)] = t;
    state.slot_tokens.as<i32>()[r * (H + P) + H + column] = t;
  }

  struct Row {
    std::vector<i32> out;
    std::vector<std::pair<i64, i32>> plan;
    i64 misses = 0, hits = 0;
  };
  Row naive(i64 r, const std::vector<std::vector<i32>>& tokens, const std::vector<i64>& lens) {
    Row row;
    auto& held = token[at(r)];
    std::vector<i32> order;  // distinct misses
    std::set<i64> hit, tails;
    std::map<i32, i32> where;
    std::vector<std::pair<i32, bool>> answers;  // (loc or token, is a miss)
    for (std::size_t s = 0; s < tokens.size(); ++s)
      for (i32 t : tokens[s]) {
        i32 answer = -1;
        bool miss = false;
        if (t >= 0 && t < lens[s]) {
          i64 found = -1;
          for (i64 c = H + P - 1; c >= H; --c)
            if (held[at(c)] == t && loc(r, c) >= 0 && t >= lens[s] - P) found = c;
          if (found >= 0) {
            tails.insert(found);
          } else {
            for (i64 c = 0; c < H; ++c)
              if (held[at(c)] == t) found = c;
            if (found >= 0) hit.insert(found);
          }
          if (found >= 0) {
            answer = loc(r, found);
          } else if (t < L && host_locs[at(r * L + t)] >= 0) {
            miss = true;
            answer = t;
            if (!where.count(t)) {
              where[t] = -1;
              order.push_back(t);
            }
          }
        }
        answers.emplace_back(answer, miss);
      }
    std::vector<std::pair<i32, i64>> candidates;
    for (i64 s = 0; s < H; ++s)
      if (!hit.count(s) && loc(r, s) >= 0) candidates.emplace_back(held[at(s)] < 0 ? 0 : std::max(1, stamp[at(r)][at(s)]), s);
    std::sort(candidates.begin(), candidates.end());
    candidates.resize(std::min(candidates.size(), order.size()));
    std::sort(candidates.begin(), candidates.end(), [](auto& a, auto& b) { return a.second < b.second; });
    const i32 now = ++clock[at(r)];
    for (i64 s : hit) stamp[at(r)][at(s)] = 2 * now + 1;
    i64 spare = 0;
    for (std::size_t u = 0; u < order.size(); ++u) {
      i32 row_id = -1;
      if (u < candidates.size()) {
        const i64 s = candidates[u].second;
        held[at(s)] = order[u];
        stamp[at(r)][at(s)] = 2 * now;
        row_id = loc(r, s);
      } else if (spare < C) {
        row_id = scratch[at(r * C + spare++)];
      } else {
        continue;
      }
      where[order[u]] = row_id;
      const i64 src = host_locs[at(r * L + order[u])];
      row.plan.emplace_back(src, row_id);
      std::copy_n(host.begin() + src * item, item, model.begin() + row_id * item);
      if (two) std::copy_n(host_v.begin() + src * item, item, model_v.begin() + row_id * item);
    }
    for (auto& [a, miss] : answers) row.out.push_back(miss ? where[a] : a);
    row.misses = static_cast<i64>(order.size());
    row.hits = static_cast<i64>(hit.size() + tails.size());
    return row;
  }
};

void run_world(unsigned seed, int calls) {
  std::mt19937 rng(seed);
  auto pick = [&](i64 low, i64 high) { return low + static_cast<i64>(rng() % static_cast<unsigned>(high - low + 1)); };
  World w(seed, pick(1, 4), pick(1, 24), pick(0, 5), pick(4, 60), pick(0, 1) * pick(0, 12), pick(1, 40), rng() % 2);
  std::vector<i32> requests(at(w.R));
  std::iota(requests.begin(), requests.end(), 0);
  for (int call = 0; call < calls; ++call) {
    const i64 B = pick(0, w.R), pad = pick(0, 2), S = pick(1, 8), K = pick(1, 9);
    std::shuffle(requests.begin(), requests.end(), rng);
    std::vector<i32> ids(requests.begin(), requests.begin() + B), tokens(at((B + pad) * S * K)), out(tokens.size(), 123456);
    for (i64 b = 0; b < pad; ++b) ids.push_back(static_cast<i32>(pick(-9, 9)));
    std::vector<i64> lens(at((B + pad) * S));
    for (i64 b = 0; b < B; ++b)
      for (i64 s = 0; s < S; ++s) lens[at(b * S + s)] = pick(1, w.L);
    for (i64 b = 0; b < B; ++b)
      if (w.P > 0 && rng() % 2) w.set_tail(ids[at(b)], pick(0, w.P - 1), static_cast<i32>(pick(-1, w.L)));
    if (w.R > 0 && rng() % 3 == 0) {  // the caller empties a slot; its stamp and hint stay
      const i64 r = pick(0, w.R - 1), s = pick(0, w.H - 1);
      w.token[at(r)][at(s)] = -1;
      w.state.slot_tokens.as<i32>()[r * (w.H + w.P) + s] = -1;
    }
    const i64 focus = pick(1, w.L);  // a working set, so that there are hits
    for (auto& t : tokens) t = static_cast<i32>(rng() % 10 == 0 ? pick(-3, w.L + 3) : pick(0, focus));
    std::vector<i64> src(at((B + pad) * S * K), -7);
    std::vector<i32> dst(src.size(), -7), count(at(B + pad), -7), misses(at(B + pad), -7), hits(at(B + pad), -7), real{static_cast<i32>(B)};
    SwapInParams p;
    p.top_k_tokens = view(tokens, {B + pad, S, K});
    p.seq_lens = view(lens, {B + pad, S});
    p.req_pool_indices = view(ids, {B + pad});
    p.num_real_reqs = view(real, {1});
    p.host_cache_locs = view(w.host_locs, {w.R, w.L});
    p.buffers.host_cache = TensorView(w.host.data(), DType::kUInt8, {w.host_rows, w.item});
    p.buffers.device_buffer = TensorView(w.device.data(), DType::kUInt8, {w.device_rows, w.item});
    if (w.two) {
      p.buffers.host_cache_v = TensorView(w.host_v.data(), DType::kUInt8, {w.host_rows, w.item});
      p.buffers.device_buffer_v = TensorView(w.device_v.data(), DType::kUInt8, {w.device_rows, w.item});
    }
    p.state = w.state;
    p.scratch_locs = view(w.scratch, {w.R, w.C});
    p.top_k_device_locs = view(out, {B + pad, S, K});
    p.plan = {view(src, {B + pad, S * K}), view(dst, {B + pad, S * K}), view(count, {B + pad})};
    p.unique_misses = view(misses, {B + pad});
    p.unique_hits = view(hits, {B + pad});
    swap_in(p);
    for (i64 b = 0; b < B; ++b) {
      std::vector<std::vector<i32>> wanted(at(S));
      std::vector<i64> n(at(S));
      for (i64 s = 0; s < S; ++s) {
        n[at(s)] = lens[at(b * S + s)];
        wanted[at(s)].assign(tokens.begin() + (b * S + s) * K, tokens.begin() + (b * S + s + 1) * K);
      }
      const World::Row want = w.naive(ids[at(b)], wanted, n);
      ASSERT_EQ(want.out, std::vector<i32>(out.begin() + b * S * K, out.begin() + (b + 1) * S * K));
      ASSERT_EQ(want.misses, misses[at(b)]);
      ASSERT_EQ(want.hits, hits[at(b)]);
      ASSERT_EQ(static_cast<i64>(want.plan.size()), count[at(b)]);
      for (std::size_t i = 0; i < want.plan.size(); ++i)
        ASSERT_EQ(want.plan[i], (std::pair{src[at(b * S * K) + i], dst[at(b * S * K) + i]}));
    }
    for (i64 b = B; b < B + pad; ++b) {
      ASSERT_EQ((std::vector<i32>{0, 0, 0}), (std::vector<i32>{count[at(b)], misses[at(b)], hits[at(b)]}));
      for (i64 i = 0; i < S * K; ++i) ASSERT_EQ(-1, out[at(b * S * K + i)]);
    }
    ASSERT_EQ(w.model, w.device);
    ASSERT_EQ(w.model_v, w.device_v);
    for (i64 r = 0; r < w.R; ++r) {
      ASSERT_EQ(w.clock[at(r)], w.state.clock.as<i32>()[r]);
      for (i64 s = 0; s < w.H + w.P; ++s) ASSERT_EQ(w.token[at(r)][at(s)], w.state.slot_tokens.as<i32>()[r * (w.H + w.P) + s]);
      for (i64 s = 0; s < w.H; ++s) ASSERT_EQ(w.stamp[at(r)][at(s)], w.state.slot_stamps.as<i32>()[r * w.H + s]);
    }
  }
}

RC_GTEST_PROP(HisparseSwap, AgreesWithTheNaiveModel, (unsigned seed)) { run_world(seed, 40); }

TEST(HisparseSwap, ThousandsOfSteps) {
  for (unsigned seed : {1u, 2u, 3u}) run_world(seed, 4000);
}

// ------------------------------------------------------------------------------------------------------------- policy

/// Misses of the native swap and of textbook LRU over the same requests, on a drifting skewed workload.
TEST(HisparseSwap, HitRateIsAtLeastThatOfLru) {
  for (const i64 H : {64, 200}) {
    std::mt19937 rng(7);
    World w(7, 1, H, 0, 600, 0, 1, false);
    std::fill(w.host_locs.begin(), w.host_locs.end(), 5);
    for (i64 s = 0; s < H; ++s) w.state.slot_locs.as<i32>()[s] = static_cast<i32>(s);
    std::vector<i32> lru;  // most recent last
    i64 native = 0, textbook = 0;
    for (int call = 0; call < 1500; ++call) {
      std::vector<i32> tokens(16), out(16), misses(1), ids{0};
      std::vector<i64> lens{600};
      for (auto& t : tokens) {
        const double u = static_cast<double>(rng() % 100000) / 100000;
        t = static_cast<i32>(static_cast<i64>(600 * u * u * u) + call / 20) % 600;
      }
      SwapInParams p;
      p.top_k_tokens = view(tokens, {1, 1, 16});
      p.seq_lens = view(lens, {1, 1});
      p.req_pool_indices = view(ids, {1});
      p.host_cache_locs = view(w.host_locs, {1, 600});
      p.buffers.host_cache = TensorView(w.host.data(), DType::kUInt8, {w.host_rows, 1});
      p.buffers.device_buffer = TensorView(w.device.data(), DType::kUInt8, {w.device_rows, 1});
      p.state = w.state;
      p.top_k_device_locs = view(out, {1, 1, 16});
      p.unique_misses = view(misses, {1});
      swap_in(p);
      native += misses[0];
      for (i32 t : tokens) {
        auto found = std::find(lru.begin(), lru.end(), t);
        if (found == lru.end()) {
          ++textbook;
          if (static_cast<i64>(lru.size()) == H) lru.erase(lru.begin());
        } else {
          lru.erase(found);
        }
        lru.push_back(t);
      }
    }
    EXPECT_GT(textbook, 1000);
    EXPECT_LE(native, textbook) << "H = " << H;
  }
}

/// A hot row that was used in every call is never evicted while rows that were not are there; the clock's restart forgets the order.
TEST(HisparseSwap, ClockRestartKeepsTheTablesRight) {
  World w(3, 1, 8, 0, 40, 0, 4, false);
  for (i64 s = 0; s < 8; ++s) w.state.slot_locs.as<i32>()[s] = static_cast<i32>(s);
  std::fill(w.host_locs.begin(), w.host_locs.end(), 0);
  std::iota(w.host_locs.begin(), w.host_locs.end(), 0);
  std::vector<i32> tokens(4), out(4), ids{0}, misses(1);
  std::vector<i64> lens{40};
  SwapInParams p;
  p.top_k_tokens = view(tokens, {1, 1, 4});
  p.seq_lens = view(lens, {1, 1});
  p.req_pool_indices = view(ids, {1});
  p.host_cache_locs = view(w.host_locs, {1, 40});
  p.buffers.host_cache = TensorView(w.host.data(), DType::kUInt8, {w.host_rows, 4});
  p.buffers.device_buffer = TensorView(w.device.data(), DType::kUInt8, {w.device_rows, 4});
  p.state = w.state;
  p.top_k_device_locs = view(out, {1, 1, 4});
  p.unique_misses = view(misses, {1});
  w.state.clock.as<i32>()[0] = layout::kMaxClock - 3;
  for (int call = 0; call < 8; ++call) {
    for (int i = 0; i < 4; ++i) tokens[at(i)] = (call * 3 + i) % 20;
    swap_in(p);
    for (int i = 0; i < 4; ++i)
      for (int b = 0; b < 4; ++b) ASSERT_EQ(w.host[at(tokens[at(i)] * 4 + b)], w.device[at(out[at(i)] * 4 + b)]);
    const i32 clock = w.state.clock.as<i32>()[0];
    EXPECT_EQ(call < 3 ? layout::kMaxClock - 2 + call : call - 2, clock);
  }
}

// ------------------------------------------------------------------------------------------------------- state, limits

TEST(HisparseState, OneBlock) {
  for (const SwapShape shape : {SwapShape{3, 5, 2, 17}, SwapShape{1, 40000, 0, 3}, SwapShape{0, 1, 0, 1}, SwapShape{7, 32767, 64, 100}}) {
    const i64 bytes = swap_state_bytes(shape);
    std::vector<std::byte> memory(at(bytes + 128), std::byte{0x5A});
    auto* base = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
    const SwapState s = swap_state_view(shape, base);
    EXPECT_EQ(shape.hot <= 32767 ? DType::kInt16 : DType::kInt32, s.token_slots.dtype);
    i64 used = 0;
    for (const TensorView* t : {&s.slot_tokens, &s.slot_locs, &s.slot_stamps, &s.token_slots, &s.clock}) {
      EXPECT_EQ(0u, reinterpret_cast<std::uintptr_t>(t->data) % 64);
      EXPECT_GE(static_cast<std::byte*>(t->data) - base, used);
      used = static_cast<std::byte*>(t->data) - base + t->numel() * size_of(t->dtype);
    }
    EXPECT_LE(used, bytes);
    for (i64 i = 0; i < s.slot_locs.numel(); ++i) s.slot_locs.as<i32>()[i] = 7;
    reset_swap_state(s);
    for (i64 i = 0; i < s.slot_tokens.numel(); ++i) ASSERT_EQ(-1, s.slot_tokens.as<i32>()[i]);
    for (i64 i = 0; i < s.slot_locs.numel(); ++i) ASSERT_EQ(7, s.slot_locs.as<i32>()[i]);
    for (i64 i = bytes; i < bytes + 64; ++i) ASSERT_EQ(std::byte{0x5A}, base[i]);
  }
  EXPECT_THROW(swap_state_bytes({1, 0, 0, 1}), Error);
  EXPECT_THROW(swap_state_bytes({1, 1, -1, 1}), Error);
}

/// Address formulas in 64 bits: rows far beyond what 32 bits of bytes can name.
TEST(HisparseLayout, SixtyFourBits) {
  EXPECT_EQ(i64{3728299} * 576, layout::linear_offset(3728299, 576));
  EXPECT_EQ(i64{4'000'000'000} * 656, layout::linear_offset(4'000'000'000, 656));
  const i64 row = (i64{1} << 33) + 63;
  EXPECT_EQ(((i64{1} << 33) / 64) * 37440 + 63 * 576, layout::paged_value_offset(row));
  EXPECT_EQ(((i64{1} << 33) / 64) * 37440 + 36864 + 63 * 8, layout::paged_scale_offset(row));
  for (i64 r = 0; r < 200; ++r) {  // records do not meet
    EXPECT_LT(layout::paged_value_offset(r) % 37440, 36864);
    EXPECT_LE(layout::paged_scale_offset(r) % 37440 + 8, 37440);
    EXPECT_EQ(r / 64, layout::paged_value_offset(r) / 37440);
  }
  const auto block = layout::state_block(1024, 8192, 64, 1 << 20);
  EXPECT_GE(block.clock - block.token_slots, i64{1024} * (1 << 20) * 2);
  EXPECT_EQ(layout::index_entry(5, 0xFFFFFFFFu), (i64{5} << 32) | 0xFFFFFFFF);
  EXPECT_EQ(3, layout::entry_slot(layout::index_entry(3, 9)));
}

TEST(HisparseLayout, PolicyWord) {
  for (const i64 hot : {1, 2, 3, 5, 4096, 4097, 32768, 1 << 20}) {
    const layout::PolicyWord word(hot);
    EXPECT_GE(i64{1} << word.cursor_bits, hot);
    EXPECT_LE(word.epoch_bits, 23);
    const auto cursor = static_cast<std::uint32_t>(hot - 1);
    EXPECT_EQ(cursor, word.cursor(word.pack(cursor, 3)));
    EXPECT_EQ(3u, word.epoch(word.pack(cursor, 3)));
    EXPECT_EQ(1u, word.next_epoch(word.pack(cursor, word.epoch_mask())));  // never 0
  }
  EXPECT_EQ(1u, layout::next_generation(0x7FFFFFFFu));
  EXPECT_EQ(layout::kDegraded | 1u, layout::next_generation(0xFFFFFFFFu));
}

}  // namespace
