// After the backward: the gradient of sinks, or of ALiBi slopes; one block an element, its rows summed in one order.
//
//   dsink  = sum over rows of exp(sink - lse) * (dlse - delta)      dslope = sum over rows of slope_rows
//
// Over the rows of every item and head that the argument was broadcast over; dsinks where its address is given.
#include "attn/mask.cuh"
#include "core/block.cuh"
#include "core/warp.cuh"

constexpr i32 kSumThreads = 256;

struct SharedStorage { Score warps[kSumThreads / 32]; };

CF_DEVICE Score sink_of(const Params& p, const Item& item, i32 head) {
  return load_kind<Score>(p.call.sinks, p.sinks_kind, head_index(p.sinks, item, head));
}

// This thread's part of the rows of one head.
CF_DEVICE Score part_of_head(const Params& p, const Item& item, i32 head) {
  const i32 stop = visibility_of(p, item).q_length;
  const i64 first = row_number(p, item, head, 0);
  Score sum = Score(0);
  if (p.call.dsinks == nullptr) {
    const Score* rows = static_cast<const Score*>(p.call.slope_rows) + first;
    for (i32 row = thread_index(); row < stop; row += kSumThreads) sum += rows[row];
    return sum;
  }
  const Score sink = sink_of(p, item, head);
  if (sink == -Limits<Score>::infinity()) return sum;        // takes no probability
  const Score* delta = static_cast<const Score*>(p.call.row_delta) + first;
  const Rows<const Score> lse = rows_of<const Score>(p.call.lse, p.lse, item, head);
  for (i32 row = thread_index(); row < stop; row += kSumThreads) {
    sum = fused(-exponential(sink - *lse.at(row, 0)), delta[row], sum);
  }
  return sum;
}

CF_DEVICE Score sum_of_block(Score x) {
  SharedStorage& smem = shared_storage<SharedStorage>();
  CF_UNROLL
  for (u32 mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  if (lane_index() == 0) smem.warps[warp_index()] = x;
  block_barrier();                         // all warps' sums are there
  Score sum = Score(0);
  for (i32 warp = 0; warp < kSumThreads / 32; ++warp) sum += smem.warps[warp];
  return sum;
}

extern "C" __global__ void __launch_bounds__(kSumThreads, 1) cupyflash_sum_rows(const Params p) {
  const i32 own_heads = p.own_heads ? p.heads_q : 1, walk_heads = p.own_heads ? 1 : p.heads_q;
  const i32 own_head = block_index() % own_heads;
  const u32 own = block_index() / own_heads;
  Score sum = Score(0);
  for (u32 loop = 0; loop < points(p.loop); ++loop) {
    for (i32 n = 0; n < walk_heads; ++n) sum += part_of_head(p, item_at(p, own, loop), own_head + n);
  }
  sum = sum_of_block(sum);
  if (thread_index() != 0) return;
  const bool sinks = p.call.dsinks != nullptr;
  void* to = sinks ? p.call.dsinks : p.call.dslopes;
  const i32 kind = sinks ? p.dsinks_kind : p.dslopes_kind;
  const i64 index = head_index(sinks ? p.dsinks : p.dslopes, item_at(p, own, 0), own_head);
  if (p.accumulate) sum += load_kind<Score>(to, kind, index);
  store_kind(to, kind, index, sum);
}
