// Mask and bias on their way to scores of the backward's second half. A warp's rows of a key tile come to shared memory
// (cp.async) kAddendStages tiles ahead: no register waits for memory. A bias that is not of q's dtype is read from where
// it lies; before, it comes to the L2 cache.
#pragma once
#include "sm90/addends.cuh"

// Rows are an odd number of 16 bytes apart, so that eight of one column lie in different banks.
constexpr u32 kMaskRowBytes = 16 * (kBlockKV / 16 | 1), kBiasRowBytes = 2 * kBlockKV + 16;
constexpr u32 kMaskBytes = kAddendStages * kBlockQ * kMaskRowBytes;
constexpr u32 kAddendBytes = kMaskBytes + kAddendStages * kBlockQ * kBiasRowBytes;
constexpr i32 kAhead = kMaskOrBias ? kAddendStages : 1;

// Where a warp's 16 rows of a key tile lie in shared memory: all tiles of masks, then all of biases.
struct AddendTile {
  u32 mask, bias;

  CF_DEVICE AddendTile(u32 at, i32 warp, i32 stage = 0)
      : mask(at + (stage * kBlockQ + warp * 16) * kMaskRowBytes),
        bias(at + kMaskBytes + (stage * kBlockQ + warp * 16) * kBiasRowBytes) {}
};

// kCount chunks, every other one of a row. `bytes`: of the row that there are; what lies beyond becomes zeros, but for
// a chunk's rest.
template <int kCount> CF_DEVICE void fetch_row(u32 to, const u8* from, i32 lane, i32 bytes) {
  to += lane % 2 * 16;
  if (bytes >= 16 * kCount) {
    CF_UNROLL
    for (int n = 0; n < kCount; n += 2) {
      if (n + 1 < kCount || lane % 2 == 0) cp_async_16(to + 16 * n, from + 16 * n);
    }
  } else {
    bytes -= lane % 2 * 16;
    CF_UNROLL
    for (int n = 0; n < kCount; n += 2) {
      if (n + 1 < kCount || lane % 2 == 0) cp_async_16(to + 16 * n, from + 16 * n, 16 * n < bytes ? 16 : 0);
    }
  }
}

// Keys from `first` on, or some more than a tile has: their bytes fit 32 bits.
CF_DEVICE i32 keys_from(const Params& p, i32 first) { return smaller(p.seqlen_k - first, kBlockKV + 16); }

// Where a lane's part of a warp's rows begins, from key 0 on: two lanes a row, every other chunk each. Rows past the end
// repeat the last one: they are not used.
struct AddendSource {
  const u8 *bias, *mask;         // mask: null where none comes

  CF_DEVICE AddendSource(const Params& p, const Addends& a, Bias kind, i32 row, i32 lane) {
    const i64 from = smaller(row + lane / 2, p.seqlen_q - 1);
    const i32 bytes = kind == Bias::kOwn ? 2 : 4;
    bias = in_global(static_cast<const u8*>(a.bias)) + (a.bias_first + from * a.bias_row) * bytes + lane % 2 * 16;
    const bool comes = has_mask(p) && a.mask_col != 0;
    mask = comes ? in_global(a.mask) + from * a.mask_row + lane % 2 * 16 : nullptr;
  }

  // Starts the way of what will meet the scores of keys from `first` on.
  CF_DEVICE void fetch_bias(const AddendTile& tile, Bias kind, i32 first, i32 keys, i32 lane) const {
    if (kind == Bias::kOwn) {
      fetch_row<kBlockKV / 8>(tile.bias + lane / 2 * kBiasRowBytes, bias + i64(first) * 2, lane, 2 * keys);
    } else if (kind == Bias::kFloat) {
      CF_UNROLL
      for (int n = 0; n < 4 * kBlockKV; n += 256) {
        if (n + lane % 2 * 128 < 4 * keys) prefetch_l2(bias + i64(first) * 4 + n + lane % 2 * 112);
      }
    }
  }
  CF_DEVICE void fetch_mask(const AddendTile& tile, i32 first, i32 keys, i32 lane) const {
    if (mask == nullptr) return;
    fetch_row<kBlockKV / 16>(tile.mask + lane / 2 * kMaskRowBytes, mask + first, lane, keys);
  }
};

// The same for rows from `row` on, all at once.
CF_DEVICE void fetch_addends(const AddendTile& tile, const Params& p, const Addends& a, Bias kind, i32 row, i32 first,
                             i32 lane) {
  const AddendSource source(p, a, kind, row, lane);
  source.fetch_bias(tile, kind, first, keys_from(p, first), lane);
  source.fetch_mask(tile, first, keys_from(p, first), lane);
}

template <i32 kGroups = kAhead - 1> CF_DEVICE void wait_for_addends() {
  cp_async_wait_group<kGroups>();
  warp_barrier();                // all lanes' chunks are there
}

// use(entry, addend) for all of a thread's entries, from what has come of the bias.
template <class Use> CF_DEVICE void for_bias(const AddendTile& tile, Use use) {
  const i32 lane = i32(opaque(thread_index() % 32));
  const u32 from = tile.bias + lane % 16 * kBiasRowBytes + lane / 16 * 16;
  CF_UNROLL
  for (int j = 0; j < kPairs; j += 2) {
    u32 words[4];                // rows 0 to 7 and 8 to 15 of chunk j, and of chunk j + 1
    ldmatrix_x4(words, from + 16 * j);
    CF_UNROLL
    for (int n = 0; n < 8; ++n) {
      const u16 bits = words[n / 2] >> n % 2 * 16;
      use(4 * (j + n / 4) + n % 4, convert<float>(Element{bits}));
    }
  }
}

CF_DEVICE void apply_mask(Scores& s, const AddendTile& tile, const Params& p, const Addends& a, i32 row) {
  const i32 lane = i32(opaque(thread_index() % 32));
  hide_scores(
      s, p, a, row, [&](int h) { return tile.mask + (lane / 4 + 8 * h) * kMaskRowBytes + lane % 4 * 2; },
      [](u32 from, int j) { return ld_shared_u16(from + 8 * j); });
}
