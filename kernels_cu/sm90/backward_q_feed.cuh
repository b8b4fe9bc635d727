// What a block of the backward's second half does next, and the two threads that supply it: the scheduler prepares work,
// the producer loads tiles.
//
// A block owns one tile of queries of one head at a time, for all items that share the queries: a piece of work is one
// item. They and their cotangents stand in shared memory; the key tiles that some of them see come from the last to the
// first. Blocks take query tiles by ticket, those that see the most keys under a causal mask first.
#pragma once
#include "core/panels.cuh"
#include "sm90/backward_launch.cuh"

constexpr i32 kConsumers = 2, kPanels = ceil_div(kHeadDim, 64);
constexpr i32 kLead = 2;         // key tiles that are still to be loaded when the next piece of work is asked for
constexpr u32 kQueryBytes = kBlockQ * 128 * kPanels, kKeyBytes = kBlockKV * 128 * kPanels;
constexpr u32 kQAt = 0, kOAt = kQAt + kQueryBytes, kKAt = kOAt + kQueryBytes, kVAt = kKAt + kStages * kKeyBytes;
constexpr u32 kAddendsAt = kVAt + kKeyBytes;
static_assert(kBlockQ == 64 * kConsumers && kThreads == 128 * (kConsumers + 1), "64 queries a consumer");

// Of a consumer's queries: the last key tile that some see; tiles in [steady_from, steady_to) are seen by all.
struct Keys { i32 last, steady_from, steady_to; };

struct Work {
  i32 tile;              // negative: there is no more
  u32 own;
  u32 loop;              // number of the item among those of the owner
  i32 closes;            // 1: it is the last
  i32 head, head_kv;
  i32 first, last;       // key tiles that some query sees; none if last < first
  i32 k_rows;            // rows of the key tile `last` that may be read: the others may hold NaN
  i32 live;              // rows below the length of an item so far
  Keys keys[kConsumers];
  Item item;
  Visibility sight;

  CF_DEVICE bool any() const { return last >= first; }
  CF_DEVICE i32 row() const { return tile * kBlockQ; }
  CF_DEVICE i32 lead(int axis) const { return item.at[kLeadAxes - 1 - axis]; }      // as TMA counts them
};

// Ready barriers end a phase when what they are named after may be read, free barriers when all have read it.
struct Control {
  u64 work_wanted, work_ready[2], work_free[2], q_ready, q_free, o_ready, o_free;
  u64 k_ready[kStages], k_free[kStages], v_ready, v_free;
  Work work[2];
};

CF_DEVICE void initialise(Control& control) {
  mbarrier_init(control.work_wanted, 1);
  for (i32 n = 0; n < 2; ++n) mbarrier_init(control.work_ready[n], 1), mbarrier_init(control.work_free[n], kConsumers + 1);
  mbarrier_init(control.q_ready, 1), mbarrier_init(control.q_free, kConsumers);
  mbarrier_init(control.o_ready, 1), mbarrier_init(control.o_free, kConsumers);
  mbarrier_init(control.v_ready, 1), mbarrier_init(control.v_free, kConsumers);
  for (i32 n = 0; n < kStages; ++n) mbarrier_init(control.k_ready[n], 1), mbarrier_init(control.k_free[n], kConsumers);
  fence_mbarrier_init();
}

// ---- scheduler: one thread. Step by step through shared memory: it has few registers.

CF_DEVICE void own(Work& work, const Params& p, const Launch& launch, u32 ticket) {
  work.loop = 0, work.tile = -1;
  if (ticket >= u32(launch.tiles)) return;
  const u32 per_group = launch.head_tiles * launch.side_by_side;
  const u32 first = ticket / per_group * launch.side_by_side, rest = ticket % per_group;
  const u32 size = smaller(u32(launch.heads) - first, u32(launch.side_by_side));
  work.tile = launch.head_tiles - 1 - i32(rest / size);
  work.own = first + rest % size;
  fence_acq_rel_cta();
  work.head = i32(work.own % u32(p.heads_q));
  work.own /= u32(p.heads_q);
  work.head_kv = work.head / launch.group;
}

CF_DEVICE void find_keys(Work& work, const Params& p) {
  const Visibility& sight = work.sight;
  const i32 row = work.row();
  work.first = sight.keys_of_some(row, row + kBlockQ).start;
  fence_acq_rel_cta();
  work.last = sight.keys_of_some(row, row + kBlockQ).stop - 1;
  fence_acq_rel_cta();
  const bool any = work.first <= work.last;
  work.first = any ? work.first / kBlockKV : 0;
  work.last = any ? work.last / kBlockKV : -1;
  work.k_rows = sight.kv_length < p.seqlen_k ? sight.kv_length - work.last * kBlockKV : kBlockKV;
  CF_UNROLL_1
  for (i32 n = 0; n < kConsumers; ++n) {
    const i32 from = row + 64 * n;
    fence_acq_rel_cta();
    work.keys[n].last = ceil_div(sight.keys_of_some(from, from + 64).stop, kBlockKV) - 1;
    fence_acq_rel_cta();
    work.keys[n].steady_from = ceil_div(sight.keys_of_all(from, smaller(from + 64, sight.q_length)).start, kBlockKV);
    fence_acq_rel_cta();
    work.keys[n].steady_to = sight.keys_of_all(from, smaller(from + 64, sight.q_length)).stop / kBlockKV;
  }
}

CF_DEVICE void prepare(Work& work, const Work& before, const Params& p) {
  work.closes = work.loop + 1 == points(p.loop);
  fence_acq_rel_cta();
  place(work.item, p, work.own, work.loop);
  fence_acq_rel_cta();
  find_sight(work.sight, p, work.item);
  work.live = larger(work.loop == 0 ? 0 : before.live, work.sight.q_length);
  find_keys(work, p);
}

CF_DEVICE void schedule(const Params& p, const Launch& launch, Control& control) {
  Ring<2> slot;
  control.work[1].closes = 1;
  while (true) {
    Work &work = control.work[slot.stage()], &before = control.work[slot.stage() ^ 1];
    mbarrier_try_wait_parity(shared_address(&control.work_wanted), slot.number % 2);
    mbarrier_try_wait_parity(barrier(control.work_free, slot.stage()), slot.parity() ^ 1);
    if (before.closes) {
      own(work, p, launch, atom_inc(static_cast<u32*>(p.call.turns) + launch.ticket));
    } else {
      work.tile = before.tile, work.head = before.head, work.head_kv = before.head_kv;
      work.own = before.own, work.loop = before.loop + 1;
    }
    forget();
    if (work.tile >= 0) prepare(work, before, p);
    mbarrier_arrive(barrier(control.work_ready, slot.stage()));                // the others may read it
    if (work.tile < 0) break;
    slot.advance();
  }
}

// ---- producer: one thread

struct Producer {
  const TensorMaps& maps;
  Control& control;
  u32 tiles;
  Ring<2> slot;
  Ring<1> q, v;
  Ring<kStages> k;

  CF_DEVICE const Work& work() const { return control.work[slot.stage()]; }
  CF_DEVICE void ask() const { mbarrier_arrive(shared_address(&control.work_wanted)); }

  // kRows rows of one head, as soon as what is there may be overwritten.
  template <i32 kRows>
  CF_DEVICE void load(u32 to, const TensorMap& map, u32 free, u32 parity, u32 ready, i32 head, i32 row) const {
    const i32 lead0 = work().lead(0), lead1 = work().lead(1);
    mbarrier_try_wait_parity(free, parity);
    mbarrier_arrive_expect_tx(ready, kRows * 128 * kPanels);
    CF_UNROLL
    for (i32 n = 0; n < kPanels; ++n) {
      cp_async_bulk_tensor_5d_load(to + n * kRows * 128, map, ready, 64 * n, row, head, lead0, lead1);
    }
  }
  CF_DEVICE void load_queries(u32 to, const TensorMap& map, const u64& free, const u64& ready) const {
    load<kBlockQ>(tiles + to, map, shared_address(&free), q.parity() ^ 1, shared_address(&ready), work().head, work().row());
  }
  CF_DEVICE void load_k(i32 n) {
    load<kBlockKV>(tiles + kKAt + k.stage() * kKeyBytes, maps.k, barrier(control.k_free, k.stage()), k.parity() ^ 1,
                   barrier(control.k_ready, k.stage()), work().head_kv, n * kBlockKV);
    k.advance();
  }
  CF_DEVICE void load_v(i32 n) {
    load<kBlockKV>(tiles + kVAt, maps.v, shared_address(&control.v_free), v.parity() ^ 1, shared_address(&control.v_ready),
                   work().head_kv, n * kBlockKV);
    v.advance();
  }

  CF_DEVICE void load_tiles() {
    const i32 first = work().first, last = work().last, asked_at = smaller(last, first + kLead);
    if (!work().any()) return ask();
    CF_UNROLL_1
    for (i32 n = last; n >= first; --n) {
      load_k(n);
      if (n == last) load_queries(kQAt, maps.q, control.q_free, control.q_ready);
      if (n == asked_at) ask();
      if (n == last) load_queries(kOAt, maps.dout, control.o_free, control.o_ready), q.advance();
      load_v(n);
    }
  }

  CF_DEVICE void produce() {
    ask();
    while (true) {
      mbarrier_try_wait_parity(barrier(control.work_ready, slot.stage()), slot.parity());
      if (work().tile < 0) break;
      load_tiles();
      mbarrier_arrive(barrier(control.work_free, slot.stage()));
      slot.advance();
    }
  }
};
