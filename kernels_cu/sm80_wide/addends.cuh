// Mask and bias on their way to scores, for a tile that a warp holds in registers, rows queries, or keys if kTurned.
#pragma once
#include "core/warp.cuh"
#include "sm80_wide/product.cuh"
#include "sm80_wide/work.cuh"

// Mask and bias of a tile, as one addend for each score: -inf where they forbid. Nothing waits for what is loaded before it
// is joined.
template <int kRows, int kCols> struct TileAddends {
  Score value[kRows][kCols];
  u32 allowed[kRows][kCols];

  // use(u, w, element) for every entry of the tile at (row, col) that lies below the lengths.
  template <bool kTurned, class T, class Use>
  static CF_DEVICE void for_entries(const T* from, i64 by_query, i64 by_key, const Work& work, i32 row, i32 col,
                                    Use use) {
    const i32 own_row = row + fragment_row(0), own_col = col + score_col(0);
    const i32 i = kTurned ? own_col : own_row, j = kTurned ? own_row : own_col;
    const i64 by_row = kTurned ? by_key : by_query, by_col = kTurned ? by_query : by_key;
    const i32 rows = (kTurned ? work.sight.kv_length : work.sight.q_length) - own_row;
    const i32 cols = (kTurned ? work.sight.q_length : work.sight.kv_length) - own_col;
    from += opaque(i * by_query + j * by_key);
    CF_UNROLL
    for (int u = 0; u < kRows; ++u) {
      CF_UNROLL
      for (int w = 0; w < kCols; ++w) {
        const i32 down = u / 2 * 16 + u % 2 * 8, across = w / 2 * 8 + w % 2;
        if (down < rows && across < cols) use(u, w, from[down * by_row + across * by_col]);
      }
    }
  }

  template <class Bias, bool kTurned> CF_DEVICE void load_bias(const Work& work, i32 row, i32 col) {
    const Addends& from = work.addends;
    const Bias* bias = static_cast<const Bias*>(from.bias) + from.bias_first;
    for_entries<kTurned>(bias, from.bias_row, from.bias_col, work, row, col,
                         [&](int u, int w, Bias x) { value[u][w] = convert<Score>(x); });
  }

  // Of the tile at (row, col); nothing past the lengths is touched.
  template <bool kTurned> CF_DEVICE void load(const Work& work, i32 row, i32 col) {
    const Addends& from = work.addends;
    CF_UNROLL
    for (int n = 0; n < kRows * kCols; ++n) value[n / kCols][n % kCols] = Score(0), allowed[n / kCols][n % kCols] = 1;
    if (from.bias != nullptr) {
      switch (from.bias_kind) {
        case kFloat16: load_bias<float16, kTurned>(work, row, col); break;
        case kBFloat16: load_bias<bfloat16, kTurned>(work, row, col); break;
        case kFloat32: load_bias<float, kTurned>(work, row, col); break;
        default: load_bias<double, kTurned>(work, row, col);
      }
    }
    if (from.mask != nullptr) {
      for_entries<kTurned>(from.mask, from.mask_row, from.mask_col, work, row, col,
                           [&](int u, int w, u8 byte) { allowed[u][w] = byte; });
    }
  }

  // False if they forbid every score of the warp.
  CF_DEVICE bool join() {
    bool any = false;
    CF_UNROLL
    for (int n = 0; n < kRows * kCols; ++n) {
      Score& x = value[n / kCols][n % kCols];
      x = allowed[n / kCols][n % kCols] != 0 ? x : -Limits<Score>::infinity();
      any = any || x != -Limits<Score>::infinity();
    }
    return vote_any(any);
  }

  // Both at once.
  template <bool kTurned> CF_DEVICE bool look(const Work& work, i32 row, i32 col) {
    load<kTurned>(work, row, col);
    return join();
  }

  // To the scores from column entry `first` on.
  template <int kAll> CF_DEVICE void add_to(Score (&s)[kRows][kAll], int first = 0) const {
    CF_UNROLL
    for (int u = 0; u < kRows; ++u) {
      CF_UNROLL
      for (int w = 0; w < kCols; ++w) s[u][first + w] = with_addend(s[u][first + w], value[u][w]);
    }
  }
};
