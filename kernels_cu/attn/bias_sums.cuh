// Sums of dS as a block's warps hold them, on their way to the gradient of a bias or to the partial sums of a run.
//
// Warp n has rows from kRows * 8 * (n % kRowWarps) and columns from kCols * 4 * (n / kRowWarps) of the owner's tile; entry
// [u][w] of its lane l is row 8 u + l / 4, column 8 (w / 2) + 2 (l % 4) + w % 2 of these.
#pragma once
#include "attn/bias_grid.cuh"
#include "core/ptx_sm80.cuh"
#include "core/block.cuh"
#include "core/warp.cuh"

// Where an owner's sums go: element (row, col) of its matrix.
struct BiasTarget {
  const Params& p;
  BiasGrid grid;
  TileWork work;

  CF_DEVICE BiasTarget(const Params& params, u32 owner) : p(params), grid(bias_grid(p, kBlockQ, kBlockKV)) {
    work = tile_work(owner, grid.tile_rows * grid.tile_cols, p.splits, grid.heads, false);
  }
  CF_DEVICE i32 row() const { return work.tile / grid.tile_cols * kBlockQ; }
  CF_DEVICE i32 col() const { return work.tile % grid.tile_cols * kBlockKV; }

  // The run's partial sums of the matrix, in C order.
  CF_DEVICE Score* partials() const {
    const i64 matrix = i64(work.own) * grid.heads + work.head;
    return static_cast<Score*>(p.call.partials) + work.split * grid.elements(p) + matrix * grid.rows * grid.cols;
  }
};

template <int kRows, int kCols, int kRowWarps, int kSumThreads> struct BiasSums {
  Score value[kRows][kCols];

  CF_DEVICE void clear() {
    CF_UNROLL
    for (int u = 0; u < kRows; ++u) {
      CF_UNROLL
      for (int w = 0; w < kCols; ++w) value[u][w] = Score(0);
    }
  }

  static CF_DEVICE i32 row() { return i32(warp_index()) % kRowWarps * kRows * 8; }
  static CF_DEVICE i32 col() { return i32(warp_index()) / kRowWarps * kCols * 4; }

  // Along an axis that the bias lacks, row or column 0 of the tile gets the sum over all: within the warp, then warp by
  // warp through `own`, which lies `apart` numbers behind that of the warp before. All kSumThreads call it.
  CF_DEVICE void fold(const Params& p, Score* own, i32 apart) {
    if (!p.own_rows) {
      CF_UNROLL
      for (int w = 0; w < kCols; ++w) {
        CF_UNROLL
        for (int u = 1; u < kRows; ++u) value[0][w] += value[u][w];
        CF_UNROLL
        for (u32 lanes = 4; lanes < 32; lanes *= 2) value[0][w] += shuffle_xor(value[0][w], lanes);
      }
      add_warps(value[0], own, apart, row() == 0 ? kRowWarps : 0);
    }
    if (!p.own_cols) {
      Score first[kRows];
      CF_UNROLL
      for (int u = 0; u < kRows; ++u) {
        first[u] = Score(0);
        CF_UNROLL
        for (int w = 0; w < kCols; ++w) first[u] += value[u][w];
        first[u] += shuffle_xor(first[u], 1);
        first[u] += shuffle_xor(first[u], 2);
      }
      add_warps(first, own, kRowWarps * apart, col() == 0 ? kSumThreads / 32 / kRowWarps : 0);
      CF_UNROLL
      for (int u = 0; u < kRows; ++u) value[u][0] = first[u];
    }
  }

  // x becomes the sum of x over `count` warps from this one on, lane by lane.
  template <int kCount> static CF_DEVICE void add_warps(Score (&x)[kCount], Score* own, i32 apart, i32 count) {
    barrier_sync_aligned(1, kSumThreads);      // nobody reads what lay there before
    CF_UNROLL
    for (int n = 0; n < kCount; ++n) own[n * 32 + lane_index()] = x[n];
    barrier_sync_aligned(1, kSumThreads);      // all warps' are there
    CF_UNROLL_1
    for (i32 other = 1; other < count; ++other) {
      CF_UNROLL
      for (int n = 0; n < kCount; ++n) x[n] += own[other * apart + n * 32 + lane_index()];
    }
    barrier_sync_aligned(1, kSumThreads);      // they have been read
  }

  // One element after the other, whatever the gradient's dtype and strides, kStep columns at a time through `own`.
  template <int kStep> CF_DEVICE void store(const BiasTarget& to, Score* own) const {
    const Params& p = to.p;
    const Item item = item_at(p, to.work.own, 0);
    CF_UNROLL
    for (int part = 0; part < kCols * 4 / kStep; ++part) {
      warp_barrier();        // the lanes have read the part before
      CF_UNROLL
      for (int u = 0; u < kRows; ++u) {
        CF_UNROLL
        for (int w = 0; w < kStep / 4; ++w) {
          const i32 r = 8 * u + i32(lane_index()) / 4, c = w / 2 * 8 + i32(lane_index()) % 4 * 2 + w % 2;
          own[r * kStep + c] = value[u][part * kStep / 4 + w];
        }
      }
      warp_barrier();        // the part is there
      CF_UNROLL_1
      for (i32 n = lane_index(); n < kRows * 8 * kStep; n += 32) {
        const i32 i = to.row() + row() + n / kStep, j = to.col() + col() + part * kStep + n % kStep;
        if (i >= to.grid.rows || j >= to.grid.cols) continue;
        if (p.splits > 1) to.partials()[i64(i) * to.grid.cols + j] = own[n];
        else store_bias_gradient(p, item, to.work.head, i, j, own[n]);
      }
    }
  }
};
