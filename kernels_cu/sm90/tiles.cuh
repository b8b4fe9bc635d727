// Tiles in shared memory: their map, their way there by TMA, the two products that read them, and results on their way
// out.
#pragma once
#include "sm90/pipeline.cuh"
#include "sm90/steady.cuh"

constexpr i32 kPanels = ceil_div(kHeadDim, 64), kPanelsV = ceil_div(kHeadDimV, 64);
constexpr u32 kQBytes = kBlockQ * 128 * kPanels, kOutBytes = kOutApart ? kBlockQ * 128 * kOutPanels : 0;
constexpr u32 kKBytes = kBlockKV * 128 * kPanels, kVBytes = kBlockKV * 128 * kPanelsV;
constexpr i32 kOutColumns = kPanelsV == kOutPanels ? kHeadDimV : 64 * kOutPanels;   // of results on their way at a time
constexpr u32 kQAt = 0, kKAt = kQAt + kQStages * kQBytes, kVAt = kKAt + kStages * kKBytes;
constexpr u32 kOutAt = kVAt + kStagesV * kVBytes;
constexpr u32 kAddendsAt = kOutAt + kOutBytes;
static_assert(1024 + kAddendsAt + kAddendBytes == kSharedBytes, "the launch gives what the kernel uses");
static_assert(kPanelsV % kOutPanels == 0, "results leave in equal parts");
static_assert(kOutApart || (kQStages == 2 && kOutPanels == kPanelsV && kOutPanels <= kPanels), "results fit");
static_assert(kBlockKV % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "whole steps of 16");

struct TensorMaps { TensorMap q, k, v, out, bias, mask; };

// Rows [row, row + kRows) of one head, kCount panels, to the tile at `to`.
template <i32 kRows, i32 kCount>
CF_DEVICE void load_tile(u32 to, const TensorMap& map, u32 bar, i32 row, i32 head, const Work& work) {
  mbarrier_arrive_expect_tx(bar, kRows * 128 * kCount);
  CF_UNROLL
  for (i32 n = 0; n < kCount; ++n) {
    cp_async_bulk_tensor_5d_load(to + n * kRows * 128, map, bar, 64 * n, row, head, work.lead(0), work.lead(1));
  }
}

// S = q k^T is started: 64 queries, the key tile of that stage.
CF_DEVICE void start_scores(Scores& s, u32 q, u32 k, u32 stage) {
  k += stage * kKBytes >> 4;
  wgmma_fence();
  CF_UNROLL
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const u32 panel = step / 4, column = step % 4 * 32;
    wgmma_scores(s, whole(q + ((panel * kBlockQ * 128 + column) >> 4)),
                 whole(k + ((panel * kBlockKV * 128 + column) >> 4)), step != 0);
  }
  wgmma_commit_group();
}

// The scores of one warp's 16 queries by products of its own: the rest of the warpgroup need not take part. q, k: where
// its first query and the key tile lie.
CF_DEVICE void scores_of_warp(Scores& s, u32 q, u32 k, u32 lane) {
  q += lane % 16 * 128;
  k += (lane / 16 * 8 + lane % 8) * 128;
  CF_UNROLL
  for (int n = 0; n < kScores; ++n) s[n] = 0.0f;
  CF_UNROLL_1
  for (u32 step = 0; step < kHeadDim / 16; ++step) {
    const u32 panel = step / 4, chunk = step % 4 * 2;
    u32 a[4], b[4];
    ldmatrix_x4(a, q + panel * kBlockQ * 128 + ((chunk + lane / 16) ^ lane % 8) * 16);
    CF_UNROLL
    for (int n = 0; n < kBlockKV / 16; ++n) {
      ldmatrix_x4(b, k + panel * kBlockKV * 128 + n * 2048 + ((chunk + lane / 8 % 2) ^ lane % 8) * 16);
      float* w = s + 8 * n;
      mma_m16n8k16<Element>(w[0], w[1], w[2], w[3], a, b[0], b[1]);
      mma_m16n8k16<Element>(w[4], w[5], w[6], w[7], a, b[2], b[3]);
    }
  }
}

using Output = float[kHeadDimV / 2];
using Operand = u32[kBlockKV / 4];           // a tile of weights, rounded, as wgmma takes it from registers

// O += p v is started (O = p v where nothing has been accumulated).
CF_DEVICE void start_output(Output& o, const Operand& p, u32 v, u32 stage, bool accumulate) {
  v += stage * kVBytes >> 4;
  wgmma_fence();
  CF_UNROLL
  for (int step = 0; step < kBlockKV / 16; ++step) {
    wgmma_output(o, p + 4 * step, whole(v + (step * 2048 >> 4)), step != 0 || accumulate);
  }
  wgmma_commit_group();
}

CF_DEVICE void round_into(Operand& p, int j, float a, float b, float c, float d) {
  p[2 * j] = cvt_rn_x2<Element>(a, b);
  p[2 * j + 1] = cvt_rn_x2<Element>(c, d);
}

// 64 rows of kOutColumns results to shared memory, rounded. `tile`: that warpgroup's rows of the first panel.
CF_DEVICE void stage_output(u32 tile, const float* o, i32 thread) {
  const i32 lane = thread % 32;
  const u32 base = tile + (thread / 32 * 16 + lane % 16) * 128 + ((lane / 16) ^ (lane % 8)) * 16;
  CF_UNROLL
  for (int n = 0; n < kOutColumns / 16; ++n) {
    stmatrix_x4((base ^ (n % 4 * 32)) + n / 4 * (kBlockQ * 128), cvt_rn_x2<Element>(o[8 * n], o[8 * n + 1]),
                cvt_rn_x2<Element>(o[8 * n + 2], o[8 * n + 3]), cvt_rn_x2<Element>(o[8 * n + 4], o[8 * n + 5]),
                cvt_rn_x2<Element>(o[8 * n + 6], o[8 * n + 7]));
  }
}

// Where float results of a warpgroup lie on their way to arrays that TMA does not take: half as many columns at a time.
CF_DEVICE u32 float_place(u32 tile, i32 row, i32 col) {
  return tile + col / 32 * (kBlockQ * 128) + row * 128 + col % 32 * 4;
}

CF_DEVICE void stage_half(u32 tile, const float* o, i32 thread) {
  const i32 row = thread / 32 * 16 + thread % 32 / 4;
  CF_UNROLL
  for (int j = 0; j < kOutColumns / 16; ++j) {
    const i32 col = 8 * j + thread % 4 * 2;
    st_shared_f32x2(float_place(tile, row, col), o[4 * j], o[4 * j + 1]);
    st_shared_f32x2(float_place(tile, row + 8, col), o[4 * j + 2], o[4 * j + 3]);
  }
}

// 64 rows of the columns from `first` on, element by element: any layout, element or float. A warpgroup's threads.
CF_DEVICE void store_half(u32 tile, const Params& p, const Work& work, i32 row, i32 first, i32 thread) {
  const i32 cols = smaller(p.head_dim_v - first, kOutColumns / 2), rows = smaller(p.seqlen_q - row, 64);
  const i64 base = lead_offset(p.out.lead, work.item) + p.out.head * work.head;
  CF_UNROLL_1
  for (i32 n = thread; n < rows * (kOutColumns / 2); n += 128) {
    const i32 r = n / (kOutColumns / 2), c = n % (kOutColumns / 2);
    if (c >= cols) continue;
    const i64 index = base + (row + r) * p.out.row + (first + c) * p.out.col;
    store_kind(p.call.out, p.out_kind, index, ld_shared_f32(float_place(tile, r, c)));
  }
}
