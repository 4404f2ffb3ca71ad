#pragma once
// The toolkit's matrix product, loaded when it is first wanted: nothing of CUDA but the runtime is linked, and a machine without it has our own.
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "specstate/stream.hpp"

namespace specstate::cuda {

class CublasLt {
 public:
  /// Whether this machine has the library.
  static bool here();
  /// Throws Error(kCuda) where it is not, or cannot be started. `workspace`: device memory that the products may use, one at a time.
  CublasLt(void* workspace, std::int64_t workspace_bytes);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  /// y [rows, n] = x [rows, k] w [n, k]^T (+ y where `accumulate`), float32 throughout; strides are floats between rows. A shape that is met for the
  /// first time asks the library for an algorithm, which allocates nothing on the device.
  void product(const float* w, std::int64_t n, std::int64_t k, const float* x, std::int64_t x_stride, std::int64_t rows, float* y,
               std::int64_t y_stride, bool accumulate, Stream stream);

 private:
  struct Plan;
  using Shape = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;  // n, k, x_stride, rows, y_stride
  const Plan& plan(const Shape& shape);
  void* handle_ = nullptr;
  void* workspace_;
  std::int64_t workspace_bytes_;
  std::map<Shape, std::unique_ptr<Plan>> plans_;
};

}  // namespace specstate::cuda
