// Mask and bias on their way to scores of the backward. Every warp brings those of its 16 keys to shared memory itself,
// a query tile ahead by cp.async: no register waits for memory.
//
// Milliseconds of a whole backward at (1, 16, 4096, head dim), each thread reading its addends where they lie, and now
// (H200, 2026-11-30, bfloat16; at head dim 256 with sm90/backward_q.cu, which has sm90/addend_rows.cuh):
//
//                                                 64             128            256
//   plain                                         0.45           0.72           1.52   1.48
//   mask (1, 16, 4096, 4096)                      1.52   0.83    1.71   1.02    4.23   2.21
//     through registers, under dP                        1.00           1.18
//   bias                                          3.45   0.83    3.85   1.02    7.95   2.16
//     and its gradient, from a kernel of its own         1.54           1.97
//     from this one                               4.23   1.04    4.82   1.22    9.33   2.18
//   float32 bias                                  2.41   0.91    2.52   1.06    6.90   2.42
//   mask and bias                                 4.33   0.98    4.81   1.17           2.55
//
// By cp.async one row that all rows repeat is slow (a mask (1, 1, 1, 4096): 2.23 and 1.63): it is read through the L1
// cache (0.88 and 1.16, where plain took 0.49 and 0.75). Nothing at head dim 64: weights not rounded, two shares, three
// stages, dP begun before scores are shaped.
#pragma once
#include "core/warp.cuh"
#include "sm90/backward_feed.cuh"

constexpr i32 kAddendKeys = 16;                                 // of a warp
constexpr u32 kPieceBytes = 512;
// Pieces of a warp's bias of float32, twice as many as those of 16 bits; then, or (above head dim 64) instead of the
// second half, those of a mask. So beside a bias of float32 some masks are read from where they lie.
constexpr u32 kBiasPieces = 8, kMaskPiece = kHeadDim <= 64 ? kBiasPieces : kBiasPieces / 2;
constexpr u32 kAddendPieces = kHeadDim <= 64 ? kBiasPieces + 2 : kBiasPieces;
constexpr u32 kAddendBytes = kAddendPieces * kPieceBytes;
static_assert(!kMaskOrBias || kBlockQ == 64, "two rows a lane");

CF_DEVICE bool has_mask(const Params& p) { return kMaskOrBias && p.call.mask != nullptr; }
CF_DEVICE bool has_bias(const Params& p) { return kMaskOrBias && p.call.bias != nullptr; }
CF_DEVICE bool is_narrow(const Params& p) { return p.bias_kind == KindOf<Element>::value; }
CF_DEVICE bool bias_comes(const Params& p) { return has_bias(p) && p.bias.row != 0; }
CF_DEVICE bool mask_comes(const Params& p) {      // one of one row is read through the L1 cache
  const bool room = kMaskPiece == kBiasPieces || !bias_comes(p) || p.bias.col == 0 || is_narrow(p);
  return has_mask(p) && p.mask.row != 0 && room;
}

// Bit n of the result: whether byte n is not zero.
CF_DEVICE u32 bits_of_bytes(u32 bytes) {
  const u32 signs = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u;
  return (signs >> 7) * 0x01020408u >> 24;
}

// Where the addends of a warp's keys lie. A row of a bias of 16 bits is two chunks of 16 bytes, one of float32 is four;
// they are swizzled so that who reads together reads from different banks. A row of a mask is one chunk.
struct AddendTile {
  u32 at;

  template <i32 kBytes> CF_DEVICE u32 chunk(i32 row, i32 number) const {
    if (kBytes == 2) return at + row / 16 * kPieceBytes + row % 16 * 32 + (number ^ row / 4 % 2) * 16;
    return at + row / 8 * kPieceBytes + row / 2 % 4 * 128 + ((row % 2 * 4 + number) ^ row / 2 % 4 * 2) * 16;
  }
  CF_DEVICE u32 mask_row(i32 row) const { return at + (kMaskPiece + row / 32) * kPieceBytes + row % 32 * 16; }

  // Starts the way of what meets the scores of rows from `row` and the warp's keys from `key` on. Rows past the last
  // are whatever is there: they are not used.
  template <i32 kBytes> CF_DEVICE void fetch_bias(const Params& p, const Addends& a, i32 row, i32 key, i32 lane) const {
    constexpr i32 kChunks = kBytes, kRows = 32 / kChunks;      // chunks of a row; rows at once
    const i32 r = lane / kChunks, c = lane % kChunks, last = p.seqlen_q - 1 - row;
    const u32 bytes = u32(clamp(smaller(p.seqlen_k - key, kAddendKeys) * kBytes - 16 * c, 0, 16));
    const i64 stride = a.bias_row * kBytes;
    const u8* from = static_cast<const u8*>(a.bias) + (a.bias_first + key) * kBytes + 16 * c;
    from += (row + smaller(r, last)) * stride;
    CF_UNROLL
    for (i32 n = 0; n < kBlockQ; n += kRows) {
      cp_async_16(chunk<kBytes>(r + n, c), in_global(from), bytes);
      if (r + n + kRows <= last) from += kRows * stride;
    }
  }
  CF_DEVICE void fetch_mask(const Params& p, const Addends& a, i32 row, i32 key, i32 lane) const {
    const u32 bytes = u32(clamp(p.seqlen_k - key, 0, 16));
    CF_UNROLL
    for (i32 n = 0; n < kBlockQ; n += 32) {
      const u8* from = a.mask + smaller(row + lane + n, p.seqlen_q - 1) * a.mask_row;
      if (a.mask_col == 0) st_shared_32(mask_row(lane + n), *in_global(from));
      else cp_async_16(mask_row(lane + n), in_global(from) + key, bytes);
    }
  }
  // A bias of one column: a number a row.
  CF_DEVICE void fetch_column(const Params& p, const Addends& a, i32 row, i32 lane) const {
    CF_UNROLL_1
    for (i32 n = lane; n < kBlockQ; n += 32) {
      const i64 from = a.bias_first + smaller(row + n, p.seqlen_q - 1) * a.bias_row;
      st_shared_32(at + n * 4, bits_of(load_kind<float>(a.bias, a.bias_kind, from)));
    }
  }
  CF_DEVICE void fetch(const Params& p, const Addends& a, i32 row, i32 key, i32 lane) const {
    if (bias_comes(p)) {
      if (a.bias_col == 0) fetch_column(p, a, row, lane);
      else if (is_narrow(p)) fetch_bias<2>(p, a, row, key, lane);
      else fetch_bias<4>(p, a, row, key, lane);
    }
    if (mask_comes(p)) fetch_mask(p, a, row, key, lane);
    cp_async_commit_group();
  }

  // use(entry, addend) for all of a thread's entries, from what has come of the bias.
  template <class Use> CF_DEVICE void for_bias(const Params& p, i32 lane, Use use) const {
    if (p.bias.col == 0) {
      CF_UNROLL
      for (int j = 0; j < kBlockQ / 8; ++j) {
        float x, y;
        ld_shared_f32x2(x, y, at + lane % 4 * 8 + j * 32);
        use(4 * j, x), use(4 * j + 1, y), use(4 * j + 2, x), use(4 * j + 3, y);
      }
    } else if (is_narrow(p)) {
      const u32 from = chunk<2>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
      CF_UNROLL
      for (int j = 0; j < kBlockQ / 8; j += 2) {
        u32 words[4];            // entries 4 j + 2 n and the one after
        ldmatrix_x4_trans(words, from + j / 2 * kPieceBytes);
        CF_UNROLL
        for (int n = 0; n < 8; ++n) use(4 * j + n, convert<float>(Element{u16(words[n / 2] >> n % 2 * 16)}));
      }
    } else {
      const u32 from = chunk<4>(lane % 4 * 2, lane / 16) + lane / 4 % 4 * 4;
      CF_UNROLL
      for (int n = 0; n < kBlockQ / 2; ++n) {
        use(n, ld_shared_f32((from ^ (n % 2 * 64 + n / 2 % 2 * 32)) + n / 4 * kPieceBytes));
      }
    }
  }

  // Bit n: whether row `l` of the tile sees the warp's key n; `row` and `key` are its place in the matrix.
  CF_DEVICE u32 mask_bits(const Params& p, const Addends& a, i32 l, i32 row, i32 key) const {
    u32 bytes[4];
    if (mask_comes(p)) {
      ld_shared_128(bytes, mask_row(l));
    } else {
      const u8* from = a.mask + smaller(row, p.seqlen_q - 1) * a.mask_row;
      Packed<u32, 4> found{};
      if (a.mask_col == 0) found.value[0] = *in_global(from);
      else if (key < p.seqlen_k) found = *reinterpret_cast<const Packed<u32, 4>*>(in_global(from + key));
      CF_UNROLL
      for (int n = 0; n < 4; ++n) bytes[n] = found.value[n];
    }
    if (p.mask.col == 0) return (bytes[0] & 0xff) != 0 ? 0xffffu : 0u;
    u32 bits = 0;
    CF_UNROLL
    for (int n = 0; n < 4; ++n) bits |= bits_of_bytes(bytes[n]) << 4 * n;
    return bits;
  }

  // hide(entry) for a thread's entries that the mask forbids.
  template <class Hide>
  CF_DEVICE void for_masked(const Params& p, const Addends& a, i32 row, i32 key, i32 lane, Hide hide) const {
    const u32 bits = mask_bits(p, a, lane, row + lane, key) | mask_bits(p, a, lane + 32, row + lane + 32, key) << 16;
    CF_UNROLL
    for (int n = 0; n < kBlockQ / 8; ++n) {                     // queries 8 (n / 2) + 2 (l % 4) + n % 2, and 32 on
      const u32 word = shuffle(bits, u32(n / 2 * 8 + lane % 4 * 2 + n % 2)) >> lane / 4;
      CF_UNROLL
      for (int m = 0; m < 4; ++m) {
        if (!(word >> 8 * m & 1)) hide(4 * (n / 2 + m / 2 * 4) + m % 2 * 2 + n % 2);
      }
    }
  }
};
