#pragma once
// The floating-point environment that all arithmetic of the library runs in: round to nearest, subnormals kept.
//
// A mode belongs to a thread. If a caller changes that of its own thread (fesetround, torch.set_flush_denormal), the executor's threads
// keep theirs, and a row's result would depend on which thread it landed on. So every piece of work sets the default and puts the
// caller's modes back: reading the register costs a few cycles, writing it happens only where it differs.
#include <cstdint>

#if defined(__SSE2__) || defined(_M_X64)
#include <xmmintrin.h>
#elif defined(__aarch64__) && defined(__GNUC__)
#else
#include <cfenv>
#endif

namespace specstate::core {

class DefaultFloatEnv {
 public:
  DefaultFloatEnv() : before_(read()) {
    if ((before_ & kModes) != kDefault) write((before_ & ~kModes) | kDefault);
  }
  ~DefaultFloatEnv() {
    if ((before_ & kModes) != kDefault) write(before_);
  }
  DefaultFloatEnv(const DefaultFloatEnv&) : DefaultFloatEnv() {}
  DefaultFloatEnv& operator=(const DefaultFloatEnv&) = delete;

 private:
#if defined(__SSE2__) || defined(_M_X64)
  using Word = unsigned;
  static constexpr Word kModes = 0xFFC0, kDefault = 0x1F80;  // FTZ, rounding, masks of exceptions, DAZ; below them what has happened
  static Word read() { return _mm_getcsr(); }
  static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__) && defined(__GNUC__)
  using Word = std::uint64_t;
  static constexpr Word kModes = 0x07C89F00, kDefault = 0;  // AHP, DN, FZ, rounding, FZ16, traps
  static Word read() {
    Word word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { __asm__ volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = int;
  static constexpr Word kModes = ~0, kDefault = FE_TONEAREST;
  static Word read() { return std::fegetround(); }
  static void write(Word word) { std::fesetround(word); }
#endif

  Word before_;
};

}  // namespace specstate::core
