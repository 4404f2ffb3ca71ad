#include "runtime/ranks.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <new>
#include <thread>
#include <vector>

#include "core/match.hpp"
#include "runtime/config.hpp"
#include "runtime/file.hpp"
#include "specstate/error.hpp"

namespace specstate::runtime {

namespace {
constexpr int kMostRanks = 64;
using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }
void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }
}  // namespace

/// Shared by all processes; atomics without locks are the same in each.
struct Ranks::Block {
  struct Rank {
    std::atomic<std::uint64_t> beats{0};
    std::atomic<int> ended{0}, status{0}, failed{0};  // the body returned; so; `error` is complete
    char error[4096] = {};
  } ranks[kMostRanks];
  std::atomic<std::uint32_t> told{0};
  char bytes[2][256] = {};  // in turns: a rank may still read the last ones
};

void Ranks::beat() { block_->ranks[rank_].beats.fetch_add(1, std::memory_order_relaxed); }

void Ranks::fail(const std::string& text) {
  Block::Rank& me = block_->ranks[rank_];
  if (me.failed) return;
  const std::size_t n = std::min(text.size(), sizeof me.error - 1);
  std::memcpy(me.error, text.data(), n);
  me.error[n] = 0;
  me.failed.store(1, std::memory_order_release);
}

void Ranks::from_first(void* bytes, std::size_t count) {
  const std::uint32_t turn = told_++;
  if (rank_ == 0) {
    std::memcpy(block_->bytes[turn % 2], bytes, count);
    block_->told.store(turn + 1, std::memory_order_release);
    return;
  }
  while (block_->told.load(std::memory_order_acquire) < turn + 1) nap();  // the parent ends this if rank 0 is gone
  std::memcpy(bytes, block_->bytes[turn % 2], count);
}

void* Ranks::map(std::int64_t offset, std::int64_t bytes) const {
  // Takes the pages at once, so that there is an error here and no signal at the first touch; never makes the file shorter, so ranks may come in any order.
  int error = 0;
  do error = ::posix_fallocate(file_, offset, bytes);
  while (error == EINTR);
  void* const p = error ? MAP_FAILED : ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file_, offset);
  if (p == MAP_FAILED)
    core::throw_runtime(
        fmt::format("generate: expected {} bytes of host memory that ranks share, got '{}'.", bytes, std::strerror(error ? error : errno)));
  return p;
}
void Ranks::unmap(void* address, std::int64_t bytes) { ::munmap(address, static_cast<std::size_t>(bytes)); }

/// The other side of the block.
struct RanksParent {
  Ranks::Block* block = nullptr;
  int file = -1, size = 0;
  std::vector<pid_t> pids;  // 0: was waited for

  explicit RanksParent(int n) : size(n), pids(static_cast<std::size_t>(n), 0) {
    void* const p = ::mmap(nullptr, sizeof(Ranks::Block), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) core::throw_runtime(fmt::format("ranks: no memory to share: {}.", std::strerror(errno)));
    block = new (p) Ranks::Block;
    file = ::memfd_create("specstate-ranks", MFD_CLOEXEC);
    if (file < 0) {
      const int error = errno;
      ::munmap(p, sizeof(Ranks::Block));
      core::throw_runtime(fmt::format("ranks: no file to share: {}.", std::strerror(error)));
    }
  }
  ~RanksParent() {
    kill_all();
    ::close(file);
    ::munmap(block, sizeof(Ranks::Block));
  }
  RanksParent(const RanksParent&) = delete;
  RanksParent& operator=(const RanksParent&) = delete;

  void kill_all() {
    for (const pid_t pid : pids)
      if (pid > 0) ::kill(pid, SIGKILL);
    for (pid_t& pid : pids)
      if (pid > 0) wait_for(pid, 0), pid = 0;
  }
  static int wait_for(pid_t pid, int flags, int* status = nullptr) {
    int ignored = 0, got = 0;
    do got = ::waitpid(pid, status ? status : &ignored, flags);
    while (got < 0 && errno == EINTR);
    return got;
  }
  void start(const std::function<int(Ranks&)>& body) {
    std::fflush(nullptr);  // or every process would write what is waiting
    const pid_t parent = ::getpid();
    for (int r = 0; r < size; ++r) {
      const pid_t pid = ::fork();
      if (pid < 0) core::throw_runtime(fmt::format("ranks: a process for rank {} could not be made: {}.", r, std::strerror(errno)));
      if (pid > 0) {
        pids[static_cast<std::size_t>(r)] = pid;
        continue;
      }
      // Ranks never outlive their parent, however it ends.
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      Ranks ranks(block, file, r, size);
      int status = 1;
      try {
        status = body(ranks);
        std::fflush(nullptr);
        block->ranks[r].status = status;
        block->ranks[r].ended.store(1, std::memory_order_release);
      } catch (const std::exception& e) {
        ranks.fail(e.what());
      } catch (...) {
        ranks.fail("an unknown exception");
      }
      std::fflush(nullptr);
      ::_exit(status);
    }
  }
  /// What rank 0 returned, or what a rank that failed returned nevertheless.
  int status(bool failed) const {
    if (!failed) return block->ranks[0].status;
    for (int r = 0; r < size; ++r)
      if (block->ranks[r].failed && block->ranks[r].ended) return block->ranks[r].status;
    return 1;
  }
  /// Why a process that was waited for did not do its work; "" if it did.
  std::string reason(int r, int status) const {
    const Ranks::Block::Rank& rank = block->ranks[r];
    if (rank.failed.load(std::memory_order_acquire)) return rank.error;
    if (WIFSIGNALED(status))
      return fmt::format("rank {} of {} was ended by signal {} ({}).", r, size, WTERMSIG(status), ::strsignal(WTERMSIG(status)));
    if (!rank.ended.load(std::memory_order_acquire))
      return fmt::format("rank {} of {} ended with status {} before its work was done.", r, size, WEXITSTATUS(status));
    return "";
  }
};

RanksOutcome run_ranks(int size, double stall_seconds, const std::function<int(Ranks&)>& body) {
  if (size < 1 || size > kMostRanks) core::throw_value(fmt::format("ranks: expected 1 to {}, got {}.", kMostRanks, size));
  RanksParent parent(size);
  parent.start(body);
  struct Seen {
    std::uint64_t beats = 0;
    Clock::time_point at = Clock::now();
  };
  std::vector<Seen> seen(static_cast<std::size_t>(size));
  std::string error;
  // A rank whose peer died may fail of that: what a signal did says more than that, so others that end at the same time are looked at.
  bool by_signal = false;
  Clock::time_point failed_at;
  for (;;) {
    int running = 0;
    for (int r = 0; r < size; ++r) {
      pid_t& pid = parent.pids[static_cast<std::size_t>(r)];
      if (pid == 0) continue;
      int status = 0;
      if (RanksParent::wait_for(pid, WNOHANG, &status) == pid) {
        pid = 0;
        const std::string why = parent.reason(r, status);
        if (!why.empty() && (error.empty() || (WIFSIGNALED(status) && !by_signal))) {
          if (error.empty()) failed_at = Clock::now();
          error = why, by_signal = WIFSIGNALED(status);
        }
        continue;
      }
      ++running;
      Seen& s = seen[static_cast<std::size_t>(r)];
      const std::uint64_t beats = parent.block->ranks[r].beats.load(std::memory_order_relaxed);
      if (beats != s.beats) s = {beats, Clock::now()};
      if (error.empty() && beats > 0 && seconds_since(s.at) > stall_seconds)
        error = fmt::format("rank {} of {} made no progress for {:.0f} s; all ranks were ended.", r, size, stall_seconds),
        failed_at = Clock::now();
    }
    if (running == 0) break;
    if (!error.empty() && seconds_since(failed_at) > 0.2) break;
    nap();
  }
  parent.kill_all();
  return {parent.status(!error.empty()), error};
}

int most_ranks(const std::string& folder) {
  const std::string file = (std::filesystem::path(folder) / "config.json").string();
  const TargetConfig config = parse_target_config(read_text(file, std::size_t{1} << 20), file);
  const bool kda = std::find(config.is_kda.begin(), config.is_kda.end(), true) != config.is_kda.end();
  return std::min(kMostRanks, kda ? std::min(config.kda_heads, config.mla_heads) : config.mla_heads);
}

}  // namespace specstate::runtime
