#pragma once
// The block drafters of runtime/drafter.hpp on the GPU. The context's keys and values lie in a pool of R * L rows a layer that
// draft_kv::materialize_into_pool fills with the rows that were committed; which they are, only the device knows.
#include <vector>

#include "runtime/checkpoint.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/cuda/ops.hpp"
#include "runtime/cuda/target.hpp"
#include "specstate/draft_kv.hpp"

namespace specstate::runtime::cuda {

class Drafter {
 public:
  Drafter(const DraftWeights& weights, const TargetWeights& target, const Limits& limits, const Tables& tables, const Constants& constants,
          specstate::cuda::CublasLt* lt, Memory& memory, const Exchange& exchange = {});
  int proposals() const { return config_.proposals(); }
  const std::vector<int>& feature_layers() const { return config_.feature_layers; }
  /// Fills columns 1.. of the step's candidates; `probabilities` [batch, G, V]: proposals are drawn from them.
  void propose(const Step& step, const Choice& choice, double* probabilities, Stream stream);
  /// All of the step's rows as the drafter's layers want them; which of them stand need not be known yet.
  void project(const Step& step, const float* features, Stream stream) { project(step.batch * step.width, features, stream); }
  /// Of the step's rows, projected, the first accepted[b] of each request are context now.
  void materialize(const Step& step, Stream stream);
  /// `count` rows of a prompt from position `begin` on are.
  void materialize(int request, int begin, int count, const float* features, Stream stream);
  /// Bytes that a token's keys and values take.
  std::int64_t bytes_of_token() const { return std::int64_t{4} * config_.layers * config_.kv_heads * config_.head_dim; }

 private:
  void project(std::int64_t rows, const float* features, Stream stream);
  void write(std::int64_t rows, const TensorView& positions, const TensorView& slots, const TensorView& committed, Stream stream);

  const DraftConfig& config_;
  Limits limits_;
  Tables tables_;
  Constants constants_;
  const Exchange exchange_;
  // This rank's heads: groups of queries with their key head; of one key head (multi-query) queries alone; else, and where there are fewer than
  // ranks, all. `units` of `unit` channels are what an exchange of attention's output consists of.
  Part heads_, kv_heads_, mlp_part_;
  std::int64_t units_ = 0, unit_ = 0;
  struct Layer {
    float *input_norm, *post_norm, *q_norm, *k_norm;
    Matrix qkv, out, gate_up, down;
  };
  std::vector<Layer> layers_;
  Matrix fc_, head_, markov_proj_;
  float *hidden_norm_, *norm_, *embed_, *markov_embed_ = nullptr;
  std::uint16_t *k_pool_, *v_pool_;
  float* rope_;
  TensorView k_view_, v_view_;
  draft_kv::MaterializeIntoPoolParams params_;  // all but the rows
  float *x_, *h_, *qkv_, *mixed_, *all_mixed_, *wide_, *act_, *logits_, *ctx_;
};

}  // namespace specstate::runtime::cuda
