// Bias and mask on their way to scores, from where they lie: they are loaded before the products that they join.
#pragma once
#include "sm90/softmax.cuh"

struct TileAddends {
  const Params& p;
  const Addends& from;
  i32 row, col;                                  // of the thread's entry 0
  float bias[kMaskOrBias ? kScores : 1];
  u32 allowed[kMaskOrBias ? kScores / 2 : 1];    // bytes, two a number

  // use(n, element) for the pairs of columns, of entries n and n + 1, that begin inside; the last may reach one column
  // further, into the padding of the row. Rows past the end repeat the last one: they are not used.
  template <class Pair, class T, class Use> CF_DEVICE void for_pairs(const T* first, i64 row_stride, Use use) const {
    const i32 inside = p.seqlen_k - col;
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      const T* of_row = first + smaller(row + 8 * h, p.seqlen_q - 1) * row_stride + col;
      CF_UNROLL
      for (int j = 0; j < kScores / 4; ++j) {
        if (8 * j < inside) use(4 * j + 2 * h, *reinterpret_cast<const Pair*>(of_row + 8 * j));
      }
    }
  }

  CF_DEVICE bool has_biases() const { return from.bias != nullptr && from.bias_col != 0; }
  CF_DEVICE bool has_bytes() const { return from.mask != nullptr && from.mask_col != 0; }

  CF_DEVICE void load() {
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) bias[n] = 0.0f;
    CF_UNROLL
    for (int n = 0; n < kScores / 2; ++n) allowed[n] = 0x0101;
    if (has_biases()) {
      const float* first = static_cast<const float*>(from.bias) + from.bias_first;
      for_pairs<Packed<float, 2>>(first, from.bias_row, [&](int n, Packed<float, 2> x) {
        bias[n] = x.value[0], bias[n + 1] = x.value[1];
      });
    }
    if (has_bytes()) for_pairs<u16>(from.mask, from.mask_row, [&](int n, u16 bytes) { allowed[n / 2] = bytes; });
  }

  // One number for all columns of a row.
  template <class Of> CF_DEVICE void join_rows(Scores& s, Of of) const {
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float addend = of(smaller(row + 8 * h, p.seqlen_q - 1));
      CF_UNROLL
      for (int n = 2 * h; n < kScores; n += n % 2 == 0 ? 1 : 3) s[n] = with_addend(s[n], addend);
    }
  }

  // Biases before what hides: a hidden score stays hidden beside any bias.
  CF_DEVICE void join(Scores& s) const {
    if (from.bias != nullptr && from.bias_col == 0) {
      const auto bias_of = [&](i32 i) { return from.bias_first + i * from.bias_row; };
      join_rows(s, [&](i32 i) { return load_kind<float>(from.bias, from.bias_kind, bias_of(i)); });
    }
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) {
      const bool hidden = (allowed[n / 2] & (n % 2 == 0 ? 0xffu : 0xff00u)) == 0;
      s[n] = with_addend(s[n], hidden ? -Limits<float>::infinity() : bias[n]);
    }
    if (from.mask != nullptr && from.mask_col == 0) {
      join_rows(s, [&](i32 i) { return from.mask[i * from.mask_row] != 0 ? 0.0f : -Limits<float>::infinity(); });
    }
  }
};
