// Parameters -> check once -> Args -> the backend.
#include <string_view>
#include <vector>

#include "core/dispatch.hpp"
#include "hisparse/check.hpp"
#include "hisparse/layout.hpp"
#include "specstate/hisparse.hpp"

namespace specstate::hisparse {

namespace {
void check_shape(const char* op, const SwapShape& s) {
  core::Checker check(op);
  const std::pair<const char*, std::int64_t> sizes[] = {{"requests", s.requests}, {"hot", s.hot}, {"context", s.context}, {"tail", s.tail}};
  for (const auto& [name, n] : sizes) {
    const std::int64_t least = name == std::string("tail") || name == std::string("requests") ? 0 : 1;
    check.require(n >= least && n <= INT32_MAX, name, std::to_string(least) + " to 2147483647", std::to_string(n));
  }
  const std::int64_t of_request = 4 * (2 * (s.hot + s.tail) + s.hot + s.context + 1) + 5 * layout::kBlockAlign;  // at most
  if (s.requests > INT64_MAX / of_request)
    check.fail("requests", "a state whose bytes 64 bits can count",
               std::to_string(s.requests) + " of " + std::to_string(of_request) + " bytes");
}
constexpr core::Names kBlockNames = {
    {"top_k_tokens", "top_k_blocks"}, {"host_cache", "host_cache_k"}, {"device_buffer", "device_buffer_k"}};
}  // namespace

std::int64_t swap_state_bytes(const SwapShape& shape) {
  check_shape("swap_state_bytes", shape);
  return layout::state_block(shape.requests, shape.hot, shape.tail, shape.context).total;
}

SwapState swap_state_view(const SwapShape& shape, void* memory, Device device) {
  check_shape("swap_state_view", shape);
  const layout::StateBlock at = layout::state_block(shape.requests, shape.hot, shape.tail, shape.context);
  auto* base = static_cast<std::byte*>(memory);
  const core::Checker check("swap_state_view");
  check.require(base != nullptr || shape.requests == 0, "memory", "a block of swap_state_bytes bytes", "a null pointer");
  check.require(reinterpret_cast<std::uintptr_t>(base) % layout::kBlockAlign == 0, "memory", "alignment to 64 bytes", "another address");
  const std::int64_t R = shape.requests, W = shape.hot + shape.tail;
  SwapState s;
  s.slot_tokens = TensorView(base, DType::kInt32, {R, W}, device);
  s.slot_locs = TensorView(base + at.slot_locs, DType::kInt32, {R, W}, device);
  s.slot_stamps = TensorView(base + at.slot_stamps, DType::kInt32, {R, shape.hot}, device);
  s.token_slots =
      TensorView(base + at.token_slots, shape.hot <= layout::kMaxShortSlots ? DType::kInt16 : DType::kInt32, {R, shape.context}, device);
  s.clock = TensorView(base + at.clock, DType::kInt32, {R}, device);
  return s;
}

void reset_swap_state(const SwapState& state, const TensorView& requests, Stream stream) {
  check_reset(state, requests);
  core::on_backend(
      "reset_swap_state", state.slot_tokens.device, [&] { cpu::reset(state, requests); }, [&] { cuda::reset(state, requests, stream); });
}

namespace {
template <class Args>
void dispatch(const TensorView& where, const Args& args, Stream stream) {
  core::on_backend(
      args.op, where.device, [&] { cpu::run(args, stream); }, [&] { cuda::run(args, stream); });
}
template <class Args, class Layers>
void dispatch(const TensorView& where, const Args& args, const Layers& layers, Stream stream) {
  const auto n = static_cast<std::int64_t>(layers.size());
  core::on_backend(
      args.op, where.device, [&] { cpu::run(args, layers.data(), n, stream); }, [&] { cuda::run(args, layers.data(), n, stream); });
}
}  // namespace

void swap_in(const SwapInParams& params, Stream stream) {
  std::vector<CopyArgs> followers;
  const SwapInArgs args = check(params, followers);
  if (followers.empty())
    dispatch(params.top_k_tokens, args, stream);
  else
    dispatch(params.top_k_tokens, args, followers, stream);
}
void swap_in_single(const SwapInSingleParams& params, Stream stream) {
  const bool blocks = params.op == std::string_view("load_blocks_to_device_buffer_mha");  // which spells these by its own names
  core::with_names(blocks ? kBlockNames : core::Names{}, [&] { dispatch(params.top_k_tokens, check(params), stream); });
}
void swap_in_spec(const SpecSwapParams& params, Stream stream) { dispatch(params.top_k_tokens, check(params), stream); }

void replay_plan(const ReplayPlanParams& params, Stream stream) {
  std::vector<CopyArgs> followers;
  const ReplayPlanArgs args = check(params, followers);
  dispatch(params.miss_src, args, followers, stream);
}

void await_follower(const AwaitFollowerParams& params, Stream stream) { dispatch(params.arrived, check(params), stream); }

void transfer_paged(const TransferPagedParams& params, Stream stream) {
  std::vector<TransferLayer> layers;
  const TransferArgs args = check(params, layers);
  dispatch(params.src_indices, args, layers, stream);
}

void transfer_paged_pointers(const TransferPagedPointersParams& params, Stream stream) {
  std::vector<TransferLayer> layers;
  const TransferArgs args = check(params, layers);
  dispatch(params.src_indices, args, layers, stream);
}

}  // namespace specstate::hisparse
