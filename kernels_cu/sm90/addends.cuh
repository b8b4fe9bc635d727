// Mask and bias on their way to scores. A warp's rows of the next key tile come to shared memory (cp.async) while it is
// busy with the tile before: no register waits for memory. A bias that is not of q's dtype is read from where it lies.
#pragma once
#include "sm90/softmax.cuh"

constexpr i32 kPairs = kBlockKV / 8;                  // of a thread and row: columns 8 j and 8 j + 1

constexpr u32 kBiasRowBytes = 2 * kBlockKV, kMaskRowBytes = kBlockKV;
constexpr u32 kAddendBytes = kMaskOrBias ? kBlockQ * (kMaskRowBytes + kBiasRowBytes) : 0;

// Where a warp's 16 rows lie in shared memory. Chunks of 16 bytes of the bias are swizzled so that eight rows of one
// column lie in different banks.
struct AddendTile {
  u32 bias, mask;

  CF_DEVICE AddendTile(u32 at, i32 warp)
      : bias(at + kBlockQ * kMaskRowBytes + warp * 16 * kBiasRowBytes), mask(at + warp * 16 * kMaskRowBytes) {}
  CF_DEVICE u32 bias_chunk(i32 row, i32 chunk) const {
    constexpr i32 kStep = kBiasRowBytes / 16 % 8, kShift = kStep == 0 ? 0 : kStep == 4 ? 1 : 2;
    return bias + row * kBiasRowBytes + (chunk ^ row % 8 >> kShift) * 16;
  }
};

CF_DEVICE bool has_mask(const Params& p) { return kMaskOrBias && p.call.mask != nullptr; }
CF_DEVICE bool has_bias(const Params& p) { return kMaskOrBias && p.call.bias != nullptr; }
CF_DEVICE bool mask_comes(const Params& p, const Addends& a) { return has_mask(p) && a.mask_col != 0; }
CF_DEVICE bool bias_comes(const Params& p, const Addends& a) {
  return has_bias(p) && a.bias_col != 0 && a.bias_kind == KindOf<Element>::value;
}

// Starts the way of what will meet the scores of rows from `row` on with keys from `first` on. Two lanes a row. Rows
// past the end repeat the last one: they are not used. Columns beyond the array become zeros, but for a chunk's rest.
CF_DEVICE void fetch_addends(const AddendTile& tile, const Params& p, const Addends& a, i32 row, i32 first, i32 lane) {
  lane = i32(opaque(lane));      // else what follows from it is kept in registers throughout
  const i32 r = lane / 2, from = smaller(row + r, p.seqlen_q - 1), keys = p.seqlen_k - first;
  if (bias_comes(p, a)) {
    const Element* source = static_cast<const Element*>(a.bias) + a.bias_first + from * a.bias_row + first;
    CF_UNROLL
    for (i32 chunk = lane % 2; chunk < kBlockKV / 8; chunk += 2) {
      cp_async_16(tile.bias_chunk(r, chunk), in_global(source) + 8 * chunk, 8 * chunk < keys ? 16 : 0);
    }
  }
  if (mask_comes(p, a)) {
    const u8* source = a.mask + from * a.mask_row + first;
    CF_UNROLL
    for (i32 chunk = lane % 2; chunk < kBlockKV / 16; chunk += 2) {
      const u32 to = tile.mask + r * kMaskRowBytes + chunk * 16;
      cp_async_16(to, in_global(source) + 16 * chunk, 16 * chunk < keys ? 16 : 0);
    }
  }
  cp_async_commit_group();
}

CF_DEVICE void wait_for_addends() {
  cp_async_wait_group<0>();
  warp_barrier();                // all lanes' chunks are there
}

// use(entry, addend) for all of a thread's entries, from what has come of the bias.
template <class Use> CF_DEVICE void for_bias(const AddendTile& tile, Use use) {
  const i32 lane = i32(opaque(thread_index() % 32));
  CF_UNROLL
  for (int j = 0; j < kPairs; j += 2) {
    u32 words[4];                // rows 0 to 7 and 8 to 15 of chunk j, and of chunk j + 1
    ldmatrix_x4(words, tile.bias_chunk(lane % 16, j + lane / 16));
    CF_UNROLL
    for (int n = 0; n < 8; ++n) {
      const u16 bits = words[n / 2] >> n % 2 * 16;
      use(4 * (j + n / 4) + n % 4, convert<float>(Element{bits}));
    }
  }
}

// A bias of one column, or of float32 where q is not. Pairs beyond the array repeat the last one, which may reach one
// column further, into the padding of the row: they are not used.
CF_DEVICE void add_bias_in_place(Scores& s, const Params& p, const Addends& a, i32 row, i32 col) {
  const i32 last_pair = p.seqlen_k - col - 1 & ~1;
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    const i64 first = a.bias_first + smaller(row + 8 * h, p.seqlen_q - 1) * a.bias_row + col * a.bias_col;
    const bool one = a.bias_col == 0;
    const float same = one ? load_kind<float>(a.bias, a.bias_kind, first) : 0.0f;
    CF_UNROLL
    for (int j = 0; j < kPairs; ++j) {
      const float* from = in_global(static_cast<const float*>(a.bias)) + first + smaller(8 * j, last_pair);
      Packed<float, 2> pair{{same, same}};
      if (!one) pair = *reinterpret_cast<const Packed<float, 2>*>(from);
      CF_UNROLL
      for (int x = 0; x < 2; ++x) s[4 * j + 2 * h + x] = with_addend(s[4 * j + 2 * h + x], pair.value[x]);
    }
  }
}

// A thread's part of the mask of a tile, a bit a score: bit 8 c + 4 g + 2 y + x of row h's word is the score in column
// pair 2 (c + 4 g) + y.
struct MaskBits { u32 word[2]; };

// Bits 7, 15, 23, 31: whether the byte is not zero.
CF_DEVICE u32 signs_of_bytes(u32 x) { return (((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) & 0x80808080u; }

// 16 columns of a mask as a nibble for each of the four lanes that share a row, a byte each.
CF_DEVICE u32 nibbles_of(const u32 (&bytes)[4]) {
  u32 two[2];
  CF_UNROLL
  for (int n = 0; n < 2; ++n) {
    const u32 z = signs_of_bytes(bytes[n]) >> 7 | signs_of_bytes(bytes[n + 2]) >> 5;     // bits 0, 8, .. and 2, 10, ..
    two[n] = (z | z >> 7) & 0x000f000fu;
  }
  return prmt(two[0], two[1], 0x6420);
}

// Byte i of lane j of four becomes byte j of lane i.
CF_DEVICE u32 transpose_of_four(u32 x, i32 lane) {
  x = prmt(x, shuffle_xor(x, 1), lane % 2 == 0 ? 0x6240 : 0x3715);
  return prmt(x, shuffle_xor(x, 2), lane / 2 % 2 == 0 ? 0x5410 : 0x3276);
}

// row: of this thread's entry 0.
CF_DEVICE void read_mask(MaskBits& bits, const AddendTile& tile, const Params& p, const Addends& a, i32 row) {
  if (!has_mask(p)) return;
  const i32 lane = i32(opaque(thread_index() % 32));
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    if (a.mask_col == 0) {
      bits.word[h] = *in_global(a.mask + smaller(row + 8 * h, p.seqlen_q - 1) * a.mask_row) != 0 ? ~0u : 0u;
      continue;
    }
    u32 own = 0;
    CF_UNROLL
    for (int half = 0; half < ceil_div(kBlockKV, 64); ++half) {
      const i32 chunk = lane % 4 + 4 * half;
      u32 bytes[4] = {0, 0, 0, 0};
      if (chunk < kBlockKV / 16) ld_shared_128(bytes, tile.mask + (lane / 4 + 8 * h) * kMaskRowBytes + chunk * 16);
      own |= nibbles_of(bytes) << 4 * half;
    }
    bits.word[h] = transpose_of_four(own, lane);
  }
}

CF_DEVICE void apply_mask(Scores& s, const MaskBits& bits) {
  CF_UNROLL
  for (int n = 0; n < kScores; ++n) {
    const int chunk = n / 8, bit = chunk % 4 * 8 + chunk / 4 * 4 + n / 4 % 2 * 2 + n % 2;
    if (!(bits.word[n / 2 % 2] >> bit & 1)) s[n] = -Limits<float>::infinity();
  }
}
