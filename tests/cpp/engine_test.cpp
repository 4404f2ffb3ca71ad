// The engine on small random models: speculation changes neither a token nor a bit of committed state, whatever is accepted, wherever
// the rows reside, however the prompt is cut and whoever shares the batch.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <span>
#include <sstream>
#include <string>

#include "core/numeric.hpp"
#include "runtime/auto.hpp"
#include "runtime/decode.hpp"
#include "runtime/kernels.hpp"
#include "runtime/safetensors.hpp"
#include "runtime/sampler.hpp"
#include "runtime/select.hpp"
#include "runtime/synthetic.hpp"
#include "specstate/error.hpp"
#include "specstate/runtime.hpp"
#include "text_of.hpp"

using namespace specstate;
using namespace specstate::runtime;
using specstate::testing::text_of;

namespace {

std::string folder_of(const std::string& name) {
  return (std::filesystem::temp_directory_path() / ("specstate_engine_test_" + name + "_" + std::to_string(::getpid()))).string();
}

/// A small model: top-k 8, so that a prompt of a few dozen bytes already selects, misses and evicts.
const std::string& model_folder() {
  static const std::string folder = [] {
    const std::string f = folder_of("model");
    write_synthetic_checkpoint(f, SyntheticShape{}, 7);
    return f;
  }();
  return folder;
}

const Checkpoint& model() {
  static const Checkpoint m = load_checkpoint(model_folder());
  return m;
}

struct Cleanup : ::testing::Environment {
  void TearDown() override {
    for (const char* name : {"model", "damaged", "eos"}) std::filesystem::remove_all(folder_of(name));
  }
};
const auto* const kCleanup = ::testing::AddGlobalTestEnvironment(new Cleanup);

const std::vector<std::string> kPrompts = {"In the beginning", "x",
                                           "And it came to pass in those days, that there went out a decree from Caesar Augustus"};

GenerateOptions options_of(Mode mode, double temperature = 0) {
  GenerateOptions o;
  o.mode = mode;
  o.temperature = temperature;
  o.seed = 11;
  o.max_new_tokens = 40;
  o.hot_slots = 8;
  o.chunk = 16;
  return o;
}

void expect_same(const Report& a, const Report& b, const std::string& what) {
  ASSERT_EQ(a.requests.size(), b.requests.size());
  for (std::size_t i = 0; i < a.requests.size(); ++i) {
    EXPECT_EQ(a.requests[i].tokens, b.requests[i].tokens) << what << ", request " << i;
    EXPECT_EQ(a.requests[i].state_digest, b.requests[i].state_digest) << what << ", request " << i;
    EXPECT_EQ(a.requests[i].finish, b.requests[i].finish) << what << ", request " << i;
  }
}

TEST(Engine, SpeculationIsLosslessAtEveryAcceptedLength) {
  Engine engine(model_folder());
  for (const double temperature : {0.0, 0.8}) {
    const Report plain = engine.generate(kPrompts, options_of(Mode::kPlain, temperature));
    for (const Mode mode : {Mode::kDFlash, Mode::kDSpark})
      for (int force = 0; force <= engine.window(mode); ++force) {
        GenerateOptions o = options_of(mode, temperature);
        o.force_accept = force;
        const Report r = engine.generate(kPrompts, o);
        const std::string what =
            std::string(name_of(mode)) + ", forced " + std::to_string(force) + ", temperature " + std::to_string(temperature);
        expect_same(plain, r, what);
        // Forcing really forces: all steps but the last ones of a request commit exactly so many.
        if (force > 0)
          EXPECT_GE(r.accepted_lengths[static_cast<std::size_t>(force)], r.steps - 2 * static_cast<std::int64_t>(kPrompts.size())) << what;
      }
  }
}

TEST(Engine, SamplingDependsOnTheSeedAlone) {
  Engine engine(model_folder());
  const Report a = engine.generate(kPrompts, options_of(Mode::kPlain, 1.0));
  GenerateOptions other = options_of(Mode::kPlain, 1.0);
  other.seed = 12;
  EXPECT_NE(a.requests[0].tokens, engine.generate(kPrompts, other).requests[0].tokens);
  EXPECT_NE(a.requests[0].tokens, engine.generate(kPrompts, options_of(Mode::kPlain)).requests[0].tokens);
}

TEST(Engine, ResidencyNeverChangesABit) {
  Engine engine(model_folder());
  for (const Mode mode : {Mode::kPlain, Mode::kDFlash, Mode::kDSpark}) {
    const Report small = engine.generate(kPrompts, options_of(mode));
    EXPECT_GT(small.hisparse.misses, 0);
    for (const int hot : {9, 12, 40, 1024}) {
      GenerateOptions o = options_of(mode);
      o.hot_slots = hot;
      const Report r = engine.generate(kPrompts, o);
      expect_same(small, r, std::string(name_of(mode)) + ", hot slots " + std::to_string(hot));
      EXPECT_LE(r.hisparse.misses, small.hisparse.misses);
    }
  }
}

TEST(Engine, ThePrefillChunkNeverChangesABit) {
  Engine engine(model_folder());
  for (const Mode mode : {Mode::kPlain, Mode::kDFlash, Mode::kDSpark}) {
    const Report r = engine.generate(kPrompts, options_of(mode));
    for (const int chunk : {1, 7, 4096}) {
      GenerateOptions o = options_of(mode);
      o.chunk = chunk;
      expect_same(r, engine.generate(kPrompts, o), "chunk " + std::to_string(chunk));
    }
  }
}

TEST(Engine, ARequestDoesNotDependOnItsBatch) {
  Engine engine(model_folder());
  for (const Mode mode : {Mode::kPlain, Mode::kDFlash, Mode::kDSpark}) {
    for (const double temperature : {0.0, 1.0}) {
      const Report batch = engine.generate(kPrompts, options_of(mode, temperature));
      for (std::size_t i = 0; i < kPrompts.size(); ++i) {
        const Report alone = engine.generate({kPrompts[i]}, options_of(mode, temperature));
        EXPECT_EQ(alone.requests[0].tokens, batch.requests[i].tokens);
        EXPECT_EQ(alone.requests[0].state_digest, batch.requests[i].state_digest);
      }
    }
  }
}

TEST(Engine, ShortRunsEndWhereTheyShould) {
  Engine engine(model_folder());
  const Report longest = engine.generate({kPrompts[2]}, options_of(Mode::kPlain));
  for (const Mode mode : {Mode::kPlain, Mode::kDFlash, Mode::kDSpark})
    for (const int n : {1, 2, 3, 5}) {
      GenerateOptions o = options_of(mode);
      o.max_new_tokens = n;
      const Report r = engine.generate({kPrompts[2]}, o);
      EXPECT_EQ(r.requests[0].finish, "length");
      EXPECT_EQ(r.requests[0].tokens, std::vector<int>(longest.requests[0].tokens.begin(), longest.requests[0].tokens.begin() + n));
      EXPECT_EQ(r.committed_tokens, n - 1);
    }
}

TEST(Engine, TheContextEndsARun) {
  Engine engine(model_folder());
  const std::string prompt(static_cast<std::size_t>(engine.context() - 8), 'q');
  GenerateOptions o = options_of(Mode::kPlain);
  const Report plain = engine.generate({prompt}, o);
  EXPECT_EQ(plain.requests[0].finish, "context");
  EXPECT_EQ(plain.requests[0].tokens.size(), 7u);
  for (const Mode mode : {Mode::kDFlash, Mode::kDSpark})
    for (const int force : {0, 1, 3, 4}) {
      o.mode = mode;
      o.force_accept = force;
      expect_same(plain, engine.generate({prompt}, o), "context");
    }
  EXPECT_EQ(engine.generate({std::string(static_cast<std::size_t>(engine.context() - 2), 'q')}, options_of(Mode::kDFlash))
                .requests[0]
                .tokens.size(),
            1u);
  EXPECT_EQ(text_of([&] {
              engine.generate({"a", std::string(static_cast<std::size_t>(engine.context() - 1), 'q')});
            }),
            "generate: prompt 2: expected at most 510 bytes (the model's context of 512 positions holds BOS, the prompt and one token), "
            "got 511.");
}

std::string slurp(const std::string& path) {
  std::ifstream f(path, std::ios::binary);
  std::stringstream s;
  s << f.rdbuf();
  return s.str();
}
void spill(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

// EOS at each place of a run, by naming a byte that the model emits there the end of the sequence.
TEST(Engine, EosEndsARunAtAnyPlace) {
  const std::string folder = folder_of("eos");
  std::filesystem::copy(model_folder(), folder,
                        std::filesystem::copy_options::recursive | std::filesystem::copy_options::overwrite_existing);
  const std::string config = slurp(model_folder() + "/config.json");
  const auto name_end = [&](int token) {
    std::string changed = config;
    spill(folder + "/config.json", changed.replace(changed.find("257"), 3, std::to_string(token)));
  };
  // Whatever byte is the end, 257 is no longer emitted, so the draws of all these models agree.
  name_end(0);
  const std::vector<int> tokens = Engine(folder).generate({kPrompts[2]}, options_of(Mode::kPlain, 1.0)).requests[0].tokens;
  int tried = 0;
  for (std::size_t i = 0; i < 10; ++i) {
    if (std::find(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(i), tokens[i]) !=
        tokens.begin() + static_cast<std::ptrdiff_t>(i))
      continue;
    ++tried;
    name_end(tokens[i]);
    Engine engine(folder);
    const Report plain = engine.generate({kPrompts[2]}, options_of(Mode::kPlain, 1.0));
    EXPECT_EQ(plain.requests[0].finish, "eos");
    EXPECT_EQ(plain.requests[0].tokens.size(), i + 1);
    EXPECT_EQ(plain.requests[0].text.size(), i);
    for (const Mode mode : {Mode::kDFlash, Mode::kDSpark})
      for (int force = 0; force <= engine.window(mode); ++force) {
        GenerateOptions o = options_of(mode, 1.0);
        o.force_accept = force;
        expect_same(plain, engine.generate({kPrompts[2]}, o), "EOS at " + std::to_string(i) + ", forced " + std::to_string(force));
      }
  }
  EXPECT_GE(tried, 5);
}

// auto may turn from plain to speculative decoding and back at any step; the drafter then learns what it missed.
RC_GTEST_PROP(Engine, AutoIsLosslessWhereverItTurns, ()) {
  GenerateOptions o = options_of(Mode::kAuto, *rc::gen::elementOf(std::vector<double>{0.0, 1.0}));
  o.max_new_tokens = *rc::gen::inRange(1, 40);
  std::vector<std::vector<int>> prompts;
  for (const std::string& p : kPrompts) prompts.push_back(tokens_of(p, model().target.config));
  const auto turns = *rc::gen::container<std::vector<int>>(40, rc::gen::inRange(-1, 2));
  RunOptions run;
  run.mode = Mode::kAuto;
  run.drafter = [&](std::int64_t step) { return turns[static_cast<std::size_t>(step)]; };
  const Report r = decode(model(), prompts, o, run, {}), plain = decode(model(), prompts, o, {}, {});
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    RC_ASSERT(r.requests[i].tokens == plain.requests[i].tokens);
    RC_ASSERT(r.requests[i].state_digest == plain.requests[i].state_digest);
  }
}

/// A machine on which a plain step takes 1, a draft `draft` and a verify of w rows 1 + (w - 1) * row.
void feed(AutoPolicy& p, double draft, double row, int accepted) {
  if (p.drafter() < 0) return p.plain_step(1, 1);
  const int w = p.width();
  p.speculative_step(draft, 1 + (w - 1) * row, {w}, {std::min(w, accepted)});
}

TEST(Auto, WhatLosesClearlyIsDroppedAfterOneTrial) {
  AutoPolicy p({8, 8});
  std::vector<int> steps;
  for (int i = 0; i < 500; ++i) {
    steps.push_back(p.drafter());
    feed(p, 1, 0.8, 2);
  }
  EXPECT_EQ(std::count(steps.begin(), steps.end(), -1), 498);
  EXPECT_EQ(std::find(steps.begin(), steps.end(), 0) - steps.begin(), 8);
  EXPECT_FALSE(p.alive(0) || p.alive(1));
}

TEST(Auto, GoodDraftsAreKeptWithTheBestDrafter) {
  AutoPolicy p({4, 8});
  for (int i = 0; i < 300; ++i) feed(p, 0.3, 0.1, 6);
  EXPECT_EQ(p.drafter(), 1);  // four rows commit four, eight rows six
  EXPECT_GE(p.width(), 6);
  EXPECT_LE(p.width(), 7);
}

TEST(Auto, WhatLosesNarrowlyIsTriedAgainLessAndLessOften) {
  AutoPolicy p({8});
  std::vector<int> tried;
  for (int i = 0; i < 3000; ++i) {
    if (p.drafter() >= 0) tried.push_back(i);
    feed(p, 0.75, 0.4, 2);
  }
  ASSERT_GE(tried.size(), 4u);
  ASSERT_LE(tried.size(), 12u);
  EXPECT_GT(tried.back() - tried[tried.size() - 2], 2 * (tried[tried.size() - 2] - tried[1]) / 2);
}

TEST(Auto, TheWidthFollowsAcceptance) {
  AutoPolicy p({8});
  for (int i = 0; i < 200; ++i) feed(p, 0.1, 0.2, 8);
  EXPECT_EQ(p.width(), 8);
  for (int i = 0; i < 2000 && p.drafter() >= 0; ++i) feed(p, 0.1, 0.2, 2);
  EXPECT_LE(p.width(), 3);
}

TEST(Engine, CheckLosslessAndTheReport) {
  Engine engine(model_folder());
  GenerateOptions o = options_of(Mode::kDSpark);
  o.check_lossless = true;
  std::string streamed;
  int last = 0;
  Callbacks callbacks;
  callbacks.text = [&](std::size_t, std::string_view bytes) { streamed += bytes; };
  callbacks.prefill = [&](std::size_t, int done, int total) {
    EXPECT_GT(done, last);
    EXPECT_LE(done, total);
    last = done;
  };
  const Report r = engine.generate({kPrompts[2]}, o, callbacks);
  EXPECT_EQ(r.lossless, std::optional<bool>(true));
  EXPECT_EQ(streamed, r.requests[0].text);
  EXPECT_EQ(last, r.requests[0].prompt_tokens);
  EXPECT_EQ(r.committed_tokens, 39);
  EXPECT_EQ(std::accumulate(r.accepted_lengths.begin(), r.accepted_lengths.end(), std::int64_t{0}), r.steps);
  // Everything committed has draft KV: the prompt and all emitted tokens but the last.
  EXPECT_EQ(r.draft_kv.tokens_materialized, r.requests[0].prompt_tokens + 39);
  EXPECT_EQ(r.draft_kv.bytes_written, r.draft_kv.tokens_materialized * 2 * 16 * 2 * 2);
  // Two sparse layers of 20 bfloat16 values a row; each miss moves one row of each.
  EXPECT_EQ(r.hisparse.host_bytes_copied, r.hisparse.misses * 2 * 20 * 2);
  EXPECT_EQ(r.kda.state_bytes, 2 * (64 * 64 + 3 * 64 * 3) * 4);
  EXPECT_GT(r.kda.snapshot_bytes_avoided, 0);
}

TEST(Engine, OptionsAreChecked) {
  Engine engine(model_folder());
  const auto refused = [&](const std::function<void(GenerateOptions&)>& change) {
    GenerateOptions o = options_of(Mode::kDFlash);
    change(o);
    return text_of([&] { engine.generate({"a"}, o); });
  };
  EXPECT_EQ(text_of([&] { engine.generate({}, {}); }), "generate: prompts: expected at least one, got none.");
  EXPECT_EQ(refused([](auto& o) { o.max_new_tokens = 0; }), "generate: max_new_tokens: expected 1 or more, got 0.");
  EXPECT_EQ(refused([](auto& o) { o.hot_slots = 7; }), "generate: hot_slots: expected 8 (index_topk) to 1048576, got 7.");
  EXPECT_EQ(refused([](auto& o) { o.chunk = 0; }), "generate: chunk: expected 1 or more, got 0.");
  EXPECT_EQ(refused([](auto& o) { o.temperature = -1; }), "generate: temperature: expected 0 (greedy) or a positive number, got -1.");
  EXPECT_EQ(refused([](auto& o) { o.sampled_proposals = true; }),
            "generate: sampled_proposals: expected a temperature above 0, got greedy decoding.");
}

TEST(Engine, DamagedModelsAreRefused) {
  const std::string folder = folder_of("damaged");
  const auto refusal = [&](const std::function<void()>& damage) {
    std::filesystem::remove_all(folder);
    std::filesystem::copy(model_folder(), folder, std::filesystem::copy_options::recursive);
    damage();
    return text_of([&] { Engine engine(folder); });
  };
  EXPECT_EQ(refusal([] {}), "");
  EXPECT_EQ(refusal([&] { std::filesystem::remove(folder + "/config.json"); }),
            folder + ": expected a model folder with config.json and model.safetensors, found no config.json.");
  EXPECT_NE(refusal([&] { std::filesystem::resize_file(folder + "/model.safetensors", 20000); }).find("is the file truncated"),
            std::string::npos);
  EXPECT_NE(refusal([&] {
              std::filesystem::resize_file(folder + "/dspark/model.safetensors", 4);
            }).find("/dspark/model.safetensors: expected at least 8 bytes"),
            std::string::npos);
  // A weight that is no number is found where it is, not in what it spoils.
  const auto spoil = [&](const std::string& file, const std::string& tensor, std::size_t at, std::string bits) {
    return refusal([&] {
      std::string weights = slurp(folder + file);
      const SafetensorsIndex index = parse_safetensors(std::as_bytes(std::span(weights)), file);
      weights.replace(index.data_begin + index.tensors.at(tensor).begin + at * bits.size(), bits.size(), bits);
      spill(folder + file, weights);
    });
  };
  const std::string nan16("\xC0\x7F", 2), infinity16("\x80\xFF", 2), nan32("\x01\x00\x80\x7F", 4);
  EXPECT_EQ(spoil("/model.safetensors", "model.layers.1.mlp.up_proj.weight", 5, nan16),
            folder + "/model.safetensors: tensor 'model.layers.1.mlp.up_proj.weight': expected finite numbers, got nan at element 5.");
  EXPECT_EQ(spoil("/model.safetensors", "model.norm.weight", 31, infinity16),
            folder + "/model.safetensors: tensor 'model.norm.weight': expected finite numbers, got infinity at element 31.");
  EXPECT_EQ(spoil("/model.safetensors", "model.layers.0.self_attn.A_log", 0, nan32),
            folder + "/model.safetensors: tensor 'model.layers.0.self_attn.A_log': expected finite numbers, got nan at element 0.");
  EXPECT_EQ(spoil("/dspark/model.safetensors", "confidence.bias", 0, nan32),
            folder + "/dspark/model.safetensors: tensor 'confidence.bias': expected finite numbers, got nan at element 0.");
  // A configuration that asks for other sizes than the file holds: the tensor is named, and nothing of that size is allocated.
  std::string config = slurp(model_folder() + "/config.json");
  config.replace(config.find("\"hidden_size\": 32"), 17, "\"hidden_size\": 1000000");
  EXPECT_EQ(refusal([&] { spill(folder + "/config.json", config); }),
            folder + "/model.safetensors: tensor 'model.embed_tokens.weight': expected bfloat16 [264, 1000000], got bfloat16 [264, 32].");
  std::filesystem::remove_all(folder);
  std::filesystem::copy(model_folder(), folder, std::filesystem::copy_options::recursive);
  std::filesystem::remove_all(folder + "/dflash");
  Engine engine(folder);
  EXPECT_FALSE(engine.has(Mode::kDFlash));
  EXPECT_TRUE(engine.has(Mode::kDSpark));
  EXPECT_EQ(text_of([&] { engine.generate({"a"}, options_of(Mode::kDFlash)); }),
            "generate: mode: expected a drafter that the model folder has, got dflash.");
}

// After every step of a random history of windows, proposals and accepted lengths, the committed state of a batch is bit for bit that of
// plain decoding, and so are the logits of the rows that stand.
RC_GTEST_PROP(Target, EveryCommitEqualsPlainDecoding, ()) {
  constexpr int kRequests = 2, kWindow = 4, kContext = 160;
  const TargetConfig& c = model().target.config;
  const int hot = *rc::gen::inRange(c.top_k, c.top_k + 6);
  Target spec(model().target, {kRequests, hot, kWindow, kContext}, {0}), plain(model().target, {kRequests, c.top_k, 1, kContext}, {});
  const auto token = [] { return *rc::gen::inRange(0, 258); };
  for (int r = 0; r < kRequests; ++r) {
    std::vector<int> prompt(static_cast<std::size_t>(*rc::gen::inRange(1, 40)));
    for (int& t : prompt) t = token();
    spec.prefill(r, prompt, true);
    plain.prefill(r, prompt, true);
  }
  const int steps = *rc::gen::inRange(1, 12);
  for (int s = 0; s < steps; ++s) {
    Window w;
    std::vector<int> tokens, accept;
    for (int r = 0; r < kRequests; ++r) {
      if (*rc::gen::inRange(0, 4) == 0) continue;  // a request may sit out
      w.slots.push_back(r);
      w.starts.push_back(spec.n_of(r));
      w.lens.push_back(*rc::gen::inRange(1, kWindow + 1));
      accept.push_back(*rc::gen::inRange(1, w.lens.back() + 1));
      for (int i = 0; i < w.lens.back(); ++i) tokens.push_back(token());
    }
    if (w.slots.empty()) continue;
    spec.forward(w, tokens, Target::Way::kVerify);
    std::int64_t row = 0;
    for (std::size_t b = 0; b < w.slots.size(); row += w.lens[b++])
      for (int i = 0; i < accept[b]; ++i) {
        const int one[] = {tokens[static_cast<std::size_t>(row + i)]};
        plain.forward({{w.slots[b]}, {1}, {w.starts[b] + i}}, one, Target::Way::kDecode);
        RC_ASSERT(std::memcmp(plain.logits(0), spec.logits(row + i), static_cast<std::size_t>(c.vocab) * 4) == 0);
        plain.commit({1});
      }
    spec.commit(accept);
    for (int r = 0; r < kRequests; ++r) RC_ASSERT(spec.digest(r) == plain.digest(r));
  }
}

TEST(Target, TheDigestSeesEveryPartOfTheState) {
  Target a(model().target, {1, 8, 4, 64}, {}), b(model().target, {1, 8, 4, 64}, {});
  const std::vector<int> one{256, 1, 2, 3, 4, 5}, other{256, 1, 2, 3, 4, 6};
  a.prefill(0, one, true);
  b.prefill(0, one, true);
  EXPECT_EQ(a.digest(0), b.digest(0));
  b.reset(0);
  b.prefill(0, other, true);
  EXPECT_NE(a.digest(0), b.digest(0));
  b.reset(0);
  b.prefill(0, one, true);
  EXPECT_EQ(a.digest(0), b.digest(0));
}

// Incremental materialization, with rejected rows in between, equals one pass over the same features.
TEST(Drafter, IncrementalEqualsOneShot) {
  for (const std::optional<DraftWeights>* weights : {&model().dflash, &model().dspark}) {
    const int width = static_cast<int>((*weights)->config.feature_layers.size()) * model().target.config.hidden;
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    Floats features(static_cast<std::size_t>(50 * width));
    for (float& f : features) f = normal(random);
    Drafter once(**weights, model().target, 1, 64), steps(**weights, model().target, 2, 64);
    once.materialize({{0}, {50}, {0}}, features.data(), {50});
    for (int n = 0; n < 50;) {
      const int rows = std::min(4, 50 - n), accept = 1 + n % rows;
      // The rejected rows' features are the true ones of later positions: were they written, they would be wrong for this position's turn.
      steps.materialize({{1}, {rows}, {n}}, features.data() + n * width, {accept});
      n += accept;
    }
    EXPECT_EQ(once.known(0), 50);
    EXPECT_EQ(once.digest(0), steps.digest(1));
    Proposals a, b;
    const DraftRequest first[] = {{0, 65, 50, 0}}, second[] = {{1, 65, 50, 0}};
    once.propose(first, {}, a);
    steps.propose(second, {}, b);
    EXPECT_EQ(a.tokens, b.tokens);
    EXPECT_EQ(a.confidence, b.confidence);
  }
}

// Two samples of the second token, drawn plainly and by rejection sampling, come from one distribution.
TEST(Engine, RejectionSamplingKeepsTheDistribution) {
  Engine engine(model_folder());
  constexpr int kRuns = 1500;
  std::map<int, std::pair<double, double>> counts;
  for (int seed = 0; seed < kRuns; ++seed) {
    GenerateOptions o = options_of(Mode::kPlain, 0.35);
    o.max_new_tokens = 3;
    o.seed = static_cast<std::uint64_t>(seed);
    ++counts[engine.generate({"z"}, o).requests[0].tokens[1]].first;
    o.mode = Mode::kDSpark;
    o.sampled_proposals = true;
    o.seed += 1000000;
    ++counts[engine.generate({"z"}, o).requests[0].tokens[1]].second;
  }
  // Rare tokens are pooled, so that each cell expects enough.
  double chi = 0, rest_a = 0, rest_b = 0;
  int cells = 0;
  const auto add = [&](double a, double b) {
    chi += (a - b) * (a - b) / (a + b);
    ++cells;
  };
  for (const auto& [token, n] : counts) {
    if (n.first + n.second >= 20)
      add(n.first, n.second);
    else
      rest_a += n.first, rest_b += n.second;
  }
  if (rest_a + rest_b > 0) add(rest_a, rest_b);
  ASSERT_GE(cells, 3);
  // Mean cells - 1, standard deviation sqrt(2 (cells - 1)): five of them are never seen by chance, and the seeds are fixed.
  EXPECT_LT(chi, cells - 1 + 5 * std::sqrt(2.0 * (cells - 1)));
}

RC_GTEST_PROP(Select, EqualsASort, ()) {
  const auto n = *rc::gen::inRange<std::size_t>(1, 400);
  const int k = *rc::gen::inRange(1, 80), kinds = *rc::gen::inRange(1, 50);
  std::vector<float> scores(n);
  for (float& s : scores) s = static_cast<float>(*rc::gen::inRange(-kinds, kinds)) * 0.37f;  // ties on purpose
  std::vector<int> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)]; });
  order.resize(std::min<std::size_t>(n, static_cast<std::size_t>(k)));
  std::sort(order.begin(), order.end());
  std::vector<std::int32_t> got(n, -7);
  std::vector<std::uint64_t> scratch;
  got.resize(static_cast<std::size_t>(select_top_k(scores.data(), static_cast<std::int64_t>(n), k, got.data(), scratch)));
  RC_ASSERT(got == order);
}

TEST(Select, NotANumberIsDefined) {
  std::vector<float> scores(100, NAN);
  for (std::size_t i = 0; i < 100; i += 3) scores[i] = static_cast<float>(i);
  std::vector<std::int32_t> got(100);
  std::vector<std::uint64_t> scratch;
  EXPECT_EQ(select_top_k(scores.data(), 100, 10, got.data(), scratch), 10);
  for (int i = 1; i < 10; ++i) EXPECT_LT(got[static_cast<std::size_t>(i - 1)], got[static_cast<std::size_t>(i)]);
}

std::vector<float> normals(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> v(n);
  for (float& x : v) x = normal(random);
  return v;
}

TEST(Kernels, IndexScoresEqualTheFormula) {
  for (const int n : {1, 15, 16, 17, 64, 65, 131})
    for (const int dim : {1, 8, 33}) {
      const int heads = 3;
      const auto q = normals(static_cast<std::size_t>(heads * dim), 1), weights = normals(heads, 2),
                 values = normals(static_cast<std::size_t>(n * dim), 3);
      const int blocks = (n + 15) / 16;
      std::vector<std::uint16_t> keys(static_cast<std::size_t>(blocks * 16 * dim), 0x7FC0);
      std::vector<float> scores(static_cast<std::size_t>(blocks * 16), NAN);
      const auto key = [&](int p, int i) -> std::uint16_t& { return keys[static_cast<std::size_t>((p / 16 * dim + i) * 16 + p % 16)]; };
      for (int p = 0; p < n; ++p)
        for (int i = 0; i < dim; ++i) key(p, i) = core::from_float<core::bfloat16>(values[static_cast<std::size_t>(p * dim + i)]).bits;
      index_scores(keys.data(), n, dim, q.data(), weights.data(), heads, scores.data());
      for (int p = 0; p < n; ++p) {
        double want = 0;
        for (int h = 0; h < heads; ++h) {
          double dot = 0;
          for (int i = 0; i < dim; ++i) dot += double{q[static_cast<std::size_t>(h * dim + i)]} * core::to_float(core::bfloat16{key(p, i)});
          want += weights[static_cast<std::size_t>(h)] * std::max(dot, 0.0);
        }
        EXPECT_NEAR(scores[static_cast<std::size_t>(p)], want, 1e-4);
        EXPECT_FALSE(std::signbit(scores[static_cast<std::size_t>(p)]) && scores[static_cast<std::size_t>(p)] == 0);
      }
    }
}

TEST(Kernels, LatentAttentionEqualsTheFormula) {
  for (const int n : {1, 7, 16, 64})
    for (const int width : {5, 20, 80}) {
      const int heads = 2, values = width - 4;
      const auto q = normals(static_cast<std::size_t>(heads * width), 5), flat = normals(static_cast<std::size_t>(n * width), 6);
      std::vector<std::uint16_t> rows(flat.size());
      for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = core::from_float<core::bfloat16>(flat[i]).bits;
      std::vector<const std::uint16_t*> pointers;
      for (int p = 0; p < n; ++p) pointers.push_back(rows.data() + p * width);
      std::vector<float> out(static_cast<std::size_t>(heads * values), NAN),
          scratch(static_cast<std::size_t>(latent_scratch(n, width)), NAN);
      latent_attention(pointers.data(), n, width, values, q.data(), heads, out.data(), scratch.data());
      for (int h = 0; h < heads; ++h) {
        std::vector<double> weight(static_cast<std::size_t>(n));
        double sum = 0;
        for (int p = 0; p < n; ++p) {
          double s = 0;
          for (int i = 0; i < width; ++i)
            s += double{q[static_cast<std::size_t>(h * width + i)]} *
                 core::to_float(core::bfloat16{rows[static_cast<std::size_t>(p * width + i)]});
          sum += weight[static_cast<std::size_t>(p)] = std::exp(s);
        }
        for (int i = 0; i < values; ++i) {
          double want = 0;
          for (int p = 0; p < n; ++p)
            want +=
                weight[static_cast<std::size_t>(p)] / sum * core::to_float(core::bfloat16{rows[static_cast<std::size_t>(p * width + i)]});
          EXPECT_NEAR(out[static_cast<std::size_t>(h * values + i)], want, 2e-5);
        }
      }
    }
}

TEST(Kernels, BlockAttentionEqualsTheFormula) {
  for (const int n : {4, 21, 70})
    for (const int dim : {3, 16, 40}) {
      const int nq = 11;  // a group of eight and three by themselves
      const auto q = normals(static_cast<std::size_t>(nq * dim), 7), k = normals(static_cast<std::size_t>(n * dim), 8),
                 v = normals(static_cast<std::size_t>(n * dim), 9);
      const std::vector<std::int64_t> first{0, 1, 2, 3, 0, 0, 1, 1, 2, 3, 0};
      std::vector<float> blocks(static_cast<std::size_t>((n + 15) / 16 * 16 * dim), NAN);
      for (int p = 0; p < n; ++p)
        for (int c = 0; c < dim; ++c)
          blocks[static_cast<std::size_t>((p / 16 * dim + c) * 16 + p % 16)] = k[static_cast<std::size_t>(p * dim + c)];
      std::vector<float> out(static_cast<std::size_t>(nq * dim), NAN), scratch(static_cast<std::size_t>(block_scratch(nq, n)), NAN);
      block_attention(q.data(), dim, nq, blocks.data(), v.data(), n, first.data(), dim, out.data(), dim, scratch.data());
      for (int i = 0; i < nq; ++i) {
        std::vector<double> want(static_cast<std::size_t>(dim), 0.0);
        double sum = 0;
        for (int p = static_cast<int>(first[static_cast<std::size_t>(i)]); p < n; ++p) {
          double s = 0;
          for (int c = 0; c < dim; ++c) s += double{q[static_cast<std::size_t>(i * dim + c)]} * k[static_cast<std::size_t>(p * dim + c)];
          sum += std::exp(s);
          for (int c = 0; c < dim; ++c) want[static_cast<std::size_t>(c)] += std::exp(s) * v[static_cast<std::size_t>(p * dim + c)];
        }
        for (int c = 0; c < dim; ++c)
          EXPECT_NEAR(out[static_cast<std::size_t>(i * dim + c)], want[static_cast<std::size_t>(c)] / sum, 2e-5);
      }
    }
}

TEST(Sampler, DrawsByInverseCdfAndForbidsTheReserved) {
  std::vector<float> logits(264, 0.0f);
  logits[258] = 100;
  forbid(logits.data(), 264, 257);
  EXPECT_EQ(argmax(logits.data(), 264), 0);
  std::vector<double> p(264);
  probabilities(logits.data(), 264, 1.0, p.data());
  EXPECT_EQ(p[256], 0);
  EXPECT_EQ(p[258], 0);
  EXPECT_NEAR(p[257], 1.0 / 257, 1e-12);
  EXPECT_EQ(inverse_cdf(p.data(), 264, 0.0), 0);
  EXPECT_EQ(inverse_cdf(p.data(), 264, 0.5), 128);
  EXPECT_EQ(inverse_cdf(p.data(), 264, 1 - 1e-17), 257);
  double sum = 0;
  for (std::uint64_t i = 0; i < 10000; ++i) {
    const double u = uniform(1, 2, i, Draw::kToken);
    ASSERT_TRUE(u >= 0 && u < 1);
    sum += u;
  }
  EXPECT_NEAR(sum / 10000, 0.5, 0.02);
  EXPECT_NE(uniform(1, 2, 3, Draw::kToken), uniform(1, 2, 3, Draw::kProposal));
}

}  // namespace
