#pragma once
// How time is taken on a GPU, and what it can do at most. A family's CUDA measurements are one file bench/gpu/<family>.cpp:
// `void run(Report&)` and `const bool registered = add_gpu_family("name", run);`, with a Gpu made from the report.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bench/harness.hpp"
#include "specstate/stream.hpp"
#include "specstate/tensor.hpp"

namespace specstate::bench {

/// Memory of the GPU, or pinned memory of the host that it can address, full of random bytes (as bfloat16 or float32: numbers in
/// [-1, 1) by fill_*).
class GpuArray {
 public:
  enum class Place { kDevice, kPinned };
  explicit GpuArray(std::size_t bytes, Place place = Place::kDevice);
  GpuArray(GpuArray&& other) noexcept : data_(other.data_), bytes_(other.bytes_), place_(other.place_) { other.data_ = nullptr; }
  GpuArray(const GpuArray&) = delete;
  ~GpuArray();

  template <class T = void>
  T* data() const {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }
  /// Dense view of the first elements.
  TensorView view(DType dtype, std::initializer_list<std::int64_t> shape) const;
  void fill_bfloat16(float scale = 1, unsigned seed = 1);
  void fill_float32(float scale = 1, unsigned seed = 1);
  void upload(const void* host, std::size_t bytes);
  template <class T>
  void set(const std::vector<T>& values) {
    upload(values.data(), values.size() * sizeof(T));
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
  Place place_;
};

/// One block that does nothing, in full order with what is before and behind it in the stream.
void empty_kernel(cudaStream_t stream);

class Gpu {
 public:
  explicit Gpu(const Report& report);
  ~Gpu();
  Gpu(const Gpu&) = delete;

  /// Enqueues one call; `repeat` counts the calls of a graph, so that inputs can rotate.
  using Call = std::function<void(Stream stream, int repeat)>;

  /// Microseconds of a call with a cold L2, as a node of a CUDA graph: the time of a graph of (before, a read of four times the L2, call),
  /// many times over, less that of the same graph without the call. `before` puts back what a call changes. Median of rounds.
  double cold_us(const Call& call, const Call& before = {}, int rounds = 21) {
    return cold_us(std::vector<Call>{call}, before, rounds).front();
  }
  /// Several calls in turns, round by round: for comparisons.
  std::vector<double> cold_us(const std::vector<Call>& calls, const Call& before = {}) { return cold_us(calls, before, 21); }
  /// Back to back, with whatever the call before left in L2.
  double warm_us(const Call& call);

  // What the GPU needs at least, measured with cold_us by kernels that do nothing else. Known sizes are not measured again.
  double read_us(std::int64_t bytes) { return stream_us(bytes, 0); }
  /// Reads so much, writes so much elsewhere; written over the bytes read where in_place.
  double stream_us(std::int64_t read_bytes, std::int64_t write_bytes, bool in_place = false);
  /// Random rows of pinned host memory into device memory, by whichever grid is fastest.
  double host_gather_us(std::int64_t rows, std::int64_t row_bytes);
  double launch_us();           // a kernel of one block that does nothing
  double host_to_device_gbs();  // the copy engine, 256 MiB
  double device_to_host_gbs();

  /// "NVIDIA H200"
  static std::string name();
  /// The numbers of this run that go beside the results.
  std::map<std::string, double> ceilings();

 private:
  struct Graph;
  std::vector<double> cold_us(const std::vector<Call>& calls, const Call& before, int rounds);
  double time_us(Graph& graph) const;
  double copy_engine_gbs(bool to_host);
  void flush(cudaStream_t stream) const;

  bool quick_;
  int multiprocessors_ = 0;
  std::size_t flush_bytes_ = 0;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  void* flush_ = nullptr;
};

}  // namespace specstate::bench
