// What a consumer of the backward does with tiles: products, weights from scores, and results on their way out.
//
// Scores have the very bits of the forward: only then do weights of large scores fit to lse.
#pragma once
#include "sm90_wide/backward_feed.cuh"

constexpr i32 kScores = kTileRows / 2;           // of a thread, for a tile of scores
constexpr float kLog2e = 1.4426950408889634f;
using Scores = float[kScores];
// With most options scores become weights in parts, and are split part by part: registers.
constexpr bool kInParts = kMaskOrBias && kSoftcapOrAlibi;
using Operand = u32[kPlanes][kTileRows / 4];      // a tile as wgmma takes it from registers

// s (+)= a b^T is started, for one plane of each.
template <i32 kDim> CF_DEVICE void start_planes(Scores& s, u32 a, u32 b, bool first) {
  CF_UNROLL
  for (int step = 0; step < kDim / 16; ++step) {
    const u32 at = (step / 4 * kPanelBytes + step % 4 * 32) >> 4;
    wgmma_scores(s, whole(a + at), whole(b + at), !first || step != 0);
  }
}

// For one plane of b and those of a that are not too small beside it.
template <int kPlane, i32 kDim> CF_DEVICE void start_inner(Scores& s, u32 a, u32 b) {
  wgmma_fence();
  CF_UNROLL
  for (int other = kLo - kPlane; other >= 0; --other) {
    start_planes<kDim>(s, a + (other * kDim / 64 * kPanelBytes >> 4), b, kPlane == kLo && other == 0);
  }
  wgmma_commit_group();
}

// d += a b is started, likewise, for a from registers.
template <int kPlane, int kCount> CF_DEVICE void start_outer(float (&d)[kCount], const Operand& a, u32 b) {
  wgmma_fence();
  CF_UNROLL
  for (int other = kLo - kPlane; other >= 0; --other) {
    CF_UNROLL
    for (int step = 0; step < kTileRows / 16; ++step) {
      wgmma_outer(d, a[other] + 4 * step, whole(b + (step * 2048 >> 4)), kPlane != kLo || other != 0 || step != 0);
    }
  }
  wgmma_commit_group();
}

CF_DEVICE void put(Operand& p, int pair, float low, float high) {
  const PlanePair planes = split(low, high);
  CF_UNROLL
  for (int plane = 0; plane < kPlanes; ++plane) {
    p[plane][pair] = kInParts ? unbranched(planes.plane[plane]) : planes.plane[plane];
  }
}
CF_DEVICE void split_into(Operand& p, const Scores& x) {
  CF_UNROLL
  for (int pair = 0; pair < kScores / 2; ++pair) put(p, pair, x[2 * pair], x[2 * pair + 1]);
}

// A warpgroup's planes in the ring.
struct Planes {
  Barriers& barriers;
  u32 slots;                                     // address

  CF_DEVICE void wait(Plane at) const {
    mbarrier_try_wait_parity(barrier(barriers.ready, at.slot), at.parity);
  }
  CF_DEVICE void release(Plane at) const {       // each warp for itself
    if (thread_index() % 32 == 0) mbarrier_arrive(barrier(barriers.free, at.slot));
  }
  CF_DEVICE void pass_by(Plane at, u32 count) const {
    CF_UNROLL_1
    for (u32 n = 0; n < count; ++n, at = at.after(1)) {
      wait(at);
      warp_barrier();                            // all lanes have seen it: the phase after the next looks the same
      release(at);
    }
  }
  CF_DEVICE u32 tile(Plane at, u32 stride) const { return descriptor(slots, stride) + (at.slot * kSlotBytes >> 4); }

  // Starts a b^T for a tile whose planes come lo first.
  template <i32 kDim> CF_DEVICE void inner(Scores& s, u32 a, Plane lo) const {
    const Plane mid = lo.after(1), hi = lo.after(2);
    wait(lo);
    start_inner<kLo, kDim>(s, a, tile(lo, 16));
    wait(mid);
    start_inner<kMid, kDim>(s, a, tile(mid, 16));
    wait(hi);
    start_inner<kHi, kDim>(s, a, tile(hi, 16));
  }
  // Starts (b a^T)^T for a tile whose planes come hi first: the sums of b a^T, where b's planes come and a's stand, in
  // the order in which `inner` forms them.
  template <i32 kDim> CF_DEVICE void inner_turned(Scores& s, u32 a, Plane hi) const {
    CF_UNROLL
    for (int n = 0; n < kPlanes; ++n) {            // the plane kLo - n of a, with the planes of b up to n
      wait(hi.after(n));
      wgmma_fence();
      CF_UNROLL
      for (int other = n; other >= 0; --other) {
        start_planes<kDim>(s, a + ((kLo - n) * kDim / 64 * kPanelBytes >> 4), tile(hi.after(other), 16), n == 0);
      }
      wgmma_commit_group();
    }
  }
  // Starts d = a b for a tile whose planes are there.
  template <int kCount>
  CF_DEVICE void outer(float (&d)[kCount], const Operand& a, Plane lo, Plane mid, Plane hi) const {
    start_outer<kLo>(d, a, tile(lo, kPanelBytes));
    start_outer<kMid>(d, a, tile(mid, kPanelBytes));
    start_outer<kHi>(d, a, tile(hi, kPanelBytes));
  }
  // The youngest groups but kYounger have read these planes, one each, the last time.
  template <int kYounger = 0> CF_DEVICE void release_behind(Plane first, Plane second, Plane third) const {
    wgmma_wait_group<kYounger + 2>();
    release(first);
    wgmma_wait_group<kYounger + 1>();
    release(second);
    wgmma_wait_group<kYounger>();
    release(third);
  }
  template <int kYounger = 0> CF_DEVICE void release_behind(Plane first) const {
    release_behind<kYounger>(first, first.after(1), first.after(2));
  }
};

// Where a thread's results go. Entry 4 j + 2 h + x of an accumulator is row 8 h, column 8 j + x from here.
struct Target {
  Rows<float> rows;
  i32 row, col, row_stop, col_stop;
  bool accumulate;

  // Parts of d come to its first registers one after the other, so that the code of one part serves all: d is used up.
  template <int kCount> CF_DEVICE void store(float (&d)[kCount], float factor, bool live0, bool live1) const {
    constexpr int kPart = 16;
    const bool pairs = rows.packed<2>() && col_stop % 2 == 0 && !accumulate;
    CF_UNROLL_1
    for (i32 first = 0; first < 2 * kCount; first += 2 * kPart) {
      CF_UNROLL
      for (int n = 0; n < kPart; n += 2) {
        const i32 h = n / 2 % 2, at = first + n / 4 * 8 + col;
        if (row + 8 * h >= row_stop) continue;
        const bool live = h == 0 ? live0 : live1;
        const float low = live ? finished(d[n], factor) : 0.0f, high = live ? finished(d[n + 1], factor) : 0.0f;
        float* to = rows.at(row + 8 * h, at);
        if (pairs) {
          if (at < col_stop) *reinterpret_cast<Packed<float, 2>*>(to) = {{low, high}};
          continue;
        }
        if (at < col_stop) *to = accumulate ? *to + low : low;
        to += rows.col_stride;
        if (at + 1 < col_stop) *to = accumulate ? *to + high : high;
      }
      CF_UNROLL
      for (int n = kPart; n < kCount; ++n) d[n - kPart] = d[n];
    }
  }
};
