// What a block of a tensor-core family's bias gradient walks, tile by tile: see attn/bias_grid.cuh.
//
// Where an owner walks little the block takes several, one after the other, so that its copies never run dry. One thread
// works everything out for all, two visits ahead, and it lies in shared memory: registers are too dear to hold it.
#pragma once
#include "attn/bias_grid.cuh"
#include "core/block.cuh"

// How many owners a block takes; cupyflash/cuda/backward_launches.py says the same.
CF_DEVICE u32 owners_of_a_block(i64 walk, i32 splits) {
  return splits == 1 && walk < 8 ? 8 / u32(larger(walk, i64(1))) : 1;
}

// A tile of a score matrix and the owner on which it falls.
struct VisitPlace {
  u32 owner;
  i32 head, row, col;      // of the tile's corner
  Item item;
  Visibility sight;

  // Whether some query of the tile sees some key.
  CF_DEVICE bool sees() const {
    const Interval some = sight.keys_of_some(row, row + kBlockQ);
    return some.start < some.stop && some.start < col + kBlockKV && col < some.stop;
  }
};

// A Visit is a Visit::Place and what begin(p, place) adds. A Visit::Place is a VisitPlace and what find(p) keeps of an
// item and a head, find_next(p) of the next head. Tiles that see nothing are not visited.
template <class Visit> struct Plan {
  u32 first, stop;         // the block's owners
  u32 own, loop;
  i64 walk, left;          // tiles of an owner, and from `next` on
  u32 made;                // visits so far
  typename Visit::Place next;
  Visit visits[4];         // of visit x at x % 4: from the one after the next to the one before

  CF_DEVICE void begin(const Params& p) {
    const BiasGrid grid = bias_grid(p, kBlockQ, kBlockKV);
    walk = grid.walk(p);
    const u32 together = owners_of_a_block(walk, p.splits);
    const i64 all = i64(points(p.own)) * grid.heads * p.splits * grid.tile_rows * grid.tile_cols;
    first = block_index() * together;
    stop = u32(smaller(i64(first) + together, all));
    const TileWork at = tile_work(first, grid.tile_rows * grid.tile_cols, p.splits, grid.heads, false);
    const i64 walk_cols = larger(grid.walk_cols, 1);      // it may be 0, and others with it
    const i64 start = walk * at.split / p.splits, line = start / walk_cols, matrix = line / grid.walk_rows;
    left = walk * (at.split + 1) / p.splits - start;
    own = at.own;
    loop = u32(matrix / grid.walk_heads);
    made = 0;
    next.owner = first;
    next.head = at.head + i32(matrix % grid.walk_heads);
    next.row = (at.tile / grid.tile_cols + i32(line % grid.walk_rows)) * kBlockQ;
    next.col = (at.tile % grid.tile_cols + i32(start % walk_cols)) * kBlockKV;
    find(p);
    CF_UNROLL_1
    while (made < 2) make(p);
  }

  CF_DEVICE void find(const Params& p) {
    next.item = item_at(p, own, loop);
    next.sight = visibility_of(p, next.item);
    next.find(p);
  }

  enum Change { kTile, kHead, kItem };

  // One tile on along the axes that the bias keeps (1) or was broadcast over (0).
  CF_DEVICE Change advance(const Params& p, i32 kept) {
    if (p.own_cols == kept) {
      if ((next.col += kBlockKV) < p.seqlen_k) return kTile;
      next.col = 0;
    }
    if (p.own_rows == kept) {
      if ((next.row += kBlockQ) < p.seqlen_q) return kTile;
      next.row = 0;
    }
    if (p.own_heads == kept) {
      if (++next.head < p.heads_q) return kHead;
      next.head = 0;
    }
    if (kept) ++own;
    else ++loop;
    return kItem;
  }

  // To the first tile of the next owner.
  CF_DEVICE Change next_owner(const Params& p) {
    const bool stays = loop == 0 && (p.own_heads || next.head == 0);
    if (!p.own_cols) next.col = 0;
    if (!p.own_rows) next.row = 0;
    if (!p.own_heads) next.head = 0;
    loop = 0;
    left = walk;
    ++next.owner;
    const Change change = advance(p, 1);
    return stays ? change : kItem;
  }

  CF_DEVICE void step(const Params& p) {
    const Change change = --left > 0 ? advance(p, 0) : next_owner(p);
    if (next.owner >= stop || change == kTile) return;
    if (change == kHead) next.find_next(p);
    else find(p);
  }

  // Makes the visit after the last one made; after the block's last its owner is `stop`.
  CF_DEVICE void make(const Params& p) {
    Visit& visit = visits[made++ % 4];
    CF_UNROLL_1
    for (bool found = false; !found;) {
      const bool ended = next.owner >= stop;
      found = ended || next.sees();
      if (found) visit.begin(p, next);
      if (!ended) step(p);
    }
  }
};
