#pragma once
// A run of decoding on the GPU (the other backend of runtime/decode.hpp).
#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/cuda/group.hpp"
#include "runtime/decode.hpp"

namespace specstate::runtime::cuda {

/// For each prompt: committed tokens and the hash of the state, after the prefill and after every step.
using States = std::vector<std::vector<std::pair<int, std::uint64_t>>>;

/// As runtime::decode. `states`, where given, is filled, at the cost of waiting for every step; `known`, where given, are the tokens of plain decoding that
/// options.force_accept needs. Throws Error(kCuda) where there is no GPU.
Report decode(const Checkpoint& model, const std::vector<std::vector<int>>& prompts, const GenerateOptions& options, Mode mode,
              const Callbacks& callbacks, States* states, const std::vector<std::vector<int>>& known = {});
/// The same on whatever is the current GPU, as one rank of `group` where that is given: then every rank calls it with the same arguments, and all get
/// the same report (but for seconds and bytes).
Report run(const Checkpoint& model, const std::vector<std::vector<int>>& prompts, const GenerateOptions& options, Mode mode,
           const Callbacks& callbacks, States* states, Group* group, const std::vector<std::vector<int>>& known = {});

}  // namespace specstate::runtime::cuda
