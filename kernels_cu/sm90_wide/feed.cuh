// The two threads that keep the consumers supplied: the scheduler prepares pieces of work, the producer loads planes.
// And the barriers through which they all speak.
#pragma once
#include "sm90_wide/tiles.cuh"

constexpr i32 kLead = 2;        // key tiles that are still to be loaded when the next piece of work is asked for
static_assert(kThreads == 128 * (kConsumers + 1), "a producer and the consumers");

// Ready barriers end a phase when what they are named after may be read, free barriers when all have read it.
struct Control {
  u64 work_wanted, work_ready[kWorkSlots], work_free[kWorkSlots], ready[kSlots], free[kSlots];
  Work work[kWorkSlots];
};

CF_DEVICE void initialise(Control& control) {
  mbarrier_init(control.work_wanted, 1);
  for (i32 n = 0; n < kWorkSlots; ++n) {
    mbarrier_init(control.work_ready[n], 1), mbarrier_init(control.work_free[n], kConsumers + 1);
  }
  for (i32 n = 0; n < kSlots; ++n) mbarrier_init(control.ready[n], 1), mbarrier_init(control.free[n], 4 * kConsumers);
  fence_mbarrier_init();
}

// ---- producer: one thread; the scheduler is sm90/pipeline.cuh's

struct Producer {
  const TensorMaps& maps;
  Control& control;
  u32 slots;
  Ring<kSlots> ring{0, 1};

  // The planes of a tile: those of keys and of values follow each other in one ring.
  template <i32 kCount> CF_DEVICE void load_tile(const TensorMap& map, const Work& work, i32 n) {
    CF_UNROLL_1
    for (i32 plane = kLo; plane >= kHi; --plane) {
      mbarrier_try_wait_parity(barrier(control.free, ring.stage), ring.parity);   // all consumers have read the slot
      load_plane<kCount>(slots + ring.stage * kSlotBytes, map, barrier(control.ready, ring.stage), plane, n * kBlockKV,
                         work.head_kv, work);
      ring.advance();
    }
  }

  CF_DEVICE void load(const Work& work) {
    if (work.last < work.first) return ask();
    const i32 ask_at = smaller(work.first + kLead, work.last);
    CF_UNROLL_1
    for (i32 n = work.last; n >= work.first; --n) {
      load_tile<kPanels>(maps.k, work, n);
      if (n == ask_at) ask();
      load_tile<kPanelsV>(maps.v, work, n);
    }
  }
  CF_DEVICE void ask() { mbarrier_arrive(shared_address(&control.work_wanted)); }
};

CF_DEVICE void produce(const TensorMaps& maps, Control& control, u32 slots) {
  Producer producer{maps, control, slots};
  Ring<kWorkSlots> ring{0, 0};
  while (true) {
    const Work& work = control.work[ring.stage];
    mbarrier_try_wait_parity(barrier(control.work_ready, ring.stage), ring.parity);
    if (work.number < 0) break;
    producer.load(work);
    mbarrier_arrive(barrier(control.work_free, ring.stage));
    ring.advance();
  }
}
