// Backward on Hopper's tensor cores, head dims from 129 to 256, second half: dq of kBlockQ queries of one head.
//
//   P = exp(S - lse)     dS = P * (r * dO v^T - delta')     dA = dS * d(c)/d(a)     dq = scale * sum of dA k over keys
//
// Scores and dP are formed once more, so that no block adds to what another one has summed: with dk and dv from
// sm90/backward_kv.cu seven products instead of five, but neither sums in float32 nor turns, and always the same bits.
// Each consumer owns 64 queries: their scores, dP and dq fill its registers, and dA goes on from there as an operand. The
// products that the next key tile begins with are started behind the last one of a tile. With kPingPong the consumers
// start products in turns, so that one weighs while the other's products run.
//
//   producer      K9 Q dO V9  K8 V8  K7 V7 ...                                         (key tiles are walked downward)
//   consumer A    S9 dP9 .dA.   dq9 S8 dP8 .dA.   dq8 S7 dP7 ...
//   consumer B           S9 dP9 .dA.   dq9 S8 dP8 .dA.   ...
//
// Shared memory: Q | dO | K x kStages | V | mask | bias; barriers and work beside them. What all of this gives:
// sm90/backward_kv.cu.
#include "sm90/backward_q_scores.cuh"

static_assert(1024 + kAddendsAt + kAddendBytes == kSharedBytes, "the launch gives what the kernel uses");
constexpr float kLog2e = 1.4426950408889634f;
constexpr bool kLate = !kPlainScores || kDropout;      // dP is formed behind the weights: registers
enum : i32 { kTurn = 2, kWarpgroup = 4 };              // named barriers of the first consumer; that of the second follows

struct Consumer {
  const Params& p;
  const Launch& launch;
  Control& control;
  i32 number, thread;                            // of the consumer, of the thread in its warpgroup
  u32 tiles;
  u32 q, dout, k, v, k_by_rows;                  // descriptors
  Ring<2> slot;
  Ring<1> q_ring, v_ring;
  Ring<kStages> k_ring;                          // of the scores
  RowNumbers rows;
  Scores s, dp;                                  // of the key tile that comes next; dp not where kLate
  float dq[kHeadDim / 2];

  CF_DEVICE const Work& work() const { return control.work[slot.stage()]; }
  CF_DEVICE i32 row() const { return work().row() + 64 * number + thread / 32 * 16 + thread % 32 / 4; }
  CF_DEVICE bool leader() const { return thread == 0; }
  CF_DEVICE void barrier_of_warpgroup() const { bar_sync(kWarpgroup + number, 128); }
  CF_DEVICE void wait_for_turn() const { if (kPingPong) bar_sync(kTurn + number, 256); }
  CF_DEVICE void pass_turn() const { if (kPingPong) bar_arrive(kTurn + 1 - number, 256); }
  CF_DEVICE void free(const u64& bar) const { if (leader()) mbarrier_arrive(shared_address(&bar)); }

  // 64 queries by the keys of a tile, summed over the head dim.
  static CF_DEVICE void start_inner(Scores& to, u32 queries, u32 keys) {
    wgmma_fence();
    CF_UNROLL
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const u32 panel = step / 4, column = step % 4 * 32;
      const u64 a = whole(queries + ((panel * kBlockQ * 128 + column) >> 4)), b = whole(keys + ((panel * kBlockKV * 128 + column) >> 4));
      if (step == 0) wgmma_scores_first(to, a, b); else wgmma_scores(to, a, b, 1);
    }
    wgmma_commit_group();
  }
  CF_DEVICE void start_dp() {
    mbarrier_try_wait_parity(shared_address(&control.v_ready), v_ring.parity());
    start_inner(dp, opaque(dout), v);            // opaque: else kept, one for each step
  }
  CF_DEVICE void start_scores() {
    mbarrier_try_wait_parity(barrier(control.k_ready, k_ring.stage()), k_ring.parity());
    start_inner(s, opaque(q), k + (k_ring.stage() * kKeyBytes >> 4));
    if constexpr (!kLate) start_dp();
  }
  // dq: 64 queries by the head dim, summed over the keys of a tile.
  CF_DEVICE void start_queries(const Operand& da) {
    const u32 keys = k_by_rows + (k_ring.stage() * kKeyBytes >> 4);
    wgmma_fence();
    CF_UNROLL
    for (int step = 0; step < kBlockKV / 16; ++step) wgmma_queries(dq, da + 4 * step, whole(keys + (step * 2048 >> 4)), 1);
    wgmma_commit_group();
  }

  CF_DEVICE void free_k(u32 stage) const { free(control.k_free[stage]); }
  CF_DEVICE void free_v() { free(control.v_free), v_ring.advance(); }

  // Key rows past the length are zeroed: a gradient of zero times a NaN there would be NaN. Both consumers write the same
  // zeros, each before its own product reads them.
  CF_DEVICE void clear_keys(i32 n) const {
    if (n != work().last || work().k_rows >= kBlockKV) return;
    const u32 tile = tiles + kKAt + k_ring.stage() * kKeyBytes;
    CF_UNROLL_1
    for (i32 chunk = work().k_rows * 8 + thread; chunk < kBlockKV * 8; chunk += 128) {
      CF_UNROLL
      for (i32 panel = 0; panel < kPanels; ++panel) st_shared_128(tile + panel * kBlockKV * 128 + chunk * 16, {0, 0, 0, 0});
    }
    fence_proxy_async();
    barrier_of_warpgroup();
  }

  // Mask and bias of key tile n, over what this warp has read.
  CF_DEVICE AddendTile addends() const { return AddendTile(tiles + kAddendsAt, 4 * number + thread / 32); }
  CF_DEVICE void fetch(i32 n) const {
    if (!kMaskOrBias || n < work().first) return;
    const i32 first = work().row() + 64 * number + thread / 32 * 16;
    const Addends a = addends_of(p, work().item, work().head);
    warp_barrier();                              // all lanes have read
    fetch_addends(addends(), p, a, bias_of(p, a), first, n * kBlockKV, thread % 32);
    cp_async_commit_group();
  }

  // Scores of key tile n, and dP, become dA.
  CF_DEVICE void gradients(Operand& da, i32 n) {
    const Keys& keys = work().keys[number];
    const Place at{p, work(), row(), n * kBlockKV + thread % 4 * 2};
    const bool edge = n < keys.steady_from || n >= keys.steady_to;
    Operand derivative;
    if constexpr (!kPlainScores) shape(s, derivative, launch.scale, at, addends());
    fetch(n - 1);
    if (edge) select(s, at);
    weigh(s, rows, launch.unit);
    if constexpr (kDropout) sign_dropped(s, at);
    if constexpr (kLate) start_dp(), wgmma_wait_group<0>(), free_v();
    gradients_of(da, s, dp, derivative, p, rows, edge);
  }

  // Key tiles that only the other consumer sees.
  CF_DEVICE void pass_by(i32 count) {
    CF_UNROLL_1
    for (; count > 0; --count) {
      wait_for_turn();
      mbarrier_try_wait_parity(barrier(control.k_ready, k_ring.stage()), k_ring.parity());
      mbarrier_try_wait_parity(shared_address(&control.v_ready), v_ring.parity());
      barrier_of_warpgroup();                    // all have seen it: the phase after the next looks the same
      free_k(k_ring.stage()), k_ring.advance();
      free_v();
      pass_turn();
    }
  }

  // Rows past the length are stored where another item has them. All tiles are selected then: they get nothing here.
  CF_DEVICE void select_dead_rows() {
    Work& own = control.work[slot.stage()];
    if ((own.loop == 0 && own.closes) || own.row() + 64 * (number + 1) <= own.sight.q_length) return;
    if (leader()) own.keys[number].steady_to = 0;
    barrier_of_warpgroup();                      // it is there
  }

  CF_DEVICE void walk_keys() {
    const i32 first = uniform(work().first), last = smaller(uniform(work().keys[number].last), uniform(work().last));
    mbarrier_try_wait_parity(shared_address(&control.q_ready), q_ring.parity());
    mbarrier_try_wait_parity(shared_address(&control.o_ready), q_ring.parity());
    q_ring.advance();
    select_dead_rows();
    rows.load(p, work(), row());
    pass_by(uniform(work().last) - larger(last, first - 1));
    if (last < first) return free(control.q_free), free(control.o_free);
    i32 n = last;
    fetch(n);
    wait_for_turn();
    start_scores();
    wgmma_wait_group<kLate ? 0 : 1>();
    pass_turn();
    wgmma_wait_group<0>();
    CF_UNROLL_1
    while (true) {
      Operand da;
      if (n == first) free(control.q_free);
      if (n == first && !kLate) free(control.o_free);
      if constexpr (!kLate) free_v();
      gradients(da, n);
      if (n == first && kLate) free(control.o_free);
      clear_keys(n);
      if (n == first) {
        start_queries(da);
        break;
      }
      wait_for_turn();
      start_queries(da);
      const u32 stage = k_ring.stage();
      k_ring.advance();
      start_scores();
      wgmma_wait_group<kLate ? 1 : 2>();         // dq is there
      free_k(stage);
      wgmma_wait_group<kLate ? 0 : 1>();
      pass_turn();
      wgmma_wait_group<0>();
      --n;
    }
    wgmma_wait_group<0>();
    free_k(k_ring.stage()), k_ring.advance();
  }

  // Element by element, for any layout and dtype. Parts of 32 columns come to the same registers one after the other, so
  // that the code of one part serves all.
  CF_DEVICE void store_elements() {
    constexpr int kPart = 32;
    const i64 base = lead_offset(p.dq.lead, work().item) + p.dq.head * work().head;
    CF_UNROLL_1
    for (i32 part = 0; part < kHeadDim / 64; ++part) {
      CF_UNROLL
      for (int n = 0; n < kPart; ++n) {
        const i32 i = row() + query_of(n), c = 64 * part + thread % 4 * 2 + key_of(n);
        if (i >= p.seqlen_q || c >= p.head_dim) continue;
        const i64 at = base + i * p.dq.row + c * p.dq.col;
        store_kind(p.call.dq, p.dq_kind, at, p.accumulate ? dq[n] + load_kind<float>(p.call.dq, p.dq_kind, at) : dq[n]);
      }
      CF_UNROLL
      for (int n = kPart; n < kHeadDim / 2; ++n) dq[n - kPart] = dq[n];
    }
  }
  // Four lanes hold the same rows: they exchange columns, so that each writes eight neighbours.
  CF_DEVICE void store_packed(const Rows<Element>& to) const {
    CF_UNROLL
    for (int n = 0; n < kHeadDim / 16; ++n) {
      const int h = n % 2, from = n / 2 * 16 + 2 * h;
      u32 word[4];
      CF_UNROLL
      for (int x = 0; x < 4; ++x) word[x] = cvt_rn_x2<Element>(dq[from + 4 * x], dq[from + 4 * x + 1]);
      exchange(word[0], word[1], 1), exchange(word[2], word[3], 1);
      exchange(word[0], word[2], 2), exchange(word[1], word[3], 2);
      const i32 i = row() + 8 * h, c = n / 2 * 32 + thread % 4 * 8;
      if (i < p.seqlen_q && c < p.head_dim) st_global_128(to.at(i, c), word);
    }
  }
  CF_DEVICE void store() {
    CF_UNROLL
    for (int n = 0; n < kHeadDim / 2; ++n) dq[n] = row() + query_of(n) < work().live ? times(dq[n], launch.scale) : 0.0f;
    const Rows<Element> to = rows_of<Element>(p.call.dq, p.dq, work().item, work().head);
    const bool packed = p.dq_kind == KindOf<Element>::value && !p.accumulate && to.packed<8>() && p.head_dim % 8 == 0;
    if (packed) store_packed(to); else store_elements();
  }
  CF_DEVICE void clear() {
    CF_UNROLL
    for (int n = 0; n < kHeadDim / 2; ++n) dq[n] = 0.0f;
  }

  CF_DEVICE void run() {
    clear();
    CF_UNROLL_1
    while (true) {
      mbarrier_try_wait_parity(barrier(control.work_ready, slot.stage()), slot.parity());
      if (work().tile < 0) break;
      if (work().any()) walk_keys();
      if (work().closes) store(), clear();
      barrier_of_warpgroup();                    // `work` has been read
      free(control.work_free[slot.stage()]);
      slot.advance();
    }
  }
};

CF_DEVICE void consume(const Params& p, const Launch& launch, Control& control, u32 tiles, i32 number) {
  Consumer c{p, launch, control, number, i32(thread_index() % 128), tiles};
  c.q = descriptor(tiles + kQAt + number * 8192, 16);
  c.dout = descriptor(tiles + kOAt + number * 8192, 16);
  c.k = descriptor(tiles + kKAt, 16);
  c.v = descriptor(tiles + kVAt, 16);
  c.k_by_rows = descriptor(tiles + kKAt, kBlockKV * 128);
  if (kPingPong && number == 0) bar_arrive(kTurn, 256);
  c.run();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    cupyflash_backward_q(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps,
                         const __grid_constant__ Launch launch) {
  Control& control = static_shared_storage<Control>();
  const u32 tiles = shared_tiles();
  if (thread_index() == 0) initialise(control);
  block_barrier();                               // the barriers are there
  if (warpgroup_index() == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (thread_index() == 0) Producer{maps, control, tiles}.produce();
    if (thread_index() == 32) schedule(p, launch, control);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, launch, control, tiles, warpgroup_index() - 1);
  }
}
