#pragma once
// The reference engine: the embedded hybrid model (KDA + sparse MLA) decoded plainly or speculatively through all three systems.
// A host that has its own engine needs none of this; it shows how the families work together, and proves that speculation is lossless.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "specstate/export.hpp"

namespace specstate::runtime {

enum class Mode : std::uint8_t { kAuto, kPlain, kDFlash, kDSpark };
/// "auto", "plain", "dflash", "dspark".
SPECSTATE_API const char* name_of(Mode mode) noexcept;

/// Where this build or installation keeps the embedded model, searched from the running executable; "" if nowhere.
SPECSTATE_API std::string find_embedded_model();

}  // namespace specstate::runtime
