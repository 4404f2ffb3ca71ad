#pragma once

namespace specstate {

/// Where CUDA work is enqueued: a `cudaStream_t` as an opaque pointer. The CPU backend ignores it and returns when done.
struct Stream {
  void* handle = nullptr;
};

}  // namespace specstate
