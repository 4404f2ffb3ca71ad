#pragma once
// Draft KV: keys and values of a block drafter (DFlash, DSpark), computed from the target's features of the context tokens.
//
// Such a drafter never runs its own transformer over the context: one fused feature vector a token gives the K and V of every
// draft layer, K_l = rope(rms(Wk_l x) * w_l, position), V_l = Wv_l x. The idea of doing all layers in one product and one pass is
// that of SGLang's fused KV materialization (DFlash, Z-Lab 2026); here the pass ends in the paged pool, without workspaces, and
// rows that were not committed are left out before the product.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "specstate/stream.hpp"
#include "specstate/tensor.hpp"

namespace specstate::draft_kv {

/// The K and V projection of all layers, packed once for the row-invariant product. Immutable, cheap to copy, thread-safe. It is a
/// copy: after the weights change, pack again. Calls give the same bits with it and with the plain weights.
class SPECSTATE_API KvProjection {
 public:
  struct Packed;
  KvProjection() = default;
  /// kv_weight [L, N*D + N*Dv, hidden] float32, bfloat16 or float16, a layer's K rows (head-major) before its V rows;
  /// kv_bias [L, N*D + N*Dv] or not given. Throws Error(kValue) naming the argument.
  explicit KvProjection(const TensorView& kv_weight, const TensorView& kv_bias = {});
  bool given() const noexcept { return packed_ != nullptr; }
  const Packed* get() const noexcept { return packed_.get(); }
  /// dtype of the weights that were packed.
  DType dtype() const noexcept;

 private:
  std::shared_ptr<const Packed> packed_;
};

/// T rows of features to the slots of a paged pool, all L layers. hidden: feature width; N KV heads of D (K) and Dv (V) channels;
/// P rows and R channels of the rotary table, R even and at most D (the other D - R channels are not rotated).
struct MaterializeIntoPoolParams {
  TensorView ctx_hidden;          ///< [T, hidden] float32, bfloat16 or float16; or the target's features:
  TensorView fc_weight;           ///< [hidden, features], optional: ctx_hidden is [T, features], and what is projected is rms(fc x) * w
  TensorView hidden_norm_weight;  ///< [hidden]: w, given with fc_weight
  float hidden_norm_eps = 1e-6f;  ///< >= 0
  KvProjection projection;        ///< packed weights, or not given:
  TensorView kv_weight;           ///< [L, N*D + N*Dv, hidden], K rows then V rows, any float dtype of the three
  TensorView kv_bias;             ///< [L, N*D + N*Dv], optional
  TensorView k_norm_weight;       ///< [L, D]
  TensorView eps;                 ///< [L] float32, each >= 0
  TensorView cos_sin_cache;       ///< [P, R], or [L, P, R] for a table a layer; a row is R/2 cosines, then R/2 sines
  TensorView positions;           ///< [T] (or slot_mapping's shape) int32 or int64: rows of the rotary table
  TensorView slot_mapping;        ///< [T], or [b, W] with b * W == T; int32 or int64; < 0: the row is skipped; not given: row i to slot i
  TensorView commit_lens;         ///< [b] int32 or int64 in 0..W, optional: row (r, j) is skipped unless j < commit_lens[r]
  std::span<const TensorView> k_pool;  ///< one [L, slots, N, D], or L times [slots, N, D]; also float8_e4m3fn, or uint8 for its codes
  std::span<const TensorView> v_pool;  ///< the same with Dv
  TensorView k_scale, v_scale;         ///< float32 or float64, [] or [L], optional: an fp8 pool holds value / scale
  bool is_neox_style = true;           ///< rotary pairs (i, i + R/2); false: (2i, 2i + 1)
  bool round_after_norm = false;       ///< K is also rounded to `io` between norm and rotary
  std::optional<DType> io;             ///< dtype to which features and projection are rounded; ctx_hidden's by default
  TensorView workspace;                ///< CUDA only: materialize_workspace_bytes bytes on the GPU; what it holds does not matter
};
/// Rounding points: features to `io` (of target features also fc's product, before and after its norm), projection (float32, with bias) to `io`, K once to `io` after the rotary, then the pool's
/// dtype; fp8 is divided by its scale in float32 and saturates at +-448. V is the rounded projection, bit for bit. A row's bits never
/// depend on the other rows of the call. Where two rows name one slot, the last one stands.
/// Throws Error(kValue) naming the argument before anything is written: shapes, dtypes, a slot beyond the pool, a position outside
/// the table of a row that would be written (skipped rows need no valid position). T = 0 does nothing. Thread-safe on disjoint slots.
/// CUDA: nothing is read on the host, so a row with a slot beyond the pool or a position outside the table is not written; the next
/// call of this header on that GPU throws then, or raise_pending_error. Of the scales only those given as numbers can be refused.
SPECSTATE_API void materialize_into_pool(const MaterializeIntoPoolParams& params, Stream stream = {});

/// Bytes of `workspace` that the call needs: 0 on the CPU and, without target features, for few tokens; bounded whatever their number. Of
/// `ctx_hidden` and `fc_weight` alone it is what usual heads need (64 or 128 channels, V as wide as K, a float32 table whose width is at least
/// 16 and a power of two); others need up to 12 MiB for their projection, which the call's other arguments tell. Throws Error(kValue) for
/// sizes below 0 or of which 64 bits cannot count a workspace.
SPECSTATE_API std::int64_t materialize_workspace_bytes(const MaterializeIntoPoolParams& params);

/// Throws Error(kValue) if finished CUDA work of this header on `device`, of whichever stream and thread, met a row that it could not write,
/// and forgets it: of several threads that ask one is told. Does not wait: synchronise first for the calls made so far. Calls of this header
/// ask, too, before they do anything. Does nothing for the CPU.
SPECSTATE_API void raise_pending_error(const Device& device);

/// RMSNorm of K per head, rotary, and V as it is, for a projection that was made elsewhere (SGLang's `_fused_norm_rope_stacked`).
struct FusedNormRopeStackedParams {
  TensorView kv;             ///< [T, L, 2 * N * D] float32, bfloat16 or float16
  TensorView k_norm_weight;  ///< [L, D]
  TensorView eps;            ///< [L] float32
  TensorView cos_sin_cache;  ///< [P, rotary_dim]
  TensorView positions;      ///< [T] int32 or int64
  std::int64_t num_kv_heads = 0, head_dim = 0, rotary_dim = 0;
  TensorView k_out, v_out;  ///< out [L, T, N, D], dtype of kv
};
/// Throws Error(kValue) with SGLang's texts where SGLang checks, else naming the argument. T = 0 does nothing. Thread-safe.
SPECSTATE_API void fused_norm_rope_stacked(const FusedNormRopeStackedParams& params, Stream stream = {});

}  // namespace specstate::draft_kv
