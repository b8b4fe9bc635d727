// core/numeric.cuh on a CPU. Every conversion has the instruction's rounding, bit for bit; the functions are the C
// library's, each within one last place, where the GPU's are within two. NaNs keep the CPU's payload.
#pragma once
#include "core/emulate/engine.cuh"

CF_DEVICE u32 bits_of(float x) { u32 r; __builtin_memcpy(&r, &x, 4); return r; }
CF_DEVICE float float_of(u32 x) { float r; __builtin_memcpy(&r, &x, 4); return r; }

namespace emulate {

CF_DEVICE u64 double_bits(double x) { u64 r; __builtin_memcpy(&r, &x, 8); return r; }

// x / 2^shift to the nearest integer, ties to even; 0 < shift.
CF_DEVICE u64 shifted(u64 x, int shift) {
  if (shift > 63) return 0;
  const u64 half = u64(1) << (shift - 1), rest = x & ((half << 1) - 1);
  return (x >> shift) + (rest > half || (rest == half && ((x >> shift) & 1)));
}

}  // namespace emulate

CF_DEVICE u32 low_word(double x) { return u32(emulate::double_bits(x)); }
CF_DEVICE u32 high_word(double x) { return u32(emulate::double_bits(x) >> 32); }
CF_DEVICE double double_of(u32 high, u32 low) {
  const u64 bits = u64(high) << 32 | low;
  double r;
  __builtin_memcpy(&r, &bits, 8);
  return r;
}

CF_DEVICE float cvt_f32_f16(u16 x) {
  const u32 sign = u32(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 0x3ff;
  if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
  const float size = float(int(fraction)) * 0x1p-24f;
  return sign ? -size : size;
}

CF_DEVICE u16 cvt_rn_f16_f64(double x) {
  const u64 bits = emulate::double_bits(x);
  const u16 sign = u16(bits >> 48 & 0x8000);
  const int exponent = int(bits >> 52 & 0x7ff) - 1023;
  const u64 fraction = bits & 0xfffffffffffffu;
  if (exponent == 1024) return u16(fraction ? 0x7fff : sign | 0x7c00);
  if (exponent > 15) return u16(sign | 0x7c00);
  // A carry out of the fraction moves to the next exponent, and from the largest number to infinity, by itself.
  if (exponent >= -14) return u16(sign | emulate::shifted(u64(exponent + 15) << 52 | fraction, 42));
  return u16(sign | emulate::shifted(u64(1) << 52 | fraction, 28 - exponent));
}

CF_DEVICE u16 cvt_rn_f16_f32(float x) { return cvt_rn_f16_f64(double(x)); }

CF_DEVICE float cvt_rz_f32_f64(double x) {
  const float nearest = float(x);
  const bool away = double(nearest) > x ? x > 0 : double(nearest) < x && x < 0;
  return away ? float_of(bits_of(nearest) - 1) : nearest;
}

CF_DEVICE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
CF_DEVICE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
CF_DEVICE float times(float a, float b) { return a * b; }          // the build forbids contraction
CF_DEVICE double times(double a, double b) { return a * b; }
CF_DEVICE float maximum(float a, float b) { return __builtin_fmaxf(a, b); }
CF_DEVICE double maximum(double a, double b) { return __builtin_fmax(a, b); }
CF_DEVICE float absolute(float x) { return __builtin_fabsf(x); }
CF_DEVICE double absolute(double x) { return __builtin_fabs(x); }
CF_DEVICE float exponential(float x) { return __builtin_expf(x); }
CF_DEVICE double exponential(double x) { return __builtin_exp(x); }
CF_DEVICE float logarithm(float x) { return __builtin_logf(x); }
CF_DEVICE double logarithm(double x) { return __builtin_log(x); }
CF_DEVICE float hyperbolic_tangent(float x) { return __builtin_tanhf(x); }
