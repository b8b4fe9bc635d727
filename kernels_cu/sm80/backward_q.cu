// Backward on tensor cores by mma.sync, second half: dq of one tile of queries, and what the ALiBi slopes' gradient needs.
//
//   P = exp(S - lse)     dS = P * (r * dO v^T - delta')     dA = dS * d(c)/d(a)     dq = scale * sum of dA k over keys
//   slope_rows = -sum of |i + offset - j| dS over keys
//
// The forward's layout: a block owns kBlockQ queries of one head, a warp some of their rows and all columns of dq; keys
// come in tiles of kBlockKV and are taken in steps of kStep. Where q was broadcast over leading axes the block walks all
// the items that shared it, in order.
//
//   key tile j   | wait for K, V of j; start copies of j + 1
//     each step  | S = Q K^T     dP = dO V^T among P = exp(S - lse)     dA     dq += dA K
//
// Shared memory: Q (later the staging of dq), dO, two tiles of K and of V, addends.
#include "attn/schedule.cuh"
#include "sm80/store.cuh"
#include "sm80/weights.cuh"

constexpr i32 kWarpRows = kBlockQ / kWarps, kR = kWarpRows / 8, kC = kStep / 4;
static_assert(kBlockQ % (16 * kWarps) == 0 && kBlockKV % kStep == 0 && kStep % 16 == 0, "whole fragments");

using TileQ = Tile<kBlockQ, kHeadDim>;
using TileO = Tile<kBlockQ, kHeadDimV>;
using TileK = Tile<kBlockKV, kHeadDim>;
using TileV = Tile<kBlockKV, kHeadDimV>;
using Scores = float[kR][kC];

// Offsets in shared memory.
constexpr i32 kAtO = TileQ::kBytes, kAtK = kAtO + TileO::kBytes, kAtV = kAtK + 2 * TileK::kBytes;
constexpr i32 kAtAddends = kAtV + 2 * TileV::kBytes, kAddendBytes = kMaskOrBias ? kWarpRows * Staging<kStep>::kRow * 4 : 0;
constexpr i32 kAtPass = kAtAddends + kWarps * kAddendBytes, kPassBytes = 256, kUsedBytes = kAtPass + kPassBytes;
static_assert(kUsedBytes + 128 == kSharedBytes, "the launch gives as much, and room to align");

// One batch item: where its keys lie and which of them the block's queries see. It lies in shared memory: registers are too
// dear to hold it.
struct Pass {
  Item item;
  ScoreRules<false> rules;
  ElementRows k, v;
  Interval block_keys;
};
static_assert(sizeof(Pass) <= kPassBytes, "there is room");

struct Backward {
  const Params& p;
  Pass& pass;
  i32 head, block_row, row, tile_row;      // first query of the block, of the warp; its place in the tile
  u32 shared;
  Reader<TileQ, true> read_q{tile_row};
  Reader<TileO, true> read_o{tile_row};
  Reader<TileK, false> read_k;
  Reader<TileV, false> read_v;
  Reader<TileK, true> sum_k;
  float negative_lse[kR], delta[kR], slope[kR], dq[kR][kHeadDim / 4];      // lse in base 2

  CF_DEVICE u32 k_tile(i32 tile) const { return shared + kAtK + u32(tile) % 2u * TileK::kBytes; }
  CF_DEVICE u32 v_tile(i32 tile) const { return shared + kAtV + u32(tile) % 2u * TileV::kBytes; }

  CF_DEVICE void begin_pass(u32 own, u32 loop) const {
    const i32 kv_head = head / (p.heads_q / p.heads_kv);
    const Item item = item_at(p, own, loop);
    const ScoreRules<false> rules = score_rules_of<false>(p, item, head);
    pass = {item, rules, rows_of<const Element>(p.call.k, p.k, item, kv_head),
            rows_of<const Element>(p.call.v, p.v, item, kv_head), rules.sight.keys_of_some(block_row, block_row + kBlockQ)};
  }

  CF_DEVICE void load_queries() {
    const ElementRows q = rows_of<const Element>(p.call.q, p.q, pass.item, head);
    const ElementRows o = rows_of<const Element>(p.call.dout, p.dout, pass.item, head);
    const i32 q_length = pass.rules.sight.q_length;
    load_tile<TileQ>(shared, q, block_row, q_length, p.head_dim, thread_index());
    load_tile<TileO>(shared + kAtO, o, block_row, q_length, p.head_dim_v, thread_index());
    const float* row_delta = static_cast<const float*>(p.call.row_delta) + row_number(p, pass.item, head, 0);
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      const i32 i = row + fragment_row(u);
      negative_lse[u] = negative_lse_of(p, pass.item, head, i, q_length);
      delta[u] = i < q_length ? row_delta[i] : 0.0f;
    }
  }

  CF_DEVICE void load_keys(i32 tile) const {
    if (tile * kBlockKV >= pass.block_keys.stop) return;
    const i32 kv_length = pass.rules.sight.kv_length;
    load_tile<TileK>(k_tile(tile), pass.k, tile * kBlockKV, kv_length, p.head_dim, thread_index());
    load_tile<TileV>(v_tile(tile), pass.v, tile * kBlockKV, kv_length, p.head_dim_v, thread_index());
  }

  CF_DEVICE void next_tile(i32 tile) const {
    cp_async_wait_group<0>();
    block_barrier();        // tile j is there for everyone; nobody reads tile j - 1 any more
    load_keys(tile + 1);
    cp_async_commit_group();
  }

  // acc = (the warp's rows of tile a) b^T, for the step's rows of tile b.
  template <class TileA, class TileB, class Meanwhile>
  CF_DEVICE void multiply_queries(Scores& acc, u32 a, const Reader<TileA, true>& read_a, u32 b,
                                  const Reader<TileB, false>& read_b, i32 step_row, Meanwhile meanwhile) const {
    const auto load = [&](u32(&left)[kR / 2][4], int k) {
      CF_UNROLL
      for (int t = 0; t < kR / 2; ++t) ldmatrix_x4(left[t], read_a.block(a, 16 * t, 16 * k));
    };
    multiply_by_transposed<TileB, TileB::kColCount>(acc, load, b, read_b, step_row, meanwhile);
  }

  CF_DEVICE void step(i32 col, const Interval& whole) {
    const u32 staged = shared + kAtAddends + warp_index() * kAddendBytes;
    if constexpr (kMaskOrBias) {
      const AddendSource source{addends_of(p, pass.item, head), pass.rules.sight.q_length, pass.rules.sight.kv_length};
      if (!source.stage<kWarpRows, kStep>(staged, row, col)) return;
    }
    const i32 tile = col / kBlockKV, step_row = col % kBlockKV;
    Scores s, derivative, dp;
    multiply_queries(s, shared, read_q, k_tile(tile), read_k, step_row, [](int) {});
    if constexpr (!kPlainScores) pass.rules.scale(s, derivative, row, col, staged);
    const float factor = kPlainScores ? pass.rules.terms.scale * kLog2e : kLog2e;
    const auto weigh = [&](int k) {
      constexpr int kAll = kR * kC, kShare = ceil_div(kAll, kHeadDimV / 16);
      CF_UNROLL
      for (int m = 0; m < kShare; ++m) {
        const int n = k * kShare + m;
        if (n < kAll) s[n % kR][n / kR] = weight_from(s[n % kR][n / kR], factor, negative_lse[n % kR]);
      }
    };
    multiply_queries(dp, shared + kAtO, read_o, v_tile(tile), read_v, step_row, weigh);
    score_gradients(s, dp, delta, dropper_of(p, pass.item, head), dropout_scale<float>(p), row, col);
    if (!whole.covers(col, col + kStep)) RowBounds::of_query(pass.rules.sight, row).select(s, col, 0.0f);
    if (kSoftcapOrAlibi && p.call.slope_rows != nullptr) {
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        CF_UNROLL
        for (int w = 0; w < kC; ++w) slope[u] = fused(-pass.rules.distance(row, col, u, w), s[u][w], slope[u]);
      }
    }
    if (kSoftcapOrAlibi && pass.rules.terms.softcap > 0.0f) {
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        CF_UNROLL
        for (int w = 0; w < kC; ++w) s[u][w] *= derivative[u][w];
      }
    }
    Operand<kR / 2, kStep> rounded;
    round_to(rounded, s);
    multiply<TileK, kStep>(dq, rounded, k_tile(tile), sum_k, step_row);
  }

  CF_DEVICE void walk(u32 own) {
    CF_UNROLL_1
    for (u32 loop = 0; loop < points(p.loop); ++loop) {
      block_barrier();      // nobody reads the pass and the tiles of the item before any more
      if (thread_index() == 0) begin_pass(own, loop);
      block_barrier();      // the pass is there
      const Visibility& sight = pass.rules.sight;
      const Interval keys = sight.keys_of_some(row, row + kWarpRows);
      const Interval whole = sight.keys_of_all(row, smaller(row + kWarpRows, sight.q_length));
      const i32 first = pass.block_keys.start / kBlockKV, last = ceil_div(pass.block_keys.stop, kBlockKV);
      if (first < last) {
        load_queries();
        load_keys(first);
        cp_async_commit_group();
      }
      CF_UNROLL_1
      for (i32 col = first * kBlockKV; col < last * kBlockKV; col += kStep) {
        if (col % kBlockKV == 0) next_tile(col / kBlockKV);
        if (col + kStep > keys.start && col < keys.stop) step(col, whole);
      }
      store_slopes(pass.item);
    }
  }

  // The slopes' sums of one item, which start again at 0.
  CF_DEVICE void store_slopes(const Item& item) {
    if (!kSoftcapOrAlibi || p.call.slope_rows == nullptr) return;
    float* to = static_cast<float*>(p.call.slope_rows) + row_number(p, item, head, 0);
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      const float sum = QuadLanes::sum(slope[u]);
      if (lane_index() % 4 == 0 && row + fragment_row(u) < p.seqlen_q) to[row + fragment_row(u)] = sum;
      slope[u] = 0.0f;
    }
  }

  CF_DEVICE void finish(const Item& item) {
    if (p.call.dq == nullptr) return;
    const float scale = float(p.call.scale);
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kHeadDim / 4; ++w) dq[u][w] *= scale;
    }
    const Target target = target_of(p.call.dq, p.dq, p.dq_kind, item, head, p.seqlen_q, p.head_dim, p.accumulate != 0);
    store_tile<TileQ>(dq, target, row, shared, tile_row);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_backward_q(const Params p) {
  const TileWork work = tile_work(block_index(), ceil_div(p.seqlen_q, kBlockQ), 1, p.heads_q, p.call.right < kUnbounded);
  const i32 block_row = work.tile * kBlockQ, tile_row = i32(warp_index()) * kWarpRows;
  u8* const storage = &shared_storage<u8>();
  const u32 shared = tile_address(shared_address(storage));
  Pass& pass = *reinterpret_cast<Pass*>(storage + (shared - shared_address(storage)) + kAtPass);
  Backward backward{p, pass, work.head, block_row, block_row + tile_row, tile_row, shared};
  CF_UNROLL
  for (int u = 0; u < kR; ++u) backward.slope[u] = 0.0f;
  clear(backward.dq);
  backward.walk(work.own);
  backward.finish(item_at(p, work.own, 0));
}
