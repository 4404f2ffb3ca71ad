#pragma once
// Checkpoints of random weights in the layout of docs/model.md: for tests that must not depend on the trained model, and for the bench
// of models whose weights do not fit a cache.
#include <cstdint>
#include <string>
#include <vector>

namespace specstate::runtime {

struct SyntheticShape {
  int hidden = 32, intermediate = 48, layers = 4;
  int mla_every = 2;  // every so many layers, the last is sparse MLA: an anchor and a follower in turn; the others are KDA
  int kda_heads = 1, kda_dim = 64;
  int mla_heads = 2, kv_lora_rank = 16, nope_dim = 8, rope_dim = 4, v_dim = 8;
  int index_heads = 2, index_dim = 8, top_k = 8;
  int max_length = 512;
  int draft_layers = 2, draft_heads = 2, draft_kv_heads = 1, draft_head_dim = 16, draft_intermediate = 24, window = 32;
  int block = 4;  // DFlash: B; DSpark: gamma = B - 1, so that both verify B rows
  int markov_rank = 4;
  std::vector<int> feature_layers;  // empty: the first and the last
  double partial_rotary = 1.0;
};
/// Writes config.json, model.safetensors, dflash/ and dspark/ into `folder`, which is created. The same seed gives the same bytes.
void write_synthetic_checkpoint(const std::string& folder, const SyntheticShape& shape, std::uint64_t seed);

}  // namespace specstate::runtime
