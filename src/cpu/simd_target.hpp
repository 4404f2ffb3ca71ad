#pragma once
// Which instruction set the run-time dispatch uses.

namespace specstate::cpu {

struct SimdTarget {
  const char* name;  // Highway's: "AVX3" (AVX-512), "AVX2", "SSE4", "SCALAR", "NEON"
  bool fma;          // a multiply-add rounds once; results are bit-identical among all targets that have it
  int float_lanes;   // in a vector register
};

SimdTarget simd_target();

}  // namespace specstate::cpu
