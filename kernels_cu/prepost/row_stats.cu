// Before the sm90 backward: what it reads of every row (attn/backward_rows.cuh), and counters at zero; a block for kRowUnit
// rows of a head, eight lanes a row.
//
// In base 2, lse is +inf where a row saw nothing or is none, so that its weights are 0; delta is the sum over columns of
// dout * out, or the caller's delta, minus dlse. row_delta, where it is wanted, gets the same in its own order.
#include "attn/backward_rows.cuh"
#include "attn/softmax.cuh"
#include "core/block.cuh"
#include "core/warp.cuh"

constexpr i32 kStatsThreads = 256, kLanes = 8, kRowsAtOnce = kStatsThreads / kLanes;

// Eight columns of a row from `col`; columns from `stop` on are zeros.
template <class T> CF_DEVICE void eight(float (&x)[8], const Rows<const T>& rows, bool packed, i32 row, i32 col, i32 stop) {
  if (packed && col + 8 <= stop) {
    const Packed<T, 8> found = *reinterpret_cast<const Packed<T, 8>*>(rows.at(row, col));
    CF_UNROLL
    for (int n = 0; n < 8; ++n) x[n] = convert<float>(found.value[n]);
    return;
  }
  CF_UNROLL
  for (int n = 0; n < 8; ++n) x[n] = col + n < stop ? convert<float>(*rows.at(row, col + n)) : 0.0f;
}

// The lane's part of dout * out of one row.
template <class Out>
CF_DEVICE float part_of_row(const Params& p, const Rows<const Element>& dout, const Rows<const Out>& out, bool packed, i32 row) {
  float sum = 0.0f;
  CF_UNROLL_1
  for (i32 col = i32(lane_index()) % kLanes * 8; col < p.head_dim_v; col += 8 * kLanes) {
    float a[8], b[8];
    eight(a, dout, packed, row, col, p.head_dim_v);
    eight(b, out, packed, row, col, p.head_dim_v);
    CF_UNROLL
    for (int n = 0; n < 8; ++n) sum = fused(a[n], b[n], sum);
  }
  return sum;
}

// The same for rows whose numbers are kRowsAtOnce apart.
CF_DEVICE void parts_of_rows(float (&sums)[kRowUnit / kRowsAtOnce], const Params& p, const Item& item, i32 head, i32 row,
                             i32 row_stop) {
  const Rows<const Element> dout = rows_of<const Element>(p.call.dout, p.dout, item, head);
  const Rows<const Element> out = rows_of<const Element>(p.call.out, p.out, item, head);
  const Rows<const float> out_f32 = rows_of<const float>(p.call.out, p.out, item, head);
  const bool is_element = p.out_kind == KindOf<Element>::value, packed = is_element && dout.packed<8>() && out.packed<8>();
  CF_UNROLL
  for (int n = 0; n < kRowUnit / kRowsAtOnce; ++n) {
    const i32 i = row + n * kRowsAtOnce;
    if (i >= row_stop) continue;
    sums[n] = is_element ? part_of_row(p, dout, out, packed, i) : part_of_row(p, dout, out_f32, false, i);
  }
}

extern "C" __global__ void __launch_bounds__(kStatsThreads) cupyflash_row_stats(const Params p) {
  const i32 units = ceil_div(p.seqlen_q, kRowUnit), tile_rows = p.splits;
  const u32 matrix = block_index() / u32(units);
  const Item item = item_at(p, matrix / u32(p.heads_q), 0);
  const i32 head = i32(matrix % u32(p.heads_q)), first = i32(block_index() % u32(units)) * kRowUnit;
  const i32 own = i32(thread_index()) / kLanes, q_length = visibility_of(p, item).q_length;
  u32* counters = static_cast<u32*>(p.call.turns) + (block_index() == 0 ? 0 : kTickets + block_index() * (kRowUnit / kRowBlock));
  if (thread_index() < (block_index() == 0 ? kTickets : 0) + kRowUnit / kRowBlock) counters[thread_index()] = 0;
  float sums[kRowUnit / kRowsAtOnce] = {};
  if (p.call.delta == nullptr) parts_of_rows(sums, p, item, head, first + own, q_length);
  float* stats = row_stats_of(p, item, head);
  CF_UNROLL
  for (int n = 0; n < kRowUnit / kRowsAtOnce; ++n) {
    const i32 row = first + own + n * kRowsAtOnce;
    float delta = sums[n], lse_log2 = Limits<float>::infinity();
    CF_UNROLL
    for (u32 mask = kLanes / 2; mask > 0; mask /= 2) delta += shuffle_xor(delta, mask);
    if (lane_index() % kLanes != 0) continue;
    if (row < q_length) {
      if (p.call.delta != nullptr) delta = *rows_of<const float>(p.call.delta, p.delta, item, head).at(row, 0);
      if (p.call.dlse != nullptr) delta -= *rows_of<const float>(p.call.dlse, p.dlse, item, head).at(row, 0);
      const float lse = lse_for_backward(*rows_of<const float>(p.call.lse, p.lse, item, head).at(row, 0));
      lse_log2 = times(lse, 1.4426950408889634f);
    }
    float* of_tile = stats + 2 * (row / tile_rows * tile_rows) + row % tile_rows;
    of_tile[0] = lse_log2;
    of_tile[tile_rows] = delta;
    if (p.call.row_delta != nullptr && row < p.seqlen_q) {
      static_cast<float*>(p.call.row_delta)[row_number(p, item, head, row)] = delta;
    }
  }
}
