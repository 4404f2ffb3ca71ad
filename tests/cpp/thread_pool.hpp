#pragma once
// An executor of plain std::threads, for tests: ThreadSanitizer sees all of it (Debian's oneTBB is not instrumented), and any
// number of threads can be asked for on any machine.
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "specstate/executor.hpp"

namespace specstate::testing {

class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int threads) : threads_(threads) {}

  void parallel_for(std::int64_t n, std::int64_t grain, Body body, void* context) override {
    // Dealt like cards, so neighbours run on different threads and no thread is left out. No shared counter: its ordering would
    // hide races from ThreadSanitizer.
    const std::int64_t piece = std::max(grain, (n + 4 * threads_ - 1) / (4 * threads_));
    auto work = [&](std::int64_t t) {
      for (std::int64_t begin = t * piece; begin < n; begin += threads_ * piece) body(context, begin, std::min(n, begin + piece));
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads_; ++t) others.emplace_back(work, t);
    work(0);
    for (std::thread& t : others) t.join();
    calls_.fetch_add(1);
  }
  int concurrency() const override { return threads_; }
  int calls() const { return calls_; }

 private:
  int threads_;
  std::atomic<int> calls_{0};
};

/// Makes `executor` the process's executor for a scope.
class InjectedExecutor {
 public:
  explicit InjectedExecutor(Executor& executor) { set_executor(&executor); }
  ~InjectedExecutor() { set_executor(nullptr); }
  InjectedExecutor(const InjectedExecutor&) = delete;
  InjectedExecutor& operator=(const InjectedExecutor&) = delete;
};

}  // namespace specstate::testing
