// One fault for each sanitizer, to prove that the sanitized builds would see one: every run of this program must end in a report.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/parallel.hpp"
#include "thread_pool.hpp"

int main(int argc, char** argv) {
  const char* kind = argc == 2 ? argv[1] : "";
  if (std::strcmp(kind, "race") == 0) {  // two pieces of one parallel_for write one variable
    specstate::testing::ThreadPool pool(2);
    specstate::testing::InjectedExecutor injected(pool);
    std::int64_t sum = 0;
    specstate::cpu::parallel_for(1 << 16, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) sum += i;
    });
    std::printf("%lld\n", static_cast<long long>(sum));
  } else if (std::strcmp(kind, "overflow") == 0) {  // one element past a buffer
    std::vector<float> row(static_cast<std::size_t>(argc) + 6);
    std::printf("%g\n", row.data()[row.size()]);
  } else if (std::strcmp(kind, "undefined") == 0) {  // a product of indices in 32 bits
    std::int32_t slot = std::numeric_limits<std::int32_t>::max() - argc, stride = 3;
    std::printf("%d\n", slot * stride);
  } else {
    std::fprintf(stderr, "usage: planted_fault race|overflow|undefined\n");
    return 2;
  }
  return 0;  // reached without a report: the sanitizer is not at work
}
