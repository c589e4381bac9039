// The floating-point mode of a piece of work. A thread may flush subnormal numbers to zero or round in another direction
// (torch.set_flush_denormal sets this on the calling thread alone), and then the bits of a result would depend on which
// thread computed it.
#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace ruda {

// While one lives, its thread rounds to nearest, keeps subnormal numbers and traps nothing; then its own mode returns.
class FloatMode {
 public:
  FloatMode() : own_(get()) { set(kIeee); }
  ~FloatMode() { set(own_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  // The memory clobbers keep loads and stores of numbers, and so the arithmetic on them, between the two calls.
#if defined(__SSE__)
  using Mode = unsigned;
  static constexpr Mode kIeee = 0x1f80;  // MXCSR: every exception masked, and nothing else
  static Mode get() { return _mm_getcsr(); }
  static void set(Mode mode) {
    __asm__ volatile("" ::: "memory");
    _mm_setcsr(mode);
    __asm__ volatile("" ::: "memory");
  }
#elif defined(__aarch64__)
  using Mode = unsigned long;
  static constexpr Mode kIeee = 0;  // FPCR
  static Mode get() {
    Mode mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(Mode mode) { __asm__ volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
#else
  using Mode = std::fenv_t;
  static inline const Mode kIeee = *FE_DFL_ENV;
  static Mode get() {
    Mode mode;
    std::fegetenv(&mode);
    return mode;
  }
  static void set(const Mode& mode) { std::fesetenv(&mode); }
#endif

  const Mode own_;
};

}  // namespace ruda
