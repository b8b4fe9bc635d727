// What the consumers of both backward kernels have in common: who they are, and the walk over work, heads and tiles.
#pragma once
#include "core/warp.cuh"
#include "sm90/backward_store.cuh"

struct ConsumerBase {
  const Params& p;
  const Launch& launch;
  Control& control;
  i32 number, thread;                      // of the consumer, of the thread in its warpgroup
  u32 tiles;
  Ring<2> slot;
  Ring<kStages> ring;
  i32 first_ragged = 0;                    // row from which tiles have rows past a length within the array
  float slope_sum = 0.0f;

  CF_DEVICE const Work& work() const { return control.work[slot.stage()]; }
  CF_DEVICE bool leader() const { return thread == 0; }
  CF_DEVICE void meet() const { bar_sync(1, 256); }
  CF_DEVICE void barrier_of_warpgroup() const { bar_sync(8 + number, 128); }

  // Rows past a length are zeroed: a weight of zero times a NaN there would be NaN. Both consumers write all of them.
  template <i32 kRows> CF_DEVICE void clear_rows(u32 tile, i32 rows) const {
    CF_UNROLL_1
    for (i32 n = rows * 8 + i32(opaque(thread)); n < kRows * 8; n += 128) {
      CF_UNROLL
      for (i32 panel = 0; panel < kPanels; ++panel) st_shared_128(tile + panel * kRows * 128 + n * 16, {0, 0, 0, 0});
    }
  }
  CF_DEVICE void clear_queries(i32 row, u32 q_ready, u32 o_ready) const {
    if (row < first_ragged) return;
    const i32 live = work().sight.q_length - row;
    mbarrier_try_wait_parity(q_ready, ring.parity());
    mbarrier_try_wait_parity(o_ready, ring.parity());
    clear_rows<kBlockQ>(tiles + kQAt + ring.stage() * kQueryBytes, live);
    clear_rows<kBlockQ>(tiles + kOAt + ring.stage() * kQueryBytes, live);
    fence_proxy_async();
    meet();
  }
  CF_DEVICE void clear_keys(i32 rows) const {
    if (rows >= kBlockKV || work().tile * kBlockKV + rows == p.seqlen_k) return;
    clear_rows<kBlockKV>(tiles + kKAt, rows);
    clear_rows<kBlockKV>(tiles + kVAt, rows);
    fence_proxy_async();
    meet();
  }

  // The block's part of the gradient of one slope.
  CF_DEVICE void store_slopes(i32 head) {
    CF_UNROLL
    for (u32 mask = 16; mask > 0; mask /= 2) slope_sum += shuffle_xor(slope_sum, mask);
    if (thread % 32 == 0) control.slope_parts[4 * number + thread / 32] = slope_sum;
    meet();                                // all warps' parts are there
    if (leader() && number == 0) {
      float sum = 0.0f;
      for (i32 warp = 0; warp < 4 * kConsumers; ++warp) sum += control.slope_parts[warp];
      const i64 at = head_number(p, work().item, head) * launch.key_tiles + work().tile;
      static_cast<float*>(p.call.slope_rows)[at] = sum;
    }
    meet();                                // they have been read
    slope_sum = 0.0f;
  }

  // Of every piece of work: steps.begin(), steps.query_tile(head, tile, first) and steps.end(); steps.store() where it closes.
  template <class Steps> CF_DEVICE void walk(Steps& steps) {
    const bool slopes = kSoftcapOrAlibi && p.call.slope_rows != nullptr;
    steps.clear();
    CF_UNROLL_1
    while (true) {
      mbarrier_try_wait_parity(barrier(control.work_ready, slot.stage()), slot.parity());
      if (work().tile < 0) break;
      const bool any = work().any();
      const i32 q_length = uniform(work().sight.q_length);
      first_ragged = q_length == p.seqlen_q ? q_length : q_length - kBlockQ + 1;      // TMA's zeros need no help
      if (any) {
        mbarrier_try_wait_parity(shared_address(&control.k_ready), work().before % 2);
        mbarrier_try_wait_parity(shared_address(&control.v_ready), work().before % 2);
        clear_keys(work().sight.kv_length - work().tile * kBlockKV);
        steps.begin();
      }
      CF_UNROLL_1
      for (i32 n = 0; n < launch.group; ++n) {
        const i32 head = uniform(work().head_kv) * launch.group + n, last = uniform(work().last);
        CF_UNROLL_1
        for (i32 tile = last; tile >= work().first; --tile) steps.query_tile(head, tile, n == 0 && tile == last);
        if (slopes) store_slopes(head);
      }
      if (any) {
        steps.end();
        if (leader()) mbarrier_arrive(shared_address(&control.kv_free));
      }
      if (work().closes) steps.store(), steps.clear();
      barrier_of_warpgroup();              // `work` has been read
      if (leader()) mbarrier_arrive(barrier(control.work_free, slot.stage()));
      slot.advance();
    }
  }
};
