// From products to scores, for the tile that a warpgroup holds as a wgmma accumulator.
//
// Entry 4 j + 2 h + x of lane l in warp w is row 16 w + 8 h + l / 4, column 8 j + 2 (l % 4) + x. Plain scores stay raw
// products: the softmax takes the scale along. With any option, and in float32 always, they come in natural units:
// there a mask of True changes no bit.
#pragma once
#include "attn/fast_tanh.cuh"
#include "sm90/work.cuh"

constexpr i32 kScores = kBlockKV / 2;                 // of a thread
constexpr bool kPlainScores = sizeof(Element) == 2 && !kMaskOrBias && !kSoftcapOrAlibi;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
using Scores = float[kScores];

// softcap * tanh(scale * product / softcap).
CF_DEVICE void cap(Scores& s, const ScoreTerms<float>& terms, float scale) {
  const float softcap = terms.softcap, inverse = terms.inverse_softcap;
  CF_UNROLL
  for (int n = 0; n < kScores; ++n) {
    const float x = times(times(s[n], scale), inverse);
    s[n] = times(softcap, sizeof(Element) == 4 ? hyperbolic_tangent(x) : fast_tanh(x));
  }
}

// scale * score - slope * |i + offset - j|. 16 bits have steady steps (sm90/steady.cuh); in float32, where all of a
// thread's columns lie on one side of its rows, |d - c| for a row's distance d and column c is d - c or c - d: two
// multiply-adds, for c is a constant of the code.
CF_DEVICE void add_alibi(Scores& s, const Work& work, i32 row, i32 col, float scale) {
  const float slope = -work.terms.slope;
  const float first = float(row + work.sight.offset - col);              // of the first row to this thread's column 0
  if (sizeof(Element) == 4 && (first >= float(kBlockKV) || first <= -8.0f)) {
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

// scale, softcap, ALiBi, in this order. (row, col) is the place of this thread's entry 0.
CF_DEVICE void shape_products(Scores& s, const Params& p, const Launch& launch, const Work& work, i32 row, i32 col) {
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
}

// What positions and lengths forbid becomes -inf. Bounds are counted from this thread's first column.
CF_DEVICE void select(Scores& s, const Work& work, i32 row, i32 col, bool left_edge) {
  const Visibility& sight = work.sight;
  const auto near = [](i64 x) { return i32(clamp(x, i64(-1) << 20, i64(1) << 20)); };      // a tile is smaller
  const i64 own = row + sight.offset - col;
  const i32 to = near(own + sight.right + 1), from = near(own - sight.left);
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    const bool live = row + 8 * h < sight.q_length;
    const i32 start = from + 8 * h, stop = live ? smaller(to + 8 * h, sight.kv_length - col) : 0;
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

// Weights that dropout removes become 0; the rows' sums keep them. For what 16 bits mostly want there is drop_pairs; the
// rest has short code.
CF_DEVICE void drop(Scores& weights, const DropoutStream& stream, i32 row, i32 col) {
  if (stream.threshold > 0xffffu) return;                                // all are kept
  if (sizeof(Element) == 4 && stream.aligned()) {
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
  u64 kept = 0;
  if (stream.aligned()) {
    Words at = stream.counter_of(u32(row + stream.origin_i), u32(col + stream.origin_j));
    CF_UNROLL_1
    for (int block = 0; block < kBlockKV / 16; ++block) {
      const Words words = philox4x32_7(at, stream.key0, stream.key1);
      at.word[0] += 4;
      u32 bits = 0;
      CF_UNROLL
      for (int n = 0; n < 4; ++n) {                                     // word 2 a + b: rows + 8 a, columns + 8 b
        const int entry = 4 * (n % 2) + 2 * (n / 2);
        bits |= u32((words.word[n] & 0xffffu) < stream.threshold) << entry;
        bits |= u32(words.word[n] >> 16 < stream.threshold) << (entry + 1);
      }
      kept |= u64(bits) << 8 * block;
    }
  } else {                                                               // 16x16 blocks do not fall together
    CF_UNROLL_1
    for (int n = 0; n < kScores; ++n) {
      kept |= u64(stream.kept(row + n % 4 / 2 * 8, col + n / 4 * 8 + n % 2)) << n;
    }
  }
  CF_UNROLL
  for (int n = 0; n < kScores; ++n) {
    if (!(kept >> n & 1)) weights[n] = 0.0f;
  }
}

// The same for weights that are rounded already, where 16x16 blocks fall together with those that one Philox call
// serves, and at least half of the weights are kept, but not all.
CF_DEVICE bool in_groups(const DropoutStream& stream) {
  return stream.aligned() && stream.threshold >= 0x8000u && stream.threshold <= 0xffffu;
}

// What that wants to know of a piece of work, found once.
struct Dropping {
  bool grouped;
  u32 key0, key1;                              // of the fourth round
  u32 most, shift;
  RowPart part;
};

// row: this thread's first.
CF_DEVICE Dropping dropping_of(const DropoutStream& stream, i32 row) {
  Dropping by{};
  if constexpr (kDropout) {
    by.grouped = in_groups(stream);
    by.key0 = uniform(stream.key0 + 3 * kKeyStep0), by.key1 = uniform(stream.key1 + 3 * kKeyStep1);
    by.most = (stream.threshold - 1) * 0x10001u, by.shift = (0x8000u - stream.threshold & 0xffffu) * 0x10001u;
    by.part = row_part(stream.counter_of(u32(row + stream.origin_i), 0), stream.key0, stream.key1);
  }
  return by;
}

// weights: a tile of them, rounded; a pair has its bits in one word. With 16 random bits u and the threshold T, larger
// (u, T - 1) + 0x8000 - T is 0x7fff for a weight that is kept and, as signed number, negative for one that is dropped.
// columns: where the part of the calls for this thread's first columns lies; the next are 64 bytes apart.
CF_DEVICE void drop_pairs(u32* weights, const Dropping& by, u32 columns) {
  constexpr int kBlocks = kBlockKV / 16;
  constexpr int kAtOnce = kBlocks % 4 == 0 ? 4 : kBlocks % 3 == 0 ? 3 : kBlocks % 5 == 0 ? 5 : kBlocks;
  CF_UNROLL
  for (int block = 0; block < kBlocks; block += kAtOnce) {
    Words words[kAtOnce];
    CF_UNROLL
    for (int n = 0; n < kAtOnce; ++n) {
      Words column;
      ld_shared_128(column.word, columns + 64 * (block + n));
      words[n] = after_three_rounds(by.part, column);
    }
    philox_in_step<3>(words, by.key0, by.key1);
    CF_UNROLL
    for (int n = 0; n < 4 * kAtOnce; ++n) {                               // word 2 a + b: rows + 8 a, columns + 8 b
      u32& pair = weights[4 * block + n / 4 * 4 + 2 * (n % 2) + n % 4 / 2];
      pair = add_min_relu_s16x2(max_u16x2(words[n / 4].word[n % 4], by.most), by.shift, pair);
    }
  }
}
