// The GPU engine's loop and kernels on an emulated GPU, beside the CPU engine: same tokens, same state after every step, requests that come and go,
// memory that fails. It runs on every machine; on a real GPU tests/gpu/test_engine_gpu.py and tests/gpu/engine_gpu_test.cpp say the rest.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <random>

#include "core/numeric.hpp"
#include "cpu/matmul.hpp"
#include "runtime/checkpoint.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/cuda/ops.hpp"
#include "runtime/cuda/run.hpp"
#include "runtime/decode.hpp"
#include "runtime/synthetic.hpp"
#include "specstate/error.hpp"

namespace specstate::runtime {
namespace {

#ifdef __SANITIZE_ADDRESS__  // a barrier of the emulated GPU is a switch between fibers, which costs it thirty times as much
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

const Checkpoint& model() {
  static const Checkpoint m = [] {
    const auto folder = std::filesystem::temp_directory_path() / ("specstate-emulated-" + std::to_string(::getpid()));
    write_synthetic_checkpoint(folder.string(), {}, 11);
    Checkpoint checkpoint = load_checkpoint(folder.string());
    std::filesystem::remove_all(folder);
    return checkpoint;
  }();
  return m;
}

GenerateOptions options(int tokens) {
  GenerateOptions o;
  o.max_new_tokens = tokens;
  o.hot_slots = 12;  // of 8 selected positions a row: a window asks for more than there are
  o.chunk = 7;
  o.deterministic = true;
  return o;
}

std::vector<std::vector<int>> prompts(int n) {
  std::vector<std::vector<int>> all;
  for (int i = 0; i < n; ++i)
    all.push_back(tokens_of(std::string(static_cast<std::size_t>(5 + (kSlow ? 4 : 9) * i), static_cast<char>('a' + i)) + "bcd",
                            model().target.config));
  return all;
}

Report on_cpu(const std::vector<std::vector<int>>& p, const GenerateOptions& o, Mode mode) {
  RunOptions run;
  run.mode = mode;
  return decode(model(), p, o, run, {});
}

class Modes : public testing::TestWithParam<std::tuple<Mode, double>> {};

TEST_P(Modes, TokensAreTheCpusAndEveryStateIsPlainDecodings) {
  const auto [mode, temperature] = GetParam();
  const auto p = prompts(5);
  GenerateOptions o = options(kSlow ? 6 : 11);
  o.temperature = temperature, o.seed = 3;
  cuda::States plain_states, states;
  const Report plain = cuda::decode(model(), p, o, Mode::kPlain, {}, &plain_states);
  o.start_steps = {0, 2, 0, 5, 1}, o.drop_steps = {-1, -1, 3};
  const Report report = cuda::decode(model(), p, o, mode, {}, &states), cpu = on_cpu(p, o, mode);
  for (std::size_t i = 0; i < p.size(); ++i) {
    const RequestReport& r = report.requests[i];
    EXPECT_EQ(r.tokens, cpu.requests[i].tokens) << i;
    EXPECT_EQ(r.finish, cpu.requests[i].finish) << i;
    EXPECT_EQ(r.steps, cpu.requests[i].steps) << i;
    EXPECT_EQ(r.text, cpu.requests[i].text) << i;
    ASSERT_LE(r.tokens.size(), plain.requests[i].tokens.size());
    EXPECT_TRUE(std::equal(r.tokens.begin(), r.tokens.end(), plain.requests[i].tokens.begin())) << i;
    const std::map<int, std::uint64_t> expected(plain_states[i].begin(), plain_states[i].end());
    ASSERT_FALSE(states[i].empty());
    for (const auto& [n, digest] : states[i]) EXPECT_EQ(expected.at(n), digest) << "request " << i << " at " << n;
  }
  EXPECT_EQ(report.requests[2].finish, "dropped");
  EXPECT_EQ(report.accepted_lengths, cpu.accepted_lengths);
  EXPECT_EQ(report.draft_kv.bytes_written, cpu.draft_kv.bytes_written);
  EXPECT_GT(report.hisparse.hits + report.hisparse.misses, 0);
}
INSTANTIATE_TEST_SUITE_P(EngineEmulated, Modes,
                         testing::Values(std::tuple(Mode::kPlain, 0.9), std::tuple(Mode::kDFlash, 0.0), std::tuple(Mode::kDSpark, 0.9)));

TEST(EngineEmulated, ReplayedStepsAreTheFirstOnes) {
  // Without recorded states the second step of a shape is captured and the others replayed.
  const auto p = prompts(3);
  GenerateOptions o = options(kSlow ? 6 : 14);
  o.chunk = 64;  // windows of a prompt larger than the hot buffer
  for (const Mode mode : {Mode::kPlain, Mode::kDFlash}) {
    const Report report = cuda::decode(model(), p, o, mode, {}, nullptr), cpu = on_cpu(p, o, mode);
    for (std::size_t i = 0; i < p.size(); ++i) EXPECT_EQ(report.requests[i].tokens, cpu.requests[i].tokens);
  }
}

TEST(EngineEmulated, PromptsWaitForAPlaceAndUsedPlacesAreClean) {
  const auto p = prompts(5);
  GenerateOptions o = options(6);
  o.max_batch = 2;
  const Report report = cuda::decode(model(), p, o, Mode::kDSpark, {}, nullptr), cpu = on_cpu(p, o, Mode::kDSpark);
  o.max_batch = 64;
  const Report at_once = cuda::decode(model(), p, o, Mode::kDSpark, {}, nullptr);
  for (std::size_t i = 0; i < p.size(); ++i) {
    EXPECT_EQ(report.requests[i].tokens, cpu.requests[i].tokens) << i;
    EXPECT_EQ(report.requests[i].state_digest, at_once.requests[i].state_digest) << i;
  }
}

TEST(EngineEmulated, SampledProposalsAreTheCpus) {
  GenerateOptions o = options(8);
  o.temperature = 0.8, o.seed = 21, o.sampled_proposals = true;
  const auto p = prompts(2);
  for (const Mode mode : {Mode::kDFlash, Mode::kDSpark}) {
    const Report report = cuda::decode(model(), p, o, mode, {}, nullptr), cpu = on_cpu(p, o, mode);
    for (std::size_t i = 0; i < p.size(); ++i) EXPECT_EQ(report.requests[i].tokens, cpu.requests[i].tokens);
  }
}

TEST(EngineEmulated, AutoMeasuresAllKindsAndKeepsOne) {
  GenerateOptions o = options(45);
  const auto p = prompts(1);
  const Report report = cuda::decode(model(), p, o, Mode::kAuto, {}, nullptr),
               plain = cuda::decode(model(), p, o, Mode::kPlain, {}, nullptr);
  EXPECT_EQ(report.requests[0].tokens, plain.requests[0].tokens);
  EXPECT_EQ(report.note.rfind("auto: ", 0), 0u) << report.note;
}

TEST(EngineEmulated, AnyAllocationMayFail) {
  const auto p = prompts(2);
  const GenerateOptions o = options(2);
  const std::int64_t before = cuda::Memory::fail_at(-1);
  cuda::decode(model(), p, o, Mode::kDSpark, {}, nullptr);
  const std::int64_t count = cuda::Memory::fail_at(-1) - before, alive = cuda::Memory::alive();
  ASSERT_GT(count, 50);
  for (std::int64_t i = 0; i < count; ++i) {
    cuda::Memory::fail_at(i);
    try {
      cuda::decode(model(), p, o, Mode::kDSpark, {}, nullptr);
      ADD_FAILURE() << "allocation " << i << " of " << count << " failed and nobody said so";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kRuntime);
      EXPECT_NE(std::string(e.what()).find("generate: expected "), std::string::npos) << e.what();
    }
    cuda::Memory::fail_at(-1);
    EXPECT_EQ(cuda::Memory::alive(), alive);
  }
}

TEST(EngineEmulated, ProductsHaveTheBitsOfTheCpu) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const std::tuple<std::int64_t, std::int64_t, std::int64_t> shapes[] = {{1, 40, 64}, {8, 17, 31}, {9, 70, 300}, {37, 33, 257}};
  for (const auto& [rows, n, k] : shapes) {
    std::vector<core::bfloat16> w(static_cast<std::size_t>(n * k));
    std::vector<float> x(static_cast<std::size_t>(rows * k)), y(static_cast<std::size_t>(rows * n));
    for (auto& v : w) v = core::from_float<core::bfloat16>(normal(random));
    for (auto& v : x) v = normal(random);
    for (auto& v : y) v = normal(random);
    const cpu::PackedMatrix packed(w.data(), n, k, DType::kBFloat16);
    std::vector<float> expected(y.size());
    cpu::matmul(packed, x.data(), k, rows, expected.data(), n, {.add = y.data(), .add_stride = n});
    cuda::Memory memory;
    cuda::matmul(cuda::upload(memory, packed), cuda::plain(x.data(), k), rows, y.data(), n, {}, y.data());
    EXPECT_EQ(std::memcmp(y.data(), expected.data(), y.size() * 4), 0) << rows << " x " << n << " x " << k;
  }
}

}  // namespace
}  // namespace specstate::runtime
