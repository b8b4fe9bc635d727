// Forward pass on the CUDA cores: out and lse of one tile of queries, for any GPU, dtype, head dims and strides.
//
// FlashAttention's loop (Dao et al. 2022, Algorithm 1; Dao 2023, Algorithm 1): a block keeps kBlockQ queries and walks
// the key tiles that any of them sees; scores live in registers, never in memory.
//
//   block     one (batch item, query head, query tile, kHeadDimV columns of v and out)
//   thread    rows y + n * kLanesY of the score tile and of the accumulated output: a row belongs to one warp, so that
//             softmax needs shuffles alone and weights pass through shared memory without a block barrier
//   shared    q  kPanels x kBlockQ x kChunk, resident where head_dim <= kHeadDim, else panel 0 is refilled by chunks
//             k  kBlockKV x kChunk, refilled by chunks of the head dim;   v  kBlockKV x kHeadDimV
//             weights  kBlockQ x kBlockKV: mask and bias first, then exp(s - m)
//
//   key tile   | load k0 v addends | S += q0 k0^T | load k1 | S += q1 k1^T | ... | softmax | O = O * rescale + P v |
//   barriers   #                   #              #         #                       w w                            #
//
// or, where cp.async exists and a second place for k (kAhead), with every chunk on its way while the one before is read:
//
//   key tile   | wait for k0; start v, k1 | S += q0 k0^T | wait for k1, v; start k2 | S += q1 k1^T | ... | softmax | O |
//   barriers   #                                         #                                                  w w
//
// Errors of out as multiples of those of the plain computation, largest / rms, ordinary inputs of head dim 64 and 512
// keys: 1.14 / 1.21 summed product by product, 0.97 / 0.80 by tiles. Queries are scaled before the products, as in the
// plain computation: scaled after, out of head dim 128 had up to 2.31 times its error where scores of 10^4 nearly tied.
// TFLOP/s, arrays (4, 2048 / D, 4096, D), D 64 / 128 (H200, 2026-11-30):
//   product by product                            37.3 / 34.4
//   by tiles, four columns at a time              33.7 / 31.5
//   by tiles in the registers of the scores       36.6 / 33.4
//   two steps of a product at once                37.0 / 35.4, at 64 not worth the registers
// Another hour, D 128 full, causal; D 64:         35.9, 34.1; 37.2, 35.1
//   chunks of keys ahead, of 32 columns           36.5, 35.4; 38.8, 35.8
//   one block of 128 queries, chunks of 64        38.0, 35.0; 32.7, 30.9 at 64 with 4 x 8 scores a thread
//   and causal: long tiles of all heads first           37.1;       37.8, with 64 queries 36.6 at 128
// These beside what was before them, at last      38.6, 37.8; 38.7, 37.9     36.0, 34.4; 37.4, 34.9
// Few blocks of 128 queries are slow: of 1 x 8 heads x 512 they took 120 us, those of 64 83 (simt.py).
//
// (# block, w warp.) 16-bit elements become float32 on the way into shared memory; all arithmetic is in Score. Head dims
// are of any size: beyond kHeadDim q is streamed, and beyond kHeadDimV every block of columns repeats the scores.
#include "simt/work.cuh"

constexpr i32 kPanels = kHeadDim / kChunk;
using Tile = ScoreTile<true>;
constexpr i32 kQ = Tile::kQ, kK = Tile::kK, kCols = kHeadDimV / kLanesX;
constexpr int kAtOnce = kSumsApart && kQ * kK <= 32 ? 2 : 1;      // steps of a product, where registers allow

struct SharedStorage {
  Work work;
  Score q[kPanels][kBlockQ * kRow];
  Score k[kAhead ? 2 : 1][kBlockKV * kRow];
  Score v[kBlockKV * kHeadDimV];
  Score weights[kBlockQ * Tile::kStep];
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "the launch gives what the kernel uses");
static_assert(sizeof(Score) * kBlockQ * kHeadDimV <= kSharedBytes - sizeof(Work), "results leave through shared memory");
static_assert(kHeadDim % kChunk == 0 && kHeadDimV % (kLanesX * kVec) == 0, "whole chunks, whole column groups");

// S = q k^T for the key tile at `col`; its v and its addends are loaded with the first chunk.
CF_DEVICE void products(Tile::Scores& s, SharedStorage& smem, const Params& p, i32 col) {
  const Work& work = smem.work;
  const bool streamed = kStreamed && p.head_dim > kHeadDim;
  clear(s);
  for (i32 chunk = 0; chunk * kChunk < p.head_dim; ++chunk) {
    block_barrier();                     // the tiles that this overwrites have been read
    load_keys<Tile>(smem.k[0], work.k, work, col, chunk, p.head_dim);
    if (streamed) load_queries<Tile>(smem.q[0], work.q, work, work.first, chunk, p.head_dim, work.terms.scale);
    if (chunk == 0) {
      const i32 col_v = work.split * kHeadDimV;
      load_tile<kBlockKV, kHeadDimV, kHeadDimV, Tile::Keys>(smem.v, work.v, col, work.sight.kv_length, col_v,
                                                            smaller(col_v + kHeadDimV, p.head_dim_v));
      if constexpr (kMaskOrBias) AddendTile<Tile>::stage(smem.weights, work.addends, work.sight, work.first, col);
    }
    block_barrier();                     // the tiles are there
    const Score* q = smem.q[streamed ? 0 : chunk] + lane_y() * kRow;
    multiply_by_transposed<kQ, kK, kLanesY * kRow, kLanesX * kRow, kAtOnce>(s, q, smem.k[0] + lane_x() * kRow,
                                                                            chunk_depth(chunk, p.head_dim));
  }
}

// The same where the next chunk is on its way while one is multiplied: `place` is where the last one was. The first of a
// walk has been started before; key tiles end at `stop`.
CF_DEVICE void products_ahead(Tile::Scores& s, SharedStorage& smem, const Params& p, i32 col, i32 stop, i32& place) {
  const Work& work = smem.work;
  const i32 chunks = ceil_div(p.head_dim, kChunk);
  clear(s);
  CF_UNROLL_1
  for (i32 chunk = 0; chunk < chunks; ++chunk) {
    cp_async_wait_group<0>();
    block_barrier();                     // the chunk is there; what the next copies overwrite has been read
    place ^= 1;
    if (chunk == 0) {
      const i32 col_v = work.split * kHeadDimV;
      start_tile<kBlockKV, kHeadDimV, kHeadDimV, Tile::Keys>(smem.v, work.v, col, work.sight.kv_length, col_v,
                                                             smaller(col_v + kHeadDimV, p.head_dim_v));
      if constexpr (kMaskOrBias) AddendTile<Tile>::stage(smem.weights, work.addends, work.sight, work.first, col);
    }
    const bool last = chunk + 1 == chunks;
    const i32 next = last ? col + kBlockKV : col;
    if (next < stop) start_keys<Tile>(smem.k[place ^ 1], work.k, work, next, last ? 0 : chunk + 1, p.head_dim);
    cp_async_commit_group();
    multiply_by_transposed<kQ, kK, kLanesY * kRow, kLanesX * kRow, kAtOnce>(
        s, smem.q[chunk] + lane_y() * kRow, smem.k[place] + lane_x() * kRow, chunk_depth(chunk, p.head_dim));
  }
  if (chunks > 1) return;
  cp_async_wait_group<0>();
  block_barrier();                       // the values are there
}

// Products become scores.
CF_DEVICE void shape_scores(Tile::Scores& s, SharedStorage& smem, i32 col) {
  const Work& work = smem.work;
  const bool whole = keys_of_all_live_rows(work).covers(col, col + kBlockKV);
  CF_UNROLL
  for (int q = 0; q < kQ; ++q) {
    Score unused[kK];
    Tile::shape(q, s[q], unused, work.terms, smem.weights, work.sight, work.first, col, whole);
  }
}

// Weights of the tile to shared memory, those that dropout removes as zeros; the row sums keep them.
CF_DEVICE void store_weights(const Tile::Scores& weights, SharedStorage& smem, i32 col) {
  const Work& work = smem.work;
  const Tile::Bits kept = kDropout ? Tile::keep_bits(work.dropout, work.first, col) : 0;
  CF_UNROLL
  for (int q = 0; q < kQ; ++q) {
    CF_UNROLL
    for (int k = 0; k < kK; ++k) {
      const bool keep = Tile::keeps(kept, q, k);
      smem.weights[Tile::place(q, k)] = keep ? weights[q][k] : Score(0);
    }
  }
}

// acc = acc * factor + weights v; rounded once a tile where products are summed apart: the scores' registers are free.
CF_DEVICE void add_values(Score (&acc)[kQ][kCols], const Score (&factor)[kQ], const SharedStorage& smem) {
  const auto add_products = [&](Score (&to)[kQ][kCols]) {
    multiply<false, kQ, kCols, kBlockKV, kLanesY * Tile::kStep, kHeadDimV, kHeadDimV, 0, kAtOnce>(
        to, smem.weights + lane_y() * Tile::kStep, smem.v + kVec * lane_x());
  };
  if constexpr (kSumsApart) {
    Score sums[kQ][kCols];
    clear(sums);
    add_products(sums);
    CF_UNROLL
    for (int n = 0; n < kQ * kCols; ++n) {
      Score& to = acc[n / kCols][n % kCols];
      to = fused(to, factor[n / kCols], sums[n / kCols][n % kCols]);
    }
  } else {
    scale_rows(acc, factor);
    add_products(acc);
  }
}

// lse of the block's rows, if asked for, and what each row's accumulated output must be multiplied by.
CF_DEVICE void finish_rows(OnlineSoftmax<Score, kQ, RowLanes>& softmax, Score (&factor)[kQ], const Params& p,
                           const Work& work) {
  Score sink = -Limits<Score>::infinity();
  if (p.call.sinks != nullptr) {
    sink = load_kind<Score>(p.call.sinks, p.sinks_kind, head_index(p.sinks, work.item, work.head));
  }
  const bool store_lse = p.call.lse != nullptr && lane_x() == 0 && work.split == 0;
  CF_UNROLL
  for (int q = 0; q < kQ; ++q) {
    Score lse;
    softmax.finish(q, sink, factor[q], lse);
    if (kDropout) factor[q] *= dropout_scale<Score>(p);
    const i32 row = work.first + Tile::query(q);
    if (row >= work.sight.q_length) lse = -Limits<Score>::infinity();
    if (store_lse && row < p.seqlen_q) *in_global(work.lse.at(row, 0)) = lse;
  }
}

// Which queries and columns are the block's.
CF_DEVICE void describe(Work& work, const Params& p) {
  const i32 tiles = ceil_div(p.seqlen_q, kBlockQ), splits = larger(ceil_div(p.head_dim_v, kHeadDimV), 1);
  const TileWork tile = forward_work(p, tiles, splits);
  describe_place(work, tile.tile * kBlockQ, tile.split);
  describe_item(work, p, tile.own, 0, tile.head / (p.heads_q / p.heads_kv));
  describe_head(work, p, tile.head);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) cupyflash_forward(const Params p) {
  SharedStorage& smem = shared_storage<SharedStorage>();
  const Work& work = smem.work;
  if (thread_index() == 0) describe(smem.work, p);
  block_barrier();                       // the description is there
  i32 place = 1;
  if (kAhead && keys_of_block(work).start < keys_of_block(work).stop) {
    start_keys<Tile>(smem.k[0], work.k, work, tile_floor(keys_of_block(work).start, kBlockKV), 0, p.head_dim);
    cp_async_commit_group();
  }
  for (i32 chunk = 0; !(kStreamed && p.head_dim > kHeadDim) && chunk * kChunk < p.head_dim; ++chunk) {
    load_queries<Tile>(smem.q[chunk], work.q, work, work.first, chunk, p.head_dim, work.terms.scale);
  }

  Score acc[kQ][kCols], factor[kQ];
  OnlineSoftmax<Score, kQ, RowLanes> softmax;
  clear(acc);
  softmax.reset();
  for (i32 col = tile_floor(keys_of_block(work).start, kBlockKV); col < keys_of_block(work).stop; col += kBlockKV) {
    Tile::Scores s;
    if constexpr (kAhead) products_ahead(s, smem, p, col, keys_of_block(work).stop, place);
    else products(s, smem, p, col);
    shape_scores(s, smem, col);
    softmax.update(s, factor);
    warp_barrier();                      // the weights before have been read
    store_weights(s, smem, col);
    warp_barrier();                      // the weights are there
    add_values(acc, factor, smem);
  }
  finish_rows(softmax, factor, p, work);
  scale_or_zero_rows(acc, factor);
  if constexpr (kAhead) cp_async_wait_group<0>();
  block_barrier();                       // all tiles have been read: the results may lie over them
  store_accumulators<kHeadDimV>(smem.q[0], acc);
  block_barrier();                       // the results are there
  const Target to{work.first, work.sight.q_length, p.seqlen_q, work.split * kHeadDimV, p.head_dim_v, false};
  store_tile<kBlockQ, kHeadDimV, Tile::Queries>(smem.q[0], p.call.out, p.out, p.out_kind, work.item, work.head, to);
}
