// The GPU engine's loop and kernels on an emulated GPU, beside the CPU engine: same tokens, same state after every step, requests that come and go,
// memory that fails. It runs on every machine; on a real GPU tests/gpu/test_engine_gpu.py and tests/gpu/engine_gpu_test.cpp say the rest.
#include <gtest/gtest.h>
#include <nvtx3/nvToolsExt.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>

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

// A barrier of the emulated GPU is a switch between fibers, which costs AddressSanitizer thirty times as much.
#ifdef __has_feature  // clang's way to say that it is there; GCC's is the other
#if __has_feature(address_sanitizer)
#define SPECSTATE_SLOW
#endif
#endif
#if defined(SPECSTATE_SLOW) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

Checkpoint synthetic(const SyntheticShape& shape) {
  const auto folder = std::filesystem::temp_directory_path() / ("specstate-emulated-" + std::to_string(::getpid()));
  write_synthetic_checkpoint(folder.string(), shape, 11);
  Checkpoint checkpoint = load_checkpoint(folder.string());
  std::filesystem::remove_all(folder);
  return checkpoint;
}
const Checkpoint& model() {
  static const Checkpoint m = synthetic({});
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

Report on_cpu(const std::vector<std::vector<int>>& p, const GenerateOptions& o, Mode mode, const Checkpoint& m = model()) {
  RunOptions run;
  run.mode = mode;
  return decode(m, p, o, run, {});
}
/// Kernels have forms: here cached rows are of 16-byte pieces, index keys are not, and the columns of the MLP are no whole panels.
const Checkpoint& other_model() {
  static const Checkpoint m = [] {
    SyntheticShape shape;
    shape.rope_dim = 8, shape.index_dim = 12, shape.index_heads = 3, shape.intermediate = 40;
    return synthetic(shape);
  }();
  return m;
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
  for (const auto& [m, mode] : {std::pair(&model(), Mode::kPlain), std::pair(&other_model(), Mode::kDFlash)}) {
    const Report report = cuda::decode(*m, p, o, mode, {}, nullptr), cpu = on_cpu(p, o, mode, *m);
    for (std::size_t i = 0; i < p.size(); ++i) EXPECT_EQ(report.requests[i].tokens, cpu.requests[i].tokens);
  }
}

TEST(EngineEmulated, PromptsWaitForAPlaceAndUsedPlacesAreClean) {
  const auto p = prompts(kSlow ? 3 : 5);
  GenerateOptions o = options(kSlow ? 4 : 6);
  o.max_batch = 2;
  const Report report = cuda::decode(model(), p, o, Mode::kDSpark, {}, nullptr), cpu = on_cpu(p, o, Mode::kDSpark);
  o.max_batch = 64;
  const Report at_once = cuda::decode(model(), p, o, Mode::kDSpark, {}, nullptr);
  for (std::size_t i = 0; i < p.size(); ++i) {
    EXPECT_EQ(report.requests[i].tokens, cpu.requests[i].tokens) << i;
    EXPECT_EQ(report.requests[i].state_digest, at_once.requests[i].state_digest) << i;
  }
}

TEST(EngineEmulated, AProfilerSeesThePartsOfAStep) {
  nvtx_seen.clear();
  cuda::decode(model(), prompts(1), options(3), Mode::kDFlash, {}, nullptr);
  ASSERT_TRUE(nvtx_open.empty());
  EXPECT_EQ(
      std::vector<std::string>(nvtx_seen.begin(), nvtx_seen.begin() + 7),
      (std::vector<std::string>{"/prefill", "/step", "/step/open window", "/step/draft", "/step/verify", "/step/accept", "/step/commit"}));
}

TEST(EngineEmulated, SampledProposalsAreTheCpus) {
  GenerateOptions o = options(kSlow ? 4 : 8);
  o.temperature = 0.8, o.seed = 21, o.sampled_proposals = true;
  const auto p = prompts(2);
  for (const Mode mode : {Mode::kDFlash, Mode::kDSpark}) {
    const Report report = cuda::decode(model(), p, o, mode, {}, nullptr), cpu = on_cpu(p, o, mode);
    for (std::size_t i = 0; i < p.size(); ++i) EXPECT_EQ(report.requests[i].tokens, cpu.requests[i].tokens);
  }
}

class Forced : public testing::TestWithParam<std::tuple<Mode, double, int>> {};

TEST_P(Forced, EveryStepCommitsSoManyAndEveryStateIsPlainDecodings) {
  const auto [mode, temperature, length] = GetParam();
  const auto p = prompts(kSlow ? 2 : 5);
  GenerateOptions o = options(kSlow ? 6 : 13);
  o.temperature = temperature, o.seed = 3, o.max_batch = 3;  // places are used twice: each time by a prompt with tokens of its own
  cuda::States plain_states, states;
  const Report plain = cuda::decode(model(), p, o, Mode::kPlain, {}, &plain_states);
  RunOptions run;
  run.mode = mode, run.lengths = {length};
  for (const RequestReport& r : plain.requests) run.known.push_back(r.tokens);
  o.force_accept = length;
  const Report report = cuda::decode(model(), p, o, mode, {}, &states, run.known), cpu = decode(model(), p, o, run, {});
  const std::size_t stride = static_cast<std::size_t>(std::min(length, window_of(model(), mode)));
  for (std::size_t i = 0; i < p.size(); ++i) {
    EXPECT_EQ(report.requests[i].tokens, plain.requests[i].tokens) << i;
    EXPECT_EQ(report.requests[i].state_digest, plain.requests[i].state_digest) << i;
    const std::map<int, std::uint64_t> expected(plain_states[i].begin(), plain_states[i].end());
    EXPECT_EQ(report.requests[i].steps, static_cast<std::int64_t>((plain.requests[i].tokens.size() - 1 + stride - 1) / stride)) << i;
    ASSERT_FALSE(states[i].empty());
    for (const auto& [n, digest] : states[i]) EXPECT_EQ(expected.at(n), digest) << "request " << i << " at " << n;
  }
  EXPECT_EQ(report.accepted_lengths, cpu.accepted_lengths);
  EXPECT_EQ(report.steps, cpu.steps);
}
std::vector<Forced::ParamType> forced() {
  if (kSlow) return {{Mode::kDSpark, 0.9, 2}};
  return {{Mode::kDFlash, 0.0, 1}, {Mode::kDSpark, 0.9, 2}, {Mode::kDSpark, 0.0, 3}, {Mode::kDFlash, 0.9, 64}};
}
INSTANTIATE_TEST_SUITE_P(EngineEmulated, Forced, testing::ValuesIn(forced()));

TEST(EngineEmulated, AutoMeasuresAllKindsAndKeepsOne) {
  GenerateOptions o = options(kSlow ? 14 : 45);  // slow: ends while it still measures
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

// ---- ranks: threads, each with an emulated GPU of its own ------------------------------------------------------------------------------

/// What the threads of one run have in common. A rank that is gone ends the waiting of the others.
struct World {
  explicit World(int n) : size(n), from(static_cast<std::size_t>(n)) {}
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  int arrived = 0;
  std::uint64_t turn = 0, gathers = 0;
  bool aborted = false;
  std::vector<const void*> from;
  std::map<std::pair<int, std::int64_t>, std::shared_ptr<std::vector<std::uint64_t>>> shared;  // by number and bytes
  std::int64_t shared_bytes = 0;

  void meet(std::unique_lock<std::mutex>& lock) {
    const std::uint64_t mine = turn;
    if (++arrived == size) {
      arrived = 0, ++turn;
      changed.notify_all();
      return;
    }
    const bool in_time = changed.wait_for(lock, std::chrono::seconds(60), [&] { return turn != mine || aborted; });
    if (turn == mine) throw Error(ErrorKind::kCuda, in_time ? "another rank is gone" : "another rank did not come");
  }
};

class Threads final : public cuda::Group {
 public:
  Threads(World& world, int rank, std::int64_t dies_at = -1) : Group(rank, world.size), world_(world), dies_at_(dies_at) {}
  void all_gather(const void* from, void* to, std::int64_t bytes, Stream) override {
    if (gathers_++ == dies_at_) throw Error(ErrorKind::kCuda, "this rank dies");
    std::unique_lock<std::mutex> lock(world_.mutex);
    if (world_.aborted) throw Error(ErrorKind::kCuda, "another rank is gone");
    world_.from[static_cast<std::size_t>(rank())] = from;
    world_.meet(lock);
    for (int r = 0; r < size(); ++r)
      std::memcpy(static_cast<char*>(to) + r * bytes, world_.from[static_cast<std::size_t>(r)], static_cast<std::size_t>(bytes));
    world_.meet(lock);
    if (rank() == 0) ++world_.gathers;
  }
  void* share(std::int64_t bytes) override {
    const std::lock_guard<std::mutex> lock(world_.mutex);
    auto& block = world_.shared[{shares_++, bytes}];
    if (!block) block = std::make_shared<std::vector<std::uint64_t>>(static_cast<std::size_t>(bytes + 7) / 8), world_.shared_bytes += bytes;
    return block->data();
  }
  void unshare(void*, std::int64_t) noexcept override {}
  void beat() override {}
  void abort() noexcept override {
    const std::lock_guard<std::mutex> lock(world_.mutex);
    world_.aborted = true;
    world_.changed.notify_all();
  }

 private:
  World& world_;
  std::int64_t dies_at_, gathers_ = 0;
  int shares_ = 0;
};

struct OfRank {
  Report report;
  cuda::States states;
  std::string error;
};
std::vector<OfRank> on_ranks(World& world, const std::function<void(cuda::Group&, OfRank&)>& body, int dying = -1,
                             std::int64_t dies_at = -1) {
  std::vector<OfRank> all(static_cast<std::size_t>(world.size));
  std::vector<std::thread> threads;
  for (int r = 0; r < world.size; ++r)
    threads.emplace_back([&, r] {
      Threads group(world, r, r == dying ? dies_at : -1);
      OfRank& mine = all[static_cast<std::size_t>(r)];
      try {
        body(group, mine);
      } catch (const std::exception& e) {
        mine.error = e.what();
        group.abort();
      }
    });
  for (std::thread& t : threads) t.join();
  return all;
}

const Checkpoint& split_model(bool grouped) {
  // 3 heads among 2 ranks are 1 and 2. Drafters: queries of one key head, and groups.
  SyntheticShape shape;
  shape.kda_heads = shape.mla_heads = 3, shape.intermediate = 49, shape.draft_heads = 3;
  static const Checkpoint one = synthetic(shape);
  shape.draft_heads = 4, shape.draft_kv_heads = 2, shape.layers = 2;
  static const Checkpoint groups = synthetic(shape);
  return grouped ? groups : one;
}

class Ranks : public testing::TestWithParam<std::tuple<int, Mode, double, bool>> {};

TEST_P(Ranks, TokensAndStatesAreThoseOfOneCard) {
  const auto [size, mode, temperature, grouped] = GetParam();
  const Checkpoint& m = split_model(grouped);
  const auto p = prompts(kSlow ? 1 : 3);
  GenerateOptions o = options(kSlow ? 3 : 7);
  o.temperature = temperature, o.seed = 3;
  o.start_steps = {0, 2, 1}, o.drop_steps = {-1, -1, 3};
  cuda::States states;
  const Report one = cuda::run(m, p, o, mode, {}, &states, nullptr);
  World world(size);
  const auto ranks = on_ranks(world, [&](cuda::Group& g, OfRank& r) { r.report = cuda::run(m, p, o, mode, {}, &r.states, &g); });
  EXPECT_GT(world.gathers, 0u);
  for (const OfRank& r : ranks) {
    ASSERT_EQ(r.error, "");
    EXPECT_EQ(r.states, states);
    for (std::size_t i = 0; i < p.size(); ++i) {
      EXPECT_EQ(r.report.requests[i].tokens, one.requests[i].tokens) << i;
      EXPECT_EQ(r.report.requests[i].finish, one.requests[i].finish) << i;
      EXPECT_EQ(r.report.requests[i].state_digest, one.requests[i].state_digest) << i;
    }
    EXPECT_EQ(r.report.accepted_lengths, one.accepted_lengths);
    EXPECT_EQ(r.report.kda.state_bytes, one.kda.state_bytes);
    EXPECT_LT(r.report.gpu.device_bytes, one.gpu.device_bytes + (2 << 20));
  }
  // The host's rows are there once: rank 0 counts them, the others have next to nothing pinned.
  EXPECT_EQ(ranks[0].report.gpu.pinned_bytes - ranks[1].report.gpu.pinned_bytes, world.shared_bytes);
  EXPECT_GT(world.shared_bytes, 0);
}
INSTANTIATE_TEST_SUITE_P(EngineEmulated, Ranks,
                         testing::Values(std::tuple(2, Mode::kPlain, 0.0, false), std::tuple(2, Mode::kDFlash, 0.0, true),
                                         std::tuple(2, Mode::kDSpark, 0.9, false), std::tuple(3, Mode::kDFlash, 0.0, false)));

TEST(EngineEmulated, RanksAgreeOnWhatAutoKeeps) {
  // Their clocks differ; what they enqueue must not.
  GenerateOptions o = options(kSlow ? 4 : 40);  // slow: ends while it still measures
  const auto p = prompts(1);
  World world(2);
  const auto ranks =
      on_ranks(world, [&](cuda::Group& g, OfRank& r) { r.report = cuda::run(split_model(false), p, o, Mode::kAuto, {}, nullptr, &g); });
  ASSERT_EQ(ranks[0].error + ranks[1].error, "");
  EXPECT_EQ(ranks[0].report.note, ranks[1].report.note);
  EXPECT_EQ(ranks[0].report.requests[0].tokens, ranks[1].report.requests[0].tokens);
}

TEST(EngineEmulated, ARankThatDiesEndsTheOthers) {
  const GenerateOptions o = options(4);
  const auto p = prompts(2);
  const std::int64_t alive = cuda::Memory::alive();
  for (const std::int64_t at : {0, 7, 60}) {
    World world(2);
    const auto ranks = on_ranks(
        world, [&](cuda::Group& g, OfRank& r) { r.report = cuda::run(split_model(true), p, o, Mode::kDFlash, {}, nullptr, &g); }, 1, at);
    EXPECT_EQ(ranks[1].error, "this rank dies") << at;
    EXPECT_EQ(ranks[0].error, "another rank is gone") << at;
    EXPECT_EQ(cuda::Memory::alive(), alive) << at;
  }
}

TEST(EngineEmulated, ARankWithoutMemorySaysWhichAndTheOthersEnd) {
  const GenerateOptions o = options(2);
  const auto p = prompts(1);
  const std::int64_t alive = cuda::Memory::alive(), before = cuda::Memory::fail_at(-1);
  {
    World world(2);
    on_ranks(world, [&](cuda::Group& g, OfRank& r) { r.report = cuda::run(split_model(true), p, o, Mode::kPlain, {}, nullptr, &g); });
  }
  const std::int64_t count = cuda::Memory::fail_at(-1) - before;  // of both: which of them meets the failure is chance
  for (std::int64_t i = 0; i < count; i += kSlow ? 31 : 3) {
    cuda::Memory::fail_at(i);
    World world(2);
    const auto ranks =
        on_ranks(world, [&](cuda::Group& g, OfRank& r) { r.report = cuda::run(split_model(true), p, o, Mode::kPlain, {}, nullptr, &g); });
    cuda::Memory::fail_at(-1);
    const std::string errors = ranks[0].error + ranks[1].error;
    EXPECT_NE(errors.find("generate: expected "), std::string::npos) << i << ": " << errors;
    EXPECT_TRUE(!ranks[0].error.empty() && !ranks[1].error.empty()) << i << ": " << errors;
    EXPECT_EQ(cuda::Memory::alive(), alive) << i;
  }
}

}  // namespace
}  // namespace specstate::runtime
