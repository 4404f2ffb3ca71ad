// Every parallel operation on executors of plain threads: the same bytes at any number of threads, and under ThreadSanitizer no race.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "cpu/parallel.hpp"
#include "thread_pool.hpp"

using namespace specstate;
using specstate::testing::InjectedExecutor;
using specstate::testing::ThreadPool;

namespace {

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
