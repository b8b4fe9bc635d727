// Mask and bias of a score tile on their way into shared memory, as one addend a score.
//
// They are loaded along with the tiles, so that their latency is spent together. Each warp brings the y slots that it
// will read. Lanes run along keys, as memory mostly does; a lane has kAtOnce loads in flight, at addresses that differ by
// constants times the strides: slots and indices are permutations of bits, so those of a sum of disjoint bits are sums.
#pragma once
#include "simt/product.cuh"
#include "simt/scores.cuh"

template <class Tile> struct AddendTile {
  static constexpr bool kOnY = Tile::kOnY;                                             // queries are on y
  static constexpr i32 kQueries = kOnY ? kWarpLanesY * Tile::kQ : kBlockQ;             // a warp brings so many queries
  static constexpr i32 kKeys = kOnY ? kBlockKV : kWarpLanesY * Tile::kK;               // of so many keys
  static constexpr i32 kAcross = smaller(32, kKeys), kDown = 32 / kAcross;             // lanes: along keys, along queries
  static constexpr i32 kCols = kKeys / kAcross, kSteps = kQueries / kDown;
  static constexpr i32 kAtOnce = 16, kRows = smaller(kSteps, larger(1, kAtOnce / kCols));
  static_assert(kKeys % kAcross == 0 && kSteps % kRows == 0, "whole batches");

  // The slot of a warp's n-th row on y, without the warp's own share.
  static CF_DEVICE constexpr i32 on_y(i32 n) { return n % kWarpLanesY + n / kWarpLanesY * kLanesY; }
  static CF_DEVICE constexpr i32 query_slot(i32 n) { return kOnY ? on_y(n) : n; }
  static CF_DEVICE constexpr i32 key_slot(i32 n) { return kOnY ? n : on_y(n); }
  static CF_DEVICE i32 query_ahead(i32 r) { return Tile::Queries::index(query_slot(kDown * r)); }
  static CF_DEVICE i32 key_ahead(i32 c) { return Tile::Keys::index(key_slot(kAcross * c)); }

  using Batch = Score[kRows][kCols];

  // Elements (i, j) and those ahead of it, 0 past the lengths, whatever lies there. Element (0, 0) is data[0].
  template <class T> static CF_DEVICE void load(Batch& batch, const T* data, i64 i, i64 j, i64 row_stride, i64 col_stride,
                                                Visibility sight) {
    const T* first = in_global(data) + (i * row_stride + j * col_stride);
    CF_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CF_UNROLL
      for (int c = 0; c < kCols; ++c) {
        const bool inside = i + query_ahead(r) < sight.q_length && j + key_ahead(c) < sight.kv_length;
        if (inside) batch[r][c] = joined(batch[r][c], first[query_ahead(r) * row_stride + key_ahead(c) * col_stride]);
      }
    }
  }

  // What an element of the bias, or of the mask, makes of an addend.
  template <class T> static CF_DEVICE Score joined(Score, T bias) { return convert<Score>(bias); }
  static CF_DEVICE Score joined(Score bias, u8 allowed) { return masked(bias, allowed); }

  template <class T> static CF_DEVICE void load_bias(Batch& batch, const Addends& from, i64 i, i64 j, Visibility sight) {
    load(batch, static_cast<const T*>(from.bias) + from.bias_first, i, j, opaque(from.bias_row), from.bias_col, sight);
  }

  static CF_DEVICE void load_batch(Batch& batch, const Addends& from, i64 i, i64 j, Visibility sight) {
    clear(batch);
    if (from.bias != nullptr) {
      switch (from.bias_kind) {
        case kFloat16: load_bias<float16>(batch, from, i, j, sight); break;
        case kBFloat16: load_bias<bfloat16>(batch, from, i, j, sight); break;
        case kFloat32: load_bias<float>(batch, from, i, j, sight); break;
        default: load_bias<double>(batch, from, i, j, sight);
      }
    }
    if (from.mask != nullptr) load(batch, from.mask, i, j, opaque(from.mask_row), from.mask_col, sight);
  }

  // The addends of the tile at (row, col) into `tile`, the warp's part of it.
  static CF_DEVICE void stage(Score* tile, const Addends& from, Visibility sight, i32 row, i32 col) {
    const i32 down = lane_index() / kAcross, across = lane_index() % kAcross, own = warp_index() * kWarpLanesY;
    const i32 k = key_slot(across) + (kOnY ? 0 : own);
    CF_UNROLL_1
    for (i32 first = 0; first < kSteps; first += kRows) {
      const i32 q = query_slot(down + kDown * first) + (kOnY ? own : 0);
      Batch batch;
      load_batch(batch, from, row + Tile::Queries::index(q), col + Tile::Keys::index(k), sight);
      CF_UNROLL
      for (int r = 0; r < kRows; ++r) {
        CF_UNROLL
        for (int c = 0; c < kCols; ++c) {
          const i32 at_q = q + query_slot(kDown * r), at_k = k + key_slot(kAcross * c);
          tile[kOnY ? at_q * Tile::kStep + at_k : at_k * Tile::kStep + at_q] = batch[r][c];
        }
      }
    }
  }
};
