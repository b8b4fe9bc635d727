// FlashAttention forward on tensor cores by mma.sync: out = softmax(scores) v, lse (Dao 2023, FlashAttention-2).
//
// A block owns kBlockQ queries of one head, a warp kBlockQ / kWarps of them and all of the output's columns; keys come
// in tiles of kBlockKV through shared memory, and are taken in steps of kStep. Weights are taken optimistically
// (sm80/weights.cuh) where scores are plain. With kAhead the products of step i + 1 stand in the code among the
// exponentials of step i; long steps without it read less from shared memory and are faster where registers allow them
// (H200, 2026-11-29: 1.1 times at D 128).
//
//   tile j        | wait for K(j + 1), V(j); start copies of K(j + 2), V(j + 1)
//     each step i | S = Q K^T    P = exp(S), dropout    check    O += P V
//
// Shared memory: Q, three tiles of K, two of V, addends of a step where there are any; a warp's rows of Q become its
// staging area for the output.
#include "attn/schedule.cuh"
#include "sm80/store.cuh"
#include "sm80/weights.cuh"

constexpr i32 kWarpRows = kBlockQ / kWarps, kR = kWarpRows / 8, kC = kStep / 4, kO = kHeadDimV / 4;
static_assert(kPlainScores || !kAhead, "only plain scores are taken ahead of time");
constexpr i32 kWideDim = larger(kHeadDim, kHeadDimV);
static_assert(kBlockQ % (16 * kWarps) == 0 && kBlockKV % kStep == 0 && kStep % 16 == 0, "whole fragments");

using TileQ = Tile<kBlockQ, kWideDim>;     // and the staging area of the output
using TileK = Tile<kBlockKV, kHeadDim>;
using TileV = Tile<kBlockKV, kHeadDimV>;

// Offsets in shared memory.
constexpr i32 kAtK = TileQ::kBytes, kAtV = kAtK + 3 * TileK::kBytes, kAtAddends = kAtV + 2 * TileV::kBytes;
constexpr i32 kAddendBytes = kMaskOrBias ? kWarpRows * Staging<kStep>::kRow * 4 : 0;      // of a warp and step
constexpr i32 kUsedBytes = kAtAddends + kWarps * kAddendBytes;
static_assert(kUsedBytes + 128 == kSharedBytes, "the launch gives as much, and room to align");

using Scores = float[kR][kC];

// What a block works on: the rows of one score matrix, or if kPacked the one query of all heads of a group, cut into
// tiles; each in p.splits runs of keys if kSplit.
struct Place {
  Item item;
  i32 head, rows, block_row, split;      // the first head, rows in all, the first row of the tile

  CF_DEVICE Place(const Params& p, u32 block) {
    const i32 group = p.heads_q / p.heads_kv;
    rows = kPacked ? group : p.seqlen_q;
    const TileWork work = tile_work(block, ceil_div(rows, kBlockQ), kSplit ? p.splits : 1, kPacked ? p.heads_kv : p.heads_q,
                                    p.call.right < kUnbounded);
    item = item_at(p, work.own, 0);
    head = kPacked ? work.head * group : work.head;
    block_row = work.tile * kBlockQ;
    split = work.split;
  }
};

struct Forward {
  const Params& p;
  ScoreRules<false> rules;
  Dropper dropper;
  i32 row;                             // first row of the warp: a query, or a head of the group if kPacked
  i32 key_stop, warp_start, warp_stop;  // keys of the block end; and of the warp, from the edge of a step
  Interval whole;                      // keys that every query of the warp sees
  float factor;                        // from products to base-2 exponents
  ElementRows k, v;
  u32 q_tile, k_tiles, v_tiles;
  Reader<TileQ, true> read_q{i32(warp_index()) * kWarpRows};
  Reader<TileK, false> read_k;
  Reader<TileV, true> read_v;
  Weights<kR> weights;
  float out[kR][kO];
  Operand<kR / 2, kQueriesInRegisters ? kHeadDim : 16> q;
  AddendSource addends;
  u32 staging;                         // of the warp

  CF_DEVICE u32 k_tile(i32 tile) const { return k_tiles + u32(tile) % 3u * TileK::kBytes; }
  CF_DEVICE u32 v_tile(i32 tile) const { return v_tiles + u32(tile) % 2u * TileV::kBytes; }

  CF_DEVICE void load_q(const Place& at, i32 live_rows) const {
    ElementRows rows = rows_of<const Element>(p.call.q, p.q, at.item, at.head);
    if (kPacked) rows.row_stride = p.q.head;
    load_tile<TileQ>(q_tile, rows, at.block_row, live_rows, p.head_dim, thread_index());
  }
  CF_DEVICE void load_k(i32 tile) const {
    if (tile * kBlockKV >= key_stop) return;
    load_tile<TileK>(k_tile(tile), k, tile * kBlockKV, rules.sight.kv_length, p.head_dim, thread_index());
  }
  CF_DEVICE void load_v(i32 tile) const {
    if (tile * kBlockKV >= key_stop) return;
    load_tile<TileV>(v_tile(tile), v, tile * kBlockKV, rules.sight.kv_length, p.head_dim_v, thread_index());
  }

  // The queries take the sign of a negative scale. A warp's own rows, before anyone reads them.
  CF_DEVICE void negate_q() {
    CF_UNROLL_1
    for (i32 n = lane_index(); n < kWarpRows * TileQ::kChunks; n += 32) {
      const u32 at = q_tile + TileQ::place(i32(warp_index()) * kWarpRows + n / TileQ::kChunks, n % TileQ::kChunks);
      u32 words[4];
      ld_shared_128(words, at);
      CF_UNROLL
      for (int x = 0; x < 4; ++x) words[x] ^= 0x80008000u;
      st_shared_128(at, words);
    }
    warp_barrier();
  }

  template <class Meanwhile> CF_DEVICE void multiply_scores(Scores& s, i32 col, Meanwhile meanwhile) const {
    const auto load = [&](u32(&left)[kR / 2][4], int k) {
      CF_UNROLL
      for (int t = 0; t < kR / 2; ++t) {
        if constexpr (kQueriesInRegisters) {
          CF_UNROLL
          for (int x = 0; x < 4; ++x) left[t][x] = q.word[k][t][x];
        } else {
          ldmatrix_x4(left[t], read_q.block(q_tile, 16 * t, 16 * k));
        }
      }
    };
    multiply_by_transposed<TileK, kHeadDim>(s, load, k_tile(col / kBlockKV), read_k, col % kBlockKV, meanwhile);
  }

  CF_DEVICE bool sees_all(i32 col) const { return whole.covers(col, col + kStep); }

  // The products of the step at `col`, selected.
  CF_DEVICE void begin(Scores& s, i32 col) {
    multiply_scores(s, col, [](int) {});
    select(s, col);
  }

  CF_DEVICE void select(Scores& s, i32 col) const {
    if (sees_all(col)) return;
    const Place at(p, u32(opaque(block_index())));      // worked out anew: registers are too dear to hold the bounds
    RowBounds::of_query(visibility_of(p, at.item), kPacked ? 0 : row).select(s, col, -Limits<float>::infinity());
  }

  // s becomes weights; the products of the next step, if there is one, go to `next`. False: the warp must do it again.
  template <bool kNext> CF_DEVICE bool optimistic(Scores& s, Scores& next, i32 col) {
    constexpr int kParts = kNext ? kHeadDim / 16 : 1, kQuads = kR * kC / 4;
    float reference[kR], sum[kR];
    Words words[kR / 2];
    CF_UNROLL
    for (int u = 0; u < kR; ++u) reference[u] = weights.negative_reference(u), sum[u] = 0.0f;
    const auto part = [&](int n) {
      CF_UNROLL
      for (int quad = n * kQuads / kParts; quad < (n + 1) * kQuads / kParts; ++quad) {
        const int u = quad / 2 % (kR / 2) * 2, h = quad % 2, w = quad / kR * 4;
        CF_UNROLL
        for (int x = w; x < w + 4; ++x) {
          s[u + h][x] = ex2_approx_ftz(fused(s[u + h][x], factor, reference[u + h]));
          sum[u + h] += s[u + h][x];
        }
        if constexpr (kDropout) drop(s, words[u / 2], u, h, w, col);
      }
    };
    if constexpr (kNext) multiply_scores(next, col + kStep, part);
    else part(0);
    float all = sum[0];
    CF_UNROLL
    for (int u = 1; u < kR; ++u) all += sum[u];
    if (vote_any(!(all <= kLargestSum))) return false;
    CF_UNROLL
    for (int u = 0; u < kR; ++u) weights.l[u] += sum[u];
    return true;
  }

  // Products become weights by the rows' true maxima.
  CF_DEVICE void exact(Scores& s, i32 col) {
    Scores unused;
    rules.scale(s, unused, row, col, staging);
    select(s, col);
    float rescale[kR];
    weights.update(s, rescale);
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kO; ++w) out[u][w] *= rescale[u];
    }
    if constexpr (kDropout) {
      Words words[kR / 2];
      CF_UNROLL
      for (int w = 0; w < kC; w += 4) {
        CF_UNROLL
        for (int u = 0; u < kR; ++u) drop(s, words[u / 2], u / 2 * 2, u % 2, w, col);
      }
    }
  }

  // Dropped weights of row half a of the group at (u, w) become 0; a goes 0, 1, and `words` is kept in between.
  CF_DEVICE void drop(Scores& s, Words& words, int u, int a, int w, i32 col) const {
    if (a == 0) words = dropper.words_at<false>(row + 8 * u, col + 4 * w);
    CF_UNROLL
    for (int x = 0; x < 4; ++x) s[u + a][w + x] = dropper.drops(words, a, x) ? 0.0f : s[u + a][w + x];
  }

  CF_DEVICE void accumulate(const Scores& s, i32 col) {
    Operand<kR / 2, kStep> rounded;
    round_to(rounded, s);
    multiply<TileV, kStep>(out, rounded, v_tile(col / kBlockKV), read_v, col % kBlockKV);
  }

  // s, begun, is used up and replaced by that of the next step.
  CF_DEVICE void step_ahead(Scores& s, i32 col) {
    Scores next;
    const bool more = col + kStep < warp_stop;
    const bool done = more ? optimistic<true>(s, next, col) : optimistic<false>(s, next, col);
    if (!done) {
      multiply_scores(s, col, [](int) {});
      exact(s, col);
    }
    accumulate(s, col);
    if (more) select(next, col + kStep);
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kC; ++w) s[u][w] = next[u][w];
    }
  }

  // The same without looking ahead; with a mask, bias, softcap or slope always the exact way.
  CF_DEVICE void step(Scores& s, i32 col) {
    if constexpr (kMaskOrBias) {
      if (!addends.stage<kWarpRows, kStep>(staging, row, col)) return;      // they forbid all of it
    }
    if (!kPlainScores || col != warp_start) begin(s, col);
    if constexpr (kPlainScores) {
      if (!optimistic<false>(s, s, col)) {
        multiply_scores(s, col, [](int) {});
        exact(s, col);
      }
    } else {
      exact(s, col);
    }
    accumulate(s, col);
  }

  CF_DEVICE void next_tile(i32 tile) {
    cp_async_wait_group<0>();
    block_barrier();        // everyone's copies are there; nobody reads K(tile - 1) or V(tile - 1) any more
    load_k(tile + 2);
    load_v(tile + 1);
    cp_async_commit_group();
  }

  // Walks the key tiles [first, last) of the block, at least one.
  CF_DEVICE void run(i32 first, i32 last) {
    load_k(first);
    load_k(first + 1);
    load_v(first);
    cp_async_commit_group();
    Scores s;
    CF_UNROLL_1
    for (i32 col = first * kBlockKV; col < last * kBlockKV; col += kStep) {
      if (col % kBlockKV == 0) next_tile(col / kBlockKV);
      if (col == first * kBlockKV && p.call.scale < 0.0) negate_q();
      if (kQueriesInRegisters && col == first * kBlockKV) load_operand(q, q_tile, read_q, 0);
      if (col < warp_start || col >= warp_stop) continue;
      if (kPlainScores && col == warp_start) {
        begin(s, col);
        weights.begin(s, rules.terms.scale);
      }
      if constexpr (kAhead) step_ahead(s, col);
      else step(s, col);
    }
  }

  // Normalises the rows and writes out and lse; rows at or past the query length get 0 and -inf.
  CF_DEVICE void finish(const Place& at) {
    const float none = -Limits<float>::infinity();
    const float kept = kDropout ? dropout_scale<float>(p) : 1.0f;
    const i32 q_length = visibility_of(p, at.item).q_length, live_rows = !kPacked ? q_length : q_length > 0 ? at.rows : 0;
    const Results to = kSplit ? partial_results(at) : results(at);
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      const i32 i = row + fragment_row(u);
      float sink = none, scale, lse;
      if (!kSplit && p.call.sinks != nullptr) {
        const i32 head = kPacked ? smaller(at.head + i, p.heads_q - 1) : at.head;
        sink = load_kind<float>(p.call.sinks, p.sinks_kind, head_index(p.sinks, at.item, head));
      }
      weights.finish(u, sink, scale, lse);
      const bool live = i < live_rows;
      CF_UNROLL
      for (int w = 0; w < kO; ++w) out[u][w] = live ? out[u][w] * scale * kept : 0.0f;
      if (to.lse != nullptr && i < at.rows && lane_index() % 4 == 0) to.lse[i * to.lse_stride] = live ? lse : none;
    }
    store_tile<TileQ>(out, to.out, row, q_tile, i32(warp_index()) * kWarpRows);
  }

  struct Results {
    Target out;
    float* lse;
    i64 lse_stride;
  };

  CF_DEVICE Results results(const Place& at) const {
    Target to = target_of(p.call.out, p.out, p.out_kind, at.item, at.head, at.rows, p.head_dim_v, false);
    if (kPacked) to.row_stride = p.out.head;
    float* lse = p.call.lse == nullptr ? nullptr : rows_of<float>(p.call.lse, p.lse, at.item, at.head).base;
    return {to, lse, kPacked ? p.lse.head : p.lse.row};
  }

  // prepost/combine.cu reads them.
  CF_DEVICE Results partial_results(const Place& at) const {
    const i64 all = i64(points(p.own)) * p.heads_q * p.seqlen_q, first = at.split * all + row_number(p, at.item, at.head, 0);
    float* partials = static_cast<float*>(p.call.partials);
    const Target to{partials + first * p.head_dim_v, p.head_dim_v, 1, kFloat32, at.rows, p.head_dim_v, false};
    return {to, partials + p.splits * all * p.head_dim_v + first, 1};
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_forward(const Params p) {
  const Place at(p, block_index());
  const i32 kv_head = at.head / (p.heads_q / p.heads_kv), splits = kSplit ? p.splits : 1;
  const u32 shared = tile_address(shared_address(&shared_storage<u8>()));
  const i32 row = at.block_row + i32(warp_index()) * kWarpRows;
  ScoreRules<false> rules = score_rules_of<false>(p, at.item, at.head);
  rules.terms.scale = absolute(rules.terms.scale);      // the queries take the sign
  const Visibility& sight = rules.sight;
  const i32 live_rows = !kPacked ? sight.q_length : sight.q_length > 0 ? at.rows : 0;
  const i32 query = kPacked ? 0 : row, block_query = kPacked ? 0 : at.block_row, live = smaller(row + kWarpRows, live_rows);
  const Interval block_keys = sight.keys_of_some(block_query, kPacked ? 1 : at.block_row + kBlockQ);
  const Interval keys = sight.keys_of_some(query, kPacked ? 1 : row + kWarpRows);
  const i32 start = block_keys.start / kBlockKV, tiles = ceil_div(block_keys.stop, kBlockKV) - start;
  const i32 first = start + i32(i64(tiles) * at.split / splits), last = start + i32(i64(tiles) * (at.split + 1) / splits);
  const i32 warp_start = larger(keys.start / kStep * kStep, first * kBlockKV), warp_stop = smaller(keys.stop, last * kBlockKV);
  const bool any = keys.start < keys.stop && warp_start < warp_stop && row < live_rows;
  Forward forward{p, rules, dropper_of(p, at.item, at.head), row, smaller(block_keys.stop, last * kBlockKV),
                  any ? warp_start : -1, any ? warp_stop : -1, sight.keys_of_all(query, kPacked ? 1 : live),
                  kPlainScores ? rules.terms.scale * kLog2e : kLog2e, rows_of<const Element>(p.call.k, p.k, at.item, kv_head),
                  rows_of<const Element>(p.call.v, p.v, at.item, kv_head), shared, shared + kAtK, shared + kAtV};
  if constexpr (kMaskOrBias) {
    forward.addends = {addends_of(p, at.item, at.head), p.seqlen_q, p.seqlen_k};
    forward.staging = shared + kAtAddends + warp_index() * kAddendBytes;
  }
  forward.weights.reset();
  clear(forward.out);
  if (first < last) {
    forward.load_q(at, live_rows);
    forward.run(first, last);
  }
  forward.finish(Place(p, u32(opaque(block_index()))));      // worked out anew: registers were too dear to hold it
}
