#pragma once
// A model folder in memory: config.json + model.safetensors of the target, and the drafters in dflash/ and dspark/ where they are.
// Matrices with the same input are packed as one (q, k, v; gate, up): a product's outputs never share a sum, so this changes no bit.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cpu/matmul.hpp"
#include "runtime/config.hpp"

namespace specstate::runtime {

using Floats = std::vector<float>;
using cpu::PackedMatrix;

struct KdaWeights {
  PackedMatrix in;                // [3HD + Rf + Rg + H, d]: q, k, v, f_a, g_a, b
  PackedMatrix gate;              // [HD, Rf] f_b
  PackedMatrix out_gate;          // [HD, Rg] g_b
  PackedMatrix out;               // [d, HD]
  Floats conv;                    // [3HD, 4]: q, k, v
  Floats a_log, dt_bias, o_norm;  // [H], [HD], [D]
};

struct MlaWeights {
  PackedMatrix in;                     // [Hm(Dn+Dr) + C+Dr (+ HiDi + Di + Hi of an anchor), d]: q, kv_a, indexer wq_b, wk, weights_proj
  std::vector<PackedMatrix> key_up;    // per head [C, Dn]: W_uk^T
  std::vector<PackedMatrix> value_up;  // per head [Dv, C]: W_uv
  PackedMatrix out;                    // [d, Hm Dv]
  Floats kv_norm;                      // [C]
  Floats index_norm, index_bias;       // [Di], anchors only
};

struct LayerWeights {
  Floats input_norm, post_norm;  // [d]
  std::optional<KdaWeights> kda;
  std::optional<MlaWeights> mla;
  PackedMatrix gate_up;  // [2F, d]
  PackedMatrix down;     // [d, F]
};

struct TargetWeights {
  TargetConfig config;
  Floats embed;       // [V, d], the stored values
  PackedMatrix head;  // [V, d]
  Floats norm;        // [d]
  std::vector<LayerWeights> layers;
};

struct DraftLayerWeights {
  Floats input_norm, post_norm, q_norm, k_norm;
  PackedMatrix qkv;      // [(heads + 2 kv_heads) D, d]
  PackedMatrix out;      // [d, heads D]
  PackedMatrix gate_up;  // [2F, d]
  PackedMatrix down;     // [d, F]
};

struct DraftWeights {
  DraftConfig config;
  PackedMatrix fc;  // [d, features d]
  Floats hidden_norm, norm;
  std::vector<DraftLayerWeights> layers;
  std::vector<std::uint16_t> kv_weight;  // bfloat16 [L, 2 kv_heads D, d], K rows then V rows: what draft_kv reads
  Floats k_norms;                        // [L, D]
  // DSpark
  Floats markov_embed;       // [V, r]
  PackedMatrix markov_proj;  // [V, r]
  Floats confidence;         // [d + r]
  float confidence_bias = 0;
};

/// Where packed weights live: large pages, because a product streams them and waits for address translation otherwise.
class WeightMemory {
 public:
  WeightMemory() = default;
  WeightMemory(WeightMemory&&) noexcept = default;
  WeightMemory& operator=(WeightMemory&&) = delete;
  ~WeightMemory();
  /// `bytes` bytes, aligned to 64, that live as long as this object.
  void* take(std::int64_t bytes);

 private:
  struct Block {
    void* address;
    std::size_t size;
  };
  std::vector<Block> blocks_;
  char* next_ = nullptr;
  std::int64_t left_ = 0;
};

struct Checkpoint {
  WeightMemory memory;  // of all packed matrices below
  TargetWeights target;
  std::optional<DraftWeights> dflash, dspark;
  std::int64_t parameters = 0;    // of the target
  std::int64_t weight_bytes = 0;  // of the target, as stored
};

/// Throws Error naming the file, and the tensor or the field, what was expected and what was got.
Checkpoint load_checkpoint(const std::string& folder);
/// One line about a usable checkpoint; throws as load_checkpoint.
std::string describe_checkpoint(const std::string& folder);

}  // namespace specstate::runtime
