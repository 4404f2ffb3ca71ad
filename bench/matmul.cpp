// The row-invariant product beside OpenBLAS with fp32 weights (twice the bytes), which need not give a row the same bits twice. It may
// take the better of W and its transpose, and sgemv for one row.
#include "cpu/matmul.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <vector>

#include "bench/harness.hpp"
#include "core/numeric.hpp"

namespace specstate::bench {

namespace {

/// OpenBLAS, opened at run time so that neither the library nor the build depends on it.
class OpenBlas {
 public:
  explicit OpenBlas(int threads) {
    unsetenv("OPENBLAS_CORETYPE");  // let it take its best kernels for this CPU
    void* library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    sgemm_ = reinterpret_cast<Sgemm>(dlsym(library, "cblas_sgemm"));
    sgemv_ = reinterpret_cast<Sgemv>(dlsym(library, "cblas_sgemv"));
    const auto set = reinterpret_cast<void (*)(int)>(dlsym(library, "openblas_set_num_threads"));
    const auto config = reinterpret_cast<char* (*)()>(dlsym(library, "openblas_get_config"));
    if (!sgemm_ || !sgemv_ || !set || !config) return;
    set(threads);
    const std::string text = config();  // "OpenBLAS 0.3.21 NO_LAPACKE ..."
    name_ = text.substr(0, text.find(' ', text.find(' ') + 1));
  }
  bool found() const { return !name_.empty(); }
  const std::string& name() const { return name_; }
  /// y[rows, n] = x[rows, k] W^T, W stored as [n, k], or as [k, n] where `transposed`.
  void product(const float* w, bool transposed, int n, int k, const float* x, int rows, float* y) const {
    constexpr int kRowMajor = 101, kNoTrans = 111, kTrans = 112;
    const int ld = transposed ? n : k;
    if (rows == 1)
      sgemv_(kRowMajor, transposed ? kTrans : kNoTrans, transposed ? k : n, ld, 1.0f, w, ld, x, 1, 0.0f, y, 1);
    else
      sgemm_(kRowMajor, kNoTrans, transposed ? kNoTrans : kTrans, rows, n, k, 1.0f, x, k, w, ld, 0.0f, y, n);
  }

 private:
  using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
  using Sgemv = void (*)(int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
  Sgemm sgemm_ = nullptr;
  Sgemv sgemv_ = nullptr;
  std::string name_;
};

void run(Report& report) {
  const OpenBlas blas(report.threads());
  struct Shape {
    int k, n;
  };
  const std::vector<Shape> shapes =
      report.quick() ? std::vector<Shape>{{192, 448}} : std::vector<Shape>{{192, 448}, {1024, 4096}, {4096, 11008}};
  const std::vector<int> all_rows = report.quick() ? std::vector<int>{1, 8} : std::vector<int>{1, 2, 4, 8, 16, 64, 256};
  std::mt19937 random(1);
  const auto uniform = [&] { return static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f; };
  for (const auto& [k, n] : shapes) {
    std::vector<core::bfloat16> w(static_cast<std::size_t>(n) * k);
    for (auto& v : w) v = core::from_float<core::bfloat16>(uniform());
    std::vector<float> wide(w.size()), wide_transposed(w.size());
    for (std::size_t i = 0; i < w.size(); ++i) {
      wide[i] = core::to_float(w[i]);
      wide_transposed[i % k * n + i / k] = wide[i];
    }
    const cpu::PackedMatrix packed(w.data(), n, k, DType::kBFloat16);
    w = {};
    std::vector<float> x(static_cast<std::size_t>(all_rows.back()) * k), y(static_cast<std::size_t>(all_rows.back()) * n);
    for (float& v : x) v = uniform();

    const std::int64_t bytes = cpu::PackedMatrix::bytes(n, k, DType::kBFloat16);
    for (const int rows : all_rows)
      for (const bool cold : {false, true}) {
        if (cold && (k != 1024 || (rows != 1 && rows != 8))) continue;
        const auto ours = [&] { cpu::matmul(packed, x.data(), k, rows, y.data(), n); };
        const auto theirs = [&] { blas.product(wide.data(), false, n, k, x.data(), rows, y.data()); };
        const auto theirs_transposed = [&] { blas.product(wide_transposed.data(), true, n, k, x.data(), rows, y.data()); };
        const auto time = [&](const std::function<void()>& f) { return cold ? report.time_cold(f) : report.time(f); };
        Result r;
        r.ours_us = time(ours);
        const double reading = cold ? report.read_cold_us(bytes) : report.read_us(bytes);
        const double computing = report.compute_us(2.0 * rows * n * k);
        r.floor_us = std::max(reading, computing);
        r.floor = reading > computing ? "reading the bf16 weights, measured at this size" : "FMA peak, measured";
        if (blas.found()) r.peers[blas.name()] = std::min(time(theirs), time(theirs_transposed));
        report.add("product",
                   {{"cache", cold ? "cold" : "warm"}, {"k", std::to_string(k)}, {"n", std::to_string(n)}, {"rows", std::to_string(rows)}},
                   r);
      }
  }
}

const bool registered = add_family("matmul", run);

}  // namespace

}  // namespace specstate::bench
