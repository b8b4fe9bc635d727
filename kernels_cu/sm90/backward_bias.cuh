// The gradient of a bias that was not broadcast is dA itself, where there is no softcap: a tile of it leaves with the
// scores that it belongs to. One of q's dtype is read again from where dA lies, rounded, one of float32 is stored from
// registers. Tiles that nobody visits are written as zeros. What it gave: sm90/backward_addends.cuh.
#pragma once
#include "sm90/backward_addends.cuh"

constexpr bool kWritesBias = kMaskOrBias && !kSoftcapOrAlibi;      // where p.call.dbias is given; backward_recipe.py

// A thread's entries, of which entry 0 is at that row and key.
CF_DEVICE void store_wide(const float (&ds)[kBlockQ / 2], const Params& p, const Item& item, i32 head, i32 row,
                          i32 key) {
  const Rows<float> rows = rows_of<float>(p.call.dbias, p.dbias, item, head);
  float* to = in_global(rows.at(row, key));
  CF_UNROLL
  for (int n = 0; n < kBlockQ / 4; ++n) {                       // queries 8 (n / 2) + n % 2
    const int i = n / 2 * 8 + n % 2, entry = n / 2 * 4 + n % 2;
    if (row + i < p.seqlen_q && key < p.seqlen_k) to[0] = ds[entry];
    if (row + i < p.seqlen_q && key + 8 < p.seqlen_k) to[8 * rows.col_stride] = ds[entry + 2];
    to += (n % 2 == 0 ? 1 : 7) * rows.row_stride;
  }
}

// The columns of a warp's 16 keys in the gradient of one head, T its elements; a lane has four of them, in eight rows of
// a tile.
template <class T> struct BiasGradient {
  Rows<T> rows;
  i32 row_stop, col, cols;     // of the lane; columns that are there
  bool packed;                 // four elements at once

  CF_DEVICE BiasGradient(const Params& p, const Item& item, i32 head, i32 key, i32 lane)
      : rows(rows_of<T>(p.call.dbias, p.dbias, item, head)), row_stop(p.seqlen_q), col(key + lane % 4 * 4),
        cols(p.seqlen_k - col), packed(rows.template packed<4>()) {}

  CF_DEVICE void store(i32 row, const Packed<T, 4>& x) const {
    if (row >= row_stop) return;
    if (packed && cols >= 4) {
      *reinterpret_cast<Packed<T, 4>*>(in_global(rows.at(row, col))) = x;
      return;
    }
    CF_UNROLL
    for (int n = 0; n < 4; ++n) {
      if (n < cols) *rows.at(row, col + n) = x.value[n];
    }
  }

  // Rows from `row` on, from dA of the warp's keys: rows of 128 bytes from `from` on, swizzled. Keys are picked so that
  // a lane gets neighbours.
  CF_DEVICE void store_tile(i32 row, u32 from, i32 lane) const {
    const i32 key = lane % 8 / 2 * 4 + lane / 8 % 2 * 2 + lane % 2;
    const u32 at = from + key * 128 + ((lane / 16) ^ key % 8) * 16;
    CF_UNROLL_1
    for (i32 j = 0; j < kBlockQ / 8; j += 2) {      // registers are few
      u32 words[4];
      ldmatrix_x4_trans(words, at ^ j * 16);
      CF_UNROLL
      for (int n = 0; n < 4; n += 2) {
        store(row + 8 * j + 4 * n + lane / 4, {{T{u16(words[n])}, T{u16(words[n] >> 16)}, T{u16(words[n + 1])},
                                                T{u16(words[n + 1] >> 16)}}});
      }
    }
  }

  CF_DEVICE void clear_rows(i32 from, i32 to, i32 lane) const {
    CF_UNROLL_1
    for (i32 row = from + lane / 4; row < to; row += 8) store(row, {});
  }
};
