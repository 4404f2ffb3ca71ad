// Acceptance on the GPU equals the CPU's, to the last byte.
#include "gpu_test.hpp"
#include "specstate/accept.hpp"

using namespace specstate;
using namespace specstate::accept;
using namespace specstate::gpu_test;

namespace {

template <class Token>
void greedy_case(std::int64_t b, std::int64_t w, bool capped, unsigned seed) {
  SCOPED_TRACE(::testing::Message() << "b " << b << ", w " << w << ", capped " << capped);
  std::mt19937 random(seed);
  Pair<Token> candidates({b, w}), target({b, w}), tokens({b, w});
  Pair<std::int32_t> lens({b}), verify_lens({b});
  const auto draw = [&](int) {
    std::vector<Token> c(b * w), t(b * w);
    std::vector<std::int32_t> n(b);
    for (std::int64_t i = 0; i < b * w; ++i) c[i] = random() % 16 ? 7 : -1, t[i] = random() % 16 ? 7 : -1;
    for (auto& x : n) x = 1 + static_cast<std::int32_t>(random() % w);
    candidates.set(c), target.set(t), verify_lens.set(n);
  };
  draw(0);
  on_both(
      [&](Where where, Stream stream) {
        VerifyGreedyParams p;
        p.candidates = candidates.view(where), p.target_argmax = target.view(where);
        if (capped) p.verify_lens = verify_lens.view(where);
        p.accept_lens = lens.view(where), p.out_tokens = tokens.view(where);
        verify_greedy(p, stream);
      },
      {&candidates, &target, &verify_lens, &lens, &tokens}, draw);
}

TEST(AcceptGpu, GreedyEqualsTheCpu) {
  SPECSTATE_NEEDS_GPU();
  unsigned seed = 1;
  for (const std::int64_t b : small() ? std::vector<int>{1, 5} : std::vector<int>{1, 3, 64, 257})
    for (const std::int64_t w : small() ? std::vector<int>{1, 33} : std::vector<int>{1, 2, 8, 16, 33, 100})
      for (const bool capped : {false, true}) {
        greedy_case<std::int64_t>(b, w, capped, ++seed);
        greedy_case<std::int32_t>(b, w, capped, ++seed);
      }
}

TEST(AcceptGpu, GreedyHonoursStrides) {
  SPECSTATE_NEEDS_GPU();
  Pair<std::int32_t> c({4, 20}), t({20, 4}), out({4, 20}), lens({8}), lengths({8});
  std::mt19937 random(5);
  std::vector<std::int32_t> x(80), y(80);
  for (int i = 0; i < 80; ++i) x[i] = random() % 8 ? 1 : 2, y[i] = random() % 8 ? 1 : 2;
  c.set(x), t.set(y), lengths.set({1, 99, 10, 99, 4, 99, 7, 99});
  const auto strided = [](TensorView v, std::int64_t rows, std::int64_t columns, std::int64_t s0, std::int64_t s1) {
    v.sizes[0] = rows, v.sizes[1] = columns, v.strides[0] = s0, v.strides[1] = s1;
    return v;
  };
  on_both(
      [&](Where where, Stream stream) {
        VerifyGreedyParams p;
        p.candidates = strided(c.view(where), 4, 10, 20, 2);
        p.target_argmax = strided(t.view(where), 4, 10, 1, 4);
        p.out_tokens = strided(out.view(where), 4, 10, 20, 2);
        p.verify_lens = strided(lengths.view(where), 4, 0, 2, 0);
        p.accept_lens = strided(lens.view(where), 4, 0, 2, 0);
        verify_greedy(p, stream);
      },
      {&c, &t, &out, &lens, &lengths});
}

/// What the CPU refuses for its content is padding on the GPU, and its neighbours are judged as ever.
TEST(AcceptGpu, LengthsOutsideTheWindowArePadding) {
  SPECSTATE_NEEDS_GPU();
  Pair<std::int64_t> c({3, 4}, {0, 5, 6, 7, 0, 5, 6, 7, 0, 5, 6, 7}), t({3, 4}, {5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8}), out({3, 4});
  Pair<std::int32_t> lens({3}), lengths({3}, {0, 3, 5});
  VerifyGreedyParams p;
  p.candidates = c.view(Where::kDevice), p.target_argmax = t.view(Where::kDevice), p.verify_lens = lengths.view(Where::kDevice);
  p.accept_lens = lens.view(Where::kDevice), p.out_tokens = out.view(Where::kDevice);
  verify_greedy(p);
  SPECSTATE_GPU(cudaDeviceSynchronize());
  const std::vector<std::int32_t> want_lens{0, 3, 0};
  const std::vector<std::int64_t> want{0, 0, 0, 0, 5, 6, 7, 0, 0, 0, 0, 0};
  std::memcpy(lens.host(), want_lens.data(), lens.size());
  std::memcpy(out.host(), want.data(), out.size());
  EXPECT_EQ(lens.difference(), "");
  EXPECT_EQ(out.difference(), "");
}

TEST(AcceptGpu, ErrorsComeBeforeAnythingIsEnqueued) {
  SPECSTATE_NEEDS_GPU();
  Pair<std::int64_t> c({2, 4}), t({2, 3}), out({2, 4});
  Pair<std::int32_t> lens({2});
  VerifyGreedyParams p;
  p.candidates = c.view(Where::kDevice), p.target_argmax = t.view(Where::kDevice);
  p.accept_lens = lens.view(Where::kDevice), p.out_tokens = out.view(Where::kDevice);
  try {
    verify_greedy(p);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kValue);
    EXPECT_STREQ(e.what(), "verify_greedy: target_argmax: expected shape [b=2, W=4], got (2, 3).");
  }
  p.target_argmax = c.view(Where::kHost);  // one array left on the host
  EXPECT_THROW(verify_greedy(p), Error);
  if (small()) return;  // memcheck counts what the runtime refuses as a fault
  p.target_argmax = c.view(Where::kDevice), p.candidates.device.index = p.target_argmax.device.index = 63;  // no such GPU
  p.accept_lens.device.index = p.out_tokens.device.index = 63;
  try {
    verify_greedy(p);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kCuda) << e.what();
  }
  SPECSTATE_GPU(cudaDeviceSynchronize());
  for (Bytes* b : std::initializer_list<Bytes*>{&lens, &out}) EXPECT_EQ(b->difference(), "");
}

std::uint16_t bf16(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  return static_cast<std::uint16_t>((u + 0x7FFFu + ((u >> 16) & 1)) >> 16);
}
template <class T>
T as(double x) {
  if constexpr (std::is_same_v<T, std::uint16_t>)
    return bf16(static_cast<float>(x));
  else
    return static_cast<T>(x);
}

struct RejectionShape {
  std::int64_t b, w, vocab;
  bool point, capped;
  int levels;  // > 0: masses are multiples of 1 / levels, so that sums are exact and ties are met
};

/// P and Q: types of the two distributions. Some rows agree (the window stands), some have no residual.
template <class P, class Q, class Token>
void rejection_case(const RejectionShape& c, DType p_type, DType q_type, unsigned seed) {
  SCOPED_TRACE(::testing::Message() << "b " << c.b << ", w " << c.w << ", vocab " << c.vocab << ", point " << c.point << ", levels "
                                    << c.levels << ", types " << name_of(p_type) << " " << name_of(q_type));
  std::mt19937 random(seed);
  const auto uniform = [&] { return static_cast<double>(random() >> 8) * 0x1p-24; };
  Pair<Token> candidates({c.b, c.w}), tokens({c.b, c.w});
  Pair<std::int32_t> lens({c.b}), verify_lens({c.b});
  Pair<P> p({c.b, c.w, c.vocab}, p_type);
  Pair<Q> q({c.b, std::max<std::int64_t>(c.w - 1, 1), c.vocab}, q_type);
  Pair<float> u({c.b, c.w});
  const auto change = [&](int) {
    std::vector<Token> tok(c.b * c.w);
    std::vector<P> ps(c.b * c.w * c.vocab);
    std::vector<Q> qs(c.b * std::max<std::int64_t>(c.w - 1, 1) * c.vocab);
    std::vector<float> us(c.b * c.w);
    std::vector<std::int32_t> n(c.b);
    const auto draw = [&] { return c.levels > 0 ? static_cast<double>(random() % (c.levels + 1)) / c.levels : uniform() * uniform(); };
    for (auto& x : ps) x = as<P>(draw());
    for (auto& x : qs) x = as<Q>(draw());
    for (std::int64_t r = 0; r < c.b; ++r) {
      n[r] = 1 + static_cast<std::int32_t>(random() % c.w);
      for (std::int64_t j = 0; j < c.w; ++j) {
        us[r * c.w + j] = random() % 16 ? static_cast<float>(uniform()) : random() % 2 ? 1.f : 0.f;
        tok[r * c.w + j] = static_cast<Token>(random() % 16 ? random() % c.vocab : random() % 2 ? -1 : c.vocab);
        ps[(r * c.w + j) * c.vocab + random() % c.vocab] = as<P>(-1);
        ps[(r * c.w + j) * c.vocab + random() % c.vocab] = as<P>(1);  // no row without mass
        const int kind = static_cast<int>(random() % 4);
        if (j + 1 < c.w && kind != 3)
          for (std::int64_t id = 0; id < c.vocab; ++id) {
            Q& to = qs[(r * (c.w - 1) + j) * c.vocab + id];
            if (kind == 0) to = as<Q>(0);  // everything with mass stands
            if (kind == 1) to = as<Q>(4);  // nearly everything falls, no residual
          }
      }
    }
    candidates.set(tok), p.set(ps), q.set(qs), u.set(us), verify_lens.set(n);
  };
  change(0);
  on_both(
      [&](Where where, Stream stream) {
        VerifyRejectionParams x;
        x.candidates = candidates.view(where), x.target_probs = p.view(where), x.uniforms = u.view(where);
        if (!c.point) {
          x.draft_probs = q.view(where);
          x.draft_probs.sizes[1] = c.w - 1;
        }
        if (c.capped) x.verify_lens = verify_lens.view(where);
        x.accept_lens = lens.view(where), x.out_tokens = tokens.view(where);
        verify_rejection(x, stream);
      },
      {&candidates, &p, &q, &u, &verify_lens, &lens, &tokens}, change, 2);
}

TEST(AcceptGpu, RejectionEqualsTheCpu) {
  SPECSTATE_NEEDS_GPU();
  unsigned seed = 100;
  const auto shapes =
      small() ? std::vector<RejectionShape>{{2, 3, 70, false, true, 0}, {1, 2, 4200, true, false, 3}}
              : std::vector<RejectionShape>{{1, 1, 1, false, false, 0},      {5, 4, 7, false, true, 3},     {3, 33, 64, false, false, 0},
                                            {2, 3, 65, true, true, 2},       {2, 2, 4096, false, false, 0}, {2, 3, 4097, true, false, 0},
                                            {2, 4, 16385, false, true, 5},   {1, 3, 32000, true, false, 0}, {40, 3, 20000, false, false, 0},
                                            {1, 8, 151936, false, false, 0}, {140, 2, 300, false, true, 0}};
  for (const RejectionShape& shape : shapes) {
    rejection_case<float, float, std::int64_t>(shape, DType::kFloat32, DType::kFloat32, ++seed);
    rejection_case<double, float, std::int32_t>(shape, DType::kFloat64, DType::kFloat32, ++seed);
    rejection_case<std::uint16_t, std::uint16_t, std::int32_t>(shape, DType::kBFloat16, DType::kBFloat16, ++seed);
  }
}

/// Lengths and uniforms outside, a row of p without mass: padding, and the row between them is judged.
TEST(AcceptGpu, RejectionsBadRowsArePadding) {
  SPECSTATE_NEEDS_GPU();
  Pair<std::int32_t> c({4, 2}, {0, 1, 0, 1, 0, 1, 0, 1}), out({4, 2}), lens({4}), lengths({4}, {2, 2, 3, 2});
  Pair<float> p({4, 2, 2}, {0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0}), u({4, 2}, {0.5f, 0.5f, 0.5f, -1, 0.5f, 0.5f, 0.5f, 0.5f});
  VerifyRejectionParams x;
  x.candidates = c.view(Where::kDevice), x.target_probs = p.view(Where::kDevice), x.uniforms = u.view(Where::kDevice);
  x.verify_lens = lengths.view(Where::kDevice), x.accept_lens = lens.view(Where::kDevice), x.out_tokens = out.view(Where::kDevice);
  verify_rejection(x);
  SPECSTATE_GPU(cudaDeviceSynchronize());
  const std::vector<std::int32_t> want_lens{2, 0, 0, 0}, want{1, 0, 0, 0, 0, 0, 0, 0};
  std::memcpy(lens.host(), want_lens.data(), lens.size());
  std::memcpy(out.host(), want.data(), out.size());
  EXPECT_EQ(lens.difference(), "");
  EXPECT_EQ(out.difference(), "");
}

template <class Real>
void plan_case(std::int64_t b, std::int64_t g, std::int64_t probes, bool lagged, bool capped, int levels, unsigned seed) {
  SCOPED_TRACE(::testing::Message() << "b " << b << ", G " << g << ", probes " << probes << ", lagged " << lagged << ", capped " << capped
                                    << ", levels " << levels);
  std::mt19937 random(seed);
  Pair<Real> now({b, g}), before({b, g}), speed({std::max<std::int64_t>(probes, 1)});
  Pair<std::int64_t> tokens({std::max<std::int64_t>(probes, 1)}), caps({b});
  Pair<std::int32_t> lens({b});
  const auto change = [&](int) {
    std::vector<Real> x(b * g), y(b * g), s(std::max<std::int64_t>(probes, 1));
    std::vector<std::int64_t> t(s.size()), n(b);
    const auto draw = [&] { return levels ? static_cast<double>(random() % (levels + 1)) / levels : 1 - 0.5 * (random() >> 8) * 0x1p-24; };
    for (auto& v : x) v = static_cast<Real>(draw());
    for (auto& v : y) v = random() % 8 ? static_cast<Real>(draw()) : Real{-1};
    std::int64_t at = static_cast<std::int64_t>(random() % (b + 1));
    double rate = 100;
    for (std::size_t i = 0; i < s.size(); ++i)
      t[i] = at, s[i] = static_cast<Real>(rate), at += 1 + random() % (1 + b), rate *= random() % 4 ? 0.97 : 0.5;
    for (auto& v : n) v = 1 + static_cast<std::int64_t>(random() % (g + 3));
    now.set(x), before.set(y), speed.set(s), tokens.set(t), caps.set(n);
  };
  change(0);
  on_both(
      [&](Where where, Stream stream) {
        PlanVerifyLengthsParams p;
        p.confidences = now.view(where), p.out = lens.view(where);
        if (lagged) p.lagged_confidences = before.view(where);
        if (probes > 0) p.probe_tokens = tokens.view(where), p.steps_per_second = speed.view(where);
        if (capped) p.max_lens = caps.view(where);
        plan_verify_lengths(p, stream);
      },
      {&now, &before, &speed, &tokens, &caps, &lens}, change);
}

TEST(AcceptGpu, PlanEqualsTheCpu) {
  SPECSTATE_NEEDS_GPU();
  unsigned seed = 500;
  for (const auto& [b, g] :
       small() ? std::vector<std::pair<int, int>>{{3, 4}, {40, 5}}
               : std::vector<std::pair<int, int>>{{1, 1}, {1, 16}, {3, 4}, {17, 7}, {64, 8}, {256, 16}, {1024, 16}, {1100, 3}})
    for (const int levels : {0, 4})
      for (const std::int64_t probes : {0, 1, 9, 60}) {
        plan_case<float>(b, g, probes, levels == 0, levels == 4, levels, ++seed);
        plan_case<double>(b, g, probes, levels == 4, levels == 0, levels, ++seed);
      }
}

TEST(AcceptGpu, PlansPaddingRowsAndLimits) {
  SPECSTATE_NEEDS_GPU();
  Pair<float> c({3, 2}, {1, 1, 0.9f, 7, 1, 1}), speed({1}, {5});  // 7: counts as 1
  Pair<std::int32_t> caps({3}, {0, 9, -4}), lens({3}), tokens({1}, {1});
  PlanVerifyLengthsParams p;
  p.confidences = c.view(Where::kDevice), p.max_lens = caps.view(Where::kDevice), p.out = lens.view(Where::kDevice);
  p.probe_tokens = tokens.view(Where::kDevice), p.steps_per_second = speed.view(Where::kDevice);
  plan_verify_lengths(p);
  SPECSTATE_GPU(cudaDeviceSynchronize());
  const std::vector<std::int32_t> want{0, 3, 0};
  std::memcpy(lens.host(), want.data(), lens.size());
  EXPECT_EQ(lens.difference(), "");
  Pair<float> many({20000, 2});
  Pair<std::int32_t> many_lens({20000});
  p.max_lens = {}, p.confidences = many.view(Where::kDevice), p.out = many_lens.view(Where::kDevice);
  try {
    plan_verify_lengths(p);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kNotImplemented) << e.what();
  }
}

}  // namespace
