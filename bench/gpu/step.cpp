// One speculative step's state operations at the scale of a large hybrid model, on synthetic weights and a synthetic router: 69 KDA layers of 12
// local heads, 24 sparse-MLA layers of 576-byte rows (top-k 2048 of 4096 hot slots, one anchor for four layers, 100 distinct misses a request and
// anchor), a drafter of 6 layers with a window of 4096 tokens, 8 tokens a verify of which 4 stand.
//
// A graph holds 20 steps, so that every step sees other misses and its data as cold as 19 steps leave them; four selections take turns between replays, so that
// a missing position comes back after 80 steps, when any cache of twice our slots has lost it too. Followers' copies run on a
// second stream behind their anchor's swap, on four multiprocessors, and each layer waits for its own rows. Of many requests they are one call a group, and a
// layer awaits its rows; an empty kernel stands where an anchor's attention is, so that the copies have their multiprocessors before the next verify takes
// all others; likewise the windows' stores to the host have six, beside the fold. Of a few requests, whose verifies leave multiprocessors free, each follower is
// a call of its own with an event behind it, which costs less. Behind the acceptance the windows' backup and commit and the draft's KV run beside the states'
// commit. The shares are graphs of one kind of operation alone.
#include <algorithm>
#include <memory>
#include <numeric>
#include <random>

#include "bench/gpu/gpu.hpp"
#include "cuda/launch.hpp"
#include "specstate/accept.hpp"
#include "specstate/draft_kv.hpp"
#include "specstate/hisparse.hpp"
#include "specstate/hisparse_steps.hpp"
#include "specstate/kda.hpp"
#include "specstate/supports.hpp"

namespace specstate::bench {

namespace {

using i64 = std::int64_t;
using i32 = std::int32_t;
std::size_t at(i64 i) { return static_cast<std::size_t>(i); }
constexpr Device kGpu{DeviceType::kCuda, 0, false};

constexpr i64 kSteps = 8, kAccepted = 4, kRepeats = 20, kVariants = 4;
constexpr i64 kKdaLayers = 69, kHeads = 12, kDim = 128;
constexpr i64 kSparseLayers = 24, kGroup = 4, kAnchors = kSparseLayers / kGroup, kTopK = 2048, kHot = 4096, kTail = 2 * kSteps, kRow = 576;
constexpr i64 kMisses = 100,
              kCore = 2300;  // core: positions that every step selects from
constexpr i64 kDraftLayers = 6, kDraftHeads = 8, kDraftHidden = 7168, kDraftWindow = 4096;
constexpr i64 kFollowerSms = 4;  // multiprocessors that the followers' copies may take from the layers beside them
constexpr i64 kWindowSms = 6;    // and that the windows' way to the host may take from the fold
constexpr i64 kFewRequests = 8;  // that leave multiprocessors free

// kFoldApart: where folds are deferred, a fold behind the verifies all the same.
enum Part : unsigned {
  kWindows = 1,
  kSwap = 2,
  kFollow = 4,
  kVerify = 8,
  kCommit = 16,
  kDraft = 32,
  kAccept = 64,
  kAll = 127,
  kFoldApart = 128
};

/// Three streams and the events between them: layers; followers' copies, then windows; the draft's KV.
class Streams {
 public:
  Streams() {
    for (cudaStream_t* x : {&main, &copies, &draft}) SPECSTATE_CUDA_CHECK(cudaStreamCreateWithFlags(x, cudaStreamNonBlocking));
    for (cudaEvent_t& e : events_) SPECSTATE_CUDA_CHECK(cudaEventCreate(&e));
  }
  ~Streams() {
    for (const cudaEvent_t e : events_) cudaEventDestroy(e);
    for (const cudaStream_t x : {main, copies, draft}) cudaStreamDestroy(x);
  }
  Streams(const Streams&) = delete;
  /// What `stream` has now.
  cudaEvent_t mark(cudaStream_t stream) {
    const cudaEvent_t e = events_[next_++ % kEvents];
    SPECSTATE_CUDA_CHECK(cudaEventRecord(e, stream));
    return e;
  }
  /// What is enqueued in `then` from here on comes after what `first` has now.
  void order(cudaStream_t first, cudaStream_t then) { SPECSTATE_CUDA_CHECK(cudaStreamWaitEvent(then, mark(first))); }

  cudaStream_t main = nullptr, copies = nullptr, draft = nullptr;

 private:
  static constexpr unsigned kEvents = 16;  // more than are waited for at once
  cudaEvent_t events_[kEvents] = {};
  unsigned next_ = 0;
};

/// All memory of one size of batch.
class World {
 public:
  World(i64 requests, i64 context) : B_(requests), L_(context) {
    sparse();
    kda();
    draft();
  }
  i64 state_bytes() const { return state_bytes_; }
  /// Whether windows can be opened and accepted on the GPU in this build.
  bool has_windows() const { return has_windows_; }

  /// Whether a step's fold waits for the next step's verifies (`pending`), which then move the states twice and not three times: where verifies have it
  /// inside. Of few requests it would be a kernel in front of each.
  bool defers() const { return B_ > kFewRequests; }

  /// Enqueues one step's operations of these parts.
  void step(unsigned parts, int repeat, Streams& s) {
    const Stream main{s.main};
    const bool deferred = defers() && !(parts & kFoldApart);
    parts &= kAll;
    const bool windows = parts & kWindows && has_windows_, apart = parts == kAll;
    if (windows) hisparse::open_window(open_, main);
    // Where verifies take every multiprocessor, the followers' copies are one call, which keeps its own.
    const bool awaited = apart && B_ > kFewRequests;
    i64 sparse_layer = 0;
    cudaEvent_t there[kGroup - 1] = {};
    for (i64 l = 0; l < kKdaLayers + kSparseLayers; ++l) {
      // Three KDA layers, then a sparse one; the last layer is sparse too.
      const bool is_sparse = l % 4 == 3 || l == kKdaLayers + kSparseLayers - 1;
      if (!is_sparse) {
        if (!(parts & kVerify)) continue;
        kda::VerifyParams p = verify_[at(l - sparse_layer)];
        if (deferred) p.pending = pending_[l - sparse_layer];
        kda::verify(p, main);
        continue;
      }
      const i64 anchor = sparse_layer / kGroup, place = sparse_layer++ % kGroup;
      if (place > 0) {
        if (parts & kFollow && awaited) hisparse::await_follower({arrived_, place - 1}, main);
        if (parts & kFollow && !awaited) SPECSTATE_CUDA_CHECK(cudaStreamWaitEvent(s.main, there[place - 1]));
        continue;
      }
      if (parts & kSwap) {
        swap_[at(anchor)].top_k_tokens.data = selections_->data<i32>() + repeat * B_ * kSteps * kTopK;
        hisparse::swap_in(swap_[at(anchor)], main);
      }
      if (!(parts & kFollow)) continue;
      s.order(s.main, s.copies);
      hisparse::ReplayPlanParams some = replay_[at(anchor)];
      some.sm_budget = apart ? kFollowerSms : 0;
      if (awaited) {
        some.arrived = arrived_;
        hisparse::replay_plan(some, {s.copies});
        empty_kernel(s.main);
        continue;
      }
      // Beside layers each follower in a call of its own, so that its layer waits for it alone.
      some.num_followers = apart ? 1 : kGroup - 1;
      for (i64 f = 0; f < kGroup - 1; f += some.num_followers, some.followers += some.num_followers) {
        hisparse::replay_plan(some, {s.copies});
        for (i64 k = 0; k < some.num_followers; ++k) there[f + k] = s.mark(s.copies);
      }
    }
    if (parts & kAccept) accept::verify_greedy(greedy_, main);
    // What follows an acceptance needs that alone. Of many requests the windows' stores to the host have a few multiprocessors of their own, before the fold
    // takes the others: beside them everything is slow, and they would hold up the draft.
    if (apart) s.order(s.main, s.copies);
    accept_window_.sm_budget = awaited ? kWindowSms : 0;
    if (windows) hisparse::accept_window(accept_window_, {apart ? s.copies : s.main});
    if (awaited) empty_kernel(s.main);
    if (apart) s.order(s.main, s.draft);
    if (parts & kDraft) draft_kv::materialize_into_pool(materialize_, {apart ? s.draft : s.main});
    if (deferred && parts & (kVerify | kCommit)) kda::defer_fold(defer_, main);  // verifies measured alone need something that waits, too
    if (parts & kCommit) {
      if (!deferred) kda::fold(fold_, main);
      kda::rollback_conv_windows(rollback_.data(), static_cast<i64>(rollback_.size()), main);
    }
    if (apart) s.order(s.copies, s.main), s.order(s.draft, s.main);
  }
  /// What the next graph selects; before each replay.
  void next(cudaStream_t s) {
    const GpuArray& v = *variants_[at(replays_++ % kVariants)];
    SPECSTATE_CUDA_CHECK(cudaMemcpyAsync(selections_->data(), v.data(), v.bytes(), cudaMemcpyDeviceToDevice, s));
  }
  /// Committed lengths back to where a graph starts.
  void rewind(cudaStream_t s) const {
    SPECSTATE_CUDA_CHECK(cudaMemcpyAsync(lengths_->data(), start_->data(), start_->bytes(), cudaMemcpyDeviceToDevice, s));
  }
  void expect_misses() const {
    std::vector<i32> n(at(B_));
    for (const auto& u : unique_) {
      SPECSTATE_CUDA_CHECK(cudaMemcpy(n.data(), u.data, n.size() * 4, cudaMemcpyDeviceToHost));
      for (const i32 x : n)
        if (x != kMisses)
          throw Error(ErrorKind::kInternal, "internal error: a step of the benchmark misses " + std::to_string(x) + " rows");
    }
  }

 private:
  GpuArray& memory(i64 bytes, bool state = false) {
    if (state) state_bytes_ += bytes;
    return *memory_.emplace_back(std::make_unique<GpuArray>(at(std::max<i64>(bytes, 1))));
  }
  template <class T>
  TensorView array(DType dtype, std::initializer_list<i64> shape, const std::vector<T>& values, bool state = false) {
    GpuArray& a = memory(static_cast<i64>(values.size() * sizeof(T)), state);
    a.set(values);
    return a.view(dtype, shape);
  }
  TensorView bf16(std::initializer_list<i64> shape, bool state = false) {
    i64 n = 1;
    for (const i64 s : shape) n *= s;
    GpuArray& a = memory(n * 2, state);
    a.fill_bfloat16(1, static_cast<unsigned>(memory_.size()));
    return a.view(DType::kBFloat16, shape);
  }
  TensorView f32(std::initializer_list<i64> shape, bool state = false) {
    i64 n = 1;
    for (const i64 s : shape) n *= s;
    GpuArray& a = memory(n * 4, state);
    a.fill_float32(1, static_cast<unsigned>(memory_.size()));
    return a.view(DType::kFloat32, shape);
  }

  void sparse() {
    static GpuArray pool(std::size_t{1} << 30, GpuArray::Place::kPinned);  // rows of all layers; many positions share one
    const i64 host_rows = static_cast<i64>(pool.bytes()) / kRow / kSparseLayers, W = kHot + kTail;
    for (i64 l = 0; l < kSparseLayers; ++l) {
      hisparse::KvBuffers b;
      b.host_cache = TensorView(pool.data<char>() + l * host_rows * kRow, DType::kUInt8, {host_rows, kRow}, {DeviceType::kCpu, 0, true});
      b.device_buffer = memory(B_ * W * kRow, true).view(DType::kUInt8, {B_ * W, kRow});
      buffers_.push_back(b);
    }
    std::mt19937 random(1);
    std::vector<i64> rows(at(B_ * L_)), ids(at(B_));
    for (i64& r : rows) r = static_cast<i64>(random()) % host_rows;
    std::iota(ids.begin(), ids.end(), 0);
    const TensorView locs = array(DType::kInt64, {B_, L_}, rows, true), requests = array(DType::kInt64, {B_}, ids),
                     lens = array(DType::kInt32, {B_, kSteps}, std::vector<i32>(at(B_ * kSteps), static_cast<i32>(L_)));
    for (i64 variant = 0; variant < kVariants; ++variant) {
      std::vector<i32> t;
      for (i64 repeat = 0; repeat < kRepeats; ++repeat)
        for (i64 s = 0; s < kSteps; ++s) {
          std::vector<i32> row;
          const i64 fresh = 2 * kHot + (variant * kRepeats + repeat) * kMisses;
          for (i64 i = kMisses * s / kSteps; i < kMisses * (s + 1) / kSteps; ++i) row.push_back(static_cast<i32>(fresh + i));
          for (i64 i = 0; static_cast<i64>(row.size()) < kTopK; ++i) row.push_back(static_cast<i32>((i + 137 * s + 31 * repeat) % kCore));
          std::shuffle(row.begin(), row.end(), random);
          t.insert(t.end(), row.begin(), row.end());
        }
      // The same of every request: their host rows differ.
      std::vector<i32> all;
      for (i64 repeat = 0; repeat < kRepeats; ++repeat)
        for (i64 b = 0; b < B_; ++b) all.insert(all.end(), t.begin() + repeat * kSteps * kTopK, t.begin() + (repeat + 1) * kSteps * kTopK);
      variants_.push_back(&memory(static_cast<i64>(all.size()) * 4));
      variants_.back()->set(all);
    }
    selections_ = &memory(static_cast<i64>(variants_[0]->bytes()));
    next(nullptr);

    const hisparse::SwapShape shape{B_, kHot, kTail, L_};
    struct alignas(64) Line {
      std::byte bytes[64];
    };
    std::vector<Line> block(at((hisparse::swap_state_bytes(shape) + 63) / 64));
    hisparse::SwapState host = hisparse::swap_state_view(shape, block.data());
    hisparse::reset_swap_state(host);
    for (i64 b = 0; b < B_; ++b)
      for (i64 s = 0; s < W; ++s) {
        host.slot_locs.as<i32>()[b * W + s] = static_cast<i32>(b * W + s);
        if (s >= kHot) continue;
        host.slot_tokens.as<i32>()[b * W + s] = static_cast<i32>(s);
        host.token_slots.as<std::int16_t>()[b * L_ + s] = static_cast<std::int16_t>(s);
      }
    arrived_ = array(DType::kInt32, {kGroup - 1}, std::vector<i32>(kGroup - 1));
    for (i64 a = 0; a < kAnchors; ++a) {
      GpuArray& state = memory(static_cast<i64>(block.size() * sizeof(Line)), true);
      state.set(block);
      hisparse::SwapInParams& p = swap_.emplace_back();
      p.state = hisparse::swap_state_view(shape, state.data(), kGpu);
      p.top_k_tokens = selections_->view(DType::kInt32, {B_, kSteps, kTopK});
      p.seq_lens = lens, p.req_pool_indices = requests, p.host_cache_locs = locs, p.buffers = buffers_[at(a * kGroup)];
      p.top_k_device_locs = memory(B_ * kSteps * kTopK * 4).view(DType::kInt32, {B_, kSteps, kTopK});
      p.plan.miss_src = memory(B_ * kSteps * kTopK * 8).view(DType::kInt64, {B_, kSteps * kTopK});
      p.plan.miss_dst = memory(B_ * kSteps * kTopK * 4).view(DType::kInt32, {B_, kSteps * kTopK});
      p.plan.miss_count = array(DType::kInt32, {B_}, std::vector<i32>(at(B_)));
      p.unique_misses = array(DType::kInt32, {B_}, std::vector<i32>(at(B_)));
      unique_.push_back(p.unique_misses);
      hisparse::ReplayPlanParams& r = replay_.emplace_back();
      r.miss_src = p.plan.miss_src, r.miss_dst = p.plan.miss_dst, r.miss_count = p.plan.miss_count;
      r.followers = buffers_.data() + a * kGroup + 1, r.num_followers = kGroup - 1;
      groups_.push_back({p.state, buffers_.data() + a * kGroup, kGroup});
    }
    // Committed lengths grow by 4 a step; a graph of 20 steps ends below the context.
    const std::vector<i32> begin(at(B_), static_cast<i32>(L_ - kRepeats * kSteps - kSteps));
    start_ = &memory(B_ * 4), lengths_ = &memory(B_ * 4);
    start_->set(begin), lengths_->set(begin);
    open_.groups = accept_window_.groups = groups_.data(), open_.num_groups = accept_window_.num_groups = kAnchors;
    open_.requests = accept_window_.requests = requests;
    open_.widths = accept_window_.widths = array(DType::kInt32, {B_}, std::vector<i32>(at(B_), kSteps));
    open_.lengths = accept_window_.lengths = lengths_->view(DType::kInt32, {B_});
    open_.locs = memory(B_ * kSteps * 4).view(DType::kInt32, {B_, kSteps});
    accepted_ = accept_window_.accepted = array(DType::kInt32, {B_}, std::vector<i32>(at(B_), kAccepted));
    accept_window_.reserved_rows = accept_window_.host_cache_locs = locs;
    has_windows_ =
        refusal([&] { hisparse::open_window(open_); }).empty() && refusal([&] { hisparse::accept_window(accept_window_); }).empty();
  }

  void kda() {
    const i64 T = B_ * kSteps, C = kHeads * kDim, N = B_;
    const auto act = [&] { return bf16({T, kHeads, kDim}); };
    kda::VerifyParams p;
    // Activations are the work of the layer before, so one set serves all layers; weights are each layer's own.
    p.x_q = act(), p.x_k = act(), p.x_v = act(), p.g = act(), p.onorm_gate = act(), p.out = act();
    p.beta = bf16({T, kHeads}), p.onorm_eps = 1e-5, p.lower_bound = -5.0;
    std::vector<i32> slots(at(N)), cu(at(N + 1));
    std::iota(slots.begin(), slots.end(), 0);
    for (i64 b = 0; b <= N; ++b) cu[at(b)] = static_cast<i32>(b * kSteps);
    p.slots = array(DType::kInt32, {N}, slots), p.cu_seqlens = array(DType::kInt32, {N + 1}, cu);
    const TensorView state = f32({kKdaLayers, N, kHeads, kDim, kDim}, true), cs = bf16({kKdaLayers, N, 3, 3 * C}, true),
                     windows = bf16({kKdaLayers, N, kSteps, 3, 3 * C}, true);
    const kda::Rings rings{bf16({kKdaLayers, N, kHeads, kSteps, kDim}, true), bf16({kKdaLayers, N, kHeads, kSteps, kDim}, true),
                           f32({kKdaLayers, N, kHeads, kSteps, kDim}, true), f32({kKdaLayers, N, kHeads, kSteps}, true)};
    // Channels are contiguous, taps apart: [.., 3, 3C] seen as [.., C, 3].
    const auto part = [&](TensorView t, int which, i64 channels) {
      t.data = static_cast<char*>(t.data) + which * C * 2;
      const int n = t.ndim;
      std::swap(t.sizes[n - 1], t.sizes[n - 2]), std::swap(t.strides[n - 1], t.strides[n - 2]);
      t.sizes[n - 2] = channels;
      return t;
    };
    const TensorView last = array(DType::kInt32, {N}, std::vector<i32>(at(N), kAccepted - 1));
    for (i64 l = 0; l < kKdaLayers; ++l) {
      p.w_q = f32({C, 4}), p.w_k = f32({C, 4}), p.w_v = f32({C, 4});
      p.A_log = f32({kHeads}), p.dt_bias = f32({kHeads, kDim}), p.onorm_weight = f32({kDim});
      p.state = state[l];
      p.rings = {rings.rawv[l], rings.rawk[l], rings.g[l], rings.beta[l]};
      p.cs_q = part(cs[l], 0, C), p.cs_k = part(cs[l], 1, C), p.cs_v = part(cs[l], 2, C);
      p.conv_q = part(windows[l], 0, C), p.conv_k = part(windows[l], 1, C), p.conv_v = part(windows[l], 2, C);
      verify_.push_back(p);
      kda::RollbackConvWindowsParams& r = rollback_.emplace_back();
      r.pool = part(cs[l], 0, 3 * C), r.windows = part(windows[l], 0, 3 * C), r.slots = p.slots, r.last_correct_step = last;
    }
    fold_.state = state, fold_.rings = rings, fold_.slots = p.slots, fold_.accept = accepted_;
    pending_ = array(DType::kInt32, {kKdaLayers, N}, std::vector<i32>(at(kKdaLayers * N)), true);
    defer_.pending = pending_, defer_.slots = p.slots, defer_.accept = accepted_;
  }

  void draft() {
    const i64 T = B_ * kSteps, columns = 2 * kDraftHeads * kDim, rows = B_ * (kDraftWindow + 16);
    auto& p = materialize_;
    p.ctx_hidden = bf16({T, kDraftHidden});
    p.kv_weight = bf16({kDraftLayers, columns, kDraftHidden}), p.k_norm_weight = bf16({kDraftLayers, kDim});
    p.eps = array(DType::kFloat32, {kDraftLayers}, std::vector<float>(kDraftLayers, 1e-6f));
    p.cos_sin_cache = f32({L_, kDim});
    std::vector<i64> slots(at(T)), positions(at(T));
    for (i64 i = 0; i < T; ++i) slots[at(i)] = i / kSteps * (kDraftWindow + 16) + i % kSteps, positions[at(i)] = L_ - 16 + i % kSteps;
    p.positions = array(DType::kInt64, {B_, kSteps}, positions), p.slot_mapping = array(DType::kInt64, {B_, kSteps}, slots);
    p.commit_lens = array(DType::kInt64, {B_}, std::vector<i64>(at(B_), kAccepted));
    k_pool_ = bf16({kDraftLayers, rows, kDraftHeads, kDim}, true), v_pool_ = bf16({kDraftLayers, rows, kDraftHeads, kDim}, true);
    p.k_pool = {&k_pool_, 1}, p.v_pool = {&v_pool_, 1};
    const i64 bytes = draft_kv::materialize_workspace_bytes(p);
    if (bytes > 0) p.workspace = memory(bytes).view(DType::kUInt8, {bytes});

    std::vector<i64> candidates(at(T), 7), target(at(T), 7);
    for (i64 b = 0; b < B_; ++b) target[at(b * kSteps + kAccepted - 1)] = 9;  // the fourth choice differs: four tokens stand
    greedy_.candidates = array(DType::kInt64, {B_, kSteps}, candidates), greedy_.target_argmax = array(DType::kInt64, {B_, kSteps}, target);
    greedy_.accept_lens = accepted_, greedy_.out_tokens = array(DType::kInt64, {B_, kSteps}, candidates);
  }

  i64 B_, L_, state_bytes_ = 0;
  bool has_windows_ = false;
  std::vector<std::unique_ptr<GpuArray>> memory_;
  std::vector<hisparse::KvBuffers> buffers_;
  std::vector<hisparse::SwapInParams> swap_;
  std::vector<hisparse::ReplayPlanParams> replay_;
  std::vector<hisparse::WindowGroup> groups_;
  hisparse::OpenWindowParams open_;
  hisparse::AcceptWindowParams accept_window_;
  std::vector<GpuArray*> variants_;
  int replays_ = 0;
  GpuArray *selections_ = nullptr, *start_ = nullptr, *lengths_ = nullptr;
  std::vector<TensorView> unique_;
  TensorView arrived_, accepted_, pending_, k_pool_, v_pool_;
  std::vector<kda::VerifyParams> verify_;
  std::vector<kda::RollbackConvWindowsParams> rollback_;
  kda::FoldParams fold_;
  kda::DeferFoldParams defer_;
  draft_kv::MaterializeIntoPoolParams materialize_;
  accept::VerifyGreedyParams greedy_;
};

/// A graph of 20 steps of some parts.
class Steps {
 public:
  Steps(World& world, unsigned parts) : world_(world) {
    for (cudaEvent_t* e : {&begin_, &end_}) SPECSTATE_CUDA_CHECK(cudaEventCreate(e));
    cudaGraph_t graph;
    SPECSTATE_CUDA_CHECK(cudaStreamBeginCapture(streams_.main, cudaStreamCaptureModeThreadLocal));
    world.rewind(streams_.main);
    for (int i = 0; i < kRepeats; ++i) world.step(parts, i, streams_);
    SPECSTATE_CUDA_CHECK(cudaStreamEndCapture(streams_.main, &graph));
    SPECSTATE_CUDA_CHECK(cudaGraphInstantiate(&graph_, graph, 0));
    SPECSTATE_CUDA_CHECK(cudaGraphDestroy(graph));
  }
  ~Steps() {
    cudaGraphExecDestroy(graph_);
    for (const cudaEvent_t e : {begin_, end_}) cudaEventDestroy(e);
  }
  Steps(const Steps&) = delete;
  /// Microseconds a step.
  double us() const {
    world_.next(streams_.main);
    SPECSTATE_CUDA_CHECK(cudaEventRecord(begin_, streams_.main));
    SPECSTATE_CUDA_CHECK(cudaGraphLaunch(graph_, streams_.main));
    SPECSTATE_CUDA_CHECK(cudaEventRecord(end_, streams_.main));
    SPECSTATE_CUDA_CHECK(cudaEventSynchronize(end_));
    float ms = 0;
    SPECSTATE_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1e3 / static_cast<double>(kRepeats);
  }

 private:
  World& world_;
  Streams streams_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

void run(Report& report) {
  Gpu gpu(report);
  const std::vector<std::pair<std::string, unsigned>> every{
      {"all", kAll},           {"swap", kSwap},         {"swap_and_follow", kSwap | kFollow},
      {"kda_verify", kVerify}, {"kda_commit", kCommit}, {"draft_kv", kDraft},
      {"windows", kWindows},   {"accept", kAccept},     {"all_fold_apart", kAll | kFoldApart}};
  std::vector<std::pair<i64, i64>> sizes{{1, 131072}, {8, 131072}, {32, 131072}, {64, 32768}};
  if (report.quick()) sizes = {{1, 32768}};
  for (const auto& [requests, context] : sizes) {
    World world(requests, context);
    SPECSTATE_CUDA_CHECK(cudaDeviceSynchronize());
    auto parts = every;
    if (!world.defers()) parts.pop_back();
    std::vector<std::unique_ptr<Steps>> graphs;
    for (const auto& [name, bits] : parts) graphs.push_back(std::make_unique<Steps>(world, bits));
    std::vector<std::vector<double>> samples(parts.size());
    const int rounds = report.quick() ? 1 : requests > 8 ? 7 : 15;
    for (int round = -2; round < rounds; ++round)  // the first two reach the steady state of misses
      for (std::size_t i = 0; i < parts.size(); ++i) {
        if (parts[i].second == kWindows && !world.has_windows()) continue;
        const double us = graphs[i]->us();
        if (round >= 0) samples[i].push_back(us);
        if (i == 0) world.expect_misses();
      }
    const Report::Keys keys{{"context", std::to_string(context)}, {"requests", std::to_string(requests)}};
    // A gather for each swap, whose rows nobody knows before it is called; and for each plan, with the followers' rows.
    const double link = kAnchors * gpu.host_gather_us(requests * kMisses, kRow),
                 links = kAnchors * gpu.host_gather_us(kGroup * requests * kMisses, kRow);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (samples[i].empty()) continue;
      Result r;
      // The lowest: other work only ever adds, and where the host's memory is busy it adds much (a graph's launches come from there).
      r.ours_us = *std::min_element(samples[i].begin(), samples[i].end());
      if (parts[i].second & kSwap) {
        r.floor_us = parts[i].second & kFollow ? links : link;
        r.floor = "bare gathers of the rows that miss, one for each plan, measured";
      }
      if (i == 0) r.more = {{"state_bytes", static_cast<double>(world.state_bytes())}, {"windows", world.has_windows() ? 1.0 : 0.0}};
      report.add(parts[i].first, keys, r);
    }
  }
}

const bool registered = add_gpu_family("step", run);

}  // namespace

}  // namespace specstate::bench
