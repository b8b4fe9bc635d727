// Backward pass on the CUDA cores, first half: dq of one tile of queries, and the rows' share of the ALiBi gradient.
//
// The weights come back from lse (Dao et al. 2022, Algorithm 4; the two-kernel form without atomics): for every key tile
//   P = exp(S - lse)      dS = P * (r * dO v^T - delta')      dA = dS * d(c)/d(a)      dq += scale * dA k
// with delta' = delta - dlse from prepost/delta.cu. A block owns its rows of dq; where q was broadcast over leading
// axes it walks all the items that shared it, in order. No atomics: the same bits every time.
//
//   block     one (owner item, query head, query tile, kHeadDim columns of dq);  threads as in forward.cu
//   shared    q, dout  kPanels x kBlockQ x kChunk, resident where they fit, else panel 0 is refilled by chunks
//             k  kPanels x kBlockKV x kChunk: all of it, or a chunk for S and then the columns of this block for dq
//             v  kBlockKV x kChunk, refilled by chunks;   lse, delta  kBlockQ
//             ds  kBlockQ x kBlockKV: mask and bias first, then d(c)/d(a), then dA
//
//   key tile   | load k v0 addends | S += q k^T | P | dP += dO v0^T | load v1 | dP += dO v1^T | .. | dA | dq += dA k |
//   barriers   #                   #                                #         #                     w   w            #
//
// A head dim beyond kHeadDim is streamed, and every block of dq's columns repeats the scores.
#include "simt/work.cuh"

constexpr i32 kPanels = kHeadDim / kChunk, kPanelsV = kHeadDimV / kChunk;
using Tile = ScoreTile<true>;
constexpr i32 kQ = Tile::kQ, kK = Tile::kK, kCols = kHeadDim / kLanesX;

struct SharedStorage {
  Work work;
  Score q[kPanels][kBlockQ * kRow];
  Score dout[kPanelsV][kBlockQ * kRow];
  Score k[kPanels][kBlockKV * kRow];
  Score v[kBlockKV * kRow];
  Score ds[kBlockQ * Tile::kStep];
  Score lse[kBlockQ], delta[kBlockQ];      // by slot
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "the launch gives what the kernel uses");
static_assert(kHeadDim % kChunk == 0 && kHeadDimV % kChunk == 0, "whole chunks");

CF_DEVICE bool is_streamed(i32 width, i32 fits) { return kStreamed && width > fits; }

// Everything of the queries that stays for all key tiles of an item.
CF_DEVICE void load_resident(SharedStorage& smem, const Params& p) {
  const Work& work = smem.work;
  load_row_numbers<Tile>(smem.lse, smem.delta, work, work.first);
  for (i32 chunk = 0; !is_streamed(p.head_dim, kHeadDim) && chunk * kChunk < p.head_dim; ++chunk) {
    load_queries<Tile>(smem.q[chunk], work.q, work, work.first, chunk, p.head_dim, work.terms.scale);
  }
  for (i32 chunk = 0; !is_streamed(p.head_dim_v, kHeadDimV) && chunk * kChunk < p.head_dim_v; ++chunk) {
    load_queries<Tile>(smem.dout[chunk], work.dout, work, work.first, chunk, p.head_dim_v);
  }
}

// S = q k^T; all of k, or its chunks one after the other, the first chunk of v and the addends are loaded on the way.
CF_DEVICE void products(Tile::Scores& s, SharedStorage& smem, const Params& p, i32 col) {
  const Work& work = smem.work;
  const bool streamed = is_streamed(p.head_dim, kHeadDim);
  const i32 chunks = ceil_div(p.head_dim, kChunk);
  clear(s);
  for (i32 chunk = 0; chunk < chunks; ++chunk) {
    if (streamed || chunk == 0) {
      block_barrier();                     // the tiles that this overwrites have been read
      if (streamed) load_queries<Tile>(smem.q[0], work.q, work, work.first, chunk, p.head_dim, work.terms.scale);
      for (i32 panel = 0; panel < (streamed ? 1 : chunks); ++panel) {
        load_keys<Tile>(smem.k[panel], work.k, work, col, chunk + panel, p.head_dim);
      }
      if (chunk == 0 && p.head_dim_v > 0) load_keys<Tile>(smem.v, work.v, work, col, 0, p.head_dim_v);
      if (kMaskOrBias && chunk == 0) AddendTile<Tile>::stage(smem.ds, work.addends, work.sight, work.first, col);
      block_barrier();                     // the tiles are there
    }
    const i32 panel = streamed ? 0 : chunk;
    multiply_by_transposed<kQ, kK, kLanesY * kRow, kLanesX * kRow>(s, smem.q[panel] + lane_y() * kRow,
                                                                   smem.k[panel] + lane_x() * kRow,
                                                                   chunk_depth(chunk, p.head_dim));
  }
}

// Products become weights, P; d(c)/d(a) waits in this thread's places of ds.
CF_DEVICE void weigh(Tile::Scores& s, SharedStorage& smem, i32 col) {
  const Work& work = smem.work;
  const bool whole = keys_of_all_live_rows(work).covers(col, col + kBlockKV);
  CF_UNROLL
  for (int q = 0; q < kQ; ++q) {
    Score derivative[kK];
    Tile::shape(q, s[q], derivative, work.terms, smem.ds, work.sight, work.first, col, whole);
    const Score lse = smem.lse[lane_y() + q * kLanesY];
    CF_UNROLL
    for (int k = 0; k < kK; ++k) {
      s[q][k] = weight_of(s[q][k], lse);
      if constexpr (kSoftcapOrAlibi) smem.ds[Tile::place(q, k)] = derivative[k];
    }
  }
}

// dP = dO v^T.
CF_DEVICE void value_products(Tile::Scores& dp, SharedStorage& smem, const Params& p, i32 col) {
  const Work& work = smem.work;
  const bool streamed = is_streamed(p.head_dim_v, kHeadDimV);
  clear(dp);
  for (i32 chunk = 0; chunk * kChunk < p.head_dim_v; ++chunk) {
    if (streamed || chunk > 0) {
      block_barrier();                     // the tiles that this overwrites have been read
      if (streamed) load_queries<Tile>(smem.dout[0], work.dout, work, work.first, chunk, p.head_dim_v);
      if (chunk > 0) load_keys<Tile>(smem.v, work.v, work, col, chunk, p.head_dim_v);
      block_barrier();                     // the tiles are there
    }
    const Score* dout = smem.dout[streamed ? 0 : chunk] + lane_y() * kRow;
    multiply_by_transposed<kQ, kK, kLanesY * kRow, kLanesX * kRow>(dp, dout, smem.v + lane_x() * kRow,
                                                                   chunk_depth(chunk, p.head_dim_v));
  }
}

// dA of the tile to shared memory, over d(c)/d(a); `slope_sum` gathers the rows' -distance * dS.
CF_DEVICE void store_ds(const Tile::Scores& weights, const Tile::Scores& dp, SharedStorage& smem, const Params& p, i32 col,
                        Score (&slope_sum)[kQ]) {
  const Work& work = smem.work;
  const Tile::Bits kept = kDropout ? Tile::keep_bits(work.dropout, work.first, col) : 0;
  const Score scale = kDropout ? dropout_scale<Score>(p) : Score(1);
  CF_UNROLL
  for (int q = 0; q < kQ; ++q) {
    const Score delta = smem.delta[lane_y() + q * kLanesY];
    CF_UNROLL
    for (int k = 0; k < kK; ++k) {
      const bool keep = Tile::keeps(kept, q, k);
      Score ds = gradient_of(weights[q][k], keep ? scale * dp[q][k] : Score(0), delta);
      if constexpr (kSoftcapOrAlibi) {
        const i64 ahead = work.first + work.sight.offset - col;
        slope_sum[q] = fused(-Tile::distance(ahead, q, k), ds, slope_sum[q]);
        ds *= smem.ds[Tile::place(q, k)];
      }
      smem.ds[Tile::place(q, k)] = ds;
    }
  }
}

// The row sums of the ALiBi gradient, to a workspace that prepost/sum_rows.cu adds up.
CF_DEVICE void store_slope_rows(const Score (&slope_sum)[kQ], const Params& p, const Work& work) {
  Score* rows = static_cast<Score*>(p.call.slope_rows) + row_number(p, work.item, work.head, 0);
  CF_UNROLL
  for (int q = 0; q < kQ; ++q) {
    const Score sum = RowLanes::sum(slope_sum[q]);
    const i32 row = work.first + Tile::query(q);
    if (lane_x() == 0 && row < p.seqlen_q) rows[row] = row < work.sight.q_length ? sum : Score(0);
  }
}

// Adds one batch item to the block's dq.
CF_DEVICE void add_item(Score (&acc)[kQ][kCols], SharedStorage& smem, const Params& p) {
  const Work& work = smem.work;
  Score slope_sum[kQ] = {};
  load_resident(smem, p);
  for (i32 col = tile_floor(keys_of_block(work).start, kBlockKV); col < keys_of_block(work).stop; col += kBlockKV) {
    Tile::Scores weights, dp;
    products(weights, smem, p, col);
    weigh(weights, smem, col);
    value_products(dp, smem, p, col);
    warp_barrier();                        // what the warp's rows of ds held has been read
    store_ds(weights, dp, smem, p, col, slope_sum);
    if (is_streamed(p.head_dim, kHeadDim)) {
      block_barrier();                     // the last chunk of k has been read
      for (i32 panel = 0; panel < kPanels && (work.split * kPanels + panel) * kChunk < p.head_dim; ++panel) {
        load_keys<Tile>(smem.k[panel], work.k, work, col, work.split * kPanels + panel, p.head_dim);
      }
      block_barrier();                     // the columns of this block are there
    }
    warp_barrier();                        // dA is there
    multiply<kSumsApart, kQ, kCols, kBlockKV, kLanesY * Tile::kStep, kRow, kChunk, kBlockKV * kRow>(
        acc, smem.ds + lane_y() * Tile::kStep, smem.k[0] + kVec * lane_x());
  }
  if (kSoftcapOrAlibi && p.call.slope_rows != nullptr && work.split == 0) store_slope_rows(slope_sum, p, work);
}

// Which queries and columns are the block's, and the item whose turn it is.
CF_DEVICE void describe(Work& work, const Params& p, u32 loop) {
  const i32 tiles = ceil_div(p.seqlen_q, kBlockQ), splits = ceil_div(p.head_dim, kHeadDim);
  const TileWork tile = tile_work(block_index(), tiles, splits, p.heads_q, true);
  describe_place(work, tile.tile * kBlockQ, tile.split);
  describe_item(work, p, tile.own, loop, tile.head / (p.heads_q / p.heads_kv));
  describe_head(work, p, tile.head);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) cupyflash_backward_q(const Params p) {
  SharedStorage& smem = shared_storage<SharedStorage>();
  const Work& work = smem.work;
  Score acc[kQ][kCols];
  clear(acc);
  for (u32 loop = 0; loop < points(p.loop); ++loop) {
    block_barrier();                       // the item before has been read
    if (thread_index() == 0) describe(smem.work, p, loop);
    block_barrier();                       // the description is there
    add_item(acc, smem, p);
  }
  if (p.call.dq == nullptr) return;
  scale_all(acc, Score(p.call.scale));
  block_barrier();                         // all tiles have been read: the results may lie over them
  store_accumulators<kHeadDim>(smem.q[0], acc);
  block_barrier();                         // the results are there
  const i32 live_stop = walks_items(p) ? p.seqlen_q : work.sight.q_length;
  const Target to{work.first, live_stop, p.seqlen_q, work.split * kHeadDim, p.head_dim, p.accumulate != 0};
  store_tile<kBlockQ, kHeadDim, Tile::Queries>(smem.q[0], p.call.dq, p.dq, p.dq_kind, work.item, work.head, to);
}
