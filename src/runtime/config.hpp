#pragma once
// config.json of the target and of the drafters (docs/model.md lists the fields). Every field is checked by name and range;
// unknown fields are ignored, as everywhere in the ecosystem.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace specstate::runtime {

/// Kimi Linear's field names plus DeepSeek's indexer names; dimension letters as in docs/model.md.
struct TargetConfig {
  int vocab = 0, hidden = 0, intermediate = 0, layers = 0;
  int mla_heads = 0, kv_lora_rank = 0, nope_dim = 0, rope_dim = 0, v_dim = 0;  // Hm, C, Dn, Dr, Dv
  float rms_eps = 0;
  int max_length = 0, bos = 0, eos = 0;
  int kda_heads = 0, kda_dim = 0;  // H, D
  float gate_lower_bound = 0;
  int index_heads = 0, index_dim = 0, top_k = 0;  // Hi, Di
  std::vector<bool> is_kda;                       // [layers]
  std::vector<int> anchor_of;                     // [layers] sparse-MLA layers: the anchor whose positions they use; KDA: -1
};

enum class DrafterKind { kDFlash, kDSpark };

/// DFlash's published names on a Qwen3 backbone, DSpark's additions.
struct DraftConfig {
  DrafterKind kind = DrafterKind::kDFlash;
  int hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, intermediate = 0, vocab = 0, max_positions = 0;
  float rms_eps = 0;
  double rope_theta = 0;
  int rotary_dim = 0;
  int block = 0;  // rows of a draft forward
  int num_target_layers = 0;
  std::vector<int> feature_layers;  // 0-based, the hidden state after that layer
  std::vector<int> window;          // [layers] a key at kp is visible to a query at qp iff kp > qp - window; 0: no window
  int mask_id = 0;
  int markov_rank = 0;                         // DSpark
  std::vector<float> confidence_temperatures;  // DSpark [block]

  /// Proposals of one step: B - 1 for DFlash (row 0 predicts nothing), gamma for DSpark.
  int proposals() const { return kind == DrafterKind::kDFlash ? block - 1 : block; }
};

/// Throw Error(kValue) whose text starts with `name`, naming the field, what was expected and what was got.
TargetConfig parse_target_config(std::string_view json, const std::string& name);
DraftConfig parse_draft_config(std::string_view json, const std::string& name);
/// A drafter must have been made for this target.
void check_drafter_fits(const DraftConfig& drafter, const TargetConfig& target, const std::string& name);

}  // namespace specstate::runtime
