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
// halves. With one place for a tile (kStages) dq of x comes after a barrier at its end, while x - 1 is on its way: first
// warps alone copy it, so that second ones are done with their products when they stand at their adds.
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
//
// Options, times as multiples of the plain call's, float64, D 128 / 64 (2026-11-30, 16 heads, 4096 keys, all gradients):
//                                      mask         bias         both         mask, softcap  mask, ALiBi  dropout
//   waited for where they are loaded   1.44 / 1.58  1.53 / 1.51  1.82 / 2.18  1.73 / 2.22    2.30 / 2.55  1.21 / 1.04
//   loaded before the products, part by part where registers are few; the plain row of D 128 beside one of mask or bias
//   and dropout; a thread stores the bias's gradient of one key
//                                      1.12 / 1.31  1.19 / 1.46  1.25 / 1.49  1.46 / 1.72    1.90 / 1.83  1.07 / 1.31
//
// Shared memory: K, V, kStages tiles of Q and dO, P, lse and delta of as many, and dA, the block's work.
#pragma once
#include "sm80_wide/gradient_tile.cuh"
#include "sm80_wide/store.cuh"
#include "sm80_wide/weights.cuh"

constexpr i32 kPairs = kWarps / 2, kPairRows = kBlockKV / kPairs, kR = kPairRows / 8, kC = kBlockQ / 4;
constexpr i32 kWideDim = larger(kHeadDim, kHeadDimV);
// Whether second warps sum queries while first ones take exponentials: worth it where those are slow.
constexpr bool kSumsMeanwhile = kSumsQueries && kStages == 2 && sizeof(Score) == 8;
static_assert(kBlockKV % (16 * kPairs) == 0 && kBlockQ % 16 == 0, "whole fragments");
// Threads that copy a tile: in one place first warps alone, while second ones take dq.
constexpr i32 kLoaders = kStages == 1 ? kThreads / 2 : kThreads;
static_assert(2 * kBlockQ <= kLoaders, "a thread fetches one of lse or delta");

using TileK = Tile<kBlockKV, kHeadDim>;
using TileV = Tile<kBlockKV, kHeadDimV>;
using TileQ = Tile<kBlockQ, kHeadDim>;
using TileO = Tile<kBlockQ, kHeadDimV>;
using Scores = Score[kR][kC];
// Weights change hands in parts of kPartQ queries: where exponentials are slow dk begins while the rest are taken.
constexpr i32 kHands = sizeof(Score) == 8 && kC >= 8 ? 2 : 1, kPartC = kC / kHands, kPartQ = kBlockQ / kHands;
using Part = Score[kR][kPartC];
using Accumulator = Score[kR][kWideDim / 4];

// Parts of the dq of a tile: some rows and a line of columns each.
constexpr i32 kLines = kHeadDim / (8 * kChunk), kDqRows = kBlockQ / 16 * kLines >= 2 * kWarps ? 32 : 16;
constexpr i32 kRowParts = kBlockQ / kDqRows, kParts = kRowParts * kLines;

// Offsets in shared memory.
constexpr i32 kWeightBytes = kPairRows * kBlockQ * sizeof(Score);
constexpr i32 kAtV = TileK::kBytes, kAtQ = kAtV + TileV::kBytes, kAtO = kAtQ + kStages * TileQ::kBytes;
constexpr i32 kAtSums = kAtO + kStages * TileO::kBytes;
constexpr i32 kAtWeights = kAtSums + (kSumsQueries ? kStages * TileA::kBytes : 0);
constexpr i32 kAtRows = kAtWeights + kPairs * kWeightBytes, kAtWork = kAtRows + 2 * kStages * kBlockQ * sizeof(Score);
static_assert(kAtWork + kWorkBytes + 128 == kSharedBytes, "the launch gives as much, and room to align");

struct Backward {
  const Params& p;
  Work& work;
  u32 shared;
  ColumnReader<TileQ> read_q;
  ColumnReader<TileO> read_o;
  RowReader<TileQ> sum_q;
  RowReader<TileO> sum_o;
  ColumnReader<TileA> read_a;
  RowReader<TileK, kSectors> sum_k;
  Score fetched;                           // lse or delta of the next tile

  static CF_DEVICE i32 pair() { return i32(warp_index()) % kPairs; }
  static CF_DEVICE bool first_of_pair() { return i32(warp_index()) < kPairs; }
  CF_DEVICE i32 col() const { return work.first + pair() * kPairRows; }      // first key of the pair

  CF_DEVICE u32 q_tile(i32 tile) const { return shared + kAtQ + u32(tile) % u32(kStages) * TileQ::kBytes; }
  CF_DEVICE u32 o_tile(i32 tile) const { return shared + kAtO + u32(tile) % u32(kStages) * TileO::kBytes; }
  CF_DEVICE u32 a_tile(i32 tile) const { return shared + kAtSums + u32(tile) % u32(kStages) * TileA::kBytes; }
  // lse (0) or delta (1) of a tile.
  CF_DEVICE u32 row_numbers(i32 tile, i32 which) const {
    return shared + kAtRows + (u32(tile) % u32(kStages) * 2 + which) * kBlockQ * sizeof(Score);
  }

  CF_DEVICE void load_queries(i32 tile) {
    if (tile >= work.tiles.start && i32(thread_index()) < kLoaders) {
      const i32 row = tile * kBlockQ, i = row + i32(thread_index()) % kBlockQ, which = i32(thread_index()) / kBlockQ;
      TileQ::template load<kLoaders>(q_tile(tile), work.q, row, work.sight.q_length, p.head_dim);
      TileO::template load<kLoaders>(o_tile(tile), work.dout, row, work.sight.q_length, p.head_dim_v);
      if (which == 0) fetched = lse_of(work, i);
      if (which == 1) fetched = delta_of(work, i);
    }
    cp_async_commit_group();
  }

  CF_DEVICE u32 group() const { return u32(i32(opaque(p.heads_q)) / p.heads_kv); }

  // The next head of the group, or the first one of the next item.
  CF_DEVICE void begin() {
    block_barrier();        // nobody reads what belongs to the head before any more
    if (thread_index() == 0) {
      const u32 number = work.walked++, part = number % group();
      describe_item(work, p, item_at(p, work.block.own, number / group()), work.block.head);
      describe_head(work, p, work.block.head * i32(group()) + i32(part));
      describe_results(work, p, work.head);
      work.tiles = tiles_of(work.sight.rows_of_some(work.first, work.first + kBlockKV), kBlockQ);
      work.whole = work.sight.rows_of_all(work.first, work.first + kBlockKV);
    }
    block_barrier();        // the work is there
    if constexpr (kWritesBias) BiasGradient{p, work}.clear_unseen();
    if (work.tiles.start >= work.tiles.stop) return;
    if (work.walked % group() == 1 % group()) {
      TileK::template load<>(shared, work.k, work.first, work.sight.kv_length, p.head_dim);
      TileV::template load<>(shared + kAtV, work.v, work.first, work.sight.kv_length, p.head_dim_v);
    }
    load_queries(work.tiles.stop - 1);
  }

  // Waits for a tile, and for dA of the one before; starts copies of the next.
  CF_DEVICE void next_tile(i32 tile) {
    const i32 thread = kMaskOrBias ? i32(opaque(thread_index())) : i32(thread_index());      // not kept beside addends
    const i32 which = thread / kBlockQ, own = thread % kBlockQ;
    if (which < 2) st_shared(row_numbers(tile, which) + own * i32(sizeof(Score)), fetched);
    cp_async_wait_group<0>();
    block_barrier();        // the tile is there for everyone; nobody reads the one before any more
    if (kStages == 2) load_queries(tile - 1);
  }

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

  // Where chunk c of part n of the weights lies, and the barrier at which it changes hands.
  CF_DEVICE u32 weights(int n, int c) const {
    return shared + kAtWeights + pair() * kWeightBytes + (n * (kR * kPartC / kChunk) + c) * 512 + lane_index() * 16;
  }
  static CF_DEVICE i32 hand(int n) { return 1 + pair() + kPairs * n; }

  // What the first warp of a pair does with a tile: weights into shared memory and into dv.
  CF_DEVICE void give_weights(Accumulator& dv, i32 tile) const {
    const i32 row = tile * kBlockQ;
    Scores s, derivative;
    Part parts[kHands];
    TileAddends<kR, kPartC> addends;           // of a part: those of the next come while one is weighed
    constexpr bool kEarly = !kSoftcapOrAlibi || sizeof(Score) == 4 || kHeadDim <= 64;      // where registers allow
    const auto load_addends = [&](int n) { addends.template load<true>(work, col(), row + n * kPartQ); };
    if constexpr (kMaskOrBias && kEarly) load_addends(kHands - 1);
    multiply_by_transposed<true>(s, shared + pair() * kPairRows * TileK::kRowBytes, q_tile(tile), read_q, p.head_dim);
    scale_scores<true>(s, derivative, work, col(), row);
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
      Part sent;
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        CF_UNROLL
        for (int w = 0; w < kPartC; ++w) sent[u][w] = capped ? own[u][w] * derivative[u][n * kPartC + w] : own[u][w];
      }
      if constexpr (kDropout) {
        for_kept<true>(own, work.dropout, col(), row + n * kPartQ, [&](int u, int w, bool kept) {
          own[u][w] = kept ? own[u][w] : Score(0);
          sent[u][w] = kept ? sent[u][w] : -sent[u][w];
        });
      }
      CF_UNROLL
      for (int c = 0; c < kR * kPartC / kChunk; ++c) {
        Score chunk[kChunk];
        CF_UNROLL
        for (int x = 0; x < kChunk; ++x) chunk[x] = sent[(c * kChunk + x) % kR][(c * kChunk + x) / kR];
        st_shared_chunk(weights(n, c), chunk);
      }
      barrier_arrive_aligned(hand(n), 64);      // the weights are there; they will have been read at the next tile
    }
    CF_UNROLL
    for (int n = kHands - 1; n >= 0; --n) multiply<true>(dv, parts[n], o_tile(tile) + n * kPartQ * TileO::kRowBytes, sum_o);
  }

  // What the second warp does: dA^T from them, into dk.
  CF_DEVICE void take_weights(Accumulator& dk, i32 tile) const {
    Scores dp;
    multiply_by_transposed<false>(dp, shared + kAtV + pair() * kPairRows * TileV::kRowBytes, o_tile(tile), read_o,
                                  p.head_dim_v);
    publish(tile + kStages);
    if constexpr (kSumsMeanwhile) sum_queries(tile + 1);
    const Score kept_scale = kDropout ? dropout_scale<Score>(p) : Score(1);
    CF_UNROLL
    for (int n = kHands - 1; n >= 0; --n) {
      Part own;
      Score delta[kPartC];
      read_row_numbers(delta, tile, 1, n);
      barrier_sync_aligned(hand(n), 64);      // as above
      CF_UNROLL
      for (int c = 0; c < kR * kPartC / kChunk; ++c) {
        Score chunk[kChunk];
        ld_shared_chunk(chunk, weights(n, c));
        CF_UNROLL
        for (int x = 0; x < kChunk; ++x) {
          const int u = (c * kChunk + x) % kR, w = (c * kChunk + x) / kR;
          const Score derivative = dp[u][n * kPartC + w];
          const bool kept = !kDropout || !has_sign(chunk[x]);
          const Score gain = kDropout ? (kept ? derivative * kept_scale : Score(0)) - delta[w] : derivative - delta[w];
          own[u][w] = score_gradient(kDropout ? absolute(chunk[x]) : chunk[x], gain);
        }
      }
      hide(own, tile * kBlockQ + n * kPartQ);
      if constexpr (kSumsQueries) {
        CF_UNROLL
        for (int u = 0; u < kR; ++u) {
          const i32 column = key_place(pair() * kPairRows + fragment_row(u));
          CF_UNROLL
          for (int w = 0; w < kPartC; ++w) {
            st_shared(a_tile(tile) + TileA::element_place(n * kPartQ + score_col(w), column), own[u][w]);
          }
        }
      }
      multiply<true>(dk, own, q_tile(tile) + n * kPartQ * TileQ::kRowBytes, sum_q);
    }
  }

  // A count for each tile of queries, at the number of its first row.
  CF_DEVICE u32* turn_of(i32 tile) const {
    return static_cast<u32*>(p.call.turns) + 1 + row_number(p, work.item, work.head, tile * kBlockQ);
  }

  // How many blocks, those of earlier keys, add to a tile before this one.
  CF_DEVICE u32 earlier(i32 tile) const {
    if (p.splits == 0) return 0;
    const Interval keys = work.sight.keys_of_some(tile * kBlockQ, (tile + 1) * kBlockQ);
    return u32(larger(work.first / kBlockKV - keys.start / kBlockKV, 0));
  }

  // The warp's part of dq of a tile: dA k, added to what the blocks of earlier keys have left.
  CF_DEVICE void sum_queries(i32 tile) const {
    if (tile >= work.tiles.stop) return;
    const u32 before = earlier(tile), seen = before > 0 ? load_relaxed(turn_of(tile)) : 0;
    CF_UNROLL_1
    for (i32 part = warp_index(); part < kParts; part += kWarps) {
      const i32 row = part % kRowParts * kDqRows, line = part / kRowParts;
      Score dq[kDqRows / 8][2 * kChunk];
      multiply_line<kBlockKV / 16>(dq, a_tile(tile) + row * TileA::kRowBytes, read_a, shared, line, sum_k);
      if (part < kWarps && seen < before) wait_for_count(turn_of(tile), before);
      warp_barrier();          // no lane adds before its turn
      const Rows<Element> rows = rows_of<Element>(p.call.dq, p.dq, work.item, work.head);
      finish_by(dq, Score(p.call.scale));
      add_line(dq, rows, tile * kBlockQ + row, work.sight.q_length, line * 8 * kChunk, p.head_dim);
    }
  }

  // Says that the block has added its share of a tile; all warps have done so and met since.
  CF_DEVICE void publish(i32 tile) const {
    if (!kSumsQueries || tile >= work.tiles.stop || p.splits == 0) return;
    if (thread_index() == kThreads / 2) red_release_increment(turn_of(tile));      // of a warp that will wait for weights
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
          if constexpr (kWritesBias) BiasGradient{p, work}.store(tile, a_tile(tile));
          sum_queries(tile);
        }
      } else {
        CF_UNROLL_1
        for (i32 tile = work.tiles.stop - 1; tile >= work.tiles.start - (kSumsQueries ? 1 : 0); --tile) {
          next_tile(tile);
          if constexpr (kWritesBias) BiasGradient{p, work}.store(tile + 1, a_tile(tile + 1));
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
