#pragma once
// How the CPU backend gets its threads. An engine with its own pool injects it; nothing starts a thread before first use.
#include <cstdint>

#include "specstate/export.hpp"

namespace specstate {

/// Runs `body(context, begin, end)` over disjoint ranges that cover [0, n), possibly in parallel, and returns when all are done.
/// Results never depend on how the range is cut: every operation's arithmetic is row-invariant.
class SPECSTATE_API Executor {
 public:
  using Body = void (*)(void* context, std::int64_t begin, std::int64_t end);
  virtual ~Executor();
  virtual void parallel_for(std::int64_t n, std::int64_t grain, Body body, void* context) = 0;
  virtual int concurrency() const = 0;
};

/// Replaces the executor of this process (nullptr: back to the built-in one, oneTBB with SPECSTATE_NUM_THREADS threads).
/// The caller keeps ownership; not to be called while an operation runs.
SPECSTATE_API void set_executor(Executor* executor);
SPECSTATE_API Executor& executor();

}  // namespace specstate
