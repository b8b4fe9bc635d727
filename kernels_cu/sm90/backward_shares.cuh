// How shares of gradients of queries reach their sums, without the consumers.
//
// The usher waits, a tile ahead, until the blocks before have added their shares of the gradient of a query tile; the
// consumers leave theirs in shared memory; the herald adds it and tells the next block. So the consumers wait for a free
// place alone, and who has fallen behind can catch up. In any order the usher waits for the first share of a query tile
// alone, which is stored and not added.
#pragma once
#include "sm90/backward_beside.cuh"

constexpr u32 kShareBytes = kBlockQ * kHeadDim * 4, kShareAt = kSumsAt - kShareBytes;

// In any order a counter is 1 as soon as a block has claimed the first share, and this when it has been stored; it counts
// the others as well where somebody waits for them all.
constexpr u32 kStored = 2;

// ---- usher: one thread

CF_DEVICE void usher(const Params& p, const Launch& launch, Control& control) {
  Ring<2> &slot = control.ushered, &ring = control.turns;
  while (true) {
    const Work& work = control.work[slot.stage()];
    mbarrier_try_wait_parity(barrier(control.work_ready, slot.stage()), slot.parity());
    if (work.tile < 0) break;
    CF_UNROLL_1
    for (i32 head = work.head_kv * launch.group; work.any() && head < (work.head_kv + 1) * launch.group; ++head) {
      i32 tile = work.round.start;
      CF_UNROLL_1
      do {
        Turn& turn = control.turn[ring.stage()];
        mbarrier_try_wait_parity(barrier(control.turn_taken, ring.stage()), ring.parity() ^ 1);
        turn.sums = dq_sums_of(p, work.item, head, kHeadDim) + i64(tile) * kBlockQ * kHeadDim;
        forget();                          // step by step: it has few registers
        turn.counter = turns_of(p, work.item, head) + tile;
        forget();
        if (launch.queries == kInTurn) {
          turn.number = turn_of(work.sight, tile, work.tile);
          wait_for_count(turn.counter, turn.number);
        } else {
          turn.number = atom_cas(turn.counter, 0, 1);
          if (turn.number != 0) wait_for_count(turn.counter, kStored);
        }
        mbarrier_arrive(barrier(control.turn_ready, ring.stage()));
        ring.advance();
        tile = work.round.after(tile);
      } while (tile != work.round.start);
    }
    mbarrier_arrive(barrier(control.work_free, slot.stage()));
    slot.advance();
  }
  mbarrier_try_wait_parity(barrier(control.turn_taken, ring.stage()), ring.parity() ^ 1);
  control.turn[ring.stage()].sums = nullptr;
  mbarrier_arrive(barrier(control.turn_ready, ring.stage()));
}

// ---- herald: one thread. It adds the shares and tells the next block.

CF_DEVICE void herald(const Launch& launch, Control& control) {
  Ring<2> ring;
  while (true) {
    mbarrier_try_wait_parity(barrier(control.turn_ready, ring.stage()), ring.parity());
    const Turn turn = control.turn[ring.stage()];
    if (turn.sums == nullptr) break;
    mbarrier_try_wait_parity(barrier(control.share_there, ring.stage()), ring.parity());
    mbarrier_arrive(barrier(control.turn_taken, ring.stage()));
    const u32 from = shared_tiles() + kShareAt;
    fence_proxy_async_global();            // what the block before added comes first
    if (turn.number == 0) cp_async_bulk_store(turn.sums, from, kShareBytes);
    else cp_reduce_async_bulk_add_f32(turn.sums, from, kShareBytes);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read();
    mbarrier_arrive(shared_address(&control.share_free));
    const bool stored = launch.queries == kInTurn || turn.number == 0;
    if (stored || launch.finish != kFinishedLater) {
      cp_async_bulk_wait_group();
      fence_proxy_async_global();
      if (stored) st_release_gpu(turn.counter, launch.queries == kInTurn ? turn.number + 1 : kStored);
      else red_release_increment(turn.counter);
    }
    ring.advance();
  }
  cp_async_bulk_wait_group();
}

// ---- the warpgroup that serves

CF_DEVICE void serve_shares(const Params& p, const TensorMaps& maps, const Launch& launch, Control& control) {
  serve(p, maps, launch, control);
  if (launch.queries == kNotWanted) return;
  if constexpr (kBeside) {
    if (thread_index() / 32 == 1) finish_beside(p, launch, control);
  }
  if (thread_index() == 64) usher(p, launch, control);
  if (thread_index() == 96) herald(launch, control);
}
