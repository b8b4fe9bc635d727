// Backward for float and double on tensor cores, by keys: dk and dv of one tile of keys and, if kSumsQueries, its share of
// every dq (Dao 2023, Algorithm 2, turned).
//
//   P = exp(S - lse)     dv += (r * P)^T dO     dS = P * (r * dP - delta')     dA = dS * d(c)/d(a)     dk += scale * dA^T q
//   dq += scale * dA k
//
// Warps work in pairs on kPairRows keys: the first of a pair computes S^T = K Q^T and owns dv, the second dP^T = V dO^T
// and owns dk. With keys on rows, P^T and dA^T leave the accumulators as operands of the next product; P^T crosses
// from one warp to the other, and its sign says what dropout took. All query heads of the group and all items that share
// the keys follow one another, in order; queries from the last to the first, which all blocks of a causal mask see.
//
//   tile x   | wait for Q(x), dO(x), lse, delta; start those of x - 1
//    first   | S^T = K Q^T     P^T -> shared     #   dv += P^T dO                                       dq of x + 1
//    second  | dP^T = V dO^T     count x + 2     #   P^T <- shared    dA^T (-> shared)   dk += dA^T Q   dq of x + 1
//                                                # the pair
//
// Where exponentials are slow (double) second warps take their part of dq before they wait for P^T, and P^T crosses in
// halves, where dA^T will lie. With one place for a tile (kStages) dq of x comes after a barrier at its end, while x - 1 is
// on its way: first warps alone copy it and take a quarter of dq, second ones the rest, and neither waits for the other.
//
// What is made of dS itself, the gradients of slopes and, under a softcap, of a bias, comes from here in double: d(c)/d(a)
// crosses beside P^T, and dS takes its place in shared memory. Slopes are summed in turns as dq is.
//
// dq, zeros at first (prepost/delta.cu), is summed where it will stay: each warp adds its part, over all keys of the block.
// In order (p.splits, heads that take turns, is not 0) a block adds to a tile after all blocks of earlier keys, so that
// every run gives the same bits: it waits until the tile's count says so, and counts when its own adds are done. Blocks
// take numbers as they start, and wait for lower ones alone; neighbours in a head start one after the other, because
// p.splits heads take turns. What order costs is a fence and a look at the count in every tile: the second warps have
// time for the fence, and the look begins before the products of dq.
//
// H200, 2026-11-30, arrays (4, 2048 / D, 4096, D), whole backward, TFLOP/s at D 128 / 64, full and causal:
//                                                          float32                      float64
//   two kernels                                            35.0 / 34.1, 33.9 / 32.8     23.8 / 25.0, 23.4 / 24.5
//   one, queries from the first, a count for each warp     41.2 / 36.6, 23.5 / 20.4     27.8 / 26.8
//   queries from the last, heads in turns, one count       42.6 / 43.1, 42.1 / 39.9     27.8 / 27.8, 27.6 / 27.2
//   the same in no order                                   46.7 / 46.4, 44.6 / 43.2     32.3 / 30.6, 31.3 / 29.6
//   a look at the count before the products                43.4 /    -, 42.4 /    -     30.3 / 30.0, 30.3 / 28.8
//   and second warps count                                 46.0 / 45.7, 44.2 / 41.8     30.2 / 28.7, 30.1 / 27.7
//   and they take their dq before P^T                      44.2 / 45.1, 39.1 / 42.0     30.4 / 31.0, 30.1 / 29.9
//   counts for four tiles at once besides                  43.9 / 44.6, 38.5 / 40.0     31.0 / 30.8, 28.5 / 28.7
//   tiles of 32 queries in one place for D 128                                          31.8 /    -, 31.4 /    -
//   these (the best of each) in no order                   46.9 / 46.6, 44.1 / 43.5     32.8 / 31.7, 31.5 / 30.4
//   dq added in whole sectors of 32 bytes                                               36.2 / 31.1, 34.7 / 30.3
//   doubles read one by one (product.cuh)                                               37.1 / 31.3, 36.5 / 29.8
//   the same in no order                                                                39.0 / 33.4, 37.1 / 31.7
//   another hour: the same                                                              34.6 / 28.9, 37.8 / 30.7
//   columns of K in the order that makes sectors, no exchange of dq                     37.6 /    -, 38.5 /    -
//   P in halves, scale and lse in one instruction *                                     38.6 / 32.5, 38.2 / 32.2
//   first warps alone copy; 64 queries in one place for D 64                            40.8 / 36.4, 40.4 / 36.3
//   these in no order, and before them                41.3 / 37.3, 40.5 / 37.1;         38.4 / 33.1, 38.5 / 32.4
//   another card: the same, in order / in none, full                                    39.7, 41.7 /    -, 37.9
//   P where dA will lie, the two kinds of warps apart, in order / in none, full         40.0, 41.4 /    -, 39.8
// * Taken back since: where scores reach 10^5 they must be rounded as the forward rounds them, or dv's error is 8 times
// that of the plain computation.
// A tile of D 128 takes 10240 cycles of the tensor cores. They were busy for 97 % of the time of products, 90 % of dq's,
// which two warps do at once (one alone keeps them busy for 65 to 73 %); but a tile took 16400: 1260 for exponentials, 850
// for dA, 1300 to 2000 for copies, 2000 for adds (the memory adds 2.4 TB/s of doubles, whoever asks). Instructions on
// doubles take the tensor cores' time. Without adds, or without exponentials, 7 % less; without both and copies 26 %
// (wrong results). Slower at D 128: first warps ahead, and all of dq with second ones, 38.5 in order, 41.8 in none (D 64
// 34.7 and 38.2); half of dq with the first ones 33.5; half of Q and dO on its way while the other half is read; both asked
// for early, into L2; products of depth 16; 16 queries 31.9. At D 64: 128 keys and 16 queries 28.4, 32 keys and two blocks
// 19.3 (both before). The order of axes in memory costs nothing.
// On that card, in ms at D 128 in no order (32.9 before, 33.2 now, 31.7 for 32.4 in short runs): half of dq with the first
// warps in parts of 16 rows 34.3, in parts of 32 33.0; all of it with second ones in parts of 32 33.6, of 16 32.7 for 33.3;
// instructions of depth 16 33.5; a tile waited for by halves or quarters of its columns, products beginning with the first,
// 32.7 and 37.0 for 31.7. Without adds 29.9, without exponentials 31.7. The card stands at its 700 W there.
//
// Options, times as multiples of the plain call's, float64, D 128 / 64 (2026-11-30, 16 heads, 4096 keys, all gradients):
//                                      mask         bias         both         mask, softcap  mask, ALiBi  dropout
//   waited for where they are loaded   1.44 / 1.58  1.53 / 1.51  1.82 / 2.18  1.73 / 2.22    2.30 / 2.55  1.21 / 1.04
//   loaded before the products, part by part where registers are few; the plain row of D 128 beside one of mask or bias
//   and dropout; a thread stores the bias's gradient of one key
//                                      1.12 / 1.31  1.19 / 1.46  1.25 / 1.49  1.46 / 1.72    1.90 / 1.83  1.07 / 1.31
//   tanh without branches, no kernel of scores alone
//                                      1.11 / 1.28  1.23 / 1.54  1.26 / 1.56  1.39 / 1.58    1.33 / 1.40  1.04 / 1.27
// and in the two last rows bias, softcap 2.54 / 2.65, then 1.51 / 1.80; bias, ALiBi 2.10 / 2.00, then 1.49 / 1.58; softcap,
// ALiBi 2.14 / 2.28, then 1.33 / 1.43.
//
// Shared memory: K, V, kStages tiles of Q and dO, dA, P or d(c)/d(a), lse and delta, sums for slopes, the block's work.
#pragma once
#include "sm80_wide/backward_sums.cuh"

// Whether second warps sum queries while first ones take exponentials: worth it where those are slow.
constexpr bool kSumsMeanwhile = kSumsQueries && kStages == 2 && sizeof(Score) == 8;

using Scores = Score[kR][kC];
using Part = Score[kR][kPartC];
using Accumulator = Score[kR][larger(kHeadDim, kHeadDimV) / 4];

struct Backward : Sums {
  ColumnReader<TileQ> read_q;
  ColumnReader<TileO> read_o;
  RowReader<TileQ> sum_q;
  RowReader<TileO> sum_o;

  // Row numbers of the lane's columns of part n.
  CF_DEVICE void read_row_numbers(Score (&x)[kPartC], i32 tile, i32 which, int n) const {
    CF_UNROLL
    for (int w = 0; w < kPartC; w += 2) {
      const u32 from = row_numbers(tile, which) + (n * kPartQ + score_col(w)) * i32(sizeof(Score));
      ld_shared_pair(x[w], x[w + 1], from);
    }
  }

  // Pairs that positions and lengths forbid get 0.
  CF_DEVICE void hide(Part& x, i32 row) const {
    if (work.whole.covers(row, row + kPartQ)) return;
    select<true>(x, work, col(), row, Score(0));
  }

  // Where chunk c of part n of the weights lies, and where part n of dA does.
  CF_DEVICE u32 weights(int n, int c) const {
    return shared + kAtWeights + pair() * kWeightBytes + (n * (kR * kPartC / kChunk) + c) * 512 + lane_index() * 16;
  }
  CF_DEVICE u32 gradients(i32 tile, int n) const {
    return first_gradient(a_tile(tile), n * kPartQ, pair() * kPairRows);
  }
  static CF_DEVICE void store(u32 places, const Part& x) {
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kPartC; ++w) st_shared(gradient_at(places, u, w), x[u][w]);
    }
  }
  static CF_DEVICE void load(u32 places, Part& x) {
    CF_UNROLL
    for (int w = 0; w < kPartC; ++w) {
      CF_UNROLL
      for (int u = 0; u < kR; ++u) x[u][w] = ld_shared<Score>(gradient_at(places, u, w));
    }
  }

  // Part n of the weights, from the first warp of a pair to the second.
  CF_DEVICE void send(u32 places, int n, const Part& x) const {
    if constexpr (kInPlace) return store(places, x);
    CF_UNROLL
    for (int c = 0; c < kR * kPartC / kChunk; ++c) {
      Score chunk[kChunk];
      CF_UNROLL
      for (int y = 0; y < kChunk; ++y) chunk[y] = x[(c * kChunk + y) % kR][(c * kChunk + y) / kR];
      st_shared_chunk(weights(n, c), chunk);
    }
  }
  CF_DEVICE void receive(u32 places, int n, Part& x) const {
    if constexpr (kInPlace) return load(places, x);
    CF_UNROLL
    for (int c = 0; c < kR * kPartC / kChunk; ++c) {
      Score chunk[kChunk];
      ld_shared_chunk(chunk, weights(n, c));
      CF_UNROLL
      for (int y = 0; y < kChunk; ++y) x[(c * kChunk + y) % kR][(c * kChunk + y) / kR] = chunk[y];
    }
  }

  // What the first warp of a pair does with a tile: weights into shared memory and into dv.
  CF_DEVICE void give_weights(Accumulator& dv, i32 tile) const {
    const i32 row = tile * kBlockQ;
    Scores s;
    Part parts[kHands];
    TileAddends<kR, kPartC> addends;           // of a part: those of the next come while one is weighed
    constexpr bool kEarly = !kSoftcapOrAlibi || sizeof(Score) == 4 || kHeadDim <= 64;      // where registers allow
    const auto load_addends = [&](int n) { addends.template load<true>(work, col(), row + n * kPartQ); };
    if constexpr (kMaskOrBias && kEarly) load_addends(kHands - 1);
    multiply_by_transposed<true>(s, shared + pair() * kPairRows * TileK::kRowBytes, q_tile(tile), read_q, p.head_dim);
    if constexpr (kMaskOrBias && !kEarly) load_addends(kHands - 1);
    WarpDecay<Score> decay_of;
    const bool capped = kSoftcapOrAlibi && work.terms.softcap > Score(0);
    CF_UNROLL
    for (int n = kHands - 1; n >= 0; --n) {
      Part& own = parts[n];
      Score lse[kPartC];
      read_row_numbers(lse, tile, 0, n);
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        CF_UNROLL
        for (int w = 0; w < kPartC; ++w) own[u][w] = s[u][n * kPartC + w];
      }
      Part derivative;
      scale_scores<true>(own, derivative, work, col(), row + n * kPartQ);
      if constexpr (kMaskOrBias) {
        addends.join();
        addends.add_to(own);
        if (n > 0) load_addends(n - 1);
      }
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        CF_UNROLL
        for (int w = 0; w < kPartC; ++w) own[u][w] = weight_by(own[u][w], own[u][w] - lse[w], decay_of);
      }
      hide(own, row + n * kPartQ);
      const u32 places = gradients(tile, n);
      Part sent;
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        CF_UNROLL
        for (int w = 0; w < kPartC; ++w) sent[u][w] = capped && !kShapes ? own[u][w] * derivative[u][w] : own[u][w];
      }
      if (kShapes && capped) store(places + kPlaceBytes, derivative);
      if constexpr (kDropout) {
        for_kept<true>(own, work.dropout, col(), row + n * kPartQ, [&](int u, int w, bool kept) {
          own[u][w] = kept ? own[u][w] : Score(0);
          sent[u][w] = kept ? sent[u][w] : -sent[u][w];
        });
      }
      send(places, n, sent);
      barrier_arrive_aligned(hand(n), 64);      // the weights are there; they will have been read at the next tile
    }
    CF_UNROLL
    for (int n = kHands - 1; n >= 0; --n) multiply<true>(dv, parts[n], o_tile(tile) + n * kPartQ * TileO::kRowBytes, sum_o);
  }

  // What the second warp does: dA^T from them, into dk.
  CF_DEVICE void take_weights(Accumulator& dk, i32 tile) const {
    Score slope = Score(0);
    Scores dp;
    multiply_by_transposed<false>(dp, shared + kAtV + pair() * kPairRows * TileV::kRowBytes, o_tile(tile), read_o,
                                  p.head_dim_v);
    publish(tile + kStages);
    if constexpr (kSumsMeanwhile) sum_queries(tile + 1);
    const Score kept_scale = kDropout ? dropout_scale<Score>(p) : Score(1);
    CF_UNROLL
    for (int n = kHands - 1; n >= 0; --n) {
      Part own;
      const u32 places = gradients(tile, n);
      Score delta[kPartC];
      read_row_numbers(delta, tile, 1, n);
      barrier_sync_aligned(hand(n), 64);      // as above
      receive(places, n, own);
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        CF_UNROLL
        for (int w = 0; w < kPartC; ++w) {
          const Score weight = own[u][w], derivative = dp[u][n * kPartC + w];
          const bool kept = !kDropout || !has_sign(weight);
          const Score gain = kDropout ? (kept ? derivative * kept_scale : Score(0)) - delta[w] : derivative - delta[w];
          own[u][w] = score_gradient(kDropout ? absolute(weight) : weight, gain);
        }
      }
      hide(own, tile * kBlockQ + n * kPartQ);
      if constexpr (kShapes) shape(own, slope, places, tile * kBlockQ + n * kPartQ);
      if constexpr (kSumsQueries) store(places, own);
      multiply<true>(dk, own, q_tile(tile) + n * kPartQ * TileQ::kRowBytes, sum_q);
    }
    if (kShapes && p.call.slope_rows != nullptr) {
      slope = Lanes<1, 32>::sum(slope);
      if (lane_index() == 0) st_shared(slopes_at(tile) + pair() * i32(sizeof(Score)), slope);
    }
  }

  // dS of a part becomes dA. The slope's gradient and, where scores are capped, a bias's are of dS itself.
  CF_DEVICE void shape(Part& own, Score& slope, u32 places, i32 row) const {
    const bool capped = work.terms.softcap > Score(0);
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kPartC; ++w) {
        if (p.call.slope_rows != nullptr) slope = fused(-distance<true>(work, col(), row, u, w), own[u][w], slope);
        if (!capped) continue;
        const u32 at = gradient_at(places, u, w) + kPlaceBytes;
        const Score derivative = ld_shared<Score>(at);
        if (kMaskOrBias) st_shared(at, own[u][w]);
        own[u][w] *= derivative;
      }
    }
  }

  CF_DEVICE void store_bias(i32 tile) const {
    const bool capped = kShapes && work.terms.softcap > Score(0);
    BiasGradient{p, work}.store(tile, a_tile(tile) + (capped ? kPlaceBytes : 0));
  }

  // Walks all queries; `acc` is dv in the first warp of a pair and dk in the second.
  CF_DEVICE void walk(Accumulator& acc) {
    do {
      begin();
      if (work.tiles.start >= work.tiles.stop) continue;
      if constexpr (kStages == 1) {
        CF_UNROLL_1
        for (i32 tile = work.tiles.stop - 1; tile >= work.tiles.start; --tile) {
          next_tile(tile);
          if (first_of_pair()) give_weights(acc, tile);
          else take_weights(acc, tile);
          block_barrier();        // dA is there; nobody reads the tile any more
          load_queries(tile - 1);
          if constexpr (kWritesBias) store_bias(tile);
          sum_queries(tile);
        }
      } else {
        CF_UNROLL_1
        for (i32 tile = work.tiles.stop - 1; tile >= work.tiles.start - (kSumsQueries ? 1 : 0); --tile) {
          next_tile(tile);
          if constexpr (kWritesBias) store_bias(tile + 1);
          if (tile >= work.tiles.start) {
            if (first_of_pair()) give_weights(acc, tile);
            else take_weights(acc, tile);
          } else {
            publish(tile + 2);
          }
          const bool summed = kSumsMeanwhile && !first_of_pair() && tile >= work.tiles.start;
          if (kSumsQueries && !summed) sum_queries(tile + 1);
        }
      }
      if constexpr (kSumsQueries) {
        block_barrier();        // all have added to the first tile
        publish(work.tiles.start);
      }
    } while (work.walked < points(p.loop) * group());
  }
};

CF_DEVICE void backward_of_keys(const Params& p) {
  Work& work = shared_work(kAtWork);
  if (thread_index() == 0) {
    const u32 number = kSumsQueries ? increment(static_cast<u32*>(p.call.turns)) : block_index();
    const i32 together = larger(p.splits, 1);
    Digits digits{number};
    const i32 turn = digits.take(together);
    work.block = tile_work(digits.rest, ceil_div(p.seqlen_k, kBlockKV), 1, p.heads_kv / together, false);
    work.block.head = work.block.head * together + turn;
    work.first = work.block.tile * kBlockKV;
    work.walked = 0;
  }
  Backward backward{p, work, shared_tiles()};
  Accumulator acc;
  clear(acc);
  backward.walk(acc);
  const bool first = Backward::first_of_pair();
  void* const to = first ? p.call.dv : p.call.dk;
  if (to == nullptr) return;
  const Score kept = kDropout ? dropout_scale<Score>(p) : Score(1);
  finish_by(acc, first ? kept : Score(p.call.scale));
  const Target target = target_of(to, first ? p.dv : p.dk, item_at(p, work.block.own, 0), work.block.head, p.seqlen_k,
                                  first ? p.head_dim_v : p.head_dim, p.accumulate != 0);
  store_tile(acc, target, backward.col());
}
