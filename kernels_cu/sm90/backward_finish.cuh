// Sums of queries become gradients as soon as they are complete: by a warp beside the products
// (sm90/backward_beside.cuh), and by the consumers of blocks that have no more work while others still have some.
//
// Both take units of up to kUnitBlocks blocks of kRowBlock rows by ticket, about in the order in which their sums are
// complete, unless blocks begin apart. Who waits for sums waits for blocks that have started.
#pragma once
#include "attn/query_sums.cuh"
#include "sm90/backward_work.cuh"

enum Finish : i32 { kFinishedLater = 0, kDownward = 1, kUpward = 2 };      // in which order sums of a head are complete

constexpr i32 kFinishTicket = kTickets - 1, kUnitBlocks = 4, kUnitRows = kUnitBlocks * kRowBlock;

// Rows of one head. One thread prepares it, step by step in shared memory: the warp beside the products has few registers.
struct Unit {
  const float* sums;     // of its first row
  const u32* counters;   // of the head
  Rows<Element> to;      // of the head
  Item item;
  Visibility sight;
  u32 rest;              // what the steps hand on
  i32 head, row;         // row: the first
  i32 blocks;            // 0: there are no more units
};

CF_DEVICE void take_unit(Unit& to, const Params& p, const Launch& launch) {
  const u32 units = unbranched(u32(ceil_div(p.seqlen_q, kUnitRows))), items = unbranched(points(p.loop)), group = launch.group;
  to.rest = atom_inc(ticket_of(p, kFinishTicket));
  to.blocks = 0;
  if (to.rest >= units * items * group * launch.heads) return;
  fence_acq_rel_cta();
  {
    const u32 of_heads = units * items * group * launch.side_by_side;      // of kv heads
    const u32 first = to.rest / of_heads * launch.side_by_side, rest = to.rest % of_heads;
    const u32 size = smaller(launch.heads - first, u32(launch.side_by_side));
    to.rest = rest / size;
    to.head = i32(first + rest % size);    // of kv heads of all owners
  }
  fence_acq_rel_cta();
  {
    u32 rest = to.rest, number = 0;        // of the head in its group, and of the item
    if (launch.finish == kDownward) to.row = i32(units - 1 - rest % units), rest /= units;
    if (group > 1) number = rest % group, rest /= group;
    const u32 owner = to.head / u32(p.heads_kv);
    to.head = i32((to.head - owner * u32(p.heads_kv)) * group + number);
    number = rest;
    if (launch.finish == kUpward) number = items > 1 ? rest % items : 0, to.row = i32(items > 1 ? rest / items : rest);
    to.row *= kUnitRows;
    place(to.item, p, owner, number);
  }
  fence_acq_rel_cta();
  find_sight(to.sight, p, to.item);
  to.counters = turns_of(p, to.item, to.head);
  fence_acq_rel_cta();
  to.sums = dq_sums_of(p, to.item, to.head, kHeadDim) + i64(to.row) * kHeadDim;
  fence_acq_rel_cta();
  to.to = rows_of<Element>(p.call.dq, p.dq, to.item, to.head);
  fence_acq_rel_cta();
  to.blocks = smaller(kUnitBlocks, ceil_div(p.seqlen_q - to.row, kRowBlock));
}

// Whether some row of the block from `row` on sees a key; only then it has sums.
CF_DEVICE bool has_sums(const Unit& unit, i32 row) {
  const Interval seen = unit.sight.keys_of_some(row, row + kRowBlock);
  return seen.start < seen.stop;
}
CF_DEVICE void wait_for_sums(const Unit& unit, const Launch& launch, i32 row) {
  const i32 tile = row / kBlockQ;
  const Interval keys = unit.sight.keys_of_some(tile * kBlockQ, tile * kBlockQ + kBlockQ);
  const u32 shares = (keys.stop - 1) / kBlockKV - keys.start / kBlockKV + 1;
  wait_for_count(unit.counters + tile, shares + (launch.queries == kInAnyOrder));
}

// ---- by the consumers

// 16 rows from `row` on, from the lane's sums.
CF_DEVICE void store_finished(const Params& p, const Packed<float, 4> (&sums)[kHeadDim / 8], const Rows<Element>& to,
                              bool packed, i32 row, float scale, i32 lane) {
  CF_UNROLL
  for (int from = 0; from < kHeadDim / 8; from += 4) {
    u32 words[2][4];
    to_rows(words, sums + from, scale);
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      exchange_columns(words[h]);
      const i32 i = row + lane / 4 + 8 * h, col = (from + lane % 4) * 8;
      if (i >= p.seqlen_q) continue;
      if (packed && col < p.head_dim) st_global_128(to.at(i, col), words[h]);
      CF_UNROLL
      for (int n = 0; n < 8; ++n) {
        if (!packed && col + n < p.head_dim) *to.at(i, col + n) = Element{u16(words[h][n / 2] >> n % 2 * 16)};
      }
    }
  }
}

CF_DEVICE void finish_block(const Params& p, const Launch& launch, const Unit& unit, i32 block, i32 lane) {
  const i32 row = unit.row + block * kRowBlock;
  const bool seen = has_sums(unit, row);
  if (seen) wait_for_sums(unit, launch, row);
  const Rows<Element> to = unit.to;
  const bool packed = to.packed<8>() && p.head_dim % 8 == 0;
  const float* from = unit.sums + block * (kRowBlock * kHeadDim) + lane * 4;
  CF_UNROLL_1
  for (i32 part = 0; part < kRowBlock / 16; ++part) {
    Packed<float, 4> sums[kHeadDim / 8] = {};
    if (seen) {
      CF_UNROLL
      for (int n = 0; n < kHeadDim / 8; ++n) {
        sums[n] = *reinterpret_cast<const Packed<float, 4>*>(in_global(from) + part * 128 + n * 512);
      }
    }
    store_finished(p, sums, to, packed, row + 16 * part, launch.scale, lane);
  }
}

// By a consumer, a block a warp; `unit` is its own.
CF_DEVICE void finish_rows(const Params& p, const Launch& launch, Unit& unit, i32 number) {
  static_assert(kUnitBlocks == 4, "a block a warp");
  if (launch.finish == kFinishedLater) return;
  CF_UNROLL_1
  while (true) {
    const i32 thread = i32(opaque(thread_index())) % 128;
    if (thread == 0) take_unit(unit, p, launch);
    bar_sync(8 + number, 128);
    if (unit.blocks == 0) return;
    if (thread / 32 < unit.blocks) finish_block(p, launch, unit, thread / 32, thread % 32);
    bar_sync(8 + number, 128);             // `unit` has been read
  }
}
