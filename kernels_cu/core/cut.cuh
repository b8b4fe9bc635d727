// Sums of floats on tensor cores, which cut toward zero where floats are rounded.
//
// A cut takes 0.72 * 2^-24 of a sum on average. What many products have lost together is given back at once: the part of
// their sum that is expected. Without that, errors point one way: scores that are all too small make flat weights.
//
// Largest / rms error of tf32x3 in sm90_wide as multiples of the plain computation's, ordinary inputs, 512 keys (H200,
// 2026-11-30), before and since:
//                    out                         dq                          dk
//   head dim  64     0.45 / 0.51  0.27 / 0.39    0.85 / 0.75  0.81 / 0.64    1.36 / 0.76  0.61 / 0.64
//   head dim 128     0.40 / 0.61  0.15 / 0.39    1.50 / 0.84  0.67 / 0.62    1.32 / 0.84  0.57 / 0.62
#pragma once
#include "core/numeric.cuh"
#include "core/ptx_sm80.cuh"

// Of a sum over `steps` of like products, whose cuts meet parts of it that grow evenly.
CF_DEVICE constexpr float part_cut(int steps) { return 0.36f * 0x1p-24f * float(steps + 1); }
// What a lane's sums may have lost of it: nothing if there are few terms, or few digits, which may be exact.
template <int kCount> CF_DEVICE float part_of(const float (&sums)[kCount], float part, i32 terms) {
  u32 digits = 0;
  CF_UNROLL
  for (int n = 0; n < kCount; ++n) digits |= bits_of(sums[n]);
  return terms > 16 && (digits & 0xffu) != 0 ? part : 0.0f;
}
CF_DEVICE float restored(float sum, float part) { return fused(sum, part, sum); }
template <int kCount> CF_DEVICE void restore(float (&sums)[kCount], float part, i32 terms) {
  const float own = part_of(sums, part, terms);
  CF_UNROLL
  for (int n = 0; n < kCount; ++n) sums[n] = restored(sums[n], own);
}

// Whether some sum is infinite or no number.
template <int kCount> CF_DEVICE bool any_lost(const float (&sums)[kCount]) {
  float probe[4] = {};
  CF_UNROLL
  for (int n = 0; n < kCount; ++n) probe[n % 4] = fused(sums[n], 0.0f, probe[n % 4]);
  const float sum = (probe[0] + probe[1]) + (probe[2] + probe[3]);
  return sum != sum;
}

// Products of queries and keys, each restored if it is below kLargeProduct: from there on they may be whole numbers that
// differ by little. `recover` mends those that are lost in some lane of the warp.
constexpr float kLargeProduct = 128.0f;
template <int kCount, class Recover>
CF_DEVICE void restore_products(float (&s)[kCount], float part, i32 terms, Recover recover) {
  float squares[4] = {};
  CF_UNROLL
  for (int n = 0; n < kCount; ++n) squares[n % 4] = fused(s[n], s[n], squares[n % 4]);
  const float sum = (squares[0] + squares[1]) + (squares[2] + squares[3]), own = part_of(s, part, terms);
  if (vote_any(!(sum < kLargeProduct * kLargeProduct))) {
    if (vote_any(any_lost(s))) recover();
    CF_UNROLL
    for (int n = 0; n < kCount; ++n) s[n] = absolute(s[n]) < kLargeProduct ? restored(s[n], own) : s[n];
  } else {
    CF_UNROLL
    for (int n = 0; n < kCount; ++n) s[n] = restored(s[n], own);
  }
}

// A result, times a factor. It gets back half a unit of its last place, which leaves sums that were exact as they are.
CF_DEVICE float finished(float sum, float factor) { return fused(sum, factor, sum * (factor * 0x1p-25f)); }
