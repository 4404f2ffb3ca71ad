#include "runtime/config.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/match.hpp"
#include "runtime/json.hpp"

namespace specstate::runtime {

namespace {

/// Reads fields of one JSON object; every refusal says "{file}: {field}: expected .., got ..".
class Fields {
 public:
  Fields(const Json& object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {
    if (!object_.is_object()) core::throw_value(fmt::format("{}: expected a JSON object, got {}.", prefix_, object_.type_name()));
  }

  [[noreturn]] void fail(const char* field, const std::string& expected, const std::string& got) const {
    core::throw_value(fmt::format("{}: {}: expected {}, got {}.", prefix_, field, expected, got));
  }
  const Json* find(const char* field) const {
    const auto it = object_.find(field);
    return it == object_.end() ? nullptr : &*it;
  }
  const Json& need(const char* field, const std::string& expected) const {
    const Json* v = find(field);
    if (!v) fail(field, expected, "no such field");
    return *v;
  }
  int integer(const char* field, int low, int high) const {
    const std::string expected = fmt::format("an integer from {} to {}", low, high);
    return to_integer(need(field, expected), field, expected, low, high);
  }
  double number(const char* field, double low, double high) const {
    const std::string expected = fmt::format("a number from {} to {}", low, high);
    const Json& v = need(field, expected);
    if (!v.is_number()) fail(field, expected, shown(v));
    const double d = v.get<double>();
    if (!(d >= low && d <= high)) fail(field, expected, shown(v));
    return d;
  }
  std::vector<int> integers(const char* field, int low, int high, std::size_t most) const {
    const std::string expected = fmt::format("an array of at most {} integers from {} to {}", most, low, high);
    const Json& v = need(field, expected);
    if (!v.is_array() || v.size() > most) fail(field, expected, shown(v));
    std::vector<int> out;
    for (const Json& n : v) out.push_back(to_integer(n, field, expected, low, high));
    return out;
  }
  /// The field must hold exactly this value; a field that may be absent counts as right.
  void exactly(const char* field, const Json& value, bool may_be_absent = false) const {
    const Json* v = find(field);
    if (!v && may_be_absent) return;
    if (!v) fail(field, shown(value), "no such field");
    if (*v != value) fail(field, shown(value), shown(*v));
  }
  Fields object(const char* field) const { return Fields(need(field, "an object"), prefix_ + ": " + field); }

 private:
  int to_integer(const Json& v, const char* field, const std::string& expected, int low, int high) const {
    if (!v.is_number_integer()) fail(field, expected, shown(v));
    // An unsigned value beyond int64 would wrap; compare it as what it is.
    const bool huge = v.is_number_unsigned() && v.get<std::uint64_t>() > 0x7FFFFFFFu;
    const std::int64_t n = huge ? -1 : v.get<std::int64_t>();
    if (huge || n < low || n > high) fail(field, expected, shown(v));
    return static_cast<int>(n);
  }

  const Json& object_;
  std::string prefix_;
};

// Sizes beyond these are damage, not models; they also keep every product of two sizes far inside 64 bits.
constexpr int kMaxSize = 1 << 20;
constexpr int kMaxLayers = 1024;
constexpr int kMaxContext = 1 << 24;

}  // namespace

TargetConfig parse_target_config(std::string_view text, const std::string& name) {
  const Json json = parse_json(text, name);
  const Fields f(json, name);
  TargetConfig c;
  f.exactly("architectures", Json::array({"KimiLinearForCausalLM"}));
  c.vocab = f.integer("vocab_size", 1, kMaxSize);
  c.hidden = f.integer("hidden_size", 1, kMaxSize);
  c.intermediate = f.integer("intermediate_size", 1, kMaxSize);
  c.layers = f.integer("num_hidden_layers", 1, kMaxLayers);
  c.mla_heads = f.integer("num_attention_heads", 1, kMaxLayers);
  c.kv_lora_rank = f.integer("kv_lora_rank", 1, 4096);
  c.nope_dim = f.integer("qk_nope_head_dim", 1, 1024);
  c.rope_dim = f.integer("qk_rope_head_dim", 1, 1024);
  c.v_dim = f.integer("v_head_dim", 1, 1024);
  f.exactly("mla_use_nope", true);
  f.exactly("q_lora_rank", nullptr);
  c.rms_eps = static_cast<float>(f.number("rms_norm_eps", 1e-12, 1.0));
  f.exactly("hidden_act", "silu");
  f.exactly("tie_word_embeddings", false);
  c.max_length = f.integer("model_max_length", 1, kMaxContext);
  c.bos = f.integer("bos_token_id", 0, c.vocab - 1);
  c.eos = f.integer("eos_token_id", 0, c.vocab - 1);
  // A prompt is [BOS] + bytes, so the bytes must have embeddings.
  if (c.vocab < 256) f.fail("vocab_size", "at least 256 (ids 0..255 are bytes)", std::to_string(c.vocab));

  const Fields linear = f.object("linear_attn_config");
  c.kda_heads = linear.integer("num_heads", 1, 1024);
  c.kda_dim = linear.integer("head_dim", 64, 128);
  if (c.kda_dim != 64 && c.kda_dim != 128) linear.fail("head_dim", "64 or 128", std::to_string(c.kda_dim));
  linear.exactly("short_conv_kernel_size", 4);
  c.gate_lower_bound = static_cast<float>(linear.number("gate_lower_bound", -100.0, -1e-3));

  c.is_kda.assign(static_cast<std::size_t>(c.layers), false);
  std::vector<int> owners(static_cast<std::size_t>(c.layers), 0);
  for (const int i : linear.integers("kda_layers", 1, c.layers, kMaxLayers)) {
    c.is_kda[static_cast<std::size_t>(i - 1)] = true;
    ++owners[static_cast<std::size_t>(i - 1)];
  }
  const std::vector<int> full = linear.integers("full_attn_layers", 1, c.layers, kMaxLayers);
  if (full.empty()) linear.fail("full_attn_layers", "at least one layer (the engine runs hybrid models)", "none");
  for (const int i : full) ++owners[static_cast<std::size_t>(i - 1)];
  for (int i = 0; i < c.layers; ++i)
    if (owners[static_cast<std::size_t>(i)] != 1)
      linear.fail("kda_layers and full_attn_layers", "every layer in exactly one of the two",
                  fmt::format("layer {} in {}", i + 1, owners[static_cast<std::size_t>(i)] ? "both, or twice" : "neither"));

  c.index_heads = f.integer("index_n_heads", 1, 1024);
  c.index_dim = f.integer("index_head_dim", 1, 1024);
  c.top_k = f.integer("index_topk", 1, 8192);
  std::vector<bool> owns(static_cast<std::size_t>(c.layers), false);
  for (const int i : f.integers("index_anchor_layers", 0, c.layers - 1, kMaxLayers)) {
    if (c.is_kda[static_cast<std::size_t>(i)])
      f.fail("index_anchor_layers", "sparse-MLA layers (0-based)", fmt::format("the KDA layer {}", i));
    owns[static_cast<std::size_t>(i)] = true;
  }
  c.anchor_of.assign(static_cast<std::size_t>(c.layers), -1);
  int anchor = -1;
  for (int i = 0; i < c.layers; ++i) {
    if (c.is_kda[static_cast<std::size_t>(i)]) continue;
    if (owns[static_cast<std::size_t>(i)]) anchor = i;
    if (anchor < 0)
      f.fail("index_anchor_layers", fmt::format("the first sparse-MLA layer, {}, among them", i), shown(*f.find("index_anchor_layers")));
    c.anchor_of[static_cast<std::size_t>(i)] = anchor;
  }
  return c;
}

DraftConfig parse_draft_config(std::string_view text, const std::string& name) {
  const Json json = parse_json(text, name);
  const Fields f(json, name);
  DraftConfig c;
  const Json& arch = f.need("architectures", R"(["DFlashDraftModel"] or ["DSparkDraftModel"])");
  if (arch == Json::array({"DFlashDraftModel"}))
    c.kind = DrafterKind::kDFlash;
  else if (arch == Json::array({"DSparkDraftModel"}))
    c.kind = DrafterKind::kDSpark;
  else
    f.fail("architectures", R"(["DFlashDraftModel"] or ["DSparkDraftModel"])", shown(arch));
  c.hidden = f.integer("hidden_size", 1, kMaxSize);
  c.layers = f.integer("num_hidden_layers", 1, kMaxLayers);
  c.heads = f.integer("num_attention_heads", 1, 1024);
  c.kv_heads = f.integer("num_key_value_heads", 1, 1024);
  if (c.heads % c.kv_heads != 0)
    f.fail("num_key_value_heads", fmt::format("a divisor of num_attention_heads {}", c.heads), std::to_string(c.kv_heads));
  c.head_dim = f.integer("head_dim", 2, 1024);
  c.intermediate = f.integer("intermediate_size", 1, kMaxSize);
  f.exactly("hidden_act", "silu", true);
  f.exactly("attention_bias", false, true);
  c.rms_eps = static_cast<float>(f.number("rms_norm_eps", 1e-12, 1.0));
  c.rope_theta = f.number("rope_theta", 1.0, 1e12);
  const double rotary = c.head_dim * f.number("partial_rotary_factor", 1e-6, 1.0);
  c.rotary_dim = static_cast<int>(rotary);
  if (c.rotary_dim < 2 || c.rotary_dim % 2 != 0)
    f.fail("partial_rotary_factor", fmt::format("an even number of rotary dimensions, at least 2, of head_dim {}", c.head_dim),
           fmt::format("{}", rotary));
  c.max_positions = f.integer("max_position_embeddings", 1, kMaxContext);
  c.vocab = f.integer("vocab_size", 1, kMaxSize);
  f.exactly("is_causal", false);
  const int low = c.kind == DrafterKind::kDFlash ? 2 : 1;
  c.block = f.integer("block_size", low, 64);
  c.num_target_layers = f.integer("num_target_layers", 1, kMaxLayers);

  const Json& types = f.need("layer_types", "an array of one name a layer");
  if (!types.is_array() || types.size() != static_cast<std::size_t>(c.layers))
    f.fail("layer_types", fmt::format("an array of {} names", c.layers), shown(types));
  int window = -1;
  for (const Json& t : types) {
    if (t == "full_attention") {
      c.window.push_back(0);
    } else if (t == "sliding_attention") {
      if (window < 0) window = f.integer("sliding_window", 1, kMaxContext);
      c.window.push_back(window);
    } else {
      f.fail("layer_types", "sliding_attention or full_attention", shown(t));
    }
  }

  const Fields dflash = f.object("dflash_config");
  c.feature_layers = dflash.integers("target_layer_ids", 0, c.num_target_layers - 1, kMaxLayers);
  if (c.feature_layers.empty()) dflash.fail("target_layer_ids", "at least one layer", "none");
  c.mask_id = dflash.integer("mask_token_id", 0, c.vocab - 1);

  if (c.kind == DrafterKind::kDSpark) {
    c.markov_rank = f.integer("markov_rank", 1, 4096);
    f.exactly("markov_head_type", "vanilla");
    const Json& taus = f.need("confidence_temperatures", fmt::format("{} positive numbers", c.block));
    if (!taus.is_array() || taus.size() != static_cast<std::size_t>(c.block))
      f.fail("confidence_temperatures", fmt::format("{} positive numbers", c.block), shown(taus));
    for (const Json& t : taus) {
      if (!t.is_number() || !(t.get<double>() >= 1e-6) || !(t.get<double>() <= 1e6))
        f.fail("confidence_temperatures", "numbers from 1e-6 to 1e6", shown(t));
      c.confidence_temperatures.push_back(static_cast<float>(t.get<double>()));
    }
  }
  return c;
}

void check_drafter_fits(const DraftConfig& d, const TargetConfig& t, const std::string& name) {
  const auto same = [&](const char* field, int want, int got) {
    if (want != got) core::throw_value(fmt::format("{}: {}: expected the target's {}, got {}.", name, field, want, got));
  };
  same("hidden_size", t.hidden, d.hidden);
  same("vocab_size", t.vocab, d.vocab);
  same("num_target_layers", t.layers, d.num_target_layers);
  // The last block may start at the last position.
  if (d.max_positions < t.max_length)
    core::throw_value(fmt::format("{}: max_position_embeddings: expected at least the target's model_max_length {}, got {}.", name,
                                  t.max_length, d.max_positions));
}

}  // namespace specstate::runtime
