#pragma once
// The row-invariant matrix product of CPU inference: y = x W^T (+ bias) (+ residual).
//
// Each output is one fp32 fused multiply-add chain over k in rising order, started at +0:
//     acc = fma(x[r][i], w[j][i], acc),  i = 0 .. k-1;    y = acc (+ bias[j]) (+ add[r][j])
// A vector lane is an output, never a part of a sum, so neither the number of rows, a row's place, the cut among threads nor the
// vector width can change a bit. (Where the CPU has no FMA, multiply and add round separately: same order, other bits.)
#include <cstdint>
#include <memory>

#include "specstate/tensor.hpp"

namespace specstate::cpu {

/// W [n, k], bfloat16 or float32, in the panel layout of the kernel. Movable; a caller-owned buffer must outlive it.
class PackedMatrix {
 public:
  /// Bytes of the packed form (n rounded up to 16). Caller-owned memory must be aligned to 64.
  static std::int64_t bytes(std::int64_t n, std::int64_t k, DType dtype);

  PackedMatrix() = default;
  /// All zeros, in own memory or in `memory`; set_rows fills it.
  PackedMatrix(std::int64_t n, std::int64_t k, DType dtype, void* memory = nullptr);
  /// Packs a dense W [n, k] of type `dtype`.
  PackedMatrix(const void* w, std::int64_t n, std::int64_t k, DType dtype, void* memory = nullptr);

  /// Rows [begin, begin + count) from w[count, k], type `dtype()`, any element strides (row_stride 1, col_stride ld packs a transpose).
  /// Several matrices with the same input become one product this way (q, k, v; gate, up).
  void set_rows(std::int64_t begin, std::int64_t count, const void* w, std::int64_t row_stride, std::int64_t col_stride = 1);

  std::int64_t n() const { return n_; }
  std::int64_t k() const { return k_; }
  DType dtype() const { return dtype_; }
  const void* data() const { return data_; }
  /// W[row][col] as stored, for tests and lookups.
  float at(std::int64_t row, std::int64_t col) const;

 private:
  struct Free {
    void operator()(void* p) const;
  };
  std::unique_ptr<void, Free> own_;
  void* data_ = nullptr;
  std::int64_t n_ = 0, k_ = 0;
  DType dtype_ = DType::kFloat32;
};

/// What is added to a product: y = (acc + bias[j]) + add[r][j]. `add` may be y itself (a residual in place).
struct MatmulAdd {
  const float* bias = nullptr;  // [n]
  const float* add = nullptr;   // [rows, n], row stride add_stride elements
  std::int64_t add_stride = 0;
};

/// y[rows, n] = x[rows, k] w^T; strides are elements between rows, rows are dense inside. y must not overlap x.
/// Runs on the process's executor; rows = 0 does nothing; k = 0 gives the added terms alone.
void matmul(const PackedMatrix& w, const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride,
            const MatmulAdd& plus = {});

}  // namespace specstate::cpu
