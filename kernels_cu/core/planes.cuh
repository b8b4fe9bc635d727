// float as the sum of three bfloat16: hi + mid + lo. Every one of its 24 bits is in one of them, for magnitudes from
// 2^-110 on.
#pragma once
#include "core/numeric.cuh"
#include "core/ptx_sm80.cuh"

constexpr int kPlanes = 3;      // hi, mid, lo
constexpr int kHi = 0, kMid = 1, kLo = 2;

// Two floats at once, packed with the first in the lower half.
struct PlanePair { u32 plane[kPlanes]; };

// Magnitudes up to the last one that bfloat16 holds, 2^128 - 2^120: beyond, hi is infinite.
CF_DEVICE PlanePair split(float low, float high) {
  PlanePair pair;
  CF_UNROLL
  for (int n = 0; n < kPlanes; ++n) {
    pair.plane[n] = cvt_rn_x2<bfloat16>(low, high);
    low -= float_of(pair.plane[n] << 16);
    high -= float_of(pair.plane[n] & 0xffff0000u);
  }
  return pair;
}

// x, or what is nearest to it that bfloat16 does not round to infinity; 0 for what is no number or infinite.
CF_DEVICE float held(float x) {
  const float most = float_of(0x7f7f0000u), size = absolute(x);
  if (!(size < Limits<float>::infinity())) return 0.0f;
  return size > most ? (x < 0.0f ? -most : most) : x;
}

// All magnitudes. What is not finite is in lo alone: it then meets nothing but hi of the other factor, which is 0 only
// where that factor is, and a product of the two is what it is in floats.
CF_DEVICE PlanePair split_any(float low, float high) {
  const u32 hi = cvt_rn_x2<bfloat16>(held(low), held(high));
  low -= float_of(hi << 16), high -= float_of(hi & 0xffff0000u);
  const u32 mid = cvt_rn_x2<bfloat16>(held(low), held(high));
  return {hi, mid, cvt_rn_x2<bfloat16>(low - float_of(mid << 16), high - float_of(mid & 0xffff0000u))};
}
