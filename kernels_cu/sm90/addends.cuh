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
