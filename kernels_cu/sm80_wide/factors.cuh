// Factors of products of float and double on tensor cores, and how lanes read them from shared memory.
//
// A lane is (g, t) = (l / 4, l % 4). An accumulator of 16 x 8 has rows g, g + 8 and columns 2 t, 2 t + 1 of a lane.
// What is summed over may be named in any order, so the sixteen places of one step are given to lanes as they lie:
// a lane has four of them, `slots`, of rows g and g + 8 of the left factor and of column g of the right one. Taken from
// an accumulator of scores they are the keys 2 t, 2 t + 1 of two neighbouring 8-column tiles.
//
// floats are read 16 bytes at a time: the slots are four neighbours, and where rows are summed over, the four neighbours
// of a row belong to as many 8-column tiles, so that a lane ends with runs of four columns. doubles are read one by one:
// of those that come in pairs the compiler makes new copies, in registers side by side, for every product.
//
#pragma once
#include "sm80_wide/tile.cuh"

constexpr i32 kAtOnce = sizeof(Element) == 8 ? 1 : kChunk;      // elements that a lane reads at once

CF_DEVICE i32 lane_group() { return i32(lane_index()) / 4; }
CF_DEVICE i32 lane_in_group() { return i32(lane_index()) % 4; }

// Row of entry u, column of entry w of a lane's accumulators: of scores, and of results.
CF_DEVICE i32 fragment_row(int u) { return u / 2 * 16 + u % 2 * 8 + lane_group(); }
CF_DEVICE i32 score_col(int w) { return w / 2 * 8 + lane_in_group() * 2 + w % 2; }
CF_DEVICE i32 result_col(int w) {
  if (kAtOnce == 1) return score_col(w);
  return w / 2 / kChunk * 8 * kChunk + (2 * lane_in_group() + w % 2) * kChunk + w / 2 % kChunk;
}
// Row, of sixteen, of a lane's slot x in factors that are read for sums in memory.
constexpr bool kSectors = sizeof(Element) == 8;
CF_DEVICE i32 key_of_slot(int x) {
  if (!kSectors) return x / 2 * 8 + lane_in_group() * 2 + x % 2;
  return x / 2 * 8 + x % 2 * 2 + lane_in_group() / 2 * 4 + lane_in_group() % 2;
}
// Of the 2 kChunk entries that a lane has in a line of results: neighbour n of run `run`, of kChunk columns.
CF_DEVICE constexpr int entry_of(int run, int n) { return kAtOnce == 1 ? kChunk * run + n : 2 * n + run; }

// Factors of one step: Left has slot x of row half h at [2 x + h], Right slot x at [x].
template <class T, int kCount> struct Factor;

template <int kCount> struct Factor<float, kCount> {
  static constexpr bool kThree = kProducts == 3;
  u32 big[kCount], small[kThree ? kCount : 1];

  CF_DEVICE void set(int n, float x) {
    const u32 rounded = bits_of(x) + 0x1000u;
    if constexpr (kThree) {
      big[n] = rounded & 0xffffe000u;
      small[n] = bits_of(x - float_of(big[n]));
    } else {
      big[n] = x == x ? rounded : bits_of(x);      // the tensor core cuts it
    }
  }
};

template <int kCount> struct Factor<double, kCount> {
  double value[kCount];
  CF_DEVICE void set(int n, double x) { value[n] = x; }
};

using Left = Factor<Element, 8>;
using Right = Factor<Element, 4>;

CF_DEVICE void ld_shared_chunk(float (&x)[4], u32 address) {
  u32 words[4];
  ld_shared_128(words, address);
  CF_UNROLL
  for (int n = 0; n < 4; ++n) x[n] = float_of(words[n]);
}
CF_DEVICE void ld_shared_chunk(double (&x)[2], u32 address) { ld_shared_f64x2(x, address); }

CF_DEVICE void st_shared_chunk(u32 address, const float (&x)[4]) {
  st_shared_128(address, {bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3])});
}
CF_DEVICE void st_shared_chunk(u32 address, const double (&x)[2]) { st_shared_f64x2(address, x); }
CF_DEVICE void st_shared(u32 address, float x) { st_shared_32(address, bits_of(x)); }
CF_DEVICE void st_shared(u32 address, double x) { st_shared_f64(address, x); }
template <class T> CF_DEVICE T ld_shared(u32 address);
template <> CF_DEVICE float ld_shared<float>(u32 address) { return ld_shared_f32(address); }
template <> CF_DEVICE double ld_shared<double>(u32 address) { return ld_shared_f64(address); }
CF_DEVICE void ld_shared_pair(float& x, float& y, u32 address) { ld_shared_f32x2(x, y, address); }
CF_DEVICE void ld_shared_pair(double& x, double& y, u32 address) {
  double both[2];
  ld_shared_f64x2(both, address);
  x = both[0], y = both[1];
}

// Where a lane reads factors whose places are columns: the slots of a step in row g of eight rows.
template <class T> struct ColumnReader {
  u32 start = T::element_place(lane_group(), lane_in_group() * kAtOnce);

  // Slots from x on of step k in row g of the eight rows from `row`, a multiple of 8: within a line, bits of the place.
  CF_DEVICE u32 at(u32 tile, i32 row, int k, int x) const {
    const int byte = (16 * k + 4 * x) * sizeof(Element);
    return ((tile + start) ^ (byte % 128)) + row * T::kRowBytes + byte / 128 * 128;
  }
  CF_DEVICE void read(float (&slots)[4], u32 tile, i32 row, int k) const { ld_shared_chunk(slots, at(tile, row, k, 0)); }
  CF_DEVICE void read(double (&slots)[4], u32 tile, i32 row, int k) const {
    CF_UNROLL
    for (int x = 0; x < 4; ++x) slots[x] = ld_shared<double>(at(tile, row, k, x));
  }
  CF_DEVICE void read(Right& right, u32 tile, i32 row, int k) const {
    Element slots[4];
    read(slots, tile, row, k);
    CF_UNROLL
    for (int x = 0; x < 4; ++x) right.set(x, slots[x]);
  }
  // An element as it was.
  static CF_DEVICE float element(u32 tile, i32 row, i32 col) {
    return ld_shared_f32(tile + T::element_place(row, col));
  }
};

// Where a lane reads factors whose places are rows: of rows 2 t, 2 t + 1 of eight rows, columns g kAtOnce on. Of double, if
// kBySectors: of rows key_of_slot, and the columns of eight so that four lanes have four neighbours of a result.
template <class T, bool kBySectors = false> struct RowReader {
  static constexpr i32 kNextRow = kBySectors ? 2 : 1;
  u32 start = kBySectors ? T::element_place(key_of_slot(0), lane_group() % 2 * 4 + lane_group() / 2)
                       : T::element_place(2 * lane_in_group(), lane_group() * kAtOnce);

  // The sixteen rows from 16 k in line `line`: right factors for each of its column tiles. The row's number and, of
  // double, the column tile change bits of the place.
  CF_DEVICE void read(Right (&right)[kChunk], u32 tile, int k, int line) const {
    const u32 places[2] = {tile + start, (tile + start) ^ (kBySectors ? 48 : 64)};
    CF_UNROLL
    for (int x = 0; x < 4; ++x) {
      const u32 place = places[x % 2];
      const int offset = (16 * k + x / 2 * 8 + x % 2 * kNextRow) * T::kRowBytes + line * 128;
      Element values[kChunk];
      read_slot(values, place + offset, (place ^ 64) + offset);
      CF_UNROLL
      for (int j = 0; j < kChunk; ++j) right[j].set(x, values[j]);
    }
  }
  static CF_DEVICE void read_slot(float (&values)[4], u32 address, u32) { ld_shared_chunk(values, address); }
  static CF_DEVICE void read_slot(double (&values)[2], u32 address, u32 next) {
    values[0] = ld_shared<double>(address), values[1] = ld_shared<double>(next);
  }
};

template <class T, int kT> CF_DEVICE void read_left(Left (&left)[kT], const ColumnReader<T>& read, u32 tile, int k) {
  CF_UNROLL
  for (int u = 0; u < 2 * kT; ++u) {
    Element slots[4];
    read.read(slots, tile, 8 * u, k);
    CF_UNROLL
    for (int x = 0; x < 4; ++x) left[u / 2].set(2 * x + u % 2, slots[x]);
  }
}
