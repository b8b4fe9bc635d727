// What a block of the backward by keys has in shared memory, and the walk over it: K and V of its keys, tiles of queries and
// cotangents with lse and delta, one on its way while the one before is used.
#pragma once
#include "sm80_wide/gradient_tile.cuh"
#include "sm80_wide/store.cuh"
#include "sm80_wide/weights.cuh"

constexpr i32 kPairs = kWarps / 2, kPairRows = kBlockKV / kPairs, kR = kPairRows / 8, kC = kBlockQ / 4;
static_assert(kBlockKV % (16 * kPairs) == 0 && kBlockQ % 16 == 0, "whole fragments");
// With one place for a tile first warps take a quarter of dq, begin with the next tile and are at their exponentials while
// second ones, who take the rest, multiply.
constexpr bool kApart = kStages == 1;
// Threads that copy a tile: in one place first warps alone, while second ones take dq.
constexpr i32 kLoaders = kApart ? kThreads / 2 : kThreads;
static_assert(2 * kBlockQ <= kLoaders, "a thread fetches one of lse or delta");
// Doubles: P changes hands where dA will lie. Beside it there may be room for d(c)/d(a), and dS after it: then the gradients
// of what is added to scores come from here.
constexpr bool kInPlace = kSumsQueries && kSectors, kRoomBeside = kInPlace && kStages == 2;
constexpr bool kShapes = kRoomBeside && kSoftcapOrAlibi;
static_assert(!kInPlace || !kSoftcapOrAlibi || kShapes, "rows of one place are for other options");
static_assert(!kSumsQueries || kPairRows == 16, "gradient_at has two rows of a lane");

using TileK = Tile<kBlockKV, kHeadDim>;
using TileV = Tile<kBlockKV, kHeadDimV>;
using TileQ = Tile<kBlockQ, kHeadDim>;
using TileO = Tile<kBlockQ, kHeadDimV>;
// Weights change hands in parts of kPartQ queries: where exponentials are slow dk begins while the rest are taken.
constexpr i32 kHands = sizeof(Score) == 8 && kC >= 8 ? 2 : 1, kPartC = kC / kHands, kPartQ = kBlockQ / kHands;

// Offsets in shared memory.
constexpr i32 kWeightBytes = kPairRows * kBlockQ * sizeof(Score);
constexpr i32 kAtV = TileK::kBytes, kAtQ = kAtV + TileV::kBytes, kAtO = kAtQ + kStages * TileQ::kBytes;
constexpr i32 kAtSums = kAtO + kStages * TileO::kBytes;
constexpr i32 kPlaces = kInPlace ? 2 : kStages, kPlaceBytes = kPlaces * TileA::kBytes;      // of dA
constexpr i32 kAtWeights = kAtSums + (kSumsQueries ? kPlaceBytes : 0);                      // P, or d(c)/d(a)
constexpr i32 kAtRows = kAtWeights + (kInPlace ? kRoomBeside * kPlaceBytes : kPairs * kWeightBytes);
constexpr i32 kAtSlopes = kAtRows + 2 * kStages * kBlockQ * i32(sizeof(Score));
constexpr i32 kAtWork = kAtSlopes + (kRoomBeside ? 2 * kPairs * i32(sizeof(Score)) : 0);
static_assert(kAtWork + kWorkBytes + 128 == kSharedBytes, "the launch gives as much, and room to align");

struct Tiles {
  const Params& p;
  Work& work;
  u32 shared;
  Score fetched;                           // lse or delta of the next tile

  static CF_DEVICE i32 pair() { return i32(warp_index()) % kPairs; }
  static CF_DEVICE bool first_of_pair() { return i32(warp_index()) < kPairs; }
  CF_DEVICE i32 col() const { return work.first + pair() * kPairRows; }      // first key of the pair

  CF_DEVICE u32 q_tile(i32 tile) const { return shared + kAtQ + u32(tile) % u32(kStages) * TileQ::kBytes; }
  CF_DEVICE u32 o_tile(i32 tile) const { return shared + kAtO + u32(tile) % u32(kStages) * TileO::kBytes; }
  CF_DEVICE u32 a_tile(i32 tile) const { return shared + kAtSums + u32(tile) % u32(kPlaces) * TileA::kBytes; }
  // lse (0) or delta (1) of a tile.
  CF_DEVICE u32 row_numbers(i32 tile, i32 which) const {
    return shared + kAtRows + (u32(tile) % u32(kStages) * 2 + which) * kBlockQ * sizeof(Score);
  }

  CF_DEVICE void load_queries(i32 tile) {
    if (tile >= work.tiles.start && i32(thread_index()) < kLoaders) {
      const i32 row = tile * kBlockQ, i = row + i32(thread_index()) % kBlockQ, which = i32(thread_index()) / kBlockQ;
      TileQ::template load<kLoaders>(q_tile(tile), work.q, row, work.sight.q_length, p.head_dim);
      TileO::template load<kLoaders>(o_tile(tile), work.dout, row, work.sight.q_length, p.head_dim_v);
      if (which == 0) fetched = lse_of(work, i);
      if (which == 1) fetched = delta_of(work, i);
    }
    cp_async_commit_group();
  }

  CF_DEVICE u32 group() const { return u32(i32(opaque(p.heads_q)) / p.heads_kv); }

  // The next head of the group, or the first one of the next item.
  CF_DEVICE void begin() {
    block_barrier();        // nobody reads what belongs to the head before any more
    if (thread_index() == 0) {
      const u32 number = work.walked++, part = number % group();
      describe_item(work, p, item_at(p, work.block.own, number / group()), work.block.head);
      describe_head(work, p, work.block.head * i32(group()) + i32(part));
      describe_results(work, p, work.head);
      work.tiles = tiles_of(work.sight.rows_of_some(work.first, work.first + kBlockKV), kBlockQ);
      work.whole = work.sight.rows_of_all(work.first, work.first + kBlockKV);
    }
    block_barrier();        // the work is there
    if constexpr (kWritesBias) BiasGradient{p, work}.clear_unseen();
    if (work.tiles.start >= work.tiles.stop) return;
    if (work.walked % group() == 1 % group()) {
      TileK::template load<>(shared, work.k, work.first, work.sight.kv_length, p.head_dim);
      TileV::template load<>(shared + kAtV, work.v, work.first, work.sight.kv_length, p.head_dim_v);
    }
    if constexpr (kApart) cp_async_commit_group();
    load_queries(work.tiles.stop - 1);
    if constexpr (kApart) {
      cp_async_wait_group<1>();
      block_barrier();        // K and V are there
    }
  }

  // Waits for a tile, and for dA of the one before; starts copies of the next.
  CF_DEVICE void next_tile(i32 tile) {
    const i32 thread = kMaskOrBias ? i32(opaque(thread_index())) : i32(thread_index());      // not kept beside addends
    const i32 which = thread / kBlockQ, own = thread % kBlockQ;
    if (which < 2) st_shared(row_numbers(tile, which) + own * i32(sizeof(Score)), fetched);
    if (kApart && !first_of_pair()) return barrier_sync_aligned(kThere, kThreads);
    cp_async_wait_group<0>();
    if constexpr (kApart) {      // first warps have copied it, and do not wait for second ones
      barrier_arrive_aligned(kThere, kThreads);
      return barrier_sync_aligned(kThere + 1, kThreads / 2);
    }
    block_barrier();        // the tile is there for everyone; nobody reads the one before any more
    if (kStages == 2) load_queries(tile - 1);
  }

  // The barriers at which part n of the weights changes hands, and at which second and first warps learn of a tile.
  static CF_DEVICE i32 hand(int n) { return 1 + pair() + kPairs * n; }
  static constexpr i32 kThere = 1 + kPairs * kHands;
};
