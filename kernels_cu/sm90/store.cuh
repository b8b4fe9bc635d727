// Gradients on their way out, from the fragments of a warp's 16 rows.
#pragma once
#include "attn/rows.cuh"
#include "core/ptx_sm90.cuh"
#include "core/warp.cuh"

// Where the gradient of one head goes.
struct Target {
  void* data;
  const Strides* to;
  i32 kind, cols;
};

// Element by element, for any layout: 32 columns at a time through 16 rows of 128 bytes in shared memory at `staging`,
// which are the warp's own. Parts of `sum` come to its first entries one after the other, so that code stands once.
template <int kEntries>
CF_DEVICE void store_elements(float (&sum)[kEntries], const Target& target, const Params& p, i64 base, i32 row, i32 row_stop,
                              u32 staging, i32 lane) {
  CF_UNROLL_1
  for (i32 part = 0; part < kEntries / 16; ++part) {
    CF_UNROLL
    for (int n = 0; n < 16; n += 2) {
      const i32 r = lane / 4 + n / 2 % 2 * 8, col = n / 4 * 8 + lane % 4 * 2;
      st_shared_f32x2(staging + r * 128 + col * 4, sum[n], sum[n + 1]);
    }
    CF_UNROLL
    for (int n = 16; n < kEntries; ++n) sum[n - 16] = sum[n];
    warp_barrier();      // the rows are there
    const i32 col = 32 * part + lane, rows = col < target.cols ? smaller(row_stop - row, 16) : 0;
    CF_UNROLL_1
    for (i32 r = 0; r < rows; ++r) {
      const i64 at = base + (row + r) * target.to->row + col * target.to->col;
      const float x = ld_shared_f32(staging + r * 128 + lane * 4);
      store_kind(target.data, target.kind, at, p.accumulate ? x + load_kind<float>(target.data, target.kind, at) : x);
    }
    warp_barrier();      // they have been read
  }
}

// The same for rows of elements that 16 bytes at once fill, 64 columns at a time.
template <int kEntries>
CF_DEVICE void store_packed_rows(const float (&sum)[kEntries], const Rows<Element>& rows, i32 cols, i32 row, i32 row_stop,
                                 u32 staging, i32 lane) {
  const u32 to = staging + lane % 16 * 128 + ((lane / 16) ^ (lane % 8)) * 16;
  CF_UNROLL
  for (int part = 0; part < kEntries / 32; ++part) {
    CF_UNROLL
    for (int n = 0; n < 4; ++n) {
      const float* x = sum + 32 * part + 8 * n;
      stmatrix_x4(to ^ (n * 32), cvt_rn_x2<Element>(x[0], x[1]), cvt_rn_x2<Element>(x[2], x[3]), cvt_rn_x2<Element>(x[4], x[5]),
                  cvt_rn_x2<Element>(x[6], x[7]));
    }
    warp_barrier();      // the rows are there
    const i32 col = 64 * part + lane % 8 * 8;
    CF_UNROLL
    for (int n = 0; n < 4; ++n) {
      const i32 r = 4 * n + lane / 8;
      u32 words[4];
      ld_shared_128(words, staging + r * 128 + ((lane % 8) ^ (r % 8)) * 16);
      if (row + r < row_stop && col < cols) st_global_128(rows.at(row + r, col), words);
    }
    warp_barrier();      // they have been read
  }
}
