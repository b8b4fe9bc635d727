// Who sums the gradient of a bias that was broadcast: owners, what they walk, and where their sums go.
//
// The bias keeps some of the axes (leading, heads, rows, columns) and is broadcast over the others. An owner is a point
// of the kept axes, with rows and columns in tiles; it walks every point of the others, cut into `splits` runs.
#pragma once
#include "attn/schedule.cuh"

struct BiasGrid {
  i32 heads, rows, cols;                   // of the gradient: 1 where summed
  i32 tile_rows, tile_cols;                // tiles that belong to different owners
  i32 walk_heads, walk_rows, walk_cols;    // heads and tiles that one owner walks

  CF_DEVICE i64 elements(const Params& p) const { return i64(points(p.own)) * heads * rows * cols; }
  CF_DEVICE i64 walk(const Params& p) const { return i64(points(p.loop)) * walk_heads * walk_rows * walk_cols; }
};

CF_DEVICE BiasGrid bias_grid(const Params& p, i32 block_q, i32 block_kv) {
  const i32 tiles_q = ceil_div(p.seqlen_q, block_q), tiles_kv = ceil_div(p.seqlen_k, block_kv);
  return {p.own_heads ? p.heads_q : 1, p.own_rows ? p.seqlen_q : 1, p.own_cols ? p.seqlen_k : 1,
          p.own_rows ? tiles_q : 1,    p.own_cols ? tiles_kv : 1,   p.own_heads ? 1 : p.heads_q,
          p.own_rows ? 1 : tiles_q,    p.own_cols ? 1 : tiles_kv};
}

// One element of the gradient, given as a point of what it keeps.
template <class Score>
CF_DEVICE void store_bias_gradient(const Params& p, const Item& item, i32 head, i32 row, i32 col, Score x) {
  const i64 index = lead_offset(p.dbias.lead, item) + p.dbias.head * head + p.dbias.row * row + p.dbias.col * col;
  if (p.accumulate) x += load_kind<Score>(p.call.dbias, p.dbias_kind, index);
  store_kind(p.call.dbias, p.dbias_kind, index, x);
}
