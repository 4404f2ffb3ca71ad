#include "runtime/synthetic.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <vector>

#include "core/match.hpp"
#include "core/numeric.hpp"
#include "runtime/digest.hpp"
#include "runtime/json.hpp"
#include "runtime/safetensors.hpp"

namespace specstate::runtime {

namespace {

/// Tensors of one file. Values are uniform in +-scale, or a constant plus that.
class Writer {
 public:
  explicit Writer(std::uint64_t seed) : seed_(seed) {}

  void matrix(const std::string& name, std::int64_t rows, std::int64_t columns) {
    // Keeps the size of activations through a layer.
    bf16(name, {rows, columns}, 0.0, std::sqrt(3.0 / static_cast<double>(columns)));
  }
  void bf16(const std::string& name, std::vector<std::int64_t> shape, double centre, double spread) {
    auto& v = halves_.emplace_back(count(shape));
    for (auto& x : v) x = core::from_float<core::bfloat16>(next(centre, spread)).bits;
    tensors_.push_back({name, DType::kBFloat16, std::move(shape), std::as_bytes(std::span(v))});
  }
  void fp32(const std::string& name, std::vector<std::int64_t> shape, double centre, double spread) {
    auto& v = floats_.emplace_back(count(shape));
    for (auto& x : v) x = next(centre, spread);
    tensors_.push_back({name, DType::kFloat32, std::move(shape), std::as_bytes(std::span(v))});
  }
  void save(const std::string& path) const { write_safetensors(path, tensors_); }

 private:
  static std::size_t count(const std::vector<std::int64_t>& shape) {
    std::int64_t n = 1;
    for (const std::int64_t s : shape) n *= s;
    return static_cast<std::size_t>(n);
  }
  float next(double centre, double spread) {
    const double u = static_cast<double>(mix64(seed_ ^ ++counter_ * 0x9E3779B97F4A7C15u) >> 11) * 0x1p-53;
    return static_cast<float>(centre + (2 * u - 1) * spread);
  }
  std::uint64_t seed_, counter_ = 0;
  std::deque<std::vector<std::uint16_t>> halves_;
  std::deque<std::vector<float>> floats_;
  std::vector<TensorToStore> tensors_;
};

void save_json(const std::string& path, const Json& j) {
  std::FILE* f = std::fopen(path.c_str(), "wb");
  if (!f) core::throw_runtime(path + ": cannot create.");
  const std::string text = j.dump(2);
  const bool ok = std::fwrite(text.data(), 1, text.size(), f) == text.size();
  if (std::fclose(f) != 0 || !ok) core::throw_runtime(path + ": cannot write.");
}

bool is_mla(const SyntheticShape& s, int layer) { return (layer + 1) % s.mla_every == 0; }
bool is_anchor(const SyntheticShape& s, int layer) { return is_mla(s, layer) && (layer + 1) / s.mla_every % 2 == 1; }

void write_target(const std::string& folder, const SyntheticShape& s, std::uint64_t seed) {
  std::vector<int> kda_layers, full_layers, anchors;
  for (int i = 0; i < s.layers; ++i) {
    (is_mla(s, i) ? full_layers : kda_layers).push_back(i + 1);
    if (is_anchor(s, i)) anchors.push_back(i);
  }
  save_json(folder + "/config.json", {{"architectures", {"KimiLinearForCausalLM"}},
                                      {"vocab_size", 264},
                                      {"hidden_size", s.hidden},
                                      {"intermediate_size", s.intermediate},
                                      {"num_hidden_layers", s.layers},
                                      {"num_attention_heads", s.mla_heads},
                                      {"kv_lora_rank", s.kv_lora_rank},
                                      {"qk_nope_head_dim", s.nope_dim},
                                      {"qk_rope_head_dim", s.rope_dim},
                                      {"v_head_dim", s.v_dim},
                                      {"mla_use_nope", true},
                                      {"q_lora_rank", nullptr},
                                      {"rms_norm_eps", 1e-5},
                                      {"hidden_act", "silu"},
                                      {"tie_word_embeddings", false},
                                      {"model_max_length", s.max_length},
                                      {"bos_token_id", 256},
                                      {"eos_token_id", 257},
                                      {"linear_attn_config",
                                       {{"num_heads", s.kda_heads},
                                        {"head_dim", s.kda_dim},
                                        {"short_conv_kernel_size", 4},
                                        {"gate_lower_bound", -5.0},
                                        {"kda_layers", kda_layers},
                                        {"full_attn_layers", full_layers}}},
                                      {"index_n_heads", s.index_heads},
                                      {"index_head_dim", s.index_dim},
                                      {"index_topk", s.top_k},
                                      {"index_anchor_layers", anchors}});
  Writer w(seed);
  const int d = s.hidden, channels = s.kda_heads * s.kda_dim, rank = std::max(4, channels / 8);
  w.bf16("model.embed_tokens.weight", {264, d}, 0, 1);
  w.matrix("lm_head.weight", 264, d);
  w.bf16("model.norm.weight", {d}, 1, 0.2);
  for (int i = 0; i < s.layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i), a = layer + "self_attn.";
    w.bf16(layer + "input_layernorm.weight", {d}, 1, 0.2);
    w.bf16(layer + "post_attention_layernorm.weight", {d}, 1, 0.2);
    w.matrix(layer + "mlp.gate_proj.weight", s.intermediate, d);
    w.matrix(layer + "mlp.up_proj.weight", s.intermediate, d);
    w.matrix(layer + "mlp.down_proj.weight", d, s.intermediate);
    if (is_mla(s, i)) {
      w.matrix(a + "q_proj.weight", s.mla_heads * (s.nope_dim + s.rope_dim), d);
      w.matrix(a + "kv_a_proj_with_mqa.weight", s.kv_lora_rank + s.rope_dim, d);
      w.bf16(a + "kv_a_layernorm.weight", {s.kv_lora_rank}, 1, 0.2);
      w.matrix(a + "kv_b_proj.weight", s.mla_heads * (s.nope_dim + s.v_dim), s.kv_lora_rank);
      w.matrix(a + "o_proj.weight", d, s.mla_heads * s.v_dim);
      if (is_anchor(s, i)) {
        w.matrix(a + "indexer.wq_b.weight", s.index_heads * s.index_dim, d);
        w.matrix(a + "indexer.wk.weight", s.index_dim, d);
        w.fp32(a + "indexer.k_norm.weight", {s.index_dim}, 1, 0.2);
        w.fp32(a + "indexer.k_norm.bias", {s.index_dim}, 0, 0.2);
        w.matrix(a + "indexer.weights_proj.weight", s.index_heads, d);
      }
      continue;
    }
    for (const char* p : {"q", "k", "v"}) {
      w.matrix(a + p + "_proj.weight", channels, d);
      w.fp32(a + p + "_conv1d.weight", {channels, 4}, 0, 0.5);
    }
    w.matrix(a + "f_a_proj.weight", rank, d);
    w.matrix(a + "f_b_proj.weight", channels, rank);
    w.matrix(a + "g_a_proj.weight", rank, d);
    w.matrix(a + "g_b_proj.weight", channels, rank);
    w.matrix(a + "b_proj.weight", s.kda_heads, d);
    w.matrix(a + "o_proj.weight", d, channels);
    w.fp32(a + "A_log", {s.kda_heads}, 0, 0.5);
    w.fp32(a + "dt_bias", {channels}, -2, 1);
    w.fp32(a + "o_norm.weight", {s.kda_dim}, 1, 0.2);
  }
  w.save(folder + "/model.safetensors");
}

void write_drafter(const std::string& folder, const SyntheticShape& s, bool dspark, std::uint64_t seed) {
  std::filesystem::create_directories(folder);
  const int d = s.hidden, q = s.draft_heads * s.draft_head_dim, kv = s.draft_kv_heads * s.draft_head_dim, gamma = s.block - 1;
  const std::vector<int> features = s.feature_layers.empty() ? std::vector<int>{0, s.layers - 1} : s.feature_layers;
  Json c{{"architectures", {dspark ? "DSparkDraftModel" : "DFlashDraftModel"}},
         {"hidden_size", d},
         {"num_hidden_layers", s.draft_layers},
         {"num_attention_heads", s.draft_heads},
         {"num_key_value_heads", s.draft_kv_heads},
         {"head_dim", s.draft_head_dim},
         {"intermediate_size", s.draft_intermediate},
         {"rms_norm_eps", 1e-6},
         {"rope_theta", 10000.0},
         {"partial_rotary_factor", s.partial_rotary},
         {"max_position_embeddings", s.max_length},
         {"vocab_size", 264},
         {"sliding_window", s.window},
         {"is_causal", false},
         {"block_size", dspark ? gamma : s.block},
         {"num_target_layers", s.layers},
         {"dflash_config", {{"target_layer_ids", features}, {"mask_token_id", 258}}}};
  for (int i = 0; i < s.draft_layers; ++i) c["layer_types"].push_back(i == 0 ? "sliding_attention" : "full_attention");
  if (dspark) {
    c["markov_rank"] = s.markov_rank;
    c["markov_head_type"] = "vanilla";
    c["confidence_temperatures"] = std::vector<double>(static_cast<std::size_t>(gamma), 1.0);
  }
  save_json(folder + "/config.json", c);
  Writer w(seed);
  w.matrix("fc.weight", d, d * static_cast<int>(features.size()));
  w.bf16("hidden_norm.weight", {d}, 1, 0.2);
  w.bf16("norm.weight", {d}, 1, 0.2);
  for (int i = 0; i < s.draft_layers; ++i) {
    const std::string layer = fmt::format("layers.{}.", i), a = layer + "self_attn.";
    w.bf16(layer + "input_layernorm.weight", {d}, 1, 0.2);
    w.bf16(layer + "post_attention_layernorm.weight", {d}, 1, 0.2);
    w.matrix(a + "q_proj.weight", q, d);
    w.matrix(a + "k_proj.weight", kv, d);
    w.matrix(a + "v_proj.weight", kv, d);
    w.matrix(a + "o_proj.weight", d, q);
    w.bf16(a + "q_norm.weight", {s.draft_head_dim}, 1, 0.2);
    w.bf16(a + "k_norm.weight", {s.draft_head_dim}, 1, 0.2);
    w.matrix(layer + "mlp.gate_proj.weight", s.draft_intermediate, d);
    w.matrix(layer + "mlp.up_proj.weight", s.draft_intermediate, d);
    w.matrix(layer + "mlp.down_proj.weight", d, s.draft_intermediate);
  }
  if (dspark) {
    w.bf16("markov.embed.weight", {264, s.markov_rank}, 0, 1);
    w.matrix("markov.proj.weight", 264, s.markov_rank);
    w.matrix("confidence.weight", 1, d + s.markov_rank);
    w.fp32("confidence.bias", {1}, 0, 0.1);
  }
  w.save(folder + "/model.safetensors");
}

}  // namespace

void write_synthetic_checkpoint(const std::string& folder, const SyntheticShape& shape, std::uint64_t seed) {
  std::filesystem::create_directories(folder);
  write_target(folder, shape, mix64(seed));
  write_drafter(folder + "/dflash", shape, false, mix64(seed + 1));
  write_drafter(folder + "/dspark", shape, true, mix64(seed + 2));
}

}  // namespace specstate::runtime
