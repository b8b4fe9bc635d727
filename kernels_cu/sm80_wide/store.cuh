// Results on their way out: a lane's accumulators to global memory.
#pragma once
#include "sm80_wide/product.cuh"

// Where a result goes: the rows of one head. Rows below `row_stop` and columns below `col_stop` are written, in place of
// what is there or on top of it.
struct Target {
  Rows<Element> rows;
  i32 row_stop, col_stop;
  bool accumulate;
};

CF_DEVICE Target target_of(void* data, const Strides& s, const Item& item, i32 head, i32 row_stop, i32 col_stop,
                           bool accumulate) {
  return {rows_of<Element>(data, s, item, head), row_stop, col_stop, accumulate};
}

// Entry [u][w] of acc goes to row `row` + fragment_row(u), column result_col(w).
template <int kRows, int kCols> CF_DEVICE void store_tile(const Element (&acc)[kRows][kCols], const Target& to, i32 row) {
  const bool packed = to.rows.packed<kChunk>();
  CF_UNROLL
  for (int u = 0; u < kRows; ++u) {
    const i32 i = row + fragment_row(u);
    if (i >= to.row_stop) continue;
    CF_UNROLL
    for (int first = 0; first < kCols; first += 2 * kChunk) {
      CF_UNROLL
      for (int x = 0; x < 2; ++x) {
        const i32 j = result_col(first + x);      // kChunk neighbours from here
        Packed<Element, kChunk> values;
        CF_UNROLL
        for (int n = 0; n < kChunk; ++n) values.value[n] = acc[u][first + 2 * n + x];
        Element* at = to.rows.at(i, j);
        if (packed && !to.accumulate && j + kChunk <= to.col_stop) {
          *reinterpret_cast<Packed<Element, kChunk>*>(at) = values;
          continue;
        }
        CF_UNROLL
        for (int n = 0; n < kChunk; ++n, at += to.rows.col_stride) {
          if (j + n < to.col_stop) *at = to.accumulate ? *at + values.value[n] : values.value[n];
        }
      }
    }
  }
}
