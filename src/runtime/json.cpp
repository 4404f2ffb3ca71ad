#include "runtime/json.hpp"

#include <fmt/format.h>

#include <set>
#include <vector>

#include "core/match.hpp"

namespace specstate::runtime {

namespace {
constexpr int kMaxDepth = 16;
}

Json parse_json(std::string_view text, const std::string& name) {
  std::vector<std::set<std::string>> keys;
  const Json::parser_callback_t watch = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kMaxDepth) core::throw_value(fmt::format("{}: expected JSON nested at most {} deep.", name, kMaxDepth));
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second)
      core::throw_value(fmt::format("{}: '{}' is named twice.", name, shown_text(value.get_ref<const std::string&>())));
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::exception& e) {
    core::throw_value(fmt::format("{}: expected valid JSON: {}.", name, shown_text(e.what())));
  }
}

std::string shown_text(std::string_view s) {
  std::string out;
  for (const char c : s.substr(0, 80)) out += c >= 32 && c < 127 ? c : '?';
  return s.size() > 80 ? out + "..." : out;
}

std::string shown(const Json& v) { return shown_text(v.dump(-1, ' ', true, Json::error_handler_t::replace)); }

}  // namespace specstate::runtime
