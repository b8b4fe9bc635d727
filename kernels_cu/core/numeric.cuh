// Numbers: conversions with one rounding, and the few functions that attention needs, for float and double alike.
#pragma once
#include "core/types.cuh"

#ifdef CUPYFLASH_EMULATE
#include "core/emulate/numeric.cuh"
#else

CF_DEVICE u32 bits_of(float x) { return __float_as_uint(x); }              // bit cast
CF_DEVICE float float_of(u32 x) { return __uint_as_float(x); }             // bit cast

CF_DEVICE u32 low_word(double x) { return u32(__double2loint(x)); }         // of its bits
CF_DEVICE u32 high_word(double x) { return u32(__double2hiint(x)); }        // of its bits
CF_DEVICE double double_of(u32 high, u32 low) { return __hiloint2double(i32(high), i32(low)); }

// cvt.f32.f16: exact.
CF_DEVICE float cvt_f32_f16(u16 x) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x)); return r; }
// cvt.rn.f16.f32: to nearest, ties to even.
CF_DEVICE u16 cvt_rn_f16_f32(float x) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
// cvt.rn.f16.f64: to nearest, ties to even.
CF_DEVICE u16 cvt_rn_f16_f64(double x) { u16 r; asm("cvt.rn.f16.f64 %0, %1;" : "=h"(r) : "d"(x)); return r; }
// cvt.rz.f32.f64: toward zero.
CF_DEVICE float cvt_rz_f32_f64(double x) { return __double2float_rz(x); }

CF_DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }        // a * b + c, rounded once
CF_DEVICE double fused(double a, double b, double c) { return __fma_rn(a, b, c); }     // a * b + c, rounded once
CF_DEVICE float times(float a, float b) { return __fmul_rn(a, b); }                    // a * b, never fused with a sum
CF_DEVICE double times(double a, double b) { return __dmul_rn(a, b); }                 // a * b, never fused with a sum
CF_DEVICE float maximum(float a, float b) { return fmaxf(a, b); }                      // beside a NaN, the number
CF_DEVICE double maximum(double a, double b) { return fmax(a, b); }                    // beside a NaN, the number
CF_DEVICE float absolute(float x) { return fabsf(x); }
CF_DEVICE double absolute(double x) { return fabs(x); }
CF_DEVICE float exponential(float x) { return expf(x); }                               // e^x within 2 last places
CF_DEVICE double exponential(double x) { return exp(x); }                              // e^x within 1 last place
CF_DEVICE float logarithm(float x) { return logf(x); }                                 // natural
CF_DEVICE double logarithm(double x) { return log(x); }                                // natural
CF_DEVICE float hyperbolic_tangent(float x) { return tanhf(x); }

#endif

template <class T> struct Limits;
template <> struct Limits<float> { static CF_DEVICE float infinity() { return float_of(0x7f800000u); } };
template <> struct Limits<double> { static CF_DEVICE double infinity() { return Limits<float>::infinity(); } };

// To nearest, ties to even, NaN kept: the hardware's own instruction exists from sm_80 on alone.
CF_DEVICE u16 bfloat16_bits(float x) {
  const u32 bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<u16>((bits >> 16) | 0x40u);
  return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// A double on its way to a shorter format: cut, with the last bit set if anything was lost ("round to odd"), so that
// the rounding that follows is the only one.
CF_DEVICE float odd_float(double x) {
  const float cut = cvt_rz_f32_f64(x);
  const bool exact = static_cast<double>(cut) == x || x != x;
  return exact ? cut : float_of(bits_of(cut) | 1u);
}

// convert<To>(x): between storage and score types, rounded once.
template <class To> struct Convert;
template <> struct Convert<float> {
  static CF_DEVICE float from(float16 x) { return cvt_f32_f16(x.bits); }
  static CF_DEVICE float from(bfloat16 x) { return float_of(static_cast<u32>(x.bits) << 16); }
  static CF_DEVICE float from(float x) { return x; }
  static CF_DEVICE float from(double x) { return static_cast<float>(x); }
};
template <> struct Convert<double> {
  template <class From> static CF_DEVICE double from(From x) { return static_cast<double>(Convert<float>::from(x)); }
  static CF_DEVICE double from(double x) { return x; }
};
template <> struct Convert<float16> {
  static CF_DEVICE float16 from(float x) { return float16{cvt_rn_f16_f32(x)}; }
  static CF_DEVICE float16 from(double x) { return float16{cvt_rn_f16_f64(x)}; }
};
template <> struct Convert<bfloat16> {
  static CF_DEVICE bfloat16 from(float x) { return bfloat16{bfloat16_bits(x)}; }
  static CF_DEVICE bfloat16 from(double x) { return bfloat16{bfloat16_bits(odd_float(x))}; }
};
template <class To, class From> CF_DEVICE To convert(From x) { return Convert<To>::from(x); }
