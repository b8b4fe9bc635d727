// dA of one tile in shared memory, queries on rows, and what is made of it beside dq: the gradient of a bias.
#pragma once
#include "sm80_wide/product.cuh"
#include "sm80_wide/work.cuh"

using TileA = Tile<kBlockQ, kSumsQueries ? kBlockKV : 32>;      // dA, the keys of a row in the order of key_place

// The column of a key in a row of TileA: the slots of a lane in one step lie where ColumnReader reads them.
CF_DEVICE constexpr i32 key_place(i32 key) {
  if (!kSectors) return key / 16 * 16 + 4 * (key % 8 / 2) + key % 16 / 8 * 2 + key % 2;
  return key / 16 * 16 + 4 * (key % 16 / 8 * 2 + key % 4 / 2) + key % 8 / 4 * 2 + key % 2;
}

// Where a lane's entry (0, 0) of the part at (row, key) lies, sixteen keys wide, and entry (u, w) from there: rows and
// keys change bits of the place.
CF_DEVICE u32 first_gradient(u32 tile, i32 row, i32 key) {
  const i32 lane = i32(opaque(lane_index()));      // not kept
  return tile + TileA::element_place(row + lane % 4 * 2, key_place(key + lane / 4));
}
CF_DEVICE u32 gradient_at(u32 start, int u, int w) {
  return (start ^ (w % 2 * 64) ^ (u * (key_place(8) * i32(sizeof(Score))))) + (w / 2 * 8 + w % 2) * TileA::kRowBytes;
}

// The gradient of a bias that was not broadcast is dS, without softcap dA itself: it leaves with the tile's dq, and what no
// query sees is written as zeros. backward_launches.py says when p.call.dbias is given.
constexpr bool kWritesBias = kSumsQueries && kMaskOrBias && (!kSoftcapOrAlibi || kSectors);

struct BiasGradient {
  const Params& p;
  const Work& work;

  // In the block's keys of rows [from, to): get(row, key). A thread has one key.
  template <class T, class Get> CF_DEVICE void store_rows_as(i32 from, i32 to, Get get) const {
    constexpr i32 kStep = kThreads / kBlockKV;
    static_assert(kThreads % kBlockKV == 0, "a thread keeps its key");
    const i32 thread = i32(opaque(thread_index())), key = thread % kBlockKV, first = thread / kBlockKV;      // not kept
    if (work.first + key >= p.seqlen_k) return;
    const Rows<T> rows = rows_of<T>(p.call.dbias, p.dbias, work.item, work.head);
    T* at = in_global(rows.at(from + first, work.first + key));
    const i32 stop = smaller(to, p.seqlen_q) - from;
    CF_UNROLL_BY(4)
    for (i32 row = first; row < stop; row += kStep, at += kStep * rows.row_stride) *at = T(get(row, key));
  }
  template <class Get> CF_DEVICE void store_rows(i32 from, i32 to, Get get) const {
    if (p.call.dbias == nullptr) return;
    if (p.dbias_kind == KindOf<Element>::value) store_rows_as<Element>(from, to, get);
    else store_rows_as<float>(from, to, get);
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
