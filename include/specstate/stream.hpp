#pragma once

namespace specstate {

/// Where CUDA work is enqueued: a `cudaStream_t` as an opaque pointer, of the device that the tensors are on (null: its default
/// stream). A CUDA call returns when its work is enqueued: what it reads must stay as it is until the stream has done it. The CPU
/// backend ignores the stream and returns when done.
struct Stream {
  void* handle = nullptr;
};

}  // namespace specstate
