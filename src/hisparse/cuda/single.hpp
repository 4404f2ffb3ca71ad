#pragma once
// The second form of the single-step swap.
#include "hisparse/cuda/rows.cuh"

namespace specstate::hisparse::cuda {

/// For tables that one CTA's shared memory does not hold.
void run_single_large(const SwapInSingleArgs& args, const CopyGeometry& copy, Stream stream);

}  // namespace specstate::hisparse::cuda
