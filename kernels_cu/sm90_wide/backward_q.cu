// Backward of float32 on Hopper's tensor cores, second half: dq of kBlockQ queries of one head.
//
//   P = exp(S - lse)     dS = P * (r * dO v^T - delta)     dA = dS * d(c)/d(a)     dq = scale * sum of dA k over keys
//
// and, beside softcap or ALiBi, the gradients of a bias and of slopes.
//
// Products are formed as in sm90_wide/forward.cu, of planes that prepost/split_all.cu has made.
//
//   block     one query tile of one head: q and dO stand in shared memory; where q was broadcast over leading axes,
//             that tile of all the items that shared it, in order
//   producer  V9 lo mid hi  K9 lo mid hi  V8 ...       plane by plane through one ring of slots
//   consumer  dP9, S9 | P, dS, split | dS9 K9 | dq += | dP8, S8 ...
//
// A consumer owns 64 queries. Where q and dO leave room for no more than 64 (head dim 128), both consumers work for
// them, on every other key tile, and add up at the end. They wait for the other's planes too: TMA may bring planes in
// another order than they were asked for, and of a slot that one has not seen filled the time before last looks like now.
#include "sm90_wide/backward_addends.cuh"

constexpr bool kTogether = kStandingTiles < kConsumers;
constexpr i32 kTeams = kTogether ? kConsumers : 1;             // key tiles are dealt out among so many
constexpr u32 kPlanesOfTile = 2 * kPlanes;
constexpr bool kFewRegisters = kMaskOrBias || kSoftcapOrAlibi;     // a row's numbers come anew for every tile
static_assert(!kTogether || (kStandingTiles == 1 && kConsumers == 2), "two for one tile");

// Of a consumer's queries: the last key tile that some see; tiles in [steady_from, steady_to) are seen by all.
struct Keys { i32 last, steady_from, steady_to; };

// A block's work on one item, prepared once in shared memory.
struct Work {
  Item item;
  i32 head, head_kv, row, first, last;           // of queries; of key tiles, none if last < first
  Keys keys[kStandingTiles];
  i32 q_length;                                  // the largest of the items so far
  Visibility sight;
  Terms terms;
  const float* stats;                            // lse and delta of the head's rows
};

CF_DEVICE void prepare(Work& work, const Params& p, u32 loop) {
  const TileWork tile = tile_work(block_index(), ceil_div(p.seqlen_q, kBlockQ), 1, p.heads_q, true);
  work.item = item_at(p, tile.own, loop);
  work.head = tile.head, work.head_kv = tile.head / (p.heads_q / p.heads_kv), work.row = tile.tile * kBlockQ;
  work.sight = visibility_of(p, work.item);
  work.q_length = loop == 0 ? work.sight.q_length : larger(work.q_length, work.sight.q_length);
  const Interval seen = work.sight.keys_of_some(work.row, work.row + kBlockQ);
  work.first = seen.start / kTileRows;
  work.last = seen.stop > seen.start ? (seen.stop - 1) / kTileRows : work.first - 1;
  CF_UNROLL_1
  for (i32 tile = 0; tile < kStandingTiles; ++tile) {
    const i32 row = work.row + tile * kTileRows;
    const Interval some = work.sight.keys_of_some(row, row + kTileRows);
    const Interval all = work.sight.keys_of_all(row, row + kTileRows);
    const i32 last = some.stop > some.start ? (some.stop - 1) / kTileRows : work.first - 1;
    work.keys[tile] = {last, ceil_div(all.start, kTileRows), all.stop / kTileRows};
  }
  describe(work.terms, p, work.item, work.head);
  work.stats = row_stats_of(p, work.item, work.head);
}

CF_DEVICE Keys uniform(const Keys& x) { return {uniform(x.last), uniform(x.steady_from), uniform(x.steady_to)}; }

struct Control {
  Barriers barriers;
  Work work;
  float slopes[kConsumers][kTileRows];           // the gradients of slopes, by rows
};

struct Feed {
  const Params& p;
  const TensorMaps& maps;
  Control& control;
  u32 tiles;
  Producer producer;

  CF_DEVICE void item() {
    const Work& work = control.work;
    if (work.last < work.first) return;
    const i32 rows = first_row(work.item, p.heads_q, work.head, p.seqlen_q) + work.row;
    const i32 keys = first_row(work.item, p.heads_kv, work.head_kv, p.seqlen_k);
    load_standing(control.barriers, tiles, maps.q, maps.dout, rows);
    CF_UNROLL_1
    for (i32 n = work.last; n >= work.first; --n) {
      producer.load<kPanelsV>(maps.v, keys + n * kTileRows);
      producer.load<kPanels>(maps.k, keys + n * kTileRows);
    }
  }
};

// One warpgroup.
struct Consumer {
  Planes planes;
  u32 q, dout;                                   // descriptors
  float kept, lse[2], delta[2];                  // kept: what dropout multiplies kept weights by
  float* slopes;                                 // of the thread's first row
  float dq[kHeadDim / 2];

  // Rows past the end repeat the last one: they are not used.
  CF_DEVICE void load_rows(const Work& work, i32 row, i32 last_row) {
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      const i32 own = smaller(row + 8 * h, last_row);
      const float* of_row = work.stats + own / kTileRows * 2 * kTileRows + own % kTileRows;
      lse[h] = of_row[0], delta[h] = of_row[kTileRows];
    }
  }

  // Scores and dP become dA, in planes, and, where others want it, dS.
  template <bool kEdge> CF_DEVICE void to_gradients(Operand& da, Scores& c, const Scores& dp, Scorer<false>& scorer,
                                                    const Place& at) const {
    SlopeSums sums;
    CF_UNROLL
    for (int pair = 0; pair < kScores / 2; ++pair) {
      const int h = pair % 2;
      float x[2];
      scorer.before(at, 2 * pair);
      CF_UNROLL
      for (int n = 2 * pair; n < 2 * pair + 2; ++n) {
        const float w = weight(scorer.score(c[n], n), lse[h]);
        const float gain = !kDropout ? dp[n] : scorer.keeps(n) ? times(dp[n], kept) : 0.0f;
        const bool none = (kMaskOrBias && w == 0.0f) || (kEdge && !scorer.sees(n));
        const float ds = none ? 0.0f : times(w, gain - delta[h]);
        x[n % 2] = ds;
        if constexpr (kAddsBeside) {
          x[n % 2] = none ? 0.0f : times(ds, scorer.derivative(c[n]));
          sums.add(h, scorer.distance(n), ds);
          c[n] = ds;
        }
      }
      put(da, pair, x[0], x[1]);
    }
    if (kAddsBeside && at.p.call.slope_rows != nullptr) sums.add_to(slopes);
  }

  // A tile whose planes of values begin there.
  CF_DEVICE void step(const Work& work, Plane of_v, const Place& at, bool edge) {
    const Plane of_k = of_v.after(kPlanes);
    Scores dp, s;
    Scorer<false> scorer(at);
    planes.inner<kHeadDimV>(dp, dout, of_v);
    planes.inner<kHeadDim>(s, q, of_k);
    scorer.meanwhile(at);
    planes.release_behind<kPlanes>(of_v);
    wgmma_wait_group<0>();
    if constexpr (kFewRegisters) load_rows(work, at.query, at.p.seqlen_q - 1);
    restore(dp, part_cut(kHeadDimV / 16), at.p.head_dim_v);
    restore_products(s, part_cut(kHeadDim / 16), at.p.head_dim, [&] {
      CF_UNROLL
      for (int n = 0; n < kScores; ++n) s[n] = recovered(s[n], lse[n / 2 % 2]);
    });
    Operand da;
    scorer.cap(s, at);
    if (edge) scorer.look(at);
    if (kAnyOption || edge) to_gradients<true>(da, s, dp, scorer, at); else to_gradients<false>(da, s, dp, scorer, at);
    if constexpr (kAddsBeside) ScoreGradients::store(s, at.p, work.item, work.head, at.query, at.key);
    float product[kHeadDim / 2];
    planes.outer(product, da, of_k, of_k.after(1), of_k.after(2));
    planes.release_behind(of_k);
    CF_UNROLL
    for (int i = 0; i < kHeadDim / 2; ++i) dq[i] += product[i];
  }
};

// The gradients of slopes from a thread's two rows, whose sums begin there: of both consumers where they work together.
CF_DEVICE void store_slopes(const Params& p, const Work& work, const float* sums, i32 row, i32 number) {
  if constexpr (kTogether) bar_sync(1, 256);     // the second has added all of its own
  if (thread_index() % 4 != 0 || (kTogether && number == 1)) return;
  float* to = static_cast<float*>(p.call.slope_rows) + row_number(p, work.item, work.head, row);
  CF_UNROLL
  for (int n = 0; n < 16; n += 8) {
    if (row + n < p.seqlen_q) to[n] = kTogether ? sums[n] + sums[n + kTileRows] : sums[n];
  }
}

CF_DEVICE void consume(const Params& p, Control& control, u32 tiles, i32 number) {
  const Work& work = control.work;
  const i32 thread = i32(thread_index() % 128), tile = kTogether ? 0 : number, team = kTogether ? number : 0;
  const i32 first = work.row + tile * kTileRows, row = first + thread / 32 * 16 + thread % 32 / 4;
  const u32 standing = u32(uniform(i32(tiles + tile * (kTileBytes + kTileBytesV))));
  Consumer c{{control.barriers, tiles + kSlotsAt}, descriptor(standing, 16), descriptor(standing + kTileBytes, 16)};
  c.kept = kDropout ? dropout_scale<float>(p) : 1.0f;
  c.slopes = control.slopes[number] + thread / 32 * 16 + thread % 32 / 4;
  CF_UNROLL
  for (int i = 0; i < kHeadDim / 2; ++i) c.dq[i] = 0.0f;
  Plane plane;
  u32 parity = 0;
  CF_UNROLL_1
  for (u32 loop = 0; loop < points(p.loop); ++loop) {
    if (loop != 0) next_item();
    Keys keys = uniform(work.keys[tile]);
    if constexpr (!kFewRegisters) c.load_rows(work, row, p.seqlen_q - 1);
    const i32 end = uniform(work.first);
    i32 n = uniform(work.last), turn = 0;
    if constexpr (kAddsBeside) {
      const i32 stop = larger(smaller(n, keys.last) + 1, end), tiles_in_all = ceil_div(p.seqlen_k, kTileRows);
      if (thread % 4 == 0) c.slopes[0] = c.slopes[8] = 0.0f;
      ScoreGradients::clear(p, work.item, work.head, row, thread % 4 * 2, team, end, kTeams);
      ScoreGradients::clear(p, work.item, work.head, row, thread % 4 * 2, stop + team, tiles_in_all, kTeams);
    }
    if (n >= end) mbarrier_try_wait_parity(shared_address(&control.barriers.standing), parity), parity ^= 1;
    CF_UNROLL_1
    for (; n >= end; --n, plane = plane.after(kPlanesOfTile)) {
      const bool mine = turn == team;
      turn = turn + 1 == kTeams ? 0 : turn + 1;
      const Place at{p, work.sight, work.terms, row, n * kTileRows + thread % 4 * 2};
      if constexpr (kFewRegisters) keys = uniform(work.keys[tile]);      // not kept through a tile: registers
      if (!mine || n > keys.last) c.planes.pass_by(plane, kPlanesOfTile);
      else c.step(work, plane, at, n < keys.steady_from || n >= keys.steady_to);
    }
    if (kAddsBeside && p.call.slope_rows != nullptr) store_slopes(p, work, c.slopes, row, number);
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
  to.store(c.dq, float(p.call.scale), row < work.q_length, row + 8 < work.q_length);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    cupyflash_backward_q(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
  Control& control = static_shared_storage<Control>();
  const u32 tiles = shared_tiles();
  if (thread_index() == 0) prepare(control.work, p, 0), initialise(control.barriers);
  block_barrier();                               // barriers and work are there
  if (warpgroup_index() == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    produce(Feed{p, maps, control, tiles, Producer{control.barriers, tiles + kSlotsAt}}, p, control.work);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, control, tiles, warpgroup_index() - 1);
  }
}
