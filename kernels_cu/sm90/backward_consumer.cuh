// What the consumers of both backward kernels have in common: who they are, and the walk over work, heads and tiles.
#pragma once
#include "core/warp.cuh"
#include "sm90/backward_bias.cuh"
#include "sm90/backward_products.cuh"
#include "sm90/backward_store.cuh"

struct ConsumerBase {
  const Params& p;
  const Launch& launch;
  Control& control;
  i32 number, thread;                      // of the consumer, of the thread in its warpgroup
  u32 tiles;
  Ring<2> slot;
  Ring<kStages> ring;

  CF_DEVICE const Work& work() const { return control.work[slot.stage()]; }
  CF_DEVICE const QueryTile& place() const { return control.query_tiles[ring.number % 4]; }
  CF_DEVICE bool at_last() const { return ring.number + 1 == work().end; }
  CF_DEVICE bool leader() const { return thread == 0; }
  CF_DEVICE void meet() const { bar_sync(1, 256); }
  CF_DEVICE void barrier_of_warpgroup() const { bar_sync(8 + number, 128); }

  // Rows past a length are zeroed: a weight of zero times a NaN there would be NaN. Both consumers write all of them.
  template <i32 kRows> CF_DEVICE void clear_rows(u32 tile, i32 rows) const {
    CF_UNROLL_1
    for (i32 n = rows * 8 + i32(opaque(thread)); n < kRows * 8; n += 128) {
      CF_UNROLL
      for (i32 panel = 0; panel < kPanels; ++panel) st_shared_128(tile + panel * kRows * 128 + n * 16, {0, 0, 0, 0});
    }
  }
  // Of the tile at that place of the pipeline, whose queries are there.
  CF_DEVICE void clear_queries(const Ring<kStages>& at) const {
    clear_queries(at.stage(), at.parity(), work().sight.q_length, control.query_tiles[at.number % 4].tile);
  }
  CF_DEVICE void clear_queries(u32 stage, u32 parity, i32 q_length, i32 tile) const {
    const i32 live = q_length - tile * kBlockQ;
    if (live >= kBlockQ || q_length == p.seqlen_q) return;      // TMA's zeros need no help
    mbarrier_try_wait_parity(barrier(control.q_ready, stage), parity);
    if (!kTogether) mbarrier_try_wait_parity(barrier(control.o_ready, stage), parity);
    clear_rows<kBlockQ>(tiles + kQAt + stage * kQueryBytes, live);
    clear_rows<kBlockQ>(tiles + kOAt + stage * kQueryBytes, live);
    fence_proxy_async();
    meet();
  }
  CF_DEVICE void clear_keys(i32 rows) const {
    if (rows >= kBlockKV || work().tile * kBlockKV + rows == p.seqlen_k) return;
    clear_rows<kBlockKV>(tiles + kKAt, rows);
    clear_rows<kBlockKV>(tiles + kVAt, rows);
    fence_proxy_async();
    meet();
  }

  // The tile that comes next: in this piece of work, or as its first.
  CF_DEVICE QueryTile next_place() const { return work().round.after(place()); }
  CF_DEVICE QueryTile first_place() const { return {work().head_kv * launch.group, work().round.start}; }

  // Mask and bias of a tile and of the warp's keys, from number `key` of the key tile on; what lay there has been read.
  CF_DEVICE void fetch(const AddendTile& addends, const QueryTile& tile, i32 key) const {
    if constexpr (kMaskOrBias) {
      const i32 own = i32(opaque(thread)), col = work().tile * kBlockKV + key + own / 32 * kAddendKeys;
      warp_barrier();                      // all lanes have read
      addends.fetch(p, addends_of(p, work().item, tile.head), tile.tile * kBlockQ, col, own % 32);
    }
  }

  // The gradient of a bias, of the consumer's keys from number `key` on: of float32, as soon as there is dA; else from
  // where dA lies; of tiles that no query sees.
  CF_DEVICE bool writes_bias(bool wide) const {
    return kWritesBias && p.call.dbias != nullptr && (p.dbias_kind == kFloat32) == wide;
  }
  CF_DEVICE void store_bias_entries(const Scores& ds, const Place& at) const {
    if (writes_bias(true)) store_wide(ds, p, work().item, at.head, at.query, at.key);
  }
  template <class T> CF_DEVICE BiasGradient<T> bias_gradient(i32 head, i32 key, i32 own) const {
    return BiasGradient<T>(p, work().item, head, work().tile * kBlockKV + key + own / 32 * kAddendKeys, own % 32);
  }
  CF_DEVICE void store_bias_tile(i32 key, i32 head, i32 row, u32 from) const {
    if (!writes_bias(false)) return;
    const i32 own = i32(opaque(thread));
    bias_gradient<Element>(head, key, own).store_tile(row, from + (key + own / 32 * kAddendKeys) * 128, own % 32);
  }
  template <class T> CF_DEVICE void clear_bias(i32 key) const {
    const i32 own = i32(opaque(thread));
    CF_UNROLL_1
    for (i32 head = work().head_kv * launch.group; head < (work().head_kv + 1) * launch.group; ++head) {
      const BiasGradient<T> gradient = bias_gradient<T>(head, key, own);
      gradient.clear_rows(0, work().any() ? work().round.first * kBlockQ : p.seqlen_q, own % 32);
      if (work().any()) gradient.clear_rows((work().round.last + 1) * kBlockQ, p.seqlen_q, own % 32);
    }
  }
  CF_DEVICE void clear_unseen_bias(i32 key) const {
    if (writes_bias(true)) clear_bias<float>(key);
    if (writes_bias(false)) clear_bias<Element>(key);
  }

  // Where the thread stores dA of a tile at `to`; of the consumer's keys the first in the tile is that of number `key`.
  CF_DEVICE u32 place_of_gradients(u32 to, i32 key) const {
    const u32 own = u32(opaque(thread)), lane = own % 32, row = key + own / 32 * 16 + lane % 16;
    return to + row * 128 + ((lane / 16) ^ (lane % 8)) * 16;
  }
  CF_DEVICE void store_gradients(const Operand& ds, u32 to, i32 key) const { store_gradients(ds, place_of_gradients(to, key)); }
  CF_DEVICE void store_gradients(const Operand& ds, u32 at) const {
    CF_UNROLL
    for (int n = 0; n < kBlockQ / 16; ++n) {
      stmatrix_x4((at ^ (n % 4 * 32)) + n / 4 * (kBlockKV * 128), ds[4 * n], ds[4 * n + 1], ds[4 * n + 2], ds[4 * n + 3]);
    }
    fence_proxy_async();
  }

  // Of every piece of work: steps.query_tiles(); steps.store() where it closes.
  template <class Steps> CF_DEVICE void walk(Steps& steps) {
    steps.clear();
    CF_UNROLL_1
    while (true) {
      mbarrier_try_wait_parity(barrier(control.work_ready, slot.stage()), slot.parity());
      if (work().tile < 0) break;
      if (work().any()) {
        mbarrier_try_wait_parity(shared_address(&control.k_ready), work().before % 2);
        mbarrier_try_wait_parity(shared_address(&control.v_ready), work().before % 2);
        clear_keys(work().sight.kv_length - work().tile * kBlockKV);
      }
      steps.query_tiles();
      if (work().closes) steps.store(), steps.clear();
      barrier_of_warpgroup();              // `work` has been read
      if (leader()) mbarrier_arrive(barrier(control.work_free, slot.stage()));
      slot.advance();
    }
  }
};
