#include <atomic>
#include <string>
#include <thread>

#include "cuda/launch.hpp"
#include "runtime/cuda/memory.hpp"

namespace specstate::runtime::cuda {

namespace {
std::atomic<std::int64_t> made = 0, failing = -1, living = 0;  // ranks of a test are threads
}

std::int64_t Memory::fail_at(std::int64_t n) {
  failing = n < 0 ? -1 : made + n;
  return made;
}

std::int64_t Memory::alive() { return living; }

void* Memory::take(std::int64_t bytes, Kind kind, const char* what, Group* group) {
  const bool pinned = kind != Kind::kDevice, shared = kind == Kind::kShared;
  const std::size_t size = bytes > 0 ? static_cast<std::size_t>(bytes) : 1;
  void* p = shared ? group->share(static_cast<std::int64_t>(size)) : nullptr;
  cudaError_t error = cudaErrorMemoryAllocation;
  if (made++ != failing) {
    error = shared   ? cudaHostRegister(p, size, cudaHostRegisterMapped | cudaHostRegisterPortable)
            : pinned ? cudaHostAlloc(&p, size, cudaHostAllocMapped | cudaHostAllocPortable)
                     : cudaMalloc(&p, size);
  }
  if (error != cudaSuccess) {
    if (shared) group->unshare(p, static_cast<std::int64_t>(size));
    (void)cudaGetLastError();
    throw Error(ErrorKind::kRuntime, std::string("generate: expected ") + std::to_string(size) + " bytes of " +
                                         (pinned ? "pinned host memory" : "device memory") + " for " + what + ", got " +
                                         cudaGetErrorName(error) + " (" + std::to_string(pinned ? pinned_bytes_ : device_bytes_) +
                                         " bytes were taken before).");
  }
  ++living;
  if (shared) {
    // Zero until a rank writes it; whoever comes late must not wipe it.
    shared_.push_back({p, static_cast<std::int64_t>(size), group});
    if (group->rank() == 0) pinned_bytes_ += bytes;
    return p;
  }
  (pinned ? pinned_ : device_).push_back(p);
  (pinned ? pinned_bytes_ : device_bytes_) += bytes;
  SPECSTATE_CUDA_CHECK(cudaMemset(p, 0, size));
  return p;
}

void Memory::copy_in(void* to, const void* from, std::int64_t bytes) {
  SPECSTATE_CUDA_CHECK(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice));
}

void Memory::settle() { SPECSTATE_CUDA_CHECK(cudaDeviceSynchronize()); }

// Errors of a destructor have nowhere to go: whatever caused them was thrown by the call that met it.
Memory::~Memory() {
  living -= static_cast<std::int64_t>(device_.size() + pinned_.size() + shared_.size());
  for (const Shared& s : shared_) (void)cudaHostUnregister(s.address), s.group->unshare(s.address, s.bytes);
  for (void* p : device_) (void)cudaFree(p);
  for (void* p : pinned_) (void)cudaFreeHost(p);
}

TensorView on_gpu(const void* data, DType dtype, std::initializer_list<std::int64_t> sizes) {
  return TensorView(const_cast<void*>(data), dtype, sizes, gpu());
}
TensorView pinned_view(const void* data, DType dtype, std::initializer_list<std::int64_t> sizes) {
  return TensorView(const_cast<void*>(data), dtype, sizes, {DeviceType::kCpu, 0, true});
}
void fill(void* to, int value, std::int64_t bytes, Stream stream) {
  SPECSTATE_CUDA_CHECK(cudaMemsetAsync(to, value, static_cast<std::size_t>(bytes), specstate::cuda::native(stream)));
}
void copy(void* to, const void* from, std::int64_t bytes, Stream stream) {
  SPECSTATE_CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, specstate::cuda::native(stream)));
}

Queue::Queue() { SPECSTATE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
Queue::~Queue() {
  (void)cudaStreamSynchronize(stream_);  // memory that its work uses is freed after it
  (void)cudaStreamDestroy(stream_);
}
void Queue::wait() const { SPECSTATE_CUDA_CHECK(cudaStreamSynchronize(stream_)); }

Event::Event(bool timing) { SPECSTATE_CUDA_CHECK(cudaEventCreateWithFlags(&event_, timing ? cudaEventDefault : cudaEventDisableTiming)); }
Event::~Event() {
  if (event_) (void)cudaEventDestroy(event_);
}
void Event::record(const Queue& queue) const { SPECSTATE_CUDA_CHECK(cudaEventRecord(event_, queue.native())); }
void Event::order(const Queue& first, const Queue& then) const {
  record(first);
  SPECSTATE_CUDA_CHECK(cudaStreamWaitEvent(then.native(), event_, 0));
}
void Event::wait() const { SPECSTATE_CUDA_CHECK(cudaEventSynchronize(event_)); }
float Event::since(const Event& begin) const {
  float ms = 0;
  SPECSTATE_CUDA_CHECK(cudaEventElapsedTime(&ms, begin.event_, event_));
  return ms;
}

namespace {
std::atomic<bool> all_enqueued = true;
}

void Trace::start(const Queue& queue) {
  marks_.clear();
  all_enqueued = false;
  SPECSTATE_CUDA_CHECK(cudaLaunchHostFunc(
      queue.native(),
      [](void*) {
        while (!all_enqueued) std::this_thread::yield();
      },
      nullptr));
  queue_ = &queue;
  mark("start");
}
void Trace::mark(const std::string& name) {
  if (!queue_) return;
  marks_.emplace_back(name, Event(true));
  marks_.back().second.record(*queue_);
}
void Trace::stop() {
  queue_ = nullptr;
  all_enqueued = true;
}
std::string Trace::json() const {
  std::string text = "{\"displayTimeUnit\": \"ns\", \"traceEvents\": [";
  if (!marks_.empty()) marks_.back().second.wait();
  for (std::size_t i = 1; i < marks_.size(); ++i) {
    const auto& [name, event] = marks_[i];
    const std::string family = name.substr(0, name.find(':'));
    text += std::string(i > 1 ? "," : "") + "\n {\"name\": \"" + name + "\", \"cat\": \"" + family +
            "\", \"ph\": \"X\", \"pid\": 0, \"tid\": \"" + family +
            "\", \"ts\": " + std::to_string(1e3 * marks_[i - 1].second.since(marks_[0].second)) +
            ", \"dur\": " + std::to_string(1e3 * event.since(marks_[i - 1].second)) + "}";
  }
  return text + "\n]}\n";
}

}  // namespace specstate::runtime::cuda
