// Mask and bias of a warp's step: one number for each score, -inf where the mask forbids, staged in shared memory.
//
// Whether four neighbours move at once is known beforehand, the kind of a bias is looked at once a step, and a mask's bytes
// become bits of all four numbers at once; in the backward loads begin before the products. Times the plain call before and
// after (H200, 2026-11-30, bfloat16, 16384 tokens, L 4096, one mask a batch item, one bias a head): forward D 128 mask 3.26 to
// 2.46, bias 3.40 to 2.46 (with 128 queries and steps of 64 keys 2.23 and 2.30), D 64 3.38 to 2.25 and 3.80 to 2.27; backward
// D 128 2.08 to 1.73 and 2.34 to 1.80, D 64 2.35 to 1.88 and 2.71 to 2.02 (with steps of 64 1.87 and 1.84).
// In the forward's optimistic step an addend takes one instruction instead of three (2026-11-30, ms, L 4096; mask, bias, both):
// D 64 3.914, 3.966, 4.220 to 3.713, 3.779, 4.066, D 128 3.201, 3.297, 3.447 to 3.155, 3.255, 3.403, D 256 nothing. More warps of 16
// rows each then are slower: D 64 with 64 queries and three blocks a multiprocessor 4.343, 4.469, 4.759, four 4.129, 4.262, 4.550.
//
// Not done: addends that each lane of the forward holds itself, with keys in an order in which a lane's are neighbours, nothing
// in shared memory (2026-11-30, L 4096, ms, before and then; D 128, 128 queries and steps of 64 in eight warps; D 64, 128 keys
// and steps of 32 in four): mask 3.18 to 2.93 and 3.90 to 3.22, bias 3.27 to 3.15 and 3.95 to 3.68, float32 bias 3.38 to 3.40
// and 3.96 to 3.40, mask and dropout 3.41 to 3.12 and 4.64 to 3.93, mask and softcap 3.78 to 3.55 and 5.15 to 4.61, bias and ALiBi
// 3.77 to 3.84 and 5.22 to 4.59; but mask and bias 3.41 to 3.67 and 4.18 to 4.48 (D 256 3.90 to 4.19), and 8 bytes spilled with
// softcap. 32 rows a warp at D 128 in steps of 32: slower than either.
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
  static constexpr i32 kNoBias = -1;

  Addends from;
  i32 rows, cols;
  bool aligned;      // whether four neighbours move at once where a row begins at a multiple of four

  AddendSource() = default;
  CF_DEVICE AddendSource(const Addends& addends, i32 row_count, i32 col_count)
      : from(addends), rows(row_count), cols(col_count), aligned(true) {
    if (from.bias != nullptr) {
      aligned = from.bias_kind != kFloat64 && from.bias_col == 1 && from.bias_row % 4 == 0 &&
                reinterpret_cast<u64>(bias_at(0, 0)) % (4 * bias_bytes()) == 0;
    }
    if (from.mask != nullptr) {
      aligned = aligned && from.mask_col == 1 && from.mask_row % 4 == 0 && reinterpret_cast<u64>(from.mask) % 4 == 0;
    }
  }

  CF_DEVICE i32 bias_bytes() const { return from.bias_kind == kFloat32 ? 4 : from.bias_kind == kFloat64 ? 8 : 2; }
  CF_DEVICE const u8* bias_at(i32 i, i32 j) const {
    return static_cast<const u8*>(from.bias) + (from.bias_first + i * from.bias_row + j * from.bias_col) * bias_bytes();
  }
  CF_DEVICE const u8* mask_at(i32 i, i32 j) const { return from.mask + (i * from.mask_row + j * from.mask_col); }

  // Begins to load the addends of rows from `row` and columns from `col`, a multiple of four.
  template <int kRows, int kCols> CF_DEVICE void fetch(AddendBatch<kRows, kCols>& batch, i32 row, i32 col) const {
    using Batch = AddendBatch<kRows, kCols>;
    batch.packed = aligned && row + kRows <= rows && col + kCols <= cols;
    if (!batch.packed) return;
    const i32 i = row + i32(lane_index()) / Batch::kGroups, j = col + i32(lane_index()) % Batch::kGroups * 4;
    constexpr i32 kRowStep = 32 / Batch::kGroups;
    static_assert(32 % Batch::kGroups == 0, "a lane keeps its columns");
    if (from.mask != nullptr) {
      const u8* at = mask_at(i, j);
      const i64 step = kRowStep * from.mask_row;
      CF_UNROLL
      for (i32 n = 0; n < Batch::kMoves; ++n, at += step) batch.seen[n] = *reinterpret_cast<const u32*>(at);
    } else {
      CF_UNROLL
      for (i32 n = 0; n < Batch::kMoves; ++n) batch.seen[n] = 0x01010101u;
    }
    if (from.bias == nullptr) return;
    const u8* at = bias_at(i, j);
    const i64 step = kRowStep * from.bias_row * bias_bytes();
    if (from.bias_kind == kFloat32) {
      load_bias<4>(batch, at, step);
    } else {
      load_bias<2>(batch, at, step);
    }
  }

  template <int kWords, int kRows, int kCols>
  static CF_DEVICE void load_bias(AddendBatch<kRows, kCols>& batch, const u8* at, i64 step) {
    CF_UNROLL
    for (i32 n = 0; n < AddendBatch<kRows, kCols>::kMoves; ++n, at += step) {
      const Packed<u32, kWords> four = *reinterpret_cast<const Packed<u32, kWords>*>(at);
      CF_UNROLL
      for (int x = 0; x < kWords; ++x) batch.bias[n][x] = four.value[x];
    }
  }

  // The bits of number x of four.
  template <i32 kKind> static CF_DEVICE u32 number(const u32 (&words)[4], int x) {
    if constexpr (kKind == kNoBias) return 0;
    if constexpr (kKind == kFloat32) return words[x];
    if constexpr (kKind == kBFloat16) return x % 2 == 0 ? words[x / 2] << 16 : words[x / 2] & 0xffff0000u;
    return bits_of(convert<float>(float16{u16(words[x / 2] >> (x % 2 * 16))}));
  }

  CF_DEVICE float addend_at(i32 i, i32 j) const {
    if (i >= rows || j >= cols) return 0.0f;
    const i64 index = from.bias_first + i * from.bias_row + j * from.bias_col;
    const float bias = from.bias == nullptr ? 0.0f : load_kind<float>(from.bias, from.bias_kind, index);
    return masked(bias, from.mask == nullptr ? u8(1) : *mask_at(i, j));
  }

  // Lays out a batch whose bias is of that kind; false if it forbids every score of the lane.
  template <i32 kKind, int kRows, int kCols>
  static CF_DEVICE bool lay_out_packed(const AddendBatch<kRows, kCols>& batch, u32 to) {
    using Batch = AddendBatch<kRows, kCols>;
    constexpr u32 kForbidden = 0xff800000u;      // -inf
    bool any = false;
    CF_UNROLL
    for (i32 n = 0; n < Batch::kMoves; ++n) {
      const u32 seen = batch.seen[n];
      const u32 signs = seen | ((seen & 0x7f7f7f7fu) + 0x7f7f7f7fu);      // set in the bytes that are not 0
      u32 words[4];
      CF_UNROLL
      for (int x = 0; x < 4; ++x) {
        words[x] = lop3<0xca>(prmt(signs, 0, 0x8888u + 0x1111u * x), number<kKind>(batch.bias[n], x), kForbidden);
        if constexpr (kKind != kNoBias) any = any || words[x] != kForbidden;
      }
      if constexpr (kKind == kNoBias) any = any || seen != 0;
      const i32 move = lane_index() + 32 * n;
      st_shared_128(to + (move / Batch::kGroups * Staging<kCols>::kRow + move % Batch::kGroups * 4) * 4, words);
    }
    return any;
  }

  // Lays them out as numbers in the warp's staging area; false if they forbid every score.
  template <int kRows, int kCols>
  CF_DEVICE bool lay_out(const AddendBatch<kRows, kCols>& batch, u32 to, i32 row, i32 col) const {
    const i32 kind = from.bias == nullptr ? kNoBias : from.bias_kind;
    bool any = false;
    warp_barrier();      // the lanes have read what was there
    if (batch.packed) {
      if (kind == kNoBias) any = lay_out_packed<kNoBias>(batch, to);
      else if (kind == kBFloat16) any = lay_out_packed<kBFloat16>(batch, to);
      else if (kind == kFloat16) any = lay_out_packed<kFloat16>(batch, to);
      else any = lay_out_packed<kFloat32>(batch, to);
    } else {
      CF_UNROLL_1
      for (i32 n = lane_index(); n < kRows * kCols; n += 32) {
        const i32 i = n / kCols, j = n % kCols;
        const float addend = addend_at(row + i, col + j);
        any = any || addend != -Limits<float>::infinity();
        st_shared_32(to + (i * Staging<kCols>::kRow + j) * 4, bits_of(addend));
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

// join(score, addend) for all of a tile. Addends are staged by query and key, so a turned tile reads them by column.
template <bool kTurned, int kRows, int kCols, class Join>
CF_DEVICE void join_staged(float (&s)[kRows][kCols], u32 staged, Join join) {
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
        ld_shared_f32x2(first, second, staged + (fragment_row(u) * Staging<kStep>::kRow + fragment_col(w)) * 4);
      }
      join(s[u][w], first);
      join(s[u][w + 1], second);
    }
  }
}
