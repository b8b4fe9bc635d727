// Products of float and double on tensor cores, from shared memory and registers.
//
// float as three products of TF32: x = big + small, both with 11 bits; big * big + big * small + small * big loses 2^-22.
// Tensor cores cut sums where floats are rounded, so the 16 places of a step are summed there and no more.
#pragma once
#include "core/cut.cuh"
#include "sm80_wide/factors.cuh"

constexpr int kChains = 8;      // sums that are made at once, so that instructions do not wait for each other
// Steps whose factors may be read ahead: all of double, which then take the fewest registers.
constexpr int kStepsAtOnce = sizeof(Element) == 8 ? 8 : 2;
// acc += a b over one step: kN column tiles, kT row tiles. Small products first; neighbours in the code do
// not wait for each other.
template <int kN, int kT>
CF_DEVICE void multiply_step(float (&acc)[kN][kT][4], const Factor<float, 8> (&a)[kT], const Factor<float, 4> (&b)[kN]) {
  const auto each = [&](auto left, auto right) {
    CF_UNROLL
    for (int half = 0; half < 2; ++half) {
      CF_UNROLL
      for (int n = 0; n < kN; ++n) {
        CF_UNROLL
        for (int t = 0; t < kT; ++t) {
          float(&d)[4] = acc[n][t];
          const auto& from_a = left(a[t]);
          const auto& from_b = right(b[n]);
          const u32 rows[4] = {from_a[4 * half], from_a[4 * half + 1], from_a[4 * half + 2], from_a[4 * half + 3]};
          mma_m16n8k8_tf32(d[0], d[1], d[2], d[3], rows, from_b[2 * half], from_b[2 * half + 1]);
        }
      }
    }
  };
  const auto big = [](const auto& x) -> const auto& { return x.big; };
  const auto small = [](const auto& x) -> const auto& { return x.small; };
  if constexpr (kProducts == 3) {
    each(small, big);
    each(big, small);
  }
  each(big, big);
}

template <int kN, int kT>
CF_DEVICE void multiply_step(double (&acc)[kN][kT][4], const Factor<double, 8> (&a)[kT], const Factor<double, 4> (&b)[kN]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  CF_UNROLL
  for (int x = 0; x < 4; ++x) {
    CF_UNROLL
    for (int n = 0; n < kN; ++n) {
      CF_UNROLL
      for (int t = 0; t < kT; ++t) {
        double(&d)[4] = acc[n][t];
        mma_m8n8k4_f64(d[0], d[1], a[t].value[2 * x], b[n].value[x]);
        mma_m8n8k4_f64(d[2], d[3], a[t].value[2 * x + 1], b[n].value[x]);
      }
    }
  }
#else
  CF_UNROLL
  for (int half = 0; half < 2; ++half) {
    CF_UNROLL
    for (int n = 0; n < kN; ++n) {
      CF_UNROLL
      for (int t = 0; t < kT; ++t) {
        const double(&rows)[8] = a[t].value;
        mma_m16n8k8_f64(acc[n][t], rows[4 * half], rows[4 * half + 1], rows[4 * half + 2], rows[4 * half + 3],
                        b[n].value[2 * half], b[n].value[2 * half + 1]);
      }
    }
  }
#endif
}

// Whether sums may stay where they are made.
constexpr bool kRoundedSums = sizeof(Element) == 8;

CF_DEVICE bool has_sign(float x) { return bits_of(x) >> 31 != 0; }
CF_DEVICE bool has_sign(double x) { return high_word(x) >> 31 != 0; }

// A result, times a factor.
CF_DEVICE double finished(double sum, double factor) { return sum * factor; }

template <int kRows, int kCols> CF_DEVICE void finish_by(Element (&acc)[kRows][kCols], Element factor) {
  CF_UNROLL
  for (int u = 0; u < kRows; ++u) {
    CF_UNROLL
    for (int w = 0; w < kCols; ++w) acc[u][w] = finished(acc[u][w], factor);
  }
}

template <int kRows, int kCols> CF_DEVICE void clear(Element (&acc)[kRows][kCols]) {
  CF_UNROLL
  for (int u = 0; u < kRows; ++u) {
    CF_UNROLL
    for (int w = 0; w < kCols; ++w) acc[u][w] = Element(0);
  }
}

// Entries of a b^T that are not finite, once more in plain sums: infinity has no small part, infinity - infinity is NaN.
template <class T, int kR, int kC> CF_DEVICE void repair(Element (&acc)[kR][kC], u32 a, u32 b) {
  static_assert(kR * kC <= 32, "a bit each");
  u32 broken = 0;
  CF_UNROLL
  for (int n = 0; n < kR * kC; ++n) broken |= u32(!(absolute(acc[n / kC][n % kC]) < Limits<float>::infinity())) << n;
  CF_UNROLL
  for (int n = 0; n < kR * kC; ++n) acc[n / kC][n % kC] = broken >> n & 1u ? Element(0) : acc[n / kC][n % kC];
  CF_UNROLL_1
  for (i32 k = 0; k < T::kColCount; ++k) {
    float row[kR];
    CF_UNROLL
    for (int u = 0; u < kR; ++u) row[u] = ColumnReader<T>::element(a, fragment_row(u), k);
    CF_UNROLL
    for (int w = 0; w < kC; ++w) {
      const float col = ColumnReader<T>::element(b, score_col(w), k);
      CF_UNROLL
      for (int u = 0; u < kR; ++u) acc[u][w] = broken >> (u * kC + w) & 1u ? fused(row[u], col, acc[u][w]) : acc[u][w];
    }
  }
}

// acc = a b^T over all columns: 8 kR rows at address a, 4 kC rows at b, each a multiple of 8 rows into its tile; rows of
// both are as those of T. kScores: of queries and keys.
template <bool kScores, class T, int kR, int kC>
CF_DEVICE void multiply_by_transposed(Element (&acc)[kR][kC], u32 a, u32 b, const ColumnReader<T>& read, i32 columns) {
  constexpr int kT = kR / 2, kN = smaller(kChains / kT, kC / 2);
  clear(acc);
  CF_UNROLL_BY(kStepsAtOnce)
  for (int k = 0; k < T::kColCount / 16; ++k) {
    Left left[kT];
    read_left(left, read, a, k);
    CF_UNROLL
    for (int first = 0; first < kC / 2; first += kN) {
      Right right[kN];
      Element sums[kN][kT][4];
      CF_UNROLL
      for (int n = 0; n < kN; ++n) read.read(right[n], b, 8 * (first + n), k);
      CF_UNROLL
      for (int n = 0; n < kN * kT * 4; ++n) {
        const int t = n / 4 % kT, w = 2 * (first + n / 4 / kT);
        sums[n / 4 / kT][t][n % 4] = kRoundedSums ? acc[2 * t + n % 4 / 2][w + n % 2] : Element(0);
      }
      multiply_step(sums, left, right);
      CF_UNROLL
      for (int n = 0; n < kN * kT * 4; ++n) {
        const int t = n / 4 % kT, w = 2 * (first + n / 4 / kT);
        Element& to = acc[2 * t + n % 4 / 2][w + n % 2];
        to = kRoundedSums || k == 0 ? sums[n / 4 / kT][t][n % 4] : to + sums[n / 4 / kT][t][n % 4];
      }
    }
  }
  if constexpr (!kRoundedSums) {
    constexpr bool kCut = kProducts == 3;        // of one product nothing is worth giving back
    float(&sums)[kR * kC] = reinterpret_cast<float(&)[kR * kC]>(acc);
    constexpr float kPart = part_cut(2);         // a step's large products are two
    if constexpr (kCut && kScores) {
      restore_products(sums, kPart, columns, [&] { repair<T>(acc, a, b); });
    } else {
      if (vote_any(any_lost(sums))) repair<T>(acc, a, b);
      if (kCut) restore(sums, kPart, columns);
    }
  }
}

// Rows of acc times factors, which mostly are 1.
template <int kR, int kO> CF_DEVICE void multiply_rows(Element (&acc)[kR][kO], const Element (&factors)[kR]) {
  bool any = false;
  CF_UNROLL
  for (int u = 0; u < kR; ++u) any = any || factors[u] != Element(1);
  if (!vote_any(any)) return;
  CF_UNROLL
  for (int u = 0; u < kR; ++u) {
    CF_UNROLL
    for (int w = 0; w < kO; ++w) acc[u][w] *= factors[u];
  }
}

// acc = acc * rescale + weights b: 4 kC rows at address b, a multiple of 8 rows into its tile; from the last step of 16 rows
// to the first if kFromLast.
template <bool kFromLast = false, class T, int kR, int kC, int kO>
CF_DEVICE void multiply(Element (&acc)[kR][kO], const Element (&rescale)[kR], const Element (&weights)[kR][kC], u32 b,
                        const RowReader<T>& read) {
  constexpr int kT = kR / 2, kN = smaller(kChains / kT, kChunk);
  static_assert(T::kColCount <= 4 * kO && kChunk % kN == 0, "acc is wide enough");
  if constexpr (kRoundedSums) multiply_rows(acc, rescale);
  CF_UNROLL
  for (int step = 0; step < kC / 4; ++step) {
    const int k = kFromLast ? kC / 4 - 1 - step : step;
    Left left[kT];
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int x = 0; x < 4; ++x) left[u / 2].set(2 * x + u % 2, weights[u][4 * k + x]);
    }
    CF_UNROLL
    for (int line = 0; line < T::kColCount / (8 * kChunk); ++line) {
      Right right[kChunk];
      read.read(right, b, k, line);
      CF_UNROLL
      for (int first = 0; first < kChunk; first += kN) {
        Element sums[kN][kT][4];
        Right some[kN];
        CF_UNROLL
        for (int n = 0; n < kN; ++n) some[n] = right[first + n];
        CF_UNROLL
        for (int n = 0; n < kN * kT * 4; ++n) {
          const int t = n / 4 % kT, w = 2 * (line * kChunk + first + n / 4 / kT), u = 2 * t + n % 4 / 2;
          sums[n / 4 / kT][t][n % 4] = kRoundedSums ? acc[u][w + n % 2] : Element(0);
        }
        multiply_step(sums, left, some);
        CF_UNROLL
        for (int n = 0; n < kN * kT * 4; ++n) {
          const int t = n / 4 % kT, w = 2 * (line * kChunk + first + n / 4 / kT), u = 2 * t + n % 4 / 2;
          const Element sum = sums[n / 4 / kT][t][n % 4];
          Element& to = acc[u][w + n % 2];
          to = kRoundedSums ? sum : step == 0 ? fused(to, rescale[u], sum) : to + sum;
        }
      }
    }
  }
}

// acc += weights b.
template <bool kFromLast = false, class T, int kR, int kC, int kO>
CF_DEVICE void multiply(Element (&acc)[kR][kO], const Element (&weights)[kR][kC], u32 b, const RowReader<T>& read) {
  Element one[kR];
  CF_UNROLL
  for (int u = 0; u < kR; ++u) one[u] = Element(1);
  multiply<kFromLast>(acc, one, weights, b, read);
}

// acc = a b over 16 kSteps places: 8 kR rows at address a, whose columns are in the order of the lanes, times a line of the
// columns of b.
template <int kSteps, int kR, class TA, class TB>
CF_DEVICE void multiply_line(Element (&acc)[kR][2 * kChunk], u32 a, const ColumnReader<TA>& read_a, u32 b, i32 line,
                             const RowReader<TB, kSectors>& read_b) {
  constexpr int kT = kR / 2;
  clear(acc);
  CF_UNROLL_BY(kStepsAtOnce)
  for (int k = 0; k < kSteps; ++k) {
    Left left[kT];
    Right right[kChunk];
    read_left(left, read_a, a, k);
    read_b.read(right, b, k, line);
    Element sums[kChunk][kT][4];
    CF_UNROLL
    for (int n = 0; n < kChunk * kT * 4; ++n) {
      const int t = n / 4 % kT, w = 2 * (n / 4 / kT);
      sums[n / 4 / kT][t][n % 4] = kRoundedSums ? acc[2 * t + n % 4 / 2][w + n % 2] : Element(0);
    }
    multiply_step(sums, left, right);
    CF_UNROLL
    for (int n = 0; n < kChunk * kT * 4; ++n) {
      const int t = n / 4 % kT, w = 2 * (n / 4 / kT);
      Element& to = acc[2 * t + n % 4 / 2][w + n % 2];
      to = kRoundedSums ? sums[n / 4 / kT][t][n % 4] : to + sums[n / 4 / kT][t][n % 4];
    }
  }
}
