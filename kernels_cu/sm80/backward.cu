// Backward on tensor cores by mma.sync in one kernel: dk and dv of one tile of keys, and its share of every dq (Dao 2023,
// Algorithm 2, turned).
//
//   dq += dA k, in float, scaled and rounded by prepost/finish_queries.cu
//
// Pairs of warps work on kPairRows keys each (sm80/backward_pair.cuh); the second warps leave dA^T in shared memory, and each
// warp sums a part of dq over all keys of the block. Queries come in tiles of kBlockQ from the last to the first and are
// taken in steps of kStep; all query heads of the group and all items that share the keys follow one another, in order.
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
// With kLongTiles a pair counts at the end of tile x, when its second warp would wait for the first; and under a causal mask
// blocks start from the last keys and queries come upward. Then block n reaches a query tile right after block n + 1 did.
// Downward all blocks of a head begin with its last queries at once, line up, and are done at once: the next ones line up again.
//
// Ladder on the same problem, main kernel, ms: two kernels 5.67 / 10.14; one, everything of a tile worked out by every warp
// 4.99 / 6.31 (in no order); one thread works it out for all 4.57; dq after the tile's steps 4.23 / 4.75; in the second
// warps before them 3.91 / 4.52. In order: 6.50 / 7.80 at first; counts looked at before the products and heads taking
// turns 4.53 / 5.17. What is left of the price of order is the fence before a count, not the wait for one (H200, 2026-11-29,
// D 128 / D 64): in order 4.24 / 4.86; nobody waits 4.16 / 5.03; no fence, nobody waits 3.96 / 4.48; in no order 3.95 / 4.40.
// Turns of four tiles handed on at once cost fewer fences and more waits: 4.63 / 5.15, under a causal mask 1.7 times as much.
// At D 256 a step of 64 queries instead of 32: 6.08 to 5.67, in no order 5.63 to 5.33.
//
// Whole backward at D 256, ms (2026-11-30, L 1024 / 4096, then the same under a causal mask / L 16384): counting in the middle
// of a tile, queries downward 1.602 / 5.743, 1.084 / 3.556 / 13.53; counting at the end 1.567 / 5.585, 1.107 / 3.728 / 14.23;
// then queries upward 0.960 / 3.006 / 11.24; in no order 1.543 / 5.443, 0.916 / 2.797 / 10.42. One count a block instead of
// one a pair, a tile later: 1.581 / 5.683. All of this is slower at D 128 (causal 2.333 to 2.558) and no faster at D 64.
//
// With dropout, whole backward, L 4096, D 128 / D 64: 6.14 / 8.70; one branch on alignment for all groups of a step 5.66 /
// 7.87; masks of rounded pairs instead of weights twice 5.91 (steps of 32), then steps of 64 queries and, at D 64, keys in
// registers 5.59 / 7.39. At D 256 one kernel instead of two: 10.48 to 5.95. The first warps worked out all that is dropped, and
// left it as signs of weights; half of it in each warp, left as flags (2026-11-30, D 128 / 64 / 256): 5.69 / 7.30 / 5.94 to
// 5.23 / 6.52 / 5.86, in no order 5.51 / 6.88 / 6.00 to 4.81 / 6.04 / 5.51; without dropout 4.35 / 4.95 / 5.73 and 4.13 / 4.61 /
// 5.23. A warp that holds its own flags until the pair meets spills 12 bytes in no order at D 128, and takes 5.00; tiles of 64
// queries at D 64, with flags beside V instead of in its place, 7.38 and 6.71.
//
// Shared memory: that of the pairs, three tiles of dA^T.
#include "sm80/backward_pair.cuh"

// A warp's part of the dq of a query tile.
constexpr i32 kDqRows = smaller(32, kBlockQ / 2), kDqRowParts = kBlockQ / kDqRows, kDqColParts = kWarps / kDqRowParts;
constexpr i32 kDqLeast = ceil_div(kHeadDim, kDqColParts), kDqCols = kDqLeast <= 16 ? 16 : kDqLeast <= 32 ? 32 : 64;
static_assert(kDqCols * kDqColParts >= kHeadDim, "the warps' parts cover it, and none crosses the edge of a panel");
static_assert(kBlockQ % kRowBlock == 0 && kDqRows % 16 == 0, "whole blocks of rows, whole fragments");

using TileS = Tile<kBlockKV, kBlockQ>;     // dA^T
constexpr i32 kUsedBytes = kPairsEnd + 3 * TileS::kBytes;
static_assert(kUsedBytes + 128 == kSharedBytes && kPairsEnd % 128 == 0, "the launch gives as much, and room to align");

struct Backward : Pair {
  CF_DEVICE u32 s_tile(i32 x) const { return shared + kPairsEnd + u32(x) % 3u * TileS::kBytes; }

  CF_DEVICE void load_stats(i32 x) const {
    const i32 me = thread_index();
    if (me < kBlockQ / 2) cp_async_16(row_stats(x) + me * 16, pass.head(x).stats + (2 * pass.at(x).row + me * 4));
  }

  // dA^T of a step goes where all warps find it.
  CF_DEVICE void leave(const Weighted& rounded, i32 x, i32 step_row) const {
    CF_UNROLL
    for (int k = 0; k < kStep / 16; ++k) {
      CF_UNROLL
      for (int n = 0; n < 4 * (kR / 2); ++n) {
        const i32 key = pair * kPairRows + n / 4 * 16 + n % 2 * 8 + i32(lane_index()) / 4;
        const i32 chunk = (step_row + 16 * k) / 8 + n % 4 / 2;
        st_shared_32(s_tile(x) + TileS::place(key, chunk) + lane_index() % 4 * 4, rounded.word[k][n / 4][n % 4]);
      }
    }
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

  CF_DEVICE void take_step(Accumulator& dk, i32 x, i32 step_row, bool whole) const {
    const auto meanwhile = [&] {
      if (!kLongTiles && step_row == 0) publish(x - 2);
    };
    take_weights(dk, x, step_row, whole, meanwhile, [&](const Weighted& rounded) { leave(rounded, x, step_row); });
  }

  // Walks all queries; `acc` is dv in the first warp of a pair and dk in the second.
  CF_DEVICE void walk(Accumulator& acc, bool first_of_pair) {
    CF_UNROLL_1
    for (u32 loop = 0; loop < points(p.loop); ++loop) {
      block_barrier();        // nobody reads the pass, the keys and the tiles of the item before any more
      if (thread_index() == 0) pass.begin(p, loop);
      block_barrier();        // the pass is there
      if (pass.tiles == 0) continue;
      begin_keys();
      CF_UNROLL_1
      for (i32 x = -1; x <= pass.tiles + 1; ++x) {
        cp_async_wait_group<0>();
        block_barrier();        // tile x is there for everyone, and dA^T of the one before; nobody reads that one any more
        // The second warps will wait for their adds to be seen, and would wait for their copies, too.
        if (first_of_pair && x + 1 < pass.tiles) load_queries(x + 1), load_stats(x + 1);
        cp_async_commit_group();
        if (kKeysInRegisters && x == 0) hold_keys(first_of_pair);
        if (!first_of_pair) sum_queries(x - 2);
        if (thread_index() == kThreads / 2 && x + 2 < pass.tiles) pass.begin_tile(p, x + 2);
        if (x >= 0 && x < pass.tiles) {
          const bool whole = sees_whole(x);
          CF_UNROLL_1
          for (i32 step_row = 0; step_row < kBlockQ; step_row += kStep) {
            if (first_of_pair) give_weights(acc, x, step_row, whole);
            else take_step(acc, x, step_row, whole);
          }
        } else if (!kLongTiles && !first_of_pair) {
          publish(x - 2);
        }
        if (first_of_pair) sum_queries(x - 1);
        else if (kLongTiles) publish(x - 2);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_backward(const Params p) {
  u8* const storage = &shared_storage<u8>();
  const u32 shared = tile_address(shared_address(storage));
  Pass& pass = *reinterpret_cast<Pass*>(storage + (shared - shared_address(storage)) + kAtPass);
  if (thread_index() == 0) {
    // Blocks that this one waits for have lower numbers, and run.
    const u32 block = kOrdered ? increment(static_cast<u32*>(p.call.turns)) : block_index();
    pass.turned = kOrdered && p.call.right < kUnbounded;
    pass.work = place_of(p, block, pass.upward());
  }
  const i32 warp = uniform(warp_index());
  Backward backward{{p, pass, shared, warp % kPairs}};
  Accumulator acc;
  clear(acc);
  backward.walk(acc, warp < kPairs);
  backward.finish(acc, warp < kPairs);
}
