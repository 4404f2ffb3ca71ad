#pragma once
// What the subcommands share: exit statuses and where JSON goes.
#include <string>

namespace specstate::cli {

inline constexpr int kOk = 0, kFailure = 1, kUsage = 2, kNotLossless = 3;

/// Throws what `write_json` would, as far as that can be foreseen: before the work, not after it.
void check_json(const std::string& file);

/// Writes `text` and a newline to a file, or to stdout for "-". Throws Error(kRuntime) naming the file.
void write_json(const std::string& file, const std::string& text);

/// Throws Error(kRuntime) if something written to stdout was lost (a full disk).
void finish_stdout();

}  // namespace specstate::cli
