// Tiles of float or double in shared memory, and their way there from global memory.
//
// A row is a whole number of 128-byte lines, a line eight chunks of 16 bytes. In line by line, chunk c of row r lies at
// place c ^ (r % 2 * 4) ^ (r / 2 % 4 * 2), of doubles c ^ (r % 2 * 4) ^ (r / 2 % 2 * 3) ^ (r / 4 % 2 * 5). A quarter of a
// warp then meets every bank once when it reads chunks 4 n + 0..3 of rows 2 i and 2 i + 1, and when it reads chunks 2 n
// and 2 n + 1 of every other row of eight; half of a warp (of doubles) also at chunks c and c ^ 2 of rows r, r + 1, r + 4,
// r + 5 or of every other row of eight.
#pragma once
#include "attn/rows.cuh"
#include "core/block.cuh"
#include "core/ptx_sm80.cuh"

constexpr i32 kWarps = kThreads / 32, kChunk = 16 / sizeof(Element);      // elements of a chunk
using ElementRows = Rows<const Element>;

template <int kRows, int kCols> struct Tile {
  static constexpr i32 kColCount = kCols, kRowBytes = kCols * sizeof(Element);
  static constexpr i32 kBytes = kRows * kRowBytes;
  static_assert(kRowBytes % 128 == 0 && kRows % 8 == 0, "whole lines and swizzles");

  static CF_DEVICE u32 place(i32 row, i32 chunk) {
    const i32 turned = sizeof(Element) == 8 ? (row / 2 % 2 * 3) ^ (row / 4 % 2 * 5) : row / 2 % 4 * 2;
    return row * kRowBytes + (chunk ^ row % 2 * 4 ^ turned) * 16;
  }
  static CF_DEVICE u32 element_place(i32 row, i32 col) {
    return place(row, col / kChunk) + col % kChunk * i32(sizeof(Element));
  }
  template <i32 kLoaders = kThreads>
  static CF_DEVICE void load(u32 tile, const ElementRows& rows, i32 row, i32 row_stop, i32 col_stop);
};

// Rows [row, row + kRows) below row_stop and columns below col_stop go to the tile at `tile`; all else becomes zeros,
// and nothing else is touched. The block's first kLoaders threads call this. Where 16 bytes cannot be moved at once the
// same values arrive in pieces of 4. The caller commits the group of copies.
template <int kRows, int kCols>
template <i32 kLoaders>
CF_DEVICE void Tile<kRows, kCols>::load(u32 tile, const ElementRows& rows, i32 row, i32 row_stop, i32 col_stop) {
  constexpr i32 kRowsAtOnce = kLoaders / 8, kLines = kRowBytes / 128;      // eight threads take a line
  static_assert(kRowsAtOnce % 8 == 0, "a thread keeps its place in the swizzle");
  const i32 own_row = thread_index() / 8, own_chunk = thread_index() % 8;
  const u32 to = tile + place(own_row, own_chunk);
  if (rows.packed<kChunk>() && row + kRows <= row_stop && col_stop == kCols) {
    const Element* from = rows.at(row + own_row, own_chunk * kChunk);
    CF_UNROLL
    for (i32 r = 0; r < kRows; r += kRowsAtOnce) {
      if (kRows % kRowsAtOnce != 0 && r + own_row >= kRows) break;
      CF_UNROLL
      for (i32 line = 0; line < kLines; ++line) cp_async_16(to + r * kRowBytes + line * 128, from + line * 8 * kChunk);
      from += kRowsAtOnce * rows.row_stride;
    }
    return;
  }
  const bool packed = rows.packed<kChunk>();
  CF_UNROLL_1
  for (i32 n = 0; n < ceil_div(kRows, kRowsAtOnce) * kLines; ++n) {
    const i32 r = n / kLines * kRowsAtOnce, line = n % kLines, col = (line * 8 + own_chunk) * kChunk;
    if (r + own_row >= kRows) continue;
    const i32 count = row + r + own_row < row_stop ? clamp(col_stop - col, 0, kChunk) : 0;
    const u32 at = to + r * kRowBytes + line * 128;
    const Element* from = count > 0 ? rows.at(row + r + own_row, col) : rows.base;
    if (packed) {
      cp_async_16(at, from, count * i32(sizeof(Element)));
      continue;
    }
    CF_UNROLL
    for (i32 x = 0; x < 4; ++x) {
      const i32 element = x / (4 / kChunk);
      const u32* piece = reinterpret_cast<const u32*>(element < count ? from + element * rows.col_stride : rows.base);
      cp_async_4(at + 4 * x, piece + x % (4 / kChunk), element < count ? 4 : 0);
    }
  }
}
