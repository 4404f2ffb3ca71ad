#pragma once
// Every environment variable of the project, read once. An unknown SPECSTATE_* is warned of.
#include <string>
#include <vector>

namespace specstate::core {

struct EnvVariable {
  const char* name;
  const char* meaning;
  const char* fallback;
};

/// The table that docs/environment.md is generated from.
const std::vector<EnvVariable>& env_table();

struct Environment {
  int num_threads = 0;   // 0: all cores that the process may use
  int log_level = 1;     // 0 error, 1 warning, 2 info, 3 debug
  std::string log_dest;  // empty: stderr
};

const Environment& env();

/// Level as in Environment::log_level.
void log(int level, const std::string& text);

}  // namespace specstate::core
