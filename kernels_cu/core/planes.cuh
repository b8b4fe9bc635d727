// float as the sum of three bfloat16: hi + mid + lo. Every one of its 24 bits is in one of them, for magnitudes from
// 2^-110 up to the last one that bfloat16 holds.
#pragma once
#include "core/numeric.cuh"
#include "core/ptx_sm80.cuh"

constexpr int kPlanes = 3;      // hi, mid, lo
constexpr int kHi = 0, kMid = 1, kLo = 2;

// Two floats at once, packed with the first in the lower half.
struct PlanePair { u32 plane[kPlanes]; };

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
