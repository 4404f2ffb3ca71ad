#include <algorithm>
#include <cmath>
#include <vector>

#include "accept/args.hpp"
#include "accept/layout.hpp"
#include "core/match.hpp"
#include "cpu/parallel.hpp"

namespace specstate::accept::cpu {

namespace {

template <class Token>
void greedy(const VerifyGreedyArgs& x) {
  const auto* candidates = static_cast<const Token*>(x.candidates);
  const auto* target = static_cast<const Token*>(x.target_argmax);
  auto* out = static_cast<Token*>(x.out_tokens);
  for (std::int64_t r = 0; r < x.batch; ++r) {
    const Token* c = candidates + r * x.candidates_stride[0];
    const Token* t = target + r * x.target_stride[0];
    Token* o = out + r * x.out_stride[0];
    const std::int64_t width = x.verify_lens.given() ? core::load_index(x.verify_lens, r) : x.width;
    std::int64_t a = 0;
    while (a + 1 < width) {
      const Token proposal = c[(a + 1) * x.candidates_stride[1]];
      if (proposal < 0 || proposal != t[a * x.target_stride[1]]) break;
      ++a;
    }
    for (std::int64_t j = 0; j < x.width; ++j) {
      Token token = 0;
      if (j < a) token = c[(j + 1) * x.candidates_stride[1]];
      if (j == a) token = t[a * x.target_stride[1]];
      o[j * x.out_stride[1]] = token;
    }
    x.accept_lens[r * x.accept_stride] = static_cast<std::int32_t>(a + 1);
  }
}

/// A row of probabilities, `n` ids from element `offset` on, as masses in float64.
void load_masses(const TensorView& t, std::int64_t offset, std::int64_t n, double* to) {
  const std::int64_t stride = t.strides[2];
  const auto copy = [&](auto* from) {
    for (std::int64_t i = 0; i < n; ++i) to[i] = mass(static_cast<double>(from[offset + i * stride]));
  };
  if (t.dtype == DType::kFloat64) return copy(t.as<double>());
  if (t.dtype == DType::kFloat32) return copy(t.as<float>());
  for (std::int64_t i = 0; i < n; ++i) to[i] = mass(real_at(t, offset + i * stride));
}

constexpr std::int64_t kNoMass = -1, kInfiniteTarget = -2, kInfiniteDraft = -3;  // in place of a token: nothing can be drawn

/// Inverse CDF in id order: the first id whose cumulative weight exceeds u * total, kNoMass if there is none. Negative weights are none.
std::int64_t draw(const std::vector<double>& weights, double u) {
  RunningSum total, sum;
  for (const double w : weights) total.add(mass(w));
  if (std::isinf(total.value())) return kInfiniteTarget;
  const double threshold = u * total.value();
  std::int64_t last = kNoMass;
  for (std::size_t id = 0; id < weights.size(); ++id) {
    const double below = sum.add(mass(weights[id]));
    if (!(weights[id] > 0)) continue;
    last = static_cast<std::int64_t>(id);
    if (below > threshold) break;
  }
  return last;  // the last with weight where u * total was rounded up to the total
}

struct Verdict {
  std::int64_t accepted, token;
};

Verdict judge(const VerifyRejectionArgs& x, std::int64_t r) {
  const std::int64_t width = x.verify_lens.given() ? core::load_index(x.verify_lens, r) : x.width;
  const auto uniform = [&](std::int64_t j) { return real_at(x.uniforms, element_offset(x.uniforms, r, j)); };
  const auto probability = [&](const TensorView& t, std::int64_t j, std::int64_t id) {
    return mass(real_at(t, element_offset(t, r, j) + id * t.strides[2]));
  };
  std::int64_t a = 0, d = -1;
  bool fell = false;
  for (; a + 1 < width; ++a) {
    d = index_at(x.candidates, element_offset(x.candidates, r, a + 1));
    const bool in_range = d >= 0 && d < x.vocab;
    const double q = !in_range ? 0 : x.draft_probs.given() ? probability(x.draft_probs, a, d) : 1;
    const double p = in_range ? probability(x.target_probs, a, d) : 0;
    if (std::isinf(p)) return {a, kInfiniteTarget};
    if (std::isinf(q)) return {a, kInfiniteDraft};
    fell = !in_range || !(uniform(a) * q < p);
    if (fell) break;
  }
  const double u = uniform(x.width - 1);
  std::vector<double> p(x.vocab);
  const auto load = [&] { load_masses(x.target_probs, element_offset(x.target_probs, r, a), x.vocab, p.data()); };
  load();
  if (fell) {
    if (x.draft_probs.given()) {
      std::vector<double> q(x.vocab);
      load_masses(x.draft_probs, element_offset(x.draft_probs, r, a), x.vocab, q.data());
      if (std::any_of(q.begin(), q.end(), [](double m) { return std::isinf(m); })) return {a, kInfiniteDraft};
      for (std::int64_t id = 0; id < x.vocab; ++id) p[id] -= q[id];
    } else if (d >= 0 && d < x.vocab) {
      p[d] -= 1;
    }
    if (const std::int64_t token = draw(p, u); token != kNoMass) return {a, token};
    load();  // no residual: the target itself
  }
  return {a, draw(p, u)};
}

}  // namespace

void run(const VerifyGreedyArgs& args, Stream) { args.is_int64 ? greedy<std::int64_t>(args) : greedy<std::int32_t>(args); }

void run(const VerifyRejectionArgs& x, Stream) {
  // A row that cannot be drawn from is an error, and an error writes nothing: decide everything first.
  std::vector<Verdict> verdicts(x.batch);
  specstate::cpu::parallel_for(x.batch, 1 + 65536 / x.vocab, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) verdicts[r] = judge(x, r);
  });
  for (std::int64_t r = 0; r < x.batch; ++r) {
    const auto [accepted, token] = verdicts[r];
    if (token >= 0) continue;
    const std::string row = "row [" + std::to_string(r) + ", " + std::to_string(accepted) + "].";
    if (token == kNoMass) core::throw_value("verify_rejection: target_probs: expected rows with mass, got none in " + row);
    core::throw_value(std::string("verify_rejection: ") + (token == kInfiniteDraft ? "draft_probs" : "target_probs") +
                      ": expected finite mass, got infinite mass in " + row);
  }
  for (std::int64_t r = 0; r < x.batch; ++r) {
    for (std::int64_t j = 0; j < x.width; ++j) {
      std::int64_t token = 0;
      if (j < verdicts[r].accepted) token = index_at(x.candidates, element_offset(x.candidates, r, j + 1));
      if (j == verdicts[r].accepted) token = verdicts[r].token;
      const std::int64_t at = element_offset(x.out_tokens, r, j);
      if (x.out_tokens.dtype == DType::kInt64)
        x.out_tokens.as<std::int64_t>()[at] = token;
      else
        x.out_tokens.as<std::int32_t>()[at] = static_cast<std::int32_t>(token);
    }
    x.accept_lens.as<std::int32_t>()[r * x.accept_lens.strides[0]] = static_cast<std::int32_t>(verdicts[r].accepted + 1);
  }
}

namespace {

struct Entry {
  double survival;
  std::int64_t proposal, row;
};

/// Proposals of row r that its cap allows.
std::int64_t choosable(const PlanVerifyLengthsArgs& x, std::int64_t r) {
  return x.max_lens.given() ? std::min(x.proposals, core::load_index(x.max_lens, r) - 1) : x.proposals;
}

/// The entries of all rows that may be verified, best first. Ties are broken by place, never by a value, and survival falls along
/// a row, so that every leading part of the list is a prefix in each row.
std::vector<Entry> ranked(const PlanVerifyLengthsArgs& x, const TensorView& confidences) {
  std::vector<Entry> entries;
  entries.reserve(x.batch * x.proposals);
  for (std::int64_t r = 0; r < x.batch; ++r) {
    const std::int64_t limit = choosable(x, r);
    double survival = 1;
    for (std::int64_t k = 0; k < limit; ++k) {
      const double c = confidences.given() ? real_at(confidences, element_offset(confidences, r, k)) : 1.0;
      if (c >= 0) survival *= c;  // unknown: 1
      if (survival < kLeastSurvival) break;
      entries.push_back({survival, k, r});
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    if (a.survival != b.survival) return a.survival > b.survival;
    return a.proposal != b.proposal ? a.proposal < b.proposal : a.row < b.row;
  });
  return entries;
}

/// How many proposals the batch should verify, from what was known before this step.
std::int64_t budget(const PlanVerifyLengthsArgs& x) {
  const std::vector<Entry> entries = ranked(x, x.lagged);
  std::int64_t probe = 0, best = 0;
  double best_rate = -1;
  RunningSum expected;
  for (std::int64_t m = 0; m <= static_cast<std::int64_t>(entries.size()); ++m) {
    if (m > 0) expected.add(entries[m - 1].survival);
    while (probe + 1 < x.probes && core::load_index(x.probe_tokens, probe + 1) <= x.batch + m) ++probe;
    const double rate = (static_cast<double>(x.batch) + expected.value()) * real_at(x.speed, probe * x.speed.strides[0]);
    if (rate > best_rate) best_rate = rate, best = m;  // the cost is a staircase: look at every m, not only to the first descent
  }
  return best;
}

}  // namespace

void run(const PlanVerifyLengthsArgs& x, Stream) {
  std::vector<std::int32_t> lens(x.batch, 1);
  if (x.probes == 0) {  // nothing is known of the cost: verify everything
    for (std::int64_t r = 0; r < x.batch; ++r) lens[r] = static_cast<std::int32_t>(1 + choosable(x, r));
  } else {
    const std::vector<Entry> entries = ranked(x, x.confidences);
    const std::int64_t m = std::min<std::int64_t>(budget(x), static_cast<std::int64_t>(entries.size()));
    for (std::int64_t i = 0; i < m; ++i) ++lens[entries[i].row];
  }
  for (std::int64_t r = 0; r < x.batch; ++r) x.verify_lens.as<std::int32_t>()[r * x.verify_lens.strides[0]] = lens[r];
}

}  // namespace specstate::accept::cpu
