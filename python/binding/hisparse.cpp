#include "specstate/hisparse.hpp"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/object.h>

#include <iterator>
#include <memory>
#include <mutex>
#include <vector>

#include "common.hpp"
#include "specstate/hisparse_coordinator.hpp"

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

/// Layers from a list for each kind of buffer, which error texts call by `names`; those of V may be empty.
using Tensors = ffi::Array<ffi::Tensor>;
constexpr const char *kLayerNames[] = {"host_cache", "device_buffer", "host_cache_v", "device_buffer_v"},
                     *kFollowerNames[] = {"follower_host_cache", "follower_device_buffer", "follower_host_cache_v",
                                          "follower_device_buffer_v"};
std::vector<KvBuffers> layers(const char* const (&names)[4], const Tensors& host, const Tensors& device, const Tensors& host_v,
                              const Tensors& device_v) {
  std::vector<KvBuffers> all(host.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].host_cache = view(names[0], host[i]), all[i].device_buffer = view(names[1], device[i]);
    if (!host_v.empty()) all[i].host_cache_v = view(names[2], host_v[i]), all[i].device_buffer_v = view(names[3], device_v[i]);
  }
  return all;
}

}  // namespace

/// The lists of followers' buffers: none where no layer follows.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_swap_in,
                              [](Opt top_k_tokens, Opt seq_lens, Opt req_pool_indices, Opt num_real_reqs, Opt host_cache_locs,
                                 Opt host_cache, Opt device_buffer, Opt host_cache_v, Opt device_buffer_v, Opt slot_tokens, Opt slot_locs,
                                 Opt slot_stamps, Opt token_slots, Opt clock, Opt scratch_locs, bool paged, Opt top_k_device_locs,
                                 Opt miss_src, Opt miss_dst, Opt miss_count, Opt unique_misses, Opt unique_hits, bool skip_io,
                                 std::int64_t sm_budget, ffi::Optional<Tensors> follower_host_cache,
                                 ffi::Optional<Tensors> follower_device_buffer, ffi::Optional<Tensors> follower_host_cache_v,
                                 ffi::Optional<Tensors> follower_device_buffer_v, std::int64_t s) {
                                guard([&] {
                                  SwapInParams p;
                                  SPECSTATE_SET(p, top_k_tokens, seq_lens, req_pool_indices, num_real_reqs, host_cache_locs, scratch_locs);
                                  SPECSTATE_SET(p, top_k_device_locs, unique_misses, unique_hits);
                                  p.buffers = buffers(host_cache, device_buffer, host_cache_v, device_buffer_v);
                                  p.state = state(slot_tokens, slot_locs, slot_stamps, token_slots, clock);
                                  p.layout = row_layout(paged);
                                  p.plan = plan(miss_src, miss_dst, miss_count);
                                  p.skip_io = skip_io;
                                  p.sm_budget = sm_budget;
                                  std::vector<KvBuffers> followers;
                                  if (follower_host_cache.has_value())
                                    followers = layers(kFollowerNames, follower_host_cache.value(), follower_device_buffer.value(),
                                                       follower_host_cache_v.value(), follower_device_buffer_v.value());
                                  p.followers = followers.data();
                                  p.num_followers = static_cast<std::int64_t>(followers.size());
                                  swap_in(p, stream(s));
                                });
                              });

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_reset_swap_state, [](Opt slot_tokens, Opt slot_locs, Opt slot_stamps, Opt token_slots, Opt clock,
                                                            Opt requests, std::int64_t s) {
  guard([&] { reset_swap_state(state(slot_tokens, slot_locs, slot_stamps, token_slots, clock), view("requests", requests), stream(s)); });
});

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_swap_in_single,
                              [](Opt top_k_tokens, Opt device_buffer_tokens, Opt host_cache_locs, Opt device_buffer_locs, Opt host_cache,
                                 Opt device_buffer, Opt host_cache_v, Opt device_buffer_v, Opt top_k_device_locs, Opt req_pool_indices,
                                 Opt seq_lens, Opt lru_slots, std::int64_t item_size_bytes, std::int64_t num_top_k,
                                 std::int64_t hot_buffer_size, Opt num_real_reqs, bool paged, Opt miss_src, Opt miss_dst, Opt miss_count,
                                 std::int64_t sparse_block_size, bool skip_io, std::int64_t sm_budget, bool one_plan_stride, ffi::String op,
                                 std::int64_t s) {
                                guard([&] {
                                  SwapInSingleParams p;
                                  SPECSTATE_SET(p, top_k_tokens, device_buffer_tokens, host_cache_locs, device_buffer_locs);
                                  p.buffers = buffers(host_cache, device_buffer, host_cache_v, device_buffer_v);
                                  SPECSTATE_SET(p, top_k_device_locs, req_pool_indices, seq_lens, lru_slots, num_real_reqs);
                                  p.item_size_bytes = item_size_bytes;
                                  p.num_top_k = num_top_k;
                                  p.hot_buffer_size = hot_buffer_size;
                                  p.layout = row_layout(paged);
                                  p.plan = plan(miss_src, miss_dst, miss_count);
                                  p.sparse_block_size = sparse_block_size;
                                  p.skip_io = skip_io;
                                  p.sm_budget = sm_budget;
                                  p.one_plan_stride = one_plan_stride;
                                  p.op = op.c_str();
                                  swap_in_single(p, stream(s));
                                });
                              });

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_swap_in_spec,
                              [](Opt top_k_tokens, Opt device_buffer_tokens, Opt host_cache_locs, Opt device_buffer_locs, Opt host_cache,
                                 Opt device_buffer, Opt top_k_device_locs, Opt req_pool_indices, Opt seq_lens, Opt cache_index,
                                 Opt cache_policy, Opt scratch_locs, Opt scratch_state, Opt num_real_reqs, Opt miss_src, Opt miss_dst,
                                 Opt miss_count, std::int64_t limits, std::int64_t sm_budget, std::int64_t s) {
                                guard([&] {
                                  SpecSwapParams p;
                                  SPECSTATE_SET(p, top_k_tokens, device_buffer_tokens, host_cache_locs, device_buffer_locs);
                                  p.buffers = buffers(host_cache, device_buffer, {}, {});
                                  SPECSTATE_SET(p, top_k_device_locs, req_pool_indices, seq_lens, num_real_reqs);
                                  p.cache_index = view("state.cache_index", cache_index);
                                  p.cache_policy = view("state.cache_policy", cache_policy);
                                  p.scratch_locs = view("state.scratch_locs", scratch_locs);
                                  p.scratch_state = view("state.scratch_state", scratch_state);
                                  p.plan = plan(miss_src, miss_dst, miss_count);
                                  p.limits = static_cast<SpecSwapParams::Limits>(limits);
                                  p.sm_budget = sm_budget;
                                  swap_in_spec(p, stream(s));
                                });
                              });

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_replay_plan, [](Opt miss_src, Opt miss_dst, Opt miss_count, Opt num_real_reqs,
                                                       ffi::Array<ffi::Tensor> host_cache, ffi::Array<ffi::Tensor> device_buffer,
                                                       ffi::Array<ffi::Tensor> host_cache_v, ffi::Array<ffi::Tensor> device_buffer_v,
                                                       std::int64_t item_size_bytes, bool paged, bool skip_io, std::int64_t sm_budget,
                                                       bool one_plan_stride, Opt arrived, ffi::String op, std::int64_t s) {
  guard([&] {
    const std::vector<KvBuffers> followers = layers(kLayerNames, host_cache, device_buffer, host_cache_v, device_buffer_v);
    ReplayPlanParams p;
    SPECSTATE_SET(p, miss_src, miss_dst, miss_count, num_real_reqs, arrived);
    p.followers = followers.data();
    p.num_followers = static_cast<std::int64_t>(followers.size());
    p.item_size_bytes = item_size_bytes;
    p.layout = row_layout(paged);
    p.skip_io = skip_io;
    p.sm_budget = sm_budget;
    p.one_plan_stride = one_plan_stride;
    p.op = op.c_str();
    replay_plan(p, stream(s));
  });
});

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_await_follower, [](Opt arrived, std::int64_t follower, std::int64_t s) {
  guard([&] {
    AwaitFollowerParams p;
    SPECSTATE_SET(p, arrived);
    p.follower = follower;
    await_follower(p, stream(s));
  });
});

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_transfer_paged, [](ffi::Array<ffi::Tensor> src, ffi::Array<ffi::Tensor> dst, Opt src_indices,
                                                          Opt dst_indices, std::int64_t sm_budget, std::int64_t s) {
  guard([&] {
    std::vector<TensorView> from, to;
    for (const ffi::Tensor& t : src) from.push_back(view("src", t));
    for (const ffi::Tensor& t : dst) to.push_back(view("dst", t));
    TransferPagedParams p;
    p.src = from.data();
    p.dst = to.data();
    p.num_layers = static_cast<std::int64_t>(from.size());
    SPECSTATE_SET(p, src_indices, dst_indices);
    p.sm_budget = sm_budget;
    transfer_paged(p, stream(s));
  });
});

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_transfer_paged_pointers,
                              [](Opt src_ptrs, Opt dst_ptrs, Opt src_indices, Opt dst_indices, std::int64_t sm_budget, std::int64_t s) {
                                guard([&] {
                                  TransferPagedPointersParams p;
                                  SPECSTATE_SET(p, src_ptrs, dst_ptrs, src_indices, dst_indices);
                                  p.sm_budget = sm_budget;
                                  transfer_paged_pointers(p, stream(s));
                                });
                              });

// ------------------------------------------------------------------------------------------------------- Coordinator

namespace {

/// What Python holds: the coordinator and the tensors that it must not outlive. Calls of several threads take turns.
class CoordinatorObject : public ffi::Object {
 public:
  std::unique_ptr<Coordinator> coordinator;
  std::vector<ffi::Tensor> kept;
  std::mutex turn;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("specstate.hisparse.Coordinator", CoordinatorObject, ffi::Object);
};
/// The coordinator, while nobody else has it. Asked for without the GIL, which is never waited for meanwhile.
class Turn {
 public:
  explicit Turn(const ffi::ObjectRef& handle) {
    auto* object = const_cast<CoordinatorObject*>(handle.as<CoordinatorObject>());
    if (object == nullptr) throw Error(ErrorKind::kValue, "Coordinator: expected a coordinator handle.");
    lock_ = std::unique_lock(object->turn), coordinator_ = object->coordinator.get();
  }
  Coordinator* operator->() const { return coordinator_; }

 private:
  std::unique_lock<std::mutex> lock_;
  Coordinator* coordinator_;
};
using Ids = ffi::Array<std::int64_t>;
std::vector<std::int64_t> numbers(const Ids& ids) { return {ids.begin(), ids.end()}; }
SwapInParams selection(const Opt& top_k_tokens, const Opt& seq_lens, const Opt& requests) {
  SwapInParams p;
  SPECSTATE_SET(p, top_k_tokens, seq_lens);
  p.req_pool_indices = view("requests", requests);
  return p;
}

}  // namespace

namespace {
CoordinatorConfig coordinator_config(const Ids& sizes, bool paged, const Ids& anchor_of) {
  CoordinatorConfig c;
  std::int64_t* const fields[] = {&c.requests, &c.hot,       &c.window,      &c.tail,      &c.scratch,   &c.context,
                                  &c.top_k,    &c.page_size, &c.device_rows, &c.host_rows, &c.sm_budget, &c.first_layer};
  for (std::size_t i = 0; i < std::size(fields); ++i) *fields[i] = sizes[static_cast<std::int64_t>(i)];
  c.layout = row_layout(paged);
  c.anchor_of = numbers(anchor_of);
  return c;
}
}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_table_bytes, [](Ids sizes, bool paged, Ids anchor_of, std::int64_t layers) {
  return guard([&] { return Coordinator::table_bytes(coordinator_config(sizes, paged, anchor_of), layers); });
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_new,
                              [](ffi::Array<ffi::Tensor> hosts, ffi::Array<ffi::Tensor> devices,
                                 ffi::Array<ffi::Optional<ffi::Tensor>> hosts_v, ffi::Array<ffi::Optional<ffi::Tensor>> devices_v,
                                 Ids sizes, bool paged, Ids anchor_of, ffi::Optional<ffi::Tensor> tables,
                                 std::int64_t s) -> ffi::ObjectRef {
                                return guard([&] {
                                  CoordinatorConfig c = coordinator_config(sizes, paged, anchor_of);
                                  auto object = ffi::make_object<CoordinatorObject>();
                                  std::vector<KvBuffers> layers(hosts.size());
                                  const auto keep = [&](const char* name, const ffi::Tensor& t) {
                                    object->kept.push_back(t);
                                    return view(name, t);
                                  };
                                  if (tables.has_value()) c.tables = keep("tables", tables.value());
                                  for (std::size_t i = 0; i < hosts.size(); ++i) {
                                    layers[i].host_cache = keep("host_cache", hosts[i]);
                                    layers[i].device_buffer = keep("device_buffer", devices[i]);
                                    if (i < hosts_v.size() && hosts_v[i].has_value())
                                      layers[i].host_cache_v = keep("host_cache_v", hosts_v[i].value());
                                    if (i < devices_v.size() && devices_v[i].has_value())
                                      layers[i].device_buffer_v = keep("device_buffer_v", devices_v[i].value());
                                  }
                                  object->coordinator = std::make_unique<Coordinator>(c, layers, stream(s));
                                  return ffi::ObjectRef(object);
                                });
                              });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_can_admit,
                              [](ffi::ObjectRef h, std::int64_t tokens) { return guard([&] { return Turn(h)->can_admit(tokens); }); });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_admit, [](ffi::ObjectRef h, std::int64_t r, std::int64_t tokens, std::int64_t s) {
  guard([&] { Turn(h)->admit(r, tokens, stream(s)); });
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_reserve, [](ffi::ObjectRef h, std::int64_t r, std::int64_t count, std::int64_t s) {
  guard([&] { Turn(h)->reserve(r, count, stream(s)); });
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_stage, [](ffi::ObjectRef h, std::int64_t layer, std::int64_t r, std::int64_t position,
                                                             Opt rows, Opt rows_v, std::int64_t s) {
  guard([&] { Turn(h)->stage(layer, r, position, view("rows", rows), view("rows_v", rows_v), stream(s)); });
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_append, [](ffi::ObjectRef h, std::int64_t r, std::int64_t count, bool from_host,
                                                              std::int64_t s) {
  guard([&] { Turn(h)->append(r, count, from_host ? Coordinator::Source::kHost : Coordinator::Source::kStaged, stream(s)); });
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_host_row, [](ffi::ObjectRef h, std::int64_t r, std::int64_t position) {
  return guard([&] { return Turn(h)->host_row(r, position); });
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_host_pages, [](ffi::ObjectRef h, std::int64_t r) {
  return guard([&] {
    const Turn c(h);
    const std::span<const std::int64_t> pages = c->host_pages(r);
    return Ids(pages.begin(), pages.end());
  });
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_prepare_verify,
                              [](ffi::ObjectRef h, Ids requests, Ids widths, Opt locs, std::int64_t s) {
                                guard([&] { Turn(h)->prepare_verify(numbers(requests), numbers(widths), view("locs", locs), stream(s)); });
                              });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_write,
                              [](ffi::ObjectRef h, std::int64_t layer, std::int64_t r, std::int64_t j, Opt row, Opt row_v, std::int64_t s) {
                                guard([&] { Turn(h)->write(layer, r, j, view("row", row), view("row_v", row_v), stream(s)); });
                              });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_swap,
                              [](ffi::ObjectRef h, std::int64_t layer, std::int64_t round, Opt top_k_tokens, Opt seq_lens, Opt requests,
                                 Opt num_real_reqs, Opt out, Opt unique_misses, Opt unique_hits, bool skip_io, std::int64_t s) {
                                guard([&] {
                                  SwapInParams p = selection(top_k_tokens, seq_lens, requests);
                                  p.num_real_reqs = view("num_real_reqs", num_real_reqs);
                                  p.top_k_device_locs = view("out", out);
                                  SPECSTATE_SET(p, unique_misses, unique_hits);
                                  p.skip_io = skip_io;
                                  Turn(h)->swap(layer, p, round, stream(s));
                                });
                              });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_follow, [](ffi::ObjectRef h, std::int64_t layer, std::int64_t round, std::int64_t s) {
  guard([&] { Turn(h)->follow(layer, round, stream(s)); });
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_follow_all,
                              [](ffi::ObjectRef h, std::int64_t layer, std::int64_t round, std::int64_t s) {
                                guard([&] { Turn(h)->follow_all(layer, round, stream(s)); });
                              });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_plan_rounds, [](ffi::ObjectRef h, std::int64_t layer, Opt top_k_tokens, Opt seq_lens,
                                                                   Opt requests, Opt round_of) {
  return guard([&] { return Turn(h)->plan_rounds(layer, selection(top_k_tokens, seq_lens, requests), view("round_of", round_of)); });
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_accept, [](ffi::ObjectRef h, Ids requests, Ids accepted, std::int64_t s) {
  guard([&] { Turn(h)->accept(numbers(requests), numbers(accepted), stream(s)); });
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_begin_step, [](ffi::ObjectRef h, Ids requests, std::int64_t s) {
  guard([&] { Turn(h)->begin_step(numbers(requests), stream(s)); });
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_open_step,
                              [](ffi::ObjectRef h, Opt requests, Opt widths, Opt num_real_reqs, Opt locs, std::int64_t s) {
                                guard([&] {
                                  StepBatch b;
                                  SPECSTATE_SET(b, requests, widths, num_real_reqs);
                                  Turn(h)->open_step(b, view("locs", locs), stream(s));
                                });
                              });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_close_step,
                              [](ffi::ObjectRef h, Opt requests, Opt widths, Opt num_real_reqs, Opt accepted, std::int64_t s) {
                                guard([&] {
                                  StepBatch b;
                                  SPECSTATE_SET(b, requests, widths, num_real_reqs);
                                  Turn(h)->close_step(b, view("accepted", accepted), stream(s));
                                });
                              });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_end_step, [](ffi::ObjectRef h, Ids requests, Ids accepted) {
  guard([&] { Turn(h)->end_step(numbers(requests), numbers(accepted)); });
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_finish,
                              [](ffi::ObjectRef h, std::int64_t r, std::int64_t s) { guard([&] { Turn(h)->finish(r, stream(s)); }); });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_abort,
                              [](ffi::ObjectRef h, std::int64_t r, std::int64_t s) { guard([&] { Turn(h)->abort(r, stream(s)); }); });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_retract,
                              [](ffi::ObjectRef h, std::int64_t r, std::int64_t s) { guard([&] { Turn(h)->retract(r, stream(s)); }); });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_resume,
                              [](ffi::ObjectRef h, std::int64_t r, std::int64_t s) { guard([&] { Turn(h)->resume(r, stream(s)); }); });
/// [state, length] of a request.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_request, [](ffi::ObjectRef h, std::int64_t r) {
  return guard([&] {
    const Turn c(h);
    return Ids{static_cast<std::int64_t>(c->state(r)), c->length(r)};
  });
});
/// [max_length, free device rows, free host rows, then the fields of CoordinatorStats].
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_totals, [](ffi::ObjectRef h) {
  return guard([&] {
    const Turn c(h);
    const CoordinatorStats& s = c->stats();
    return Ids{c->max_length(), c->free_device_rows(), c->free_host_rows(), s.swaps, s.unique_hits, s.unique_misses,
               s.unserved,      s.bytes_to_device,     s.bytes_to_host};
  });
});
/// Copies of slot_tokens and slot_locs of a layer's group into dense int32 tensors of the same shape.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hisparse_coordinator_tables, [](ffi::ObjectRef h, std::int64_t layer, In tokens, In locs, std::int64_t s) {
  guard([&] { Turn(h)->copy_tables(layer, view("tokens", tokens), view("locs", locs), stream(s)); });
});

}  // namespace specstate::binding
