#pragma once
// KDA and GDN: linear attention with a recurrent state, verified several tokens at a time and committed by replay.
//
// The recurrence is that of Kimi Delta Attention (Kimi Linear, arXiv:2510.26692) and of Gated DeltaNet (arXiv:2412.06464): with the
// normalised key k and query q, decay d = exp(ld) and write strength beta of a token, per head
//     S *= d (along K);  u = (v - S k) * beta;  S += u k^T;  o = S q.
// `verify` runs several proposed tokens of each request and writes no pool. Either it records what the state update needs (ring
// mode: 1 kB a token and head; the ReplaySSM scheme of sglang) and `fold` replays the accepted tokens into the pool, or it stores
// the state after every token (snapshot mode: 64 kB a token and head). `decode` runs tokens that are certain, in place.
//
// Names of sizes: N requests, T tokens of all requests together, H key heads, HV value heads (a multiple of H; value head hv reads
// key head hv / (HV / H)), K and V channels of a head (each 64 or 128), L ring length, C channels of a convolution (H*K or HV*V).
// Activation dtype ("act"): bfloat16 or float32, one for x_*, cs_*, conv windows, rawv, rawk and out; g, beta and gate may each be
// of either. Convolution and norm weights, ring g and ring beta: float32. State and snapshots: float32, or bfloat16 (both alike).
// Index tensors: int32 or int64 of any stride. Tensors written [T, ...] may carry a leading dimension of 1.
//
// Guarantees (bit for bit, on one instruction set or one GPU architecture): fold(accept = n) = snapshot n-1; a request's result depends
// neither on the other requests of the call nor on the thread count or launch; ring output = snapshot output and a verify of W tokens =
// W decodes. On CUDA the outputs (not the records, nor the states folded from them) of a ring-mode verify have the last two with `exact`
// only: without it a faster form gives them, within float32 rounding (src/kda/SEMANTICS.md). CPU and CUDA agree within tolerances.
//
// All functions throw Error(kValue) naming the argument before anything is written, and are safe to call from several threads as
// long as the calls write different memory.
#include <cstdint>
#include <optional>

#include "specstate/stream.hpp"
#include "specstate/tensor.hpp"

namespace specstate::kda {

/// What one step of the model's layer reads, common to verify and decode.
struct StepParams {
  TensorView x_q, x_k;  ///< [T, H, K] act: raw projections, or (without w_*) convolved and activated q, k
  TensorView x_v;       ///< [T, HV, V] act
  /// Causal depthwise convolution of width 4 and SiLU before the recurrence: all six or none.
  TensorView w_q, w_k, w_v;     ///< [C, 4] float32, last tap = newest
  TensorView cs_q, cs_k, cs_v;  ///< [pool, C, 3] act: the three inputs before the first token, oldest first; any strides
  TensorView g;                 ///< raw gate: [T, HV, K] or [T, HV*K] (KDA), [T, HV] (GDN: one decay a head)
  TensorView beta;              ///< [T, HV] logits
  TensorView A_log;             ///< [HV] float32 or bfloat16
  TensorView dt_bias;           ///< [HV, K] or [HV*K] (KDA), [HV] (GDN), float32 or bfloat16
  TensorView state;             ///< [pool, HV, V, K]; dense inside a slot; slot pitch a multiple of 4 elements, 16-byte aligned
  TensorView slots;             ///< [N] slot of each request; <= null_slot: a padding row
  /// [N+1] request r owns tokens cu[r] to cu[r+1]-1; cu[0] = 0, never decreasing, cu[N] <= T. Not given: T / N tokens each.
  TensorView cu_seqlens;
  /// Gated RMS norm of the output over V (all three or none): o * rsqrt(mean(o^2) + eps) * weight * sigmoid(gate).
  TensorView onorm_gate;    ///< [T, HV, V]
  TensorView onorm_weight;  ///< [V] float32
  std::optional<double> onorm_eps;
  TensorView out;  ///< [T, HV, V] act, written completely: padding rows and tokens of no request become 0

  /// Given: safe gate ld = lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), < 0. Not given: ld = -exp(A_log) * softplus(g + dt_bias).
  std::optional<double> lower_bound;
  double softplus_beta = 1.0, softplus_threshold = 20.0;
  std::optional<double> scale;     ///< of q; > 0; default K^-0.5
  bool l2norm = true;              ///< q, k <- x / sqrt(sum x^2 + 1e-6)
  bool round_before_norm = false;  ///< o rounded to act before the norm
  std::int64_t null_slot = -1;
};

/// The records of the verified tokens: all four or none. Entry i of a slot is the i-th token of its latest verify.
struct Rings {
  TensorView rawv;  ///< [slots, HV, L, V] act: v after convolution and SiLU; last dimension dense
  TensorView rawk;  ///< [slots, H, L, K] act: k after convolution and SiLU, before the norm
  TensorView g;     ///< [slots, HV, L, K] (KDA) or [slots, HV, L] (GDN) float32: ld
  TensorView beta;  ///< [slots, HV, L] float32: sigmoid(beta)
};

struct VerifyParams : StepParams {
  Rings rings;                        ///< tokens i >= L are not recorded
  TensorView snapshots;               ///< [rows, steps, HV, V, K] of state's dtype: state after token i
  TensorView conv_q, conv_k, conv_v;  ///< [rows, steps, C, 3] act, any strides: window after token i, both modes; all three or none
  TensorView rows;                    ///< [N] row of each request in snapshots and conv_*; default: its own number
  /// Tree: [N, >= tokens of each request] index of a token's parent within its request, < 0: the request's own state. A parent comes
  /// before its children; token 0 always starts from the request's state. Not given: a chain.
  TensorView parents;
  bool exact = false;  ///< bitwise output parity of the modes, also on CUDA; the CPU always has it
  /// Deferred fold: [>= pool] int32, tokens of each slot's record that are accepted and not yet in its state (`defer_fold`). They are
  /// folded first: state is then written, and the counts of the call's slots become 0. Needs rings. Bit for bit a `fold` before the call.
  TensorView pending;
  bool update_state = false;  ///< also store the state after each request's last token in its slot (not pure then)
  /// Rows of slot <= null_slot start from zeros and give output; they write no state and no ring. A row < 0 has no snapshots.
  bool null_from_zero = false;
};
/// Verifies T proposed tokens of N requests. Writes out, and per token the rings or snapshots, and the conv windows; entries beyond
/// a request's tokens and everything of padding rows stay untouched. N = 0 only clears out.
SPECSTATE_API void verify(const VerifyParams& params, Stream stream = {});

/// Tokens that are certain, one or any number a request (a prefill), in place: state and cs_* are advanced.
struct DecodeParams : StepParams {};
SPECSTATE_API void decode(const DecodeParams& params, Stream stream = {});

struct FoldParams {
  TensorView state;   ///< [pool, HV, V, K], or [layers, pool, HV, V, K]; as in StepParams; in place
  Rings rings;        ///< as in Rings, with a leading layer dimension if state has one
  TensorView slots;   ///< [N]; <= null_slot: skipped
  TensorView accept;  ///< [N] tokens to commit, the bonus token included; <= 0: skipped
  /// In the place of accept: [>= pool] int32, or [layers, >= pool] with layers; a request's tokens are those that its slot's count names,
  /// which becomes 0. The flush of a deferred fold.
  TensorView pending;
  /// Prefix-cache snapshots (both or none): after token track_step[n] (0-based) the state is also stored in slot track[n]; skipped
  /// for track[n] <= null_slot and for a step that is not among the accepted ones.
  TensorView track, track_step;  ///< [N]
  bool l2norm = true;
  std::int64_t null_slot = -1;
};
/// Replays the accepted tokens of each request from the rings into its state. One call for one or all layers.
/// An accepted entry that was never recorded (beta not a number, or all of it zero) is refused.
SPECSTATE_API void fold(const FoldParams& params, Stream stream = {});

struct DeferFoldParams {
  TensorView pending;  ///< [slots] int32, or [layers, slots]; in place
  TensorView slots;    ///< [N]; <= null_slot: skipped
  TensorView accept;   ///< [N] accepted tokens, the bonus token included; <= 0: skipped
  std::int64_t null_slot = -1;
};
/// The deferred fold: pending[slot] = accept, in the place of `fold`. The next verify of the slot with this `pending` folds them first,
/// which spares one of the three passes over the state in a step. Whatever else reads the slot's state (decode, a prefill, a copy for a
/// prefix cache) comes after a flush: `fold` with pending. A slot that gets a new owner has its count set to 0 with its state.
SPECSTATE_API void defer_fold(const DeferFoldParams& params, Stream stream = {});

struct RollbackConvWindowsParams {
  TensorView pool;                      ///< [pool, C, 3], any strides; in place
  TensorView windows;                   ///< [rows, steps, C, 3] of pool's dtype, any strides: what verify wrote
  TensorView slots;                     ///< [N]; < 0: skipped
  TensorView last_correct_step;         ///< [N] accepted tokens - 1; < 0: skipped
  TensorView rows;                      ///< [N] row of each request; default: its own number
  TensorView track_slots, track_steps;  ///< [N], both or none: a second copy, windows[row, track_step] -> pool[track_slot]; < 0: skipped
};
/// Commits the conv windows: pool[slot] = windows[row, last_correct_step], for `count` pools that share their indices' meaning.
/// All are checked before the first is written. On a GPU, pools that are alike (a model's layers) are one launch.
SPECSTATE_API void rollback_conv_windows(const RollbackConvWindowsParams* params, std::int64_t count, Stream stream = {});

// ---- the names that sglang calls; contracts and error texts are sglang's ----

/// Dense chain verify with a safe gate and head dims of 128: tensors [1, T, H, ...], the checks and texts of sglang's fused kernel.
/// `rows` is its intermediate_state_indices, which may be longer than N; onorm fields all or none.
SPECSTATE_API void fused_kda_decode_mtp_dspark(const VerifyParams& params, Stream stream = {});

/// fold with sglang's redundant sizes: max_cache_len must be the rings' L, num_k_heads the rawk heads.
struct CommitParams : FoldParams {
  std::int64_t max_cache_len = 0, num_k_heads = 0;
};
SPECSTATE_API void commit_kda_replayssm_spec(const CommitParams& params, Stream stream = {});
SPECSTATE_API void commit_kda_replayssm_spec_all_layers(const CommitParams& params, Stream stream = {});

/// The recurrence alone (q, k, v convolved and activated already), decode and verify, KDA and GDN.
struct GatingUpdateParams {
  TensorView A_log;                       ///< HV elements
  TensorView a;                           ///< raw gate, [.., HV*K] or [.., HV, K] (is_kda), else [.., HV]
  TensorView dt_bias;                     ///< HV*K elements (is_kda), else HV
  TensorView q, k, v;                     ///< [B, T, H, K], [B, T, HV, V]
  TensorView b;                           ///< [.., HV] logits
  TensorView initial_state_source;        ///< [pool, HV, V, K]; written back unless disable_state_update
  TensorView initial_state_indices;       ///< [N]; < 0 starts from zeros and writes no state and no ring
  TensorView cu_seqlens;                  ///< [N+1] with B = 1; not given: N = B requests of T tokens
  TensorView intermediate_states_buffer;  ///< [rows, steps, HV, V, K] or not given
  TensorView intermediate_state_indices;  ///< [N] rows of it; default: the request's number
  TensorView retrieve_parent_token;       ///< [N, T] or not given
  Rings rings;
  TensorView out;  ///< v's shape
  std::optional<double> scale, lower_bound;
  double softplus_beta = 1.0, softplus_threshold = 20.0;
  bool use_qk_l2norm_in_kernel = false, is_kda = false, disable_state_update = false, cache_ring = false;
};
SPECSTATE_API void fused_sigmoid_gating_delta_rule_update(const GatingUpdateParams& params, Stream stream = {});
/// One KDA token a request, state in place, softplus gate; q [N, 1, H, K] or [1, N, H, K]. The state may be flat (one dimension).
/// Of GatingUpdateParams it reads A_log, a, dt_bias, q, k, v, b, the state, its indices, cu_seqlens, out, scale, the softplus numbers
/// and use_qk_l2norm_in_kernel. A slot < 0 gives zeros.
SPECSTATE_API void cutedsl_fused_sigmoid_gating_kda_update(const GatingUpdateParams& params, Stream stream = {});

}  // namespace specstate::kda
