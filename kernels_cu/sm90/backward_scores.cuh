// Scores, weights and their gradients for the tile that a warpgroup of the backward holds: keys by queries.
//
// Entry 4 j + 2 h + x of lane l in warp w is key 16 w + 8 h + l / 4, query 8 j + 2 (l % 4) + x. Turned like this, weights
// and gradients leave the accumulators as operands of dv and dk; what belongs to a query varies along j and x.
#pragma once
#include "sm90/backward_addends.cuh"

constexpr i32 kScores = kBlockQ / 2;                  // of a thread
constexpr bool kPlainScores = !kMaskOrBias && !kSoftcapOrAlibi;
constexpr float kLargestLse = 1048576.0f;             // 2^20: beyond it the rounding of lse might make weights overflow
using Scores = float[kScores];
using Operand = u32[kBlockQ / 4];                     // a tile rounded, as wgmma takes it from registers

CF_DEVICE float first_of(u32 pair) { return convert<float>(Element{u16(pair)}); }
CF_DEVICE float second_of(u32 pair) { return convert<float>(Element{u16(pair >> 16)}); }
CF_DEVICE float entry_of(const Operand& a, int n) { return n % 2 == 0 ? first_of(a[n / 2]) : second_of(a[n / 2]); }

// Row numbers of a thread's queries: `x` and `y` of the two queries of entries 4 j to 4 j + 3.
struct RowNumbers {
  float x[kBlockQ / 8], y[kBlockQ / 8];
  CF_DEVICE void load(u32 from, int j, i32 thread) { ld_shared_f32x2(x[j], y[j], from + thread % 4 * 8 + j * 32); }
  CF_DEVICE void load(u32 from, i32 thread) {
    CF_UNROLL
    for (int j = 0; j < kBlockQ / 8; ++j) load(from, j, thread);
  }
  CF_DEVICE float of(int n) const { return n % 2 == 0 ? x[n / 4] : y[n / 4]; }      // for entry n
};
constexpr bool kLoadEarly = kBlockQ == 64 && !kSoftcapOrAlibi;      // row numbers, under a product: registers allow it

// The matrix of scores that a thread's entries belong to, and the place of its entry 0.
struct Place {
  const Params& p;
  const Work& work;
  i32 head, query, key;
};

// Which entries of a thread positions and lengths allow: bit 2 j + x of word h for entry 4 j + 2 h + x.
struct Seen {
  u32 words[2];
  CF_DEVICE bool has(int bit, int word) const { return (words[word] & 1u << bit) != 0; }
  CF_DEVICE bool has(int n) const { return has(n / 4 * 2 + n % 2, n / 2 % 2); }
};

// Bits of those queries that are less than `rows` behind the thread's first one.
CF_DEVICE u32 bits_below(i32 rows) {
  const i32 inside = clamp(rows, 0, kBlockQ), bits = inside / 8 * 2 + smaller(inside % 8, 2);
  return bits < 32 ? (1u << bits) - 1 : ~0u;
}
// What positions and lengths forbid becomes -inf; the rest. Bits become predicates seven at once, but ptxas spills some for
// them in backward_kv.
CF_DEVICE Seen select(Scores& s, const Place& at) {
  Seen seen;
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    const Interval rows = at.work.sight.rows_of_some(at.key + 8 * h, at.key + 8 * h + 1);
    const i32 start = rows.start - at.query, stop = rows.stop - at.query;
    seen.words[h] = bits_below(stop) & ~bits_below(start);
    CF_UNROLL
    for (int n = 0; n < kScores / 2; ++n) {
      const int row = n / 2 * 8 + n % 2;
      if (kHeadDim <= 128 ? !seen.has(n, h) : row < start || row >= stop) s[n / 2 * 4 + 2 * h + n % 2] = -Limits<float>::infinity();
    }
  }
  return seen;
}

// |i + offset - j|
CF_DEVICE float distance(float ahead, int n) { return absolute(ahead + float(n / 4 * 8 + n % 2 - n / 2 % 2 * 8)); }
CF_DEVICE float ahead_of(const Place& at) { return float(at.query + at.work.sight.offset - at.key); }

// A bias of one row, or of one number, which all query tiles read.
template <class Use> CF_DEVICE void add_bias_row(const Addends& a, const Place& at, Use use) {
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    const float x = load_kind<float>(a.bias, a.bias_kind, a.bias_first + smaller(at.key + 8 * h, at.p.seqlen_k - 1) * a.bias_col);
    CF_UNROLL
    for (int n = 0; n < kScores / 2; ++n) use(n / 2 * 4 + 2 * h + n % 2, x);
  }
}

// scale, softcap, ALiBi, bias, mask, in this order; `derivative` is d(c) / d(a), rounded.
CF_DEVICE void shape(Scores& s, Operand& derivative, float scale, const Place& at, const AddendTile& addends) {
  CF_UNROLL
  for (int n = 0; n < kScores; ++n) s[n] = times(s[n], scale);
  if constexpr (kSoftcapOrAlibi) {
    const ScoreTerms<float> terms = score_terms_of<float>(at.p, at.work.item, at.head);
    if (!(terms.softcap > 0.0f)) {
      CF_UNROLL
      for (int n = 0; n < kScores / 2; ++n) derivative[n] = cvt_rn_x2<Element>(1.0f, 1.0f);
    } else {
      CF_UNROLL
      for (int n = 0; n < kScores; n += 2) {
        float first, second;
        s[n] = terms.capped(s[n], first);
        s[n + 1] = terms.capped(s[n + 1], second);
        derivative[n / 2] = cvt_rn_x2<Element>(first, second);
      }
    }
    if (at.p.call.slopes != nullptr) {
      const float ahead = ahead_of(at);
      CF_UNROLL
      for (int n = 0; n < kScores; ++n) s[n] = fused(-terms.slope, distance(ahead, n), s[n]);
    }
  }
  if constexpr (kMaskOrBias) {
    const i32 lane = i32(opaque(thread_index() % 32)), row = at.query - lane % 4 * 2, key = at.key - lane / 4;      // the warp's
    const Addends a = addends_of(at.p, at.work.item, at.head);
    cp_async_wait_group<0>();
    warp_barrier();                                      // all lanes' chunks are there
    const auto add = [&](int n, float b) { s[n] = with_addend(s[n], b); };
    if (bias_comes(at.p)) addends.for_bias(at.p, lane, add);
    else if (has_bias(at.p)) add_bias_row(a, at, add);
    if (has_mask(at.p)) addends.for_masked(at.p, a, row, key, lane, [&](int n) { s[n] = -Limits<float>::infinity(); });
  }
}

// Powers of two that weights are, none above 0: only rows of huge or strange lse need this. Unseen keys stay unseen.
CF_DEVICE void temper(Scores& s, u32 lse_log2, float unit, i32 thread) {
  RowNumbers lse;
  CF_UNROLL
  for (int n = 0; n < kScores; ++n) {
    if (n % 4 == 0) lse.load(lse_log2, n / 4, thread);
    const float power = fused(s[n], unit, -lse.of(n));
    if (s[n] != -Limits<float>::infinity()) s[n] = power > 0.0f ? 0.0f : power;
  }
}

// What scores are turned into weights with: read while their product runs.
struct Weighing {
  u32 lse_log2;          // of the tile's queries, in shared memory; zeros where the scores are tempered first
  float unit;
  bool tempered;
};

CF_DEVICE Weighing weighing_of(u32 lse_log2, u32 zeros, float unit, i32 thread) {
  float some[kBlockQ / 32];
  const u32 from = lse_log2 + thread % 32 * (kBlockQ / 8);
  CF_UNROLL
  for (int n = 0; n < kBlockQ / 32; n += 2) ld_shared_f32x2(some[n], some[n + 1], from + 4 * n);
  bool ordinary = true;
  CF_UNROLL
  for (int n = 0; n < kBlockQ / 32; ++n) ordinary &= absolute(some[n]) < kLargestLse;
  const bool tempered = vote_any(!ordinary);
  return {tempered ? zeros : lse_log2, float_of(tempered ? bits_of(1.0f) : bits_of(unit)), tempered};
}

// Scores become weights. `lse` holds what `by` says, if it is loaded early.
CF_DEVICE void weigh(Scores& s, const Weighing& by, RowNumbers& lse, u32 lse_log2, float unit, i32 thread) {
  if (by.tempered) temper(s, lse_log2, unit, thread);
  CF_UNROLL
  for (int n = 0; n < kScores; ++n) {
    if (!kLoadEarly && n % 4 == 0) lse.load(by.lse_log2, n / 4, thread);
    s[n] = ex2_approx_ftz(fused(s[n], by.unit, -lse.of(n)));
  }
}

// Which weights dropout removes: bit 16 x + k for entry 2 k + x. One Philox call serves eight elements that lie in one lane
// where queries run along rows, so the bits are drawn in that order and turned. With 16 random bits u and a threshold T from
// 2^15 on, larger(u, T - 1) + 0x8000 - T is 0x7fff for a weight that is kept and, as signed number, negative for one that
// is dropped; for smaller T all bits are inverted.
CF_DEVICE u32 draw(const Place& at, i32 lane) {
  static_assert(!kDropout || kScores == 32, "a bit for each entry");
  DropoutStream stream = at.work.dropout;
  stream.t = matrix_number(at.p, at.work.item, at.head);
  if (stream.threshold > 0xffffu) return 0;              // all are kept
  if (!stream.aligned()) {                               // the elements of a group lie in others of the whole matrix
    u32 dropped = 0;
    CF_UNROLL_1
    for (i32 n = 0; n < kScores; ++n) {
      dropped |= u32(!stream.kept(at.query + n / 4 * 8 + n % 2, at.key + n / 2 % 2 * 8)) << (n % 2 * 16 + n / 2);
    }
    return dropped;
  }
  const bool inverted = stream.threshold < 0x8000u;
  const u32 flip = inverted ? ~0u : 0u, threshold = inverted ? 0x10000u - stream.threshold : stream.threshold;
  const u32 most = (threshold - 1) * 0x10001u, shift = (0x8000u - threshold & 0xffffu) * 0x10001u;
  const Words first = stream.counter_of(u32(at.query - lane % 4 * 2 + lane / 4 + stream.origin_i),
                                        u32(at.key - lane / 4 + lane % 4 * 2 + stream.origin_j));
  Words words[kBlockQ / 16];
  CF_UNROLL
  for (int group = 0; group < kBlockQ / 16; ++group) words[group] = first, words[group].word[1] += 8 * group;
  philox_in_step(words, stream.key0, stream.key1);
  u32 kept = 0;
  CF_UNROLL
  for (int k = 15; k >= 0; --k) {                        // word 2 a + b: queries + 8 a, keys + 8 b
    kept = 2 * kept + add_min_relu_s16x2(max_u16x2(words[k / 4].word[k % 4] ^ flip, most), shift, 0x00010001u);
  }
  return movmatrix_trans(kept ^ ~flip);
}
CF_DEVICE bool is_dropped(u32 dropped, int n) { return (dropped >> (n % 2 * 16 + n / 2) & 1u) != 0; }

// Words of the 16 x 16 group at the 16 queries from `query` and the warp's 16 keys: word 2 h + b is for keys + 8 h and
// queries + 8 b, half x for query x. They are drawn with queries on rows and turned.
CF_DEVICE Words words_of(const DropoutStream& stream, const Place& at, int group, i32 lane) {
  const i32 i = at.query - lane % 4 * 2 + 16 * group + lane / 4, j = at.key - lane / 4 + lane % 4 * 2;
  Words words;
  if (stream.aligned()) {
    words = stream.words_of(u32(i + stream.origin_i), u32(j + stream.origin_j));
  } else {                                               // the elements lie in other groups of the whole matrix
    words = Words{};
    CF_UNROLL_1
    for (i32 n = 0; n < 8; ++n) {
      const u32 dropped = stream.kept(i + n / 4 * 8, j + n / 2 % 2 * 8 + n % 2) ? 0u : 0xffffu << (n % 2 * 16);
      words.word[0] |= n / 2 == 0 ? dropped : 0u;
      words.word[1] |= n / 2 == 1 ? dropped : 0u;
      words.word[2] |= n / 2 == 2 ? dropped : 0u;
      words.word[3] |= n / 2 == 3 ? dropped : 0u;
    }
  }
  return {{movmatrix_trans(words.word[0]), movmatrix_trans(words.word[2]), movmatrix_trans(words.word[1]),
           movmatrix_trans(words.word[3])}};
}

// Weights that dropout removes get a minus sign.
CF_DEVICE void sign_dropped(Scores& s, const Place& at, i32 lane) {
  const DropoutStream stream = dropout_of(at.p, at.work.item, at.head);
  if (stream.threshold > 0xffffu) return;                // all are kept
  const u32 limit = stream.threshold << 16;              // the upper half decides, whatever is below it
  CF_UNROLL
  for (int group = 0; group < kBlockQ / 16; ++group) {
    const Words words = words_of(stream, at, group, lane);
    CF_UNROLL
    for (int n = 0; n < 4; ++n) {
      const int entry = 8 * group + n % 2 * 4 + n / 2 * 2;
      if (words.word[n] << 16 >= limit) s[entry] = -s[entry];
      if (words.word[n] >= limit) s[entry + 1] = -s[entry + 1];
    }
  }
}

// From the end, where weights are rounded late: ptxas then finds registers for all of them.
CF_DEVICE void round_to(Operand& to, const Scores& from) {
  CF_UNROLL
  for (int n = 0; n < kScores / 2; ++n) {
    const int k = kRoundedWeights ? n : kScores / 2 - 1 - n;
    to[k] = cvt_rn_x2<Element>(from[2 * k], from[2 * k + 1]);
  }
}

// Weights with a minus sign become 0.
CF_DEVICE void remove_signed(Operand& weights) {
  CF_UNROLL
  for (int n = 0; n < kScores / 2; ++n) weights[n] &= ~prmt(weights[n], 0, 0xbb99u);      // of each half: its sign in every bit
}
CF_DEVICE void remove_dropped(Operand& weights, u32 dropped) {
  CF_UNROLL
  for (int n = 0; n < kScores / 2; ++n) weights[n] &= ~prmt(dropped << (15 - n), 0, 0xbb99u);
}

// Of gradients rounded like their weights: what is never seen gets 0, whatever its gain is.
CF_DEVICE void remove_unseen(Operand& ds, const Operand& weights) {
  CF_UNROLL
  for (int n = 0; n < kScores / 2; ++n) {
    if ((weights[n] & 0x7fffu) == 0) ds[n] &= 0xffff0000u;
    if ((weights[n] & 0x7fff0000u) == 0) ds[n] &= 0xffffu;
  }
}
constexpr bool kRemovedLate = kPlainScores && kDropout;      // by this; else gradients_of or round_gradients does it

// Whether -delta of some query is infinite or no number: a weight of 0 times it would not be 0.
CF_DEVICE bool any_strange(u32 less_delta, i32 thread) {
  bool ordinary = true;
  CF_UNROLL
  for (i32 row = 0; row < kBlockQ; row += 32) {
    ordinary = ordinary && absolute(ld_shared_f32(less_delta + (row + thread % 32) * 4)) < Limits<float>::infinity();
  }
  return vote_any(!ordinary);
}

// dA of a tile from its weights, dP in dp, and -delta of its queries (at `from`, if not loaded early). `edge`: some key is
// not seen by some query.
template <class Weight, class Dropped>
CF_DEVICE void gradients_of(Operand& ds, Scores& dp, Weight weight, Dropped dropped, const Operand& derivative, const Place& at,
                            bool edge, RowNumbers& less_delta, u32 from, u32 zeros, i32 thread) {
  if (kPlainScores && !kDropout && edge) {                 // what stands there, NaN too, is never seen
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) dp[n] = weight(n) == 0.0f ? 0.0f : dp[n];
    if (any_strange(from, thread)) {                       // gains are formed here, and have no delta below
      CF_UNROLL
      for (int n = 0; n < kScores; ++n) {
        if (!kLoadEarly && n % 4 == 0) less_delta.load(from, n / 4, thread);
        if (weight(n) != 0.0f) dp[n] += less_delta.of(n);
      }
      from = zeros;
      if constexpr (kLoadEarly) less_delta = RowNumbers{};
    }
  }
  const float kept = kDropout ? dropout_scale<float>(at.p) : 1.0f;
  CF_UNROLL
  for (int j = 0; j < kScores / 4; ++j) {
    if (!kLoadEarly) less_delta.load(from, j, thread);
    CF_UNROLL
    for (int n = 4 * j; n < 4 * j + 4; ++n) {
      float gain = dp[n] + less_delta.of(n);
      if constexpr (kDropout) gain = fused(dropped(n) ? 0.0f : dp[n], kept, less_delta.of(n));
      dp[n] = weight(n) * gain;
      if constexpr (kSoftcapOrAlibi) dp[n] *= entry_of(derivative, n);
      if constexpr (!kPlainScores) dp[n] = weight(n) == 0.0f ? 0.0f : dp[n];
    }
    if constexpr (kRoundedWeights) {
      ds[2 * j] = cvt_rn_x2<Element>(dp[4 * j], dp[4 * j + 1]);
      ds[2 * j + 1] = cvt_rn_x2<Element>(dp[4 * j + 2], dp[4 * j + 3]);
    }
  }
}

// Where gains are the product alone, dP added to -delta. What is never seen gets 0 whatever its gain is, NaN too.
constexpr bool kGainsAtOnce = kPlainScores && !kDropout && !kRoundedWeights;

// -delta of a tile's queries.
CF_DEVICE void begin_gains(Scores& gains, u32 from, i32 thread) {
  CF_UNROLL
  for (int n = 0; n < kScores; n += 2) ld_shared_f32x2(gains[n], gains[n + 1], from + thread % 4 * 8 + n / 4 * 32);
}

// dA from weights and gains, both rounded late: from the end, as in round_to.
CF_DEVICE void round_gradients(Operand& ds, Operand& weights, const Scores& s, Scores& gains, const Seen& seen, bool edge) {
  if (edge) {
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) {
      if (!seen.has(n)) gains[n] = 0.0f;
    }
  }
  CF_UNROLL
  for (int n = kScores / 2 - 1; n >= 0; --n) {
    ds[n] = cvt_rn_x2<Element>(gains[2 * n] * s[2 * n], gains[2 * n + 1] * s[2 * n + 1]);
    weights[n] = cvt_rn_x2<Element>(s[2 * n], s[2 * n + 1]);
  }
}
