// Backward on tensor cores by mma.sync, first half: dk and dv of one tile of keys (Dao 2023, Algorithm 2, turned).
//
// Pairs of warps work on kPairRows keys each (sm80/backward_pair.cuh). Queries come in tiles of kBlockQ from the last to the
// first and are taken in steps of kStep; all query heads of the group and all items that share the keys follow one another,
// in order.
//
//   query tile x  | wait for Q, dO, lse, delta of x; start copies of x + 1; the steps of the pair
#include "sm80/backward_pair.cuh"

static_assert(kPairsEnd + 128 == kSharedBytes, "the launch gives as much, and room to align");
static_assert(2 * kBlockQ <= kThreads, "a thread fetches one of lse or delta");

struct Backward : Pair {
  float fetched;      // lse or -delta of the next tile

  CF_DEVICE void fetch_stats(i32 x) {
    const i32 me = thread_index(), i = pass.at(x).row + me % kBlockQ, head = pass.at(x).head;
    if (me < kBlockQ) fetched = -negative_lse_of(p, pass.item, head, i, pass.sight.q_length);
    if (me / kBlockQ != 1) return;
    const float* row_delta = static_cast<const float*>(p.call.row_delta) + row_number(p, pass.item, head, i);
    fetched = i < pass.sight.q_length ? -*row_delta : 0.0f;
  }

  // Walks all queries; `acc` is dv in the first warp of a pair and dk in the second.
  CF_DEVICE void walk(Accumulator& acc, bool first_of_pair) {
    CF_UNROLL_1
    for (u32 loop = 0; loop < points(p.loop); ++loop) {
      block_barrier();        // nobody reads the pass, the keys and the tiles of the item before any more
      if (thread_index() == 0) pass.begin(p, loop);
      block_barrier();        // the pass is there
      if (pass.tiles == 0) continue;
      begin_keys();
      CF_UNROLL_1
      for (i32 x = -1; x < pass.tiles; ++x) {
        if (x >= 0 && thread_index() < 2 * kBlockQ) st_shared_32(row_stats(x) + thread_index() * 4, bits_of(fetched));
        cp_async_wait_group<0>();
        block_barrier();        // tile x is there for everyone; nobody reads the one before any more
        if (x + 1 < pass.tiles) {
          if (first_of_pair) load_queries(x + 1);
          fetch_stats(x + 1);
        }
        cp_async_commit_group();
        if (thread_index() == kThreads / 2 && x + 2 < pass.tiles) pass.begin_tile(p, x + 2);
        if (x < 0) continue;
        if (kKeysInRegisters && x == 0) hold_keys(first_of_pair);
        const bool whole = sees_whole(x);
        CF_UNROLL_1
        for (i32 step_row = 0; step_row < kBlockQ; step_row += kStep) {
          if (first_of_pair) give_weights(acc, x, step_row, whole);
          else take_weights(acc, x, step_row, whole, [] {}, [](const Weighted&) {});
        }
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_backward_kv(const Params p) {
  u8* const storage = &shared_storage<u8>();
  const u32 shared = tile_address(shared_address(storage));
  Pass& pass = *reinterpret_cast<Pass*>(storage + (shared - shared_address(storage)) + kAtPass);
  if (thread_index() == 0) {
    pass.turned = false;
    pass.work = place_of(p, block_index(), false);
  }
  const i32 warp = uniform(warp_index());
  Backward backward{{p, pass, shared, warp % kPairs}};
  Accumulator acc;
  clear(acc);
  backward.walk(acc, warp < kPairs);
  backward.finish(acc, warp < kPairs);
}
