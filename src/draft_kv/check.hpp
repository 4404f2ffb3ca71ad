#pragma once
#include "draft_kv/args.hpp"

namespace specstate::draft_kv {

/// The one complete check of a call; throws before anything is written. Packs plain weights, finds the rows that are written.
MaterializeArgs check(const MaterializeIntoPoolParams& params);
FusedNormRopeStackedArgs check(const FusedNormRopeStackedParams& params);

}  // namespace specstate::draft_kv
