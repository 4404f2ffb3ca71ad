#pragma once
// What the subcommands share: exit statuses and where JSON goes.
#include <string>

namespace specstate::cli {

inline constexpr int kOk = 0, kFailure = 1, kUsage = 2, kNotLossless = 3;

/// Writes `text` and a newline to a file, or to stdout for "-". Throws Error(kRuntime) naming the file.
void write_json(const std::string& file, const std::string& text);

}  // namespace specstate::cli
