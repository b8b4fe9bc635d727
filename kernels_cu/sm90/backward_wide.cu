// Backward on Hopper's tensor cores, head dims up to 256: dk and dv of one tile of keys, and its share of dq.
//
// The mathematics of sm90/backward.cu; dk and dv of 64 keys fill the registers of a warpgroup each, so the gradients are
// split and not the keys: the first consumer computes S^T and the weights and owns dv, the second dP^T and dA and owns dk.
// Weights (and derivatives of a softcap) go from the first to the second through shared memory, rounded, dA goes to both;
// each computes half of dq's columns. Shares of dq are 64 KB a tile at 64 keys, most of what the L2 cache can add.
//
//   consumer A    S9 .weights.      dv9  dq9 | S8 .weights.      dv8  dq8 | ...
//   consumer B    dP9          .dA. dk9  dq9 | dP8          .dA. dk8  dq8 | ...
//   usher         turn of 9?           turn of 8?               herald: 9 is added, next block's turn
//
// Shared memory: K | V | Q | dO | dA x 2 | weights | derivatives | the share of dq; barriers and row numbers beside them.
//
// TFLOP/s at head dim 256, full / causal, all launches together (H200, 2026-11-29, bfloat16), in turn:
//
//                                                        1024 keys       4096            16384
//   consumers add, the herald hears a tile later         282 / 168       355 / 258       409 / 394
//   the herald adds                                      323 / 203       395 / 318       419 / 404
//   16 to 64 heads side by side under a causal mask          / 231           / 342
//   without dq                                                                           541 /
//   (cuDNN 9.19 beside the second row                    305 / 258       408 / 374       368 / 415)
//
// Runs differ, for a reason not found: in another the second row had 356 at 16384 without a mask (cuDNN 376).
//
// In any order, 2026-11-30 (cuDNN 297 / 258, 408 / 375 and 369 / 413): the herald's 64 KB keep the place for most of a tile,
// so each consumer adds its half, and the next tile's first product starts between the two parts that it writes it in.
//
//   the herald adds                                      319 / 257       391 / 370       411 / 412
//   the consumers add                                    279 / 229       321 / 303       326 / 327
//     and start the next product before                  334 / 262       432 / 386       452 / 446
//     with two heads side by side under a causal mask        / 267           / 398           / 456
//
// In turn, next to one another (through the public call; cuDNN 304 / 249, 394 / 367 and 364 / 390):
//
//   the next product after the share                     203 / 142       296 / 278       336 / 324
//   between its two parts                                263 / 187       345 / 288       359 / 330
#include "sm90/backward_consumer.cuh"

constexpr u32 kWeightsAt = kGradientAt + 2 * kGradientBytes, kDerivativesAt = kWeightsAt + kGradientBytes;
static_assert(kDerivativesAt + kGradientBytes == kShareAt && kShares == 1, "the launch gives what the kernel uses");
static_assert(kBlockQ == 64 && kBlockKV == 64 && kStages == 1 && kThreads == 384, "one tile of each at a time");
static_assert(kHeadDim % 128 == 0, "half of the columns are whole panels");

enum : i32 { kWeightsThere = 2, kGradientsThere = 3 };      // named barriers
using Output = float[kHeadDim / 2];
using Queries = float[kHeadDim / 4];

template <bool kOwnsValues> struct Consumer : ConsumerBase {
  u64 rows, columns, columns_by_rows, gradients, keys_by_rows;      // descriptors; columns: of the queries or of dO
  u32 own_words;                           // where the thread stores weights
  Output sum;                              // dv or dk
  Scores s;                                // or dP, of the tile that comes next

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
    const Weighing weighing = weighing_of(control.lse_of(0), shared_address(control.zeros), launch.unit, thread);
    RowNumbers lse;
    lse.load(weighing.lse_log2, thread);
    if constexpr (!kPlainScores) shape(s, derivative, launch.scale, at);
    if (edge) select(s, at);
    weigh(s, weighing, lse, control.lse_of(0), launch.unit, thread);
    if constexpr (kDropout) sign_dropped(s, at, thread % 32);
    round_to(weights, s);
    give_words(tiles + kWeightsAt, weights);
    if constexpr (kSoftcapOrAlibi) give_words(tiles + kDerivativesAt, derivative);
    bar_arrive(kWeightsThere, 256);
    if constexpr (kDropout) remove_dropped(weights);
  }

  // The second one's: dA from them and dP, for itself and for both.
  CF_DEVICE void take_weights(Operand& ds, const Place& at, bool edge) {
    Operand weights, derivative;
    bar_sync(kWeightsThere, 256);
    RowNumbers delta;
    delta.load(control.delta_of(0), thread);
    take_words(weights, tiles + kWeightsAt);
    if constexpr (kSoftcapOrAlibi) take_words(derivative, tiles + kDerivativesAt);
    const auto weight = [&](int n) { return entry_of(weights, n); };
    gradients_of(ds, s, weight, derivative, at, edge, delta, control.delta_of(0), thread);
    store_gradients(ds, tiles + kGradientAt + ring.number % 2 * kGradientBytes, 0);
  }

  CF_DEVICE void query_tile() {
    Operand operand;                       // weights, or dA
    Queries dq;
    const u32 q_ready = barrier(control.q_ready, 0), o_ready = barrier(control.o_ready, 0);
    const i32 head = place().head, row = place().tile * kBlockQ, key = work().tile * kBlockKV + thread / 32 * 16 + thread % 32 / 4;
    const Place at{p, work(), head, row + thread % 4 * 2, key};
    const bool edge = !work().whole[0].covers(row, smaller(row + kBlockQ, work().sight.q_length));
    if constexpr (kOwnsValues) weights_of(operand, at, edge); else take_weights(operand, at, edge);
    mbarrier_try_wait_parity(kOwnsValues ? o_ready : q_ready, ring.parity());
    start_gradient(sum, operand, columns_by_rows);
    bar_sync(kGradientsThere, 256);        // dA is there; weights, lse and delta have been read
    start_queries(dq, gradients + ring.number % 2 * (kGradientBytes >> 4), keys_by_rows);
    if (leader()) mbarrier_arrive(kOwnsValues ? barrier(control.q_free, 0) : barrier(control.o_free, 0));
    if (leader() && at_last()) mbarrier_arrive(shared_address(&control.v_free));
    wgmma_wait_group<1>();                 // dv or dk is there
    if (leader()) mbarrier_arrive(kOwnsValues ? barrier(control.o_free, 0) : barrier(control.q_free, 0));
    wgmma_wait_group<0>();
    const u32 share = ring.number;
    ring.advance();
    if (launch.queries == kInTurn) await_place(share);
    if (launch.queries == kInAnyOrder) await_half();
    if (launch.queries != kNotWanted) write_share<0>(dq, share);
    start_next(ring.number != work().end);      // else of whatever lies there, for nobody
    if (launch.queries != kNotWanted) write_share<1>(dq, share);
    if (launch.queries == kInTurn) give_share(share);
    if (launch.queries == kInAnyOrder) add_half(share);
    wgmma_wait_group<0>();
  }

  CF_DEVICE void clear() {
    CF_UNROLL
    for (int n = 0; n < kHeadDim / 2; ++n) sum[n] = 0.0f;
  }
  CF_DEVICE void begin() {
    start_next(true);
    wgmma_wait_group<0>();
  }
  CF_DEVICE void start_next(bool any) {
    if (any) mbarrier_try_wait_parity(kOwnsValues ? barrier(control.q_ready, 0) : barrier(control.o_ready, 0), ring.parity());
    if (any) clear_queries(ring);
    start_scores(s, rows, columns);
  }
  CF_DEVICE void end() const {}
  CF_DEVICE void store() {
    const i32 own = i32(opaque(thread)), warp_row = own / 32 * 16, lane = own % 32;
    const u32 staging = tiles + kGradientAt + (kOwnsValues ? 0 : kGradientBytes) + warp_row * 128;      // over dA
    const float dv_scale = kDropout ? dropout_scale<float>(p) : 1.0f;
    const Target to_v{p.call.dv, &p.dv, p.dv_kind, p.head_dim_v}, to_k{p.call.dk, &p.dk, p.dk_kind, p.head_dim};
    meet();                                // both consumers have read dA
    store_rows(sum, kOwnsValues ? dv_scale : launch.scale, kOwnsValues ? to_v : to_k, p, work(), warp_row, staging, lane);
    meet();                                // the staging may become dA again
  }
};

template <bool kOwnsValues>
CF_DEVICE void consume(const Params& p, const Launch& launch, Control& control, u32 tiles) {
  const i32 number = kOwnsValues ? 0 : 1, thread = thread_index() % 128;
  Consumer<kOwnsValues> c{{p, launch, control, number, thread, tiles}};
  c.rows = descriptor(tiles + (kOwnsValues ? kKAt : kVAt), 16);
  c.columns = descriptor(tiles + (kOwnsValues ? kQAt : kOAt), 16);
  c.columns_by_rows = descriptor(tiles + (kOwnsValues ? kOAt : kQAt), kBlockQ * 128);
  c.gradients = descriptor(tiles + kGradientAt, kBlockKV * 128);
  c.keys_by_rows = descriptor(tiles + kKAt + number * (kPanels / 2) * kBlockKV * 128, kBlockKV * 128);
  c.own_words = thread * 16;
  c.walk(c);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    cupyflash_backward_wide(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps,
                            const __grid_constant__ Launch launch) {
  Control& control = static_shared_storage<Control>();
  initialise(control, launch);
  if (warpgroup_index() == 0) return serve(p, maps, launch, control);
  setmaxnreg_inc<kConsumerRegisters>();
  if (warpgroup_index() == 1) consume<true>(p, launch, control, shared_tiles());
  else consume<false>(p, launch, control, shared_tiles());
}
