#pragma once
// What crosses from check.cpp to a backend: raw pointers, 64-bit strides in elements, sizes.
#include <cstdint>
#include <vector>

#include "draft_kv/layout.hpp"
#include "specstate/draft_kv.hpp"

namespace specstate::draft_kv {

/// Norm and rotary of K, the same for both operations.
struct NormRope {
  TensorView k_norm_weight;  // [layers, head_dim]
  TensorView eps;            // [layers] float32
  TensorView cos_sin_cache;  // [table, rotary_dim] or [layers, table, rotary_dim]
  std::int64_t head_dim, rotary_dim;
  bool is_neox_style, round_after_norm;
  DType io;  // dtype to which the result (and, if asked, the normed value) is rounded
};

struct MaterializeArgs {
  TensorView ctx_hidden;                     // [tokens, hidden], or where `fc_weight` is given [tokens, features]
  TensorView fc_weight, hidden_norm_weight;  // [hidden, features], [hidden]; or not given
  float hidden_norm_eps;
  KvProjection projection;  // packed [layers * (heads * head_dim + heads * v_head_dim), hidden]
  NormRope norm_rope;
  std::vector<WrittenRow> rows;         // what is written, in row order; one row a slot
  std::vector<LayerPool> k, v;          // [layers]
  std::vector<float> k_scale, v_scale;  // [layers], 1 where the pool is not fp8
  DType k_dtype, v_dtype;               // of the pools; uint8 is float8_e4m3fn
  std::int64_t layers, heads, v_head_dim;

  // Where the host does not read what tensors hold, a kernel does: in place of `projection` and `rows`, and of scales given as tensors.
  TensorView kv_weight, kv_bias;                    // [layers, columns, hidden], [layers, columns] or not given
  TensorView slot_mapping, positions, commit_lens;  // [tokens] or [b, window]; [b]
  TensorView k_scale_values, v_scale_values;        // [] or [layers], or not given
  std::int64_t tokens, window, slots;
  void* workspace;
};

struct FusedNormRopeStackedArgs {
  TensorView kv;         // [tokens, layers, 2 * heads * head_dim]
  TensorView positions;  // [tokens]
  NormRope norm_rope;
  TensorView k_out, v_out;  // [layers, tokens, heads, head_dim]
  std::int64_t tokens, layers, heads;
};

namespace cpu {
void run(const MaterializeArgs& args, Stream stream);
void run(const FusedNormRopeStackedArgs& args, Stream stream);
}  // namespace cpu

namespace cuda {
void run(const MaterializeArgs& args, Stream stream);
void run(const FusedNormRopeStackedArgs& args, Stream stream);
/// Bytes of workspace that a call of so many tokens needs: bounded, whatever their number. `item`: bytes of a value of the context
/// [tokens, hidden] that is made of target features, 0 without them.
std::int64_t workspace_bytes(std::int64_t tokens, std::int64_t hidden, std::int64_t item);
/// The same of a call of which all is known that matters: heads that only a slower form takes need more.
std::int64_t workspace_bytes(const NormRope& norm_rope, std::int64_t v_head_dim, const TensorView& ctx, const TensorView& kv_weight,
                             const TensorView& fc_weight);
/// Throws Error(kValue) if an earlier call on the current device met a row that it could not write; clears that.
void raise_flags();
}  // namespace cuda

}  // namespace specstate::draft_kv
