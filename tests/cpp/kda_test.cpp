// KDA: random calls. What must hold bit for bit: against one head at a time, other executors, other instruction sets.
#include "specstate/kda.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "core/dispatch.hpp"
#include "core/numeric.hpp"
#include "hwy/targets.h"
#include "kda/layout.hpp"
#include "specstate/error.hpp"
#include "specstate/executor.hpp"
#include "specstate/supports.hpp"

using namespace specstate;
using namespace specstate::kda;

namespace {

/// A call with memory of its own; float32, chain, ring and snapshots.
struct Case {
  std::int64_t H, G, K, V, pool;
  bool scalar_gate, safe, norm;
  std::vector<std::int32_t> cu, slots;
  std::vector<float> q, k, v, w_q, w_k, w_v, cs_q, cs_k, cs_v, g, beta, a_log, bias, state, gate, weight;
  std::vector<float> out, rawv, rawk, ring_g, ring_beta, snapshots, conv_q, conv_k, conv_v;
  std::int64_t longest = 1;

  std::int64_t tokens() const { return cu.back(); }
  std::int64_t requests() const { return static_cast<std::int64_t>(slots.size()); }
  std::int64_t hv() const { return H * G; }
  std::int64_t gates() const { return scalar_gate ? 1 : K; }

  Case(unsigned seed, std::int64_t h, std::int64_t group, std::int64_t key, std::int64_t value, std::vector<int> lens, bool scalar,
       bool safe_gate, bool with_norm)
      : H(h),
        G(group),
        K(key),
        V(value),
        pool(static_cast<std::int64_t>(lens.size()) + 2),
        scalar_gate(scalar),
        safe(safe_gate),
        norm(with_norm) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& x, std::int64_t n, float scale = 1) {
      x.resize(static_cast<std::size_t>(n));
      for (float& y : x) y = scale * normal(rng);
    };
    cu.push_back(0);
    for (int n : lens) cu.push_back(cu.back() + n), longest = std::max<std::int64_t>(longest, n);
    slots.resize(static_cast<std::size_t>(pool));
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), rng);
    slots.resize(lens.size());
    const std::int64_t T = tokens(), N = requests(), HV = hv();
    fill(q, T * H * K), fill(k, T * H * K), fill(v, T * HV * V);
    fill(w_q, H * K * 4, .3f), fill(w_k, H * K * 4, .3f), fill(w_v, HV * V * 4, .3f);
    fill(cs_q, pool * H * K * 3), fill(cs_k, pool * H * K * 3), fill(cs_v, pool * HV * V * 3);
    fill(g, T * HV * gates()), fill(beta, T * HV), fill(a_log, HV, .5f), fill(bias, HV * gates());
    fill(state, pool * HV * V * K), fill(gate, T * HV * V), fill(weight, V);
    out.assign(static_cast<std::size_t>(T * HV * V), NAN);
    const auto poison = [](std::vector<float>& x, std::int64_t n) { x.assign(static_cast<std::size_t>(n), NAN); };
    poison(rawv, pool * HV * longest * V), poison(rawk, pool * H * longest * K);
    poison(ring_g, pool * HV * longest * gates()), poison(ring_beta, pool * HV * longest);
    poison(snapshots, N * longest * HV * V * K);
    poison(conv_q, N * longest * H * K * 3), poison(conv_k, N * longest * H * K * 3), poison(conv_v, N * longest * HV * V * 3);
  }

  static TensorView floats(std::vector<float>& x, std::initializer_list<std::int64_t> shape) { return {x.data(), DType::kFloat32, shape}; }

  void step(StepParams& p) {
    const std::int64_t T = tokens(), N = requests(), HV = hv();
    p.x_q = floats(q, {T, H, K}), p.x_k = floats(k, {T, H, K}), p.x_v = floats(v, {T, HV, V});
    p.w_q = floats(w_q, {H * K, 4}), p.w_k = floats(w_k, {H * K, 4}), p.w_v = floats(w_v, {HV * V, 4});
    p.cs_q = floats(cs_q, {pool, H * K, 3}), p.cs_k = floats(cs_k, {pool, H * K, 3}), p.cs_v = floats(cs_v, {pool, HV * V, 3});
    p.g = scalar_gate ? floats(g, {T, HV}) : floats(g, {T, HV, K});
    p.dt_bias = scalar_gate ? floats(bias, {HV}) : floats(bias, {HV, K});
    p.beta = floats(beta, {T, HV}), p.A_log = floats(a_log, {HV}), p.state = floats(state, {pool, HV, V, K});
    p.slots = {slots.data(), DType::kInt32, {N}}, p.cu_seqlens = {cu.data(), DType::kInt32, {N + 1}};
    p.out = floats(out, {T, HV, V});
    if (safe) p.lower_bound = -5.0;
    if (norm) p.onorm_gate = floats(gate, {T, HV, V}), p.onorm_weight = floats(weight, {V}), p.onorm_eps = 1e-5;
  }
  Rings rings() {
    const std::int64_t HV = hv(), L = longest;
    return {floats(rawv, {pool, HV, L, V}), floats(rawk, {pool, H, L, K}),
            scalar_gate ? floats(ring_g, {pool, HV, L}) : floats(ring_g, {pool, HV, L, K}), floats(ring_beta, {pool, HV, L})};
  }
  VerifyParams verify_params() {
    VerifyParams p;
    step(p);
    p.rings = rings();
    p.snapshots = floats(snapshots, {requests(), longest, hv(), V, K});
    p.conv_q = floats(conv_q, {requests(), longest, H * K, 3}), p.conv_k = floats(conv_k, {requests(), longest, H * K, 3});
    p.conv_v = floats(conv_v, {requests(), longest, hv() * V, 3});
    return p;
  }
  /// Every output, one behind the other.
  std::vector<float> run() {
    verify(verify_params());
    std::vector<float> all;
    for (const auto* x : {&out, &rawv, &rawk, &ring_g, &ring_beta, &snapshots, &conv_q, &conv_k, &conv_v})
      all.insert(all.end(), x->begin(), x->end());
    std::vector<float> folded = state;
    std::vector<std::int32_t> accept;
    for (std::int64_t r = 0; r < requests(); ++r) accept.push_back(cu[static_cast<std::size_t>(r + 1)] - cu[static_cast<std::size_t>(r)]);
    FoldParams f;
    f.state = floats(folded, {pool, hv(), V, K});
    f.rings = rings();
    f.slots = {slots.data(), DType::kInt32, {requests()}}, f.accept = {accept.data(), DType::kInt32, {requests()}};
    fold(f);
    all.insert(all.end(), folded.begin(), folded.end());
    return all;
  }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
}

Case any_case() {
  const auto lens = *rc::gen::resize(4, rc::gen::nonEmpty(rc::gen::container<std::vector<int>>(rc::gen::element(0, 1, 2, 3, 5, 19))));
  const auto seed = *rc::gen::arbitrary<unsigned>();
  const auto heads = *rc::gen::element(1, 2), group = *rc::gen::element(1, 2);
  const auto key = *rc::gen::element(64, 128), value = *rc::gen::element(64, 128);
  return Case(seed, heads, group, key, value, lens, *rc::gen::arbitrary<bool>(), *rc::gen::arbitrary<bool>(), *rc::gen::arbitrary<bool>());
}

/// Cuts the range in the worst way: single items, backwards, each on a fresh thread.
class Adverse final : public Executor {
 public:
  void parallel_for(std::int64_t n, std::int64_t, Body body, void* context) override {
    for (std::int64_t i = n; i-- > 0;) std::thread([&] { body(context, i, i + 1); }).join();
  }
  int concurrency() const override { return 3; }
};

struct Injected {
  explicit Injected(Executor& e) { set_executor(&e); }
  ~Injected() { set_executor(nullptr); }
};

RC_GTEST_PROP(Kda, BitsDoNotDependOnTheExecutor, ()) {
  Case a = any_case();
  Case b = a;
  const auto want = a.run();
  Adverse adverse;
  const Injected injected(adverse);
  RC_ASSERT(same(b.run(), want));
}

RC_GTEST_PROP(Kda, FoldEqualsTheLastSnapshot, ()) {
  Case a = any_case();
  const auto all = a.run();
  const std::size_t slot = static_cast<std::size_t>(a.hv() * a.V * a.K);
  const float* folded = all.data() + all.size() - a.state.size();
  for (std::int64_t r = 0; r < a.requests(); ++r) {
    const std::int64_t n = a.cu[static_cast<std::size_t>(r + 1)] - a.cu[static_cast<std::size_t>(r)];
    const std::int64_t s = a.slots[static_cast<std::size_t>(r)];
    const float* want = n == 0 ? a.state.data() + static_cast<std::size_t>(s) * slot
                               : a.snapshots.data() + static_cast<std::size_t>(r * a.longest + n - 1) * slot;
    RC_ASSERT(std::memcmp(folded + static_cast<std::size_t>(s) * slot, want, slot * 4) == 0);
  }
}

RC_GTEST_PROP(Kda, DecodeOfManyTokensEqualsVerifyAndCommit, ()) {
  Case a = any_case();
  Case b = a;
  const auto all = a.run();
  DecodeParams p;
  b.step(p);
  decode(p);
  RC_ASSERT(same(b.out, a.out));
  RC_ASSERT(std::memcmp(b.state.data(), all.data() + all.size() - a.state.size(), a.state.size() * 4) == 0);
  for (std::int64_t r = 0; r < a.requests(); ++r) {
    const std::int64_t n = a.cu[static_cast<std::size_t>(r + 1)] - a.cu[static_cast<std::size_t>(r)], row = a.H * a.K * 3;
    const std::int64_t s = a.slots[static_cast<std::size_t>(r)];
    const float* want = n == 0 ? a.cs_q.data() + s * row : a.conv_q.data() + (r * a.longest + n - 1) * row;
    RC_ASSERT(std::memcmp(b.cs_q.data() + s * row, want, static_cast<std::size_t>(row) * 4) == 0);
  }
}

// A tree is walked in one piece, a chain 16 tokens at a time.
RC_GTEST_PROP(Kda, AChainWrittenAsATreeIsTheChain, ()) {
  Case a = any_case();
  Case b = a;
  a.run();
  std::vector<std::int64_t> parents(static_cast<std::size_t>(b.requests() * b.longest));
  for (std::size_t i = 0; i < parents.size(); ++i) parents[i] = static_cast<std::int64_t>(i) % b.longest - 1;
  VerifyParams p = b.verify_params();
  p.parents = {parents.data(), DType::kInt64, {b.requests(), b.longest}};
  verify(p);
  RC_ASSERT(same(a.out, b.out));
  RC_ASSERT(same(a.snapshots, b.snapshots));
  RC_ASSERT(same(a.conv_v, b.conv_v));
  RC_ASSERT(same(a.rawk, b.rawk));
}

// Sums run in 16 lanes whatever the vector width, so instruction sets with a fused multiply-add agree to the bit.
TEST(Kda, InstructionSetsAgree) {
  const std::int64_t have = hwy::SupportedTargets();
  if (!(have & HWY_AVX2)) GTEST_SKIP() << "needs-isa: AVX2";
  const auto results = [](std::int64_t disabled) {
    hwy::DisableTargets(disabled);
    Case a(7, 2, 2, 128, 64, {3, 20, 1}, false, false, true), b(8, 1, 1, 64, 128, {5, 1}, true, true, false);
    auto x = a.run();
    const auto y = b.run();
    x.insert(x.end(), y.begin(), y.end());
    hwy::DisableTargets(0);
    return x;
  };
  const auto best = results(0);
  EXPECT_TRUE(same(results(HWY_AVX3_DL | HWY_AVX3), best));  // AVX2
  // Without a fused multiply-add the bits differ, the values do not: SSE4, and one lane at a time.
  for (std::int64_t disabled : {HWY_AVX3_DL | HWY_AVX3 | HWY_AVX2, HWY_AVX3_DL | HWY_AVX3 | HWY_AVX2 | HWY_SSE4 | HWY_SSSE3}) {
    const auto other = results(disabled);
    ASSERT_EQ(other.size(), best.size());
    EXPECT_FALSE(same(other, best)) << "the switch had no effect";
    double worst = 0;
    for (std::size_t i = 0; i < best.size(); ++i) {
      ASSERT_EQ(std::isnan(other[i]), std::isnan(best[i])) << i;
      if (!std::isnan(best[i])) worst = std::max(worst, std::abs(double(other[i]) - best[i]) / (1 + std::abs(double(best[i]))));
    }
    EXPECT_LT(worst, 5e-6);
  }
}

TEST(Kda, OffsetsAre64Bits) {
  Array a;
  a.stride[0] = 56171520 / 4, a.stride[1] = 128 * 128, a.stride[4] = 1;
  EXPECT_EQ(at(a, 400, 3, 0, 0, 5), 400 * (56171520LL / 4) + 3 * 128 * 128 + 5);
  EXPECT_GT(at(a, 400) * 4, std::int64_t{1} << 32);
}

TEST(Kda, AnErrorNamesTheArgumentAndWritesNothing) {
  Case a(1, 1, 1, 64, 64, {2, 3}, false, true, false);
  VerifyParams p = a.verify_params();
  p.slots.dtype = DType::kFloat32;
  try {
    verify(p);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kValue);
    EXPECT_STREQ(e.what(), "verify: slots: expected dtype int32 or int64, got float32.");
  }
  for (float x : a.out) EXPECT_TRUE(std::isnan(x));
  p = a.verify_params();
  p.state.device = p.x_q.device = {DeviceType::kCuda, 0};
  EXPECT_THROW(verify(p), Error);
}

/// The check of a CUDA call reads no memory of the GPU; a build without CUDA refuses the call after it.
TEST(Kda, ACudaCallIsCheckedWithoutTouchingMemory) {
  FoldParams f;
  const Device cuda{DeviceType::kCuda, 0};
  auto* nowhere = reinterpret_cast<float*>(std::uintptr_t{4096});
  f.state = {nowhere, DType::kFloat32, {2, 1, 64, 64}, cuda};
  f.rings = {{nowhere, DType::kBFloat16, {2, 1, 4, 64}, cuda},
             {nowhere, DType::kBFloat16, {2, 1, 4, 64}, cuda},
             {nowhere, DType::kFloat32, {2, 1, 4, 64}, cuda},
             {nowhere, DType::kFloat32, {2, 1, 4}, cuda}};
  f.rings.rawv.data = nowhere + (1 << 20), f.rings.rawk.data = nowhere + (2 << 20), f.rings.g.data = nowhere + (3 << 20);
  f.rings.beta.data = nowhere + (4 << 20);
  f.slots = {nowhere + (5 << 20), DType::kInt32, {1}, cuda}, f.accept = {nowhere + (6 << 20), DType::kInt32, {1}, cuda};
  if constexpr (core::cuda_built()) {
    const CheckOnly only;
    fold(f);
    return;
  }
  try {
    fold(f);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kNotImplemented);
  }
}

}  // namespace
