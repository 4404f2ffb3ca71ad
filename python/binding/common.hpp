#pragma once
// What every export shares: DLPack views in, the right Python exception out. Exports hold no logic.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "specstate/error.hpp"
#include "specstate/stream.hpp"
#include "specstate/tensor.hpp"

// Of CPython the binding needs a few functions, all of its stable ABI, so no headers: they are the running interpreter's.
extern "C" {
void* PyEval_SaveThread();
void PyEval_RestoreThread(void* state);
}

namespace specstate::binding {

namespace ffi = tvm::ffi;

using In = DLTensor*;  // a pointer is what crosses: arguments of some twenty tensors are moved about several times on their way
using Opt = ffi::Optional<DLTensor*>;

/// An array that cannot become a TensorView. Python finds out which one it was, and what its caller calls it.
class ArgumentError : public Error {
 public:
  explicit ArgumentError(const std::string& text) : Error(ErrorKind::kValue, text) {}
};

/// The caller's array in a TensorView that nothing was given to yet; `name` is the argument's name in error texts.
void view(const char* name, const DLTensor* t, TensorView& v);
inline void view(const char* name, const Opt& t, TensorView& v) {
  if (t.has_value()) view(name, t.value(), v);
}
template <class T>
TensorView view(const char* name, const T& t) {
  TensorView v;
  view(name, t, v);
  return v;
}
inline TensorView view(const char* name, const ffi::Tensor& t) { return view(name, t.GetDLTensorPtr()); }

/// SPECSTATE_SET(p, a, b): view("a", a, p.a), view("b", b, p.b). Most arguments bear the name of their parameter.
#define SPECSTATE_AGAIN ()
#define SPECSTATE_SCAN(...) SPECSTATE_SCAN3(SPECSTATE_SCAN3(SPECSTATE_SCAN3(__VA_ARGS__)))
#define SPECSTATE_SCAN3(...) SPECSTATE_SCAN9(SPECSTATE_SCAN9(SPECSTATE_SCAN9(__VA_ARGS__)))
#define SPECSTATE_SCAN9(...) __VA_ARGS__
#define SPECSTATE_SET_ONE(p, x, ...) view(#x, x, p.x) __VA_OPT__(, SPECSTATE_SET_MORE SPECSTATE_AGAIN(p, __VA_ARGS__))
#define SPECSTATE_SET_MORE() SPECSTATE_SET_ONE
#define SPECSTATE_SET(p, ...) SPECSTATE_SCAN(SPECSTATE_SET_ONE(p, __VA_ARGS__))

/// A CUDA stream handle that crosses as an integer.
inline Stream stream(std::int64_t handle) { return Stream{reinterpret_cast<void*>(handle)}; }

/// While it lives, this thread has given the GIL back. Exports are called with it (`release_gil` is off): taking it again must be done here.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  /// Where the interpreter has ended meanwhile, CPython ends a daemon thread here by unwinding it, which nothing of C++ between here and its
  /// beginning survives: such a thread stays here instead, as it would in CPython 3.14, until the process ends.
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* state_;
};

/// Runs `f` without the GIL; a specstate::Error leaves as the Python exception of its kind, with exactly its text.
template <class F>
auto guard(F&& f) -> decltype(f()) {
  try {
    const WithoutGil released;
    return f();
  } catch (const ArgumentError& e) {
    throw ffi::Error("SpecstateArgument", e.what(), "");
  } catch (const Error& e) {
    const char* kind = "RuntimeError";
    if (e.kind() == ErrorKind::kValue) kind = "ValueError";
    if (e.kind() == ErrorKind::kNotImplemented) kind = "NotImplementedError";
    throw ffi::Error(kind, e.what(), "");
  } catch (const std::bad_alloc&) {
    throw ffi::Error("MemoryError", "out of host memory", "");
  }
}

}  // namespace specstate::binding
