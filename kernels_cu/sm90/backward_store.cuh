// Gradients of keys or values on their way out, from the fragments of a warp's 16 rows.
#pragma once
#include "sm90/backward_scores.cuh"

// Where the gradient of one head goes.
struct Target {
  void* data;
  const Strides* to;
  i32 kind, cols;
};

// Element by element, for any layout: 32 columns at a time through 16 rows of 128 bytes in shared memory at `staging`,
// which are the warp's own.
template <int kEntries>
CF_DEVICE void store_elements(const float (&sum)[kEntries], const Target& target, const Params& p, i64 base, i32 row, u32 staging,
                              i32 lane) {
  CF_UNROLL
  for (int part = 0; part < kEntries / 16; ++part) {
    CF_UNROLL
    for (int n = 0; n < 16; n += 2) {
      const i32 r = lane / 4 + n / 2 % 2 * 8, col = n / 4 * 8 + lane % 4 * 2;
      st_shared_f32x2(staging + r * 128 + col * 4, sum[16 * part + n], sum[16 * part + n + 1]);
    }
    warp_barrier();      // the rows are there
    const i32 col = 32 * part + lane, rows = col < target.cols ? smaller(p.seqlen_k - row, 16) : 0;
    CF_UNROLL_1
    for (i32 r = 0; r < rows; ++r) {
      const i64 at = base + (row + r) * target.to->row + col * target.to->col;
      const float x = ld_shared_f32(staging + r * 128 + lane * 4);
      store_kind(target.data, target.kind, at, p.accumulate ? x + load_kind<float>(target.data, target.kind, at) : x);
    }
    warp_barrier();      // they have been read
  }
}

// Entry 4 j + 2 h + x of lane l, times `factor`, is for row + 8 h + l / 4 of the key tile, column 8 j + 2 (l % 4) + x.
template <int kEntries>
CF_DEVICE void store_rows(float (&sum)[kEntries], float factor, const Target& target, const Params& p, const Work& work,
                          i32 tile_row, u32 staging, i32 lane) {
  if (target.data == nullptr) return;
  CF_UNROLL
  for (int n = 0; n < kEntries; ++n) sum[n] = times(sum[n], factor);
  const i32 row = work.tile * kBlockKV + tile_row, first = lane % 4 * 2;
  const Rows<Element> rows = rows_of<Element>(target.data, *target.to, work.item, work.head_kv);
  const bool pairs = target.kind == KindOf<Element>::value && !p.accumulate && rows.packed<2>() && target.cols % 2 == 0;
  if (!pairs) {
    const i64 base = lead_offset(target.to->lead, work.item) + target.to->head * work.head_kv;
    return store_elements(sum, target, p, base, row, staging, lane);
  }
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    const i32 i = row + lane / 4 + 8 * h;
    if (i >= p.seqlen_k) continue;
    Element* to = rows.at(i, first);
    CF_UNROLL
    for (int j = 0; j < kEntries / 4; ++j) {
      if (first + 8 * j >= target.cols) continue;
      *reinterpret_cast<u32*>(to + 8 * j) = cvt_rn_x2<Element>(sum[4 * j + 2 * h], sum[4 * j + 2 * h + 1]);
    }
  }
}
