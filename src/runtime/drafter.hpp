#pragma once
// The DFlash and DSpark drafters (docs/model.md): a block of mask tokens, filled in one pass that attends to the target's features.
//
// The context's keys and values live in a paged pool that draft_kv::materialize_into_pool fills, row by row as tokens are committed
// (sections 3.2 and 3.4 of the speculative loop); the block's own stay in working memory, because none of them survives the step.
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/checkpoint.hpp"
#include "runtime/sparse_kv.hpp"
#include "specstate/draft_kv.hpp"

namespace specstate::runtime {

struct DraftStats {
  std::int64_t tokens_materialized = 0, bytes_written = 0;
};

/// How proposals are chosen.
struct ProposalRule {
  bool sampled = false;  // drawn from softmax(logits / temperature); otherwise the best id
  double temperature = 1.0;
  std::uint64_t seed = 0;
};

struct DraftRequest {
  int request = 0;        // row of the tables
  int last_token = 0;     // the last emitted one, in no state yet
  int n = 0;              // committed tokens
  std::uint64_t key = 0;  // what `uniform` calls the request
};

struct Proposals {
  int count = 0;                    // G, of each request
  std::vector<int> tokens;          // [b, G]
  std::vector<float> confidence;    // [b, G], DSpark
  std::vector<double> probability;  // [b, G, V], of sampled proposals
};

class Drafter {
 public:
  /// `context`: positions that a request can have.
  Drafter(const DraftWeights& weights, const TargetWeights& target, int requests, int context);

  DrafterKind kind() const { return config_.kind; }
  int proposals() const { return config_.proposals(); }
  const std::vector<int>& feature_layers() const { return config_.feature_layers; }

  void reset(int request);
  /// features [rows of w, F d]: of the rows of request b the first commit[b] are now context. Rows come in order, without gaps.
  void materialize(const Window& w, const float* features, const std::vector<int>& commit);
  /// Committed positions whose keys and values are in the pool.
  int known(int request) const { return known_[static_cast<std::size_t>(request)]; }
  /// One block for each request; all its committed positions must be known.
  void propose(std::span<const DraftRequest> requests, const ProposalRule& rule, Proposals& out);

  const DraftStats& stats() const { return stats_; }
  /// A hash of the materialized keys and values.
  std::uint64_t digest(int request) const;
  /// For tests: bfloat16 [kv_heads, D] of a known position.
  const std::uint16_t* key(int layer, int request, int position) const { return k_pool_.data() + values_before(layer, request, position); }
  const std::uint16_t* value(int layer, int request, int position) const {
    return v_pool_.data() + values_before(layer, request, position);
  }

 private:
  std::int64_t pool_row(int request, int position) const;
  std::int64_t values_before(int layer, int request, int position) const {
    return (layer * pool_rows_ + pool_row(request, position)) * config_.kv_heads * config_.head_dim;
  }
  void attention(std::span<const DraftRequest> requests, int layer, const float* qkv, std::int64_t stride, float* out);

  const DraftWeights& weights_;
  const DraftConfig& config_;
  const TargetWeights& target_;
  draft_kv::KvProjection projection_;
  Floats eps_, rope_;                           // [L], [context + block, R]
  std::vector<std::uint16_t> k_pool_, v_pool_;  // bfloat16 [L, rows, kv_heads, D]; page 0 takes what belongs nowhere
  std::int64_t pool_rows_ = 0;
  std::vector<std::vector<std::int64_t>> pages_;  // [requests]: page of each 16 positions
  std::vector<std::int64_t> free_pages_;
  std::vector<int> known_;
  DraftStats stats_;
  Floats x_, h_, qkv_, mixed_, wide_, act_, logits_, ctx_, compact_, bias_, keys_, values_;
};

}  // namespace specstate::runtime
