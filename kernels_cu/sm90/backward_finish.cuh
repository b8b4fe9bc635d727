// Sums of queries become gradients, by the blocks that have no more work while others still have some.
//
// Each warp of the consumers takes blocks of kRowBlock rows by ticket, about in the order in which their sums are
// complete. Who waits for sums waits for blocks that have started.
#pragma once
#include "attn/query_sums.cuh"
#include "sm90/backward_work.cuh"

enum Finish : i32 { kFinishedLater = 0, kDownward = 1, kUpward = 2 };      // in which order sums of a head are complete

constexpr i32 kFinishTicket = kTickets - 1;

// A block of rows of one head.
struct RowsToFinish {
  Item item;
  i32 head, row;

  CF_DEVICE RowsToFinish(const Params& p, const Launch& launch, u32 ticket) {
    const u32 blocks = ceil_div(p.seqlen_q, kRowBlock), items = points(p.loop), group = launch.group;
    const u32 of_head = blocks * items * group, of_heads = of_head * launch.side_by_side;      // of kv heads
    const u32 first = ticket / of_heads * launch.side_by_side, size = smaller(launch.heads - first, u32(launch.side_by_side));
    const u32 owner = first + ticket % of_heads % size, rest = ticket % of_heads / size;
    const u32 own_head = launch.finish == kUpward ? rest % group : rest / blocks % group;
    const u32 loop = launch.finish == kUpward ? rest / group % items : rest / blocks / group;
    item = item_at(p, owner / u32(p.heads_kv), loop);
    head = i32(owner % u32(p.heads_kv) * group + own_head);
    row = kRowBlock * i32(launch.finish == kUpward ? rest / group / items : blocks - 1 - rest % blocks);
  }
};

// 16 rows of the block at `to`, from the lane's sums.
CF_DEVICE void store_finished(const Params& p, const Packed<float, 4> (&sums)[kHeadDim / 8], const Rows<Element>& to,
                              bool packed, i32 row, float scale, i32 lane) {
  CF_UNROLL
  for (int from = 0; from < kHeadDim / 8; from += 4) {
    u32 words[2][4];
    to_rows(words, sums + from, scale);
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      exchange_columns(words[h]);
      const i32 i = row + lane / 4 + 8 * h, col = (from + lane % 4) * 8;
      if (i >= p.seqlen_q) continue;
      if (packed && col < p.head_dim) st_global_128(to.at(i, col), words[h]);
      CF_UNROLL
      for (int n = 0; n < 8; ++n) {
        if (!packed && col + n < p.head_dim) *to.at(i, col + n) = Element{u16(words[h][n / 2] >> n % 2 * 16)};
      }
    }
  }
}

CF_DEVICE void finish_block(const Params& p, const Launch& launch, const RowsToFinish& rows, i32 lane) {
  const Visibility sight = visibility_of(p, rows.item);
  const Interval seen = sight.keys_of_some(rows.row, rows.row + kRowBlock);
  if (seen.start < seen.stop) {
    const i32 tile = rows.row / kBlockQ;
    const Interval keys = sight.keys_of_some(tile * kBlockQ, tile * kBlockQ + kBlockQ);
    const u32 shares = (keys.stop - 1) / kBlockKV - keys.start / kBlockKV + 1;
    wait_for_count(turns_of(p, rows.item, rows.head) + tile, shares + (launch.queries == kInAnyOrder));
  }
  const Rows<Element> to = rows_of<Element>(p.call.dq, p.dq, rows.item, rows.head);
  const bool packed = to.packed<8>() && p.head_dim % 8 == 0;
  const float* from = dq_sums_of(p, rows.item, rows.head, kHeadDim) + i64(rows.row) * kHeadDim + lane * 4;
  CF_UNROLL_1
  for (i32 part = 0; part < kRowBlock / 16; ++part) {
    Packed<float, 4> sums[kHeadDim / 8] = {};
    if (seen.start < seen.stop) {
      CF_UNROLL
      for (int n = 0; n < kHeadDim / 8; ++n) {
        sums[n] = *reinterpret_cast<const Packed<float, 4>*>(in_global(from) + part * 128 + n * 512);
      }
    }
    store_finished(p, sums, to, packed, rows.row + 16 * part, launch.scale, lane);
  }
}

CF_DEVICE void finish_rows(const Params& p, const Launch& launch) {
  if (launch.finish == kFinishedLater) return;
  const i32 lane = i32(lane_index());
  const u32 blocks = ceil_div(p.seqlen_q, kRowBlock) * points(p.loop) * launch.group * launch.heads;
  CF_UNROLL_1
  while (true) {
    u32 ticket = 0;
    if (lane == 0) ticket = atom_inc(static_cast<u32*>(p.call.turns) + kFinishTicket);
    ticket = shuffle(ticket, 0);
    if (ticket >= blocks) return;
    finish_block(p, launch, RowsToFinish(p, launch, ticket), lane);
  }
}
