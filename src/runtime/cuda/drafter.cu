#include <algorithm>
#include <cmath>

#include "runtime/cuda/drafter.hpp"

namespace specstate::runtime::cuda {

namespace {
using i64 = std::int64_t;
std::size_t at(i64 i) { return static_cast<std::size_t>(i); }
}  // namespace

Drafter::Drafter(const DraftWeights& weights, const TargetWeights& target, const Limits& limits, const Tables& tables,
                 const Constants& constants, specstate::cuda::CublasLt* lt, Memory& memory, const Exchange& exchange)
    : config_(weights.config), limits_(limits), tables_(tables), constants_(constants), exchange_(exchange) {
  const i64 all_heads = config_.heads, all_kv = config_.kv_heads, size = exchange_.group ? exchange_.group->size() : 1;
  heads_ = {0, all_heads}, kv_heads_ = {0, all_kv};
  units_ = all_heads, unit_ = config_.head_dim;
  if (all_kv >= size) {
    const i64 queries = all_heads / all_kv;
    kv_heads_ = part_of(exchange_.group, all_kv), heads_ = {kv_heads_.begin * queries, kv_heads_.count * queries};
    units_ = all_kv, unit_ = queries * config_.head_dim;
  } else if (all_kv == 1 && all_heads >= size) {
    heads_ = part_of(exchange_.group, all_heads);
  }
  mlp_part_ = config_.intermediate >= size ? part_of(exchange_.group, config_.intermediate) : Part{0, config_.intermediate};
  const auto floats_of = [&](const Floats& v) { return memory.upload(v.data(), static_cast<i64>(v.size()), "weights"); };
  const i64 L = config_.layers, N = kv_heads_.count, D = config_.head_dim;
  for (const DraftLayerWeights& l : weights.layers)
    layers_.push_back({floats_of(l.input_norm), floats_of(l.post_norm), floats_of(l.q_norm), floats_of(l.k_norm),
                       upload_rows(memory, l.qkv,
                                   {{heads_.begin * D, heads_.count * D},
                                    {(all_heads + kv_heads_.begin) * D, kv_heads_.count * D},
                                    {(all_heads + all_kv + kv_heads_.begin) * D, kv_heads_.count * D}},
                                   lt),
                       upload_split(memory, l.out, exchange_, lt),
                       upload_rows(memory, l.gate_up, {mlp_part_, {config_.intermediate + mlp_part_.begin, mlp_part_.count}}, lt),
                       upload_split(memory, l.down, exchange_, lt)});
  fc_ = upload_split(memory, weights.fc, exchange_, lt), head_ = upload_split(memory, target.head, exchange_, lt);
  hidden_norm_ = floats_of(weights.hidden_norm), norm_ = floats_of(weights.norm), embed_ = floats_of(target.embed);
  if (config_.kind == DrafterKind::kDSpark)
    markov_embed_ = floats_of(weights.markov_embed), markov_proj_ = upload(memory, weights.markov_proj);

  const i64 half = config_.rotary_dim / 2, R = limits_.requests, B = config_.block, d = config_.hidden, F = config_.intermediate;
  const i64 rope_rows = limits_.context + B;
  Floats table(at(rope_rows * 2 * half));
  for (i64 i = 0; i < half; ++i) {
    const float frequency = static_cast<float>(std::pow(config_.rope_theta, -2.0 * static_cast<double>(i) / config_.rotary_dim));
    for (i64 p = 0; p < rope_rows; ++p) {
      const float angle = static_cast<float>(p) * frequency;
      table[at(p * 2 * half + i)] = std::cos(angle), table[at(p * 2 * half + half + i)] = std::sin(angle);
    }
  }
  rope_ = floats_of(table);
  const i64 kv = N * D, pool = config_.layers * R * limits_.context * kv;
  k_pool_ = memory.device<std::uint16_t>(pool, "draft keys"), v_pool_ = memory.device<std::uint16_t>(pool, "draft values");

  const i64 rows = limits_.batch * B, context_rows = std::max<i64>(limits_.batch * limits_.window, limits_.chunk);
  const auto activations = [&](i64 n, i64 width) { return memory.device<float>(n * width, "the drafter's activations"); };
  x_ = activations(rows, d), h_ = activations(rows, d), qkv_ = activations(rows, (heads_.count + 2 * N) * D);
  all_mixed_ = mixed_ = activations(rows, all_heads * D);
  if (exchange_.group) all_mixed_ = activations(rows, all_heads * D);
  wide_ = activations(rows, 2 * F), act_ = activations(rows, F);
  logits_ = activations(rows, config_.vocab), ctx_ = activations(context_rows, d);

  const i64 pool_rows = R * limits_.context;
  // [K rows of our heads, V rows of them] of each layer.
  std::vector<std::uint16_t> kv_weight;
  for (i64 l = 0; l < 2 * L; ++l) {
    const auto from = weights.kv_weight.begin() + (l * all_kv + kv_heads_.begin) * D * d;
    kv_weight.insert(kv_weight.end(), from, from + N * D * d);
  }
  k_view_ = on_gpu(k_pool_, DType::kBFloat16, {L, pool_rows, N, D}), v_view_ = on_gpu(v_pool_, DType::kBFloat16, {L, pool_rows, N, D});
  params_.ctx_hidden = on_gpu(ctx_, DType::kFloat32, {context_rows, d});
  params_.kv_weight =
      on_gpu(memory.upload(kv_weight.data(), static_cast<i64>(kv_weight.size()), "weights"), DType::kBFloat16, {L, 2 * N * D, d});
  params_.k_norm_weight = on_gpu(floats_of(weights.k_norms), DType::kFloat32, {L, D});
  params_.eps = on_gpu(floats_of(Floats(at(L), config_.rms_eps)), DType::kFloat32, {L});
  params_.cos_sin_cache = on_gpu(rope_, DType::kFloat32, {rope_rows, config_.rotary_dim});
  params_.k_pool = {&k_view_, 1}, params_.v_pool = {&v_view_, 1};
  if (const i64 bytes = draft_kv::materialize_workspace_bytes(params_); bytes > 0)
    params_.workspace = on_gpu(memory.device<char>(bytes, "draft KV workspace"), DType::kUInt8, {bytes});
}

void Drafter::project(i64 rows, const float* features, Stream stream) {
  const i64 d = config_.hidden;
  matmul(fc_, plain(features, d * static_cast<i64>(config_.feature_layers.size())), rows, ctx_, d, stream);
  rms_norm(ctx_, d, rows, d, hidden_norm_, config_.rms_eps, ctx_, d, stream);
}

void Drafter::write(i64 rows, const TensorView& positions, const TensorView& slots, const TensorView& committed, Stream stream) {
  draft_kv::MaterializeIntoPoolParams p = params_;
  p.ctx_hidden = on_gpu(ctx_, DType::kFloat32, {rows, config_.hidden});
  p.positions = positions, p.slot_mapping = slots, p.commit_lens = committed;
  draft_kv::materialize_into_pool(p, stream);
}

void Drafter::materialize(const Step& step, Stream stream) {
  const i64 B = step.batch, W = step.width;
  write(B * W, on_gpu(step.positions, DType::kInt32, {B, W}), on_gpu(step.pool_rows, DType::kInt64, {B, W}),
        on_gpu(step.accepted, DType::kInt32, {B}), stream);
}

void Drafter::materialize(int request, int begin, int count, const float* features, Stream stream) {
  project(count, features, stream);
  write(count, on_gpu(constants_.iota + begin, DType::kInt32, {count}),
        on_gpu(constants_.pool_rows + i64{request} * limits_.context + begin, DType::kInt64, {count}), {}, stream);
}

void Drafter::propose(const Step& step, const Choice& choice, double* probabilities, Stream stream) {
  const Rows rows = step.rows();
  const i64 B = config_.block, M = step.batch * B, d = config_.hidden, D = config_.head_dim, heads = heads_.count, kv = kv_heads_.count,
            F = config_.intermediate, width = (heads + 2 * kv) * D, V = config_.vocab, pool = i64{limits_.requests} * limits_.context;
  embed_block(rows, B, tables_.last, config_.mask_id, embed_, d, x_, stream);
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    const Layer& layer = layers_[l];
    matmul(layer.qkv, normed(x_, d, layer.input_norm, config_.rms_eps, h_), M, qkv_, width, stream);
    const Rotary rotary{layer.q_norm, layer.k_norm, config_.rms_eps, rope_, config_.rotary_dim, 1.0f / std::sqrt(static_cast<float>(D))};
    const i64 before = static_cast<i64>(l) * pool * kv * D;
    block_attention(rows, B, qkv_, width, heads, kv, D, rotary, config_.window[l], limits_.context, k_pool_ + before, v_pool_ + before,
                    limits_.context, mixed_, stream);
    const float* mixed = mixed_;
    if (heads < config_.heads)
      gather_columns(exchange_, mixed_, M, units_, unit_, all_mixed_, config_.heads * D, false, stream), mixed = all_mixed_;
    matmul(layer.out, plain(mixed, config_.heads * D), M, x_, d, stream, x_);
    mlp(layer.gate_up, layer.down, normed(x_, d, layer.post_norm, config_.rms_eps, h_), M, F, wide_, act_, x_, d, exchange_, stream);
  }
  // Rows that predict: all of DSpark's, all but the first of DFlash's.
  matmul(head_, normed(x_, d, norm_, config_.rms_eps, h_), M, logits_, V, stream);
  runtime::cuda::propose(rows, B, B - proposals(), logits_, choice, tables_.keys, {markov_embed_, markov_proj_}, step.candidates,
                         probabilities, stream);
}

}  // namespace specstate::runtime::cuda
