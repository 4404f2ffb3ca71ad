#include <cublasLt.h>
#include <dlfcn.h>

#include <string>

#include "cuda/cublaslt.hpp"
#include "cuda/launch.hpp"

namespace specstate::cuda {

namespace {

/// The entry points in use; all or none.
struct Library {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  bool here = false;

  Library() {
    void* library = nullptr;  // stays loaded: its handles may outlive everything of ours
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "/usr/local/cuda/lib64/libcublasLt.so"})
      if (!library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    const auto load = [&](auto& f, const char* name) {
      f = library ? reinterpret_cast<std::remove_reference_t<decltype(f)>>(dlsym(library, name)) : nullptr;
      return f != nullptr;
    };
    here = load(create, "cublasLtCreate") && load(destroy, "cublasLtDestroy") && load(matmul, "cublasLtMatmul") &&
           load(desc, "cublasLtMatmulDescCreate") && load(desc_destroy, "cublasLtMatmulDescDestroy") &&
           load(desc_set, "cublasLtMatmulDescSetAttribute") && load(layout, "cublasLtMatrixLayoutCreate") &&
           load(layout_destroy, "cublasLtMatrixLayoutDestroy") && load(preference, "cublasLtMatmulPreferenceCreate") &&
           load(preference_destroy, "cublasLtMatmulPreferenceDestroy") && load(preference_set, "cublasLtMatmulPreferenceSetAttribute") &&
           load(heuristic, "cublasLtMatmulAlgoGetHeuristic");
  }
};
const Library& library() {
  static const Library l;
  return l;
}

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(ErrorKind::kCuda, std::string(what) + ": cuBLASLt status " + std::to_string(static_cast<int>(status)));
}

}  // namespace

struct CublasLt::Plan {
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulHeuristicResult_t found{};
  Plan() = default;
  ~Plan() {
    for (const cublasLtMatrixLayout_t l : {w, x, y})
      if (l) library().layout_destroy(l);
    if (desc) library().desc_destroy(desc);
  }
};

bool CublasLt::here() { return library().here; }

CublasLt::CublasLt(void* workspace, std::int64_t workspace_bytes) : workspace_(workspace), workspace_bytes_(workspace_bytes) {
  if (!here()) throw Error(ErrorKind::kCuda, "cuBLASLt: expected libcublasLt.so.13 or .12, got none.");
  check(library().create(reinterpret_cast<cublasLtHandle_t*>(&handle_)), "cublasLtCreate");
}
CublasLt::~CublasLt() {
  plans_.clear();
  library().destroy(static_cast<cublasLtHandle_t>(handle_));
}

const CublasLt::Plan& CublasLt::plan(const Shape& shape) {
  std::unique_ptr<Plan>& known = plans_[shape];
  if (known) return *known;
  const auto [n, k, x_stride, rows, y_stride] = shape;
  const Library& lt = library();
  auto p = std::make_unique<Plan>();
  check(lt.desc(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  const cublasOperation_t transposed = CUBLAS_OP_T;
  check(lt.desc_set(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed), "cublasLtMatmulDescSetAttribute");
  // Rows of ours are columns of the library's: y^T = w x^T.
  const auto size = [](std::int64_t v) { return static_cast<std::uint64_t>(v); };
  check(lt.layout(&p->w, CUDA_R_32F, size(k), size(n), k), "cublasLtMatrixLayoutCreate");
  check(lt.layout(&p->x, CUDA_R_32F, size(k), size(rows), x_stride), "cublasLtMatrixLayoutCreate");
  check(lt.layout(&p->y, CUDA_R_32F, size(n), size(rows), y_stride), "cublasLtMatrixLayoutCreate");
  cublasLtMatmulPreference_t preference = nullptr;
  check(lt.preference(&preference), "cublasLtMatmulPreferenceCreate");
  const std::size_t most = static_cast<std::size_t>(workspace_bytes_);
  lt.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most);
  const std::uint32_t aligned = 4;  // rows may begin anywhere
  for (const auto which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                           CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    lt.preference_set(preference, which, &aligned, sizeof aligned);
  int found = 0;
  const cublasStatus_t status =
      lt.heuristic(static_cast<cublasLtHandle_t>(handle_), p->desc, p->w, p->x, p->y, p->y, preference, 1, &p->found, &found);
  lt.preference_destroy(preference);
  check(status, "cublasLtMatmulAlgoGetHeuristic");
  if (found < 1) throw Error(ErrorKind::kCuda, "cublasLtMatmulAlgoGetHeuristic: no algorithm for this shape");
  known = std::move(p);
  return *known;
}

void CublasLt::product(const float* w, std::int64_t n, std::int64_t k, const float* x, std::int64_t x_stride, std::int64_t rows, float* y,
                       std::int64_t y_stride, bool accumulate, Stream stream) {
  if (rows == 0 || n == 0) return;
  const Plan& p = plan({n, k, x_stride, rows, y_stride});
  const float one = 1, beta = accumulate ? 1 : 0;
  check(library().matmul(static_cast<cublasLtHandle_t>(handle_), p.desc, &one, w, p.w, x, p.x, &beta, y, p.y, y, p.y, &p.found.algo,
                         workspace_, static_cast<std::size_t>(workspace_bytes_), native(stream)),
        "cublasLtMatmul");
}

}  // namespace specstate::cuda
