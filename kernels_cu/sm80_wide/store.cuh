// Results on their way out: a lane's accumulators to global memory.
#pragma once
#include "core/warp.cuh"
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
        const i32 j = result_col(first + entry_of(x, 0));      // kChunk neighbours from here
        Packed<Element, kChunk> values;
        CF_UNROLL
        for (int n = 0; n < kChunk; ++n) values.value[n] = acc[u][first + entry_of(x, n)];
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

// Adds a line of results, from column `col` on, to rows of global memory; entry [u] goes to row `row` + fragment_row(u).
template <int kRows>
CF_DEVICE void add_line(const float (&acc)[kRows][8], const Rows<float>& rows, i32 row, i32 row_stop, i32 col,
                        i32 col_stop) {
  const bool packed = rows.packed<kChunk>();
  CF_UNROLL
  for (int n = 0; n < 2 * kRows; ++n) {
    const float(&x)[8] = acc[n / 2];
    const i32 i = row + fragment_row(n / 2), run = n % 2, j = col + result_col(entry_of(run, 0));
    if (i >= row_stop) continue;
    float* to = rows.at(i, j);
    if (packed && j + 4 <= col_stop) {
      red_add_x4(to, x[entry_of(run, 0)], x[entry_of(run, 1)], x[entry_of(run, 2)], x[entry_of(run, 3)]);
      continue;
    }
    CF_UNROLL
    for (int y = 0; y < 4; ++y) {
      if (j + y < col_stop) red_add(to + y * rows.col_stride, x[entry_of(run, y)]);
    }
  }
}

// The same for double, of columns that were read for sectors. The memory adds whole sectors of 32 bytes as fast as parts of
// them: the four lanes of a group have four neighbours.
template <int kRows>
CF_DEVICE void add_line(const double (&acc)[kRows][4], const Rows<double>& rows, i32 row, i32 row_stop, i32 col,
                        i32 col_stop) {
  const bool whole = row + 8 * kRows <= row_stop && col + 16 <= col_stop && rows.col_stride == 1;
  double* to = rows.at(row + lane_group(), col + lane_in_group());
  const i64 eight_rows = 8 * rows.row_stride;
  if (whole) {
    CF_UNROLL
    for (int u = 0; u < kRows; ++u, to += eight_rows) {
      CF_UNROLL
      for (int x = 0; x < 4; ++x) red_add(to + 4 * x, acc[u][x]);
    }
    return;
  }
  CF_UNROLL
  for (int u = 0; u < kRows; ++u, to += eight_rows) {
    CF_UNROLL
    for (int x = 0; x < 4; ++x) {
      if (row + fragment_row(u) < row_stop && col + 4 * x + lane_in_group() < col_stop) {
        red_add(to + 4 * x * rows.col_stride, acc[u][x]);
      }
    }
  }
}
