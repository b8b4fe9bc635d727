// Online softmax, in natural units, with nothing fused that must cancel.
//
// After any number of tiles, m is the maximum of a row's scores, l the sum of exp(s - m) over them (this thread's part
// of it until `finish`), and the accumulated output is the sum of exp(s - m) * v (Milakov and Gimelshein 2018;
// Dao et al. 2022). A score of -inf is a key that the row does not see. Scores are compared and subtracted before
// anything is multiplied, so equal scores give exp(0) = 1 whatever their size.
#pragma once
#include "core/numeric.cuh"

// What to subtract from scores: a row that has seen nothing yet must not meet -inf - -inf.
template <class Score> CF_DEVICE Score reference_of(Score m) { return m == -Limits<Score>::infinity() ? Score(0) : m; }

// `RowLanes` reduces over the threads that share a row: RowLanes::max(x) and RowLanes::sum(x).
template <class Score, int kRows, class RowLanes> struct OnlineSoftmax {
  Score m[kRows], l[kRows];

  CF_DEVICE void reset() {
    CF_UNROLL
    for (int u = 0; u < kRows; ++u) m[u] = -Limits<Score>::infinity(), l[u] = Score(0);
  }

  // Scores become weights exp(s - m); `rescale` is what the rows' earlier results must be multiplied by.
  template <int kCols> CF_DEVICE void update(Score (&s)[kRows][kCols], Score (&rescale)[kRows]) {
    CF_UNROLL
    for (int u = 0; u < kRows; ++u) {
      Score tile_max = s[u][0];
      CF_UNROLL
      for (int w = 1; w < kCols; ++w) tile_max = maximum(tile_max, s[u][w]);
      const Score new_m = maximum(m[u], RowLanes::max(tile_max));
      const Score reference = reference_of(new_m);
      rescale[u] = exponential(m[u] - reference);
      m[u] = new_m;
      Score sum = Score(0);
      CF_UNROLL
      for (int w = 0; w < kCols; ++w) {
        s[u][w] = exponential(s[u][w] - reference);
        sum += s[u][w];
      }
      l[u] = fused(l[u], rescale[u], sum);
    }
  }

  // Ends row u, after its sink (-inf: none) has taken its share: the factor that makes its accumulated output the
  // mean, 0 for a row that saw nothing, and its lse.
  CF_DEVICE void finish(int u, Score sink, Score& factor, Score& lse) {
    const Score sum = RowLanes::sum(l[u]);
    const Score top = maximum(m[u], sink);
    const Score reference = reference_of(top);
    const Score mine = exponential(m[u] - reference);                    // 1 unless the sink is the maximum
    const Score total = fused(sum, mine, exponential(sink - reference));
    const bool overflow = top == Limits<Score>::infinity();
    factor = sum == Score(0) ? Score(0) : mine / total;
    lse = overflow ? top : top + logarithm(total);
  }
};

// The backward's weight of a score, from the row's lse. An unseen key has weight 0 even where lse is NaN.
template <class Score> CF_DEVICE Score weight_of(Score s, Score lse) {
  return s == -Limits<Score>::infinity() ? Score(0) : exponential(s - lse);
}

// dS from a weight, r * dP and delta - dlse; 0 where nothing is seen, whatever stands there.
template <class Score> CF_DEVICE Score gradient_of(Score weight, Score dp, Score delta) {
  return weight == Score(0) ? Score(0) : weight * (dp - delta);
}

// lse of a row that saw nothing is -inf, which would make its weights exp(+inf): +inf makes them 0.
template <class Score> CF_DEVICE Score lse_for_backward(Score lse) {
  return lse == -Limits<Score>::infinity() ? Limits<Score>::infinity() : lse;
}
