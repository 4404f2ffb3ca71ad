// Acceptance against naive models written as the rules are stated.
#include "specstate/accept.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "specstate/error.hpp"

using namespace specstate;
using namespace specstate::accept;

namespace {

using Ids = std::vector<std::int64_t>;

struct Result {
  std::vector<std::int32_t> lens;
  Ids tokens;
};

Result greedy(Ids candidates, Ids target, std::int64_t b, std::int64_t w, Ids verify_lens = {}) {
  Result r{std::vector<std::int32_t>(b, -1), Ids(b * w, -1)};
  VerifyGreedyParams p;
  p.candidates = TensorView(candidates.data(), DType::kInt64, {b, w});
  p.target_argmax = TensorView(target.data(), DType::kInt64, {b, w});
  if (!verify_lens.empty()) p.verify_lens = TensorView(verify_lens.data(), DType::kInt64, {b});
  p.accept_lens = TensorView(r.lens.data(), DType::kInt32, {b});
  p.out_tokens = TensorView(r.tokens.data(), DType::kInt64, {b, w});
  verify_greedy(p);
  return r;
}

RC_GTEST_PROP(Greedy, IsTheLongestCommonRun, ()) {
  const auto b = *rc::gen::inRange<std::int64_t>(1, 6), w = *rc::gen::inRange<std::int64_t>(1, 8);
  const auto candidates = *rc::gen::container<Ids>(b * w, rc::gen::inRange<std::int64_t>(-1, 2));
  const auto target = *rc::gen::container<Ids>(b * w, rc::gen::inRange<std::int64_t>(-1, 2));
  const auto lens = *rc::gen::container<Ids>(b, rc::gen::inRange<std::int64_t>(1, w + 1));
  const bool capped = *rc::gen::arbitrary<bool>();
  const Result got = greedy(candidates, target, b, w, capped ? lens : Ids{});
  for (std::int64_t r = 0; r < b; ++r) {
    Ids emitted;
    for (std::int64_t j = 0; j < (capped ? lens[r] : w); ++j) {
      emitted.push_back(target[r * w + j]);
      if (j + 1 == w || candidates[r * w + j + 1] != target[r * w + j] || target[r * w + j] < 0) break;
    }
    RC_ASSERT(got.lens[r] == static_cast<std::int32_t>(emitted.size()));
    emitted.resize(w);
    RC_ASSERT(Ids(got.tokens.begin() + r * w, got.tokens.begin() + (r + 1) * w) == emitted);
  }
}

/// Small integers as probabilities, so that every product and sum is exact and ties are met.
RC_GTEST_PROP(Rejection, FollowsTheRuleToTheLastTie, ()) {
  const auto b = *rc::gen::inRange<std::int64_t>(1, 4), w = *rc::gen::inRange<std::int64_t>(1, 5),
             V = *rc::gen::inRange<std::int64_t>(1, 6);
  const auto numbers = [](std::int64_t n, int highest) {
    std::vector<double> x;
    for (const int i : *rc::gen::container<std::vector<int>>(n, rc::gen::inRange(0, highest))) x.push_back(i);
    return x;
  };
  auto p = numbers(b * w * V, 4), q = numbers(b * (w - 1) * V, 4), u = numbers(b * w, 8);
  for (std::int64_t i = 0; i < b * w; ++i) p[i * V + i % V] += 1;  // no row without mass
  for (double& x : u) x /= 8;
  auto candidates = *rc::gen::container<Ids>(b * w, rc::gen::inRange<std::int64_t>(-1, V + 1));
  const bool point = *rc::gen::arbitrary<bool>();
  Result got{std::vector<std::int32_t>(b, -1), Ids(b * w, -1)};
  VerifyRejectionParams params;
  params.candidates = TensorView(candidates.data(), DType::kInt64, {b, w});
  if (!point) params.draft_probs = TensorView(q.data(), DType::kFloat64, {b, w - 1, V});
  params.target_probs = TensorView(p.data(), DType::kFloat64, {b, w, V});
  params.uniforms = TensorView(u.data(), DType::kFloat64, {b, w});
  params.accept_lens = TensorView(got.lens.data(), DType::kInt32, {b});
  params.out_tokens = TensorView(got.tokens.data(), DType::kInt64, {b, w});
  verify_rejection(params);

  for (std::int64_t r = 0; r < b; ++r) {
    Ids emitted;
    std::vector<double> last(p.begin() + (r * w + w - 1) * V, p.begin() + (r * w + w) * V);
    for (std::int64_t j = 0; j + 1 < w; ++j) {
      const double* pj = &p[(r * w + j) * V];
      const std::int64_t d = candidates[r * w + j + 1];
      const auto qj = [&](std::int64_t id) { return point ? (id == d ? 1.0 : 0.0) : q[(r * (w - 1) + j) * V + id]; };
      if (d >= 0 && d < V && u[r * w + j] * qj(d) < pj[d]) {
        emitted.push_back(d);
        continue;
      }
      double left = 0;
      for (std::int64_t id = 0; id < V; ++id) last[id] = std::max(pj[id] - qj(id), 0.0), left += last[id];
      if (left == 0) last.assign(pj, pj + V);
      break;
    }
    double total = 0, sum = 0;
    for (double x : last) total += x;
    std::int64_t id = 0;
    while ((sum += last[id]) <= u[r * w + w - 1] * total) ++id;
    emitted.push_back(id);
    RC_ASSERT(last[id] > 0);
    RC_ASSERT(got.lens[r] == static_cast<std::int32_t>(emitted.size()));
    emitted.resize(w);
    RC_ASSERT(Ids(got.tokens.begin() + r * w, got.tokens.begin() + (r + 1) * w) == emitted);
  }
}

RC_GTEST_PROP(Plan, SpendsTheBudgetOnPrefixesInOrderOfSurvival, ()) {
  const auto b = *rc::gen::inRange<std::int64_t>(1, 5), G = *rc::gen::inRange<std::int64_t>(1, 6),
             m = *rc::gen::inRange<std::int64_t>(0, 20);
  std::vector<float> c;
  for (const int i : *rc::gen::container<std::vector<int>>(b * G, rc::gen::inRange(0, 5))) c.push_back(static_cast<float>(i) / 4);
  // A cost table that makes exactly b + m tokens the best: free up to there, ruinous beyond.
  std::vector<std::int64_t> probes{0, b + m + 1};
  std::vector<double> speeds{1, 1e-9};
  std::vector<std::int32_t> lens(b, -1);
  PlanVerifyLengthsParams p;
  p.confidences = TensorView(c.data(), DType::kFloat32, {b, G});
  p.probe_tokens = TensorView(probes.data(), DType::kInt64, {2});
  p.steps_per_second = TensorView(speeds.data(), DType::kFloat64, {2});
  p.out = TensorView(lens.data(), DType::kInt32, {b});
  plan_verify_lengths(p);

  std::int64_t spent = 0, choosable = 0;
  double worst_in = 2, best_out = -1;
  for (std::int64_t r = 0; r < b; ++r) {
    RC_ASSERT(lens[r] >= 1 && lens[r] <= G + 1);
    spent += lens[r] - 1;
    double s = 1;
    for (std::int64_t k = 0; k < G; ++k) {
      s *= c[r * G + k];
      choosable += s >= 1e-6;
      if (k < lens[r] - 1)
        worst_in = std::min(worst_in, s);
      else
        best_out = std::max(best_out, s);
    }
  }
  RC_ASSERT(spent == std::min({m, choosable, b * G}));
  RC_ASSERT(worst_in >= best_out || best_out < 1e-6);
}

TEST(Accept, ErrorsAreOfTheKindValue) {
  try {
    greedy({0, 1}, {1, 1}, 1, 2, {3});
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kValue);
    EXPECT_STREQ(e.what(), "verify_greedy: verify_lens: expected lengths in 1..2, got 3 at row 0.");
  }
}

}  // namespace
