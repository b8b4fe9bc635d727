// Products of register and shared-memory tiles by mma.m16n8k16.
//
// An accumulator tile is float[2 * row tiles][columns / 4]: entry [2 t + h][2 n + x] of lane l is row 16 t + 8 h + l / 4,
// column 8 n + 2 (l % 4) + x. Everything in this family that is held in registers has this form.
#pragma once
#include "sm80/tile.cuh"

CF_DEVICE i32 fragment_row(int u) { return u / 2 * 16 + u % 2 * 8 + i32(lane_index()) / 4; }
CF_DEVICE i32 fragment_col(int w) { return w / 2 * 8 + i32(lane_index()) % 4 * 2 + w % 2; }

template <int kRows, int kCols> CF_DEVICE void clear(float (&acc)[kRows][kCols]) {
  CF_UNROLL
  for (int u = 0; u < kRows; ++u) {
    CF_UNROLL
    for (int w = 0; w < kCols; ++w) acc[u][w] = 0.0f;
  }
}

// Columns n, n + 1 (in units of 8) of row tile t.
template <int kRows, int kCols>
CF_DEVICE void mma_pair(float (&acc)[kRows][kCols], int t, int n, const u32 (&a)[4], const u32 (&b)[4]) {
  float (&low)[kCols] = acc[2 * t], (&high)[kCols] = acc[2 * t + 1];
  mma_m16n8k16<Element>(low[2 * n], low[2 * n + 1], high[2 * n], high[2 * n + 1], a, b[0], b[1]);
  mma_m16n8k16<Element>(low[2 * n + 2], low[2 * n + 3], high[2 * n + 2], high[2 * n + 3], a, b[2], b[3]);
}

// A 16-bit operand in registers: row tiles by 16 columns, as a accumulator tile leaves them after rounding.
template <int kRowTiles, int kDepth> struct Operand { u32 word[kDepth / 16][kRowTiles][4]; };

// The row tiles from a_row of a shared tile, as an operand.
template <class TileA, int kRowTiles, int kDepth>
CF_DEVICE void load_operand(Operand<kRowTiles, kDepth>& a, u32 tile, const Reader<TileA, true>& read, i32 a_row) {
  CF_UNROLL
  for (int k = 0; k < kDepth / 16; ++k) {
    CF_UNROLL
    for (int t = 0; t < kRowTiles; ++t) ldmatrix_x4(a.word[k][t], read.block(tile, a_row + 16 * t, 16 * k));
  }
}

// acc += a b^T over kDepth columns: `load_a(left, k)` gives the row tiles of a for columns [16 k, 16 k + 16), b is the
// rows from b_row of tile `b`. `meanwhile(k)` is called once a step, so that other work may fill the gaps.
template <class TileB, int kDepth, int kRows, int kCols, class LoadA, class Meanwhile>
CF_DEVICE void add_product_by_transposed(float (&acc)[kRows][kCols], LoadA load_a, u32 b,
                                         const Reader<TileB, false>& read_b, i32 b_row, Meanwhile meanwhile) {
  CF_UNROLL
  for (int k = 0; k < kDepth / 16; ++k) {
    u32 left[kRows / 2][4];
    load_a(left, k);
    CF_UNROLL
    for (int n = 0; n < kCols / 2; n += 2) {
      u32 right[4];
      ldmatrix_x4(right, read_b.block(b, b_row + 8 * n, 16 * k));
      CF_UNROLL
      for (int t = 0; t < kRows / 2; ++t) mma_pair(acc, t, n, left[t], right);
    }
    meanwhile(k);
  }
}

// The same in place of what acc holds.
template <class TileB, int kDepth, int kRows, int kCols, class LoadA, class Meanwhile>
CF_DEVICE void multiply_by_transposed(float (&acc)[kRows][kCols], LoadA load_a, u32 b, const Reader<TileB, false>& read_b,
                                      i32 b_row, Meanwhile meanwhile) {
  clear(acc);
  add_product_by_transposed<TileB, kDepth>(acc, load_a, b, read_b, b_row, meanwhile);
}

// Rounds a tile; row tile t, columns [16 k, 16 k + 16) become word[k][t].
template <int kRows, int kCols> CF_DEVICE void round_to(Operand<kRows / 2, kCols * 4>& to, const float (&from)[kRows][kCols]) {
  CF_UNROLL
  for (int k = 0; k < kCols / 4; ++k) {
    CF_UNROLL
    for (int t = 0; t < kRows / 2; ++t) {
      CF_UNROLL
      for (int x = 0; x < 4; ++x) {
        const float (&row)[kCols] = from[2 * t + x % 2];
        to.word[k][t][x] = cvt_rn_x2<Element>(row[4 * k + x / 2 * 2], row[4 * k + x / 2 * 2 + 1]);
      }
    }
  }
}

// acc += a b: a in registers, b the kDepth rows from b_row of tile `b`, all of its columns.
template <class TileB, int kDepth, int kRows, int kCols>
CF_DEVICE void multiply(float (&acc)[kRows][kCols], const Operand<kRows / 2, kDepth>& a, u32 b,
                        const Reader<TileB, true>& read_b, i32 b_row) {
  static_assert(TileB::kColCount <= 4 * kCols, "acc is wide enough");
  CF_UNROLL
  for (int k = 0; k < kDepth / 16; ++k) {
    CF_UNROLL
    for (int n = 0; n < TileB::kColCount / 8; n += 2) {
      u32 right[4];
      ldmatrix_x4_trans(right, read_b.block(b, b_row + 16 * k, 8 * n));
      CF_UNROLL
      for (int t = 0; t < kRows / 2; ++t) mma_pair(acc, t, n, a.word[k][t], right);
    }
  }
}
