#include "runtime/auto.hpp"

#include <algorithm>
#include <numeric>

namespace specstate::runtime {

namespace {

constexpr int kWarm = 8;      // plain steps before the first trial
constexpr int kTrial = 2;     // steps of a drafter's first trial: the first one also fills the caches
constexpr int kPause = 96;    // plain steps before another try; four times as long each time
constexpr double kNew = 0.2;  // weight of a new measurement
// A prior of so many observations at this probability, until proposals were judged.
constexpr double kPriorCount = 2, kPriorPass = 0.75;
// A gain below the margin is noise, and plain decoding risks nothing; below the other no change of acceptance would help.
constexpr double kMargin = 1.03, kClear = 0.8;

std::size_t at(int i) { return static_cast<std::size_t>(i); }

/// A preempted step says nothing about what a step costs: outliers count at most half as much again, and a faster one counts fully.
void learn(double& cost, double seconds) {
  if (cost == 0 || seconds < cost)
    cost = cost == 0 ? seconds : 0.5 * (cost + seconds);
  else
    cost += kNew * (std::min(seconds, 1.5 * cost) - cost);
}

}  // namespace

AutoPolicy::AutoPolicy(std::vector<int> windows) : pause_(kPause) {
  int most = 1;
  for (const int window : windows) {
    Way& w = ways_.emplace_back();
    w.window = window;
    w.alive = window > 1;
    w.tried.assign(at(std::max(0, window - 1)), kPriorCount);
    w.passed.assign(w.tried.size(), kPriorCount * kPriorPass);
    most = std::max(most, window);
  }
  verify_.assign(at(most + 1), 0.0);
}

double AutoPolicy::verify_cost(int rows) const {
  if (verify_[at(rows)] > 0) return verify_[at(rows)];
  int low = rows, high = rows;
  while (low > 1 && verify_[at(low)] == 0) --low;
  while (high + 1 < static_cast<int>(verify_.size()) && verify_[at(high)] == 0) ++high;
  const double below = low == 1 && verify_[1] == 0 ? plain_ : verify_[at(low)];
  if (verify_[at(high)] == 0) return below * rows / low;  // nothing wider was seen
  return below + (verify_[at(high)] - below) * (rows - low) / (high - low);
}

double AutoPolicy::gain(const Way& way, int width) const {
  double tokens = 1, survive = 1;
  for (int k = 0; k + 1 < width; ++k) tokens += survive *= way.passed[at(k)] / way.tried[at(k)];
  return tokens / (way.draft + verify_cost(width));
}

int AutoPolicy::best_width(const Way& way) const {
  int best = 2;
  for (int w = 3; w <= way.window; ++w)
    if (gain(way, w) > gain(way, best)) best = w;
  return best;
}

void AutoPolicy::speeds(int drafter, int batch, std::vector<std::int32_t>& tokens, std::vector<double>& steps_per_second) const {
  const Way& way = ways_[at(drafter)];
  tokens.clear();
  steps_per_second.clear();
  for (int w = 1; w <= way.window; ++w) {
    tokens.push_back(batch * w);
    steps_per_second.push_back(1.0 / (batch * (way.draft + verify_cost(w))));
  }
}

void AutoPolicy::decide() {
  // Each drafter is tried once with whole blocks, unless the one before it lost clearly: their costs are alike.
  for (; trying_ < static_cast<int>(ways_.size()); ++trying_) {
    Way& way = ways_[at(trying_)];
    if (!way.alive) continue;
    if (way.steps >= kTrial) {
      if (gain(way, best_width(way)) * plain_ < kClear)
        for (Way& w : ways_) w.alive = false;
      continue;
    }
    next_ = trying_;
    width_ = way.window;
    trial_ = true;
    return;
  }
  trial_ = false;
  next_ = -1;
  double best = kMargin / plain_;
  for (int i = 0; i < static_cast<int>(ways_.size()); ++i)
    if (ways_[at(i)].alive && gain(ways_[at(i)], best_width(ways_[at(i)])) > best) {
      best = gain(ways_[at(i)], best_width(ways_[at(i)]));
      next_ = i;
    }
  width_ = next_ < 0 ? 1 : best_width(ways_[at(next_)]);
  if (next_ < 0) {
    left_ = pause_;
    pause_ *= 4;
  }
}

void AutoPolicy::plain_step(int requests, double seconds) {
  learn(plain_, seconds / requests);
  if (++plain_steps_ < kWarm) return;
  if (plain_steps_ == kWarm) return decide();
  if (left_ > 0 && --left_ == 0) {
    // One whole block of the better drafter, whatever the table says.
    int best = -1;
    for (int i = 0; i < static_cast<int>(ways_.size()); ++i)
      if (ways_[at(i)].alive &&
          (best < 0 || gain(ways_[at(i)], best_width(ways_[at(i)])) > gain(ways_[at(best)], best_width(ways_[at(best)]))))
        best = i;
    if (best < 0) return;
    next_ = best;
    width_ = ways_[at(best)].window;
    trial_ = true;
  }
}

void AutoPolicy::speculative_step(double draft_seconds, double verify_seconds, const std::vector<int>& lens,
                                  const std::vector<int>& accepted) {
  if (next_ < 0) return;
  Way& way = ways_[at(next_)];
  const int batch = static_cast<int>(lens.size()), rows = std::accumulate(lens.begin(), lens.end(), 0);
  learn(way.draft, draft_seconds / batch);
  learn(verify_[at(std::clamp((rows + batch / 2) / batch, 1, way.window))], verify_seconds / batch);
  for (std::size_t b = 0; b < lens.size(); ++b)
    for (int k = 0; k + 1 < lens[b] && k < accepted[b]; ++k) {  // proposal k was judged if those before it stood
      way.tried[at(k)] += 1;
      way.passed[at(k)] += k + 1 < accepted[b] ? 1 : 0;
    }
  ++way.steps;
  decide();
}

}  // namespace specstate::runtime
