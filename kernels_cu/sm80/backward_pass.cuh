// What the threads of a backward's block that owns keys share besides tiles: which keys are theirs, which queries come, and
// where their rows lie. Few threads work it out for all, and it stays in shared memory: registers are too dear to hold it.
#pragma once
#include "attn/backward_rows.cuh"
#include "attn/schedule.cuh"
#include "sm80/scores.cuh"

constexpr i32 kPairs = kWarps / 2, kPairRows = kBlockKV / kPairs, kR = kPairRows / 8, kC = kStep / 4;
constexpr bool kLongTiles = larger(kHeadDim, kHeadDimV) > 128;      // few keys a block, and much to do for each query

// The blocks of p.splits heads take turns, so that those of one head start one after the other, as their turns come: from the
// first keys of the head to its last, or from the last to the first.
CF_DEVICE TileWork place_of(const Params& p, u32 block, bool from_last) {
  const u32 tiles = ceil_div(p.seqlen_k, kBlockKV), heads = points(p.own) * p.heads_kv, together = u32(p.splits);
  const u32 first = block / (together * tiles) * together, rest = block % (together * tiles);
  const u32 size = smaller(together, heads - first), head = first + rest % size;
  const i32 tile = i32(rest / size);
  return {head / p.heads_kv, i32(head % p.heads_kv), 0, from_last ? i32(tiles) - 1 - tile : tile};
}

// Where the rows of a head of queries lie.
struct Head {
  const Element *q, *dout;
  const float* stats;
  float* dq;
  u32* turns;
  i32 packed;      // whether chunks of q and dout are moved at once
};

// A tile of queries. They come from the last one of a head to its first, or from the first to the last, head by head.
struct Cursor { i32 head, row; };

// The queries of one batch item that see some of the block's keys, for all heads of the group.
struct Pass {
  TileWork work;
  Item item;
  Visibility sight;
  i32 first_row, last_row, tiles;      // first queries of the first and the last tile; tiles of all heads
  i32 group;                           // heads that share keys
  i32 turned;                          // see `upward`
  Interval whole[kPairs];              // queries that see every key of a pair
  Cursor cursors[8];                   // of tile x at x % 8: of the one to be copied after the next, to the one before last
  Head heads[8];                       // of these, by head % 8

  CF_DEVICE const Cursor& at(i32 x) const { return cursors[x % 8]; }
  CF_DEVICE const Head& head(i32 x) const { return heads[cursors[x % 8].head % 8]; }
  CF_DEVICE i32 col() const { return work.tile * kBlockKV; }      // the first key of the block

  // Whether queries come from the first to the last, and blocks from the last keys.
  CF_DEVICE bool upward() const { return kLongTiles && turned != 0; }

  // How many blocks that started before this one add to the dq of the tile at `row`.
  CF_DEVICE u32 earlier(i32 row) const {
    if (!upward() && sight.left >= kUnbounded) return work.tile;
    const Interval keys = sight.keys_of_some(row, row + kBlockQ);
    return upward() ? ceil_div(keys.stop, kBlockKV) - 1 - work.tile : work.tile - keys.start / kBlockKV;
  }

  CF_DEVICE void begin(const Params& p, u32 loop) {
    item = item_at(p, work.own, loop);
    const Visibility seen = visibility_of(p, item);
    const Interval rows = seen.rows_of_some(col(), col() + kBlockKV);
    const i32 first = rows.start / kBlockQ, stop = rows.start < rows.stop ? ceil_div(rows.stop, kBlockQ) : first;
    sight = seen;
    group = p.heads_q / p.heads_kv;
    first_row = first * kBlockQ;
    last_row = (stop - 1) * kBlockQ;
    tiles = (stop - first) * group;
  }

  // What is not needed at once: the first tile, and what pair n sees.
  CF_DEVICE void begin_first_tile(const Params& p) {
    cursors[0] = {work.head * group, upward() ? first_row : last_row};
    begin_head(p, cursors[0].head);
  }
  CF_DEVICE void begin_pair(i32 n) {
    const i32 first_key = col() + n * kPairRows;
    whole[n] = sight.rows_of_all(first_key, first_key + kPairRows);
  }

  // After tile x - 1 comes tile x.
  CF_DEVICE void begin_tile(const Params& p, i32 x) {
    Cursor next = at(x - 1);
    next.row += upward() ? kBlockQ : -kBlockQ;
    if (next.row < first_row || next.row > last_row) {
      next = {next.head + 1, upward() ? first_row : last_row};
      begin_head(p, next.head);
    }
    cursors[x % 8] = next;
  }

  CF_DEVICE void begin_head(const Params& p, i32 head) {
    const ElementRows q = rows_of<const Element>(p.call.q, p.q, item, head);
    const ElementRows o = rows_of<const Element>(p.call.dout, p.dout, item, head);
    const bool packed = q.packed<8>() && o.packed<8>() && p.head_dim == kHeadDim && p.head_dim_v == kHeadDimV;
    heads[head % 8] = {q.base, o.base, row_stats_of(p, item, head), dq_sums_of(p, item, head, kHeadDim),
                       turns_of(p, item, head), packed};
  }
};
constexpr i32 kPassBytes = 640;
static_assert(sizeof(Pass) <= kPassBytes, "there is room");
