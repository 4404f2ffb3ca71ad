// Processes that a parent makes and watches (runtime/ranks.hpp): what they share, and every way in which one can go.
#include "runtime/ranks.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "specstate/error.hpp"

namespace specstate::runtime {
namespace {

using std::chrono::steady_clock;

double seconds_since(steady_clock::time_point t) { return std::chrono::duration<double>(steady_clock::now() - t).count(); }
[[noreturn]] void sleep_for_ever() {
  for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
}

TEST(Ranks, ShareAFileAndWhatTheFirstSays) {
  const RanksOutcome o = run_ranks(3, 60, [](Ranks& r) {
    constexpr std::int64_t kOffset = 1 << 20, kBytes = 12345;
    char* const p = static_cast<char*>(r.map(kOffset, kBytes));
    std::uint64_t word = r.rank() == 0 ? 0x1234567890ABCDEF : 0;
    if (r.rank() == 0) p[kBytes - 1] = 42;  // before it says anything
    for (int i = 0; i < 2; ++i, ++word) {
      r.from_first(&word, sizeof word);
      if (word != 0x1234567890ABCDEF + static_cast<std::uint64_t>(i)) return 10;
    }
    const bool ok = p[kBytes - 1] == 42 && p[0] == 0 && r.size() == 3;
    Ranks::unmap(p, kBytes);
    return ok ? 5 : 11;
  });
  EXPECT_EQ(o.error, "");
  EXPECT_EQ(o.status, 5);
}

TEST(Ranks, AnExceptionOfOneEndsAll) {
  const auto begin = steady_clock::now();
  const RanksOutcome o = run_ranks(3, 60, [](Ranks& r) -> int {
    if (r.rank() == 2) throw std::runtime_error("no memory for weights");
    sleep_for_ever();
  });
  EXPECT_EQ(o.error, "no memory for weights");
  EXPECT_EQ(o.status, 1);
  EXPECT_LT(seconds_since(begin), 30);
}

TEST(Ranks, ASignalAnExitAndSilenceAreToldApart) {
  EXPECT_EQ(run_ranks(2, 60,
                      [](Ranks& r) -> int {
                        if (r.rank() == 1) ::raise(SIGKILL);
                        sleep_for_ever();
                      })
                .error,
            "rank 1 of 2 was ended by signal 9 (Killed).");
  EXPECT_EQ(run_ranks(2, 60,
                      [](Ranks& r) -> int {
                        if (r.rank() == 0) ::_exit(7);
                        sleep_for_ever();
                      })
                .error,
            "rank 0 of 2 ended with status 7 before its work was done.");
  EXPECT_EQ(run_ranks(2, 1,
                      [](Ranks& r) -> int {
                        r.beat();
                        if (r.rank() == 1) sleep_for_ever();
                        for (;;) r.beat(), std::this_thread::sleep_for(std::chrono::milliseconds(20));
                      })
                .error,
            "rank 1 of 2 made no progress for 1 s; all ranks were ended.");
}

TEST(Ranks, TheSignalIsTheReasonAndNotWhatItBroke) {
  const RanksOutcome o = run_ranks(2, 60, [](Ranks& r) -> int {
    if (r.rank() == 0) throw std::runtime_error("the other rank is gone");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ::raise(SIGKILL);
    return 0;
  });
  EXPECT_EQ(o.error, "rank 1 of 2 was ended by signal 9 (Killed).");
}

TEST(Ranks, AStatusWithoutAnErrorIsTheFirstOnes) {
  const RanksOutcome o = run_ranks(2, 60, [](Ranks& r) { return 3 + r.rank(); });
  EXPECT_EQ(o.error, "");
  EXPECT_EQ(o.status, 3);
  const RanksOutcome refused = run_ranks(2, 60, [](Ranks& r) {
    r.fail("a bad option");
    return 2;
  });
  EXPECT_EQ(refused.error, "a bad option");
  EXPECT_EQ(refused.status, 2);
}

TEST(Ranks, MoreHostMemoryThanIsAllowedIsAnError) {
  const RanksOutcome o = run_ranks(1, 60, [](Ranks& r) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 20, 1 << 20};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 9;
    r.map(0, 2 << 20);
    return 0;
  });
  EXPECT_EQ(o.error, "generate: expected 2097152 bytes of host memory that ranks share, got 'File too large'.");
}

}  // namespace
}  // namespace specstate::runtime
