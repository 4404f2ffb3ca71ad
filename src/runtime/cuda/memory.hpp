#pragma once
// What a run on the GPU allocates, the graphs it replays, and where both can fail. Only `Memory` allocates, all of it before the first step.
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/cuda/group.hpp"
#include "specstate/stream.hpp"
#include "specstate/tensor.hpp"

namespace specstate::runtime::cuda {

/// Zeroed memory that is freed together. An allocation that fails throws Error(kRuntime) saying what it was for.
class Memory {
 public:
  Memory() = default;
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <class T>
  T* device(std::int64_t count, const char* what) {
    return static_cast<T*>(take(count * static_cast<std::int64_t>(sizeof(T)), Kind::kDevice, what));
  }
  /// Pinned memory of the host that the GPU reads and writes.
  template <class T>
  T* pinned(std::int64_t count, const char* what) {
    return static_cast<T*>(take(count * static_cast<std::int64_t>(sizeof(T)), Kind::kPinned, what));
  }
  /// The same, one for all ranks of a group; pinned_bytes counts it on its first rank only. (No group: pinned.)
  template <class T>
  T* shared(Group* group, std::int64_t count, const char* what) {
    return static_cast<T*>(take(count * static_cast<std::int64_t>(sizeof(T)), group ? Kind::kShared : Kind::kPinned, what, group));
  }
  template <class T>
  T* upload(const T* values, std::int64_t count, const char* what) {
    T* to = device<T>(count, what);
    copy_in(to, values, count * static_cast<std::int64_t>(sizeof(T)));
    return to;
  }
  /// Until then what was zeroed or uploaded may still be on its way: a stream of ours waits for nothing of that.
  static void settle();
  static void copy_in(void* to, const void* from, std::int64_t bytes);
  std::int64_t device_bytes() const { return device_bytes_; }
  std::int64_t pinned_bytes() const { return pinned_bytes_; }

  /// For tests: the n-th allocation from now on (0: the next) fails as if there were no memory; < 0: none. Returns how many were made so far.
  static std::int64_t fail_at(std::int64_t n);
  /// For tests: allocations of this process that were not freed yet.
  static std::int64_t alive();

 private:
  enum class Kind : std::uint8_t { kDevice, kPinned, kShared };
  void* take(std::int64_t bytes, Kind kind, const char* what, Group* group = nullptr);

  std::vector<void*> device_, pinned_;
  struct Shared {
    void* address;
    std::int64_t bytes;
    Group* group;
  };
  std::vector<Shared> shared_;
  std::int64_t device_bytes_ = 0, pinned_bytes_ = 0;
};

/// The GPU that a run is on: the current one of the thread.
Device gpu();
/// Dense views of its memory, and of pinned memory.
TensorView on_gpu(const void* data, DType dtype, std::initializer_list<std::int64_t> sizes);
TensorView pinned_view(const void* data, DType dtype, std::initializer_list<std::int64_t> sizes);
/// Enqueued: `bytes` bytes of `value`.
void fill(void* to, int value, std::int64_t bytes, Stream stream);
/// Enqueued: a copy between any two places, host memory pinned.
void copy(void* to, const void* from, std::int64_t bytes, Stream stream);

/// A stream of our own, and an event behind each of the last steps.
class Queue {
 public:
  Queue();
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  Stream stream() const { return {stream_}; }
  cudaStream_t native() const { return stream_; }
  void wait() const;

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  explicit Event(bool timing = false);
  ~Event();
  Event(Event&& other) noexcept : event_(other.event_) { other.event_ = nullptr; }
  Event(const Event&) = delete;
  void record(const Queue& queue) const;
  void wait() const;
  /// What is enqueued in `then` from now on waits for what `first` has now; nothing of the host's.
  void order(const Queue& first, const Queue& then) const;
  /// Milliseconds from `begin` to this one; both have happened.
  float since(const Event& begin) const;

 private:
  cudaEvent_t event_ = nullptr;
};

/// A second queue for what the first one need not wait for at once. Where they are not `apart` (ranks, whose exchanges have one order; a trace,
/// whose times are of one operation after another) it is the first one, and fork and join do nothing.
class Beside {
 public:
  explicit Beside(const Queue& main) : main_(main) {}
  void set_apart(bool apart) { apart_ = apart; }
  Stream stream() const { return apart_ ? side_.stream() : main_.stream(); }
  /// What is enqueued here from now on comes after what the first queue has now.
  void fork() const {
    if (apart_) event_.order(main_, side_);
  }
  /// What is enqueued there from now on comes after what this one has now.
  void join() const {
    if (apart_) event_.order(side_, main_);
  }

 private:
  const Queue& main_;
  Queue side_;
  Event event_;
  bool apart_ = false;
};

/// Work that was captured once.
class Graph {
 public:
  Graph(const Queue& queue, const std::function<void()>& enqueue);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(const Queue& queue) const;

 private:
  cudaGraphExec_t exec_ = nullptr;
};

/// Where the time of one step goes: an event behind each operation while it is on. `mark` does nothing otherwise, so it stands in the code
/// of the step itself. The stream does nothing until everything is enqueued, or the times would be those of launches.
class Trace {
 public:
  ~Trace() { stop(); }
  void start(const Queue& queue);
  /// What was enqueued since the mark before is called so.
  void mark(const std::string& name);
  void stop();
  bool on() const { return queue_ != nullptr; }
  /// Chrome's trace format (chrome://tracing, Perfetto), once stopped. Waits for the last event.
  std::string json() const;

 private:
  const Queue* queue_ = nullptr;
  std::vector<std::pair<std::string, Event>> marks_;
};

}  // namespace specstate::runtime::cuda
