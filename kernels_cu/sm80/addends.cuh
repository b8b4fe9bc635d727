// Mask and bias of a warp's step: one number for each score, -inf where the mask forbids, staged in shared memory.
#pragma once
#include "attn/score.cuh"
#include "sm80/product.cuh"

// A row of staged addends is kCols floats and 8 more, so that the reads of a fragment meet no bank twice.
template <int kCols> struct Staging { static constexpr i32 kRow = kCols + 8; };

// Mask and bias of kRows x kCols scores on their way: four neighbours of a row at a time, as they lie in memory.
template <int kRows, int kCols> struct AddendBatch {
  static constexpr i32 kGroups = kCols / 4, kMoves = kRows * kGroups / 32;
  static_assert(kRows * kGroups % 32 == 0, "whole warps");
  u32 bias[kMoves][4], seen[kMoves];
  bool packed;      // else they are loaded one by one when they are laid out
};

// Where the addends of one score matrix lie; nothing outside rows x cols is touched.
struct AddendSource {
  Addends from;
  i32 rows, cols;

  CF_DEVICE i32 bias_bytes() const { return from.bias_kind == kFloat32 ? 4 : from.bias_kind == kFloat64 ? 8 : 2; }
  CF_DEVICE const u8* bias_at(i32 i, i32 j) const {
    return static_cast<const u8*>(from.bias) + (from.bias_first + i * from.bias_row + j * from.bias_col) * bias_bytes();
  }
  CF_DEVICE const u8* mask_at(i32 i, i32 j) const { return from.mask + (i * from.mask_row + j * from.mask_col); }

  // Whether all of a batch is there and moves by four.
  CF_DEVICE bool packed(i32 row, i32 col, i32 row_stop, i32 col_stop) const {
    const bool bias = from.bias_kind != kFloat64 && from.bias_col == 1 && from.bias_row % 4 == 0 &&
                      reinterpret_cast<u64>(bias_at(row, col)) % (4 * bias_bytes()) == 0;
    const bool mask = from.mask_col == 1 && from.mask_row % 4 == 0 && reinterpret_cast<u64>(mask_at(row, col)) % 4 == 0;
    return row_stop <= rows && col_stop <= cols && (bias || from.bias == nullptr) && (mask || from.mask == nullptr);
  }

  // Begins to load the addends of rows from `row` and columns from `col`.
  template <int kRows, int kCols> CF_DEVICE void fetch(AddendBatch<kRows, kCols>& batch, i32 row, i32 col) const {
    using Batch = AddendBatch<kRows, kCols>;
    batch.packed = packed(row, col, row + kRows, col + kCols);
    if (!batch.packed) return;
    const i32 i = row + i32(lane_index()) / Batch::kGroups, j = col + i32(lane_index()) % Batch::kGroups * 4;
    constexpr i32 kRowStep = 32 / Batch::kGroups;
    static_assert(32 % Batch::kGroups == 0, "a lane keeps its columns");
    CF_UNROLL
    for (i32 n = 0; n < Batch::kMoves; ++n) {
      batch.seen[n] = from.mask == nullptr ? 0x01010101u : *reinterpret_cast<const u32*>(mask_at(i + n * kRowStep, j));
    }
    if (from.bias_kind == kFloat32) {
      CF_UNROLL
      for (i32 n = 0; n < Batch::kMoves; ++n) {
        Packed<u32, 4> four{};
        if (from.bias != nullptr) four = *reinterpret_cast<const Packed<u32, 4>*>(bias_at(i + n * kRowStep, j));
        CF_UNROLL
        for (int x = 0; x < 4; ++x) batch.bias[n][x] = four.value[x];
      }
    } else {
      CF_UNROLL
      for (i32 n = 0; n < Batch::kMoves; ++n) {
        Packed<u32, 2> four{};
        if (from.bias != nullptr) four = *reinterpret_cast<const Packed<u32, 2>*>(bias_at(i + n * kRowStep, j));
        batch.bias[n][0] = four.value[0];
        batch.bias[n][1] = four.value[1];
      }
    }
  }

  CF_DEVICE float addend(const u32 (&words)[4], int x) const {
    const u16 half = u16(words[x / 2] >> (x % 2 * 16));
    switch (from.bias_kind) {
      case kFloat16: return convert<float>(float16{half});
      case kBFloat16: return convert<float>(bfloat16{half});
      default: return float_of(words[x]);
    }
  }

  CF_DEVICE float addend_at(i32 i, i32 j) const {
    if (i >= rows || j >= cols) return 0.0f;
    const i64 index = from.bias_first + i * from.bias_row + j * from.bias_col;
    const float bias = from.bias == nullptr ? 0.0f : load_kind<float>(from.bias, from.bias_kind, index);
    return masked(bias, from.mask == nullptr ? u8(1) : *mask_at(i, j));
  }

  // Lays them out as numbers in the warp's staging area; false if they forbid every score.
  template <int kRows, int kCols>
  CF_DEVICE bool lay_out(const AddendBatch<kRows, kCols>& batch, u32 to, i32 row, i32 col) const {
    using Batch = AddendBatch<kRows, kCols>;
    bool any = false;
    const auto place = [&](i32 n) {
      const i32 move = lane_index() + 32 * n;
      return to + (move / Batch::kGroups * Staging<kCols>::kRow + move % Batch::kGroups * 4) * 4;
    };
    const auto seen = [&](float x) {
      any = any || x != -Limits<float>::infinity();
      return bits_of(x);
    };
    u32 words[4];
    warp_barrier();      // the lanes have read what was there
    if (batch.packed) {
      CF_UNROLL
      for (i32 n = 0; n < Batch::kMoves; ++n) {
        CF_UNROLL
        for (int x = 0; x < 4; ++x) words[x] = seen(masked(addend(batch.bias[n], x), u8(batch.seen[n] >> (8 * x))));
        st_shared_128(place(n), words);
      }
    } else {
      CF_UNROLL_1
      for (i32 n = lane_index(); n < kRows * kCols; n += 32) {
        const i32 i = n / kCols, j = n % kCols;
        st_shared_32(to + (i * Staging<kCols>::kRow + j) * 4, seen(addend_at(row + i, col + j)));
      }
    }
    warp_barrier();      // what all lanes have written is there
    return vote_any(any);
  }

  template <int kRows, int kCols> CF_DEVICE bool stage(u32 to, i32 row, i32 col) const {
    AddendBatch<kRows, kCols> batch;
    fetch(batch, row, col);
    return lay_out(batch, to, row, col);
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
