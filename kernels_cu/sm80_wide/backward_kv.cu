// Backward for float and double on tensor cores, first half: dk and dv of one tile of keys (Dao 2023, Algorithm 2, turned).
//
//   P = exp(S - lse)     dv += (r * P)^T dO     dS = P * (r * dP - delta')     dA = dS * d(c)/d(a)     dk += scale * dA^T q
//
// Warps work in pairs on kPairRows keys: the first of a pair computes S^T = K Q^T and owns dv, the second dP^T = V dO^T
// and owns dk. With keys on rows, P^T and dA^T leave the accumulators as operands of the next product; only P^T crosses
// from one warp to the other, and its sign says what dropout took. All query heads of the group and all items that share
// the keys follow one another, in order.
//
//   tile x   | wait for Q(x), dO(x), lse, delta; start those of x + 1
//    first   | S^T = K Q^T     P^T -> shared     #   dv += P^T dO
//    second  | dP^T = V dO^T                     #   P^T <- shared    dA^T    dk += dA^T Q        # the pair
//
// Shared memory: K, V, two tiles of Q and dO, two of P a pair, lse and delta of two tiles, the block's work.
#include "sm80_wide/store.cuh"
#include "sm80_wide/weights.cuh"

constexpr i32 kPairs = kWarps / 2, kPairRows = kBlockKV / kPairs, kR = kPairRows / 8, kC = kBlockQ / 4;
constexpr i32 kWideDim = larger(kHeadDim, kHeadDimV);
static_assert(kBlockKV % (16 * kPairs) == 0 && kBlockQ % 16 == 0, "whole fragments");
static_assert(2 * kBlockQ <= kThreads, "a thread fetches one of lse or delta");

using TileK = Tile<kBlockKV, kHeadDim>;
using TileV = Tile<kBlockKV, kHeadDimV>;
using TileQ = Tile<kBlockQ, kHeadDim>;
using TileO = Tile<kBlockQ, kHeadDimV>;
using Scores = Score[kR][kC];
using Accumulator = Score[kR][kWideDim / 4];

// Offsets in shared memory.
constexpr i32 kWeightBytes = kPairRows * kBlockQ * sizeof(Score);
constexpr i32 kAtV = TileK::kBytes, kAtQ = kAtV + TileV::kBytes, kAtO = kAtQ + 2 * TileQ::kBytes;
constexpr i32 kAtWeights = kAtO + 2 * TileO::kBytes, kAtRows = kAtWeights + 2 * kPairs * kWeightBytes;
constexpr i32 kAtWork = kAtRows + 4 * kBlockQ * sizeof(Score);
static_assert(kAtWork + kWorkBytes + 128 == kSharedBytes, "the launch gives as much, and room to align");

struct Backward {
  const Params& p;
  Work& work;
  u32 shared;
  ColumnReader<TileQ> read_q;
  ColumnReader<TileO> read_o;
  RowReader<TileQ> sum_q;
  RowReader<TileO> sum_o;
  Score fetched;                           // lse or delta of the next tile

  static CF_DEVICE i32 pair() { return i32(warp_index()) % kPairs; }
  CF_DEVICE i32 col() const { return work.first + pair() * kPairRows; }      // first key of the pair

  CF_DEVICE u32 q_tile(i32 tile) const { return shared + kAtQ + u32(tile) % 2u * TileQ::kBytes; }
  CF_DEVICE u32 o_tile(i32 tile) const { return shared + kAtO + u32(tile) % 2u * TileO::kBytes; }
  CF_DEVICE u32 weights_of(i32 tile) const {
    return shared + kAtWeights + (pair() * 2 + tile % 2) * kWeightBytes + lane_index() * 16;
  }
  // lse (0) or delta (1) of a tile.
  CF_DEVICE u32 row_numbers(i32 tile, i32 which) const {
    return shared + kAtRows + (tile % 2 * 2 + which) * kBlockQ * i32(sizeof(Score));
  }

  CF_DEVICE void load_queries(i32 tile) {
    if (tile < work.tiles.stop) {
      const i32 row = tile * kBlockQ, i = row + i32(thread_index()) % kBlockQ, which = i32(thread_index()) / kBlockQ;
      TileQ::load(q_tile(tile), work.q, row, work.sight.q_length, p.head_dim);
      TileO::load(o_tile(tile), work.dout, row, work.sight.q_length, p.head_dim_v);
      if (which == 0) fetched = lse_of(work, i);
      if (which == 1) fetched = delta_of(work, i);
    }
    cp_async_commit_group();
  }

  // The next head of the group, or the first one of the next item.
  CF_DEVICE void begin(const Item& item, i32 head, i32 kv_head, bool new_item) {
    block_barrier();        // nobody reads what belongs to the head before any more
    if (thread_index() == 0) {
      describe_item(work, p, item, kv_head);
      describe_head(work, p, head);
      describe_results(work, p, head);
      work.tiles = tiles_of(work.sight.rows_of_some(work.first, work.first + kBlockKV), kBlockQ);
    }
    block_barrier();        // the work is there
    if (work.tiles.start >= work.tiles.stop) return;
    if (new_item) {
      TileK::load(shared, work.k, work.first, work.sight.kv_length, p.head_dim);
      TileV::load(shared + kAtV, work.v, work.first, work.sight.kv_length, p.head_dim_v);
    }
    load_queries(work.tiles.start);
  }

  // Waits for a tile, and starts copies of the next.
  CF_DEVICE void next_tile(i32 tile) {
    const i32 which = i32(thread_index()) / kBlockQ, own = i32(thread_index()) % kBlockQ;
    if (which < 2) st_shared(row_numbers(tile, which) + own * i32(sizeof(Score)), fetched);
    cp_async_wait_group<0>();
    block_barrier();        // the tile is there for everyone; nobody reads the one before any more
    load_queries(tile + 1);
  }

  // Numbers of the lane's columns.
  CF_DEVICE void read_row_numbers(Score (&x)[kC], i32 tile, i32 which) const {
    CF_UNROLL
    for (int w = 0; w < kC; w += 2) {
      ld_shared_pair(x[w], x[w + 1], row_numbers(tile, which) + score_col(w) * i32(sizeof(Score)));
    }
  }

  // Pairs that positions and lengths forbid get 0.
  CF_DEVICE void hide(Scores& s, i32 row) const {
    if (work.sight.keys_of_all(row, row + kBlockQ).covers(col(), col() + kPairRows)) return;
    select<true>(s, work, col(), row, Score(0));
  }

  // What the first warp of a pair does with a tile: weights into shared memory and into dv.
  CF_DEVICE void give_weights(Accumulator& dv, i32 tile) const {
    const i32 row = tile * kBlockQ;
    Scores s, derivative;
    TileAddends<kR, kC> addends;
    if constexpr (kMaskOrBias) addends.template load<true>(work.addends, work.sight.q_length, work.sight.kv_length, col(), row);
    multiply_by_transposed(s, shared + pair() * kPairRows * TileK::kRowBytes, q_tile(tile), read_q);
    scale_scores<true>(s, derivative, work, col(), row);
    if constexpr (kMaskOrBias) addends.add_to(s);
    Score lse[kC];
    read_row_numbers(lse, tile, 0);
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kC; ++w) s[u][w] = weight_from(s[u][w], lse[w]);
    }
    hide(s, row);
    Scores sent;
    const bool capped = kSoftcapOrAlibi && work.terms.softcap > Score(0);
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kC; ++w) sent[u][w] = capped ? s[u][w] * derivative[u][w] : s[u][w];
    }
    if constexpr (kDropout) {
      for_kept<true>(s, work.dropout, col(), row, [&](int u, int w, bool kept) {
        s[u][w] = kept ? s[u][w] : Score(0);
        sent[u][w] = kept ? sent[u][w] : -sent[u][w];
      });
    }
    CF_UNROLL
    for (int n = 0; n < kR * kC; n += kChunk) {
      Score chunk[kChunk];
      CF_UNROLL
      for (int x = 0; x < kChunk; ++x) chunk[x] = sent[n / kC][n % kC + x];
      st_shared_chunk(weights_of(tile) + n / kChunk * 512, chunk);
    }
    barrier_sync_aligned(1 + pair(), 64);      // the weights are there; those of two tiles ago have been read
    multiply(dv, s, o_tile(tile), sum_o);
  }

  // What the second warp does: dA^T from them, into dk.
  CF_DEVICE void take_weights(Accumulator& dk, i32 tile) const {
    Scores dp;
    multiply_by_transposed(dp, shared + kAtV + pair() * kPairRows * TileV::kRowBytes, o_tile(tile), read_o);
    const Score kept_scale = kDropout ? dropout_scale<Score>(p) : Score(1);
    Score delta[kC];
    read_row_numbers(delta, tile, 1);
    barrier_sync_aligned(1 + pair(), 64);      // as above
    CF_UNROLL
    for (int n = 0; n < kR * kC; n += kChunk) {
      Score chunk[kChunk];
      ld_shared_chunk(chunk, weights_of(tile) + n / kChunk * 512);
      CF_UNROLL
      for (int x = 0; x < kChunk; ++x) {
        const int w = n % kC + x;
        Score& own = dp[n / kC][w];
        const bool kept = !kDropout || !has_sign(chunk[x]);
        const Score gain = kDropout ? (kept ? own * kept_scale : Score(0)) - delta[w] : own - delta[w];
        own = score_gradient(kDropout ? absolute(chunk[x]) : chunk[x], gain);
      }
    }
    hide(dp, tile * kBlockQ);
    multiply(dk, dp, q_tile(tile), sum_q);
  }

  // Walks all queries; `acc` is dv in the first warp of a pair and dk in the second.
  CF_DEVICE void walk(Accumulator& acc, u32 own, i32 kv_head, bool first_of_pair) {
    const i32 group = p.heads_q / p.heads_kv;
    CF_UNROLL_1
    for (u32 number = 0; number < points(p.loop) * u32(group); ++number) {
      const i32 part = i32(number % u32(group));
      begin(item_at(p, own, number / u32(group)), kv_head * group + part, kv_head, part == 0);
      CF_UNROLL_1
      for (i32 tile = work.tiles.start; tile < work.tiles.stop; ++tile) {
        next_tile(tile);
        if (first_of_pair) give_weights(acc, tile);
        else take_weights(acc, tile);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_backward_kv(const Params p) {
  const TileWork tile = tile_work(block_index(), ceil_div(p.seqlen_k, kBlockKV), 1, p.heads_kv, false);
  const i32 head = tile.head;
  const bool first_of_pair = i32(warp_index()) < kPairs, accumulate = p.accumulate != 0;
  Work& work = shared_work(kAtWork);
  if (thread_index() == 0) work.first = tile.tile * kBlockKV;
  Backward backward{p, work, shared_tiles()};
  Accumulator acc;
  clear(acc);
  backward.walk(acc, tile.own, head, first_of_pair);
  void* const to = first_of_pair ? p.call.dv : p.call.dk;
  if (to == nullptr) return;
  const Score kept = kDropout ? dropout_scale<Score>(p) : Score(1);
  multiply_by(acc, first_of_pair ? kept : Score(p.call.scale));
  store_tile(acc, target_of(to, first_of_pair ? p.dv : p.dk, item_at(p, tile.own, 0), head, p.seqlen_k,
                            first_of_pair ? p.head_dim_v : p.head_dim, accumulate), backward.col());
}
