// Backward for float and double on tensor cores, by queries: dq of one tile of queries (kOwnsQueries), or the gradients of
// what is added to its scores.
//
//   P = exp(S - lse)     dS = P * (r * dO v^T - delta')     dA = dS * d(c)/d(a)     dq = scale * sum of dA k over keys
//   dbias = dS, of a bias that was not broadcast     slope_rows = -sum of |i + offset - j| dS over keys
//
// The forward's layout: a block owns kBlockQ queries of one head, a warp some of their rows and all columns of dq. Where q
// was broadcast over leading axes the block of dq walks all the items that shared it, in order.
//
//   tile j   | wait for K(j), V(j); start K(j + 1), V(j + 1)     S = Q K^T     dP = dO V^T     P, dS     dq += dA K
//
// Shared memory: Q, dO, two tiles of K and of V, lse and delta, the block's work.
#pragma once
#include "sm80_wide/store.cuh"
#include "sm80_wide/weights.cuh"

constexpr i32 kWarpRows = kBlockQ / kWarps, kR = kWarpRows / 8, kC = kBlockKV / 4;
static_assert(kBlockQ % (16 * kWarps) == 0 && kBlockKV % 16 == 0, "whole fragments");

using TileQ = Tile<kBlockQ, kHeadDim>;
using TileO = Tile<kBlockQ, kHeadDimV>;
using TileK = Tile<kBlockKV, kHeadDim>;
using TileV = Tile<kBlockKV, kHeadDimV>;
using Scores = Score[kR][kC];
using OwnAddends = TileAddends<kR, kC>;

// Offsets in shared memory.
constexpr i32 kAtO = TileQ::kBytes, kAtK = kAtO + TileO::kBytes, kAtV = kAtK + 2 * TileK::kBytes;
constexpr i32 kAtRows = kAtV + 2 * TileV::kBytes, kAtWork = kAtRows + 2 * kBlockQ * sizeof(Score);
static_assert(kAtWork + kWorkBytes + 128 == kSharedBytes, "the launch gives as much, and room to align");

struct Backward {
  const Params& p;
  Work& work;
  u32 shared;
  ColumnReader<TileK> read_k;
  ColumnReader<TileV> read_v;
  RowReader<TileK> sum_k;
  Score slope[kR], dq[kR][kHeadDim / 4];

  // First query of the warp in the block's tile, and in all.
  static CF_DEVICE i32 tile_row() { return i32(warp_index()) * kWarpRows; }
  CF_DEVICE i32 row() const { return work.first + tile_row(); }

  CF_DEVICE u32 k_tile(i32 tile) const { return shared + kAtK + u32(tile) % 2u * TileK::kBytes; }
  CF_DEVICE u32 v_tile(i32 tile) const { return shared + kAtV + u32(tile) % 2u * TileV::kBytes; }

  // Where lse (0) or delta (1) of the block's query i lies.
  CF_DEVICE u32 row_number_at(i32 which, i32 i) const {
    return shared + kAtRows + (which * kBlockQ + i) * i32(sizeof(Score));
  }

  CF_DEVICE void load_keys(i32 tile) const {
    if (tile < work.tiles.stop) {
      TileK::load(k_tile(tile), work.k, tile * kBlockKV, work.sight.kv_length, p.head_dim);
      TileV::load(v_tile(tile), work.v, tile * kBlockKV, work.sight.kv_length, p.head_dim_v);
    }
    cp_async_commit_group();
  }

  // The next item: its queries and first keys.
  CF_DEVICE void begin(const Item& item) {
    block_barrier();        // nobody reads what belongs to the item before any more
    if (thread_index() == 0) {
      describe_item(work, p, item, work.head / (p.heads_q / p.heads_kv));
      describe_head(work, p, work.head);
      describe_results(work, p, work.head);
      work.tiles = tiles_of(work.sight.keys_of_some(work.first, work.first + kBlockQ), kBlockKV);
    }
    block_barrier();        // the work is there
    describe_warp(work, row(), kWarpRows);
    warp_barrier();         // the warp's part of it too
    for (i32 i = thread_index(); i < kBlockQ; i += kThreads) {      // seen by all at the first tile's barrier
      st_shared(row_number_at(0, i), lse_of(work, work.first + i));
      st_shared(row_number_at(1, i), delta_of(work, work.first + i));
    }
    if (work.tiles.start >= work.tiles.stop) return;
    TileQ::load(shared, work.q, work.first, work.sight.q_length, p.head_dim);
    TileO::load(shared + kAtO, work.dout, work.first, work.sight.q_length, p.head_dim_v);
    load_keys(work.tiles.start);
  }

  // dS of a tile, and d(c) / d(a) where something caps.
  CF_DEVICE void score_gradients(Scores& s, Scores& derivative, const OwnAddends& addends, i32 tile) const {
    const i32 col = tile * kBlockKV;
    Scores dp;
    multiply_by_transposed<true>(s, shared + tile_row() * TileQ::kRowBytes, k_tile(tile), read_k,
                                 p.head_dim);
    scale_scores<false>(s, derivative, work, row(), col);
    if constexpr (kMaskOrBias) addends.add_to(s);
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      const Score lse = ld_shared<Score>(row_number_at(0, tile_row() + fragment_row(u)));
      CF_UNROLL
      for (int w = 0; w < kC; ++w) s[u][w] = weight_from(s[u][w], lse);
    }
    multiply_by_transposed<false>(dp, shared + kAtO + tile_row() * TileO::kRowBytes, v_tile(tile), read_v,
                                  p.head_dim_v);
    if constexpr (kDropout) {
      const Score scale = dropout_scale<Score>(p);
      for_kept<false>(dp, work.dropout, row(), col,
                      [&](int u, int w, bool kept) { dp[u][w] = kept ? dp[u][w] * scale : Score(0); });
    }
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      const Score delta = ld_shared<Score>(row_number_at(1, tile_row() + fragment_row(u)));
      CF_UNROLL
      for (int w = 0; w < kC; ++w) s[u][w] = score_gradient(s[u][w], dp[u][w] - delta);
    }
    if (!work.all[warp_index()].covers(col, col + kBlockKV)) select<false>(s, work, row(), col, Score(0));
  }

  CF_DEVICE void add_to_queries(const OwnAddends& addends, i32 tile) {
    Scores s, derivative;
    score_gradients(s, derivative, addends, tile);
    if (kSoftcapOrAlibi && work.terms.softcap > Score(0)) {
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        CF_UNROLL
        for (int w = 0; w < kC; ++w) s[u][w] *= derivative[u][w];
      }
    }
    multiply(dq, s, k_tile(tile), sum_k);
  }

  CF_DEVICE void to_addends(const OwnAddends& addends, i32 tile, bool seen) {
    Scores s, derivative;
    if (seen) score_gradients(s, derivative, addends, tile); else clear(s);
    store_bias(s, tile * kBlockKV);
    if (!kSoftcapOrAlibi || p.call.slope_rows == nullptr) return;
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kC; ++w) {
        slope[u] = fused(-distance<false>(work, row(), tile * kBlockKV, u, w), s[u][w], slope[u]);
      }
    }
  }

  // The bias's gradient, of the warp's queries and a tile of keys.
  template <class T> CF_DEVICE void store_bias(const Scores& ds, i32 col) const {
    const Rows<T> rows = rows_of<T>(p.call.dbias, p.dbias, work.item, work.head);
    const bool pairs = rows.template packed<2>() && p.seqlen_k % 2 == 0;
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      const i32 i = row() + fragment_row(u), first = col + score_col(0);
      T* const to = rows.at(i, first);
      CF_UNROLL
      for (int w = 0; w < kC; w += 2) {
        const i32 at = score_col(w) - score_col(0);
        if (i >= p.seqlen_q || first + at >= p.seqlen_k) continue;
        if (pairs) {
          *reinterpret_cast<Packed<T, 2>*>(to + at) = {{T(ds[u][w]), T(ds[u][w + 1])}};
          continue;
        }
        to[at * rows.col_stride] = T(ds[u][w]);
        if (first + at + 1 < p.seqlen_k) to[(at + 1) * rows.col_stride] = T(ds[u][w + 1]);
      }
    }
  }
  CF_DEVICE void store_bias(const Scores& ds, i32 col) const {
    if (!kMaskOrBias || p.call.dbias == nullptr) return;
    if (p.dbias_kind == KindOf<Element>::value) store_bias<Element>(ds, col);
    else store_bias<float>(ds, col);
  }
  CF_DEVICE void clear_bias(i32 from, i32 to) const {
    Scores zeros;
    clear(zeros);
    CF_UNROLL_1
    for (i32 tile = from; tile < to; ++tile) store_bias(zeros, tile * kBlockKV);
  }

  CF_DEVICE void walk(u32 own) {
    CF_UNROLL_1
    for (u32 loop = 0; loop < points(p.loop); ++loop) {
      begin(item_at(p, own, loop));
      if constexpr (!kOwnsQueries) {
        clear_bias(0, work.tiles.start);
        clear_bias(work.tiles.stop, ceil_div(p.seqlen_k, kBlockKV));
      }
      OwnAddends next;
      if constexpr (kMaskOrBias) next.template load<false>(work, row(), work.tiles.start * kBlockKV);
      CF_UNROLL_1
      for (i32 tile = work.tiles.start; tile < work.tiles.stop; ++tile) {
        cp_async_wait_group<0>();
        block_barrier();    // tile j is there for everyone; nobody reads tile j - 1 any more
        load_keys(tile + 1);
        const Interval keys = work.some[warp_index()];
        bool seen = (tile + 1) * kBlockKV > keys.start && tile * kBlockKV < keys.stop;
        OwnAddends addends = next;
        if constexpr (kMaskOrBias) {
          seen = addends.join() && seen;      // or a mask or a bias forbids all
          next.template load<false>(work, row(), (tile + 1) * kBlockKV);
        }
        if constexpr (kOwnsQueries) {
          if (seen) add_to_queries(addends, tile);
        } else {
          to_addends(addends, tile, seen);
        }
      }
      if constexpr (!kOwnsQueries) store_slopes();
    }
  }

  // The slopes' sums of one item, which start again at 0.
  CF_DEVICE void store_slopes() {
    if (!kSoftcapOrAlibi || p.call.slope_rows == nullptr) return;
    Score* to = static_cast<Score*>(p.call.slope_rows) + row_number(p, work.item, work.head, 0);
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      const Score sum = QuadLanes::sum(slope[u]);
      if (lane_in_group() == 0 && row() + fragment_row(u) < p.seqlen_q) to[row() + fragment_row(u)] = sum;
      slope[u] = Score(0);
    }
  }

  CF_DEVICE void finish(const Item& item) {
    finish_by(dq, Score(p.call.scale));
    store_tile(dq, target_of(p.call.dq, p.dq, item, work.head, p.seqlen_q, p.head_dim, p.accumulate != 0), row());
  }
};

CF_DEVICE void backward_of_queries(const Params& p) {
  const TileWork tile = tile_work(block_index(), ceil_div(p.seqlen_q, kBlockQ), 1, p.heads_q, p.call.right < kUnbounded);
  Work& work = shared_work(kAtWork);
  if (thread_index() == 0) work.head = tile.head, work.first = tile.tile * kBlockQ;
  Backward backward{p, work, shared_tiles()};
  CF_UNROLL
  for (int u = 0; u < kR; ++u) backward.slope[u] = Score(0);
  clear(backward.dq);
  backward.walk(tile.own);
  if constexpr (kOwnsQueries) backward.finish(item_at(p, tile.own, 0));
}
