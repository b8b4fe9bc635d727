// After a forward whose keys were cut into p.splits runs: one warp joins kSlice columns of a row of the runs' results, and the
// sink.
//
// Run s left out_s, normalised, and lse_s, -inf where it saw nothing. Then lse = log(sum of exp(lse_s) + exp(sink)) and
// out = sum of exp(lse_s - lse) * out_s. Lane l weighs the runs l, l + 32; eight lanes take the columns of the runs g, g + 4,
// ... in order, and the four sums are added up in pairs. All loads are on their way before one is used: with a warp for a row
// and sixteen runs at a time it took 9.8 instead of 6.0 us for 64 runs (H200, 2026-11-30). Programmatic dependent launch
// after decode or forward, in a CUDA graph: 0.4 us of 14, 0.5 or less of 55 and 74.
#include "attn/mask.cuh"
#include "attn/softmax.cuh"
#include "core/block.cuh"
#include "core/warp.cuh"

constexpr i32 kCombineThreads = 256, kSlice = 32, kMostRuns = 64, kOwnRuns = kMostRuns / 32;
constexpr i32 kColLanes = 8, kGroups = 32 / kColLanes, kAtOnce = kMostRuns / kGroups;

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

// What each run counts in a row; returns the row's lse.
CF_DEVICE Score weigh_runs(Score (&weight)[kOwnRuns], const Score* lses, i64 stride, i32 runs, Score sink) {
  const i32 lane = lane_index();
  Score top = sink, total = Score(0);
  CF_UNROLL
  for (i32 n = 0; n < kOwnRuns; ++n) {
    weight[n] = lane + 32 * n < runs ? lses[(lane + 32 * n) * stride] : -Limits<Score>::infinity();
    top = maximum(top, weight[n]);
  }
  top = WarpLanes::max(top);
  const Score reference = reference_of(top);
  CF_UNROLL
  for (i32 n = 0; n < kOwnRuns; ++n) total += weight[n] = exponential(weight[n] - reference);
  total = WarpLanes::sum(total) + exponential(sink - reference);
  CF_UNROLL
  for (i32 n = 0; n < kOwnRuns; ++n) weight[n] = weight[n] == Score(0) ? Score(0) : weight[n] / total;
  return top == Limits<Score>::infinity() ? top : top + logarithm(total);
}

extern "C" __global__ void __launch_bounds__(kCombineThreads) cupyflash_combine(const Params p) {
  const i32 rows = p.heads_q * p.seqlen_q, slices = larger(1, ceil_div(p.head_dim_v, kSlice));
  const u32 units = u32(rows) * u32(slices), blocks = (units + kCombineThreads / 32 - 1) / (kCombineThreads / 32);
  const u32 unit = block_index() % blocks * (kCombineThreads / 32) + warp_index();
  if (unit >= units) return;
  const u32 own = block_index() / blocks;
  const i32 number = unit / u32(slices), slice = unit % u32(slices), row = number % p.seqlen_q, head = number / p.seqlen_q;
  const Item item = item_at(p, own, 0);
  const i64 all = i64(points(p.own)) * rows, at = i64(own) * rows + number;
  const Score* outs = static_cast<const Score*>(p.call.partials) + at * p.head_dim_v;
  const Score* lses = static_cast<const Score*>(p.call.partials) + p.splits * all * p.head_dim_v + at;
  const bool live = row < visibility_of(p, item).q_length;
  const Score none = -Limits<Score>::infinity();
  const Score sink = p.call.sinks == nullptr
      ? none : load_kind<Score>(p.call.sinks, p.sinks_kind, head_index(p.sinks, item, head));
  const i64 out_row = lead_offset(p.out.lead, item) + p.out.head * head + p.out.row * row;
  const i32 group = i32(lane_index()) / kColLanes;
  Score lse = none;
  const auto join = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    CF_UNROLL_1
    for (i32 pass = 0; pass < kSlice; pass += kColLanes * kWidth) {
      const i32 col = slice * kSlice + pass + i32(lane_index()) % kColLanes * kWidth;
      Packed<Score, kWidth> x[kAtOnce];
      CF_UNROLL
      for (i32 n = 0; n < kAtOnce; ++n) {
        const i32 run = kGroups * n + group;
        const Score* from = outs + (run * all * p.head_dim_v + col);
        x[n] = Packed<Score, kWidth>{};
        if (col < p.head_dim_v && run < p.splits) x[n] = *reinterpret_cast<const Packed<Score, kWidth>*>(from);
      }
      Score weight[kOwnRuns], sum[kWidth] = {};
      lse = weigh_runs(weight, lses, all, p.splits, sink);
      CF_UNROLL
      for (i32 n = 0; n < kAtOnce; ++n) {
        const Score of_run = shuffle(weight[kGroups * n / 32], u32(kGroups * n + group) % 32);
        CF_UNROLL
        for (int c = 0; c < kWidth; ++c) sum[c] = of_run != Score(0) ? fused(of_run, x[n].value[c], sum[c]) : sum[c];
      }
      CF_UNROLL
      for (int c = 0; c < kWidth; ++c) {
        CF_UNROLL
        for (u32 mask = kColLanes; mask < 32; mask *= 2) sum[c] += shuffle_xor(sum[c], mask);
        if (c % kGroups != group || col + c >= p.head_dim_v) continue;
        store_kind(p.call.out, p.out_kind, out_row + p.out.col * (col + c), live ? sum[c] : Score(0));
      }
    }
  };
  constexpr int kWide = 16 / sizeof(Score);
  if (p.head_dim_v % kWide == 0) join(Width<kWide>{});
  else join(Width<1>{});
  if (p.call.lse == nullptr || slice != 0 || lane_index() != 0) return;
  *rows_of<Score>(p.call.lse, p.lse, item, head).at(row, 0) = live ? lse : none;
}
