// Gradients of keys or values on their way out.
#pragma once
#include "sm90/backward_scores.cuh"
#include "sm90/store.cuh"

// Entry 4 j + 2 h + x of lane l, times `factor`, is for row + 8 h + l / 4 of the key tile, column 8 j + 2 (l % 4) + x.
template <int kEntries>
CF_DEVICE void store_rows(float (&sum)[kEntries], float factor, const Target& target, const Params& p, const Work& work,
                          i32 tile_row, u32 staging, i32 lane) {
  if (target.data == nullptr) return;
  CF_UNROLL
  for (int n = 0; n < kEntries; ++n) sum[n] = times(sum[n], factor);
  const i32 row = work.tile * kBlockKV + tile_row;
  const Rows<Element> rows = rows_of<Element>(target.data, *target.to, work.item, work.head_kv);
  const bool packed = target.kind == KindOf<Element>::value && !p.accumulate && rows.packed<8>() && target.cols % 8 == 0;
  if (packed) return store_packed_rows(sum, rows, target.cols, row, p.seqlen_k, staging, lane);
  const i64 base = lead_offset(target.to->lead, work.item) + target.to->head * work.head_kv;
  store_elements(sum, target, p, base, row, p.seqlen_k, staging, lane);
}
