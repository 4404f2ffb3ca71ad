// Parameters -> check once -> Args -> the backend.
#include <algorithm>

#include "core/dispatch.hpp"
#include "kda/check.hpp"
#include "specstate/kda.hpp"

namespace specstate::kda {

namespace {

template <class Args>
void dispatch(const char* op, Device device, const Args& args, Stream stream) {
  core::on_backend(
      op, device, [&] { cpu::run(args, stream); }, [&] { cuda::run(args, stream); });
}

using core::Names;
using core::with_names;

constexpr Names kGatingNames = {{"x_q", "q"},
                                {"x_k", "k"},
                                {"x_v", "v"},
                                {"g", "a"},
                                {"beta", "b"},
                                {"state", "initial_state_source"},
                                {"slots", "initial_state_indices"},
                                {"snapshots", "intermediate_states_buffer"},
                                {"rows", "intermediate_state_indices"},
                                {"parents", "retrieve_parent_token"},
                                {"rings.rawv", "replayssm_rawv"},
                                {"rings.rawk", "replayssm_rawk"},
                                {"rings.g", "replayssm_g"},
                                {"rings.beta", "replayssm_beta"}};

void commit(const CommitParams& params, const char* op, int state_dims, Stream stream) {
  with_names({{"state", "checkpoint_state"},
              {"rings.rawv", "rawv_cache"},
              {"rings.rawk", "rawk_cache"},
              {"rings.g", "gk_cache"},
              {"rings.beta", "beta_cache"},
              {"slots", "ssm_state_indices"},
              {"accept", "accept_lens"},
              {"track", "mamba_track_indices"},
              {"track_step", "mamba_steps_to_track"}},
             [&] {
               check_commit_contract(params, op, state_dims);
               const FoldArgs args = check(params, op);
               dispatch(op, params.state.device, args, stream);
             });
}

}  // namespace

void verify(const VerifyParams& params, Stream stream) {
  const VerifyArgs args = check(params);
  dispatch("verify", params.x_q.device, args, stream);
}

void decode(const DecodeParams& params, Stream stream) {
  const VerifyArgs args = check(params);
  dispatch("decode", params.x_q.device, args, stream);
}

void fold(const FoldParams& params, Stream stream) {
  const FoldArgs args = check(params);
  dispatch("fold", params.state.device, args, stream);
}

void defer_fold(const DeferFoldParams& params, Stream stream) {
  const DeferArgs args = check(params);
  dispatch("defer_fold", params.pending.device, args, stream);
}

void rollback_conv_windows(const RollbackConvWindowsParams* params, std::int64_t count, Stream stream) {
  const std::vector<RollbackArgs> all = check(params, count);
  if (!all.empty()) dispatch("rollback_conv_windows", params[0].pool.device, std::span<const RollbackArgs>(all), stream);
}

void fused_kda_decode_mtp_dspark(const VerifyParams& params, Stream stream) {
  static constexpr const char* op = "fused_kda_decode_mtp_dspark";
  with_names({{"state", "recurrent_state"},
              {"snapshots", "intermediate_ssm"},
              {"rows", "intermediate_state_indices"},
              {"conv_q", "intermediate_conv_q"},
              {"conv_k", "intermediate_conv_k"},
              {"conv_v", "intermediate_conv_v"},
              {"slots", "ssm_state_indices"},
              {"rings.rawv", "replayssm_rawv"},
              {"rings.rawk", "replayssm_rawk"},
              {"rings.g", "replayssm_g"},
              {"rings.beta", "replayssm_beta"}},
             [&] {
               check_fused_contract(params);
               VerifyParams own = params;
               if (own.rings.rawv.given()) own.snapshots = {};  // ring mode leaves them alone
               VerifyArgs args = check(own, op);
               check_fused_lengths(args, op);
               args.steps = std::min(args.steps, args.T / args.N);  // where lengths are on a GPU, longer requests are padding
               dispatch(op, params.x_q.device, args, stream);
             });
}

void commit_kda_replayssm_spec(const CommitParams& params, Stream stream) { commit(params, "commit_kda_replayssm_spec", 4, stream); }

void commit_kda_replayssm_spec_all_layers(const CommitParams& params, Stream stream) {
  commit(params, "commit_kda_replayssm_spec_all_layers", 5, stream);
}

void fused_sigmoid_gating_delta_rule_update(const GatingUpdateParams& params, Stream stream) {
  static constexpr const char* op = "fused_sigmoid_gating_delta_rule_update";
  with_names(kGatingNames, [&] {
    const VerifyArgs args = check(as_verify(params, op), op);
    dispatch(op, params.q.device, args, stream);
  });
}

void cutedsl_fused_sigmoid_gating_kda_update(const GatingUpdateParams& params, Stream stream) {
  static constexpr const char* op = "cutedsl_fused_sigmoid_gating_kda_update";
  with_names(kGatingNames, [&] {
    const VerifyArgs args = check(as_decode(params, op), op);
    dispatch(op, params.q.device, args, stream);
  });
}

}  // namespace specstate::kda
