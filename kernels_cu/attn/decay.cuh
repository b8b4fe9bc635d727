// e^x for x <= 0: what a softmax takes of its scores.
#pragma once
#include "core/block.cuh"
#include "core/numeric.cuh"
#include "core/ptx_sm80.cuh"

// Within 2 last places of the power of 2 that x is rounded to; less than 2^-126 is 0.
CF_DEVICE float decay(float x) { return ex2_approx_ftz(times(x, 1.4426950408889634f)); }

// log2(e), -log(2) in two parts of which the first has few bits, and (e^r - 1 - r) / r^2 for |r| <= log(2) / 2, from
// the tenth power down: its polynomial through the zeros of Chebyshev's.
CF_CONSTANT double kDecay[14] = {
    1.4426950408889634, -0.6931471803691238, -1.9082149292705877e-10, 2.0914686968086876e-09, 2.5105217004720745e-08,
    2.75572736431103e-07, 2.7557255400206422e-06, 2.4801587325547743e-05, 0.00019841269874820627,
    0.0013888888888883748, 0.008333333333326136, 0.04166666666666667, 0.1666666666666667, 0.5};

constexpr double kRound = 6755399441055744.0;      // 1.5 * 2^52: the low word of kRound + k is that of k
constexpr u32 kFarthest = 0xc0861000u, kInfinite = 0xfff00000u;      // high words of -706 and of -infinity
// Whether x, at most 0, has a power that counts as 0.
CF_DEVICE bool is_far(double x) { return high_word(x) - kFarthest - 1u < kInfinite - kFarthest; }

// e^x = 2^k (1 + rest): x = k log(2) + r with |r| <= log(2) / 2; k times the first part of log(2) is exact.
struct DecayParts { double rest; u32 k; };
CF_DEVICE DecayParts parts_of_decay(double x) {
  const double sum = fused(x, kDecay[0], kRound), k = sum - kRound;
  const double r = fused(k, kDecay[2], fused(k, kDecay[1], x));
  double tail = kDecay[3];
  CF_UNROLL
  for (int n = 4; n < 14; ++n) tail = fused(tail, r, kDecay[n]);
  return {fused(times(tail, r), r, r), low_word(sum)};
}

// Within 1 last place; results below 2^-1019 are 0.
CF_DEVICE double decay(double x) {
  const DecayParts parts = parts_of_decay(x);
  const double power = unbranched(parts.rest + 1.0);      // or each would be a branch of its own
  return is_far(x) ? 0.0 : double_of(high_word(power) + (parts.k << 20), low_word(power));
}
