// What a block of the backward does next, and all that is known about it beforehand. The producer prepares it, once, in
// shared memory; the others read it.
//
// A block owns one tile of keys of one kv head at a time, for all items that share the keys: a piece of work is one item.
// It walks the query tiles that see some of its keys downward and round, head by head of the group, from the last one on
// or, if the launch says so, each block of a head from elsewhere. Its share of their gradients is added in any order, or in
// turn: then for every query tile the key tiles go from left to right, so that sums are the same in every run. Blocks take
// key tiles from left to right, too, and by ticket: who waits, waits for one that has started before.
#pragma once
#include "attn/dropout.cuh"
#include "attn/schedule.cuh"
#include "attn/score.cuh"
#include "sm90/backward_launch.cuh"

constexpr i32 kConsumers = 2, kConsumerKeys = 64;

struct QueryTile { i32 head, tile; };

// The query tiles that a block walks, for each head of the group.
struct Round {
  i32 first, last;       // those that see some of the keys; none if last < first
  i32 start;             // where the walk begins: downward, and from the first on to the last

  CF_DEVICE bool any() const { return last >= first; }
  CF_DEVICE i32 count() const { return last + 1 - first; }
  CF_DEVICE i32 after(i32 tile) const { return tile == first ? last : tile - 1; }
  CF_DEVICE QueryTile after(const QueryTile& now) const {
    const i32 tile = after(now.tile);
    return {now.head + (tile == start), tile};
  }
};

struct Work {
  i32 tile, head_kv;     // the key tile; negative: there is no more
  u32 own;
  u32 loop;              // number of the item among those of the owner
  i32 closes;            // 1: it is the last
  Round round;
  u32 before;            // pieces of work before this one that had query tiles
  u32 begin, end;        // numbers of its query tiles, of all heads, among those of the block
  Item item;
  Visibility sight;
  Interval plain[kConsumers];      // query tiles without edges: all of their queries see all keys of a consumer
  DropoutStream dropout;           // but for the number of the score matrix

  CF_DEVICE bool any() const { return round.any(); }
  CF_DEVICE i32 lead(int axis) const { return item.at[kLeadAxes - 1 - axis]; }      // as TMA counts them
};

CF_DEVICE void own(Work& work, const Params& p, const Launch& launch, u32 ticket) {
  const u32 per_group = launch.head_tiles * launch.side_by_side;
  const u32 first = ticket / per_group * launch.side_by_side, rest = ticket % per_group;
  const u32 size = larger(smaller(u32(launch.heads) - first, u32(launch.side_by_side)), 1u);      // none is left: any number
  work.loop = 0;
  work.tile = ticket < u32(launch.tiles) ? i32(rest / size) : -1;
  work.own = first + rest % size;
  fence_acq_rel_cta();
  work.head_kv = i32(work.own % u32(p.heads_kv));
  work.own /= u32(p.heads_kv);
}

// Step by step through shared memory: the producer has few registers.
CF_DEVICE void prepare(Work& work, const Work& before, const Params& p, const Launch& launch) {
  Visibility& sight = work.sight;
  work.closes = work.loop + 1 == unbranched(points(p.loop));
  fence_acq_rel_cta();
  place(work.item, p, work.own, work.loop);
  fence_acq_rel_cta();
  find_sight(sight, p, work.item);
  const i32 col = work.tile * kBlockKV;
  work.round.first = sight.rows_of_some(col, col + kBlockKV).start;
  fence_acq_rel_cta();
  work.round.last = sight.rows_of_some(col, col + kBlockKV).stop - 1;
  fence_acq_rel_cta();
  const bool any = work.round.first <= work.round.last;
  work.round.first = any ? work.round.first / kBlockQ : 0;
  work.round.last = any ? work.round.last / kBlockQ : -1;
  CF_UNROLL_1
  for (i32 n = 0; n < kBlockKV / kConsumerKeys; ++n) {
    const i32 from = work.tile * kBlockKV + n * kConsumerKeys;
    fence_acq_rel_cta();
    work.plain[n].start = ceil_div(sight.rows_of_all(from, from + kConsumerKeys).start, kBlockQ);
    fence_acq_rel_cta();
    work.plain[n].stop = sight.rows_of_all(from, from + kConsumerKeys).stop;
    fence_acq_rel_cta();
    const i32 stop = work.plain[n].stop;
    // Past the length scores are finite and weights 0, but for a bias.
    const bool to_end = !kMaskOrBias && stop == sight.q_length;
    work.plain[n].stop = larger(work.plain[n].start, to_end ? work.round.last + 1 : stop / kBlockQ);
  }
  work.round.start = work.round.last;
  if (launch.apart) work.round.start -= i32(u32(work.round.count()) * u32(work.tile) / u32(launch.head_tiles));
  fence_acq_rel_cta();
  if constexpr (kDropout && kHeadDim <= 128) work.dropout = dropout_of(p, work.item, 0);
  fence_acq_rel_cta();
  work.before = before.before + before.any();
  work.begin = before.end;
  work.end = work.begin + u32(work.round.count()) * launch.group;
}

// How many blocks add to a query tile before that of key tile n.
CF_DEVICE u32 turn_of(const Visibility& sight, i32 tile, i32 n) {
  return n - sight.keys_of_some(tile * kBlockQ, tile * kBlockQ + kBlockQ).start / kBlockKV;
}

// A wgmma operand in shared memory, 128-byte rows swizzled. stride: of 64-column panels, where columns are not what is
// summed over.
CF_DEVICE u64 descriptor(u32 tile, u32 stride) {
  return u64((tile & 0x3ffffu) >> 4) | u64(stride >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
