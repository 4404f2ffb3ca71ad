#pragma once
#include "accept/args.hpp"
#include "specstate/accept.hpp"

namespace specstate::accept {

/// The one complete check of a call; throws before anything is written.
VerifyGreedyArgs check(const VerifyGreedyParams& params);
VerifyRejectionArgs check(const VerifyRejectionParams& params);
PlanVerifyLengthsArgs check(const PlanVerifyLengthsParams& params);

}  // namespace specstate::accept
