// CPU primitives: the row-invariant product, row operations, the executor. Everything that claims bits is compared by bits.
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/numeric.hpp"
#include "cpu/matmul.hpp"
#include "cpu/parallel.hpp"
#include "cpu/simd_target.hpp"
#include "cpu/vector.hpp"
#include "specstate/error.hpp"

using namespace specstate;
using namespace specstate::cpu;
using core::bfloat16;

namespace {

constexpr float kPoison = -12345.5f;

std::vector<float> random_floats(std::size_t n, std::uint32_t seed) {
  std::mt19937 g(seed);
  std::normal_distribution<float> d;
  std::vector<float> x(n);
  for (float& v : x) v = d(g);
  return x;
}

std::vector<bfloat16> to_bf16(const std::vector<float>& x) {
  std::vector<bfloat16> y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = core::from_float<bfloat16>(x[i]);
  return y;
}

::testing::AssertionResult same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << "sizes " << a.size() << " and " << b.size();
  for (std::size_t i = 0; i < a.size(); ++i)
    if (core::bits_of(a[i]) != core::bits_of(b[i]))
      return ::testing::AssertionFailure() << "element " << i << ": " << a[i] << " and " << b[i];
  return ::testing::AssertionSuccess();
}

/// Pieces of `largest` items on plain threads, last piece first: another cut and order than the built-in executor's.
class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(int threads, std::int64_t largest = 1) : threads_(threads), largest_(largest) {}
  void parallel_for(std::int64_t n, std::int64_t grain, Body body, void* context) override {
    ++calls;
    const std::int64_t piece = largest_;
    std::atomic<std::int64_t> next{(n + piece - 1) / piece};
    std::vector<std::thread> pool;
    for (int t = 0; t < threads_; ++t)
      pool.emplace_back([&] {
        for (std::int64_t i; (i = next.fetch_sub(1) - 1) >= 0;) body(context, i * piece, std::min(n, (i + 1) * piece));
      });
    for (std::thread& t : pool) t.join();
  }
  int concurrency() const override { return threads_; }
  std::atomic<int> calls{0};

 private:
  int threads_;
  std::int64_t largest_;
};

struct Injected {
  explicit Injected(Executor& e) { set_executor(&e); }
  ~Injected() { set_executor(nullptr); }
};

/// Runs `f` once under each instruction set that this machine has and this build compiled.
void on_each_target(const std::function<void(const SimdTarget&)>& f) {
  std::set<std::string> seen;  // a target that was not compiled falls back to a plainer one
  for (std::int64_t targets = hwy::SupportedTargets(); targets; targets &= targets - 1) {
    hwy::SetSupportedTargetsForTest(targets & -targets);
    hwy::GetChosenTarget().DeInit();
    if (seen.insert(simd_target().name).second) f(simd_target());
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
}

TEST(SimdTarget, EachIsReallyForced) {
  std::set<std::string> names;
  on_each_target([&](const SimdTarget& t) { names.insert(t.name); });
  EXPECT_TRUE(names.count(simd_target().name));
#if defined(__x86_64__)
  EXPECT_TRUE(names.count("SCALAR") || names.count("EMU128"));  // Highway takes the first with gcc before 12.3
  EXPECT_TRUE(names.count("SSE4"));
#endif
  for (const std::string& n : names) std::printf("  target %s\n", n.c_str());
}

struct Problem {
  std::int64_t rows, n, k;
  bool bf16;
  std::vector<float> x, w;  // w: exactly representable values of the packed type
  PackedMatrix packed;

  Problem(std::int64_t rows, std::int64_t n, std::int64_t k, bool bf16, std::uint32_t seed)
      : rows(rows), n(n), k(k), bf16(bf16), x(random_floats(rows * k, seed)), w(random_floats(n * k, seed + 1)) {
    if (bf16) {
      const auto h = to_bf16(w);
      for (std::size_t i = 0; i < w.size(); ++i) w[i] = core::to_float(h[i]);
      packed = PackedMatrix(h.data(), n, k, DType::kBFloat16);
    } else {
      packed = PackedMatrix(w.data(), n, k, DType::kFloat32);
    }
  }
  std::vector<float> run() const {
    std::vector<float> y(rows * n, kPoison);
    matmul(packed, x.data(), k, rows, y.data(), n);
    return y;
  }
  /// The definition in matmul.hpp.
  std::vector<float> chain(bool fma) const {
    std::vector<float> y(rows * n);
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t j = 0; j < n; ++j) {
        float acc = 0;
        for (std::int64_t i = 0; i < k; ++i) {
          const float a = x[r * k + i], b = w[j * k + i];
          acc = fma ? std::fma(a, b, acc) : acc + a * b;
        }
        y[r * n + j] = acc;
      }
    return y;
  }
};

TEST(Matmul, IsTheDefinedChainOnEveryInstructionSet) {
  std::mt19937 g(7);
  for (int c = 0; c < 60; ++c) {
    const Problem p(1 + g() % 19, 1 + g() % 150, g() % 70, c % 2, g());
    on_each_target([&](const SimdTarget& t) {
      EXPECT_TRUE(same_bits(p.run(), p.chain(t.fma))) << t.name << " rows " << p.rows << " n " << p.n << " k " << p.k << " bf16 " << p.bf16;
    });
  }
}

TEST(Matmul, AgreesWithFloat64) {
  for (bool bf16 : {false, true})
    for (std::int64_t k : {1, 2, 33, 513, 2047}) {
      const Problem p(5, 83, k, bf16, static_cast<std::uint32_t>(k));
      const auto y = p.run();
      for (std::int64_t r = 0; r < p.rows; ++r)
        for (std::int64_t j = 0; j < p.n; ++j) {
          double sum = 0, size = 0;
          for (std::int64_t i = 0; i < k; ++i) {
            const double t = static_cast<double>(p.x[r * k + i]) * p.w[j * k + i];
            sum += t, size += std::fabs(t);
          }
          EXPECT_NEAR(y[r * p.n + j], sum, size * 0x1p-24 * std::sqrt(static_cast<double>(k)) * 2) << r << " " << j << " " << k;
        }
    }
}

TEST(Matmul, ARowKnowsNothingOfTheOthers) {
  for (bool bf16 : {false, true}) {
    const Problem p(17, 203, 77, bf16, 3);
    std::vector<float> alone(p.rows * p.n, kPoison);
    for (std::int64_t r = 0; r < p.rows; ++r) matmul(p.packed, p.x.data() + r * p.k, p.k, 1, alone.data() + r * p.n, p.n);
    std::vector<std::int64_t> order(p.rows);
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 g(5);
    for (std::int64_t rows = 1; rows <= p.rows; ++rows) {
      std::shuffle(order.begin(), order.end(), g);
      // Rows in any order, strided on both sides; what lies between rows stays as it was.
      const std::int64_t xs = p.k + 3, ys = p.n + 5;
      std::vector<float> x(rows * xs, NAN), y(rows * ys, kPoison);
      for (std::int64_t r = 0; r < rows; ++r) std::copy_n(p.x.data() + order[r] * p.k, p.k, x.data() + r * xs);
      matmul(p.packed, x.data(), xs, rows, y.data(), ys);
      for (std::int64_t r = 0; r < rows; ++r) {
        EXPECT_EQ(std::memcmp(y.data() + r * ys, alone.data() + order[r] * p.n, p.n * 4), 0) << rows << " rows, row " << r;
        for (std::int64_t j = p.n; j < ys; ++j) EXPECT_EQ(y[r * ys + j], kPoison);
      }
    }
  }
}

TEST(Matmul, ManyRowsAndAnyCutAmongThreadsGiveTheSameBits) {
  const Problem p(301, 330, 1030, true, 9);  // several chunks of rows
  const auto built_in = p.run();
  std::vector<float> alone(p.n);
  for (std::int64_t r : {0, 126, 127, 150, 300}) {
    matmul(p.packed, p.x.data() + r * p.k, p.k, 1, alone.data(), p.n);
    EXPECT_EQ(std::memcmp(built_in.data() + r * p.n, alone.data(), p.n * 4), 0) << r;
  }
  for (int threads : {1, 2, 5})
    for (std::int64_t largest : {1, 2, 7}) {
      ThreadExecutor e(threads, largest);
      Injected use(e);
      EXPECT_TRUE(same_bits(p.run(), built_in)) << threads << " threads, pieces of " << largest;
      EXPECT_EQ(e.calls, 1);
    }
}

TEST(Matmul, AddsBiasThenResidual) {
  for (std::int64_t n : {16, 64, 75}) {
    const Problem p(6, n, 20, true, 21);
    const auto bias = random_floats(n, 1), residual = random_floats(p.rows * (n + 2), 2);
    const auto plain = p.run();
    std::vector<float> expected(plain.size()), y(plain.size(), kPoison);
    for (std::int64_t r = 0; r < p.rows; ++r)
      for (std::int64_t j = 0; j < n; ++j) expected[r * n + j] = (plain[r * n + j] + bias[j]) + residual[r * (n + 2) + j];
    matmul(p.packed, p.x.data(), p.k, p.rows, y.data(), n, {.bias = bias.data(), .add = residual.data(), .add_stride = n + 2});
    EXPECT_TRUE(same_bits(y, expected));
    // In place: y is its own residual.
    auto in_place = residual;
    matmul(p.packed, p.x.data(), p.k, p.rows, in_place.data(), n + 2, {.bias = bias.data(), .add = in_place.data(), .add_stride = n + 2});
    for (std::int64_t r = 0; r < p.rows; ++r) EXPECT_EQ(std::memcmp(in_place.data() + r * (n + 2), expected.data() + r * n, n * 4), 0);
  }
}

TEST(Matmul, PacksPartsTransposesAndForeignMemory) {
  const std::int64_t n = 45, k = 31;
  const auto w = to_bf16(random_floats(n * k, 4));
  const PackedMatrix whole(w.data(), n, k, DType::kBFloat16);
  std::vector<bfloat16> transposed(n * k);
  for (std::int64_t j = 0; j < n; ++j)
    for (std::int64_t i = 0; i < k; ++i) transposed[i * n + j] = w[j * k + i];
  const std::int64_t bytes = PackedMatrix::bytes(n, k, DType::kBFloat16);
  EXPECT_EQ(bytes, 3 * 16 * 64);  // three panels of 16 pairs
  alignas(64) static std::uint8_t memory[3 * 16 * 64 + 64];
  std::memset(memory, 0xAB, sizeof memory);
  PackedMatrix parts(n, k, DType::kBFloat16, memory);
  parts.set_rows(0, 20, transposed.data(), 1, n);
  parts.set_rows(20, 25, w.data() + 20 * k, k);
  EXPECT_EQ(parts.data(), memory);
  EXPECT_EQ(std::memcmp(memory, whole.data(), bytes), 0);
  EXPECT_EQ(memory[bytes], 0xAB);
  for (std::int64_t j = 0; j < n; ++j)
    for (std::int64_t i = 0; i < k; ++i) ASSERT_EQ(parts.at(j, i), core::to_float(w[j * k + i]));
  EXPECT_THROW(PackedMatrix(4, 4, DType::kInt32), Error);
}

TEST(Matmul, NothingToDo) {
  const Problem p(2, 3, 0, true, 1);
  EXPECT_TRUE(same_bits(p.run(), std::vector<float>(6, 0.0f)));
  float untouched = kPoison;
  matmul(p.packed, nullptr, 0, 0, &untouched, 3);
  EXPECT_EQ(untouched, kPoison);
}

/// Distance in representable floats.
double ulps(float got, double exact) {
  if (std::isnan(exact) && std::isnan(got)) return 0;
  const float e = static_cast<float>(exact);
  if (got == e)
    return std::isinf(e) ? 0 : std::fabs(got - exact) / std::max(std::nextafter(std::fabs(e), INFINITY) - std::fabs(e), 0x1p-149f);
  const double unit = std::max(static_cast<double>(std::nextafter(std::fabs(e), INFINITY)) - std::fabs(e), 0x1p-149);
  return std::fabs(got - exact) / unit;
}

TEST(Vector, ExpAndSigmoidAreAccurateEverywhere) {
  std::vector<float> x;
  for (std::uint32_t bits = 0; bits < 0x7F800000u; bits += 4099) {  // every binade, both signs
    x.push_back(core::from_bits(bits));
    x.push_back(-core::from_bits(bits));
  }
  for (int i = -110 * 2048; i < 95 * 2048; ++i) x.push_back(static_cast<float>(i) / 2048 + 1e-4f);
  for (float v : {0.0f, -0.0f, 88.72283f, 88.72284f, -103.97f, -103.98f, INFINITY, -INFINITY, NAN}) x.push_back(v);
  on_each_target([&](const SimdTarget& t) {
    std::vector<float> e(x.size(), kPoison), s(x.size(), kPoison), u(x.size(), kPoison);
    cpu::exp(x.data(), e.data(), x.size());
    cpu::sigmoid(x.data(), s.data(), x.size());
    cpu::silu(x.data(), u.data(), x.size());
    double worst_exp = 0, worst_sigmoid = 0, worst_silu = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double v = x[i], sig = v > 0 ? 1 / (1 + std::exp(-v)) : std::exp(v) / (1 + std::exp(v));
      const double exact = std::exp(v);
      if (exact >= 0x1.ffffffp127)
        EXPECT_EQ(e[i], INFINITY) << x[i];
      else
        worst_exp = std::max(worst_exp, ulps(e[i], exact));
      worst_sigmoid = std::max(worst_sigmoid, ulps(s[i], std::isinf(v) ? (v > 0 ? 1 : 0) : sig));
      if (!std::isfinite(v)) continue;
      if (v > -87)
        worst_silu = std::max(worst_silu, ulps(u[i], v * sig));
      else  // the sigmoid is subnormal
        EXPECT_NEAR(u[i], v * sig, 2 * 104 * 0x1p-149);
    }
    EXPECT_LE(worst_exp, 1.01) << t.name;
    EXPECT_LE(worst_sigmoid, 2.5) << t.name;
    EXPECT_LE(worst_silu, 3.0) << t.name;
    std::printf("  %s: exp %.3f, sigmoid %.3f, silu %.3f ulp at most\n", t.name, worst_exp, worst_sigmoid, worst_silu);
    EXPECT_TRUE(std::isnan(e.back()) && std::isnan(s.back()) && std::isnan(u.back()));
  });
}

TEST(Vector, TailsHaveTheBitsOfTheBody) {
  const std::int64_t n = 67;
  const auto x = random_floats(n, 1), g = random_floats(n, 2);
  using Map = std::function<void(const float*, const float*, float*, std::int64_t)>;
  const std::vector<std::pair<const char*, Map>> maps{
      {"exp", [](auto a, auto, auto y, auto m) { cpu::exp(a, y, m); }},
      {"sigmoid", [](auto a, auto, auto y, auto m) { cpu::sigmoid(a, y, m); }},
      {"silu", [](auto a, auto, auto y, auto m) { cpu::silu(a, y, m); }},
      {"swiglu", [](auto a, auto b, auto y, auto m) { cpu::swiglu(a, b, y, m); }},
      {"axpy", [](auto a, auto b, auto y, auto m) { std::copy_n(b, m, y), cpu::axpy(0.7f, a, y, m); }},
  };
  on_each_target([&](const SimdTarget& t) {
    for (const auto& [name, f] : maps) {
      std::vector<float> whole(n), one(n);
      f(x.data(), g.data(), whole.data(), n);
      for (std::int64_t i = 0; i < n; ++i) f(x.data() + i, g.data() + i, one.data() + i, 1);
      EXPECT_TRUE(same_bits(whole, one)) << name << " " << t.name;
      for (std::int64_t m = 0; m < n; ++m) {
        std::vector<float> part(n, kPoison), expected(n, kPoison);
        std::copy_n(whole.data(), m, expected.data());
        f(x.data(), g.data(), part.data(), m);
        EXPECT_TRUE(same_bits(part, expected)) << name << " " << m << " " << t.name;
      }
    }
  });
}

/// The 32 chains of vector.hpp.
template <class F>
float chains(std::int64_t n, F add) {
  float c[32] = {};
  for (std::int64_t i = 0; i < n; ++i) c[i % 32] = add(c[i % 32], i);
  for (int half = 16; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) c[i] += c[i + half];
  return c[0];
}

TEST(Vector, SumsRunInTheDefinedOrder) {
  for (std::int64_t n : {0, 1, 5, 31, 32, 33, 64, 100, 257}) {
    const auto a = random_floats(n, 1), b = random_floats(n, 2), w = random_floats(n, 3);
    const auto h = to_bf16(b);
    on_each_target([&](const SimdTarget& t) {
      const auto chain = [&](auto&& x, auto&& y) {
        return chains(n, [&](float c, std::int64_t i) { return t.fma ? std::fma(x(i), y(i), c) : c + x(i) * y(i); });
      };
      const auto av = [&](std::int64_t i) { return a[i]; };
      EXPECT_EQ(cpu::dot(a.data(), b.data(), n), chain(av, [&](auto i) { return b[i]; })) << n << " " << t.name;
      EXPECT_EQ(cpu::dot(a.data(), h.data(), n), chain(av, [&](auto i) { return core::to_float(h[i]); })) << n << " " << t.name;
      if (n == 0) return;
      std::vector<float> y(n, kPoison), expected(n);
      const float s = 1.0f / std::sqrt(chain(av, av) / static_cast<float>(n) + 1e-5f);
      for (std::int64_t i = 0; i < n; ++i) expected[i] = a[i] * s * w[i];
      cpu::rms_norm(a.data(), w.data(), 1e-5f, y.data(), n);
      EXPECT_TRUE(same_bits(y, expected)) << n << " " << t.name;
      std::vector<float> ones(n, 1.0f), plain(n, kPoison);
      cpu::rms_norm(a.data(), ones.data(), 1e-5f, y.data(), n);
      cpu::rms_norm(a.data(), nullptr, 1e-5f, plain.data(), n);
      EXPECT_TRUE(same_bits(y, plain));
    });
  }
}

TEST(Vector, SoftmaxAndLayerNormAgreeWithFloat64AndEveryFmaTargetAgreesByBits) {
  for (std::int64_t n : {1, 2, 15, 32, 33, 200, 1025}) {
    auto scores = random_floats(n, 7);
    for (float& s : scores) s *= 20;
    if (n > 2) scores[1] = -INFINITY;
    const auto x = random_floats(n, 8), w = random_floats(n, 9), b = random_floats(n, 10);
    double max = -INFINITY, sum = 0, mean = 0, variance = 0;
    for (float s : scores) max = std::max<double>(max, s);
    for (float s : scores) sum += std::exp(s - max);
    for (float v : x) mean += v / static_cast<double>(n);
    for (float v : x) variance += (v - mean) * (v - mean) / static_cast<double>(n);
    std::vector<std::vector<float>> fused;
    on_each_target([&](const SimdTarget& t) {
      auto p = scores;
      cpu::softmax(p.data(), n);
      std::vector<float> y(n, kPoison);
      cpu::layer_norm(x.data(), w.data(), b.data(), 1e-6f, y.data(), n);
      for (std::int64_t i = 0; i < n; ++i) {
        // e^(s - max): half a unit of s - max, at most 160, is an error of 2^-17 at the far end, where values are tiny.
        EXPECT_NEAR(p[i], std::exp(scores[i] - max) / sum, 1e-6 * (1e-30 + std::exp(scores[i] - max) / sum) * 20) << n << " " << i;
        EXPECT_NEAR(y[i], (x[i] - mean) / std::sqrt(variance + 1e-6) * w[i] + b[i], 2e-5) << n << " " << i;
      }
      p.insert(p.end(), y.begin(), y.end());
      if (t.fma) fused.push_back(p);
    });
    for (const auto& f : fused) EXPECT_TRUE(same_bits(f, fused.front())) << n;
  }
}

TEST(Vector, ConvertsBfloat16) {
  const auto x = random_floats(77, 3);
  std::vector<bfloat16> h(77);
  std::vector<float> y(77);
  cpu::to_bfloat16(x.data(), h.data(), 77);
  cpu::to_float(h.data(), y.data(), 77);
  for (int i = 0; i < 77; ++i) EXPECT_EQ(y[i], core::to_float(core::from_float<bfloat16>(x[i])));
}

TEST(Parallel, AnInjectedExecutorRunsEveryItemOnceAndIsLetGo) {
  Executor& built_in = executor();
  ThreadExecutor e(3, 4);
  std::vector<std::atomic<int>> hits(103);
  {
    Injected use(e);
    EXPECT_EQ(&executor(), &e);
    parallel_for(103, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) ++hits[i];
    });
    parallel_for(0, 1, [&](std::int64_t, std::int64_t) { ADD_FAILURE() << "called for nothing"; });
    parallel_for(5, 8, [&](std::int64_t begin, std::int64_t end) { EXPECT_TRUE(begin == 0 && end == 5); });  // too small to hand out
  }
  EXPECT_EQ(e.calls, 1);
  for (auto& h : hits) EXPECT_EQ(h, 1);
  EXPECT_EQ(&executor(), &built_in);
  std::atomic<std::int64_t> sum{0};
  parallel_for(1000, 10, [&](std::int64_t begin, std::int64_t end) {
    EXPECT_LT(begin, end);
    for (std::int64_t i = begin; i < end; ++i) sum += i;
  });
  EXPECT_EQ(sum, 999 * 1000 / 2);
}

}  // namespace
