// The HiSparse swaps beside a bare gather of the same rows. Every call finds new misses: the selections of a ring are far enough apart that
// a miss was evicted long before it is wanted again, and the host rows are scattered over far more memory than the caches hold.
#include "specstate/hisparse.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "bench/harness.hpp"
#include "cpu/parallel.hpp"
#include "hisparse/layout.hpp"
#include "specstate/error.hpp"

namespace specstate::bench {

namespace {

using namespace hisparse;
using i64 = std::int64_t;
using i32 = std::int32_t;

std::size_t at(i64 i) { return static_cast<std::size_t>(i); }
TensorView ints(std::vector<i32>& v, std::initializer_list<i64> sizes) { return TensorView(v.data(), DType::kInt32, sizes); }
TensorView longs(std::vector<i64>& v, std::initializer_list<i64> sizes) { return TensorView(v.data(), DType::kInt64, sizes); }

struct Case {
  i64 requests, steps, top_k, hot, bytes, misses;  // misses of a request and call
};

/// The layout of sglang's speculative benchmark: 4 steps of 2048 positions over 4096 hot slots, 782 distinct misses a call, most hits shared
/// between the steps; here each request has host rows of its own.
struct World {
  Case c;
  i64 context, variants, host_rows, device_rows;
  std::vector<std::uint8_t> host, device;
  std::vector<i64> host_locs, miss_src;
  std::vector<std::vector<i32>> tokens;  // of a ring of calls
  std::vector<i32> out, ids, lens, real, miss_dst, miss_count;

  World(const Case& given, i64 variants) : c(given), variants(variants) {
    std::mt19937 random(1);
    const i64 resident = c.hot - c.misses;  // hits come from these, so they stay
    context = resident + variants * c.misses;
    host_rows = c.requests * context;
    device_rows = c.requests * (c.hot + 1);
    host.resize(at(host_rows * c.bytes));
    device.resize(at(device_rows * c.bytes));
    for (std::size_t i = 0; i < host.size(); i += 4096) host[i] = static_cast<std::uint8_t>(i >> 12);  // resident pages
    for (std::size_t i = 0; i < device.size(); i += 4096) device[i] = 1;
    host_locs.resize(at(host_rows));
    std::iota(host_locs.begin(), host_locs.end(), 0);
    std::shuffle(host_locs.begin(), host_locs.end(), random);
    const i64 S = c.steps, K = c.top_k, fresh = c.misses / S;
    for (i64 v = 0; v < variants; ++v) {
      std::vector<i32> all;
      for (i64 r = 0; r < c.requests; ++r)
        for (i64 s = 0; s < S; ++s) {
          std::vector<i32> row;
          const i64 mine = s + 1 < S ? fresh : c.misses - fresh * (S - 1);
          for (i64 i = 0; i < mine; ++i) row.push_back(static_cast<i32>(resident + v * c.misses + s * fresh + i));
          for (i64 i = 0; static_cast<i64>(row.size()) < K; ++i) row.push_back(static_cast<i32>((i + 137 * s) % resident));
          std::shuffle(row.begin(), row.end(), random);
          all.insert(all.end(), row.begin(), row.end());
        }
      tokens.push_back(std::move(all));
    }
    out.resize(at(c.requests * S * K));
    ids.resize(at(c.requests));
    std::iota(ids.begin(), ids.end(), 0);
    lens.assign(at(c.requests * S), static_cast<i32>(context));
    real = {static_cast<i32>(c.requests)};
    miss_src.resize(at(c.requests * S * K));
    miss_dst.resize(miss_src.size());
    miss_count.resize(at(c.requests));
  }
  KvBuffers buffers() {
    KvBuffers b;
    b.host_cache = TensorView(host.data(), DType::kUInt8, {host_rows, c.bytes});
    b.device_buffer = TensorView(device.data(), DType::kUInt8, {device_rows, c.bytes});
    return b;
  }
  MissPlan plan() {
    const i64 M = c.steps * c.top_k;
    return {longs(miss_src, {c.requests, M}), ints(miss_dst, {c.requests, M}), ints(miss_count, {c.requests})};
  }
  /// Device rows of slot s of request r.
  i32 row(i64 r, i64 s) const { return static_cast<i32>(r * (c.hot + 1) + s); }

  Report::Keys keys() const {
    return {{"bytes", std::to_string(c.bytes)},       {"hot", std::to_string(c.hot)},     {"misses", std::to_string(c.misses)},
            {"requests", std::to_string(c.requests)}, {"steps", std::to_string(c.steps)}, {"top_k", std::to_string(c.top_k)}};
  }
};

/// The same bytes between the same kind of rows and nothing else, on the same threads.
double gather_us(const Report& report, World& w, i64 layers = 1, bool cold = false) {
  const i64 n = w.c.requests * w.c.misses;
  std::vector<i64> src(at(n * w.variants));
  for (i64 i = 0; i < n * w.variants; ++i) src[at(i)] = w.host_locs[at((i * 7919) % w.host_rows)];
  std::shuffle(src.begin(), src.end(), std::mt19937(2));
  i64 call = 0;
  const auto gather = [&] {
    const i64* rows = src.data() + (call++ % w.variants) * n;
    for (i64 l = 0; l < layers; ++l)
      cpu::parallel_for(n, std::max<i64>(1, 65536 / w.c.bytes), [&](i64 begin, i64 end) {
        for (i64 i = begin; i < end; ++i)
          std::memcpy(w.device.data() + layout::linear_offset((i * 5) % w.device_rows, w.c.bytes),
                      w.host.data() + layout::linear_offset(rows[i], w.c.bytes), at(w.c.bytes));
      });
  };
  return cold ? report.time_cold(gather) : report.best_time(gather);
}
constexpr const char* kFloor = "bare gather of as many scattered rows, measured";

void spec(Report& report, const Case& c, i64 variants) {
  World w(c, variants);
  const i64 B = c.requests, S = c.steps, K = c.top_k, W = c.hot + 1;
  const double floor = gather_us(report, w);

  // The native state.
  const SwapShape shape{B, c.hot, 1, w.context};
  std::vector<std::byte> memory(at(swap_state_bytes(shape) + 64));
  SwapInParams p;
  p.state = swap_state_view(shape, memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64);
  for (i64 r = 0; r < B; ++r)
    for (i64 s = 0; s < W; ++s) p.state.slot_locs.as<i32>()[r * W + s] = w.row(r, s);
  reset_swap_state(p.state);
  p.seq_lens = ints(w.lens, {B, S});
  p.req_pool_indices = ints(w.ids, {B});
  p.host_cache_locs = longs(w.host_locs, {B, w.context});
  p.buffers = w.buffers();
  p.top_k_device_locs = ints(w.out, {B, S, K});
  p.plan = w.plan();
  i64 call = 0;
  const auto native = [&] {
    p.top_k_tokens = ints(w.tokens[at(call++ % variants)], {B, S, K});
    swap_in(p);
  };
  native();
  Result r;
  r.floor_us = floor;
  r.floor = kFloor;
  r.ours_us = report.time(native);
  const bool expected = std::all_of(w.miss_count.begin(), w.miss_count.end(), [&](i32 n) { return n == c.misses; });
  if (!expected) throw Error(ErrorKind::kInternal, "internal error: the benchmark's calls do not miss as they should");
  report.add("swap", w.keys(), r);
  p.skip_io = true;
  r.ours_us = report.time(native);
  r.floor_us = 0;
  r.floor.clear();
  report.add("swap_bookkeeping", w.keys(), r);

  // Followers of that plan.
  std::vector<std::uint8_t> host2(w.host.size()), device2(w.device.size());
  std::memset(host2.data(), 1, host2.size());
  KvBuffers follower;
  follower.host_cache = TensorView(host2.data(), DType::kUInt8, {w.host_rows, c.bytes});
  follower.device_buffer = TensorView(device2.data(), DType::kUInt8, {w.device_rows, c.bytes});
  const std::vector<KvBuffers> followers{w.buffers(), follower, w.buffers()};
  ReplayPlanParams replay;
  replay.miss_src = p.plan.miss_src;
  replay.miss_dst = p.plan.miss_dst;
  replay.miss_count = p.plan.miss_count;
  replay.followers = followers.data();
  replay.num_followers = 3;
  r.ours_us = report.time_cold([&] { replay_plan(replay); });
  r.floor_us = gather_us(report, w, 3, true);
  r.floor = std::string(kFloor) + ", three times, with cold caches as ours";
  Report::Keys keys = w.keys();
  keys["followers"] = "3";
  report.add("follower_replay", keys, r);

  // sglang's state.
  std::vector<i32> slot_tokens(at(B * W), -1), slot_locs(at(B * W)), policy(at((B + 1) * c.hot)), scratch_state;
  for (i64 q = 0; q < B; ++q)
    for (i64 s = 0; s < W; ++s) slot_locs[at(q * W + s)] = w.row(q, s);
  i64 hash = 1;
  while (hash < 2 * c.hot) hash *= 2;
  std::vector<i64> index(at(B * 2 * hash), -1), ids(w.ids.begin(), w.ids.end());
  const i64 columns = std::max(4 * B, 5 * S * K);
  scratch_state.assign(at((B + 1) * columns), -1);
  std::fill_n(scratch_state.begin(), columns, 0);
  std::vector<i32> scratch;
  SpecSwapParams x;
  x.device_buffer_tokens = ints(slot_tokens, {B, W});
  x.device_buffer_locs = ints(slot_locs, {B, W});
  x.host_cache_locs = p.host_cache_locs;
  x.buffers = p.buffers;
  x.top_k_device_locs = p.top_k_device_locs;
  x.req_pool_indices = longs(ids, {B});
  x.seq_lens = ints(w.lens, {B * S});
  x.cache_index = longs(index, {B, 2, hash});
  x.cache_policy = ints(policy, {B + 1, c.hot});
  x.scratch_locs = ints(scratch, {B, 0});
  x.scratch_state = ints(scratch_state, {B + 1, columns});
  x.num_real_reqs = ints(w.real, {1});
  x.plan = p.plan;
  x.limits = SpecSwapParams::Limits::kNone;
  const auto sglang_state = [&] {
    x.top_k_tokens = ints(w.tokens[at(call++ % variants)], {B, S, K});
    swap_in_spec(x);
  };
  sglang_state();
  r.ours_us = report.time(sglang_state);
  r.floor_us = floor;
  r.floor = kFloor;
  report.add("spec_swap", w.keys(), r);
}

void single(Report& report, const Case& c, i64 variants) {
  World w(c, variants);
  const i64 B = c.requests, K = c.top_k, W = c.hot + 1;
  std::vector<i32> slot_tokens(at(B * W), -1), slot_locs(at(B * W));
  std::vector<std::int16_t> lru(at(B * c.hot));
  for (i64 r = 0; r < B; ++r) {
    for (i64 s = 0; s < W; ++s) slot_locs[at(r * W + s)] = w.row(r, s);
    std::iota(lru.begin() + r * c.hot, lru.begin() + (r + 1) * c.hot, std::int16_t{0});
  }
  SwapInSingleParams p;
  p.device_buffer_tokens = ints(slot_tokens, {B, W});
  p.device_buffer_locs = ints(slot_locs, {B, W});
  p.host_cache_locs = longs(w.host_locs, {B, w.context});
  p.buffers = w.buffers();
  p.top_k_device_locs = ints(w.out, {B, K});
  p.req_pool_indices = ints(w.ids, {B});
  for (i32& n : w.lens) n += 1;
  p.seq_lens = ints(w.lens, {B});
  p.lru_slots = TensorView(lru.data(), DType::kInt16, {B, c.hot});
  p.plan = w.plan();
  i64 call = 0;
  const auto step = [&] {
    p.top_k_tokens = ints(w.tokens[at(call++ % variants)], {B, K});
    swap_in_single(p);
  };
  step();
  Result r;
  r.ours_us = report.time(step);
  r.floor_us = gather_us(report, w);
  r.floor = kFloor;
  report.add("single_swap", w.keys(), r);
}

void run(Report& report) {
  if (report.quick()) {
    spec(report, {1, 2, 64, 128, 64, 16}, 16);
    single(report, {1, 1, 64, 128, 64, 16}, 16);
    return;
  }
  for (const i64 requests : {1, 4}) spec(report, {requests, 4, 2048, 4096, 576, 782}, requests == 1 ? 128 : 32);
  spec(report, {1, 8, 64, 512, 160, 100}, 512);  // the shape of the embedded model's verify
  for (const i64 misses : {410, 2}) single(report, {1, 1, 2048, 4096, 512, misses}, misses > 100 ? 192 : 4096);
}

const bool registered = add_family("hisparse", run);

}  // namespace

}  // namespace specstate::bench
