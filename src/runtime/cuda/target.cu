#include <algorithm>
#include <cmath>

#include "runtime/cuda/target.hpp"

namespace specstate::runtime::cuda {

namespace {

using i64 = std::int64_t;
using i32 = std::int32_t;
constexpr int kPromptWindow = 64;  // positions of a prompt that are committed at once: the tail that the swap finds by a map
constexpr i64 kTaps = 3;           // inputs that a convolution of width 4 remembers

std::size_t at(i64 i) { return static_cast<std::size_t>(i); }
TensorView floats(const float* data, std::initializer_list<i64> sizes) { return on_gpu(data, DType::kFloat32, sizes); }
TensorView ints(const i32* data, std::initializer_list<i64> sizes) { return on_gpu(data, DType::kInt32, sizes); }
TensorView longs(const i64* data, std::initializer_list<i64> sizes) { return on_gpu(data, DType::kInt64, sizes); }
/// [rows, heads, dim] inside rows of `stride` floats.
TensorView heads_view(const float* data, i64 rows, i64 stride, i64 heads, i64 dim) {
  TensorView t = floats(data, {rows, heads, dim});
  t.strides[0] = stride;
  return t;
}

}  // namespace

Target::Target(const TargetWeights& weights, const Limits& limits, std::vector<int> features, const Tables& tables,
               const Constants& constants, specstate::cuda::CublasLt* lt, Trace& trace, Beside& beside, Memory& memory,
               const Exchange& exchange)
    : config_(weights.config),
      limits_(limits),
      feature_layers_(std::move(features)),
      tables_(tables),
      constants_(constants),
      trace_(trace),
      beside_(beside),
      exchange_(exchange),
      kda_part_(part_of(exchange.group, config_.kda_heads)),
      mla_part_(part_of(exchange.group, config_.mla_heads)),
      mlp_part_(part_of(exchange.group && config_.intermediate >= exchange.group->size() ? exchange.group : nullptr, config_.intermediate)),
      row_(config_.kv_lora_rank + config_.rope_dim),
      tail_(std::max(2 * limits.window, std::min(limits.chunk, kPromptWindow))),
      top_k_(config_.top_k) {
  const i64 R = limits_.requests, L = limits_.context, W = limits_.window, H = kda_part_.count, D = config_.kda_dim, d = config_.hidden,
            F = config_.intermediate;
  const auto floats_of = [&](const Floats& v) { return memory.upload(v.data(), static_cast<i64>(v.size()), "weights"); };
  const auto some_of = [&](const Floats& v, i64 begin, i64 count) { return memory.upload(v.data() + begin, count, "weights"); };
  const i64 all_H = config_.kda_heads, first_H = kda_part_.begin, all_Hm = config_.mla_heads, first_Hm = mla_part_.begin;
  embed_ = floats_of(weights.embed), norm_ = floats_of(weights.norm), head_ = upload_split(memory, weights.head, exchange_, lt);
  i64 widest = 0, sparse_layers = 0;
  for (int l = 0; l < config_.layers; ++l) {
    const LayerWeights& from = weights.layers[at(l)];
    Layer& to = layers_.emplace_back();
    to.input_norm = floats_of(from.input_norm), to.post_norm = floats_of(from.post_norm);
    to.gate_up = upload_rows(memory, from.gate_up, {mlp_part_, {F + mlp_part_.begin, mlp_part_.count}}, lt);
    to.down = upload_split(memory, from.down, exchange_, lt);
    if (from.kda) {
      const KdaWeights& k = *from.kda;
      to.number = kda_layers_++;
      // Of q, k, v, beta and what the gates put out the rows of our heads; the gates' inner values whole.
      const Part rows{first_H * D, H * D};
      const i64 ranks = k.gate.k() + k.out_gate.k(), all = all_H * D;
      Floats conv;
      for (i64 i = 0; i < 3; ++i) {
        const auto begin = k.conv.begin() + (i * all + rows.begin) * 4;
        conv.insert(conv.end(), begin, begin + rows.count * 4);
      }
      to.kda = std::make_unique<Kda>(Kda{
          &k,
          upload_rows(
              memory, k.in,
              {rows, {all + rows.begin, rows.count}, {2 * all + rows.begin, rows.count}, {3 * all, ranks}, {3 * all + ranks + first_H, H}},
              lt),
          upload_rows(memory, k.gate, {rows}, lt), upload_rows(memory, k.out_gate, {rows}, lt), upload_split(memory, k.out, exchange_, lt),
          floats_of(conv), some_of(k.a_log, first_H, H), some_of(k.dt_bias, rows.begin, rows.count), floats_of(k.o_norm)});
      widest = std::max(widest, to.kda->in.n);
    } else {
      const MlaWeights& m = *from.mla;
      to.mla = std::make_unique<Mla>();
      const i64 query = config_.nope_dim + config_.rope_dim, all = all_Hm * query;
      to.mla->host = &m;
      to.mla->in = upload_rows(memory, m.in, {{first_Hm * query, mla_part_.count * query}, {all, m.in.n() - all}}, lt);
      to.mla->out = upload_split(memory, m.out, exchange_, lt), to.mla->kv_norm = floats_of(m.kv_norm);
      for (i64 h = first_Hm; h < first_Hm + mla_part_.count; ++h) {
        to.mla->key_up.push_back(upload(memory, m.key_up[at(h)]));
        to.mla->value_up.push_back(upload(memory, m.value_up[at(h)]));
      }
      to.mla->anchor = config_.anchor_of[at(l)] == l;
      if (to.mla->anchor) {
        to.mla->index_norm = floats_of(m.index_norm), to.mla->index_bias = floats_of(m.index_bias);
        keys_.push_back(memory.device<std::uint16_t>(R * L * config_.index_dim, "index keys"));
        groups_.emplace_back();
      }
      // Followers come right behind their anchor among the sparse layers: an anchor is the nearest before them.
      to.mla->layer = at(sparse_layers++), to.mla->group = groups_.size() - 1;
      ++groups_.back().num_layers;
      widest = std::max(widest, to.mla->in.n);
    }
  }

  const i64 states = kda_layers_ * R * H, all_states = kda_layers_ * R * all_H;
  state_ = memory.device<float>(states * D * D, "KDA states");
  for (float*& c : conv_) c = memory.device<float>(states * D * kTaps, "KDA convolution windows");
  state_bytes_ = 4 * all_states * D * (D + 3 * kTaps);  // of all ranks
  if (W > 1) {
    for (float** ring : {&rawv_, &rawk_, &ring_g_}) *ring = memory.device<float>(states * W * D, "KDA rings");
    ring_beta_ = memory.device<float>(states * W, "KDA rings");
    for (float*& c : verified_) c = memory.device<float>(kda_layers_ * limits_.batch * H * W * D * kTaps, "KDA verified windows");
    ring_bytes_ = 4 * all_states * W * (3 * D + 1);
    snapshot_bytes_ = 4 * all_states * W * D * D - ring_bytes_;
  }

  const i64 hot = limits_.hot_slots;
  scratch_rows_ = std::max<i64>(0, W * top_k_ - hot);  // a step may select more positions than there are hot slots; the rest is read once
  const i64 own = hot + tail_ + scratch_rows_, device_rows = R * own;
  for (i64 l = 0; l < sparse_layers; ++l) {
    hisparse::KvBuffers& b = buffers_.emplace_back();
    b.host_cache =
        pinned_view(memory.shared<std::uint16_t>(exchange_.group, R * L * row_, "the host's KV rows"), DType::kBFloat16, {R * L, row_});
    b.device_buffer = on_gpu(memory.device<std::uint16_t>(device_rows * row_, "hot KV rows"), DType::kBFloat16, {device_rows, row_});
    stage_.push_back(memory.device<std::uint16_t>(L * row_, "KV rows of a prompt"));
  }
  std::vector<i32> slot_locs(at(R * (hot + tail_))), scratch(at(R * scratch_rows_));
  for (i64 r = 0; r < R; ++r) {
    for (i64 s = 0; s < hot + tail_; ++s) slot_locs[at(r * (hot + tail_) + s)] = static_cast<i32>(r * own + s);
    for (i64 s = 0; s < scratch_rows_; ++s) scratch[at(r * scratch_rows_ + s)] = static_cast<i32>(r * own + hot + tail_ + s);
  }
  if (scratch_rows_ > 0) scratch_ = memory.upload(scratch.data(), R * scratch_rows_, "scratch rows");
  const hisparse::SwapShape shape{R, hot, tail_, L};
  std::size_t first = 0;
  for (hisparse::WindowGroup& g : groups_) {
    g.layers = buffers_.data() + first, first += at(g.num_layers);
    g.state = hisparse::swap_state_view(shape, memory.device<char>(hisparse::swap_state_bytes(shape), "swap state"), gpu());
    Memory::copy_in(g.state.slot_locs.data, slot_locs.data(), static_cast<i64>(slot_locs.size()) * 4);
    Selection& s = selections_.emplace_back();
    const i64 occurrences = W * top_k_, B = limits_.batch;
    const i64 rows = std::max<i64>(limits_.batch * W, limits_.chunk);  // a prefill chooses for a whole chunk
    s.selected = memory.device<i32>(rows * top_k_, "selections"), s.locs = memory.device<i32>(rows * top_k_, "selections");
    s.miss_src = memory.device<i64>(B * occurrences, "miss plan"), s.miss_dst = memory.device<i32>(B * occurrences, "miss plan");
    s.miss_count = memory.device<i32>(B, "miss plan");
  }
  host_locs_ = memory.device<i64>(R * L, "host rows"), prefill_locs_ = memory.device<i32>(tail_, "host rows");
  swaps_ = {anchors(), limits_.batch, memory.device<i32>(anchors() * limits_.batch, "totals"),
            memory.device<i32>(anchors() * limits_.batch, "totals"), memory.device<i64>(2 * anchors(), "totals")};

  const i64 rows = std::max<i64>(limits_.batch * W, limits_.chunk), Hm = mla_part_.count, C = config_.kv_lora_rank;
  const auto activations = [&](i64 width) { return memory.device<float>(rows * width, "activations"); };
  x_ = activations(d), h_ = activations(d), proj_ = activations(widest), gate_ = activations(2 * H * D), out_gate_ = gate_ + rows * H * D;
  // An all-gather sends as much as the largest part has.
  const i64 all_mixed = std::max(all_H * D, all_Hm * config_.v_dim);
  all_mixed_ = mixed_ = activations(all_mixed);
  if (exchange_.group) all_mixed_ = activations(all_mixed);
  query_ = activations(Hm * C), latent_ = activations(Hm * C);
  wide_ = activations(2 * F), act_ = activations(F), features_ = activations(std::max<i64>(1, feature_width()));
  logits_ = activations(config_.vocab), scores_ = activations(L);
}

void Target::reset(int request, Stream stream) {
  const i64 R = limits_.requests, HD = kda_part_.count * config_.kda_dim, D = config_.kda_dim, L = limits_.context;
  for (i64 l = 0; l < kda_layers_; ++l) {
    fill(state_ + (l * R + request) * HD * D, 0, HD * D * 4, stream);
    for (float* c : conv_) fill(c + (l * R + request) * HD * kTaps, 0, HD * kTaps * 4, stream);
  }
  for (const hisparse::WindowGroup& g : groups_) hisparse::reset_swap_state(g.state, ints(constants_.iota + request, {1}), stream);
  fill(host_locs_ + request * L, -1, L * 8, stream);
  fill(tables_.lengths + request, 0, 4, stream);
}

void Target::windows(const TensorView& requests, const TensorView& widths, const TensorView& real, const TensorView& locs, Stream stream) {
  hisparse::OpenWindowParams p;
  p.groups = groups_.data(), p.num_groups = anchors();
  p.requests = requests, p.widths = widths, p.num_real_reqs = real;
  p.lengths = ints(tables_.lengths, {limits_.requests}), p.locs = locs;
  hisparse::open_window(p, stream);
}

void Target::accept(const TensorView& requests, const TensorView& widths, const TensorView& real, const TensorView& accepted,
                    Stream stream) {
  const i64 R = limits_.requests, L = limits_.context;
  hisparse::AcceptWindowParams p;
  p.groups = groups_.data(), p.num_groups = anchors();
  p.requests = requests, p.widths = widths, p.num_real_reqs = real, p.accepted = accepted;
  p.lengths = ints(tables_.lengths, {R}), p.reserved_rows = longs(constants_.pool_rows, {R, L}),
  p.host_cache_locs = longs(host_locs_, {R, L});
  hisparse::accept_window(p, stream);
}

void Target::open(const Step& step) {
  const i64 B = step.batch, W = step.width;
  beside_.fork();
  windows(ints(step.requests, {B}), ints(step.widths, {B}), ints(step.real, {1}), ints(step.locs, {B, W}), beside_.stream());
  trace_.mark("hisparse: open window");
}

void Target::forward(const Step& step, bool in_place, Stream stream) {
  const i64 B = step.batch, W = step.width;
  layers(step.rows(), &step, in_place ? Way::kInPlace : Way::kVerify, stream);
  head(0, B * W, stream);
  trace_.mark("model: head");
}

void Target::commit(const Step& step, bool in_place, Stream stream) {
  const i64 B = step.batch, R = limits_.requests, H = kda_part_.count, D = config_.kda_dim, W = limits_.window, HD = H * D;
  if (!in_place) {
    kda::FoldParams f;
    f.state = floats(state_, {kda_layers_, R, H, D, D});
    f.rings = {floats(rawv_, {kda_layers_, R, H, W, D}), floats(rawk_, {kda_layers_, R, H, W, D}),
               floats(ring_g_, {kda_layers_, R, H, W, D}), floats(ring_beta_, {kda_layers_, R, H, W})};
    f.slots = ints(step.kda_slots, {B}), f.accept = ints(step.accepted, {B});
    kda::fold(f, stream);
    std::vector<kda::RollbackConvWindowsParams> conv;
    for (i64 l = 0; l < kda_layers_; ++l)
      for (int i = 0; i < 3; ++i) {
        kda::RollbackConvWindowsParams& c = conv.emplace_back();
        c.pool = floats(conv_[i] + l * R * HD * kTaps, {R, HD, kTaps});
        c.windows = floats(verified_[i] + l * limits_.batch * W * HD * kTaps, {limits_.batch, W, HD, kTaps});
        c.slots = ints(step.kda_slots, {B}), c.last_correct_step = ints(step.last_step, {B});
      }
    kda::rollback_conv_windows(conv.data(), static_cast<i64>(conv.size()), stream);
    trace_.mark("kda: fold and rollback");
  }
  accept(ints(step.requests, {B}), ints(step.widths, {B}), ints(step.real, {1}), ints(step.accepted, {B}), stream);
  trace_.mark("hisparse: accept window");
}

void Target::prefill(int request, const i64* tokens, int begin, int count, bool last, Stream stream) {
  const Rows rows{1, count, constants_.one(), constants_.iota + request, constants_.iota + begin, tokens + begin};
  layers(rows, nullptr, Way::kPrefill, stream);
  // The rows go through windows as those of a step do: backed up to the host, and resident where they fit.
  const TensorView who = ints(constants_.iota + request, {1}), one = ints(constants_.one(), {1});
  for (i64 done = 0; done < count; done += tail_) {
    const i64 n = std::min<i64>(tail_, count - done);
    const TensorView width = ints(constants_.iota + n, {1});
    windows(who, width, one, ints(prefill_locs_, {1, n}), stream);
    for (std::size_t l = 0; l < buffers_.size(); ++l)
      scatter_rows(stage_[l] + (begin + done) * row_, n, row_, prefill_locs_, buffers_[l].device_buffer.as<std::uint16_t>(), stream);
    accept(who, width, one, width, stream);
  }
  if (last) head(count - 1, 1, stream);
}

void Target::layers(const Rows& rows, const Step* step, Way way, Stream stream) {
  const i64 T = rows.count(), d = config_.hidden, F = config_.intermediate;
  embed(embed_, d, rows.tokens, T, x_, stream);
  trace_.mark("model: embedding");
  for (int l = 0; l < config_.layers; ++l) {
    const Layer& layer = layers_[at(l)];
    const Input h = normed(x_, d, layer.input_norm, config_.rms_eps, h_);
    if (layer.kda)
      kda(layer, h, rows, step ? step->kda_slots : rows.requests, way, stream);
    else
      mla(*layer.mla, h, rows, step, stream);
    Also feature;
    for (std::size_t f = 0; f < feature_layers_.size(); ++f)
      if (feature_layers_[f] == l) feature = {features_ + static_cast<i64>(f) * d, feature_width()};
    mlp(layer.gate_up, layer.down, normed(x_, d, layer.post_norm, config_.rms_eps, h_), T, F, wide_, act_, x_, d, exchange_, stream,
        feature);
    for (std::size_t f = 0; f < feature_layers_.size(); ++f)  // of a layer that is wanted twice
      if (feature_layers_[f] == l && features_ + static_cast<i64>(f) * d != feature.y)
        copy_columns(x_, d, T, d, features_ + static_cast<i64>(f) * d, feature_width(), stream);
    trace_.mark("model: mlp of layer " + std::to_string(l));
  }
}

void Target::head(i64 first_row, i64 rows, Stream stream) {
  const i64 d = config_.hidden;
  matmul(head_, normed(x_ + first_row * d, d, norm_, config_.rms_eps, h_), rows, logits_, config_.vocab, stream);
}

kda::Rings Target::rings(i64 l) const {
  const i64 R = limits_.requests, H = kda_part_.count, D = config_.kda_dim, W = limits_.window, ring = R * H * W;
  return {floats(rawv_ + l * ring * D, {R, H, W, D}), floats(rawk_ + l * ring * D, {R, H, W, D}),
          floats(ring_g_ + l * ring * D, {R, H, W, D}), floats(ring_beta_ + l * ring, {R, H, W})};
}

// x += o_proj(kda(h)).
void Target::kda(const Layer& layer, const Input& h, const Rows& rows, const i32* slots, Way way, Stream stream) {
  const Kda& k = *layer.kda;
  const i64 T = rows.count(), d = config_.hidden, H = kda_part_.count, D = config_.kda_dim, HD = H * D, R = limits_.requests,
            W = limits_.window, rf = k.gate.k, rg = k.out_gate.k, P = k.in.n, l = layer.number;
  matmul(k.in, h, T, proj_, P, stream);
  if (!k.gate.lt && rf == rg) {  // two products of one shape are one launch
    matmul_heads({k.gate, k.out_gate}, proj_ + 3 * HD, P, rf, T, gate_, HD, out_gate_ - gate_, stream);
  } else {
    matmul(k.gate, plain(proj_ + 3 * HD, P), T, gate_, HD, stream);
    matmul(k.out_gate, plain(proj_ + 3 * HD + rf, P), T, out_gate_, HD, stream);
  }
  trace_.mark("model: projections");
  kda::VerifyParams p;
  p.x_q = heads_view(proj_, T, P, H, D), p.x_k = heads_view(proj_ + HD, T, P, H, D), p.x_v = heads_view(proj_ + 2 * HD, T, P, H, D);
  TensorView *taps[] = {&p.w_q, &p.w_k, &p.w_v}, *before[] = {&p.cs_q, &p.cs_k, &p.cs_v}, *after[] = {&p.conv_q, &p.conv_k, &p.conv_v};
  for (i64 i = 0; i < 3; ++i) {
    *taps[i] = floats(k.conv + i * HD * 4, {HD, 4});
    *before[i] = floats(conv_[i] + l * R * HD * kTaps, {R, HD, kTaps});
    if (way == Way::kVerify) *after[i] = floats(verified_[i] + l * limits_.batch * W * HD * kTaps, {limits_.batch, W, HD, kTaps});
  }
  p.g = heads_view(gate_, T, HD, H, D);
  p.beta = floats(proj_ + 3 * HD + rf + rg, {T, H});
  p.beta.strides[0] = P;
  p.A_log = floats(k.a_log, {H}), p.dt_bias = floats(k.dt_bias, {HD});
  p.state = floats(state_ + l * R * HD * D, {R, H, D, D});
  p.slots = ints(slots, {rows.batch});
  p.onorm_gate = heads_view(out_gate_, T, HD, H, D), p.onorm_weight = floats(k.o_norm, {D}), p.onorm_eps = config_.rms_eps;
  p.out = heads_view(mixed_, T, HD, H, D);
  p.lower_bound = config_.gate_lower_bound;
  if (way == Way::kVerify) {
    p.rings = rings(l);
    p.exact = limits_.exact;
    kda::verify(p, stream);
  } else {
    kda::DecodeParams decode;
    static_cast<kda::StepParams&>(decode) = p;
    kda::decode(decode, stream);
  }
  trace_.mark(way == Way::kVerify ? "kda: verify" : "kda: decode");
  const i64 all = i64{config_.kda_heads} * D;
  if (exchange_.group) gather_columns(exchange_, mixed_, T, config_.kda_heads, D, all_mixed_, all, false, stream);
  matmul(k.out, plain(all_mixed_, all), T, x_, d, stream, x_);
  trace_.mark("model: projections");
}

// x += o_proj(sparse attention(h)) in the absorbed form. A step reads device rows that the swap resolved; a prefill the staged rows of its prompt.
void Target::mla(const Mla& m, const Input& h, const Rows& rows, const Step* step, Stream stream) {
  const i64 T = rows.count(), B = rows.batch, W = rows.width, K = top_k_, d = config_.hidden, Hm = mla_part_.count,
            C = config_.kv_lora_rank, Dn = config_.nope_dim, Dr = config_.rope_dim, Dv = config_.v_dim, P = m.in.n, Q = Hm * (Dn + Dr),
            L = limits_.context, R = limits_.requests;
  matmul(m.in, h, T, proj_, P, stream);
  if (step && m.layer == 0) beside_.join();  // the windows are open
  std::uint16_t* const device = buffers_[m.layer].device_buffer.as<std::uint16_t>();
  const i64 Hi = config_.index_heads, Di = config_.index_dim;
  const float* const index = proj_ + Q + row_;  // an anchor's: queries, key, weights
  IndexKeys keys;
  if (m.anchor) keys = {index + Hi * Di, P, Di, m.index_norm, m.index_bias, L, keys_[m.group]};
  store_rows(rows, {proj_ + Q, P, C, Dr, m.kv_norm, config_.rms_eps, step ? step->locs : rows.positions, step ? device : stage_[m.layer]},
             keys, stream);
  matmul_heads(m.key_up, proj_, P, Dn + Dr, T, query_, Hm * C, C, stream);
  trace_.mark("model: projections");

  Selection& s = selections_[m.group];
  if (m.anchor) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(Hi)) * (1.0f / std::sqrt(static_cast<float>(Di)));
    select(rows, index, P, Hi * Di + Di, Hi, Di, scale, keys_[m.group], L, K, scores_, s.selected, stream);
    trace_.mark("model: indexer");
  }
  if (step && m.anchor) {
    hisparse::SwapInParams p;
    p.top_k_tokens = ints(s.selected, {B, W, K}), p.seq_lens = ints(step->ends, {B, W}), p.req_pool_indices = ints(step->requests, {B});
    p.num_real_reqs = ints(step->real, {1}), p.host_cache_locs = longs(host_locs_, {R, L}), p.buffers = buffers_[m.layer];
    p.state = groups_[m.group].state, p.top_k_device_locs = ints(s.locs, {B, W, K});
    if (scratch_) p.scratch_locs = ints(scratch_, {R, scratch_rows_});
    p.plan = {longs(s.miss_src, {B, W * K}), ints(s.miss_dst, {B, W * K}), ints(s.miss_count, {B})};
    const i64 first = static_cast<i64>(m.group) * limits_.batch;
    p.unique_hits = ints(swaps_.hits + first, {B}), p.unique_misses = ints(swaps_.misses + first, {B});
    hisparse::swap_in(p, stream);
    trace_.mark("hisparse: swap");
    beside_.fork();
  } else if (step) {
    beside_.join();  // this layer's rows are there
  }
  // The next layer's rows come while this one and what is between them run.
  const hisparse::WindowGroup& group = groups_[m.group];
  if (const std::size_t next = m.layer + 1; step && next < buffers_.size() && &buffers_[next] < group.layers + group.num_layers) {
    hisparse::ReplayPlanParams p;
    p.miss_src = longs(s.miss_src, {B, W * K}), p.miss_dst = ints(s.miss_dst, {B, W * K}), p.miss_count = ints(s.miss_count, {B});
    p.num_real_reqs = ints(step->real, {1}), p.followers = &buffers_[next], p.num_followers = 1;
    hisparse::replay_plan(p, beside_.stream());
    trace_.mark("hisparse: follower");
  }
  latent_attention(rows, s.selected, step ? s.locs : s.selected, K, step ? device : stage_[m.layer], query_, proj_ + Dn, P, Dn + Dr, Hm, C,
                   Dr, 1.0f / std::sqrt(static_cast<float>(Dn + Dr)), latent_, tables_.fault, stream);
  trace_.mark("model: sparse attention");
  matmul_heads(m.value_up, latent_, Hm * C, C, T, mixed_, Hm * Dv, Dv, stream);
  const i64 all = config_.mla_heads * Dv;
  if (exchange_.group) gather_columns(exchange_, mixed_, T, config_.mla_heads, Dv, all_mixed_, all, false, stream);
  matmul(m.out, plain(all_mixed_, all), T, x_, d, stream, x_);
  trace_.mark("model: projections");
}

void Target::digest(int first, int count, std::uint64_t* out, Stream stream) const {
  const i64 R = limits_.requests, L = limits_.context, HD = kda_part_.count * config_.kda_dim, D = config_.kda_dim, Di = config_.index_dim,
            before = kda_part_.begin * D;                                    // channels of other ranks' heads
  const bool first_rank = !exchange_.group || exchange_.group->rank() == 0;  // adds what all ranks have
  std::uint64_t salt = 0;
  // Words of a request that lie one behind the other, or so many a committed position.
  const auto add = [&](const void* base, i64 step, i64 words, bool positions, i64 skipped = -1) {
    salt += std::uint64_t{1} << 40;
    if (skipped < 0 && !first_rank) return;
    add_digest(static_cast<const std::uint32_t*>(base) + first * step, step, words, positions ? tables_.lengths + first : nullptr, count,
               salt + static_cast<std::uint64_t>(std::max<i64>(skipped, 0)), out, stream);
  };
  add(tables_.lengths, 1, 1, false);
  for (i64 l = 0; l < kda_layers_; ++l) {
    add(state_ + l * R * HD * D, HD * D, HD * D, false, before * D);
    for (const float* c : conv_) add(c + l * R * HD * kTaps, HD * kTaps, HD * kTaps, false, before * kTaps);
  }
  for (const hisparse::KvBuffers& b : buffers_) add(b.host_cache.data, L * row_ / 2, row_ / 2, true);
  for (const std::uint16_t* k : keys_) add(k, L * Di / 2, Di / 2, true);
}

}  // namespace specstate::runtime::cuda
