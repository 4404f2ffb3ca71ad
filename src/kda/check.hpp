#pragma once
#include "kda/args.hpp"
#include "specstate/kda.hpp"

namespace specstate::kda {

inline constexpr std::int64_t kWindow = 3;  // inputs before a token that its convolution reads; with its own it has four taps

/// The one complete check of a call; throws before anything is written. `op` is the name in error texts.
VerifyArgs check(const VerifyParams& params, const char* op = "verify");
VerifyArgs check(const DecodeParams& params, const char* op = "decode");
FoldArgs check(const FoldParams& params, const char* op = "fold");
DeferArgs check(const DeferFoldParams& params);
std::vector<RollbackArgs> check(const RollbackConvWindowsParams* params, std::int64_t count);

/// sglang's own checks, in its order and with its texts; shapes and dtypes only. They come before `check`.
void check_fused_contract(const VerifyParams& params);
void check_fused_lengths(const VerifyArgs& args, const char* op);
void check_commit_contract(const CommitParams& params, const char* op, int state_dims);

/// The neighbours' tensors as those of verify and decode, without a copy; throws where their shapes do not allow that.
VerifyParams as_verify(const GatingUpdateParams& params, const char* op);
DecodeParams as_decode(const GatingUpdateParams& params, const char* op);

}  // namespace specstate::kda
