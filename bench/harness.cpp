#include "bench/harness.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>

#include "bench/ceilings.hpp"
#include "cpu/parallel.hpp"
#include "cpu/simd_target.hpp"

namespace specstate::bench {

namespace {

using Clock = std::chrono::steady_clock;
double us_since(Clock::time_point t) { return std::chrono::duration<double, std::micro>(Clock::now() - t).count(); }

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

double least(std::vector<double> x) { return *std::min_element(x.begin(), x.end()); }

/// Memory far larger than any cache here, touched once.
std::vector<char>& large_memory() {
  static std::vector<char> memory(std::size_t{256} << 20, 1);
  return memory;
}

void read_on_all_threads(const char* memory, std::int64_t bytes, bool many_streams) {
  constexpr std::int64_t kLine = 64;
  on_all_threads(bytes / kLine,
                 [&](std::int64_t begin, std::int64_t end) { read_loop(memory + begin * kLine, (end - begin) * kLine, many_streams); });
}

std::map<std::string, Run>& registry() {
  static std::map<std::string, Run> all;
  return all;
}

std::map<std::string, Run>& gpu_registry() {
  static std::map<std::string, Run> all;
  return all;
}

}  // namespace

void on_all_threads(std::int64_t n, const std::function<void(std::int64_t, std::int64_t)>& body) {
  const std::int64_t pieces = std::int64_t{8} * executor().concurrency();
  cpu::parallel_for(pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    if (n * begin / pieces < n * end / pieces) body(n * begin / pieces, n * end / pieces);
  });
}

int Report::threads() const { return executor().concurrency(); }

double Report::time(const std::function<void()>& call) const { return take(call, median); }
double Report::best_time(const std::function<void()>& call) const { return take(call, least); }

double Report::take(const std::function<void()>& call, double (*summary)(std::vector<double>)) const {
  const double warm_us = quick() ? 1e3 : 20e3, round_us = quick() ? 4e3 : 100e3;
  const int rounds = quick() ? 1 : 5;
  int calls = 0;
  const auto start = Clock::now();
  do call(), ++calls;
  while (us_since(start) < warm_us);
  // A sample is at least some 20 us long, so that the clock's own cost vanishes.
  const int batch = std::max(1, static_cast<int>(20.0 * calls / us_since(start)));
  double best = 1e300;
  for (int round = 0; round < rounds; ++round) {
    std::vector<double> samples;
    const auto begin = Clock::now();
    do {
      const auto t = Clock::now();
      for (int i = 0; i < batch; ++i) call();
      samples.push_back(us_since(t) / batch);
    } while (us_since(begin) < round_us || samples.size() < 3);
    best = std::min(best, summary(std::move(samples)));
  }
  return best;
}

double Report::time_cold(const std::function<void()>& call) const {
  auto& memory = large_memory();
  double best = 1e300;
  for (int round = 0; round < (quick() ? 1 : 5); ++round) {
    std::vector<double> samples;
    for (int i = 0; i < (quick() ? 1 : 5); ++i) {
      read_on_all_threads(memory.data(), static_cast<std::int64_t>(memory.size()), true);
      const auto t = Clock::now();
      call();
      samples.push_back(us_since(t));
    }
    best = std::min(best, median(std::move(samples)));
  }
  return best;
}

double Report::read_us(std::int64_t bytes) const {
  static std::map<std::int64_t, double> known;
  bytes = (bytes + 63) / 64 * 64;
  if (const auto i = known.find(bytes); i != known.end()) return i->second;
  const std::vector<char> memory(static_cast<std::size_t>(bytes) + 64, 1);
  // Handing a small job to other threads costs more than it saves: whichever is faster is the floor.
  double best = 1e300;
  for (const bool many_streams : {false, true}) {
    best = std::min(best, best_time([&] { read_loop(memory.data(), bytes, many_streams); }));
    best = std::min(best, best_time([&] { read_on_all_threads(memory.data(), bytes, many_streams); }));
  }
  return known[bytes] = best;
}

const Ceilings& Report::ceilings() const {
  static const Ceilings measured = [this] {
    Ceilings c;
    c.threads = threads();
    const std::int64_t steps = quick() ? 2000 : 20000, pieces = std::int64_t{8} * c.threads;
    const double operations = fma_loop(1) * static_cast<double>(steps * pieces);
    c.fma_gflops = operations * 1e-3 / best_time([&] {
                     on_all_threads(pieces, [&](std::int64_t begin, std::int64_t end) { fma_loop(steps * (end - begin)); });
                   });
    constexpr std::int64_t kInL3 = std::int64_t{12} << 20;
    c.read_l3_gbs = static_cast<double>(kInL3) * 1e-3 / read_us(kInL3);
    auto& memory = large_memory();
    const auto size = static_cast<std::int64_t>(memory.size());
    const double read_us = std::min(best_time([&] { read_on_all_threads(memory.data(), size, false); }),
                                    best_time([&] { read_on_all_threads(memory.data(), size, true); }));
    c.read_memory_gbs = static_cast<double>(size) * 1e-3 / read_us;
    const std::int64_t half = size / 2;
    c.memcpy_gbs = static_cast<double>(half) * 1e-3 / best_time([&] {
                     on_all_threads(half, [&](std::int64_t begin, std::int64_t end) {
                       std::memcpy(memory.data() + begin, memory.data() + half + begin, static_cast<std::size_t>(end - begin));
                     });
                   });
    return c;
  }();
  return measured;
}

void Report::add(const std::string& operation, Keys keys, Result result) {
  if (device() == "cpu") keys["threads"] = std::to_string(threads());
  result.name = family_ + "/" + operation + "/";
  for (const auto& [key, value] : keys) result.name += (result.name.back() == '/' ? "" : ",") + key + "=" + value;
  results_.push_back(std::move(result));
  if (settings_.seconds > 0 && std::chrono::steady_clock::now() - begin_ > std::chrono::duration<double>(settings_.seconds))
    throw TimeIsOver{};
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  std::string name = "unknown CPU";
  for (std::string line; std::getline(info, line);)
    if (line.rfind("model name", 0) == 0) {
      name = line.substr(line.find(':') + 2);
      break;
    }
  return name + ", " + cpu::simd_target().name;
}

bool add_gpu_family(const char* name, Run run) { return gpu_registry().emplace(name, run).second; }
const std::map<std::string, Run>& gpu_families() { return gpu_registry(); }
GpuMachine& gpu_machine() {
  static GpuMachine machine;
  return machine;
}

bool add_family(const char* name, Run run) { return registry().emplace(name, run).second; }
const std::map<std::string, Run>& families() { return registry(); }

}  // namespace specstate::bench
