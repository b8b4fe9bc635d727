// Backward on Hopper's tensor cores, head dims from 129 to 256: dk and dv of one tile of keys; dq is sm90/backward_q.cu's.
//
// The mathematics of sm90/backward.cu; dk and dv of 64 keys fill the registers of a warpgroup each, so the gradients are
// split and not the keys: the first consumer computes S^T and the weights and owns dv, the second dP^T and dA and owns dk.
// Weights (and derivatives of a softcap) go from the first to the second through shared memory, rounded. Nothing comes
// back: the first goes ahead as far as there are places for weights, and weighs while the second's products run. The
// product that the next tile begins with is started behind the last one of a tile.
//
//   consumer A    .weights 9. dv9 S8  .weights 8. dv8 S7  ...                       (query tiles are walked downward)
//   consumer B         .dA 9.  dk9 dP8     .dA 8.  dk8 dP7 ...
//
// Mask and bias take the second place of weights: there the first consumer goes ahead until its weights are ready.
//
// Shared memory: K | V | Q x 2 | dO x 2 | weights and derivatives x 2, or once and addends; barriers and row numbers
// beside them.
//
// TFLOP/s at head dim 256, five products counted, full / causal, all launches together (H200, 2026-11-30, bfloat16):
//
//                                                        1024 keys       4096            16384
//   one kernel, dq in turn, dq's shares by the herald    319 / 242       374 / 322       362 / 341
//   one kernel, dq in any order, each consumer its half  329 / 263       426 / 392       430 / 432
//   this and backward_q, a block a query tile            380 / 303       459 / 434       477 / 502
//   (cuDNN 9.19 beside them, in any order                295 / 256       401 / 371       363 / 404)
//   K and V free at the last tile, results without
//     waiting, blocks of backward_q stay                 390 / 307       451 / 445       472 / 476
//   (cuDNN beside it, in another run                     296 / 256       381 / 357       351 / 378)
//
// In one kernel the order was compiled in. It had room for one tile of Q and dO beside the 64 KB of a share, so that each
// tile waited for its loads, and asked 64 KB of sums a tile of the L2 cache. Of what is executed, four products here ran
// at 620 and 656 TFLOP/s at 4096 and 16384 keys, three in backward_q at 662 and 684, row_stats counted with both. Turns
// of the consumers gave nothing here, and -1 to 3 % in backward_q.
#include "sm90/backward_consumer.cuh"

constexpr u32 kHandedAt = kGradientAt, kHandedBytes = 2 * kGradientBytes;      // weights, derivatives behind them
static_assert(1024 + kHandedAt + 2 * kHandedBytes == kSharedBytes, "the launch gives what the kernel uses");
static_assert(4 * kAddendBytes == kHandedBytes, "addends of four warps take the second place");
static_assert(kBlockQ == 64 && kBlockKV == 64 && kStages == 2 && kThreads == 384, "two tiles of queries");

enum : i32 { kThere = 2, kTaken = 4 };                     // named barriers, of weights: one for each of two tiles
using Output = float[kHeadDim / 2];

template <bool kOwnsValues> struct Consumer : ConsumerBase {
  u64 rows, columns, columns_by_rows;      // descriptors; columns: of the queries or of dO
  u32 own_words;                           // where the thread stores weights
  Output sum;                              // dv or dk
  Scores s;                                // or dP, of the tile that comes next

  CF_DEVICE AddendTile addends() const { return {tiles + kHandedAt + kHandedBytes + thread / 32 * kAddendBytes}; }
  CF_DEVICE i32 place_of_weights() const { return kMaskOrBias ? 0 : i32(ring.number % 2); }
  CF_DEVICE u32 weights_at() const { return tiles + kHandedAt + place_of_weights() * kHandedBytes; }
  CF_DEVICE u32 derivatives_at() const { return weights_at() + kGradientBytes; }
  CF_DEVICE u64 of_stage(u64 queries) const { return queries + ring.stage() * (kQueryBytes >> 4); }

  CF_DEVICE void give_words(u32 to, const Operand& words) const {
    CF_UNROLL
    for (int n = 0; n < kScores / 8; ++n) {
      st_shared_128(to + own_words + n * 2048, {words[4 * n], words[4 * n + 1], words[4 * n + 2], words[4 * n + 3]});
    }
  }
  CF_DEVICE void take_words(Operand& words, u32 from) const {
    CF_UNROLL
    for (int n = 0; n < kScores / 8; ++n) {
      u32 found[4];
      ld_shared_128(found, from + own_words + n * 2048);
      CF_UNROLL
      for (int x = 0; x < 4; ++x) words[4 * n + x] = found[x];
    }
  }

  // The first consumer's part: weights from scores.
  CF_DEVICE void weights_of(Operand& weights, const Place& at, bool edge) {
    Operand derivative;
    const u32 lse_log2 = control.lse_of(ring.stage());
    const Weighing weighing = weighing_of(lse_log2, shared_address(control.zeros), launch.unit, thread);
    RowNumbers lse;
    lse.load(weighing.lse_log2, thread);
    if constexpr (!kPlainScores) shape(s, derivative, launch.scale, at, addends());
    if (edge) select(s, at);
    weigh(s, weighing, lse, lse_log2, launch.unit, thread);
    if constexpr (kDropout) sign_dropped(s, at, thread % 32);
    round_to(weights, s);
    bar_sync(kTaken + place_of_weights(), 256);
    give_words(weights_at(), weights);
    if constexpr (kSoftcapOrAlibi) give_words(derivatives_at(), derivative);
    bar_arrive(kThere + place_of_weights(), 256);
    if (!at_last()) fetch(addends(), next_place(), 0);
    if constexpr (kDropout) remove_signed(weights);
  }

  // The second one's: dA from them and dP.
  CF_DEVICE void take_weights(Operand& ds, const Place& at, bool edge) {
    Operand weights, derivative;
    bar_sync(kThere + place_of_weights(), 256);
    RowNumbers less_delta;
    less_delta.load(control.less_delta_of(ring.stage()), thread);
    take_words(weights, weights_at());
    if constexpr (kSoftcapOrAlibi) take_words(derivative, derivatives_at());
    bar_arrive(kTaken + place_of_weights(), 256);
    const auto weight = [&](int n) { return kDropout ? absolute(entry_of(weights, n)) : entry_of(weights, n); };
    const auto dropped = [&](int n) { return entry_of(weights, n) < 0.0f; };
    gradients_of(ds, s, weight, dropped, derivative, at, edge, less_delta, control.less_delta_of(ring.stage()),
                 shared_address(control.zeros), thread);
    if (kRemovedLate && edge) remove_unseen(ds, weights);
    store_bias_entries(s, at);
    if (writes_bias(false)) {              // through where derivatives would be
      store_gradients(ds, derivatives_at(), 0);
      warp_barrier();
      store_bias_tile(0, at.head, place().tile * kBlockQ, derivatives_at());
    }
  }

  CF_DEVICE void query_tile() {
    Operand operand;                       // weights, or dA
    const i32 head = place().head, row = place().tile * kBlockQ, key = work().tile * kBlockKV + thread / 32 * 16 + thread % 32 / 4;
    const Place at{p, work(), head, row + thread % 4 * 2, key};
    const bool edge = !work().plain[0].contains(place().tile);
    if (leader() && at_last()) free_keys();
    if constexpr (kOwnsValues) weights_of(operand, at, edge); else take_weights(operand, at, edge);
    if (at_last()) products<true>(operand); else products<false>(operand);
  }
  template <bool kLast> CF_DEVICE void products(const Operand& operand) {
    const u32 q_ready = barrier(control.q_ready, ring.stage()), o_ready = barrier(control.o_ready, ring.stage());
    const u32 q_free = barrier(control.q_free, ring.stage()), o_free = barrier(control.o_free, ring.stage());
    mbarrier_try_wait_parity(kOwnsValues ? o_ready : q_ready, ring.parity());
    start_gradient(sum, operand, of_stage(columns_by_rows));
    ring.advance();
    if constexpr (!kLast) start_next();
    wgmma_wait_group<kLast ? 0 : 1>();     // dv or dk is there; lse and delta have been read
    if (leader()) mbarrier_arrive(q_free), mbarrier_arrive(o_free);
    wgmma_wait_group<0>();
  }
  // K is read by the first consumer alone, V by the second: each arrives for both.
  CF_DEVICE void free_keys() const {
    const u32 free = shared_address(kOwnsValues ? &control.k_free : &control.v_free);
    mbarrier_arrive(free), mbarrier_arrive(free);
  }

  CF_DEVICE void clear() {
    CF_UNROLL
    for (int n = 0; n < kHeadDim / 2; ++n) sum[n] = 0.0f;
  }
  CF_DEVICE void begin() {
    if (kOwnsValues) fetch(addends(), first_place(), 0);
    start_next();
    wgmma_wait_group<0>();
  }
  CF_DEVICE void start_next() {
    const u32 ready = kOwnsValues ? barrier(control.q_ready, ring.stage()) : barrier(control.o_ready, ring.stage());
    mbarrier_try_wait_parity(ready, ring.parity());
    clear_queries(ring);
    start_scores(s, rows, of_stage(columns));
  }
  CF_DEVICE void query_tiles() {
    if (!kOwnsValues) clear_unseen_bias(0);
    if (work().any()) begin();
    CF_UNROLL_1
    while (ring.number != work().end) query_tile();
  }
  CF_DEVICE void store() {
    const i32 own = i32(opaque(thread)), warp_row = own / 32 * 16, lane = own % 32;
    const u32 handed = tiles + kHandedAt + number * kHandedBytes;
    const u32 staging = handed + kGradientBytes + warp_row * 128;      // where derivatives would be
    const float dv_scale = kDropout ? dropout_scale<float>(p) : 1.0f;
    const Target to_v{p.call.dv, &p.dv, p.dv_kind, p.head_dim_v}, to_k{p.call.dk, &p.dk, p.dk_kind, p.head_dim};
    share_staging();                       // the second consumer has taken them
    store_rows(sum, kOwnsValues ? dv_scale : launch.scale, kOwnsValues ? to_v : to_k, p, work(), warp_row, staging, lane);
    share_staging();                       // it may hold them again
  }
  // Where there are none, nobody waits; ptxas wants something there, or spills.
  CF_DEVICE void share_staging() const {
    if constexpr (kPlainScores) forget(); else meet();
  }
};

template <bool kOwnsValues>
CF_DEVICE void consume(const Params& p, const Launch& launch, Control& control, u32 tiles) {
  const i32 number = kOwnsValues ? 0 : 1, thread = thread_index() % 128;
  Consumer<kOwnsValues> c{{p, launch, control, number, thread, tiles}};
  c.rows = descriptor(tiles + (kOwnsValues ? kKAt : kVAt), 16);
  c.columns = descriptor(tiles + (kOwnsValues ? kQAt : kOAt), 16);
  c.columns_by_rows = descriptor(tiles + (kOwnsValues ? kOAt : kQAt), kBlockQ * 128);
  c.own_words = thread * 16;
  if (!kOwnsValues) bar_arrive(kTaken, 256);      // the places are free
  if (!kOwnsValues && !kMaskOrBias) bar_arrive(kTaken + 1, 256);
  c.walk(c);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    cupyflash_backward_kv(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps,
                          const __grid_constant__ Launch launch) {
  Control& control = static_shared_storage<Control>();
  initialise(control, false);
  if (warpgroup_index() == 0) return serve(p, maps, launch, control);
  setmaxnreg_inc<kConsumerRegisters>();
  if (warpgroup_index() == 1) consume<true>(p, launch, control, shared_tiles());
  else consume<false>(p, launch, control, shared_tiles());
}
