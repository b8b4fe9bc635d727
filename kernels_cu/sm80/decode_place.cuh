// What a decode works on: tiles of queries and slices of keys, rows that are queries of several heads, sums of strands, and
// where results go among those of all runs.
#pragma once
#include "attn/schedule.cuh"
#include "sm80/weights.cuh"

constexpr i32 kTileRows = kBlockQ, kN = kTileRows / 8, kSlice = 16, kStrands = kBlockKV / kSlice;
constexpr bool kWalks = kHeadWarps > 1;                   // a warp takes all strands of a run
constexpr bool kStored = kTileRows * kHeadDim > 2048;    // registers have no room for queries
using TileK = Tile<kSlice, kHeadDim>;
using TileV = Tile<kSlice, kHeadDimV>;
using Scores = float[2 * kN][2];      // [2 n + x][h]: query 8 n + 2 (l % 4) + x, key 8 h + l / 4
using Output = float[kN][kHeadDimV / 16][4];      // [n][m][2 y + x]: the same query, column 16 m + 8 y + l / 4
static_assert(kWarps == (kWalks ? kHeadWarps : kStrands), "each warp has something of its own");

// Of entry u or h of a thread's scores: its row of the tile, its key of the slice.
CF_DEVICE i32 tile_row(int u) { return u / 2 * 8 + i32(lane_index()) % 4 * 2 + u % 2; }
CF_DEVICE i32 tile_key(int h) { return h * 8 + i32(lane_index()) / 4; }

// Offsets in shared memory.
constexpr i32 kStageBytes = TileK::kBytes + TileV::kBytes, kWarpBytes = kStages * kStageBytes;
constexpr i32 kAtQueries = kWarps * kWarpBytes, kQueryBytes = kStored ? kTileRows * kHeadDim * 2 : 0;
constexpr i32 kAtSums = kAtQueries + kWarps * kQueryBytes, kUsedBytes = kAtSums + kWarps * kTileRows * 8;
static_assert(kUsedBytes + 128 == kSharedBytes, "the launch gives as much, and room to align");
static_assert(kTileRows * kHeadDimV * 4 <= kWarpBytes, "a warp's output fits its stages");

using ColumnLanes = Lanes<4, 32>;      // the eight lanes that share queries

// What a warp works on: `rows` in all (query i of head h of the group is row h * seqlen_q + i), from `first_row`.
struct Place {
  Item item;
  i32 warp, kv_head, first_row, rows, split;

  CF_DEVICE Place(const Params& p, u32 block) {
    rows = p.heads_q / p.heads_kv * p.seqlen_q;
    Digits digits{block};      // all heads of a run together: often their keys lie side by side
    warp = i32(warp_index());
    first_row = rows <= kTileRows ? 0 : digits.take(ceil_div(rows, kTileRows)) * kTileRows;
    kv_head = digits.take(p.heads_kv / kHeadWarps) * kHeadWarps + (kHeadWarps > 1 ? warp : 0);
    split = digits.take(p.splits);
    item = item_at(p, digits.rest, 0);
  }
};

// A row of the tile.
struct Query {
  i32 head, row;
  bool exists, live;      // is there such a row; is it below the query length

  CF_DEVICE Query(const Params& p, const Place& at, i32 tile_row, i32 q_length) {
    const i32 number = at.first_row + tile_row, last = smaller(number, at.rows - 1);
    const i32 of_group = p.seqlen_q == 1 ? last : last / p.seqlen_q;
    head = at.kv_head * (p.heads_q / p.heads_kv) + of_group;
    row = last - of_group * p.seqlen_q;
    exists = number < at.rows;
    live = exists && row < q_length;
  }
};

// The maximum and the sum of one row of a strand, or of several together.
struct Sums {
  float m, l;

  // Takes in those of another strand; what the two's outputs then count.
  CF_DEVICE void join(const Sums& other, float& mine, float& others) {
    const float top = maximum(m, other.m), reference = reference_of(top);
    mine = exponential(m - reference);
    others = exponential(other.m - reference);
    l = fused(l, mine, other.l * others);
    m = top;
  }
};

// What counts nothing may be no number.
CF_DEVICE float weighed(float x, float mine, float other, float others) {
  const float kept = mine != 0.0f ? x * mine : 0.0f;
  return others != 0.0f ? fused(other, others, kept) : kept;
}

// Where a row's results go among those of all runs.
struct Row {
  float* out;      // null: there is no such row
  float* lse;
  i32 cols;
  float factor;

  CF_DEVICE void write(int m, float low, float high) const {
    const i32 col = 16 * m + tile_key(0);
    if (out != nullptr && col < cols) out[col] = low * factor;
    if (out != nullptr && col + 8 < cols) out[col + 8] = high * factor;
  }
  CF_DEVICE void write_lse(const Sums& of) const {
    if (out != nullptr) *lse = of.m == Limits<float>::infinity() ? of.m : of.m + logarithm(of.l);
  }
};
