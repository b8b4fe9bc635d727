// What a launch of the backward takes besides Params, and where its pipelines stand.
#pragma once
#include "attn/backward_rows.cuh"
#include "core/block.cuh"
#include "core/ptx_sm90.cuh"

// The third parameter: what the call adds to Params. cupyflash/cuda/sm90_backward.py packs it.
struct Launch {
  float scale, unit;     // scores to natural units, and what the kernel keeps as a score to powers of two
  i32 tiles;             // key tiles of all heads and owners; in backward_q query tiles
  i32 head_tiles;        // of one head
  i32 heads;             // of all owners: kv heads; in backward_q query heads
  i32 side_by_side;      // heads that are walked together, few, so that what they read stays in the L2 cache
  i32 group;             // query heads of a kv head
  i32 ticket;            // number of this launch's ticket counter
  i32 queries;           // what is done about gradients of queries: a QueryGradients
  i32 finish;            // and whether their sums become gradients here: a Finish
  i32 apart;             // 1: blocks of a head begin at query tiles apart
};

enum QueryGradients : i32 { kNotWanted = 0, kInTurn = 1, kInAnyOrder = 2 };

struct TensorMaps { TensorMap q, k, v, dout; };

// Where a pipeline stands: the number of the next thing in it. Who waits for something ready takes `parity`, who waits
// for a free place takes the other one: the first such wait falls through.
template <u32 kCount> struct Ring {
  u32 number = 0;
  CF_DEVICE u32 stage() const { return number % kCount; }
  CF_DEVICE u32 parity() const { return number / kCount % 2; }
  CF_DEVICE void advance() { ++number; }
};

// The same of two places, for those who have registers: its place and its parity, which a number gives by shifts and masks.
struct Cursor {
  u32 at = 0, phase = 0;
  CF_DEVICE void advance() { phase ^= at, at ^= 1; }
  CF_DEVICE Cursor before() const { return {at ^ 1, phase ^ at ^ 1}; }
  CF_DEVICE u32 in(const u64 (&bars)[2]) const { return shared_address(bars) + 8 * at; }
};

// A launch's counter of tickets; its address is computed where it is used, for those who have few registers.
CF_DEVICE u32* ticket_of(const Params& p, i32 number) {
  return in_global(reinterpret_cast<u32*>(opaque(reinterpret_cast<i64>(p.call.turns)))) + number;
}

// ---- what those who find work prepare, step by step through shared memory: they have few registers

// Point `own` of own[] and point `loop` of loop[]. Divisions are slow, and mostly there is one axis.
CF_DEVICE void place(Item& item, const Params& p, u32 own, u32 loop) {
  u32 number = 0, weight = 1;
  CF_UNROLL
  for (i32 axis = kLeadAxes - 1; axis >= 0; --axis) {
    u32 at = 0;
    if (p.own[axis] > 1) at = own % u32(p.own[axis]), own /= u32(p.own[axis]);
    if (p.loop[axis] > 1) at = loop % u32(p.loop[axis]), loop /= u32(p.loop[axis]);
    item.at[axis] = at;
    number += weight * at;
    weight = unbranched(weight) * p.lead[axis];
  }
  item.number = number;
}

CF_DEVICE void find_sight(Visibility& sight, const Params& p, const Item& item) {
  sight.q_length = q_length_of(p, item);
  fence_acq_rel_cta();
  sight.kv_length = kv_length_of(p, item);
  fence_acq_rel_cta();
  sight.offset = offset_of(p, item, sight.q_length, sight.kv_length);
  sight.left = p.call.left, sight.right = p.call.right;
  fence_acq_rel_cta();
}
