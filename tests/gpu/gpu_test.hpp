#pragma once
// How an operation is tested on a GPU: the same call on the CPU and on the GPU, from the same bytes, and every byte compared.
//
//   SPECSTATE_NEEDS_GPU();
//   Pair<std::int32_t> lens({b});            // one array twice: host and device, poisoned, with red zones around the device's
//   Pair<float> x({b, w}, values);
//   const auto call = [&](Where where, Stream stream) { params.x = x.view(where); ...; operation(params, stream); };
//   on_both(call, {&lens, &x});              // runs, replays a captured graph, compares
//
// A test binary links the shared library that is shipped, so the CPU results are those of the very build.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "specstate/error.hpp"
#include "specstate/stream.hpp"
#include "specstate/tensor.hpp"

namespace specstate::gpu_test {

#define SPECSTATE_GPU(call) ASSERT_EQ((call), cudaSuccess) << #call

inline bool gpu_here() {
  static const bool here = [] {
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess && n > 0;
  }();
  return here;
}
#define SPECSTATE_NEEDS_GPU() \
  if (!::specstate::gpu_test::gpu_here()) GTEST_SKIP() << "needs-gpu: the CUDA runtime sees no GPU"

/// True where a slow tool watches (tools/gpu_test.py runs compute-sanitizer so): keep the tests' shapes small.
inline bool small() { return std::getenv("GPU_TEST_SMALL") != nullptr; }

enum class Where { kHost, kDevice };

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kFloat64;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::kInt32;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::kInt64;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::kUInt8;
};

/// Host memory aligned as cudaMalloc aligns: what may lie in the one copy may lie in the other.
template <class T>
struct AlignedAllocator {
  using value_type = T;
  static constexpr std::align_val_t kAlign{256};
  AlignedAllocator() = default;
  template <class U>
  AlignedAllocator(const AlignedAllocator<U>&) {}  // NOLINT: implicit as the standard asks
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kAlign)); }
  void deallocate(T* p, std::size_t) { ::operator delete(p, kAlign); }
  bool operator==(const AlignedAllocator&) const { return true; }
};

/// An array of raw bytes in host and device memory. The device's copy lies between red zones.
class Bytes {
 public:
  static constexpr std::size_t kRedZone = 4096;
  static constexpr unsigned char kPoison = 0xA5, kRed = 0x5C;

  explicit Bytes(std::size_t n) : host_(n, kPoison), pristine_(host_) {
    if (cudaMalloc(&block_, n + 2 * kRedZone) != cudaSuccess) throw std::bad_alloc();
    cudaMemset(block_, kRed, n + 2 * kRedZone);
    upload();
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  virtual ~Bytes() { cudaFree(block_); }

  void* host() { return host_.data(); }
  void* device() const { return static_cast<char*>(block_) + kRedZone; }
  std::size_t size() const { return host_.size(); }
  /// What is in the host's copy now becomes the content of both, and what reset() restores.
  void upload() {
    pristine_ = host_;
    reset();
  }
  /// Waits: a small copy from pageable memory may return before it has arrived, and the tests' streams do not wait for it.
  void reset() {
    host_ = pristine_;
    cudaMemcpy(device(), host_.data(), host_.size(), cudaMemcpyHostToDevice);
    cudaDeviceSynchronize();
  }
  std::vector<unsigned char> download() const {
    std::vector<unsigned char> bytes(size());
    cudaMemcpy(bytes.data(), device(), size(), cudaMemcpyDeviceToHost);
    return bytes;
  }
  /// Empty if the device's copy equals the host's and the red zones are whole, else what differs first.
  std::string difference() const {
    std::vector<unsigned char> all(size() + 2 * kRedZone);
    if (const cudaError_t e = cudaMemcpy(all.data(), block_, all.size(), cudaMemcpyDeviceToHost); e != cudaSuccess)
      return std::string("cudaMemcpy: ") + cudaGetErrorString(e);
    for (std::size_t i = 0; i < kRedZone; ++i)
      if (all[i] != kRed || all[kRedZone + size() + i] != kRed) return "a red zone was written, byte " + std::to_string(i);
    for (std::size_t i = 0; i < size(); ++i)
      if (all[kRedZone + i] != host_[i])
        return "byte " + std::to_string(i) + " is " + std::to_string(all[kRedZone + i]) + ", on the CPU " + std::to_string(host_[i]);
    return {};
  }

 private:
  std::vector<unsigned char, AlignedAllocator<unsigned char>> host_, pristine_;
  void* block_ = nullptr;
};

/// A dense array of T, poisoned or given, host and device.
template <class T>
class Pair : public Bytes {
 public:
  Pair(std::initializer_list<std::int64_t> shape, DType dtype = DTypeOf<T>::value) : Pair(shape, std::vector<T>(), dtype) {}
  Pair(std::initializer_list<std::int64_t> shape, const std::vector<T>& values, DType dtype = DTypeOf<T>::value)
      : Bytes(static_cast<std::size_t>(TensorView(nullptr, dtype, shape).numel()) * sizeof(T)), view_(nullptr, dtype, shape) {
    if (!values.empty()) set(values);
  }
  void set(const std::vector<T>& values) {
    if (values.size() * sizeof(T) != size()) throw std::length_error("Pair: values do not fit the shape");
    std::memcpy(host(), values.data(), size());
    upload();
  }
  T* values() { return static_cast<T*>(host()); }
  TensorView view(Where where) {
    TensorView v = view_;
    v.data = where == Where::kHost ? host() : device();
    if (where == Where::kDevice) v.device = {DeviceType::kCuda, 0};
    return v;
  }

 private:
  TensorView view_;
};

/// A stream of its own: not the legacy one, which a capture refuses.
class OwnStream {
 public:
  OwnStream() { cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  operator Stream() const { return {stream_}; }  // NOLINT: implicit on purpose
  cudaStream_t native() const { return stream_; }
  ::testing::AssertionResult synchronize() const {
    const cudaError_t e = cudaStreamSynchronize(stream_);
    return e == cudaSuccess ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << cudaGetErrorString(e);
  }

 private:
  cudaStream_t stream_ = nullptr;
};

/// What `call` enqueues, as a graph; a call that allocates, synchronises or reads device memory fails here.
class Captured {
 public:
  Captured(const OwnStream& stream, const std::function<void(Stream)>& call) : stream_(stream) {
    cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal);
    call(stream);
    ok_ = cudaStreamEndCapture(stream.native(), &graph_) == cudaSuccess && cudaGraphInstantiate(&exec_, graph_, 0) == cudaSuccess;
  }
  ~Captured() {
    if (exec_) cudaGraphExecDestroy(exec_);
    if (graph_) cudaGraphDestroy(graph_);
  }
  /// How many kernels the call launches.
  std::size_t kernels() const {
    std::size_t n = 0, kernels = 0;
    if (!graph_ || cudaGraphGetNodes(graph_, nullptr, &n) != cudaSuccess) return 0;
    std::vector<cudaGraphNode_t> nodes(n);
    cudaGraphGetNodes(graph_, nodes.data(), &n);
    for (cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type{};
      cudaGraphNodeGetType(node, &type);
      kernels += type == cudaGraphNodeTypeKernel;
    }
    return kernels;
  }
  ::testing::AssertionResult replay() const {
    if (!ok_) return ::testing::AssertionFailure() << "the call could not be captured: " << cudaGetErrorString(cudaGetLastError());
    if (cudaGraphLaunch(exec_, stream_.native()) != cudaSuccess) return ::testing::AssertionFailure() << "cudaGraphLaunch";
    return stream_.synchronize();
  }

 private:
  const OwnStream& stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  bool ok_ = false;
};

using Call = std::function<void(Where, Stream)>;

/// `call` on the CPU, on the GPU, and `replays` times by a captured graph, each time from the arrays' pristine content after `change`
/// has drawn new inputs (it sets Pairs). All arrays must be equal to the last byte after each.
inline void on_both(const Call& call, std::initializer_list<Bytes*> arrays, const std::function<void(int)>& change = {}, int replays = 3) {
  const OwnStream stream;
  const auto compare = [&](const char* how, int round) {
    int i = 0;
    for (Bytes* b : arrays) {
      EXPECT_EQ(b->difference(), "") << "array " << i << ", " << how << ", round " << round;
      ++i;
    }
  };
  for (Bytes* b : arrays) b->reset();
  call(Where::kHost, {});
  call(Where::kDevice, stream);
  ASSERT_TRUE(stream.synchronize());
  compare("plain call", 0);
  const Captured graph(stream, [&](Stream s) { call(Where::kDevice, s); });
  for (int round = 1; round <= replays; ++round) {
    if (change) change(round);
    for (Bytes* b : arrays) b->reset();
    call(Where::kHost, {});
    ASSERT_TRUE(graph.replay());
    compare("replay", round);
  }
}

}  // namespace specstate::gpu_test
