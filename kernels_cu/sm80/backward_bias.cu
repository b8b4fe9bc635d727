// Backward on tensor cores by mma.sync: the gradient of a bias, dS summed over whatever the bias was broadcast over.
//
// A block owns a tile of the bias (attn/bias_grid.cuh) and recomputes dS for every (batch item, query head, query tile,
// key tile) that fell on it, in order; long walks are cut into p.splits runs, which prepost/sum_partials.cu adds in
// order. Nothing is held per element of the score matrix but the bias itself. A warp has some of the tile's rows and all
// of its columns, in steps of kStep.
//
//   tile       | load Q dO K V |   each step: S = Q K^T   dP = dO V^T   P = exp(S - lse)   sum += P * (r * dP - delta')
//   barriers   #               #
//
// Shared memory: Q, dO, K, V, addends; at the end the sums.
#include "attn/bias_grid.cuh"
#include "sm80/weights.cuh"

constexpr i32 kWarpRows = kBlockQ / kWarps, kR = kWarpRows / 8, kC = kStep / 4, kSteps = kBlockKV / kStep;
constexpr i32 kSumRow = kBlockKV + 8;
static_assert(kBlockQ % (16 * kWarps) == 0 && kBlockKV % kStep == 0 && kStep % 16 == 0, "whole fragments");

using TileQ = Tile<kBlockQ, kHeadDim>;
using TileO = Tile<kBlockQ, kHeadDimV>;
using TileK = Tile<kBlockKV, kHeadDim>;
using TileV = Tile<kBlockKV, kHeadDimV>;
using Scores = float[kR][kC];

// Offsets in shared memory.
constexpr i32 kAtO = TileQ::kBytes, kAtK = kAtO + TileO::kBytes, kAtV = kAtK + TileK::kBytes;
constexpr i32 kAtAddends = kAtV + TileV::kBytes, kAddendBytes = kMaskOrBias ? kWarpRows * Staging<kStep>::kRow * 4 : 0;
constexpr i32 kUsedBytes = larger(kAtAddends + kWarps * kAddendBytes, kBlockQ * kSumRow * 4);
static_assert(kUsedBytes + 128 == kSharedBytes, "the launch gives as much, and room to align");

struct Backward {
  const Params& p;
  u32 shared;
  i32 tile_row;
  Reader<TileQ, true> read_q{tile_row};
  Reader<TileO, true> read_o{tile_row};
  Reader<TileK, false> read_k;
  Reader<TileV, false> read_v;
  float sum[kSteps][kR][kC];

  template <class TileA, class TileB>
  CF_DEVICE void multiply_queries(Scores& acc, u32 a, const Reader<TileA, true>& read_a, u32 b,
                                  const Reader<TileB, false>& read_b, i32 step_row) const {
    const auto load = [&](u32(&left)[kR / 2][4], int k) {
      CF_UNROLL
      for (int t = 0; t < kR / 2; ++t) ldmatrix_x4(left[t], read_a.block(a, 16 * t, 16 * k));
    };
    multiply_by_transposed<TileB, TileB::kColCount>(acc, load, b, read_b, step_row, [](int) {});
  }

  CF_DEVICE void load(const Item& item, i32 head, const Visibility& sight, i32 row, i32 col) const {
    const i32 kv_head = head / (p.heads_q / p.heads_kv), me = thread_index();
    const ElementRows q = rows_of<const Element>(p.call.q, p.q, item, head);
    const ElementRows k = rows_of<const Element>(p.call.k, p.k, item, kv_head);
    const ElementRows o = rows_of<const Element>(p.call.dout, p.dout, item, head);
    const ElementRows v = rows_of<const Element>(p.call.v, p.v, item, kv_head);
    block_barrier();       // the tile before has been read
    load_tile<TileQ>(shared, q, row, sight.q_length, p.head_dim, me);
    load_tile<TileO>(shared + kAtO, o, row, sight.q_length, p.head_dim_v, me);
    load_tile<TileK>(shared + kAtK, k, col, sight.kv_length, p.head_dim, me);
    load_tile<TileV>(shared + kAtV, v, col, sight.kv_length, p.head_dim_v, me);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    block_barrier();       // the tile is there
  }

  // Adds dS of the tile at (row, col) of one score matrix; the warp's rows begin at row + tile_row.
  CF_DEVICE void add(const Item& item, i32 head, i32 row, i32 col) {
    const ScoreRules<false> rules = score_rules_of<false>(p, item, head);
    const Interval some = rules.sight.keys_of_some(row, row + kBlockQ);
    if (some.stop <= col || col + kBlockKV <= some.start) return;
    load(item, head, rules.sight, row, col);
    const i32 own_row = row + tile_row, q_length = rules.sight.q_length;
    const float* row_delta = static_cast<const float*>(p.call.row_delta) + row_number(p, item, head, 0);
    float negative_lse[kR], delta[kR];
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      const i32 i = own_row + fragment_row(u);
      negative_lse[u] = negative_lse_of(p, item, head, i, q_length);
      delta[u] = i < q_length ? row_delta[i] : 0.0f;
    }
    // Nothing is whole where rows are past the length: their addends are read, whatever they are, and selected away.
    const Interval whole = rules.sight.keys_of_all(own_row, own_row + kWarpRows);
    CF_UNROLL
    for (int n = 0; n < kSteps; ++n) {
      Scores s, unused, dp;
      const i32 at = col + n * kStep;
      multiply_queries(s, shared, read_q, shared + kAtK, read_k, n * kStep);
      multiply_queries(dp, shared + kAtO, read_o, shared + kAtV, read_v, n * kStep);
      const u32 staged = shared + kAtAddends + warp_index() * kAddendBytes;
      if constexpr (kMaskOrBias) {
        const AddendSource source{addends_of(p, item, head), p.seqlen_q, p.seqlen_k};
        source.stage<kWarpRows, kStep>(staged, own_row, at);
      }
      if constexpr (!kPlainScores) rules.scale(s, unused, own_row, at, staged);
      const float factor = kPlainScores ? rules.terms.scale * kLog2e : kLog2e;
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        CF_UNROLL
        for (int w = 0; w < kC; ++w) s[u][w] = weight_from(s[u][w], factor, negative_lse[u]);
      }
      score_gradients(s, dp, delta, dropper_of(p, item, head), dropout_scale<float>(p), own_row, at);
      if (!whole.covers(at, at + kStep)) RowBounds::of_query(rules.sight, own_row).select(s, at, 0.0f);
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        CF_UNROLL
        for (int w = 0; w < kC; ++w) sum[n][u][w] += s[u][w];
      }
    }
  }

  // The tile's sums in shared memory; along an axis that the bias lacks, place 0 gets the sum over all, in order.
  CF_DEVICE void fold(float* sums) const {
    block_barrier();       // the last tile has been read
    CF_UNROLL
    for (int n = 0; n < kSteps; ++n) {
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        CF_UNROLL
        for (int w = 0; w < kC; ++w) sums[(tile_row + fragment_row(u)) * kSumRow + n * kStep + fragment_col(w)] = sum[n][u][w];
      }
    }
    block_barrier();       // the sums are there
    if (!p.own_rows) {
      for (i32 j = thread_index(); j < kBlockKV; j += kThreads) {
        for (i32 i = 1; i < kBlockQ; ++i) sums[j] += sums[i * kSumRow + j];
      }
      block_barrier();     // row 0 is there
    }
    if (!p.own_cols) {
      for (i32 i = thread_index(); i < kBlockQ; i += kThreads) {
        for (i32 j = 1; j < kBlockKV; ++j) sums[i * kSumRow] += sums[i * kSumRow + j];
      }
      block_barrier();     // column 0 is there
    }
  }

  // The folded tile to the gradient, or to the partial sums of this run.
  CF_DEVICE void store(const float* sums, const BiasGrid& grid, const TileWork& owner, i32 row, i32 col) const {
    const Item item = item_at(p, owner.own, 0);
    const i64 first = (i64(owner.own) * grid.heads + owner.head) * grid.rows;
    float* partials = static_cast<float*>(p.call.partials) + owner.split * grid.elements(p);
    const i32 rows = p.own_rows ? kBlockQ : 1, cols = p.own_cols ? kBlockKV : 1;
    for (i32 n = thread_index(); n < rows * cols; n += kThreads) {
      const i32 r = n / cols, c = n % cols, i = row + r, j = col + c;
      if (i >= grid.rows || j >= grid.cols) continue;
      if (p.splits > 1) partials[(first + i) * grid.cols + j] = sums[r * kSumRow + c];
      else store_bias_gradient(p, item, owner.head, i, j, sums[r * kSumRow + c]);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_backward_bias(const Params p) {
  const BiasGrid grid = bias_grid(p, kBlockQ, kBlockKV);
  const TileWork owner = tile_work(block_index(), grid.tile_rows * grid.tile_cols, p.splits, grid.heads, false);
  const i32 row = owner.tile / grid.tile_cols * kBlockQ, col = owner.tile % grid.tile_cols * kBlockKV;
  const i64 start = grid.walk(p) * owner.split / p.splits, stop = grid.walk(p) * (owner.split + 1) / p.splits;
  Backward backward{p, tile_address(shared_address(&shared_storage<u8>())), i32(warp_index()) * (kBlockQ / kWarps)};
  CF_UNROLL
  for (int n = 0; n < kSteps; ++n) clear(backward.sum[n]);
  CF_UNROLL_1
  for (i64 number = start; number < stop; ++number) {
    const i32 walk_col = i32(number % grid.walk_cols), walk_row = i32(number / grid.walk_cols % grid.walk_rows);
    const i64 matrix = number / grid.walk_cols / grid.walk_rows;
    const Item item = item_at(p, owner.own, u32(matrix / grid.walk_heads));
    backward.add(item, owner.head + i32(matrix % grid.walk_heads), row + walk_row * kBlockQ, col + walk_col * kBlockKV);
  }
  float* sums = &shared_storage<float>();
  backward.fold(sums);
  backward.store(sums, grid, owner, row, col);
}
