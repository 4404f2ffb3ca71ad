#pragma once
// Parsing JSON that may be hostile: bounded depth (printing and comparing recurse), no key twice, only Error leaves.
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace specstate::runtime {

using Json = nlohmann::json;

/// Throws Error(kValue) whose text starts with `name`.
Json parse_json(std::string_view text, const std::string& name);

/// At most 80 printable characters of something that we did not write.
std::string shown_text(std::string_view s);
std::string shown(const Json& v);

}  // namespace specstate::runtime
