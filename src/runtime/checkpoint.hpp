#pragma once
// A model folder: config.json + model.safetensors of the target, and the drafters in dflash/ and dspark/ where they are there.
#include <memory>
#include <optional>
#include <string>

#include "runtime/config.hpp"
#include "runtime/safetensors.hpp"
#include "specstate/export.hpp"

namespace specstate::runtime {

/// One line about a usable checkpoint; throws Error saying what is wrong with any other.
std::string describe_checkpoint(const std::string& folder);

}  // namespace specstate::runtime
