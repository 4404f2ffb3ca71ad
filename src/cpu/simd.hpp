// First include of every file with Highway kernels: which instruction sets are compiled.
// SSSE3 adds compile time and no machine; vectors without a fixed size (SVE, RVV) cannot be held in arrays.
#ifndef HWY_DISABLED_TARGETS
#if defined(__x86_64__)
#define HWY_DISABLED_TARGETS HWY_SSSE3
#elif defined(__aarch64__)
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#endif
