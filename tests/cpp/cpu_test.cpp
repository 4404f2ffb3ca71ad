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
    if (core::bits_of(a[i]) != core::bits_of(b[i])) return ::testing::AssertionFailure() << "element " << i << ": " << a[i] << " and " << b[i];
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
  EXPECT_TRUE(names.count("SCALAR") && names.count("SSE4"));
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

}  // namespace
