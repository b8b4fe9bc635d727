// From products to scores, for a tile that a warp holds in registers.
//
// Plain scores (scale alone) stay raw products wherever a fused multiply-add can take the scale along.
#pragma once
#include "attn/fast_tanh.cuh"
#include "attn/score.cuh"
#include "sm80/addends.cuh"

constexpr bool kPlainScores = !kMaskOrBias && !kSoftcapOrAlibi;
constexpr float kLog2e = 1.4426950408889634f;

// What row `first` + r of a tile sees, r < 256: columns from start + r to stop + r, below length. Rows may be queries
// and columns keys, or the reverse: 32 bits are enough for either. Rows from `rows` on see nothing.
struct RowBounds {
  i32 start, stop, length, rows;

  static CF_DEVICE RowBounds of_query(const Visibility& sight, i32 first) {
    return {limited(first + sight.offset - sight.left), limited(first + sight.offset + sight.right + 1), sight.kv_length,
            sight.q_length - first};
  }
  static CF_DEVICE RowBounds of_key(const Visibility& sight, i32 first) {
    return {limited(first - sight.offset - sight.right), limited(first - sight.offset + sight.left + 1), sight.q_length,
            sight.kv_length - first};
  }
  static CF_DEVICE i32 limited(i64 x) { return i32(clamp(x, i64(-1024), (i64(1) << 31) - 1024)); }

  // Elements of the tile whose columns begin at `col` become `hidden` where a row does not see a column.
  template <int kRows, int kCols> CF_DEVICE void select(float (&s)[kRows][kCols], i32 col, float hidden) const {
    const i32 own = fragment_row(0) - col - fragment_col(0), end = length - col - fragment_col(0);
    CF_UNROLL
    for (int u = 0; u < kRows; ++u) {
      const int r = u / 2 * 16 + u % 2 * 8;
      const i32 first = start + own + r, last = fragment_row(u) < rows ? smaller(stop + own + r, end) : first;
      CF_UNROLL
      for (int w = 0; w < kCols; ++w) {
        const int at = w / 2 * 8 + w % 2;
        s[u][w] = at >= first && at < last ? s[u][w] : hidden;
      }
    }
  }
};

// All that scores depend on besides the products. Rows of a tile are queries, or keys if kTurned.
template <bool kTurned> struct ScoreRules {
  ScoreTerms<float> terms;
  Visibility sight;

  // Natural scores from products, not yet selected; row and col are those of the tile's corner, `staged` its addends.
  // `derivative` (d(c) / d(a)) is left alone when nothing caps.
  template <int kRows, int kCols>
  CF_DEVICE void scale(float (&s)[kRows][kCols], float (&derivative)[kRows][kCols], i32 row, i32 col, u32 staged) const {
    scale_alone(s, derivative, row, col);
    if constexpr (kMaskOrBias) join_staged<kTurned>(s, staged, [](float& x, float addend) { x = with_addend(x, addend); });
  }

  // The same in fewer instructions, for those who look whether the sums of weights are numbers: where a mask or a bias forbids
  // a score that was infinite or NaN, it becomes NaN.
  template <int kRows, int kCols> CF_DEVICE void scale_in_haste(float (&s)[kRows][kCols], i32 row, i32 col, u32 staged) const {
    if constexpr (kMaskOrBias && !kSoftcapOrAlibi) {
      join_staged<kTurned>(s, staged, [&](float& x, float addend) { x = fused(terms.scale, x, addend); });
    } else {
      float unused[kRows][kCols];
      scale_alone(s, unused, row, col);
      if constexpr (kMaskOrBias) join_staged<kTurned>(s, staged, [](float& x, float addend) { x += addend; });
    }
  }

  // The same without the addends. With fast_tanh, and the rows of the table for softcap and ALiBi, softcap takes 1.59 instead
  // of 2.04 times the plain forward at D 128, 1.74 instead of 2.14 at D 64 (H200, 2026-11-30).
  template <int kRows, int kCols>
  CF_DEVICE void scale_alone(float (&s)[kRows][kCols], float (&derivative)[kRows][kCols], i32 row, i32 col) const {
    if (kSoftcapOrAlibi && terms.softcap > 0.0f) {
      const float factor = terms.scale * terms.inverse_softcap;
      CF_UNROLL
      for (int u = 0; u < kRows; ++u) {
        CF_UNROLL
        for (int w = 0; w < kCols; ++w) {
          const float tangent = fast_tanh(times(factor, s[u][w]));
          derivative[u][w] = fused(-tangent, tangent, 1.0f);
          s[u][w] = times(terms.softcap, tangent);
        }
      }
    } else {
      CF_UNROLL
      for (int u = 0; u < kRows; ++u) {
        CF_UNROLL
        for (int w = 0; w < kCols; ++w) s[u][w] = times(terms.scale, s[u][w]);
      }
    }
    if constexpr (kSoftcapOrAlibi) {
      if (terms.slope != 0.0f) {
        CF_UNROLL
        for (int u = 0; u < kRows; ++u) {
          CF_UNROLL
          for (int w = 0; w < kCols; ++w) s[u][w] = fused(-terms.slope, distance(row, col, u, w), s[u][w]);
        }
      }
    }
  }

  // |i + offset - j|
  CF_DEVICE float distance(i32 row, i32 col, int u, int w) const {
    const float ahead = kTurned ? float(col + sight.offset - row) : float(row + sight.offset - col);
    const float r = float(fragment_row(u)), c = float(fragment_col(w));
    return absolute(kTurned ? ahead + c - r : ahead + r - c);
  }
};

template <bool kTurned> CF_DEVICE ScoreRules<kTurned> score_rules_of(const Params& p, const Item& item, i32 head) {
  return {score_terms_of<float>(p, item, head), visibility_of(p, item)};
}
