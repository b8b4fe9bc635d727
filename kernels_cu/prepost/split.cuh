// What the kernels that split rows into planes of bfloat16 have in common: a row becomes hi | mid | lo, each of as many
// columns, whole panels of 64, filled up with zeros.
#pragma once
#include "attn/mask.cuh"
#include "core/block.cuh"
#include "core/planes.cuh"

constexpr i32 kSplitThreads = 256;
constexpr i32 kColumns = 8;                    // of a thread

CF_DEVICE i32 padded(i32 columns) { return round_up(columns, 64); }

CF_DEVICE void read_columns(float (&x)[kColumns], const Rows<const float>& rows, i32 row, i32 col, i32 columns) {
  if (rows.packed<4>() && col + kColumns <= columns) {
    CF_UNROLL
    for (int n = 0; n < kColumns; n += 4) {
      const Packed<float, 4> four = *reinterpret_cast<const Packed<float, 4>*>(rows.at(row, col + n));
      CF_UNROLL
      for (int i = 0; i < 4; ++i) x[n + i] = four.value[i];
    }
  } else {
    CF_UNROLL
    for (int n = 0; n < kColumns; ++n) x[n] = col + n < columns ? *rows.at(row, col + n) : 0.0f;
  }
}

CF_DEVICE void write_planes(bfloat16* to, i32 columns, const float (&x)[kColumns]) {
  PlanePair pair[kColumns / 2];
  CF_UNROLL
  for (int n = 0; n < kColumns / 2; ++n) pair[n] = split_any(x[2 * n], x[2 * n + 1]);
  CF_UNROLL
  for (int plane = 0; plane < kPlanes; ++plane) {
    Packed<u32, kColumns / 2> packed;
    CF_UNROLL
    for (int n = 0; n < kColumns / 2; ++n) packed.value[n] = pair[n].plane[plane];
    *reinterpret_cast<Packed<u32, kColumns / 2>*>(to + plane * columns) = packed;
  }
}
