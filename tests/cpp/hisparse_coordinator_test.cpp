// The request life cycle: random sequences of every operation, legal or not, against a model that remembers what each position's bytes are.
#include "specstate/hisparse_coordinator.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <functional>
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
using Bytes = std::vector<std::uint8_t>;

std::size_t at(i64 i) { return static_cast<std::size_t>(i); }

constexpr i64 kFirstLayer = 20;
constexpr i64 kLayers = 5;

std::string error_of(const std::function<void()>& f, ErrorKind kind = ErrorKind::kValue) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(kind, e.kind()) << e.what();
    return e.what();
  }
  return "no error";
}

/// Five layers: anchors 20, 22 (K and V) and 24, followers 21 (of 20) and 23 (of 22), rows of different sizes.
struct Fixture {
  CoordinatorConfig config;
  std::mt19937 rng;
  std::vector<i64> item{5, 12, 16, 1, 132};
  std::vector<Bytes> host, device, host_v, device_v;
  i64 device_rows, host_rows;
  std::vector<KvBuffers> buffers;
  std::unique_ptr<Coordinator> c;

  Fixture(unsigned seed, const CoordinatorConfig& given, i64 device_rows, i64 host_rows)
      : config(given), rng(seed), device_rows(device_rows), host_rows(host_rows) {
    config.first_layer = kFirstLayer;
    config.anchor_of = {20, 20, 22, 22, 24};
    for (i64 l = 0; l < kLayers; ++l) {
      host.push_back(noise(host_rows * item[at(l)]));
      device.push_back(noise(device_rows * item[at(l)]));
      host_v.push_back(noise(host_rows * item[at(l)]));
      device_v.push_back(noise(device_rows * item[at(l)]));
    }
    for (i64 l = 0; l < kLayers; ++l) {
      KvBuffers b;
      b.host_cache = TensorView(host[at(l)].data(), DType::kUInt8, {host_rows, item[at(l)]});
      b.device_buffer = TensorView(device[at(l)].data(), DType::kUInt8, {device_rows, item[at(l)]});
      if (two(l)) {
        b.host_cache_v = TensorView(host_v[at(l)].data(), DType::kUInt8, {host_rows, item[at(l)]});
        b.device_buffer_v = TensorView(device_v[at(l)].data(), DType::kUInt8, {device_rows, item[at(l)]});
      }
      buffers.push_back(b);
    }
    c = std::make_unique<Coordinator>(config, buffers);
  }
  static bool two(i64 l) { return l == 2; }
  static i64 anchor(i64 l) { return l < 2 ? 0 : l < 4 ? 2 : 4; }
  Bytes noise(i64 n) {
    Bytes b(at(n));
    for (auto& x : b) x = static_cast<std::uint8_t>(rng());
    return b;
  }
};

struct Model {
  RequestState state = RequestState::kFree;
  i64 length = 0, width = 0;
  // [layer][position]: K bytes, then V bytes where there are two; the window included
  std::vector<std::vector<Bytes>> content = std::vector<std::vector<Bytes>>(kLayers);
};

struct Machine : Fixture {
  std::vector<Model> model;
  int refused = 0, steps = 0;

  Machine(unsigned seed, const CoordinatorConfig& config, i64 device_rows, i64 host_rows)
      : Fixture(seed, config, device_rows, host_rows), model(at(config.requests)) {}

  i64 pick(i64 low, i64 high) { return low + static_cast<i64>(rng() % static_cast<unsigned>(high - low + 1)); }
  Bytes row(i64 l) { return noise(item[at(l)] * (two(l) ? 2 : 1)); }

  /// Runs an operation that the coordinator may refuse for want of rows; true if it was done. A refusal must change nothing.
  bool attempt(const std::function<void()>& f) {
    const auto before = snapshot();
    try {
      f();
      return true;
    } catch (const Error& e) {
      EXPECT_EQ(ErrorKind::kRuntime, e.kind()) << e.what();
      EXPECT_TRUE(before == snapshot()) << e.what();
      ++refused;
      return false;
    }
  }
  std::vector<i64> snapshot() const {
    std::vector<i64> s{c->free_device_rows(), c->free_host_rows()};
    for (i64 r = 0; r < config.requests; ++r) {
      s.push_back(static_cast<i64>(c->state(r)));
      s.push_back(c->length(r));
    }
    for (i64 l : {20, 22, 24}) {
      const SwapState t = c->tables(l);
      for (const TensorView* v : {&t.slot_tokens, &t.slot_locs, &t.slot_stamps})
        for (i64 i = 0; i < v->numel(); ++i) s.push_back(v->as<i32>()[i]);
    }
    for (i64 i = 0; i < config.requests * config.context; ++i) s.push_back(c->host_cache_locs().as<i64>()[i]);
    return s;
  }

  // ------------------------------------------------------------------------------------------------------- commands
  void admit(i64 r) {
    const i64 tokens = pick(0, config.context / 2);
    const bool could = c->can_admit(tokens);
    const bool done = attempt([&] { c->admit(r, tokens); });
    EXPECT_EQ(could, done);
    if (done) model[at(r)] = Model{}, model[at(r)].state = RequestState::kActive;
  }
  void prefill(i64 r) {
    Model& q = model[at(r)];
    const i64 n = pick(0, std::min<i64>(9, config.context - q.length));
    if (!attempt([&] { c->reserve(r, n); })) return;
    const bool direct = rng() % 3 == 0;
    for (i64 l = 0; l < kLayers; ++l) {
      Bytes rows, rows_v;
      for (i64 k = 0; k < n; ++k) {
        const Bytes one = row(l);
        q.content[at(l)].push_back(one);
        rows.insert(rows.end(), one.begin(), one.begin() + item[at(l)]);
        if (two(l)) rows_v.insert(rows_v.end(), one.begin() + item[at(l)], one.end());
        if (direct) {
          const i64 h = c->host_row(r, q.length + k);
          std::copy_n(one.begin(), item[at(l)], host[at(l)].begin() + h * item[at(l)]);
          if (two(l)) std::copy_n(one.begin() + item[at(l)], item[at(l)], host_v[at(l)].begin() + h * item[at(l)]);
        }
      }
      if (!direct) {
        const i64 half = n / 2;  // in two pieces
        const std::uint8_t* v = two(l) ? rows_v.data() : nullptr;
        c->stage(l + kFirstLayer, r, q.length, half, rows.data(), item[at(l)], v, item[at(l)]);
        c->stage(l + kFirstLayer, r, q.length + half, n - half, rows.data() + half * item[at(l)], item[at(l)],
                 v ? v + half * item[at(l)] : nullptr, item[at(l)]);
      }
    }
    c->append(r, n, direct ? Coordinator::Source::kHost : Coordinator::Source::kStaged);
    q.length += n;
  }
  void verify() {
    std::vector<i64> ids, widths;
    for (i64 r = 0; r < config.requests; ++r)
      if (model[at(r)].state == RequestState::kActive && model[at(r)].length < config.context && rng() % 3 != 0) {
        ids.push_back(r);
        widths.push_back(pick(1, std::min(config.window, config.context - model[at(r)].length)));
      }
    if (ids.empty()) return;
    std::shuffle(ids.begin(), ids.end(), rng);
    for (std::size_t b = 0; b < ids.size(); ++b) widths[b] = std::min(widths[b], config.context - model[at(ids[b])].length);
    std::vector<i32> locs(ids.size() * at(config.window + 1), 99);
    const auto B = static_cast<i64>(ids.size());
    if (!attempt([&] { c->prepare_verify(ids, widths, TensorView(locs.data(), DType::kInt32, {B, config.window + 1})); })) return;
    for (i64 b = 0; b < B; ++b) {
      Model& q = model[at(ids[at(b)])];
      q.state = RequestState::kVerifying;
      q.width = widths[at(b)];
      for (i64 j = 0; j <= config.window; ++j) {
        const i32 loc = locs[at(b * (config.window + 1) + j)];
        EXPECT_EQ(j < q.width ? c->verify_loc(ids[at(b)], j) : -1, loc);
      }
      for (i64 l = 0; l < kLayers; ++l)
        for (i64 j = 0; j < q.width; ++j) {
          q.content[at(l)].push_back(row(l));
          const Bytes& one = q.content[at(l)].back();
          c->write(l + kFirstLayer, ids[at(b)], j, one.data(), two(l) ? one.data() + item[at(l)] : nullptr);
        }
    }
    swap_all();
  }

  /// One pass over all layers for all requests that are in a window (or could be read), in rounds where the selection is too wide.
  void swap_all() {
    std::vector<i32> ids;
    for (i64 r = 0; r < config.requests; ++r)
      if (model[at(r)].state == RequestState::kVerifying || (model[at(r)].state == RequestState::kActive && rng() % 2))
        ids.push_back(static_cast<i32>(r));
    const auto B = static_cast<i64>(ids.size());
    if (B == 0) return;
    const i64 S = pick(1, config.window), K = pick(1, config.top_k);
    std::vector<i32> tokens(at(B * S * K));
    std::vector<i64> lens(at(B * S));
    for (i64 b = 0; b < B; ++b) {
      const Model& q = model[at(ids[at(b)])];
      for (i64 s = 0; s < S; ++s) {
        const i64 end = q.length + q.width;
        lens[at(b * S + s)] = q.width ? std::min(end, q.length + s + 1) : q.length;
        for (i64 k = 0; k < K; ++k)
          tokens[at((b * S + s) * K + k)] = static_cast<i32>(rng() % 8 == 0 ? pick(-2, end + 2) : pick(std::max<i64>(0, end - 20), end));
      }
    }
    for (i64 l = 0; l < kLayers; ++l) {
      if (anchor(l) != l) continue;
      const i64 layer = l + kFirstLayer;
      SwapInParams p;
      p.top_k_tokens = TensorView(tokens.data(), DType::kInt32, {B, S, K});
      p.seq_lens = TensorView(lens.data(), DType::kInt64, {B, S});
      p.req_pool_indices = TensorView(ids.data(), DType::kInt32, {B});
      std::vector<i32> round_of(at(B * S), -5);
      const i64 rounds = c->plan_rounds(layer, p, TensorView(round_of.data(), DType::kInt32, {B, S}));
      if (S * K <= config.scratch) EXPECT_EQ(1, rounds);
      std::vector<std::vector<i32>> outs;
      for (i64 n = 0; n < rounds; ++n) {
        std::vector<i32> mine = tokens, out(tokens.size(), 123456);
        for (i64 i = 0; i < B * S; ++i)
          if (round_of[at(i)] != n) std::fill_n(mine.begin() + i * K, K, -1);
        p.top_k_tokens.data = mine.data();
        p.top_k_device_locs = TensorView(out.data(), DType::kInt32, {B, S, K});
        c->swap(layer, p, n);
        check_rows(l, ids, tokens, lens, round_of, n, out, S, K);
        outs.push_back(out);
      }
      for (i64 f = l + 1; f < kLayers && anchor(f) == l; ++f)
        for (i64 n = 0; n < rounds; ++n) {
          c->follow(f + kFirstLayer, n);
          check_rows(f, ids, tokens, lens, round_of, n, outs[at(n)], S, K);
        }
    }
  }
  /// Every visible position of a round is answered, by a row that holds its bytes.
  void check_rows(i64 l, const std::vector<i32>& ids, const std::vector<i32>& tokens, const std::vector<i64>& lens,
                  const std::vector<i32>& round_of, i64 round, const std::vector<i32>& out, i64 S, i64 K) {
    for (std::size_t b = 0; b < ids.size(); ++b)
      for (i64 s = 0; s < S; ++s)
        for (i64 k = 0; k < K; ++k) {
          const i64 i = (static_cast<i64>(b) * S + s) * K + k, t = tokens[at(i)];
          const bool visible = round_of[at(static_cast<i64>(b) * S + s)] == round && t >= 0 && t < lens[at(static_cast<i64>(b) * S + s)];
          if (!visible) {
            ASSERT_EQ(-1, out[at(i)]);
          } else {
            ASSERT_GE(out[at(i)], 0) << "position " << t << " of request " << ids[b] << " has no row";
            ASSERT_TRUE(device_holds(l, out[at(i)], model[at(ids[b])].content[at(l)][at(t)]));
          }
        }
  }
  void accept() {
    std::vector<i64> ids, counts;
    for (i64 r = 0; r < config.requests; ++r)
      if (model[at(r)].state == RequestState::kVerifying && rng() % 4 != 0) {
        ids.push_back(r);
        const i64 w = model[at(r)].width, kind = pick(0, 4);
        counts.push_back(kind == 0 ? 0 : kind == 1 ? 1 : kind == 2 ? w : pick(0, w));
      }
    c->accept(ids, counts);
    for (std::size_t b = 0; b < ids.size(); ++b) {
      Model& q = model[at(ids[b])];
      q.length += counts[b];
      q.width = 0;
      q.state = RequestState::kActive;
      for (auto& layer : q.content) layer.resize(at(q.length));
    }
  }
  /// A step whose counts are in arrays, as an engine has them that never reads them on the host; the host is told at the end.
  void step_by_arrays() {
    std::vector<i64> ids;
    for (i64 r = 0; r < config.requests; ++r)
      if (model[at(r)].state == RequestState::kActive && rng() % 3 != 0) ids.push_back(r);
    std::shuffle(ids.begin(), ids.end(), rng);
    if (!attempt([&] { c->begin_step(ids); })) return;
    const auto B = static_cast<i64>(ids.size());
    std::vector<i64> batch(ids), counts;
    std::vector<i32> widths, accepted, locs(at((B + 1) * (config.window + 1)), 99), real{static_cast<i32>(B)};
    for (const i64 r : ids) {
      Model& q = model[at(r)];
      q.state = RequestState::kVerifying;
      q.width = pick(0, std::min(config.window, config.context - q.length));
      widths.push_back(static_cast<i32>(q.width)), counts.push_back(pick(0, q.width));
      accepted.push_back(static_cast<i32>(counts.back()));
    }
    batch.push_back(-9), widths.push_back(-9), accepted.push_back(-9);  // padding
    const StepBatch step{TensorView(batch.data(), DType::kInt64, {B + 1}), TensorView(widths.data(), DType::kInt32, {B + 1}),
                         TensorView(real.data(), DType::kInt32, {1})};
    c->open_step(step, TensorView(locs.data(), DType::kInt32, {B + 1, config.window + 1}));
    for (i64 b = 0; b <= B; ++b)
      for (i64 j = 0; j <= config.window; ++j) EXPECT_EQ(b < B && j < widths[at(b)], locs[at(b * (config.window + 1) + j)] >= 0);
    for (i64 b = 0; b < B; ++b)
      for (i64 l = 0; l < kLayers; ++l)
        for (i64 j = 0; j < widths[at(b)]; ++j) {
          auto& content = model[at(ids[at(b)])].content[at(l)];
          content.push_back(row(l));
          c->write(l + kFirstLayer, ids[at(b)], j, content.back().data(), two(l) ? content.back().data() + item[at(l)] : nullptr);
        }
    if (B > 0) EXPECT_NE("no error", error_of([&] { c->retract(ids[0]); }));
    swap_all();
    c->close_step(step, TensorView(accepted.data(), DType::kInt32, {B + 1}));
    c->end_step(ids, counts);
    for (std::size_t b = 0; b < ids.size(); ++b) {
      Model& q = model[at(ids[b])];
      EXPECT_EQ(q.length + counts[b], c->lengths().as<i32>()[ids[b]]);
      q.length += counts[b], q.width = 0, q.state = RequestState::kActive;
      for (auto& layer : q.content) layer.resize(at(q.length));
    }
  }
  void end(i64 r, bool finish) {
    finish ? c->finish(r) : c->abort(r);
    model[at(r)] = Model{};
  }
  void retract(i64 r) {
    c->retract(r);
    Model& q = model[at(r)];
    q.state = RequestState::kRetracted;
    q.width = 0;
    for (auto& layer : q.content) layer.resize(at(q.length));
  }
  void resume(i64 r) {
    if (attempt([&] { c->resume(r); })) model[at(r)].state = RequestState::kActive;
  }
  /// Operations that are wrong in this state: refused by name, nothing changes.
  void misuse(i64 r) {
    const auto before = snapshot();
    const Model& q = model[at(r)];
    const bool active = q.state == RequestState::kActive, verifying = q.state == RequestState::kVerifying;
    const std::vector<i64> one{r}, twice{r, r}, w{1}, ww{1, 1}, wide{config.window + 1}, too_many{q.width + 1};
    if (q.state != RequestState::kFree) EXPECT_NE("no error", error_of([&] { c->admit(r, 0); }));
    if (q.state == RequestState::kFree) EXPECT_NE("no error", error_of([&] { c->finish(r); }));
    if (!active) EXPECT_NE("no error", error_of([&] { c->reserve(r, 0); }));
    if (!active) EXPECT_NE("no error", error_of([&] { c->prepare_verify(one, w); }));
    if (!verifying) EXPECT_NE("no error", error_of([&] { c->accept(one, w); }));
    if (q.state != RequestState::kRetracted) EXPECT_NE("no error", error_of([&] { c->resume(r); }));
    if (active) {
      EXPECT_NE("no error", error_of([&] { c->prepare_verify(twice, ww); }));
      EXPECT_NE("no error", error_of([&] { c->prepare_verify(one, wide); }));
      EXPECT_NE("no error", error_of([&] { c->append(r, config.context + 1); }));
      if (q.length < config.context) EXPECT_NE("no error", error_of([&] { c->verify_loc(r, 0); }));
    }
    if (verifying) {
      EXPECT_EQ("Coordinator: accepted: expected 0 to the window's " + std::to_string(q.width) + " positions, got " +
                    std::to_string(too_many[0]) + ".",
                error_of([&] { c->accept(one, too_many); }));
      EXPECT_NE("no error", error_of([&] { c->write(kFirstLayer, r, q.width, nullptr); }));
    }
    for (i64 layer : {kFirstLayer - 1, kFirstLayer + kLayers, i64{0}}) EXPECT_NE("no error", error_of([&] { c->follow(layer); }));
    EXPECT_NE("no error", error_of([&] { c->follow(kFirstLayer); }));  // an anchor
    EXPECT_TRUE(before == snapshot());
  }

  // ----------------------------------------------------------------------------------------------------- invariants
  bool holds(const std::vector<Bytes>& k, const std::vector<Bytes>& v, i64 l, i64 r, const Bytes& want) const {
    const i64 n = item[at(l)];
    if (!std::equal(want.begin(), want.begin() + n, k[at(l)].begin() + r * n)) return false;
    return !two(l) || std::equal(want.begin() + n, want.end(), v[at(l)].begin() + r * n);
  }
  bool device_holds(i64 l, i64 r, const Bytes& want) const { return holds(device, device_v, l, r, want); }

  void check() {
    ++steps;
    std::set<i32> owned;
    std::set<i64> host_used;
    i64 live = 0;
    const i64 W = config.hot + config.tail;
    const i64* host_locs = c->host_cache_locs().as<i64>();
    for (i64 r = 0; r < config.requests; ++r) {
      const Model& q = model[at(r)];
      ASSERT_EQ(q.state, c->state(r));
      ASSERT_EQ(q.length, c->length(r));
      const bool has_rows = q.state == RequestState::kActive || q.state == RequestState::kVerifying;
      live += has_rows;
      if (q.state == RequestState::kFree) ASSERT_TRUE(c->host_pages(r).empty());
      for (i64 p = 0; p < config.context; ++p) {  // host: complete up to the length, nothing beyond
        const i64 h = host_locs[r * config.context + p];
        ASSERT_EQ(p < q.length, h >= 0);
        if (h < 0) continue;
        ASSERT_TRUE(host_used.insert(h).second);
        ASSERT_EQ(h, c->host_row(r, p));
        ASSERT_EQ(h, c->host_pages(r)[at(p / config.page_size)] * config.page_size + p % config.page_size);
        for (i64 l = 0; l < kLayers; ++l) ASSERT_TRUE(holds(host, host_v, l, h, q.content[at(l)][at(p)]));
      }
      for (i64 anchor_layer : {0, 2, 4}) {
        const SwapState t = c->tables(anchor_layer + kFirstLayer);
        std::map<i32, i64> slot_of;
        for (i64 s = 0; s < W; ++s) {
          const i32 token = t.slot_tokens.as<i32>()[r * W + s], loc = t.slot_locs.as<i32>()[r * W + s];
          if (!has_rows) {
            ASSERT_EQ(-1, token);
            ASSERT_EQ(-1, loc);
          }
          if (anchor_layer == 0 && loc >= 0) ASSERT_TRUE(owned.insert(loc).second);
          if (token < 0) continue;
          ASSERT_GE(loc, 0);
          ASSERT_TRUE(slot_of.emplace(token, s).second) << "position " << token << " in two slots";
          ASSERT_LT(token, q.length + q.width);
          if (token >= q.length) ASSERT_GE(s, config.hot);  // the window is in the tail only
          for (i64 l = anchor_layer; l < kLayers && anchor(l) == anchor_layer; ++l)
            ASSERT_TRUE(device_holds(l, loc, q.content[at(l)][at(token)])) << "layer " << l << " slot " << s << " position " << token;
        }
        if (has_rows && q.length + q.width <= config.hot && anchor_layer == 0)  // growth kept up with the length
          for (i64 s = 0; s < q.length + q.width; ++s) ASSERT_GE(t.slot_locs.as<i32>()[r * W + s], 0);
      }
    }
    ASSERT_EQ(device_rows, c->free_device_rows() + live * (W + config.scratch));
    ASSERT_LE(static_cast<i64>(host_used.size()), host_rows - c->free_host_rows());
  }

  void step(int op, i64 r) {
    const RequestState s = model[at(r)].state;
    switch (op % 19) {
      case 0:
      case 1:
        if (s == RequestState::kFree) admit(r);
        break;
      case 2:
      case 3:
      case 4:
        if (s == RequestState::kActive) prefill(r);
        break;
      case 5:
      case 6:
      case 7:
      case 8: verify(); break;
      case 9:
      case 10:
      case 11: accept(); break;
      case 12:
        if (s != RequestState::kFree && rng() % 2) end(r, true);
        break;
      case 13:
        if (rng() % 2) end(r, false), c->abort(r);  // abort twice, or of a free slot: nothing
        break;
      case 14:
        if (s == RequestState::kActive || s == RequestState::kVerifying)
          retract(r);
        else if (s == RequestState::kRetracted)
          resume(r);
        break;
      case 16:
      case 17:
      case 18: step_by_arrays(); break;
      default: misuse(r); break;
    }
    check();
  }
};

CoordinatorConfig small_config(unsigned seed) {
  std::mt19937 rng(seed);
  auto pick = [&](i64 low, i64 high) { return low + static_cast<i64>(rng() % static_cast<unsigned>(high - low + 1)); };
  CoordinatorConfig c;
  c.requests = pick(1, 4);
  c.top_k = pick(1, 8);
  c.hot = c.top_k + pick(0, 16);
  c.window = pick(1, 8);
  c.tail = rng() % 2 ? 0 : c.window + pick(0, 3);
  c.scratch = rng() % 2 ? 0 : c.window * c.top_k;
  c.context = pick(20, 60);
  c.page_size = pick(1, 5);
  return c;
}

void run_machine(unsigned seed, const std::vector<std::uint8_t>& ops, int* refused = nullptr) {
  CoordinatorConfig c = small_config(seed);
  const i64 per_request = c.hot + (c.tail ? c.tail : 2 * c.window) + c.scratch;
  // Too few rows for everybody, so that refusals happen.
  Machine m(seed, c, per_request * std::max<i64>(1, c.requests - 1) + 3, c.context * c.requests / 2 + 7);
  m.config.tail = c.tail ? c.tail : 2 * c.window;
  for (const std::uint8_t op : ops) {
    m.step(op, m.pick(0, c.requests - 1));
    if (::testing::Test::HasFatalFailure()) return;
  }
  for (i64 r = 0; r < c.requests; ++r) m.end(r, false);
  m.check();
  EXPECT_EQ(m.device_rows, m.c->free_device_rows());
  EXPECT_EQ(m.host_rows / c.page_size * c.page_size, m.c->free_host_rows());
  if (refused) *refused += m.refused;
}

RC_GTEST_PROP(HisparseCoordinator, RandomLives, (unsigned seed, std::vector<std::uint8_t> ops)) { run_machine(seed, ops); }

TEST(HisparseCoordinator, LongLives) {
  int refused = 0;
  for (unsigned seed = 0; seed < 24 && !HasFatalFailure(); ++seed) {
    std::mt19937 rng(seed);
    std::vector<std::uint8_t> ops(400);
    for (auto& op : ops) op = static_cast<std::uint8_t>(rng());
    SCOPED_TRACE(seed);
    run_machine(seed, ops, &refused);
  }
  EXPECT_GT(refused, 50);
}

// ------------------------------------------------------------------------------------------------------- single facts

CoordinatorConfig plain() {
  CoordinatorConfig c;
  c.requests = 3;
  c.hot = 8;
  c.window = 4;
  c.context = 64;
  c.top_k = 4;
  c.page_size = 1;
  return c;
}

TEST(HisparseCoordinator, ShortRequestsNeverMiss) {
  Machine m(1, plain(), 100, 100);
  m.config.tail = 8;
  m.admit(0);
  while (m.model[0].length + 4 <= 8) {
    m.verify();
    m.accept();
    m.check();
  }
  EXPECT_EQ(0, m.c->stats().unique_misses);
  EXPECT_GT(m.c->stats().unique_hits, 0);
  EXPECT_EQ(0, m.c->stats().bytes_to_device);
}

TEST(HisparseCoordinator, ErrorTexts) {
  Fixture f(1, plain(), 40, 30);
  Coordinator& c = *f.c;
  const std::vector<i64> r0{0}, w5{5}, w1{1}, two{0, 1};
  EXPECT_EQ("Coordinator: request: expected 0..2, got 3.", error_of([&] { c.admit(3, 1); }));
  EXPECT_EQ("Coordinator: tokens: expected 0..30, got 31.", error_of([&] { c.admit(0, 31); }));
  c.admit(0, 10);
  EXPECT_EQ("Coordinator: request: expected request 0 to be free, got active.", error_of([&] { c.admit(0, 1); }));
  EXPECT_EQ("Coordinator: widths: expected at most window=4, got 5.", error_of([&] { c.prepare_verify(r0, w5); }));
  EXPECT_EQ("Coordinator: widths: expected one for each of 2 requests, got 1.", error_of([&] { c.prepare_verify(two, w1); }));
  EXPECT_EQ("Coordinator: layer: expected 20..24, got 5.", error_of([&] { c.follow(5); }));
  EXPECT_EQ("Coordinator: layer: expected a follower layer, got 22, an anchor.", error_of([&] { c.follow(22); }));
  EXPECT_EQ("Coordinator: round: expected a swap of anchor 20 that layer 21 has yet to follow, got none for round 0.",
            error_of([&] { c.follow(21); }));
  EXPECT_EQ("Coordinator: layer: expected an anchor layer, got 23, a follower of 22.", error_of([&] {
              SwapInParams p;
              c.swap(23, p);
            }));
  EXPECT_EQ("Coordinator: top_k_tokens: expected shape [B, S, K] or [B, K], got none.", error_of([&] {
              SwapInParams p;
              c.swap(22, p);
            }));
  EXPECT_EQ("Coordinator: count: expected positions that layer 20 has staged (up to 0), got 4.", error_of([&] { c.append(0, 4); }));
  c.append(0, 4, Coordinator::Source::kHost);
  EXPECT_EQ("HiSparse failed to allocate 21 KV slots. 20 of 30 host rows are free.",
            error_of([&] { c.reserve(0, 27); }, ErrorKind::kRuntime));
  c.admit(1, 0);
  EXPECT_EQ("HiSparse failed to allocate 16 KV slots. 8 of 40 device rows are free.",
            error_of([&] { c.admit(2, 0); }, ErrorKind::kRuntime));
  EXPECT_EQ("Coordinator: seq_lens: expected at most 4, the end of the window, got 5.", error_of([&] {
              std::vector<i32> tokens(1), out(1), ids{0};
              std::vector<i64> lens{5};
              SwapInParams p;
              p.top_k_tokens = TensorView(tokens.data(), DType::kInt32, {1, 1});
              p.top_k_device_locs = TensorView(out.data(), DType::kInt32, {1, 1});
              p.seq_lens = TensorView(lens.data(), DType::kInt64, {1});
              p.req_pool_indices = TensorView(ids.data(), DType::kInt32, {1});
              c.swap(20, p);
            }));

  auto broken = [&](auto change) {
    CoordinatorConfig config = f.config;
    change(config);
    return error_of([&] { Coordinator(config, f.buffers); });
  };
  EXPECT_EQ("Coordinator: page_size: expected >= 1, got 0.", broken([](auto& x) { x.page_size = 0; }));
  EXPECT_EQ("Coordinator: requests: expected >= 1, got 0.", broken([](auto& x) { x.requests = 0; }));
  EXPECT_EQ("Coordinator: anchor_of: expected a preceding anchor layer for layer 20, got 19.",
            broken([](auto& x) { x.anchor_of[0] = 19; }));
  EXPECT_EQ("Coordinator: anchor_of: expected a preceding anchor layer for layer 22, got 21.",
            broken([](auto& x) { x.anchor_of[2] = 21; }));
  EXPECT_EQ("Coordinator: anchor_of: expected a preceding anchor layer for layer 21, got 23.",
            broken([](auto& x) { x.anchor_of[1] = 23; }));
  EXPECT_EQ("Coordinator: tail: expected at least window=4 slots, got 3.", broken([](auto& x) { x.tail = 3; }));
  EXPECT_EQ("Coordinator: hot: expected at least top_k=9 slots, got 8.", broken([](auto& x) { x.top_k = 9; }));
  EXPECT_EQ("Coordinator: anchor_of: expected 5 entries, got 4.", broken([](auto& x) { x.anchor_of.pop_back(); }));
  EXPECT_EQ("Coordinator: device_rows: expected 0..40, got 41.", broken([](auto& x) { x.device_rows = 41; }));
}

TEST(HisparseCoordinator, ScratchShortage) {
  CoordinatorConfig c = plain();
  c.scratch = 10;
  Fixture f(1, c, 30, 30);
  f.c->admit(0, 0);
  EXPECT_EQ("HiSparse failed to allocate 16 KV slots. 4 of 30 device rows are free.",
            error_of([&] { f.c->admit(1, 0); }, ErrorKind::kRuntime));
  Fixture g(1, c, 43, 30);
  g.c->admit(0, 0);
  EXPECT_EQ("HiSparse spec failed to allocate 10 scratch slots. 17 of 43 device rows are free.",
            error_of([&] { g.c->admit(1, 0); }, ErrorKind::kRuntime));
  EXPECT_EQ(17, g.c->free_device_rows());
}

}  // namespace
