#pragma once
#include "core/match.hpp"
#include "draft_kv/args.hpp"

namespace specstate::draft_kv {

/// The one complete check of a call; throws before anything is written. Packs plain weights, finds the rows that are written.
MaterializeArgs check(const MaterializeIntoPoolParams& params);
FusedNormRopeStackedArgs check(const FusedNormRopeStackedParams& params);

/// Bytes of the workspace that the call wants, asked for `check.op()`.
std::int64_t workspace_bytes(const core::Checker& check, const MaterializeIntoPoolParams& params);

}  // namespace specstate::draft_kv
