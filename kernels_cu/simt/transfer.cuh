// Tiles on their way between global memory, shared memory and registers.
//
// Whatever the strides, the same values arrive in the same places: where rows are packed a thread moves kVec elements
// at once, else one by one, along the axis of the smaller stride. What lies outside the given rows and columns is never
// touched; rows outside become zeros, columns outside are filled up to a multiple of kVec.
#pragma once
#include "attn/rows.cuh"
#include "core/ptx_sm80.cuh"
#include "simt/product.cuh"

using ElementVector = Packed<Element, kVec>;
using TensorRows = Rows<const Element>;

CF_DEVICE i64 magnitude(i64 x) { return x < 0 ? -x : x; }
CF_DEVICE constexpr bool is_power_of_two(i32 x) { return (x & (x - 1)) == 0; }

CF_DEVICE Vector widened(const ElementVector& x, Score factor) {
  Vector wide;
  CF_UNROLL
  for (int n = 0; n < kVec; ++n) wide.value[n] = convert<Score>(x.value[n]) * factor;
  return wide;
}

// Rows row + index(slot) below row_stop and columns [col, col_stop), times a factor, go to `tile`, kStep scores a slot.
// All threads.
template <int kSlots, int kWidth, int kStep, class Slots>
CF_DEVICE void load_tile(Score* tile, const TensorRows& from, i32 row, i32 row_stop, i32 col, i32 col_stop,
                         Score factor = Score(1)) {
  const TensorRows rows{in_global(from.base), from.row_stride, from.col_stride};
  constexpr i32 kGroups = kWidth / kVec, kAtOnce = kThreads / kGroups, kMoves = kSlots / kAtOnce;
  static_assert(is_power_of_two(kGroups) && is_power_of_two(kAtOnce) && kSlots % kAtOnce == 0, "slots part by bits");
  const i32 slot = thread_index() / kGroups, group = thread_index() % kGroups * kVec;
  if (rows.template packed<kVec>() && col_stop % kVec == 0) {
    constexpr i32 kBatch = smaller(kMoves, 8);                   // loads in flight
    if (col + group >= col_stop) return;
    const i64 row_stride = opaque(rows.row_stride);
    CF_UNROLL_1
    for (i32 first = 0; first < kMoves; first += kBatch) {
      // Slots::index permutes bits, so the index of a sum of disjoint bits is the sum of the indices.
      const i32 r = row + Slots::index(slot) + Slots::index(first * kAtOnce);
      const Element* source = rows.base + r * row_stride + col + group;
      ElementVector batch[kBatch];
      CF_UNROLL
      for (int n = 0; n < kBatch; ++n) {
        const i32 ahead = Slots::index(n * kAtOnce);
        batch[n] = ElementVector{};
        if (r + ahead < row_stop) batch[n] = *reinterpret_cast<const ElementVector*>(source + ahead * row_stride);
      }
      CF_UNROLL
      for (int n = 0; n < kBatch; ++n) {
        *reinterpret_cast<Vector*>(tile + (slot + (first + n) * kAtOnce) * kStep + group) = widened(batch[n], factor);
      }
    }
    return;
  }
  const bool along_rows = magnitude(rows.row_stride) < magnitude(rows.col_stride);
  const i32 width = round_up(col_stop - col, kVec);
  CF_UNROLL_1
  for (i32 move = thread_index(); move < kSlots * kWidth; move += kThreads) {
    const i32 s = along_rows ? move % kSlots : move / kWidth, c = along_rows ? move / kSlots : move % kWidth;
    const i32 r = row + Slots::index(s);
    if (c >= width) continue;
    const bool inside = r < row_stop && col + c < col_stop;
    tile[s * kStep + c] = inside ? convert<Score>(*rows.at(r, col + c)) * factor : Score(0);
  }
}

// The same without a factor, by copies that may still be on their way: the caller waits for them.
template <int kSlots, int kWidth, int kStep, class Slots>
CF_DEVICE void start_tile(Score* tile, const TensorRows& from, i32 row, i32 row_stop, i32 col, i32 col_stop) {
  constexpr i32 kGroups = kWidth / kVec, kAtOnce = kThreads / kGroups, kBytes = sizeof(Score);
  const TensorRows rows{in_global(from.base), from.row_stride, from.col_stride};
  if (sizeof(Element) != kBytes || !rows.template packed<kVec>() || col_stop % kVec != 0) {
    load_tile<kSlots, kWidth, kStep, Slots>(tile, from, row, row_stop, col, col_stop);
    return;
  }
  const i32 slot = thread_index() / kGroups, group = thread_index() % kGroups * kVec, r = row + Slots::index(slot);
  if (col + group >= col_stop) return;
  const u32 to = shared_address(tile) + (slot * kStep + group) * kBytes;
  if (row + kSlots > row_stop) {
    CF_UNROLL_1
    for (i32 n = 0; n < kSlots; n += kAtOnce) {
      const bool inside = r + Slots::index(n) < row_stop;
      const Element* source = inside ? rows.at(r + Slots::index(n), col + group) : rows.base;
      cp_async_16(to + n * kStep * kBytes, source, inside ? 16 : 0);
    }
    return;
  }
  const i64 row_bytes = opaque(rows.row_stride * kBytes);
  const char* const source = reinterpret_cast<const char*>(opaque(reinterpret_cast<i64>(rows.at(r, col + group))));
  CF_UNROLL
  for (int n = 0; n < kSlots; n += kAtOnce) cp_async_16(to + n * kStep * kBytes, source + Slots::index(n) * row_bytes);
}

// acc[r][g * kVec + x] goes to `tile`, rows lane_y + r * kLanesY of kStep scores, columns as in `multiply`.
template <int kStep, int kR, int kCols> CF_DEVICE void store_accumulators(Score* tile, const Score (&acc)[kR][kCols]) {
  CF_UNROLL
  for (int r = 0; r < kR; ++r) {
    CF_UNROLL
    for (int g = 0; g < kCols / kVec; ++g) {
      Vector out;
      CF_UNROLL
      for (int x = 0; x < kVec; ++x) out.value[x] = acc[r][g * kVec + x];
      *reinterpret_cast<Vector*>(tile + (lane_y() + r * kLanesY) * kStep + kVec * (lane_x() + kLanesX * g)) = out;
    }
  }
}

// Where a tile of results goes: rows below `rows_stop` are written, those from `live_stop` on as zeros.
struct Target {
  i32 row, live_stop, rows_stop, col, col_stop;
  bool accumulate;
};

template <class Out, int kSlots, int kWidth, class Slots>
CF_DEVICE void store_tile_as(const Score* tile, const Rows<Out>& rows, const Target& to) {
  using OutVector = Packed<Out, kVec>;
  const bool packed = rows.template packed<kVec>() && !to.accumulate;
  CF_UNROLL_1
  for (i32 move = thread_index(); move < kSlots * kWidth / kVec; move += kThreads) {
    const i32 slot = move / (kWidth / kVec), group = move % (kWidth / kVec) * kVec;
    const i32 r = to.row + Slots::index(slot), c = to.col + group;
    if (r >= to.rows_stop || c >= to.col_stop) continue;
    const Vector values = load_vector(tile + slot * kWidth + group);
    OutVector out;
    CF_UNROLL
    for (int x = 0; x < kVec; ++x) out.value[x] = convert<Out>(r < to.live_stop ? values.value[x] : Score(0));
    if (packed && c + kVec <= to.col_stop) {
      *reinterpret_cast<OutVector*>(rows.at(r, c)) = out;
      continue;
    }
    CF_UNROLL
    for (int x = 0; x < kVec; ++x) {
      if (c + x >= to.col_stop) continue;
      Out* address = rows.at(r, c + x);
      *address = to.accumulate ? convert<Out>(values.value[x] + convert<Score>(*address)) : out.value[x];
    }
  }
}

// A tile of results in shared memory, kWidth scores a slot, to an array of Element or of Score. All threads.
template <int kSlots, int kWidth, class Slots>
CF_DEVICE void store_tile(const Score* tile, void* data, const Strides& strides, i32 kind, const Item& item, i32 head,
                          const Target& to) {
  if (kind == KindOf<Element>::value) {
    store_tile_as<Element, kSlots, kWidth, Slots>(tile, rows_of<Element>(data, strides, item, head), to);
  } else {
    store_tile_as<Score, kSlots, kWidth, Slots>(tile, rows_of<Score>(data, strides, item, head), to);
  }
}
