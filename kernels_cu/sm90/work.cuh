// Which piece of work is next, and all that is known about it beforehand. The producer prepares it, once, in shared
// memory; the consumers read it.
#pragma once
#include "attn/dropout.cuh"
#include "attn/score.cuh"
#include "core/block.cuh"
#include "core/ptx_sm90.cuh"

// The second parameter record: what the call adds to Params. cupyflash/cuda/sm90.py packs it.
struct Launch {
  u32* counter;          // two zeros, left as zeros: tiles handed out beyond the first wave, blocks that are done
  float scale, unit;     // scores to natural units, and what the kernel keeps as a score to powers of two
  i32 tiles;             // query tiles of all heads and items
  i32 query_tiles;       // of one head
  i32 heads;             // of all items
  i32 group;             // heads walked side by side, so that their keys and values stay in the L2 cache
  i32 out_by_tma;        // 0: the layout or dtype of out is none for TMA
  float cap[3];          // of the polynomial that stands for a softcap of small products: sm90/steady.cuh
  float cap_limit;       // of product^2, negative where it does not hold
  i32 items;             // of which all share a bias, and are walked side by side; 1: items come one after the other
};

constexpr i32 kConsumers = kBlockQ / 64;

// With ALiBi the walk may begin where queries stand, so that addends only fall.
constexpr bool kFromWithin = kSoftcapOrAlibi && sizeof(Element) == 2;

// Of one consumer's queries: the last key tile that some see; tiles in [steady_from, steady_to) are seen by all and
// need no selection.
struct Keys { i32 last, steady_from, steady_to; };

// A query tile of one head. Its keys are walked in tiles [first, last]: from `start` up to the last, then downward.
struct Work {
  i32 number;            // negative: there is no more, and no key is seen
  i32 head, head_kv, row;
  i32 first, last, start;
  Keys keys[kConsumers];
  i32 v_rows;            // rows of the value tile `last` that may be read: the others may hold NaN
  float sink;            // natural units, -inf without one
  Item item;
  Visibility sight;
  ScoreTerms<float> terms;
  Addends addends;
  DropoutStream dropout;

  // The key tile of a step; steps count downward from `last` to `first`.
  CF_DEVICE i32 tile(i32 step) const { return kFromWithin && step >= start ? start + last - step : step; }
  // TMA's coordinate on the axis-th leading axis from the right; there are at most two.
  CF_DEVICE i32 lead(int axis) const { return item.at[kLeadAxes - 1 - axis]; }
};

// Heads in groups; within a group the last query tiles come first: under a causal mask they are the longest.
CF_DEVICE void place(Work& work, const Params& p, const Launch& launch, u32 tile) {
  const u32 per_group = launch.query_tiles * launch.group;
  const u32 first_head = tile / per_group * launch.group, rest = tile % per_group;
  const u32 size = smaller(u32(launch.heads) - first_head, u32(launch.group));
  const u32 head = first_head + rest % size;
  work.row = (launch.query_tiles - 1 - rest / size) * kBlockQ;
  work.head = head % p.heads_q;
  u32 number = head / p.heads_q;
  if (launch.items > 1) number = head % launch.items, work.head = head / launch.items;
  work.item.number = number;
  CF_UNROLL
  for (int axis = kLeadAxes - 1; axis >= 0; --axis) {
    work.item.at[axis] = 0;
    if (p.lead[axis] > 1) {                        // divisions are slow, and mostly there is one axis
      work.item.at[axis] = number % p.lead[axis];
      number /= p.lead[axis];
    }
  }
  work.head_kv = work.head / (p.heads_q / p.heads_kv);
}

CF_DEVICE void see_nothing(Work& work) {
  work.first = 0, work.last = -1;
  for (i32 n = 0; n < kConsumers; ++n) work.keys[n].last = -1;
}

CF_DEVICE void find_keys(Work& work, const Params& p) {
  const Visibility& sight = work.sight;
  const Interval seen = sight.keys_of_some(work.row, work.row + kBlockQ);
  if (seen.stop <= seen.start) return see_nothing(work);
  work.first = seen.start / kBlockKV;
  work.last = (seen.stop - 1) / kBlockKV;
  work.v_rows = sight.kv_length < p.seqlen_k ? sight.kv_length - work.last * kBlockKV : kBlockKV;
  CF_UNROLL_1
  for (i32 n = 0; n < kConsumers; ++n) {
    const i32 row = work.row + 64 * n, stop = smaller(row + 64, sight.q_length);
    const Interval some = sight.keys_of_some(row, stop), all = sight.keys_of_all(row, stop);
    Keys& keys = work.keys[n];
    const bool any = some.stop > some.start, every = any && all.stop > all.start;
    keys.last = kPingPong ? work.last : any ? (some.stop - 1) / kBlockKV : -1;         // turns: all walk alike
    keys.steady_from = every ? ceil_div(all.start, kBlockKV) : work.last + 1;          // none is steady: all are edges
    keys.steady_to = every ? all.stop / kBlockKV : 0;
  }
}

CF_DEVICE void find_start(Work& work) {
  work.start = work.last;
  bool alike = work.terms.slope > 0.0f;
  for (i32 n = 0; n < kConsumers; ++n) alike = alike && work.keys[n].last == work.last;
  if (alike) {
    const i64 at = (work.row + kBlockQ / 2 + work.sight.offset) / kBlockKV;
    work.start = i32(clamp(at, i64(work.first), i64(work.last)));
  }
}

// Step by step through shared memory: the scheduler has few registers.
CF_DEVICE void prepare(Work& work, const Params& p, const Launch& launch, u32 tile) {
  work.number = tile;
  place(work, p, launch, tile);
  forget();
  work.sight = visibility_of(p, work.item);
  forget();
  find_keys(work, p);
  forget();
  work.sink = -Limits<float>::infinity();
  if (p.call.sinks != nullptr) {
    work.sink = load_kind<float>(p.call.sinks, p.sinks_kind, head_index(p.sinks, work.item, work.head));
  }
  if constexpr (kSoftcapOrAlibi) work.terms = score_terms_of<float>(p, work.item, work.head);
  if constexpr (kFromWithin) find_start(work);
  forget();
  if constexpr (kMaskOrBias) work.addends = addends_of(p, work.item, work.head);
  forget();
  if constexpr (kDropout) work.dropout = dropout_of(p, work.item, work.head);
}
