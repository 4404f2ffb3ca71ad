#pragma once
// Ranges for a profiler: none here.
inline void nvtxRangePushA(const char*) {}
inline void nvtxRangePop() {}
