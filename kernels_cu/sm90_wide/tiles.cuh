// Tiles of planes in shared memory, and the two products that read them.
//
// A plane of a tile is laid out as sm90/pipeline.cuh describes. Keys and values come plane by plane into a ring of
// slots, lo first; queries stay, every consumer's 64 rows in all three planes.
#pragma once
#include "core/cut.cuh"
#include "core/planes.cuh"
#include "sm90/pipeline.cuh"
#include "sm90_wide/scores.cuh"

constexpr i32 kPanels = ceil_div(kHeadDim, 64), kPanelsV = ceil_div(kHeadDimV, 64);
constexpr u32 kQPanelBytes = 64 * 128, kQPlaneBytes = kPanels * kQPanelBytes, kQBytes = kPlanes * kQPlaneBytes;
constexpr u32 kPanelBytes = kBlockKV * 128, kSlotBytes = larger(kPanels, kPanelsV) * kPanelBytes;
constexpr u32 kSlotsAt = kConsumers * kQBytes;
static_assert(1024 + kSlotsAt + kSlots * kSlotBytes == kSharedBytes, "the launch gives what the kernel uses");
static_assert(kBlockKV % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "whole steps of 16");

struct TensorMaps { TensorMap none, k, v, none_either; };      // where sm90 has queries and results, none

// Rows [row, row + kBlockKV) of one plane of one head.
template <i32 kCount>
CF_DEVICE void load_plane(u32 to, const TensorMap& map, u32 bar, i32 plane, i32 row, i32 head, const Work& work) {
  mbarrier_arrive_expect_tx(bar, kPanelBytes * kCount);
  CF_UNROLL
  for (i32 n = 0; n < kCount; ++n) {
    cp_async_bulk_tensor_5d_load(to + n * kPanelBytes, map, bar, 64 * (plane * kCount + n), row, head, work.lead(0),
                                 work.lead(1));
  }
}

// S += q k^T is started, for one plane of the keys and those of the queries that are not too small beside it.
template <int kPlane> CF_DEVICE void start_scores(Scores& s, u32 q, u32 k) {
  wgmma_fence();
  CF_UNROLL
  for (int other = kLo - kPlane; other >= 0; --other) {
    CF_UNROLL
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const u32 panel = step / 4, column = step % 4 * 32;
      wgmma_scores(s, whole(q + ((other * kQPlaneBytes + panel * kQPanelBytes + column) >> 4)),
                   whole(k + ((panel * kPanelBytes + column) >> 4)), kPlane != kLo || other != 0 || step != 0);
    }
  }
  wgmma_commit_group();
}

// Scores that an overflow made infinite, of either sign, or no numbers are formed from q and k as they are. (row, col) is
// the place of this thread's entry 0.
CF_DEVICE void recover(Scores& s, const Params& p, const Work& work, i32 row, i32 col) {
  const Rows<const float> q = rows_of<const float>(p.call.q, p.q, work.item, work.head);
  const Rows<const float> k = rows_of<const float>(p.call.k, p.k, work.item, work.head_kv);
  CF_UNROLL_1
  for (int n = 0; n < kScores; ++n) {
    const i32 i = row + n / 2 % 2 * 8, j = col + n / 4 * 8 + n % 2;
    if (i >= p.seqlen_q || j >= work.sight.kv_length) continue;
    float score = 0.0f;
    CF_UNROLL_1
    for (i32 at = 0; at < p.head_dim; ++at) score = fused(*q.at(i, at), *k.at(j, at), score);
    CF_UNROLL
    for (int entry = 0; entry < kScores; ++entry) {
      if (entry == n && !(absolute(s[entry]) < Limits<float>::infinity())) s[entry] = score;
    }
  }
}

using Output = float[kHeadDimV / 2];
using Operand = u32[kPlanes][kBlockKV / 4];  // a tile of weights as wgmma takes it from registers

// O += p v is started, likewise.
template <int kPlane> CF_DEVICE void start_output(Output& o, const Operand& p, u32 v) {
  wgmma_fence();
  CF_UNROLL
  for (int other = kLo - kPlane; other >= 0; --other) {
    CF_UNROLL
    for (int step = 0; step < kBlockKV / 16; ++step) {
      wgmma_output(o, p[other] + 4 * step, whole(v + (step * 2048 >> 4)), kPlane != kLo || other != 0 || step != 0);
    }
  }
  wgmma_commit_group();
}

CF_DEVICE void split_into(Operand& p, const Scores& weights) {
  CF_UNROLL
  for (int n = 0; n < kScores / 2; ++n) {
    const PlanePair pair = split(weights[2 * n], weights[2 * n + 1]);
    CF_UNROLL
    for (int plane = 0; plane < kPlanes; ++plane) p[plane][n] = pair.plane[plane];
  }
}

// 64 rows of queries from `row` on, of one head: read as they lie, split, and written where wgmma reads them. The
// threads of a warpgroup. Rows past the end repeat the last one, columns past the head dim are zeros.
CF_DEVICE void split_queries(u32 to, const Params& p, const Work& work, i32 row, i32 thread) {
  const Rows<const float> q = rows_of<const float>(p.call.q, p.q, work.item, work.head);
  const i32 lane = thread % 32, warp = thread / 32, last = p.seqlen_q - 1;
  const u32 base = to + (warp * 16 + lane % 16) * 128 + ((lane / 16) ^ (lane % 8)) * 16;
  const float* rows[2];
  CF_UNROLL
  for (int h = 0; h < 2; ++h) rows[h] = q.at(smaller(row + warp * 16 + lane / 4 + 8 * h, last), lane % 4 * 2);
  const bool pairs = q.packed<2>() && p.head_dim % 2 == 0;
  CF_UNROLL_1
  for (i32 panel = 0; panel < kPanels; ++panel) {
    float x[4][4][2];
    CF_UNROLL
    for (int step = 0; step < 4; ++step) {
      CF_UNROLL
      for (int part = 0; part < 4; ++part) {          // of a 16 x 16 block: rows + 8 (part % 2), columns + 8 (part / 2)
        const i32 col = 64 * panel + 16 * step + 8 * (part / 2), at = col + lane % 4 * 2;
        const float* from = rows[part % 2] + col * q.col_stride;
        float(&pair)[2] = x[step][part];
        pair[0] = pair[1] = 0.0f;
        if (pairs) {
          if (at < p.head_dim) {
            const Packed<float, 2> both = *reinterpret_cast<const Packed<float, 2>*>(from);
            pair[0] = both.value[0], pair[1] = both.value[1];
          }
        } else {
          if (at < p.head_dim) pair[0] = from[0];
          if (at + 1 < p.head_dim) pair[1] = from[q.col_stride];
        }
      }
    }
    CF_UNROLL
    for (int step = 0; step < 4; ++step) {
      PlanePair part[4];
      CF_UNROLL
      for (int n = 0; n < 4; ++n) part[n] = split(x[step][n][0], x[step][n][1]);
      CF_UNROLL
      for (int plane = 0; plane < kPlanes; ++plane) {
        stmatrix_x4((base ^ (step * 32)) + plane * kQPlaneBytes + panel * kQPanelBytes, part[0].plane[plane],
                    part[1].plane[plane], part[2].plane[plane], part[3].plane[plane]);
      }
    }
  }
}
