// Register-tiled products of two tiles in shared memory, on the CUDA cores.
//
// Both read 16 bytes at a time. Rows of a tile are kRow = kChunk + kVec scores apart, an odd number of 16-byte words, so
// that eight neighbouring slots lie in eight different bank groups. The sums run over k in ascending order by fused
// multiply-adds whatever the tile sizes are: scores have the same bits in every kernel.
#pragma once
#include "core/numeric.cuh"
#include "simt/lanes.cuh"

constexpr i32 kRow = kChunk + kVec;
// Whether gradients sum the products of a tile apart. Those of 16 bits are rounded by more, sums of double by little;
// beside softcap, ALiBi, or two other options it would spill.
constexpr bool kFewOptions = !kSoftcapOrAlibi && !(kMaskOrBias && kDropout);
constexpr bool kSumsApart = KindOf<Element>::value == kFloat32 && kFewOptions;
static_assert(kChunk % (8 * kVec) == 0, "rows are an odd number of 16-byte words");

using Vector = Packed<Score, kVec>;
CF_DEVICE Vector load_vector(const Score* address) { return *reinterpret_cast<const Vector*>(address); }

template <int kR, int kCols> CF_DEVICE void clear(Score (&acc)[kR][kCols]) {
  CF_UNROLL
  for (int r = 0; r < kR; ++r) {
    CF_UNROLL
    for (int c = 0; c < kCols; ++c) acc[r][c] = Score(0);
  }
}

// acc[q][k] += sum over c < depth of a[q][c] * b[k][c]. Thread row q begins at a + q * kStepA, k at b + k * kStepB. The
// loop's body is kAtOnce steps long.
template <int kQ, int kK, int kStepA, int kStepB, int kAtOnce = 1>
CF_DEVICE void multiply_by_transposed(Score (&acc)[kQ][kK], const Score* a, const Score* b, i32 depth) {
  CF_UNROLL_BY(kAtOnce)
  for (i32 c = 0; c < depth; c += kVec) {
    if constexpr (kQ <= kK) {      // the shorter side waits in registers, the longer one streams
      Vector rows[kQ];
      CF_UNROLL
      for (int q = 0; q < kQ; ++q) rows[q] = load_vector(a + q * kStepA + c);
      CF_UNROLL
      for (int k = 0; k < kK; ++k) {
        const Vector col = load_vector(b + k * kStepB + c);
        CF_UNROLL
        for (int x = 0; x < kVec; ++x) {
          CF_UNROLL
          for (int q = 0; q < kQ; ++q) acc[q][k] = fused(rows[q].value[x], col.value[x], acc[q][k]);
        }
      }
    } else {
      Vector cols[kK];
      CF_UNROLL
      for (int k = 0; k < kK; ++k) cols[k] = load_vector(b + k * kStepB + c);
      CF_UNROLL
      for (int q = 0; q < kQ; ++q) {
        const Vector row = load_vector(a + q * kStepA + c);
        CF_UNROLL
        for (int x = 0; x < kVec; ++x) {
          CF_UNROLL
          for (int k = 0; k < kK; ++k) acc[q][k] = fused(row.value[x], cols[k].value[x], acc[q][k]);
        }
      }
    }
  }
}

// acc[r][g * kVec + x] += sum over k < kDepth of a[r][k] * b[k][column], thread row r at a + r * kStepA, row k of b at
// b + k * kStepB. A thread has kVec neighbouring columns of every group of kLanesX * kVec; b points to its first ones,
// group g is kPanel / (kLanesX * kVec) groups to a panel, panels kPanelStep apart. kApart: products are summed apart,
// group by group, and their sum is added once, so that a sum over many tiles is rounded once a tile and not once a product.
template <bool kApart, int kR, int kCols, int kDepth, int kStepA, int kStepB, int kPanel, int kPanelStep, int kAtOnce = 1>
CF_DEVICE void multiply(Score (&acc)[kR][kCols], const Score* a, const Score* b) {
  constexpr int kGroup = kLanesX * kVec, kWidth = kApart ? kVec : kCols;
  static_assert(kPanel % kGroup == 0, "a group lies within a panel");
  CF_UNROLL
  for (int first = 0; first < kCols; first += kWidth) {
    Score sums[kR][kWidth];
    CF_UNROLL
    for (int n = 0; n < kR * kWidth; ++n) sums[n / kWidth][n % kWidth] = kApart ? Score(0) : acc[n / kWidth][n % kWidth];
    CF_UNROLL_BY(kAtOnce)
    for (i32 k = 0; k < kDepth; k += kVec) {
      Vector rows[kR];
      CF_UNROLL
      for (int r = 0; r < kR; ++r) rows[r] = load_vector(a + r * kStepA + k);
      CF_UNROLL
      for (int y = 0; y < kVec; ++y) {
        CF_UNROLL
        for (int c = 0; c < kWidth; c += kVec) {
          const int column = (first + c) / kVec * kGroup;
          const Vector col = load_vector(b + (k + y) * kStepB + column / kPanel * kPanelStep + column % kPanel);
          CF_UNROLL
          for (int x = 0; x < kVec; ++x) {
            CF_UNROLL
            for (int r = 0; r < kR; ++r) sums[r][c + x] = fused(rows[r].value[y], col.value[x], sums[r][c + x]);
          }
        }
      }
    }
    CF_UNROLL
    for (int n = 0; n < kR * kWidth; ++n) {
      Score& to = acc[n / kWidth][first + n % kWidth];
      to = kApart ? to + sums[n / kWidth][n % kWidth] : sums[n / kWidth][n % kWidth];
    }
  }
}

// Row r times factor[r].
template <int kR, int kCols> CF_DEVICE void scale_rows(Score (&acc)[kR][kCols], const Score (&factor)[kR]) {
  CF_UNROLL
  for (int r = 0; r < kR; ++r) {
    CF_UNROLL
    for (int c = 0; c < kCols; ++c) acc[r][c] *= factor[r];
  }
}

// The same, but a factor of 0 makes zeros of anything.
template <int kR, int kCols> CF_DEVICE void scale_or_zero_rows(Score (&acc)[kR][kCols], const Score (&factor)[kR]) {
  CF_UNROLL
  for (int r = 0; r < kR; ++r) {
    CF_UNROLL
    for (int c = 0; c < kCols; ++c) acc[r][c] = factor[r] == Score(0) ? Score(0) : acc[r][c] * factor[r];
  }
}

template <int kR, int kCols> CF_DEVICE void scale_all(Score (&acc)[kR][kCols], Score factor) {
  CF_UNROLL
  for (int r = 0; r < kR; ++r) {
    CF_UNROLL
    for (int c = 0; c < kCols; ++c) acc[r][c] *= factor;
  }
}
