// From a lane's part of sums of gradients of queries (attn/backward_rows.cuh) to rows of the gradient.
#pragma once
#include "attn/backward_rows.cuh"
#include "core/ptx_sm80.cuh"
#include "core/warp.cuh"

// Four float4 of a lane, the sums of its two rows in 32 columns, scaled and rounded: words[h] are pairs of row h, one of
// eight columns each.
CF_DEVICE void to_rows(u32 (&words)[2][4], const Packed<float, 4>* sums, float scale) {
  CF_UNROLL
  for (int n = 0; n < 8; ++n) {
    const float* entry = sums[n / 2].value + n % 2 * 2;
    words[n % 2][n / 2] = cvt_rn_x2<Element>(times(entry[0], scale), times(entry[1], scale));
  }
}
// The four lanes of a row exchange columns: the lane's word n becomes columns 8 (l % 4) + 2 n of the 32, and the one after.
CF_DEVICE void exchange_columns(u32 (&word)[4]) {
  exchange(word[0], word[1], 1), exchange(word[2], word[3], 1);
  exchange(word[0], word[2], 2), exchange(word[1], word[3], 2);
}
