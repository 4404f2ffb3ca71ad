// The engine against the golden vectors of the embedded model, which an independent float64 NumPy model made (training/golden.py).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "core/numeric.hpp"
#include "runtime/decode.hpp"
#include "runtime/safetensors.hpp"
#include "specstate/runtime.hpp"

using namespace specstate;
using namespace specstate::runtime;

namespace {

const std::string& folder() {
  static const std::string f = find_embedded_model();
  return f;
}
const Checkpoint& model() {
  static const Checkpoint m = load_checkpoint(folder());
  return m;
}

class Golden {
 public:
  explicit Golden(const std::string& name) : file_(folder() + "/golden/" + name + ".safetensors") {}
  template <class T>
  std::vector<T> get(const std::string& name) const {
    const StoredTensor* t = file_.find(name);
    EXPECT_NE(t, nullptr) << name;
    const auto bytes = file_.get(name, std::is_same_v<T, float> ? DType::kFloat32 : DType::kInt32, t->shape);
    std::vector<T> v(bytes.size() / sizeof(T));
    std::memcpy(v.data(), bytes.data(), bytes.size());
    return v;
  }
  std::vector<float> floats(const std::string& name) const { return get<float>(name); }
  std::vector<int> ints(const std::string& name) const { return get<int>(name); }

 private:
  Safetensors file_;
};

/// Relative to the largest wanted value: errors of a residual stream are of that size everywhere.
void expect_near(const float* got, const std::vector<float>& want, double tolerance, const std::string& what) {
  double scale = 0, worst = 0;
  for (const float w : want) scale = std::max(scale, std::abs(double{w}));
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double e = std::abs(double{got[i]} - want[i]);
    worst = std::isnan(e) ? INFINITY : std::max(worst, e);
  }
  EXPECT_LE(worst, tolerance * scale) << what << ", largest value " << scale;
}

std::vector<int> all_layers() {
  std::vector<int> v;
  for (int l = 0; l < model().target.config.layers; ++l) v.push_back(l);
  return v;
}

// fp32 activations against float64; the cached bfloat16 rows may round to the neighbour, which later layers then see.
constexpr double kTolerance = 4e-3;

/// The last `rows` tokens as one verify window, everything before as prefill.
Target run(const std::vector<int>& tokens, int rows, int hot_slots) {
  const int T = static_cast<int>(tokens.size());
  Target t(model().target, {1, hot_slots, rows, T + 8}, all_layers());
  for (int begin = 0; begin < T - rows; begin += 64) {
    const int end = std::min(T - rows, begin + 64);
    t.prefill(0, {tokens.data() + begin, static_cast<std::size_t>(end - begin)}, end == T - rows);
  }
  t.forward({{0}, {rows}, {T - rows}}, {tokens.data() + T - rows, static_cast<std::size_t>(rows)}, Target::Way::kVerify);
  return t;
}

TEST(GoldenTarget, LogitsHiddenAndState) {
  ASSERT_NE(folder(), "");
  const Golden g("target");
  const TargetConfig& c = model().target.config;
  const std::vector<int> tokens = g.ints("tokens");
  const int T = static_cast<int>(tokens.size()), d = c.hidden, width = c.layers * d;
  Target t = run(tokens, 32, 96);
  expect_near(t.logits(0), g.floats("logits"), kTolerance, "logits");
  for (int l = 0; l < c.layers; ++l) {
    std::vector<float> hidden;
    for (int r = 24; r < 32; ++r) hidden.insert(hidden.end(), t.features() + r * width + l * d, t.features() + r * width + (l + 1) * d);
    expect_near(hidden.data(), g.floats("hidden." + std::to_string(l)), kTolerance, "hidden " + std::to_string(l));
  }
  t.commit({32});
  for (const int l : {3, 7}) {
    std::vector<float> rows;
    for (int p = 0; p < T; ++p)
      for (int i = 0; i < t.sparse().row_values(); ++i) rows.push_back(core::to_float(core::bfloat16{t.sparse().host_row(l, 0, p)[i]}));
    // One unit in the last place of the largest value.
    expect_near(rows.data(), g.floats("rows." + std::to_string(l)), 8e-3, "rows " + std::to_string(l));
  }
  for (const int l : {0, 6})
    expect_near(t.kda_state(l, 0), g.floats("state." + std::to_string(l)), kTolerance, "state " + std::to_string(l));
  for (const int l : {0, 1, 2, 4, 5, 6}) {
    const int channels = c.kda_heads * c.kda_dim;
    std::vector<float> window;
    for (int tap = 0; tap < 3; ++tap)
      for (int i = 0; i < 3; ++i)
        for (int ch = 0; ch < channels; ++ch) window.push_back(t.conv_window(l, i, 0)[ch * 3 + tap]);
    expect_near(window.data(), g.floats("conv." + std::to_string(l)), kTolerance, "conv " + std::to_string(l));
  }
}

TEST(GoldenTarget, ALongPromptThatMissesAndEvicts) {
  const Golden g("long");
  const TargetConfig& c = model().target.config;
  Target t = run(g.ints("tokens"), 4, c.top_k);
  expect_near(t.logits(0), g.floats("logits"), kTolerance, "logits");
  const float* last = t.features() + 3 * c.layers * c.hidden;
  expect_near(last, g.floats("hidden"), kTolerance, "hidden");
}

TEST(GoldenTarget, GreedyContinuationInEveryMode) {
  const Golden g("target");
  const std::vector<int> tokens = g.ints("tokens"), greedy = g.ints("greedy");
  const std::vector<float> margin = g.floats("greedy_margin");
  for (const float m : margin) ASSERT_GT(m, 0.02);  // every choice is decided in fp32
  const std::string prompt(tokens.begin() + 1, tokens.end());
  Engine engine(folder());
  GenerateOptions o;
  o.max_new_tokens = static_cast<int>(greedy.size());
  for (const Mode mode : {Mode::kPlain, Mode::kDFlash, Mode::kDSpark, Mode::kAuto}) {
    o.mode = mode;
    const Report r = engine.generate({prompt}, o);
    EXPECT_EQ(r.requests[0].tokens, greedy) << name_of(mode);
    if (mode != Mode::kDFlash && mode != Mode::kDSpark) continue;
    // The drafts accepted in each step, without the bonus token, are those of the reference.
    std::vector<std::int64_t> want(r.accepted_lengths.size(), 0);
    for (const int a : Golden(name_of(mode)).ints("accepted")) ++want[static_cast<std::size_t>(a + 1)];
    std::vector<std::int64_t> got = r.accepted_lengths;
    // The reference cuts its last step by the number of drafts, the engine by the number of tokens: one step may count one less.
    std::int64_t apart = 0;
    for (std::size_t i = 0; i < got.size(); ++i) apart += std::abs(got[i] - want[i]);
    EXPECT_LE(apart, 2) << name_of(mode);
  }
}

TEST(GoldenDrafter, ContextProposalsAndConfidence) {
  const std::vector<int> tokens = Golden("target").ints("tokens");
  const int T = static_cast<int>(tokens.size());
  for (const char* name : {"dflash", "dspark"}) {
    const Golden g(name);
    const DraftWeights& weights = std::string(name) == "dflash" ? *model().dflash : *model().dspark;
    Target target(model().target, {1, 96, 8, T + 8}, weights.config.feature_layers);
    Drafter drafter(weights, model().target, 1, T + 8);
    target.prefill(0, tokens, true);
    drafter.materialize({{0}, {T}, {0}}, target.features(), {T});
    for (int l = 0; l < weights.config.layers; ++l) {
      std::vector<float> k, v;
      for (int p = T - 48; p < T; ++p)
        for (int i = 0; i < weights.config.kv_heads * weights.config.head_dim; ++i) {
          k.push_back(core::to_float(core::bfloat16{drafter.key(l, 0, p)[i]}));
          v.push_back(core::to_float(core::bfloat16{drafter.value(l, 0, p)[i]}));
        }
      expect_near(k.data(), g.floats("k." + std::to_string(l)), 8e-3, name);
      expect_near(v.data(), g.floats("v." + std::to_string(l)), 8e-3, name);
    }
    Proposals out;
    const DraftRequest who[] = {{0, g.ints("last_token")[0], T, 0}};
    drafter.propose(who, {}, out);
    EXPECT_EQ(out.tokens, g.ints("tokens")) << name;
    if (weights.config.kind == DrafterKind::kDSpark) expect_near(out.confidence.data(), g.floats("confidence"), 1e-2, "confidence");
  }
}

}  // namespace
