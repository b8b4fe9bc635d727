// What the two kernels of the backward have in common: tiles of planes in shared memory, the thread that loads them, the
// products that read them, and weights from scores.
//
// All planes are rows of prepost/split_all.cu's workspace: 64-row tiles of a head follow each other, then the next head.
// Some tiles stand in shared memory for all of a block's life, the others come plane by plane through one ring of slots.
// A plane is laid out as sm90/pipeline.cuh describes.
//
// Scores have the very bits of the forward: only then do weights of large scores fit to lse.
#pragma once
#include "attn/backward_rows.cuh"
#include "attn/schedule.cuh"
#include "core/block.cuh"
#include "core/planes.cuh"
#include "core/ptx_sm90.cuh"

constexpr i32 kTileRows = 64, kScores = kTileRows / 2;         // of a tile; of a thread, for a tile of scores
constexpr i32 kPanels = ceil_div(kHeadDim, 64), kPanelsV = ceil_div(kHeadDimV, 64);
constexpr u32 kPanelBytes = kTileRows * 128, kSlotBytes = larger(kPanels, kPanelsV) * kPanelBytes;
constexpr u32 kTileBytes = kPlanes * kPanels * kPanelBytes, kTileBytesV = kPlanes * kPanelsV * kPanelBytes;
constexpr u32 kSlotsAt = kStandingTiles * (kTileBytes + kTileBytesV);
constexpr float kLog2e = 1.4426950408889634f;
static_assert(1024 + kSlotsAt + kSlots * kSlotBytes + kHandedBytes == kSharedBytes, "the launch gives what the kernel uses");
static_assert(kThreads == 128 * (kConsumers + 1), "a producer and the consumers");
static_assert(kSlots >= 2 * kPlanes, "a tile of each kind");

struct TensorMaps { TensorMap q, k, v, dout; };

// Ready barriers end a phase when what they are named after may be read, free barriers when all have read it.
struct Barriers { u64 standing, ready[kSlots], free[kSlots]; };

CF_DEVICE void initialise(Barriers& barriers, i32 warps_that_read) {
  mbarrier_init(barriers.standing, 1);
  for (i32 n = 0; n < kSlots; ++n) mbarrier_init(barriers.ready[n], 1), mbarrier_init(barriers.free[n], warps_that_read);
  fence_mbarrier_init();
}

// A plane in the ring: its slot, and the parity of the phase in which it lies there.
struct Plane {
  u32 slot = 0, parity = 0;
  CF_DEVICE Plane after(u32 count) const {
    const u32 next = slot + count;
    return next < u32(kSlots) ? Plane{next, parity} : Plane{next - kSlots, parity ^ 1};
  }
};

CF_DEVICE u32 barrier(const u64* bars, u32 slot) { return shared_address(bars) + 8 * slot; }

// Lower half of a wgmma operand's descriptor. stride: of panels, where columns are not what is summed over.
CF_DEVICE u32 descriptor(u32 tile, u32 stride) { return (tile & 0x3ffffu) >> 4 | (stride >> 4) << 16; }
// The upper half is the same for all: 8 rows are 1024 bytes, swizzled by 128.
CF_DEVICE u64 whole(u32 lower) { return u64(1024 >> 4 | 1u << 30) << 32 | lower; }

// ---- producer: one thread

// Where the planes of a head begin.
CF_DEVICE i32 first_row(const Item& item, i32 heads, i32 head, i32 length) {
  return i32(item.number * heads + head) * round_up(length, kTileRows);
}

template <i32 kCount> CF_DEVICE void load_plane(u32 to, const TensorMap& map, u32 bar, i32 plane, i32 row) {
  CF_UNROLL
  for (i32 n = 0; n < kCount; ++n) {
    cp_async_bulk_tensor_5d_load(to + n * kPanelBytes, map, bar, 64 * (plane * kCount + n), row, 0, 0, 0);
  }
}

// A tile that stands: its three planes follow each other.
template <i32 kCount> CF_DEVICE void load_standing(u32 to, const TensorMap& map, u32 bar, i32 row) {
  CF_UNROLL_1
  for (i32 plane = 0; plane < kPlanes; ++plane) load_plane<kCount>(to + plane * kCount * kPanelBytes, map, bar, plane, row);
}

struct Producer {
  Barriers& barriers;
  u32 slots;
  Plane next{};

  // The planes of a tile, lo first or hi first.
  template <i32 kCount, bool kHiFirst = false> CF_DEVICE void load(const TensorMap& map, i32 row) {
    CF_UNROLL_1
    for (i32 n = 0; n < kPlanes; ++n, next = next.after(1)) {
      const i32 plane = kHiFirst ? n : kLo - n;
      const u32 bar = barrier(barriers.ready, next.slot);
      mbarrier_try_wait_parity(barrier(barriers.free, next.slot), next.parity ^ 1);       // all have read what was there
      mbarrier_arrive_expect_tx(bar, kPanelBytes * kCount);
      load_plane<kCount>(slots + next.slot * kSlotBytes, map, bar, plane, row);
    }
  }
};

// ---- consumers

using Scores = float[kScores];
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

CF_DEVICE void split_into(Operand& p, const Scores& x) {
  CF_UNROLL
  for (int n = 0; n < kScores / 2; ++n) {
    const PlanePair pair = split(x[2 * n], x[2 * n + 1]);
    CF_UNROLL
    for (int plane = 0; plane < kPlanes; ++plane) p[plane][n] = pair.plane[plane];
  }
}

// exp(scale * product - lse), at most 1: of scores as large as their last place another order of sums might give more.
CF_DEVICE float weight(float product, float scale, float lse) {
  const float exponent = times(product, scale) - lse;
  return ex2_approx_ftz(times(exponent > 0.0f ? 0.0f : exponent, kLog2e));
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
  template <int kCount> CF_DEVICE void outer(float (&d)[kCount], const Operand& a, Plane lo, Plane mid, Plane hi) const {
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

  template <int kCount> CF_DEVICE void store(const float (&d)[kCount], float factor, bool live0, bool live1) const {
    const bool pairs = rows.packed<2>() && col_stop % 2 == 0 && !accumulate;
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      if (row + 8 * h >= row_stop) continue;
      const bool live = h == 0 ? live0 : live1;
      CF_UNROLL
      for (int j = 0; j < kCount / 4; ++j) {
        const i32 at = 8 * j + col;
        const float low = live ? d[4 * j + 2 * h] * factor : 0.0f, high = live ? d[4 * j + 2 * h + 1] * factor : 0.0f;
        float* to = rows.at(row + 8 * h, at);
        if (pairs) {
          if (at < col_stop) *reinterpret_cast<Packed<float, 2>*>(to) = {{low, high}};
          continue;
        }
        if (at < col_stop) *to = accumulate ? *to + low : low;
        to += rows.col_stride;
        if (at + 1 < col_stop) *to = accumulate ? *to + high : high;
      }
    }
  }
};
