// After the sm90 backward: the gradient of queries from its sums (attn/backward_rows.cuh); a block for kRowBlock rows of
// one owner, all items that it was broadcast over added in order.
//
// A block of sums is p.splits columns wide: entry 2 h + x of float4 number 128 j + t is row 16 (t / 32) + 8 h + t % 32 / 4,
// column 8 j + 2 (t % 4) + x. Up to 128 columns at a time go through shared memory, so that rows are written in one piece.
#include "attn/backward_rows.cuh"
#include "core/block.cuh"

constexpr i32 kFinishThreads = 256, kCols = 128, kPitch = kCols + 4;
static_assert(kSharedBytes == kRowBlock * kPitch * 4, "the launch gives what the kernel uses");

CF_DEVICE bool any_key_is_seen(const Params& p, const Item& item, i32 row) {
  const Interval keys = visibility_of(p, item).keys_of_some(row, row + kRowBlock);
  return keys.start < keys.stop;
}

// Eight scaled columns of a row; columns from `count` on are none.
CF_DEVICE void store_eight(const Params& p, i64 index, i32 count, bool packed, const float* from) {
  const float scale = float(p.call.scale);
  if (packed && count >= 8) {
    const auto *low = reinterpret_cast<const Packed<float, 4>*>(from), *high = low + 1;
    Packed<Element, 8> rounded;
    CF_UNROLL
    for (int n = 0; n < 8; ++n) rounded.value[n] = convert<Element>(times((n < 4 ? *low : *high).value[n % 4], scale));
    *reinterpret_cast<Packed<Element, 8>*>(static_cast<Element*>(p.call.dq) + index) = rounded;
    return;
  }
  for (i32 n = 0; n < smaller(count, 8); ++n) {
    const i64 at = index + n * p.dq.col;
    const float x = times(from[n], scale);
    store_kind(p.call.dq, p.dq_kind, at, p.accumulate ? x + load_kind<float>(p.call.dq, p.dq_kind, at) : x);
  }
}

extern "C" __global__ void __launch_bounds__(kFinishThreads) cupyflash_finish_queries(const Params p) {
  float* tile = &shared_storage<float>();
  const u32 blocks = ceil_div(p.seqlen_q, kRowBlock), matrix = block_index() / blocks;
  const i32 head = i32(matrix % u32(p.heads_q)), row = i32(block_index() % blocks) * kRowBlock, cols = p.splits;
  const u32 own = matrix / u32(p.heads_q), items = points(p.loop);
  const i32 t = i32(thread_index()) % 128, own_row = t / 32 * 16 + t % 32 / 4;
  const Item first = item_at(p, own, 0);
  const Rows<Element> rows = rows_of<Element>(p.call.dq, p.dq, first, head);
  const bool packed = p.dq_kind == KindOf<Element>::value && !p.accumulate && rows.packed<8>();
  const i64 base = lead_offset(p.dq.lead, first) + p.dq.head * head;
  CF_UNROLL_1
  for (i32 start = 0; start < smaller(cols, p.head_dim); start += kCols) {
    Packed<float, 4> sums[kCols / 16] = {};
    CF_UNROLL_1
    for (u32 loop = 0; loop < items; ++loop) {
      const Item item = item_at(p, own, loop);
      if (!any_key_is_seen(p, item, row)) continue;
      const float* from = dq_sums_of(p, item, head, cols) + i64(row) * cols + start * 64 + thread_index() * 4;
      CF_UNROLL
      for (int n = 0; n < kCols / 16; ++n) {
        if (start + 16 * n >= cols) continue;
        const Packed<float, 4> found = *reinterpret_cast<const Packed<float, 4>*>(from + n * 1024);
        CF_UNROLL
        for (int x = 0; x < 4; ++x) sums[n].value[x] += found.value[x];
      }
    }
    block_barrier();       // the columns before have been read
    CF_UNROLL
    for (int n = 0; n < kCols / 16; ++n) {
      float* to = tile + own_row * kPitch + 16 * n + thread_index() / 128 * 8 + t % 4 * 2;
      *reinterpret_cast<Packed<float, 2>*>(to) = {{sums[n].value[0], sums[n].value[1]}};
      *reinterpret_cast<Packed<float, 2>*>(to + 8 * kPitch) = {{sums[n].value[2], sums[n].value[3]}};
    }
    block_barrier();       // the columns are there
    const i32 chunks = smaller(cols - start, kCols) / 8;
    CF_UNROLL_1
    for (i32 n = thread_index(); n < kRowBlock * chunks; n += kFinishThreads) {
      const i32 r = n / chunks, col = n % chunks * 8;
      if (row + r >= p.seqlen_q) break;
      store_eight(p, base + (row + r) * p.dq.row + (start + col) * p.dq.col, p.head_dim - start - col, packed, tile + r * kPitch + col);
    }
  }
}
