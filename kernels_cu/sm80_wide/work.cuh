// What a block works on at the moment: which item and head, what it may see, where its tensors lie.
//
// One thread works it out and the block keeps it in shared memory: it is needed between the products, where registers
// are too dear to hold it.
#pragma once
#include "attn/dropout.cuh"
#include "attn/schedule.cuh"
#include "attn/score.cuh"
#include "attn/softmax.cuh"
#include "sm80_wide/tile.cuh"

struct alignas(16) Work {
  TileWork block;                  // of the backward by keys: what the block owns,
  u32 walked;                      // and how many heads of how many items it has begun
  Item item;
  Visibility sight;
  ScoreTerms<Score> terms;
  ElementRows q, k, v, dout;
  Rows<const Score> lse;
  const Score* delta;              // row_delta of the head
  Addends addends;
  DropoutStream dropout;
  i32 head, first;                 // first: query, or key, of the block
  Interval tiles;                  // of what the block walks, in order
  Interval whole;                  // of the backward by keys: queries that see every key of the block
  Interval some[kWarps], all[kWarps];      // of the forward and dq: keys that some and that every query of a warp sees
};
static_assert(sizeof(Work) <= kWorkBytes, "part of kSharedBytes, which the host computes");

CF_DEVICE void describe_item(Work& work, const Params& p, const Item& item, i32 kv_head) {
  work.item = item;
  work.sight = visibility_of(p, item);
  work.k = rows_of<const Element>(p.call.k, p.k, item, kv_head);
  work.v = rows_of<const Element>(p.call.v, p.v, item, kv_head);
}

CF_DEVICE void describe_head(Work& work, const Params& p, i32 head) {
  work.head = head;
  if (kSoftcapOrAlibi) work.terms = score_terms_of<Score>(p, work.item, head);
  work.terms.scale = Score(p.call.scale);
  work.q = rows_of<const Element>(p.call.q, p.q, work.item, head);
  if (kMaskOrBias) work.addends = addends_of(p, work.item, head);
  if (kDropout) work.dropout = dropout_of(p, work.item, head);
}

// What the backward needs besides.
CF_DEVICE void describe_results(Work& work, const Params& p, i32 head) {
  work.dout = rows_of<const Element>(p.call.dout, p.dout, work.item, head);
  work.lse = rows_of<const Score>(p.call.lse, p.lse, work.item, head);
  work.delta = static_cast<const Score*>(p.call.row_delta) + row_number(p, work.item, head, 0);
}

// Of the calling warp, whose queries begin at `row`.
CF_DEVICE void describe_warp(Work& work, i32 row, i32 rows) {
  if (lane_index() != 0) return;
  work.some[warp_index()] = work.sight.keys_of_some(row, row + rows);
  work.all[warp_index()] = work.sight.keys_of_all(row, smaller(row + rows, work.sight.q_length));
}

// lse and delta of a query as the backward takes them; a row that is none gets weights of 0.
CF_DEVICE Score lse_of(const Work& work, i32 row) {
  if (row >= work.sight.q_length) return Limits<Score>::infinity();
  return lse_for_backward(*work.lse.at(row, 0));
}
CF_DEVICE Score delta_of(const Work& work, i32 row) { return row < work.sight.q_length ? work.delta[row] : Score(0); }

// Tiles of `block` that hold some of an interval.
CF_DEVICE Interval tiles_of(const Interval& x, i32 block) {
  if (x.start >= x.stop) return {0, 0};
  return {x.start / block, ceil_div(x.stop, block)};
}

// The block's shared memory: the first address that may begin a tile, and the work, `at` bytes behind it.
CF_DEVICE u32 shared_tiles() { return (shared_address(&shared_storage<u8>()) + 127) / 128 * 128; }
CF_DEVICE Work& shared_work(i32 at) {
  u8* start = &shared_storage<u8>();
  return *reinterpret_cast<Work*>(start + (shared_tiles() - shared_address(start)) + at);
}
