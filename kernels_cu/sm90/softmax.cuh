// Softmax without a maximum in the steady loop.
//
// A row's weights are powers of two against its reference m, any number that keeps them and their sums in range; after
// the division by their sum l the choice of m is gone. A maximum is looked for only where the old reference will not
// do. Let `unit` turn a score into a power of two. The exponent of score s is
//
//   s * unit - m * unit     one fused multiply-add against the rounded m * unit, the same number for all keys of a row,
//                           so that nothing is lost, while |m * unit| < kFusedLimit (its last place is then below 1/8)
//   (s - m) * unit          beyond: equal scores cancel before anything is rounded
//
// written as (s - shift) * unit - log2 with one of shift, log2 zero. Rows that cannot take the fused form, and rows
// that have seen nothing (m = -inf), have the fast reference NaN: their sums come out NaN, and they go the slow way.
#pragma once
#include "core/lanes.cuh"
#include "sm90/scores.cuh"

constexpr float kFusedLimit = sizeof(Element) == 4 ? 0.0f : 1048576.0f;          // 2^20; never in float32
constexpr float kTileSumLimit = 32768.0f;       // 2^15: a thread's sum over a tile; float16 holds such weights
// Careful steps: the reference may be 2^8 too small; in float32 it never is. So there the weight of a lone key is 1.
constexpr float kLazyLimit = sizeof(Element) == 4 ? 0.0f : 8.0f;

struct Reference { float shift, log2; };

CF_DEVICE float not_a_number() { return float_of(0x7fffffffu); }

CF_DEVICE Reference reference_to(float m, float unit) {
  const float log2 = times(m, unit);
  if (m == -Limits<float>::infinity()) return {0.0f, 0.0f};
  return absolute(log2) < kFusedLimit ? Reference{0.0f, log2} : Reference{m, 0.0f};
}

CF_DEVICE float fast_reference(float m, float unit) {
  const float log2 = times(m, unit);
  return absolute(log2) < kFusedLimit ? log2 : not_a_number();
}

// The state of a thread's two rows. l is this thread's part until `finish`; fast is the fast reference to m.
struct Softmax {
  float m[2], l[2], fast[2], rescale[2];

  // Rows that are not there see nothing, and want no reference.
  CF_DEVICE void reset(i32 row, i32 rows) {
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      const bool live = row + 8 * h < rows;
      m[h] = live ? -Limits<float>::infinity() : 0.0f, l[h] = 0.0f, fast[h] = live ? not_a_number() : 0.0f;
    }
  }

  // Largest scores of the two rows.
  static CF_DEVICE void maxima(const Scores& s, float (&top)[2]) {
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      float x = -Limits<float>::infinity();
      CF_UNROLL
      for (int j = 0; j < kScores / 4; ++j) x = maximum(x, maximum(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      top[h] = QuadLanes::max(x);
    }
  }

  // Row h goes over to another reference; what has been accumulated must be multiplied by rescale[h].
  CF_DEVICE void move(int h, float to, float unit) {
    const Reference from = reference_to(m[h], unit), next = reference_to(to, unit);
    const float exponent = fused(from.shift - next.shift, unit, from.log2 - next.log2);
    rescale[h] = to == m[h] ? 1.0f : m[h] == -Limits<float>::infinity() ? 0.0f : ex2_approx_ftz(exponent);
    m[h] = to;
    l[h] *= rescale[h];
    fast[h] = fast_reference(to, unit);
  }

  // References for rows whose largest scores are `top`: those, or the old one where that is little too small. Whether
  // some row of the warp has moved.
  CF_DEVICE bool look(const float (&top)[2], float unit) {
    bool stay[2];
    CF_UNROLL
    for (int h = 0; h < 2; ++h) stay[h] = times(top[h] - m[h], unit) <= kLazyLimit;          // false for -inf - -inf
    const bool moved = vote_any(!stay[0] || !stay[1]);
    if (moved) {
      CF_UNROLL
      for (int h = 0; h < 2; ++h) move(h, stay[h] ? m[h] : maximum(m[h], top[h]), unit);
    }
    return moved;
  }

  // References of rows that have seen nothing before. Rows that are not there want none.
  CF_DEVICE void begin(const float (&top)[2], i32 row, i32 rows, float unit) {
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      m[h] = row + 8 * h < rows ? top[h] : 0.0f;
      l[h] = 0.0f, fast[h] = fast_reference(m[h], unit);
    }
  }

  // The same after sums have left the range in some row of the warp. Rows that did not stay as they were: a row's bits
  // never depend on its neighbours.
  CF_DEVICE void look_again(const float (&top)[2], const float (&sums)[2], float unit) {
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      const bool out = QuadLanes::max(in_range(sums[h]) ? 0.0f : 1.0f) != 0.0f;
      move(h, out ? maximum(m[h], top[h]) : m[h], unit);
    }
  }
  static CF_DEVICE bool in_range(float sum) { return sum <= kTileSumLimit; }        // false for NaN

  // Scores become weights, in place: the entries from 4 * from to 4 * to. Their sums are added to `sums`.
  template <bool kFused> CF_DEVICE void weigh(Scores& s, int from, int to, float unit, float (&sums)[2]) const {
    Reference r[2];
    CF_UNROLL
    for (int h = 0; h < 2; ++h) r[h] = kFused ? Reference{0.0f, fast[h]} : reference_to(m[h], unit);
    CF_UNROLL
    for (int j = from; j < to; ++j) {
      float* w = s + 4 * j;
      CF_UNROLL
      for (int n = 0; n < 4; ++n) {
        const float score = kFused ? w[n] : w[n] - r[n / 2].shift;
        w[n] = ex2_approx_ftz(fused(score, unit, -r[n / 2].log2));
      }
      sums[0] += w[0] + w[1];
      sums[1] += w[2] + w[3];
    }
  }

  // All of them, by the form that these references allow.
  CF_DEVICE void weigh(Scores& s, float unit, float (&sums)[2]) const {
    if (vote_any(fast[0] != fast[0] || fast[1] != fast[1])) {
      weigh<false>(s, 0, kScores / 4, unit, sums);
    } else {
      weigh<true>(s, 0, kScores / 4, unit, sums);
    }
  }

  // Ends row h, after its sink (-inf: none) has taken its share: the factor that makes its accumulated output the mean,
  // 0 for a row that saw nothing, and its lse in natural units. natural: of what is kept as a score.
  CF_DEVICE void finish(int h, float natural, float unit, float sink, float& factor, float& lse) const {
    finish_row(m[h], QuadLanes::sum(l[h]), natural, unit, sink, true, factor, lse);
  }
  // The same for a row of reference m, whose sum is there. Without a sink, lse only if it is wanted.
  CF_DEVICE void finish_row(float m, float sum, float natural, float unit, float sink, bool wanted, float& factor,
                            float& lse) const {
    const float infinity = Limits<float>::infinity();
    const bool seen = !(sum == 0.0f);
    factor = !seen ? 0.0f : sizeof(Element) == 4 ? 1.0f / sum : rcp_approx_ftz(sum);
    if (!wanted && sink == -infinity) return;
    const Reference r = reference_to(m, unit);
    const float rounding = r.shift == 0.0f ? fused(-m, unit, r.log2) : 0.0f;
    const float own = m == infinity ? m : fused(m, natural, logarithm(sum) + times(rounding, kLn2));
    lse = seen ? own : -infinity;
    if (sink == -infinity) return;
    const float top = maximum(lse, sink);
    const bool direct = top == infinity || lse != lse;
    const float both = direct ? lse + top : top + logarithm(exponential(lse - top) + exponential(sink - top));
    factor *= seen ? exponential(lse - both) : 1.0f;
    lse = both;
  }
};
