// Mask and bias of a warp's step: one number for each score, -inf where the mask forbids, staged in shared memory.
#pragma once
#include "attn/score.cuh"
#include "sm80/product.cuh"

// A row of staged addends is kCols floats and 8 more, so that the reads of a fragment meet no bank twice.
template <int kCols> struct Staging { static constexpr i32 kRow = kCols + 8; };

template <class T> CF_DEVICE Packed<T, 4> four_at(const T* from, i64 step, bool packed, i32 count) {
  Packed<T, 4> x{};
  if (packed && count >= 4) return *reinterpret_cast<const Packed<T, 4>*>(from);
  CF_UNROLL
  for (i32 n = 0; n < 4; ++n) {
    if (n < count) x.value[n] = from[n * step];
  }
  return x;
}

template <class T> CF_DEVICE bool packed_by_four(const T* from, i64 row_step, i64 col_step) {
  return col_step == 1 && reinterpret_cast<u64>(from) % (4 * sizeof(T)) == 0 && row_step % 4 == 0;
}

// Where the addends of one score matrix of rows x cols lie; nothing outside it is touched.
struct AddendSource {
  Addends from;
  i32 rows, cols;

  template <class Bias, int kRows, int kCols> CF_DEVICE bool stage_as(u32 to, i32 row, i32 col) const {
    constexpr i32 kGroups = kCols / 4, kMoves = kRows * kGroups / 32;
    constexpr i32 kBatch = sizeof(Bias) == 8 ? 2 : kMoves % 4 == 0 ? 4 : kMoves;      // loads in flight
    static_assert(kRows * kGroups % 32 == 0 && kMoves % kBatch == 0, "whole batches");
    const Bias* bias = static_cast<const Bias*>(from.bias) + from.bias_first;
    const bool bias_packed = packed_by_four(bias, from.bias_row, from.bias_col);
    const bool mask_packed = packed_by_four(from.mask, from.mask_row, from.mask_col);
    bool any = false;
    CF_UNROLL_1
    for (i32 first = 0; first < kMoves; first += kBatch) {
      Packed<Bias, 4> added[kBatch];
      Packed<u8, 4> seen[kBatch];
      CF_UNROLL
      for (i32 n = 0; n < kBatch; ++n) {
        const i32 move = lane_index() + 32 * (first + n), i = row + move / kGroups, j = col + move % kGroups * 4;
        const i32 count = i < rows ? clamp(cols - j, 0, 4) : 0;
        added[n] = Packed<Bias, 4>{};
        seen[n] = Packed<u8, 4>{{1, 1, 1, 1}};
        const Bias* of_bias = bias + i * from.bias_row + j * from.bias_col;
        const u8* of_mask = from.mask + i * from.mask_row + j * from.mask_col;
        if (from.bias != nullptr) added[n] = four_at(of_bias, from.bias_col, bias_packed, count);
        if (from.mask != nullptr) seen[n] = four_at(of_mask, from.mask_col, mask_packed, count);
      }
      CF_UNROLL
      for (i32 n = 0; n < kBatch; ++n) {
        const i32 move = lane_index() + 32 * (first + n);
        u32 words[4];
        CF_UNROLL
        for (int x = 0; x < 4; ++x) {
          const float addend = masked(convert<float>(added[n].value[x]), seen[n].value[x]);
          any = any || addend != -Limits<float>::infinity();
          words[x] = bits_of(addend);
        }
        st_shared_128(to + (move / kGroups * Staging<kCols>::kRow + move % kGroups * 4) * 4, words);
      }
    }
    return any;
  }

  // Stages the warp's addends of rows from `row` and columns from `col`; false if they forbid every one of them.
  template <int kRows, int kCols> CF_DEVICE bool stage(u32 to, i32 row, i32 col) const {
    bool any;
    warp_barrier();      // the lanes have read what was there
    switch (from.bias_kind) {
      case kFloat16: any = stage_as<float16, kRows, kCols>(to, row, col); break;
      case kBFloat16: any = stage_as<bfloat16, kRows, kCols>(to, row, col); break;
      case kFloat32: any = stage_as<float, kRows, kCols>(to, row, col); break;
      default: any = stage_as<double, kRows, kCols>(to, row, col);
    }
    warp_barrier();      // what all lanes have written is there
    return vote_any(any);
  }
};

// The addends of a tile join its scores; they are staged by query and key, so a turned tile reads them by column.
template <bool kTurned, int kRows, int kCols> CF_DEVICE void add_staged(float (&s)[kRows][kCols], u32 staged) {
  CF_UNROLL
  for (int u = 0; u < kRows; ++u) {
    CF_UNROLL
    for (int w = 0; w < kCols; w += 2) {
      float first, second;
      if constexpr (kTurned) {
        constexpr i32 kRow = Staging<8 * kRows>::kRow;
        const u32 at = staged + (fragment_col(w) * kRow + fragment_row(u)) * 4;
        first = ld_shared_f32(at);
        second = ld_shared_f32(at + kRow * 4);
      } else {
        ld_shared_f32x2(first, second, staged + (fragment_row(u) * Staging<4 * kCols>::kRow + fragment_col(w)) * 4);
      }
      s[u][w] = with_addend(s[u][w], first);
      s[u][w + 1] = with_addend(s[u][w + 1], second);
    }
  }
}
