#include "cpu/simd_target.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd_target.cpp"
#include "cpu/simd.hpp"
//
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace specstate::cpu::HWY_NAMESPACE {

SimdTarget describe() { return {hwy::TargetName(HWY_TARGET), HWY_NATIVE_FMA != 0, static_cast<int>(HWY_LANES(float))}; }

}  // namespace specstate::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace specstate::cpu {

HWY_EXPORT(describe);
SimdTarget simd_target() { return HWY_DYNAMIC_DISPATCH(describe)(); }

}  // namespace specstate::cpu
#endif
