// Mask and bias of key tiles, which come by TMA as keys do: where they lie in shared memory, and how consumers read them.
// A consumer has two places, each for its 64 rows of a key tile: boxes of biases, side by side, and one of mask bytes. A
// bias of float32 takes both places of biases. A box has 32, 64 or 128 bytes a row, and TMA's swizzle for as many, by
// which eight rows lie in different banks.
#pragma once
#include "sm90/addends.cuh"

constexpr i32 kPlaces = 2;
// Boxes side by side; kMaskBox, kBiasBox, kWideBox: bytes of a row of a box.
constexpr i32 kBiasBoxes = ceil_div(2 * kBlockKV, kBiasBox), kWideBoxes = ceil_div(4 * kBlockKV, kWideBox);
constexpr u32 kBiasPlace = 64 * kBiasBox * kBiasBoxes, kMaskPlace = 64 * kMaskBox;
static_assert(kMaskBox >= kBlockKV && kWideBox * kWideBoxes == 2 * kBiasBox * kBiasBoxes, "tiles fit their places");
constexpr u32 kMasksAt = kConsumers * kPlaces * kBiasPlace;
constexpr u32 kAddendBytes = kMaskOrBias ? kMasksAt + kConsumers * kPlaces * kMaskPlace : 0;

// Where it lies for a consumer. at: where all of them begin.
struct AddendPlace {
  u32 bias, wide, mask;

  CF_DEVICE AddendPlace(u32 at, i32 consumer, u32 place) {
    wide = at + consumer * kPlaces * kBiasPlace;
    bias = wide + place * kBiasPlace;
    mask = at + kMasksAt + (consumer * kPlaces + place) * kMaskPlace;
  }
};

CF_DEVICE bool mask_comes(const Params& p, const Addends& a) { return has_mask(p) && a.mask_col != 0; }
// A bias of float32 takes both places.
CF_DEVICE i32 places_of(Bias bias) { return bias == Bias::kFloat ? 1 : kPlaces; }

// Where a row of a box begins; its other chunks are found by an exclusive or.
template <i32 kBox> CF_DEVICE u32 swizzled(u32 row) { return row * kBox ^ (row * kBox >> 7 & (kBox / 16 - 1)) << 4; }

// A pair of biases, or -inf where its byte of a mask is 0.
CF_DEVICE u32 hide(u32 biases, u32 bytes) {
  constexpr u32 kHidden = KindOf<Element>::value == kFloat16 ? 0xfc00fc00u : 0xff80ff80u;
  const u32 signs = bytes | ((bytes & 0x7f7fu) + 0x7f7fu);      // set in the bytes that are not 0
  return lop3<0xca>(prmt(signs, 0, 0x9988u), biases, kHidden);
}

// use(entry, addend) for all of a thread's entries. kMasked: -inf where the mask forbids.
template <bool kMasked = false, class Use> CF_DEVICE void for_bias(const AddendPlace& tile, Use use) {
  constexpr int kChunks = kBiasBox / 16;
  const i32 thread = i32(opaque(thread_index() % 128)), lane = thread % 32, warp = thread / 32;
  const u32 from = tile.bias + swizzled<kBiasBox>(16 * warp + lane % 16) ^ (lane / 16 * 16);
  const u32 mask = tile.mask + swizzled<kMaskBox>(16 * warp + lane / 4) + lane % 4 * 2;
  const u32 mask8 = tile.mask + swizzled<kMaskBox>(16 * warp + lane / 4 + 8) + lane % 4 * 2;
  CF_UNROLL
  for (int j = 0; j < kPairs; j += 2) {
    u32 words[4];                // rows 0 to 7 and 8 to 15 of chunk j, and of chunk j + 1
    ldmatrix_x4(words, (from ^ (j % kChunks * 16)) + j / kChunks * 64 * kBiasBox);
    if constexpr (kMasked) {
      CF_UNROLL
      for (int n = 0; n < 4; ++n) {
        words[n] = hide(words[n], ld_shared_u16(((n % 2 == 0 ? mask : mask8) ^ (j / 2 * 16)) + n / 2 * 8));
      }
    }
    CF_UNROLL
    for (int n = 0; n < 8; ++n) {
      const u16 bits = words[n / 2] >> n % 2 * 16;
      use(4 * (j + n / 4) + n % 4, convert<float>(Element{bits}));
    }
  }
}

// The same for a bias of float32.
template <class Use> CF_DEVICE void for_wide_bias(const AddendPlace& tile, Use use) {
  constexpr int kBoxPairs = kWideBox / 32;
  const i32 thread = i32(opaque(thread_index() % 128)), lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  const u32 from[2] = {tile.wide + swizzled<kWideBox>(row) ^ (lane % 4 * 8),
                       tile.wide + swizzled<kWideBox>(row + 8) ^ (lane % 4 * 8)};
  CF_UNROLL
  for (int n = 0; n < kScores / 2; ++n) {
    const int j = n / 2;
    float first, second;
    ld_shared_f32x2(first, second, (from[n % 2] ^ (j % kBoxPairs * 32)) + j / kBoxPairs * 64 * kWideBox);
    use(2 * n, first), use(2 * n + 1, second);
  }
}

// Where the mask of a thread's row 8 h begins, and its bytes of columns 8 j and 8 j + 1.
CF_DEVICE u32 mask_row(const AddendPlace& tile, i32 thread, int h) {
  const i32 lane = thread % 32;
  return tile.mask + swizzled<kMaskBox>(thread / 32 * 16 + lane / 4 + 8 * h) + lane % 4 * 2;
}
CF_DEVICE u32 mask_pair(u32 row, int j) { return ld_shared_u16((row ^ (j / 2 * 16)) + j % 2 * 8); }

// use(entry, whether the mask allows it) for all of a thread's entries.
template <class Use> CF_DEVICE void for_mask(const AddendPlace& tile, Use use) {
  const i32 thread = i32(opaque(thread_index() % 128));
  const u32 rows[2] = {mask_row(tile, thread, 0), mask_row(tile, thread, 1)};
  CF_UNROLL
  for (int n = 0; n < kScores / 2; ++n) {
    const u32 pair = mask_pair(rows[n % 2], n / 2);
    use(2 * n, (pair & 0xffu) != 0), use(2 * n + 1, pair >> 8 != 0);
  }
}

CF_DEVICE void apply_mask(Scores& s, const AddendPlace& tile, const Params& p, const Addends& a, i32 row) {
  const i32 thread = i32(opaque(thread_index() % 128));
  hide_scores(s, p, a, row, [&](int h) { return mask_row(tile, thread, h); }, mask_pair);
}
