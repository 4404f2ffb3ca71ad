#pragma once
// What every export shares: DLPack views in, the right Python exception out. Exports hold no logic.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <string>
#include <utility>

#include "specstate/error.hpp"
#include "specstate/stream.hpp"
#include "specstate/tensor.hpp"

namespace specstate::binding {

namespace ffi = tvm::ffi;

using In = DLTensor*;  // a pointer is what crosses: arguments of some twenty tensors are moved about several times on their way
using Opt = ffi::Optional<DLTensor*>;

/// An array that cannot become a TensorView: `view` knows the argument, Python puts the function's name before the text.
class ArgumentError : public Error {
 public:
  explicit ArgumentError(const std::string& text) : Error(ErrorKind::kValue, text) {}
};

/// The caller's array as a TensorView; `name` is the argument's name in error texts.
TensorView view(const char* name, const DLTensor* t);
inline TensorView view(const char* name, const Opt& t) { return t.has_value() ? view(name, t.value()) : TensorView{}; }
inline TensorView view(const char* name, const ffi::Tensor& t) { return view(name, t.GetDLTensorPtr()); }

/// SPECSTATE_SET(p, a, b): p.a = view("a", a), p.b = view("b", b). Most arguments bear the name of their parameter.
#define SPECSTATE_AGAIN ()
#define SPECSTATE_SCAN(...) SPECSTATE_SCAN3(SPECSTATE_SCAN3(SPECSTATE_SCAN3(__VA_ARGS__)))
#define SPECSTATE_SCAN3(...) SPECSTATE_SCAN9(SPECSTATE_SCAN9(SPECSTATE_SCAN9(__VA_ARGS__)))
#define SPECSTATE_SCAN9(...) __VA_ARGS__
#define SPECSTATE_SET_ONE(p, x, ...) p.x = view(#x, x) __VA_OPT__(, SPECSTATE_SET_MORE SPECSTATE_AGAIN(p, __VA_ARGS__))
#define SPECSTATE_SET_MORE() SPECSTATE_SET_ONE
#define SPECSTATE_SET(p, ...) SPECSTATE_SCAN(SPECSTATE_SET_ONE(p, __VA_ARGS__))

/// A CUDA stream handle that crosses as an integer.
inline Stream stream(std::int64_t handle) { return Stream{reinterpret_cast<void*>(handle)}; }

/// Runs `f`; a specstate::Error leaves as the Python exception of its kind, with exactly its text.
template <class F>
auto guard(F&& f) -> decltype(f()) {
  try {
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
