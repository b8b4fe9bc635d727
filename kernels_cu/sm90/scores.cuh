// From products to scores, for the tile that a warpgroup holds as a wgmma accumulator.
//
// Entry 4 j + 2 h + x of lane l in warp w is row 16 w + 8 h + l / 4, column 8 j + 2 (l % 4) + x. Plain scores stay raw
// products: the softmax takes the scale along. With any option they come in natural units.
#pragma once
#include "sm90/work.cuh"

constexpr i32 kScores = kBlockKV / 2;                 // of a thread
constexpr bool kPlainScores = !kMaskOrBias && !kSoftcapOrAlibi;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
using Scores = float[kScores];

// tanh by one exponential and one reciprocal, within 3e-7; near 0, where 1 - 2 / (1 + e^2x) cancels, by its series.
CF_DEVICE float fast_tanh(float x) {
  const float power = ex2_approx_ftz(times(x, 2.0f * kLog2e)), square = times(x, x);
  const float far = fused(-2.0f, rcp_approx_ftz(power + 1.0f), 1.0f);
  const float near = times(x, fused(square, fused(square, 2.0f / 15.0f, -1.0f / 3.0f), 1.0f));
  return absolute(x) < 0.125f ? near : far;
}

// softcap * tanh(scale * product / softcap). Near 0 the plain formula 1 - 2 / (1 + e^2x) loses 2^-23 of the softcap:
// too little to be seen in 16 bits while that is small.
constexpr float kSmallSoftcap = 64.0f;

CF_DEVICE void cap(Scores& s, const ScoreTerms<float>& terms, float scale) {
  const float softcap = terms.softcap, inverse = terms.inverse_softcap;
  const float power = times(times(scale, inverse), 2.0f * kLog2e);
  if constexpr (sizeof(Element) == 4) {
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) s[n] = times(softcap, hyperbolic_tangent(times(times(s[n], scale), inverse)));
  } else if (softcap <= kSmallSoftcap && absolute(power) < 1e30f) {
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) {
      s[n] = fused(-2.0f * softcap, rcp_approx_ftz(ex2_approx_ftz(times(s[n], power)) + 1.0f), softcap);
    }
  } else {
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) s[n] = times(softcap, fast_tanh(times(times(s[n], scale), inverse)));
  }
}

// scale * score - slope * |i + offset - j|. Where all of a thread's columns lie on one side of its rows, |d - c| for a
// row's distance d and column c is d - c or c - d: two multiply-adds, for c is a constant of the code.
CF_DEVICE void add_alibi(Scores& s, const Work& work, i32 row, i32 col, float scale) {
  const float slope = -work.terms.slope;
  const float first = float(row + work.sight.offset - col);              // of the first row to this thread's column 0
  if (first >= float(kBlockKV) || first <= -8.0f) {
    const float step = first > 0.0f ? -slope : slope;
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float base = times(-step, first + float(8 * h));
      CF_UNROLL
      for (int n = 0; n < kScores / 2; ++n) {
        const int j = n / 2, x = n % 2;
        float& score = s[4 * j + 2 * h + x];
        score = fused(step, float(8 * j + x), fused(score, scale, base));
      }
    }
    return;
  }
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    CF_UNROLL
    for (int n = 0; n < kScores / 2; ++n) {
      const int j = n / 2, x = n % 2;
      float& score = s[4 * j + 2 * h + x];
      score = fused(slope, absolute(first + float(8 * h - 8 * j - x)), times(score, scale));
    }
  }
}

// Columns of a tile of mask or bias, counted from this thread's first: those from `inside` on lie beyond the array. A
// tile of which all is inside has a form without tests; where such tiles have steps of their own, kWhole tells them.
template <bool kWhole> struct Columns {
  i32 inside;
  CF_DEVICE bool whole() const { return kWhole || (!kOptimistic && inside >= kBlockKV); }

  // Pairs of a row: pair j holds columns 8 j and 8 j + 1. The last pair inside may reach one column further, into the
  // padding of the row.
  template <class T, class Use> CF_DEVICE void for_pairs(const T* row, Use use) const {
    if (whole()) {
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

template <class T, class Cols> CF_DEVICE void add_bias_row(Scores& s, int h, const T* row, const Cols& columns) {
  columns.for_pairs(row, [&](int j, Packed<T, 2> pair) {
    CF_UNROLL
    for (int x = 0; x < 2; ++x) {
      float& score = s[4 * j + 2 * h + x];
      score = with_addend(score, convert<float>(pair.value[x]));
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
template <class Cols>
CF_DEVICE void add_bias(Scores& s, const Addends& a, i32 row, i32 last_row, i32 col, const Cols& columns) {
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    const i64 first = a.bias_first + smaller(row + 8 * h, last_row) * a.bias_row + col * a.bias_col;
    if (a.bias_col == 0) {
      add_to_row(s, h, load_kind<float>(a.bias, a.bias_kind, first));
    } else if (a.bias_kind == kFloat32) {
      add_bias_row(s, h, static_cast<const float*>(a.bias) + first, columns);
    } else {
      add_bias_row(s, h, static_cast<const Element*>(a.bias) + first, columns);
    }
  }
}

template <class Cols>
CF_DEVICE void apply_mask(Scores& s, const Addends& a, i32 row, i32 last_row, i32 col, const Cols& columns) {
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

// scale, softcap, ALiBi, bias, mask, in this order. (row, col) is the place of this thread's entry 0. kWhole: all keys
// of the tile are inside.
template <bool kWhole>
CF_DEVICE void shape(Scores& s, const Params& p, const Launch& launch, const Work& work, i32 row, i32 col) {
  const bool capped = kSoftcapOrAlibi && work.terms.softcap > 0.0f;
  const bool sloped = kSoftcapOrAlibi && p.call.slopes != nullptr;
  if constexpr (kSoftcapOrAlibi) {
    if (capped) cap(s, work.terms, launch.scale);
    if (sloped) add_alibi(s, work, row, col, capped ? 1.0f : launch.scale);
  }
  if constexpr (!kPlainScores) {
    if (!capped && !sloped) {
      CF_UNROLL
      for (int n = 0; n < kScores; ++n) s[n] = times(s[n], launch.scale);
    }
  }
  if constexpr (kMaskOrBias) {
    const i32 last_row = p.seqlen_q - 1;
    const Columns<kWhole> columns{p.seqlen_k - col};
    if (p.call.bias != nullptr) add_bias(s, work.addends, row, last_row, col, columns);
    if (p.call.mask != nullptr) apply_mask(s, work.addends, row, last_row, col, columns);
  }
}

// What positions and lengths forbid becomes -inf. Bounds are counted from this thread's first column.
CF_DEVICE void select(Scores& s, const Work& work, i32 row, i32 col, bool left_edge) {
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    const Interval keys = work.sight.keys_of(row + 8 * h);
    const i32 start = keys.start - col, stop = keys.stop - col;
    CF_UNROLL
    for (int n = 0; n < kScores / 2; ++n) {
      const int j = n / 2, x = n % 2;
      if (8 * j + x >= stop) s[4 * j + 2 * h + x] = -Limits<float>::infinity();
    }
    if (left_edge) {
      CF_UNROLL
      for (int n = 0; n < kScores / 2; ++n) {
        const int j = n / 2, x = n % 2;
        if (8 * j + x < start) s[4 * j + 2 * h + x] = -Limits<float>::infinity();
      }
    }
  }
}

// Weights that dropout removes become 0; the rows' sums keep them.
CF_DEVICE void drop(Scores& weights, const DropoutStream& stream, i32 row, i32 col) {
  if (stream.threshold > 0xffffu) return;                                // all are kept
  if (stream.aligned()) {
    const u32 limit = stream.threshold << 16;                            // the upper half decides, whatever is below it
    const u32 i = u32(row + stream.origin_i), j = u32(col + stream.origin_j);
    Words first = stream.counter_of(i, j);
    CF_UNROLL
    for (int block = 0; block < kBlockKV / 16; ++block) {
      Words at = first;
      at.word[0] += 4 * block;
      const Words words = philox4x32_7(at, stream.key0, stream.key1);
      CF_UNROLL
      for (int n = 0; n < 4; ++n) {                                     // word 2 a + b: rows + 8 a, columns + 8 b
        const int entry = 8 * block + 4 * (n % 2) + 2 * (n / 2);
        if (words.word[n] << 16 >= limit) weights[entry] = 0.0f;
        if (words.word[n] >= limit) weights[entry + 1] = 0.0f;
      }
    }
    return;
  }
  u64 kept = 0;                                                          // 16x16 blocks do not fall together
  CF_UNROLL_1
  for (int n = 0; n < kScores; ++n) {
    kept |= u64(stream.kept(row + n % 4 / 2 * 8, col + n / 4 * 8 + n % 2)) << n;
  }
  CF_UNROLL
  for (int n = 0; n < kScores; ++n) {
    if (!(kept >> n & 1)) weights[n] = 0.0f;
  }
}

// The same for weights that are rounded already, where 16x16 blocks fall together with those that one Philox call
// serves.
CF_DEVICE bool in_groups(const DropoutStream& stream) { return stream.aligned(); }

// weights: a tile of them, rounded; a pair has its bits in one word. Halves u of a word w at or above the threshold T
// have bit 15 in w AND or OR (u % 2^15 + what T lacks of 2^15, or of 2^16), as T is above 2^15 or below.
CF_DEVICE void drop_pairs(u32* weights, const DropoutStream& stream, i32 row, i32 col) {
  const u32 threshold = stream.threshold;
  const u32 lacking = ((threshold < 0x8000u ? 0x8000u : 0x10000u) - threshold) * 0x10001u;
  const u32 either = opaque(threshold < 0x8000u ? ~0u : 0u);             // else a choice for each
  Words counter = stream.counter_of(u32(row + stream.origin_i), u32(col + stream.origin_j));
  CF_UNROLL
  for (int block = 0; block < kBlockKV / 16; ++block) {
    const Words words = philox4x32_7(counter, stream.key0, stream.key1);
    counter.word[0] += 4;
    CF_UNROLL
    for (int n = 0; n < 4; ++n) {                                       // word 2 a + b: rows + 8 a, columns + 8 b
      const u32 w = words.word[n], sum = (w & 0x7fff7fffu) + lacking;
      const u32 dropped = (w & sum) | (either & (w | sum));
      weights[4 * block + 2 * (n % 2) + n / 2] &= ~signs_of_halves(dropped);
    }
  }
}
