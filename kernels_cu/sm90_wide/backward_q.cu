// Backward of float32 on Hopper's tensor cores, second half: dq of kBlockQ queries of one head.
//
//   P = exp(S - lse)     dS = P * (dO v^T - delta)     dq = scale * sum of dS k over keys
//
// Products are formed as in sm90_wide/forward.cu, of planes that prepost/split_all.cu has made.
//
//   block     one query tile of one head: q and dO stand in shared memory
//   producer  V9 lo mid hi  K9 lo mid hi  V8 ...       plane by plane through one ring of slots
//   consumer  dP9, S9 | P, dS, split | dS9 K9 | dq += | dP8, S8 ...
//
// A consumer owns 64 queries. Where q and dO leave room for no more than 64 (head dim 128), both consumers work for
// them, on every other key tile, and add up at the end.
#include "sm90_wide/backward.cuh"

constexpr bool kTogether = kStandingTiles < kConsumers;
constexpr i32 kTeams = kTogether ? kConsumers : 1;             // key tiles are dealt out among so many
constexpr u32 kPlanesOfTile = 2 * kPlanes;
static_assert(!kTogether || (kStandingTiles == 1 && kConsumers == 2), "two for one tile");

// A block's work, prepared once in shared memory.
struct Work {
  Item item;
  i32 head, head_kv, row, first, last;           // of queries; of key tiles, none if last < first
  Visibility sight;
};

CF_DEVICE void prepare(Work& work, const Params& p) {
  const TileWork tile = tile_work(block_index(), ceil_div(p.seqlen_q, kBlockQ), 1, p.heads_q, true);
  work.item = item_at(p, tile.own, 0);
  work.head = tile.head, work.head_kv = tile.head / (p.heads_q / p.heads_kv), work.row = tile.tile * kBlockQ;
  work.sight = visibility_of(p, work.item);
  const Interval seen = work.sight.keys_of_some(work.row, work.row + kBlockQ);
  work.first = seen.start / kTileRows;
  work.last = seen.stop > seen.start ? (seen.stop - 1) / kTileRows : work.first - 1;
}

struct Control { Barriers barriers; Work work; };

CF_DEVICE void produce(const Params& p, const TensorMaps& maps, Control& control, u32 tiles) {
  const Work& work = control.work;
  if (work.last < work.first) return;
  const i32 rows = first_row(work.item, p.heads_q, work.head, p.seqlen_q) + work.row;
  const i32 keys = first_row(work.item, p.heads_kv, work.head_kv, p.seqlen_k);
  load_standing(control.barriers, tiles, maps.q, maps.dout, rows);
  Producer producer{control.barriers, tiles + kSlotsAt};
  CF_UNROLL_1
  for (i32 n = work.last; n >= work.first; --n) {
    producer.load<kPanelsV>(maps.v, keys + n * kTileRows);
    producer.load<kPanels>(maps.k, keys + n * kTileRows);
  }
}

// One warpgroup.
struct Consumer {
  Planes planes;
  u32 q, dout;                                   // descriptors
  float scale, lse[2], delta[2];
  Interval seen[2];                              // keys, of the thread's two rows
  float dq[kHeadDim / 2];

  // Scores become dS.
  template <bool kEdge> CF_DEVICE void to_gradients(Scores& s, const Scores& dp, i32 col) const {
    CF_UNROLL
    for (int n = 0; n < kScores; ++n) {
      const int h = n / 2 % 2, j = n / 4 * 8 + n % 2;
      s[n] = times(weight(s[n], scale, lse[h]), dp[n] - delta[h]);
      if (kEdge && !seen[h].contains(col + j)) s[n] = 0.0f;
    }
  }

  // A tile whose planes of values begin there.
  CF_DEVICE void step(Plane of_v, i32 col, bool edge) {
    const Plane of_k = of_v.after(kPlanes);
    Scores dp, s;
    planes.inner<kHeadDimV>(dp, dout, of_v);
    planes.inner<kHeadDim>(s, q, of_k);
    planes.release_behind<kPlanes>(of_v);
    wgmma_wait_group<0>();
    if (edge) to_gradients<true>(s, dp, col); else to_gradients<false>(s, dp, col);
    Operand ds;
    split_into(ds, s);
    float product[kHeadDim / 2];
    planes.outer(product, ds, of_k, of_k.after(1), of_k.after(2));
    planes.release_behind(of_k);
    CF_UNROLL
    for (int i = 0; i < kHeadDim / 2; ++i) dq[i] += product[i];
  }
};

CF_DEVICE void consume(const Params& p, Control& control, u32 tiles, i32 number) {
  const Work& work = control.work;
  const i32 thread = i32(thread_index() % 128), tile = kTogether ? 0 : number, team = kTogether ? number : 0;
  const i32 first = work.row + tile * kTileRows, row = first + thread / 32 * 16 + thread % 32 / 4;
  const u32 standing = u32(uniform(i32(tiles + tile * (kTileBytes + kTileBytesV))));
  Consumer c{{control.barriers, tiles + kSlotsAt}, descriptor(standing, 16), descriptor(standing + kTileBytes, 16)};
  c.scale = float(p.call.scale);
  const float* stats = row_stats_of(p, work.item, work.head);
  CF_UNROLL
  for (int h = 0; h < 2; ++h) {
    const i32 own = smaller(row + 8 * h, p.seqlen_q - 1);
    c.seen[h] = work.sight.keys_of(row + 8 * h);
    c.lse[h] = stats[own / kTileRows * 2 * kTileRows + own % kTileRows];
    c.delta[h] = stats[own / kTileRows * 2 * kTileRows + kTileRows + own % kTileRows];
  }
  CF_UNROLL
  for (int i = 0; i < kHeadDim / 2; ++i) c.dq[i] = 0.0f;
  const i32 end_row = first + kTileRows;
  const Interval some = work.sight.keys_of_some(first, end_row), all = work.sight.keys_of_all(first, end_row);
  const i32 last = uniform(some.stop > some.start ? (some.stop - 1) / kTileRows : work.first - 1);
  const i32 steady_from = uniform(ceil_div(all.start, kTileRows)), steady_to = uniform(all.stop / kTileRows);
  const i32 end = uniform(work.first);
  i32 n = uniform(work.last);
  if (n >= end) mbarrier_try_wait_parity(shared_address(&control.barriers.standing), 0);
  Plane plane;
  i32 turn = 0;
  CF_UNROLL_1
  for (; n >= end; --n, plane = plane.after(kPlanesOfTile)) {
    const bool mine = turn == team;
    turn = turn + 1 == kTeams ? 0 : turn + 1;
    if (!mine) continue;
    if (n > last) c.planes.pass_by(plane, kPlanesOfTile);
    else c.step(plane, n * kTileRows + thread % 4 * 2, n < steady_from || n >= steady_to);
  }
  if constexpr (kTogether) {
    const u32 mine = tiles + 4 * thread;         // where q was
    bar_sync(1, 256);                            // all products have read it
    if (number == 1) {
      CF_UNROLL
      for (int i = 0; i < kHeadDim / 2; ++i) st_shared_32(mine + 512 * i, bits_of(c.dq[i]));
    }
    bar_sync(1, 256);                            // sums of the second are there
    if (number == 1) return;
    CF_UNROLL
    for (int i = 0; i < kHeadDim / 2; ++i) c.dq[i] += ld_shared_f32(mine + 512 * i);
  }
  const Rows<float> rows = rows_of<float>(p.call.dq, p.dq, work.item, work.head);
  const Target to{rows, row, thread % 4 * 2, p.seqlen_q, p.head_dim, p.accumulate != 0};
  to.store(c.dq, c.scale, row < work.sight.q_length, row + 8 < work.sight.q_length);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    cupyflash_backward_q(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
  Control& control = static_shared_storage<Control>();
  const u32 tiles = shared_tiles();
  if (thread_index() == 0) prepare(control.work, p), initialise(control.barriers, 4 * kConsumers / kTeams);
  block_barrier();                               // barriers and work are there
  if (warpgroup_index() == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (thread_index() == 0) produce(p, maps, control, tiles);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, control, tiles, warpgroup_index() - 1);
  }
}
