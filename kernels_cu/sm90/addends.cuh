// Mask and bias on their way to scores: what all tensor-core kernels of 16 bits share.
// Who includes this says what Scores are: entry 4 j + 2 h + x of lane l is row 8 h + l / 4, column 8 j + 2 (l % 4) + x.
#pragma once
#include "attn/score.cuh"
#include "core/warp.cuh"

constexpr i32 kPairs = kBlockKV / 8;                  // of a thread and row: columns 8 j and 8 j + 1

CF_DEVICE bool has_mask(const Params& p) { return kMaskOrBias && p.call.mask != nullptr; }
CF_DEVICE bool has_bias(const Params& p) { return kMaskOrBias && p.call.bias != nullptr; }

// The bias of a piece of work: there is none, it is of q's dtype or of float32, or all columns are one.
enum class Bias { kNone, kOwn, kFloat, kOneColumn };

CF_DEVICE Bias bias_of(const Params& p, const Addends& a) {
  if (!has_bias(p)) return Bias::kNone;
  const bool one = uniform(i32(a.bias_col == 0)) != 0;
  return one ? Bias::kOneColumn : p.bias_kind == KindOf<Element>::value ? Bias::kOwn : Bias::kFloat;
}

// use(entry, addend) for all of a thread's entries, of a bias of one column, or of float32 that is read from where it
// lies. Columns beyond the array have the addend 0; the last pair in it may reach one column further, into the padding of
// the row.
template <class Use> CF_DEVICE void for_bias_in_place(const Params& p, const Addends& a, i32 row, i32 col, Use use) {
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    const i64 first = a.bias_first + smaller(row + 8 * h, p.seqlen_q - 1) * a.bias_row + col * a.bias_col;
    const bool one = a.bias_col == 0;
    const float same = one ? load_kind<float>(a.bias, a.bias_kind, first) : 0.0f;
    const float* from = in_global(static_cast<const float*>(a.bias)) + first;
    CF_UNROLL
    for (int j = 0; j < kPairs; ++j) {
      Packed<float, 2> pair{{same, same}};
      if (!one && 8 * j < p.seqlen_k - col) pair = *reinterpret_cast<const Packed<float, 2>*>(from + 8 * j);
      use(4 * j + 2 * h, pair.value[0]), use(4 * j + 2 * h + 1, pair.value[1]);
    }
  }
}

// Scores that the mask forbids become -inf. row: of this thread's entry 0; pair_at(row_at(h), j): the bytes of its columns
// 8 j and 8 j + 1 in row 8 h.
template <class RowAt, class PairAt>
CF_DEVICE void hide_scores(Scores& s, const Params& p, const Addends& a, i32 row, RowAt row_at, PairAt pair_at) {
  const bool one = a.mask_col == 0;
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    if (one) {
      const bool allowed = *in_global(a.mask + smaller(row + 8 * h, p.seqlen_q - 1) * a.mask_row) != 0;
      CF_UNROLL
      for (int n = 0; n < kScores / 2; ++n) {
        if (!allowed) s[n / 2 * 4 + 2 * h + n % 2] = -Limits<float>::infinity();
      }
    } else {
      const u32 from = row_at(h);
      CF_UNROLL
      for (int j = 0; j < kPairs; ++j) {
        const u32 pair = pair_at(from, j);
        if ((pair & 0xffu) == 0) s[4 * j + 2 * h] = -Limits<float>::infinity();
        if (pair >> 8 == 0) s[4 * j + 2 * h + 1] = -Limits<float>::infinity();
      }
    }
  }
}
