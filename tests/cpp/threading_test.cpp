// Every parallel operation on executors of plain threads: the same bytes at any number of threads, and under ThreadSanitizer no race.
#include <gtest/gtest.h>
#include <unistd.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <cfenv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/numeric.hpp"
#include "cpu/matmul.hpp"
#include "cpu/parallel.hpp"
#include "runtime/synthetic.hpp"
#include "specstate/accept.hpp"
#include "specstate/draft_kv.hpp"
#include "specstate/hisparse.hpp"
#include "specstate/kda.hpp"
#include "specstate/runtime.hpp"
#include "thread_pool.hpp"

using namespace specstate;
using specstate::testing::InjectedExecutor;
using specstate::testing::ThreadPool;

namespace {

/// A dense tensor with its memory, of reproducible values.
struct Tensor {
  std::vector<std::byte> memory;
  TensorView view;
  operator const TensorView&() const { return view; }
};

Tensor zeros(DType dtype, std::initializer_list<std::int64_t> sizes) {
  Tensor t;
  t.view = TensorView(nullptr, dtype, sizes);
  t.memory.resize(static_cast<std::size_t>(t.view.numel() * size_of(dtype)));
  t.view.data = t.memory.data();
  return t;
}

Tensor floats(DType dtype, std::initializer_list<std::int64_t> sizes, std::uint32_t seed) {
  Tensor t = zeros(dtype, sizes);
  for (std::int64_t i = 0; i < t.view.numel(); ++i) {
    seed = seed * 1664525u + 1013904223u;
    const float x = static_cast<float>(seed >> 8) / static_cast<float>(1 << 23) - 1.0f;
    if (dtype == DType::kBFloat16)
      t.view.as<core::bfloat16>()[i] = core::from_float<core::bfloat16>(x);
    else
      t.view.as<float>()[i] = x;
  }
  return t;
}

template <class Integer>
Tensor integers(DType dtype, std::initializer_list<std::int64_t> sizes, const std::vector<Integer>& values) {
  Tensor t = zeros(dtype, sizes);
  std::memcpy(t.memory.data(), values.data(), std::min(t.memory.size(), values.size() * sizeof(Integer)));
  return t;
}

/// Runs `operation`, which returns all bytes that it wrote, at several thread counts; `parallel`: it must have asked for threads.
template <class F>
void same_bytes_at_any_thread_count(F&& operation, bool parallel = true) {
  std::vector<std::byte> want;
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    InjectedExecutor injected(pool);
    const std::vector<std::byte> got = operation();
    if (parallel) EXPECT_GT(pool.calls(), 0) << "the operation asked for no threads: a larger case is needed";
    if (threads == 1) want = got;
    ASSERT_EQ(got.size(), want.size());
    EXPECT_TRUE(std::memcmp(got.data(), want.data(), want.size()) == 0) << "other bytes at " << threads << " threads";
  }
}

TEST(Threads, MatrixProduct) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32})
    for (const std::int64_t rows : {1, 5, 19}) {
      const std::int64_t n = 3000, k = 257;
      const Tensor w = floats(dtype, {n, k}, 1), x = floats(DType::kFloat32, {rows, k}, 2);
      same_bytes_at_any_thread_count([&] {
        const cpu::PackedMatrix packed(w.view.data, n, k, dtype);  // packing is parallel, too
        Tensor y = zeros(DType::kFloat32, {rows, n});
        cpu::matmul(packed, x.view.as<float>(), k, rows, y.view.as<float>(), n);
        return y.memory;
      });
    }
}

TEST(Threads, DraftKvMaterializes) {
  const std::int64_t T = 13, L = 3, N = 2, D = 64, hidden = 96;
  const Tensor ctx = floats(DType::kBFloat16, {T, hidden}, 3), weight = floats(DType::kBFloat16, {L, 2 * N * D, hidden}, 4);
  const Tensor norm = floats(DType::kFloat32, {L, D}, 5), table = floats(DType::kFloat32, {32, D}, 6),
               eps = floats(DType::kFloat32, {L}, 7);
  for (std::int64_t l = 0; l < L; ++l) eps.view.as<float>()[l] = 1e-6f;
  std::vector<std::int32_t> slots;
  for (int t = 0; t < T; ++t) slots.push_back(t % 5 == 4 ? -1 : (t * 7) % 29);
  const Tensor mapping = integers(DType::kInt32, {T}, slots), positions = integers(DType::kInt32, {T}, std::vector<std::int32_t>(T, 9));
  same_bytes_at_any_thread_count([&] {
    Tensor k = zeros(DType::kBFloat16, {L, 29, N, D}), v = zeros(DType::kBFloat16, {L, 29, N, D});
    draft_kv::MaterializeIntoPoolParams p;
    p.ctx_hidden = ctx, p.kv_weight = weight, p.k_norm_weight = norm, p.eps = eps, p.cos_sin_cache = table;
    p.positions = positions, p.slot_mapping = mapping;
    p.k_pool = {&k.view, 1}, p.v_pool = {&v.view, 1};
    draft_kv::materialize_into_pool(p);
    k.memory.insert(k.memory.end(), v.memory.begin(), v.memory.end());
    return k.memory;
  });
}

struct KdaCall {
  static constexpr std::int64_t N = 3, W = 4, T = N * W, H = 2, HV = 4, D = 64;
  Tensor q = floats(DType::kFloat32, {T, H, D}, 11), k = floats(DType::kFloat32, {T, H, D}, 12),
         v = floats(DType::kFloat32, {T, HV, D}, 13);
  Tensor wq = floats(DType::kFloat32, {H * D, 4}, 14), wv = floats(DType::kFloat32, {HV * D, 4}, 15);
  Tensor csq = floats(DType::kFloat32, {N, H*D, 3}, 16), csk = floats(DType::kFloat32, {N, H*D, 3}, 17);
  Tensor csv = floats(DType::kFloat32, {N, HV*D, 3}, 18), g = floats(DType::kFloat32, {T, HV, D}, 19);
  Tensor beta = floats(DType::kFloat32, {T, HV}, 20), a_log = floats(DType::kFloat32, {HV}, 21),
         bias = floats(DType::kFloat32, {HV, D}, 22);
  Tensor state = floats(DType::kFloat32, {N, HV, D, D}, 23), out = zeros(DType::kFloat32, {T, HV, D});
  Tensor rawv = zeros(DType::kFloat32, {N, HV, W, D}), rawk = zeros(DType::kFloat32, {N, H, W, D});
  Tensor ring_g = zeros(DType::kFloat32, {N, HV, W, D}), ring_beta = zeros(DType::kFloat32, {N, HV, W});
  Tensor slots = integers(DType::kInt32, {N}, std::vector<std::int32_t>{2, 0, 1});
  Tensor cu = integers(DType::kInt32, {N + 1}, std::vector<std::int32_t>{0, 4, 8, 12});
  Tensor accept = integers(DType::kInt32, {N}, std::vector<std::int32_t>{1, 4, 3});

  void fill(kda::StepParams& p) {
    p.x_q = q, p.x_k = k, p.x_v = v, p.w_q = p.w_k = wq, p.w_v = wv, p.cs_q = csq, p.cs_k = csk, p.cs_v = csv;
    p.g = g, p.beta = beta, p.A_log = a_log, p.dt_bias = bias, p.state = state, p.slots = slots, p.cu_seqlens = cu, p.out = out;
    p.lower_bound = -5.0;
  }
  kda::Rings rings() const { return {rawv, rawk, ring_g, ring_beta}; }
  std::vector<std::byte> written() const {
    std::vector<std::byte> all;
    for (const Tensor* t : {&out, &state, &csq, &csk, &csv, &rawv, &rawk, &ring_g, &ring_beta})
      all.insert(all.end(), t->memory.begin(), t->memory.end());
    return all;
  }
};

TEST(Threads, KdaVerifiesAndFolds) {
  same_bytes_at_any_thread_count([] {
    KdaCall c;
    kda::VerifyParams p;
    c.fill(p);
    p.rings = c.rings();
    kda::verify(p);
    kda::FoldParams f;
    f.state = c.state, f.rings = c.rings(), f.slots = c.slots, f.accept = c.accept;
    kda::fold(f);
    return c.written();
  });
}

TEST(Threads, KdaDecodes) {
  same_bytes_at_any_thread_count([] {
    KdaCall c;
    kda::DecodeParams p;
    c.fill(p);
    kda::decode(p);
    return c.written();
  });
}

TEST(Threads, HisparseSwapsAndReplays) {
  constexpr std::int64_t B = 6, S = 2, K = 24, R = 7, H = 64, P = 2, L = 300, item = 1040, host_rows = R * L, device_rows = R * (H + P);
  const Tensor host = floats(DType::kFloat32, {host_rows, item / 4}, 31);
  std::vector<std::int32_t> picked, requests, lens(B * S, L), places;
  std::uint32_t seed = 5;
  for (int i = 0; i < B * S * K; ++i) picked.push_back(static_cast<std::int32_t>((seed = seed * 1664525u + 1013904223u) >> 8) % L);
  for (int b = 0; b < B; ++b) requests.push_back((b * 3 + 1) % R);
  for (int i = 0; i < R * L; ++i) places.push_back((i * 101) % static_cast<int>(host_rows));
  std::vector<std::int32_t> locs;
  for (int i = 0; i < device_rows; ++i) locs.push_back(i);
  const Tensor tokens = integers(DType::kInt32, {B, S, K}, picked), ids = integers(DType::kInt32, {B}, requests);
  const Tensor seq_lens = integers(DType::kInt32, {B, S}, lens), host_locs = integers(DType::kInt32, {R, L}, places);
  const hisparse::SwapShape shape{R, H, P, L};
  same_bytes_at_any_thread_count([&] {
    Tensor memory = zeros(DType::kUInt8, {hisparse::swap_state_bytes(shape) + 64});
    const auto address = reinterpret_cast<std::uintptr_t>(memory.view.data);
    const hisparse::SwapState state = hisparse::swap_state_view(shape, memory.memory.data() + (64 - address % 64));
    std::memcpy(state.slot_locs.data, locs.data(), locs.size() * sizeof(locs[0]));
    hisparse::reset_swap_state(state);
    Tensor device = zeros(DType::kFloat32, {device_rows, item / 4}), follower = zeros(DType::kFloat32, {device_rows, item / 4});
    Tensor out = zeros(DType::kInt32, {B, S, K}), src = zeros(DType::kInt64, {B, S * K}), dst = zeros(DType::kInt32, {B, S * K});
    Tensor count = zeros(DType::kInt32, {B});
    hisparse::SwapInParams p;
    p.top_k_tokens = tokens, p.seq_lens = seq_lens, p.req_pool_indices = ids, p.host_cache_locs = host_locs, p.state = state;
    p.buffers.host_cache = host, p.buffers.device_buffer = device, p.top_k_device_locs = out;
    p.plan = {src, dst, count};
    hisparse::swap_in(p);
    hisparse::KvBuffers other;
    other.host_cache = host, other.device_buffer = follower;
    hisparse::ReplayPlanParams r;
    r.miss_src = src, r.miss_dst = dst, r.miss_count = count, r.followers = &other, r.num_followers = 1;
    hisparse::replay_plan(r);
    std::vector<std::byte> all = out.memory;
    for (const Tensor* t : {&device, &follower, &count}) all.insert(all.end(), t->memory.begin(), t->memory.end());
    const auto* tables = static_cast<const std::byte*>(state.slot_tokens.data);
    all.insert(all.end(), tables, tables + state.slot_tokens.numel() * 4);
    EXPECT_EQ(device.memory, follower.memory);
    return all;
  });
}

TEST(Threads, AcceptanceRejects) {
  const std::int64_t b = 40, W = 3, V = 4096;
  Tensor target = floats(DType::kFloat32, {b, W, V}, 41), draft = floats(DType::kFloat32, {b, W - 1, V}, 42),
         u = floats(DType::kFloat32, {b, W}, 43);
  for (const Tensor* t : {&target, &draft, &u})
    for (std::int64_t i = 0; i < t->view.numel(); ++i) t->view.as<float>()[i] = std::abs(t->view.as<float>()[i]);
  std::vector<std::int32_t> proposals;
  for (int i = 0; i < b * W; ++i) proposals.push_back(i * 37 % static_cast<int>(V));
  const Tensor candidates = integers(DType::kInt32, {b, W}, proposals);
  same_bytes_at_any_thread_count([&] {
    Tensor lens = zeros(DType::kInt32, {b}), out = zeros(DType::kInt32, {b, W});
    accept::VerifyRejectionParams p;
    p.candidates = candidates, p.draft_probs = draft, p.target_probs = target, p.uniforms = u, p.accept_lens = lens, p.out_tokens = out;
    accept::verify_rejection(p);
    lens.memory.insert(lens.memory.end(), out.memory.begin(), out.memory.end());
    return lens.memory;
  });
}

// The whole engine: prefill in chunks, both drafters, verify, acceptance, commits; two prompts as one batch.
TEST(Threads, EngineGenerates) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / ("specstate_threads_" + std::to_string(::getpid()));
  runtime::write_synthetic_checkpoint(folder.string(), runtime::SyntheticShape{}, 3);
  for (const runtime::Mode mode : {runtime::Mode::kPlain, runtime::Mode::kDFlash, runtime::Mode::kDSpark})
    same_bytes_at_any_thread_count([&] {
      runtime::Engine engine(folder.string());
      runtime::GenerateOptions options;
      options.mode = mode;
      options.max_new_tokens = 12;
      options.chunk = 16;
      options.hot_slots = engine.top_k() + 4;
      std::vector<std::byte> all;
      for (const runtime::RequestReport& r :
           engine.generate({"a prompt of some length, longer than the selection", "another"}, options).requests) {
        const auto* tokens = reinterpret_cast<const std::byte*>(r.tokens.data());
        all.insert(all.end(), tokens, tokens + r.tokens.size() * sizeof(int));
        const auto* digest = reinterpret_cast<const std::byte*>(&r.state_digest);
        all.insert(all.end(), digest, digest + sizeof r.state_digest);
      }
      return all;
    });
  std::filesystem::remove_all(folder);
}

/// Bad modes of floating point for the thread that makes it, while it lives: rounds down, flushes subnormals where the machine can.
class HostileModes {
 public:
  HostileModes() {
    std::fegetenv(&before_);
    std::fesetround(FE_DOWNWARD);
#if defined(__SSE2__)
    _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
  }
  ~HostileModes() { std::fesetenv(&before_); }
  HostileModes(const HostileModes&) = delete;
  HostileModes& operator=(const HostileModes&) = delete;

 private:
  std::fenv_t before_;
};

/// Two threads, each with modes of its own.
class HostileExecutor final : public Executor {
 public:
  void parallel_for(std::int64_t n, std::int64_t grain, Body body, void* context) override {
    const std::int64_t half = std::min(n, std::max(grain, n / 2));
    std::thread other([&] {
      const HostileModes modes;
      body(context, 0, half);
    });
    if (half < n) body(context, half, n);
    other.join();
    ++calls;
  }
  int concurrency() const override { return 2; }
  int calls = 0;
};

template <class F>
void same_bytes_in_any_modes(F&& operation) {
  std::vector<std::byte> want;
  {
    ThreadPool calm(2);
    const InjectedExecutor injected(calm);
    want = operation();
  }
  HostileExecutor hostile;
  for (const bool caller : {false, true}) {
    const InjectedExecutor injected(hostile);
    std::optional<HostileModes> modes;
    if (caller) modes.emplace();
#if defined(__SSE2__)
    const unsigned before = _mm_getcsr() & 0xFFC0;
#endif
    const std::vector<std::byte> got = operation();
#if defined(__SSE2__)
    EXPECT_EQ(_mm_getcsr() & 0xFFC0, before) << "the caller's modes are the caller's";
#endif
    EXPECT_EQ(std::fegetround(), caller ? FE_DOWNWARD : FE_TONEAREST);
    ASSERT_EQ(got.size(), want.size());
    EXPECT_TRUE(std::memcmp(got.data(), want.data(), want.size()) == 0) << (caller ? "the caller's modes" : "a worker's modes");
  }
  EXPECT_GT(hostile.calls, 0);
}

TEST(Modes, MatrixProduct) {
  const std::int64_t n = 3000, k = 257;
  for (const std::int64_t rows : {1, 5}) {
    const Tensor w = floats(DType::kFloat32, {n, k}, 1), x = floats(DType::kFloat32, {rows, k}, 2);
    same_bytes_in_any_modes([&] {
      const cpu::PackedMatrix packed(w.view.data, n, k, DType::kFloat32);
      Tensor y = zeros(DType::kFloat32, {rows, n});
      cpu::matmul(packed, x.view.as<float>(), k, rows, y.view.as<float>(), n);
      return y.memory;
    });
  }
}

TEST(Modes, KdaDecodesSubnormalsToo) {
  KdaCall tiny;
  for (std::int64_t i = 0; i < tiny.state.view.numel(); ++i) tiny.state.view.as<float>()[i] *= 1e-38f;
  for (std::int64_t i = 0; i < tiny.v.view.numel(); ++i) tiny.v.view.as<float>()[i] *= 1e-38f;
  const std::vector<std::byte> state = tiny.state.memory;
  same_bytes_in_any_modes([&] {
    KdaCall c;
    c.state.memory = state, c.state.view.data = c.state.memory.data();
    kda::DecodeParams p;
    c.fill(p);
    kda::decode(p);
    return c.written();
  });
  same_bytes_in_any_modes([] {
    KdaCall c;
    kda::VerifyParams p;
    c.fill(p);
    p.scale = 0.1, p.rings = c.rings();
    kda::verify(p);
    return c.written();
  });
}

TEST(Executor, CoversTheRangeOnceWithPiecesOfTheGrain) {
  for (int threads : {1, 2, 3, 8})
    for (std::int64_t n : {0, 1, 2, 7, 64, 1000})
      for (std::int64_t grain : {1, 3, 64, 5000}) {
        ThreadPool pool(threads);
        InjectedExecutor injected(pool);
        std::vector<int> hits(static_cast<std::size_t>(n));
        std::atomic<int> small{0};
        cpu::parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
          if (end - begin < grain && end != n) ++small;
          for (std::int64_t i = begin; i < end; ++i) ++hits[static_cast<std::size_t>(i)];
        });
        EXPECT_EQ(hits, std::vector<int>(hits.size(), 1)) << threads << " threads, n " << n << ", grain " << grain;
        EXPECT_EQ(small, 0) << "a piece below the grain";
      }
}

TEST(Executor, TheBuiltInOneComesBack) {
  Executor& before = executor();
  {
    ThreadPool pool(2);
    InjectedExecutor injected(pool);
    EXPECT_EQ(&executor(), &pool);
    cpu::parallel_for(100, 1, [](std::int64_t, std::int64_t) {});
    EXPECT_EQ(pool.calls(), 1);
  }
  EXPECT_EQ(&executor(), &before);
  EXPECT_GE(before.concurrency(), 1);
}

}  // namespace
