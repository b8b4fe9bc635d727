// Where things lie: the only place that turns (tensor, batch item, head, row) into an address.
//
// Packed ragged batches or paged caches would be other sources of Rows; no kernel computes an address of its own.
#pragma once
#include "attn/params.cuh"
#include "core/numeric.cuh"

// One batch item: its coordinates on the leading axes and its row-major number.
struct Item { i32 at[kLeadAxes]; i64 number; };

// The item at point `own` of own[] and point `loop` of loop[] (both row-major numbers).
CF_DEVICE Item item_at(const Params& p, u32 own, u32 loop) {
  Item item;
  item.number = 0;
  i64 weight = 1;
  CF_UNROLL
  for (i32 axis = kLeadAxes - 1; axis >= 0; --axis) {
    const u32 own_size = p.own[axis], loop_size = p.loop[axis];      // one of the two is 1, often both
    item.at[axis] = 0;
    if (own_size > 1) {
      item.at[axis] = own % own_size;
      own /= own_size;
    } else if (loop_size > 1) {
      item.at[axis] = loop % loop_size;
      loop /= loop_size;
    }
    item.number += weight * item.at[axis];
    weight *= p.lead[axis];
  }
  return item;
}

CF_DEVICE u32 points(const i32 (&sizes)[kLeadAxes]) { return u32(sizes[0]) * sizes[1] * sizes[2] * sizes[3]; }

// Whether a block walks more than one item.
CF_DEVICE bool walks_items(const Params& p) { return p.loop[0] > 1 || p.loop[1] > 1 || p.loop[2] > 1 || p.loop[3] > 1; }

CF_DEVICE i64 lead_offset(const i64 (&strides)[kLeadAxes], const Item& item) {
  return strides[0] * item.at[0] + strides[1] * item.at[1] + strides[2] * item.at[2] + strides[3] * item.at[3];
}

// The rows of one head: element (row, col) is base[row * row_stride + col * col_stride].
template <class T> struct Rows {
  T* base;
  i64 row_stride, col_stride;

  CF_DEVICE T* at(i64 row, i64 col) const { return base + row * row_stride + col * col_stride; }

  // Whether N elements from any column that is a multiple of N may be moved by one instruction.
  template <int N> CF_DEVICE bool packed() const {
    const u64 bytes = sizeof(T) * N;
    return col_stride == 1 && reinterpret_cast<u64>(base) % bytes == 0 && u64(row_stride) * sizeof(T) % bytes == 0;
  }
};

template <class T> CF_DEVICE Rows<T> rows_of(const void* data, const Strides& s, const Item& item, i32 head) {
  T* base = static_cast<T*>(const_cast<void*>(data));
  return {base + (lead_offset(s.lead, item) + s.head * head), s.row, s.col};
}

// A row in C order of (batch, heads_q, seqlen_q): the workspaces of the backward.
CF_DEVICE i64 row_number(const Params& p, const Item& item, i32 head, i32 row) {
  return (item.number * p.heads_q + head) * p.seqlen_q + row;
}

// Element of an array of a dtype known at run time.
template <class Score> CF_DEVICE Score load_kind(const void* data, i32 kind, i64 index) {
  switch (kind) {
    case kFloat16: return convert<Score>(static_cast<const float16*>(data)[index]);
    case kBFloat16: return convert<Score>(static_cast<const bfloat16*>(data)[index]);
    case kFloat32: return convert<Score>(static_cast<const float*>(data)[index]);
    default: return convert<Score>(static_cast<const double*>(data)[index]);
  }
}

template <class Score> CF_DEVICE void store_kind(void* data, i32 kind, i64 index, Score x) {
  switch (kind) {
    case kFloat16: static_cast<float16*>(data)[index] = convert<float16>(x); break;
    case kBFloat16: static_cast<bfloat16*>(data)[index] = convert<bfloat16>(x); break;
    case kFloat32: static_cast<float*>(data)[index] = convert<float>(x); break;
    default: static_cast<double*>(data)[index] = x;
  }
}

// One number a head: sinks, slopes and their gradients.
CF_DEVICE i64 head_index(const Strides& s, const Item& item, i32 head) {
  return lead_offset(s.lead, item) + s.head * head;
}

// An integer of an item (and head): `value` where there is no array. Unsigned ones of 64 bits are taken as their bits:
// a seed is all of them, but a length of 2^63 or more counts as 0.
CF_DEVICE i64 integer_at(const void* data, i64 value, const Integer& s, const Item& item, i32 head) {
  if (data == nullptr) return value;
  const i64 index = lead_offset(s.lead, item) + s.head * head;
  const char* at = static_cast<const char*>(data) + index * (s.bytes < 0 ? -s.bytes : s.bytes);
  switch (s.bytes) {
    case 1: return *reinterpret_cast<const i8*>(at);
    case 2: return *reinterpret_cast<const i16*>(at);
    case 4: return *reinterpret_cast<const i32*>(at);
    case -1: return *reinterpret_cast<const u8*>(at);
    case -2: return *reinterpret_cast<const u16*>(at);
    case -4: return *reinterpret_cast<const u32*>(at);
    default: return *reinterpret_cast<const i64*>(at);
  }
}
