// Windows and staging as operations on tensors, against the Coordinator, which does the same in its own tables; and their refusals.
#include "specstate/hisparse_steps.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "specstate/error.hpp"
#include "specstate/hisparse_coordinator.hpp"

namespace {

using namespace specstate;
using namespace specstate::hisparse;
using i64 = std::int64_t;
using i32 = std::int32_t;
std::size_t at(i64 i) { return static_cast<std::size_t>(i); }

TensorView view(std::vector<i32>& v, std::initializer_list<i64> sizes) { return TensorView(v.data(), DType::kInt32, sizes); }
TensorView view(std::vector<i64>& v, std::initializer_list<i64> sizes) { return TensorView(v.data(), DType::kInt64, sizes); }

struct Tables {
  i64 R, H, P, L;
  std::vector<i32> tokens, locs, stamps, hints, clock, lengths;
  std::vector<i64> reserved, committed;
  Tables(i64 R, i64 H, i64 P, i64 L)
      : R(R),
        H(H),
        P(P),
        L(L),
        tokens(at(R * (H + P)), -1),
        locs(at(R * (H + P))),
        stamps(at(R * H), 0),
        hints(at(R * L), -1),
        clock(at(R), 4),
        lengths(at(R), 0),
        reserved(at(R * L)),
        committed(at(R * L), -1) {
    std::iota(locs.begin(), locs.end(), 0);
    std::iota(reserved.begin(), reserved.end(), 0);
  }
  SwapState state() {
    return {view(tokens, {R, H + P}), view(locs, {R, H + P}), view(stamps, {R, H}), view(hints, {R, L}), view(clock, {R})};
  }
};

/// Rows of random bytes are written into windows of both; after every acceptance the same positions are resident with the same bytes, and
/// the host pools hold the same positions.
TEST(HisparseSteps, DoWhatTheCoordinatorDoes) {
  for (unsigned seed = 1; seed <= 30; ++seed) {
    std::mt19937 random(seed);
    const auto pick = [&](i64 low, i64 high) { return low + static_cast<i64>(random() % static_cast<unsigned>(high - low + 1)); };
    const i64 R = 2, H = pick(2, 12), P = pick(2, 6), L = 40, item = 8;
    Tables t(R, H, P, L);
    std::vector<std::uint8_t> host(at(R * L * item)), device(at(R * (H + P) * item)), chost(host), cdevice(device);
    KvBuffers layer, clayer;
    layer.host_cache = TensorView(host.data(), DType::kUInt8, {R * L, item});
    layer.device_buffer = TensorView(device.data(), DType::kUInt8, {R * (H + P), item});
    clayer.host_cache = TensorView(chost.data(), DType::kUInt8, {R * L, item});
    clayer.device_buffer = TensorView(cdevice.data(), DType::kUInt8, {R * (H + P), item});
    CoordinatorConfig config;
    config.requests = R, config.hot = H, config.window = P, config.tail = P, config.context = L, config.page_size = 1;
    Coordinator c(config, {&clayer, 1});
    for (i64 r = 0; r < R; ++r) c.admit(r, 0);
    const WindowGroup group{t.state(), &layer, 1};
    for (int step = 0; step < 12; ++step) {
      std::vector<i64> ids{0, 1};
      if (random() % 2) std::swap(ids[0], ids[1]);
      if (random() % 3 == 0) ids.pop_back();
      const i64 B = static_cast<i64>(ids.size());
      std::vector<i64> widths, accepted;
      std::vector<i32> w32, a32;
      bool full = false;
      for (const i64 r : ids) {
        const i64 left = std::min(P, L - t.lengths[at(r)]);
        full = full || left < 1;
        widths.push_back(left < 1 ? 0 : pick(1, left)), accepted.push_back(pick(0, widths.back()));
        w32.push_back(static_cast<i32>(widths.back())), a32.push_back(static_cast<i32>(accepted.back()));
      }
      if (full) break;
      std::vector<i32> locs(at(B * P), 77);
      OpenWindowParams open;
      open.groups = &group, open.num_groups = 1, open.requests = view(ids, {B}), open.widths = view(w32, {B});
      open.lengths = view(t.lengths, {R}), open.locs = view(locs, {B, P});
      open_window(open);
      c.prepare_verify(ids, widths);
      for (i64 b = 0; b < B; ++b)
        for (i64 j = 0; j < widths[at(b)]; ++j) {
          std::vector<std::uint8_t> row(at(item));
          for (auto& x : row) x = static_cast<std::uint8_t>(random());
          c.write(0, ids[at(b)], j, row.data());
          std::copy(row.begin(), row.end(), device.begin() + locs[at(b * P + j)] * item);
        }
      AcceptWindowParams p;
      p.groups = &group, p.num_groups = 1, p.requests = open.requests, p.widths = open.widths, p.accepted = view(a32, {B});
      p.lengths = open.lengths, p.reserved_rows = view(t.reserved, {R, L}), p.host_cache_locs = view(t.committed, {R, L});
      accept_window(p);
      c.accept(ids, accepted);
      const SwapState theirs = c.tables(0);
      for (i64 r = 0; r < R; ++r) {
        ASSERT_EQ(t.lengths[at(r)], c.length(r));
        for (i64 q = 0; q < t.lengths[at(r)]; ++q) {
          const i64 mine = t.committed[at(r * L + q)];
          ASSERT_EQ(mine, r * L + q);
          ASSERT_TRUE(std::equal(host.begin() + mine * item, host.begin() + (mine + 1) * item, chost.begin() + c.host_row(r, q) * item));
        }
        for (i64 s = 0; s < H + P; ++s) {
          const i32 token = t.tokens[at(r * (H + P) + s)];
          ASSERT_EQ(token, theirs.slot_tokens.as<i32>()[r * (H + P) + s]) << "request " << r << ", slot " << s << ", step " << step;
          if (token < 0) continue;
          const i64 a = t.locs[at(r * (H + P) + s)], b = theirs.slot_locs.as<i32>()[r * (H + P) + s];
          ASSERT_TRUE(std::equal(device.begin() + a * item, device.begin() + (a + 1) * item, cdevice.begin() + b * item));
        }
      }
    }
  }
}

std::string text(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(HisparseSteps, Refusals) {
  Tables t(2, 4, 2, 8);
  const std::vector<i32> before = t.tokens;
  WindowGroup group{t.state(), nullptr, 0};
  std::vector<i64> ids{0, 1};
  std::vector<i32> widths{1, 2}, accepted{1, 2};
  OpenWindowParams open;
  open.groups = &group, open.num_groups = 1, open.requests = view(ids, {2}), open.widths = view(widths, {2}),
  open.lengths = view(t.lengths, {2});
  widths[1] = 3;
  EXPECT_EQ(text([&] { open_window(open); }), "open_window: widths: expected 0..2, got 3 at [1].");
  widths[1] = 2, ids[1] = 0;
  EXPECT_EQ(text([&] { open_window(open); }), "open_window: requests: expected each request once, got 0 at [1].");
  ids[1] = 2;
  EXPECT_EQ(text([&] { open_window(open); }), "open_window: requests: expected request ids in 0..1, got 2 at [1].");
  ids[1] = 1, t.lengths[1] = 7;
  EXPECT_EQ(text([&] { open_window(open); }), "open_window: widths: expected 0..1, got 2 at [1].");
  t.lengths[1] = 0;
  AcceptWindowParams p;
  p.groups = &group, p.num_groups = 1, p.requests = open.requests, p.widths = open.widths, p.accepted = view(accepted, {2});
  p.lengths = open.lengths, p.reserved_rows = view(t.reserved, {2, 8}), p.host_cache_locs = view(t.committed, {2, 8});
  accepted[0] = 2;
  EXPECT_EQ(text([&] { accept_window(p); }), "accept_window: accepted: expected 0..1, got 2 at [0].");
  accepted[0] = 1, t.reserved[0] = -1;
  EXPECT_NE(text([&] { accept_window(p); }).find("accept_window: reserved_rows: expected host rows in 0.."), std::string::npos);
  t.reserved[0] = 0;
  std::vector<std::uint8_t> host(16 * 8), device(12 * 16);
  KvBuffers layer{TensorView(host.data(), DType::kUInt8, {16, 8}), TensorView(device.data(), DType::kUInt8, {12, 16}), {}, {}};
  group.layers = &layer, group.num_layers = 1;
  EXPECT_EQ(text([&] { accept_window(p); }), "accept_window: layers[0].device_buffer: expected rows of 8 bytes, got rows of 16 bytes.");
  EXPECT_EQ(t.tokens, before);
  std::vector<std::uint8_t> pool(64);
  const TensorView a(pool.data(), DType::kUInt8, {4, 8}), b(pool.data() + 32, DType::kUInt8, {2, 16});
  std::vector<i32> src{0}, dst{1};
  CopyRowsParams c;
  c.src = &a, c.dst = &b, c.num_layers = 1, c.src_rows = view(src, {1}), c.dst_rows = view(dst, {1});
  EXPECT_EQ(text([&] { copy_rows(c); }), "copy_rows: dst[0]: expected rows of 8 bytes, got rows of 16 bytes.");
  c.layout = static_cast<RowLayout>(7);
  EXPECT_EQ(text([&] { copy_rows(c); }), "copy_rows: layout: expected kLinear (0) or kDsv4Paged (1), got 7.");
  c.layout = RowLayout::kLinear;
  ReplayPlanParams replay;
  std::vector<i64> miss_src{0};
  std::vector<i32> count{0};
  replay.miss_src = view(miss_src, {1, 1}), replay.miss_dst = view(dst, {1, 1}), replay.miss_count = view(count, {1});
  replay_plan(replay);
  replay.layout = static_cast<RowLayout>(7);
  EXPECT_EQ(text([&] { replay_plan(replay); }), "replay_plan: layout: expected kLinear (0) or kDsv4Paged (1), got 7.");
  c.dst = &a, dst[0] = 4;
  EXPECT_EQ(text([&] { copy_rows(c); }), "copy_rows: dst_rows: expected rows below 4, got 4 at [0].");
}

/// What a pointer, a count, a page, a clock or a dtype can get wrong is said by name, and nothing is written.
TEST(HisparseSteps, RefusalsOfAcceptWindow) {
  Tables t(2, 4, 2, 8);
  std::vector<i64> ids{0, 1};
  std::vector<i32> widths{1, 2}, accepted{1, 2};
  std::vector<std::uint8_t> host(16 * 8, 3), device(12 * 8, 5);
  KvBuffers layer{TensorView(host.data(), DType::kUInt8, {16, 8}), TensorView(device.data(), DType::kUInt8, {12, 8}), {}, {}};
  WindowGroup group{t.state(), &layer, 1};
  AcceptWindowParams p;
  p.groups = &group, p.num_groups = 1, p.requests = view(ids, {2}), p.widths = view(widths, {2}), p.accepted = view(accepted, {2});
  p.lengths = view(t.lengths, {2}), p.reserved_rows = view(t.reserved, {2, 8}), p.host_cache_locs = view(t.committed, {2, 8});
  const AcceptWindowParams good = p;
  const auto refused = [&](const std::string& expected) {
    const std::vector<i32> tokens = t.tokens, stamps = t.stamps, lengths = t.lengths;
    const std::vector<i64> committed = t.committed;
    EXPECT_EQ(text([&] { accept_window(p); }), "accept_window: " + expected);
    EXPECT_TRUE(tokens == t.tokens && stamps == t.stamps && lengths == t.lengths && committed == t.committed && host[0] == 3);
    p = good;
  };
  group.layers = nullptr;
  refused("groups[0].layers: expected 1 entries, got a null pointer.");
  group.num_layers = -1;
  refused("groups[0].num_layers: expected 0 or more, got -1.");
  group.layers = &layer, group.num_layers = 1;
  p.groups = nullptr;
  refused("groups: expected 1 entries, got a null pointer.");
  p.num_groups = 0;
  refused("num_groups: expected 1 or more, got 0.");
  p.num_groups = -1;
  refused("num_groups: expected 0 or more, got -1.");
  for (const i32 clock : {-1, 1 << 30}) {
    t.clock[1] = clock;
    refused("groups[0].state.clock: expected a state that reset_swap_state has prepared, got " + std::to_string(clock) + " at [1].");
  }
  t.clock[1] = (1 << 30) - 1;  // the last one
  p.layout = static_cast<RowLayout>(7);
  refused("layout: expected kLinear (0) or kDsv4Paged (1), got 7.");
  // Pages whose rows 64 bits cannot name: their product must not come back into the pool.
  std::vector<i64> pages{i64{1} << 62, 0, 2, 3};
  p.page_size = 4, p.reserved_rows = view(pages, {2, 2});
  refused("reserved_rows: expected pages in 0.." + std::to_string(INT64_MAX / 4 - 1) + ", got 4611686018427387904 at [0].");
  pages = {4, 0, 2, 3};
  p.page_size = INT64_MAX, p.reserved_rows = TensorView(pages.data(), DType::kInt64, {2, 1});
  refused("reserved_rows: expected pages in 0..0, got 4 at [0].");
  p.page_size = 4, p.reserved_rows = view(pages, {2, 2});
  refused("reserved_rows: expected host rows in 0..15, got 16 at [0].");
  p.lengths.data = static_cast<char*>(p.lengths.data) + 2, p.lengths.sizes[0] = 2;
  refused("lengths: expected a data pointer that is a multiple of 4 bytes, got remainder 2.");
  // Without layers it is the table that bounds the rows.
  group.num_layers = 0;
  std::vector<i32> narrow(16, -1);
  for (const i64 row : {i64{1} << 40, i64{1} << 31}) {
    t.reserved[0] = row;
    p.host_cache_locs = view(narrow, {2, 8});
    refused("reserved_rows: expected host rows in 0..2147483647, got " + std::to_string(row) + " at [0].");
  }
  t.reserved[0] = (i64{1} << 31) - 1;
  p.host_cache_locs = view(narrow, {2, 8});
  accept_window(p);
  EXPECT_EQ(narrow[0], INT32_MAX);
  t.reserved[0] = i64{1} << 40, t.lengths.assign(2, 0), p = good;
  accept_window(p);
  EXPECT_EQ(t.committed[0], i64{1} << 40);
  group.num_layers = 1, t.lengths.assign(2, 0), pages = {3, 0, 2, 3};
  p.page_size = 4, p.reserved_rows = view(pages, {2, 2});
  accept_window(p);
  EXPECT_EQ(t.committed[0], 12);
  EXPECT_EQ(host[12 * 8], 5);
  OpenWindowParams open;
  open.num_groups = 1;
  EXPECT_EQ(text([&] { open_window(open); }), "open_window: groups: expected 1 entries, got a null pointer.");
}

/// What is written lies apart from everything else; one buffer as both ends, and one table for reserved and committed rows, are meant.
TEST(HisparseSteps, OutputsLieApart) {
  Tables t(2, 4, 2, 8);
  std::vector<i64> ids{0, 1};
  std::vector<i32> widths{1, 2}, accepted{1, 2};
  std::vector<std::uint8_t> host(16 * 8), device(12 * 8);
  KvBuffers layers[2];
  layers[0].host_cache = TensorView(host.data(), DType::kUInt8, {16, 8});
  layers[0].device_buffer = TensorView(device.data(), DType::kUInt8, {12, 8});
  WindowGroup group{t.state(), layers, 1};
  const auto tail = " expected memory of its own, got memory that overlaps ";
  const auto overlap = [&](const char* op, const char* name, const char* other) {
    return std::string(op) + ": " + name + ":" + tail + other + ".";
  };

  OpenWindowParams open;
  open.groups = &group, open.num_groups = 1, open.requests = view(ids, {2}), open.widths = view(widths, {2});
  open.lengths = view(t.lengths, {2}), open.locs = view(widths, {2, 1});
  EXPECT_EQ(text([&] { open_window(open); }), overlap("open_window", "locs", "widths"));
  open.locs = view(t.locs, {2, 2});
  EXPECT_EQ(text([&] { open_window(open); }), overlap("open_window", "locs", "groups[0].state.slot_locs"));
  open.locs = {};
  WindowGroup twice[2] = {group, group};
  open.groups = twice, open.num_groups = 2;
  EXPECT_EQ(text([&] { open_window(open); }), overlap("open_window", "groups[1].state.slot_tokens", "groups[0].state.slot_tokens"));
  open.groups = &group, open.num_groups = 1;

  AcceptWindowParams p;
  p.groups = &group, p.num_groups = 1, p.requests = open.requests, p.widths = open.widths, p.accepted = open.widths;
  p.lengths = view(accepted, {2}), p.accepted = view(accepted, {2});
  p.reserved_rows = view(t.reserved, {2, 8}), p.host_cache_locs = view(t.committed, {2, 8});
  EXPECT_EQ(text([&] { accept_window(p); }), overlap("accept_window", "lengths", "accepted"));
  p.lengths = open.lengths;
  layers[1] = layers[0], group.num_layers = 2;
  EXPECT_EQ(text([&] { accept_window(p); }), overlap("accept_window", "layers[1].device_buffer", "layers[0].device_buffer"));
  group.num_layers = 1;
  p.reserved_rows = p.host_cache_locs = view(t.reserved, {2, 8});
  open_window(open);
  accept_window(p);
  EXPECT_EQ(t.lengths, (std::vector<i32>{1, 2}));

  std::vector<i32> rows{0, 1};
  const TensorView whole = layers[0].host_cache;
  const TensorView low(host.data(), DType::kUInt8, {8, 8}), shifted(host.data() + 4, DType::kUInt8, {8, 8});
  std::iota(host.begin(), host.end(), std::uint8_t{0});
  const std::vector<std::uint8_t> kept = host;
  CopyRowsParams c;
  c.src = &low, c.dst = &shifted, c.num_layers = 1, c.src_rows = view(rows, {1}),
  c.dst_rows = TensorView(rows.data() + 1, DType::kInt32, {1});
  EXPECT_EQ(text([&] { copy_rows(c); }), overlap("copy_rows", "dst[0]", "src[0]"));
  const TensorView index(host.data(), DType::kInt32, {1});
  c.dst = &low, c.src = &layers[0].device_buffer, c.src_rows = index;
  EXPECT_EQ(text([&] { copy_rows(c); }), overlap("copy_rows", "dst[0]", "src_rows"));
  EXPECT_EQ(host, kept);
  c.src = c.dst = &whole, c.src_rows = view(rows, {1});
  copy_rows(c);
  EXPECT_TRUE(std::equal(host.begin(), host.begin() + 8, host.begin() + 8));
}

}  // namespace
