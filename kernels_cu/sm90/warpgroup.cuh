// What a consumer does besides its softmax: it waits for tiles and gives them back, starts products, and sends results
// on their way.
#pragma once
#include "sm90/feed.cuh"

struct Warpgroup {
  const Params& p;
  const Launch& launch;
  Control& control;
  i32 number, thread;                          // of the consumer, of the thread in its warpgroup
  u32 tiles;
  u32 q, k, v;                                 // descriptors
  float unit;
  Ring<kQStages> q_ring{0, 0};
  Ring<kStages> k_ring{0, 0};
  Ring<kStagesV> v_ring{0, 0};
  i32 n;                                       // the key tile
  bool accumulated;
  Softmax softmax;
  Output o;

  // The place of this thread's entry 0. Not kept: a register less.
  CF_DEVICE i32 row_of(const Work& work) const { return work.row + 64 * number + thread / 32 * 16 + thread % 32 / 4; }
  CF_DEVICE i32 col() const { return n * kBlockKV + thread % 4 * 2; }

  CF_DEVICE bool warp_leader() const { return thread % 32 == 0; }
  CF_DEVICE void barrier_of_warpgroup() const { bar_sync(8 + number, 128); }
  CF_DEVICE void wait_for_turn() const { if (kPingPong) bar_sync(1 + number, 256); }
  CF_DEVICE void pass_turn() const { if (kPingPong) bar_arrive(number == kConsumers - 1 ? 1 : number + 2, 256); }

  CF_DEVICE const Work& wait_for_work(const Ring<kWorkSlots>& slot) const {
    mbarrier_try_wait_parity(shared_address(&control.work_ready[slot.stage]), slot.parity);
    return control.work[slot.stage];
  }
  CF_DEVICE void wait_q() const { mbarrier_try_wait_parity(barrier(control.q_ready, q_ring.stage), q_ring.parity); }
  CF_DEVICE void wait_k() const { mbarrier_try_wait_parity(barrier(control.k_ready, k_ring.stage), k_ring.parity); }
  CF_DEVICE void wait_v() const { mbarrier_try_wait_parity(barrier(control.v_ready, v_ring.stage), v_ring.parity); }
  // Places are given back by each warp for itself, when all its lanes have waited for them.
  CF_DEVICE void free_q() {
    if (kOutApart && warp_leader()) mbarrier_arrive(barrier(control.q_free, q_ring.stage));
    q_ring.advance();
  }
  // Where the tile before had its queries its results have left.
  CF_DEVICE void free_results(const Work& work) const {
    if (kOutApart || work.number == i32(block_index()) || !warp_leader()) return;
    cp_async_bulk_wait_group_read();
    mbarrier_arrive(barrier(control.q_free, q_ring.stage ^ 1));
  }
  CF_DEVICE void free_k() {
    if (warp_leader()) mbarrier_arrive(barrier(control.k_free, k_ring.stage));
    k_ring.advance();
  }
  CF_DEVICE void free_v() {
    if (warp_leader()) mbarrier_arrive(barrier(control.v_free, v_ring.stage));
    v_ring.advance();
  }
  CF_DEVICE void pass_k() { wait_k(), warp_barrier(), free_k(); }
  CF_DEVICE void pass_v() { wait_v(), warp_barrier(), free_v(); }

  CF_DEVICE void scores(Scores& s) const {
    const u32 from = q + (q_ring.stage * kQBytes >> 4);
    start_scores(s, kHeadDim > 128 ? opaque(from) : from, k, k_ring.stage);      // opaque: else kept, one for each step
  }
  CF_DEVICE void output(const Operand& weights) {
    start_output(o, weights, v, v_ring.stage, accumulated);
    accumulated = true;
  }

  // The last key tile that this warpgroup sees; less than work.first where it sees none.
  CF_DEVICE i32 last_tile(const Work& work) const { return uniform(work.keys[number].last); }
  CF_DEVICE void wait_to_begin(const Work& work) {
    if (last_tile(work) < work.first) return;
    wait_q();
    CF_UNROLL_1
    for (i32 unseen = uniform(work.last - last_tile(work)); unseen > 0; --unseen) pass_k();
    wait_k();
  }
  // Nothing is seen of what has been loaded for other warpgroups.
  CF_DEVICE void pass_by(const Work& work) {
    if (kOutApart && work.last < work.first) return;
    wait_q();
    warp_barrier();
    free_results(work);
    free_q();
    CF_UNROLL_1
    for (i32 unseen = work.last; unseen >= work.first; --unseen) pass_k(), pass_v();
  }
  CF_DEVICE void finish_output() {
    wgmma_wait_group<0>();                     // O is there, V and the weights are read
    free_v();
  }
  CF_DEVICE void rescale() {
    CF_UNROLL
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] *= softmax.rescale[i / 2 % 2];
  }
  static CF_DEVICE void to_operand(Operand& weights, const Scores& s) {
    CF_UNROLL
    for (int j = 0; j < kScores / 4; ++j) round_into(weights, j, s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]);
  }
  // Those of this warp's rows with key tile n.
  CF_DEVICE void form_scores_again(Scores& s) const {
    const u32 first = address_of(q) + q_ring.stage * kQBytes + thread / 32 * 2048;
    scores_of_warp(s, first, address_of(k) + k_ring.stage * kKBytes, thread % 32);
  }
  // Value rows of key tile n past the length are zeroed.
  CF_DEVICE void clear_values(const Work& work) const {
    if (n == work.last && work.v_rows < kBlockKV) {
      wait_v();
      clear_rows<kPanelsV>(tiles + kVAt + v_ring.stage * kVBytes, work.v_rows, thread);
      fence_proxy_async();
      barrier_of_warpgroup();                  // all rows are zeros: the product may read them
    }
  }

  // O becomes the means of its rows. Of the four lanes that share two rows each ends one, even lanes the first.
  CF_DEVICE void finish_rows(const Work& work) {
    const i32 lane = i32(opaque(thread)) % 32, h = lane % 2, row = row_of(work) + 8 * h;   // opaque: registers are few
    const bool live = row < work.sight.q_length;
    const float natural = kPlainScores ? launch.scale : 1.0f;
    const float sums[2] = {QuadLanes::sum(softmax.l[0]), QuadLanes::sum(softmax.l[1])};
    float own, lse, factor[2];
    softmax.finish_row(h == 0 ? softmax.m[0] : softmax.m[1], h == 0 ? sums[0] : sums[1], natural, unit, work.sink,
                       p.call.lse != nullptr, own, lse);
    if constexpr (kDropout) own *= dropout_scale<float>(p);
    if (!live) own = 0.0f;
    CF_UNROLL
    for (int n = 0; n < 2; ++n) factor[n] = shuffle(own, lane / 2 * 2 + n);
    CF_UNROLL
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] *= factor[i / 2 % 2];
    if (vote_any(own == 0.0f)) {               // what was accumulated may be no number
      CF_UNROLL
      for (int i = 0; i < kHeadDimV / 2; ++i) {
        if (factor[i / 2 % 2] == 0.0f) o[i] = 0.0f;
      }
    }
    if (p.call.lse != nullptr && lane % 4 < 2 && row < p.seqlen_q) {
      const Rows<float> lse_rows = rows_of<float>(p.call.lse, p.lse, work.item, work.head);
      *lse_rows.at(row, 0) = live ? lse : -Limits<float>::infinity();
    }
  }

  // Each warp sends its 16 rows.
  CF_DEVICE void store(const Work& work, const TensorMap& map) {
    const u32 tile = tiles + (kOutApart ? kOutAt : kQAt + (q_ring.stage ^ 1) * kQBytes) + number * 8192;
    const i32 first_row = work.row + 64 * number, own = i32(opaque(thread)), warp = own / 32;
    CF_UNROLL
    for (i32 panel = 0; panel < kPanelsV; panel += kOutPanels) {
      const float* some = o + 32 * panel;
      if (launch.out_by_tma) {
        if (kOutApart) {
          if (warp_leader()) cp_async_bulk_wait_group_read();
          warp_barrier();                      // the results before have left
        }
        stage_output(tile, some, own);
        fence_proxy_async();
        warp_barrier();                        // the results are staged
        if (!warp_leader()) continue;
        CF_UNROLL
        for (i32 n = 0; n < kOutPanels; ++n) {
          cp_async_bulk_tensor_5d_store(map, tile + n * kBlockQ * 128 + warp * 2048, 64 * (panel + n),
                                        first_row + 16 * warp, work.head, work.lead(0), work.lead(1));
        }
        cp_async_bulk_commit_group();
      } else {
        CF_UNROLL
        for (i32 half = 0; half < 2; ++half) {
          stage_half(tile, some + half * kOutColumns / 4, own);
          barrier_of_warpgroup();              // half of the results are staged
          store_half(tile, p, work, first_row, 64 * panel + half * kOutColumns / 2, own);
          fence_proxy_async();
          barrier_of_warpgroup();              // and read
        }
      }
    }
  }

  // Results of a piece of work go on their way, and its slot is free.
  CF_DEVICE void leave(const Work& work, u32 slot, const TensorMap& map) {
    finish_rows(work);
    store(work, map);
    if (warp_leader()) mbarrier_arrive(shared_address(&control.work_free[slot]));      // its lanes have met in store
  }
};
