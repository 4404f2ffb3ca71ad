#include "runtime/target.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/match.hpp"
#include "core/numeric.hpp"
#include "cpu/parallel.hpp"
#include "cpu/vector.hpp"
#include "runtime/digest.hpp"
#include "runtime/kernels.hpp"
#include "runtime/select.hpp"
#include "specstate/kda.hpp"

namespace specstate::runtime {

namespace {

constexpr int kTaps = 3;  // inputs that a convolution of width 4 remembers

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Scratch memory grows and keeps its size; contents are unspecified.
float* room(Floats& v, std::int64_t n) {
  if (static_cast<std::int64_t>(v.size()) < n) v.resize(at(n));
  return v.data();
}

TensorView floats(const float* data, std::initializer_list<std::int64_t> sizes) {
  return TensorView(const_cast<float*>(data), DType::kFloat32, sizes);
}

/// [rows, heads, dim] inside rows of `stride` floats.
TensorView heads_view(const float* data, std::int64_t rows, std::int64_t stride, std::int64_t heads, std::int64_t dim) {
  TensorView t = floats(data, {rows, heads, dim});
  t.strides[0] = stride;
  return t;
}

}  // namespace

Target::Target(const TargetWeights& weights, const TargetLimits& limits, std::vector<int> features)
    : weights_(weights),
      config_(weights.config),
      limits_(limits),
      feature_layers_(std::move(features)),
      n_(at(limits.requests), 0),
      kda_(at(config_.layers)),
      keys_(at(config_.layers)),
      sparse_(config_, limits.requests, limits.hot_slots, limits.window, limits.context) {
  const std::int64_t R = limits_.requests, H = config_.kda_heads, D = config_.kda_dim, W = limits_.window;
  for (int l = 0; l < config_.layers; ++l) {
    if (config_.is_kda[at(l)]) {
      KdaState& s = kda_[at(l)];
      s.state.assign(at(R * H * D * D), 0.0f);
      for (Floats& conv : s.conv) conv.assign(at(R * H * D * kTaps), 0.0f);
      for (Floats& windows : s.windows) windows.assign(at(R * W * H * D * kTaps), 0.0f);
      for (Floats* ring : {&s.rawv, &s.rawk, &s.gate}) ring->assign(at(R * H * W * D), 0.0f);
      s.beta.assign(at(R * H * W), 0.0f);
    } else if (config_.anchor_of[at(l)] == l) {
      keys_[at(l)].resize(at(R));
    }
  }
}

void Target::reset(int request) {
  n_[at(request)] = 0;
  for (int l = 0; l < config_.layers; ++l) {
    KdaState& s = kda_[at(l)];
    const auto clear = [&](Floats& v) {
      const std::int64_t part = static_cast<std::int64_t>(v.size()) / limits_.requests;
      std::fill_n(v.begin() + request * part, part, 0.0f);
    };
    clear(s.state);
    for (Floats& conv : s.conv) clear(conv);
    if (!keys_[at(l)].empty()) keys_[at(l)][at(request)].clear();
  }
  sparse_.reset(request);
}

void Target::forward(const Window& window, std::span<const int> tokens, Way way) {
  window_ = window;
  verified_ = way == Way::kVerify;
  sparse_.open_window(window);
  layers(window, tokens, false, way == Way::kDecode);
  head(0, window.rows());
}

void Target::prefill(int request, std::span<const int> tokens, bool last) {
  Window w;
  w.slots = {request};
  w.lens = {static_cast<int>(tokens.size())};
  w.starts = {n_of(request)};
  sparse_.reserve(request, w.lens[0]);
  layers(w, tokens, true, true);
  sparse_.append(request, w.lens[0]);
  n_[at(request)] += w.lens[0];
  if (last) head(w.rows() - 1, 1);
}

void Target::commit(const std::vector<int>& accept) {
  sparse_.commit(accept);
  const std::int64_t N = static_cast<std::int64_t>(window_.slots.size());
  if (verified_) {
    const std::int64_t R = limits_.requests, H = config_.kda_heads, D = config_.kda_dim, W = limits_.window, HD = H * D;
    std::vector<std::int32_t> slots(window_.slots.begin(), window_.slots.end()), lens(accept.begin(), accept.end()), steps;
    for (const int a : accept) steps.push_back(a - 1);
    const TensorView slot_view(slots.data(), DType::kInt32, {N});
    std::vector<kda::RollbackConvWindowsParams> conv;
    for (KdaState& s : kda_) {
      if (s.state.empty()) continue;
      kda::FoldParams f;
      f.state = floats(s.state.data(), {R, H, D, D});
      f.rings = {floats(s.rawv.data(), {R, H, W, D}), floats(s.rawk.data(), {R, H, W, D}), floats(s.gate.data(), {R, H, W, D}),
                 floats(s.beta.data(), {R, H, W})};
      f.slots = slot_view;
      f.accept = TensorView(lens.data(), DType::kInt32, {N});
      kda::fold(f);
      for (std::size_t i = 0; i < 3; ++i) {
        kda::RollbackConvWindowsParams& c = conv.emplace_back();
        c.pool = floats(s.conv[i].data(), {R, HD, kTaps});
        c.windows = floats(s.windows[i].data(), {R, W, HD, kTaps});
        c.slots = slot_view;
        c.last_correct_step = TensorView(steps.data(), DType::kInt32, {N});
      }
    }
    kda::rollback_conv_windows(conv.data(), static_cast<std::int64_t>(conv.size()));
  }
  // Index keys of rejected rows are simply overwritten by the next window.
  for (std::int64_t b = 0; b < N; ++b) n_[at(window_.slots[at(b)])] += accept[at(b)];
}

void Target::layers(const Window& w, std::span<const int> tokens, bool prefill, bool in_place) {
  const std::int64_t rows = w.rows(), d = config_.hidden, F = config_.intermediate, width = feature_width();
  float* x = room(x_, rows * d);
  float* h = room(h_, rows * d);
  float* wide = room(mlp_, rows * 2 * F);
  float* act = room(act_, rows * F);
  room(features_, rows * width);
  for (std::int64_t r = 0; r < rows; ++r) std::memcpy(x + r * d, weights_.embed.data() + std::int64_t{tokens[at(r)]} * d, at(d) * 4);
  for (int l = 0; l < config_.layers; ++l) {
    const LayerWeights& layer = weights_.layers[at(l)];
    for (std::int64_t r = 0; r < rows; ++r) cpu::rms_norm(x + r * d, layer.input_norm.data(), config_.rms_eps, h + r * d, d);
    if (layer.kda)
      kda(l, w, in_place);
    else
      mla(l, w, prefill);
    for (std::int64_t r = 0; r < rows; ++r) cpu::rms_norm(x + r * d, layer.post_norm.data(), config_.rms_eps, h + r * d, d);
    cpu::matmul(layer.gate_up, h, d, rows, wide, 2 * F);
    for (std::int64_t r = 0; r < rows; ++r) cpu::swiglu(wide + r * 2 * F, wide + r * 2 * F + F, act + r * F, F);
    cpu::matmul(layer.down, act, F, rows, x, d, {.add = x, .add_stride = d});
    for (std::size_t f = 0; f < feature_layers_.size(); ++f)
      if (feature_layers_[f] == l)
        for (std::int64_t r = 0; r < rows; ++r)
          std::memcpy(features_.data() + r * width + static_cast<std::int64_t>(f) * d, x + r * d, at(d) * 4);
  }
}

void Target::head(std::int64_t first_row, std::int64_t rows) {
  const std::int64_t d = config_.hidden, V = config_.vocab;
  float* final = room(final_, rows * d);
  for (std::int64_t r = 0; r < rows; ++r)
    cpu::rms_norm(x_.data() + (first_row + r) * d, weights_.norm.data(), config_.rms_eps, final + r * d, d);
  cpu::matmul(weights_.head, final, d, rows, room(logits_, rows * V), V);
}

// x += o_proj(kda(h)); the whole layer between projections is one call of the family.
void Target::kda(int l, const Window& w, bool in_place) {
  const KdaWeights& k = *weights_.layers[at(l)].kda;
  KdaState& s = kda_[at(l)];
  const std::int64_t T = w.rows(), d = config_.hidden, H = config_.kda_heads, D = config_.kda_dim, HD = H * D, R = limits_.requests;
  const std::int64_t W = limits_.window, rf = k.gate.k(), rg = k.out_gate.k(), P = k.in.n(), N = static_cast<std::int64_t>(w.slots.size());
  float* proj = room(proj_, T * P);
  float* gate = room(gate_, T * HD);
  float* out_gate = room(out_gate_, T * HD);
  float* mixed = room(mixed_, T * HD);
  cpu::matmul(k.in, h_.data(), d, T, proj, P);
  cpu::matmul(k.gate, proj + 3 * HD, P, T, gate, HD);
  cpu::matmul(k.out_gate, proj + 3 * HD + rf, P, T, out_gate, HD);

  std::vector<std::int32_t> slots(w.slots.begin(), w.slots.end()), cu{0};
  for (const int n : w.lens) cu.push_back(cu.back() + n);
  kda::VerifyParams p;
  p.x_q = heads_view(proj, T, P, H, D);
  p.x_k = heads_view(proj + HD, T, P, H, D);
  p.x_v = heads_view(proj + 2 * HD, T, P, H, D);
  TensorView* taps[] = {&p.w_q, &p.w_k, &p.w_v};
  TensorView* windows[] = {&p.cs_q, &p.cs_k, &p.cs_v};
  TensorView* after[] = {&p.conv_q, &p.conv_k, &p.conv_v};
  for (std::int64_t i = 0; i < 3; ++i) {
    *taps[i] = floats(k.conv.data() + i * HD * 4, {HD, 4});
    *windows[i] = floats(s.conv[at(i)].data(), {R, HD, kTaps});
    if (!in_place) *after[i] = floats(s.windows[at(i)].data(), {R, W, HD, kTaps});
  }
  p.g = heads_view(gate, T, HD, H, D);
  p.beta = floats(proj + 3 * HD + rf + rg, {T, H});
  p.beta.strides[0] = P;
  p.A_log = floats(k.a_log.data(), {H});
  p.dt_bias = floats(k.dt_bias.data(), {HD});
  p.state = floats(s.state.data(), {R, H, D, D});
  p.slots = TensorView(slots.data(), DType::kInt32, {N});
  p.cu_seqlens = TensorView(cu.data(), DType::kInt32, {N + 1});
  p.onorm_gate = heads_view(out_gate, T, HD, H, D);
  p.onorm_weight = floats(k.o_norm.data(), {D});
  p.onorm_eps = config_.rms_eps;
  p.out = heads_view(mixed, T, HD, H, D);
  p.lower_bound = config_.gate_lower_bound;
  if (in_place) {
    kda::DecodeParams decode;
    static_cast<kda::StepParams&>(decode) = p;
    kda::decode(decode);
  } else {
    p.rings = {floats(s.rawv.data(), {R, H, W, D}), floats(s.rawk.data(), {R, H, W, D}), floats(s.gate.data(), {R, H, W, D}),
               floats(s.beta.data(), {R, H, W})};
    kda::verify(p);
  }
  cpu::matmul(k.out, mixed, HD, T, x_.data(), d, {.add = x_.data(), .add_stride = d});
}

void Target::store_key(int l, int request, int position, const float* key) {
  const std::int64_t dim = config_.index_dim, block = position / kKeyBlock;
  auto& keys = keys_[at(l)][at(request)];
  if (static_cast<std::int64_t>(keys.size()) < (block + 1) * dim * kKeyBlock) keys.resize(at((block + 1) * dim * kKeyBlock), 0);
  std::uint16_t* k = keys.data() + block * dim * kKeyBlock + position % kKeyBlock;
  for (std::int64_t i = 0; i < dim; ++i) k[i * kKeyBlock] = core::from_float<core::bfloat16>(key[i]).bits;
}

// The indexer: keys of all rows first, then each row chooses among the positions up to its own.
void Target::select(int l, const Window& w, const float* proj, std::int64_t stride) {
  const MlaWeights& m = *weights_.layers[at(l)].mla;
  const std::int64_t rows = w.rows(), Hi = config_.index_heads, Di = config_.index_dim, K = config_.top_k;
  const float scale = 1.0f / std::sqrt(static_cast<float>(Hi)) * (1.0f / std::sqrt(static_cast<float>(Di)));
  selected_.assign(at(rows * K), -1);
  counts_.assign(at(rows), 0);
  std::vector<int> request(at(rows)), position(at(rows));
  Floats key(at(Di));
  std::int64_t r = 0;
  for (std::size_t b = 0; b < w.slots.size(); ++b)
    for (int i = 0; i < w.lens[b]; ++i, ++r) {
      request[at(r)] = w.slots[b];
      position[at(r)] = w.starts[b] + i;
      cpu::layer_norm(proj + r * stride + Hi * Di, m.index_norm.data(), m.index_bias.data(), 1e-6f, key.data(), Di);
      store_key(l, request[at(r)], position[at(r)], key.data());
    }
  cpu::parallel_for(rows, 1, [&](std::int64_t begin, std::int64_t end) {
    Floats scores, weights(at(Hi));
    std::vector<std::uint64_t> candidates;
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t n = position[at(row)] + 1;
      std::int32_t* out = selected_.data() + row * K;
      if (n > K) {
        scores.resize(at((n + kKeyBlock - 1) / kKeyBlock * kKeyBlock));
        const float* q = proj + row * stride;
        for (std::int64_t i = 0; i < Hi; ++i) weights[at(i)] = q[Hi * Di + Di + i] * scale;
        index_scores(keys_[at(l)][at(request[at(row)])].data(), n, Di, q, weights.data(), Hi, scores.data());
      }
      counts_[at(row)] = static_cast<std::int32_t>(select_top_k(scores.data(), n, K, out, candidates));
    }
  });
}

void Target::attend(int l, std::int64_t row, std::int64_t count, const std::uint16_t** rows) {
  const std::int64_t Hm = config_.mla_heads, C = config_.kv_lora_rank, width = C + config_.rope_dim;
  thread_local Floats scratch;
  latent_attention(rows, count, width, C, query_.data() + row * Hm * width, Hm, latent_.data() + row * Hm * C,
                   room(scratch, latent_scratch(count, width)));
}

// x += o_proj(sparse attention(h)) in the absorbed form: the query goes up into the latent space, the mean latent comes down.
void Target::mla(int l, const Window& w, bool prefill) {
  const MlaWeights& m = *weights_.layers[at(l)].mla;
  const std::int64_t T = w.rows(), d = config_.hidden, Hm = config_.mla_heads, C = config_.kv_lora_rank, Dn = config_.nope_dim,
                     Dr = config_.rope_dim, Dv = config_.v_dim, width = C + Dr, P = m.in.n(), Q = Hm * (Dn + Dr), K = config_.top_k;
  float* proj = room(proj_, T * P);
  float* query = room(query_, T * Hm * width);
  float* latent = room(latent_, T * Hm * C);
  float* mixed = room(mixed_, T * Hm * Dv);
  cpu::matmul(m.in, h_.data(), d, T, proj, P);

  Floats row(at(width));
  stored_.resize(at(T * width));
  for (std::int64_t r = 0; r < T; ++r) {
    const float* kv = proj + r * P + Q;
    cpu::rms_norm(kv, m.kv_norm.data(), config_.rms_eps, row.data(), C);
    std::copy_n(kv + C, Dr, row.begin() + C);
    cpu::to_bfloat16(row.data(), stored_.data() + r * width, width);
  }
  const auto* bits = reinterpret_cast<const std::uint16_t*>(stored_.data());
  if (prefill) {
    sparse_.stage(l, w.slots[0], w.starts[0], T, bits);
  } else {
    for (std::size_t b = 0; b < w.slots.size(); ++b)
      for (int j = 0; j < w.lens[b]; ++j, bits += width) sparse_.write(l, w.slots[b], j, bits);
  }

  const float scale = 1.0f / std::sqrt(static_cast<float>(Dn + Dr));
  for (std::int64_t h = 0; h < Hm; ++h) {
    cpu::matmul(m.key_up[at(h)], proj + h * (Dn + Dr), P, T, query + h * width, Hm * width);
    for (std::int64_t t = 0; t < T; ++t) {
      float* q = query + (t * Hm + h) * width;
      std::copy_n(proj + t * P + h * (Dn + Dr) + Dn, Dr, q + C);
      for (std::int64_t i = 0; i < width; ++i) q[i] *= scale;
    }
  }

  const bool anchor = config_.anchor_of[at(l)] == l;
  if (anchor) {
    select(l, w, proj + Q + width, P);
    if (!prefill) sparse_.plan(l, selected_.data(), counts_.data());
  }
  if (prefill) {
    cpu::parallel_for(T, 1, [&](std::int64_t begin, std::int64_t end) {
      std::vector<const std::uint16_t*> rows(at(K));
      for (std::int64_t t = begin; t < end; ++t) {
        for (std::int32_t k = 0; k < counts_[at(t)]; ++k) rows[at(k)] = sparse_.host_row(l, w.slots[0], selected_[at(t * K + k)]);
        attend(l, t, counts_[at(t)], rows.data());
      }
    });
  } else {
    for (int round = 0; round < sparse_.rounds(l); ++round) {
      sparse_.enter_round(l, round);
      const std::vector<int> members = sparse_.rows_of(l, round);
      cpu::parallel_for(static_cast<std::int64_t>(members.size()), 2, [&](std::int64_t begin, std::int64_t end) {
        std::vector<const std::uint16_t*> rows(at(K));
        for (std::int64_t i = begin; i < end; ++i) {
          const int t = members[at(i)];
          sparse_.pointers(l, t, counts_[at(t)], rows.data());
          attend(l, t, counts_[at(t)], rows.data());
        }
      });
    }
  }
  for (std::int64_t h = 0; h < Hm; ++h) cpu::matmul(m.value_up[at(h)], latent + h * C, Hm * C, T, mixed + h * Dv, Hm * Dv);
  cpu::matmul(m.out, mixed, Hm * Dv, T, x_.data(), d, {.add = x_.data(), .add_stride = d});
}

KdaBytes Target::kda_bytes() const {
  KdaBytes b;
  for (const KdaState& s : kda_) {
    b.state += static_cast<std::int64_t>(s.state.size() + 3 * s.conv[0].size()) * 4;
    b.ring += static_cast<std::int64_t>(s.rawv.size() + s.rawk.size() + s.gate.size() + s.beta.size()) * 4;
    b.snapshots_avoided += static_cast<std::int64_t>(s.state.size()) * 4 * limits_.window;
  }
  b.snapshots_avoided -= b.ring;
  return b;
}

const float* Target::kda_state(int l, int request) const {
  const std::int64_t D = config_.kda_dim;
  return kda_[at(l)].state.data() + request * config_.kda_heads * D * D;
}
const float* Target::conv_window(int l, int i, int request) const {
  return kda_[at(l)].conv[at(i)].data() + std::int64_t{request} * config_.kda_heads * config_.kda_dim * kTaps;
}

std::uint64_t Target::digest(int request) const {
  Digest digest;
  const int n = n_of(request);
  digest.value(static_cast<std::uint64_t>(n));
  for (int l = 0; l < config_.layers; ++l) {
    const KdaState& s = kda_[at(l)];
    for (const Floats* v : {&s.state, &s.conv[0], &s.conv[1], &s.conv[2]}) {
      const std::size_t part = v->size() / at(limits_.requests);
      digest.bytes(v->data() + part * at(request), part * 4);
    }
    if (config_.anchor_of[at(l)] < 0) continue;
    for (int p = 0; p < n; ++p) digest.bytes(sparse_.host_row(l, request, p), at(sparse_.row_values()) * 2);
    if (keys_[at(l)].empty()) continue;
    const std::uint16_t* keys = keys_[at(l)][at(request)].data();
    for (int p = 0; p < n; ++p)
      for (int i = 0; i < config_.index_dim; ++i) digest.value(keys[(p / kKeyBlock * config_.index_dim + i) * kKeyBlock + p % kKeyBlock]);
  }
  return digest.result();
}

}  // namespace specstate::runtime
