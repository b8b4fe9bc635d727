// Before the backward: row_delta = sum over columns of dout * out, or the caller's delta, minus dlse; one warp a row.
//
// With it, dS = P * (r * dP - row_delta) covers the gradient through lse as well. Rows at or past q_length are not read
// and give 0. For a backward that adds to dq in place, dq and the turns' counters become zeros.
#include "attn/mask.cuh"
#include "core/block.cuh"
#include "core/warp.cuh"

constexpr i32 kDeltaThreads = 256;

CF_DEVICE Score dot_of_rows(const Params& p, const Item& item, i32 head, i32 row) {
  const Rows<const Element> dout = rows_of<const Element>(p.call.dout, p.dout, item, head);
  const i64 out_row = lead_offset(p.out.lead, item) + p.out.head * head + p.out.row * row;
  Score sum = Score(0);
  for (i32 col = lane_index(); col < p.head_dim_v; col += 32) {
    const Score out = load_kind<Score>(p.call.out, p.out_kind, out_row + p.out.col * col);
    sum = fused(convert<Score>(*dout.at(row, col)), out, sum);
  }
  CF_UNROLL
  for (u32 mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  return sum;
}

extern "C" __global__ void __launch_bounds__(kDeltaThreads) cupyflash_delta(const Params p) {
  const i64 number = i64(block_index()) * (kDeltaThreads / 32) + warp_index();
  if (number >= i64(points(p.own)) * p.heads_q * p.seqlen_q) return;
  const i32 row = i32(number % p.seqlen_q), head = i32(number / p.seqlen_q % p.heads_q);
  const Item item = item_at(p, u32(number / p.seqlen_q / p.heads_q), 0);
  Score delta = Score(0);
  if (row < visibility_of(p, item).q_length) {
    if (p.call.delta != nullptr) delta = *rows_of<const Score>(p.call.delta, p.delta, item, head).at(row, 0);
    else delta = dot_of_rows(p, item, head, row);
    if (p.call.dlse != nullptr) delta -= *rows_of<const Score>(p.call.dlse, p.dlse, item, head).at(row, 0);
  }
  if (lane_index() == 0) static_cast<Score*>(p.call.row_delta)[number] = delta;
  if (p.call.turns == nullptr) return;
  u32* turns = static_cast<u32*>(p.call.turns);
  if (lane_index() == 0) turns[1 + number] = 0;
  if (lane_index() == 0 && p.call.slope_rows != nullptr) static_cast<Score*>(p.call.slope_rows)[number] = Score(0);
  if (number == 0 && lane_index() == 0) turns[0] = 0;
  if (p.accumulate) return;
  const Rows<Element> dq = rows_of<Element>(p.call.dq, p.dq, item, head);
  for (i32 col = lane_index(); col < p.head_dim; col += 32) *dq.at(row, col) = convert<Element>(Score(0));
}
