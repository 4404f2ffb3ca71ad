#include "runtime/sparse_kv.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/match.hpp"

namespace specstate::runtime {

namespace {

// Host rows are handed out in pages, so that a request's rows are not adjacent, as in a serving engine.
constexpr std::int64_t kHostPage = 16;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

std::int64_t Window::rows() const { return std::accumulate(lens.begin(), lens.end(), std::int64_t{0}); }

SparseKv::SparseKv(const TargetConfig& config, int requests, int hot_slots, int window, int context)
    : config_(config),
      requests_(requests),
      hot_(hot_slots),
      tail_(2 * window),
      context_(context),
      top_k_(config.top_k),
      row_(config.kv_lora_rank + config.rope_dim) {
  const std::int64_t pages = requests_ * ((context_ + kHostPage - 1) / kHostPage), columns = hot_ + tail_;
  for (std::int64_t p = pages - 1; p >= 0; --p) free_pages_.push_back(p);
  host_locs_.assign(at(std::int64_t{requests_} * context_), -1);
  layers_.resize(at(config.layers));
  group_of_.assign(at(config.layers), 0);
  const hisparse::SwapShape shape{requests_, hot_, tail_, context_};
  for (int l = 0; l < config.layers; ++l) {
    const int anchor = config.anchor_of[at(l)];
    if (anchor < 0) continue;
    Layer& layer = layers_[at(l)];
    layer.host.resize(at(pages * kHostPage * row_));
    layer.device.resize(at(requests_ * columns * row_));
    layer.staging.resize(at(requests_));
    if (anchor == l) {
      Group& g = groups_.emplace_back();
      g.anchor = l;
      g.memory.resize(at(hisparse::swap_state_bytes(shape)) + 64);
      const auto address = reinterpret_cast<std::uintptr_t>(g.memory.data());
      g.state = hisparse::swap_state_view(shape, g.memory.data() + (64 - address % 64) % 64);
      for (std::int64_t i = 0; i < requests_ * columns; ++i) g.state.slot_locs.as<std::int32_t>()[i] = static_cast<std::int32_t>(i);
      hisparse::reset_swap_state(g.state);
    }
    group_of_[at(l)] = groups_.size() - 1;
  }
}

void SparseKv::reset(int request) {
  const std::int32_t id = request;
  for (Group& g : groups_) hisparse::reset_swap_state(g.state, TensorView(const_cast<std::int32_t*>(&id), DType::kInt32, {1}));
  std::int64_t* locs = host_locs_.data() + std::int64_t{request} * context_;
  for (std::int64_t p = 0; p < context_; p += kHostPage)
    if (locs[p] >= 0) free_pages_.push_back(locs[p] / kHostPage);
  std::fill(locs, locs + context_, -1);
  for (Layer& l : layers_)
    if (!l.staging.empty()) l.staging[at(request)].clear();
}

void SparseKv::stage(int l, int request, const std::uint16_t* row) {
  auto& staging = layers_[at(l)].staging[at(request)];
  staging.insert(staging.end(), row, row + row_);
}

const std::uint16_t* SparseKv::staged(int l, int request, std::int64_t position) const {
  return layers_[at(l)].staging[at(request)].data() + position * row_;
}

std::int64_t SparseKv::host_place(int request, int position) {
  std::int64_t* locs = host_locs_.data() + std::int64_t{request} * context_;
  if (locs[position] < 0) {
    std::int64_t page;
    if (position % kHostPage == 0) {
      if (free_pages_.empty()) core::throw_runtime("SparseKv: no host page is left.");
      page = free_pages_.back();
      free_pages_.pop_back();
    } else {
      page = locs[position - position % kHostPage] / kHostPage;
    }
    locs[position] = page * kHostPage + position % kHostPage;
  }
  return locs[position];
}

const std::uint16_t* SparseKv::host_row(int l, int request, int position) const {
  return layers_[at(l)].host.data() + host_locs_[at(std::int64_t{request} * context_ + position)] * row_;
}

void SparseKv::finish_prefill(int request, int n) {
  for (int p = 0; p < n; ++p) {
    const std::int64_t place = host_place(request, p);
    for (Layer& l : layers_)
      if (!l.staging.empty())
        std::memcpy(l.host.data() + place * row_, l.staging[at(request)].data() + std::int64_t{p} * row_, at(row_) * 2);
  }
  for (Layer& l : layers_)
    if (!l.staging.empty()) std::vector<std::uint16_t>().swap(l.staging[at(request)]);
}

void SparseKv::set_tail_token(int request, int position, std::int32_t token) {
  const std::int64_t column = tail_loc(request, position);  // tables and device rows have the same shape
  for (Group& g : groups_) g.state.slot_tokens.as<std::int32_t>()[column] = token;
}

void SparseKv::open_window(const Window& window) {
  window_ = window;
  for (std::size_t b = 0; b < window.slots.size(); ++b)
    for (int i = 0; i < window.lens[b]; ++i) set_tail_token(window.slots[b], window.starts[b] + i, window.starts[b] + i);
}

void SparseKv::write(int l, int request, int position, const std::uint16_t* row) {
  std::memcpy(device_row(l, tail_loc(request, position)), row, at(row_) * 2);
}

void SparseKv::plan(int l, const std::int32_t* selected, const std::int32_t* counts) {
  Group& g = groups_[group_of_[at(l)]];
  g.rounds.clear();
  // Per request, rows join a round while the distinct positions that the hot buffer must hold fit it.
  std::vector<std::vector<std::vector<int>>> cut(window_.slots.size());
  const std::int32_t* tokens = g.state.slot_tokens.as<std::int32_t>();
  std::vector<std::int32_t> seen, wanted, merged;
  int first = 0;
  for (std::size_t b = 0; b < window_.slots.size(); ++b) {
    seen.clear();
    for (int i = 0; i < window_.lens[b]; ++i) {
      const std::int32_t* row = selected + std::int64_t{first + i} * top_k_;
      // Positions that the tail answers need no hot slot.
      wanted.clear();
      for (int k = 0; k < counts[first + i]; ++k)
        if (tokens[tail_loc(window_.slots[b], row[k])] != row[k]) wanted.push_back(row[k]);
      merged.clear();
      std::set_union(seen.begin(), seen.end(), wanted.begin(), wanted.end(), std::back_inserter(merged));
      if (cut[b].empty() || static_cast<int>(merged.size()) > hot_) {
        cut[b].emplace_back();
        seen = wanted;
      } else {
        seen.swap(merged);
      }
      cut[b].back().push_back(first + i);
    }
    first += window_.lens[b];
  }
  std::size_t rounds = 0;
  for (const auto& c : cut) rounds = std::max(rounds, c.size());
  for (std::size_t t = 0; t < rounds; ++t) {
    Round& r = g.rounds.emplace_back();
    for (const auto& c : cut)
      if (t < c.size()) r.requests += 1, r.steps = std::max(r.steps, static_cast<int>(c[t].size()));
    const std::int64_t cells = std::int64_t{r.requests} * r.steps;
    r.tokens.assign(at(cells * top_k_), -1);
    r.locs.resize(at(cells * top_k_));
    r.seq_lens.assign(at(cells), 0);
    r.miss_src.resize(at(cells * top_k_));
    r.miss_dst.resize(at(cells * top_k_));
    r.miss_count.resize(at(r.requests));
    int first_row = 0;
    for (std::size_t b = 0; b < cut.size(); first_row += window_.lens[b++]) {
      if (t >= cut[b].size()) continue;
      const std::int64_t base = static_cast<std::int64_t>(r.slots.size()) * r.steps;
      r.slots.push_back(window_.slots[b]);
      for (std::size_t s = 0; s < cut[b][t].size(); ++s) {
        const int row = cut[b][t][s];
        const std::int64_t cell = base + static_cast<std::int64_t>(s);
        r.rows.push_back(row);
        r.place.push_back(cell);
        r.seq_lens[at(cell)] = window_.starts[b] + (row - first_row) + 1;
        std::copy_n(selected + std::int64_t{row} * top_k_, counts[row], r.tokens.data() + cell * top_k_);
      }
    }
  }
}

hisparse::KvBuffers SparseKv::buffers(int l) {
  Layer& layer = layers_[at(l)];
  hisparse::KvBuffers b;
  b.host_cache = TensorView(layer.host.data(), DType::kBFloat16, {static_cast<std::int64_t>(layer.host.size()) / row_, row_});
  b.device_buffer = TensorView(layer.device.data(), DType::kBFloat16, {static_cast<std::int64_t>(layer.device.size()) / row_, row_});
  return b;
}

void SparseKv::enter_round(int l, int round) {
  Group& g = groups_[group_of_[at(l)]];
  Round& r = g.rounds[at(round)];
  const std::int64_t B = r.requests, S = r.steps, M = S * top_k_;
  const TensorView src(r.miss_src.data(), DType::kInt64, {B, M}), dst(r.miss_dst.data(), DType::kInt32, {B, M}),
      count(r.miss_count.data(), DType::kInt32, {B});
  if (g.anchor == l) {
    std::vector<std::int32_t> misses(at(B)), hits(at(B));
    hisparse::SwapInParams p;
    p.top_k_tokens = TensorView(r.tokens.data(), DType::kInt32, {B, S, top_k_});
    p.seq_lens = TensorView(r.seq_lens.data(), DType::kInt32, {B, S});
    p.req_pool_indices = TensorView(r.slots.data(), DType::kInt32, {B});
    p.host_cache_locs = TensorView(host_locs_.data(), DType::kInt64, {requests_, context_});
    p.buffers = buffers(l);
    p.state = g.state;
    p.top_k_device_locs = TensorView(r.locs.data(), DType::kInt32, {B, S, top_k_});
    p.plan = {src, dst, count};
    p.unique_misses = TensorView(misses.data(), DType::kInt32, {B});
    p.unique_hits = TensorView(hits.data(), DType::kInt32, {B});
    hisparse::swap_in(p);
    for (std::int64_t b = 0; b < B; ++b) stats_.hits += hits[at(b)], stats_.misses += misses[at(b)];
  } else {
    const hisparse::KvBuffers follower = buffers(l);
    hisparse::ReplayPlanParams p;
    p.miss_src = src;
    p.miss_dst = dst;
    p.miss_count = count;
    p.followers = &follower;
    p.num_followers = 1;
    hisparse::replay_plan(p);
  }
  for (std::int64_t b = 0; b < B; ++b) stats_.host_bytes_copied += std::int64_t{r.miss_count[at(b)]} * row_ * 2;
}

const std::vector<int>& SparseKv::rows_of(int l, int round) const { return groups_[group_of_[at(l)]].rounds[at(round)].rows; }

void SparseKv::pointers(int l, int round, int i, std::int64_t count, const std::uint16_t** out) const {
  const Round& r = groups_[group_of_[at(l)]].rounds[at(round)];
  const std::int32_t* locs = r.locs.data() + r.place[at(i)] * top_k_;
  const std::uint16_t* device = layers_[at(l)].device.data();
  for (std::int64_t k = 0; k < count; ++k) {
    // Every selected position is committed or in the window, and a round fits the hot buffer: -1 would be a bug of ours.
    if (locs[k] < 0) throw Error(ErrorKind::kInternal, "internal error: a selected position is in no device row");
    out[k] = device + std::int64_t{locs[k]} * row_;
  }
}

void SparseKv::commit(const std::vector<int>& accept) {
  for (std::size_t b = 0; b < window_.slots.size(); ++b) {
    const int request = window_.slots[b];
    for (int i = 0; i < window_.lens[b]; ++i) {
      const int position = window_.starts[b] + i;
      if (i >= accept[b]) {
        set_tail_token(request, position, -1);
        continue;
      }
      const std::int64_t place = host_place(request, position), loc = tail_loc(request, position);
      for (int l = 0; l < config_.layers; ++l)
        if (config_.anchor_of[at(l)] >= 0) std::memcpy(layers_[at(l)].host.data() + place * row_, device_row(l, loc), at(row_) * 2);
    }
  }
}

}  // namespace specstate::runtime
