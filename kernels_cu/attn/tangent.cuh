// tanh of scores.
#pragma once
#include "attn/decay.cuh"

constexpr u32 kOne = 0x3ff00000u;      // high word of 1

CF_DEVICE float tangent(float x) { return hyperbolic_tangent(x); }

// Within 3 last places, and without branches, so that neighbours do not wait for each other: 26 instructions on doubles.
//
// With e = exp(-2 |x|) = s + s p, s a power of 2: (1 - e) / (1 + e), where 1 - s is exact and |x| near 0 keeps
// its last places; or, from |x| = 0.87 on, 1 - 2 e / (1 + e).
CF_DEVICE double tangent(double x) {
  const double z = times(-2.0, absolute(x));
  const DecayParts parts = parts_of_decay(z);
  const double p = parts.rest;
  const bool ends = i32(parts.k) < -2;
  const u32 power = kOne + (parts.k << 20);
  const double s = double_of(power, 0), factor = double_of(power + (ends ? 1u << 20 : 0), 0);      // s, and s or 2 s
  const double over = fused(-factor, p, ends ? -factor : 1.0 - s), under = fused(s, p, 1.0 + s);
  const double near = rcp_approx_ftz(under), error = fused(-under, near, 1.0), first = times(over, near);
  const double quotient = fused(first, fused(error, error, error), first);
  const double size = unbranched(quotient + (ends ? 1.0 : 0.0));
  const bool far = is_far(z);
  return double_of((far ? kOne : high_word(size)) | (high_word(x) & 0x80000000u), far ? 0 : low_word(size));
}
