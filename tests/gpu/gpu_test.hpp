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
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
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

/// Memory of the tests, on the device or pinned: cut from one piece, since each cudaMalloc and cudaFree waits for the GPU, which other tests
/// share. Where a tool watches the ends of every allocation they are real ones.
template <bool kPinned>
class Arena {
 public:
  static Arena& get() {
    static Arena a;
    return a;
  }
  unsigned char* take(std::size_t bytes) {
    const std::size_t cut = (bytes + 255) / 256 * 256;
    if (!small() && !base_) base_ = allocate(kSize);
    if (!base_ || used_ + cut > kSize) return allocate(std::max<std::size_t>(bytes, 1));
    used_ += cut, ++live_;
    return base_ + used_ - cut;
  }
  bool owns(const unsigned char* p) const { return base_ && p >= base_ && p < base_ + kSize; }
  void give(unsigned char* p, std::size_t bytes) {
    if (!owns(p))
      kPinned ? cudaFreeHost(p) : cudaFree(p);
    else if (--live_ == 0)
      used_ = 0;
    else if (p + (bytes + 255) / 256 * 256 == base_ + used_)  // the last one
      used_ = static_cast<std::size_t>(p - base_);
  }

 private:
  static constexpr std::size_t kSize = std::size_t{1} << (kPinned ? 27 : 31);
  static unsigned char* allocate(std::size_t bytes) {
    void* p = nullptr;
    if ((kPinned ? cudaMallocHost(&p, bytes) : cudaMalloc(&p, bytes)) == cudaSuccess) return static_cast<unsigned char*>(p);
    cudaGetLastError();
    return nullptr;
  }
  unsigned char* base_ = nullptr;
  std::size_t used_ = 0, live_ = 0;
};

/// Pinned memory through which arrays cross without a wait. Where many programs share a GPU a wait takes a turn of all of them, milliseconds: what
/// goes up is enqueued in the legacy stream, which the tests' streams and their graphs come after, and what comes down (Seen) waits once for all.
class Crossing {
 public:
  static Crossing& get() {
    static Crossing c;
    return c;
  }
  void up(void* device, const void* host, std::size_t bytes) {
    for (std::size_t done = 0; done < bytes;) {
      if (used_ == up_.size) wait(), grow(up_, kUp);
      const std::size_t n = std::min(bytes - done, up_.size - used_);
      std::memcpy(up_.memory + used_, static_cast<const char*>(host) + done, n);
      cudaMemcpyAsync(static_cast<char*>(device) + done, up_.memory + used_, n, cudaMemcpyHostToDevice, nullptr);
      used_ += n, done += n;
    }
  }
  unsigned char* down(std::size_t bytes) {
    grow(down_, bytes);
    return down_.memory;
  }
  cudaError_t wait() {
    used_ = 0;
    return cudaDeviceSynchronize();
  }

 private:
  static constexpr std::size_t kUp = std::size_t{16} << 20;
  struct Pinned {
    unsigned char* memory = nullptr;
    std::size_t size = 0;
  };
  static void grow(Pinned& p, std::size_t bytes) {
    if (bytes <= p.size) return;
    cudaFreeHost(p.memory);
    if (cudaMallocHost(&p.memory, bytes) != cudaSuccess) throw std::bad_alloc();
    p.size = bytes;
  }
  Pinned up_, down_;
  std::size_t used_ = 0;
};

/// An array of raw bytes in host and device memory. The device's copy lies between red zones.
class Bytes {
 public:
  static constexpr std::size_t kRedZone = 4096;
  static constexpr unsigned char kPoison = 0xA5, kRed = 0x5C;

  explicit Bytes(std::size_t n) : host_(n, kPoison), block_(Arena<false>::get().take(n + 2 * kRedZone)) {
    if (!block_) throw std::bad_alloc();
    cudaMemsetAsync(block_, kRed, n + 2 * kRedZone, nullptr);
    upload();
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  virtual ~Bytes() { Arena<false>::get().give(block_, size() + 2 * kRedZone); }

  void* host() { return host_.data(); }
  const void* host() const { return host_.data(); }
  void* device() const { return block_ + kRedZone; }
  std::size_t size() const { return host_.size(); }
  /// What is in the host's copy now becomes the content of both, and what reset() restores.
  void upload() {
    pristine_ = host_;
    send();
  }
  void reset() {
    host_ = pristine_;
    send();
  }
  std::vector<unsigned char> download() const;
  /// Empty if the device's copy equals the host's and the red zones are whole, else what differs first.
  std::string difference() const;

 private:
  friend class Seen;
  void send() { Crossing::get().up(device(), host_.data(), host_.size()); }
  std::vector<unsigned char, AlignedAllocator<unsigned char>> host_, pristine_;
  unsigned char* block_ = nullptr;
};

/// What the device holds of several arrays, fetched with one wait, which is for everything that was enqueued before. Valid until another one is made.
class Seen {
 public:
  explicit Seen(const std::vector<const Bytes*>& arrays) {
    std::size_t bytes = 0;
    for (const Bytes* b : arrays) bytes += b->size() + 2 * Bytes::kRedZone;
    unsigned char* at = Crossing::get().down(bytes);
    for (const Bytes* b : arrays) {
      const std::size_t n = b->size() + 2 * Bytes::kRedZone;
      places_.emplace_back(b, at);
      cudaMemcpyAsync(at, b->block_, n, cudaMemcpyDeviceToHost, nullptr);
      at += n;
    }
    status_ = Crossing::get().wait();
  }
  const unsigned char* of(const Bytes& b) const {
    for (const auto& [array, at] : places_)
      if (array == &b) return at + Bytes::kRedZone;
    throw std::out_of_range("Seen: an array that was not fetched");
  }
  std::string difference(const Bytes& b) const {
    if (status_ != cudaSuccess) return std::string("the GPU: ") + cudaGetErrorString(status_);
    const auto* host = static_cast<const unsigned char*>(b.host());
    const unsigned char *at = of(b), *front = at - Bytes::kRedZone, *back = at + b.size();
    for (std::size_t i = 0; i < Bytes::kRedZone; ++i)
      if (front[i] != Bytes::kRed || back[i] != Bytes::kRed) return "a red zone was written, byte " + std::to_string(i);
    if (std::memcmp(at, host, b.size()) == 0) return {};
    std::size_t i = 0;
    while (at[i] == host[i]) ++i;
    return "byte " + std::to_string(i) + " is " + std::to_string(at[i]) + ", on the CPU " + std::to_string(host[i]);
  }

 private:
  std::vector<std::pair<const Bytes*, unsigned char*>> places_;
  cudaError_t status_ = cudaSuccess;
};

inline std::vector<unsigned char> Bytes::download() const {
  const Seen seen({this});
  return {seen.of(*this), seen.of(*this) + size()};
}
inline std::string Bytes::difference() const { return Seen({this}).difference(*this); }

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

/// A stream of its own: not the legacy one, which a capture refuses, but behind it (Crossing).
class OwnStream {
 public:
  OwnStream() { cudaStreamCreate(&stream_); }
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
  std::size_t kernels() const { return blocks().size(); }
  /// And of how many blocks each. (The driver's question: another copy of the runtime does not know the library's kernels.)
  std::vector<std::int64_t> blocks() const {
    static const auto parameters = reinterpret_cast<int (*)(cudaGraphNode_t, CUDA_KERNEL_NODE_PARAMS_v2*)>(
        dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGraphKernelNodeGetParams_v2"));
    std::size_t n = 0;
    if (!graph_ || cudaGraphGetNodes(graph_, nullptr, &n) != cudaSuccess) return {};
    std::vector<cudaGraphNode_t> nodes(n);
    cudaGraphGetNodes(graph_, nodes.data(), &n);
    std::vector<std::int64_t> blocks;
    for (cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type{};
      cudaGraphNodeGetType(node, &type);
      if (type != cudaGraphNodeTypeKernel) continue;
      CUDA_KERNEL_NODE_PARAMS_v2 p = {};
      blocks.push_back(parameters(node, &p) == 0 ? std::int64_t{p.gridDimX} * p.gridDimY * p.gridDimZ : -1);
    }
    return blocks;
  }
  ::testing::AssertionResult launch() const {
    if (!ok_) return ::testing::AssertionFailure() << "the call could not be captured: " << cudaGetErrorString(cudaGetLastError());
    if (cudaGraphLaunch(exec_, stream_.native()) != cudaSuccess) return ::testing::AssertionFailure() << "cudaGraphLaunch";
    return ::testing::AssertionSuccess();
  }
  ::testing::AssertionResult replay() const {
    const auto launched = launch();
    return launched ? stream_.synchronize() : launched;
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
inline void on_both(const Call& call, std::initializer_list<Bytes*> arrays, const std::function<void(int)>& change = {},
                    int replays = small() ? 1 : 3) {
  static const OwnStream stream;
  const auto compare = [&](const char* how, int round) {
    const Seen seen({arrays.begin(), arrays.end()});
    int i = 0;
    for (const Bytes* b : arrays) {
      EXPECT_EQ(seen.difference(*b), "") << "array " << i << ", " << how << ", round " << round;
      ++i;
    }
  };
  for (Bytes* b : arrays) b->reset();
  call(Where::kDevice, stream);
  call(Where::kHost, {});  // meanwhile
  compare("plain call", 0);
  const Captured graph(stream, [&](Stream s) { call(Where::kDevice, s); });
  for (int round = 1; round <= replays; ++round) {
    if (change) change(round);
    for (Bytes* b : arrays) b->reset();
    ASSERT_TRUE(graph.launch());
    call(Where::kHost, {});
    compare("replay", round);
  }
}

}  // namespace specstate::gpu_test
