// What the kernel of dq leaves beside it where softcap or ALiBi shape scores: the gradients of a bias that was not
// broadcast, dS itself, and of slopes, -sum of |i + offset - j| dS over the keys of a row, summed up by
// prepost/sum_rows.cu. Tiles that nobody visits are written as zeros.
#pragma once
#include "core/lanes.cuh"
#include "sm90_wide/backward_scores.cuh"

constexpr bool kAddsBeside = kSoftcapOrAlibi;      // backward_recipe.py

// Of a tile, -sum of |i + offset - j| dS for the thread's two rows.
struct SlopeSums {
  float row[2] = {0.0f, 0.0f};

  CF_DEVICE void add(int h, float distance, float ds) { row[h] = fused(-distance, ds, row[h]); }

  // Adds them to the sums of those rows, which lie eight apart.
  CF_DEVICE void add_to(float* rows) const {
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float sum = QuadLanes::sum(row[h]);
      if (thread_index() % 4 == 0) rows[8 * h] += sum;
    }
  }
};

struct ScoreGradients {
  // A thread's entries, of which entry 0 is at that query and key.
  static CF_DEVICE void store(const Scores& ds, const Params& p, const Item& item, i32 head, i32 query, i32 key) {
    if (!kMaskOrBias || p.call.dbias == nullptr) return;
    const Rows<float> rows = rows_of<float>(p.call.dbias, p.dbias, item, head);
    const bool pairs = rows.packed<2>() && key + kTileRows <= p.seqlen_k;
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      if (query + 8 * h >= p.seqlen_q) continue;
      float* to = in_global(rows.at(query + 8 * h, key));
      CF_UNROLL
      for (int j = 0; j < kTileRows / 8; ++j) {
        const float low = ds[4 * j + 2 * h], high = ds[4 * j + 2 * h + 1];
        if (pairs) {
          *reinterpret_cast<Packed<float, 2>*>(to + 8 * j) = {{low, high}};
          continue;
        }
        if (key + 8 * j < p.seqlen_k) to[0] = low;
        if (key + 8 * j + 1 < p.seqlen_k) to[rows.col_stride] = high;
        to += 8 * rows.col_stride;
      }
    }
  }

  // Of key tiles [from, to), of which every `step`th is the thread's; its first entry is at that query and column.
  static CF_DEVICE void clear(const Params& p, const Item& item, i32 head, i32 query, i32 col, i32 from, i32 to,
                              i32 step) {
    if (!kMaskOrBias || p.call.dbias == nullptr) return;
    Scores zeros;
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) zeros[n] = 0.0f;
    CF_UNROLL_1
    for (i32 n = from; n < to; n += step) store(zeros, p, item, head, query, n * kTileRows + col);
  }
};
