// Calls of the HiSparse family. Their state is any state: a damaged one may cost copies, never a step outside.
#include "fuzz.hpp"
#include "specstate/hisparse.hpp"

using namespace specstate;
using namespace specstate::fuzz;
using namespace specstate::hisparse;

namespace {

struct Sizes {
  std::int64_t B, S, K, R, H, P, L, host_rows, device_rows, item;
};

KvBuffers buffers(Input& input, Call& call, const Sizes& n, bool paged) {
  KvBuffers k;
  if (paged) {
    k.host_cache = call.in(DType::kUInt8, {1, 37440});
    k.device_buffer = call.inout(DType::kUInt8, {1, 37440});
    return k;
  }
  k.host_cache = call.in(DType::kUInt8, {n.host_rows, n.item});
  k.device_buffer = call.inout(DType::kUInt8, {n.device_rows, n.item});
  if (input.chance(4)) {
    k.host_cache_v = call.in(DType::kUInt8, {n.host_rows, n.item});
    k.device_buffer_v = call.inout(DType::kUInt8, {n.device_rows, n.item});
  }
  return k;
}

MissPlan plan(Input& input, Call& call, const Sizes& n, std::int64_t occurrences) {
  if (input.flip()) return {};
  const std::int64_t room = occurrences + input.integer(0, 1);
  return {call.out(DType::kInt64, {n.B, room}), call.out(DType::kInt32, {n.B, room}), call.out(DType::kInt32, {n.B})};
}

int native(Input& input, Call& call, const Sizes& n) {
  const DType lens = input.pick({DType::kInt32, DType::kInt64}), ids = input.pick({DType::kInt32, DType::kInt64});
  SwapInParams p;
  p.layout = input.chance(64) ? RowLayout::kDsv4Paged : RowLayout::kLinear;
  p.top_k_tokens = call.in(DType::kInt32, {n.B, n.S, n.K}, {-1, n.L - 1});
  p.seq_lens = call.in(lens, {n.B, n.S}, {0, n.L});
  p.req_pool_indices = call.in(ids, {n.B}, {.lowest = 0, .highest = n.R - 1, .distinct = true});
  if (input.flip()) p.num_real_reqs = call.in(DType::kInt32, {1}, {0, n.B});
  p.host_cache_locs = call.in(ids, {n.R, n.L}, {-1, n.host_rows - 1});
  p.buffers = buffers(input, call, n, p.layout == RowLayout::kDsv4Paged);
  p.state.slot_tokens = call.inout(DType::kInt32, {n.R, n.H + n.P}, {-1, n.L - 1});
  p.state.slot_locs = call.in(DType::kInt32, {n.R, n.H + n.P}, {.lowest = 0, .highest = n.device_rows - 1, .distinct = true});
  p.state.slot_stamps = call.inout(DType::kInt32, {n.R, n.H}, {0, 9});
  p.state.token_slots = call.inout(input.pick({DType::kInt16, DType::kInt32}), {n.R, n.L}, {-1, n.H - 1});
  p.state.clock = call.inout(DType::kInt32, {n.R}, {0, 5});
  p.top_k_device_locs = call.out(DType::kInt32, {n.B, n.S, n.K});
  p.plan = plan(input, call, n, n.S * n.K);
  if (input.flip()) p.unique_misses = call.out(DType::kInt32, {n.B});
  if (input.flip()) p.unique_hits = call.out(DType::kInt32, {n.B});
  p.skip_io = input.chance(4);
  TensorView resets;
  if (input.flip()) resets = call.in(ids, {n.B}, {0, n.R - 1});
  const bool reset = input.chance(4);
  return call.run([&] {
    if (reset)
      reset_swap_state(p.state, resets);
    else
      swap_in(p);
  });
}

int single(Input& input, Call& call, const Sizes& n) {
  const DType ids = input.pick({DType::kInt32, DType::kInt64});
  const std::int64_t block = input.chance(4) ? input.integer(1, 3) : 1, hot = n.H + n.K * block;
  SwapInSingleParams p;
  p.layout = input.chance(64) ? RowLayout::kDsv4Paged : RowLayout::kLinear;
  p.sparse_block_size = block;
  p.top_k_tokens = call.in(DType::kInt32, {n.B, n.K}, {-1, n.L - 1});
  p.device_buffer_tokens = call.inout(DType::kInt32, {n.R, hot + 1 + n.P}, {-1, n.L - 1});
  p.host_cache_locs = call.in(DType::kInt64, {n.R, n.L}, {-1, n.host_rows - 1});
  p.device_buffer_locs = call.in(DType::kInt32, {n.R, hot + 1 + n.P}, {.lowest = 0, .highest = n.device_rows - 1, .distinct = true});
  p.buffers = buffers(input, call, n, p.layout == RowLayout::kDsv4Paged);
  p.top_k_device_locs = call.out(DType::kInt32, {n.B, n.K * block});
  p.req_pool_indices = call.in(ids, {n.B}, {.lowest = 0, .highest = n.R - 1, .distinct = true});
  p.seq_lens = call.in(ids, {n.B}, {0, n.L});
  p.lru_slots = call.inout(input.pick({DType::kInt16, DType::kInt32}), {n.R, hot}, {.lowest = 0, .highest = hot - 1, .distinct = true});
  if (input.chance(16)) p.item_size_bytes = input.pick<std::int64_t>({0, 1, n.item, -2, INT64_MAX, INT64_MIN});
  if (input.chance(16)) p.num_top_k = input.pick<std::int64_t>({0, 1, n.K, -2, INT64_MAX, INT64_MIN});
  if (input.chance(16)) p.hot_buffer_size = input.pick<std::int64_t>({0, 1, hot, -2, INT64_MAX, INT64_MIN});
  if (input.chance(16)) p.sparse_block_size = input.pick<std::int64_t>({0, 2, -1, INT64_MAX, INT64_MIN});
  if (input.flip()) p.num_real_reqs = call.in(DType::kInt32, {1}, {0, n.B});
  p.plan = plan(input, call, n, n.K * block);
  p.skip_io = input.chance(4);
  return call.run([&] { swap_in_single(p); });
}

int inside_sglangs_state(Input& input, Call& call, const Sizes& n) {
  const std::int64_t hot = n.H < n.R ? n.R : n.H, occurrences = n.S * n.K, scratch = input.integer(0, 4);
  SpecSwapParams p;
  p.top_k_tokens = call.in(DType::kInt32, {n.B, n.S, n.K}, {-1, n.L - 1});
  p.device_buffer_tokens = call.inout(DType::kInt32, {n.R, hot + n.P}, {-1, n.L - 1});
  p.host_cache_locs = call.in(DType::kInt64, {n.R, n.L}, {-1, n.host_rows - 1});
  p.device_buffer_locs = call.inout(DType::kInt32, {n.R, hot + n.P}, {.lowest = 0, .highest = n.device_rows - 1, .distinct = true});
  p.buffers = buffers(input, call, n, false);
  p.top_k_device_locs = call.out(DType::kInt32, {n.B, n.S, n.K});
  p.req_pool_indices = call.in(DType::kInt64, {n.B}, {.lowest = 0, .highest = n.R - 1, .distinct = true});
  p.seq_lens = call.in(DType::kInt32, {n.B * n.S}, {0, n.L});
  p.cache_index = call.inout(DType::kInt64, {n.R, 2, input.pick<std::int64_t>({1, 2, 4, 8, 16, 64})}, {-1, (1ll << 34) + 5});
  p.cache_policy = call.inout(DType::kInt32, {n.R + 1, hot}, {0, 9});
  p.scratch_locs = call.inout(DType::kInt32, {n.R, scratch}, {0, n.device_rows - 1});
  const std::int64_t width = 4 * n.R > 5 * occurrences ? 4 * n.R : 5 * occurrences;
  p.scratch_state = call.inout(DType::kInt32, {n.R + 1, width + width % 2}, {0, 9});
  p.num_real_reqs = call.in(DType::kInt32, {1}, {0, n.B});
  p.plan = plan(input, call, n, occurrences);
  using Limits = SpecSwapParams::Limits;
  p.limits = input.pick({Limits::kNone, Limits::kNone, Limits::kContract, Limits::kStrict});
  return call.run([&] { swap_in_spec(p); });
}

int replay(Input& input, Call& call, const Sizes& n) {
  ReplayPlanParams p;
  p.miss_src = call.in(DType::kInt64, {n.B, n.K}, {0, n.host_rows - 1});
  p.miss_dst = call.in(DType::kInt32, {n.B, n.K}, {0, n.device_rows - 1});
  p.miss_count = call.in(DType::kInt32, {n.B}, {0, n.K});
  if (input.flip()) p.num_real_reqs = call.in(DType::kInt32, {1}, {0, n.B});
  p.layout = input.chance(64) ? RowLayout::kDsv4Paged : RowLayout::kLinear;
  std::vector<KvBuffers> followers;
  for (std::int64_t i = input.integer(0, 2); i >= 0; --i) followers.push_back(buffers(input, call, n, p.layout == RowLayout::kDsv4Paged));
  p.followers = followers.data(), p.num_followers = static_cast<std::int64_t>(followers.size());
  if (input.chance(16)) p.item_size_bytes = input.pick<std::int64_t>({0, 1, n.item, -2, INT64_MAX, INT64_MIN});
  p.skip_io = input.chance(8);
  return call.run([&] { replay_plan(p); });
}

int transfer(Input& input, Call& call, const Sizes& n) {
  const DType ids = input.pick({DType::kInt32, DType::kInt64});
  TensorView src[2], dst[2];
  TransferPagedParams p;
  p.num_layers = input.integer(1, 2);
  for (std::int64_t l = 0; l < p.num_layers; ++l)
    src[l] = call.in(DType::kUInt8, {1, 37440}), dst[l] = call.inout(DType::kUInt8, {1, 37440});
  p.src = src, p.dst = dst;
  p.src_indices = call.in(ids, {n.K}, {0, 63});
  p.dst_indices = call.in(ids, {n.K}, {0, 63});
  return call.run([&] { transfer_paged(p); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  Call call(input);
  Sizes n{};
  n.B = input.integer(0, 3), n.S = input.integer(1, 4), n.K = input.integer(1, 6);
  n.R = n.B + input.integer(0, 2) + (n.B == 0);
  n.H = input.integer(1, 9), n.P = input.integer(0, 3), n.L = input.integer(1, 24);
  n.host_rows = input.integer(1, 16), n.item = input.integer(1, 40);
  n.device_rows = n.R * (n.H + n.P + 4 * n.K + 1);
  switch (input.integer(0, 40) % 10) {
    case 0:
    case 1:
    case 2: return native(input, call, n);
    case 3:
    case 4: return single(input, call, n);
    case 5:
    case 6: return inside_sglangs_state(input, call, n);
    case 7:
    case 8: return replay(input, call, n);
    default: return input.chance(8) ? transfer(input, call, n) : native(input, call, n);
  }
}
