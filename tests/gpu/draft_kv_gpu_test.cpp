// Draft KV on the GPU from C++: the CPU's V to the bit where the arithmetic is the CPU's, one set of bytes whichever kernel takes the rows,
// graphs, workspaces and pending errors. Small shapes, so that the sanitizers run all of it. (The oracle's cases: test_draft_kv_gpu.py.)
#include <cmath>
#include <tuple>

#include "core/numeric.hpp"
#include "gpu_test.hpp"
#include "specstate/draft_kv.hpp"

using namespace specstate;
using namespace specstate::draft_kv;
using namespace specstate::gpu_test;

namespace {

struct Shape {
  DType io;
  std::int64_t tokens, window, layers, heads, dim, rotary, hidden, features;
  bool most = false;       // of every window all rows are committed but one at most; else any number
  std::int64_t v_dim = 0;  // 0: that of K
  std::int64_t of_v() const { return v_dim ? v_dim : dim; }
};
constexpr std::int64_t kTable = 40;

/// Tensors of one call, each twice. bfloat16 lives in uint16 arrays.
struct Case {
  Shape s;
  std::int64_t slots;
  Pair<std::uint16_t> x16, w16, fc16, hidden_norm16, norm16, bias16, k16, v16;
  Pair<float> x32, w32, norm32, bias32, k32, v32, eps, table;
  Pair<std::int64_t> positions, slot, commit;
  Pair<std::uint8_t> workspace;
  TensorView k_view, v_view;
  bool neox = true, rounded = false, biased = true;
  bool all = false;  // every row is written

  explicit Case(const Shape& shape, bool every_row = false)
      : s(shape),
        slots(shape.tokens + 5),
        x16({n16(s.tokens * width())}, DType::kUInt16),
        w16({n16(s.layers * columns() * s.hidden)}, DType::kUInt16),
        fc16({std::max<std::int64_t>(s.hidden * s.features, 1)}, DType::kUInt16),
        hidden_norm16({s.hidden}, DType::kUInt16),
        norm16({n16(s.layers * s.dim)}, DType::kUInt16),
        bias16({n16(s.layers * columns())}, DType::kUInt16),
        k16({n16(s.layers * slots * s.heads * s.dim)}, DType::kUInt16),
        v16({n16(s.layers * slots * s.heads * s.of_v())}, DType::kUInt16),
        x32({n32(s.tokens * width())}),
        w32({n32(s.layers * columns() * s.hidden)}),
        norm32({n32(s.layers * s.dim)}),
        bias32({n32(s.layers * columns())}),
        k32({n32(s.layers * slots * s.heads * s.dim)}),
        v32({n32(s.layers * slots * s.heads * s.of_v())}),
        eps({s.layers}, std::vector<float>(s.layers, 1e-5f)),
        table({kTable * s.rotary}),
        positions({s.tokens}),
        slot({s.tokens}),
        commit({s.tokens / s.window}),
        workspace({32 << 20}),
        all(every_row) {
    draw(1);
  }
  std::int64_t columns() const { return s.heads * (s.dim + s.of_v()); }
  std::int64_t width() const { return s.features ? s.features : s.hidden; }
  std::int64_t n16(std::int64_t n) const { return s.io == DType::kFloat32 ? 1 : std::max<std::int64_t>(n, 1); }
  std::int64_t n32(std::int64_t n) const { return s.io == DType::kFloat32 ? std::max<std::int64_t>(n, 1) : 1; }

  void draw(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](Pair<std::uint16_t>& a, Pair<float>* b, float scale, float add) {
      if (b && s.io == DType::kFloat32) {
        std::vector<float> v(b->size() / 4);
        for (float& x : v) x = add + scale * normal(random);
        b->set(v);
      } else {
        std::vector<std::uint16_t> v(a.size() / 2);
        for (auto& x : v) x = core::from_float<core::bfloat16>(add + scale * normal(random)).bits;
        a.set(v);
      }
    };
    fill(x16, &x32, 1, 0), fill(w16, &w32, 1 / std::sqrt(static_cast<float>(s.hidden)), 0), fill(norm16, &norm32, 0.2f, 1);
    fill(bias16, &bias32, 0.5f, 0);
    if (s.features) fill(fc16, nullptr, 1 / std::sqrt(static_cast<float>(s.features)), 0), fill(hidden_norm16, nullptr, 0.2f, 1);
    std::vector<float> angles(kTable * s.rotary);
    for (std::int64_t i = 0; i < kTable; ++i)
      for (std::int64_t j = 0; j < s.rotary / 2; ++j)
        angles[i * s.rotary + j] = std::cos(0.1f * static_cast<float>(i * (j + 1))),
                              angles[i * s.rotary + s.rotary / 2 + j] = std::sin(0.1f * static_cast<float>(i * (j + 1)));
    table.set(angles);
    std::vector<std::int64_t> p(s.tokens), at(s.tokens), c(s.tokens / s.window);
    for (std::int64_t i = 0; i < s.tokens; ++i) {
      p[i] = static_cast<std::int64_t>(random() % kTable);
      at[i] = all || random() % 8 ? (i * 7 + seed) % slots : (random() % 2 ? -1 : 0);  // some skipped, some in one slot
    }
    for (auto& n : c)
      n = s.most ? s.window - static_cast<std::int64_t>(random() % 2) : static_cast<std::int64_t>(random() % (s.window + 1));
    positions.set(p), slot.set(at), commit.set(c);
  }

  TensorView as(Pair<std::uint16_t>& a, Pair<float>* b, Where where, std::initializer_list<std::int64_t> shape) {
    const bool wide = b && s.io == DType::kFloat32;
    const TensorView v = wide ? b->view(where) : a.view(where);
    TensorView out(v.data, wide ? DType::kFloat32 : DType::kBFloat16, shape, v.device);
    return out;
  }

  MaterializeIntoPoolParams params(Where where) {
    MaterializeIntoPoolParams p;
    p.ctx_hidden = as(x16, &x32, where, {s.tokens, width()});
    if (s.features)
      p.fc_weight = as(fc16, nullptr, where, {s.hidden, s.features}), p.hidden_norm_weight = as(hidden_norm16, nullptr, where, {s.hidden});
    p.kv_weight = as(w16, &w32, where, {s.layers, columns(), s.hidden});
    if (biased) p.kv_bias = as(bias16, &bias32, where, {s.layers, columns()});
    p.k_norm_weight = as(norm16, &norm32, where, {s.layers, s.dim});
    p.eps = eps.view(where);
    p.cos_sin_cache = TensorView(table.view(where).data, DType::kFloat32, {kTable, s.rotary}, table.view(where).device);
    p.positions = positions.view(where);
    p.slot_mapping = TensorView(slot.view(where).data, DType::kInt64, {s.tokens / s.window, s.window}, slot.view(where).device);
    if (!all) p.commit_lens = commit.view(where);
    k_view = as(k16, &k32, where, {s.layers, slots, s.heads, s.dim}), v_view = as(v16, &v32, where, {s.layers, slots, s.heads, s.of_v()});
    p.k_pool = {&k_view, 1}, p.v_pool = {&v_view, 1};
    p.is_neox_style = neox, p.round_after_norm = rounded;
    if (where == Where::kDevice) p.workspace = workspace.view(where);
    return p;
  }

  /// One row of the call after the other (or some at a time), by calls of their own.
  void in_pieces(std::int64_t windows, Stream stream) {
    const MaterializeIntoPoolParams all = params(Where::kDevice);
    for (std::int64_t r = 0; r < s.tokens / s.window; r += windows) {
      const std::int64_t n = std::min(windows, s.tokens / s.window - r);
      MaterializeIntoPoolParams p = all;
      p.ctx_hidden = rowed(all.ctx_hidden, r * s.window, n * s.window);
      p.positions = rowed(all.positions, r * s.window, n * s.window);
      p.slot_mapping = rowed(all.slot_mapping, r, n);
      if (p.commit_lens.given()) p.commit_lens = rowed(all.commit_lens, r, n);
      p.k_pool = {&k_view, 1}, p.v_pool = {&v_view, 1};
      materialize_into_pool(p, stream);
    }
  }
  static TensorView rowed(TensorView t, std::int64_t from, std::int64_t rows) {
    t.data = static_cast<char*>(t.data) + from * t.strides[0] * size_of(t.dtype);
    t.sizes[0] = rows;
    return t;
  }
  Bytes& k() { return s.io == DType::kFloat32 ? static_cast<Bytes&>(k32) : k16; }
  Bytes& v() { return s.io == DType::kFloat32 ? static_cast<Bytes&>(v32) : v16; }
};

/// Largest distance of two arrays of bfloat16 (or float32) in units of the last place of the larger magnitude in a run of `run` values.
double distance(const std::vector<unsigned char>& a, const std::vector<unsigned char>& b, DType io, std::int64_t run) {
  const std::int64_t item = size_of(io), n = static_cast<std::int64_t>(a.size()) / item;
  const auto value = [&](const std::vector<unsigned char>& x, std::int64_t i) {
    if (io == DType::kFloat32) return *reinterpret_cast<const float*>(x.data() + 4 * i);
    return core::to_float(core::bfloat16{*reinterpret_cast<const std::uint16_t*>(x.data() + 2 * i)});
  };
  double worst = 0;
  for (std::int64_t begin = 0; begin < n; begin += run) {
    double size = 0;
    for (std::int64_t i = begin; i < begin + run; ++i) size = std::max<double>(size, std::fabs(value(b, i)));
    for (std::int64_t i = begin; i < begin + run; ++i) {
      const double off = std::fabs(static_cast<double>(value(a, i)) - value(b, i));
      if (!(off == off)) return std::memcmp(&a[i * item], &b[i * item], item) == 0 ? worst : HUGE_VAL;
      worst = std::max(worst, off / (size * (io == DType::kFloat32 ? 0x1p-20 : 0x1p-8)));
    }
  }
  return worst;
}

std::vector<unsigned char> host_bytes(Bytes& b) {
  return {static_cast<unsigned char*>(b.host()), static_cast<unsigned char*>(b.host()) + b.size()};
}

/// CPU and GPU agree, what was not named keeps its bytes, and any cut into calls and a replayed graph leave the same bytes.
void check(const Shape& shape, bool neox, bool rounded, bool biased, bool every_row = false) {
  SCOPED_TRACE(::testing::Message() << name_of(shape.io) << ", " << shape.tokens << " tokens, head dim " << shape.dim << ", rotary "
                                    << shape.rotary << ", hidden " << shape.hidden << ", features " << shape.features << ", neox " << neox);
  Case c(shape, every_row);
  c.neox = neox, c.rounded = rounded, c.biased = biased;
  const OwnStream stream;
  const auto arrays = {&c.k(), &c.v()};
  const auto run = [&](const std::function<void()>& call) {
    for (Bytes* b : arrays) b->reset();
    call();
    EXPECT_TRUE(stream.synchronize());
    raise_pending_error({DeviceType::kCuda, 0});
    return std::pair{c.k().download(), c.v().download()};
  };
  const auto whole = run([&] { materialize_into_pool(c.params(Where::kDevice), stream); });
  for (const std::int64_t windows : {std::int64_t{1}, 63 / c.s.window + 1, 100 / c.s.window + 1}) {
    if (windows == 1 ? c.s.tokens > (small() ? 16 : 80) : small() && (windows * c.s.window >= c.s.tokens || c.s.tokens > 300)) continue;
    const auto cut = run([&] { c.in_pieces(windows, stream); });
    EXPECT_EQ(cut.first, whole.first) << windows << " windows a call: K";
    EXPECT_EQ(cut.second, whole.second) << windows << " windows a call: V";
  }
  for (Bytes* b : arrays) b->reset();
  materialize_into_pool(c.params(Where::kHost));
  // A projection on the other side of its rounding is up to 2 units of a row's largest value off, and its norm's weight is up to 1.6.
  EXPECT_LE(distance(whole.first, host_bytes(c.k()), shape.io, shape.dim), 3.2);
  if (shape.io == DType::kFloat32 && !shape.features)
    EXPECT_EQ(whole.second, host_bytes(c.v()));
  else  // in bfloat16 one unit in the last place of a row's largest value, at most
    EXPECT_LE(distance(whole.second, host_bytes(c.v()), shape.io, shape.of_v()), shape.io == DType::kBFloat16 ? 2.0
                                                                                 : shape.features             ? 1.5
                                                                                                              : 1.0);

  const Captured graph(stream, [&](Stream s) { materialize_into_pool(c.params(Where::kDevice), s); });
  for (unsigned round = 2; round < (!small() ? 4 : shape.hidden > 2048 ? 2 : 3); ++round) {
    c.draw(round);
    const auto plain = run([&] { materialize_into_pool(c.params(Where::kDevice), stream); });
    const auto replayed = run([&] { EXPECT_TRUE(graph.replay()); });
    EXPECT_EQ(replayed, plain);
  }
}

constexpr DType kB = DType::kBFloat16, kF = DType::kFloat32;

TEST(DraftKvGpu, FewRows) {
  SPECSTATE_NEEDS_GPU();
  check({kB, 1, 1, 2, 2, 128, 128, 512, 0}, true, false, true);
  check({kB, 16, 4, 3, 2, 128, 128, 576, 0}, true, true, false);
  check({kB, 64, 8, 2, 1, 128, 64, 512, 0}, true, false, true);
  check({kB, 40, 4, 3, 1, 64, 64, 640, 0}, false, false, true);
  check({kB, 60, 6, 3, 3, 64, 32, 512, 0}, true, false, false);
  check({kB, 24, 8, 6, 8, 128, 128, 512, 0}, true, false, true);  // places of 192 columns
}

TEST(DraftKvGpu, FewRowsOfManyFeatures) {
  SPECSTATE_NEEDS_GPU();
  if (!small()) check({kB, 64, 16, 6, 8, 128, 128, 4160, 0}, true, false, true);
  check({kB, 9, 9, 1, 1, 64, 64, 4160, 0}, true, false, true);  // 8 runs
  if (!small()) check({kB, 40, 8, 1, 2, 128, 128, 4224, 0}, true, false, true);
  if (!small()) check({kB, 64, 8, 9, 8, 128, 128, 576, 0}, true, false, true);  // more places than clusters
}

TEST(DraftKvGpu, RowsByPairs) {
  SPECSTATE_NEEDS_GPU();
  check({kB, 72, 8, 2, 1, 128, 128, 512, 0}, true, false, true);
  check({kB, 300, 4, 2, 2, 128, 128, 576, 0}, true, true, false);
  if (small()) return;
  check({kB, 448, 8, 1, 2, 128, 128, 512, 0, true}, true, false, true);
  check({kB, 100, 4, 2, 1, 128, 16, 512, 0}, true, true, true);
  check({kB, 180, 4, 1, 1, 128, 32, 512, 0}, true, false, false);
  check({kB, 264, 8, 6, 8, 128, 128, 576, 0}, false, false, true);  // 192 columns
  check({kB, 512, 16, 6, 8, 128, 128, 512, 0}, true, false, false);
  check({kB, 440, 8, 9, 8, 128, 128, 512, 0}, true, true, true);  // more places than clusters
}

TEST(DraftKvGpu, RowsByPairsAsTheyLie) {
  SPECSTATE_NEEDS_GPU();
  check({kB, 144, 8, 1, 1, 128, 96, 512, 0}, false, false, true, true);
  if (small()) return;
  check({kB, 250, 2, 1, 2, 128, 64, 512, 0}, true, false, true, true);
}

TEST(DraftKvGpu, RowsByHalves) {
  SPECSTATE_NEEDS_GPU();
  check({kB, 136, 8, 1, 1, 128, 64, 576, 0}, true, false, true);
  if (small()) return;
  check({kB, 136, 8, 1, 1, 128, 64, 4160, 0}, true, false, true);  // 8 runs
  check({kB, 408, 8, 1, 1, 128, 64, 4160, 0}, true, true, false);
  check({kB, 328, 8, 1, 1, 128, 64, 4160, 0, true}, true, false, true);  // more than 256 stand
  check({kB, 512, 8, 6, 8, 128, 128, 4160, 0, true}, false, false, true);
}

TEST(DraftKvGpu, ManyRows) {
  SPECSTATE_NEEDS_GPU();
  check({kB, 528, 8, 1, 2, 128, 128, 512, 0}, true, false, true);
  check({kB, 256, 8, 3, 1, 64, 64, 512, 0}, false, false, true);
  check({kB, 1040, 8, 1, 1, 64, 16, 512, 0}, true, false, true);
}

TEST(DraftKvGpu, OtherHeads) {
  SPECSTATE_NEEDS_GPU();
  check({kB, 12, 4, 2, 2, 80, 48, 576, 0, false, 48}, true, true, true);  // V of another width, a rotary width that is no power of two
  check({kB, 136, 8, 1, 1, 96, 96, 512, 0}, true, false, true);
  if (small()) return;
  check({kB, 1, 1, 1, 1, 256, 256, 512, 0}, false, false, false);
  check({kB, 64, 8, 9, 8, 256, 64, 512, 0}, true, false, true);          // a few layers at a time
  check({kB, 300, 4, 9, 8, 256, 256, 512, 0, true}, true, false, true);  // 128 rows at a time
  check({kB, 200, 8, 2, 4, 192, 64, 4160, 0, false, 128}, true, false, false);
}
TEST(DraftKvGpu, OtherHeadsOfTargetFeatures) {
  SPECSTATE_NEEDS_GPU();
  check({kB, 12, 4, 1, 1, 96, 32, 512, 512}, true, false, true);
  if (small()) return;
  check({kB, 136, 8, 2, 2, 192, 64, 640, 768, false, 128}, true, true, true);
  check({kB, 64, 8, 9, 8, 256, 64, 512, 512}, true, false, true);
}

/// Which rows stand, and which of several that name one slot, whatever rounds the call is done in: what calls of 64 rows leave, one behind another.
TEST(DraftKvGpu, RowsThatStandOfLongCalls) {
  SPECSTATE_NEEDS_GPU();
  const OwnStream stream;
  for (const std::int64_t dim : {128, 64}) {
    Case c({kB, small() ? 528 : 8200, 8, 1, 1, dim, 64, 512, 0});  // more than a round
    const std::int64_t windows = c.s.tokens / c.s.window;
    const auto compare = [&](const char* what, std::int64_t doubled, auto commit_of) {
      SCOPED_TRACE(::testing::Message() << what << ", head dim " << dim);
      std::vector<std::int64_t> slots(c.s.tokens), lens(windows);
      for (std::int64_t i = 0; i < c.s.tokens; ++i) slots[i] = i % doubled * 7 % c.slots;
      for (std::int64_t r = 0; r < windows; ++r) lens[r] = commit_of(r);
      c.slot.set(slots), c.commit.set(lens);
      const auto run = [&](auto call) {
        c.k().reset(), c.v().reset();
        call();
        EXPECT_TRUE(stream.synchronize());
        raise_pending_error({DeviceType::kCuda, 0});
        return std::pair{c.k().download(), c.v().download()};
      };
      const auto whole = run([&] { materialize_into_pool(c.params(Where::kDevice), stream); });
      EXPECT_EQ(whole, run([&] { c.in_pieces(8, stream); }));
    };
    const std::int64_t all = c.s.tokens;
    compare("none", all, [](std::int64_t) { return 0; });
    compare("one", all, [](std::int64_t r) { return r == 31 ? 1 : 0; });
    compare("the last", all, [&](std::int64_t r) { return r == windows - 1 ? 8 : 0; });
    compare("all", all, [](std::int64_t) { return 8; });
    compare("some", all, [](std::int64_t r) { return r * 5 % 9; });
    compare("slots named twice", all / 2 + 3, [](std::int64_t r) { return r * 5 % 9; });
    compare("a few slots", 5, [](std::int64_t r) { return r * 5 % 9; });
  }
}

TEST(DraftKvGpu, AnyRows) {
  SPECSTATE_NEEDS_GPU();
  check({kF, 20, 4, 2, 2, 6, 4, 33, 0}, true, false, true);
  check({kF, 50, 5, 1, 3, 80, 80, 24, 0}, false, false, false);
  check({kB, 33, 3, 2, 2, 46, 20, 70, 0}, true, true, true);
  check({kB, 1100, 10, 1, 1, 8, 8, 16, 0}, true, false, true);
  if (!small()) check({kF, 4, 2, 32, 1100, 2, 2, 3, 0}, true, false, true);  // more heads than a dimension of blocks
}

/// fused_norm_rope_stacked: V to the bit, K within a unit, rows with positions outside untouched and reported, strides of larger arrays.
void check_stacked(DType io, std::int64_t tokens, std::int64_t layers, std::int64_t heads, std::int64_t dim, std::int64_t rotary) {
  SCOPED_TRACE(::testing::Message() << name_of(io) << ", " << tokens << " tokens, head dim " << dim << ", rotary " << rotary);
  Case c({io, tokens, 1, layers, heads, dim, rotary, layers * 2 * heads * dim, 0});  // a row of features is a row of projections
  const std::int64_t out = dim + 8;                                                  // channels of a head in the results' arrays
  Pair<std::uint16_t> k16({c.n16(layers * tokens * heads * out)}, DType::kUInt16),
      v16({c.n16(layers * tokens * heads * out)}, DType::kUInt16);
  Pair<float> k32({c.n32(layers * tokens * heads * out)}), v32({c.n32(layers * tokens * heads * out)});
  const auto call = [&](Where where, Stream stream) {
    FusedNormRopeStackedParams p;
    p.kv = c.as(c.x16, &c.x32, where, {tokens, layers, 2 * heads * dim});
    p.k_norm_weight = c.as(c.norm16, &c.norm32, where, {layers, dim});
    p.eps = c.eps.view(where);
    p.cos_sin_cache = TensorView(c.table.view(where).data, DType::kFloat32, {kTable, rotary}, c.table.view(where).device);
    p.positions = c.positions.view(where);
    p.num_kv_heads = heads, p.head_dim = dim, p.rotary_dim = rotary;
    p.k_out = c.as(k16, &k32, where, {layers, tokens, heads, out}), p.v_out = c.as(v16, &v32, where, {layers, tokens, heads, out});
    p.k_out.sizes[3] = p.v_out.sizes[3] = dim;
    fused_norm_rope_stacked(p, stream);
  };
  Bytes& k = io == DType::kFloat32 ? static_cast<Bytes&>(k32) : k16;
  Bytes& v = io == DType::kFloat32 ? static_cast<Bytes&>(v32) : v16;
  const OwnStream stream;
  call(Where::kHost, {});
  call(Where::kDevice, stream);
  ASSERT_TRUE(stream.synchronize());
  EXPECT_NO_THROW(raise_pending_error({DeviceType::kCuda, 0}));
  EXPECT_EQ(v.difference(), "");
  EXPECT_LE(distance(k.download(), host_bytes(k), io, out), 1.0);
  std::vector<std::int64_t> bad(tokens, kTable);
  c.positions.set(bad), k.reset(), v.reset();
  call(Where::kDevice, stream);
  ASSERT_TRUE(stream.synchronize());
  EXPECT_THROW(raise_pending_error({DeviceType::kCuda, 0}), Error);
  EXPECT_EQ(k.difference(), "");
  EXPECT_EQ(v.difference(), "");
}

// A kernel form each, so that a sanitizer may run them side by side.
TEST(DraftKvGpu, TargetFeaturesOfFewRows) {
  SPECSTATE_NEEDS_GPU();
  check({kB, 12, 4, 1, 1, 128, 128, 512, 576}, true, false, true);
  if (small()) return;
  check({kB, 60, 4, 1, 2, 64, 64, 1152, 1280}, true, true, false);
  check({kB, 40, 4, 1, 1, 128, 128, 4224, 512}, true, false, true);  // 8 runs of the projection
  check({kB, 64, 8, 6, 8, 128, 128, 512, 512}, true, false, true);   // places of 192 columns
  check({kB, 56, 8, 10, 8, 128, 64, 576, 512}, true, true, true);    // more places than clusters
  check({kB, 15, 3, 33, 1, 128, 128, 512, 512}, true, false, true);  // more layers than a launch names: two projections of one context
}
TEST(DraftKvGpu, TargetFeaturesOfManyRows) {
  SPECSTATE_NEEDS_GPU();
  check({kB, 136, 8, 1, 1, 128, 64, 512, 512}, true, false, true);              // two tiles
  if (!small()) check({kB, 72, 8, 1, 1, 64, 64, 512, 512}, true, true, false);  // part of one
}
TEST(DraftKvGpu, TargetFeaturesOfManyRowsOfWhichAllStand) {
  SPECSTATE_NEEDS_GPU();
  check({kB, 132, 4, 1, 1, 64, 64, 512, 512}, true, false, false, true);
}
TEST(DraftKvGpu, TargetFeaturesOfLongCalls) {
  SPECSTATE_NEEDS_GPU();
  check({kB, 1100, 4, 1, 1, 64, 64, 1024, 512}, true, false, false, true);               // tiles of 192 rows
  if (!small()) check({kB, 2404, 4, 1, 1, 64, 64, 512, 512}, true, false, false, true);  // two rounds
}
TEST(DraftKvGpu, TargetFeaturesOfAnyShape) {
  SPECSTATE_NEEDS_GPU();
  check({kB, 20, 4, 2, 2, 46, 20, 33, 50}, true, false, false);
  check({kF, 12, 4, 1, 2, 46, 20, 33, 50}, true, false, true);
}

// ----------------------------------------------------------------------------------------------- where index tensors end

/// An index tensor of any strides whose elements fill an allocation from its first to its last byte, so that a tool sees whoever reads beside it. Or, where
/// no tool watches, with other valid numbers on both sides, which would give other results.
template <class T>
class Edge {
 public:
  Edge(std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides, bool beside, std::int64_t most, std::int64_t step) {
    std::int64_t low = 0, high = 0;
    for (std::size_t d = 0; d < sizes.size(); ++d) (strides[d] < 0 ? low : high) += strides[d] * (sizes[d] - 1);
    const std::int64_t pad = beside ? 4096 : 0, count = high - low + 1;
    std::vector<T> values(static_cast<std::size_t>(count + 2 * pad));
    for (std::int64_t i = 0; i < count + 2 * pad; ++i) values[i] = static_cast<T>(((i - pad + 4096 * most) * step + 1) % most);
    if (cudaMalloc(&memory_, values.size() * sizeof(T)) != cudaSuccess) throw std::bad_alloc();
    cudaMemcpy(memory_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
    view.data = memory_ + pad - low, view.dtype = DTypeOf<T>::value, view.device = {DeviceType::kCuda, 0};
    view.ndim = static_cast<int>(sizes.size());
    std::int64_t n = 1;
    for (std::size_t d = 0; d < sizes.size(); ++d) view.sizes[d] = sizes[d], view.strides[d] = strides[d], n *= sizes[d];
    for (std::int64_t i = 0; i < n; ++i) {
      std::int64_t at = pad - low, rest = i;
      for (std::size_t d = sizes.size(); d-- > 0; rest /= sizes[d]) at += rest % sizes[d] * strides[d];
      read.push_back(values[at]);
    }
  }
  Edge(const Edge&) = delete;
  ~Edge() { cudaFree(memory_); }
  TensorView view;
  std::vector<std::int64_t> read;  // the elements in order

 private:
  T* memory_ = nullptr;
};

struct Layout {
  std::int64_t outer, inner;
};
/// Of slots and of positions: windows in one place, one number a window, one for all, gaps, columns, backwards, and back to back.
std::vector<std::pair<Layout, Layout>> layouts(std::int64_t windows, std::int64_t width) {
  const Layout one_place{0, 1}, of_window{1, 0}, all_one{0, 0}, gaps{width + 3, 1}, columns{1, windows}, backwards{-width, -1},
      dense{width, 1};
  if (small()) return {{one_place, one_place}, {gaps, of_window}, {backwards, all_one}};
  return {{one_place, one_place}, {dense, one_place}, {one_place, dense},     {dense, of_window}, {of_window, all_one},
          {gaps, columns},        {columns, gaps},    {backwards, one_place}, {gaps, backwards},  {all_one, dense}};
}

/// Slots, positions and commit lengths of any strides name the same rows as dense ones, and nobody reads what lies beside them.
void check_edges(const Shape& shape) {
  SCOPED_TRACE(::testing::Message() << name_of(shape.io) << ", " << shape.tokens << " tokens, head dim " << shape.dim << ", features "
                                    << shape.features);
  Case c(shape);
  const OwnStream stream;
  const std::int64_t windows = shape.tokens / shape.window;
  const auto run = [&](const MaterializeIntoPoolParams& p) {
    c.k().reset(), c.v().reset();
    materialize_into_pool(p, stream);
    EXPECT_TRUE(stream.synchronize());
    raise_pending_error({DeviceType::kCuda, 0});
    return std::pair{c.k().download(), c.v().download()};
  };
  int turn = 0;
  for (const auto& [slots, positions] : layouts(windows, shape.window))
    for (const bool beside : {false, true}) {
      if (beside && small()) continue;
      ++turn;
      SCOPED_TRACE(::testing::Message() << "strides " << slots.outer << ", " << slots.inner << " and " << positions.outer << ", "
                                        << positions.inner << (beside ? ", among others" : ""));
      MaterializeIntoPoolParams p = c.params(Where::kDevice);
      const Edge<std::int64_t> at({windows, shape.window}, {slots.outer, slots.inner}, beside, c.slots, 7);
      const Edge<std::int32_t> by({windows, shape.window}, {positions.outer, positions.inner}, beside, kTable, 3);
      const Edge<std::int32_t> until({windows}, {turn % 3}, beside, shape.window + 1, 5);
      c.slot.set(at.read), c.positions.set(by.read), c.commit.set(until.read);
      if (turn % 4 == 0) p.commit_lens = {};
      const auto dense = run(p);
      p.slot_mapping = at.view, p.positions = by.view;
      if (p.commit_lens.given()) p.commit_lens = until.view;
      EXPECT_EQ(run(p), dense);
    }
  if (shape.window > 1) return;
  // Dimensions of one entry may have any stride.
  MaterializeIntoPoolParams p = c.params(Where::kDevice);
  const auto dense = run(p);
  p.slot_mapping.strides[1] = 1 << 30, p.positions = p.slot_mapping, p.positions.data = c.positions.device();
  EXPECT_EQ(run(p), dense);
  p.slot_mapping.sizes[0] = p.positions.sizes[0] = 1, p.slot_mapping.sizes[1] = p.positions.sizes[1] = shape.tokens;
  for (TensorView* t : {&p.slot_mapping, &p.positions}) t->strides[0] = -(1 << 30), t->strides[1] = 1;
  p.commit_lens = {};
  const auto one_window = run(p);
  EXPECT_EQ(run([&] {
              MaterializeIntoPoolParams q = c.params(Where::kDevice);
              q.commit_lens = {};
              return q;
            }()),
            one_window);
}

TEST(DraftKvGpu, IndicesOfAnyStridesAreReadWithinTheirMemory) {
  SPECSTATE_NEEDS_GPU();
  check_edges({kB, 16, 4, 1, 1, 128, 128, 512, 0});  // few_rows
  check_edges({kB, 72, 8, 1, 1, 128, 128, 512, 0});  // pair_rows
  check_edges({kB, 96, 8, 1, 1, 64, 64, 512, 0});    // many_rows
  check_edges({kB, 256, 8, 1, 1, 64, 64, 512, 0});   // bulk_rows
  check_edges({kF, 20, 4, 1, 1, 6, 4, 33, 0});       // any_rows
  check_edges({kB, 6, 1, 1, 1, 128, 128, 512, 0});
  if (small()) return;
  check_edges({kB, 12, 4, 1, 1, 128, 128, 512, 576});
  check_edges({kB, 72, 8, 1, 1, 64, 64, 512, 512});
  check_edges({kB, 528, 8, 1, 1, 128, 128, 512, 0});
  check_edges({kB, 1040, 8, 1, 1, 64, 64, 512, 0});  // a list of all rows
  check_edges({kB, 1100, 10, 1, 1, 8, 8, 16, 0});
}

TEST(DraftKvGpu, PositionsOfProjectionsAreReadWithinTheirMemory) {
  SPECSTATE_NEEDS_GPU();
  for (const auto& [io, dim, rotary] : {std::tuple{kB, std::int64_t{128}, std::int64_t{128}}, {kB, 46, 20}})
    for (const std::int64_t stride : {0, 1, -1, 3}) {
      SCOPED_TRACE(::testing::Message() << "head dim " << dim << ", stride " << stride);
      constexpr std::int64_t kTokens = 7, kLayers = 2, kHeads = 2;
      Case c({io, kTokens, 1, kLayers, kHeads, dim, rotary, kLayers * 2 * kHeads * dim, 0});
      Pair<std::uint16_t> k({kLayers * kTokens * kHeads * dim}, DType::kUInt16), v({kLayers * kTokens * kHeads * dim}, DType::kUInt16);
      const Edge<std::int64_t> by({kTokens}, {stride}, false, kTable, 3);
      c.positions.set(by.read);
      const OwnStream stream;
      const auto call = [&](Where where) {
        FusedNormRopeStackedParams p;
        p.kv = c.as(c.x16, nullptr, where, {kTokens, kLayers, 2 * kHeads * dim});
        p.k_norm_weight = c.as(c.norm16, nullptr, where, {kLayers, dim});
        p.eps = c.eps.view(where);
        p.cos_sin_cache = TensorView(c.table.view(where).data, DType::kFloat32, {kTable, rotary}, c.table.view(where).device);
        p.positions = where == Where::kDevice ? by.view : c.positions.view(where);
        p.num_kv_heads = kHeads, p.head_dim = dim, p.rotary_dim = rotary;
        p.k_out = c.as(k, nullptr, where, {kLayers, kTokens, kHeads, dim}),
        p.v_out = c.as(v, nullptr, where, {kLayers, kTokens, kHeads, dim});
        fused_norm_rope_stacked(p, stream);
      };
      call(Where::kHost);
      call(Where::kDevice);
      ASSERT_TRUE(stream.synchronize());
      EXPECT_EQ(v.difference(), "");
      EXPECT_LE(distance(k.download(), host_bytes(k), io, dim), 1.0);
    }
}

TEST(DraftKvGpu, LaunchesOfADecodeStep) {
  SPECSTATE_NEEDS_GPU();
  const OwnStream stream;
  struct Of {
    std::int64_t layers, heads, dim, hidden;
    std::size_t projections;  // launches
  };
  std::vector<Of> all{{2, 2, 128, 512, 1}, {2, 3, 64, 640, 1}};
  if (!small()) {
    all.push_back({6, 8, 128, 512, 1});   // places of 192 columns
    all.push_back({10, 8, 128, 512, 1});  // more places than clusters
    all.push_back({1, 1, 128, 4224, 1});  // 8 runs
    all.push_back({33, 1, 128, 512, 2});  // more layers than a launch names
  }
  for (const Of& of : all)
    for (const std::int64_t tokens : {1, 16, 33, 64})
      for (const std::int64_t features : {0, 640}) {
        Case c({kB, tokens, 1, of.layers, of.heads, of.dim, of.dim, of.hidden, features});
        const Captured graph(stream, [&](Stream s) { materialize_into_pool(c.params(Where::kDevice), s); });
        EXPECT_EQ(graph.kernels(), of.projections + (features ? 2 : 0))  // fc, and the norm
            << tokens << " tokens, " << features << " features, " << of.layers << " layers, hidden " << of.hidden;
      }
}

TEST(DraftKvGpu, ProjectionsMadeElsewhere) {
  SPECSTATE_NEEDS_GPU();
  check_stacked(kB, 7, 3, 2, 128, 128);
  check_stacked(kB, 5, 2, 3, 80, 48);
  check_stacked(kF, 9, 2, 1, 64, 64);
  check_stacked(kF, 9, 2, 1, 512, 128);
  check_stacked(kB, 9, 2, 2, 46, 20);
  check_stacked(kF, 6, 1, 3, 6, 4);
}

TEST(DraftKvGpu, RowsThatCannotBeWrittenAreReportedOnce) {
  SPECSTATE_NEEDS_GPU();
  Case c({kB, 16, 4, 2, 2, 128, 128, 512, 0});
  std::vector<std::int64_t> p(16, 3), all(4, 4), at(16);
  for (int i = 0; i < 16; ++i) at[i] = i;
  p[5] = kTable;
  c.positions.set(p), c.commit.set(all), c.slot.set(at);
  const OwnStream stream;
  materialize_into_pool(c.params(Where::kDevice), stream);
  ASSERT_TRUE(stream.synchronize());
  const Device device{DeviceType::kCuda, 0};
  try {
    materialize_into_pool(c.params(Where::kDevice), stream);
    FAIL() << "not reported";
  } catch (const Error& e) {
    EXPECT_STREQ(
        e.what(),
        "draft_kv: positions: expected rows of cos_sin_cache, got one outside in an earlier call on this GPU (its row was not written).");
  }
  EXPECT_NO_THROW(raise_pending_error(device));
  at[0] = c.slots, p[5] = 1;
  c.positions.set(p), c.slot.set(at);
  materialize_into_pool(c.params(Where::kDevice), stream);
  ASSERT_TRUE(stream.synchronize());
  EXPECT_THROW(raise_pending_error(device), Error);
  EXPECT_NO_THROW(raise_pending_error(device));

  for (const std::int64_t bad : {20, 1030}) {  // by line_up_many
    Case long_call({kB, 1040, 8, 1, 1, 64, 64, 512, 0});
    std::vector<std::int64_t> slots(1040), lens(130, 7);
    for (int i = 0; i < 1040; ++i) slots[i] = i;
    slots[bad] = long_call.slots, slots[23] = INT64_MAX;  // (the latter is not committed)
    long_call.slot.set(slots), long_call.commit.set(lens);
    materialize_into_pool(long_call.params(Where::kDevice), stream);
    ASSERT_TRUE(stream.synchronize());
    EXPECT_THROW(raise_pending_error(device), Error);
    slots[bad] = -1;
    long_call.slot.set(slots);
    const auto got = long_call.k().download();
    long_call.k().reset(), long_call.v().reset();
    materialize_into_pool(long_call.params(Where::kDevice), stream);
    ASSERT_TRUE(stream.synchronize());
    EXPECT_NO_THROW(raise_pending_error(device));
    EXPECT_EQ(long_call.k().download(), got);
  }
}

TEST(DraftKvGpu, TheWorkspaceIsBoundedAndChecked) {
  SPECSTATE_NEEDS_GPU();
  MaterializeIntoPoolParams p;
  const Device device{DeviceType::kCuda, 0};
  const auto bytes = [&](std::int64_t tokens) {
    p.ctx_hidden = TensorView(nullptr, kB, {tokens, 512}, device);
    return materialize_workspace_bytes(p);
  };
  EXPECT_EQ(bytes(64), 0);
  EXPECT_GT(bytes(65), 0);
  EXPECT_EQ(bytes(100'000), bytes(10'000'000));
  Case c({kB, 1040, 8, 1, 1, 64, 64, 512, 0});
  MaterializeIntoPoolParams q = c.params(Where::kDevice);
  q.workspace = {};
  EXPECT_THROW(materialize_into_pool(q), Error);
  q.workspace = Case::rowed(c.workspace.view(Where::kDevice), 0, 16);
  EXPECT_THROW(materialize_into_pool(q), Error);
}

}  // namespace
