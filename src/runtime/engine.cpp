// The public face of the engine: checks of the options, the choice of `auto`, the comparison with plain decoding.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "core/dispatch.hpp"
#include "core/float_env.hpp"
#include "core/match.hpp"
#include "runtime/cuda/run.hpp"
#include "runtime/decode.hpp"

namespace specstate::runtime {

namespace {

using States = cuda::States::value_type;

/// Tokens and state are those of plain decoding; of a dropped request those that there are. Where states were recorded, each of them.
bool same(const RequestReport& r, const RequestReport& plain, const States* states, const States* plain_states) {
  const bool dropped = r.finish == "dropped";
  if (dropped ? r.tokens.size() > plain.tokens.size() : r.tokens.size() != plain.tokens.size()) return false;
  if (!std::equal(r.tokens.begin(), r.tokens.end(), plain.tokens.begin())) return false;
  if (!states) return dropped || r.state_digest == plain.state_digest;
  std::map<int, std::uint64_t> expected(plain_states->begin(), plain_states->end());
  return std::all_of(states->begin(), states->end(),
                     [&](const auto& s) { return expected.count(s.first) && expected[s.first] == s.second; });
}

constexpr int kLastStep = 1 << 20;  // that a request may wait for: far beyond any context

}  // namespace

struct Engine::Impl {
  Checkpoint model;
};

Engine::Engine(const std::string& folder) : impl_(std::make_unique<Impl>(Impl{load_checkpoint(folder)})) {}
Engine::~Engine() = default;
Engine::Engine(Engine&&) noexcept = default;

bool Engine::has(Mode mode) const {
  if (mode == Mode::kDFlash) return impl_->model.dflash.has_value();
  if (mode == Mode::kDSpark) return impl_->model.dspark.has_value();
  return true;
}
int Engine::context() const { return impl_->model.target.config.max_length; }
int Engine::top_k() const { return impl_->model.target.config.top_k; }
int Engine::window(Mode mode) const { return window_of(impl_->model, mode); }

Report Engine::generate(const std::vector<std::string>& prompts, const GenerateOptions& options, const Callbacks& callbacks) {
  const core::DefaultFloatEnv env;
  const auto require = [](bool ok, const char* argument, const std::string& expected, const std::string& got) {
    if (!ok) core::throw_value(fmt::format("generate: {}: expected {}, got {}.", argument, expected, got));
  };
  const Checkpoint& model = impl_->model;
  const TargetConfig& config = model.target.config;
  require(!prompts.empty(), "prompts", "at least one", "none");
  require(options.max_new_tokens >= 1, "max_new_tokens", "1 or more", std::to_string(options.max_new_tokens));
  require(options.max_batch >= 1 && options.max_batch <= 1024, "max_batch", "1 to 1024", std::to_string(options.max_batch));
  require(options.chunk >= 1, "chunk", "1 or more", std::to_string(options.chunk));
  require(options.hot_slots >= config.top_k && options.hot_slots <= 1 << 20, "hot_slots",
          fmt::format("{} (index_topk) to {}", config.top_k, 1 << 20), std::to_string(options.hot_slots));
  require(options.temperature >= 0 && std::isfinite(options.temperature), "temperature", "0 (greedy) or a positive number",
          fmt::format("{}", options.temperature));
  require(options.force_accept >= 0, "force_accept", "0 (off) or more", std::to_string(options.force_accept));
  require(!options.sampled_proposals || options.temperature > 0, "sampled_proposals", "a temperature above 0", "greedy decoding");
  require(!options.sampled_proposals || !(options.check_lossless || options.force_accept), "sampled_proposals",
          "no check_lossless and no force_accept (plain decoding draws other tokens of the same distribution)", "both");
  const bool on_gpu = options.device == DeviceType::kCuda;
  require(on_gpu || !options.trace, "trace", "a GPU", "the CPU");
  require(options.start_steps.size() <= prompts.size() && options.drop_steps.size() <= prompts.size(), "start_steps, drop_steps",
          "at most one for each prompt", "more");
  for (const int step : options.start_steps)
    require(step >= 0 && step <= kLastStep, "start_steps", fmt::format("0 to {}", kLastStep), std::to_string(step));
  for (const int step : options.drop_steps)
    require(step >= -1 && step <= kLastStep, "drop_steps", fmt::format("-1 (never) to {}", kLastStep), std::to_string(step));
  require(has(options.mode), "mode", "a drafter that the model folder has", name_of(options.mode));

  std::vector<std::vector<int>> tokens;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    // Compare before converting: a prompt may be far larger than any context.
    require(prompts[i].size() + 2 <= static_cast<std::size_t>(config.max_length), fmt::format("prompt {}", i + 1).c_str(),
            fmt::format("at most {} bytes (the model's context of {} positions holds BOS, the prompt and one token)", config.max_length - 2,
                        config.max_length),
            std::to_string(prompts[i].size()));
    tokens.push_back(tokens_of(prompts[i], config));
  }

  RunOptions run;
  run.mode = options.mode;
  const bool speculative = run.mode != Mode::kPlain;
  cuda::States plain_states, states;
  const auto decode_on = [&](const GenerateOptions& o, const RunOptions& r, const Callbacks& c, cuda::States* record) {
    if (!on_gpu) return decode(model, tokens, o, r, c);
    if constexpr (core::cuda_built())
      return cuda::decode(model, tokens, o, r.mode, c, record, r.known);
    else
      core::no_cuda("generate");
  };
  std::optional<Report> plain;
  if (speculative && (options.check_lossless || options.force_accept)) {
    GenerateOptions undisturbed = options;
    undisturbed.start_steps.clear(), undisturbed.drop_steps.clear(), undisturbed.trace = false;
    RunOptions plainly;
    plainly.mode = Mode::kPlain;
    plain = decode_on(undisturbed, plainly, {}, options.check_lossless ? &plain_states : nullptr);
    if (options.force_accept) {
      run.lengths = {options.force_accept};
      for (const RequestReport& r : plain->requests) run.known.push_back(r.tokens);
    }
  }
  Report report = decode_on(options, run, callbacks, plain && options.check_lossless ? &states : nullptr);
  if (options.check_lossless) {
    report.lossless = true;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      RequestReport& r = report.requests[i];
      // Plain decoding is its own reference.
      r.lossless =
          !plain || same(r, plain->requests[i], states.empty() ? nullptr : &states[i], plain_states.empty() ? nullptr : &plain_states[i]);
      report.lossless = *report.lossless && *r.lossless;
    }
  }
  return report;
}

}  // namespace specstate::runtime
