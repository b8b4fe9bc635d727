// Backward of float32 on Hopper's tensor cores, first half: dk and dv of kBlockKV keys of one kv head.
//
//   P = exp(S - lse)     dS = P * (dO v^T - delta)     dv = P^T dO     dk = scale * dS^T q, summed over the group
//
// Scores are formed transposed, S^T = k q^T, so that weights are where wgmma takes them from: registers.
//
//   block     64 keys or 128 of one kv head: k and v stand in shared memory
//   producer  Q0 hi mid lo  dO0 lo mid hi  Q1 ...      every query tile that sees some key, head by head of the group
//
// Where registers allow it (head dim 64), a consumer owns 64 keys and forms both gradients:
//
//   consumer  S0^T | P, split | P0^T dO0 | dv +=, dP0^T | dS, split | dS0^T Q0 | dk +=, S1^T ...
//
// At head dim 128 both consumers work for the same 64 keys, the first for dv and the second for dk; it gets the weights
// through shared memory:
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
// Before weights of large scores were formed from the forward's very sums, the error of dv was 3 to 4 times that of "ieee"
// where scores reach 10^4.
#include "sm90_wide/backward.cuh"

constexpr bool kBoth = kStandingTiles == kConsumers;           // a consumer forms both gradients
constexpr u32 kPlanesOfTile = 2 * kPlanes;
static_assert(kBoth || (kStandingTiles == 1 && kConsumers == 2), "one for dv, one for dk");
static_assert(kHandedBytes == (kBoth ? 0 : kScores * 4 * 128), "weights as a warpgroup holds them");

// A block's work, prepared once in shared memory.
struct Work {
  Item item;
  i32 head_kv, head, head_stop, col;             // of keys; of the group's queries; of keys
  i32 start, stop;                               // query tiles that see some of the keys, of every head
  Visibility sight;
};

CF_DEVICE void prepare(Work& work, const Params& p) {
  const TileWork tile = tile_work(block_index(), ceil_div(p.seqlen_k, kBlockKV), 1, p.heads_kv, false);
  work.item = item_at(p, tile.own, 0);
  work.head_kv = tile.head, work.col = tile.tile * kBlockKV;
  work.head = tile.head * (p.heads_q / p.heads_kv), work.head_stop = work.head + p.heads_q / p.heads_kv;
  work.sight = visibility_of(p, work.item);
  const Interval rows = work.sight.rows_of_some(work.col, work.col + kBlockKV);
  work.start = rows.start / kTileRows;
  work.stop = rows.stop > rows.start ? ceil_div(rows.stop, kTileRows) : work.start;
}

struct Control {
  Barriers barriers;
  u64 handed, taken;                             // weights, from warp to warp
  Work work;
};

CF_DEVICE void initialise(Control& control) {
  mbarrier_init(control.handed, 4), mbarrier_init(control.taken, 4);
  initialise(control.barriers, 4 * kConsumers);
}

CF_DEVICE void produce(const Params& p, const TensorMaps& maps, Control& control, u32 tiles) {
  const Work& work = control.work;
  const i32 keys = first_row(work.item, p.heads_kv, work.head_kv, p.seqlen_k) + work.col;
  load_standing(control.barriers, tiles, maps.k, maps.v, keys);
  Producer producer{control.barriers, tiles + kSlotsAt};
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
  float scale;
  Interval seen[2];                              // queries that see the thread's two keys
  float dk[kOfKeys ? kHeadDim / 2 : 1], dv[kOfValues ? kHeadDimV / 2 : 1];

  // Scores become weights.
  CF_DEVICE void weigh(Scores& s, const float* stats, i32 row, bool edge) const {
    if (edge) weigh<true>(s, stats, row); else weigh<false>(s, stats, row);
  }
  template <bool kEdge> CF_DEVICE void weigh(Scores& s, const float* stats, i32 row) const {
    PerQuery lse;
    load_per_query(lse, stats);
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) {
      s[n] = weight(s[n], scale, lse[n / 4 * 2 + n % 2]);
      if (kEdge && !seen[n / 2 % 2].contains(row + n / 4 * 8 + n % 2)) s[n] = 0.0f;
    }
  }

  CF_DEVICE void to_gradients(const Scores& weights, Scores& dp, const float* stats) const {
    PerQuery delta;
    load_per_query(delta, stats + kTileRows);
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) {
      const float ds = times(weights[n], dp[n] - delta[n / 4 * 2 + n % 2]);
      dp[n] = weights[n] == 0.0f ? 0.0f : ds;    // whatever lies there
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

  CF_DEVICE void add_to_values(const Scores& weights, Plane of_dout) {
    Operand a;
    split_into(a, weights);
    wait_for_tile(of_dout);
    float product[kHeadDimV / 2];
    planes.outer(product, a, of_dout, of_dout.after(1), of_dout.after(2));
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

  // A tile whose planes of queries begin there. row: the first query of the thread; stats: its lse and delta.
  // parity: of the tile's number.
  CF_DEVICE void step(Plane of_q, i32 row, const float* stats, bool edge, u32 parity) {
    const Plane of_dout = of_q.after(kPlanes);
    Scores s, dp;
    if constexpr (kOfValues) planes.inner_turned<kHeadDim>(s, k, of_q);
    if constexpr (!kOfKeys) {
      wgmma_wait_group<0>();
      CF_UNROLL
      for (u32 n = 0; n < kPlanes; ++n) planes.release(of_q.after(n));
      weigh(s, stats, row, edge);
      hand_over(s, parity);
      add_to_values(s, of_dout);
    } else if constexpr (!kOfValues) {
      planes.inner<kHeadDimV>(dp, v, of_dout);
      planes.release_behind(of_dout);
      take(s, parity);
      to_gradients(s, dp, stats);
      wait_for_tile(of_q);
      add_to_keys(dp, of_q);
    } else {                                     // dP last: registers
      wgmma_wait_group<0>();
      weigh(s, stats, row, edge);
      add_to_values(s, of_dout);
      planes.inner<kHeadDimV>(dp, v, of_dout);
      planes.release_behind(of_dout);
      to_gradients(s, dp, stats);
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
  c.scale = float(p.call.scale);
  if constexpr (kOfKeys) {
    CF_UNROLL
    for (int i = 0; i < kHeadDim / 2; ++i) c.dk[i] = 0.0f;
  }
  if constexpr (kOfValues) {
    CF_UNROLL
    for (int i = 0; i < kHeadDimV / 2; ++i) c.dv[i] = 0.0f;
  }
  mbarrier_try_wait_parity(shared_address(&control.barriers.standing), 0);
  Plane plane;
  u32 parity = 0;
  const Interval all = work.sight.rows_of_all(first, first + kTileRows);
  const i32 steady_from = uniform(ceil_div(all.start, kTileRows)), steady_to = uniform(all.stop / kTileRows);
  const i32 start = uniform(work.start), stop = uniform(work.stop), head_stop = uniform(work.head_stop);
  const bool live0 = col < work.sight.kv_length, live1 = col + 8 < work.sight.kv_length;
  CF_UNROLL
  for (int h = 0; h < 2; ++h) c.seen[h] = work.sight.rows_of_some(col + 8 * h, col + 8 * h + 1);
  CF_UNROLL_1
  for (i32 head = uniform(work.head); head < head_stop; ++head) {
    const float* stats = row_stats_of(p, work.item, head) + lane % 4 * 2;
    CF_UNROLL_1
    for (i32 n = start; n < stop; ++n, plane = plane.after(kPlanesOfTile)) {
      c.step(plane, n * kTileRows + lane % 4 * 2, stats + n * 2 * kTileRows, n < steady_from || n >= steady_to, parity);
      parity ^= 1;
    }
  }
  if constexpr (kOfKeys) {
    if (p.call.dk != nullptr) {
      const Rows<float> rows = rows_of<float>(p.call.dk, p.dk, work.item, work.head_kv);
      const Target to{rows, col, lane % 4 * 2, p.seqlen_k, p.head_dim, p.accumulate != 0};
      to.store(c.dk, c.scale, live0, live1);
    }
  }
  if constexpr (kOfValues) {
    if (p.call.dv != nullptr) {
      const Rows<float> rows = rows_of<float>(p.call.dv, p.dv, work.item, work.head_kv);
      const Target to{rows, col, lane % 4 * 2, p.seqlen_k, p.head_dim_v, p.accumulate != 0};
      to.store(c.dv, 1.0f, live0, live1);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    cupyflash_backward_kv(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
  Control& control = static_shared_storage<Control>();
  const u32 tiles = shared_tiles();
  if (thread_index() == 0) prepare(control.work, p), initialise(control);
  block_barrier();                               // barriers and work are there
  if (warpgroup_index() == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (thread_index() == 0) produce(p, maps, control, tiles);
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
