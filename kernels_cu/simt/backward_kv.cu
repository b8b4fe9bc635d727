// Backward pass on the CUDA cores, second half: dk and dv of one tile of keys.
//
// Weights come back from lse (Dao et al. 2022, Algorithm 4; the two-kernel form without atomics): for every tile of
// queries that sees some of the keys, of every query head of the group,
//   P = exp(S - lse)     dv += (r * P)^T dO     dS = P * (r * dO v^T - delta')     dA = dS * d(c)/d(a)
//   dk += scale * dA^T q                               with delta' = delta - dlse from prepost/delta.cu
// A block owns its rows of dk and dv; where k and v were broadcast over leading axes it walks all the items that shared
// them, in order. No atomics: the same bits every time.
//
//   block     one (owner item, kv head, key tile, kHeadDim columns of dk and kHeadDimV of dv)
//   thread    keys y + n * kLanesY and queries x + n * kLanesX of the score tile; rows y + n * kLanesY of dk and dv:
//             weights and dA pass, turned, through rows of shared memory that one warp owns
//   shared    k, v  kPanels x kBlockKV x kChunk, resident where they fit;   q, dout  kPanels x kBlockQ x kChunk
//             (a head dim that does not fit: chunks through panel 0 for the scores, then this block's columns)
//             turned  kBlockKV x kBlockQ: mask and bias, then weights, then dA;   lse, delta  kBlockQ
//
//   query tile | load q dO | S = q k^T | r P | dP = dO v^T | dv += P^T dO | dA | dk += dA^T q |
//   barriers   #           #           w     w                           w    w              #
#include "simt/work.cuh"

constexpr i32 kPanels = kHeadDim / kChunk, kPanelsV = kHeadDimV / kChunk;
using Tile = ScoreTile<false>;
constexpr i32 kQ = Tile::kQ, kK = Tile::kK, kCols = kHeadDim / kLanesX, kColsV = kHeadDimV / kLanesX;

struct SharedStorage {
  Work work;
  Score k[kPanels][kBlockKV * kRow];
  Score v[kPanelsV][kBlockKV * kRow];
  Score q[kPanels][kBlockQ * kRow];
  Score dout[kPanelsV][kBlockQ * kRow];
  Score turned[kBlockKV * Tile::kStep];
  Score lse[kBlockQ], delta[kBlockQ];      // by slot
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "the launch gives what the kernel uses");
static_assert(kHeadDim % kChunk == 0 && kHeadDimV % kChunk == 0, "whole chunks");

// The place of a block's results: first key, and which kHeadDim columns of dk and kHeadDimV columns of dv.
struct Place { i32 col, split; };

CF_DEVICE bool is_streamed(i32 width, i32 fits) { return kStreamed && width > fits; }

// acc = a b^T over a head dim: q and k for the scores, dout and v for dP. What is streamed is loaded on the way.
template <int kWidth>
CF_DEVICE void products(Tile::Scores& acc, Score* a, Score* b, const TensorRows& a_rows, const TensorRows& b_rows,
                        const Work& work, const Place& at, i32 row, i32 width) {
  const bool streamed = is_streamed(width, kWidth);
  clear(acc);
  for (i32 chunk = 0; chunk * kChunk < width; ++chunk) {
    if (streamed) {
      block_barrier();                     // the chunk before has been read
      load_queries<Tile>(a, a_rows, work, row, chunk, width);
      load_keys<Tile>(b, b_rows, work, at.col, chunk, width);
      block_barrier();                     // the chunk is there
    }
    const i32 panel = streamed ? 0 : chunk;
    multiply_by_transposed<kQ, kK, kLanesX * kRow, kLanesY * kRow>(acc, a + (panel * kBlockQ + lane_x()) * kRow,
                                                                   b + (panel * kBlockKV + lane_y()) * kRow,
                                                                   chunk_depth(chunk, width));
  }
}

// Columns of q or dout that this block's dk or dv is made of, after all of them have streamed through panel 0.
template <int kCount>
CF_DEVICE void load_own_columns(Score (&panels)[kCount][kBlockQ * kRow], const TensorRows& rows, const Work& work,
                                const Place& at, i32 row, i32 width) {
  block_barrier();                         // the last chunk has been read
  for (i32 panel = 0; panel < kCount && (at.split * kCount + panel) * kChunk < width; ++panel) {
    load_queries<Tile>(panels[panel], rows, work, row, at.split * kCount + panel, width);
  }
  block_barrier();                         // the columns are there
}

// Everything of the query tile at `row` that fits.
CF_DEVICE void load_tile_of_queries(SharedStorage& smem, const Params& p, const Place& at, i32 row) {
  const Work& work = smem.work;
  load_row_numbers<Tile>(smem.lse, smem.delta, work, row);
  for (i32 chunk = 0; !is_streamed(p.head_dim, kHeadDim) && chunk * kChunk < p.head_dim; ++chunk) {
    load_queries<Tile>(smem.q[chunk], work.q, work, row, chunk, p.head_dim);
  }
  for (i32 chunk = 0; !is_streamed(p.head_dim_v, kHeadDimV) && chunk * kChunk < p.head_dim_v; ++chunk) {
    load_queries<Tile>(smem.dout[chunk], work.dout, work, row, chunk, p.head_dim_v);
  }
  if constexpr (kMaskOrBias) Tile::stage(smem.turned, work.addends, p, row, at.col);
}

// Products become weights. r * P goes to `turned`, P * d(c)/d(a) stays.
CF_DEVICE void weigh(Tile::Scores& s, SharedStorage& smem, const Place& at, i32 row, u64 kept) {
  const Work& work = smem.work;
  const bool whole = work.sight.keys_of_all(row, row + kBlockQ).covers(at.col, at.col + kBlockKV);
  CF_UNROLL
  for (int q = 0; q < kQ; ++q) {
    Score derivative[kK];
    Tile::shape(q, s[q], derivative, work.terms, smem.turned, work.sight, row, at.col, whole);
    const Score lse = smem.lse[lane_x() + q * kLanesX];
    CF_UNROLL
    for (int k = 0; k < kK; ++k) {
      s[q][k] = weight_of(s[q][k], lse);
      const bool keep = !kDropout || (kept >> (q * kK + k) & 1);
      smem.turned[Tile::place(q, k)] = keep ? s[q][k] : Score(0);
      if constexpr (kSoftcapOrAlibi) s[q][k] *= derivative[k];
    }
  }
}

// Weights (times d(c)/d(a)) become dA.
CF_DEVICE void differentiate(Tile::Scores& weights, const Tile::Scores& dp, SharedStorage& smem, const Params& p, u64 kept) {
  const Score scale = kDropout ? dropout_scale<Score>(p) : Score(1);
  CF_UNROLL
  for (int q = 0; q < kQ; ++q) {
    const Score delta = smem.delta[lane_x() + q * kLanesX];
    CF_UNROLL
    for (int k = 0; k < kK; ++k) {
      const bool keep = !kDropout || (kept >> (q * kK + k) & 1);
      weights[q][k] = gradient_of(weights[q][k], keep ? scale * dp[q][k] : Score(0), delta);
    }
  }
}

// acc += the tile in `turned` times the columns in `panels`.
template <int kColumns>
CF_DEVICE void add_product(Score (&acc)[kK][kColumns], const SharedStorage& smem, const Score* panels) {
  multiply<kK, kColumns, kBlockQ, kLanesY * Tile::kStep, kRow, kChunk, kBlockQ * kRow>(
      acc, smem.turned + lane_y() * Tile::kStep, panels + kVec * lane_x());
}

// Adds the query tile at `row` to dk and dv.
CF_DEVICE void add_tile(Score (&dk)[kK][kCols], Score (&dv)[kK][kColsV], SharedStorage& smem, const Params& p,
                        const Place& at, i32 row) {
  const Work& work = smem.work;
  const bool want_dk = p.call.dk != nullptr;
  block_barrier();                         // the tile before has been read
  load_tile_of_queries(smem, p, at, row);
  block_barrier();                         // the tile and the addends are there
  Tile::Scores weights, dp;
  products<kHeadDim>(weights, smem.q[0], smem.k[0], work.q, work.k, work, at, row, p.head_dim);
  const u64 kept = kDropout ? Tile::keep_bits(work.dropout, row, at.col) : 0;
  weigh(weights, smem, at, row, kept);
  if (want_dk) {
    products<kHeadDimV>(dp, smem.dout[0], smem.v[0], work.dout, work.v, work, at, row, p.head_dim_v);
    differentiate(weights, dp, smem, p, kept);
  }
  if (is_streamed(p.head_dim_v, kHeadDimV)) load_own_columns(smem.dout, work.dout, work, at, row, p.head_dim_v);
  warp_barrier();                          // the weights are there
  if (p.call.dv != nullptr) add_product(dv, smem, smem.dout[0]);
  if (!want_dk) return;
  if (is_streamed(p.head_dim, kHeadDim)) load_own_columns(smem.q, work.q, work, at, row, p.head_dim);
  warp_barrier();                          // the weights have been read
  CF_UNROLL
  for (int q = 0; q < kQ; ++q) {
    CF_UNROLL
    for (int k = 0; k < kK; ++k) smem.turned[Tile::place(q, k)] = weights[q][k];
  }
  warp_barrier();                          // dA is there
  add_product(dk, smem, smem.q[0]);
}

// Everything of the keys that stays for all query tiles of an item.
CF_DEVICE void load_resident(SharedStorage& smem, const Params& p, const Place& at) {
  const Work& work = smem.work;
  for (i32 chunk = 0; !is_streamed(p.head_dim, kHeadDim) && chunk * kChunk < p.head_dim; ++chunk) {
    load_keys<Tile>(smem.k[chunk], work.k, work, at.col, chunk, p.head_dim);
  }
  for (i32 chunk = 0; !is_streamed(p.head_dim_v, kHeadDimV) && chunk * kChunk < p.head_dim_v; ++chunk) {
    load_keys<Tile>(smem.v[chunk], work.v, work, at.col, chunk, p.head_dim_v);
  }
}

template <int kWidth, int kColumns>
CF_DEVICE void store(Score (&acc)[kK][kColumns], Score factor, SharedStorage& smem, void* data, const Strides& strides,
                     i32 kind, const Place& at, i32 width, const Params& p) {
  const Work& work = smem.work;
  scale_all(acc, factor);
  block_barrier();                         // what lies there has been read: the results may lie over it
  store_accumulators<kWidth>(smem.k[0], acc);
  block_barrier();                         // the results are there
  const i32 live_stop = points(p.loop) == 1 ? work.sight.kv_length : p.seqlen_k;
  const Target to{at.col, live_stop, p.seqlen_k, at.split * kWidth, width, p.accumulate != 0};
  store_tile<kBlockKV, kWidth, Tile::Keys>(smem.k[0], data, strides, kind, work.item, work.head_kv, to);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) cupyflash_backward_kv(const Params p) {
  SharedStorage& smem = shared_storage<SharedStorage>();
  const i32 splits = larger(ceil_div(p.head_dim, kHeadDim), ceil_div(p.head_dim_v, kHeadDimV));
  const TileWork tile = tile_work(block_index(), ceil_div(p.seqlen_k, kBlockKV), splits, p.heads_kv, false);
  const Place at{tile.tile * kBlockKV, tile.split};
  const i32 group = p.heads_q / p.heads_kv;
  Score dk[kK][kCols], dv[kK][kColsV];
  clear(dk);
  clear(dv);
  for (u32 turn = 0; turn < points(p.loop) * group; ++turn) {     // all query heads of all items, in order
    block_barrier();                       // the turn before has been read
    if (thread_index() == 0) {
      describe_item(smem.work, p, tile.own, turn / group, tile.head);
      describe_head(smem.work, p, tile.head * group + turn % group);
    }
    block_barrier();                       // the description is there
    if (turn % group == 0) load_resident(smem, p, at);
    const Interval rows = smem.work.sight.rows_of_some(at.col, at.col + kBlockKV);
    for (i32 row = tile_floor(rows.start, kBlockQ); row < rows.stop; row += kBlockQ) add_tile(dk, dv, smem, p, at, row);
  }
  if (p.call.dk != nullptr) {
    store<kHeadDim>(dk, Score(p.call.scale), smem, p.call.dk, p.dk, p.dk_kind, at, p.head_dim, p);
  }
  if (p.call.dv != nullptr) {
    const Score scale = kDropout ? dropout_scale<Score>(p) : Score(1);
    store<kHeadDimV>(dv, scale, smem, p.call.dv, p.dv, p.dv_kind, at, p.head_dim_v, p);
  }
}
