// Which key may a query see: lengths, causal, windows and offsets, for tiles and for elements.
//
// Query i stands at position p = i + offset and sees key j iff i < q_length, j < kv_length and
// p - left <= j <= p + right. cupyflash/masks.py is the same in NumPy. A mask array is no matter of this file.
#pragma once
#include "attn/rows.cuh"

struct Interval {
  i32 start, stop;      // empty where stop <= start
  CF_DEVICE bool contains(i32 x) const { return x >= start && x < stop; }
  CF_DEVICE bool covers(i32 from, i32 to) const { return start <= from && to <= stop; }
};

// No sum of a row, an offset and a bound leaves 64 bits, and no offset reaches a bound that is none.
constexpr i64 kFarthestOffset = i64(1) << 60, kUnbounded = i64(1) << 61;

struct Visibility {
  i32 q_length, kv_length;
  i64 offset, left, right;

  // Keys that some row of [row, row_stop) may see.
  CF_DEVICE Interval keys_of_some(i32 row, i32 row_stop) const {
    const i32 last = smaller(row_stop, q_length) - 1;
    if (last < row) return {0, 0};
    return {clip(row + offset - left, kv_length), clip(last + offset + right + 1, kv_length)};
  }

  // Keys that every row of [row, row_stop) sees.
  CF_DEVICE Interval keys_of_all(i32 row, i32 row_stop) const {
    if (row_stop > q_length) return {0, 0};
    return {clip(row_stop - 1 + offset - left, kv_length), clip(row + offset + right + 1, kv_length)};
  }

  // Keys that one row sees: the element test is keys_of(i).contains(j).
  CF_DEVICE Interval keys_of(i32 row) const { return keys_of_some(row, row + 1); }

  // Rows that may see some key of [col, col_stop).
  CF_DEVICE Interval rows_of_some(i32 col, i32 col_stop) const {
    const i32 last = smaller(col_stop, kv_length) - 1;
    if (last < col) return {0, 0};
    return {clip(col - offset - right, q_length), clip(last - offset + left + 1, q_length)};
  }

  // Rows that see every key of [col, col_stop).
  CF_DEVICE Interval rows_of_all(i32 col, i32 col_stop) const {
    if (col_stop > kv_length) return {0, 0};
    return {clip(col_stop - 1 - offset - right, q_length), clip(col - offset + left + 1, q_length)};
  }

  static CF_DEVICE i32 clip(i64 x, i32 length) { return i32(clamp(x, i64(0), i64(length))); }
};

// Lengths and offsets may come from the device, unchecked: they are clamped here.
CF_DEVICE i32 q_length_of(const Params& p, const Item& item) {
  return Visibility::clip(integer_at(p.call.q_length, p.call.q_length_value, p.q_length, item, 0), p.seqlen_q);
}
CF_DEVICE i32 kv_length_of(const Params& p, const Item& item) {
  return Visibility::clip(integer_at(p.call.kv_length, p.call.kv_length_value, p.kv_length, item, 0), p.seqlen_k);
}
CF_DEVICE i64 offset_of(const Params& p, const Item& item, i32 q_length, i32 kv_length) {
  if (p.bottom_right) return i64(kv_length) - q_length;
  const i64 offset = integer_at(p.call.query_offset, p.call.query_offset_value, p.query_offset, item, 0);
  return clamp(offset, -kFarthestOffset, kFarthestOffset);
}

CF_DEVICE Visibility visibility_of(const Params& p, const Item& item) {
  const i32 q_length = q_length_of(p, item), kv_length = kv_length_of(p, item);
  return {q_length, kv_length, offset_of(p, item, q_length, kv_length), p.call.left, p.call.right};
}
