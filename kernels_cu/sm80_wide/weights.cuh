// From products to scores and weights, for a tile that a warp holds in registers, rows queries, or keys if kTurned.
#pragma once
#include "core/lanes.cuh"
#include "sm80_wide/addends.cuh"
#include "sm80_wide/warp_decay.cuh"

// attn/softmax.cuh's step with this family's exponential.
template <int kRows> struct Softmax : OnlineSoftmax<Score, kRows, QuadLanes> {
  template <int kCols> CF_DEVICE void update(Score (&s)[kRows][kCols], Score (&rescale)[kRows]) {
    CF_UNROLL
    for (int u = 0; u < kRows; ++u) {
      Score top = s[u][0];
      CF_UNROLL
      for (int w = 1; w < kCols; ++w) top = maximum(top, s[u][w]);
      top = maximum(this->m[u], QuadLanes::max(top));
      const Score reference = reference_of(top);
      rescale[u] = decay(this->m[u] - reference);
      this->m[u] = top;
      Score sum = Score(0);
      CF_UNROLL
      for (int w = 0; w < kCols; ++w) {
        s[u][w] = decay(s[u][w] - reference);
        sum += s[u][w];
      }
      this->l[u] = fused(this->l[u], rescale[u], sum);
    }
  }
};

// x, or 0 where it is above.
CF_DEVICE float at_most_zero(float x) { return x > 0.0f ? 0.0f : x; }
CF_DEVICE double at_most_zero(double x) { return high_word(x) <= 0x7ff00000u ? 0.0 : x; }      // not by the pipe of doubles

// The backward's weight of a score s, from s - lse: none is above 1, and an unseen key has 0 whatever lse is.
template <class Decay> CF_DEVICE Score weight_by(Score s, Score power, const Decay& decay_of) {
  const Score weight = decay_of(at_most_zero(power));
  return kMaskOrBias && s == -Limits<Score>::infinity() ? Score(0) : weight;
}
CF_DEVICE Score weight_from(Score s, Score lse) {
  return weight_by(s, s - lse, [](Score x) { return decay(x); });
}

// dS from a weight and its gain r * dP - delta; a key that a mask or a bias forbids gets 0 whatever the gain is, and what
// positions and lengths forbid is selected by the caller.
CF_DEVICE Score score_gradient(Score weight, Score gain) {
  return kMaskOrBias && weight == Score(0) ? Score(0) : weight * gain;
}

// |i + offset - j| of entry (u, w) of the tile at (row, col).
template <bool kTurned> CF_DEVICE Score distance(const Work& work, i32 row, i32 col, int u, int w) {
  const Score ahead = Score(kTurned ? col + work.sight.offset - row : row + work.sight.offset - col);
  const Score r = Score(fragment_row(u)), c = Score(score_col(w));
  return absolute(kTurned ? ahead + c - r : ahead + r - c);
}

// Natural scores from products, not yet selected and without addends; (row, col) is the tile's corner. `derivative`
// (d(c) / d(a)) is left alone when nothing caps.
template <bool kTurned, int kRows, int kCols>
CF_DEVICE void scale_scores(Score (&s)[kRows][kCols], Score (&derivative)[kRows][kCols], const Work& work, i32 row,
                            i32 col) {
  const Score scale = work.terms.scale;
  CF_UNROLL
  for (int u = 0; u < kRows; ++u) {
    CF_UNROLL
    for (int w = 0; w < kCols; ++w) s[u][w] = times(scale, s[u][w]);
  }
  if constexpr (kSoftcapOrAlibi) {
    const ScoreTerms<Score> terms = work.terms;
    if (terms.softcap > Score(0)) {
      CF_UNROLL
      for (int u = 0; u < kRows; ++u) {
        CF_UNROLL
        for (int w = 0; w < kCols; ++w) s[u][w] = terms.capped(s[u][w], derivative[u][w]);
      }
    }
    if (terms.slope != Score(0)) {
      CF_UNROLL
      for (int u = 0; u < kRows; ++u) {
        CF_UNROLL
        for (int w = 0; w < kCols; ++w) s[u][w] = fused(-terms.slope, distance<kTurned>(work, row, col, u, w), s[u][w]);
      }
    }
  }
}

// Elements become `hidden` where positions and lengths forbid.
template <bool kTurned, int kRows, int kCols>
CF_DEVICE void select(Score (&s)[kRows][kCols], const Work& work, i32 row, i32 col, Score hidden) {
  CF_UNROLL
  for (int u = 0; u < kRows; ++u) {
    const i32 i = row + fragment_row(u);
    const Interval seen = kTurned ? work.sight.rows_of_some(i, i + 1) : work.sight.keys_of(i);
    const i32 first = seen.start - col - score_col(0), last = seen.stop - col - score_col(0);
    CF_UNROLL
    for (int w = 0; w < kCols; ++w) {
      const int at = w / 2 * 8 + w % 2;
      s[u][w] = at >= first && at < last ? s[u][w] : hidden;
    }
  }
}

// Which of the lane's eight scores in the 16 x 16 block at (row, col) dropout keeps: bit 4 (row half) + column entry.
template <bool kTurned> CF_DEVICE u32 kept_bits(const DropoutStream& stream, i32 row, i32 col) {
  const i32 r = row + fragment_row(0), c = col + score_col(0);
  u32 bits = 0;
  if (!stream.aligned()) {
    CF_UNROLL_1
    for (i32 n = 0; n < 8; ++n) {
      const i32 own_row = r + n / 4 * 8, own_col = c + n / 2 % 2 * 8 + n % 2;
      bits |= u32(stream.kept(kTurned ? own_col : own_row, kTurned ? own_row : own_col)) << n;
    }
    return bits;
  }
  if constexpr (!kTurned) {
    return stream.group(r, c);
  } else {
    CF_UNROLL
    for (int x = 0; x < 2; ++x) {      // the two queries; keys r and r + 8 are both odd or both even
      const u32 group = stream.group(c + x, r - r % 2) >> (r % 2);
      CF_UNROLL
      for (int n = 0; n < 4; ++n) bits |= (group >> (4 * (n % 2) + 2 * (n / 2)) & 1u) << (4 * (n / 2) + 2 * (n % 2) + x);
    }
    return bits;
  }
}

// f(x, keeps) for every entry of a tile at (row, col).
template <bool kTurned, int kRows, int kCols, class F>
CF_DEVICE void for_kept(Score (&x)[kRows][kCols], const DropoutStream& stream, i32 row, i32 col, F f) {
  CF_UNROLL
  for (int u = 0; u < kRows; u += 2) {
    CF_UNROLL
    for (int w = 0; w < kCols; w += 4) {
      const u32 bits = kept_bits<kTurned>(stream, row + 8 * u, col + 4 * w);
      CF_UNROLL
      for (int n = 0; n < 8; ++n) f(u + n / 4, w + n % 4, (bits >> n & 1u) != 0);
    }
  }
}
