// Draft KV: compaction and addresses against naive models, threads, packed and plain weights, errors of the C++ interface.
#include "specstate/draft_kv.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "core/dispatch.hpp"
#include "core/numeric.hpp"
#include "cpu/vector.hpp"
#include "draft_kv/check.hpp"
#include "draft_kv/cuda/deal.hpp"
#include "draft_kv/cuda/work.hpp"
#include "specstate/error.hpp"
#include "thread_pool.hpp"

using namespace specstate;
using namespace specstate::draft_kv;
using specstate::testing::InjectedExecutor;
using specstate::testing::ThreadPool;

namespace {

using Ids = std::vector<std::int64_t>;

/// One call with dense float32 tensors that own their memory.
struct Case {
  std::int64_t T, W, L, N, D, R, hidden, slots, P;
  std::vector<float> features, weight, norm, eps, table, k, v;
  std::vector<std::int64_t> positions, slot, commit;
  TensorView k_view, v_view;

  Case(std::int64_t b, std::int64_t w, std::int64_t layers = 2, std::int64_t heads = 2, std::int64_t dim = 8, std::int64_t width = 12,
       std::int64_t pool = 64, unsigned seed = 1)
      : T(b * w), W(w), L(layers), N(heads), D(dim), R(dim), hidden(width), slots(pool), P(100) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& to, std::int64_t n) {
      to.resize(n);
      for (float& x : to) x = normal(random);
    };
    fill(features, T * hidden), fill(weight, L * 2 * N * D * hidden), fill(norm, L * D), fill(table, P * R);
    eps.assign(L, 1e-6f);
    k.assign(L * slots * N * D, -77.0f), v = k;
    positions.resize(T), slot.resize(T), commit.assign(b, w);
    for (std::int64_t i = 0; i < T; ++i) positions[i] = i % P, slot[i] = i % slots;
  }

  MaterializeIntoPoolParams params() {
    k_view = TensorView(k.data(), DType::kFloat32, {L, slots, N, D});
    v_view = TensorView(v.data(), DType::kFloat32, {L, slots, N, D});
    MaterializeIntoPoolParams p;
    p.ctx_hidden = TensorView(features.data(), DType::kFloat32, {T, hidden});
    p.kv_weight = TensorView(weight.data(), DType::kFloat32, {L, 2 * N * D, hidden});
    p.k_norm_weight = TensorView(norm.data(), DType::kFloat32, {L, D});
    p.eps = TensorView(eps.data(), DType::kFloat32, {L});
    p.cos_sin_cache = TensorView(table.data(), DType::kFloat32, {P, R});
    p.positions = TensorView(positions.data(), DType::kInt64, {T});
    p.slot_mapping = TensorView(slot.data(), DType::kInt64, {W ? T / W : 0, W});
    p.commit_lens = TensorView(commit.data(), DType::kInt64, {static_cast<std::int64_t>(commit.size())});
    p.k_pool = {&k_view, 1};
    p.v_pool = {&v_view, 1};
    return p;
  }
};

RC_GTEST_PROP(Compaction, KeepsTheRowsOfANaiveWriter, ()) {
  const auto b = *rc::gen::inRange<std::int64_t>(0, 7), w = *rc::gen::inRange<std::int64_t>(1, 9);
  Case c(b, w);
  std::map<std::int64_t, WrittenRow> slots;  // what a serial writer leaves in each slot
  for (std::int64_t r = 0; r < b; ++r) {
    c.commit[r] = *rc::gen::inRange<std::int64_t>(0, w + 1);
    for (std::int64_t j = 0; j < w; ++j) {
      const std::int64_t i = r * w + j;
      c.slot[i] = *rc::gen::inRange<std::int64_t>(-3, 40);
      c.positions[i] = *rc::gen::inRange<std::int64_t>(0, c.P);
      if (j < c.commit[r] && c.slot[i] >= 0)
        slots[c.slot[i]] = {i, c.slot[i], c.positions[i]};
      else
        c.positions[i] = *rc::gen::element<std::int64_t>(-1, INT64_MAX, INT64_MIN, c.P);  // skipped: of no account
    }
  }
  const MaterializeArgs args = check(c.params());
  RC_ASSERT(args.rows.size() == slots.size());
  std::int64_t before = -1;
  for (const WrittenRow& row : args.rows) {
    RC_ASSERT(row.row > before);  // in row order
    before = row.row;
    RC_ASSERT(slots.at(row.slot).row == row.row);
    RC_ASSERT(slots.at(row.slot).position == row.position);
  }
}

RC_GTEST_PROP(Compaction, ABadRowIsRefusedOnlyIfItIsWritten, ()) {
  const auto b = *rc::gen::inRange<std::int64_t>(1, 5), w = *rc::gen::inRange<std::int64_t>(1, 6);
  Case c(b, w);
  const auto i = *rc::gen::inRange<std::int64_t>(0, b * w);
  for (std::int64_t r = 0; r < b; ++r) c.commit[r] = *rc::gen::inRange<std::int64_t>(0, w + 1);
  if (*rc::gen::arbitrary<bool>())
    c.positions[i] = *rc::gen::elementOf(Ids{-1, c.P, INT64_MAX, INT64_MIN});
  else
    c.slot[i] = *rc::gen::elementOf(Ids{c.slots, INT64_MAX, std::int64_t{1} << 32});
  const bool written = i % w < c.commit[i / w];
  bool refused = false;
  try {
    materialize_into_pool(c.params());
  } catch (const Error& e) {
    refused = e.kind() == ErrorKind::kValue;
    for (float x : c.k) RC_ASSERT(x == -77.0f);
    for (float x : c.v) RC_ASSERT(x == -77.0f);
  }
  RC_ASSERT(refused == written);
}

TEST(Layout, AddressesArePlaceValuesIn64Bits) {
  const LayerPool pool{nullptr, 1'000'003, 130, 1};
  EXPECT_EQ(pool_offset(pool, 5'000'000, 7), 5'000'015'000'000 + 910);
  // Columns of [L, heads * head_dim | heads * v_head_dim] enumerated once.
  const std::int64_t L = 3, N = 2, D = 4, Dv = 6, width = layer_columns(N, D, Dv);
  std::int64_t column = 0;
  for (std::int64_t l = 0; l < L; ++l) {
    for (std::int64_t h = 0; h < N; ++h, column += D) EXPECT_EQ(k_column(width, l, h, D), column);
    for (std::int64_t h = 0; h < N; ++h, column += Dv) EXPECT_EQ(v_column(width, l, N, D, h, Dv), column);
  }
  EXPECT_EQ(column, L * width);
}

TEST(Vectors, RoundAndRotateAsTheScalarsDo) {
  std::mt19937 random(3);
  for (std::int64_t n : {0, 1, 3, 15, 16, 17, 33, 100}) {
    std::vector<float> x(n), cosine(n), sine(n), low(n), high(n);
    for (std::int64_t i = 0; i < n; ++i) {
      x[i] = core::from_bits(static_cast<std::uint32_t>(random()));  // any float: NaN, infinity, subnormal
      low[i] = static_cast<float>(i) - 7.3f, high[i] = 0.1f * i, cosine[i] = 0.6f + 0.01f * i, sine[i] = 0.8f - 0.01f * i;
    }
    std::vector<core::bfloat16> stored(n);
    std::vector<float> back(n), rounded = x, a = low, b = high;
    specstate::cpu::to_bfloat16(x.data(), stored.data(), n);
    specstate::cpu::to_float(stored.data(), back.data(), n);
    specstate::cpu::round_to_bfloat16(rounded.data(), n);
    specstate::cpu::rotate_halves(a.data(), b.data(), cosine.data(), sine.data(), n);
    for (std::int64_t i = 0; i < n; ++i) {
      const core::bfloat16 want = core::from_float<core::bfloat16>(x[i]);
      EXPECT_EQ(stored[i].bits, want.bits);
      EXPECT_EQ(core::bits_of(back[i]), core::bits_of(core::to_float(want)));
      EXPECT_EQ(core::bits_of(rounded[i]), core::bits_of(core::to_float(want)));
      specstate::cpu::rotate(low[i], high[i], cosine[i], sine[i]);
      EXPECT_EQ(a[i], low[i]);
      EXPECT_EQ(b[i], high[i]);
    }
  }
}

TEST(Layout, EveryRotatedChannelIsInOnePair) {
  for (bool neox : {true, false})
    for (std::int64_t half : {1, 2, 5, 64}) {
      std::vector<int> seen(2 * half);
      for (std::int64_t i = 0; i < half; ++i) {
        const RotaryPair p = rotary_pair(i, half, neox);
        ++seen[p.first], ++seen[p.second];
        EXPECT_EQ(p.second - p.first, neox ? half : 1);
      }
      EXPECT_EQ(seen, std::vector<int>(2 * half, 1));
    }
}

TEST(Materialize, ThreadsAndCompanyNeverChangeABit) {
  Case whole(40, 8, 3, 2, 16, 40, 400, 7);
  for (std::size_t r = 0; r < whole.commit.size(); ++r) whole.commit[r] = static_cast<std::int64_t>(r % 9);
  Case serial = whole;
  {
    ThreadPool one(1);
    InjectedExecutor injected(one);
    materialize_into_pool(serial.params());
  }
  for (int threads : {2, 3, 8}) {
    Case c = whole;
    ThreadPool pool(threads);
    InjectedExecutor injected(pool);
    materialize_into_pool(c.params());
    EXPECT_EQ(c.k, serial.k);
    EXPECT_EQ(c.v, serial.v);
  }
  Case alone = whole;  // each committed row in a call of its own
  for (std::int64_t i = 0; i < whole.T; ++i) {
    if (i % whole.W >= whole.commit[i / whole.W]) continue;
    MaterializeIntoPoolParams p = alone.params();
    p.ctx_hidden = TensorView(&alone.features[i * alone.hidden], DType::kFloat32, {1, alone.hidden});
    p.positions = TensorView(&alone.positions[i], DType::kInt64, {1});
    p.slot_mapping = TensorView(&alone.slot[i], DType::kInt64, {1});
    p.commit_lens = {};
    materialize_into_pool(p);
  }
  EXPECT_EQ(alone.k, serial.k);
  EXPECT_EQ(alone.v, serial.v);
}

TEST(Materialize, PackedWeightsGiveTheSameBits) {
  Case plain(5, 4), packed = plain;
  materialize_into_pool(plain.params());
  MaterializeIntoPoolParams p = packed.params();
  p.projection = KvProjection(p.kv_weight);
  EXPECT_EQ(p.projection.dtype(), DType::kFloat32);
  p.kv_weight = {};
  materialize_into_pool(p);
  EXPECT_EQ(packed.k, plain.k);
  EXPECT_EQ(packed.v, plain.v);
  p.kv_weight = TensorView(packed.weight.data(), DType::kFloat32, {2, 32, 12});
  EXPECT_THROW(materialize_into_pool(p), Error);  // both
  EXPECT_FALSE(KvProjection().given());
}

TEST(Materialize, OnePoolALayer) {
  Case one(3, 4), many = one;
  materialize_into_pool(one.params());
  MaterializeIntoPoolParams p = many.params();
  const std::vector<TensorView> k{many.k_view[0], many.k_view[1]}, v{many.v_view[0], many.v_view[1]};
  p.k_pool = k, p.v_pool = v;
  materialize_into_pool(p);
  EXPECT_EQ(many.k, one.k);
  EXPECT_EQ(many.v, one.v);
}

TEST(Materialize, RoundsToTheDtypeThatIsAsked) {
  Case c(2, 3);
  MaterializeIntoPoolParams p = c.params();
  p.io = DType::kBFloat16;
  materialize_into_pool(p);
  for (float x : c.v) EXPECT_EQ(x, core::to_float(core::from_float<core::bfloat16>(x)));
  for (float x : c.k) EXPECT_EQ(x, core::to_float(core::from_float<core::bfloat16>(x)));
  p.io = DType::kFloat8E4M3FN;
  EXPECT_THROW(materialize_into_pool(p), Error);
}

/// b * W is the number of rows, not its remainder by 2^64; windows of no column have no lengths to read, however many there are.
TEST(Materialize, WindowsThatAreTooManyToMultiply) {
  Case c(0, 2);
  c.slot.resize(1), c.commit.resize(1);
  MaterializeIntoPoolParams p = c.params();
  p.slot_mapping = TensorView(c.slot.data(), DType::kInt64, {0, 2}), p.commit_lens = TensorView(c.commit.data(), DType::kInt64, {0});
  materialize_into_pool(p);
  p.slot_mapping.sizes[0] = p.commit_lens.sizes[0] = std::int64_t{1} << 55;
  p.slot_mapping.sizes[1] = 32;
  p.slot_mapping.strides[0] = p.slot_mapping.strides[1] = p.commit_lens.strides[0] = 0;
  EXPECT_EQ(refusal([&] { materialize_into_pool(p); }),
            "materialize_into_pool: slot_mapping: expected shape [b, W] with b * W = 0 rows of ctx_hidden, got (36028797018963968, 32).");
  p.slot_mapping.sizes[1] = 512;
  EXPECT_NE(refusal([&] { materialize_into_pool(p); }), "");
  p.slot_mapping.sizes[1] = 0;
  materialize_into_pool(p);
}

TEST(Materialize, TensorsOnAGpuAreCheckedWithoutReadingThem) {
  Case c(1, 2);
  MaterializeIntoPoolParams p = c.params();
  const auto move = [](TensorView& t) { t.device = {DeviceType::kCuda, 0}; };
  for (TensorView* t :
       {&p.ctx_hidden, &p.kv_weight, &p.k_norm_weight, &p.eps, &p.cos_sin_cache, &p.positions, &p.slot_mapping, &p.commit_lens})
    move(*t);
  EXPECT_THROW(materialize_into_pool(p), Error);  // pools still on the host
  move(c.k_view), move(c.v_view);
  if constexpr (core::cuda_built()) {
    // Taken, by a build with CUDA; the addresses are the host's, so it is only asked.
    EXPECT_EQ(refusal([&] { materialize_into_pool(p); }), "");
    const TensorView fc(c.weight.data(), DType::kFloat32, {c.hidden, c.hidden}, p.ctx_hidden.device);
    p.fc_weight = fc;
    EXPECT_EQ(refusal([&] { materialize_into_pool(p); }), "materialize_into_pool: hidden_norm_weight: expected a tensor, got none.");
    p.hidden_norm_weight = TensorView(c.weight.data(), DType::kFloat32, {c.hidden}, p.ctx_hidden.device);
    EXPECT_NE(refusal([&] { materialize_into_pool(p); }).find("materialize_into_pool: workspace: expected at least "), std::string::npos);
    for (const std::int64_t tokens : {4096, 50'000'000}) {  // rounds of 2048 tokens
      p.ctx_hidden.sizes[0] = tokens;
      EXPECT_LT(materialize_workspace_bytes(p), 2048 * (4 * c.hidden + 4 * c.hidden / 16 + 64) + 4096);
    }
    p.fc_weight = p.hidden_norm_weight = {}, p.ctx_hidden.sizes[0] = c.T;
    EXPECT_EQ(materialize_workspace_bytes(p), 0);
    MaterializeIntoPoolParams q;  // heads that no epilogue knows: their projection needs room for few tokens, too
    const auto on_gpu = [&](DType dtype, std::initializer_list<std::int64_t> shape) {
      return TensorView(c.weight.data(), dtype, shape, p.ctx_hidden.device);
    };
    q.ctx_hidden = on_gpu(DType::kBFloat16, {12, 576}), q.kv_weight = on_gpu(DType::kBFloat16, {2, 256, 576});
    q.k_norm_weight = on_gpu(DType::kBFloat16, {2, 80}), q.eps = on_gpu(DType::kFloat32, {2});
    q.cos_sin_cache = on_gpu(DType::kFloat32, {40, 48});
    const TensorView v = on_gpu(DType::kBFloat16, {2, 17, 2, 48});
    q.v_pool = {&v, 1};
    EXPECT_GE(materialize_workspace_bytes(q), 12 * 2 * 256 * 2);
    q.ctx_hidden.sizes[0] = 0;
    EXPECT_EQ(materialize_workspace_bytes(q), 0);
    for (const std::int64_t tokens : {2048, 50'000'000}) {
      q.ctx_hidden.sizes[0] = tokens;
      MaterializeIntoPoolParams short_of_it;
      short_of_it.ctx_hidden = q.ctx_hidden;
      const std::int64_t usual = materialize_workspace_bytes(short_of_it);
      EXPECT_LE(materialize_workspace_bytes(q), std::max<std::int64_t>(usual, 14 << 20));
      EXPECT_GE(materialize_workspace_bytes(q), usual);  // on a GPU that is no Hopper they take what others take
    }
    q.kv_weight.sizes[0] = 0;  // no layers: the call refuses them, the query does not fall over them
    EXPECT_GE(materialize_workspace_bytes(q), 0);
    q.cos_sin_cache.ndim = 1 << 30;
    EXPECT_GE(materialize_workspace_bytes(q), 0);
    q.fc_weight = on_gpu(DType::kBFloat16, {2, 2}), q.fc_weight.ndim = 1 << 30;
    EXPECT_EQ(refusal([&] { materialize_workspace_bytes(q); }),
              "materialize_workspace_bytes: fc_weight: expected shape [hidden, features], got 1073741824 dimensions.");
    p.ctx_hidden.sizes[0] = 10'000;
    const std::int64_t bytes = materialize_workspace_bytes(p);
    EXPECT_GT(bytes, 0);
    p.ctx_hidden.sizes[0] = 50'000'000;
    EXPECT_EQ(materialize_workspace_bytes(p), bytes);
    // Wider rows, fewer of them in a round: some 75 MB for a line of rows and what blocks hand on.
    for (const std::int64_t hidden : {512, 2560, 4096, 4160, 7168, 8192, 20'480, 65'536}) {
      p.ctx_hidden.sizes[1] = hidden;
      EXPECT_LE(materialize_workspace_bytes(p), (64 << 20) + 11'000'000) << hidden;
    }
    p.ctx_hidden.sizes[0] = 300, p.ctx_hidden.sizes[1] = 7168;
    EXPECT_LE(materialize_workspace_bytes(p), 300 * 7168 * 2 + 11'000'000);
    for (const std::int64_t hidden : {std::int64_t{1} << 41, std::int64_t{1} << 55, INT64_MAX, std::int64_t{-1}}) {
      p.ctx_hidden.sizes[1] = hidden;
      EXPECT_EQ(refusal([&] { materialize_workspace_bytes(p); }).find("materialize_workspace_bytes: ctx_hidden: expected "), 0) << hidden;
      MaterializeIntoPoolParams q = p;
      q.ctx_hidden.sizes[1] = 4, q.fc_weight = TensorView(nullptr, DType::kFloat32, {4, 4}, p.ctx_hidden.device),
      q.fc_weight.sizes[0] = hidden;
      EXPECT_EQ(refusal([&] { materialize_workspace_bytes(q); }).find("materialize_workspace_bytes: fc_weight: expected "), 0) << hidden;
    }
  } else {
    try {
      materialize_into_pool(p);
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kNotImplemented);
    }
  }
  raise_pending_error({DeviceType::kCpu, 0});  // nothing can be pending on the CPU
}

TEST(Places, HaveEveryHeadOfKAndEveryQuarterOfVOnce) {
  for (int layers = 1; layers <= 8; ++layers)
    for (int heads = 1; heads <= 9; ++heads) {
      const cuda::Places places = cuda::Places::of_width(layers, heads, 5);
      int quarters = 0;
      for (int i = 0; i < places.slots; ++i) {
        const int count = places.v_count(i), all = count + (i < places.k_heads ? 4 : 0);
        ASSERT_EQ(places.v_begin(i), quarters);
        ASSERT_TRUE(count >= 0 && all > 0 && all <= places.width) << layers << " layers, " << heads << " heads";
        quarters += count;
      }
      ASSERT_GE(places.slots, layers * heads);
      ASSERT_EQ(quarters, 4 * layers * heads);
      for (int n = 0; n < 4 * layers * heads; ++n) ASSERT_TRUE(places.by_heads(n) == n / heads && places.by_quarters(n) == n / (4 * heads));
      const auto few = [&](int clusters) { return cuda::LayerPlaces::of(layers, heads, clusters); };
      for (const cuda::LayerPlaces& by_layer :
           {few(1), few(7), few(60), few(66), cuda::LayerPlaces(layers, heads, 6)}) {  // of few_rows and pair_rows
        std::vector<int> k(layers * 2 * heads), column(layers * heads * 8);
        int v = 0;
        for (int i = 0; i < by_layer.used; ++i) {
          const auto place = by_layer[i];
          ASSERT_TRUE(place.v >= 0 && place.count >= 0 && place.count + (place.head >= 0 ? 4 : 0) <= by_layer.width);
          const auto name = [&](int row, int n) {
            for (int q = 0; q < n; ++q) ASSERT_EQ(column.at(row / 32 + q)++, 0) << layers << " layers, " << heads << " heads, place " << i;
          };
          if (place.head >= 0) {
            ASSERT_EQ(k.at(place.head)++, 0);
            ASSERT_LT(place.head % (2 * heads), heads);
            ASSERT_EQ(place.wide, 128 * place.head);
            name(place.wide, 4);
          } else {
            name(place.wide, std::min(place.count, 4));
          }
          const int beside = place.count - (place.head >= 0 ? 0 : 4);  // quarters in the narrow box
          ASSERT_EQ(place.narrow >= 0, beside > 0);
          if (place.narrow >= 0) name(place.narrow, beside);
          ASSERT_EQ(place.v, v);
          if (place.count > 0) {  // quarters of one layer, from where they say
            const int layer = place.v / (4 * heads), first = layer * heads * 8 + heads * 4 + place.v % (4 * heads);
            ASSERT_EQ((place.head >= 0 ? place.narrow : place.wide) / 32, first);
            ASSERT_EQ((place.v + place.count - 1) / (4 * heads), layer);
          }
          v += place.count;
        }
        ASSERT_EQ(std::accumulate(k.begin(), k.end(), 0), layers * heads);
        ASSERT_EQ(std::accumulate(column.begin(), column.end(), 0), layers * heads * 8);
      }
    }
}

TEST(Places, OfPairsAreAsWideAsMakesTheFewestRounds) {
  EXPECT_EQ(cuda::LayerPlaces::of_pairs(5, 8, 66).width, 5);  // 65 places
  EXPECT_EQ(cuda::LayerPlaces::of_pairs(6, 8, 66).width, 6);  // 66, where 160 columns make 78
  EXPECT_EQ(cuda::LayerPlaces::of_pairs(6, 8, 66).used, 66);
  EXPECT_EQ(cuda::LayerPlaces::of_pairs(1, 1, 66).width, 5);
}

/// Every run of every tile is one block's; what is handed on goes to the block after this one, which takes it; nobody has more than a round more than others.
void deals(int row_tiles, int places, int runs, int blocks, bool share) {
  using namespace specstate::draft_kv::cuda;
  std::map<std::tuple<int, int>, std::vector<int>> owner;
  const int tiles = row_tiles * places, rounds = tiles / blocks, left = tiles % blocks;
  std::set<int> parts;
  std::map<std::tuple<int, int>, int> handed_on;  // by a tile's run before which it ends
  int most = 0;
  for (int block = 0; block < blocks; ++block) {
    const Work work = Work::of(row_tiles, places, runs, block, blocks, share);
    int done = 0;
    for (int i = 0; i < work.pieces; ++i) {
      const Piece piece = work.piece(i);
      ASSERT_TRUE(piece.row_tile >= 0 && piece.row_tile < row_tiles && piece.place >= 0 && piece.place < places);
      ASSERT_TRUE(piece.begin >= 0 && piece.begin < piece.end && piece.end <= runs);
      if (piece.end - piece.begin < runs) ASSERT_TRUE(share && i >= rounds);
      const int tile = piece.row_tile * places + piece.place;
      if (piece.begin > 0) {
        ASSERT_TRUE(handed_on.count({tile, piece.begin}));  // by a block of a lower number
        ASSERT_EQ((handed_on[{tile, piece.begin}]), work.taken());
        ASSERT_EQ(i, work.pieces - 1);  // nothing comes after what has to be waited for
      }
      auto& of_tile = owner.try_emplace({piece.row_tile, piece.place}, runs, -1).first->second;
      for (int run = piece.begin; run < piece.end; ++run) ASSERT_EQ(std::exchange(of_tile[run], block), -1);
      if (piece.end < runs) {
        ASSERT_TRUE(work.given() >= 0 && work.given() < blocks * 3 / 4);
        ASSERT_TRUE(parts.insert(work.given()).second);
        handed_on[{tile, piece.end}] = work.given();
      }
      done += piece.end - piece.begin;
    }
    most = std::max(most, done);
  }
  ASSERT_EQ(static_cast<int>(owner.size()), tiles);
  for (const auto& [tile, blocks_of] : owner)
    for (int run = 0; run < runs; ++run) {
      ASSERT_GE(blocks_of[run], 0);
      if (run > 0 && blocks_of[run] != blocks_of[run - 1]) ASSERT_EQ(blocks_of[run], blocks_of[run - 1] + 1);
    }
  ASSERT_LE(most, (rounds + (left > 0)) * runs);
  if (share && left > 0 && 2 * left <= blocks) ASSERT_LT(most, (rounds + 1) * runs);
  if (share && left % 2 == 0 && 2 * left > blocks && 3 * left <= 2 * blocks) ASSERT_EQ(most, rounds * runs + runs - runs / 3);
  if (share && runs == 4 && left > 0 && 4 * left <= blocks) ASSERT_EQ(most, rounds * runs + 1);
}

TEST(Work, TilesOfRowsCoverThemAndLieWithin) {
  using namespace specstate::draft_kv::cuda;
  for (int count = 1; count <= 5 * kTileRows; ++count)
    for (int tile = 0; tile < (count + kTileRows - 1) / kTileRows; ++tile) {
      const int first = first_row_of(tile, count);
      ASSERT_TRUE(first >= 0 && first <= tile * kTileRows && first + kTileRows >= std::min((tile + 1) * kTileRows, count));
      if (count >= kTileRows) ASSERT_LE(first + kTileRows, count);
    }
}

TEST(Work, EveryRunIsDoneOnce) {
  for (const int blocks : {1, 7, 66, 78, 132})
    for (const int places : {1, 5, 32, 64, 77})
      for (int row_tiles = 0; row_tiles < 26; ++row_tiles)
        for (const int runs : {4, 8, 12})
          for (const bool share : {false, true}) {
            deals(row_tiles, places, runs, blocks, share);
            if (::testing::Test::HasFatalFailure())
              FAIL() << row_tiles << " x " << places << " tiles, " << runs << " runs, " << blocks << " blocks, shared " << share;
          }
}

}  // namespace
