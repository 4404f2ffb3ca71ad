#pragma once
// Would a call be taken? Without making it, and without reading what the tensors hold.
#include <string>

#include "specstate/error.hpp"

namespace specstate {

/// True where this build has CUDA kernels.
SPECSTATE_API bool cuda_built() noexcept;

/// While one lives, every operation called on its thread checks its arguments (shapes, dtypes, devices, strides, overlaps and
/// numbers) and returns: it runs nothing and reads and writes no element. Errors of contents (an id outside, lengths that do not
/// fit) are therefore not found. Nests; other threads are not affected.
class SPECSTATE_API CheckOnly {
 public:
  CheckOnly() noexcept;
  ~CheckOnly();
  CheckOnly(const CheckOnly&) = delete;
  CheckOnly& operator=(const CheckOnly&) = delete;
  static bool active() noexcept;
};

/// The text of the error that the operation called by `call` would raise; empty if the call would be taken.
///   if (std::string why = refusal([&] { kda::fold(params, stream); }); !why.empty()) ...
template <class F>
std::string refusal(F&& call) {
  const CheckOnly scope;
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return {};
}

}  // namespace specstate
