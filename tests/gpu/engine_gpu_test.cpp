// The engine on the GPU from inside: its product beside the CPU's, its logits beside the CPU engine's, memory that fails and memory that must not grow.
// (This test links the library's objects, because the engine's parts are not exported.)
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>

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
  const cuda::Limits limits{1, 96, 1, 64, n + 8, true};
  cuda::Tables tables{memory.device<std::int32_t>(1, ""), memory.device<std::int32_t>(1, ""), memory.device<std::int32_t>(1, ""),
                      memory.device<std::uint64_t>(1, ""), memory.device<std::int32_t>(1, "")};
  std::vector<std::int32_t> iota(static_cast<std::size_t>(n + 80));
  std::vector<std::int64_t> pool(static_cast<std::size_t>(n + 8)), ids(tokens.begin(), tokens.end());
  for (std::size_t i = 0; i < iota.size(); ++i) iota[i] = static_cast<std::int32_t>(i);
  for (std::size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<std::int64_t>(i);
  const cuda::Constants constants{memory.upload(iota.data(), n + 80, ""), memory.upload(pool.data(), n + 8, "")};
  cuda::Target gpu(model().target, limits, {}, tables, constants, nullptr, trace, memory);
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

/// The held-out prompts in batches of 1 to 16.
std::vector<std::vector<std::vector<int>>> batches() {
  std::vector<std::filesystem::path> files;
  for (const auto& e : std::filesystem::directory_iterator(std::filesystem::path(find_embedded_model()) / "prompts"))
    if (e.file_size() < 3000) files.push_back(e.path());
  std::sort(files.begin(), files.end());
  std::vector<std::vector<std::vector<int>>> all;
  std::size_t next = 0;
  for (const std::size_t size : {1, 5, 16, 16, 16}) {
    if (next >= files.size() || (gpu_test::small() && size > 1)) break;
    all.emplace_back();
    for (std::size_t i = 0; i < size && next < files.size(); ++i, ++next) {
      std::ifstream file(files[next]);
      const std::string text{std::istreambuf_iterator<char>(file), {}};
      all.back().push_back(tokens_of(text.substr(0, gpu_test::small() ? 12 : 700), model().target.config));
    }
  }
  return all;
}

TEST(EngineGpu, HeldOutPromptsAreLosslessAfterEveryStep) {
  SPECSTATE_NEEDS_GPU();
  std::size_t count = 0, states_seen = 0;
  for (const auto& batch : batches()) {
    count += batch.size();
    for (const double temperature : {0.0, 0.8}) {
      if (gpu_test::small() && temperature > 0) continue;
      GenerateOptions options;
      options.max_new_tokens = gpu_test::small() ? 3 : 28, options.deterministic = true, options.chunk = 1024,
      options.temperature = temperature, options.seed = 5;
      cuda::States plain_states;
      const Report plain = cuda::decode(model(), batch, options, Mode::kPlain, {}, &plain_states);
      for (std::size_t i = 0; i < batch.size(); ++i) {
        options.start_steps.push_back(static_cast<int>(3 * i % 7));
        options.drop_steps.push_back(i % 5 == 3 ? static_cast<int>(3 * i % 7 + 4) : -1);
      }
      for (const Mode mode : {Mode::kDFlash, Mode::kDSpark}) {
        if (gpu_test::small() && mode == Mode::kDSpark) continue;
        cuda::States states;
        const Report report = cuda::decode(model(), batch, options, mode, {}, &states);
        for (std::size_t i = 0; i < batch.size(); ++i) {
          const std::vector<int>&got = report.requests[i].tokens, &expected = plain.requests[i].tokens;
          const bool dropped = report.requests[i].finish == "dropped";
          ASSERT_TRUE(dropped ? got.size() <= expected.size() : got.size() == expected.size()) << name_of(mode) << " " << i;
          ASSERT_TRUE(std::equal(got.begin(), got.end(), expected.begin())) << name_of(mode) << " " << temperature << " request " << i;
          const std::map<int, std::uint64_t> digests(plain_states[i].begin(), plain_states[i].end());
          ASSERT_FALSE(states[i].empty());
          for (const auto& [n, digest] : states[i]) {
            ASSERT_TRUE(digests.count(n)) << n;
            ASSERT_EQ(digests.at(n), digest) << name_of(mode) << " " << temperature << " request " << i << " at " << n;
            ++states_seen;
          }
        }
      }
    }
  }
  RecordProperty("prompts", std::to_string(count));
  RecordProperty("states", std::to_string(states_seen));
  std::printf("%zu prompts, %zu states after steps\n", count, states_seen);
}

std::vector<std::vector<int>> prompts() {
  return {tokens_of("In the beginning God created", model().target.config), tokens_of("And it came to pass", model().target.config)};
}

// (All of them, one by one: EngineEmulated.AnyAllocationMayFail.)
TEST(EngineGpu, AllocationsMayFail) {
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
  for (std::int64_t i = 0; i < count; i += 11) {
    cuda::Memory::fail_at(i);
    try {
      cuda::decode(model(), prompts(), options, Mode::kDSpark, {}, nullptr);
      ADD_FAILURE() << "allocation " << i << " of " << count << " failed and nobody said so";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kRuntime);
      EXPECT_NE(std::string(e.what()).find("generate: expected "), std::string::npos) << e.what();
    }
    cuda::Memory::fail_at(-1);
    ASSERT_EQ(cuda::Memory::alive(), alive) << "after allocation " << i;
  }
  const Report again = cuda::decode(model(), prompts(), options, Mode::kDSpark, {}, nullptr);
  for (std::size_t i = 0; i < again.requests.size(); ++i) EXPECT_EQ(again.requests[i].tokens, good.requests[i].tokens);
}

std::int64_t resident_kilobytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word)
    if (word == "VmRSS:") return status >> word, std::stoll(word);
  return 0;
}

TEST(EngineGpu, MemoryDoesNotGrow) {
  SPECSTATE_NEEDS_GPU();
  if (gpu_test::small()) return;  // nothing of it is left in a small run
  // Requests come and go all the time; memory of both sides is looked at while they do, once every graph exists. SPECSTATE_SOAK_SECONDS makes it
  // longer: runs follow each other until then.
  const char* const soak = std::getenv("SPECSTATE_SOAK_SECONDS");
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(soak ? std::atoi(soak) : 0);
  GenerateOptions options;
  options.max_new_tokens = soak ? 3000 : 300;
  options.deterministic = true;
  std::vector<std::vector<int>> many;
  for (int i = 0; i < 16; ++i) {
    many.push_back(tokens_of("Verse " + std::to_string(i), model().target.config));
    options.start_steps.push_back(5 * i), options.drop_steps.push_back(i % 4 == 3 ? 5 * i + 40 : -1);
  }
  std::vector<std::size_t> free;
  std::size_t emitted = 0, total = 0;
  Callbacks callbacks;
  callbacks.text = [&](std::size_t, std::string_view bytes) {
    if ((emitted += bytes.size()) % 512 < bytes.size()) cudaMemGetInfo(&free.emplace_back(), &total);
  };
  const auto begin = std::chrono::steady_clock::now();
  std::int64_t first_host = 0, last_host = 0;
  int runs = 0;
  do {
    free.clear();
    cuda::decode(model(), many, options, Mode::kDFlash, callbacks, nullptr);
    ASSERT_GT(free.size(), 5u);
    // Free device memory is everybody's: it tells something only where this program is alone.
    if (soak) EXPECT_EQ(free[free.size() / 2], free.back()) << emitted << " bytes were emitted";
    last_host = resident_kilobytes();
    if (runs++ < 3) first_host = last_host;  // three runs until everything that is kept has been made
  } while (runs < 6 || std::chrono::steady_clock::now() < end);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%d runs, %zu bytes emitted in %.0f s; host memory %lld kB after three runs, %lld kB at the end\n", runs, emitted, seconds,
              static_cast<long long>(first_host), static_cast<long long>(last_host));
  EXPECT_LT(last_host - first_host, 4096);
}

}  // namespace
}  // namespace specstate::runtime
