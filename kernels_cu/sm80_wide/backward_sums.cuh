// How shares of dq, and of the slopes' gradient, are added to what the blocks of earlier keys have left.
#pragma once
#include "sm80_wide/backward_tiles.cuh"

// Parts of the dq of a tile: some rows and a line of columns each.
constexpr i32 kLines = kHeadDim / (8 * kChunk), kDqRows = kBlockQ / 16 * kLines >= 2 * kWarps ? 32 : 16;
constexpr i32 kFirstLines = kLines / 4;

struct Sums : Tiles {
  ColumnReader<TileA> read_a;
  RowReader<TileK, kSectors> sum_k;

  // A count for each tile of queries, at the number of its first row.
  CF_DEVICE u32* turn_of(i32 tile) const {
    return static_cast<u32*>(p.call.turns) + 1 + row_number(p, work.item, work.head, tile * kBlockQ);
  }

  // How many blocks, those of earlier keys, add to a tile before this one.
  CF_DEVICE u32 earlier(i32 tile) const {
    if (p.splits == 0) return 0;
    const Interval keys = work.sight.keys_of_some(tile * kBlockQ, (tile + 1) * kBlockQ);
    return u32(larger(work.first / kBlockKV - keys.start / kBlockKV, 0));
  }

  // Where pairs leave their sums of a tile for the slope's gradient.
  CF_DEVICE u32 slopes_at(i32 tile) const { return shared + kAtSlopes + u32(tile) % 2u * (kPairs * sizeof(Score)); }
  // A tile's part of the slope's gradient goes to its first row, on top of what the blocks of earlier keys have left.
  CF_DEVICE void sum_slopes(i32 tile) const {
    if (p.call.slope_rows == nullptr || tile >= work.tiles.stop) return;
    if (thread_index() == kThreads / 2) {
      if (const u32 before = earlier(tile); before > 0) wait_for_count(turn_of(tile), before);
      Score sum = Score(0);
      CF_UNROLL
      for (i32 n = 0; n < kPairs; ++n) sum += ld_shared<Score>(slopes_at(tile) + n * i32(sizeof(Score)));
      red_add(static_cast<Score*>(p.call.slope_rows) + row_number(p, work.item, work.head, tile * kBlockQ), sum);
    }
    warp_barrier();
  }

  // Lines [first, last) of dq of a tile, of which warp `warp` of `warps` takes its part: dA k, added to what the blocks of
  // earlier keys have left.
  template <i32 kRows> CF_DEVICE void sum_lines(i32 tile, i32 first, i32 last, i32 warp, i32 warps) const {
    constexpr i32 kRowParts = kBlockQ / kRows;
    if (tile >= work.tiles.stop || first == last) return;
    const u32 before = earlier(tile), seen = before > 0 ? load_relaxed(turn_of(tile)) : 0;
    CF_UNROLL_1
    for (i32 part = warp; part < kRowParts * (last - first); part += warps) {
      const i32 row = part % kRowParts * kRows, line = first + part / kRowParts;
      Score dq[kRows / 8][2 * kChunk];
      multiply_line<kBlockKV / 16>(dq, a_tile(tile) + row * TileA::kRowBytes, read_a, shared, line, sum_k);
      if (part < warps && seen < before) wait_for_count(turn_of(tile), before);
      warp_barrier();          // no lane adds before its turn
      const Rows<Element> rows = rows_of<Element>(p.call.dq, p.dq, work.item, work.head);
      finish_by(dq, Score(p.call.scale));
      add_line(dq, rows, tile * kBlockQ + row, work.sight.q_length, line * 8 * kChunk, p.head_dim);
    }
  }
  CF_DEVICE void sum_queries(i32 tile) const {
    if constexpr (kShapes) sum_slopes(tile);
    if constexpr (!kApart) return sum_lines<kDqRows>(tile, 0, kLines, warp_index(), kWarps);
    const bool first = first_of_pair();
    sum_lines<16>(tile, first ? 0 : kFirstLines, first ? kFirstLines : kLines, pair(), kPairs);
  }

  // Says that the block has added its share of a tile; all warps have done so and met since.
  CF_DEVICE void publish(i32 tile) const {
    if (!kSumsQueries || tile >= work.tiles.stop || p.splits == 0) return;
    if (thread_index() == kThreads / 2) red_release_increment(turn_of(tile));      // of a warp that will wait for weights
  }
};
