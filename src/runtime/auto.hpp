#pragma once
// `auto`: speculate only where it pays, by measured costs and observed acceptance.
//
// Nothing is measured that is not also work done: the first steps decode plainly, the next ones draft and verify whole blocks, and what
// they took fills a cost table (a plain step, a draft, a verify of each width; widths not yet seen lie on a line between those that were).
// With the acceptance seen so far the table says which width of which drafter emits the most tokens a second, and whether plain decoding
// emits more. A drafter that lost narrowly is tried again after a pause that grows; one that lost clearly is dropped.
#include <cstdint>
#include <vector>

namespace specstate::runtime {

class AutoPolicy {
 public:
  /// `windows`: most rows that a verify of each drafter has.
  explicit AutoPolicy(std::vector<int> windows);

  /// The drafter of the next step, -1: none, decode plainly.
  int drafter() const { return next_; }
  /// Drafters that may be asked again; the features of plainly decoded tokens need not be kept for the others.
  bool alive(int drafter) const { return ways_[static_cast<std::size_t>(drafter)].alive; }
  /// Rows of each request that the next verify should have.
  int width() const { return width_; }
  /// The next step is there to measure: its width is not to be cut.
  bool trial() const { return trial_; }
  /// The cost table in the form of plan_verify_lengths: steps a second of `batch` requests that verify so many tokens in all.
  void speeds(int drafter, int batch, std::vector<std::int32_t>& tokens, std::vector<double>& steps_per_second) const;

  /// After a plain step of `requests` requests.
  void plain_step(int requests, double seconds);
  /// After a speculative step: what the draft and everything else took, rows verified and rows committed of each request.
  void speculative_step(double draft_seconds, double verify_seconds, const std::vector<int>& lens, const std::vector<int>& accepted);

  /// The table, for reports: seconds of a request's share of a plain step, of a draft, of a verify by rows; 0 where nothing was measured.
  double plain_cost() const { return plain_; }
  double draft_cost(int drafter) const { return ways_[static_cast<std::size_t>(drafter)].draft; }
  const std::vector<double>& verify_costs() const { return verify_; }

 private:
  struct Way {
    int window = 0;
    bool alive = true;
    int steps = 0;  // speculative steps so far
    double draft = 0;
    std::vector<double> tried, passed;  // by proposal: judged, and accepted
  };
  double verify_cost(int rows) const;
  double gain(const Way& way, int width) const;
  int best_width(const Way& way) const;
  void decide();

  std::vector<Way> ways_;
  double plain_ = 0;
  std::vector<double> verify_;  // [window + 1]
  int plain_steps_ = 0, trying_ = 0, left_ = 0, pause_;
  int next_ = -1, width_ = 1;
  bool trial_ = true;
};

}  // namespace specstate::runtime
