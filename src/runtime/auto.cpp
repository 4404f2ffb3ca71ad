#include "runtime/auto.hpp"

#include <algorithm>

namespace specstate::runtime {

namespace {

// Steps before a trial is judged, and how strongly a new observation moves a rate.
constexpr int kTrial = 4;
constexpr double kNew = 0.15;
// A prior of so many observations at this probability: optimistic enough to try.
constexpr double kPriorCount = 2, kPriorPass = 0.8;
constexpr int kFirstPause = 64;
// A gain below this is noise, and plain decoding has none of the risk.
constexpr double kMargin = 1.03;

std::size_t at(int i) { return static_cast<std::size_t>(i); }

}  // namespace

AutoPolicy::AutoPolicy(const Report::Costs& costs, double draft, int batch) : costs_(costs), draft_(draft), batch_(batch), pause_(kFirstPause) {
  const int window = static_cast<int>(costs.verify.size()) - 1;
  tried_.assign(at(std::max(0, window - 1)), kPriorCount);
  passed_.assign(tried_.size(), kPriorCount * kPriorPass);
  plain_rate_ = batch / costs.plain;
  for (int w = 2; w <= window; ++w)
    if (batch * w / (draft + costs.verify[at(w)]) > kMargin * plain_rate_) hopeful_ = true;
  speculate_ = hopeful_;
  for (int w = 1; w <= window; ++w) {
    probe_tokens_.push_back(batch * w);
    steps_per_second_.push_back(1.0 / (draft + costs.verify[at(w)]));
  }
}

double AutoPolicy::gain(int width) const {
  double expected = 1, survive = 1;
  for (int k = 0; k + 1 < width; ++k) expected += survive *= passed_[at(k)] / tried_[at(k)];
  return expected / (draft_ + costs_.verify[at(width)]);
}

int AutoPolicy::width() const {
  int best = 2;
  for (int w = 3; w < static_cast<int>(costs_.verify.size()); ++w)
    if (gain(w) > gain(best)) best = w;
  return best;
}

void AutoPolicy::plain_step(int requests, double seconds) {
  plain_rate_ += kNew * (requests / seconds - plain_rate_);
  if (!hopeful_ || speculate_) return;
  if (--plain_left_ <= 0) {
    speculate_ = true;
    steps_ = 0;
  }
}

void AutoPolicy::speculative_step(const std::vector<int>& lens, const std::vector<int>& accepted, double seconds) {
  int tokens = 0;
  for (std::size_t b = 0; b < lens.size(); ++b) {
    tokens += accepted[b];
    // Proposal k was judged if the k before it stood.
    for (int k = 0; k + 1 < lens[b] && k < accepted[b]; ++k) {
      tried_[at(k)] += 1;
      passed_[at(k)] += k + 1 < accepted[b] ? 1 : 0;
    }
  }
  const double rate = tokens / seconds;
  spec_rate_ = steps_ == 0 ? rate : spec_rate_ + std::max(kNew, 1.0 / (steps_ + 1)) * (rate - spec_rate_);
  if (++steps_ < kTrial || spec_rate_ > kMargin * plain_rate_) return;
  speculate_ = false;
  plain_left_ = pause_;
  pause_ *= 2;
}

}  // namespace specstate::runtime
