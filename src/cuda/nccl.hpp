#pragma once
// The one collective that is used, of a library that is loaded when a second GPU is: nothing of NCCL is linked or included. What is declared here is its
// stable C interface (since 2.0).
#include <cstddef>
#include <cstdint>
#include <string>

#include "specstate/stream.hpp"

namespace specstate::cuda {

class Nccl {
 public:
  struct Id {
    char bytes[128];
  };
  /// Names what was not found; "" where the library is here.
  static std::string missing();
  /// For the first rank; the others are told.
  static Id make_id();
  /// Waits for all `size` ranks. The current device is this rank's. NVLink multicast stays off, whatever the environment says.
  Nccl(const Id& id, int rank, int size);
  ~Nccl();
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;
  /// Enqueued, and capturable: to [size, bytes] = the `from` [bytes] of every rank.
  void all_gather(const void* from, void* to, std::int64_t bytes, Stream stream) const;
  /// Kernels that wait for other ranks end; nothing else can be done with this object afterwards.
  void abort() noexcept;

 private:
  void* comm_ = nullptr;
};

}  // namespace specstate::cuda
