#pragma once
// One exception type; `kind` says who is at fault. The Python package raises the built-in exception of the same name.
#include <stdexcept>
#include <string>

#include "specstate/export.hpp"

namespace specstate {

enum class ErrorKind {
  kValue,           // a wrong argument (ValueError)
  kNotImplemented,  // a right call that this build or version does not do (NotImplementedError)
  kRuntime,         // the machine or the run-time state failed (RuntimeError)
  kCuda,            // a CUDA call failed: no driver, no code for this GPU, a fault of earlier work on it (RuntimeError)
  kInternal,        // our own bug (RuntimeError, text starts with "internal error")
};

class SPECSTATE_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ~Error() override;
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace specstate
