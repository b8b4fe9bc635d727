// Workspaces of a backward that owns keys and hands gradients of queries on: where they lie.
//
//   row_stats   lse of the rows of a query tile, in base 2, then their dlse - delta: a gain is dP and this. In sm90_wide
//               natural, and delta - dlse
//   dq_sums     unscaled gradients of queries, in blocks of kRowBlock rows, each in the order of wgmma's fragments
//   turns       counters: kTickets of them for launches as a whole, then one a query tile
//
// Rows of a head are padded to whole units of kRowUnit, so that tiles and copies of any size up to it stay inside.
#pragma once
#include "attn/mask.cuh"

constexpr i32 kRowUnit = 128, kRowBlock = 64, kTickets = 4;

CF_DEVICE i64 padded_rows(const Params& p) { return i64(ceil_div(p.seqlen_q, kRowUnit)) * kRowUnit; }
CF_DEVICE i64 head_number(const Params& p, const Item& item, i32 head) { return item.number * p.heads_q + head; }

// Of query tile 0 of a head; a tile has twice as many floats as rows.
CF_DEVICE float* row_stats_of(const Params& p, const Item& item, i32 head) {
  return static_cast<float*>(p.call.row_stats) + 2 * head_number(p, item, head) * padded_rows(p);
}

// Query tile 0 of a head.
CF_DEVICE u32* turns_of(const Params& p, const Item& item, i32 head) {
  return static_cast<u32*>(p.call.turns) + kTickets + head_number(p, item, head) * (padded_rows(p) / kRowBlock);
}

// Row 0 of a head in sums of `cols` columns.
CF_DEVICE float* dq_sums_of(const Params& p, const Item& item, i32 head, i32 cols) {
  return static_cast<float*>(p.call.dq_sums) + head_number(p, item, head) * padded_rows(p) * cols;
}
