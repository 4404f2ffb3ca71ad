#include "hisparse/check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <optional>

#include "core/dispatch.hpp"
#include "core/match.hpp"
#include "hisparse/layout.hpp"

namespace specstate::hisparse {

using core::Checker;
using core::Dim;
using core::Sym;
using core::throw_runtime;
using core::throw_value;

namespace {

constexpr const char* kTogether = "miss_src, miss_dst, and miss_count must be provided together.";

template <class T>
Strided1<T> strided1(const TensorView& t) {
  return t.given() ? Strided1<T>{static_cast<T*>(t.data), t.strides[0]} : Strided1<T>{};
}
template <class T>
Strided2<T> strided2(const TensorView& t) {
  return t.given() ? Strided2<T>{static_cast<T*>(t.data), t.strides[0], t.strides[1]} : Strided2<T>{};
}
template <class T>
Strided3<T> strided3(const TensorView& t) {
  return {static_cast<T*>(t.data), t.strides[0], t.strides[1], t.strides[2]};
}

/// May a dense tensor of other entries be read as rows back to back? Flat pools come with the size of a row, or by sglang's names; where
/// the size is inferred, other entries are a mistake that would move the wrong bytes.
enum class Flat { kRefused, kTaken };
Flat flat_of(std::int64_t item_bytes) { return item_bytes == kInfer ? Flat::kRefused : Flat::kTaken; }

/// Rows of one pool. A tensor whose entries are rows of `item` bytes may have any pitch.
RowBuffer rows_of(Checker& check, const char* name, const TensorView& t, std::int64_t item, bool paged, Flat flat) {
  RowBuffer b;
  b.base = static_cast<std::byte*>(t.data);
  const std::int64_t bytes = t.numel() * size_of(t.dtype);
  if (paged) {
    check.arg(name, t).inner_contiguous(t.ndim);
    if (bytes % layout::kPageBytes != 0) check.fail(name, "whole DSv4 pages of 37440 bytes", std::to_string(bytes) + " bytes");
    b.rows = bytes / layout::kPageBytes * layout::kPageRows;
    return b;
  }
  const std::int64_t inner = t.sizes[0] == 0 ? item : bytes / t.sizes[0];
  if (inner == item) {
    check.arg(name, t).inner_contiguous(t.ndim - 1);
    b.pitch = t.strides[0] * size_of(t.dtype);
    b.rows = t.sizes[0];
  } else {
    if (flat == Flat::kRefused || !t.contiguous() || bytes % item != 0)
      check.fail(name, fmt::format("rows of {} bytes", item), fmt::format("rows of {} bytes", inner));
    b.pitch = item;
    b.rows = bytes / item;
  }
  return b;
}

constexpr const char* kBufferNames[4] = {"host_cache", "device_buffer", "host_cache_v", "device_buffer_v"};

/// `item_bytes` kInfer: the bytes of a row of the first host cache.
CopyArgs copy_args(Checker& check, const KvBuffers& k, RowLayout row_layout, std::int64_t item_bytes, bool skip_io, Flat flat,
                   const char* const* names = kBufferNames) {
  CopyArgs c;
  c.paged = check_paged(check, row_layout);
  c.skip_io = skip_io;
  const bool second = k.host_cache_v.given() || k.device_buffer_v.given();
  if (c.paged && second) throw_value("DSv4 page-padded layout is K-only (MLA).");
  c.pairs = second ? 2 : 1;
  const TensorView* host[2] = {&k.host_cache, &k.host_cache_v};
  const TensorView* device[2] = {&k.device_buffer, &k.device_buffer_v};
  for (int i = 0; i < c.pairs; ++i) {
    check.arg(names[2 * i], *host[i]).required();
    check.arg(names[2 * i + 1], *device[i]).required().as_bytes().same_device().written();
    check.arg(names[2 * i], *host[i]).as_bytes();
    check.require(host[i]->ndim >= 1, names[2 * i], "at least one dimension", "shape ()");
    check.require(device[i]->ndim >= 1, names[2 * i + 1], "at least one dimension", "shape ()");
    // A CUDA call reads host rows from the GPU, which only pinned memory allows.
    if (check.device().type == DeviceType::kCuda) {
      if (!core::pinned(*host[i]))
        check.fail(names[2 * i], "pinned host memory",
                   host[i]->device.type == DeviceType::kCpu ? "pageable host memory" : name_of(host[i]->device));
    } else {
      check.arg(names[2 * i], *host[i]).as_bytes().same_device();
    }
  }
  if (c.paged) {
    check.require(item_bytes == kInfer || item_bytes == layout::kPagedRowBytes, "item_size_bytes", "584 for the DSv4 layout",
                  std::to_string(item_bytes));
    c.item_bytes = layout::kPagedRowBytes;
  } else {
    const TensorView& h = k.host_cache;
    c.item_bytes = item_bytes;
    if (item_bytes == kInfer) {
      std::int64_t elements = 1;
      for (int i = 1; i < h.ndim; ++i) elements *= h.sizes[i];
      c.item_bytes = elements * size_of(h.dtype);
      if (c.item_bytes < 1) check.fail(names[0], "rows of at least one byte", "shape " + shape_text(h));
    }
    if (c.item_bytes < 1) check.fail("item_size_bytes", ">= 1", std::to_string(item_bytes));
  }
  for (int i = 0; i < c.pairs; ++i) {
    c.host[i] = rows_of(check, names[2 * i], *host[i], c.item_bytes, c.paged, flat);
    c.device[i] = rows_of(check, names[2 * i + 1], *device[i], c.item_bytes, c.paged, flat);
  }
  check_item(check, names[0], c.item_bytes);
  return c;
}

std::int64_t min_rows(std::initializer_list<const TensorView*> tables) {
  std::int64_t n = INT64_MAX;
  for (const TensorView* t : tables) n = std::min(n, t->sizes[0]);
  return n;
}

void plan_together(const MissPlan& plan) {
  const bool all = plan.miss_src.given() && plan.miss_dst.given() && plan.miss_count.given();
  const bool none = !plan.miss_src.given() && !plan.miss_dst.given() && !plan.miss_count.given();
  if (!all && !none) throw_value(kTogether);
  if (none) return;
  if (plan.miss_src.dtype != DType::kInt64 || plan.miss_dst.dtype != DType::kInt32)
    throw_value("miss_src must be int64 and miss_dst must be int32.");
  if (plan.miss_count.dtype != DType::kInt32) throw_value("miss_count must be int32.");
}

/// What is left to check of a plan once its kind, dtypes and shape stand.
PlanArgs plan_args(Checker& check, const MissPlan& plan) {
  if (!plan.miss_src.given()) return {};
  check.arg("miss_src", plan.miss_src).same_device().written();
  check.arg("miss_dst", plan.miss_dst).same_device().written();
  check.arg("miss_count", plan.miss_count).same_device().written();
  return {strided2<std::int64_t>(plan.miss_src), strided2<std::int32_t>(plan.miss_dst), strided1<std::int32_t>(plan.miss_count)};
}

void plan_shape(Checker& check, const MissPlan& plan, std::int64_t batch, std::int64_t occurrences) {
  check.arg("miss_src", plan.miss_src).shape({Dim::at_least(batch, "B"), Dim::at_least(occurrences, "M")});
  check.arg("miss_dst", plan.miss_dst).shape({Dim::at_least(batch, "B"), Dim::at_least(occurrences, "M")});
  check.arg("miss_count", plan.miss_count).shape({Dim::at_least(batch, "B")});
}

bool strides_differ(const MissPlan& plan) { return plan.miss_src.given() && plan.miss_src.strides[0] != plan.miss_dst.strides[0]; }

}  // namespace

LayerNames::LayerNames(const std::string& before, const std::string& after) {
  for (int k = 0; k < 4; ++k) names_[k] = (text_[k] = before + kBufferNames[k] + after).c_str();
}

CopyArgs check_buffers(Checker& check, const LayerNames& names, const KvBuffers& buffers, RowLayout row_layout) {
  check.arg(names[1], buffers.device_buffer).required().as_bytes().same_device();
  const CopyArgs args = copy_args(check, buffers, row_layout, kInfer, false, Flat::kRefused, names);
  check.arg(names[0], buffers.host_cache).as_bytes().written();
  check.arg(names[2], buffers.host_cache_v).as_bytes().written();
  return args;
}

void check_count(const Checker& check, const char* name, const TensorView& list) {
  if (list.sizes[0] > INT32_MAX) check.fail(name, fmt::format("at most {} entries", INT32_MAX), "shape " + shape_text(list));
}

void check_item(const Checker& check, const char* name, std::int64_t bytes) {
  if (bytes > INT32_MAX) check.fail(name, fmt::format("rows of at most {} bytes", INT32_MAX), fmt::format("rows of {} bytes", bytes));
}

bool check_paged(Checker& check, RowLayout layout) {
  if (layout != RowLayout::kLinear && layout != RowLayout::kDsv4Paged)
    check.fail("layout", "kLinear (0) or kDsv4Paged (1)", std::to_string(static_cast<int>(layout)));
  return layout == RowLayout::kDsv4Paged;
}

const std::int32_t* check_num_real(Checker& check, const TensorView& t) {
  if (!t.given()) return nullptr;
  check.arg("num_real_reqs", t).dtype(DType::kInt32).same_device();
  if (t.ndim > 1 || t.numel() < 1) check.fail("num_real_reqs", "shape [1]", shape_text(t));
  return t.as<const std::int32_t>();
}

std::int64_t check_sm_budget(Checker& check, std::int64_t sm_budget) {
  check.require(sm_budget >= 0, "sm_budget", "0 (any number) or more SMs", std::to_string(sm_budget));
  return sm_budget;
}

void check_occurrences(std::int64_t steps, std::int64_t top_k) {
  if (top_k > 0 && steps > kMaxOccurrences / top_k)
    throw_value(fmt::format("HiSparse speculative swap supports at most {} occurrences.", kMaxOccurrences));
}

bool same_view(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.ndim == b.ndim && std::equal(a.sizes, a.sizes + std::max(0, a.ndim), b.sizes) &&
         std::equal(a.strides, a.strides + std::max(0, a.ndim), b.strides);
}

namespace {
bool same_buffers(const KvBuffers& a, const KvBuffers& b) {
  return same_view(a.host_cache, b.host_cache) && same_view(a.device_buffer, b.device_buffer) &&
         same_view(a.host_cache_v, b.host_cache_v) && same_view(a.device_buffer_v, b.device_buffer_v);
}

/// The layers that a plan is replayed on. A layer that is named twice, or that is the `anchor`, gets the same bytes twice. Any other two are apart: one's
/// rows must not be lost under the other's. `names` live as long as the checker.
std::vector<CopyArgs> follower_args(Checker& check, const KvBuffers* layers, std::int64_t n, const KvBuffers* anchor, const char* before,
                                    RowLayout row_layout, std::int64_t item_bytes, bool skip_io, Flat flat, std::deque<LayerNames>& names) {
  check.array("followers", layers, "num_followers", n);
  std::vector<CopyArgs> followers;
  for (std::int64_t i = 0; i < n; ++i) {
    names.emplace_back(before, n == 1 ? "" : fmt::format("[{}]", i));
    const auto same = [&](const KvBuffers& b) { return same_buffers(b, layers[i]); };
    std::optional<Checker> alone;
    if ((anchor != nullptr && same(*anchor)) || std::any_of(layers, layers + i, same)) alone.emplace(check);
    followers.push_back(copy_args(alone ? *alone : check, layers[i], row_layout, item_bytes, skip_io, flat, names.back()));
  }
  return followers;
}
}  // namespace

// -------------------------------------------------------------------------------------------------------------- swap_in

SwapInArgs check(const SwapInParams& p, std::vector<CopyArgs>& followers) {
  Checker check("swap_in");
  Sym B("B"), S("S"), K("K"), R("R"), L("L"), H("H"), W("H+P");
  check.arg("top_k_tokens", p.top_k_tokens).required().dtype(DType::kInt32).shape({B, S, K}).same_device();
  check_occurrences(S, K);
  check.arg("seq_lens", p.seq_lens).required().dtype({DType::kInt32, DType::kInt64}).shape({B, S}).same_device();
  check.arg("req_pool_indices", p.req_pool_indices).required().dtype({DType::kInt32, DType::kInt64}).shape({B}).same_device();
  check_count(check, "req_pool_indices", p.req_pool_indices);
  SwapInArgs a{};
  a.op = "swap_in";
  a.locs_name = "state.slot_locs";
  a.scratch_name = "scratch_locs";
  a.num_real = check_num_real(check, p.num_real_reqs);
  a.sm_budget = check_sm_budget(check, p.sm_budget);
  check.arg("host_cache_locs", p.host_cache_locs).required().dtype({DType::kInt32, DType::kInt64}).shape({R, L}).same_device();
  const SwapState& s = p.state;
  check.arg("state.slot_tokens", s.slot_tokens).required().dtype(DType::kInt32).shape({R, W}).same_device().written();
  check.arg("state.slot_locs", s.slot_locs).required().dtype(DType::kInt32).shape({R, W}).same_device();
  check.arg("state.slot_stamps", s.slot_stamps).required().dtype(DType::kInt32).shape({R, H}).same_device().written();
  if (H < 1 || H > W) check.fail("state.slot_stamps", fmt::format("1 to {} hot slots", W.value()), shape_text(s.slot_stamps));
  check.arg("state.token_slots", s.token_slots).required().dtype({DType::kInt16, DType::kInt32}).shape({R, L}).same_device().written();
  if (s.token_slots.dtype == DType::kInt16)
    check.require(H <= layout::kMaxShortSlots, "state.token_slots", "dtype int32 for more than 32767 hot slots", "int16");
  check.arg("state.clock", s.clock).required().dtype(DType::kInt32).shape({R}).same_device().written();
  check.arg("scratch_locs", p.scratch_locs).dtype(DType::kInt32).shape({R, Dim::any("C")}).same_device();
  check.arg("top_k_device_locs", p.top_k_device_locs).required().dtype(DType::kInt32).shape({B, S, K}).same_device().written();
  plan_together(p.plan);
  plan_shape(check, p.plan, B, S * K);
  a.plan = plan_args(check, p.plan);
  for (const auto& [name, t] : {std::pair{"unique_misses", &p.unique_misses}, std::pair{"unique_hits", &p.unique_hits}})
    check.arg(name, *t).dtype(DType::kInt32).shape({Dim::at_least(B, "B")}).same_device().written();
  a.copy = copy_args(check, p.buffers, p.layout, kInfer, p.skip_io, Flat::kRefused);
  std::deque<LayerNames> names;
  followers =
      follower_args(check, p.followers, p.num_followers, &p.buffers, "follower_", p.layout, kInfer, p.skip_io, Flat::kRefused, names);
  if (!followers.empty()) check.require(p.plan.miss_src.given(), "miss_src", "a plan for the followers", "none");
  const std::int64_t host_rows = a.copy.host_rows(), device_rows = a.copy.device_rows();
  const char* const host_of = kBufferNames[a.copy.host[0].rows > host_rows ? 2 : 0];
  const char* const device_of = kBufferNames[a.copy.device[0].rows > device_rows ? 3 : 1];
  for (std::size_t i = 0; i < followers.size(); ++i) {
    const auto enough = [&](const char* name, std::int64_t rows, std::int64_t least, const char* of) {
      if (rows < least) check.fail(name, fmt::format("at least the {} rows of {}", least, of), std::to_string(rows));
    };
    for (int k = 0; k < followers[i].pairs; ++k) {
      enough(names[i][2 * k], followers[i].host[k].rows, host_rows, host_of);
      enough(names[i][2 * k + 1], followers[i].device[k].rows, device_rows, device_of);
    }
  }
  check.outputs_apart();

  a.tokens = strided3<const std::int32_t>(p.top_k_tokens);
  a.out = strided3<std::int32_t>(p.top_k_device_locs);
  a.seq_lens = integers(p.seq_lens);
  a.requests = integers(p.req_pool_indices);
  a.host_locs = integers(p.host_cache_locs);
  a.slot_tokens = strided2<std::int32_t>(s.slot_tokens);
  a.slot_locs = strided2<std::int32_t>(s.slot_locs);
  a.scratch_locs = strided2<std::int32_t>(p.scratch_locs);
  a.scratch = p.scratch_locs.given() ? p.scratch_locs.sizes[1] : 0;
  a.stamps = strided2<std::int32_t>(s.slot_stamps);
  a.token_slots = integers(s.token_slots);
  a.clock = strided1<std::int32_t>(s.clock);
  a.unique_misses = strided1<std::int32_t>(p.unique_misses);
  a.unique_hits = strided1<std::int32_t>(p.unique_hits);
  a.batch = B;
  a.steps = S;
  a.top_k = K;
  a.request_slots = R;
  a.context = L;
  a.hot = H;
  a.tail = W - H;
  return a;
}

void check_reset(const SwapState& s, const TensorView& requests) {
  Checker check("reset_swap_state");
  Sym R("R"), L("L"), H("H"), W("H+P");
  check.arg("state.slot_tokens", s.slot_tokens).required().dtype(DType::kInt32).shape({R, W}).same_device().written();
  check.arg("state.slot_locs", s.slot_locs).same_device();  // never written, and so not to be hit by the others
  check.arg("state.slot_stamps", s.slot_stamps).required().dtype(DType::kInt32).shape({R, H}).same_device().written();
  if (H > W) check.fail("state.slot_stamps", fmt::format("at most {} hot slots", W.value()), shape_text(s.slot_stamps));
  check.arg("state.token_slots", s.token_slots).required().dtype({DType::kInt16, DType::kInt32}).shape({R, L}).same_device().written();
  check.arg("state.clock", s.clock).required().dtype(DType::kInt32).shape({R}).same_device().written();
  check.arg("requests", requests).dtype({DType::kInt32, DType::kInt64}).ndim(1).same_device();
  // A broadcast list may be longer than anyone waits for.
  if (requests.given() && requests.sizes[0] > R)
    check.fail("requests", fmt::format("at most R={} request ids", R.value()), shape_text(requests));
  check.outputs_apart();
}

// -------------------------------------------------------------------------------------------------- sglang's spec swap

SpecSwapArgs check(const SpecSwapParams& p) {
  constexpr const char* op = "load_cache_to_device_buffer_spec_mla";
  using Limits = SpecSwapParams::Limits;
  Checker check(op);
  Sym B("B"), S("S"), K("K"), L("L"), W("H+P");
  // sglang's order: the Python wrapper's checks, then the limits of the compiled kernel, then those of its C++ side.
  check.arg("top_k_tokens", p.top_k_tokens)
      .required()
      .text("speculative top_k_tokens must have shape [batch, steps, top_k].")
      .shape({B, S, K});
  if (S < 1 || (p.limits != Limits::kNone && (S < 2 || S > 4)))
    throw_value(fmt::format("HiSparse speculative swap requires 2-4 steps, got {}.", S.value()));
  check.arg("top_k_tokens", p.top_k_tokens).dtype(DType::kInt32).same_device();
  check.arg("cache_policy", p.cache_policy).required();
  plan_together(p.plan);
  const std::int64_t occurrences = S * K;
  if (p.plan.miss_src.given()) {
    const TensorView &src = p.plan.miss_src, &dst = p.plan.miss_dst, &count = p.plan.miss_count;
    if (src.ndim != 2 || dst.ndim != 2 || src.sizes[0] < B || dst.sizes[0] < B || src.sizes[1] < occurrences || dst.sizes[1] < occurrences)
      throw_value(fmt::format("speculative miss_src/miss_dst must have shape [batch, >= steps * top_k] (capacity {}).", occurrences));
    if (count.ndim != 1 || count.sizes[0] < B) throw_value("speculative miss_count must have shape [batch].");
    if (strides_differ(p.plan)) throw_value("miss_src/miss_dst row strides must match.");
  }
  check_occurrences(S, K);
  const char* const policy_text = "speculative cache_policy must contain one CLOCK control row and one reference-epoch row per request.";
  if (p.cache_policy.ndim != 2) throw_runtime(policy_text);
  const std::int64_t H = p.cache_policy.sizes[1];
  if (p.limits == Limits::kStrict) {
    if (K < 1024) throw_value("HiSparse speculative swap requires top_k >= 1024.");
    if (occurrences > 8192) throw_value("HiSparse speculative swap supports at most 8192 occurrences.");
    if (H < 2) throw_value("speculative hot buffer must contain at least two slots.");
    if (H > 32768) throw_value("speculative CLOCK cursor requires hot_buffer_size <= 32768.");
    if ((H & (H - 1)) != 0) throw_value(fmt::format("HiSparse hot_size must be a power of two >= {}, got {}.", K.value(), H));
    if (p.scratch_locs.ndim == 2 && p.scratch_locs.sizes[1] == 0)
      throw_value("speculative scratch_locs must have shape [num_requests, scratch_capacity].");
  }
  if (H < 1) check.fail("state.cache_policy", "at least one hot slot", shape_text(p.cache_policy));

  check.arg("top_k_device_locs", p.top_k_device_locs).required();
  if (p.top_k_device_locs.ndim != 3) throw_runtime("speculative output must have shape [batch, steps, top_k].");
  check.arg("top_k_device_locs", p.top_k_device_locs).dtype(DType::kInt32).shape({B, S, K}).same_device().written();
  check.arg("state.cache_index", p.cache_index).required();
  if (p.cache_index.ndim != 3 || p.cache_index.sizes[1] != 2)
    throw_runtime("speculative cache_index must have shape [num_requests, 2, hash_size].");
  const std::int64_t Z = p.cache_index.sizes[2];
  if (Z <= 0 || (Z & (Z - 1)) != 0) throw_runtime("ring hash capacity must be a power of two.");
  check.arg("state.scratch_locs", p.scratch_locs).required();
  if (p.scratch_locs.ndim != 2) throw_runtime("speculative scratch_locs must have shape [num_requests, scratch_capacity].");
  const std::int64_t R = p.scratch_locs.sizes[0];
  if (p.cache_index.sizes[0] < R) throw_runtime("speculative cache_index request capacity is smaller than scratch_locs.");
  if (p.cache_policy.sizes[0] < R + 1) throw_runtime(policy_text);
  // Row 0 of cache_policy holds one element a request.
  if (R > H) throw_value("HiSparse spec request capacity must not exceed device_buffer_size.");
  check.arg("state.scratch_state", p.scratch_state).required();
  if (p.scratch_state.ndim != 2 || p.scratch_state.sizes[0] < R + 1 || p.scratch_state.sizes[1] < 4 * R ||
      p.scratch_state.sizes[1] < 5 * occurrences)
    throw_runtime("speculative scratch_state must contain one counter row and one miss-metadata row per request.");
  if (p.scratch_state.strides[0] % 2 != 0) throw_runtime("speculative scratch metadata stride must be 64-bit aligned.");
  check.arg("state.cache_index", p.cache_index).dtype(DType::kInt64).same_device().written();
  check.arg("state.cache_policy", p.cache_policy).dtype(DType::kInt32).same_device().written();
  check.arg("state.scratch_locs", p.scratch_locs).dtype(DType::kInt32).same_device();
  check.arg("state.scratch_state", p.scratch_state).dtype(DType::kInt32).same_device().written();

  check.arg("host_cache_locs", p.host_cache_locs).required().shape({Dim::any("R"), L});
  if (L > std::int64_t{1} << 31)
    throw_runtime(
        fmt::format("speculative packed ring metadata supports sequence lengths up to {}, got {}", std::int64_t{1} << 31, L.value()));
  check.arg("host_cache_locs", p.host_cache_locs).dtype(DType::kInt64).same_device();
  check.arg("device_buffer_tokens", p.device_buffer_tokens)
      .required()
      .dtype(DType::kInt32)
      .shape({Dim::any("R"), W})
      .same_device()
      .written();
  if (W < H)
    check.fail("device_buffer_tokens", fmt::format("at least {} columns (the width of cache_policy)", H),
               shape_text(p.device_buffer_tokens));
  check.arg("device_buffer_locs", p.device_buffer_locs).required().dtype(DType::kInt32).shape({Dim::any("R"), W}).same_device();
  check.arg("req_pool_indices", p.req_pool_indices).required().dtype(DType::kInt64).shape({B}).same_device();
  check_count(check, "req_pool_indices", p.req_pool_indices);
  Sym BS("B*S", B * S);
  check.arg("seq_lens", p.seq_lens).required().dtype(DType::kInt32).shape({BS}).same_device();
  check.arg("num_real_reqs", p.num_real_reqs).required();

  SpecSwapArgs a{};
  a.op = op;
  a.locs_name = "device_buffer_locs";
  a.scratch_name = "state.scratch_locs";
  a.num_real = check_num_real(check, p.num_real_reqs);
  a.sm_budget = check_sm_budget(check, p.sm_budget);
  a.plan = plan_args(check, p.plan);
  a.copy = copy_args(check, p.buffers, RowLayout::kLinear, kInfer, false, Flat::kTaken);
  check.outputs_apart();
  a.tokens = strided3<const std::int32_t>(p.top_k_tokens);
  a.out = strided3<std::int32_t>(p.top_k_device_locs);
  a.seq_lens = {p.seq_lens.data, S * p.seq_lens.strides[0], p.seq_lens.strides[0], 4};
  a.requests = integers(p.req_pool_indices);
  a.host_locs = integers(p.host_cache_locs);
  a.slot_tokens = strided2<std::int32_t>(p.device_buffer_tokens);
  a.slot_locs = strided2<std::int32_t>(p.device_buffer_locs);
  a.index = strided3<std::int64_t>(p.cache_index);
  a.policy = strided2<std::int32_t>(p.cache_policy);
  a.scratch_locs = strided2<std::int32_t>(p.scratch_locs);
  a.scratch_state = strided2<std::int32_t>(p.scratch_state);
  a.hash_size = Z;
  a.scratch = p.scratch_locs.sizes[1];
  a.counter_requests = R;
  a.batch = B;
  a.steps = S;
  a.top_k = K;
  a.request_slots = std::min(R, min_rows({&p.device_buffer_tokens, &p.device_buffer_locs, &p.host_cache_locs}));
  a.context = L;
  a.hot = H;
  a.tail = W - H;
  return a;
}

// ---------------------------------------------------------------------------------------------------------- single step

SwapInSingleArgs check(const SwapInSingleParams& p) {
  Checker check(p.op);
  Sym B("B"), L("L");
  const std::int64_t block = p.sparse_block_size;
  check.require(block >= 1, "sparse_block_size", ">= 1", std::to_string(block));
  check.arg("top_k_tokens", p.top_k_tokens).required().ndim(2);
  check.arg("lru_slots", p.lru_slots).required().ndim(2);
  const std::int64_t H = p.hot_buffer_size != kInfer ? p.hot_buffer_size : p.lru_slots.sizes[1];
  const std::int64_t entries = p.num_top_k != kInfer ? p.num_top_k : p.top_k_tokens.sizes[1];
  if (static_cast<__int128>(entries) * block > H)
    throw_value(block > 1 ? fmt::format("hot_buffer_size ({}) must be >= selected tokens ({})", H, static_cast<__int128>(entries) * block)
                          : fmt::format("hot_buffer_size ({}) must be >= num_top_k ({})", H, entries));
  check.require(entries >= 0, "num_top_k", ">= 0", std::to_string(entries));
  check.require(H >= 1, "hot_buffer_size", ">= 1", std::to_string(H));
  const std::int64_t K = entries * block;
  check.arg("top_k_tokens", p.top_k_tokens).dtype(DType::kInt32).shape({B, Dim(entries)}).same_device();
  check.arg("lru_slots", p.lru_slots).dtype({DType::kInt16, DType::kInt32});
  check.arg("lru_slots", p.lru_slots).shape({Dim::any("R"), Dim(H)}).same_device().written();
  plan_together(p.plan);
  plan_shape(check, p.plan, B, K);
  if (p.one_plan_stride && strides_differ(p.plan)) throw_value("load_cache_to_device_buffer: miss_src/miss_dst row strides differ");
  check.arg("device_buffer_tokens", p.device_buffer_tokens)
      .required()
      .dtype(DType::kInt32)
      .shape({Dim::any("R"), Dim::at_least(H + 1, "H+P")})
      .same_device()
      .written();
  check.arg("device_buffer_locs", p.device_buffer_locs)
      .required()
      .dtype(DType::kInt32)
      .shape({Dim::any("R"), Dim::at_least(H + 1, "H+P")})
      .same_device();
  check.arg("host_cache_locs", p.host_cache_locs).required().dtype(DType::kInt64).shape({Dim::any("R"), L}).same_device();
  check.arg("top_k_device_locs", p.top_k_device_locs).required().dtype(DType::kInt32).same_device().written();
  check.arg("top_k_device_locs", p.top_k_device_locs).shape({B, block > 1 ? Dim::at_least(K, "K") : Dim(K)});
  check.arg("req_pool_indices", p.req_pool_indices).required().dtype({DType::kInt32, DType::kInt64}).shape({B}).same_device();
  check.arg("seq_lens", p.seq_lens).required().dtype({DType::kInt32, DType::kInt64}).shape({B}).same_device();

  check_count(check, "req_pool_indices", p.req_pool_indices);

  SwapInSingleArgs a{};
  a.op = p.op;
  a.num_real = check_num_real(check, p.num_real_reqs);
  a.sm_budget = check_sm_budget(check, p.sm_budget);
  a.plan = plan_args(check, p.plan);
  a.copy = copy_args(check, p.buffers, p.layout, p.item_size_bytes, p.skip_io, flat_of(p.item_size_bytes));
  check.outputs_apart();
  a.selection = strided2<const std::int32_t>(p.top_k_tokens);
  a.out = strided2<std::int32_t>(p.top_k_device_locs);
  a.seq_lens = integers(p.seq_lens);
  a.requests = integers(p.req_pool_indices);
  a.host_locs = integers(p.host_cache_locs);
  a.slot_tokens = strided2<std::int32_t>(p.device_buffer_tokens);
  a.slot_locs = strided2<std::int32_t>(p.device_buffer_locs);
  a.lru = integers(p.lru_slots);
  a.batch = B;
  a.top_k = K;
  a.block = block;
  a.request_slots = min_rows({&p.device_buffer_tokens, &p.device_buffer_locs, &p.host_cache_locs, &p.lru_slots});
  a.context = L;
  a.hot = H;
  return a;
}

// ------------------------------------------------------------------------------------------------- replay and transfer

ReplayPlanArgs check(const ReplayPlanParams& p, std::vector<CopyArgs>& followers) {
  Checker check(p.op);
  check.arg("miss_src", p.miss_src).required();
  check.arg("miss_dst", p.miss_dst).required();
  check.arg("miss_count", p.miss_count).required();
  plan_together({p.miss_src, p.miss_dst, p.miss_count});
  check.arg("miss_src", p.miss_src).ndim(2).same_device();
  check.arg("miss_dst", p.miss_dst).ndim(2).same_device();
  check.arg("miss_count", p.miss_count).ndim(1).same_device();
  if (p.one_plan_stride && p.miss_src.strides[0] != p.miss_dst.strides[0])
    throw_runtime("copy_cache_planned: miss_src/miss_dst row strides differ");
  ReplayPlanArgs a{};
  a.op = p.op;
  a.num_real = check_num_real(check, p.num_real_reqs);
  a.sm_budget = check_sm_budget(check, p.sm_budget);
  a.src = strided2<const std::int64_t>(p.miss_src);
  a.dst = strided2<const std::int32_t>(p.miss_dst);
  a.count = strided1<const std::int32_t>(p.miss_count);
  a.batch = min_rows({&p.miss_src, &p.miss_dst, &p.miss_count});
  a.capacity = std::min(p.miss_src.sizes[1], p.miss_dst.sizes[1]);
  // A broadcast plan may be longer than anyone waits for. One of the tables must have entries of its own.
  for (const auto& [d, n] : {std::pair{0, a.batch}, {1, a.capacity}})
    if (n > 1 && p.miss_src.strides[d] == 0 && p.miss_dst.strides[d] == 0)
      check.fail("miss_dst", fmt::format("{} of their own (miss_src has none)", d == 0 ? "rows" : "pairs"),
                 fmt::format("stride 0 for shape {}", shape_text(p.miss_dst)));
  check_paged(check, p.layout);
  std::deque<LayerNames> names;
  followers = follower_args(check, p.followers, p.num_followers, nullptr, "", p.layout, p.item_size_bytes, p.skip_io,
                            flat_of(p.item_size_bytes), names);
  check.arg("arrived", p.arrived).dtype(DType::kInt32).shape({p.num_followers}).same_device().written();
  a.arrived = strided1<std::int32_t>(p.arrived);
  check.outputs_apart();
  return a;
}

AwaitFollowerArgs check(const AwaitFollowerParams& p) {
  Checker check("await_follower");
  check.arg("arrived", p.arrived).required().dtype(DType::kInt32).ndim(1).same_device().written();
  if (p.arrived.sizes[0] < 1) check.fail("arrived", "the sign of at least one follower", "shape " + shape_text(p.arrived));
  check.require(0 <= p.follower && p.follower < p.arrived.sizes[0], "follower", fmt::format("0 to {}", p.arrived.sizes[0] - 1),
                std::to_string(p.follower));
  return {p.arrived.as<std::int32_t>() + p.follower * p.arrived.strides[0]};
}

TransferArgs check(const TransferPagedParams& p, std::vector<TransferLayer>& layers) {
  Checker check("transfer_paged");
  Sym N("N");
  check.arg("src_indices", p.src_indices).required().dtype({DType::kInt32, DType::kInt64}).shape({N}).same_device();
  check.arg("dst_indices", p.dst_indices).required().dtype(p.src_indices.dtype).shape({N}).same_device();
  check_count(check, "src_indices", p.src_indices);
  layers.clear();
  check.array("src", p.src, "num_layers", p.num_layers);
  check.array("dst", p.dst, "num_layers", p.num_layers);
  std::deque<std::string> names;
  for (std::int64_t i = 0; i < p.num_layers; ++i) {
    const std::string &src = names.emplace_back(fmt::format("src[{}]", i)), &dst = names.emplace_back(fmt::format("dst[{}]", i));
    const bool within = same_view(p.src[i], p.dst[i]);  // rows move inside one buffer: that is one argument
    for (const auto& [name, t] : {std::pair{(within ? dst : src).c_str(), &p.src[i]}, std::pair{dst.c_str(), &p.dst[i]}}) {
      check.arg(name, *t).required().as_bytes();
      check.require(t->ndim >= 1, name, "at least one dimension", "shape ()");
      // Backups go from the device to pinned memory and back: either end may be host memory.
      if (check.device().type == DeviceType::kCpu || t->device.type == DeviceType::kCuda)
        check.arg(name, *t).as_bytes().same_device();
      else
        check.require(core::pinned(*t), name, "pinned host memory", "pageable host memory");
    }
    check.arg(dst.c_str(), p.dst[i]).as_bytes().written();
    const RowBuffer a = rows_of(check, src.c_str(), p.src[i], 0, true, Flat::kRefused),
                    b = rows_of(check, dst.c_str(), p.dst[i], 0, true, Flat::kRefused);
    layers.push_back({a.base, b.base, a.rows, b.rows});
  }
  check.outputs_apart();
  return {integers(p.src_indices), integers(p.dst_indices), N, check.op(), check_sm_budget(check, p.sm_budget)};
}

TransferArgs check(const TransferPagedPointersParams& p, std::vector<TransferLayer>& layers) {
  Checker check("transfer_cache_dsv4_mla");
  Sym L("num_layers"), N("num_items");
  check.arg("src_ptrs", p.src_ptrs).required().dtype({DType::kUInt64, DType::kInt64}).shape({L}).same_device();
  check.arg("dst_ptrs", p.dst_ptrs).required().dtype({DType::kUInt64, DType::kInt64}).shape({L}).same_device();
  check.arg("src_indices", p.src_indices).required().dtype(DType::kInt64).shape({N}).same_device();
  check.arg("dst_indices", p.dst_indices).required().dtype(DType::kInt64).shape({N}).same_device();
  check_count(check, "src_indices", p.src_indices);
  layers.clear();
  if (N > 0 && core::host_reads(p.src_ptrs)) {  // on a GPU the addresses are the kernel's to read
    for (std::int64_t i = 0; i < L; ++i) {
      const auto src = p.src_ptrs.as<const std::uint64_t>()[i * p.src_ptrs.strides[0]];
      const auto dst = p.dst_ptrs.as<const std::uint64_t>()[i * p.dst_ptrs.strides[0]];
      if (src == 0) check.fail("src_ptrs", "addresses", fmt::format("0 at [{}]", i));
      if (dst == 0) check.fail("dst_ptrs", "addresses", fmt::format("0 at [{}]", i));
      layers.push_back({reinterpret_cast<const std::byte*>(src), reinterpret_cast<std::byte*>(dst), -1, -1});
    }
  }
  TransferArgs a{integers(p.src_indices), integers(p.dst_indices), N, check.op(), check_sm_budget(check, p.sm_budget)};
  if (check.device().type == DeviceType::kCuda) {
    a.src_ptrs = integers(p.src_ptrs);
    a.dst_ptrs = integers(p.dst_ptrs);
    a.pointer_layers = L;
  }
  return a;
}

}  // namespace specstate::hisparse
