#include "runtime/sparse_kv.hpp"

#include <algorithm>
#include <numeric>

#include "core/env.hpp"
#include "specstate/error.hpp"

namespace specstate::runtime {

namespace {

// Host rows are handed out in pages, so that a request's rows are not adjacent, as in a serving engine.
constexpr std::int64_t kHostPage = 16;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

std::int64_t Window::rows() const { return std::accumulate(lens.begin(), lens.end(), std::int64_t{0}); }

SparseKv::SparseKv(const TargetConfig& config, int requests, int hot_slots, int window, int context)
    : top_k_(config.top_k), row_(config.kv_lora_rank + config.rope_dim), anchor_of_(config.anchor_of), sparse_of_(at(config.layers)) {
  hisparse::CoordinatorConfig c;
  c.requests = requests;
  c.hot = hot_slots;
  c.window = window;
  c.tail = 2 * window;
  c.context = context;
  c.top_k = top_k_;
  c.page_size = kHostPage;
  const std::int64_t host_rows = requests * ((context + kHostPage - 1) / kHostPage) * kHostPage;
  const std::int64_t device_rows = requests * (c.hot + c.tail);
  for (int l = 0; l < config.layers; ++l) {
    if (anchor_of_[at(l)] < 0) continue;
    sparse_of_[at(l)] = layers_.size();
    c.anchor_of.push_back(static_cast<std::int64_t>(group(l)));
    Layer& layer = layers_.emplace_back();
    layer.host.resize(at(host_rows * row_));
    layer.device.resize(at(device_rows * row_));
  }
  selections_.resize(layers_.size());
  std::vector<hisparse::KvBuffers> buffers;
  for (Layer& layer : layers_)
    buffers.push_back({TensorView(layer.host.data(), DType::kBFloat16, {host_rows, row_}),
                       TensorView(layer.device.data(), DType::kBFloat16, {device_rows, row_}),
                       {},
                       {}});
  coordinator_ = std::make_unique<hisparse::Coordinator>(c, buffers);
  for (int r = 0; r < requests; ++r) coordinator_->admit(r, 0);
}

void SparseKv::reset(int request) {
  coordinator_->abort(request);
  coordinator_->admit(request, 0);
}

void SparseKv::stage(int l, int request, int position, std::int64_t count, const std::uint16_t* rows) {
  coordinator_->stage(static_cast<std::int64_t>(sparse(l)), request, position, count, rows, row_ * 2);
}

const std::uint16_t* SparseKv::host_row(int l, int request, std::int64_t position) const {
  const std::int64_t page = coordinator_->host_pages(request)[at(position / kHostPage)];
  return layers_[sparse(l)].host.data() + (page * kHostPage + position % kHostPage) * row_;
}

void SparseKv::open_window(const Window& window) {
  ids_.assign(window.slots.begin(), window.slots.end());
  slots_.assign(window.slots.begin(), window.slots.end());
  widths_.assign(window.lens.begin(), window.lens.end());
  steps_ = *std::max_element(widths_.begin(), widths_.end());
  place_.clear();
  ends_.clear();
  for (std::size_t b = 0; b < ids_.size(); ++b)
    for (int i = 0; i < window.lens[b]; ++i) {
      place_.push_back(static_cast<std::int64_t>(b) * steps_ + i);
      ends_.push_back(window.starts[b] + i + 1);
    }
  coordinator_->prepare_verify(ids_, widths_);
}

void SparseKv::write(int l, int request, int j, const std::uint16_t* row) {
  coordinator_->write(static_cast<std::int64_t>(sparse(l)), request, j, row);
}

hisparse::SwapInParams SparseKv::params(Selection& s) {
  const auto batch = static_cast<std::int64_t>(ids_.size());
  hisparse::SwapInParams p;
  p.top_k_tokens = TensorView(s.tokens.data(), DType::kInt32, {batch, steps_, top_k_});
  p.seq_lens = TensorView(s.seq_lens.data(), DType::kInt32, {batch, steps_});
  p.req_pool_indices = TensorView(slots_.data(), DType::kInt32, {batch});
  p.top_k_device_locs = TensorView(s.locs.data(), DType::kInt32, {batch, steps_, top_k_});
  return p;
}

/// A line a request, which tools/hisparse_policies.py reads.
void SparseKv::log_selection(int l, const Selection& s) const {
  const std::size_t each = at(steps_ * top_k_);
  for (std::size_t b = 0; b < ids_.size(); ++b) {
    std::string line = "layer " + std::to_string(l) + " of slot " + std::to_string(ids_[b]) + " selects";
    for (std::size_t i = b * each; i < (b + 1) * each; ++i)
      if (s.tokens[i] >= 0) line += " " + std::to_string(s.tokens[i]);
    core::log(3, line);
  }
}

void SparseKv::plan(int l, const std::int32_t* selected, const std::int32_t* counts) {
  Selection& s = selections_[group(l)];
  const std::int64_t cells = static_cast<std::int64_t>(ids_.size()) * steps_;
  s.tokens.assign(at(cells * top_k_), -1);
  s.locs.resize(at(cells * top_k_));
  s.seq_lens.assign(at(cells), 0);
  s.round_of.resize(at(cells));
  for (std::size_t row = 0; row < place_.size(); ++row) {
    s.seq_lens[at(place_[row])] = ends_[row];
    std::copy_n(selected + row * at(top_k_), counts[row], s.tokens.data() + place_[row] * top_k_);
  }
  if (core::env().log_level >= 3) log_selection(l, s);
  const TensorView round_of(s.round_of.data(), DType::kInt32, {static_cast<std::int64_t>(ids_.size()), steps_});
  s.rounds = coordinator_->plan_rounds(static_cast<std::int64_t>(sparse(l)), params(s), round_of);
}

void SparseKv::enter_round(int l, int round) {
  const auto layer = static_cast<std::int64_t>(sparse(l));
  if (anchor_of_[at(l)] != l) {
    coordinator_->follow(layer, round);
    return;
  }
  Selection& s = selections_[sparse(l)];
  hisparse::SwapInParams p = params(s);
  if (s.rounds == 1) {
    coordinator_->swap(layer, p);
    return;
  }
  // The other rounds' steps ask for nothing, and their answers stand.
  const std::size_t width = at(top_k_);
  masked_.assign(s.tokens.size(), -1);
  answer_.resize(s.locs.size());
  for (std::size_t cell = 0; cell < s.round_of.size(); ++cell)
    if (s.round_of[cell] == round) std::copy_n(s.tokens.data() + cell * width, width, masked_.data() + cell * width);
  p.top_k_tokens.data = masked_.data();
  p.top_k_device_locs.data = answer_.data();
  coordinator_->swap(layer, p, round);
  for (std::size_t cell = 0; cell < s.round_of.size(); ++cell)
    if (s.round_of[cell] == round) std::copy_n(answer_.data() + cell * width, width, s.locs.data() + cell * width);
}

std::vector<int> SparseKv::rows_of(int l, int round) const {
  const Selection& s = selections_[group(l)];
  std::vector<int> rows;
  for (std::size_t row = 0; row < place_.size(); ++row)
    if (s.round_of[at(place_[row])] == round) rows.push_back(static_cast<int>(row));
  return rows;
}

void SparseKv::pointers(int l, int row, std::int64_t count, const std::uint16_t** out) const {
  const std::int32_t* locs = selections_[group(l)].locs.data() + place_[at(row)] * top_k_;
  const std::uint16_t* device = layers_[sparse(l)].device.data();
  for (std::int64_t k = 0; k < count; ++k) {
    // Every selected position is committed or in the window, and a round fits the hot buffer: -1 would be a bug of ours.
    if (locs[k] < 0) throw Error(ErrorKind::kInternal, "internal error: a selected position is in no device row");
    out[k] = device + std::int64_t{locs[k]} * row_;
  }
}

void SparseKv::commit(const std::vector<int>& accept) {
  coordinator_->accept(ids_, std::vector<std::int64_t>(accept.begin(), accept.end()));
}

}  // namespace specstate::runtime
