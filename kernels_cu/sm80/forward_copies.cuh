// What a block of the forward works on, and how its tiles come into shared memory.
//
// Shared memory: Q, three tiles of K (two if kPaired), two of V, what pairs exchange, addends of a step where there are any, the
// place; a warp's rows of Q become its staging area for the output.
#pragma once
#include "attn/schedule.cuh"
#include "sm80/scores.cuh"

constexpr i32 kParts = kPaired ? 2 : 1, kKeyTiles = kPaired ? 2 : 3;
constexpr i32 kWarpRows = kBlockQ * kParts / kWarps, kOwnStep = kStep / kParts, kOwnCols = kHeadDimV / kParts;
constexpr i32 kR = kWarpRows / 8, kC = kOwnStep / 4, kO = kOwnCols / 4, kWideDim = larger(kHeadDim, kHeadDimV);
static_assert(kWarpRows % 16 == 0 && kBlockKV % kStep == 0 && kOwnStep % 16 == 0, "whole fragments");
static_assert(!kPaired || kOwnCols % 64 == 0, "whole panels");

constexpr i64 kHeldBytes = i64(1) << 25;   // of keys and values, that the L2 cache holds
using TileQ = Tile<kBlockQ, kWideDim>;     // and the staging area of the output
using TileK = Tile<kBlockKV, kHeadDim>;
using TileV = Tile<kBlockKV, kHeadDimV>;

// Offsets in shared memory.
constexpr i32 kAtK = TileQ::kBytes, kAtV = kAtK + kKeyTiles * TileK::kBytes, kAtPairs = kAtV + 2 * TileV::kBytes;
constexpr i32 kPairBytes = kPaired ? kWarpRows * kStep * 2 + 64 : 0;      // weights of a step, and whether a warp takes it again
constexpr i32 kAtAddends = kAtPairs + kWarps * kPairBytes;                // two steps of each pair
constexpr i32 kAddendBytes = kMaskOrBias ? kWarpRows * Staging<kStep>::kRow * 4 : 0;      // of a warp and step
constexpr i32 kAtPlace = kAtAddends + kWarps * kAddendBytes, kPlaceBytes = 256, kUsedBytes = kAtPlace + kPlaceBytes;
static_assert(kUsedBytes + 128 == kSharedBytes, "the launch gives as much, and room to align");

// What a block works on: a tile of queries, in p.splits runs of keys if kSplit. It lies in shared memory: registers are
// too dear to hold it.
struct Place {
  Item item;
  Visibility sight;
  i32 head, block_row, split;      // the first row of the tile
  Interval whole[kWarps];          // keys that every query of a warp sees
  AddendSource addends;

  // How many heads of queries have keys and values that the L2 cache holds.
  static CF_DEVICE u32 heads_together(const Params& p) {
    const i64 bytes_each = i64(p.seqlen_k) * (p.head_dim + p.head_dim_v) * 2;
    const u32 held = u32(kHeldBytes) / u32(clamp(bytes_each, kHeldBytes >> 16, kHeldBytes));
    return u32(smaller(i64(p.heads_q / p.heads_kv) * held, i64(points(p.own)) * p.heads_q));
  }

  CF_DEVICE void begin(const Params& p) {
    const i32 tiles = ceil_div(p.seqlen_q, kBlockQ), splits = kSplit ? p.splits : 1;
    const TileWork work = p.call.right < kUnbounded
        ? longest_first(block_index(), tiles, splits, p.heads_q, points(p.own), heads_together(p))
        : tile_work(block_index(), tiles, splits, p.heads_q, false);
    item = item_at(p, work.own, 0);
    sight = visibility_of(p, item);
    head = work.head;
    block_row = work.tile * kBlockQ;
    split = work.split;
    if constexpr (kMaskOrBias) addends = {addends_of(p, item, head), sight.q_length, sight.kv_length};
  }
};
static_assert(sizeof(Place) <= kPlaceBytes, "there is room");

struct Copies {
  const Params& p;
  const Place& at;
  i32 key_stop;      // of the block, in its run: the edge of a tile
  ElementRows k, v;
  u32 q_tile;

  CF_DEVICE u32 k_tile(i32 tile) const { return q_tile + kAtK + u32(tile) % u32(kKeyTiles) * TileK::kBytes; }
  CF_DEVICE u32 v_tile(i32 tile) const { return q_tile + kAtV + u32(tile) % 2u * TileV::kBytes; }

  CF_DEVICE void load_q() const {
    const ElementRows rows = rows_of<const Element>(p.call.q, p.q, at.item, at.head);
    load_tile<TileQ>(q_tile, rows, at.block_row, at.sight.q_length, p.head_dim, thread_index());
  }
  CF_DEVICE void load_k(i32 tile) const {
    if (tile * kBlockKV >= key_stop) return;
    load_tile<TileK>(k_tile(tile), k, tile * kBlockKV, at.sight.kv_length, p.head_dim, thread_index());
  }
  CF_DEVICE void load_v(i32 tile) const {
    if (tile * kBlockKV >= key_stop) return;
    load_tile<TileV>(v_tile(tile), v, tile * kBlockKV, at.sight.kv_length, p.head_dim_v, thread_index());
  }

  // Starts the copies that come before the walk.
  CF_DEVICE void load_first(i32 first) const {
    load_q();
    CF_UNROLL
    for (i32 n = 0; n < kKeyTiles - 1; ++n) load_k(first + n);
    load_v(first);
    cp_async_commit_group();
  }
};
