// After a backward that hands gradients of queries on: the gradient from its sums (attn/backward_rows.cuh); a block for
// kRowUnit rows of one owner, all items that it was broadcast over added in order; a warp for 16 of the rows.
//
// Sums are p.splits columns wide: entry 2 h + x of float4 number 128 j + t is row 16 (t / 32) + 8 h + t % 32 / 4,
// column 8 j + 2 (t % 4) + x. Four lanes hold the same rows: they exchange columns, so that each writes eight
// neighbours.
#include "attn/query_sums.cuh"
#include "core/block.cuh"

constexpr i32 kFinishThreads = 256, kAtOnce = 8;      // float4 of a lane at once: 64 columns
static_assert(kFinishThreads / 32 * 16 == kRowUnit, "a warp for 16 rows");

CF_DEVICE bool any_key_is_seen(const Params& p, const Item& item, i32 row) {
  const Interval keys = visibility_of(p, item).keys_of_some(row, row + kRowBlock);
  return keys.start < keys.stop;
}

using Sums = Packed<float, 4>[kAtOnce];

// Rows lane / 4 and 8 more of the warp's 16, 64 columns from `col`, element by element.
CF_DEVICE void store_elements(const Params& p, const Sums& sums, i64 base, i32 row, i32 col, float scale) {
  CF_UNROLL
  for (int n = 0; n < 4 * kAtOnce; ++n) {
    const i32 i = row + n / 2 % 2 * 8, c = col + n / 4 * 8 + i32(lane_index()) % 4 * 2 + n % 2;
    if (i >= p.seqlen_q || c >= p.head_dim) continue;
    const i64 at = base + i * p.dq.row + c * p.dq.col;
    const float x = times(sums[n / 4].value[n % 4], scale);
    store_kind(p.call.dq, p.dq_kind, at, p.accumulate ? x + load_kind<float>(p.call.dq, p.dq_kind, at) : x);
  }
}

// The same, eight columns a lane at once.
CF_DEVICE void store_rows(const Params& p, const Sums& sums, const Rows<Element>& rows, i32 row, i32 col, float scale) {
  CF_UNROLL
  for (int from = 0; from < kAtOnce; from += 4) {
    u32 words[2][4];
    to_rows(words, sums + from, scale);
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      exchange_columns(words[h]);
      const i32 i = row + 8 * h, c = col + 8 * (from + i32(lane_index()) % 4);
      if (i < p.seqlen_q && c < p.head_dim) st_global_128(rows.at(i, c), words[h]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kFinishThreads, 2) cupyflash_finish_queries(const Params p) {
  const u32 units = ceil_div(p.seqlen_q, kRowUnit), matrix = block_index() / units;
  const i32 head = i32(matrix % u32(p.heads_q)), cols = p.splits;
  const i32 warp = i32(thread_index()) / 32, lane = i32(lane_index());
  const i32 block = i32(block_index() % units) * kRowUnit + warp / 4 * kRowBlock;
  const i32 row = block + warp % 4 * 16 + lane / 4;
  if (block >= p.seqlen_q) return;
  const u32 owner = matrix / u32(p.heads_q), items = points(p.loop);
  const Item first = item_at(p, owner, 0);
  const Rows<Element> rows = rows_of<Element>(p.call.dq, p.dq, first, head);
  const bool packed = p.dq_kind == KindOf<Element>::value && !p.accumulate && rows.packed<8>() && p.head_dim % 8 == 0;
  const float scale = float(p.call.scale);
  CF_UNROLL_1
  for (i32 col = 0; col < p.head_dim; col += 8 * kAtOnce) {
    Sums sums = {};
    CF_UNROLL_1
    for (u32 loop = 0; loop < items; ++loop) {
      const Item item = loop == 0 ? first : item_at(p, owner, loop);
      if (!any_key_is_seen(p, item, block)) continue;
      const i32 own = (warp % 4 * 32 + lane) * 4;
      const float* from = dq_sums_of(p, item, head, cols) + i64(block) * cols + col * kRowBlock + own;
      CF_UNROLL
      for (int n = 0; n < kAtOnce; ++n) {
        if (col + 8 * n >= cols) continue;
        const Packed<float, 4> found = *reinterpret_cast<const Packed<float, 4>*>(from + n * 512);
        CF_UNROLL
        for (int x = 0; x < 4; ++x) sums[n].value[x] += found.value[x];
      }
    }
    if (packed) store_rows(p, sums, rows, row, col, scale);
    else store_elements(p, sums, lead_offset(p.dq.lead, first) + p.dq.head * head, row, col, scale);
  }
}
