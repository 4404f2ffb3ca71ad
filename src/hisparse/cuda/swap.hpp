#pragma once
// The second form of the multi-step swaps.
#include "hisparse/args.hpp"

namespace specstate::hisparse::cuda {

/// For the calls that swap.cu leaves to it.
void run_large(const SwapInArgs& args, Stream stream);
void run_large(const SpecSwapArgs& args, Stream stream);

}  // namespace specstate::hisparse::cuda
