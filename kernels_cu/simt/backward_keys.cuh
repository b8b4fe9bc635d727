// Backward pass on the CUDA cores, by keys: dk and dv of one tile of keys and, if kSumsQueries, its share of every dq.
//
// Weights come back from lse (Dao et al. 2022, Algorithm 4; the two-kernel form without atomics): for every tile of
// queries that sees some of the keys, of every query head of the group,
//   P = exp(S - lse)     dv += (r * P)^T dO     dS = P * (r * dO v^T - delta')     dA = dS * d(c)/d(a)
//   dk += scale * dA^T q     dq += scale * dA k         with delta' = delta - dlse from prepost/delta.cu
// A block owns its rows of dk and dv; where k and v were broadcast over leading axes it walks all the items that shared
// them, in order.
//
// dq, zeros at first (prepost/delta.cu), is summed where it will stay, in turns as in sm80_wide/backward_keys.cuh: with
// p.splits not 0 a block adds to a tile after all blocks of earlier keys, so that every run gives the same bits. One
// kernel computes five products where two compute seven.
//
// H200, 2026-11-30, float32, arrays (4, 2048 / D, 4096, D), whole backward, TFLOP/s at D 128 / 64, full and causal:
//   two kernels                                     21.5 / 23.2, 20.4 / 22.1
//   one, dq four keys at a time                     30.8 / 32.4, 30.4 / 31.0
//   eight                                           31.1 / 33.2, 31.0 / 31.2     in no order 30.2 / 32.5, 30.0 / 31.0
//   64 queries and 256 threads                      26.9 / 29.0, 27.2 / 29.1
// Summed product by product over 512 queries, float32's dk had up to 2.6 times the largest error of the plain
// computation; by tiles it has 1.5 times (scores of 500), 1.04 on ordinary inputs. That takes 3 % of the time: 30.9 / 32.7,
// then 30.0 / 31.5. Beside options that leave no registers for it (product.cuh) the sums are as they were.
//
//   block     one (owner item, kv head, key tile, kHeadDim columns of dk and kHeadDimV of dv)
//   thread    keys y + n * kLanesY and queries x + n * kLanesX of the score tile; rows y + n * kLanesY of dk and dv:
//             weights and dA pass, turned, through rows of shared memory that one warp owns
//   shared    k, v  kPanels x kBlockKV x kChunk, resident where they fit;   q, dout  kPanels x kBlockQ x kChunk
//             (a head dim that does not fit: chunks through panel 0 for the scores, then this block's columns)
//             turned  kBlockKV x kBlockQ: mask and bias, then r * P, then P * d(c)/d(a), then dA
//             lse, delta  kBlockQ
//
//   query tile | load q dO addends | S = q k^T | r P | dv += P^T dO | dP = dO v^T | dA | dk += dA^T q | dq += dA k |
//   barriers   #                   #                 w              w                  w (# for dq)                #
//
// A head dim that does not fit is streamed, and every block of columns repeats the scores.
#pragma once
#include "core/ptx_sm80.cuh"
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
                        const Work& work, i32 row, i32 width, Score factor = Score(1)) {
  const bool streamed = is_streamed(width, kWidth);
  clear(acc);
  for (i32 chunk = 0; chunk * kChunk < width; ++chunk) {
    if (streamed) {
      block_barrier();                     // the chunk before has been read
      load_queries<Tile>(a, a_rows, work, row, chunk, width, factor);
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
                                i32 width, Score factor = Score(1)) {
  block_barrier();                         // the last chunk has been read
  for (i32 panel = 0; panel < kCount && (work.split * kCount + panel) * kChunk < width; ++panel) {
    load_queries<Tile>(panels[panel], rows, work, row, work.split * kCount + panel, width, factor);
  }
  block_barrier();                         // the columns are there
}

// Everything of the query tile at `row` that fits.
CF_DEVICE void load_tile_of_queries(SharedStorage& smem, const Params& p, i32 row) {
  const Work& work = smem.work;
  load_row_numbers<Tile>(smem.lse, smem.delta, work, row);
  for (i32 chunk = 0; !is_streamed(p.head_dim, kHeadDim) && chunk * kChunk < p.head_dim; ++chunk) {
    load_queries<Tile>(smem.q[chunk], work.q, work, row, chunk, p.head_dim, work.terms.scale);
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
      const bool keep = Tile::keeps(kept, q, k);
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
      const bool keep = Tile::keeps(kept, q, k);
      Score& place = smem.turned[Tile::place(q, k)];
      place = gradient_of(place, keep ? scale * dp[q][k] : Score(0), delta);
    }
  }
}

// acc += the tile in `turned` times the columns in `panels`.
template <int kColumns>
CF_DEVICE void add_product(Score (&acc)[kK][kColumns], const SharedStorage& smem, const Score* panels) {
  multiply<kSumsApart, kK, kColumns, kBlockQ, kLanesY * Tile::kStep, kRow, kChunk, kBlockQ * kRow>(
      acc, smem.turned + lane_y() * Tile::kStep, panels + kVec * lane_x());
}

// Query heads to a kv head; worked out where it is needed.
CF_DEVICE i32 group_of(const Params& p) { return i32(opaque(p.heads_q)) / p.heads_kv; }

// A count for each tile of queries, at the number of its first row: how many blocks have added to its dq.
CF_DEVICE u32* turn_of(const Work& work, const Params& p, i32 row) {
  return static_cast<u32*>(p.call.turns) + 1 + row_number(p, work.item, work.head, row);
}

// Says that the block has added its share of the tile at `row`; all warps have done so and met since.
CF_DEVICE void publish(const Work& work, const Params& p, i32 row) {
  if (kSumsQueries && p.splits != 0 && thread_index() == 0) red_release_increment(turn_of(work, p, row));
}

// How many blocks, those of earlier keys, add to the tile at `row` before this one.
CF_DEVICE u32 earlier(const Work& work, const Params& p, i32 row) {
  if (p.splits == 0) return 0;
  const Interval keys = work.sight.keys_of_some(row, row + kBlockQ);
  return u32(larger(work.first / kBlockKV - keys.start / kBlockKV, 0));
}

// The block's share of the dq of the query tile at `row`, from dA in `turned`: a thread has kVec neighbouring slots of
// queries and kVec neighbouring columns of every panel.
template <class Sum, bool kOnX = kLanesX * kVec == kBlockQ>      // queries on x
CF_DEVICE void sum_queries(const SharedStorage& smem, const Params& p, i32 row) {
  static_assert((kOnX ? kLanesX : kLanesY) * kVec == kBlockQ, "all queries have a lane");
  static_assert((kOnX ? kLanesY : kLanesX) * kVec == kChunk, "all columns have one");
  const Work& work = smem.work;
  const i32 slot = kVec * (kOnX ? lane_x() : lane_y()), column = kVec * (kOnX ? lane_y() : lane_x());
  const u32 before = earlier(work, p, row), seen = before > 0 ? load_relaxed(turn_of(work, p, row)) : 0;
  Score dq[kVec][kPanels * kVec];
  clear(dq);
  CF_UNROLL_BY(8)
  for (i32 key = 0; key < kBlockKV; ++key) {
    const Vector rows = load_vector(smem.turned + key * Tile::kStep + slot);
    CF_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      const Vector cols = load_vector(smem.k[panel] + key * kRow + column);
      CF_UNROLL
      for (int r = 0; r < kVec; ++r) {
        CF_UNROLL
        for (int x = 0; x < kVec; ++x) {
          dq[r][panel * kVec + x] = fused(rows.value[r], cols.value[x], dq[r][panel * kVec + x]);
        }
      }
    }
  }
  if (seen < before) wait_for_count(turn_of(work, p, row), before);
  warp_barrier();                          // no lane adds before its turn
  const Rows<Sum> to = rows_of<Sum>(p.call.dq, p.dq, work.item, work.head);
  const bool packed = to.template packed<kVec>();
  scale_all(dq, Score(p.call.scale));
  CF_UNROLL
  for (int r = 0; r < kVec; ++r) {
    const i32 i = row + Tile::Queries::index(slot + r);
    if (i >= work.sight.q_length) continue;
    CF_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      const i32 j = panel * kChunk + column;
      const Score(&values)[kVec] = *reinterpret_cast<const Score(*)[kVec]>(&dq[r][panel * kVec]);
      if (packed && j + kVec <= p.head_dim) {
        red_add_x4(to.at(i, j), values[0], values[1], values[2], values[3]);
        continue;
      }
      CF_UNROLL
      for (int x = 0; x < kVec; ++x) {
        if (j + x < p.head_dim) red_add(to.at(i, j + x), values[x]);
      }
    }
  }
}

// Adds the query tile at `row` to dk and dv, and to dq its share of that; `before` is the tile added last, or -1.
template <bool kSums>
CF_DEVICE void add_tile(Score (&dk)[kK][kCols], Score (&dv)[kK][kColsV], SharedStorage& smem, const Params& p, i32 row,
                        i32 before) {
  const Work& work = smem.work;
  block_barrier();                         // the tile before has been read
  if (before >= 0) publish(work, p, before);
  load_tile_of_queries(smem, p, row);
  block_barrier();                         // the tile and the addends are there
  Tile::Scores scores;
  products<kHeadDim>(scores, smem.q[0], smem.k[0], work.q, work.k, work, row, p.head_dim, work.terms.scale);
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
  if (is_streamed(p.head_dim, kHeadDim)) load_own_columns(smem.q, work.q, work, row, p.head_dim, work.terms.scale);
  if (kSums) block_barrier();              // dA is there for everyone
  else warp_barrier();                     // dA is there
  add_product(dk, smem, smem.q[0]);
  if constexpr (kSums) sum_queries<Element>(smem, p, row);
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

// Which keys and columns are the block's, and what its turn is about: the query heads of a group, item after item.
CF_DEVICE void describe(Work& work, const Params& p, u32 number, u32 turn) {
  const i32 tiles = ceil_div(p.seqlen_k, kBlockKV), group = group_of(p);
  const i32 splits = larger(ceil_div(p.head_dim, kHeadDim), ceil_div(p.head_dim_v, kHeadDimV));
  const i32 together = kSumsQueries ? larger(p.splits, 1) : 1;      // heads whose blocks start in turns
  Digits digits{number};
  const i32 head = digits.take(together);
  TileWork tile = tile_work(digits.rest, tiles, splits, p.heads_kv / together, false);
  tile.head = tile.head * together + head;
  describe_place(work, tile.tile * kBlockKV, tile.split);
  describe_item(work, p, tile.own, turn / group, tile.head);
  describe_head(work, p, tile.head * group + turn % group);
}

CF_DEVICE void backward_of_keys(const Params& p) {
  SharedStorage& smem = shared_storage<SharedStorage>();
  const Work& work = smem.work;
  Score dk[kK][kCols], dv[kK][kColsV];
  clear(dk);
  clear(dv);
  u32 number = block_index();              // blocks wait for lower numbers alone, which have started before
  if (kSumsQueries && thread_index() == 0) number = increment(static_cast<u32*>(p.call.turns));
  for (u32 turn = 0; turn < points(p.loop) * group_of(p); ++turn) {       // all query heads of all items, in order
    block_barrier();                       // the turn before has been read
    if (thread_index() == 0) describe(smem.work, p, number, turn);
    block_barrier();                       // the description is there
    if (turn % group_of(p) == 0) load_resident(smem, p);
    const Interval rows = work.sight.rows_of_some(work.first, work.first + kBlockKV);
    if (rows.start >= rows.stop) continue;
    const i32 last = tile_floor(rows.stop - 1, kBlockQ), first = tile_floor(rows.start, kBlockQ);
    for (i32 row = last; row >= first; row -= kBlockQ) {
      add_tile<kSumsQueries>(dk, dv, smem, p, row, row == last ? -1 : row + kBlockQ);
    }
    if constexpr (kSumsQueries) {
      block_barrier();                     // all have added to the first tile
      publish(work, p, first);
    }
  }
  if (p.call.dk != nullptr) {
    store<kHeadDim>(dk, Score(1), smem, p.call.dk, p.dk, p.dk_kind, p.head_dim, p);
  }
  if (p.call.dv != nullptr) {
    const Score scale = kDropout ? dropout_scale<Score>(p) : Score(1);
    store<kHeadDimV>(dv, scale, smem, p.call.dv, p.dv, p.dv_kind, p.head_dim_v, p);
  }
}
