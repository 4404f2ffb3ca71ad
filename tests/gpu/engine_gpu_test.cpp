// The engine on the GPU from inside: its product beside the CPU's, its logits beside the CPU engine's, memory that fails and memory that must not grow.
// (This test links the library's objects, because the engine's parts are not exported.)
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <random>
#include <sstream>

#include "cpu/matmul.hpp"
#include "gpu_test.hpp"
#include "runtime/checkpoint.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/cuda/ops.hpp"
#include "runtime/cuda/run.hpp"
#include "runtime/cuda/target.hpp"
#include "runtime/decode.hpp"
#include "runtime/target.hpp"

namespace specstate::runtime {
namespace {

using gpu_test::gpu_here;

const Checkpoint& model() {
  static const Checkpoint m = load_checkpoint(find_embedded_model());
  return m;
}

TEST(EngineGpu, ProductsHaveTheBitsOfTheCpu) {
  SPECSTATE_NEEDS_GPU();
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const auto& [rows, n, k] :
       {std::tuple<std::int64_t, std::int64_t, std::int64_t>{1, 264, 192}, {8, 17, 31}, {9, 1200, 192}, {64, 33, 576}, {100, 448, 257}}) {
    std::vector<core::bfloat16> w(static_cast<std::size_t>(n * k));
    std::vector<float> x(static_cast<std::size_t>(rows * k)), y(static_cast<std::size_t>(rows * n));
    for (auto& v : w) v = core::from_float<core::bfloat16>(normal(random));
    for (auto& v : x) v = normal(random);
    for (auto& v : y) v = normal(random);
    const cpu::PackedMatrix packed(w.data(), n, k, DType::kBFloat16);
    std::vector<float> expected(y.size()), got(y.size(), NAN);
    cpu::matmul(packed, x.data(), k, rows, expected.data(), n, {.add = y.data(), .add_stride = n});
    cuda::Memory memory;
    cuda::Queue queue;
    const cuda::Matrix m = cuda::upload(memory, packed);
    float *dx = memory.upload(x.data(), rows * k, "x"), *dy = memory.upload(y.data(), rows * n, "y");
    cuda::Memory::settle();
    cuda::matmul(m, cuda::plain(dx, k), rows, dy, n, queue.stream(), dy);
    queue.wait();
    SPECSTATE_GPU(cudaMemcpy(got.data(), dy, got.size() * 4, cudaMemcpyDeviceToHost));
    ASSERT_EQ(std::memcmp(got.data(), expected.data(), got.size() * 4), 0) << rows << " x " << n << " x " << k;
  }
}

TEST(EngineGpu, LogitsAreThoseOfTheCpuEngineWithinBounds) {
  SPECSTATE_NEEDS_GPU();
  std::mt19937 random(3);
  std::vector<int> tokens{model().target.config.bos};
  for (int i = 0; i < (gpu_test::small() ? 12 : 300); ++i) tokens.push_back(static_cast<int>(97 + random() % 26));
  const int n = static_cast<int>(tokens.size()), V = model().target.config.vocab;
  Target cpu(model().target, {1, 96, 1, n + 8}, {});
  cpu.prefill(0, tokens, true);

  cuda::Memory memory;
  cuda::Queue queue;
  cuda::Trace trace;
  cuda::Beside beside(queue);
  const cuda::Limits limits{1, 96, 1, 64, n + 8, true};
  cuda::Tables tables{memory.device<std::int32_t>(1, ""), memory.device<std::int32_t>(1, ""), memory.device<std::int32_t>(1, ""),
                      memory.device<std::uint64_t>(1, ""), memory.device<std::int32_t>(1, "")};
  std::vector<std::int32_t> iota(static_cast<std::size_t>(n + 80));
  std::vector<std::int64_t> pool(static_cast<std::size_t>(n + 8)), ids(tokens.begin(), tokens.end());
  for (std::size_t i = 0; i < iota.size(); ++i) iota[i] = static_cast<std::int32_t>(i);
  for (std::size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<std::int64_t>(i);
  const cuda::Constants constants{memory.upload(iota.data(), n + 80, ""), memory.upload(pool.data(), n + 8, "")};
  cuda::Target gpu(model().target, limits, {}, tables, constants, nullptr, trace, beside, memory);
  const std::int64_t* device_ids = memory.upload(ids.data(), n, "");
  cuda::Memory::settle();
  gpu.reset(0, queue.stream());
  for (int begin = 0; begin < n; begin += 64) gpu.prefill(0, device_ids, begin, std::min(64, n - begin), begin + 64 >= n, queue.stream());
  queue.wait();
  std::vector<float> got(static_cast<std::size_t>(V));
  SPECSTATE_GPU(cudaMemcpy(got.data(), gpu.logits(), got.size() * 4, cudaMemcpyDeviceToHost));
  float most = 0, largest = 0;
  for (int i = 0; i < V; ++i) {
    most = std::max(most, std::fabs(got[static_cast<std::size_t>(i)] - cpu.logits(0)[i]));
    largest = std::max(largest, std::fabs(cpu.logits(0)[i]));
  }
  RecordProperty("largest_difference", std::to_string(most));
  EXPECT_LT(most, 1e-3f * largest);
}

std::vector<std::vector<int>> prompts() {
  return {tokens_of("In the beginning God created", model().target.config), tokens_of("And it came to pass", model().target.config)};
}

/// Each of them, one by one (on the emulated GPU: EngineEmulated.AnyAllocationMayFail).
TEST(EngineGpu, AnyAllocationMayFail) {
  SPECSTATE_NEEDS_GPU();
  if (gpu_test::small()) return;  // no kernel is reached
  GenerateOptions options;
  options.max_new_tokens = 8;
  options.deterministic = true;
  const std::int64_t before = cuda::Memory::fail_at(-1);
  const Report good = cuda::decode(model(), prompts(), options, Mode::kDSpark, {}, nullptr);
  const std::int64_t count = cuda::Memory::fail_at(-1) - before;
  ASSERT_GT(count, 100);
  const std::int64_t alive = cuda::Memory::alive();
  int refused_device = 0, refused_pinned = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    cuda::Memory::fail_at(i);
    try {
      cuda::decode(model(), prompts(), options, Mode::kDSpark, {}, nullptr);
      ADD_FAILURE() << "allocation " << i << " of " << count << " failed and nobody said so";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kRuntime);
      const std::string what = e.what();
      EXPECT_EQ(what.rfind("generate: expected ", 0), 0u) << what;
      refused_device += what.find(" bytes of device memory for ") != std::string::npos;
      refused_pinned += what.find(" bytes of pinned host memory for ") != std::string::npos;
    }
    cuda::Memory::fail_at(-1);
    ASSERT_EQ(cuda::Memory::alive(), alive) << "after allocation " << i;
  }
  EXPECT_EQ(refused_device + refused_pinned, count);
  EXPECT_GT(refused_pinned, 5);
  RecordProperty("allocations", std::to_string(count));
  const Report again = cuda::decode(model(), prompts(), options, Mode::kDSpark, {}, nullptr);
  for (std::size_t i = 0; i < again.requests.size(); ++i) EXPECT_EQ(again.requests[i].tokens, good.requests[i].tokens);
}

/// What the driver says that this program holds of the GPU; where it says nothing of programs, what is not free (then others' memory counts too).
class DeviceUse {
 public:
  DeviceUse() {
    char bus[32] = "";
    void* const nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!nvml || cudaDeviceGetPCIBusId(bus, sizeof bus, 0) != cudaSuccess) return;
    const auto init = reinterpret_cast<int (*)()>(dlsym(nvml, "nvmlInit_v2"));
    const auto by_bus = reinterpret_cast<int (*)(const char*, void**)>(dlsym(nvml, "nvmlDeviceGetHandleByPciBusId_v2"));
    processes_ = reinterpret_cast<int (*)(void*, unsigned*, Process*)>(dlsym(nvml, "nvmlDeviceGetComputeRunningProcesses_v3"));
    if (!init || !by_bus || !processes_ || init() != 0 || by_bus(bus, &device_) != 0) processes_ = nullptr;
    own_ = now() >= 0;
    if (!own_) processes_ = nullptr;
  }
  bool own() const { return own_; }
  std::int64_t now() const {
    if (!processes_) {
      std::size_t free = 0, total = 0;
      cudaMemGetInfo(&free, &total);
      return static_cast<std::int64_t>(total - free);
    }
    Process all[256];
    unsigned n = 256;
    if (processes_(device_, &n, all) != 0) return -1;
    for (unsigned i = 0; i < n; ++i)
      if (all[i].pid == static_cast<unsigned>(getpid()) && all[i].used < std::uint64_t{1} << 48)
        return static_cast<std::int64_t>(all[i].used);
    return -1;
  }

 private:
  struct Process {
    unsigned pid;
    std::uint64_t used;
    unsigned gpu_instance, compute_instance;
  };
  int (*processes_)(void*, unsigned*, Process*) = nullptr;
  void* device_ = nullptr;
  bool own_ = false;
};

std::int64_t resident_bytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word)
    if (word == "VmRSS:") return status >> word, std::stoll(word) * 1024;
  return 0;
}

/// Values over time on a line: how much an hour, and the standard error of that.
std::pair<double, double> per_hour(const std::vector<double>& seconds, const std::vector<double>& values) {
  const double n = static_cast<double>(seconds.size());
  const double t = std::accumulate(seconds.begin(), seconds.end(), 0.0) / n, v = std::accumulate(values.begin(), values.end(), 0.0) / n;
  double tt = 0, tv = 0, rest = 0;
  for (std::size_t i = 0; i < seconds.size(); ++i) tt += (seconds[i] - t) * (seconds[i] - t), tv += (seconds[i] - t) * (values[i] - v);
  for (std::size_t i = 0; i < seconds.size(); ++i) rest += std::pow(values[i] - v - tv / tt * (seconds[i] - t), 2);
  return {3600 * tv / tt, 3600 * std::sqrt(rest / std::max(1.0, n - 2) / tt)};
}

TEST(EngineGpu, MemoryDoesNotGrow) {
  SPECSTATE_NEEDS_GPU();
  if (gpu_test::small()) return;  // nothing of it is left in a small run
  // Requests come and go all the time, run after run; memory of both sides is looked at in the midst of each run and at its end.
  // ENGINE_SOAK_SECONDS makes it longer, ENGINE_SOAK_JSON names a file for what was seen (tools/gpu_soak.py).
  const char *const soak = std::getenv("ENGINE_SOAK_SECONDS"), *const json = std::getenv("ENGINE_SOAK_JSON");
  GenerateOptions options;
  options.max_new_tokens = 300;
  options.deterministic = true;
  std::vector<std::vector<int>> many;
  for (int i = 0; i < 24; ++i) {  // of which 16 at once
    many.push_back(tokens_of("Verse " + std::to_string(i), model().target.config));
    options.start_steps.push_back(5 * i), options.drop_steps.push_back(i % 4 == 3 ? 5 * i + 40 : -1);
  }
  options.max_batch = 16;
  SPECSTATE_GPU(cudaFree(nullptr));  // the driver lists programs that have a context
  const DeviceUse device;
  std::int64_t bytes = 0, within = 0, tokens = 0;
  std::vector<double> seconds, on_device, on_host;
  const auto begin = std::chrono::steady_clock::now();
  const auto since = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  Callbacks callbacks;
  int runs = 0;
  do {
    bytes = 0;
    std::vector<std::int64_t> during;  // every graph exists at the first of them
    callbacks.text = [&](std::size_t, std::string_view text) {
      if ((bytes += static_cast<std::int64_t>(text.size())) % 1024 < static_cast<std::int64_t>(text.size())) during.push_back(device.now());
    };
    const Report report = cuda::decode(model(), many, options, Mode::kDFlash, callbacks, nullptr);
    for (const RequestReport& r : report.requests) tokens += static_cast<std::int64_t>(r.tokens.size());
    ASSERT_GT(during.size(), 2u);
    within = std::max(within, during.back() - during[during.size() / 2]);
    if (runs++ < 3) continue;  // until everything that is kept has been made
    seconds.push_back(since()), on_device.push_back(static_cast<double>(device.now())),
        on_host.push_back(static_cast<double>(resident_bytes()));
  } while (runs < 7 || since() < (soak ? std::atof(soak) : 0));
  const auto [device_rate, device_error] = per_hour(seconds, on_device);
  const auto [host_rate, host_error] = per_hour(seconds, on_host);
  std::ostringstream said;
  said.precision(12);
  said << "{\"seconds\": " << since() << ", \"runs\": " << runs << ", \"tokens\": " << tokens << ", \"device_is_of\": \""
       << (device.own() ? "this program" : "all programs") << "\", \"device_bytes\": [" << on_device.front() << ", " << on_device.back()
       << "], \"device_bytes_within_a_run\": " << within << ", \"device_bytes_per_hour\": " << device_rate
       << ", \"device_standard_error\": " << device_error << ", \"host_bytes\": [" << on_host.front() << ", " << on_host.back()
       << "], \"host_bytes_per_hour\": " << host_rate << ", \"host_standard_error\": " << host_error << "}\n";
  std::printf("%s", said.str().c_str());
  if (json) std::ofstream(json) << said.str();
  if (device.own()) {
    EXPECT_EQ(within, 0);
    EXPECT_LE(on_device.back(), on_device.front());
  }
  EXPECT_LT(on_host.back() - on_host.front(), 4 << 20);
}

}  // namespace
}  // namespace specstate::runtime
