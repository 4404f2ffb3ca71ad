#pragma once
#include <vector>

#include "hisparse/args.hpp"

namespace specstate::hisparse {

/// The one complete check of shapes, dtypes, strides and places; throws before anything is written. Ids inside the tensors
/// (requests, slots, rows, LRU entries) are the backend's to judge: on the CPU they are errors, on a GPU such rows are invalid.
SwapInArgs check(const SwapInParams& params);
SpecSwapArgs check(const SpecSwapParams& params);
SwapInSingleArgs check(const SwapInSingleParams& params);
ReplayPlanArgs check(const ReplayPlanParams& params, std::vector<CopyArgs>& followers);
TransferArgs check(const TransferPagedParams& params, std::vector<TransferLayer>& layers);
TransferArgs check(const TransferPagedPointersParams& params, std::vector<TransferLayer>& layers);
/// Geometry of one layer's buffers (`layers[index].` in error texts).
CopyArgs check_buffers(const char* op, const KvBuffers& buffers, RowLayout layout, std::int64_t index);
void check_reset(const SwapState& state, const TensorView& requests);

}  // namespace specstate::hisparse
