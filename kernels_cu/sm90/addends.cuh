// Mask and bias on their way to scores. A warp's rows of a key tile come to shared memory (cp.async) kAddendStages
// tiles ahead: no register waits for memory. A bias that is not of q's dtype is read from where it lies; before, it
// comes to the L2 cache.
// Who includes this says what Scores are: entry 4 j + 2 h + x of lane l is row 8 h + l / 4, column 8 j + 2 (l % 4) + x.
#pragma once
#include "attn/score.cuh"
#include "core/warp.cuh"

constexpr i32 kPairs = kBlockKV / 8;                  // of a thread and row: columns 8 j and 8 j + 1

// Rows are an odd number of 16 bytes apart, so that eight of one column lie in different banks.
constexpr u32 kMaskRowBytes = 16 * (kBlockKV / 16 | 1), kBiasRowBytes = 2 * kBlockKV + 16;
constexpr u32 kMaskBytes = kAddendStages * kBlockQ * kMaskRowBytes;
constexpr u32 kAddendBytes = kMaskBytes + kAddendStages * kBlockQ * kBiasRowBytes;
constexpr i32 kAhead = kMaskOrBias ? kAddendStages : 1;
// A bias of float32 takes the place of two tiles, and comes one tile ahead.
constexpr u32 kWideRowBytes = 2 * kBiasRowBytes;
constexpr bool kWideComes = kAddendStages == 2;

// Where a warp's 16 rows of a key tile lie in shared memory: all tiles of masks, then all of biases.
struct AddendTile {
  u32 mask, bias, wide;

  CF_DEVICE AddendTile(u32 at, i32 warp, i32 stage = 0)
      : mask(at + (stage * kBlockQ + warp * 16) * kMaskRowBytes),
        bias(at + kMaskBytes + (stage * kBlockQ + warp * 16) * kBiasRowBytes),
        wide(at + kMaskBytes + warp * 16 * kWideRowBytes) {}
};

CF_DEVICE bool has_mask(const Params& p) { return kMaskOrBias && p.call.mask != nullptr; }
CF_DEVICE bool has_bias(const Params& p) { return kMaskOrBias && p.call.bias != nullptr; }

// How the bias of a piece of work is had: there is none, it comes (in q's dtype, in float32), or it is read from where it
// lies.
enum class Bias { kNone, kComes, kComesWide, kInPlace, kOneColumn };

CF_DEVICE Bias bias_of(const Params& p, const Addends& a) {
  if (!has_bias(p)) return Bias::kNone;
  const bool one = uniform(i32(a.bias_col == 0)) != 0;
  if (one) return Bias::kOneColumn;
  return p.bias_kind == KindOf<Element>::value ? Bias::kComes : kWideComes ? Bias::kComesWide : Bias::kInPlace;
}

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
    const i32 bytes = kind == Bias::kComes ? 2 : 4;
    bias = in_global(static_cast<const u8*>(a.bias)) + (a.bias_first + from * a.bias_row) * bytes + lane % 2 * 16;
    const bool comes = has_mask(p) && a.mask_col != 0;
    mask = comes ? in_global(a.mask) + from * a.mask_row + lane % 2 * 16 : nullptr;
  }

  // Starts the way of what will meet the scores of keys from `first` on.
  CF_DEVICE void fetch_bias(const AddendTile& tile, Bias kind, i32 first, i32 keys, i32 lane) const {
    if (kind == Bias::kComes) {
      fetch_row<kBlockKV / 8>(tile.bias + lane / 2 * kBiasRowBytes, bias + i64(first) * 2, lane, 2 * keys);
    } else if (kind == Bias::kComesWide) {
      fetch_row<kBlockKV / 4>(tile.wide + lane / 2 * kWideRowBytes, bias + i64(first) * 4, lane, 4 * keys);
    } else if (kind == Bias::kInPlace) {
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

// A pair of biases, or -inf where its byte of a mask is 0.
CF_DEVICE u32 hide(u32 biases, u32 bytes) {
  constexpr u32 kHidden = KindOf<Element>::value == kFloat16 ? 0xfc00fc00u : 0xff80ff80u;
  const u32 signs = bytes | ((bytes & 0x7f7fu) + 0x7f7fu);      // set in the bytes that are not 0
  return lop3<0xca>(prmt(signs, 0, 0x9988u), biases, kHidden);
}

// use(entry, addend) for all of a thread's entries, from what has come of the bias. kMasked: and of the mask.
template <bool kMasked = false, class Use> CF_DEVICE void for_bias(const AddendTile& tile, Use use) {
  const i32 lane = i32(opaque(thread_index() % 32));
  const u32 from = tile.bias + lane % 16 * kBiasRowBytes + lane / 16 * 16;
  const u32 mask = tile.mask + lane / 4 * kMaskRowBytes + lane % 4 * 2;
  CF_UNROLL
  for (int j = 0; j < kPairs; j += 2) {
    u32 words[4];                // rows 0 to 7 and 8 to 15 of chunk j, and of chunk j + 1
    ldmatrix_x4(words, from + 16 * j);
    if constexpr (kMasked) {
      CF_UNROLL
      for (int n = 0; n < 4; ++n) {
        words[n] = hide(words[n], ld_shared_u16(mask + n % 2 * 8 * kMaskRowBytes + 8 * (j + n / 2)));
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
template <class Use> CF_DEVICE void for_wide_bias(const AddendTile& tile, Use use) {
  const i32 lane = i32(opaque(thread_index() % 32));
  const u32 from = tile.wide + lane / 4 * kWideRowBytes + lane % 4 * 8;
  CF_UNROLL
  for (int n = 0; n < kScores / 2; ++n) {
    float first, second;
    ld_shared_f32x2(first, second, from + n % 2 * 8 * kWideRowBytes + n / 2 * 32);
    use(2 * n, first), use(2 * n + 1, second);
  }
}

// The same for a bias of one column, or of float32 where q is not. Columns beyond the array have the addend 0; the last
// pair in it may reach one column further, into the padding of the row.
template <class Use> CF_DEVICE void for_bias_in_place(const Params& p, const Addends& a, i32 row, i32 col, Use use) {
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    const i64 first = a.bias_first + smaller(row + 8 * h, p.seqlen_q - 1) * a.bias_row + col * a.bias_col;
    const bool one = a.bias_col == 0;
    const float same = one ? load_kind<float>(a.bias, a.bias_kind, first) : 0.0f;
    const float* from = in_global(static_cast<const float*>(a.bias)) + first;
    CF_UNROLL
    for (int j = 0; j < kPairs; ++j) {
      Packed<float, 2> pair{{same, same}};
      if (!one && 8 * j < p.seqlen_k - col) pair = *reinterpret_cast<const Packed<float, 2>*>(from + 8 * j);
      use(4 * j + 2 * h, pair.value[0]), use(4 * j + 2 * h + 1, pair.value[1]);
    }
  }
}

// A bias of float32 in a tile that lies within the array: where this thread's columns begin.
struct BiasRows {
  const float* row[2];

  CF_DEVICE BiasRows(const Params& p, const Addends& a, i32 row, i32 col) {
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      this->row[h] = in_global(static_cast<const float*>(a.bias)) + a.bias_first + col +
                     smaller(row + 8 * h, p.seqlen_q - 1) * a.bias_row;
    }
  }
  template <class Use> CF_DEVICE void for_each(Use use) const {
    CF_UNROLL
    for (int n = 0; n < kScores / 2; ++n) {
      const auto pair = *reinterpret_cast<const Packed<float, 2>*>(in_global(row[n % 2]) + 8 * (n / 2));
      use(2 * n, pair.value[0]), use(2 * n + 1, pair.value[1]);
    }
  }
};

// Scores that the mask forbids become -inf. row: of this thread's entry 0.
CF_DEVICE void apply_mask(Scores& s, const AddendTile& tile, const Params& p, const Addends& a, i32 row) {
  const bool one = a.mask_col == 0;
  const i32 lane = i32(opaque(thread_index() % 32));
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    if (one) {
      const bool allowed = *in_global(a.mask + smaller(row + 8 * h, p.seqlen_q - 1) * a.mask_row) != 0;
      CF_UNROLL
      for (int n = 0; n < kScores / 2; ++n) {
        if (!allowed) s[n / 2 * 4 + 2 * h + n % 2] = -Limits<float>::infinity();
      }
    } else {
      CF_UNROLL
      for (int j = 0; j < kPairs; ++j) {
        const u32 pair = ld_shared_u16(tile.mask + (lane / 4 + 8 * h) * kMaskRowBytes + lane % 4 * 2 + 8 * j);
        if ((pair & 0xffu) == 0) s[4 * j + 2 * h] = -Limits<float>::infinity();
        if (pair >> 8 == 0) s[4 * j + 2 * h + 1] = -Limits<float>::infinity();
      }
    }
  }
}
