#pragma once
// The toolkit's matrix product as a yardstick, loaded at run time: where it is missing, comparisons with it are left out.
#include <cublasLt.h>
#include <dlfcn.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "bench/gpu/gpu.hpp"

namespace specstate::bench {

class CublasLt {
 public:
  CublasLt() : library_(dlopen("libcublasLt.so.13", RTLD_NOW)) {
    if (!library_) library_ = dlopen("/usr/local/cuda/lib64/libcublasLt.so.13", RTLD_NOW);
    if (!library_ || !load(create_, "cublasLtCreate") || !load(matmul_, "cublasLtMatmul") || !load(desc_, "cublasLtMatmulDescCreate") ||
        !load(set_, "cublasLtMatmulDescSetAttribute") || !load(layout_, "cublasLtMatrixLayoutCreate") ||
        !load(preference_, "cublasLtMatmulPreferenceCreate") || !load(prefer_, "cublasLtMatmulPreferenceSetAttribute") ||
        !load(heuristic_, "cublasLtMatmulAlgoGetHeuristic") || create_(&handle_) != CUBLAS_STATUS_SUCCESS)
      handle_ = nullptr;
    if (handle_) workspace_ = std::make_unique<GpuArray>(kWorkspace);
  }
  bool here() const { return handle_ != nullptr; }

  /// y [rows, n] = x [rows, k] w [n, k]^T in bfloat16 with float32 sums: the first algorithms that the library proposes.
  class Product {
   public:
    std::size_t algorithms() const { return found_.size(); }
    void run(std::size_t algorithm, const void* x, const void* w, void* y, cudaStream_t stream) const {
      const float one = 1, zero = 0;
      lt_.matmul_(lt_.handle_, desc_, &one, w, w_, x, x_, &zero, y, y_, y, y_, &found_[algorithm].algo, lt_.workspace_->data(), kWorkspace,
                  stream);
    }

   private:
    friend class CublasLt;
    explicit Product(const CublasLt& lt) : lt_(lt) {}
    const CublasLt& lt_;
    cublasLtMatmulDesc_t desc_ = nullptr;
    cublasLtMatrixLayout_t w_ = nullptr, x_ = nullptr, y_ = nullptr;
    std::vector<cublasLtMatmulHeuristicResult_t> found_;
  };
  Product product(std::int64_t rows, std::int64_t n, std::int64_t k) const {
    Product p(*this);
    desc_(&p.desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    set_(p.desc_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    layout_(&p.w_, CUDA_R_16BF, k, n, k), layout_(&p.x_, CUDA_R_16BF, k, rows, k), layout_(&p.y_, CUDA_R_16BF, n, rows, n);
    cublasLtMatmulPreference_t preference = nullptr;
    preference_(&preference);
    const std::size_t most = kWorkspace;
    prefer_(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most);
    p.found_.resize(4);
    int found = 0;
    heuristic_(handle_, p.desc_, p.w_, p.x_, p.y_, p.y_, preference, static_cast<int>(p.found_.size()), p.found_.data(), &found);
    p.found_.resize(static_cast<std::size_t>(found));
    return p;
  }

 private:
  static constexpr std::size_t kWorkspace = std::size_t{64} << 20;
  template <class F>
  bool load(F& f, const char* name) {
    f = reinterpret_cast<F>(dlsym(library_, name));
    return f != nullptr;
  }

  void* library_;
  cublasLtHandle_t handle_ = nullptr;
  std::unique_ptr<GpuArray> workspace_;
  decltype(&cublasLtCreate) create_ = nullptr;
  decltype(&cublasLtMatmul) matmul_ = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_ = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) set_ = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_ = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_ = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) prefer_ = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic_ = nullptr;
};

}  // namespace specstate::bench
