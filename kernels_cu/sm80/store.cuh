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

  CF_DEVICE Target from_col(i32 col) const {
    const i64 bytes = col * col_stride * (kind == KindOf<Element>::value ? 2 : 4);
    return {static_cast<char*>(base) + bytes, row_stride, col_stride, kind, row_stop, col_stop - col, accumulate};
  }
};

CF_DEVICE Target target_of(void* data, const Strides& s, i32 kind, const Item& item, i32 head, i32 row_stop, i32 col_stop,
                           bool accumulate) {
  const i64 bytes = (lead_offset(s.lead, item) + s.head * head) * (kind == KindOf<Element>::value ? 2 : 4);
  void* base = data == nullptr ? nullptr : static_cast<char*>(data) + bytes;
  return {base, s.row, s.col, kind, row_stop, col_stop, accumulate};
}

// Eight neighbours of a row, as floats in shared memory at `from`, go to columns [col, col + 8) of row `row`.
template <class T> CF_DEVICE void store_eight(const Target& to, i32 row, i32 col, u32 from, u32 behind) {
  const Rows<T> rows = to.rows<T>();
  if (!to.accumulate && col + 8 <= to.col_stop && rows.template packed<8>()) {
    u32 low[4], high[4];
    ld_shared_128(low, from);
    ld_shared_128(high, behind);
    T* at = rows.at(row, col);
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<Packed<u32, 4>*>(at) = {{low[0], low[1], low[2], low[3]}};
      *reinterpret_cast<Packed<u32, 4>*>(at + 4) = {{high[0], high[1], high[2], high[3]}};
    } else {
      const auto two = [](u32 x, u32 y) { return cvt_rn_x2<T>(float_of(x), float_of(y)); };
      *reinterpret_cast<Packed<u32, 4>*>(at) = {{two(low[0], low[1]), two(low[2], low[3]), two(high[0], high[1]),
                                                 two(high[2], high[3])}};
    }
    return;
  }
  CF_UNROLL_1
  for (i32 n = 0; n < 8 && col + n < to.col_stop; ++n) {
    T* at = rows.at(row, col + n);
    const float x = ld_shared_f32((n < 4 ? from : behind) + n % 4 * 4);
    *at = convert<T>(to.accumulate ? x + convert<float>(*at) : x);      // x + 0 would turn -0 into 0
  }
}

// The same for whole columns of elements that replace what is there: rounded on their way to shared memory.
template <class T, int kRows, int kCols>
CF_DEVICE void store_whole_tile(const float (&acc)[kRows][kCols], const Target& to, i32 row, u32 staging, i32 tile_row) {
  constexpr i32 kChunks = kCols / 2;
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
  Element* const base = static_cast<Element*>(to.base);
  constexpr i32 kMoves = kRows * 8 * kChunks / 32, kAtOnce = smaller(kMoves, 4);
  CF_UNROLL_1
  for (i32 first = 0; first < kMoves; first += kAtOnce) {
    u32 words[kAtOnce][4];
    const auto each = [&](auto move) {
      CF_UNROLL
      for (i32 x = 0; x < kAtOnce; ++x) {
        const i32 n = lane_index() + 32 * (first + x);
        if (kMoves % kAtOnce == 0 || first + x < kMoves) move(words[x], n / kChunks, n % kChunks);
      }
    };
    each([&](u32 (&eight)[4], i32 r, i32 chunk) { ld_shared_128(eight, staging + T::place(tile_row + r, chunk)); });
    each([&](u32 (&eight)[4], i32 r, i32 chunk) {
      if (row + r >= to.row_stop || chunk * 8 >= to.col_stop) return;
      *reinterpret_cast<Packed<u32, 4>*>(base + (row + r) * to.row_stride + chunk * 8) = {{eight[0], eight[1], eight[2], eight[3]}};
    });
  }
}

// acc goes to rows from `row`, through the warp's own rows from tile_row of the shared tile at `staging`; where it must be
// 32 columns at a time, as floats.
template <class T, int kRows, int kCols>
CF_DEVICE void store_tile(const float (&acc)[kRows][kCols], const Target& to, i32 row, u32 staging, i32 tile_row) {
  if (to.kind == KindOf<Element>::value && !to.accumulate && to.col_stop % 8 == 0 && to.rows<Element>().template packed<8>()) {
    return store_whole_tile<T>(acc, to, row, staging, tile_row);
  }
  using Staged = Tile<T::kRowCount, 64>;      // a panel of T, of 8 chunks of four floats
  CF_UNROLL_1
  for (i32 part = 0; part < ceil_div(kCols, 8); ++part) {
    warp_barrier();       // the lanes have read their last of the tile, or of the columns before
    CF_UNROLL
    for (i32 w = 0; w < kCols; w += 2) {
      if (w / 8 != part) continue;
      CF_UNROLL
      for (int u = 0; u < kRows; ++u) {
        const u32 at = staging + Staged::place(tile_row + fragment_row(u), w % 8 + i32(lane_index()) % 4 / 2);
        st_shared_f32x2(at + lane_index() % 2 * 8, acc[u][w], acc[u][w + 1]);
      }
    }
    warp_barrier();       // the whole rows are there
    CF_UNROLL_1
    for (i32 n = lane_index(); n < kRows * 8 * 4; n += 32) {
      const i32 r = n / 4, i = row + r, j = part * 32 + n % 4 * 8;
      if (i >= to.row_stop || j >= to.col_stop) continue;
      const u32 from = staging + Staged::place(tile_row + r, n % 4 * 2);
      const u32 behind = staging + Staged::place(tile_row + r, n % 4 * 2 + 1);
      if (to.kind == KindOf<Element>::value) store_eight<Element>(to, i, j, from, behind);
      else store_eight<float>(to, i, j, from, behind);
    }
  }
}
