// Backward on tensor cores by mma.sync in one kernel: dk and dv of one tile of keys, and its share of every dq (Dao 2023,
// Algorithm 2, turned).
//
//   P = exp(S - lse)     dv += (r * P)^T dO     dS = P * (r * dP - delta')     dA = dS * d(c)/d(a)     dk += scale * dA^T q
//   dq += dA k, in float, scaled and rounded by prepost/finish_queries.cu
//
// Warps work in pairs on kPairRows keys: the first of a pair computes S^T = K Q^T and owns dv, the second dP^T = V dO^T
// and owns dk. With keys on rows, P^T and dA^T leave the accumulators as operands of the next product; P^T crosses from
// one warp to the other, rounded, and its sign says what dropout took; dA^T goes to shared memory, and each warp sums a
// part of dq over all keys of the block. Queries come in tiles of kBlockQ from the last to the first and are taken in steps
// of kStep; all query heads of the group and all items that share the keys follow one another, in order.
//
//   query tile x  | # tile x, dA^T of x - 1 are there
//     first warp  | copies of x + 1    S^T = K Q^T    P^T -> shared          # pair    dv += P^T dO    dq of x - 1
//     second warp | dq of x - 2    dP^T = V dO^T    publish x - 2            # pair    P^T <- shared   dA^T   dk += dA^T Q
//
// If kOrdered a block adds to the dq of a tile after all blocks of earlier keys, so that every run gives the same bits: it
// waits until the tile's count says so, and counts when its own adds are done. Blocks take numbers as they start, and wait
// for lower ones alone; neighbours in a head start one after the other, because the heads of a group take turns. In order
// it took 4.53 / 5.17 ms, in no order 3.89 / 4.48 (H200, 2026-11-29, bfloat16, D 128 / D 64, 16384 tokens, L 4096).
//
// Ladder on the same problem, main kernel, ms: two kernels 5.67 / 10.14; one, everything of a tile worked out by every warp
// 4.99 / 6.31 (in no order); one thread works it out for all 4.57; dq after the tile's steps 4.23 / 4.75; in the second
// warps before them 3.91 / 4.52. In order: 6.50 / 7.80 at first; counts looked at before the products and heads taking
// turns 4.53 / 5.17.
//
// Shared memory: K, V (later the staging of dv, dk), two tiles of Q and dO, two of P a pair, lse and delta, three of dA^T,
// addends, the pass.
#include "sm80/backward_pass.cuh"
#include "sm80/store.cuh"
#include "sm80/weights.cuh"

constexpr i32 kWideDim = larger(kHeadDim, kHeadDimV);
constexpr bool kKeysInRegisters = kWideDim <= 64 && kPlainScores && !kDropout;      // where they have room
static_assert(kBlockKV % (16 * kPairs) == 0 && kBlockQ % kStep == 0 && kStep % 16 == 0, "whole fragments");

using TileK = Tile<kBlockKV, kWideDim>;
using TileV = Tile<kBlockKV, kWideDim>;
using TileQ = Tile<kBlockQ, kHeadDim>;
using TileO = Tile<kBlockQ, kHeadDimV>;
using Scores = float[kR][kC];
using Accumulator = float[kR][kWideDim / 4];
using Weighted = Operand<kR / 2, kStep>;
using TileS = Tile<kBlockKV, kBlockQ>;     // dA^T

// A warp's part of the dq of a query tile.
constexpr i32 kDqRows = smaller(32, kBlockQ / 2), kDqRowParts = kBlockQ / kDqRows, kDqColParts = kWarps / kDqRowParts;
constexpr i32 kDqLeast = ceil_div(kHeadDim, kDqColParts), kDqCols = kDqLeast <= 16 ? 16 : kDqLeast <= 32 ? 32 : 64;
static_assert(kDqCols * kDqColParts >= kHeadDim, "the warps' parts cover it, and none crosses the edge of a panel");
static_assert(kBlockQ % kRowBlock == 0 && kDqRows % 16 == 0, "whole blocks of rows, whole fragments");

// Offsets in shared memory.
constexpr i32 kWeightBytes = kPairRows * kStep * 2, kAddendBytes = kMaskOrBias ? kStep * Staging<kPairRows>::kRow * 4 : 0;
constexpr i32 kAtV = TileK::kBytes, kAtQ = kAtV + TileV::kBytes, kAtO = kAtQ + 2 * TileQ::kBytes;
constexpr i32 kAtWeights = kAtO + 2 * TileO::kBytes, kAtRows = kAtWeights + 2 * kPairs * kWeightBytes;
constexpr i32 kAtSums = kAtRows + 4 * kBlockQ * 4 , kAtAddends = kAtSums + 3 * TileS::kBytes;
constexpr i32 kAtPass = kAtAddends + kPairs * kAddendBytes, kUsedBytes = kAtPass + kPassBytes;
static_assert(kUsedBytes + 128 == kSharedBytes, "the launch gives as much, and room to align");

struct Backward {
  const Params& p;
  Pass& pass;
  u32 shared;
  i32 pair;
  Reader<TileK, true> read_keys{pair * kPairRows};
  Reader<TileQ, false> read_q;
  Reader<TileO, false> read_o;
  Reader<TileQ, true> sum_q;
  Reader<TileO, true> sum_o;
  Operand<kR / 2, kKeysInRegisters ? kWideDim : 16> own_keys;      // of the pair: K in its first warp, V in the second

  CF_DEVICE u32 q_tile(i32 x) const { return shared + kAtQ + u32(x) % 2u * TileQ::kBytes; }
  CF_DEVICE u32 o_tile(i32 x) const { return shared + kAtO + u32(x) % 2u * TileO::kBytes; }
  CF_DEVICE u32 s_tile(i32 x) const { return shared + kAtSums + u32(x) % 3u * TileS::kBytes; }
  CF_DEVICE u32 weights_of(i32 step) const {
    return shared + kAtWeights + (pair * 2 + step % 2) * kWeightBytes + lane_index() * 16;
  }
  CF_DEVICE u32 row_stats(i32 x) const { return shared + kAtRows + u32(x) % 2u * (2 * kBlockQ * 4); }      // lse, delta

  CF_DEVICE i32 col() const { return pass.col() + pair * kPairRows; }      // the first key of the pair

  CF_DEVICE void load_keys() const {
    const ElementRows k = rows_of<const Element>(p.call.k, p.k, pass.item, pass.work.head);
    const ElementRows v = rows_of<const Element>(p.call.v, p.v, pass.item, pass.work.head);
    load_tile<TileK>(shared, k, pass.col(), pass.sight.kv_length, p.head_dim, thread_index());
    load_tile<TileV>(shared + kAtV, v, pass.col(), pass.sight.kv_length, p.head_dim_v, thread_index());
  }

  // Starts copies of tile x. The first warps of the pairs do so: the second ones will wait for their adds to be seen, and
  // would wait for their copies, too.
  CF_DEVICE void load_queries(i32 x) const {
    constexpr i32 kCopying = 32 * kPairs;
    const Head& head = pass.head(x);
    const i32 me = i32(opaque(thread_index())), row = pass.at(x).row, q_length = pass.sight.q_length;
    if (head.packed && row + kBlockQ <= q_length) {
      const u32 to = TileQ::place(me / 8, me % 8);
      const Element* q_from = head.q + ((row + me / 8) * p.q.row + me % 8 * 8);
      const Element* o_from = head.dout + ((row + me / 8) * p.dout.row + me % 8 * 8);
      load_whole_tile<TileQ, kCopying>(q_tile(x) + to, q_from, p.q.row, me);
      load_whole_tile<TileO, kCopying>(o_tile(x) + to, o_from, p.dout.row, me);
    } else {
      load_tile<TileQ, kCopying>(q_tile(x), {head.q, p.q.row, p.q.col}, row, q_length, p.head_dim, me);
      load_tile<TileO, kCopying>(o_tile(x), {head.dout, p.dout.row, p.dout.col}, row, q_length, p.head_dim_v, me);
    }
    if (me < kBlockQ / 2) cp_async_16(row_stats(x) + me * 16, head.stats + (2 * row + me * 4));
  }

  // acc = (the pair's rows of a key tile) b^T, for the step's rows of tile b.
  template <class TileB, int kDepth>
  CF_DEVICE void multiply_keys(Scores& acc, u32 keys, u32 b, const Reader<TileB, false>& read_b, i32 step_row) const {
    const u32 tile = u32(opaque(keys));
    const auto load = [&](u32(&left)[kR / 2][4], int k) {
      CF_UNROLL
      for (int t = 0; t < kR / 2; ++t) {
        if constexpr (kKeysInRegisters) {
          CF_UNROLL
          for (int n = 0; n < 4; ++n) left[t][n] = own_keys.word[k][t][n];
        } else {
          ldmatrix_x4(left[t], read_keys.block(tile, 16 * t, 16 * k));
        }
      }
    };
    multiply_by_transposed<TileB, kDepth>(acc, load, b, read_b, step_row, [](int) {});
  }

  // Pairs that positions and lengths forbid get 0; the step's queries begin at `row`.
  CF_DEVICE void select(Scores& s, i32 row) const { RowBounds::of_key(pass.sight, col()).select(s, row, 0.0f); }

  // What the first warp of a pair does with a step: weights into shared memory and into dv.
  CF_DEVICE void give_weights(Accumulator& dv, i32 x, i32 step_row, bool whole) const {
    const i32 head = pass.at(x).head, row = pass.at(x).row + step_row;
    const ScoreRules<true> rules{score_terms_of<float>(p, pass.item, head), pass.sight};
    Scores s, derivative;
    multiply_keys<TileQ, kHeadDim>(s, shared, q_tile(x), read_q, step_row);
    const u32 staged = shared + kAtAddends + pair * kAddendBytes;
    if constexpr (kMaskOrBias) {
      const AddendSource source{addends_of(p, pass.item, head), pass.sight.q_length, pass.sight.kv_length};
      source.stage<kStep, kPairRows>(staged, row, col());
    }
    if constexpr (!kPlainScores) rules.scale(s, derivative, col(), row, staged);
    const float factor = kPlainScores ? rules.terms.scale * kLog2e : kLog2e;
    const u32 lse_at = row_stats(x) + (step_row + fragment_col(0)) * 4;
    CF_UNROLL
    for (int w = 0; w < kC; w += 2) {
      float lse[2];
      ld_shared_f32x2(lse[0], lse[1], lse_at + w / 2 * 32);
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        CF_UNROLL
        for (int y = 0; y < 2; ++y) {
          s[u][w + y] = weight_from(s[u][w + y], factor, -lse[y]);
        }
      }
    }
    if (!whole) select(s, row);
    Weighted given, kept;
    Scores sent;
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kC; ++w) {
        const bool capped = kSoftcapOrAlibi && rules.terms.softcap > 0.0f;
        sent[u][w] = capped ? s[u][w] * derivative[u][w] : s[u][w];
      }
    }
    if constexpr (kDropout) {
      const Dropper dropper = dropper_of(p, pass.item, head);
      CF_UNROLL
      for (int w = 0; w < kC; w += 4) {
        CF_UNROLL
        for (int u = 0; u < kR; u += 2) {
          const Words words = dropper.words_at<true>(row + 4 * w, col() + 8 * u);
          CF_UNROLL
          for (int n = 0; n < 8; ++n) {
            const bool drops = dropper.drops(words, n / 4, n % 4);
            float& weight = s[u + n / 4][w + n % 4];
            float& signed_weight = sent[u + n / 4][w + n % 4];
            weight = drops ? 0.0f : weight;
            signed_weight = drops ? -signed_weight : signed_weight;
          }
        }
      }
    }
    round_to(given, sent);
    CF_UNROLL
    for (int n = 0; n < kStep / 16 * (kR / 2); ++n) {
      st_shared_128(weights_of(x * (kBlockQ / kStep) + step_row / kStep) + n * 512, given.word[n / (kR / 2)][n % (kR / 2)]);
    }
    barrier_sync_aligned(1 + pair, 64);      // the weights are there; those of two steps ago have been read
    if constexpr (kSoftcapOrAlibi || kDropout) round_to(kept, s);
    else kept = given;
    multiply<TileO, kStep>(dv, kept, o_tile(x), sum_o, step_row);
  }

  // What the second warp does: dA^T from them, into dk.
  CF_DEVICE void take_weights(Accumulator& dk, i32 x, i32 step_row, bool whole) const {
    Scores dp;
    multiply_keys<TileO, kHeadDimV>(dp, shared + kAtV, o_tile(x), read_o, step_row);
    const float kept_scale = kDropout ? dropout_scale<float>(p) : 1.0f;
    if (step_row == 0) publish(x - 2);
    const u32 delta_at = row_stats(x) + (kBlockQ + step_row + fragment_col(0)) * 4;
    float delta[kC];
    CF_UNROLL
    for (int w = 0; w < kC; w += 2) ld_shared_f32x2(delta[w], delta[w + 1], delta_at + w / 2 * 32);
    barrier_sync_aligned(1 + pair, 64);      // as above
    CF_UNROLL
    for (int n = 0; n < kStep / 16 * (kR / 2); ++n) {
      const int k = n / (kR / 2), t = n % (kR / 2);
      u32 words[4];
      ld_shared_128(words, weights_of(x * (kBlockQ / kStep) + step_row / kStep) + n * 512);
      CF_UNROLL
      for (int x4 = 0; x4 < 8; ++x4) {
        const int u = 2 * t + x4 / 2 % 2, w = 4 * k + x4 / 4 * 2 + x4 % 2;
        const float weight = convert<float>(Element{u16(words[x4 / 2] >> (x4 % 2 * 16))});
        float gain = dp[u][w] - delta[w];
        const bool drops = kDropout && (words[x4 / 2] >> (x4 % 2 * 16 + 15)) % 2 != 0;
        if constexpr (kDropout) gain = drops ? -delta[w] : fused(dp[u][w], kept_scale, -delta[w]);
        const float size = kDropout ? absolute(weight) : weight;
        dp[u][w] = score_gradient(size, gain);
      }
    }
    if (!whole) select(dp, pass.at(x).row + step_row);
    Weighted rounded;
    round_to(rounded, dp);
    CF_UNROLL
    for (int k = 0; k < kStep / 16; ++k) {
      CF_UNROLL
      for (int n = 0; n < 4 * (kR / 2); ++n) {
        const i32 key = pair * kPairRows + n / 4 * 16 + n % 2 * 8 + i32(lane_index()) / 4;
        const i32 chunk = (step_row + 16 * k) / 8 + n % 4 / 2;
        st_shared_32(s_tile(x) + TileS::place(key, chunk) + lane_index() % 4 * 4, rounded.word[k][n / 4][n % 4]);
      }
    }
    multiply<TileQ, kStep>(dk, rounded, q_tile(x), sum_q, step_row);
  }

  CF_DEVICE u32* turn_of(i32 x) const { return pass.head(x).turns + pass.at(x).row / kRowBlock; }

  // The warp's part of dq of tile x: dA k, added to what the blocks of earlier keys have left.
  CF_DEVICE void sum_queries(i32 x) const {
    const i32 warp = uniform(warp_index()), row = warp / kDqColParts * kDqRows, col = warp % kDqColParts * kDqCols;
    if (x < 0 || x >= pass.tiles || col >= kHeadDim) return;
    const u32 count = kOrdered ? pass.earlier(pass.at(x).row) * kPairs : 1, seen = kOrdered ? load_relaxed(turn_of(x)) : 1;
    const u32 keys_at = u32(opaque(shared)), lane = u32(opaque(lane_index()));      // registers are too dear to hold more
    const Reader<TileS, false> read_s(0, row, lane);
    const Reader<TileK, true> sum_k(0, col, lane);
    float dq[kDqRows / 8][kDqCols / 4];
    clear(dq);
    CF_UNROLL
    for (int k = 0; k < kBlockKV / 16; ++k) {
      u32 left[kDqRows / 16][4];
      CF_UNROLL
      for (int t = 0; t < kDqRows / 16; ++t) ldmatrix_x4_trans(left[t], read_s.block(s_tile(x), 16 * k, 16 * t));
      CF_UNROLL
      for (int n = 0; n < kDqCols / 8; n += 2) {
        u32 right[4];
        ldmatrix_x4_trans(right, sum_k.block(keys_at, 16 * k, 8 * n));
        CF_UNROLL
        for (int t = 0; t < kDqRows / 16; ++t) mma_pair(dq, t, n, left[t], right);
      }
    }
    if (seen < count) wait_for_count(turn_of(x), count);
    warp_barrier();          // no lane adds before its turn
    float* dq_to = pass.head(x).dq + (i64((pass.at(x).row + row) / kRowBlock) * kRowBlock * kHeadDim +
                                      (col / 8 * 128 + row % kRowBlock / 16 * 32 + i32(lane_index())) * 4);
    const auto each = [&](auto add) {
      CF_UNROLL
      for (int t = 0; t < kDqRows / 16; ++t) {
        CF_UNROLL
        for (int n = 0; n < kDqCols / 8; ++n) {
          if (kHeadDim % kDqCols != 0 && col + 8 * n >= kHeadDim) break;
          float* to = dq_to + n * 512 + t * 128;
          add(to, dq[2 * t][2 * n], dq[2 * t][2 * n + 1], dq[2 * t + 1][2 * n], dq[2 * t + 1][2 * n + 1]);
        }
      }
    };
    if (count == 0) each(st_global_x4);
    else each(red_add_x4);
  }

  // Says that the pair has added its part of tile x. The first warp did so before the last barrier of the block.
  CF_DEVICE void publish(i32 x) const {
    if (!kOrdered || x < 0 || x >= pass.tiles) return;
    warp_barrier();          // all lanes have added
    if (lane_index() == 0) red_release_increment(turn_of(x));
  }

  // Walks all queries; `acc` is dv in the first warp of a pair and dk in the second.
  CF_DEVICE void walk(Accumulator& acc, bool first_of_pair) {
    CF_UNROLL_1
    for (u32 loop = 0; loop < points(p.loop); ++loop) {
      block_barrier();        // nobody reads the pass, the keys and the tiles of the item before any more
      if (thread_index() == 0) pass.begin(p, loop);
      block_barrier();        // the pass is there
      if (pass.tiles == 0) continue;
      load_keys();
      CF_UNROLL_1
      for (i32 x = -1; x <= pass.tiles + 1; ++x) {
        cp_async_wait_group<0>();
        block_barrier();        // tile x is there for everyone, and dA^T of the one before; nobody reads that one any more
        if (first_of_pair && x + 1 < pass.tiles) load_queries(x + 1);
        cp_async_commit_group();
        if (kKeysInRegisters && x == 0) load_operand(own_keys, first_of_pair ? shared : shared + kAtV, read_keys, 0);
        if (!first_of_pair) sum_queries(x - 2);
        if (thread_index() == kThreads / 2 && x + 2 < pass.tiles) pass.begin_tile(p, x + 2);
        if (x >= 0 && x < pass.tiles) {
          const i32 row = pass.at(x).row;
          const bool whole = pass.whole[pair].covers(row, smaller(row + kBlockQ, pass.sight.q_length));
          CF_UNROLL_1
          for (i32 step_row = 0; step_row < kBlockQ; step_row += kStep) {
            if (first_of_pair) give_weights(acc, x, step_row, whole);
            else take_weights(acc, x, step_row, whole);
          }
        } else if (!first_of_pair) {
          publish(x - 2);
        }
        if (first_of_pair) sum_queries(x - 1);
      }
    }
  }

  // Writes dv or dk, times `factor`, through the rows of K or V that only the warp itself reads.
  CF_DEVICE void store(Accumulator& acc, float factor, const Target& target, u32 staging) const {
    if (target.base == nullptr) return;
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kWideDim / 4; ++w) acc[u][w] *= factor;
    }
    store_tile<TileK>(acc, target, col(), staging, pair * kPairRows);
  }

  CF_DEVICE void finish(Accumulator& acc, bool first_of_pair) const {
    const Item item = item_at(p, pass.work.own, 0);
    const bool accumulate = p.accumulate != 0;
    block_barrier();         // nobody reads the keys any more
    const Target dv = target_of(p.call.dv, p.dv, p.dv_kind, item, pass.work.head, p.seqlen_k, p.head_dim_v, accumulate);
    const Target dk = target_of(p.call.dk, p.dk, p.dk_kind, item, pass.work.head, p.seqlen_k, p.head_dim, accumulate);
    if (first_of_pair) store(acc, kDropout ? dropout_scale<float>(p) : 1.0f, dv, shared);
    else store(acc, float(p.call.scale), dk, shared + kAtV);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_backward(const Params p) {
  u8* const storage = &shared_storage<u8>();
  const u32 shared = tile_address(shared_address(storage));
  Pass& pass = *reinterpret_cast<Pass*>(storage + (shared - shared_address(storage)) + kAtPass);
  if (thread_index() == 0) {
    // Blocks that this one waits for have lower numbers, and run.
    const u32 block = kOrdered ? increment(static_cast<u32*>(p.call.turns)) : block_index();
    pass.work = place_of(p, block);
  }
  const i32 warp = uniform(warp_index());
  Backward backward{p, pass, shared, warp % kPairs};
  Accumulator acc;
  clear(acc);
  backward.walk(acc, warp < kPairs);
  backward.finish(acc, warp < kPairs);
}
