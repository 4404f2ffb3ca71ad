#include "runtime/decode.hpp"

#include <algorithm>
#include <chrono>

#include "core/match.hpp"
#include "runtime/auto.hpp"
#include "runtime/digest.hpp"
#include "runtime/sampler.hpp"
#include "specstate/accept.hpp"

namespace specstate::runtime {

namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct Request {
  const std::vector<int>* prompt = nullptr;
  std::uint64_t key = 0;
  int limit = 0;             // tokens that may be emitted
  int last = 0;              // the last emitted token, in no state yet
  int start = 0, drop = -1;  // steps, see GenerateOptions
  bool started = false, done = false;
  bool active() const { return started && !done; }
};

class Run {
 public:
  Run(const Checkpoint& model, const std::vector<std::vector<int>>& prompts, const GenerateOptions& options, const RunOptions& run,
      const Callbacks& callbacks);
  Report finish();

 private:
  void come_and_go();
  void prefill(int r);
  void step();
  int choose(float* logits, const Request& request, int position);
  /// Emits tokens to request r until one ends it; returns how many were taken.
  int emit(int r, const int* tokens, int count);
  void propose(Drafter& drafter, const std::vector<int>& active, const std::vector<int>& lens);
  void schedule(int drafter, const std::vector<int>& active, std::vector<int>& lens);
  void materialize(const Window& w, const std::vector<int>& accepted, int drafted);
  void catch_up(std::size_t drafter);
  std::vector<int> accept(const std::vector<int>& active, const Window& w, const std::vector<int>& rows);

  const TargetConfig& config_;
  const GenerateOptions& options_;
  const RunOptions& run_;
  const Callbacks& callbacks_;
  int window_;
  std::vector<Request> requests_;
  std::vector<std::unique_ptr<Drafter>> drafters_;  // those that the mode may use; auto drops the losers
  std::optional<Target> target_;
  std::optional<AutoPolicy> auto_;
  /// Features of committed tokens that a drafter was not given: it gets them when it is asked again.
  std::vector<std::vector<Floats>> pending_;  // [drafters][requests]
  std::vector<float> lagged_;                 // [requests, G] confidences of each request's step before, -1 unknown
  Proposals proposals_;
  std::vector<double> probabilities_;
  std::vector<int> emitted_;           // of one step of one request
  std::vector<std::vector<int>> out_;  // [active] tokens that this step emits
  std::int64_t steps_ = 0, forced_steps_ = 0, plain_steps_ = 0;
  Report::DraftKv dropped_;                      // written by drafters that auto has dropped
  std::vector<std::string> names_;               // [drafters]
  std::vector<std::int64_t> speculative_steps_;  // [drafters]
  Report report_;
};

int context_needed(const std::vector<std::vector<int>>& prompts, const GenerateOptions& options, const TargetConfig& config) {
  std::int64_t most = 0;
  for (const auto& p : prompts) most = std::max<std::int64_t>(most, static_cast<std::int64_t>(p.size()) + options.max_new_tokens);
  return static_cast<int>(std::min<std::int64_t>(most, config.max_length));
}

Run::Run(const Checkpoint& model, const std::vector<std::vector<int>>& prompts, const GenerateOptions& options, const RunOptions& run,
         const Callbacks& callbacks)
    : config_(model.target.config), options_(options), run_(run), callbacks_(callbacks), window_(window_of(model, run.mode)) {
  const int count = static_cast<int>(prompts.size()), context = context_needed(prompts, options, config_);
  for (const auto& [mode, weights] : {std::pair(Mode::kDSpark, &model.dspark), std::pair(Mode::kDFlash, &model.dflash)}) {
    if (!weights->has_value() || (run.mode != mode && run.mode != Mode::kAuto)) continue;
    auto drafter = std::make_unique<Drafter>(**weights, model.target, count, context);
    // Two drafters can share one pass of the target only if they want the same features.
    if (drafters_.empty() || drafter->feature_layers() == drafters_[0]->feature_layers()) {
      drafters_.push_back(std::move(drafter));
      names_.push_back(name_of(mode));
    }
  }
  pending_.assign(drafters_.size(), std::vector<Floats>(prompts.size()));
  speculative_steps_.assign(drafters_.size(), 0);
  if (run.mode == Mode::kAuto) {
    std::vector<int> windows;
    for (const auto& d : drafters_) windows.push_back(d->proposals() + 1);
    auto_.emplace(windows);
  }
  target_.emplace(model.target, TargetLimits{count, options.hot_slots, window_, context},
                  drafters_.empty() ? std::vector<int>{} : drafters_[0]->feature_layers());
  report_.mode = run.mode;
  report_.requests.resize(prompts.size());
  report_.accepted_lengths.assign(at(window_ + 1), 0);
  for (const auto& p : prompts) {
    Request& r = requests_.emplace_back();
    r.prompt = &p;
    Digest key;  // the request's own name: independent of its place in the batch
    for (const int t : p) key.value(static_cast<std::uint64_t>(t));
    r.key = key.result();
    r.limit = std::min(options.max_new_tokens, config_.max_length - static_cast<int>(p.size()));
    const std::size_t i = requests_.size() - 1;
    if (i < options.start_steps.size()) r.start = options.start_steps[i];
    if (i < options.drop_steps.size()) r.drop = options.drop_steps[i];
  }
  const auto begin = std::chrono::steady_clock::now();
  while (std::any_of(requests_.begin(), requests_.end(), [](const Request& r) { return !r.done; })) {
    come_and_go();
    if (std::any_of(requests_.begin(), requests_.end(), [](const Request& r) { return r.active(); }))
      step();
    else
      ++steps_;
  }
  report_.decode_seconds = seconds_since(begin) - report_.prefill_seconds;
}

/// Requests whose step has come are dropped, or read their prompts.
void Run::come_and_go() {
  const auto begin = std::chrono::steady_clock::now();
  for (int r = 0; r < static_cast<int>(requests_.size()); ++r) {
    Request& request = requests_[at(r)];
    if (!request.done && request.drop >= 0 && steps_ >= request.drop) request.done = true, report_.requests[at(r)].finish = "dropped";
    if (request.done || request.started || steps_ < request.start) continue;
    request.started = true;
    prefill(r);
  }
  report_.prefill_seconds += seconds_since(begin);
}

int Run::choose(float* logits, const Request& request, int position) {
  forbid(logits, config_.vocab, config_.eos);
  if (options_.temperature <= 0) return argmax(logits, config_.vocab);
  probabilities_.resize(at(config_.vocab));
  probabilities(logits, config_.vocab, options_.temperature, probabilities_.data());
  return inverse_cdf(probabilities_.data(), config_.vocab,
                     uniform(options_.seed, request.key, static_cast<std::uint64_t>(position), Draw::kToken));
}

int Run::emit(int r, const int* tokens, int count) {
  Request& request = requests_[at(r)];
  RequestReport& report = report_.requests[at(r)];
  std::string bytes;
  int taken = 0;
  while (taken < count && !request.done) {
    const int token = tokens[taken++];
    report.tokens.push_back(token);
    request.last = token;
    if (token == config_.eos)
      report.finish = "eos";
    else if (token < 256)
      bytes += static_cast<char>(token);
    if (token != config_.eos && static_cast<int>(report.tokens.size()) == request.limit)
      report.finish = request.limit == options_.max_new_tokens ? "length" : "context";
    request.done = !report.finish.empty();
  }
  report.text += bytes;
  if (callbacks_.text && !bytes.empty()) callbacks_.text(at(r), bytes);
  return taken;
}

void Run::prefill(int r) {
  const std::vector<int>& prompt = *requests_[at(r)].prompt;
  const int total = static_cast<int>(prompt.size());
  report_.requests[at(r)].prompt_tokens = total;
  for (int begin = 0; begin < total; begin += options_.chunk) {
    const int end = std::min(total, begin + options_.chunk);
    target_->prefill(r, {prompt.data() + begin, at(end - begin)}, end == total);
    for (const auto& d : drafters_) d->materialize({{r}, {end - begin}, {begin}}, target_->features(), {end - begin});
    if (callbacks_.prefill) callbacks_.prefill(at(r), end, total);
  }
  const int first = choose(target_->logits(0), requests_[at(r)], total);
  emit(r, &first, 1);
}

void Run::propose(Drafter& drafter, const std::vector<int>& active, const std::vector<int>& lens) {
  std::vector<DraftRequest> who;
  for (const int r : active) who.push_back({r, requests_[at(r)].last, target_->n_of(r), requests_[at(r)].key});
  drafter.propose(who, {options_.sampled_proposals, options_.temperature, options_.seed}, proposals_);
  if (run_.known.empty()) return;
  // Forced acceptance: K - 1 proposals become right, the next one wrong.
  const int G = proposals_.count, right = run_.lengths[at(forced_steps_++) % run_.lengths.size()] - 1;
  for (std::size_t i = 0; i < active.size(); ++i) {
    const std::vector<int>& known = run_.known[at(active[i])];
    const std::size_t done = report_.requests[at(active[i])].tokens.size();
    for (int k = 0; k < std::min(G, right + 1) && k + 1 < lens[i]; ++k) {
      const int truth = done + at(k) < known.size() ? known[done + at(k)] : 0;
      proposals_.tokens[i * at(G) + at(k)] = k < right ? truth : (truth + 1) % 256;
    }
  }
}

// How many rows of each window stand, and the tokens that they emit.
std::vector<int> Run::accept(const std::vector<int>& active, const Window& w, const std::vector<int>& rows) {
  const std::int64_t b = static_cast<std::int64_t>(active.size()), V = config_.vocab;
  const std::int64_t W = *std::max_element(w.lens.begin(), w.lens.end());
  std::vector<std::int64_t> candidates(at(b * W), -1), target(at(b * W), 0), out(at(b * W));
  std::vector<std::int32_t> lens(at(b)), verify_lens(w.lens.begin(), w.lens.end());
  const TensorView out_view(out.data(), DType::kInt64, {b, W}), lens_view(lens.data(), DType::kInt32, {b});
  std::int64_t row = 0;
  if (!options_.sampled_proposals || W == 1) {
    for (std::int64_t i = 0; i < b; ++i)
      for (std::int64_t j = 0; j < w.lens[at(i)]; ++j, ++row) {
        candidates[at(i * W + j)] = rows[at(row)];
        target[at(i * W + j)] = choose(target_->logits(row), requests_[at(active[at(i)])], w.starts[at(i)] + static_cast<int>(j) + 1);
      }
    accept::VerifyGreedyParams params;
    params.candidates = TensorView(candidates.data(), DType::kInt64, {b, W});
    params.target_argmax = TensorView(target.data(), DType::kInt64, {b, W});
    params.verify_lens = TensorView(verify_lens.data(), DType::kInt32, {b});
    params.accept_lens = lens_view;
    params.out_tokens = out_view;
    accept::verify_greedy(params);
  } else {
    std::vector<double> p(at(b * W * V), 1.0), q(at(b * (W - 1) * V), 0.0), u(at(b * W), 0.0);
    for (std::int64_t i = 0; i < b; ++i) {
      const Request& request = requests_[at(active[at(i)])];
      for (std::int64_t j = 0; j < w.lens[at(i)]; ++j, ++row) {
        candidates[at(i * W + j)] = rows[at(row)];
        forbid(target_->logits(row), config_.vocab, config_.eos);
        probabilities(target_->logits(row), config_.vocab, options_.temperature, p.data() + (i * W + j) * V);
        const std::uint64_t position = static_cast<std::uint64_t>(w.starts[at(i)] + j + 1);
        u[at(i * W + j)] = uniform(options_.seed, request.key, position, Draw::kAcceptance);
        if (j + 1 < w.lens[at(i)])
          std::copy_n(proposals_.probability.data() + (i * proposals_.count + j) * V, V, q.data() + (i * (W - 1) + j) * V);
      }
      // The final draw has a number of its own; the window's first position names it.
      u[at(i * W + W - 1)] = uniform(options_.seed, request.key, static_cast<std::uint64_t>(w.starts[at(i)] + 1), Draw::kToken);
    }
    accept::VerifyRejectionParams params;
    params.candidates = TensorView(candidates.data(), DType::kInt64, {b, W});
    params.draft_probs = TensorView(q.data(), DType::kFloat64, {b, W - 1, V});
    params.target_probs = TensorView(p.data(), DType::kFloat64, {b, W, V});
    params.uniforms = TensorView(u.data(), DType::kFloat64, {b, W});
    params.verify_lens = TensorView(verify_lens.data(), DType::kInt32, {b});
    params.accept_lens = lens_view;
    params.out_tokens = out_view;
    accept::verify_rejection(params);
  }
  std::vector<int> accepted(lens.begin(), lens.end());
  out_.assign(at(b), {});
  for (std::int64_t i = 0; i < b; ++i) out_[at(i)].assign(out.begin() + i * W, out.begin() + i * W + accepted[at(i)]);
  return accepted;
}

/// How many rows each request verifies, at most what `lens` allows.
void Run::schedule(int drafter, const std::vector<int>& active, std::vector<int>& lens) {
  const std::int64_t b = static_cast<std::int64_t>(active.size()), G = proposals_.count;
  if (proposals_.confidence.empty() || auto_->trial()) {
    for (int& len : lens) len = std::min(len, auto_->width());
    return;
  }
  lagged_.resize(requests_.size() * at(G), -1.0f);
  std::vector<float> lagged;
  for (const int r : active) lagged.insert(lagged.end(), lagged_.begin() + r * G, lagged_.begin() + (r + 1) * G);
  std::vector<std::int32_t> caps(lens.begin(), lens.end()), planned(at(b));
  std::vector<std::int32_t> probes;
  std::vector<double> speed;
  auto_->speeds(drafter, static_cast<int>(b), probes, speed);
  const std::int64_t n = static_cast<std::int64_t>(probes.size());
  accept::PlanVerifyLengthsParams p;
  p.confidences = TensorView(proposals_.confidence.data(), DType::kFloat32, {b, G});
  p.lagged_confidences = TensorView(lagged.data(), DType::kFloat32, {b, G});
  p.probe_tokens = TensorView(probes.data(), DType::kInt32, {n});
  p.steps_per_second = TensorView(speed.data(), DType::kFloat64, {n});
  p.max_lens = TensorView(caps.data(), DType::kInt32, {b});
  p.out = TensorView(planned.data(), DType::kInt32, {b});
  accept::plan_verify_lengths(p);
  lens.assign(planned.begin(), planned.end());
  for (std::int64_t i = 0; i < b; ++i) std::copy_n(proposals_.confidence.begin() + i * G, G, lagged_.begin() + active[at(i)] * G);
}

void Run::materialize(const Window& w, const std::vector<int>& accepted, int drafted) {
  const int width = target_->feature_width();
  for (std::size_t d = 0; d < drafters_.size(); ++d) {
    if (!drafters_[d]) continue;
    if (!auto_ || static_cast<int>(d) == drafted) {
      drafters_[d]->materialize(w, target_->features(), accepted);
      continue;
    }
    const float* row = target_->features();
    for (std::size_t b = 0; b < w.slots.size(); row += std::int64_t{w.lens[b++]} * width) {
      Floats& pending = pending_[d][at(w.slots[b])];
      pending.insert(pending.end(), row, row + std::int64_t{accepted[b]} * width);
    }
  }
}

/// The drafter learns what was decoded without it.
void Run::catch_up(std::size_t drafter) {
  const int width = target_->feature_width();
  for (int r = 0; r < static_cast<int>(requests_.size()); ++r) {
    Floats& pending = pending_[drafter][at(r)];
    const int rows = static_cast<int>(pending.size()) / width;
    if (rows && requests_[at(r)].active())
      drafters_[drafter]->materialize({{r}, {rows}, {drafters_[drafter]->known(r)}}, pending.data(), {rows});
    pending.clear();
  }
}

// reserve, draft, verify, accept, commit, materialize.
void Run::step() {
  auto begin = std::chrono::steady_clock::now();
  int drafter = drafters_.empty() ? -1 : 0;
  if (auto_) drafter = run_.drafter ? run_.drafter(steps_) : auto_->drafter();
  ++steps_;
  std::vector<int> active;
  Window w;
  for (int r = 0; r < static_cast<int>(requests_.size()); ++r) {
    if (!requests_[at(r)].active()) continue;
    active.push_back(r);
    w.slots.push_back(r);
    w.starts.push_back(target_->n_of(r));
    // A step cannot commit more tokens than may still be emitted, so no more rows are verified (and none beyond the context).
    w.lens.push_back(drafter >= 0 ? std::min(drafters_[at(drafter)]->proposals() + 1,
                                             requests_[at(r)].limit - static_cast<int>(report_.requests[at(r)].tokens.size()))
                                  : 1);
  }
  if (*std::max_element(w.lens.begin(), w.lens.end()) == 1) drafter = -1;  // nothing to propose
  double draft_seconds = 0;
  if (drafter >= 0) {
    catch_up(at(drafter));
    begin = std::chrono::steady_clock::now();  // what was put off is no cost of this step
    propose(*drafters_[at(drafter)], active, w.lens);
    if (auto_ && !run_.drafter) schedule(drafter, active, w.lens);
    draft_seconds = seconds_since(begin);
  }
  std::vector<int> rows;
  for (std::size_t i = 0; i < active.size(); ++i)
    for (int j = 0; j < w.lens[i]; ++j)
      rows.push_back(j == 0 ? requests_[at(active[i])].last : proposals_.tokens[i * at(proposals_.count) + at(j) - 1]);
  const bool certain = *std::max_element(w.lens.begin(), w.lens.end()) == 1;
  target_->forward(w, rows, certain ? Target::Way::kDecode : Target::Way::kVerify);
  std::vector<int> accepted = accept(active, w, rows);
  for (std::size_t i = 0; i < active.size(); ++i) {
    // An EOS among the accepted ends the request: what follows it is neither emitted nor committed.
    accepted[i] = emit(active[i], out_[i].data(), accepted[i]);
    RequestReport& report = report_.requests[at(active[i])];
    ++report.steps;
    report.committed_tokens += accepted[i];
    ++report_.accepted_lengths[at(accepted[i])];
  }
  target_->commit(accepted);
  materialize(w, accepted, drafter);
  ++(drafter >= 0 ? speculative_steps_[at(drafter)] : plain_steps_);
  if (!auto_ || run_.drafter) return;
  const double seconds = seconds_since(begin);
  if (drafter >= 0)
    auto_->speculative_step(draft_seconds, seconds - draft_seconds, w.lens, accepted);
  else
    auto_->plain_step(static_cast<int>(active.size()), seconds);
  for (std::size_t d = 0; d < drafters_.size(); ++d)
    if (drafters_[d] && !auto_->alive(static_cast<int>(d))) {
      dropped_.tokens_materialized += drafters_[d]->stats().tokens_materialized;
      dropped_.bytes_written += drafters_[d]->stats().bytes_written;
      drafters_[d].reset();
    }
}

Report Run::finish() {
  if (auto_) {
    // What ran most speaks for the whole.
    report_.mode = Mode::kPlain;
    report_.note = "auto: " + std::to_string(plain_steps_) + " plain steps";
    std::int64_t most = 0;
    for (std::size_t d = 0; d < names_.size(); ++d) {
      report_.note += ", " + std::to_string(speculative_steps_[d]) + " with " + names_[d];
      if (speculative_steps_[d] > std::max(most, plain_steps_)) {
        most = speculative_steps_[d];
        report_.mode = names_[d] == "dspark" ? Mode::kDSpark : Mode::kDFlash;
      }
      (names_[d] == "dspark" ? report_.costs.dspark_draft : report_.costs.dflash_draft) = auto_->draft_cost(static_cast<int>(d));
    }
    report_.costs.plain = auto_->plain_cost();
    report_.costs.verify = auto_->verify_costs();
  }
  for (std::size_t r = 0; r < requests_.size(); ++r) {
    RequestReport& request = report_.requests[r];
    request.state_digest = target_->digest(static_cast<int>(r));
    report_.steps += request.steps;
    report_.committed_tokens += request.committed_tokens;
  }
  report_.mean_accepted_length = report_.steps ? static_cast<double>(report_.committed_tokens) / static_cast<double>(report_.steps) : 0.0;
  report_.tokens_per_second = report_.decode_seconds > 0 ? static_cast<double>(report_.committed_tokens) / report_.decode_seconds : 0.0;
  const hisparse::CoordinatorStats& sparse = target_->sparse_stats();
  const std::int64_t hits = sparse.unique_hits, misses = sparse.unique_misses;
  report_.hisparse = {hits, misses, sparse.bytes_to_device, 0.0, options_.hot_slots, config_.top_k};
  if (hits + misses > 0) report_.hisparse.hit_rate = static_cast<double>(hits) / static_cast<double>(hits + misses);
  const KdaBytes kda = target_->kda_bytes();
  report_.kda = {kda.state, kda.ring, kda.snapshots_avoided};
  report_.draft_kv = dropped_;
  for (const auto& d : drafters_)
    if (d) {
      report_.draft_kv.tokens_materialized += d->stats().tokens_materialized;
      report_.draft_kv.bytes_written += d->stats().bytes_written;
    }
  return std::move(report_);
}

}  // namespace

int window_of(const Checkpoint& model, Mode mode) {
  if (mode == Mode::kAuto) return std::max(window_of(model, Mode::kDFlash), window_of(model, Mode::kDSpark));
  if (mode == Mode::kDFlash && model.dflash) return model.dflash->config.proposals() + 1;
  if (mode == Mode::kDSpark && model.dspark) return model.dspark->config.proposals() + 1;
  return 1;
}

std::vector<int> tokens_of(const std::string& prompt, const TargetConfig& config) {
  std::vector<int> tokens{config.bos};
  for (const char c : prompt) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

Report decode(const Checkpoint& model, const std::vector<std::vector<int>>& prompts, const GenerateOptions& options, const RunOptions& run,
              const Callbacks& callbacks) {
  return Run(model, prompts, options, run, callbacks).finish();
}

}  // namespace specstate::runtime
