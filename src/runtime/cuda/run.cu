// The loop of a run: begin, draft, verify, accept, emit, commit, materialize are enqueued for a whole step, or replayed as the step's graph,
// and the host reads what a step emitted while the next one runs. Which requests take part, how long they are and when they end is known to the
// device first: a request that ended is left out by `begin` before the host has heard of it.
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "core/match.hpp"
#include "runtime/cuda/drafter.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/cuda/run.hpp"
#include "runtime/cuda/target.hpp"
#include "runtime/digest.hpp"
#include "specstate/accept.hpp"

namespace specstate::runtime::cuda {

namespace {

using i64 = std::int64_t;
using i32 = std::int32_t;
constexpr i64 kEntries = 8;  // records of the ring: more than are ever in flight
constexpr i64 kWorkspace = i64{4} << 20;
constexpr int kWarm = 3, kTrial = 8;  // steps of each kind that auto runs, and then measures

std::size_t at(i64 i) { return static_cast<std::size_t>(i); }
double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}
/// Batches come in powers of two, so that few graphs serve all.
int bucket(int n) {
  int b = 1;
  while (b < n) b *= 2;
  return b;
}
/// What is enqueued meanwhile, for a profiler (NVTX).
struct Range {
  explicit Range(const char* name) { nvtxRangePushA(name); }
  void next(const char* name) {
    nvtxRangePop();
    nvtxRangePushA(name);
  }
  ~Range() { nvtxRangePop(); }
};

struct Prompt {
  const std::vector<int>* tokens = nullptr;
  i64* device = nullptr;
  std::uint64_t key = 0;
  int limit = 0, start = 0, drop = -1;
  i64 known_end = 0;  // of its run of forced tokens
  int slot = -1;      // while it is decoded
  bool done = false;
};

class Run {
 public:
  Run(const Checkpoint& model, const std::vector<std::vector<int>>& prompts, const GenerateOptions& options, Mode mode,
      const Callbacks& callbacks, States* states, Group* group, const std::vector<std::vector<int>>& known);
  Report finish();

 private:
  void start(int prompt);
  void drop(int prompt);
  void step();
  void enqueue(int batch, int drafter);
  void publish(int kind);
  void read_behind(i64 most_in_flight);
  void read();
  void end(int prompt, const char* why);
  void record_states(i64 entry);
  void choose_shape();
  void decode();
  i64 of_first_rank(i64 value);

  const Checkpoint& model_;
  const TargetConfig& config_;
  const GenerateOptions& options_;
  const Callbacks& callbacks_;
  States* states_;
  Group* group_;
  Mode mode_;
  int window_, requests_;
  Limits limits_;
  // Memory outlives everything that uses it; the queue waits for its work before memory goes.
  Memory memory_;
  Queue queue_;
  std::optional<specstate::cuda::CublasLt> lt_;  // where the bits need not be plain decoding's
  Trace trace_;
  Beside beside_{queue_};
  Exchange exchange_;
  std::uint64_t* rank_digests_ = nullptr;                     // [ranks, R] device
  i64 *word_ = nullptr, *words_ = nullptr, *told_ = nullptr;  // device [1], [ranks]; pinned [1]
  Tables tables_;
  Constants constants_;
  Step all_;  // for the largest batch; smaller ones use its memory
  Emitted emitted_;
  Forced forced_;
  std::optional<Target> target_;
  std::vector<std::unique_ptr<Drafter>> drafters_;
  std::vector<std::string> names_;
  double *target_probabilities_ = nullptr, *draft_probabilities_ = nullptr, *uniforms_ = nullptr;
  std::uint64_t *digest_ = nullptr, *digests_ = nullptr;  // [R] device; [prompts] pinned: at their ends
  std::uint64_t* recorded_digests_ = nullptr;             // pinned, [entries, R]
  i32* recorded_lengths_ = nullptr;
  i64* totals_ = nullptr;  // pinned, as target_->swaps().totals
  std::vector<Prompt> prompts_;
  std::vector<int> prompt_of_;    // [slots] -1: free
  std::vector<i32> active_;       // slots of the last step
  i32* active_pinned_ = nullptr;  // [entries, slots]
  i64 active_changes_ = 0;
  struct Start {
    i32 left;
    std::uint64_t key;
    i64 known_end;
  };
  Start* starts_ = nullptr;  // pinned, [slots]
  struct Shape {
    int runs = 0;
    std::unique_ptr<Graph> graph;
  };
  std::map<std::tuple<int, int, i64>, Shape> shapes_;  // batch, drafter, drafters alive
  std::vector<Event> events_;                          // [entries]
  struct InFlight {
    i64 entry;
    int drafter;               // -2: a prefill
    std::vector<int> prompts;  // of each slot then: it may have another by the time this is read
  };
  std::vector<InFlight> in_flight_;
  i64 written_ = 0, steps_ = 0;
  // auto: the kinds in turns, then the one that emitted most a second. Kind -1 is plain.
  int kind_ = -1;
  bool choosing_ = false;
  int trial_step_ = 0;
  i64 trial_tokens_ = 0, emitted_tokens_ = 0;
  std::chrono::steady_clock::time_point trial_begin_;
  std::vector<double> speed_;  // of plain, then of each drafter
  std::vector<i64> ran_;       // steps of each
  Report report_;
};

Run::Run(const Checkpoint& model, const std::vector<std::vector<int>>& prompts, const GenerateOptions& options, Mode mode,
         const Callbacks& callbacks, States* states, Group* group, const std::vector<std::vector<int>>& known)
    : model_(model), config_(model.target.config), options_(options), callbacks_(callbacks), states_(states), group_(group), mode_(mode) {
  window_ = window_of(model, mode);
  requests_ = std::min<int>(options.max_batch, static_cast<int>(prompts.size()));
  if (config_.vocab > 4096) core::throw_not_implemented("generate: --device cuda: a vocabulary of more than 4096 ids.");
  i64 context = 0;
  for (const auto& p : prompts) context = std::max<i64>(context, static_cast<i64>(p.size()) + options.max_new_tokens);
  context = std::min<i64>(context, config_.max_length) + window_;
  limits_ = {requests_,        options.hot_slots,         window_,
             options.chunk,    static_cast<int>(context), options.deterministic || options.check_lossless,
             bucket(requests_)};

  const i64 R = requests_, B = bucket(requests_), W = window_, V = config_.vocab, L = context;
  tables_ = {memory_.device<i32>(R, "tables"), memory_.device<i32>(R, "tables"), memory_.device<i32>(R, "tables"),
             memory_.device<std::uint64_t>(R, "tables"), memory_.device<i32>(1, "tables")};
  std::vector<i32> iota(at(std::max({L, R, i64{options.chunk}, 2 * W}) + 2));
  for (std::size_t i = 0; i < iota.size(); ++i) iota[i] = static_cast<i32>(i);
  std::vector<i64> pool_rows(at(R * L));
  for (i64 i = 0; i < R * L; ++i) pool_rows[at(i)] = i;
  constants_ = {memory_.upload(iota.data(), static_cast<i64>(iota.size()), "tables"), memory_.upload(pool_rows.data(), R * L, "tables")};
  const auto ints = [&](i64 n) { return memory_.device<i32>(n, "a step"); };
  const auto longs = [&](i64 n) { return memory_.device<i64>(n, "a step"); };
  all_.batch = B, all_.width = W;
  for (i32** p : {&all_.slots, &all_.requests, &all_.kda_slots, &all_.widths, &all_.caps, &all_.accept, &all_.accepted, &all_.last_step})
    *p = ints(B);
  all_.real = ints(1);
  for (i32** p : {&all_.positions, &all_.ends, &all_.locs}) *p = ints(B * W);
  for (i64** p : {&all_.candidates, &all_.target, &all_.out, &all_.pool_rows}) *p = longs(B * W);
  emitted_ = {memory_.pinned<i32>(kEntries * B, "emitted tokens"),
              memory_.pinned<i32>(kEntries * B, "emitted tokens"),
              memory_.pinned<i32>(kEntries * B * W, "emitted tokens"),
              memory_.pinned<i32>(kEntries, "emitted tokens"),
              kEntries,
              B,
              W,
              ints(1)};
  active_pinned_ = memory_.pinned<i32>(kEntries * B, "requests of a step"), starts_ = memory_.pinned<Start>(R, "requests of a step");
  digest_ = memory_.device<std::uint64_t>(R, "digests"),
  digests_ = memory_.pinned<std::uint64_t>(static_cast<i64>(prompts.size()), "digests");
  if (states_) {
    recorded_digests_ = memory_.pinned<std::uint64_t>(kEntries * R, "digests");
    recorded_lengths_ = memory_.pinned<i32>(kEntries * R, "digests");
  }
  if (options.sampled_proposals && W > 1) {
    target_probabilities_ = memory_.device<double>(B * W * V, "probabilities");
    draft_probabilities_ = memory_.device<double>(B * (W - 1) * V, "probabilities"),
    uniforms_ = memory_.device<double>(B * W, "probabilities");
  }
  if (!limits_.exact && specstate::cuda::CublasLt::here())
    lt_.emplace(memory_.device<char>(kWorkspace, "workspace of products"), kWorkspace);
  report_.gpu.products = lt_ ? "cuBLASLt" : "row-invariant";
  if (group_) {
    // Room for the widest exchange: a product's outputs, the MLP's columns, attention's and KDA's heads. Ranks' parts of n are n / size rounded up.
    i64 rows = std::max<i64>(B * W, options.chunk), most = std::max<i64>({config_.vocab, config_.hidden, config_.intermediate});
    for (const auto* weights : {&model.dspark, &model.dflash})
      if (*weights) rows = std::max<i64>(rows, B * (*weights)->config.block), most = std::max<i64>(most, (*weights)->config.intermediate);
    i64 part = group_->largest_part_of(most);
    part = std::max(part, group_->largest_part_of(config_.kda_heads) * config_.kda_dim);
    part = std::max(part, group_->largest_part_of(config_.mla_heads) * config_.v_dim);
    for (const auto* weights : {&model.dspark, &model.dflash})
      if (*weights) part = std::max<i64>(part, i64{(*weights)->config.heads} * (*weights)->config.head_dim);
    exchange_ = {group_, memory_.device<float>(rows * part, "exchanges of ranks"),
                 memory_.device<float>(group_->size() * rows * part, "exchanges of ranks"), rows * part};
    rank_digests_ = memory_.device<std::uint64_t>(group_->size() * R, "digests");
    word_ = memory_.device<i64>(1, "exchanges of ranks"), words_ = memory_.device<i64>(group_->size(), "exchanges of ranks");
    told_ = memory_.pinned<i64>(1, "exchanges of ranks");
  }
  std::vector<int> features;
  for (const auto& [of, weights] : {std::pair(Mode::kDSpark, &model.dspark), std::pair(Mode::kDFlash, &model.dflash)}) {
    if (!weights->has_value() || (mode != of && mode != Mode::kAuto)) continue;
    // Two drafters share one pass of the target only if they want the same features, and one window.
    if (!drafters_.empty() &&
        ((*weights)->config.feature_layers != features || (*weights)->config.proposals() != drafters_[0]->proposals()))
      continue;
    drafters_.push_back(
        std::make_unique<Drafter>(**weights, model.target, limits_, tables_, constants_, lt_ ? &*lt_ : nullptr, memory_, exchange_));
    names_.push_back(name_of(of));
    features = drafters_[0]->feature_layers();
  }
  target_.emplace(model.target, limits_, features, tables_, constants_, lt_ ? &*lt_ : nullptr, trace_, beside_, memory_, exchange_);
  totals_ = memory_.pinned<i64>(2 * target_->anchors(), "totals");

  report_.mode = mode;
  report_.requests.resize(prompts.size());
  report_.accepted_lengths.assign(at(W + 1), 0);
  ran_.assign(drafters_.size() + 1, 0), speed_.assign(drafters_.size() + 1, 0);
  choosing_ = mode == Mode::kAuto && !drafters_.empty();
  kind_ = choosing_ || drafters_.empty() ? -1 : 0;
  std::vector<i32> forced;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    Prompt& p = prompts_.emplace_back();
    p.tokens = &prompts[i];
    Digest key;
    for (const int t : prompts[i]) key.value(static_cast<std::uint64_t>(t));
    p.key = key.result();
    p.limit = std::min(options.max_new_tokens, config_.max_length - static_cast<int>(prompts[i].size()));
    if (i < options.start_steps.size()) p.start = options.start_steps[i];
    if (i < options.drop_steps.size()) p.drop = options.drop_steps[i];
    const std::vector<i64> ids(prompts[i].begin(), prompts[i].end());
    p.device = memory_.upload(ids.data(), static_cast<i64>(ids.size()), "prompts");
    if (!known.empty()) {
      forced.insert(forced.end(), known[i].begin(), known[i].end());
      forced.resize(at(p.known_end = (i ? prompts_[i - 1].known_end : 0) + p.limit));
    }
    report_.requests[i].prompt_tokens = static_cast<int>(ids.size());
  }
  if (!known.empty() && options.force_accept)
    forced_ = {options.force_accept, memory_.upload(forced.data(), static_cast<i64>(forced.size()), "forced tokens"), longs(R)};
  prompt_of_.assign(at(R), -1);
  for (i64 i = 0; i < kEntries; ++i) events_.emplace_back();
  if (states_) states_->assign(prompts.size(), {});
  Memory::settle();
  // The queue's end waits for its work, and that may wait for a rank that is gone.
  try {
    decode();
  } catch (...) {
    if (group_) group_->abort();
    throw;
  }
}

void Run::decode() {
  double prefill_seconds = 0;
  auto begin = std::chrono::steady_clock::now();
  for (;;) {
    bool waiting = false, active = false;
    for (int i = 0; i < static_cast<int>(prompts_.size()); ++i) {
      Prompt& p = prompts_[at(i)];
      if (!p.done && p.drop >= 0 && steps_ >= p.drop) drop(i);
      if (p.done || p.slot >= 0) continue;
      const bool room = std::find(prompt_of_.begin(), prompt_of_.end(), -1) != prompt_of_.end();
      if (p.start <= steps_ && room) {
        const auto now = std::chrono::steady_clock::now();
        start(i);
        if (steps_ == 0) queue_.wait();  // so that the first prefills are no part of decoding's time
        prefill_seconds += seconds_since(now);
      } else {
        waiting = true;
      }
    }
    for (const int p : prompt_of_) active |= p >= 0;
    if (!waiting && !active) break;
    if (group_) group_->beat();
    if (active)
      step();
    else
      ++steps_;
  }
  queue_.wait();
  report_.prefill_seconds = prefill_seconds, report_.decode_seconds = seconds_since(begin) - prefill_seconds;
}

void Run::start(int prompt) {
  const Range range("prefill");
  Prompt& p = prompts_[at(prompt)];
  p.slot = static_cast<int>(std::find(prompt_of_.begin(), prompt_of_.end(), -1) - prompt_of_.begin());
  prompt_of_[at(p.slot)] = prompt;
  const Stream s = queue_.stream();
  const int total = static_cast<int>(p.tokens->size());
  target_->reset(p.slot, s);
  starts_[p.slot] = {p.limit, p.key, p.known_end};
  copy(tables_.left + p.slot, &starts_[p.slot].left, 4, s);
  copy(tables_.keys + p.slot, &starts_[p.slot].key, 8, s);
  if (forced_.length) copy(forced_.ends + p.slot, &starts_[p.slot].known_end, 8, s);
  for (int begin = 0; begin < total; begin += options_.chunk) {
    const int count = std::min(options_.chunk, total - begin);
    target_->prefill(p.slot, p.device, begin, count, begin + count == total, s);
    for (const auto& d : drafters_)
      if (d)
        d->materialize(p.slot, begin, count, target_->features(), s), report_.draft_kv.tokens_materialized += count,
            report_.draft_kv.bytes_written += count * d->bytes_of_token();
    if (group_) group_->beat();
    if (callbacks_.prefill) callbacks_.prefill(at(prompt), begin + count, total);
  }
  const Rows last{1, 1, constants_.one(), constants_.iota + p.slot, constants_.iota + total - 1, p.device + total - 1};
  choose(last, target_->logits(), {config_.vocab, config_.eos, options_.temperature, options_.seed}, tables_.keys, all_.target, nullptr,
         nullptr, s);
  Step first = all_;
  first.batch = first.width = 1;
  first.real = constants_.one(), first.requests = constants_.iota + p.slot, first.accept = constants_.one(), first.out = all_.target;
  emit(first, tables_, config_.eos, emitted_, {}, s);
  publish(-2);
  read_behind(2);
}

void Run::drop(int prompt) {
  read_behind(0);  // what it emitted before counts
  Prompt& p = prompts_[at(prompt)];
  if (p.done) return;
  if (p.slot >= 0) fill(tables_.left + p.slot, 0, 4, queue_.stream());
  end(prompt, "dropped");
}

void Run::end(int prompt, const char* why) {
  Prompt& p = prompts_[at(prompt)];
  p.done = true;
  report_.requests[at(prompt)].finish = why;
  if (p.slot < 0) return;
  fill(digest_, 0, 8, queue_.stream());
  target_->digest(p.slot, 1, digest_, queue_.stream());
  if (group_) sum_over_ranks(*group_, digest_, 1, rank_digests_, queue_.stream());
  copy(digests_ + prompt, digest_, 8, queue_.stream());
  prompt_of_[at(p.slot)] = -1;
  p.slot = -1;
}

/// Lengths and hashes of all requests as the work so far leaves them, into the record of that entry of the ring.
void Run::record_states(i64 entry) {
  const i64 R = requests_;
  fill(digest_, 0, R * 8, queue_.stream());
  target_->digest(0, requests_, digest_, queue_.stream());
  if (group_) sum_over_ranks(*group_, digest_, R, rank_digests_, queue_.stream());
  copy(recorded_digests_ + entry * R, digest_, R * 8, queue_.stream());
  copy(recorded_lengths_ + entry * R, tables_.lengths, R * 4, queue_.stream());
}

// A step's operations, in the order of the reference engine's Run::step.
void Run::enqueue(int batch, int kind) {
  const Stream s = queue_.stream();
  Step step = all_;
  step.batch = batch, step.width = kind < 0 ? 1 : window_;
  const bool in_place = step.width == 1;
  const i64 W = step.width, V = config_.vocab;
  const Rows rows = step.rows();
  const Choice choice{V, config_.eos, options_.temperature, options_.seed};
  const bool rejection = options_.sampled_proposals && W > 1;
  beside_.set_apart(!group_ && !trace_.on());
  Range range("open window");
  begin(step, tables_, limits_.context, s);
  trace_.mark("step: begin");
  target_->open(step);
  if (kind >= 0) {
    range.next("draft");
    drafters_[at(kind)]->propose(step, choice, rejection ? draft_probabilities_ : nullptr, s);
    if (forced_.length) force(step, tables_, forced_, s);
    trace_.mark("draft: propose");
  }
  range.next("verify");
  target_->forward(step, in_place, s);
  range.next("accept");
  beside_.fork();
  for (const auto& d : drafters_)
    if (d) d->project(step, target_->features(), beside_.stream());
  if (!drafters_.empty()) trace_.mark("draft: project");
  choose(rows, target_->logits(), choice, tables_.keys, step.target, rejection ? target_probabilities_ : nullptr, uniforms_, s);
  const TensorView candidates = on_gpu(step.candidates, DType::kInt64, {batch, W}), caps = on_gpu(step.caps, DType::kInt32, {batch}),
                   accepted = on_gpu(step.accept, DType::kInt32, {batch}), out = on_gpu(step.out, DType::kInt64, {batch, W});
  if (rejection) {
    accept::VerifyRejectionParams p;
    p.candidates = candidates, p.verify_lens = caps, p.accept_lens = accepted, p.out_tokens = out;
    p.draft_probs = on_gpu(draft_probabilities_, DType::kFloat64, {batch, W - 1, V});
    p.target_probs = on_gpu(target_probabilities_, DType::kFloat64, {batch, W, V});
    p.uniforms = on_gpu(uniforms_, DType::kFloat64, {batch, W});
    accept::verify_rejection(p, s);
  } else {
    accept::VerifyGreedyParams p;
    p.candidates = candidates, p.verify_lens = caps, p.accept_lens = accepted, p.out_tokens = out;
    p.target_argmax = on_gpu(step.target, DType::kInt64, {batch, W});
    accept::verify_greedy(p, s);
  }
  trace_.mark("accept: verify");
  emit(step, tables_, config_.eos, emitted_, target_->swaps(), s);
  trace_.mark("step: emit");
  range.next("commit");
  beside_.fork();
  for (const auto& d : drafters_)
    if (d) d->materialize(step, beside_.stream());
  if (!drafters_.empty()) trace_.mark("draft: materialize");
  target_->commit(step, in_place, s);
  beside_.join();
}

void Run::step() {
  const Range range("step");
  std::vector<i32> active;
  for (std::size_t slot = 0; slot < prompt_of_.size(); ++slot)
    if (prompt_of_[slot] >= 0) active.push_back(static_cast<i32>(slot));
  const int batch = bucket(static_cast<int>(active.size()));
  active.resize(at(batch), -1);
  if (active != active_) {
    i32* const pinned = active_pinned_ + active_changes_++ % kEntries * all_.batch;
    std::copy(active.begin(), active.end(), pinned);
    copy(all_.slots, pinned, batch * 4, queue_.stream());
    active_ = active;
  }
  i64 alive = 0;
  for (std::size_t d = 0; d < drafters_.size(); ++d) alive |= static_cast<i64>(drafters_[d] != nullptr) << d;
  // The first step of a shape runs as it is (families may set themselves up then), the second is captured, all later ones are its replay.
  Shape& shape = shapes_[{batch, kind_, alive}];
  const bool traced = options_.trace && shape.runs == 2 && report_.trace.empty() && !choosing_;
  if (traced) queue_.wait(), trace_.start(queue_);
  if (shape.runs == 0 || traced) {
    enqueue(batch, kind_);
  } else {
    if (!shape.graph) shape.graph = std::make_unique<Graph>(queue_, [this, batch, kind = kind_] { enqueue(batch, kind); });
    shape.graph->launch(queue_);
  }
  ++shape.runs;
  if (traced) trace_.stop(), report_.trace = trace_.json();
  publish(kind_);
  ++steps_, ++ran_[at(kind_ + 1)];
  read_behind(1);
  if (choosing_) choose_shape();
}

/// What only a clock can say must be the same everywhere, or ranks would enqueue different steps.
i64 Run::of_first_rank(i64 value) {
  if (!group_) return value;
  const Stream s = queue_.stream();
  *told_ = value;
  copy(word_, told_, 8, s);
  group_->all_gather(word_, words_, 8, s);
  copy(told_, words_, 8, s);
  queue_.wait();
  return *told_;
}

/// What was enqueued last wrote an entry of the ring.
void Run::publish(int kind) {
  const i64 entry = written_++ % kEntries;
  if (states_) record_states(entry);
  events_[at(entry)].record(queue_);
  in_flight_.push_back({entry, kind, prompt_of_});
}

void Run::read_behind(i64 most_in_flight) {
  while (static_cast<i64>(in_flight_.size()) > most_in_flight) read();
}

void Run::read() {
  const InFlight f = std::move(in_flight_.front());
  in_flight_.erase(in_flight_.begin());
  events_[at(f.entry)].wait();
  if (emitted_.fault[f.entry]) throw Error(ErrorKind::kInternal, "internal error: a selected position is in no device row");
  if (states_)
    for (std::size_t slot = 0; slot < f.prompts.size(); ++slot)
      if (const int prompt = f.prompts[slot]; prompt >= 0 && !prompts_[at(prompt)].done)
        (*states_)[at(prompt)].emplace_back(recorded_lengths_[f.entry * requests_ + static_cast<i64>(slot)],
                                            recorded_digests_[f.entry * requests_ + static_cast<i64>(slot)]);
  for (i64 b = 0; b < emitted_.batch; ++b) {
    const i32 count = emitted_.count[f.entry * emitted_.batch + b];
    if (count <= 0) continue;
    const int prompt = f.prompts[at(emitted_.request[f.entry * emitted_.batch + b])];
    RequestReport& report = report_.requests[at(prompt)];
    const i32* tokens = emitted_.tokens + (f.entry * emitted_.batch + b) * emitted_.width;
    std::string bytes;
    const char* finish = nullptr;
    for (i32 i = 0; i < count; ++i) {
      report.tokens.push_back(tokens[i]);
      if (tokens[i] == config_.eos)
        finish = "eos";
      else if (tokens[i] < 256)
        bytes += static_cast<char>(tokens[i]);
    }
    const Prompt& p = prompts_[at(prompt)];
    if (!finish && static_cast<int>(report.tokens.size()) >= p.limit) finish = p.limit == options_.max_new_tokens ? "length" : "context";
    report.text += bytes;
    emitted_tokens_ += count;
    if (f.drafter != -2) {
      ++report.steps, report.committed_tokens += count;
      ++report_.accepted_lengths[at(count)];
      for (const auto& d : drafters_)
        if (d) report_.draft_kv.tokens_materialized += count, report_.draft_kv.bytes_written += count * d->bytes_of_token();
    }
    if (callbacks_.text && !bytes.empty()) callbacks_.text(at(prompt), bytes);
    if (finish) end(prompt, finish);
  }
}

/// auto: a kind's steps are measured from the first replay on; when all kinds have been, the fastest stays and the other drafters go.
void Run::choose_shape() {
  ++trial_step_;
  if (trial_step_ == kWarm) {
    read_behind(0);
    queue_.wait();
    trial_begin_ = std::chrono::steady_clock::now(), trial_tokens_ = emitted_tokens_;
  }
  if (trial_step_ < kWarm + kTrial) return;
  read_behind(0);
  queue_.wait();
  speed_[at(kind_ + 1)] = static_cast<double>(emitted_tokens_ - trial_tokens_) / seconds_since(trial_begin_);
  trial_step_ = 0;
  if (++kind_ < static_cast<int>(drafters_.size())) return;
  kind_ = static_cast<int>(of_first_rank(std::max_element(speed_.begin(), speed_.end()) - speed_.begin())) - 1;
  choosing_ = false;
  for (std::size_t d = 0; d < drafters_.size(); ++d)
    if (static_cast<int>(d) != kind_) drafters_[d].reset();
}

Report Run::finish() {
  const i64 anchors = target_->anchors();
  copy(totals_, target_->swaps().totals, 2 * anchors * 8, queue_.stream());
  queue_.wait();
  draft_kv::raise_pending_error(gpu());
  Report::HiSparse& h = report_.hisparse;
  for (i64 a = 0; a < anchors; ++a) {
    h.hits += totals_[2 * a], h.misses += totals_[2 * a + 1];
    h.host_bytes_copied += totals_[2 * a + 1] * target_->layers_of(a) * target_->row_bytes();
  }
  h.hot_slots = options_.hot_slots, h.top_k = config_.top_k;
  if (h.hits + h.misses > 0) h.hit_rate = static_cast<double>(h.hits) / static_cast<double>(h.hits + h.misses);
  report_.kda = {target_->state_bytes(), target_->ring_bytes(), target_->snapshot_bytes_avoided()};
  for (std::size_t i = 0; i < prompts_.size(); ++i) {
    RequestReport& r = report_.requests[i];
    r.state_digest = digests_[i];
    report_.steps += r.steps, report_.committed_tokens += r.committed_tokens;
  }
  report_.mean_accepted_length = report_.steps ? static_cast<double>(report_.committed_tokens) / static_cast<double>(report_.steps) : 0.0;
  report_.tokens_per_second = report_.decode_seconds > 0 ? static_cast<double>(report_.committed_tokens) / report_.decode_seconds : 0.0;
  report_.gpu.device_bytes = memory_.device_bytes(), report_.gpu.pinned_bytes = memory_.pinned_bytes();
  report_.gpu.ranks = group_ ? group_->size() : 1;
  report_.gpu.graphs = static_cast<i64>(shapes_.size());
  if (mode_ == Mode::kAuto) {
    const std::size_t most = static_cast<std::size_t>(std::max_element(ran_.begin(), ran_.end()) - ran_.begin());
    report_.mode = most == 0 ? Mode::kPlain : names_[most - 1] == "dspark" ? Mode::kDSpark : Mode::kDFlash;
    report_.note = "auto: " + std::to_string(ran_[0]) + " plain steps";
    for (std::size_t d = 0; d < names_.size(); ++d) report_.note += ", " + std::to_string(ran_[d + 1]) + " with " + names_[d];
  }
  return std::move(report_);
}

}  // namespace

Report run(const Checkpoint& model, const std::vector<std::vector<int>>& prompts, const GenerateOptions& options, Mode mode,
           const Callbacks& callbacks, States* states, Group* group, const std::vector<std::vector<int>>& known) {
  return Run(model, prompts, options, mode, callbacks, states, group, known).finish();
}

}  // namespace specstate::runtime::cuda
