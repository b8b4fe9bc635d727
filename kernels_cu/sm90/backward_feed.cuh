// The thread that serves the consumers, and the barriers through which all speak: the producer prepares work and loads
// tiles.
#pragma once
#include "sm90/backward_finish.cuh"

// Queries of a tile and their cotangents come and go as one: o_ready and o_free are for consumers of one of them.
constexpr bool kTogether = kHeadDim <= 128;
constexpr i32 kPanels = ceil_div(kHeadDim, 64);
constexpr u32 kKeyBytes = kBlockKV * 128 * kPanels, kQueryBytes = kBlockQ * 128 * kPanels;
// Places in shared memory. What lies behind tiles differs from kernel to kernel.
constexpr u32 kKAt = 0, kVAt = kKAt + kKeyBytes, kQAt = kVAt + kKeyBytes, kOAt = kQAt + kStages * kQueryBytes;
constexpr u32 kGradientAt = kOAt + kStages * kQueryBytes, kGradientBytes = kBlockKV * kBlockQ * 2;      // of dA

// The block's turn to add its share of a query tile.
struct Turn {
  float* sums;           // null: there is no more
  u32* counter;
  u32 number;            // shares before, or whether there is one; the first is stored, not added
};

// Ready barriers end a phase when what they are named after may be read, free barriers when all have read it.
struct Control {
  u64 work_ready[2], work_free[2], k_ready, v_ready, k_free, v_free;
  u64 q_ready[kStages], q_free[kStages], o_ready[kStages], o_free[kStages];
  u64 ds_free[2];
  u64 turn_ready[2], turn_taken[2], share_there[2], share_free, sums_there;
  alignas(16) float lse_log2[kStages][2 * kBlockQ];      // of a query tile; behind them dlse - delta
  float zeros[kBlockQ];
  Ring<1> fetched;                         // blocks of sums
  Ring<2> produced, ushered, turns;      // here, because those who feed have few registers
  Turn turn[2];
  QueryTile query_tiles[4];
  Work work[2];
  Unit unit;                               // whose sums become gradients beside the products
  i32 block, blocks;                       // of it: the one at hand, and how many have been
  bool has_sums;                           // the one at hand

  CF_DEVICE u32 lse_of(u32 stage) const { return shared_address(lse_log2[stage]); }
  CF_DEVICE u32 less_delta_of(u32 stage) const { return shared_address(lse_log2[stage] + kBlockQ); }
};

// Of a stage, or of any number of one.
template <i32 kCount> CF_DEVICE u32 barrier(const u64 (&bars)[kCount], u32 number) {
  return shared_address(bars) + 8 * (number % kCount);
}

// ushered: whether usher and herald are there.
CF_DEVICE void initialise_barriers(Control& control, bool ushered) {
  mbarrier_init(control.k_ready, 1), mbarrier_init(control.v_ready, 1);
  mbarrier_init(control.k_free, kConsumers), mbarrier_init(control.v_free, kConsumers);
  for (i32 n = 0; n < 2; ++n) {
    mbarrier_init(control.work_ready[n], 1), mbarrier_init(control.work_free[n], kConsumers + ushered);
    mbarrier_init(control.ds_free[n], 4 * kConsumers);
    mbarrier_init(control.turn_ready[n], 1), mbarrier_init(control.turn_taken[n], 1);
    mbarrier_init(control.share_there[n], 4 * kConsumers);
  }
  for (i32 n = 0; n < kStages; ++n) {
    mbarrier_init(control.q_ready[n], 1), mbarrier_init(control.q_free[n], kConsumers);
    mbarrier_init(control.o_ready[n], 1), mbarrier_init(control.o_free[n], kConsumers);
  }
  mbarrier_init(control.share_free, 1), mbarrier_init(control.sums_there, 1);
  control.fetched.number = control.produced.number = control.ushered.number = control.turns.number = 0;
  fence_mbarrier_init();
}

// By all threads of the block.
CF_DEVICE void initialise(Control& control, bool ushered) {
  if (thread_index() < kBlockQ) control.zeros[thread_index()] = 0.0f;
  if (thread_index() == 0) initialise_barriers(control, ushered);
  block_barrier();                         // the barriers are there
}

// ---- producer: one thread. It looks for work when it has loaded the last tiles, not sooner: who has been given work that
// it cannot begin yet would keep others waiting for their turns.

// The work that comes next, for all. False: there is no more.
CF_DEVICE bool find_work(const Params& p, const Launch& launch, Control& control) {
  const Ring<2>& slot = control.produced;
  Work &work = control.work[slot.stage()], &before = control.work[slot.stage() ^ 1];
  mbarrier_try_wait_parity(barrier(control.work_free, slot.stage()), slot.parity() ^ 1);
  if (before.closes) {
    own(work, p, launch, atom_inc(ticket_of(p, launch.ticket)));
  } else {
    work.tile = before.tile, work.head_kv = before.head_kv, work.own = before.own, work.loop = before.loop + 1;
  }
  forget();
  if (work.tile >= 0) prepare(work, before, p, launch);
  mbarrier_arrive(barrier(control.work_ready, slot.stage()));                // the others may read it
  return work.tile >= 0;
}

struct Producer {
  const Params& p;
  const TensorMaps& maps;
  const Launch& launch;
  Control& control;
  Ring<kStages> ring;

  CF_DEVICE const Work& work() const { return control.work[control.produced.stage()]; }

  // kRows rows of one head, as soon as what is there may be overwritten; `bytes` more will follow; kFollow:
  // these are such.
  template <i32 kRows, bool kFollow = false>
  CF_DEVICE void load(u32 to, const TensorMap& map, u32 free, u32 parity, u32 ready, i32 head, i32 row, u32 bytes = 0) const {
    const i32 lead0 = work().lead(0), lead1 = work().lead(1);      // read before the wait: others wait for this thread
    if (!kFollow) mbarrier_try_wait_parity(free, parity);
    if (!kFollow) mbarrier_arrive_expect_tx(ready, kRows * 128 * kPanels + bytes);
    CF_UNROLL
    for (i32 n = 0; n < kPanels; ++n) {
      cp_async_bulk_tensor_5d_load(to + n * kRows * 128, map, ready, 64 * n, row, head, lead0, lead1);
    }
  }
  CF_DEVICE void load_keys(u32 to, const TensorMap& map, const u64& free, const u64& ready) const {
    load<kBlockKV>(to, map, shared_address(&free), work().before % 2 ^ 1, shared_address(&ready), work().head_kv,
                   work().tile * kBlockKV);
  }
  CF_DEVICE void load_q(i32 head, i32 tile) const {
    const u32 ready = barrier(control.q_ready, ring.stage());
    control.query_tiles[ring.number % 4] = {head, tile};
    load<kBlockQ>(shared_tiles() + kQAt + ring.stage() * kQueryBytes, maps.q, barrier(control.q_free, ring.stage()),
                  ring.parity() ^ 1, ready, head, tile * kBlockQ, kBlockQ * 8 + kTogether * kQueryBytes);
    forget();                              // step by step: it has few registers
    const float* stats = row_stats_of(p, work().item, head) + 2 * kBlockQ * tile;
    cp_async_bulk_load(control.lse_of(ring.stage()), stats, kBlockQ * 8, ready);
  }
  CF_DEVICE void load_o(i32 head, i32 tile) const {
    const u32 ready = kTogether ? barrier(control.q_ready, ring.stage()) : barrier(control.o_ready, ring.stage());
    load<kBlockQ, kTogether>(shared_tiles() + kOAt + ring.stage() * kQueryBytes, maps.dout,
                             barrier(control.o_free, ring.stage()), ring.parity() ^ 1, ready, head, tile * kBlockQ);
  }

  CF_DEVICE void load_tiles() {
    if (!work().any()) return;
    CF_UNROLL_1
    for (i32 head = work().head_kv * launch.group; head < (work().head_kv + 1) * launch.group; ++head) {
      i32 tile = work().round.start;
      CF_UNROLL_1
      do {
        load_q(head, tile);
        if (tile == work().round.start && head == work().head_kv * launch.group) {
          load_keys(shared_tiles() + kVAt, maps.v, control.v_free, control.v_ready);      // free the sooner
          load_keys(shared_tiles() + kKAt, maps.k, control.k_free, control.k_ready);
        }
        load_o(head, tile);
        ring.advance();
        tile = work().round.after(tile);
      } while (tile != work().round.start);
    }
  }

  CF_DEVICE void produce() {
    Work& none = control.work[1];
    none.closes = 1, none.before = none.end = 0, none.round.first = 0, none.round.last = -1;
    while (find_work(p, launch, control)) {
      load_tiles();
      control.produced.advance();
    }
  }
};

// ---- the warpgroup that serves

CF_DEVICE void serve(const Params& p, const TensorMaps& maps, const Launch& launch, Control& control) {
  setmaxnreg_dec<kProducerRegisters>();
  if (thread_index() == 0) Producer{p, maps, launch, control}.produce();
}
