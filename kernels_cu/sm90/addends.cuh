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
constexpr u32 kAddendStageBytes = kBlockQ * (kMaskRowBytes + kBiasRowBytes);
constexpr u32 kAddendBytes = kAddendStages * kAddendStageBytes;
constexpr i32 kAhead = kMaskOrBias ? kAddendStages : 1;

// Where a warp's 16 rows of a key tile lie in shared memory.
struct AddendTile {
  u32 bias, mask;

  CF_DEVICE AddendTile(u32 at, i32 warp)
      : bias(at + kBlockQ * kMaskRowBytes + warp * 16 * kBiasRowBytes), mask(at + warp * 16 * kMaskRowBytes) {}
};

CF_DEVICE bool has_mask(const Params& p) { return kMaskOrBias && p.call.mask != nullptr; }
CF_DEVICE bool has_bias(const Params& p) { return kMaskOrBias && p.call.bias != nullptr; }

// How the bias of a piece of work is had: there is none, it comes, or it is read from where it lies.
enum class Bias { kNone, kComes, kInPlace, kOneColumn };

CF_DEVICE Bias bias_of(const Params& p, const Addends& a) {
  if (!has_bias(p)) return Bias::kNone;
  const bool one = uniform(i32(a.bias_col == 0)) != 0;
  return one ? Bias::kOneColumn : p.bias_kind == KindOf<Element>::value ? Bias::kComes : Bias::kInPlace;
}

// kCount chunks, every other one of a row. `bytes`: of the row that there are; what lies beyond becomes zeros, but for
// a chunk's rest.
template <int kCount> CF_DEVICE void fetch_row(u32 to, const u8* from, i32 lane, i32 bytes) {
  from = in_global(from) + lane % 2 * 16, to += lane % 2 * 16, bytes -= lane % 2 * 16;
  if (bytes >= 16 * kCount) {
    CF_UNROLL
    for (int n = 0; n < kCount; n += 2) {
      if (n + 1 < kCount || lane % 2 == 0) cp_async_16(to + 16 * n, from + 16 * n);
    }
  } else {
    CF_UNROLL
    for (int n = 0; n < kCount; n += 2) {
      if (n + 1 < kCount || lane % 2 == 0) cp_async_16(to + 16 * n, from + 16 * n, 16 * n < bytes ? 16 : 0);
    }
  }
}

// Starts the way of what will meet the scores of rows from `row` on with keys from `first` on. Two lanes a row. Rows
// past the end repeat the last one: they are not used.
CF_DEVICE void fetch_addends(const AddendTile& tile, const Params& p, const Addends& a, Bias kind, i32 row, i32 first,
                             i32 lane) {
  const i32 keys = smaller(p.seqlen_k - first, kBlockKV + 16);      // their bytes fit 32 bits
  const i64 from = smaller(row + lane / 2, p.seqlen_q - 1);
  if (kind == Bias::kComes || kind == Bias::kInPlace) {
    const i32 bytes = kind == Bias::kInPlace ? 4 : 2;
    const u8* source = static_cast<const u8*>(a.bias) + (a.bias_first + from * a.bias_row + first) * bytes;
    if (kind == Bias::kComes) {
      fetch_row<kBlockKV / 8>(tile.bias + lane / 2 * kBiasRowBytes, source, lane, 2 * keys);
    } else {
      CF_UNROLL
      for (int n = 0; n < 4 * kBlockKV; n += 256) {
        if (n + lane % 2 * 128 < 4 * keys) prefetch_l2(source + n + lane % 2 * 128);
      }
    }
  }
  if (has_mask(p) && a.mask_col != 0) {
    fetch_row<kBlockKV / 16>(tile.mask + lane / 2 * kMaskRowBytes, a.mask + from * a.mask_row + first, lane, keys);
  }
}

CF_DEVICE void wait_for_addends() {
  cp_async_wait_group<kAhead - 1>();
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
