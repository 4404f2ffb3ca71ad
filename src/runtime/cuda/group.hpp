#pragma once
// The ranks of a tensor-parallel run, each with a GPU of its own, as the engine sees them.
//
// Nothing that ranks compute in parts is ever added up: a rank computes some outputs of a product, or some heads, completely, in the one order of sums,
// and all ranks get all of them by an all-gather. So the bits are one card's, for any number of ranks; an all-reduce of partial products would save one
// of two exchanges of a layer and change the order of every sum. What is not split (norms, indexer, selection, swaps, acceptance, sampling) every rank
// computes from the same bits, so every rank knows every token without being told.
#include <cstdint>

#include "specstate/stream.hpp"

namespace specstate::runtime::cuda {

/// n things among ranks: rank r has those from r n / size to (r + 1) n / size, so 3 heads are 1 and 2.
struct Part {
  std::int64_t begin = 0, count = 0;
};

class Group {
 public:
  Group(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  int rank() const { return rank_; }
  int size() const { return size_; }
  Part part_of(std::int64_t n) const { return {rank_ * n / size_, (rank_ + 1) * n / size_ - rank_ * n / size_}; }
  std::int64_t largest_part_of(std::int64_t n) const { return (n + size_ - 1) / size_; }

  /// Enqueued: to [size, bytes] = the `from` [bytes] of every rank. Both in device memory.
  virtual void all_gather(const void* from, void* to, std::int64_t bytes, Stream stream) = 0;
  /// Host memory that all ranks have in common: the n-th call of each gives the same. Not pinned yet.
  virtual void* share(std::int64_t bytes) = 0;
  virtual void unshare(void* address, std::int64_t bytes) noexcept = 0;
  /// A sign of life, now and then.
  virtual void beat() = 0;
  /// Nothing that was enqueued waits for another rank any more.
  virtual void abort() noexcept = 0;

 private:
  int rank_, size_;
};

/// The whole and its only part where there is no group.
inline Part part_of(const Group* group, std::int64_t n) { return group ? group->part_of(n) : Part{0, n}; }

/// A group and room for what it exchanges: `part` [most], `parts` [size, most] floats.
struct Exchange {
  Group* group = nullptr;
  float *part = nullptr, *parts = nullptr;
  std::int64_t most = 0;
};

}  // namespace specstate::runtime::cuda
