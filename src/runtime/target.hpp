#pragma once
// The hybrid target model of docs/model.md on the CPU, with the state of several requests.
//
// One forward runs the rows of several requests through all layers. Three ways, one arithmetic (a row's bits are the same in each):
//   prefill  many certain tokens of one request; KDA advances in place, sparse-MLA rows go to the host
//   decode   one certain token of each request; KDA advances in place
//   verify   a window of proposed tokens of each request; nothing of the state changes until commit() says how many stand
// decode and verify are followed by commit().
#include <cstdint>
#include <span>
#include <vector>

#include "core/numeric.hpp"
#include "runtime/checkpoint.hpp"
#include "runtime/sparse_kv.hpp"

namespace specstate::runtime {

/// Sizes of the state.
struct TargetLimits {
  int requests = 1;
  int hot_slots = 96;  // at least index_topk
  int window = 8;      // most rows of a request in one verify
  int context = 0;     // positions that a request can have
};

struct KdaBytes {
  std::int64_t state = 0, ring = 0, snapshots_avoided = 0;
};

class Target {
 public:
  /// `features`: layers whose output rows are recorded; empty: none.
  Target(const TargetWeights& weights, const TargetLimits& limits, std::vector<int> features);

  /// Forgets a request's state.
  void reset(int request);

  enum class Way { kDecode, kVerify };
  /// tokens [rows]; afterwards logits() [rows, V] and features() [rows, F d].
  void forward(const Window& window, std::span<const int> tokens, Way way);
  /// The first accept[b] rows of the last forward's window stand (all of a decode). Then n_of(request) has grown by as much.
  void commit(const std::vector<int>& accept);

  /// Appends certain tokens; logits() has one row, that of the last token, if `last`; features() all.
  void prefill(int request, std::span<const int> tokens, bool last);

  /// Committed tokens of a request.
  int n_of(int request) const { return n_[static_cast<std::size_t>(request)]; }

  float* logits(std::int64_t row) { return logits_.data() + row * config_.vocab; }
  const float* features() const { return features_.data(); }
  int feature_width() const { return static_cast<int>(feature_layers_.size()) * config_.hidden; }

  const hisparse::CoordinatorStats& sparse_stats() const { return sparse_.stats(); }
  KdaBytes kda_bytes() const;
  /// A hash of everything committed: KDA states, convolution windows, cached rows, index keys. Equal state, equal digest.
  std::uint64_t digest(int request) const;

  // For tests: the state itself.
  const SparseKv& sparse() const { return sparse_; }
  const float* kda_state(int l, int request) const;           // [H, D, D]
  const float* conv_window(int l, int i, int request) const;  // [HD, 3] of q, k or v

 private:
  struct KdaState {
    Floats state;                   // [requests, H, D, D]
    Floats conv[3];                 // of q, k, v: [requests, HD, 3]
    Floats rawv, rawk, gate, beta;  // rings [requests, H, window, D], beta [requests, H, window]
    Floats windows[3];              // of q, k, v: [requests, window, HD, 3]
  };
  void layers(const Window& w, std::span<const int> tokens, bool prefill, bool in_place);
  void kda(int l, const Window& w, bool in_place);
  void mla(int l, const Window& w, bool prefill);
  void select(int l, const Window& w, const float* proj, std::int64_t stride);
  void attend(int l, std::int64_t row, std::int64_t count, const std::uint16_t** rows);
  void head(std::int64_t first_row, std::int64_t rows);
  void store_key(int l, int request, int position, const float* key);

  const TargetWeights& weights_;
  const TargetConfig& config_;
  TargetLimits limits_;
  std::vector<int> feature_layers_;
  std::vector<int> n_;
  std::vector<KdaState> kda_;                                  // [layers], empty for MLA
  std::vector<std::vector<std::vector<std::uint16_t>>> keys_;  // [layers][requests]: blocks of 16 positions, see index_scores
  SparseKv sparse_;
  Window window_;  // of the last decode or verify
  bool verified_ = false;

  // Activations of a forward, [rows, ...].
  Floats x_, h_, proj_, gate_, out_gate_, mixed_, query_, latent_, mlp_, act_, logits_, features_, final_;
  std::vector<core::bfloat16> stored_;           // [rows, kv_lora_rank + rope_dim]
  std::vector<std::int32_t> selected_, counts_;  // of the last anchor: [rows, top_k], [rows]
};

}  // namespace specstate::runtime
