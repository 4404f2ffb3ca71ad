#include "specstate/hisparse.hpp"

#include <tvm/ffi/container/array.h>

#include <vector>

#include "common.hpp"

namespace specstate::binding {

using namespace hisparse;

namespace {

KvBuffers buffers(const Opt& host, const Opt& device, const Opt& host_v, const Opt& device_v) {
  return {view("host_cache", host), view("device_buffer", device), view("host_cache_v", host_v), view("device_buffer_v", device_v)};
}
MissPlan plan(const Opt& src, const Opt& dst, const Opt& count) {
  return {view("miss_src", src), view("miss_dst", dst), view("miss_count", count)};
}
RowLayout row_layout(bool paged) { return paged ? RowLayout::kDsv4Paged : RowLayout::kLinear; }
SwapState state(const Opt& tokens, const Opt& locs, const Opt& stamps, const Opt& hints, const Opt& clock) {
  return {view("state.slot_tokens", tokens), view("state.slot_locs", locs), view("state.slot_stamps", stamps),
          view("state.token_slots", hints), view("state.clock", clock)};
}
TensorView view(const char* name, const ffi::Tensor& t) { return binding::view(name, ffi::TensorView(t)); }
using binding::view;

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(
    hisparse_swap_in,
    [](Opt top_k_tokens, Opt seq_lens, Opt req_pool_indices, Opt num_real_reqs, Opt host_cache_locs, Opt host_cache, Opt device_buffer,
       Opt host_cache_v, Opt device_buffer_v, Opt slot_tokens, Opt slot_locs, Opt slot_stamps, Opt token_slots, Opt clock, Opt scratch_locs, bool paged,
       Opt top_k_device_locs, Opt miss_src, Opt miss_dst, Opt miss_count, Opt unique_misses, Opt unique_hits, bool skip_io, std::int64_t s) {
      guard([&] {
        SwapInParams p;
        p.top_k_tokens = view("top_k_tokens", top_k_tokens);
        p.seq_lens = view("seq_lens", seq_lens);
        p.req_pool_indices = view("req_pool_indices", req_pool_indices);
        p.num_real_reqs = view("num_real_reqs", num_real_reqs);
        p.host_cache_locs = view("host_cache_locs", host_cache_locs);
        p.buffers = buffers(host_cache, device_buffer, host_cache_v, device_buffer_v);
        p.state = state(slot_tokens, slot_locs, slot_stamps, token_slots, clock);
        p.scratch_locs = view("scratch_locs", scratch_locs);
        p.layout = row_layout(paged);
        p.top_k_device_locs = view("top_k_device_locs", top_k_device_locs);
        p.plan = plan(miss_src, miss_dst, miss_count);
        p.unique_misses = view("unique_misses", unique_misses);
        p.unique_hits = view("unique_hits", unique_hits);
        p.skip_io = skip_io;
        swap_in(p, stream(s));
      });
    });

TVM_FFI_DLL_EXPORT_TYPED_FUNC(
    hisparse_reset_swap_state,
    [](Opt slot_tokens, Opt slot_locs, Opt slot_stamps, Opt token_slots, Opt clock, Opt requests, std::int64_t s) {
      guard([&] {
        reset_swap_state(state(slot_tokens, slot_locs, slot_stamps, token_slots, clock), view("requests", requests), stream(s));
      });
    });

TVM_FFI_DLL_EXPORT_TYPED_FUNC(
    hisparse_swap_in_single,
    [](Opt top_k_tokens, Opt device_buffer_tokens, Opt host_cache_locs, Opt device_buffer_locs, Opt host_cache, Opt device_buffer,
       Opt host_cache_v, Opt device_buffer_v, Opt top_k_device_locs, Opt req_pool_indices, Opt seq_lens, Opt lru_slots,
       std::int64_t item_size_bytes, std::int64_t num_top_k, std::int64_t hot_buffer_size, Opt num_real_reqs, bool paged, Opt miss_src,
       Opt miss_dst, Opt miss_count, std::int64_t sparse_block_size, bool skip_io, ffi::String op, std::int64_t s) {
      guard([&] {
        SwapInSingleParams p;
        p.top_k_tokens = view("top_k_tokens", top_k_tokens);
        p.device_buffer_tokens = view("device_buffer_tokens", device_buffer_tokens);
        p.host_cache_locs = view("host_cache_locs", host_cache_locs);
        p.device_buffer_locs = view("device_buffer_locs", device_buffer_locs);
        p.buffers = buffers(host_cache, device_buffer, host_cache_v, device_buffer_v);
        p.top_k_device_locs = view("top_k_device_locs", top_k_device_locs);
        p.req_pool_indices = view("req_pool_indices", req_pool_indices);
        p.seq_lens = view("seq_lens", seq_lens);
        p.lru_slots = view("lru_slots", lru_slots);
        p.item_size_bytes = item_size_bytes;
        p.num_top_k = num_top_k;
        p.hot_buffer_size = hot_buffer_size;
        p.num_real_reqs = view("num_real_reqs", num_real_reqs);
        p.layout = row_layout(paged);
        p.plan = plan(miss_src, miss_dst, miss_count);
        p.sparse_block_size = sparse_block_size;
        p.skip_io = skip_io;
        p.op = op.c_str();
        swap_in_single(p, stream(s));
      });
    });

TVM_FFI_DLL_EXPORT_TYPED_FUNC(
    hisparse_swap_in_spec,
    [](Opt top_k_tokens, Opt device_buffer_tokens, Opt host_cache_locs, Opt device_buffer_locs, Opt host_cache, Opt device_buffer,
       Opt top_k_device_locs, Opt req_pool_indices, Opt seq_lens, Opt cache_index, Opt cache_policy, Opt scratch_locs, Opt scratch_state,
       Opt num_real_reqs, Opt miss_src, Opt miss_dst, Opt miss_count, std::int64_t limits, std::int64_t s) {
      guard([&] {
        SpecSwapParams p;
        p.top_k_tokens = view("top_k_tokens", top_k_tokens);
        p.device_buffer_tokens = view("device_buffer_tokens", device_buffer_tokens);
        p.host_cache_locs = view("host_cache_locs", host_cache_locs);
        p.device_buffer_locs = view("device_buffer_locs", device_buffer_locs);
        p.buffers = buffers(host_cache, device_buffer, {}, {});
        p.top_k_device_locs = view("top_k_device_locs", top_k_device_locs);
        p.req_pool_indices = view("req_pool_indices", req_pool_indices);
        p.seq_lens = view("seq_lens", seq_lens);
        p.cache_index = view("state.cache_index", cache_index);
        p.cache_policy = view("state.cache_policy", cache_policy);
        p.scratch_locs = view("state.scratch_locs", scratch_locs);
        p.scratch_state = view("state.scratch_state", scratch_state);
        p.num_real_reqs = view("num_real_reqs", num_real_reqs);
        p.plan = plan(miss_src, miss_dst, miss_count);
        p.limits = static_cast<SpecSwapParams::Limits>(limits);
        swap_in_spec(p, stream(s));
      });
    });

TVM_FFI_DLL_EXPORT_TYPED_FUNC(
    hisparse_replay_plan,
    [](Opt miss_src, Opt miss_dst, Opt miss_count, Opt num_real_reqs, ffi::Array<ffi::Tensor> host_cache,
       ffi::Array<ffi::Tensor> device_buffer, ffi::Array<ffi::Tensor> host_cache_v, ffi::Array<ffi::Tensor> device_buffer_v,
       std::int64_t item_size_bytes, bool paged, bool skip_io, ffi::String op, std::int64_t s) {
      guard([&] {
        std::vector<KvBuffers> followers;
        for (std::size_t i = 0; i < host_cache.size(); ++i) {
          KvBuffers b;
          b.host_cache = view("host_cache", host_cache[i]);
          b.device_buffer = view("device_buffer", device_buffer[i]);
          if (!host_cache_v.empty()) {
            b.host_cache_v = view("host_cache_v", host_cache_v[i]);
            b.device_buffer_v = view("device_buffer_v", device_buffer_v[i]);
          }
          followers.push_back(b);
        }
        ReplayPlanParams p;
        p.miss_src = view("miss_src", miss_src);
        p.miss_dst = view("miss_dst", miss_dst);
        p.miss_count = view("miss_count", miss_count);
        p.num_real_reqs = view("num_real_reqs", num_real_reqs);
        p.followers = followers.data();
        p.num_followers = static_cast<std::int64_t>(followers.size());
        p.item_size_bytes = item_size_bytes;
        p.layout = row_layout(paged);
        p.skip_io = skip_io;
        p.op = op.c_str();
        replay_plan(p, stream(s));
      });
    });

TVM_FFI_DLL_EXPORT_TYPED_FUNC(
    hisparse_transfer_paged,
    [](ffi::Array<ffi::Tensor> src, ffi::Array<ffi::Tensor> dst, Opt src_indices, Opt dst_indices, std::int64_t s) {
      guard([&] {
        std::vector<TensorView> from, to;
        for (const ffi::Tensor& t : src) from.push_back(view("src", t));
        for (const ffi::Tensor& t : dst) to.push_back(view("dst", t));
        TransferPagedParams p;
        p.src = from.data();
        p.dst = to.data();
        p.num_layers = static_cast<std::int64_t>(from.size());
        p.src_indices = view("src_indices", src_indices);
        p.dst_indices = view("dst_indices", dst_indices);
        transfer_paged(p, stream(s));
      });
    });

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_transfer_paged_pointers,
                              [](Opt src_ptrs, Opt dst_ptrs, Opt src_indices, Opt dst_indices, std::int64_t s) {
                                guard([&] {
                                  TransferPagedPointersParams p;
                                  p.src_ptrs = view("src_ptrs", src_ptrs);
                                  p.dst_ptrs = view("dst_ptrs", dst_ptrs);
                                  p.src_indices = view("src_indices", src_indices);
                                  p.dst_indices = view("dst_indices", dst_indices);
                                  transfer_paged_pointers(p, stream(s));
                                });
                              });

}  // namespace specstate::binding
