#pragma once
// One run of decoding: the prompts of a batch from prefill to the last token, plainly or speculatively.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/drafter.hpp"
#include "runtime/target.hpp"
#include "specstate/runtime.hpp"

namespace specstate::runtime {

/// What a run needs beside the public options.
struct RunOptions {
  Mode mode = Mode::kPlain;
  /// Forced acceptance: the tokens that plain decoding emits, and how many tokens step 0, 1, ... commits (cyclically). Empty: none.
  std::vector<std::vector<int>> known;
  std::vector<int> lengths;
  /// For tests of auto: the drafter of step 0, 1, ... (-1: plain), whatever was measured.
  std::function<int(std::int64_t step)> drafter;
};

Report decode(const Checkpoint& model, const std::vector<std::vector<int>>& prompts, const GenerateOptions& options, const RunOptions& run,
              const Callbacks& callbacks);

/// [BOS] + bytes.
std::vector<int> tokens_of(const std::string& prompt, const TargetConfig& config);
/// The window of a mode: rows of a verify, 1 for plain; auto takes the larger of its drafters'.
int window_of(const Checkpoint& model, Mode mode);

}  // namespace specstate::runtime
