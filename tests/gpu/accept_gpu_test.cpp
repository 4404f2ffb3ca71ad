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
  for (const std::int64_t b : {1, 3, 64, 257})
    for (const std::int64_t w : {1, 2, 8, 16, 33, 100})
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

}  // namespace
