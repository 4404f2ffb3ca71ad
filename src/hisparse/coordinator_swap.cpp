// The swap of an anchor, what it owes its followers, and the cutting of a selection into rounds.
#include <fmt/format.h>

#include <iterator>

#include "hisparse/coordinator.hpp"

namespace specstate::hisparse {

namespace {

/// A selection of one step, [B, K], as three dimensions.
SwapInParams three_dimensional(const SwapInParams& params) {
  SwapInParams p = params;
  if (p.top_k_tokens.ndim != 2 && p.top_k_tokens.ndim != 3)
    refuse("top_k_tokens", "shape [B, S, K] or [B, K]",
           p.top_k_tokens.given() ? fmt::format("{} dimensions", p.top_k_tokens.ndim) : "none");
  if (p.top_k_tokens.ndim == 3) return p;
  auto add_step = [](TensorView& t, int ndim) {
    if (t.ndim != ndim) return;  // swap_in says what is wrong
    for (int i = t.ndim++; i > 1; --i) t.sizes[i] = t.sizes[i - 1], t.strides[i] = t.strides[i - 1];
    t.sizes[1] = t.strides[1] = 1;
  };
  add_step(p.top_k_tokens, 2);
  add_step(p.top_k_device_locs, 2);
  add_step(p.seq_lens, 1);
  return p;
}

/// What `swap` and `plan_rounds` ask of a selection.
void check_selection(core::Checker& check, const SwapInParams& p, core::Sym& B, core::Sym& S, core::Sym& K) {
  check.arg("top_k_tokens", p.top_k_tokens).dtype(DType::kInt32).shape({B, S, K}).same_device();
  check.arg("seq_lens", p.seq_lens).required().dtype({DType::kInt32, DType::kInt64}).shape({B, S}).same_device();
  check.arg("req_pool_indices", p.req_pool_indices).required().dtype({DType::kInt32, DType::kInt64}).shape({B}).same_device();
  check_count(check, "req_pool_indices", p.req_pool_indices);
}
}  // namespace

void Coordinator::swap(std::int64_t layer, const SwapInParams& params, std::int64_t round, Stream stream) {
  Impl& m = *impl_;
  const CoordinatorConfig& c = m.config;
  const std::int64_t l = m.local(layer);
  Group& g = m.group(l);
  if (g.anchor != l) refuse("layer", "an anchor layer", fmt::format("{}, a follower of {}", layer, g.anchor + c.first_layer));
  if (round != 0 && round != g.rounds) refuse("round", fmt::format("0 or the next one, {}", g.rounds), round);
  if (m.on_gpu() && round != 0) refuse("round", "0 on a GPU", round);
  SwapInParams p = three_dimensional(params);
  core::Checker check = m.known;
  core::Sym B("B"), S("S"), K("K");
  check_selection(check, p, B, S, K);
  check_occurrences(S, K);
  const std::int32_t* const num_real = check_num_real(check, p.num_real_reqs);
  check.arg("top_k_device_locs", p.top_k_device_locs).required().dtype(DType::kInt32).shape({B, S, K}).same_device().written();
  for (const auto& [name, t] : {std::pair{"unique_misses", &p.unique_misses}, std::pair{"unique_hits", &p.unique_hits}})
    check.arg(name, *t).dtype(DType::kInt32).shape({core::Dim::at_least(B, "B")}).same_device().written();
  check.outputs_apart();
  p.host_cache_locs = m.host_locs;
  p.buffers = m.buffers[at(l)];
  p.state = g.state;
  p.scratch_locs = m.scratch_locs;
  p.layout = c.layout;
  if (p.sm_budget == 0) p.sm_budget = c.sm_budget;
  const std::int64_t batch = B, occurrences = S * K;
  const bool planned = g.layers.size() > 1;
  if (planned && m.on_gpu()) {
    if (batch > c.requests) refuse("top_k_tokens", fmt::format("at most requests={} rows where layers follow", c.requests), batch);
    if (occurrences > m.most_selected)
      refuse("top_k_tokens", fmt::format("at most window * top_k = {} positions a row", m.most_selected), occurrences);
  }
  // Nothing changes until the call is known to be taken.
  const auto owed = [&] {
    if (round > 0) return;  // a follower that did not follow the last rounds must not miss what they brought: it may be a hit from now on
    for (const std::int64_t follower : g.layers) {
      if (follower != l) m.catch_up(g, follower, g.rounds, stream);
      m.followed[at(follower)] = m.copied[at(follower)] = 0;
    }
    g.rounds = 0;
  };
  const auto run = [&](const SwapInArgs& args) { m.on_backend([&] { cpu::run(args, stream); }, [&] { cuda::run(args, stream); }); };
  if (m.on_gpu()) {
    if (planned) {
      const auto part = [&](TensorView t) {  // the corner that this swap fills
        t.sizes[0] = batch;
        if (t.ndim == 2) t.sizes[1] = occurrences;
        return t;
      };
      p.plan = {part(g.block.miss_src), part(g.block.miss_dst), part(g.block.miss_count)};
    }
    const SwapInArgs args = hisparse::check(p);
    owed();
    if (planned) {
      g.plans.resize(1);
      g.plans[0].view = p.plan;
    }
    run(args);
    m.stats.swaps += batch;
    g.rounds = 1;
    return;
  }
  const std::int64_t real = num_real ? std::clamp<std::int64_t>(*num_real, 0, batch) : batch;
  Plan& plan = m.spare;
  std::vector<std::int32_t>&misses = m.misses, &hits = m.hits;
  misses.resize(at(batch));
  hits.resize(at(batch));
  plan.src.resize(at(batch * occurrences));
  plan.dst.resize(at(batch * occurrences));
  plan.count.resize(at(batch));
  plan.view =
      p.plan = {TensorView(plan.src.data(), DType::kInt64, {batch, occurrences}),
                TensorView(plan.dst.data(), DType::kInt32, {batch, occurrences}), TensorView(plan.count.data(), DType::kInt32, {batch})};
  const TensorView given_misses = p.unique_misses, given_hits = p.unique_hits;
  p.unique_misses = TensorView(misses.data(), DType::kInt32, {batch});
  p.unique_hits = TensorView(hits.data(), DType::kInt32, {batch});
  // Rows of a request that holds none would all be -1; that is a mistake of the caller.
  const Integers lens = integers(p.seq_lens);
  std::vector<std::int64_t> ids;
  for (std::int64_t b = 0; b < real; ++b) {
    ids.push_back(core::load_index(p.req_pool_indices, b));
    const Request& q = m.in_state(ids.back(), {RequestState::kActive, RequestState::kVerifying});
    const std::int64_t end = q.length + q.width + q.ahead * c.window;
    for (std::int64_t s = 0; s < S; ++s)
      if (lens(b, s) > end) refuse("seq_lens", fmt::format("at most {}, the end of the window", end), lens(b, s));
  }
  m.distinct(ids);
  const SwapInArgs args = hisparse::check(p);
  owed();
  run(args);
  for (const auto& [out, from] : {std::pair{&given_misses, &misses}, std::pair{&given_hits, &hits}})
    if (out->given())
      for (std::int64_t b = 0; b < batch; ++b) out->as<std::int32_t>()[b * out->strides[0]] = (*from)[at(b)];

  m.stats.swaps += real;
  for (std::int64_t b = 0; b < batch; ++b) {
    m.stats.unique_hits += hits[at(b)];
    m.stats.unique_misses += misses[at(b)];
    m.stats.unserved += misses[at(b)] - plan.count[at(b)];
    if (!p.skip_io) m.stats.bytes_to_device += plan.count[at(b)] * m.rows(l).pairs * m.rows(l).item_bytes;
  }
  g.rounds = round + 1;
  if (g.rounds > static_cast<std::int64_t>(g.plans.size())) g.plans.emplace_back();
  std::swap(g.plans[at(round)], plan);
}

void Coordinator::follow(std::int64_t layer, std::int64_t round, Stream stream) {
  Impl& m = *impl_;
  const std::int64_t l = m.local(layer);
  Group& g = m.group(l);
  if (g.anchor == l) refuse("layer", "a follower layer", fmt::format("{}, an anchor", layer));
  if (round != m.followed[at(l)] || round >= g.rounds)
    refuse("round", fmt::format("a swap of anchor {} that layer {} has yet to follow", g.anchor + m.config.first_layer, layer),
           round >= g.rounds ? fmt::format("none for round {}", round) : fmt::format("round {}, not {}", round, m.followed[at(l)]));
  m.catch_up(g, l, round + 1, stream);
  ++m.followed[at(l)];
}

void Coordinator::follow_all(std::int64_t layer, std::int64_t round, Stream stream) {
  Impl& m = *impl_;
  const std::int64_t l = m.local(layer);
  Group& g = m.group(l);
  if (g.anchor != l) refuse("layer", "an anchor layer", fmt::format("{}, a follower of {}", layer, g.anchor + m.config.first_layer));
  if (round < 0 || round >= g.rounds) refuse("round", fmt::format("a swap of anchor {}: below {}", layer, g.rounds), round);
  std::vector<std::int64_t> owing;
  for (const std::int64_t f : g.layers) {
    if (f == l) continue;
    if (m.followed[at(f)] != round)
      refuse("round", fmt::format("{}, which layer {} has yet to follow", m.followed[at(f)], f + m.config.first_layer), round);
    if (m.copied[at(f)] == round) owing.push_back(f);
  }
  if (!owing.empty()) m.replay(g.plans[at(round)], owing, stream);
  for (const std::int64_t f : g.layers)
    if (f != l) m.followed[at(f)] = round + 1, m.copied[at(f)] = std::max(m.copied[at(f)], round + 1);
}

std::int64_t Coordinator::plan_rounds(std::int64_t layer, const SwapInParams& params, const TensorView& round_of) const {
  const Impl& m = *impl_;
  const std::int64_t l = m.local(layer);
  const Group& g = m.group(l);
  const SwapInParams p = three_dimensional(params);
  core::Checker check = m.known;
  core::Sym B("B"), S("S"), K("K");
  check_selection(check, p, B, S, K);
  check.arg("round_of", round_of).required().dtype(DType::kInt32).shape({B, S}).same_device().written();
  check.outputs_apart();
  if (m.on_gpu()) {
    // What a selection wants is not read by the host: it must fit in any case, and then there is one round.
    if (S != 0 && K > (m.config.hot + m.config.scratch) / S)
      refuse("top_k_tokens", fmt::format("at most hot + scratch = {} positions a row on a GPU", m.config.hot + m.config.scratch), S * K);
    return 1;
  }
  for (std::int64_t b = 0; b < B; ++b)
    m.in_state(core::load_index(p.req_pool_indices, b), {RequestState::kActive, RequestState::kVerifying});
  const auto set_round = [&](std::int64_t b, std::int64_t s, std::int32_t round) {
    round_of.as<std::int32_t>()[b * round_of.strides[0] + s * round_of.strides[1]] = round;
  };
  if (S == 0 || K <= (m.config.hot + m.config.scratch) / S) {
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t s = 0; s < S; ++s) set_round(b, s, 0);
    return 1;
  }
  const Integers lens = integers(p.seq_lens);
  const std::int32_t* tokens = p.top_k_tokens.as<const std::int32_t>();
  std::int64_t rounds = 1;
  std::vector<std::int32_t> held, wanted, both;
  for (std::int64_t b = 0; b < B; ++b) {
    const std::int64_t r = core::load_index(p.req_pool_indices, b);
    const std::int64_t room = m.requests[at(r)].hot_rows + m.config.scratch;
    std::int32_t round = 0;
    held.clear();
    for (std::int64_t s = 0; s < S; ++s) {
      wanted.clear();
      for (std::int64_t k = 0; k < K; ++k) {
        const std::int32_t t = tokens[b * p.top_k_tokens.strides[0] + s * p.top_k_tokens.strides[1] + k * p.top_k_tokens.strides[2]];
        if (t < 0 || t >= lens(b, s) || t >= m.config.context) continue;
        // The tail answers without a hot slot; what is neither committed nor there has no row at all.
        if (table(g.state.slot_tokens)(r, m.config.hot + t % m.config.tail) == t || m.life.window.host_locs(r, t) < 0) continue;
        wanted.push_back(t);
      }
      if (!std::is_sorted(wanted.begin(), wanted.end())) std::sort(wanted.begin(), wanted.end());
      wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
      both.clear();
      std::set_union(held.begin(), held.end(), wanted.begin(), wanted.end(), std::back_inserter(both));
      if (s > 0 && static_cast<std::int64_t>(both.size()) > room) {
        ++round;
        held = wanted;
      } else {
        held.swap(both);
      }
      set_round(b, s, round);
    }
    rounds = std::max<std::int64_t>(rounds, round + 1);
  }
  return rounds;
}

}  // namespace specstate::hisparse
