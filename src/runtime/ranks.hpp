#pragma once
// The processes of one tensor-parallel run on one host: forked by one parent before anything of CUDA or of a thread pool exists, watched by it until
// they end. They share a block of memory for what the host side has to say (errors, signs of life, NCCL's id) and one file without a name, in which
// the host's KV rows lie once for all of them.
#include <cstdint>
#include <functional>
#include <string>

namespace specstate::runtime {

/// What a process knows of itself among the others.
class Ranks {
 public:
  int rank() const { return rank_; }
  int size() const { return size_; }
  /// A sign of life: a rank that gave one owes the next within the limit of run_ranks.
  void beat();
  /// Why this rank gives up. The first text stays.
  void fail(const std::string& text);
  /// Rank 0's bytes (at most 256), for every rank; waits for rank 0. Every rank calls it as often as the others.
  void from_first(void* bytes, std::size_t count);
  /// `bytes` bytes of the shared file from `offset` on, the same for every rank, zero until somebody writes. Throws Error(kRuntime) where the host has
  /// not so much. unmap takes them back.
  void* map(std::int64_t offset, std::int64_t bytes) const;
  static void unmap(void* address, std::int64_t bytes);

 private:
  friend struct RanksParent;
  struct Block;
  Ranks(Block* block, int file, int rank, int size) : block_(block), file_(file), rank_(rank), size_(size) {}
  Block* block_;
  int file_, rank_, size_;
  std::uint32_t told_ = 0;
};

/// What came of it: the status that `body` of rank 0 returned; where a rank failed, why, and the status that its body returned after fail(), else 1.
struct RanksOutcome {
  int status = 0;
  std::string error;
};
/// `body` in `size` processes of its own. When one fails (an exception, a signal, an exit on the way, no sign of life for `stall_seconds`), the others are killed.
/// Call it before threads are started: a forked process has none of them.
RanksOutcome run_ranks(int size, double stall_seconds, const std::function<int(Ranks&)>& body);

/// Most ranks that a model can be split for: every rank has a head of each kind. Throws Error as load_checkpoint.
int most_ranks(const std::string& folder);

}  // namespace specstate::runtime
