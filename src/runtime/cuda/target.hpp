#pragma once
// The hybrid target model of runtime/target.hpp on the GPU: the same layers in the same order, with all state in device memory and the sparse
// KV in pinned memory of the host. What a forward works on is named by device arrays (ops.hpp: Rows, Step), so a step is enqueued, or
// replayed as a graph, without the host knowing lengths or tokens.
#include <memory>
#include <vector>

#include "runtime/checkpoint.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/cuda/ops.hpp"
#include "specstate/hisparse.hpp"
#include "specstate/hisparse_steps.hpp"
#include "specstate/kda.hpp"

namespace specstate::runtime::cuda {

struct Limits {
  int requests = 1;    // R
  int hot_slots = 96;  // at least index_topk
  int window = 8;      // W, most rows of a request in one verify
  int chunk = 64;      // most rows of a prefill call
  int context = 0;     // L, positions that a request can have, an open window included
  bool exact = true;   // outputs of a verify have the bits of plain decoding's
  int batch = 1;       // most windows of a step: R or more, those beyond the active requests are padding
};

/// Numbers that never change, for calls whose arguments must lie on the device.
struct Constants {
  std::int32_t* iota = nullptr;       // [max(L, R, ...)]
  std::int64_t* pool_rows = nullptr;  // [R, L] request * L + position
  std::int32_t* one() const { return iota + 1; }
};

class Target {
 public:
  Target(const TargetWeights& weights, const Limits& limits, std::vector<int> features, const Tables& tables, const Constants& constants,
         specstate::cuda::CublasLt* lt, Trace& trace, Beside& beside, Memory& memory, const Exchange& exchange = {});

  /// Forgets a request's state.
  void reset(int request, Stream stream);
  /// Opens the windows of a step, beside what comes until `forward` reads them.
  void open(const Step& step);
  /// Runs the rows of a step (of a plain one, of width 1, in place) and leaves logits and features.
  void forward(const Step& step, bool in_place, Stream stream);
  /// The first accepted[b] rows stand.
  void commit(const Step& step, bool in_place, Stream stream);
  /// `count` certain tokens of a request from position `begin` on; if `last`, logits() has one row, that of the last token.
  void prefill(int request, const std::int64_t* tokens, int begin, int count, bool last, Stream stream);

  const float* logits() const { return logits_; }
  const float* features() const { return features_; }
  std::int64_t feature_width() const { return static_cast<std::int64_t>(feature_layers_.size()) * config_.hidden; }
  /// out[r] += a hash of everything that is committed of requests first .. first + count - 1; of one rank's share, so that the ranks' sums are the
  /// hash of one card.
  void digest(int first, int count, std::uint64_t* out, Stream stream) const;
  /// Of the step that runs, and so far: for `emit`.
  const Swaps& swaps() const { return swaps_; }
  std::int64_t anchors() const { return static_cast<std::int64_t>(groups_.size()); }
  /// Layers that a miss of an anchor is copied for.
  std::int64_t layers_of(std::int64_t anchor) const { return groups_[static_cast<std::size_t>(anchor)].num_layers; }
  std::int64_t row_bytes() const { return row_ * 2; }
  std::int64_t state_bytes() const { return state_bytes_; }
  std::int64_t ring_bytes() const { return ring_bytes_; }
  std::int64_t snapshot_bytes_avoided() const { return snapshot_bytes_; }

 private:
  struct Kda {
    const KdaWeights* host;
    Matrix in, gate, out_gate, out;
    float *conv, *a_log, *dt_bias, *o_norm;
  };
  struct Mla {
    const MlaWeights* host;
    Matrix in, out;
    std::vector<Matrix> key_up, value_up;
    float *kv_norm, *index_norm = nullptr, *index_bias = nullptr;
    std::size_t layer = 0, group = 0;  // among sparse layers, among anchors
    bool anchor = false;
  };
  struct Layer {
    float *input_norm, *post_norm;
    std::unique_ptr<Kda> kda;
    std::unique_ptr<Mla> mla;
    std::int64_t number = 0;  // among KDA layers
    Matrix gate_up, down;
  };
  enum class Way { kPrefill, kInPlace, kVerify };
  void layers(const Rows& rows, const Step* step, Way way, Stream stream);
  void kda(const Layer& layer, const Input& h, const Rows& rows, const std::int32_t* slots, Way way, Stream stream);
  void mla(const Mla& m, const Input& h, const Rows& rows, const Step* step, Stream stream);
  void head(std::int64_t first_row, std::int64_t rows, Stream stream);
  void windows(const TensorView& requests, const TensorView& widths, const TensorView& real, const TensorView& locs, Stream stream);
  void accept(const TensorView& requests, const TensorView& widths, const TensorView& real, const TensorView& accepted, Stream stream);
  kda::Rings rings(std::int64_t layer) const;

  const TargetConfig& config_;
  Limits limits_;
  std::vector<int> feature_layers_;
  Tables tables_;
  Constants constants_;
  Trace& trace_;
  Beside& beside_;
  const Exchange exchange_;
  // What is here of the heads and of the columns between the MLP's products.
  Part kda_part_, mla_part_, mlp_part_;
  std::int64_t kda_layers_ = 0, row_, tail_, top_k_;
  std::int64_t state_bytes_ = 0, ring_bytes_ = 0, snapshot_bytes_ = 0;
  // Weights.
  float *embed_, *norm_;
  Matrix head_;
  std::vector<Layer> layers_;
  // KDA state, all layers in one array each: state [Lk, R, H, D, D], windows of q, k, v [Lk, R, HD, 3], rings [Lk, R, H, W, D], verified windows
  // [Lk, batch, W, HD, 3].
  float *state_, *conv_[3], *rawv_, *rawk_, *ring_g_, *ring_beta_, *verified_[3];
  // Sparse KV: rows on both sides, the rows of the prompt that is being read, one native swap state an anchor.
  std::vector<std::uint16_t*> stage_, keys_;  // [sparse layers] [L, row]; [anchors] [R, L, Di]
  std::vector<hisparse::KvBuffers> buffers_;  // [sparse layers], grouped by anchor
  std::vector<hisparse::WindowGroup> groups_;
  std::int64_t* host_locs_;  // [R, L]
  std::int32_t *scratch_ = nullptr, *prefill_locs_;
  std::int64_t scratch_rows_ = 0;  // of a request
  struct Selection {
    std::int32_t *selected, *locs, *miss_dst, *miss_count;
    std::int64_t* miss_src;
  };
  std::vector<Selection> selections_;  // [anchors]
  Swaps swaps_;
  // Activations.
  float *x_, *h_, *proj_, *gate_, *out_gate_, *mixed_, *all_mixed_, *query_, *latent_, *wide_, *act_, *logits_, *features_, *scores_;
};

}  // namespace specstate::runtime::cuda
