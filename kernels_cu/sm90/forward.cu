// Forward pass on Hopper's tensor cores: out and lse for 16-bit elements, head dims up to kHeadDim and kHeadDimV.
//
// FlashAttention-3's division of labour (Shah et al. 2024) with a softmax of our own (sm90/softmax.cuh): blocks stay on
// their multiprocessor and take query tiles from a counter. Of warpgroup 0 two threads work: the scheduler prepares the
// next piece of work, the producer loads by TMA. The other warpgroups are consumers of 64 queries each: scores, weights
// and the accumulated output live in registers, and of weights nothing is ever written to memory.
//
//   block     one query tile (kBlockQ = 64 queries a consumer) of one head at a time
//   thread    two rows: wgmma accumulators as sm90/scores.cuh describes
//   shared    q | k x kStages | v x kStages | out (kOwnOut; else over q), sm90/tiles.cuh; barriers and Work beside them
//
//   producer    K9 Q  K8 V9  K7 V8  ...  K0 V1  V0  | K9 Q of the next tile ...           (keys are walked downward)
//   consumer A  S9 .softmax. | S8 O+=P9V9 .softmax. | S7 O+=P8V8 ...                      softmax under its own PV ...
//   consumer B       S9 .softmax. | S8 O+=P9V9 .softmax. | ...                            ... and under A's products
//
// kPingPong hands the right to start products round (named barriers 1, 2, ...), so that softmaxes and products of
// different consumers alternate. A careful step looks for the maximum; an optimistic step (kOptimistic) does not, needs
// the scores again if that fails, and so has its weights in a second set of registers: such steps come in pairs.
//
// What the steps give at head dim 128: speed over the better of cuDNN 9.19 and FlashAttention-3 in the same run, 16384
// keys, full / causal, bfloat16 (H200, 2026-11-29; all but the last row on a prototype).
//
//                                                          expected                        measured
//   TMA, producer and consumers, weights in registers      0.81                            0.81 / 0.79
//   + ping-pong                                            + 6 to 14 %                     0.81 / 0.79
//   + softmax under the product before                     + 16 %                          0.99 / 0.95
//   + reference moved only when 2^8 too small              + some %, at head dim 256       1.00 / 0.96
//   + no maximum in the steady loop                        not foreseen                    1.15 / 1.09
//   + blocks that stay, results in a buffer of their own   + 2 to 5 %                      1.18 / 1.15
#include "sm90/feed.cuh"

// One warpgroup.
struct Consumer {
  const Params& p;
  const Launch& launch;
  Control& control;
  i32 number, thread;                          // of the consumer, of the thread in its warpgroup
  u32 tiles;
  u64 q, k, v;                                 // descriptors
  float unit;
  Ring<kStages> k_ring{0, 0}, v_ring{0, 0};
  u32 q_parity = 0;
  i32 row, col, n;                             // of the thread's entry 0: row, column within a key tile; the key tile
  bool accumulated;
  Softmax softmax;
  Output o;

  CF_DEVICE bool leader() const { return thread == 0; }
  CF_DEVICE void barrier_of_warpgroup() const { bar_sync(8 + number, 128); }
  CF_DEVICE void wait_for_turn() const { if (kPingPong) bar_sync(1 + number, 256); }
  CF_DEVICE void pass_turn() const { if (kPingPong) bar_arrive(number == kConsumers - 1 ? 1 : number + 2, 256); }

  CF_DEVICE void wait_q() {
    mbarrier_try_wait_parity(shared_address(&control.q_ready), q_parity);
    q_parity ^= 1;
  }
  CF_DEVICE void wait_k() const { mbarrier_try_wait_parity(barrier(control.k_ready, k_ring.stage), k_ring.parity); }
  CF_DEVICE void wait_v() const { mbarrier_try_wait_parity(barrier(control.v_ready, v_ring.stage), v_ring.parity); }
  CF_DEVICE void free_k() {
    if (leader()) mbarrier_arrive(barrier(control.k_free, k_ring.stage));
    k_ring.advance();
  }
  CF_DEVICE void free_v() {
    if (leader()) mbarrier_arrive(barrier(control.v_free, v_ring.stage));
    v_ring.advance();
  }

  // S of key tile n; O += P V of the tile before runs on while its softmax is taken.
  CF_DEVICE void products(Scores& s, const Operand& before) {
    wait_k();
    wait_for_turn();
    start_scores(s, q, k, k_ring.stage);
    wait_v();
    start_output(o, before, v, v_ring.stage, accumulated);
    pass_turn();
    accumulated = true;
    wgmma_wait_group<1>();                     // S is there, K is read
    free_k();
  }
  CF_DEVICE void finish_output() {
    wgmma_wait_group<0>();                     // O is there, V and the weights are read
    free_v();
  }

  // Scores become weights, those that dropout removes 0. Whether the references have moved.
  CF_DEVICE bool to_weights(Scores& s, const Work& work, bool left_edge, bool right_edge) {
    shape(s, p, launch, work, row, n * kBlockKV + col);
    if (left_edge || right_edge) select(s, work, row, n * kBlockKV + col, left_edge);
    const bool moved = softmax.look(s, unit);
    softmax.weigh_in_place(s, unit);
    if constexpr (kDropout) drop(s, work.dropout, row, n * kBlockKV + col);
    return moved;
  }
  static CF_DEVICE void to_operand(Operand& weights, const Scores& s) {
    CF_UNROLL
    for (int j = 0; j < kScores / 4; ++j) round_into(weights, j, s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]);
  }
  CF_DEVICE void rescale() {
    CF_UNROLL
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] *= softmax.rescale[i / 2 % 2];
  }

  CF_DEVICE void first_step(Operand& weights, const Work& work) {
    Scores s;
    wait_k();
    wait_for_turn();
    start_scores(s, q, k, k_ring.stage);
    pass_turn();
    wgmma_wait_group<0>();
    free_k();
    to_weights(s, work, n < work.steady_from, n >= work.steady_to);
    to_operand(weights, s);
    if (work.v_rows < kBlockKV) {              // value rows past the length
      wait_v();
      clear_rows(tiles + kVAt + v_ring.stage * kVBytes, work.v_rows, thread);
      fence_proxy_async();
      barrier_of_warpgroup();                  // all rows are zeros: the product may read them
    }
  }

  // The reference moves only when it is more than 2^8 too small.
  CF_DEVICE void careful_step(Operand& weights, const Work& work) {
    Scores s;
    const bool left_edge = n < work.steady_from, right_edge = n >= work.steady_to;
    products(s, weights);
    const bool moved = to_weights(s, work, left_edge, right_edge);
    finish_output();                           // only now may the weights change
    to_operand(weights, s);
    if (moved) rescale();
  }

  // The reference stays unless sums leave its range.
  CF_DEVICE void optimistic_step(const Operand& before, Operand& weights, const Work& work) {
    Scores s;
    float sums[2];
    const auto keep = [&](int j, const float (&w)[4]) { round_into(weights, j, w[0], w[1], w[2], w[3]); };
    products(s, before);
    shape(s, p, launch, work, row, n * kBlockKV + col);
    softmax.weigh<true>(s, unit, sums, keep);
    const bool again = vote_any(!Softmax::in_range(sums[0]) || !Softmax::in_range(sums[1]));
    if (again) {
      softmax.look_again(s, sums, unit);
      softmax.weigh<false>(s, unit, sums, keep);
    }
    softmax.l[0] += sums[0];
    softmax.l[1] += sums[1];
    finish_output();
    if (again) rescale();
  }

  CF_DEVICE void walk_keys(const Work& work) {
    Operand weights;
    wait_q();
    accumulated = false;
    n = work.last;
    first_step(weights, work);
    --n;
    CF_UNROLL_1
    while (n >= work.first) {
      if constexpr (kOptimistic) {
        if (n < work.steady_to && n > work.steady_from) {
          Operand other;
          CF_UNROLL_1
          do {
            optimistic_step(weights, other, work);
            --n;
            optimistic_step(other, weights, work);
            --n;
          } while (n > work.steady_from);
          continue;
        }
      }
      careful_step(weights, work);
      --n;
    }
    if (kOwnOut && leader()) mbarrier_arrive(shared_address(&control.q_free));   // q has been read for the last time
    wait_v();
    start_output(o, weights, v, v_ring.stage, accumulated);
    finish_output();
  }

  CF_DEVICE void finish_rows(const Work& work) {
    const Rows<float> lse_rows = rows_of<float>(p.call.lse, p.lse, work.item, work.head);
    const float natural = kPlainScores ? launch.scale : 1.0f;
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      float factor, lse;
      softmax.finish(h, natural, unit, work.sink, factor, lse);
      if constexpr (kDropout) factor *= dropout_scale<float>(p);
      const bool live = row + 8 * h < work.sight.q_length, zero = !live || factor == 0.0f;
      const bool writes = p.call.lse != nullptr && thread % 4 == 0 && row + 8 * h < p.seqlen_q;
      if (writes) *lse_rows.at(row + 8 * h, 0) = live ? lse : -Limits<float>::infinity();
      CF_UNROLL
      for (int j = 0; j < kHeadDimV / 8; ++j) {
        CF_UNROLL
        for (int x = 0; x < 2; ++x) {
          float& out = o[4 * j + 2 * h + x];
          out = zero ? 0.0f : out * factor;
        }
      }
    }
  }

  CF_DEVICE void store(const Work& work, const TensorMap& map) {
    const u32 tile = tiles + kOutAt + number * 8192;
    const i32 first_row = work.row + 64 * number;
    if (kOwnOut) {
      if (leader()) cp_async_bulk_wait_group_read();
      barrier_of_warpgroup();                  // the results of the tile before have left
    }
    if (launch.out_by_tma) {
      stage_output(tile, o, thread);
      fence_proxy_async();
    } else {
      stage_half<0>(tile, o, thread);
      barrier_of_warpgroup();                  // half of the results are staged
      store_half(tile, p, work, first_row, 0, thread);
      barrier_of_warpgroup();                  // and read
      stage_half<1>(tile, o, thread);
      barrier_of_warpgroup();
      store_half(tile, p, work, first_row, 1, thread);
      fence_proxy_async();
    }
    barrier_of_warpgroup();                    // the results are staged, q and `work` are read
    if (!leader()) return;
    if (launch.out_by_tma) {
      CF_UNROLL
      for (i32 panel = 0; panel < kPanelsV; ++panel) {
        const u32 from = tile + panel * kBlockQ * 128;
        cp_async_bulk_tensor_5d_store(map, from, 64 * panel, first_row, work.head, work.lead(0), work.lead(1));
      }
      cp_async_bulk_commit_group();
      if (!kOwnOut) cp_async_bulk_wait_group_read();
    }
    if (!kOwnOut) mbarrier_arrive(shared_address(&control.q_free));
  }
};

CF_DEVICE void consume(const Params& p, const TensorMaps& maps, const Launch& launch, Control& control, u32 tiles,
                       i32 number) {
  const i32 thread = thread_index() % 128;
  Consumer c{p, launch, control, number, thread, tiles};
  c.q = descriptor(tiles + kQAt + number * 8192, 16);
  c.k = descriptor(tiles + kKAt, 16);
  c.v = descriptor(tiles + kVAt, kBlockKV * 128);
  c.unit = kPlainScores ? launch.unit : kLog2e;
  c.col = thread % 4 * 2;
  if (kPingPong && number == 0) bar_arrive(1, 256);
  Ring<kWorkSlots> slot{0, 0};
  CF_UNROLL_1
  while (true) {
    const Work& work = control.work[slot.stage];
    mbarrier_try_wait_parity(shared_address(&control.work_ready[slot.stage]), slot.parity);
    if (work.number < 0) break;
    c.row = work.row + 64 * number + thread / 32 * 16 + thread % 32 / 4;
    c.softmax.reset();
    if (work.last >= work.first) {
      c.walk_keys(work);
    } else if (!kOwnOut) {
      c.wait_q();                              // the rows have seen nothing: o will not be looked at
    }
    c.finish_rows(work);
    c.store(work, maps.out);
    if (c.leader()) mbarrier_arrive(shared_address(&control.work_free[slot.stage]));
    slot.advance();
  }
  if (c.leader()) cp_async_bulk_wait_group();  // results must have left before the block ends
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    cupyflash_forward(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps,
                      const __grid_constant__ Launch launch) {
  Control& control = static_shared_storage<Control>();
  const u32 tiles = shared_tiles();
  if (thread_index() == 0) initialise(control);
  block_barrier();                             // the barriers are there
  if (warpgroup_index() == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (thread_index() == 0) produce(maps, control, tiles);
    if (thread_index() == 32) schedule(p, launch, control);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, maps, launch, control, tiles, warpgroup_index() - 1);      // not kept across the branch: a register less
  }
}
