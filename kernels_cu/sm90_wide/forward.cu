// Forward pass of float32 on Hopper's tensor cores, as exact as float32: out and lse, head dims up to kHeadDim and
// kHeadDimV, both up to 128.
//
// A float is the sum of three bfloat16 (core/planes.cuh). Of the nine products of planes the six largest are formed,
// small ones first: hi lo, mid mid, hi mid, lo hi, mid hi, hi hi; what is left out is below 2^-24. Tensor cores cut
// their sums where floats are rounded, so a tile's product starts from zero and tiles' products are added as floats.
//
//   before    prepost/split.cu: k and v as rows hi | mid | lo in the workspace, 1.5 times their bytes; zeros past the
//             length, whatever lies there
//   block     stays on its multiprocessor; one query tile (kBlockQ = 64 queries a consumer) of one head at a time
//   thread    two rows: wgmma accumulators as sm90/scores.cuh describes
//   shared    q, a consumer's 64 rows in three planes, split by itself | kSlots planes of keys and values
//
//   producer    K9 lo mid hi  V9 lo mid hi  K8 lo mid hi ...      plane by plane through one ring of slots
//   consumer    S9 | softmax, split | P9V9 | O += | S8 ...        other consumers' products fill the gaps
//
// The count, for 64 queries and 64 keys at head dim 128, in clocks of a multiprocessor: products 2 * 1536; softmax and
// split 224 of the half-rate pipe and 256 of exponentials, a fifth of that: two consumers keep the tensor cores busy,
// three at head dim 64. S reads 2 KB of q and 2 KB of k for a product of 32 clocks, which is all that shared memory
// gives; with fewer keys in a tile that would be the limit. Registers: O and its addend 64 each, the planes of weights
// 48, S 32: no room for the scores of one tile beside the weights of another. Six products of bfloat16 allow 117 to 132
// TFLOP/s at the measured rates of wgmma. Three of TF32 allow 130, but want v transposed, and 8 bytes an element in
// shared memory instead of 6.
//
// TFLOP/s of the whole call, full / causal, 4096 keys, 16384 tokens of 2048, and ratio to PyTorch's efficient backend
// in the same run (H200, 2026-11-29; before references were exact and lost scores were formed again).
//
//   queries x keys     head dim 128                         queries x keys     head dim 64
//   128 x 48, turns    110.6 /  96.2  2.42 / 2.41           128 x  64, turns    96.1 /  90.4  2.70 / 2.92
//   128 x 80, turns    118.8 / 105.3  2.60 / 2.64           128 x  96, turns   100.3 /  93.8  2.82 / 3.03
//   128 x 64, turns    117.8 / 106.4  2.58 / 2.67           128 x 128, turns   108.2 /  98.5  3.04 / 3.18
//   128 x 64           120.1 / 107.4  2.63 / 2.69           192 x  80, turns   108.4 /  96.3  3.05 / 3.11
//                                                           192 x  64, turns   113.1 /  94.6  3.18 / 3.06
//                                                           192 x  64          115.5 / 101.6  3.24 / 3.28
//
// Beside sm80_wide: times as fast, forward / backward of plain scores (H200, 2026-11-30, as many keys as queries).
//
//   queries                            64           128           192           256           512          1024
//   head dim 64,  1 x  8 heads  0.86 / 0.81   0.93 / 0.88   0.87 / 0.95   0.91 / 1.03   1.03 / 1.13   1.11 / 1.31
//                 4 x 16        0.77 / 0.72   0.84 / 0.81   0.96 / 1.28   1.02 / 1.43   1.26 / 1.53   1.91 / 1.73
//   head dim 128, 1 x  8        0.98 / 1.02   1.01 / 1.38   1.09 / 1.57   1.17 / 1.71   1.33 / 1.99   1.43 / 2.07
//                 4 x 16        0.87 / 0.87   0.92 / 0.93   1.16 / 1.18   1.18 / 1.27   1.63 / 1.52   1.99 / 1.75
//
// turns: only one consumer at a time forms scores. The kernel as it is, in one run: 120.6 / 111.2 (2.69 / 2.67) at head
// dim 128, 116.7 / 104.7 (3.32 / 3.46) at 64; 118.7 / 128.5 and 120.6 / 116.7 with 16384 keys. Errors of out against
// float64 were 0.2 to 0.9 times those of "ieee".
// Times of options as multiples of the plain call's, head dim 128 / 64 (2026-11-30, 16 heads, 4096 keys); a mask's and a
// bias's addends were read after the products, and are loaded before them:
//              mask         bias         both         mask, softcap   bias, softcap
//   after      1.22 / 1.26  1.28 / 1.36  1.59 / 1.66  1.42 / 1.54     1.49 / 1.63
//   before     1.16 / 1.19  1.23 / 1.24  1.25 / 1.40  1.33 / 1.42     1.32 / 1.52
#include "sm90_wide/feed.cuh"

// One warpgroup.
struct Consumer {
  const Params& p;
  const Launch& launch;
  Control& control;
  i32 number, thread;                          // of the consumer, of the thread in its warpgroup
  u32 queries, slots;                          // addresses
  u32 q, k, v;                                 // descriptors: k and v of slot 0
  float unit;
  Ring<kSlots> ring{0, 0};
  i32 row, col, n;                             // of the thread's entry 0: row, column within a key tile; the key tile
  Softmax softmax;
  Output o;

  CF_DEVICE bool leader() const { return thread == 0; }
  CF_DEVICE void barrier_of_warpgroup() const { bar_sync(8 + number, 128); }

  CF_DEVICE void wait_plane(const Ring<kSlots>& at) const {
    mbarrier_try_wait_parity(barrier(control.ready, at.stage), at.parity);
  }
  CF_DEVICE void free_plane() {                // each warp for itself
    if (thread % 32 == 0) mbarrier_arrive(barrier(control.free, ring.stage));
    ring.advance();
  }
  CF_DEVICE void pass_by_tile() {
    CF_UNROLL_1
    for (int plane = 0; plane < kPlanes; ++plane) {
      wait_plane(ring);
      warp_barrier();                          // all lanes have seen it: the phase after the next looks the same
      free_plane();
    }
  }
  // The last key tile that this warpgroup sees; less than work.first where it sees none.
  CF_DEVICE i32 last_tile(const Work& work) const { return uniform(work.keys[number].last); }

  // Starts the products with each of the three planes of a tile as they come, and frees them as they have been read.
  template <class Start> CF_DEVICE void products(Start start) {
    Ring<kSlots> next = ring;
    wait_plane(next);
    start(next.stage, Plane<kLo>{});
    next.advance();
    wait_plane(next);
    start(next.stage, Plane<kMid>{});
    next.advance();
    wait_plane(next);
    start(next.stage, Plane<kHi>{});
    wgmma_wait_group<2>();
    free_plane();
    wgmma_wait_group<1>();
    free_plane();
    wgmma_wait_group<0>();
    free_plane();
  }
  template <int kPlane> struct Plane { static constexpr int value = kPlane; };

  CF_DEVICE void scores(Scores& s) {
    products([&](u32 slot, auto plane) {
      start_scores<decltype(plane)::value>(s, q, k + (slot * kSlotBytes >> 4));
    });
  }
  CF_DEVICE void output(Output& product, const Operand& weights) {
    products([&](u32 slot, auto plane) {
      start_output<decltype(plane)::value>(product, weights, v + (slot * kSlotBytes >> 4));
    });
  }

  // Scores become weights, those that dropout removes 0. Whether the references have moved.
  CF_DEVICE bool to_weights(Scores& s, const Work& work, const TileAddends& addends, bool left_edge, bool right_edge) {
    restore_products(s, part_cut(kHeadDim / 16), p.head_dim, [&] { recover(s, p, work, row, n * kBlockKV + col); });
    shape_products(s, p, launch, work, row, n * kBlockKV + col);
    if constexpr (kMaskOrBias) addends.join(s);
    if (left_edge || right_edge) select(s, work, row, n * kBlockKV + col, left_edge);
    float top[2];
    Softmax::maxima(s, top);
    const bool moved = softmax.look(top, unit);
    softmax.weigh<false>(s, 0, kScores / 4, unit, softmax.l);
    if constexpr (kDropout) drop(s, work.dropout, row, n * kBlockKV + col);
    return moved;
  }

  // The sum over a tile's keys is made by the tensor cores, which cut what floats would round; the sum of the tiles is
  // made of floats.
  CF_DEVICE void add(const Output& product, bool moved) {
    if (moved) {
      CF_UNROLL
      for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = fused(o[i], softmax.rescale[i / 2 % 2], product[i]);
    } else {
      CF_UNROLL
      for (int i = 0; i < kHeadDimV / 2; ++i) o[i] += product[i];
    }
  }

  CF_DEVICE void step(const Work& work, bool left_edge, bool right_edge) {
    Scores s;
    TileAddends addends{p, work.addends, row, n * kBlockKV + col};
    if constexpr (kMaskOrBias) addends.load();
    scores(s);
    const bool moved = to_weights(s, work, addends, left_edge, right_edge);
    Operand weights;
    split_into(weights, s);
    Output product;
    output(product, weights);
    add(product, moved);
  }

  CF_DEVICE void walk_keys(const Work& work) {
    const i32 last = larger(last_tile(work), work.first - 1);
    const i32 steady_from = uniform(work.keys[number].steady_from), steady_to = uniform(work.keys[number].steady_to);
    barrier_of_warpgroup();                    // the queries before have been read
    split_queries(queries, p, work, work.row + 64 * number, thread);
    fence_proxy_async();
    barrier_of_warpgroup();                    // these are there
    CF_UNROLL_1
    for (n = work.last; n > last; --n) pass_by_tile(), pass_by_tile();
    CF_UNROLL
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = 0.0f;
    CF_UNROLL_1
    for (; n >= work.first; --n) step(work, n < steady_from, n >= steady_to);
  }

  CF_DEVICE void finish_rows(const Work& work) {
    const Rows<float> lse_rows = rows_of<float>(p.call.lse, p.lse, work.item, work.head);
    const Rows<float> out_rows = rows_of<float>(p.call.out, p.out, work.item, work.head);
    const bool pairs = out_rows.packed<2>() && p.head_dim_v % 2 == 0;
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      float factor, lse;
      softmax.finish(h, 1.0f, unit, work.sink, factor, lse);
      if constexpr (kDropout) factor *= dropout_scale<float>(p);
      const i32 own = row + 8 * h;
      const bool live = own < work.sight.q_length, zero = !live || factor == 0.0f;
      if (own >= p.seqlen_q) continue;
      if (p.call.lse != nullptr && thread % 4 == 0) *lse_rows.at(own, 0) = live ? lse : -Limits<float>::infinity();
      CF_UNROLL
      for (int j = 0; j < kHeadDimV / 8; ++j) {
        const i32 at = 8 * j + col;
        const float low = zero ? 0.0f : finished(o[4 * j + 2 * h], factor);
        const float high = zero ? 0.0f : finished(o[4 * j + 2 * h + 1], factor);
        if (pairs) {
          if (at < p.head_dim_v) *reinterpret_cast<Packed<float, 2>*>(out_rows.at(own, at)) = {{low, high}};
        } else {
          if (at < p.head_dim_v) *out_rows.at(own, at) = low;
          if (at + 1 < p.head_dim_v) *out_rows.at(own, at + 1) = high;
        }
      }
    }
  }

  CF_DEVICE void run() {
    Ring<kWorkSlots> at{0, 0};
    CF_UNROLL_1
    while (true) {
      const Work& work = control.work[at.stage];
      mbarrier_try_wait_parity(barrier(control.work_ready, at.stage), at.parity);
      if (work.number < 0) break;
      row = work.row + 64 * number + thread / 32 * 16 + thread % 32 / 4;
      softmax.reset(row, work.sight.q_length);
      if (work.first <= work.last) walk_keys(work);
      finish_rows(work);
      barrier_of_warpgroup();                  // the work has been read
      if (leader()) mbarrier_arrive(barrier(control.work_free, at.stage));
      at.advance();
    }
  }
};

CF_DEVICE void consume(const Params& p, const Launch& launch, Control& control, u32 tiles, i32 number) {
  const i32 thread = thread_index() % 128;
  Consumer c{p, launch, control, number, thread, tiles + number * kQBytes, tiles + kSlotsAt};
  c.q = descriptor(c.queries, 16);
  c.k = descriptor(c.slots, 16);
  c.v = descriptor(c.slots, kPanelBytes);
  c.unit = kLog2e;
  c.col = thread % 4 * 2;
  c.run();
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
    if (thread_index() == 0) produce(maps, control, tiles + kSlotsAt);
    if (thread_index() == 32) schedule(p, launch, control);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, launch, control, tiles, warpgroup_index() - 1);            // not kept across the branch: a register less
  }
}
