// After a forward whose keys were cut into p.splits runs: one warp a row joins the runs' results, and the sink.
//
// Run s left out_s, normalised, and lse_s, -inf where it saw nothing. Then lse = log(sum of exp(lse_s) + exp(sink)) and
// out = sum of exp(lse_s - lse) * out_s, added in the order of the runs. Lane l weighs the runs l, l + 32, ...
#include "attn/mask.cuh"
#include "attn/softmax.cuh"
#include "core/block.cuh"
#include "core/warp.cuh"

constexpr i32 kCombineThreads = 256, kMostRuns = 64, kOwnRuns = kMostRuns / 32, kAtOnce = 16;

template <int kWidth> struct Width { static constexpr int value = kWidth; };      // columns that a lane takes at once

struct WarpLanes {
  static CF_DEVICE Score max(Score x) {
    CF_UNROLL
    for (u32 mask = 16; mask > 0; mask /= 2) x = maximum(x, shuffle_xor(x, mask));
    return x;
  }
  static CF_DEVICE Score sum(Score x) {
    CF_UNROLL
    for (u32 mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
  }
};

extern "C" __global__ void __launch_bounds__(kCombineThreads) cupyflash_combine(const Params p) {
  const i32 rows = p.heads_q * p.seqlen_q, blocks = ceil_div(rows, kCombineThreads / 32);
  const i32 number = i32(block_index() % u32(blocks)) * (kCombineThreads / 32) + i32(warp_index());
  if (number >= rows) return;
  const u32 own = block_index() / u32(blocks);
  const i32 row = number % p.seqlen_q, head = number / p.seqlen_q, lane = lane_index();
  const Item item = item_at(p, own, 0);
  const bool live = row < visibility_of(p, item).q_length;
  const Score none = -Limits<Score>::infinity();
  const i64 all = i64(points(p.own)) * rows, at = i64(own) * rows + number;
  const Score* outs = static_cast<const Score*>(p.call.partials) + at * p.head_dim_v;
  const Score* lses = static_cast<const Score*>(p.call.partials) + p.splits * all * p.head_dim_v + at;
  const Score sink = p.call.sinks == nullptr
      ? none : load_kind<Score>(p.call.sinks, p.sinks_kind, head_index(p.sinks, item, head));
  Score weight[kOwnRuns], top = sink, total = Score(0);
  CF_UNROLL
  for (i32 n = 0; n < kOwnRuns; ++n) {
    weight[n] = lane + 32 * n < p.splits ? lses[(lane + 32 * n) * all] : none;
    top = maximum(top, weight[n]);
  }
  top = WarpLanes::max(top);
  const Score reference = reference_of(top);
  CF_UNROLL
  for (i32 n = 0; n < kOwnRuns; ++n) total += weight[n] = exponential(weight[n] - reference);
  total = WarpLanes::sum(total) + exponential(sink - reference);
  CF_UNROLL
  for (i32 n = 0; n < kOwnRuns; ++n) weight[n] = weight[n] == Score(0) ? Score(0) : weight[n] / total;
  const Score lse = top == Limits<Score>::infinity() ? top : top + logarithm(total);
  const i64 out_row = lead_offset(p.out.lead, item) + p.out.head * head + p.out.row * row;
  const auto join = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    CF_UNROLL_1
    for (i32 col = lane * kWidth; col < round_up(p.head_dim_v, 32 * kWidth); col += 32 * kWidth) {
      Score sum[kWidth] = {};
      CF_UNROLL_1
      for (i32 first = 0; first < p.splits; first += kAtOnce) {
        Packed<Score, kWidth> x[kAtOnce];
        CF_UNROLL
        for (i32 n = 0; n < kAtOnce; ++n) {
          const Score* from = outs + ((first + n) * all * p.head_dim_v + col);
          x[n] = Packed<Score, kWidth>{};
          if (col < p.head_dim_v && first + n < p.splits) x[n] = *reinterpret_cast<const Packed<Score, kWidth>*>(from);
        }
        CF_UNROLL
        for (i32 n = 0; n < kAtOnce; ++n) {
          const Score of_run = shuffle(first < 32 ? weight[0] : weight[1], u32(first + n) % 32);
          CF_UNROLL
          for (int c = 0; c < kWidth; ++c) sum[c] = of_run != Score(0) ? fused(of_run, x[n].value[c], sum[c]) : sum[c];
        }
      }
      CF_UNROLL
      for (int c = 0; c < kWidth; ++c) {
        if (col + c >= p.head_dim_v) continue;
        store_kind(p.call.out, p.out_kind, out_row + p.out.col * (col + c), live ? sum[c] : Score(0));
      }
    }
  };
  constexpr int kWide = 16 / sizeof(Score);
  if (p.head_dim_v % kWide == 0) join(Width<kWide>{});
  else join(Width<1>{});
  if (p.call.lse == nullptr || lane != 0) return;
  *rows_of<Score>(p.call.lse, p.lse, item, head).at(row, 0) = live ? lse : none;
}
