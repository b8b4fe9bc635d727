// From products to scores and weights in the backward, for a tile that a warpgroup holds: queries by keys, or turned,
// keys by queries.
//
// Entry 4 j + 2 h + x of lane l in warp w is row 16 w + 8 h + l / 4, column 8 j + 2 (l % 4) + x.
#pragma once
#include "attn/dropout.cuh"
#include "attn/score.cuh"
#include "core/warp.cuh"
#include "sm90_wide/backward.cuh"

// What options say of one head; kept in shared memory.
struct Terms {
  ScoreTerms<float> score;
  Addends addends;
  DropoutStream dropout;
};
constexpr bool kAnyOption = kMaskOrBias || kSoftcapOrAlibi || kDropout;

CF_DEVICE void describe(Terms& terms, const Params& p, const Item& item, i32 head) {
  if constexpr (kSoftcapOrAlibi) terms.score = score_terms_of<float>(p, item, head);
  if constexpr (kMaskOrBias) terms.addends = addends_of(p, item, head);
  if constexpr (kDropout) terms.dropout = dropout_of(p, item, head);
}

// Where a tile lies in its matrix of scores: the place of the thread's entry 0.
struct Place {
  const Params& p;
  const Visibility& sight;
  const Terms& terms;
  i32 query, key;
};

// exp(score - lse), at most 1: of scores as large as their last place another order of sums might give more.
CF_DEVICE float weight(float score, float lse) {
  const float w = ex2_approx_ftz(times(min_nan(score - lse, 0.0f), kLog2e));
  return kMaskOrBias && score == -Limits<float>::infinity() ? 0.0f : w;          // lse may be no number
}

// What overflows is infinite in one product of planes and of either sign in another. Under a finite lse it was -inf;
// under any other the row has no weights that are numbers.
CF_DEVICE float recovered(float product, float lse) {
  if (absolute(product) < Limits<float>::infinity()) return product;
  return lse - lse - Limits<float>::infinity();
}

// A tile's scores from their products. Addends are loaded before these are formed and joined meanwhile; where registers are
// few that goes for a part, and those of the next are on their way while one is computed.
template <bool kTurned> struct Scorer {
  static constexpr int kPart = kInParts ? 8 : !kTurned && kHeadDim > 64 ? 16 : kScores;
  const Params& p;
  float scale, slope, inverse_softcap, ahead;    // ahead: of entry 0's query, to its key
  float addend[kMaskOrBias ? kPart : 1];         // of mask and bias, -inf where they forbid
  float bias[kMaskOrBias ? kPart : 1];           // of the next part: as they were loaded,
  u32 allowed[kMaskOrBias ? kPart : 1];          // nothing waits for them
  u32 kept, seen;                                // bit n: dropout keeps entry n; positions and lengths let it be seen

  static CF_DEVICE constexpr int query_of(int n) { return kTurned ? n / 4 * 8 + n % 2 : n / 2 % 2 * 8; }
  static CF_DEVICE constexpr int key_of(int n) { return kTurned ? n / 2 % 2 * 8 : n / 4 * 8 + n % 2; }

  CF_DEVICE Scorer(const Place& at) : p(at.p), seen(~0u) {
    scale = float(p.call.scale);
    if constexpr (kSoftcapOrAlibi) {
      slope = at.terms.score.slope, inverse_softcap = at.terms.score.inverse_softcap;
      ahead = float(at.query + at.sight.offset - at.key);
    }
    if constexpr (kMaskOrBias) load_addends(at, 0);
  }

  // Once products have been started.
  CF_DEVICE void meanwhile(const Place& at) {
    if constexpr (kMaskOrBias) next_part(at, 0);
    draw(at);
  }
  // Before entries are asked for, in order.
  CF_DEVICE void before(const Place& at, int n) {
    if (kMaskOrBias && n != 0 && n % kPart == 0) next_part(at, n);
  }
  CF_DEVICE void next_part(const Place& at, int n) {
    join();
    if (n + kPart == kScores) return;
    forget();                                    // no earlier
    load_addends(at, n + kPart);
  }
  CF_DEVICE void join() {
    CF_UNROLL
    for (int n = 0; n < kPart; ++n) addend[n] = allowed[n] != 0 ? bias[n] : -Limits<float>::infinity();
  }

  // From entry `first` on.
  CF_DEVICE void load_addends(const Place& at, int first) {
    const Addends& from = at.terms.addends;
    const float* biases = static_cast<const float*>(from.bias) + from.bias_first;
    CF_UNROLL
    for (int n = 0; n < kPart; ++n) bias[n] = 0.0f, allowed[n] = 1;
    if (from.bias != nullptr) {
      for_entries(at, first, biases, p.bias.row, p.bias.col, [&](int n, float x) { bias[n] = x; });
    }
    if (from.mask != nullptr) {
      for_entries(at, first, from.mask, p.mask.row, p.mask.col, [&](int n, u8 byte) { allowed[n] = byte; });
    }
  }
  // use(n, element) for those of kPart entries from `first` on that lie below the lengths.
  template <class T, class Use>
  static CF_DEVICE void for_entries(const Place& at, int first, const T* from, i64 row, i64 col, Use use) {
    const i32 query = at.query + query_of(first), key = at.key + key_of(first);
    const i32 queries = at.sight.q_length - query, keys = at.sight.kv_length - key;
    from += query * row + key * col;
    const i64 along = kTurned ? row : col, other = 8 * (kTurned ? col : row);
    CF_UNROLL
    for (int m = 0; m < kPart / 2; ++m) {
      CF_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int n = m / 2 * 4 + 2 * h + m % 2;
        if (query_of(n) < queries && key_of(n) < keys) use(n, from[h * other]);
      }
      from += (m % 2 == 0 ? 1 : 7) * along;
    }
  }

  // Not all entries are seen.
  CF_DEVICE void look(const Place& at) {
    seen = 0;
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      const i32 row = (kTurned ? at.key : at.query) + 8 * h, col = kTurned ? at.query : at.key;
      const Interval some = kTurned ? at.sight.rows_of_some(row, row + 1) : at.sight.keys_of(row);
      const Interval of_tile{some.start - col, some.stop - col};
      CF_UNROLL
      for (int n = 2 * h; n < kScores; n += n % 2 == 0 ? 1 : 3) {
        seen |= of_tile.contains(n / 4 * 8 + n % 2) ? 1u << n : 0u;
      }
    }
  }
  CF_DEVICE bool sees(int n) const { return (seen >> n & 1u) != 0; }
  CF_DEVICE bool keeps(int n) const { return !kDropout || (kept >> n & 1u) != 0; }

  // c of every entry, from its product.
  CF_DEVICE void cap(Scores& s, const Place& at) const {
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) s[n] = times(s[n], scale);
    const float softcap = at.terms.score.softcap;
    if (kSoftcapOrAlibi && softcap > 0.0f) {
      CF_UNROLL
      for (int n = 0; n < kScores; ++n) s[n] = times(softcap, hyperbolic_tangent(times(s[n], inverse_softcap)));
    }
  }
  // The score of entry n from c.
  CF_DEVICE float score(float c, int n) const {
    if constexpr (kSoftcapOrAlibi) c = fused(-slope, distance(n), c);
    return kMaskOrBias ? with_addend(c, addend[n % kPart]) : c;
  }
  // Of entry n's query from its key.
  CF_DEVICE float distance(int n) const { return absolute(ahead + float(query_of(n) - key_of(n))); }
  // d(c) / d(a)
  CF_DEVICE float derivative(float c) const {
    const float tangent = times(c, inverse_softcap);
    return fused(-tangent, tangent, 1.0f);
  }

  // Groups of 16 x 16 (attn/dropout.cuh) are drawn with queries on rows. A lane of a turned tile wants what other lanes
  // have drawn: of queries 2 (l % 4) + x and key l / 4.
  CF_DEVICE void draw(const Place& at) {
    if constexpr (!kDropout) return;
    const DropoutStream& stream = at.terms.dropout;
    i32 query = at.query, key = at.key;
    const i32 lane = i32(lane_index());
    if (kTurned) query += lane / 4 - lane % 4 * 2, key += lane % 4 * 2 - lane / 4;
    u32 drawn = 0;                               // bit 8 group + 4 a + 2 b + e
    if (stream.aligned()) {
      CF_UNROLL
      for (int group = 0; group < kScores / 8; ++group) {
        drawn |= stream.group(query + (kTurned ? 16 * group : 0), key + (kTurned ? 0 : 16 * group)) << (8 * group);
      }
    } else {
      CF_UNROLL_1
      for (int n = 0; n < kScores; ++n) {
        const i32 along = n / 8 * 16, i = query + (kTurned ? along : 0) + n / 4 % 2 * 8;
        const i32 j = key + (kTurned ? 0 : along) + n / 2 % 2 * 8 + n % 2;
        drawn |= u32(stream.kept(i, j)) << n;
      }
    }
    if constexpr (kTurned) {
      u32 of[2];
      CF_UNROLL
      for (int x = 0; x < 2; ++x) of[x] = shuffle(drawn, u32((lane % 4 * 2 + x) * 4 + lane / 8)) >> (lane / 4 % 2);
      kept = (of[0] & 0x55555555u) | (of[1] & 0x55555555u) << 1;
    } else {                                     // entry 8 group + 4 b + 2 a + e
      kept = (drawn & 0xc3c3c3c3u) | (drawn & 0x30303030u) >> 2 | (drawn & 0x0c0c0c0cu) << 2;
    }
  }
};
