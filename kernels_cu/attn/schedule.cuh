// Which piece of work a block does. All grids are one-dimensional; the last index runs fastest.
#pragma once
#include "attn/mask.cuh"
#include "core/block.cuh"

// A counter that is taken apart from its fastest digit upward.
struct Digits {
  u32 rest;
  CF_DEVICE i32 take(i32 size) {
    const u32 digit = rest % u32(size);
    rest /= u32(size);
    return i32(digit);
  }
};

// (owner item, head, split, tile). Neighbouring blocks share keys and values; with `last_tile_first` the tiles that
// see the most keys under a causal mask start first.
struct TileWork { u32 own; i32 head, split, tile; };

CF_DEVICE TileWork tile_work(u32 block, i32 tiles, i32 splits, i32 heads, bool last_tile_first) {
  Digits digits{block};
  TileWork work;
  work.tile = digits.take(tiles);
  if (last_tile_first) work.tile = tiles - 1 - work.tile;
  work.split = digits.take(splits);
  work.head = digits.take(heads);
  work.own = digits.rest;
  return work;
}

// The same with all heads' last tiles first, then the last but one, and so on: under a causal mask no long piece of work
// begins near the end. Heads are taken `together` at a time, as many as the L2 cache holds keys and values of.
CF_DEVICE TileWork longest_first(u32 block, i32 tiles, i32 splits, u32 heads, u32 owners, u32 together) {
  const u32 pieces = u32(tiles) * splits, first = block / (together * pieces) * together;
  Digits digits{block - first * pieces};
  const u32 head = first + digits.take(smaller(together, owners * heads - first));
  TileWork work;
  work.tile = tiles - 1 - digits.take(tiles);
  work.split = digits.take(splits);
  work.head = head % heads;
  work.own = head / heads;
  return work;
}

// That of a forward which takes an item's heads together where a causal mask makes pieces of many lengths.
CF_DEVICE TileWork forward_work(const Params& p, i32 tiles, i32 splits) {
  if (p.call.right < kUnbounded) return longest_first(block_index(), tiles, splits, p.heads_q, points(p.own), p.heads_q);
  return tile_work(block_index(), tiles, splits, p.heads_q, false);
}

// Where part n of `parts` begins when tiles are shared out: tiles * n / parts, without a product that could overflow.
CF_DEVICE i32 part_start(i32 tiles, i32 n, i32 parts) {
  const i32 whole = tiles / parts, rest = tiles - whole * parts;
  return whole * n + (rest == 0 ? 0 : rest * n / parts);
}

// First tile boundary at or below x.
CF_DEVICE i32 tile_floor(i32 x, i32 block) { return x / block * block; }
