// FlashAttention forward on tensor cores by mma.sync: out = softmax(scores) v, lse (Dao 2023, FlashAttention-2).
//
// A block owns kBlockQ queries of one head, a warp kBlockQ / kWarps of them and all of the output's columns; keys come
// in tiles of kBlockKV through shared memory, and are taken in steps of kStep, weights optimistically (sm80/weights.cuh).
// With kAhead the products of step i + 1 stand in the code among the exponentials of step i; long steps without it read
// less from shared memory and are faster where registers allow them. With kHeld a warp's queries stay in registers.
//
// Ladder (H200, 2026-11-29, bfloat16, 16384 tokens, L 4096, ms): copies first and results in chunks 1.469 to 1.432 at D 128,
// nothing at D 64 and 256; kHeld 1.814 to 1.770 at D 64, with dropout 2.967 to 2.812; with dropout a step of 64 keys
// instead of 32 2.276 to 1.964 at D 128. What a warp walks read from shared memory in every step: 3 to 5 % slower.
// With dropout, one branch on alignment for all groups of a step instead of one for each (2026-11-30): 1.987 to 1.792 at
// D 128, 2.824 to 2.376 at D 64. Three blocks a multiprocessor at D 64, with steps of 32 keys: 1.754 to 1.835, at L 1024 under
// a causal mask 0.328 to 0.318. Products that start before K(j + 1) and V(j) of the first tile are there: nothing.
// A first reference from two steps where rows see nothing in the first: window of 512 0.340 to 0.278 at D 128, 0.440 to
// 0.339 at D 64; shorter steps, or tiles of 64 queries, then are slower. Pairs do not do so (0.332 without them to 0.353):
// a look in every step whether rows still wait for their first key costs them 8 % of everything else.
//
// What did not help (2026-11-30, L 4096, ms): with queries in registers the products of step i + 1 among the exponentials of
// step i 1.741 to 1.926 at D 64, and O += P V of step i - 1 there, too, 1.902 (D 128: 1.429 to 1.779); warps of one block of
// eight that take turns at products 2.340, without turns 1.868; 16 rows a warp, eight warps 1.860; a quarter of the
// exponentials by products instead 1.794 (D 128: 1.497, D 256: 1.668 to 1.693), half of them 1.951; full and empty barriers
// for each place of a tile, so that warps may drift apart, 4 % slower and more at every head dim. Without any exponentials
// (and wrong) it takes 1.488 at D 64 and 1.423 at D 128: what is left there is products and the issue of all else.
// Under a causal mask all heads' long rows start first, as many heads at a time as the L2 cache holds keys of, instead of head
// after head (2026-11-30, ms, L 1024 / 4096 / 16384): D 64 0.337, 0.962, 3.535 to 0.330, 0.926, 3.349; D 128 0.272, 0.819, 3.002
// to 0.257, 0.759, 2.784; D 256 0.300, 0.956, 3.174 to 0.280, 0.857, 3.186.
// Fewer divisions before the first copy (2026-11-30, ms, L 1024 / 4096 / 16384): D 64 0.493, 1.763, 6.862 to 0.488, 1.738, 6.721,
// under a causal mask 0.320, 0.939, 3.457 to 0.317, 0.930, 3.420; D 128 0.415, 1.469 to 0.408, 1.462, causal 0.254, 0.784 to 0.256,
// 0.778. Of the 54500 clocks of a block at D 64 and L 1024, 1900 find its place, 2300 start the first copies, 1700 wait for them
// and 4000 write results; at D 256, one block a multiprocessor, 1600, 2200, 3400 and 5600 of 101400.
// Steps of 128 keys at D 64, not of 64 with queries in registers (2026-11-30, ms, L 1024, 4096): 0.497, 1.783 to 0.479, 1.657, under
// a causal mask 0.321, 0.952 to 0.317, 0.904, with 24 bytes spilled. Without (exact steps in parts, one address for queries
// and values), of FlashAttention-2's speed at L 1024, 4096, 16384: 0.96, 1.03, 1.04 to 1.03, 1.13, 1.17, causal 0.99, 1.04, 1.09 to
// 1.03, 1.11, 1.19 (with fewer divisions at the start).
//
// What limits it at D 64, L 4096 (2026-11-30): each partition has two warps, and in 62 % of its clocks neither can issue; tensor
// pipe 50 % busy, issue slots 37 %, shared memory 34 %. mma.sync takes 6 clocks whichever operand is kept from one to the next,
// 9 beside one exponential (with its FFMA and FADD) each. A warp waits where it votes: without the vote (unsafe) 1.783 to 1.613, in
// steps of 128 keys 1.567; without the block's barriers (wrong) 1.706. So the exponentials were laid among products: in parts of 16
// keys, products one part ahead, queries in registers 1.759 to 1.989; O += P V one part later, too, 1.868; two parts later, so that
// nobody waits for the vote, 1.753, and 1.656 in steps of 128 keys (no spills, 226 registers), at L 16384 6.922 to 6.338 and causal
// 3.434 to 3.218, but at L 1024 0.497 to 0.504 and 0.322 to 0.347: at its end each step drains, and the first reference was dear.
// Pairs at D 256 that take their own weights before they wait for the other's: 1.668 to 1.694, at L 1024 0.462 to 0.467.
//
// A mask or a bias in parts of a step (2026-11-30, ms, L 4096; mask, bias, both): D 128 3.155, 3.255, 3.403 to 3.065, 3.158, 3.308,
// D 256 mask 3.732 to 3.670, D 64 3.713, 3.779, 4.066 to 3.715, 3.809, 4.103; plain steps so D 64 1.763 to 1.810, D 128 1.469 to
// 1.575: four votes instead of one are what it costs.
// ALiBi with 128 queries a block instead of 64 at D 128, steps of 64 keys instead of 32 at D 64: 1.92 to 1.46 and 1.72 to
// 1.55 times the plain forward.
//
//   tile j        | wait for K(j + 1), V(j); start copies of K(j + 2), V(j + 1)
//     each step i | S = Q K^T    P = exp(S), dropout    check    O += P V
//
// With kPaired two warps share twice as many rows: each computes the weights of half of a step's keys and leaves them to
// both in shared memory, and owns half of the output's columns. So a warp reads half of K and half of V: at head dim 256
// shared memory, not the tensor cores, is the limit: 1.816 to 1.625 ms, under a causal mask 1.044 to 0.944 (L 4096; at
// L 1024 0.494 to 0.456, 0.312 to 0.297). Queries in registers and steps of 32 keys instead: 1.838; products ahead: 2.053.
//
//     each step i | S = Q K^T    P = exp(S)    check    P -> shared    # pair    P <- shared    O += P V
#include "sm80/forward_copies.cuh"
#include "sm80/store.cuh"
#include "sm80/weights.cuh"

static_assert(kPlainScores && !kDropout || !kAhead, "only plain scores are taken ahead of time, and nothing is dropped");
static_assert(kPlainScores && !kDropout && !kAhead && !kHeld && !kSplit || !kPaired, "pairs have the plain form alone");
// A step with a mask or a bias is taken in parts of 16 keys where head dims are large.
constexpr bool kInParts = kMaskOrBias && !kSoftcapOrAlibi && !kDropout && kHeadDim > 64;
constexpr i32 kPart = 16;
// Registers are scarce in long steps: they are taken again in parts, and one address leads to queries and values.
constexpr bool kLong = kStep > 64;
static_assert(kPlainScores && !kDropout && !kPaired && !kAhead && !kHeld || !kLong, "long steps have the plain form alone");
using Scores = float[kR][kC];
using Part = float[kR][kPart / 4];
using OwnV = Tile<kBlockKV, kOwnCols>;      // the columns of V that a warp takes

struct Forward : Copies {
  ScoreRules<false> rules;
  Dropper dropper;
  i32 row;                             // first row of the warp
  i32 warp_start, warp_stop;           // keys of the warp, from the edge of a step
  float factor;                        // from products to base-2 exponents
  Reader<TileQ, true> read_q{tile_row()};
  Operand<kR / 2, kHeld ? kHeadDim : 16> own_q;
  Reader<TileK, false> read_k;
  Reader<OwnV, true> read_v{0, part() * kOwnCols};
  Weights<kR> weights;
  float out[kR][kO];
  u32 staging;                         // of the warp
  AddendBatch<kWarpRows, kMaskOrBias ? kStep : 16> coming;      // of the next step

  // Which of a pair's two warps this is, and the first of their rows in the tile.
  static CF_DEVICE i32 part() { return i32(warp_index()) % kParts; }
  static CF_DEVICE i32 tile_row() { return i32(warp_index()) / kParts * kWarpRows; }
  static CF_DEVICE i32 own(i32 col) { return col + part() * kOwnStep; }                      // of the step at `col`
  static CF_DEVICE i32 others(i32 col) { return col + (kParts - 1 - part()) * kOwnStep; }

  // All who share rows.
  static CF_DEVICE void pair_barrier() {
    if constexpr (kPaired) barrier_sync_aligned(1 + i32(warp_index()) / 2, 64);
    else warp_barrier();
  }

  // The queries take the sign of a negative scale. A warp's own rows, before anyone reads them.
  CF_DEVICE void negate_q() {
    CF_UNROLL_1
    for (i32 n = 32 * part() + lane_index(); n < kWarpRows * TileQ::kChunks; n += 32 * kParts) {
      const u32 at = q_tile + TileQ::place(tile_row() + n / TileQ::kChunks, n % TileQ::kChunks);
      u32 words[4];
      ld_shared_128(words, at);
      CF_UNROLL
      for (int x = 0; x < 4; ++x) words[x] ^= 0x80008000u;
      st_shared_128(at, words);
    }
    pair_barrier();
  }

  template <int kCols, class Meanwhile>
  CF_DEVICE void multiply_scores(float (&s)[kR][kCols], i32 col, Meanwhile meanwhile) const {
    const auto load = [&](u32(&left)[kR / 2][4], int k) {
      CF_UNROLL
      for (int t = 0; t < kR / 2; ++t) {
        if constexpr (kHeld) {
          CF_UNROLL
          for (int n = 0; n < 4; ++n) left[t][n] = own_q.word[k][t][n];
        } else {
          ldmatrix_x4(left[t], query_block(16 * t, 16 * k));
        }
      }
    };
    multiply_by_transposed<TileK, kHeadDim>(s, load, k_tile(col / kBlockKV), read_k, col % kBlockKV, meanwhile);
  }

  // Where the lane reads a block of the warp's queries.
  CF_DEVICE u32 query_block(i32 row, i32 col) const {
    if constexpr (!kLong) return read_q.block(q_tile, row, col);
    Reader<TileQ, true> read;
    read.start = read_v.start;      // rows of a warp begin at a multiple of 8
    return read.block(q_tile + tile_row() * 128, row, col);
  }

  CF_DEVICE bool sees_all(i32 col) const { return at.whole[warp_index()].covers(col, col + kOwnStep); }

  // What the exponentials of the step at `col` are taken of: products if scores are plain, else scores; selected.
  CF_DEVICE void begin(Scores& s, i32 col) {
    multiply_scores(s, col, [](int) {});
    if constexpr (!kPlainScores) rules.scale_in_haste(s, row, col, u32(opaque(staging)));
    select(s, col);
  }

  template <int kCols> CF_DEVICE void select(float (&s)[kR][kCols], i32 col) const {
    if (sees_all(col)) return;
    RowBounds::of_query(at.sight, row).select(s, col, -Limits<float>::infinity());
  }

  // s becomes weights; the products of the next step, if there is one, go to `next`. False: the warp must do it again.
  template <bool kNext> CF_DEVICE bool optimistic(Scores& s, Scores& next, i32 col) {
    constexpr int kShares = kNext ? kHeadDim / 16 : 1, kQuads = kR * kC / 4;
    float reference[kR], sum[kR];
    Words words[kR / 2];
    CF_UNROLL
    for (int u = 0; u < kR; ++u) reference[u] = weights.negative_reference(u), sum[u] = 0.0f;
    const auto share = [&](int n, auto... aligned) {
      CF_UNROLL
      for (int quad = n * kQuads / kShares; quad < (n + 1) * kQuads / kShares; ++quad) {
        const int u = quad / 2 % (kR / 2) * 2, h = quad % 2, w = quad / kR * 4;
        CF_UNROLL
        for (int x = w; x < w + 4; ++x) {
          s[u + h][x] = ex2_approx_ftz(fused(s[u + h][x], factor, reference[u + h]));
          sum[u + h] += s[u + h][x];
        }
        if constexpr (sizeof...(aligned) > 0) drop(s, words[u / 2], u, h, w, col, aligned...);
      }
    };
    if constexpr (kNext) multiply_scores(next, col + kStep, share);
    else if constexpr (kDropout) dropper.for_alignment([&](auto aligned) { share(0, aligned); });
    else share(0);
    float all = sum[0];
    CF_UNROLL
    for (int u = 1; u < kR; ++u) all += sum[u];
    if (!agreed(s, col, vote_any(!(all <= kLargestSum)))) return false;
    CF_UNROLL
    for (int u = 0; u < kR; ++u) weights.l[u] += sum[u];
    return true;
  }

  // The same part by part, each of which joins the output at once: the weights of the next one stand among its products. The
  // first key that was not taken, from which the warp must do it again; the end of the step if there is none.
  CF_DEVICE i32 in_parts(const Scores& s, i32 col) {
    CF_UNROLL
    for (int first = 0; first < kStep; first += kPart) {
      Part part;
      float sum[kR], all = 0.0f;
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        const float reference = weights.negative_reference(u);
        CF_UNROLL
        for (int w = 0; w < kPart / 4; ++w) {
          part[u][w] = ex2_approx_ftz(fused(s[u][first / 4 + w], factor, reference));
          sum[u] = w == 0 ? part[u][w] : sum[u] + part[u][w];
        }
        all += sum[u];
      }
      if (vote_any(!(all <= kLargestSum))) return col + first;
      CF_UNROLL
      for (int u = 0; u < kR; ++u) weights.l[u] += sum[u];
      accumulate(part, col + first);
    }
    return col + kStep;
  }

  // The keys from `from` of the step that ends at `stop`, by the rows' true maxima.
  CF_DEVICE void take_exactly(i32 from, i32 stop) {
    CF_UNROLL_1
    for (; from < stop; from += kPart) {
      Part s;
      multiply_scores(s, from, [](int) {});
      exact(s, from, staging + (from - stop + kStep) * 4);
      accumulate(s, from);
    }
  }

  // Where a pair leaves the weights of the step that `col` lies in, and then each warp whether it takes the step again.
  CF_DEVICE u32 exchange(i32 col) const {
    return q_tile + kAtPairs + (i32(warp_index()) / kParts * 2 + col / kStep % 2) * kPairBytes;
  }

  CF_DEVICE void leave(const Scores& s, i32 col) const {
    Operand<kR / 2, kOwnStep> rounded;
    round_to(rounded, s);
    constexpr int kWords = kOwnStep / 16 * (kR / 2);
    CF_UNROLL
    for (int n = 0; n < kWords; ++n) {
      st_shared_128(exchange(col) + (part() * kWords + n) * 512 + lane_index() * 16, rounded.word[n / (kR / 2)][n % (kR / 2)]);
    }
  }

  // Whether no warp of those that share rows takes the step again; then a pair's weights are there.
  CF_DEVICE bool agreed(const Scores& s, i32 col, bool again) const {
    if constexpr (!kPaired) return !again;
    const u32 flags = exchange(col) + kPairBytes - 64;
    leave(s, col);
    if (lane_index() == 0) st_shared_32(flags + part() * 4, again ? bits_of(1.0f) : 0);
    pair_barrier();
    return ld_shared_f32(flags) + ld_shared_f32(flags + 4) == 0.0f;
  }

  CF_DEVICE void rescale_out(const float (&rescale)[kR]) {
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kO; ++w) out[u][w] *= rescale[u];
    }
  }

  // Products become weights by the rows' true maxima; their addends lie at `staged`.
  template <int kCols> CF_DEVICE void exact(float (&s)[kR][kCols], i32 col, u32 staged) {
    float unused[kR][kCols];
    rules.scale(s, unused, row, col, staged);
    select(s, col);
    float rescale[kR];
    weights.update(s, rescale);
    rescale_out(rescale);
    if constexpr (kDropout) {
      Words words[kR / 2];
      CF_UNROLL
      for (int w = 0; w < kCols; w += 4) {
        CF_UNROLL
        for (int u = 0; u < kR; ++u) {
          dropper.for_alignment([&](auto aligned) { drop(s, words[u / 2], u / 2 * 2, u % 2, w, col, aligned); });
        }
      }
    }
  }

  // Dropped weights of row half a of the group at (u, w) become 0; a goes 0, 1, and `words` is kept in between.
  template <int kCols, bool kAligned>
  CF_DEVICE void drop(float (&s)[kR][kCols], Words& words, int u, int a, int w, i32 col, Aligned<kAligned> aligned) const {
    if (a == 0) words = dropper.words_at(row + 8 * u, col + 4 * w, aligned);
    CF_UNROLL
    for (int x = 0; x < 4; ++x) s[u + a][w + x] = dropper.drops(words, a, x) ? 0.0f : s[u + a][w + x];
  }

  template <int kCols> CF_DEVICE void accumulate(const float (&s)[kR][kCols], i32 col) {
    if constexpr (kPaired) {
      Operand<kR / 2, kStep> left;
      CF_UNROLL
      for (int n = 0; n < kStep / 16 * (kR / 2); ++n) {
        ld_shared_128(left.word[n / (kR / 2)][n % (kR / 2)], exchange(col) + n * 512 + lane_index() * 16);
      }
      multiply<OwnV, kStep>(out, left, v_tile(col / kBlockKV), read_v, col % kBlockKV);
    } else {
      Operand<kR / 2, 4 * kCols> rounded;
      round_to(rounded, s);
      multiply<OwnV, 4 * kCols>(out, rounded, v_tile(col / kBlockKV), read_v, col % kBlockKV);
    }
  }

  // s, begun, is used up and replaced by that of the next step.
  CF_DEVICE void step_ahead(Scores& s, i32 col) {
    Scores next;
    const bool more = col + kStep < warp_stop;
    const bool done = more ? optimistic<true>(s, next, col) : optimistic<false>(s, next, col);
    if (!done) {
      multiply_scores(s, col, [](int) {});
      exact(s, col, staging);
    }
    accumulate(s, col);
    if (more) select(next, col + kStep);
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kC; ++w) s[u][w] = next[u][w];
    }
  }

  // The same without looking ahead.
  CF_DEVICE void step(Scores& s, i32 col) {
    if (!kPlainScores || col != warp_start) begin(s, own(col));
    if (!kPlainScores && col == warp_start) weights.begin(s, 1.0f);
    if constexpr (kInParts) return take_exactly(in_parts(s, col), col + kStep);
    if (!optimistic<false>(s, s, own(col))) {
      if constexpr (kLong) return take_exactly(col, col + kStep);
      if constexpr (kPaired) raise_to_others(s, col);
      multiply_scores(s, own(col), [](int) {});
      exact(s, own(col), staging);
      if constexpr (kPaired) leave(s, own(col)), pair_barrier();
    }
    accumulate(s, col);
  }

  // The rows' maxima take in the keys of the step that the other warp of the pair takes.
  CF_DEVICE void raise_to_others(Scores& s, i32 col) {
    Scores unused;
    multiply_scores(s, others(col), [](int) {});
    rules.scale(s, unused, row, others(col), staging);
    select(s, others(col));
    float rescale[kR];
    weights.raise(s, rescale);
    rescale_out(rescale);
  }

  // A first reference of plain scores, and the products of the first step. Where the last row sees none of its keys, those
  // of the next step count too: or that row would have no reference, and two steps would be taken again.
  CF_DEVICE void begin_walk(Scores& s, i32 col) {
    if constexpr (!kPaired && !kDropout) {
      const i32 last = smaller(row + kWarpRows, at.sight.q_length) - 1;
      const bool late = at.sight.keys_of(last).start >= col + kStep && col + kStep < warp_stop;
      CF_UNROLL_1
      for (i32 from = late ? col + kStep : col; from >= col; from -= kStep) {
        begin(s, from);
        weights.begin(s, rules.terms.scale);
      }
    } else {
      begin(s, own(col));
      weights.begin(s, rules.terms.scale);
      if constexpr (kPaired) share_references(exchange(col + kStep));
    }
  }

  // The larger one of a pair's two references of a row; what lies at `place` is needed in the next step.
  CF_DEVICE void share_references(u32 place) {
    const u32 mine = place + part() * kWarpRows * 4, other = place + (1 - part()) * kWarpRows * 4;
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      if (lane_index() % 4 == 0) st_shared_32(mine + fragment_row(u) * 4, bits_of(weights.m[u]));
    }
    pair_barrier();          // the references are there
    CF_UNROLL
    for (int u = 0; u < kR; ++u) weights.m[u] = maximum(weights.m[u], ld_shared_f32(other + fragment_row(u) * 4));
  }

  CF_DEVICE void next_tile(i32 tile) {
    cp_async_wait_group<0>();
    block_barrier();        // everyone's copies are there; nobody reads K(tile - 1) or V(tile - 1) any more
    load_k(tile + kKeyTiles - 1);
    load_v(tile + 1);
    cp_async_commit_group();
  }

  // Walks the key tiles of the block from `first`, at least one.
  CF_DEVICE void run(i32 first) {
    Scores s;
    CF_UNROLL_1
    for (i32 col = first * kBlockKV - (kMaskOrBias ? kStep : 0); col < key_stop; col += kStep) {
      if (col % kBlockKV == 0) next_tile(col / kBlockKV);
      if (col == first * kBlockKV && p.call.scale < 0.0) negate_q();
      if (kHeld && col == first * kBlockKV) {
        const Reader<TileQ, true> read_once(tile_row(), 0, u32(opaque(lane_index())));
        load_operand(own_q, q_tile, read_once, 0);
      }
      const bool mine = col >= warp_start && col < warp_stop;
      if constexpr (kMaskOrBias) {
        const bool any = mine && at.addends.lay_out(coming, staging, row, col);
        if (col + kStep >= warp_start && col + kStep < warp_stop) at.addends.fetch(coming, row, col + kStep);
        if (!any) continue;      // they forbid all of it
      }
      if (!mine) continue;
      if (kPlainScores && col == warp_start) begin_walk(s, col);
      if constexpr (kAhead) step_ahead(s, col);
      else step(s, col);
    }
  }

  // Normalises the rows and writes out and lse; rows at or past the query length get 0 and -inf.
  CF_DEVICE void finish() {
    if constexpr (kPaired) join_sums();
    const float none = -Limits<float>::infinity();
    const float kept = kDropout ? dropout_scale<float>(p) : 1.0f;
    const i32 q_length = at.sight.q_length;
    const Results to = kSplit ? partial_results() : results();
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      const i32 i = row + fragment_row(u);
      float sink = none, scale, lse;
      if (!kSplit && p.call.sinks != nullptr) {
        sink = load_kind<float>(p.call.sinks, p.sinks_kind, head_index(p.sinks, at.item, at.head));
      }
      weights.finish(u, sink, scale, lse);
      const bool live = i < q_length;
      CF_UNROLL
      for (int w = 0; w < kO; ++w) out[u][w] = live ? out[u][w] * scale * kept : 0.0f;
      const bool writes = to.lse != nullptr && part() == 0 && lane_index() % 4 == 0;
      if (writes && i < p.seqlen_q) to.lse[i * to.lse_stride] = live ? lse : none;
    }
    const u32 own_panels = q_tile + part() * (kOwnCols / 64) * TileQ::kPanelBytes;
    store_tile<TileQ>(out, to.out.from_col(part() * kOwnCols), row, own_panels, tile_row());
  }

  // The sums of a pair's rows over the keys of both.
  CF_DEVICE void join_sums() {
    const u32 at = exchange(0) + lane_index() * 4;
    pair_barrier();          // nobody reads weights or queries any more
    CF_UNROLL
    for (int u = 0; u < kR; ++u) st_shared_32(at + (part() * kR + u) * 128, bits_of(weights.l[u]));
    pair_barrier();          // the sums are there
    CF_UNROLL
    for (int u = 0; u < kR; ++u) weights.l[u] += ld_shared_f32(at + ((1 - part()) * kR + u) * 128);
  }

  struct Results {
    Target out;
    float* lse;
    i64 lse_stride;
  };

  CF_DEVICE Results results() const {
    const Target to = target_of(p.call.out, p.out, p.out_kind, at.item, at.head, p.seqlen_q, p.head_dim_v, false);
    float* lse = p.call.lse == nullptr ? nullptr : rows_of<float>(p.call.lse, p.lse, at.item, at.head).base;
    return {to, lse, p.lse.row};
  }

  // prepost/combine.cu reads them.
  CF_DEVICE Results partial_results() const {
    const i64 all = i64(points(p.own)) * p.heads_q * p.seqlen_q, first = at.split * all + row_number(p, at.item, at.head, 0);
    float* partials = static_cast<float*>(p.call.partials);
    const Target to{partials + first * p.head_dim_v, p.head_dim_v, 1, kFloat32, p.seqlen_q, p.head_dim_v, false};
    return {to, partials + p.splits * all * p.head_dim_v + first, 1};
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_forward(const Params p) {
  u8* const storage = &shared_storage<u8>();
  const u32 shared = tile_address(shared_address(storage));
  Place& at = *reinterpret_cast<Place*>(storage + (shared - shared_address(storage)) + kAtPlace);
  if (thread_index() == 0) at.begin(p);
  block_barrier();       // it is there
  const Visibility& sight = at.sight;
  const Interval block_keys = sight.keys_of_some(at.block_row, at.block_row + kBlockQ);
  const i32 start = block_keys.start / kBlockKV, tiles = ceil_div(block_keys.stop, kBlockKV) - start;
  const i32 kv_head = p.heads_q == p.heads_kv ? at.head : at.head / (p.heads_q / p.heads_kv), splits = kSplit ? p.splits : 1;
  const i32 first = start + part_start(tiles, at.split, splits), last = start + part_start(tiles, at.split + 1, splits);
  const Copies copies{p, at, last * kBlockKV, rows_of<const Element>(p.call.k, p.k, at.item, kv_head),
                      rows_of<const Element>(p.call.v, p.v, at.item, kv_head), shared};
  const i32 row = at.block_row + Forward::tile_row();
  if (lane_index() == 0) at.whole[warp_index()] = sight.keys_of_all(row, smaller(row + kWarpRows, sight.q_length));
  warp_barrier();        // it is there
  if (first < last) copies.load_first(first);
  ScoreRules<false> rules{score_terms_of<float>(p, at.item, at.head), sight};
  rules.terms.scale = absolute(rules.terms.scale);      // the queries take the sign
  const Interval keys = sight.keys_of_some(row, row + kWarpRows);
  const i32 warp_start = larger(keys.start / kStep * kStep, first * kBlockKV), warp_stop = smaller(keys.stop, last * kBlockKV);
  const bool any = keys.start < keys.stop && warp_start < warp_stop;
  Forward forward{copies, rules, dropper_of(p, at.item, at.head), row, any ? warp_start : -1, any ? warp_stop : -1,
                  kPlainScores ? rules.terms.scale * kLog2e : kLog2e};
  forward.staging = shared + kAtAddends + warp_index() * kAddendBytes;
  forward.weights.reset();
  clear(forward.out);
  if (first < last) forward.run(first);
  forward.finish();
}
