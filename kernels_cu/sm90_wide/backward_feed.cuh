// How the two kernels of the backward are supplied: tiles of planes in shared memory, and the thread that loads them.
//
// All planes are rows of the workspace of prepost/split_all.cu: tiles of 64 rows of a head follow each other, then those
// of the next head. Some tiles stand in shared memory while a block works on an item, the others come plane by plane
// through one ring of slots. A plane is laid out as sm90/pipeline.cuh describes.
#pragma once
#include "attn/backward_rows.cuh"
#include "attn/schedule.cuh"
#include "core/cut.cuh"
#include "core/panels.cuh"
#include "core/planes.cuh"

constexpr i32 kTileRows = 64;
constexpr i32 kPanels = ceil_div(kHeadDim, 64), kPanelsV = ceil_div(kHeadDimV, 64);
constexpr u32 kPanelBytes = kTileRows * 128, kSlotBytes = larger(kPanels, kPanelsV) * kPanelBytes;
constexpr u32 kTileBytes = kPlanes * kPanels * kPanelBytes, kTileBytesV = kPlanes * kPanelsV * kPanelBytes;
constexpr u32 kSlotsAt = kStandingTiles * (kTileBytes + kTileBytesV);
constexpr u32 kHandedAt = kSlotsAt + kSlots * kSlotBytes;
static_assert(1024 + kHandedAt + kHandedBytes == kSharedBytes, "the launch gives what the kernel uses");
static_assert(kThreads == 128 * (kConsumers + 1), "a producer and the consumers");
static_assert(kSlots >= 2 * kPlanes, "a tile of each kind");

struct TensorMaps { TensorMap q, k, v, dout; };

// Ready barriers end a phase when what they are named after may be read, free barriers when all have read it.
struct Barriers { u64 standing, ready[kSlots], free[kSlots]; };

CF_DEVICE void initialise(Barriers& barriers) {
  mbarrier_init(barriers.standing, 1);
  for (i32 n = 0; n < kSlots; ++n) {
    mbarrier_init(barriers.ready[n], 1), mbarrier_init(barriers.free[n], 4 * kConsumers);
  }
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

// The three planes of a tile that stands follow each other.
template <i32 kCount> CF_DEVICE void load_planes(u32 to, const TensorMap& map, u32 bar, i32 row) {
  CF_UNROLL_1
  for (i32 plane = 0; plane < kPlanes; ++plane) {
    load_plane<kCount>(to + plane * kCount * kPanelBytes, map, bar, plane, row);
  }
}

// Tiles of two tensors in turn, from `row` on.
CF_DEVICE void load_standing(Barriers& barriers, u32 tiles, const TensorMap& first, const TensorMap& second, i32 row) {
  const u32 standing = shared_address(&barriers.standing);
  mbarrier_arrive_expect_tx(standing, kSlotsAt);
  CF_UNROLL_1
  for (i32 n = 0; n < kStandingTiles; ++n) {
    const u32 to = tiles + n * (kTileBytes + kTileBytesV);
    load_planes<kPanels>(to, first, standing, row + n * kTileRows);
    load_planes<kPanelsV>(to + kTileBytes, second, standing, row + n * kTileRows);
  }
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
      mbarrier_try_wait_parity(barrier(barriers.free, next.slot), next.parity ^ 1);     // all have read what was there
      mbarrier_arrive_expect_tx(bar, kPanelBytes * kCount);
      load_plane<kCount>(slots + next.slot * kSlotBytes, map, bar, plane, row);
    }
  }
};

// ---- a gradient whose argument was broadcast over leading axes: a block walks all the items that shared it

// All threads, who come from different places in the code: the emulation wants them to meet at one.
CF_DEVICE void meet() { block_barrier(); }

// Consumers: the work on the item before is done; that on the next has been prepared by the thread that loads.
CF_DEVICE void next_item() {
  meet();
  meet();
}

// The warpgroup that loads; feed.item() is the share of one thread in an item.
template <class Feed, class Work> CF_DEVICE void produce(Feed feed, const Params& p, Work& work) {
  CF_UNROLL_1
  for (u32 loop = 0; loop < points(p.loop); ++loop) {
    if (loop != 0) {
      meet();
      if (thread_index() == 0) prepare(work, p, loop);
      meet();
    }
    if (thread_index() == 0) feed.item();
    warp_barrier();
  }
}
