#include "runtime/drafter.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/match.hpp"
#include "core/numeric.hpp"
#include "cpu/parallel.hpp"
#include "cpu/vector.hpp"
#include "runtime/digest.hpp"
#include "runtime/kernels.hpp"
#include "runtime/sampler.hpp"

namespace specstate::runtime {

namespace {

constexpr std::int64_t kPage = 16;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

float* room(Floats& v, std::int64_t n) {
  if (static_cast<std::int64_t>(v.size()) < n) v.resize(at(n));
  return v.data();
}

/// Rotary pairs (i, i + R/2); the table row holds R/2 cosines, then R/2 sines.
void rotate(float* x, const float* table, std::int64_t rotary) {
  const std::int64_t half = rotary / 2;
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half], c = table[i], s = table[half + i];
    x[i] = a * c - b * s;
    x[i + half] = b * c + a * s;
  }
}

}  // namespace

Drafter::Drafter(const DraftWeights& weights, const TargetWeights& target, int requests, int context)
    : weights_(weights),
      config_(weights.config),
      target_(target),
      projection_(TensorView(const_cast<std::uint16_t*>(weights.kv_weight.data()), DType::kBFloat16,
                             {config_.layers, 2 * std::int64_t{config_.kv_heads} * config_.head_dim, config_.hidden})),
      eps_(at(config_.layers), config_.rms_eps),
      pages_(at(requests)),
      known_(at(requests), 0) {
  const std::int64_t positions = context + config_.block, half = config_.rotary_dim / 2;
  rope_.resize(at(positions * 2 * half));
  for (std::int64_t i = 0; i < half; ++i) {
    // fp32 frequencies times fp32 positions, as the frameworks build this table.
    const float frequency = static_cast<float>(std::pow(config_.rope_theta, -2.0 * static_cast<double>(i) / config_.rotary_dim));
    for (std::int64_t p = 0; p < positions; ++p) {
      const float angle = static_cast<float>(p) * frequency;
      rope_[at(p * 2 * half + i)] = std::cos(angle);
      rope_[at(p * 2 * half + half + i)] = std::sin(angle);
    }
  }
  const std::int64_t pages = 1 + requests * ((context + kPage - 1) / kPage);
  pool_rows_ = pages * kPage;
  const std::int64_t values = config_.layers * pool_rows_ * config_.kv_heads * config_.head_dim;
  k_pool_.resize(at(values));
  v_pool_.resize(at(values));
  for (std::int64_t p = pages - 1; p >= 1; --p) free_pages_.push_back(p);
}

void Drafter::reset(int request) {
  known_[at(request)] = 0;
  auto& pages = pages_[at(request)];
  free_pages_.insert(free_pages_.end(), pages.rbegin(), pages.rend());
  pages.clear();
}

std::int64_t Drafter::pool_row(int request, int position) const {
  return pages_[at(request)][at(position / kPage)] * kPage + position % kPage;
}

void Drafter::materialize(const Window& w, const float* features, const std::vector<int>& commit) {
  const std::int64_t d = config_.hidden, width = d * static_cast<std::int64_t>(config_.feature_layers.size());
  // Committed rows only, so that rejected ones cost nothing.
  std::vector<std::int32_t> positions;
  std::vector<std::int64_t> slots;
  std::int64_t rows = 0, first = 0;
  for (const int c : commit) rows += c;
  float* compact = room(compact_, rows * width);
  for (std::size_t b = 0; b < w.slots.size(); first += w.lens[b++]) {
    const int request = w.slots[b];
    if (commit[b] > 0 && w.starts[b] != known_[at(request)]) throw Error(ErrorKind::kInternal, "internal error: draft KV with a gap");
    for (int i = 0; i < commit[b]; ++i) {
      const int position = w.starts[b] + i;
      if (position % kPage == 0) {
        if (free_pages_.empty()) core::throw_runtime("Drafter: no page of the pool is left.");
        pages_[at(request)].push_back(free_pages_.back());
        free_pages_.pop_back();
      }
      std::memcpy(compact + static_cast<std::int64_t>(positions.size()) * width, features + (first + i) * width, at(width) * 4);
      positions.push_back(position);
      slots.push_back(pool_row(request, position));
    }
    known_[at(request)] += commit[b];
  }
  if (rows == 0) return;
  float* ctx = room(ctx_, rows * d);
  cpu::matmul(weights_.fc, compact, width, rows, ctx, d);
  for (std::int64_t r = 0; r < rows; ++r) cpu::rms_norm(ctx + r * d, weights_.hidden_norm.data(), config_.rms_eps, ctx + r * d, d);

  const std::int64_t L = config_.layers, N = config_.kv_heads, D = config_.head_dim;
  const TensorView k(k_pool_.data(), DType::kBFloat16, {L, pool_rows_, N, D}), v(v_pool_.data(), DType::kBFloat16, {L, pool_rows_, N, D});
  draft_kv::MaterializeIntoPoolParams p;
  p.ctx_hidden = TensorView(ctx, DType::kFloat32, {rows, d});
  p.projection = projection_;
  p.k_norm_weight = TensorView(const_cast<float*>(weights_.k_norms.data()), DType::kFloat32, {L, D});
  p.eps = TensorView(eps_.data(), DType::kFloat32, {L});
  p.cos_sin_cache =
      TensorView(rope_.data(), DType::kFloat32, {static_cast<std::int64_t>(rope_.size()) / config_.rotary_dim, config_.rotary_dim});
  p.positions = TensorView(positions.data(), DType::kInt32, {rows});
  p.slot_mapping = TensorView(slots.data(), DType::kInt64, {rows});
  p.k_pool = {&k, 1};
  p.v_pool = {&v, 1};
  draft_kv::materialize_into_pool(p);
  stats_.tokens_materialized += rows;
  stats_.bytes_written += rows * L * N * D * 2 * 2;
}

void Drafter::attention(std::span<const DraftRequest> requests, int layer, const float* qkv, std::int64_t stride, float* out) {
  const std::int64_t B = config_.block, D = config_.head_dim, N = config_.kv_heads, group = config_.heads / config_.kv_heads;
  const std::int64_t window = config_.window[at(layer)], qd = config_.heads * D;
  const std::int64_t items = static_cast<std::int64_t>(requests.size());
  // Row j at position n + j sees keys at positions > n + j - window: those of the context, then the whole block.
  const auto oldest = [&](std::int64_t b, std::int64_t j) {
    return window ? std::max<std::int64_t>(0, requests[at(b)].n + j - window + 1) : std::int64_t{0};
  };
  const auto start = [&](std::int64_t b) { return std::min<std::int64_t>(oldest(b, 0), requests[at(b)].n); };
  // Keys in blocks and values of every request and KV head, one behind the other.
  std::vector<std::int64_t> totals(at(items)), offsets(at(items * N + 1), 0);
  for (std::int64_t b = 0; b < items; ++b) {
    totals[at(b)] = requests[at(b)].n - start(b) + B;
    for (std::int64_t kv = 0; kv < N; ++kv)
      offsets[at(b * N + kv + 1)] = offsets[at(b * N + kv)] + (totals[at(b)] + kKeyBlock - 1) / kKeyBlock * kKeyBlock * D;
  }
  float *keys = room(keys_, offsets.back()), *values = room(values_, offsets.back());
  cpu::parallel_for(items * N, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t b = item / N, kv = item % N, known = totals[at(b)] - B;
      float *k = keys + offsets[at(item)], *v = values + offsets[at(item)];
      const auto key = [&](std::int64_t i) { return k + i / kKeyBlock * D * kKeyBlock + i % kKeyBlock; };  // its channels, kKeyBlock apart
      for (std::int64_t i = 0; i < known; ++i) {
        const std::int64_t row = ((layer * pool_rows_ + pool_row(requests[at(b)].request, static_cast<int>(start(b) + i))) * N + kv) * D;
        float* to = key(i);
        for (std::int64_t c = 0; c < D; ++c) to[c * kKeyBlock] = core::to_float(core::bfloat16{k_pool_[at(row + c)]});
        cpu::to_float(reinterpret_cast<const core::bfloat16*>(v_pool_.data() + row), v + i * D, D);
      }
      for (std::int64_t j = 0; j < B; ++j) {
        const float* row = qkv + (b * B + j) * stride + qd;
        float* to = key(known + j);
        for (std::int64_t c = 0; c < D; ++c) to[c * kKeyBlock] = row[kv * D + c];
        std::copy_n(row + (N + kv) * D, D, v + (known + j) * D);
      }
    }
  });
  cpu::parallel_for(items * config_.heads, 2, [&](std::int64_t begin, std::int64_t end) {
    thread_local Floats scratch;
    std::vector<std::int64_t> first(at(B));
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t b = item / config_.heads, h = item % config_.heads, total = totals[at(b)], from = offsets[at(b * N + h / group)];
      for (std::int64_t j = 0; j < B; ++j) first[at(j)] = oldest(b, j) - start(b);
      block_attention(qkv + b * B * stride + h * D, stride, B, keys + from, values + from, total, first.data(), D, out + b * B * qd + h * D,
                      qd, room(scratch, block_scratch(B, total)));
    }
  });
}

void Drafter::propose(std::span<const DraftRequest> requests, const ProposalRule& rule, Proposals& out) {
  const std::int64_t b = static_cast<std::int64_t>(requests.size()), B = config_.block, M = b * B, d = config_.hidden, D = config_.head_dim,
                     heads = config_.heads, kv = config_.kv_heads, F = config_.intermediate, width = (heads + 2 * kv) * D, G = proposals(),
                     V = config_.vocab;
  for (const DraftRequest& r : requests)
    if (known(r.request) != r.n) throw Error(ErrorKind::kInternal, "internal error: a draft without its context");
  float *x = room(x_, M * d), *h = room(h_, M * d), *qkv = room(qkv_, M * width), *mixed = room(mixed_, M * heads * D);
  float *wide = room(wide_, M * 2 * F), *act = room(act_, M * F);
  for (std::int64_t r = 0; r < M; ++r) {
    const int id = r % B == 0 ? requests[at(r / B)].last_token : config_.mask_id;
    std::memcpy(x + r * d, target_.embed.data() + id * d, at(d) * 4);
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(D));
  for (int l = 0; l < config_.layers; ++l) {
    const DraftLayerWeights& layer = weights_.layers[at(l)];
    for (std::int64_t r = 0; r < M; ++r) cpu::rms_norm(x + r * d, layer.input_norm.data(), config_.rms_eps, h + r * d, d);
    cpu::matmul(layer.qkv, h, d, M, qkv, width);
    for (std::int64_t r = 0; r < M; ++r) {
      const float* table = rope_.data() + (requests[at(r / B)].n + r % B) * config_.rotary_dim;
      for (std::int64_t i = 0; i < heads + kv; ++i) {
        float* v = qkv + r * width + i * D;
        cpu::rms_norm(v, (i < heads ? layer.q_norm : layer.k_norm).data(), config_.rms_eps, v, D);
        rotate(v, table, config_.rotary_dim);
        if (i < heads)
          for (std::int64_t c = 0; c < D; ++c) v[c] *= scale;
      }
    }
    attention(requests, l, qkv, width, mixed);
    cpu::matmul(layer.out, mixed, heads * D, M, x, d, {.add = x, .add_stride = d});
    for (std::int64_t r = 0; r < M; ++r) cpu::rms_norm(x + r * d, layer.post_norm.data(), config_.rms_eps, h + r * d, d);
    cpu::matmul(layer.gate_up, h, d, M, wide, 2 * F);
    for (std::int64_t r = 0; r < M; ++r) cpu::swiglu(wide + r * 2 * F, wide + r * 2 * F + F, act + r * F, F);
    cpu::matmul(layer.down, act, F, M, x, d, {.add = x, .add_stride = d});
  }

  // Rows that predict: all of DSpark's, all but the first of DFlash's.
  const std::int64_t skip = B - G, rows = b * G;
  for (std::int64_t r = 0; r < rows; ++r)
    cpu::rms_norm(x + (r / G * B + skip + r % G) * d, weights_.norm.data(), config_.rms_eps, h + r * d, d);
  float* logits = room(logits_, rows * V);
  cpu::matmul(target_.head, h, d, rows, logits, V);

  out.count = static_cast<int>(G);
  out.tokens.assign(at(rows), 0);
  out.confidence.clear();
  out.probability.resize(rule.sampled ? at(rows * V) : 0);
  const auto choose = [&](std::int64_t request, std::int64_t k) {
    float* row = logits + (request * G + k) * V;
    forbid(row, static_cast<int>(V), target_.config.eos);
    int& token = out.tokens[at(request * G + k)];
    if (!rule.sampled) {
      token = argmax(row, static_cast<int>(V));
      return;
    }
    double* q = out.probability.data() + (request * G + k) * V;
    probabilities(row, static_cast<int>(V), rule.temperature, q);
    const DraftRequest& who = requests[at(request)];
    token = inverse_cdf(q, static_cast<int>(V), uniform(rule.seed, who.key, static_cast<std::uint64_t>(who.n + 1 + k), Draw::kProposal));
  };
  if (config_.kind == DrafterKind::kDFlash) {
    for (std::int64_t r = 0; r < b; ++r)
      for (std::int64_t k = 0; k < G; ++k) choose(r, k);
    return;
  }
  // DSpark's Markov head: each proposal corrects the logits of the next, so this part is sequential, and small.
  const std::int64_t rank = config_.markov_rank;
  out.confidence.resize(at(rows));
  Floats previous(at(b * rank)), joined(at(d + rank));
  float* bias = room(bias_, b * V);
  for (std::int64_t k = 0; k < G; ++k) {
    for (std::int64_t r = 0; r < b; ++r) {
      const std::int64_t token = k == 0 ? requests[at(r)].last_token : out.tokens[at(r * G + k - 1)];
      std::copy_n(weights_.markov_embed.begin() + token * rank, rank, previous.begin() + r * rank);
    }
    cpu::matmul(weights_.markov_proj, previous.data(), rank, b, bias, V);
    for (std::int64_t r = 0; r < b; ++r) {
      float* row = logits + (r * G + k) * V;
      for (std::int64_t i = 0; i < V; ++i) row[i] += bias[r * V + i];
      choose(r, k);
      std::copy_n(h + (r * G + k) * d, d, joined.begin());
      std::copy_n(previous.begin() + r * rank, rank, joined.begin() + d);
      const float raw = cpu::dot(joined.data(), weights_.confidence.data(), d + rank) + weights_.confidence_bias;
      out.confidence[at(r * G + k)] = 1.0f / (1.0f + std::exp(-raw / config_.confidence_temperatures[at(k)]));
    }
  }
}

std::uint64_t Drafter::digest(int request) const {
  Digest digest;
  const std::int64_t values = std::int64_t{config_.kv_heads} * config_.head_dim;
  digest.value(static_cast<std::uint64_t>(known(request)));
  for (int l = 0; l < config_.layers; ++l)
    for (int p = 0; p < known(request); ++p) {
      digest.bytes(key(l, request, p), at(values) * 2);
      digest.bytes(value(l, request, p), at(values) * 2);
    }
  return digest.result();
}

}  // namespace specstate::runtime
