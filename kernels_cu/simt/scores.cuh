// A tile of scores in registers: from products to scores, and which of its weights dropout keeps.
//
// ScoreTile<true> has queries on y and keys on x (forward and dQ: softmax runs along rows within a warp), <false> the
// reverse (dK and dV). Registers are always [query][key]; only shared memory tiles turn, as [y slot][x slot], and the
// y slots of a warp are read and written by that warp alone.
#pragma once
#include "attn/dropout.cuh"
#include "attn/score.cuh"
#include "simt/lanes.cuh"

// One bit for each score of a thread.
template <bool kMoreThan32> struct BitsOf { using Type = u32; };
template <> struct BitsOf<true> { using Type = u64; };

template <bool kQueriesOnY> struct ScoreTile {
  static constexpr i32 kQueryLanes = kQueriesOnY ? kLanesY : kLanesX, kKeyLanes = kQueriesOnY ? kLanesX : kLanesY;
  static constexpr i32 kQ = kBlockQ / kQueryLanes, kK = kBlockKV / kKeyLanes;     // queries and keys of a thread
  static constexpr i32 kX = kQueriesOnY ? kK : kQ;
  static constexpr i32 kStep = kLanesX * kX + kVec;                               // scores a y slot in shared memory
  static_assert(kBlockQ % (2 * kQueryLanes) == 0 && kBlockKV % (4 * kKeyLanes) == 0, "threads hold whole dropout groups");
  static_assert(kQ * kK <= 64, "one bit each");
  using Queries = QuerySlots<kQueryLanes>;
  using Keys = KeySlots<kKeyLanes>;
  static constexpr bool kOnY = kQueriesOnY;
  using Scores = Score[kQ][kK];
  using Bits = typename BitsOf<(kQ * kK > 32)>::Type;

  static CF_DEVICE i32 query_lane() { return kQueriesOnY ? lane_y() : lane_x(); }
  static CF_DEVICE i32 key_lane() { return kQueriesOnY ? lane_x() : lane_y(); }
  static CF_DEVICE i32 query(i32 q) { return Queries::index(query_lane() + q * kQueryLanes); }
  static CF_DEVICE i32 key(i32 k) { return Keys::index(key_lane() + k * kKeyLanes); }

  // This thread's element of a shared [y slot][x slot] tile.
  static CF_DEVICE i32 place(i32 q, i32 k) {
    const i32 y = kQueriesOnY ? q : k, x = kQueriesOnY ? k : q;
    return (lane_y() + y * kLanesY) * kStep + lane_x() + x * kLanesX;
  }

  // This thread's elements to a shared [y slot][x slot] tile.
  static CF_DEVICE void store(const Scores& s, Score* tile) {
    CF_UNROLL
    for (int q = 0; q < kQ; ++q) {
      CF_UNROLL
      for (int k = 0; k < kK; ++k) tile[place(q, k)] = s[q][k];
    }
  }

  // Products of query q, scaled before, become scores, -inf where it does not see a key. `staged` holds the addends,
  // `whole` says that every query of the tile sees every key as far as positions and lengths go. `derivative` is
  // d(c)/d(a).
  static CF_DEVICE void shape(int q, Score (&s)[kK], Score (&derivative)[kK], const ScoreTerms<Score>& terms,
                              const Score* staged, const Visibility& sight, i32 row, i32 col, bool whole) {
    if constexpr (kSoftcapOrAlibi) apply_terms(q, s, derivative, terms, row + sight.offset - col);
    if constexpr (kMaskOrBias) {
      CF_UNROLL
      for (int k = 0; k < kK; ++k) s[k] = with_addend(s[k], staged[place(q, k)]);
    }
    if (whole) return;
    const Interval seen = sight.keys_of(row + query(q));
    CF_UNROLL
    for (int k = 0; k < kK; ++k) s[k] = seen.contains(col + key(k)) ? s[k] : -Limits<Score>::infinity();
  }

  // Distance of a query's position from a key, |i + offset - j|, with i + offset - j = ahead for the tile's corner.
  static CF_DEVICE Score distance(i64 ahead, int q, int k) {
    return absolute(Score(ahead) + Score(query(q)) - Score(key(k)));
  }

  static CF_DEVICE void apply_terms(int q, Score (&s)[kK], Score (&derivative)[kK], const ScoreTerms<Score>& terms,
                                    i64 ahead) {
    CF_UNROLL
    for (int k = 0; k < kK; ++k) derivative[k] = Score(1);
    if (terms.softcap > Score(0)) {
      CF_UNROLL
      for (int k = 0; k < kK; ++k) s[k] = terms.capped(s[k], derivative[k]);
    }
    if (terms.slope != Score(0)) {
      CF_UNROLL
      for (int k = 0; k < kK; ++k) s[k] = fused(-terms.slope, distance(ahead, q, k), s[k]);
    }
  }

  // Bit q * kK + k: dropout keeps that weight.
  static CF_DEVICE Bits keep_bits(const DropoutStream& stream, i32 row, i32 col) {
    Bits bits = 0;
    if (stream.aligned()) {
      CF_UNROLL_1
      for (i32 n = 0; n < kQ * kK; n += n % kK + 4 == kK ? kK + 4 : 4) {       // first elements of groups
        const Bits group = stream.group(row + query(n / kK), col + key(n % kK));
        bits |= (group & 15) << n | (group >> 4) << (n + kK);
      }
    } else {
      CF_UNROLL_1
      for (i32 n = 0; n < kQ * kK; ++n) bits |= Bits(stream.kept(row + query(n / kK), col + key(n % kK))) << n;
    }
    return bits;
  }
  static CF_DEVICE bool keeps(Bits kept, int q, int k) { return !kDropout || (kept >> (q * kK + k) & 1); }
};
