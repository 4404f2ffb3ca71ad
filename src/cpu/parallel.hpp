#pragma once
// parallel_for over the process's executor (specstate/executor.hpp).
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/float_env.hpp"
#include "specstate/executor.hpp"

namespace specstate::cpu {

/// body(begin, end) over [0, n) in pieces of at least `grain`, each in the default floating-point environment. The pieces must not change
/// the arithmetic of any item.
template <class F>
void parallel_for(std::int64_t n, std::int64_t grain, F&& body) {
  if (n <= 0) return;
  if (n <= grain) {
    const core::DefaultFloatEnv env;
    body(std::int64_t{0}, n);
    return;
  }
  using Fn = std::remove_reference_t<F>;
  executor().parallel_for(
      n, std::max<std::int64_t>(1, grain),
      [](void* f, std::int64_t begin, std::int64_t end) {
        const core::DefaultFloatEnv env;
        (*static_cast<Fn*>(f))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace specstate::cpu
