#pragma once
// Ranges for a profiler: here their names are kept, for a test.
#include <string>
#include <vector>

inline thread_local std::vector<std::string> nvtx_open, nvtx_seen;
inline void nvtxRangePushA(const char* name) {
  nvtx_open.emplace_back(name);
  std::string path;
  for (const std::string& range : nvtx_open) path += "/" + range;
  nvtx_seen.push_back(path);
}
inline void nvtxRangePop() { nvtx_open.pop_back(); }
