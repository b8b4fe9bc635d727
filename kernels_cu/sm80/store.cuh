// Results on their way out: accumulator tiles to global memory through shared memory.
#pragma once
#include "sm80/product.cuh"

// Where a result goes: the rows of one head, of Element or float. Rows below `row_stop` and columns from 0 below `col_stop`
// are written, in place of what is there or on top of it.
struct Target {
  void* base;
  i64 row_stride, col_stride;
  i32 kind, row_stop, col_stop;
  bool accumulate;

  template <class T> CF_DEVICE Rows<T> rows() const { return {static_cast<T*>(base), row_stride, col_stride}; }
};

CF_DEVICE Target target_of(void* data, const Strides& s, i32 kind, const Item& item, i32 head, i32 row_stop, i32 col_stop,
                           bool accumulate) {
  const i64 bytes = (lead_offset(s.lead, item) + s.head * head) * (kind == KindOf<Element>::value ? 2 : 4);
  void* base = data == nullptr ? nullptr : static_cast<char*>(data) + bytes;
  return {base, s.row, s.col, kind, row_stop, col_stop, accumulate};
}

// Element by element, for what the fast way does not take.
template <class T, int kRows, int kCols>
CF_DEVICE void store_elements(const float (&acc)[kRows][kCols], const Target& to, i32 row) {
  const Rows<T> rows = to.rows<T>();
  T* row_at = rows.at(row + fragment_row(0), fragment_col(0));
  CF_UNROLL
  for (int u = 0; u < kRows; ++u) {
    T* at = row_at;
    CF_UNROLL
    for (int w = 0; w < kCols; ++w) {
      if (row + fragment_row(u) < to.row_stop && fragment_col(w) < to.col_stop) {
        *at = convert<T>(acc[u][w] + (to.accumulate ? convert<float>(*at) : 0.0f));
      }
      at += (w % 2 == 0 ? 1 : 7) * rows.col_stride;
    }
    row_at += 8 * rows.row_stride;
  }
}

// acc goes to rows from `row`, through the warp's own rows from tile_row of the shared tile at `staging`.
template <class T, int kRows, int kCols>
CF_DEVICE void store_tile(const float (&acc)[kRows][kCols], const Target& to, i32 row, u32 staging, i32 tile_row) {
  constexpr i32 kChunks = kCols / 2;
  if (to.kind != KindOf<Element>::value) return store_elements<float>(acc, to, row);
  if (to.accumulate) return store_elements<Element>(acc, to, row);
  warp_barrier();       // the lanes have read their last of the tile
  CF_UNROLL
  for (int u = 0; u < kRows; ++u) {
    CF_UNROLL
    for (int w = 0; w < kCols; w += 2) {
      st_shared_32(staging + T::place(tile_row + fragment_row(u), w / 2) + lane_index() % 4 * 4,
                   cvt_rn_x2<Element>(acc[u][w], acc[u][w + 1]));
    }
  }
  warp_barrier();       // the whole rows are there
  const Rows<Element> rows = to.rows<Element>();
  const bool packed = rows.packed<8>();
  CF_UNROLL_1
  for (i32 n = lane_index(); n < kRows * 8 * kChunks; n += 32) {
    const i32 r = n / kChunks, chunk = n % kChunks, i = row + r, j = chunk * 8;
    if (i >= to.row_stop || j >= to.col_stop) continue;
    u32 words[4];
    ld_shared_128(words, staging + T::place(tile_row + r, chunk));
    if (packed && j + 8 <= to.col_stop) {
      *reinterpret_cast<Packed<u32, 4>*>(rows.at(i, j)) = Packed<u32, 4>{{words[0], words[1], words[2], words[3]}};
      continue;
    }
    CF_UNROLL
    for (int x = 0; x < 8; ++x) {
      if (j + x < to.col_stop) *rows.at(i, j + x) = Element{u16(words[x / 2] >> (x % 2 * 16))};
    }
  }
}
