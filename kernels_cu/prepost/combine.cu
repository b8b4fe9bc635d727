// After a forward whose keys were cut into p.splits runs: one warp a row joins the runs' results, and the sink.
//
// Run s left out_s, normalised, and lse_s, -inf where it saw nothing. Then lse = log(sum of exp(lse_s) + exp(sink)) and
// out = sum of exp(lse_s - lse) * out_s, added in the order of the runs.
#include "attn/mask.cuh"
#include "attn/softmax.cuh"
#include "core/block.cuh"

constexpr i32 kCombineThreads = 256;

extern "C" __global__ void __launch_bounds__(kCombineThreads) cupyflash_combine(const Params p) {
  const i64 all = i64(points(p.own)) * p.heads_q * p.seqlen_q;
  const i64 number = i64(block_index()) * (kCombineThreads / 32) + warp_index();
  if (number >= all) return;
  const i32 row = i32(number % p.seqlen_q), head = i32(number / p.seqlen_q % p.heads_q);
  const Item item = item_at(p, u32(number / p.seqlen_q / p.heads_q), 0);
  const bool live = row < visibility_of(p, item).q_length;
  const Score none = -Limits<Score>::infinity();
  const Score* outs = static_cast<const Score*>(p.call.partials) + number * p.head_dim_v;
  const Score* lses = static_cast<const Score*>(p.call.partials) + p.splits * all * p.head_dim_v + number;
  Score top = none;
  if (p.call.sinks != nullptr) top = load_kind<Score>(p.call.sinks, p.sinks_kind, head_index(p.sinks, item, head));
  const Score sink = top;
  for (i32 split = 0; split < p.splits; ++split) top = maximum(top, lses[split * all]);
  const Score reference = reference_of(top);
  Score total = exponential(sink - reference);
  for (i32 split = 0; split < p.splits; ++split) total += exponential(lses[split * all] - reference);
  const Score lse = top == Limits<Score>::infinity() ? top : top + logarithm(total);
  const i64 out_row = lead_offset(p.out.lead, item) + p.out.head * head + p.out.row * row;
  for (i32 col = lane_index(); col < p.head_dim_v; col += 32) {
    Score sum = Score(0);
    for (i32 split = 0; split < p.splits; ++split) {
      const Score weight = exponential(lses[split * all] - reference) / total;
      if (lses[split * all] != none) sum = fused(weight, outs[split * all * p.head_dim_v + col], sum);
    }
    store_kind(p.call.out, p.out_kind, out_row + p.out.col * col, live ? sum : Score(0));
  }
  if (p.call.lse == nullptr || lane_index() != 0) return;
  *rows_of<Score>(p.call.lse, p.lse, item, head).at(row, 0) = live ? lse : none;
}
