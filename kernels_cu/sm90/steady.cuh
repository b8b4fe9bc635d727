// From products to weights in one pass, by references that stay: straight code for each shape of scores, so that
// exponentials run beside the rest. The exponent of entry n is product * factor + term, in powers of two:
//
//   factor    scale, or with a softcap a polynomial of product^2, where nothing comes near the softcap
//   term      -reference, with ALiBi of keys on one side of the rows a line in the column, with a bias that too
//
// A mask has made products -inf before.
#pragma once
#include "sm90/addends.cuh"

// softcap * tanh(x) is softcap * x (c0 + c1 x^2 + c2 x^4) within 2^-22 of itself up to kNear.
constexpr float kNear = 0.2f, kLeastCoefficient = 1e-33f;

struct Cap {
  float c[3];
  float largest;                 // product, less than 0 where the polynomial does not hold

  CF_DEVICE Cap(const ScoreTerms<float>& terms, float unit) {
    const float factor = times(terms.scale, terms.inverse_softcap), square = times(factor, factor);
    c[0] = times(unit, 0.99999988f), c[1] = times(times(unit, square), -0.33328590f);
    c[2] = times(times(times(unit, square), square), 0.13015409f);
    largest = absolute(c[2]) > kLeastCoefficient ? times(kNear, rcp_approx_ftz(absolute(factor))) : -1.0f;
  }
  // Whether the polynomial holds for all products of the warp's rows that are there: live[h].
  CF_DEVICE bool holds(const Scores& s, const bool (&live)[2]) const {
    float top[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) top[n % 4] = maximum(top[n % 4], absolute(s[n]));
    const float low = maximum(top[0], top[1]), high = maximum(top[2], top[3]);
    return !vote_any((live[0] && !(low <= largest)) || (live[1] && !(high <= largest)));
  }
  CF_DEVICE float factor(float product) const {
    const float x = times(product, product);
    return fused(x, fused(x, c[2], c[1]), c[0]);
  }
};

// ALiBi for keys on one side of a thread's two rows, less their references.
struct Line {
  float step, base[2];

  CF_DEVICE Line(float slope, float first, const float (&reference)[2]) {      // first: from column 0 to row 0
    step = times(first > 0.0f ? slope : -slope, kLog2e);
    CF_UNROLL
    for (int h = 0; h < 2; ++h) base[h] = fused(-step, first + float(8 * h), -reference[h]);
  }
  CF_DEVICE float at(int n) const { return fused(step, float(n / 4 * 8 + n % 2), base[n / 2 % 2]); }
};

struct Steady {
  float unit;                    // of a product
  const float (&reference)[2];
  Cap cap;
  Line line;
  const AddendTile& tile;

  template <bool kCapped, bool kSloped, bool kBiased> CF_DEVICE void weigh(Scores& s, float (&sums)[2]) const {
    const auto weigh_one = [&](int n, float term) {
      s[n] = ex2_approx_ftz(fused(s[n], kCapped ? cap.factor(s[n]) : unit, term));
      sums[n / 2 % 2] += s[n];
    };
    const auto term = [&](int n) { return kSloped ? line.at(n) : -reference[n / 2 % 2]; };
    if constexpr (kBiased) {
      for_bias(tile, [&](int n, float b) { weigh_one(n, fused(b, kLog2e, term(n))); });
    } else {
      CF_UNROLL
      for (int n = 0; n < kScores; ++n) weigh_one(n, term(n));
    }
  }
  template <bool kCapped, bool kSloped> CF_DEVICE void weigh(Scores& s, bool biased, float (&sums)[2]) const {
    if constexpr (kMaskOrBias) {
      if (biased) return weigh<kCapped, kSloped, true>(s, sums);
    }
    weigh<kCapped, kSloped, false>(s, sums);
  }
  CF_DEVICE void weigh(Scores& s, bool capped, bool sloped, bool biased, float (&sums)[2]) const {
    if constexpr (kSoftcapOrAlibi) {
      if (capped && sloped) return weigh<true, true>(s, biased, sums);
      if (capped) return weigh<true, false>(s, biased, sums);
      if (sloped) return weigh<false, true>(s, biased, sums);
    }
    weigh<false, false>(s, biased, sums);
  }
};
