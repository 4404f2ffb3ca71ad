// Every parallel operation on executors of plain threads: the same bytes at any number of threads, and under ThreadSanitizer no race.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "core/numeric.hpp"
#include "cpu/matmul.hpp"
#include "cpu/parallel.hpp"
#include "specstate/draft_kv.hpp"
#include "thread_pool.hpp"

using namespace specstate;
using specstate::testing::InjectedExecutor;
using specstate::testing::ThreadPool;

namespace {

/// A dense tensor with its memory, of reproducible values.
struct Tensor {
  std::vector<std::byte> memory;
  TensorView view;
  operator const TensorView&() const { return view; }
};

Tensor zeros(DType dtype, std::initializer_list<std::int64_t> sizes) {
  Tensor t;
  t.view = TensorView(nullptr, dtype, sizes);
  t.memory.resize(static_cast<std::size_t>(t.view.numel() * size_of(dtype)));
  t.view.data = t.memory.data();
  return t;
}

Tensor floats(DType dtype, std::initializer_list<std::int64_t> sizes, std::uint32_t seed) {
  Tensor t = zeros(dtype, sizes);
  for (std::int64_t i = 0; i < t.view.numel(); ++i) {
    seed = seed * 1664525u + 1013904223u;
    const float x = static_cast<float>(seed >> 8) / static_cast<float>(1 << 23) - 1.0f;
    if (dtype == DType::kBFloat16)
      t.view.as<core::bfloat16>()[i] = core::from_float<core::bfloat16>(x);
    else
      t.view.as<float>()[i] = x;
  }
  return t;
}

template <class Integer>
Tensor integers(DType dtype, std::initializer_list<std::int64_t> sizes, const std::vector<Integer>& values) {
  Tensor t = zeros(dtype, sizes);
  std::memcpy(t.memory.data(), values.data(), std::min(t.memory.size(), values.size() * sizeof(Integer)));
  return t;
}

/// Runs `operation`, which returns all bytes that it wrote, at several thread counts; `parallel`: it must have asked for threads.
template <class F>
void same_bytes_at_any_thread_count(F&& operation, bool parallel = true) {
  std::vector<std::byte> want;
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    InjectedExecutor injected(pool);
    const std::vector<std::byte> got = operation();
    if (parallel) EXPECT_GT(pool.calls(), 0) << "the operation asked for no threads: a larger case is needed";
    if (threads == 1) want = got;
    ASSERT_EQ(got.size(), want.size());
    EXPECT_TRUE(std::memcmp(got.data(), want.data(), want.size()) == 0) << "other bytes at " << threads << " threads";
  }
}

TEST(Threads, MatrixProduct) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32})
    for (const std::int64_t rows : {1, 5, 19}) {
      const std::int64_t n = 3000, k = 257;
      const Tensor w = floats(dtype, {n, k}, 1), x = floats(DType::kFloat32, {rows, k}, 2);
      const cpu::PackedMatrix packed(w.view.data, n, k, dtype);
      same_bytes_at_any_thread_count([&] {
        Tensor y = zeros(DType::kFloat32, {rows, n});
        cpu::matmul(packed, x.view.as<float>(), k, rows, y.view.as<float>(), n);
        return y.memory;
      });
    }
}

TEST(Threads, DraftKvMaterializes) {
  const std::int64_t T = 13, L = 3, N = 2, D = 64, hidden = 96;
  const Tensor ctx = floats(DType::kBFloat16, {T, hidden}, 3), weight = floats(DType::kBFloat16, {L, 2 * N * D, hidden}, 4);
  const Tensor norm = floats(DType::kFloat32, {L, D}, 5), table = floats(DType::kFloat32, {32, D}, 6),
               eps = floats(DType::kFloat32, {L}, 7);
  for (std::int64_t l = 0; l < L; ++l) eps.view.as<float>()[l] = 1e-6f;
  std::vector<std::int32_t> slots;
  for (int t = 0; t < T; ++t) slots.push_back(t % 5 == 4 ? -1 : (t * 7) % 29);
  const Tensor mapping = integers(DType::kInt32, {T}, slots), positions = integers(DType::kInt32, {T}, std::vector<std::int32_t>(T, 9));
  same_bytes_at_any_thread_count([&] {
    Tensor k = zeros(DType::kBFloat16, {L, 29, N, D}), v = zeros(DType::kBFloat16, {L, 29, N, D});
    draft_kv::MaterializeIntoPoolParams p;
    p.ctx_hidden = ctx, p.kv_weight = weight, p.k_norm_weight = norm, p.eps = eps, p.cos_sin_cache = table;
    p.positions = positions, p.slot_mapping = mapping;
    p.k_pool = {&k.view, 1}, p.v_pool = {&v.view, 1};
    draft_kv::materialize_into_pool(p);
    k.memory.insert(k.memory.end(), v.memory.begin(), v.memory.end());
    return k.memory;
  });
}

TEST(Executor, CoversTheRangeOnceWithPiecesOfTheGrain) {
  for (int threads : {1, 2, 3, 8})
    for (std::int64_t n : {0, 1, 2, 7, 64, 1000})
      for (std::int64_t grain : {1, 3, 64, 5000}) {
        ThreadPool pool(threads);
        InjectedExecutor injected(pool);
        std::vector<int> hits(static_cast<std::size_t>(n));
        std::atomic<int> small{0};
        cpu::parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
          if (end - begin < grain && end != n) ++small;
          for (std::int64_t i = begin; i < end; ++i) ++hits[static_cast<std::size_t>(i)];
        });
        EXPECT_EQ(hits, std::vector<int>(hits.size(), 1)) << threads << " threads, n " << n << ", grain " << grain;
        EXPECT_EQ(small, 0) << "a piece below the grain";
      }
}

TEST(Executor, TheBuiltInOneComesBack) {
  Executor& before = executor();
  {
    ThreadPool pool(2);
    InjectedExecutor injected(pool);
    EXPECT_EQ(&executor(), &pool);
    cpu::parallel_for(100, 1, [](std::int64_t, std::int64_t) {});
    EXPECT_EQ(pool.calls(), 1);
  }
  EXPECT_EQ(&executor(), &before);
  EXPECT_GE(before.concurrency(), 1);
}

}  // namespace
