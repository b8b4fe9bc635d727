// Backward of float32 on Hopper's tensor cores, first half: dk and dv of kBlockKV keys of one kv head.
//
//   P = exp(S - lse)     dS = P * (r * dO v^T - delta)     dA = dS * d(c)/d(a)
//   dv = (r * P)^T dO     dk = scale * dA^T q, both summed over the group
//
// Scores are formed transposed, S^T = k q^T, so that weights are where wgmma takes them from: registers.
//
//   block     64 keys or 128 of one kv head: k and v stand in shared memory; where they were broadcast over leading
//             axes, those keys of all the items that shared them, in order
//   producer  Q0 hi mid lo  dO0 lo mid hi  Q1 ...      every query tile that sees some key, head by head of the group
//
// Where registers allow it (head dim 64 without options), a consumer owns 64 keys and forms both gradients:
//
//   consumer  S0^T | P, split | P0^T dO0 | dv +=, dP0^T | dS, split | dS0^T Q0 | dk +=, S1^T ...
//
// Else both consumers work for the same 64 keys, the first for dv and the second for dk; it gets the weights, times
// d(c)/d(a), through shared memory:
//
//   first     S0^T  | P, split | P0^T dO0 | dv += | S1^T ...
//   second    dP0^T | dS, split           | dS0^T Q0 | dk += | dP1^T ...
//
// TFLOP/s of the whole backward (five products counted), full / causal, 4096 keys, 16384 tokens of 2048, and ratio to
// PyTorch's efficient backend in the same run (H200, 2026-11-29 and 30); ms of this kernel and of backward_q.cu.
//
//   head dim 128                                                                           kv             q
//   both consumers form S^T: eight products     72.9 / 69.3  1.97 / 1.99     11.1 / 5.9     6.7 / 3.6
//   weights are handed over: seven              77.2 / 78.0  2.10 / 2.22     10.1 / 5.2     6.5 / 3.3
//   head dim 64
//   dP^T beside S^T: spills                                                  13.8 / 5.1     6.5 / 3.5
//   dP^T last                                   78.6 / 71.4  2.24 / 2.16     10.2 / 5.4     6.3 / 3.5
//   two consumers for 64 keys, as at 128                                     10.6 / 5.5
//   128 queries in backward_q.cu, or 64 for two consumers                                   6.2 / 3.5, 6.8 / 3.5
//
// Before weights of large scores were formed from the forward's very sums, the error of dv was 3 to 4 times that of
// "ieee" where scores reach 10^4.
//
// Options, against sm80_wide in the same run: times as fast (H200, 2026-11-30, 4096 keys, 8192 tokens of 2048).
//
//   head dim   plain  causal  mask  bias  ALiBi  softcap  dropout
//   128         1.93    1.85  3.09  3.59   2.32     2.12     2.27
//   64          1.80    1.72  3.50  3.94
//
// Mask and bias are loaded before the products and joined while these are formed; with a mask's bytes compared where they
// were loaded the backward took 16.4 ms instead of 9.2 at head dim 128, 20.6 instead of 11.1 at 64. All gradients, as
// multiples of the plain call's time at head dim 128 / 64 (16 heads of 4096 keys):
//                                      mask, bias   mask, softcap  ALiBi        mask, ALiBi  bias, ALiBi  bias, softcap
//   a mask beside a bias compared where it was loaded; slopes' and bias's gradients from sm80_wide
//                                      1.90 / 3.07  1.62 / 1.91    1.92 / 1.79  2.61 / 2.88  2.80 / 3.23  2.91 / 3.51
//   joined; they leave backward_q.cu   1.36 / 1.55  1.53 / 1.72    1.12 / 1.07  1.39 / 1.52  1.54 / 1.76  1.72 / 1.96
#include "sm90_wide/backward_bias.cuh"

constexpr bool kBoth = kStandingTiles == kConsumers;           // a consumer forms both gradients
constexpr u32 kPlanesOfTile = 2 * kPlanes;
static_assert(!(kBoth && kAnyOption), "options take registers");
constexpr bool kSplitLater = !kBoth && !kSoftcapOrAlibi;       // weights are handed over first, as soon as may be
static_assert(kBoth || (kStandingTiles == 1 && kConsumers == 2), "one for dv, one for dk");
static_assert(kHandedBytes == (kBoth ? 0 : kScores * 4 * 128), "weights as a warpgroup holds them");

// Of a tile of keys: query tiles in [steady_from, steady_to) see all of them.
struct Queries { i32 steady_from, steady_to; };

// A block's work on one item, prepared once in shared memory.
struct Work {
  Item item;
  i32 head_kv, head, head_stop, col;             // of keys; of the group's queries; of keys
  i32 start, stop;                               // query tiles that see some of the keys, of every head
  Queries queries[kStandingTiles];
  i32 kv_length;                                 // the largest of the items so far
  Visibility sight;
};

CF_DEVICE void prepare(Work& work, const Params& p, u32 loop) {
  const TileWork tile = tile_work(block_index(), ceil_div(p.seqlen_k, kBlockKV), 1, p.heads_kv, false);
  work.item = item_at(p, tile.own, loop);
  work.head_kv = tile.head, work.col = tile.tile * kBlockKV;
  work.head = tile.head * (p.heads_q / p.heads_kv), work.head_stop = work.head + p.heads_q / p.heads_kv;
  work.sight = visibility_of(p, work.item);
  work.kv_length = loop == 0 ? work.sight.kv_length : larger(work.kv_length, work.sight.kv_length);
  const Interval rows = work.sight.rows_of_some(work.col, work.col + kBlockKV);
  work.start = rows.start / kTileRows;
  work.stop = rows.stop > rows.start ? ceil_div(rows.stop, kTileRows) : work.start;
  CF_UNROLL_1
  for (i32 tile = 0; tile < kStandingTiles; ++tile) {
    const i32 col = work.col + tile * kTileRows;
    const Interval all = work.sight.rows_of_all(col, col + kTileRows);
    work.queries[tile] = {ceil_div(all.start, kTileRows), all.stop / kTileRows};
  }
}

CF_DEVICE Queries uniform(const Queries& x) { return {uniform(x.steady_from), uniform(x.steady_to)}; }

struct Control {
  Barriers barriers;
  u64 handed, taken;                             // weights, from warp to warp
  Work work;
  Terms terms;                                   // of the head that is weighed
};

CF_DEVICE void initialise(Control& control) {
  mbarrier_init(control.handed, 4), mbarrier_init(control.taken, 4);
  initialise(control.barriers);
}

struct Feed {
  const Params& p;
  const TensorMaps& maps;
  Control& control;
  u32 tiles;
  Producer producer;

  CF_DEVICE void item() {
    const Work& work = control.work;
    const i32 keys = first_row(work.item, p.heads_kv, work.head_kv, p.seqlen_k) + work.col;
    load_standing(control.barriers, tiles, maps.k, maps.v, keys);
    CF_UNROLL_1
    for (i32 head = work.head; head < work.head_stop; ++head) {
      const i32 rows = first_row(work.item, p.heads_q, head, p.seqlen_q);
      CF_UNROLL_1
      for (i32 n = work.start; n < work.stop; ++n) {
        producer.load<kPanels, true>(maps.q, rows + n * kTileRows);
        producer.load<kPanelsV>(maps.dout, rows + n * kTileRows);
      }
    }
  }
};

// Numbers of a thread's 16 queries of a tile: entries 2 j and 2 j + 1 of its columns 8 j and 8 j + 1.
using PerQuery = float[kTileRows / 4];

CF_DEVICE void load_per_query(PerQuery& x, const float* of_thread) {
  CF_UNROLL
  for (int j = 0; j < kTileRows / 8; ++j) {
    const Packed<float, 2> pair = *reinterpret_cast<const Packed<float, 2>*>(of_thread + 8 * j);
    x[2 * j] = pair.value[0], x[2 * j + 1] = pair.value[1];
  }
}

// One warpgroup.
template <bool kOfKeys, bool kOfValues> struct Consumer {
  Planes planes;
  u32 handed, taken, weights;                    // addresses: two barriers, the thread's weights
  u32 k, v;                                      // descriptors
  float kept;                                    // what dropout multiplies kept weights by
  float dk[kOfKeys ? kHeadDim / 2 : 1], dv[kOfValues ? kHeadDimV / 2 : 1];

  // Scores become what gains are multiplied by: weights and d(c) / d(a), with a minus sign where dropout removes the
  // weight. The weights that it leaves go into planes, here or later.
  template <bool kEdge>
  CF_DEVICE void weigh(Operand& left, Scores& s, const float* stats, Scorer<true>& scorer, const Place& at) const {
    CF_UNROLL
    for (int pair = 0; pair < kScores / 2; ++pair) {
      scorer.before(at, 2 * pair);
      const Packed<float, 2> lse = *reinterpret_cast<const Packed<float, 2>*>(stats + pair / 2 * 8);
      float w[2];
      CF_UNROLL
      for (int x = 0; x < 2; ++x) {
        const int n = 2 * pair + x;
        w[x] = weight(scorer.score(s[n], n), lse.value[x]);
        if (kEdge && !scorer.sees(n)) w[x] = 0.0f;
        s[n] = kSoftcapOrAlibi ? times(w[x], scorer.derivative(s[n])) : w[x];
        if (!scorer.keeps(n)) s[n] = -s[n], w[x] = 0.0f;
      }
      if constexpr (!kSplitLater) put(left, pair, w[0], w[1]);
    }
  }
  static CF_DEVICE void split_left(Operand& left, const Scores& factors) {
    CF_UNROLL
    for (int pair = 0; pair < kScores / 2; ++pair) {
      const float x = factors[2 * pair], y = factors[2 * pair + 1];
      put(left, pair, kDropout && x < 0.0f ? 0.0f : x, kDropout && y < 0.0f ? 0.0f : y);
    }
  }

  CF_DEVICE void to_gradients(const Scores& factors, Scores& dp, const float* stats) const {
    PerQuery delta;
    load_per_query(delta, stats + kTileRows);
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) {
      float gain = dp[n];
      if constexpr (kDropout) gain = factors[n] < 0.0f ? 0.0f : times(gain, kept);
      const float ds = times(absolute(factors[n]), gain - delta[n / 4 * 2 + n % 2]);
      dp[n] = factors[n] == 0.0f ? 0.0f : ds;    // whatever lies there
    }
  }

  // From one consumer to the other, whose thread holds the same entries.
  CF_DEVICE void hand_over(const Scores& s, u32 parity) const {
    mbarrier_try_wait_parity(taken, parity ^ 1);
    CF_UNROLL
    for (int n = 0; n < kScores; n += 2) st_shared_f32x2(weights + 512 * n, s[n], s[n + 1]);
    warp_barrier();                              // all lanes have written theirs
    if (thread_index() % 32 == 0) mbarrier_arrive(handed);
  }
  CF_DEVICE void take(Scores& s, u32 parity) const {
    mbarrier_try_wait_parity(handed, parity);
    CF_UNROLL
    for (int n = 0; n < kScores; n += 2) ld_shared_f32x2(s[n], s[n + 1], weights + 512 * n);
    warp_barrier();                              // all lanes have read theirs
    if (thread_index() % 32 == 0) mbarrier_arrive(taken);
  }

  CF_DEVICE void add_to_values(const Operand& weights, Plane of_dout) {
    wait_for_tile(of_dout);
    float product[kHeadDimV / 2];
    planes.outer(product, weights, of_dout, of_dout.after(1), of_dout.after(2));
    if constexpr (kOfKeys) wgmma_wait_group<0>(); else planes.release_behind(of_dout);
    CF_UNROLL
    for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] += product[i];
  }
  CF_DEVICE void add_to_keys(const Scores& ds, Plane of_q) {
    Operand a;
    split_into(a, ds);
    float product[kHeadDim / 2];
    planes.outer(product, a, of_q.after(2), of_q.after(1), of_q);
    planes.release_behind(of_q.after(2), of_q.after(1), of_q);
    CF_UNROLL
    for (int i = 0; i < kHeadDim / 2; ++i) dk[i] += product[i];
  }
  CF_DEVICE void wait_for_tile(Plane lo) const {
    CF_UNROLL
    for (u32 n = 0; n < kPlanes; ++n) planes.wait(lo.after(n));
  }

  // A tile whose planes of queries begin there. stats: lse and delta of the thread's queries. parity: of the tile's
  // number.
  CF_DEVICE void step(Plane of_q, const Place& at, const Item& item, i32 head, const float* stats, bool edge,
                      u32 parity) {
    const Plane of_dout = of_q.after(kPlanes);
    Scores s, dp;
    if constexpr (kOfValues) {
      Scorer<true> scorer(at);
      planes.inner_turned<kHeadDim>(s, k, of_q);
      scorer.meanwhile(at);
      wgmma_wait_group<0>();
      if constexpr (!kOfKeys) {
        CF_UNROLL
        for (u32 n = 0; n < kPlanes; ++n) planes.release(of_q.after(n));
      }
      restore_products(s, part_cut(kHeadDim / 16), at.p.head_dim, [&] {
        CF_UNROLL
        for (int n = 0; n < kScores; ++n) s[n] = recovered(s[n], stats[n / 4 * 8 + n % 2]);
      });
      Operand left;
      scorer.cap(s, at);
      if (edge) scorer.look(at);
      if (kAnyOption || edge) weigh<true>(left, s, stats, scorer, at); else weigh<false>(left, s, stats, scorer, at);
      if constexpr (!kOfKeys) hand_over(s, parity);
      if constexpr (kSplitLater) split_left(left, s);
      add_to_values(left, of_dout);
    }
    if constexpr (kOfKeys) {
      planes.inner<kHeadDimV>(dp, v, of_dout);   // after the values' share: registers
      planes.release_behind(of_dout);
      if constexpr (!kOfValues) take(s, parity);
      restore(dp, part_cut(kHeadDimV / 16), at.p.head_dim_v);
      to_gradients(s, dp, stats);
      if (kWritesBias && at.p.call.dbias != nullptr) BiasGradient(at.p, item, head).store(dp, at.query, at.key);
      if constexpr (!kOfValues) wait_for_tile(of_q);
      add_to_keys(dp, of_q);
    }
  }
};

template <bool kOfKeys, bool kOfValues>
CF_DEVICE void consume(const Params& p, Control& control, u32 tiles, i32 tile) {
  const Work& work = control.work;
  const i32 thread = i32(thread_index() % 128), first = work.col + tile * kTileRows, lane = thread % 32;
  const i32 col = first + thread / 32 * 16 + lane / 4;
  const u32 standing = kBoth ? u32(uniform(i32(tiles + tile * (kTileBytes + kTileBytesV)))) : tiles;
  Consumer<kOfKeys, kOfValues> c{{control.barriers, tiles + kSlotsAt},
                                   shared_address(&control.handed),
                                   shared_address(&control.taken),
                                   tiles + kHandedAt + 8 * thread,
                                   descriptor(standing, 16), descriptor(standing + kTileBytes, 16)};
  c.kept = kDropout ? dropout_scale<float>(p) : 1.0f;
  if constexpr (kOfKeys) {
    CF_UNROLL
    for (int i = 0; i < kHeadDim / 2; ++i) c.dk[i] = 0.0f;
  }
  if constexpr (kOfValues) {
    CF_UNROLL
    for (int i = 0; i < kHeadDimV / 2; ++i) c.dv[i] = 0.0f;
  }
  Plane plane;
  u32 parity = 0;
  CF_UNROLL_1
  for (u32 loop = 0; loop < points(p.loop); ++loop) {
    if (loop != 0) next_item();
    mbarrier_try_wait_parity(shared_address(&control.barriers.standing), loop % 2);
    Queries queries = uniform(work.queries[tile]);
    const i32 start = uniform(work.start), head_stop = uniform(work.head_stop);
    i32 stop = uniform(work.stop);
    CF_UNROLL_1
    for (i32 head = uniform(work.head); head < head_stop; ++head) {
      if constexpr (kAnyOption && kOfValues) {   // one of the consumers
        bar_sync(1, 128);                        // what is said of the head before has been read
        if (thread == 0) describe(control.terms, p, work.item, head);
        bar_sync(1, 128);                        // that of this one is there
      }
      if (kOfKeys && kWritesBias && p.call.dbias != nullptr) {
        const BiasGradient gradient(p, work.item, head);
        gradient.clear_rows(0, start * kTileRows, lane % 4 * 2, col);
        gradient.clear_rows(stop * kTileRows, p.seqlen_q, lane % 4 * 2, col);
      }
      const float* stats = row_stats_of(p, work.item, head) + lane % 4 * 2;
      CF_UNROLL_1
      for (i32 n = start; n < stop; ++n, plane = plane.after(kPlanesOfTile)) {
        if constexpr (kInParts) queries = uniform(work.queries[tile]), stop = uniform(work.stop);
        const Place at{p, work.sight, control.terms, n * kTileRows + lane % 4 * 2, col};
        c.step(plane, at, work.item, head, stats + n * 2 * kTileRows, n < queries.steady_from || n >= queries.steady_to, parity);
        parity ^= 1;
      }
    }
  }
  const bool live0 = col < work.kv_length, live1 = col + 8 < work.kv_length;
  if constexpr (kOfKeys) {
    if (p.call.dk != nullptr) {
      const Rows<float> rows = rows_of<float>(p.call.dk, p.dk, work.item, work.head_kv);
      const Target to{rows, col, lane % 4 * 2, p.seqlen_k, p.head_dim, p.accumulate != 0};
      to.store(c.dk, float(p.call.scale), live0, live1);
    }
  }
  if constexpr (kOfValues) {
    if (p.call.dv != nullptr) {
      const Rows<float> rows = rows_of<float>(p.call.dv, p.dv, work.item, work.head_kv);
      const Target to{rows, col, lane % 4 * 2, p.seqlen_k, p.head_dim_v, p.accumulate != 0};
      to.store(c.dv, c.kept, live0, live1);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    cupyflash_backward_kv(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
  Control& control = static_shared_storage<Control>();
  const u32 tiles = shared_tiles();
  if (thread_index() == 0) prepare(control.work, p, 0), initialise(control);
  block_barrier();                               // barriers and work are there
  if (warpgroup_index() == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    produce(Feed{p, maps, control, tiles, Producer{control.barriers, tiles + kSlotsAt}}, p, control.work);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    const i32 number = warpgroup_index() - 1;
    if constexpr (kBoth) {
      consume<true, true>(p, control, tiles, number);
    } else {
      if (number == 0) consume<false, true>(p, control, tiles, 0); else consume<true, false>(p, control, tiles, 0);
    }
  }
}
