#include "core/env.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

extern char** environ;  // NOLINT: POSIX

namespace specstate::core {

const std::vector<EnvVariable>& env_table() {
  static const std::vector<EnvVariable> table = {
      {"SPECSTATE_LIBRARY_PATH", "folder of the shared libraries that the Python package loads", "beside the package"},
      {"SPECSTATE_LOG_DEST", "file that log lines are appended to", "stderr"},
      {"SPECSTATE_LOG_LEVEL", "error, warning, info or debug", "warning"},
      {"SPECSTATE_NUM_THREADS", "threads of the CPU backend", "all cores of the process"},
      {"SPECSTATE_SGLANG", "what the sglang plugin replaces: 1 (everything), 0 (nothing), or families and functions with commas between",
       "none"},
  };
  return table;
}

namespace {

std::string get(const char* name) {
  const char* v = std::getenv(name);
  return v ? v : "";
}

void write_line(const Environment& e, const std::string& text) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  std::FILE* f = e.log_dest.empty() ? stderr : std::fopen(e.log_dest.c_str(), "a");
  if (!f) f = stderr;
  std::fprintf(f, "specstate: %s\n", text.c_str());
  if (f != stderr) std::fclose(f);
}

Environment read() {
  Environment e;
  std::vector<std::string> warnings;
  e.log_dest = get("SPECSTATE_LOG_DEST");
  const std::string level = get("SPECSTATE_LOG_LEVEL");
  static const char* levels[] = {"error", "warning", "info", "debug"};
  bool known = level.empty();
  for (int i = 0; i < 4; ++i)
    if (level == levels[i]) e.log_level = i, known = true;
  if (!known) warnings.push_back("SPECSTATE_LOG_LEVEL: expected error, warning, info or debug, got '" + level + "'; using warning");
  const std::string threads = get("SPECSTATE_NUM_THREADS");
  if (!threads.empty()) {
    char* end = nullptr;
    const long n = std::strtol(threads.c_str(), &end, 10);
    if (*end == 0 && n >= 1 && n <= 4096)
      e.num_threads = static_cast<int>(n);
    else
      warnings.push_back("SPECSTATE_NUM_THREADS: expected a number from 1 to 4096, got '" + threads + "'; using all cores");
  }
  for (char** p = environ; *p; ++p) {
    if (std::strncmp(*p, "SPECSTATE_", 10) != 0) continue;
    const std::string name(*p, std::strcspn(*p, "="));
    bool in_table = false;
    for (const EnvVariable& v : env_table()) in_table = in_table || name == v.name;
    if (!in_table) warnings.push_back("unknown environment variable " + name + " (docs/environment.md lists them)");
  }
  if (e.log_level >= 1)
    for (const std::string& w : warnings) write_line(e, "warning: " + w);
  return e;
}

}  // namespace

const Environment& env() {
  static const Environment e = read();
  return e;
}

void log(int level, const std::string& text) {
  static const char* names[] = {"error: ", "warning: ", "info: ", "debug: "};
  if (level <= env().log_level) write_line(env(), names[level] + text);
}

}  // namespace specstate::core
