// Forward pass on Hopper's tensor cores: out and lse for 16-bit elements, head dims up to kHeadDim and kHeadDimV.
//
// FlashAttention-3's division of labour (Shah et al. 2024) with a softmax of our own (sm90/softmax.cuh): blocks stay on
// their multiprocessor and take query tiles from a counter. Of warpgroup 0 two threads work: the scheduler prepares the
// next piece of work, the producer loads by TMA. The other warpgroups are consumers of 64 queries each: scores, weights
// and the accumulated output live in registers, and of weights nothing is ever written to memory.
//
//   block     one query tile (kBlockQ = 64 queries a consumer) of one head at a time
//   thread    two rows: wgmma accumulators as sm90/scores.cuh describes
//   shared    q x kQStages | k x kStages | v x kStages | out, sm90/tiles.cuh; barriers and Work beside them
//
//   producer    K9 Q  K8 V9  K7 V8  ...  K0 V1  V0  | K9 Q of the next tile ...           (keys are walked downward)
//   consumer A  S9 .softmax. | S8 O+=P9V9 .softmax. | ... | O+=P0V0 S9' results .softmax. | ...    under its own PV ...
//   consumer B       S9 .softmax. | S8 O+=P9V9 .softmax. | ...                               ... and under A's products
//
// The scores that a query tile begins with are formed behind the last product of the tile before. A consumer passes by
// the key tiles that only others see. kPingPong hands the right to start products round (named barriers 1, 2, ...), so
// that softmaxes and products alternate between two consumers; more of them do without, and all walk alike with it.
//
// A careful step looks for the maximum; an optimistic step (kOptimistic) does not. Where that fails a warp forms its
// scores again, by mma.sync, for wgmma wants all four warps. So each warp frees its keys.
//
// What the steps give: speed over the better of cuDNN 9.19 and FlashAttention-3 in the same run, bfloat16, H200,
// 2026-11-29. First head dim 128 and 16384 keys, full / causal, all but the last row on a prototype:
//
//                                                          expected                        measured
//   TMA, producer and consumers, weights in registers      0.81                            0.81 / 0.79
//   + ping-pong                                            + 6 to 14 %                     0.81 / 0.79
//   + softmax under the product before                     + 16 %                          0.99 / 0.95
//   + reference moved only when 2^8 too small              + some %, at head dim 256       1.00 / 0.96
//   + no maximum in the steady loop                        not foreseen                    1.15 / 1.09
//   + blocks that stay, results in a buffer of their own   + 2 to 5 %                      1.18 / 1.15
//   + a scheduler of its own that takes two tiles ahead    nothing                         1.19 / 1.02
//
// The last step lost a tenth of causal speed (head dim 256: 0.87 instead of 1.01): tiles taken early lie with a block
// whatever it has before them. From there on, by head dim, at 1024, 4096 and 16384 keys:
//
//                                                    full                          causal
//   128  two tiles ahead                             1.12  1.15  1.19              0.99  1.08  1.02
//        tiles taken late, begun behind the last     1.08  1.19  1.15              1.18  1.13  1.10
//   256  two tiles ahead                             0.98  1.05  1.07              0.88  0.83  0.87
//        taken late, begun early, queries free early 1.13  1.06  1.03              1.15  1.01  1.03
//   64   192 x 96, two tiles ahead                   1.01  1.11  1.10              0.88  1.08  1.05
//        192 x 128, taken late, begun early          1.09  1.15  1.09              0.84  1.03  1.09
//        four consumers, 256 x 64, unseen tiles left 1.29  1.21  1.11              1.33  1.26  1.19
//   as it stands, through the API                64  1.22  1.15  1.07              1.21  1.18  1.10
//                                               128  1.02  1.08  1.09              0.97  1.03  1.06
//
// At 512 keys head dim 128 stood at 0.98 and 0.91; since pieces of few keys are followed at once, at 1.00 and 0.97.
// What did not help: key tiles of 80 at head dim 256; three consumers at head dim 128 (192 x 64, 192 x 80: 0.92 to 1.02
// of 128 x 128); ping-pong of three consumers; O finished early at head dim 128.
#include "sm90/feed.cuh"

// O is finished in the middle of the weights, and later ones are rounded as they come: 0 to 6 % at head dim 64. Elsewhere
// it is finished behind a branch after them: the compiler may move a wait within straight code, and likes it early.
constexpr bool kEarly = kPlainScores && !kDropout && !kPingPong;
// Dropout between the products of two key tiles: 1.24 instead of 1.26 ms at head dim 128, 3 % slower at 64.
constexpr bool kDropBetween = kDropout && kBlockQ == 128 && kHeadDim <= 128;

// One warpgroup.
struct Consumer {
  const Params& p;
  const Launch& launch;
  Control& control;
  i32 number, thread;                          // of the consumer, of the thread in its warpgroup
  u32 tiles;
  u32 q, k, v;                                 // descriptors
  float unit;
  Ring<kQStages> q_ring{0, 0};
  Ring<kStages> k_ring{0, 0}, v_ring{0, 0};
  i32 n;                                       // the key tile
  bool accumulated;
  Softmax softmax;
  Output o;

  // The place of this thread's entry 0. Not kept: a register less.
  CF_DEVICE i32 row_of(const Work& work) const { return work.row + 64 * number + thread / 32 * 16 + thread % 32 / 4; }
  CF_DEVICE i32 col() const { return n * kBlockKV + thread % 4 * 2; }

  CF_DEVICE bool leader() const { return thread == 0; }
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
  CF_DEVICE void free_q() {
    if (leader()) mbarrier_arrive(barrier(control.q_free, q_ring.stage));
    q_ring.advance();
  }
  CF_DEVICE void free_k() {                    // each warp for itself
    if (thread % 32 == 0) mbarrier_arrive(barrier(control.k_free, k_ring.stage));
    k_ring.advance();
  }
  CF_DEVICE void free_v() {
    if (leader()) mbarrier_arrive(barrier(control.v_free, v_ring.stage));
    v_ring.advance();
  }

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
    for (i32 unseen = uniform(work.last - last_tile(work)); unseen > 0; --unseen) wait_k(), free_k();
    wait_k();
  }
  // Nothing is seen of what has been loaded for other warpgroups.
  CF_DEVICE void pass_by(const Work& work) {
    if (work.last < work.first) return;
    wait_q();
    free_q();
    CF_UNROLL_1
    for (i32 unseen = work.last; unseen >= work.first; --unseen) wait_k(), free_k(), wait_v(), free_v();
  }
  // S of key tile n; O += P V of the tile before runs on while its softmax is taken.
  CF_DEVICE void products(Scores& s, Operand& before, const Work& work) {
    wait_k();
    wait_for_turn();
    scores(s);
    drop_before_product(before, work, col() + kBlockKV);
    wait_v();
    output(before);
    pass_turn();
    wgmma_wait_group<1>();                     // S is there
  }
  CF_DEVICE void drop_before_product(Operand& weights, const Work& work, i32 col) const {
    if constexpr (kDropBetween) {
      if (in_groups(work.dropout)) drop_pairs(weights, work.dropout, row_of(work), col);
    }
  }
  CF_DEVICE void drop_before_rounding(Scores& s, const Work& work) const {
    if constexpr (kDropout) {
      if (!kDropBetween || !in_groups(work.dropout)) drop(s, work.dropout, row_of(work), col());
    }
  }
  CF_DEVICE void finish_output() {
    wgmma_wait_group<0>();                     // O is there, V and the weights are read
    free_v();
  }

  // Scores become weights, those that dropout removes 0. Whether the references have moved.
  CF_DEVICE bool to_weights(Scores& s, const Work& work, bool left_edge, bool right_edge) {
    shape<false>(s, p, launch, work, row_of(work), col());
    if (left_edge || right_edge) select(s, work, row_of(work), col(), left_edge);
    const bool moved = softmax.look(s, unit);
    softmax.weigh(s, unit);
    drop_before_rounding(s, work);
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

  CF_DEVICE void first_step(Scores& s, Operand& weights, const Work& work, bool left_edge, bool right_edge) {
    to_weights(s, work, left_edge, right_edge);
    to_operand(weights, s);
    if (n == work.last && work.v_rows < kBlockKV) {              // value rows past the length
      wait_v();
      clear_rows<kPanelsV>(tiles + kVAt + v_ring.stage * kVBytes, work.v_rows, thread);
      fence_proxy_async();
      barrier_of_warpgroup();                  // all rows are zeros: the product may read them
    }
  }

  // The reference moves only when it is more than 2^8 too small.
  CF_DEVICE void careful_step(Scores& s, Operand& weights, const Work& work, bool left_edge, bool right_edge) {
    products(s, weights, work);
    free_k();
    const bool moved = to_weights(s, work, left_edge, right_edge);
    finish_output();                           // only now may the weights change
    to_operand(weights, s);
    if (moved) rescale();
  }

  // The reference stays unless sums leave its range: then the scores are formed again.
  CF_DEVICE void optimistic_step(Scores& s, Operand& weights, const Work& work) {
    constexpr int kAll = kScores / 4, kMiddle = kEarly ? kAll / 2 : kAll;
    float sums[2] = {0.0f, 0.0f};
    products(s, weights, work);
    shape<true>(s, p, launch, work, row_of(work), col());
    softmax.weigh<true>(s, 0, kMiddle, unit, sums);
    if constexpr (kEarly) {
      finish_output();
      softmax.weigh<true>(s, kMiddle, kAll, unit, sums);
      to_operand(weights, s);
    }
    const bool again = vote_any(!Softmax::in_range(sums[0]) || !Softmax::in_range(sums[1]));
    if (again) {
      const u32 first = address_of(q) + q_ring.stage * kQBytes + thread / 32 * 2048;
      scores_of_warp(s, first, address_of(k) + k_ring.stage * kKBytes, thread % 32);
      shape<true>(s, p, launch, work, row_of(work), col());
      softmax.look_again(s, sums, unit);
      sums[0] = sums[1] = 0.0f;
      softmax.weigh<false>(s, 0, kAll, unit, sums);
      if constexpr (kEarly) to_operand(weights, s);
    }
    free_k();
    softmax.l[0] += sums[0];
    softmax.l[1] += sums[1];
    if constexpr (!kEarly) {
      drop_before_rounding(s, work);
      finish_output();
      to_operand(weights, s);
    }
    if (again) rescale();
  }

  // From S of the first key tile to the weights of the last.
  CF_DEVICE void walk_keys(Scores& s, Operand& weights, const Work& work) {
    const i32 last = last_tile(work);
    const i32 steady_from = uniform(work.keys[number].steady_from), steady_to = uniform(work.keys[number].steady_to);
    free_k();
    CF_UNROLL_1
    for (i32 unseen = uniform(work.last - last); unseen > 0; --unseen) wait_v(), free_v();
    accumulated = false;
    n = last;
    const bool guess = kOptimistic && !(kSoftcapOrAlibi && p.call.slopes != nullptr);      // ALiBi's scores rise
    first_step(s, weights, work, n < steady_from, n >= steady_to);
    --n;
    CF_UNROLL_1
    while (n >= work.first) {
      if constexpr (kOptimistic) {
        if (guess && n < steady_to && n >= steady_from) {
          CF_UNROLL_1
          do {
            optimistic_step(s, weights, work);
            --n;
          } while (n >= steady_from);
          continue;
        }
      }
      careful_step(s, weights, work, n < steady_from, n >= steady_to);
      --n;
    }
    free_q();
    drop_before_product(weights, work, col() + kBlockKV);
    wait_v();
  }

  CF_DEVICE void finish_rows(const Work& work) {
    const i32 row = row_of(work);
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
    CF_UNROLL
    for (i32 panel = 0; panel < kPanelsV; panel += kOutPanels) {
      const float* some = o + 32 * panel;
      if (leader()) cp_async_bulk_wait_group_read();
      barrier_of_warpgroup();                  // the results before have left
      if (launch.out_by_tma) {
        stage_output(tile, some, thread);
        fence_proxy_async();
        barrier_of_warpgroup();                // the results are staged
        if (!leader()) continue;
        CF_UNROLL
        for (i32 n = 0; n < kOutPanels; ++n) {
          cp_async_bulk_tensor_5d_store(map, tile + n * kBlockQ * 128, 64 * (panel + n), first_row, work.head,
                                        work.lead(0), work.lead(1));
        }
        cp_async_bulk_commit_group();
      } else {
        CF_UNROLL
        for (i32 half = 0; half < 2; ++half) {
          stage_half(tile, some + half * kOutColumns / 4, thread);
          barrier_of_warpgroup();              // half of the results are staged
          store_half(tile, p, work, first_row, 64 * panel + half * kOutColumns / 2, thread);
          barrier_of_warpgroup();              // and read
        }
      }
    }
  }

  // Piece after piece: the first scores of the next are formed behind the last product of one, while its results are
  // on their way. Both products are started even where there is nothing to multiply, and what they give is not looked
  // at: a branch around them would make the compiler wait for each.
  CF_DEVICE void run(const TensorMaps& maps) {
    Scores s;
    Operand weights;
    Ring<kWorkSlots> slot{0, 0};
    wait_for_work(slot);
    wait_to_begin(control.work[0]);
    wait_for_turn();
    scores(s);
    pass_turn();
    wgmma_wait_group<0>();
    CF_UNROLL_1
    while (true) {
      const Work& work = control.work[slot.stage];
      if (work.number < 0) break;
      softmax.reset(row_of(work), work.sight.q_length);
      const i32 first = work.first, last = last_tile(work);
      if (last >= first) walk_keys(s, weights, work); else pass_by(work);
      const u32 this_slot = slot.stage;
      slot.advance();
      const Work& next = wait_for_work(slot);
      wait_to_begin(next);
      wait_for_turn();
      output(weights);
      scores(s);
      pass_turn();
      wgmma_wait_group<1>();                   // O is there
      if (last >= first) free_v();
      finish_rows(work);
      store(work, maps.out);
      if (leader()) mbarrier_arrive(shared_address(&control.work_free[this_slot]));
      wgmma_wait_group<0>();                   // S is there
    }
    if (leader()) cp_async_bulk_wait_group();  // results must have left before the block ends
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
  if (kPingPong && number == 0) bar_arrive(1, 256);
  c.run(maps);
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
    if (thread_index() == 32) schedule<kLead>(p, launch, control);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, maps, launch, control, tiles, warpgroup_index() - 1);      // not kept across the branch: a register less
  }
}
