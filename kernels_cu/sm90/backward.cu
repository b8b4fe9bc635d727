// Backward on Hopper's tensor cores, head dims up to 128: dk and dv of one tile of keys, and its share of dq.
//
//   P = exp(S - lse)     dv += (r * P)^T dO     dS = P * (r * dP - delta')     dA = dS * d(c)/d(a)     dk += scale * dA^T q
//
// FlashAttention-3's turned form (Shah et al. 2024): two warpgroups own 64 keys each and compute S^T = K Q^T and dP^T =
// V dO^T, so that P^T and dA^T leave the accumulators as register operands. Only dA crosses through shared memory, for
// dq = dA K; that product is taken one query tile late, from a second buffer, so that no warpgroup waits for the other.
// dq's columns are split between the warpgroups, or its rows where a query tile has 128. Shares of dq are added to sums in
// float32 straight from registers, in the order of the key tiles: the first block stores, the others add when the usher
// (sm90/backward_feed.cuh) says that it is their turn. Blocks stay on their multiprocessor and take work by ticket.
//
//   producer      K Q9 V dO9   Q8 dO8   Q7 dO7 ...                                  (query tiles are walked downward)
//   consumers     S9 dP9 .weights. dv9       .dS. dk9 | S8 dP8 .weights. dv8 dq9 .dS. dk8  add dq9 | ...
//   usher         turn of 9?                 turn of 8? ...                        herald: 9 is added, next block's turn
//
// Shared memory: K | V | Q x kStages | dO x kStages | dA x 2; barriers and row numbers beside them.
//
// TFLOP/s at head dim 128 and 16384 keys, full / causal, all launches of a backward together (H200, 2026-11-29, bfloat16;
// cuDNN 9.19: 562 / 547 beside the first two rows, 564 / 543 beside the others, which lack what came after them: products
// under which turns and row numbers are awaited).
//
//   a block for every key tile, dq in no order                                        600 / 591
//   the same in turn, one thread both waiting and telling                             479 / 454
//   blocks that stay, usher and herald apart, in turn                                 459 / 456
//   the same with 64 heads side by side                                               439 / 504
//   the same in no order                                                              539 / 538
//   the same without dq                                                               603 / 608
//
// In turn each block of a head runs as fast as the slowest before it: the fewer of a head run at once, the less it costs.
#include "sm90/backward_consumer.cuh"

constexpr bool kSplitRows = kBlockQ == 128;        // of dq between the warpgroups, else its columns
constexpr u32 kGradientBytes = kBlockKV * kBlockQ * 2;
constexpr u32 kGradientAt = kFedBytes, kUsedBytes = 1024 + kGradientAt + 2 * kGradientBytes;
static_assert(kUsedBytes == kSharedBytes, "the launch gives what the kernel uses");
static_assert(kBlockKV == 128 && kThreads == 384, "64 keys a consumer");
static_assert(kSplitRows ? kHeadDim == 64 : kBlockQ == 64, "a consumer computes 64 rows of dq, all columns or half of them");

using Output = float[kHeadDim / 2];
using Queries = float[kSplitRows ? kHeadDim / 2 : kHeadDim / 4];
constexpr i32 kQueryBlocks = sizeof(Queries) / 16;      // of eight columns

struct Consumer : ConsumerBase {
  u64 keys, values, q, o, q_by_rows, o_by_rows, gradients, keys_by_rows;      // descriptors
  u32 gradient_row;                        // where the thread stores its rows of dA
  Output dk, dv;

  // Number of the next dA: there is one for every tile so far, and one of zeros for every piece of work.
  CF_DEVICE u32 step() const { return ring.number + work().before + 1; }

  CF_DEVICE void start_scores(Scores& s, u64 a, u64 b) const {
    wgmma_fence();
    CF_UNROLL
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const u32 panel = k / 4, column = k % 4 * 32;
      const u64 of_a = a + ((panel * kBlockKV * 128 + column) >> 4);
      const u64 of_b = b + u64((ring.stage() * kQueryBytes + panel * kBlockQ * 128 + column) >> 4);
      if (k == 0) wgmma_scores_first(s, of_a, of_b); else wgmma_scores(s, of_a, of_b, 1);
    }
    wgmma_commit_group();
  }
  CF_DEVICE void start_gradient(Output& sum, const Operand& a, u64 b) const {
    wgmma_fence();
    CF_UNROLL
    for (int k = 0; k < kBlockQ / 16; ++k) {
      wgmma_gradient(sum, a + 4 * k, b + u64((ring.stage() * kQueryBytes + k * 2048) >> 4), 1);
    }
    wgmma_commit_group();
  }
  // dq of the tile whose dA is that of step `of`.
  CF_DEVICE void start_queries(Queries& dq, u32 of) const {
    mbarrier_try_wait_parity(barrier(control.ds_ready, of), of / 2 % 2);
    wgmma_fence();
    CF_UNROLL
    for (int k = 0; k < kBlockKV / 16; ++k) {
      const u64 a = gradients + u64((of % 2 * kGradientBytes + k * 2048) >> 4), b = keys_by_rows + u64(k * 2048 >> 4);
      if (k == 0) wgmma_queries_first(dq, a, b); else wgmma_queries(dq, a, b, 1);
    }
    wgmma_commit_group();
  }

  // dA of this step to shared memory, for both consumers.
  CF_DEVICE void give_gradients(const Operand& ds, u32 step) const {
    const u32 to = gradient_row + step % 2 * kGradientBytes;
    mbarrier_try_wait_parity(barrier(control.ds_free, step), step / 2 % 2 ^ 1);
    CF_UNROLL
    for (int n = 0; n < kBlockQ / 16; ++n) {
      stmatrix_x4((to ^ (n % 4 * 32)) + n / 4 * (kBlockKV * 128), ds[4 * n], ds[4 * n + 1], ds[4 * n + 2], ds[4 * n + 3]);
    }
    fence_proxy_async();
    warp_barrier();
    if (thread % 32 == 0) mbarrier_arrive(barrier(control.ds_ready, step));
  }

  // Waits for the turn of the tile before: its sums, and whether they begin with this block.
  struct Destination { float* to; bool first; };
  CF_DEVICE Destination await_turn() const {
    const u32 before = ring.number - 1;
    const volatile Turn& turn = control.turn[before % 2];
    mbarrier_try_wait_parity(barrier(control.turn_ready, before), before / 2 % 2);
    return {in_global(turn.sums) + number * kQueryBlocks * 512 + thread * 4, turn.number == 0};
  }
  // The share of the tile before.
  CF_DEVICE void add_queries(const Queries& dq, const Destination& place) const {
    if (place.first) {
      CF_UNROLL
      for (int j = 0; j < kQueryBlocks; ++j) {
        *reinterpret_cast<Packed<float, 4>*>(place.to + j * 512) = {{dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]}};
      }
    } else {
      CF_UNROLL
      for (int j = 0; j < kQueryBlocks; ++j) {
        red_add_f32x4(place.to + j * 512, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
      }
    }
    warp_barrier();
    if (thread % 32 == 0) mbarrier_arrive(barrier(control.share_there, ring.number - 1));
  }

  CF_DEVICE void clear() {
    CF_UNROLL
    for (int n = 0; n < kHeadDim / 2; ++n) dk[n] = dv[n] = 0.0f;
  }
  // Before the first tile: the pipeline begins with a dA of zeros.
  CF_DEVICE void begin() {
    const Operand nothing{};
    give_gradients(nothing, step() - 1);
  }

  // The right to start products, which the consumers hand to and fro, so that weights are taken under products.
  CF_DEVICE void wait_for_right() const { if (kPingPong) bar_sync(2 + number, 256); }
  CF_DEVICE void pass_right() const { if (kPingPong) bar_arrive(3 - number, 256); }

  CF_DEVICE void query_tile(i32 head, i32 tile, bool first) {
    Scores s, dp;
    Operand weights, ds, derivative;
    Queries dq;
    const i32 row = tile * kBlockQ, col = work().tile * kBlockKV + number * 64;
    const i32 own = i32(opaque(thread));   // what follows from it is computed here: registers are few
    const Place at{p, work(), head, row + own % 4 * 2, col + own / 32 * 16 + own % 32 / 4};
    const u32 q_ready = barrier(control.q_ready, ring.stage()), o_ready = barrier(control.o_ready, ring.stage());
    clear_queries(row, q_ready, o_ready);
    mbarrier_try_wait_parity(q_ready, ring.parity());
    start_scores(s, keys, q);
    mbarrier_try_wait_parity(o_ready, ring.parity());
    if constexpr (kPlainScores) start_scores(dp, values, o);
    if (kPlainScores && !first) pass_right();
    const bool edge = !work().whole[number].covers(row, smaller(row + kBlockQ, work().sight.q_length));
    const u32 lse_log2 = control.lse_of(ring.stage());
    const Weighing weighing = weighing_of(lse_log2, shared_address(control.zeros), launch.unit, thread);
    RowNumbers lse;
    if constexpr (kLoadEarly) lse.load(weighing.lse_log2, thread);
    if constexpr (kPlainScores) {
      wgmma_wait_group<1>();               // S is there
    } else {
      wgmma_wait_group<0>();               // scores need the registers of dP
      shape(s, derivative, launch.scale, at);
    }
    if (edge) select(s, at);
    weigh(s, weighing, lse, lse_log2, launch.unit, thread);
    if constexpr (kDropout) sign_dropped(s, at, thread % 32);
    if constexpr (kRoundedWeights) round_to(weights, s);
    if constexpr (!kPlainScores) {
      start_scores(dp, values, o);
      if (!first) pass_right();
    }
    RowNumbers delta;
    const u32 delta_at = control.delta_of(ring.stage());
    if constexpr (kLoadEarly) delta.load(delta_at, thread);
    wgmma_wait_group<0>();                 // dP is there
    if constexpr (!kRoundedWeights) round_to(weights, s);
    const auto weight = [&](int n) { return kRoundedWeights ? entry_of(weights, n) : s[n]; };
    gradients_of(ds, dp, weight, derivative, at, edge, delta, delta_at, slope_sum, thread);
    if constexpr (kDropout) remove_dropped(weights);
    wait_for_right();
    start_gradient(dv, weights, o_by_rows);
    start_queries(dq, step() - 1);
    give_gradients(ds, step());
    start_gradient(dk, ds, q_by_rows);
    const bool adds = launch.queries != kNotWanted && !first;
    Destination sums{};
    if (adds) sums = await_turn();
    wgmma_wait_group<1>();                 // dv and dq are there; dk runs on
    if (leader()) mbarrier_arrive(barrier(control.ds_free, step() - 1));
    if (adds) add_queries(dq, sums);
    wgmma_wait_group<0>();
    if (leader()) {
      mbarrier_arrive(barrier(control.o_free, ring.stage()));
      mbarrier_arrive(barrier(control.q_free, ring.stage()));
    }
    ring.advance();
  }

  CF_DEVICE void end() {
    Queries dq;
    pass_right();                          // the other consumer's last dA may wait for it
    start_queries(dq, step() - 1);
    wgmma_wait_group<0>();
    if (leader()) mbarrier_arrive(barrier(control.ds_free, step() - 1));
    if (launch.queries != kNotWanted) add_queries(dq, await_turn());
  }

  CF_DEVICE void store() {
    const i32 own = i32(opaque(thread)), warp_row = 64 * number + own / 32 * 16, lane = own % 32;
    const u32 staging = tiles + kGradientAt + warp_row * 128;      // over the warp's own rows of dA
    const Target to_v{p.call.dv, &p.dv, p.dv_kind, p.head_dim_v}, to_k{p.call.dk, &p.dk, p.dk_kind, p.head_dim};
    const float dv_scale = kDropout ? dropout_scale<float>(p) : 1.0f;
    meet();                                // both consumers have read dA
    store_rows(dv, dv_scale, to_v, p, work(), warp_row, staging, lane);
    store_rows(dk, launch.scale, to_k, p, work(), warp_row, staging, lane);
  }
};

CF_DEVICE void consume(const Params& p, const Launch& launch, Control& control, u32 tiles, i32 number) {
  const i32 thread = thread_index() % 128, lane = thread % 32, row = 64 * number;
  Consumer c{{p, launch, control, number, thread, tiles}};
  c.keys = descriptor(tiles + kKAt + row * 128, 16);
  c.values = descriptor(tiles + kVAt + row * 128, 16);
  c.q = descriptor(tiles + kQAt, 16);
  c.o = descriptor(tiles + kOAt, 16);
  c.q_by_rows = descriptor(tiles + kQAt, kBlockQ * 128);
  c.o_by_rows = descriptor(tiles + kOAt, kBlockQ * 128);
  c.gradients = descriptor(tiles + kGradientAt + (kSplitRows ? number * kBlockKV * 128 : 0), kBlockKV * 128);
  const i32 half = kHeadDim / 2, panel = half / 64 * kBlockKV * 128, column = half % 64 * 2;
  c.keys_by_rows = descriptor(tiles + kKAt + (kSplitRows ? 0 : number * (panel + column)), kBlockKV * 128);
  c.gradient_row = tiles + kGradientAt + (row + thread / 32 * 16 + lane % 16) * 128 + ((lane / 16) ^ (lane % 8)) * 16;
  if (kPingPong && number == 1) bar_arrive(2, 256);      // the first consumer begins
  c.walk(c);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    cupyflash_backward(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps,
                       const __grid_constant__ Launch launch) {
  Control& control = static_shared_storage<Control>();
  const u32 tiles = shared_tiles();
  if (thread_index() == 0) initialise(control, launch.queries != kNotWanted, 4 * kConsumers);
  if (thread_index() < kBlockQ) control.zeros[thread_index()] = 0.0f;
  block_barrier();                         // the barriers are there
  if (warpgroup_index() == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (thread_index() == 0) Producer{p, maps, launch, control}.produce();
    if (thread_index() == 32) schedule(p, launch, control);
    if (thread_index() == 64 && launch.queries != kNotWanted) usher(p, launch, control);
    if (thread_index() == 96 && launch.queries != kNotWanted) herald(launch, control);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, launch, control, tiles, warpgroup_index() - 1);
  }
}
