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
//             turned  kBlockKV x kBlockQ: mask and bias, then r * P, then P * d(c)/d(a), then dA
//             lse, delta  kBlockQ
//
//   query tile | load q dO addends | S = q k^T | r P | dv += P^T dO | dP = dO v^T | dA | dk += dA^T q |
//   barriers   #                   #                 w              w                  w              #
//
// A head dim that does not fit is streamed, and every block of columns repeats the scores.
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

CF_DEVICE bool is_streamed(i32 width, i32 fits) { return kStreamed && width > fits; }

// acc = a b^T over a head dim: q and k for the scores, dout and v for dP. What is streamed is loaded on the way.
template <int kWidth>
CF_DEVICE void products(Tile::Scores& acc, Score* a, Score* b, const TensorRows& a_rows, const TensorRows& b_rows,
                        const Work& work, i32 row, i32 width) {
  const bool streamed = is_streamed(width, kWidth);
  clear(acc);
  for (i32 chunk = 0; chunk * kChunk < width; ++chunk) {
    if (streamed) {
      block_barrier();                     // the chunk before has been read
      load_queries<Tile>(a, a_rows, work, row, chunk, width);
      load_keys<Tile>(b, b_rows, work, work.first, chunk, width);
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
CF_DEVICE void load_own_columns(Score (&panels)[kCount][kBlockQ * kRow], const TensorRows& rows, const Work& work, i32 row,
                                i32 width) {
  block_barrier();                         // the last chunk has been read
  for (i32 panel = 0; panel < kCount && (work.split * kCount + panel) * kChunk < width; ++panel) {
    load_queries<Tile>(panels[panel], rows, work, row, work.split * kCount + panel, width);
  }
  block_barrier();                         // the columns are there
}

// Everything of the query tile at `row` that fits.
CF_DEVICE void load_tile_of_queries(SharedStorage& smem, const Params& p, i32 row) {
  const Work& work = smem.work;
  load_row_numbers<Tile>(smem.lse, smem.delta, work, row);
  for (i32 chunk = 0; !is_streamed(p.head_dim, kHeadDim) && chunk * kChunk < p.head_dim; ++chunk) {
    load_queries<Tile>(smem.q[chunk], work.q, work, row, chunk, p.head_dim);
  }
  for (i32 chunk = 0; !is_streamed(p.head_dim_v, kHeadDimV) && chunk * kChunk < p.head_dim_v; ++chunk) {
    load_queries<Tile>(smem.dout[chunk], work.dout, work, row, chunk, p.head_dim_v);
  }
  if constexpr (kMaskOrBias) AddendTile<Tile>::stage(smem.turned, work.addends, work.sight, row, work.first);
}

// Products become weights. r * P goes to `turned`; P * d(c)/d(a) stays, where it differs.
CF_DEVICE void weigh(Tile::Scores& s, SharedStorage& smem, i32 row, Tile::Bits kept) {
  const Work& work = smem.work;
  const bool whole = work.sight.keys_of_all(row, row + kBlockQ).covers(work.first, work.first + kBlockKV);
  CF_UNROLL
  for (int q = 0; q < kQ; ++q) {
    Score derivative[kK];
    Tile::shape(q, s[q], derivative, work.terms, smem.turned, work.sight, row, work.first, whole);
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

// dP becomes dA, in the place of the weights that wait in `turned`.
CF_DEVICE void differentiate(const Tile::Scores& dp, SharedStorage& smem, const Params& p, Tile::Bits kept) {
  const Score scale = kDropout ? dropout_scale<Score>(p) : Score(1);
  CF_UNROLL
  for (int q = 0; q < kQ; ++q) {
    const Score delta = smem.delta[lane_x() + q * kLanesX];
    CF_UNROLL
    for (int k = 0; k < kK; ++k) {
      const bool keep = !kDropout || (kept >> (q * kK + k) & 1);
      Score& place = smem.turned[Tile::place(q, k)];
      place = gradient_of(place, keep ? scale * dp[q][k] : Score(0), delta);
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
                        i32 row) {
  const Work& work = smem.work;
  block_barrier();                         // the tile before has been read
  load_tile_of_queries(smem, p, row);
  block_barrier();                         // the tile and the addends are there
  Tile::Scores scores;
  products<kHeadDim>(scores, smem.q[0], smem.k[0], work.q, work.k, work, row, p.head_dim);
  const Tile::Bits kept = kDropout ? Tile::keep_bits(work.dropout, row, work.first) : 0;
  weigh(scores, smem, row, kept);
  if (p.call.dv != nullptr) {
    if (is_streamed(p.head_dim_v, kHeadDimV)) load_own_columns(smem.dout, work.dout, work, row, p.head_dim_v);
    warp_barrier();                        // r * P is there
    add_product(dv, smem, smem.dout[0]);
  }
  if (p.call.dk == nullptr) return;
  if (kDropout || kSoftcapOrAlibi) {
    warp_barrier();                        // r * P has been read
    Tile::store(scores, smem.turned);
  }
  products<kHeadDimV>(scores, smem.dout[0], smem.v[0], work.dout, work.v, work, row, p.head_dim_v);
  if (!kDropout && !kSoftcapOrAlibi) warp_barrier();       // P has been read
  differentiate(scores, smem, p, Tile::Bits(opaque(kept)));      // its bits are not worth 32 registers
  if (is_streamed(p.head_dim, kHeadDim)) load_own_columns(smem.q, work.q, work, row, p.head_dim);
  warp_barrier();                          // dA is there
  add_product(dk, smem, smem.q[0]);
}

// Everything of the keys that stays for all query tiles of an item.
CF_DEVICE void load_resident(SharedStorage& smem, const Params& p) {
  const Work& work = smem.work;
  for (i32 chunk = 0; !is_streamed(p.head_dim, kHeadDim) && chunk * kChunk < p.head_dim; ++chunk) {
    load_keys<Tile>(smem.k[chunk], work.k, work, work.first, chunk, p.head_dim);
  }
  for (i32 chunk = 0; !is_streamed(p.head_dim_v, kHeadDimV) && chunk * kChunk < p.head_dim_v; ++chunk) {
    load_keys<Tile>(smem.v[chunk], work.v, work, work.first, chunk, p.head_dim_v);
  }
}

template <int kWidth, int kColumns>
CF_DEVICE void store(Score (&acc)[kK][kColumns], Score factor, SharedStorage& smem, void* data, const Strides& strides,
                     i32 kind, i32 width, const Params& p) {
  const Work& work = smem.work;
  scale_all(acc, factor);
  block_barrier();                         // what lies there has been read: the results may lie over it
  store_accumulators<kWidth>(smem.k[0], acc);
  block_barrier();                         // the results are there
  const i32 live_stop = walks_items(p) ? p.seqlen_k : work.sight.kv_length;
  const Target to{work.first, live_stop, p.seqlen_k, work.split * kWidth, width, p.accumulate != 0};
  store_tile<kBlockKV, kWidth, Tile::Keys>(smem.k[0], data, strides, kind, work.item, work.head_kv, to);
}

// Query heads to a kv head; worked out where it is needed.
CF_DEVICE i32 group_of(const Params& p) { return i32(opaque(p.heads_q)) / p.heads_kv; }

// Which keys and columns are the block's, and what its turn is about: the query heads of a group, item after item.
CF_DEVICE void describe(Work& work, const Params& p, u32 turn) {
  const i32 tiles = ceil_div(p.seqlen_k, kBlockKV), group = group_of(p);
  const i32 splits = larger(ceil_div(p.head_dim, kHeadDim), ceil_div(p.head_dim_v, kHeadDimV));
  const TileWork tile = tile_work(block_index(), tiles, splits, p.heads_kv, false);
  describe_place(work, tile.tile * kBlockKV, tile.split);
  describe_item(work, p, tile.own, turn / group, tile.head);
  describe_head(work, p, tile.head * group + turn % group);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) cupyflash_backward_kv(const Params p) {
  SharedStorage& smem = shared_storage<SharedStorage>();
  const Work& work = smem.work;
  Score dk[kK][kCols], dv[kK][kColsV];
  clear(dk);
  clear(dv);
  for (u32 turn = 0; turn < points(p.loop) * group_of(p); ++turn) {       // all query heads of all items, in order
    block_barrier();                       // the turn before has been read
    if (thread_index() == 0) describe(smem.work, p, turn);
    block_barrier();                       // the description is there
    if (turn % group_of(p) == 0) load_resident(smem, p);
    const Interval rows = work.sight.rows_of_some(work.first, work.first + kBlockKV);
    for (i32 row = tile_floor(rows.start, kBlockQ); row < rows.stop; row += kBlockQ) add_tile(dk, dv, smem, p, row);
  }
  if (p.call.dk != nullptr) {
    store<kHeadDim>(dk, Score(p.call.scale), smem, p.call.dk, p.dk, p.dk_kind, p.head_dim, p);
  }
  if (p.call.dv != nullptr) {
    const Score scale = kDropout ? dropout_scale<Score>(p) : Score(1);
    store<kHeadDimV>(dv, scale, smem, p.call.dv, p.dv, p.dv_kind, p.head_dim_v, p);
  }
}
