#pragma once
// The two loops that no kernel can beat.
#include <cstdint>

namespace specstate::bench {

/// Runs `steps` rounds of independent multiply-adds in registers; returns the floating point operations done.
double fma_loop(std::int64_t steps);
/// Reads `bytes` (a multiple of 64) once, front to back or as eight streams side by side: the first is faster in a cache, the second
/// in memory.
void read_loop(const void* memory, std::int64_t bytes, bool many_streams);

}  // namespace specstate::bench
