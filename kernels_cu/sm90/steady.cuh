// From products to weights in one pass, by references that stay: straight code for each shape of scores, so that
// exponentials run beside the rest. The exponent of entry n is product * factor + term, in powers of two:
//
//   factor    scale, or with a softcap a polynomial of product^2, where nothing comes near the softcap
//   term      -reference, with ALiBi of keys on one side of the rows a line in the column, with a bias that too
//
// A mask has made products -inf before.
#pragma once
#include "sm90/softmax.cuh"
#include "sm90/addends.cuh"

// softcap * tanh(x) is softcap * x (c0 + c1 u + c2 u^2), u = x^2 - kNear^2, within 2^-22 of itself up to kNear. So the
// sign of u says whether it holds.
constexpr float kNear = 0.2f, kLeastCoefficient = 1e-33f;

struct Cap {
  float c[3];
  float limit;                   // of product^2, negative where the polynomial does not hold

  CF_DEVICE Cap(const ScoreTerms<float>& terms, float unit) {
    const float factor = times(terms.scale, terms.inverse_softcap), square = times(factor, factor);
    c[0] = times(unit, 0.98687669f), c[1] = times(times(unit, square), -0.32287357f);
    c[2] = times(times(times(unit, square), square), 0.13015409f);
    limit = absolute(c[2]) > kLeastCoefficient ? times(kNear * kNear, rcp_approx_ftz(square)) : -1.0f;
  }
  // near: negative, as a signed number, while it has held.
  CF_DEVICE float factor(float product, u32& near) const {
    const float u = fused(product, product, -limit);
    near &= bits_of(u);
    return fused(u, fused(u, c[2], c[1]), c[0]);
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
  const float (&reference)[2];
  Line line;
  const AddendTile& tile;
  const BiasRows& rows;          // of a bias that is read from where it lies

  // factor(n): of product n.
  template <bool kSloped, Bias kBias, class Factor>
  CF_DEVICE void weigh(Scores& s, float (&sums)[2], Factor factor) const {
    const auto weigh_one = [&](int n, float term) {
      s[n] = ex2_approx_ftz(fused(s[n], factor(n), term));
      sums[n / 2 % 2] += s[n];
    };
    const auto term = [&](int n) { return kSloped ? line.at(n) : -reference[n / 2 % 2]; };
    if constexpr (kBias == Bias::kComes) {
      for_bias(tile, [&](int n, float b) { weigh_one(n, fused(b, kLog2e, term(n))); });
    } else if constexpr (kBias == Bias::kInPlace) {
      rows.for_each([&](int n, float b) { weigh_one(n, fused(b, kLog2e, term(n))); });
    } else {
      CF_UNROLL
      for (int n = 0; n < kScores; ++n) weigh_one(n, term(n));
    }
  }
  template <bool kSloped, class Factor>
  CF_DEVICE void weigh(Scores& s, Bias bias, float (&sums)[2], Factor factor) const {
    if constexpr (kMaskOrBias) {
      if (bias == Bias::kComes) return weigh<kSloped, Bias::kComes>(s, sums, factor);
      if (bias == Bias::kInPlace) return weigh<kSloped, Bias::kInPlace>(s, sums, factor);
    }
    weigh<kSloped, Bias::kNone>(s, sums, factor);
  }
  template <class Factor>
  CF_DEVICE void weigh(Scores& s, bool sloped, Bias bias, float (&sums)[2], Factor factor) const {
    if constexpr (kSoftcapOrAlibi) {
      if (sloped) return weigh<true>(s, bias, sums, factor);
    }
    weigh<false>(s, bias, sums, factor);
  }
};
