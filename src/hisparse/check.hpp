#pragma once
#include <string>
#include <vector>

#include "core/match.hpp"
#include "hisparse/args.hpp"

namespace specstate::hisparse {

/// Integers and tables of a tensor, as a backend sees them.
inline Integers integers(const TensorView& t) {
  return {t.data, t.ndim > 0 ? t.strides[0] : 0, t.ndim > 1 ? t.strides[1] : 0, static_cast<int>(size_of(t.dtype))};
}
inline Strided2<std::int32_t> table(const TensorView& t) { return {t.as<std::int32_t>(), t.strides[0], t.strides[1]}; }

/// The one complete check of shapes, dtypes, strides and places; throws before anything is written. Ids inside the tensors
/// (requests, slots, rows, LRU entries) are the backend's to judge: on the CPU they are errors, on a GPU such rows are invalid.
SwapInArgs check(const SwapInParams& params, std::vector<CopyArgs>& followers);
inline SwapInArgs check(const SwapInParams& params) {  // of a call without followers
  std::vector<CopyArgs> none;
  return check(params, none);
}
SpecSwapArgs check(const SpecSwapParams& params);
SwapInSingleArgs check(const SwapInSingleParams& params);
ReplayPlanArgs check(const ReplayPlanParams& params, std::vector<CopyArgs>& followers);
AwaitFollowerArgs check(const AwaitFollowerParams& params);
TransferArgs check(const TransferPagedParams& params, std::vector<TransferLayer>& layers);
TransferArgs check(const TransferPagedPointersParams& params, std::vector<TransferLayer>& layers);

/// What error texts call the four buffers of a layer. It stays in its place: a checker points into it.
class LayerNames {
 public:
  explicit LayerNames(const std::string& before, const std::string& after = "");
  LayerNames(const LayerNames&) = delete;
  LayerNames& operator=(const LayerNames&) = delete;
  operator const char* const*() const { return names_; }  // NOLINT: implicit on purpose

 private:
  std::string text_[4];
  const char* names_[4];
};
/// Geometry of one layer's buffers, both ends written (backups go to the host). That layers are apart is `outputs_apart()`'s to say.
CopyArgs check_buffers(core::Checker& check, const LayerNames& names, const KvBuffers& buffers, RowLayout layout);
/// Kernels count a batch, or a list of rows, in 32 bits; a broadcast one may be longer than anyone waits for.
void check_count(const core::Checker& check, const char* name, const TensorView& list);
/// Kernels count the bytes of a row in 32 bits.
void check_item(const core::Checker& check, const char* name, std::int64_t bytes);
/// Are rows DSv4-paged? A layout that is none of the two is refused.
bool check_paged(core::Checker& check, RowLayout layout);
/// The count of real rows, or null.
const std::int32_t* check_num_real(core::Checker& check, const TensorView& num_real_reqs);
/// SMs that a call's copies may occupy, 0 for any number.
std::int64_t check_sm_budget(core::Checker& check, std::int64_t sm_budget);
/// More occurrences than one call takes?
void check_occurrences(std::int64_t steps, std::int64_t top_k);
/// Do both name the very same elements?
bool same_view(const TensorView& a, const TensorView& b);
void check_reset(const SwapState& state, const TensorView& requests);

}  // namespace specstate::hisparse
