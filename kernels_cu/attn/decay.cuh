// e^x for x <= 0: what a softmax takes of its scores.
#pragma once
#include "core/block.cuh"
#include "core/numeric.cuh"
#include "core/ptx_sm80.cuh"

// Within 2 last places of the power of 2 that x is rounded to; less than 2^-126 is 0.
CF_DEVICE float decay(float x) { return ex2_approx_ftz(times(x, 1.4426950408889634f)); }

// log2(e), -log(2) in two parts of which the first has few bits, and 1 / 13!, 1 / 12!, ... 1 / 2!
CF_CONSTANT double kDecay[15] = {
    1.4426950408889634, -0.6931471803691238, -1.9082149292705877e-10, 1.0 / 6227020800.0, 1.0 / 479001600.0,
    1.0 / 39916800.0,   1.0 / 3628800.0,     1.0 / 362880.0,          1.0 / 40320.0,      1.0 / 5040.0,
    1.0 / 720.0,        1.0 / 120.0,         1.0 / 24.0,              1.0 / 6.0,          0.5};

// Within 1 last place; results below 2^-1019 are 0.
//
// x = k log(2) + r with |r| <= log(2) / 2; k times the first part of log(2) is exact.
CF_DEVICE double decay(double x) {
  constexpr double kRound = 6755399441055744.0;      // 1.5 * 2^52: the low word of kRound + k is that of k
  const double sum = fused(x, kDecay[0], kRound), k = sum - kRound;
  const double r = fused(k, kDecay[2], fused(k, kDecay[1], x));
  double tail = kDecay[3];
  CF_UNROLL
  for (int n = 4; n < 15; ++n) tail = fused(tail, r, kDecay[n]);
  const double power = unbranched(fused(times(tail, r), r, r) + 1.0);      // or each would be a branch of its own
  return x < -706.0 ? 0.0 : double_of(high_word(power) + (low_word(sum) << 20), low_word(power));
}
