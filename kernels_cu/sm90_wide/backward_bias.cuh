// The gradient of a bias that was not broadcast is dA itself, where there is no softcap: a consumer's keys of one head.
// Tiles that nobody visits are written as zeros.
#pragma once
#include "sm90_wide/backward_scores.cuh"

constexpr bool kWritesBias = kMaskOrBias && !kSoftcapOrAlibi;      // where p.call.dbias is given; backward_launches.py

struct BiasGradient {
  const Params& p;
  Rows<float> rows;

  CF_DEVICE BiasGradient(const Params& p, const Item& item, i32 head)
      : p(p), rows(rows_of<float>(p.call.dbias, p.dbias, item, head)) {}

  // A thread's entries, of which entry 0 is at that query and key.
  CF_DEVICE void store(const Scores& ds, i32 query, i32 key) const {
    float* to = in_global(rows.at(query, key));
    CF_UNROLL
    for (int n = 0; n < kScores; n += n % 2 == 0 ? 1 : 3) {
      const bool there = query + Scorer<true>::query_of(n) < p.seqlen_q;
      if (there && key < p.seqlen_k) to[0] = ds[n];
      if (there && key + 8 < p.seqlen_k) to[8 * rows.col_stride] = ds[n + 2];
      to += (n % 2 == 0 ? 1 : 7) * rows.row_stride;
    }
  }

  // Rows [from, to) of the thread's two keys; its first row there is from + first.
  CF_DEVICE void clear_rows(i32 from, i32 to, i32 first, i32 key) const {
    CF_UNROLL_1
    for (i32 row = from + first; row < to; row += row % 2 == 0 ? 1 : 7) {
      if (key < p.seqlen_k) *in_global(rows.at(row, key)) = 0.0f;
      if (key + 8 < p.seqlen_k) *in_global(rows.at(row, key + 8)) = 0.0f;
    }
  }
};
