// From products to weights and gradients of scores in the backward's second half, for the tile that a warpgroup holds:
// queries by keys.
//
// Entry 4 j + 2 h + x of lane l in warp w is query 16 w + 8 h + l / 4, key 8 j + 2 (l % 4) + x. What belongs to a query is
// two numbers of a thread.
#pragma once
#include "attn/dropout.cuh"
#include "attn/score.cuh"
#include "core/warp.cuh"
#include "sm90/backward_q_feed.cuh"

constexpr i32 kScores = kBlockKV / 2;                 // of a thread
constexpr bool kPlainScores = !kMaskOrBias && !kSoftcapOrAlibi;
constexpr float kLargestLse = 1048576.0f;             // 2^20: beyond it the rounding of lse might make weights overflow
using Scores = float[kScores];
using Operand = u32[kScores / 2];                     // a tile rounded, as wgmma takes it from registers
#include "sm90/addend_rows.cuh"                       // of such scores

CF_DEVICE constexpr int query_of(int n) { return n / 2 % 2 * 8; }
CF_DEVICE constexpr int key_of(int n) { return n / 4 * 8 + n % 2; }

// The matrix of scores that a thread's entries belong to, and the place of its entry 0.
struct Place {
  const Params& p;
  const Work& work;
  i32 query, key;
};

// What positions and lengths forbid becomes -inf.
CF_DEVICE void select(Scores& s, const Place& at) {
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    const Interval keys = at.work.sight.keys_of(at.query + 8 * h);
    const i32 start = keys.start - at.key, stop = keys.stop - at.key;
    CF_UNROLL
    for (int n = 2 * h; n < kScores; n += n % 2 == 0 ? 1 : 3) {
      if (key_of(n) < start || key_of(n) >= stop) s[n] = -Limits<float>::infinity();
    }
  }
}

// scale, softcap, ALiBi, bias, mask, in this order; `derivative` is d(c) / d(a), rounded.
CF_DEVICE void shape(Scores& s, Operand& derivative, float scale, const Place& at, const AddendTile& addends) {
  CF_UNROLL
  for (int n = 0; n < kScores; ++n) s[n] = times(s[n], scale);
  if constexpr (kSoftcapOrAlibi) {
    const ScoreTerms<float> terms = score_terms_of<float>(at.p, at.work.item, at.work.head);
    CF_UNROLL
    for (int n = 0; n < kScores; n += 2) {
      float first = 1.0f, second = 1.0f;
      if (terms.softcap > 0.0f) s[n] = terms.capped(s[n], first), s[n + 1] = terms.capped(s[n + 1], second);
      derivative[n / 2] = cvt_rn_x2<Element>(first, second);
    }
    if (at.p.call.slopes != nullptr) {
      const float ahead = float(at.query + at.work.sight.offset - at.key);      // |i + offset - j|
      CF_UNROLL
      for (int n = 0; n < kScores; ++n) s[n] = fused(-terms.slope, absolute(ahead + float(query_of(n) - key_of(n))), s[n]);
    }
  }
  if constexpr (kMaskOrBias) {
    const Addends a = addends_of(at.p, at.work.item, at.work.head);
    const Bias bias = bias_of(at.p, a);
    const auto add = [&](int n, float b) { s[n] = with_addend(s[n], b); };
    wait_for_addends();
    if (bias == Bias::kOwn) for_bias(addends, add);
    else if (bias != Bias::kNone) for_bias_in_place(at.p, a, at.query, at.key, add);
    if (has_mask(at.p)) apply_mask(s, addends, at.p, a, at.query);
  }
}

// Weights that dropout removes get a minus sign.
CF_DEVICE void sign_dropped(Scores& s, const Place& at) {
  const DropoutStream stream = dropout_of(at.p, at.work.item, at.work.head);
  if (stream.threshold > 0xffffu) return;                // all are kept
  if (!stream.aligned()) {                               // the elements lie in other groups of the whole matrix
    u32 dropped = 0;
    CF_UNROLL_1
    for (int n = 0; n < kScores; ++n) {
      dropped |= u32(!stream.kept(at.query + n / 2 % 2 * 8, at.key + n / 4 * 8 + n % 2)) << n;
    }
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) s[n] = (dropped >> n & 1u) != 0 ? -s[n] : s[n];
    return;
  }
  const u32 limit = stream.threshold << 16;              // the upper half decides, whatever is below it
  CF_UNROLL
  for (int group = 0; group < kScores / 8; ++group) {
    const Words words = stream.words_of(u32(at.query + stream.origin_i), u32(at.key + 16 * group + stream.origin_j));
    CF_UNROLL
    for (int n = 0; n < 4; ++n) {                        // word 2 a + b: queries + 8 a, keys + 8 b
      const int entry = 8 * group + n % 2 * 4 + n / 2 * 2;
      if (words.word[n] << 16 >= limit) s[entry] = -s[entry];
      if (words.word[n] >= limit) s[entry + 1] = -s[entry + 1];
    }
  }
}

// Of a thread's two rows.
struct RowNumbers {
  float lse_log2[2], less_delta[2];
  bool tempered;               // some row of the warp has a huge or strange lse

  CF_DEVICE void load(const Params& p, const Work& work, i32 row) {
    const float* stats = row_stats_of(p, work.item, work.head);
    bool ordinary = true;
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      const i32 own = smaller(row + 8 * h, p.seqlen_q - 1);                // rows past the end repeat the last one
      const float* of_row = stats + own / kStatsRows * 2 * kStatsRows + own % kStatsRows;
      lse_log2[h] = of_row[0], less_delta[h] = of_row[kStatsRows];
      ordinary = ordinary && absolute(lse_log2[h]) < kLargestLse;
    }
    tempered = vote_any(!ordinary);
  }
};

// Scores become weights, powers of two. In tempered rows none is above 0, and unseen keys stay unseen.
CF_DEVICE void weigh(Scores& s, const RowNumbers& rows, float unit) {
  if (rows.tempered) {
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) {
      const float power = fused(s[n], unit, -rows.lse_log2[n / 2 % 2]);
      if (s[n] != -Limits<float>::infinity()) s[n] = power > 0.0f ? 0.0f : power;
    }
  } else {
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) s[n] = fused(s[n], unit, -rows.lse_log2[n / 2 % 2]);
  }
  CF_UNROLL
  for (int n = 0; n < kScores; ++n) s[n] = ex2_approx_ftz(s[n]);
}

CF_DEVICE float entry_of(const Operand& a, int n) { return convert<float>(Element{u16(n % 2 == 0 ? a[n / 2] : a[n / 2] >> 16)}); }

// dA of a tile from its weights and dP. `edge`: some key is not seen by some query.
CF_DEVICE void gradients_of(Operand& da, const Scores& weights, Scores& dp, const Operand& derivative, const Params& p,
                            const RowNumbers& rows, bool edge) {
  const float kept = kDropout ? dropout_scale<float>(p) : 1.0f;
  CF_UNROLL
  for (int n = 0; n < kScores; ++n) {
    const float less_delta = rows.less_delta[n / 2 % 2];
    float gain = dp[n] + less_delta;
    if constexpr (kDropout) gain = weights[n] < 0.0f ? less_delta : fused(dp[n], kept, less_delta);
    dp[n] = (kDropout ? absolute(weights[n]) : weights[n]) * gain;
    if constexpr (kSoftcapOrAlibi) dp[n] *= entry_of(derivative, n);
  }
  if (!kPlainScores || edge) {                           // what is never seen gets 0 whatever its gain is, NaN too
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) dp[n] = weights[n] == 0.0f ? 0.0f : dp[n];
  }
  CF_UNROLL
  for (int n = 0; n < kScores; n += 2) da[n / 2] = cvt_rn_x2<Element>(dp[n], dp[n + 1]);
}
