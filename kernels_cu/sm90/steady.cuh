// From products to weights in one pass, by references that stay: straight code for each shape of scores, so that
// exponentials run beside the rest. The exponent of entry n is product * factor + term, in powers of two:
//
//   factor    scale, or with a softcap a polynomial of product^2, where nothing comes near the softcap
//   term      -reference, with ALiBi of keys on one side of the rows a line in the column, with a bias that too
//
// A mask makes products -inf in the same pass, or biases; beside a bias of float32 before.
#pragma once
#include "sm90/softmax.cuh"
#include "sm90/addend_boxes.cuh"

// What steady steps want to know of a piece of work, found once: what is computed between scores and weights nothing
// hides.
struct Course {
  i32 start, turned;                   // key tiles of steps from `start` on are walked upward: turned - step
  i32 from, to, behind, ahead;         // steady are key tiles of [from, to) below `behind` or from `ahead` on
  float first, slope;                  // from this thread's column 0 of key tile 0 to its first row; of ALiBi, in base 2
  i32 rows;                            // from its first row to the end of the queries

  CF_DEVICE i32 tile(i32 step) const { return kFromWithin && step >= start ? turned - step : step; }
  CF_DEVICE bool steady(i32 n) const {
    return n >= from && n < to && (!kSoftcapOrAlibi || n < behind || n >= ahead);
  }
};

// softcap * tanh(x) is softcap * x (c0 + c1 u + c2 u^2), u = x^2 - kNear^2, within 2^-22 of itself up to kNear. So the
// sign of u says whether it holds. near: negative, as a signed number, while it has held.
CF_DEVICE float cap_factor(const Launch& launch, float product, u32& near) {
  const float u = fused(product, product, -launch.cap_limit);
  near &= bits_of(u);
  return fused(u, fused(u, launch.cap[2], launch.cap[1]), launch.cap[0]);
}

// ALiBi for keys on one side of a thread's two rows, less their references. Column 0 may be far away, where base has
// few places behind the point: `lost` is what its rounding takes from all weights of a row and tile, and gives to sums.
struct Line {
  float step, base[2], lost[2];

  CF_DEVICE Line(const Course& course, i32 n, const float (&reference)[2]) {
    const float first = course.first - float(n * kBlockKV);
    step = n < course.behind ? course.slope : -course.slope;
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float distance = first + float(8 * h);
      base[h] = fused(-step, distance, -reference[h]);
      lost[h] = times(fused(-step, distance, -base[h]) - reference[h], kLn2);
    }
  }
  CF_DEVICE float at(int n) const { return fused(step, float(n / 4 * 8 + n % 2), base[n / 2 % 2]); }
};

struct Steady {
  const float (&reference)[2];
  const Line& line;
  const AddendPlace& tile;

  // factor(n): of product n. kMasked: with a mask, which is in biases before they are added.
  template <bool kSloped, Bias kBias, bool kMasked = false, class Factor>
  CF_DEVICE void weigh(Scores& s, float (&sums)[2], Factor factor) const {
    const auto weigh_one = [&](int n, float term) {
      s[n] = ex2_approx_ftz(fused(s[n], factor(n), term));
      sums[n / 2 % 2] += s[n];
    };
    const auto term = [&](int n) { return kSloped ? line.at(n) : -reference[n / 2 % 2]; };
    const auto with_bias = [&](int n, float b) { weigh_one(n, fused(b, kLog2e, term(n))); };
    if constexpr (kBias == Bias::kOwn) {
      for_bias<kMasked>(tile, with_bias);
    } else if constexpr (kBias == Bias::kFloat) {
      for_wide_bias(tile, with_bias);
    } else if constexpr (kMasked) {
      for_mask(tile, [&](int n, bool allowed) {
        if (!allowed) s[n] = -Limits<float>::infinity();
        weigh_one(n, term(n));
      });
    } else {
      CF_UNROLL
      for (int n = 0; n < kScores; ++n) weigh_one(n, term(n));
    }
  }
  template <bool kSloped, class Factor>
  CF_DEVICE void weigh(Scores& s, Bias bias, bool masked, float (&sums)[2], Factor factor) const {
    if constexpr (kMaskOrBias) {
      if (bias == Bias::kOwn && masked) return weigh<kSloped, Bias::kOwn, true>(s, sums, factor);
      if (bias == Bias::kOwn) return weigh<kSloped, Bias::kOwn>(s, sums, factor);
      if (bias == Bias::kFloat) return weigh<kSloped, Bias::kFloat>(s, sums, factor);
      if (masked) return weigh<kSloped, Bias::kNone, true>(s, sums, factor);
    }
    weigh<kSloped, Bias::kNone>(s, sums, factor);
  }
  template <class Factor>
  CF_DEVICE void weigh(Scores& s, bool sloped, Bias bias, bool masked, float (&sums)[2], Factor factor) const {
    if constexpr (kSoftcapOrAlibi) {
      if (sloped) return weigh<true>(s, bias, masked, sums, factor);
    }
    weigh<false>(s, bias, masked, sums, factor);
  }
};
