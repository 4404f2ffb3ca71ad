#pragma once
// What every benchmark shares: how time is taken, what this machine can do at most, how a result is named.
// A family is one file: `void run(Report&)` and `const bool registered = add_family("name", run);`.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace specstate::bench {

struct Result {
  std::string name;  // family/operation/key=value,... with sorted keys
  double ours_us = 0;
  double floor_us = 0;                  // 0: no floor is known
  std::string floor;                    // what the floor is
  std::map<std::string, double> peers;  // name -> microseconds
  std::map<std::string, double> more;   // other numbers that go beside them, by their JSON name
};

/// What this machine does at most, measured in the same run with the threads of the CPU backend.
struct Ceilings {
  int threads = 0;
  double fma_gflops = 0;   // fp32 multiply-adds from registers, two operations each
  double read_l3_gbs = 0;  // 12 MiB read again and again, 10^9 bytes a second
  double read_memory_gbs = 0;
  double memcpy_gbs = 0;  // bytes copied, far larger than the caches
};

/// Ends a family whose time is over; what was measured counts.
struct TimeIsOver {};

class Report {
 public:
  struct Settings {
    std::string device = "cpu";
    bool quick = false;  // few and short samples: shows that it runs, not how fast
    double seconds = 0;  // > 0: no further case is begun after so long
  };
  Report(std::string family, const Settings& settings) : family_(std::move(family)), settings_(settings) {}

  const std::string& family() const { return family_; }
  const std::string& device() const { return settings_.device; }
  bool quick() const { return settings_.quick; }
  int threads() const;

  /// Microseconds of a call with warm caches: the lowest of several medians. Other work on the machine only ever adds.
  double time(const std::function<void()>& call) const;
  /// The best single sample: for ceilings and floors, which must not be beaten by luck.
  double best_time(const std::function<void()>& call) const;
  /// The same with caches emptied before every call.
  double time_cold(const std::function<void()>& call) const;

  const Ceilings& ceilings() const;
  /// Microseconds to read `bytes` of resident memory once, warm: from whichever cache holds that much, or from memory.
  double read_us(std::int64_t bytes) const;
  double read_cold_us(std::int64_t bytes) const { return static_cast<double>(bytes) / ceilings().read_memory_gbs * 1e-3; }
  /// Microseconds of so many floating point operations at the measured peak.
  double compute_us(double operations) const { return operations / ceilings().fma_gflops * 1e-3; }

  using Keys = std::map<std::string, std::string>;
  /// `threads` joins the keys by itself on the CPU. Throws TimeIsOver.
  void add(const std::string& operation, Keys keys, Result result);
  const std::vector<Result>& results() const { return results_; }

 private:
  double take(const std::function<void()>& call, double (*summary)(std::vector<double>)) const;

  std::string family_;
  Settings settings_;
  std::vector<Result> results_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// Cuts [0, n) among the CPU backend's threads, for measurements of the machine itself.
void on_all_threads(std::int64_t n, const std::function<void(std::int64_t, std::int64_t)>& body);

/// "AMD EPYC, 2 threads, AVX3"
std::string cpu_name();

using Run = void (*)(Report&);
bool add_family(const char* name, Run run);
/// In the order of their names.
const std::map<std::string, Run>& families();

/// The same for measurements on a GPU (bench/gpu/): builds with CUDA have them.
bool add_gpu_family(const char* name, Run run);
const std::map<std::string, Run>& gpu_families();
struct GpuMachine {
  std::string (*name)() = nullptr;                                  // "NVIDIA H200"
  std::map<std::string, double> (*ceilings)(bool quick) = nullptr;  // what it does at most, measured now
};
GpuMachine& gpu_machine();

}  // namespace specstate::bench
