// 50 held-out prompts on the GPU: tokens and every state of speculative decoding are plain decoding's, bit for bit, in batches of 1 to 16 whose
// requests start at different steps and are dropped, greedy and sampled, at natural and at forced acceptance.
// (This test links the library's objects, because States are not exported. A program of its own, so that it runs beside the engine's other tests.)
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>

#include "gpu_test.hpp"
#include "runtime/checkpoint.hpp"
#include "runtime/cuda/run.hpp"
#include "runtime/decode.hpp"

namespace specstate::runtime {
namespace {

using gpu_test::gpu_here;
using gpu_test::small;

const Checkpoint& model() {
  static const Checkpoint m = load_checkpoint(find_embedded_model());
  return m;
}

/// The 50 shortest, in full.
std::vector<std::vector<int>> held_out() {
  std::vector<std::pair<std::uintmax_t, std::filesystem::path>> files;
  for (const auto& e : std::filesystem::directory_iterator(std::filesystem::path(find_embedded_model()) / "prompts"))
    files.emplace_back(e.file_size(), e.path());
  std::sort(files.begin(), files.end());
  files.resize(std::min<std::size_t>(files.size(), small() ? 2 : 50));
  std::vector<std::vector<int>> prompts;
  for (const auto& [size, path] : files) {
    std::ifstream file(path);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    prompts.push_back(tokens_of(small() ? text.substr(0, 6) : text, model().target.config));
  }
  std::mt19937 random(4);  // long ones among short ones
  std::shuffle(prompts.begin(), prompts.end(), random);
  return prompts;
}

struct Case {
  Mode mode;
  int forced;
};

class HeldOut : public testing::TestWithParam<double> {};

TEST_P(HeldOut, IsLosslessAfterEveryStep) {
  SPECSTATE_NEEDS_GPU();
  if (small() && GetParam() > 0) return;
  const auto prompts = held_out();
  const std::size_t n = prompts.size();
  GenerateOptions options;
  options.max_new_tokens = small() ? 3 : 48, options.deterministic = true, options.chunk = 1024, options.temperature = GetParam(),
  options.seed = 5;
  cuda::States plain_states;
  const Report plain = cuda::decode(model(), prompts, options, Mode::kPlain, {}, &plain_states);
  std::vector<std::vector<int>> known;
  for (const RequestReport& r : plain.requests) known.push_back(r.tokens);
  options.max_batch = 16;
  std::size_t states_seen = 0;
  for (const auto& [mode, forced] :
       {Case{Mode::kDFlash, 0}, Case{Mode::kDSpark, 0}, Case{Mode::kAuto, 0}, Case{Mode::kDFlash, 2}, Case{Mode::kDSpark, 7}}) {
    if (small() && (mode != Mode::kDFlash || !forced)) continue;
    const std::string what = name_of(mode) + (forced ? " forced to " + std::to_string(forced) : "");
    options.force_accept = forced;
    options.start_steps.clear(), options.drop_steps.clear();
    // A request more each step, as long as steps commit few: the batch is 1, 2, ... 16, and as small again when the last ones end.
    for (std::size_t i = 0; i < n; ++i) {
      const int start = static_cast<int>(forced == 2 ? i : i / 3);
      options.start_steps.push_back(start), options.drop_steps.push_back(i % 5 == 3 ? start + 2 + static_cast<int>(i) % 4 : -1);
    }
    cuda::States states;
    const Report report = cuda::decode(model(), prompts, options, mode, {}, &states, forced ? known : decltype(known){});
    if (!small() && forced == 2) EXPECT_EQ(report.gpu.graphs, 5) << "batches of 1, 2, 4, 8 and 16, rounded up";
    int dropped_midway = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const RequestReport& r = report.requests[i];
      const std::vector<int>& expected = plain.requests[i].tokens;
      const bool dropped = r.finish == "dropped";
      dropped_midway += dropped && !r.tokens.empty();
      ASSERT_TRUE(dropped ? r.tokens.size() <= expected.size() : r.tokens.size() == expected.size()) << what << ", request " << i;
      ASSERT_TRUE(std::equal(r.tokens.begin(), r.tokens.end(), expected.begin())) << what << ", request " << i;
      const std::map<int, std::uint64_t> digests(plain_states[i].begin(), plain_states[i].end());
      ASSERT_TRUE(dropped || !states[i].empty());
      for (const auto& [length, digest] : states[i]) {
        ASSERT_TRUE(digests.count(length)) << length;
        ASSERT_EQ(digests.at(length), digest) << what << ", request " << i << " at " << length;
        ++states_seen;
      }
    }
    if (!small()) EXPECT_GE(dropped_midway, 3) << what;
    if (forced) EXPECT_GT(report.accepted_lengths[static_cast<std::size_t>(forced)], report.steps * 3 / 4) << what;
  }
  RecordProperty("prompts", std::to_string(n));
  RecordProperty("states", std::to_string(states_seen));
  std::printf("%zu prompts, %zu states after steps\n", n, states_seen);
}
INSTANTIATE_TEST_SUITE_P(EngineGpu, HeldOut, testing::Values(0.0, 0.8));

}  // namespace
}  // namespace specstate::runtime
