// What a block works on at the moment: which item and head, what it may see, where its tensors lie.
//
// One thread works it out and the block keeps it in shared memory: it is needed between the inner loops, where registers
// are too dear to hold it.
#pragma once
#include "attn/dropout.cuh"
#include "attn/schedule.cuh"
#include "attn/score.cuh"
#include "attn/softmax.cuh"
#include "simt/addends.cuh"
#include "simt/transfer.cuh"

struct alignas(16) Work {
  Visibility sight;
  TensorRows q, k, v, dout;
  Rows<Score> lse;
  const Score* delta;              // row_delta of the head
  Addends addends;
  DropoutStream dropout;
  ScoreTerms<Score> terms;
  Item item;
  i32 head, head_kv;
  i32 first, split;                // the block's first query (or key), and which columns of the results are its own
};
static_assert(sizeof(Work) == 304 + 4 * sizeof(Score), "part of kSharedBytes, which the host computes");

// The part that stays.
CF_DEVICE void describe_place(Work& work, i32 first, i32 split) {
  work.first = first;
  work.split = split;
}

// The part of one batch item and kv head.
CF_DEVICE void describe_item(Work& work, const Params& p, u32 own, u32 loop, i32 head_kv) {
  work.item = item_at(p, own, loop);
  work.sight = visibility_of(p, work.item);
  work.head_kv = head_kv;
  work.k = rows_of<const Element>(p.call.k, p.k, work.item, head_kv);
  work.v = rows_of<const Element>(p.call.v, p.v, work.item, head_kv);
}

// The part of one query head.
CF_DEVICE void describe_head(Work& work, const Params& p, i32 head) {
  work.head = head;
  work.q = rows_of<const Element>(p.call.q, p.q, work.item, head);
  work.dout = rows_of<const Element>(p.call.dout, p.dout, work.item, head);
  work.lse = rows_of<Score>(p.call.lse, p.lse, work.item, head);
  work.delta = static_cast<const Score*>(p.call.row_delta) + row_number(p, work.item, head, 0);
  work.terms = score_terms_of<Score>(p, work.item, head);
  if (kMaskOrBias) work.addends = addends_of(p, work.item, head);
  if (kDropout) work.dropout = dropout_of(p, work.item, head);
}

// Keys that some query of a block sees.
CF_DEVICE Interval keys_of_block(const Work& work) {
  return work.sight.keys_of_some(work.first, work.first + kBlockQ);
}

// Keys that every query of a block sees, those aside whose results are not wanted.
CF_DEVICE Interval keys_of_all_live_rows(const Work& work) {
  return work.sight.keys_of_all(work.first, smaller(work.first + kBlockQ, work.sight.q_length));
}

// kChunk columns of a tile of queries (of q, times the scale, or of dout) or of keys (of k or v), of head dim `width`.
// All threads.
template <class Tile>
CF_DEVICE void load_queries(Score* panel, const TensorRows& rows, const Work& work, i32 row, i32 chunk, i32 width,
                            Score factor = Score(1)) {
  load_tile<kBlockQ, kChunk, kRow, typename Tile::Queries>(panel, rows, row, work.sight.q_length, chunk * kChunk,
                                                           smaller((chunk + 1) * kChunk, width), factor);
}

template <class Tile>
CF_DEVICE void load_keys(Score* panel, const TensorRows& rows, const Work& work, i32 col, i32 chunk, i32 width) {
  load_tile<kBlockKV, kChunk, kRow, typename Tile::Keys>(panel, rows, col, work.sight.kv_length, chunk * kChunk,
                                                         smaller((chunk + 1) * kChunk, width));
}

// The same without waiting for them.
template <class Tile>
CF_DEVICE void start_keys(Score* panel, const TensorRows& rows, const Work& work, i32 col, i32 chunk, i32 width) {
  start_tile<kBlockKV, kChunk, kRow, typename Tile::Keys>(panel, rows, col, work.sight.kv_length, chunk * kChunk,
                                                          smaller((chunk + 1) * kChunk, width));
}

// Scores read the chunk of a head dim that is left of `width`: how deep it is.
CF_DEVICE i32 chunk_depth(i32 chunk, i32 width) { return smaller(kChunk, width - chunk * kChunk); }

// lse and delta of a tile of queries, by slot. All threads.
template <class Tile> CF_DEVICE void load_row_numbers(Score* lse, Score* delta, const Work& work, i32 row) {
  for (i32 slot = thread_index(); slot < kBlockQ; slot += kThreads) {
    const i32 at = row + Tile::Queries::index(slot);
    const bool live = at < work.sight.q_length;
    lse[slot] = live ? lse_for_backward(*in_global(work.lse.at(at, 0))) : Limits<Score>::infinity();
    delta[slot] = live ? *in_global(work.delta + at) : Score(0);
  }
}
