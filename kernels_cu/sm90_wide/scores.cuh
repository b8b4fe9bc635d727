// Bias and mask on their way to scores, from where they lie.
#pragma once
#include "sm90/softmax.cuh"

// Columns of a tile of mask or bias, counted from this thread's first: those from `inside` on lie beyond the array. A
// tile of which all is inside has a form without tests.
struct Columns {
  i32 inside;

  // Pairs of a row: pair j holds columns 8 j and 8 j + 1. The last pair inside may reach one column further, into the
  // padding of the row.
  template <class T, class Use> CF_DEVICE void for_pairs(const T* row, Use use) const {
    if (inside >= kBlockKV) {
      CF_UNROLL
      for (int j = 0; j < kBlockKV / 8; ++j) use(j, *reinterpret_cast<const Packed<T, 2>*>(row + 8 * j));
    } else {
      CF_UNROLL
      for (int j = 0; j < kBlockKV / 8; ++j) {
        if (8 * j < inside) use(j, *reinterpret_cast<const Packed<T, 2>*>(row + 8 * j));
      }
    }
  }
};

CF_DEVICE void add_bias_row(Scores& s, int h, const float* row, const Columns& columns) {
  columns.for_pairs(row, [&](int j, Packed<float, 2> pair) {
    CF_UNROLL
    for (int x = 0; x < 2; ++x) {
      float& score = s[4 * j + 2 * h + x];
      score = with_addend(score, pair.value[x]);
    }
  });
}

CF_DEVICE void add_to_row(Scores& s, int h, float addend) {
  CF_UNROLL
  for (int n = 0; n < kScores / 2; ++n) {
    float& score = s[4 * (n / 2) + 2 * h + n % 2];
    score = with_addend(score, addend);
  }
}

// Rows past the end repeat the last one: they are not used.
CF_DEVICE void add_bias(Scores& s, const Addends& a, i32 row, i32 last_row, i32 col, const Columns& columns) {
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    const i64 first = a.bias_first + smaller(row + 8 * h, last_row) * a.bias_row + col * a.bias_col;
    if (a.bias_col == 0) {
      add_to_row(s, h, load_kind<float>(a.bias, a.bias_kind, first));
    } else {
      add_bias_row(s, h, static_cast<const float*>(a.bias) + first, columns);
    }
  }
}

CF_DEVICE void apply_mask(Scores& s, const Addends& a, i32 row, i32 last_row, i32 col, const Columns& columns) {
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    const u8* allowed = a.mask + smaller(row + 8 * h, last_row) * a.mask_row + col * a.mask_col;
    if (a.mask_col == 0) {
      add_to_row(s, h, *allowed != 0 ? 0.0f : -Limits<float>::infinity());
    } else {
      columns.for_pairs(allowed, [&](int j, Packed<u8, 2> pair) {
        CF_UNROLL
        for (int x = 0; x < 2; ++x) {
          if (pair.value[x] == 0) s[4 * j + 2 * h + x] = -Limits<float>::infinity();
        }
      });
    }
  }
}

// scale, softcap, ALiBi, bias, mask, in this order. (row, col) is the place of this thread's entry 0.
CF_DEVICE void shape(Scores& s, const Params& p, const Launch& launch, const Work& work, i32 row, i32 col) {
  shape_products(s, p, launch, work, row, col);
  if constexpr (kMaskOrBias) {
    const i32 last_row = p.seqlen_q - 1;
    const Columns columns{p.seqlen_k - col};
    if (p.call.bias != nullptr) add_bias(s, work.addends, row, last_row, col, columns);
    if (p.call.mask != nullptr) apply_mask(s, work.addends, row, last_row, col, columns);
  }
}
