// FlashAttention forward for float and double on tensor cores by mma.sync: out = softmax(scores) v, lse (Dao 2023).
//
// A block owns kBlockQ queries of one head, a warp kBlockQ / kWarps of them and all of the output's columns. Tiles of
// kBlockKV keys and of their values follow one another through three places in shared memory: while one is read, the
// next has arrived and the one after it is on its way.
//
//   tile j   | wait for K(j); start V(j + 1) after its place is free    S = Q K^T     P = exp(S - m), dropout
//            | wait for V(j); start K(j + 2)                            O = O exp(m_before - m) + P V
//
// Shared memory: Q, three places, the block's work.
//
// float32 on an H200 (2026-11-29, 4096 keys, full, TFLOP/s at head dim 128 / 64; PyTorch's efficient backend 45 / 35):
//   16 queries a warp, tiles of 32 keys (these, with every option)             53 / 52
//   32 queries a warp                                                          58 / 57, but spills
//   32 queries a warp, tiles of 64 keys                                         - / 59, but spills
//   32 queries a warp, K and V parted into big and small in shared memory      56 / 54: twice the reads cost more than
//                                                                              the instructions that parting takes
//   one product instead of three                                              122 / 109
// Without exponentials, barriers or copies (wrong results) it is 1 to 5 % faster: reads of shared memory and products wait
// for each other.
// float64 (2026-11-30, full / causal): 40.6 / 38.0 and 33.9 / 32.0; doubles read one by one 42.9 / 40.1 and 33.6 / 32.4;
// causal at 128 39.6, with the long tiles of all heads first 41.6.
// Options, times as multiples of the plain call's, float64, D 128 (2026-11-30, 16 heads, 4096 keys):
//                                              mask   bias   both   softcap   ALiBi
//   tiles of 16 keys, the library's tanh       1.28   1.42   1.46   1.39      1.16
//   tanh without branches (attn/tangent.cuh)   1.28   1.42   1.47   1.34      1.17
//   tiles of 32 keys, addends by halves        1.17   1.28   1.36   1.28      1.03
//   the next tile's addends asked for into L2  1.20   1.25   1.35   1.28      1.03: not kept
// At D 64 tanh without branches takes softcap from 1.47 to 1.33, beside ALiBi from 1.49 to 1.35; beside a mask or a bias it
// changes nothing (1.74 and 1.81). Instructions of depth 16: 13.0 ms for 13.2, one sample.
#include "sm80_wide/store.cuh"
#include "sm80_wide/weights.cuh"

constexpr i32 kWarpRows = kBlockQ / kWarps, kR = kWarpRows / 8, kC = kBlockKV / 4, kO = kHeadDimV / 4;
static_assert(kBlockQ % (16 * kWarps) == 0 && kBlockKV % 16 == 0, "whole fragments");

using TileQ = Tile<kBlockQ, kHeadDim>;
using TileK = Tile<kBlockKV, kHeadDim>;
using TileV = Tile<kBlockKV, kHeadDimV>;
using Scores = Score[kR][kC];

// Offsets in shared memory.
constexpr i32 kAtPlaces = TileQ::kBytes, kPlaceBytes = larger(TileK::kBytes, TileV::kBytes);
constexpr i32 kAtWork = kAtPlaces + 3 * kPlaceBytes;
static_assert(kAtWork + kWorkBytes + 128 == kSharedBytes, "the launch gives as much, and room to align");

struct Forward {
  const Params& p;
  const Work& work;
  u32 places, queries;                 // in shared memory: of tiles, of the warp's queries
  ColumnReader<TileK> read;
  RowReader<TileV> read_v;
  Softmax<kR> softmax;
  Score out[kR][kO];

  CF_DEVICE i32 row() const { return work.first + i32(warp_index()) * kWarpRows; }      // first query of the warp
  CF_DEVICE u32 place(i32 number) const { return places + u32(number) % 3u * kPlaceBytes; }

  // Starts copies of the `number`th tile of the sequence K, V, K, V, ...
  CF_DEVICE void load(i32 number) const {
    const i32 tile = work.tiles.start + number / 2, col = tile * kBlockKV;
    if (tile < work.tiles.stop) {
      if (number % 2 == 0) TileK::load(place(number), work.k, col, work.sight.kv_length, p.head_dim);
      else TileV::load(place(number), work.v, col, work.sight.kv_length, p.head_dim_v);
    }
    cp_async_commit_group();
  }

  CF_DEVICE void wait_for(i32 number) const {
    cp_async_wait_group<1>();
    block_barrier();        // everyone's part of the tile is there; nobody reads the tile before any more
    load(number + 2);
  }

  // Scores of the tile at `col`, whose keys lie at `keys_at`. False: a mask or a bias forbids all.
  CF_DEVICE bool make_scores(Scores& s, i32 col, u32 keys_at) const {
    constexpr bool kAhead = kHeadDimV <= 64;      // where addends have registers while they come, else by halves
    constexpr int kPart = kAhead ? kC : kC / 2;
    TileAddends<kR, kPart> addends;
    if (kMaskOrBias && kAhead && !addends.template look<false>(work, row(), col)) return false;
    Scores unused;
    multiply_by_transposed<true>(s, queries, keys_at, read, p.head_dim);
    scale_scores<false>(s, unused, work, row(), col);
    if constexpr (kMaskOrBias && kAhead) addends.add_to(s);
    if constexpr (kMaskOrBias && !kAhead) {
      bool any = false;
      CF_UNROLL
      for (int part = 0; part < kC; part += kPart) {
        any = addends.template look<false>(work, row(), col + 4 * part) || any;
        addends.add_to(s, part);
      }
      if (!any) return false;
    }
    if (!work.all[warp_index()].covers(col, col + kBlockKV)) select<false>(s, work, row(), col, -Limits<Score>::infinity());
    return true;
  }

  CF_DEVICE void run() {
    CF_UNROLL_1
    for (i32 number = 0; work.tiles.start + number / 2 < work.tiles.stop; number += 2) {
      const i32 col = (work.tiles.start + number / 2) * kBlockKV;
      Scores s;
      Score rescale[kR];
      wait_for(number);
      const Interval keys = work.some[warp_index()];
      bool any = col + kBlockKV > keys.start && col < keys.stop;
      if (any && (any = make_scores(s, col, place(number)))) {
        softmax.update(s, rescale);
        if constexpr (kDropout) {
          for_kept<false>(s, work.dropout, row(), col, [&](int u, int w, bool kept) { s[u][w] = kept ? s[u][w] : Score(0); });
        }
      }
      wait_for(number + 1);
      if (any) multiply(out, rescale, s, place(number + 1), read_v);
    }
  }

  // Normalises the rows and writes out and lse; rows at or past the query length get 0 and -inf.
  CF_DEVICE void finish() {
    const Score none = -Limits<Score>::infinity(), kept = kDropout ? dropout_scale<Score>(p) : Score(1);
    const Item& item = work.item;
    const i32 head = work.head, q_length = work.sight.q_length;
    Score sink = none;
    if (p.call.sinks != nullptr) sink = load_kind<Score>(p.call.sinks, p.sinks_kind, head_index(p.sinks, item, head));
    const Rows<Score> lses = rows_of<Score>(p.call.lse, p.lse, item, head);
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      const i32 i = row() + fragment_row(u);
      const bool live = i < q_length;
      Score factor, lse;
      softmax.finish(u, sink, factor, lse);
      CF_UNROLL
      for (int w = 0; w < kO; ++w) out[u][w] = live ? finished(out[u][w], factor * kept) : Score(0);
      if (p.call.lse != nullptr && i < p.seqlen_q && lane_in_group() == 0) *lses.at(i, 0) = live ? lse : none;
    }
    store_tile(out, target_of(p.call.out, p.out, item, head, p.seqlen_q, p.head_dim_v, false), row());
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_forward(const Params p) {
  const TileWork tile = forward_work(p, ceil_div(p.seqlen_q, kBlockQ), 1);
  const i32 block_row = tile.tile * kBlockQ, tile_row = i32(warp_index()) * kWarpRows, row = block_row + tile_row;
  const u32 shared = shared_tiles();
  Work& work = shared_work(kAtWork);
  if (thread_index() == 0) {
    describe_item(work, p, item_at(p, tile.own, 0), tile.head / (p.heads_q / p.heads_kv));
    describe_head(work, p, tile.head);
    work.first = block_row;
    work.tiles = tiles_of(work.sight.keys_of_some(block_row, block_row + kBlockQ), kBlockKV);
  }
  block_barrier();      // the work is there
  describe_warp(work, row, kWarpRows);
  Forward forward{p, work, shared + kAtPlaces, shared + tile_row * TileQ::kRowBytes};
  forward.softmax.reset();
  clear(forward.out);
  TileQ::load(shared, work.q, block_row, work.sight.q_length, p.head_dim);
  forward.load(0);
  forward.load(1);
  warp_barrier();       // the warp's part of the work is there
  forward.run();
  cp_async_wait_group<0>();
  forward.finish();
}
