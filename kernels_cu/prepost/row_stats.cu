// Before a backward that hands gradients of queries on: what it reads of every row (attn/backward_rows.cuh), and its
// counters at zero; a block for kRowUnit rows of a head, eight lanes a row.
//
// lse in base 2 is +inf where a row saw nothing or is none, so that its weights are 0; delta is the sum over columns of
// dout * out, or the caller's delta, minus dlse, and 0 where lse is -inf, for weights of 0 do not hide an infinite dlse.
// row_delta, where it is wanted, gets the sum in its own order, with dlse of every row: sinks want it.
//
// At 16384 rows of 2048 columns (H200, 2026-11-30) 36.6 us, 39.0 with three blocks a multiprocessor; out read past the L2
// cache, or heads from the last to the first, give nothing.
#include "attn/backward_rows.cuh"
#include "attn/softmax.cuh"
#include "core/block.cuh"
#include "core/warp.cuh"

constexpr i32 kStatsThreads = 256, kLanes = 8, kRowsAtOnce = kStatsThreads / kLanes;
constexpr i32 kRows = kRowUnit / kRowsAtOnce;        // of a thread, kRowsAtOnce apart

// The lane's part of dout * out of its rows, eight columns at a time; all of them are on their way before one is used.
CF_DEVICE void parts_of_packed_rows(float (&sums)[kRows], const Rows<const Element>& dout,
                                    const Rows<const Element>& out, i32 cols, i32 row, i32 row_stop) {
  CF_UNROLL_1
  for (i32 col = i32(lane_index()) % kLanes * 8; col < cols; col += 8 * kLanes) {
    Packed<u32, 4> a[kRows] = {}, b[kRows] = {};      // pairs of elements
    CF_UNROLL
    for (int n = 0; n < kRows; ++n) {
      if (row + n * kRowsAtOnce >= row_stop) continue;
      a[n] = *reinterpret_cast<const Packed<u32, 4>*>(dout.at(row + n * kRowsAtOnce, col));
      b[n] = *reinterpret_cast<const Packed<u32, 4>*>(out.at(row + n * kRowsAtOnce, col));
    }
    CF_UNROLL
    for (int n = 0; n < 4 * kRows; ++n) {
      const u32 x = a[n / 4].value[n % 4], y = b[n / 4].value[n % 4];
      sums[n / 4] = fused(convert<float>(Element{u16(x)}), convert<float>(Element{u16(y)}), sums[n / 4]);
      sums[n / 4] = fused(convert<float>(Element{u16(x >> 16)}), convert<float>(Element{u16(y >> 16)}), sums[n / 4]);
    }
  }
}

// The same for any layout, in the same order.
template <class Out>
CF_DEVICE void parts_of_rows(float (&sums)[kRows], const Rows<const Element>& dout, const Rows<const Out>& out,
                             i32 cols, i32 row, i32 row_stop) {
  CF_UNROLL
  for (int n = 0; n < kRows; ++n) {
    const i32 i = row + n * kRowsAtOnce;
    CF_UNROLL_1
    for (i32 col = i32(lane_index()) % kLanes * 8; i < row_stop && col < cols; col += 8 * kLanes) {
      CF_UNROLL_1
      for (i32 c = col; c < smaller(col + 8, cols); ++c) {
        sums[n] = fused(convert<float>(*dout.at(i, c)), convert<float>(*out.at(i, c)), sums[n]);
      }
    }
  }
}

CF_DEVICE void parts_of_deltas(float (&sums)[kRows], const Params& p, const Item& item, i32 head, i32 row,
                               i32 row_stop) {
  const Rows<const Element> dout = rows_of<const Element>(p.call.dout, p.dout, item, head);
  const Rows<const Element> out = rows_of<const Element>(p.call.out, p.out, item, head);
  const bool is_element = p.out_kind == KindOf<Element>::value;
  const bool packed = dout.packed<8>() && out.packed<8>() && p.head_dim_v % 8 == 0;
  if (is_element && packed) return parts_of_packed_rows(sums, dout, out, p.head_dim_v, row, row_stop);
  if (is_element) return parts_of_rows(sums, dout, out, p.head_dim_v, row, row_stop);
  parts_of_rows(sums, dout, rows_of<const float>(p.call.out, p.out, item, head), p.head_dim_v, row, row_stop);
}

extern "C" __global__ void __launch_bounds__(kStatsThreads, 4) cupyflash_row_stats(const Params p) {
  const i32 units = ceil_div(p.seqlen_q, kRowUnit), tile_rows = p.splits;
  const u32 matrix = block_index() / u32(units);
  const Item item = item_at(p, matrix / u32(p.heads_q), 0);
  const i32 head = i32(matrix % u32(p.heads_q)), first = i32(block_index() % u32(units)) * kRowUnit;
  const i32 own = i32(thread_index()) / kLanes, q_length = visibility_of(p, item).q_length;
  u32* counters = static_cast<u32*>(p.call.turns);
  counters += block_index() == 0 ? 0 : kTickets + block_index() * (kRowUnit / kRowBlock);
  if (thread_index() < (block_index() == 0 ? kTickets : 0) + kRowUnit / kRowBlock) counters[thread_index()] = 0;
  // Lane n of a row's lanes writes what belongs to row n of theirs.
  const i32 lane = i32(lane_index()) % kLanes, row = first + own + lane * kRowsAtOnce;
  const bool seen = lane < kRows && row < q_length;
  const auto of_row = [&](const void* data, const Strides& strides) {
    return seen && data != nullptr ? *rows_of<const float>(data, strides, item, head).at(row, 0) : 0.0f;
  };
  const float lse = of_row(p.call.lse, p.lse), dlse = of_row(p.call.dlse, p.dlse);
  float sums[kRows] = {}, delta = of_row(p.call.delta, p.delta);
  if (p.call.delta == nullptr) {
    parts_of_deltas(sums, p, item, head, first + own, q_length);
    CF_UNROLL
    for (int n = 0; n < kRows; ++n) {
      CF_UNROLL
      for (u32 mask = kLanes / 2; mask > 0; mask /= 2) sums[n] += shuffle_xor(sums[n], mask);
      if (lane == n) delta = sums[n];
    }
  }
  if (lane >= kRows) return;
  if (p.call.dlse != nullptr) delta -= dlse;
  float* of_tile = row_stats_of(p, item, head) + 2 * (row / tile_rows * tile_rows) + row % tile_rows;
  of_tile[0] = seen ? times(lse_for_backward(lse), 1.4426950408889634f) : Limits<float>::infinity();
  of_tile[tile_rows] = lse == -Limits<float>::infinity() ? 0.0f : -delta;      // where nothing was seen dlse may be -inf
  if (p.call.row_delta != nullptr && row < p.seqlen_q) {
    static_cast<float*>(p.call.row_delta)[row_number(p, item, head, row)] = delta;
  }
}
