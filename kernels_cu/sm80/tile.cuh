// Tiles of 16-bit elements in shared memory, their way there from global memory and into mma fragments.
//
// A tile is cut into panels of 64 columns; a row of a panel is 128 bytes, eight chunks of 16. Chunk c of row r lies at
// place c ^ (r % 8), so that the eight rows of an 8x8 matrix fall into different banks whichever way they are read.
#pragma once
#include "attn/rows.cuh"
#include "core/block.cuh"
#include "core/ptx_sm80.cuh"

constexpr i32 kWarps = kThreads / 32;
using ElementRows = Rows<const Element>;

template <int kRows, int kCols> struct Tile {
  static constexpr i32 kRowCount = kRows, kColCount = kCols;
  static constexpr i32 kPanels = ceil_div(kCols, 64), kPanelBytes = kRows * 128, kBytes = kPanels * kPanelBytes;
  static constexpr i32 kChunks = kCols / 8;
  static_assert(kCols % 16 == 0 && kRows % 8 == 0, "whole fragments");

  static CF_DEVICE u32 place(i32 row, i32 chunk) {
    return chunk / 8 * kPanelBytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
  }
};

// The first address at or above x that may begin a tile.
CF_DEVICE u32 tile_address(u32 x) { return (x + 127) / 128 * 128; }

// A whole tile of rows whose chunks are moved at once; `to` and `from` are this thread's first chunk. kOnce: nobody else
// will read them.
template <class T, int kCount = kThreads, bool kOnce = false>
CF_DEVICE void load_whole_tile(u32 to, const Element* from, i64 row_stride, i32 me) {
  constexpr i32 kRowsAtOnce = kCount / 8;                 // eight threads take the chunks of a row of a panel
  CF_UNROLL
  for (i32 r = 0; r < T::kRowCount; r += kRowsAtOnce) {
    if (T::kRowCount % kRowsAtOnce != 0 && r + me / 8 >= T::kRowCount) break;
    CF_UNROLL
    for (i32 panel = 0; panel < T::kPanels; ++panel) {
      if (T::kColCount % 64 != 0 && panel * 64 + me % 8 * 8 >= T::kColCount) break;
      const u32 at = (to ^ (r % 8 * 16)) + r * 128 + panel * T::kPanelBytes;
      if constexpr (kOnce) cp_async_16_once(at, from + panel * 64);
      else cp_async_16(at, from + panel * 64);
    }
    from += kRowsAtOnce * row_stride;
  }
}

// Rows [row, row + kRows) below row_stop and columns below col_stop go to the tile at `tile`; all else becomes zeros,
// and nothing else is touched. `kCount` threads take part, this one is number `me`. Where 16 bytes cannot be moved at
// once the same values arrive in smaller pieces. The caller commits the group of copies.
template <class T, int kCount = kThreads, bool kOnce = false>
CF_DEVICE void load_tile(u32 tile, const ElementRows& rows, i32 row, i32 row_stop, i32 col_stop, i32 me) {
  constexpr i32 kRowsAtOnce = kCount / 8;
  static_assert(T::kRowCount % 8 == 0, "whole turns of the swizzle");
  const i32 own_row = me / 8, own_chunk = me % 8;
  const u32 to = tile + T::place(own_row, own_chunk);
  const bool packed = rows.packed<8>();
  if (packed && row + T::kRowCount <= row_stop && col_stop == T::kColCount) {
    return load_whole_tile<T, kCount, kOnce>(to, rows.at(row + own_row, own_chunk * 8), rows.row_stride, me);
  }
  const bool pairs = rows.packed<2>();
  CF_UNROLL_1
  for (i32 n = 0; n < ceil_div(T::kRowCount, kRowsAtOnce) * T::kPanels; ++n) {
    const i32 r = n / T::kPanels * kRowsAtOnce, panel = n % T::kPanels, col = panel * 64 + own_chunk * 8;
    if (r + own_row >= T::kRowCount || col >= T::kColCount) continue;
    const i32 elements = row + r + own_row < row_stop ? clamp(col_stop - col, 0, 8) : 0;
    const u32 at = (to ^ (r % 8 * 16)) + r * 128 + panel * T::kPanelBytes;
    const Element* from = elements > 0 ? rows.at(row + r + own_row, col) : rows.base;
    if (packed) {
      cp_async_16(at, from, 2 * elements);
    } else if (pairs) {
      CF_UNROLL
      for (i32 x = 0; x < 8; x += 2) cp_async_4(at + 2 * x, x < elements ? from + x : rows.base, 2 * clamp(elements - x, 0, 2));
    } else {
      u32 words[4];
      CF_UNROLL
      for (i32 x = 0; x < 8; x += 2) {
        const u32 low = x < elements ? from[x * rows.col_stride].bits : 0;
        const u32 high = x + 1 < elements ? from[(x + 1) * rows.col_stride].bits : 0;
        words[x / 2] = low | high << 16;
      }
      st_shared_128(at, words);
    }
  }
}

// Where a lane reads its rows of four 8x8 matrices: row and chunk within a 16x16 block.
//   kRowsFirst: matrices (0, 0), (8, 0), (0, 8), (8, 8): an A operand, or B from rows that are summed over (.trans)
//   otherwise:  matrices (0, 0), (0, 8), (8, 0), (8, 8): B from rows that are its columns
template <bool kRowsFirst> struct LaneBlock {
  static CF_DEVICE i32 row(u32 lane = lane_index()) { return lane % 8 + (kRowsFirst ? lane / 8 % 2 : lane / 16) * 8; }
  static CF_DEVICE i32 chunk(u32 lane = lane_index()) { return kRowsFirst ? lane / 16 : lane / 8 % 2; }
};

// Addresses of a lane in a tile: `start` once, then blocks by constants. Rows advance by multiples of 16.
template <class T, bool kRowsFirst> struct Reader {
  u32 start;
  CF_DEVICE Reader() : Reader(0) {}
  // `col` is a multiple of 16 of which no block crosses the panel's edge.
  explicit CF_DEVICE Reader(i32 row, i32 col = 0, u32 lane = lane_index()) {
    const i32 r = row + LaneBlock<kRowsFirst>::row(lane);
    start = (r * 128 + (LaneBlock<kRowsFirst>::chunk(lane) ^ (r % 8)) * 16 ^ (col % 64 * 2)) + col / 64 * T::kPanelBytes;
  }
  // The 16x16 block at (row, col) of the tile at `tile`, both multiples of 16; tile is a multiple of 128.
  CF_DEVICE u32 block(u32 tile, i32 row, i32 col) const {
    return ((tile + start) ^ (col % 64 * 2)) + col / 64 * T::kPanelBytes + row * 128;
  }
};
