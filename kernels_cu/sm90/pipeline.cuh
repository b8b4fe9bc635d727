// What kernels of a scheduler, a producer and consumers have in common: pipelines and the barriers on them, the
// scheduler itself, and how tiles are cleared. Columns of a tile (core/panels.cuh) beyond the head dim are zeros.
#pragma once
#include "core/panels.cuh"
#include "sm90/work.cuh"

constexpr i32 kWorkSlots = sizeof(Element) == 2 ? 3 : 2;

// Where a pipeline stands: a stage, and the parity of the phase that is waited for next.
template <i32 kCount> struct Ring {
  u32 stage, parity;
  CF_DEVICE void advance() {
    if (++stage == kCount) stage = 0, parity ^= 1;
  }
};

CF_DEVICE u32 address_of(u32 lower) { return (lower & 0x3fffu) << 4; }

// Value rows from `rows` on are zeroed: a weight of zero times a NaN there would be NaN. The threads of a warpgroup;
// all warpgroups write the same zeros, each before its own products read them.
template <i32 kPanels> CF_DEVICE void clear_rows(u32 tile, i32 rows, i32 thread) {
  for (i32 n = rows * 8 + thread; n < kBlockKV * 8; n += 128) {
    CF_UNROLL
    for (i32 panel = 0; panel < kPanels; ++panel) st_shared_128(tile + panel * kBlockKV * 128 + n * 16, {0, 0, 0, 0});
  }
}

// The scheduler: one thread, so that nobody waits for its divisions and loads. It takes a tile only when the producer
// is about to need it: tiles taken early would lie with a block whatever it has before them.
// kFollowed: pieces with no more key tiles than one and so many are followed as soon as there is a slot; their producer
// does not ask.
template <i32 kFollowed = -2, class Control>
CF_DEVICE void schedule(const Params& p, const Launch& launch, Control& control) {
  Ring<kWorkSlots> slot{0, 1};                 // parity 1: the first wait for a free slot falls through
  u32 tile = block_index(), wanted = 0;
  while (true) {
    Work& work = control.work[slot.stage];
    mbarrier_try_wait_parity(shared_address(&control.work_free[slot.stage]), slot.parity);
    const bool any = tile < u32(launch.tiles);
    if (any) prepare(work, p, launch, tile); else work.number = -1, see_nothing(work);
    mbarrier_arrive(shared_address(&control.work_ready[slot.stage]));            // the others may read it
    if (!any) break;
    if (work.last - work.first > kFollowed) {
      mbarrier_try_wait_parity(shared_address(&control.work_wanted), wanted);
      wanted ^= 1;
    }
    slot.advance();
    tile = grid_size() + atom_inc(launch.counter);
  }
  const bool last = atom_inc(launch.counter + 1) == grid_size() - 1;
  if (last) launch.counter[0] = launch.counter[1] = 0;                           // for the next launch
}
