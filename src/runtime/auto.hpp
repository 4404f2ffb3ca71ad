#pragma once
// `auto`: speculate only where it pays, by measured costs and observed acceptance.
//
// Costs come from a table measured on the live state before the first step (a verify of nothing committed leaves the state as it was).
// If even a fully accepted block were slower than plain decoding, plain decoding it is. Otherwise a few speculative steps are tried;
// from then on the observed rates of both ways decide, and a lost trial is repeated after twice as long each time.
#include <cstdint>
#include <vector>

#include "specstate/runtime.hpp"

namespace specstate::runtime {

/// One of the two ways a step can go, with its observed rate.
class AutoPolicy {
 public:
  AutoPolicy() = default;
  /// `costs` complete; `draft`: seconds of the drafter that would be used; `batch` requests.
  AutoPolicy(const Report::Costs& costs, double draft, int batch);

  /// Whether any width could beat plain decoding.
  bool hopeful() const { return hopeful_; }
  bool speculate() const { return speculate_; }
  /// Rows of each request that a verify should have, by the acceptance seen so far.
  int width() const;
  /// Steps a second for plan_verify_lengths: a draft and a verify of so many rows of the whole batch.
  const std::vector<std::int32_t>& probe_tokens() const { return probe_tokens_; }
  const std::vector<double>& steps_per_second() const { return steps_per_second_; }

  /// After a plain step of `requests` requests.
  void plain_step(int requests, double seconds);
  /// After a speculative step: each request verified `lens` rows, of which `accepted` were committed.
  void speculative_step(const std::vector<int>& lens, const std::vector<int>& accepted, double seconds);

 private:
  double gain(int width) const;

  Report::Costs costs_;
  double draft_ = 0;
  int batch_ = 1;
  bool hopeful_ = false, speculate_ = false;
  std::vector<double> tried_, passed_;   // [window] proposal k was verified after all before it passed; and passed itself
  double plain_rate_ = 0, spec_rate_ = 0;  // tokens a second
  int steps_ = 0;                        // speculative steps of this trial
  int plain_left_ = 0, pause_ = 0;
  std::vector<std::int32_t> probe_tokens_;
  std::vector<double> steps_per_second_;
};

}  // namespace specstate::runtime
