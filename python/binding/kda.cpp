#include "specstate/kda.hpp"

#include <vector>

#include "common.hpp"

namespace specstate::binding {

namespace {

using OptDouble = ffi::Optional<double>;

std::optional<double> number(const OptDouble& x) { return x.has_value() ? std::optional<double>(x.value()) : std::nullopt; }

}  // namespace

// What verify and decode share: `Step` of kda.py hands these over in this order.
#define SPECSTATE_KDA_STEP                                                                                                                \
  Opt x_q, Opt x_k, Opt x_v, Opt w_q, Opt w_k, Opt w_v, Opt cs_q, Opt cs_k, Opt cs_v, Opt g, Opt beta, Opt A_log, Opt dt_bias, Opt state, \
      Opt slots, Opt cu_seqlens, Opt onorm_gate, Opt onorm_weight, OptDouble onorm_eps, Opt out, OptDouble lower_bound,                   \
      double softplus_beta, double softplus_threshold, OptDouble scale, bool l2norm, bool round_before_norm, std::int64_t null_slot
#define SPECSTATE_KDA_FILL(p)                                                                         \
  SPECSTATE_SET(p, x_q, x_k, x_v, w_q, w_k, w_v, cs_q, cs_k, cs_v);                                   \
  SPECSTATE_SET(p, g, beta, A_log, dt_bias, state, slots, cu_seqlens, onorm_gate, onorm_weight, out); \
  p.onorm_eps = number(onorm_eps), p.lower_bound = number(lower_bound), p.scale = number(scale);      \
  p.softplus_beta = softplus_beta, p.softplus_threshold = softplus_threshold;                         \
  p.l2norm = l2norm, p.round_before_norm = round_before_norm, p.null_slot = null_slot

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_verify, [](SPECSTATE_KDA_STEP, Opt rawv, Opt rawk, Opt ring_g, Opt ring_beta, Opt snapshots, Opt conv_q,
                                             Opt conv_k, Opt conv_v, Opt rows, Opt parents, Opt pending, bool exact, bool update_state,
                                             bool null_from_zero, bool fused, std::int64_t s) {
  guard([&] {
    kda::VerifyParams p;
    SPECSTATE_KDA_FILL(p);
    p.rings = {view("rawv", rawv), view("rawk", rawk), view("g", ring_g), view("beta", ring_beta)};
    SPECSTATE_SET(p, snapshots, conv_q, conv_k, conv_v, rows, parents, pending);
    p.exact = exact, p.update_state = update_state, p.null_from_zero = null_from_zero;
    fused ? kda::fused_kda_decode_mtp_dspark(p, stream(s)) : kda::verify(p, stream(s));
  });
});

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_decode, [](SPECSTATE_KDA_STEP, std::int64_t s) {
  guard([&] {
    kda::DecodeParams p;
    SPECSTATE_KDA_FILL(p);
    kda::decode(p, stream(s));
  });
});

// form: 0 fold, 1 commit_kda_replayssm_spec, 2 its all-layers form.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_fold, [](Opt state, Opt rawv, Opt rawk, Opt g, Opt beta, Opt slots, Opt accept, Opt track, Opt track_step,
                                           Opt pending, bool l2norm, std::int64_t null_slot, std::int64_t max_cache_len,
                                           std::int64_t num_k_heads, std::int64_t form, std::int64_t s) {
  guard([&] {
    kda::CommitParams p;
    SPECSTATE_SET(p, state, slots, accept, track, track_step, pending);
    p.rings = {view("rawv", rawv), view("rawk", rawk), view("g", g), view("beta", beta)};
    p.l2norm = l2norm, p.null_slot = null_slot;
    p.max_cache_len = max_cache_len, p.num_k_heads = num_k_heads;
    if (form == 0) kda::fold(p, stream(s));
    if (form == 1) kda::commit_kda_replayssm_spec(p, stream(s));
    if (form == 2) kda::commit_kda_replayssm_spec_all_layers(p, stream(s));
  });
});

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_defer_fold, [](Opt pending, Opt slots, Opt accept, std::int64_t null_slot, std::int64_t s) {
  guard([&] {
    kda::DeferFoldParams p;
    SPECSTATE_SET(p, pending, slots, accept);
    p.null_slot = null_slot;
    kda::defer_fold(p, stream(s));
  });
});

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_gating_update, [](Opt A_log, Opt a, Opt dt_bias, double softplus_beta, double softplus_threshold, Opt q,
                                                    Opt k, Opt v, Opt b, Opt state, Opt indices, OptDouble scale, bool l2norm,
                                                    Opt cu_seqlens, bool is_kda, OptDouble lower_bound, bool disable_state_update,
                                                    Opt buffer, Opt buffer_indices, Opt parents, bool cache_ring, Opt rawv, Opt rawk,
                                                    Opt ring_g, Opt ring_beta, Opt out, bool one_token, std::int64_t s) {
  guard([&] {
    kda::GatingUpdateParams p;
    p.softplus_beta = softplus_beta, p.softplus_threshold = softplus_threshold;
    SPECSTATE_SET(p, A_log, a, dt_bias, q, k, v, b, cu_seqlens, out);
    p.initial_state_source = view("initial_state_source", state);
    p.initial_state_indices = view("initial_state_indices", indices);
    p.scale = number(scale), p.use_qk_l2norm_in_kernel = l2norm;
    p.is_kda = is_kda, p.lower_bound = number(lower_bound), p.disable_state_update = disable_state_update;
    p.intermediate_states_buffer = view("intermediate_states_buffer", buffer);
    p.intermediate_state_indices = view("intermediate_state_indices", buffer_indices);
    p.retrieve_parent_token = view("retrieve_parent_token", parents);
    p.cache_ring = cache_ring;
    p.rings = {view("replayssm_rawv", rawv), view("replayssm_rawk", rawk), view("replayssm_g", ring_g), view("replayssm_beta", ring_beta)};
    one_token ? kda::cutedsl_fused_sigmoid_gating_kda_update(p, stream(s)) : kda::fused_sigmoid_gating_delta_rule_update(p, stream(s));
  });
});

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_rollback_conv_windows,
                              [](ffi::Array<ffi::Tensor> pools, ffi::Array<ffi::Tensor> windows, Opt slots, Opt last_correct_step, Opt rows,
                                 Opt track_slots, Opt track_steps, std::int64_t s) {
                                guard([&] {
                                  std::vector<kda::RollbackConvWindowsParams> all;
                                  for (std::size_t i = 0; i < pools.size(); ++i) {
                                    kda::RollbackConvWindowsParams p;
                                    p.pool = view("conv_pools", pools[i]), p.windows = view("intermediate_windows", windows[i]);
                                    SPECSTATE_SET(p, slots, last_correct_step, rows, track_slots, track_steps);
                                    all.push_back(p);
                                  }
                                  kda::rollback_conv_windows(all.data(), static_cast<std::int64_t>(all.size()), stream(s));
                                });
                              });

}  // namespace specstate::binding
