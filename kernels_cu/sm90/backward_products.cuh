// The products of the backward, each started as one group. Operands in shared memory are named by descriptors.
#pragma once
#include "sm90/backward_scores.cuh"

// S^T or dP^T: 64 keys by the queries of a tile, summed over the head dim.
template <bool kAdds = false> CF_DEVICE void start_scores(Scores& s, u64 keys, u64 queries) {
  wgmma_fence();
  CF_UNROLL
  for (int k = 0; k < kHeadDim / 16; ++k) {
    const u32 panel = k / 4, column = k % 4 * 32;
    const u64 a = keys + ((panel * kBlockKV * 128 + column) >> 4), b = queries + ((panel * kBlockQ * 128 + column) >> 4);
    if (k == 0 && !kAdds) wgmma_scores_first(s, a, b); else wgmma_scores(s, a, b, 1);
  }
  wgmma_commit_group();
}

// dv or dk: 64 keys by the head dim, summed over the queries of a tile; the weights or dA come from registers.
template <int kEntries> CF_DEVICE void start_gradient(float (&sum)[kEntries], const Operand& a, u64 queries_by_rows) {
  wgmma_fence();
  CF_UNROLL
  for (int k = 0; k < kBlockQ / 16; ++k) wgmma_gradient(sum, a + 4 * k, queries_by_rows + u64(k * 2048 >> 4), 1);
  wgmma_commit_group();
}

// dq: 64 queries by columns of the head dim, summed over the keys of a tile.
template <int kEntries> CF_DEVICE void start_queries(float (&dq)[kEntries], u64 gradients, u64 keys_by_rows) {
  wgmma_fence();
  CF_UNROLL
  for (int k = 0; k < kBlockKV / 16; ++k) {
    const u64 a = gradients + u64(k * 2048 >> 4), b = keys_by_rows + u64(k * 2048 >> 4);
    if (k == 0) wgmma_queries_first(dq, a, b); else wgmma_queries(dq, a, b, 1);
  }
  wgmma_commit_group();
}
