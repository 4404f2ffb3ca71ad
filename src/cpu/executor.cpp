#include "specstate/executor.hpp"

#include <tbb/blocked_range.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#ifndef _WIN32
#include <pthread.h>
#endif

#include <atomic>

#include "core/env.hpp"

namespace specstate {

Executor::~Executor() = default;

namespace {

/// A child of fork() has none of the workers of its parent, whose pool would wait for them: there, the caller's thread does all.
std::atomic<bool> in_child{false};

class TbbExecutor final : public Executor {
 public:
  TbbExecutor() : threads_(core::env().num_threads > 0 ? core::env().num_threads : tbb::info::default_concurrency()), arena_(threads_) {
#ifndef _WIN32
    pthread_atfork(nullptr, nullptr, [] { in_child.store(true, std::memory_order_relaxed); });
#endif
  }

  void parallel_for(std::int64_t n, std::int64_t grain, Body body, void* context) override {
    if (concurrency() == 1) return body(context, 0, n);
    arena_.execute([&] {
      tbb::parallel_for(tbb::blocked_range<std::int64_t>(0, n, static_cast<std::size_t>(grain)),
                        [&](const tbb::blocked_range<std::int64_t>& r) { body(context, r.begin(), r.end()); });
    });
  }
  int concurrency() const override { return in_child.load(std::memory_order_relaxed) ? 1 : threads_; }

 private:
  int threads_;
  tbb::task_arena arena_;
};

std::atomic<Executor*> injected{nullptr};

}  // namespace

void set_executor(Executor* executor) { injected.store(executor); }

Executor& executor() {
  if (Executor* e = injected.load()) return *e;
  static TbbExecutor built_in;
  return built_in;
}

}  // namespace specstate
