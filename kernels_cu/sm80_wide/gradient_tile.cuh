// dA of one tile in shared memory, queries on rows, and what is made of it beside dq: the gradient of a bias.
#pragma once
#include "attn/bias_grid.cuh"
#include "sm80_wide/product.cuh"
#include "sm80_wide/work.cuh"

using TileA = Tile<kBlockQ, kSumsQueries ? kBlockKV : 32>;      // dA, the keys of a row in the order of key_place

// The column of a key in a row of TileA: the slots of a lane in one step lie where ColumnReader reads them.
CF_DEVICE i32 key_place(i32 key) {
  if (!kSectors) return key / 16 * 16 + 4 * (key % 8 / 2) + key % 16 / 8 * 2 + key % 2;
  return key / 16 * 16 + 4 * (key % 16 / 8 * 2 + key % 4 / 2) + key % 8 / 4 * 2 + key % 2;
}

// The gradient of a bias that was not broadcast is dA itself, where there is no softcap: it leaves with the tile's dq, and
// what no query sees is written as zeros. backward_launches.py says when p.call.dbias is given.
constexpr bool kWritesBias = kSumsQueries && kMaskOrBias && !kSoftcapOrAlibi;

struct BiasGradient {
  const Params& p;
  const Work& work;

  // In the block's keys of rows [from, to): get(row, key).
  template <class Get> CF_DEVICE void store_rows(i32 from, i32 to, Get get) const {
    if (p.call.dbias == nullptr) return;
    CF_UNROLL_1
    for (i32 n = thread_index(); n < (to - from) * kBlockKV; n += kThreads) {
      const i32 row = from + n / kBlockKV, key = n % kBlockKV;
      if (row >= p.seqlen_q || work.first + key >= p.seqlen_k) continue;
      store_bias_gradient<Score>(p, work.item, work.head, row, work.first + key, get(row - from, key));
    }
  }

  CF_DEVICE void store(i32 tile, u32 from) const {
    if (tile >= work.tiles.stop) return;
    store_rows(tile * kBlockQ, (tile + 1) * kBlockQ, [&](i32 row, i32 key) {
      return ld_shared<Score>(from + TileA::element_place(row, key_place(key)));
    });
  }

  CF_DEVICE void clear_unseen() const {
    const auto zero = [](i32, i32) { return Score(0); };
    const bool any = work.tiles.start < work.tiles.stop;
    store_rows(0, any ? work.tiles.start * kBlockQ : p.seqlen_q, zero);
    if (any) store_rows(work.tiles.stop * kBlockQ, p.seqlen_q, zero);
  }
};
