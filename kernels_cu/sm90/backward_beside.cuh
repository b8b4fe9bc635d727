// Sums of queries become gradients beside the products, by a warp of those that serve the consumers.
//
// TMA brings a block of sums; the warp rounds 16 rows and 32 columns of it at a time and turns them into rows where their
// sums have been. It has few registers, and beside wgmma an instruction costs about 5 clk.
#pragma once
#include "sm90/backward_feed.cuh"

constexpr u32 kSumsBytes = kBeside ? kRowBlock * kHeadDim * 4 : 0, kSumsAt = kSharedBytes - 1024 - kSumsBytes;
constexpr u32 kColumnsBytes = kRowBlock * 32;      // of eight columns of the block

// Waits for the sums of the next block and has them fetched, if there are any. By one thread.
CF_DEVICE void fetch_sums(Control& control, const Launch& launch) {
  const Unit& unit = control.unit;
  control.block = launch.finish == kUpward ? control.blocks : unit.blocks - 1 - control.blocks;
  control.blocks += 1;
  const i32 row = unit.row + control.block * kRowBlock;
  const u32 there = shared_address(&control.sums_there);
  control.has_sums = has_sums(unit, row);
  if (!control.has_sums) return mbarrier_arrive(there);
  wait_for_sums(unit, launch, row);
  fence_proxy_async_global();              // the others' shares come first
  mbarrier_arrive_expect_tx(there, kSumsBytes);
  cp_async_bulk_load(shared_tiles() + kSumsAt, unit.sums + control.block * (kRowBlock * kHeadDim), kSumsBytes, there);
}

CF_DEVICE void clear_sums(u32 lane) {
  CF_UNROLL_1
  for (u32 at = lane * 16; at < kSumsBytes; at += 512) st_shared_128(shared_tiles() + kSumsAt + at, {0, 0, 0, 0});
  warp_barrier();
}

// 16 rows and 32 columns, of which the lane reads its sums at `from`. Rows of 64 bytes take the place of the first two
// times eight columns, eight rows each, chunks of 16 bytes swizzled: `to` is where the lane's row of a matrix goes.
CF_DEVICE void turn_into_rows(u32 from, u32 to, float scale) {
  CF_UNROLL
  for (int half = 0; half < 2; ++half) {
    u32 words[4];
    CF_UNROLL
    for (int n = 0; n < 2; ++n) {
      u32 x[4];
      ld_shared_128(x, from + (2 * half + n) * kColumnsBytes);
      words[2 * n] = cvt_rn_x2<Element>(times(float_of(x[0]), scale), times(float_of(x[1]), scale));
      words[2 * n + 1] = cvt_rn_x2<Element>(times(float_of(x[2]), scale), times(float_of(x[3]), scale));
    }
    if (half == 0) warp_barrier();         // all lanes have read what gives its place
    stmatrix_x4(to ^ half * 32, words[0], words[1], words[2], words[3]);
  }
  warp_barrier();                          // all lanes have written
}

// 32 columns of the block whose sums are there, from `col` on.
CF_DEVICE void finish_columns(const Params& p, const Launch& launch, const Control& control, i32 col) {
  const u32 lane = u32(opaque(thread_index())) % 32;
  u32 from = shared_tiles() + kSumsAt + col / 8 * kColumnsBytes + lane * 16;
  u32 to = from - lane * 16 + lane / 8 % 2 * kColumnsBytes + lane % 8 * 64 + ((lane / 16) ^ (lane % 8 / 2)) * 16;
  u32 own = from - lane * 16 + lane / 4 * 64 + (lane % 4 ^ lane / 8) * 16;
  const i32 row = control.unit.row + control.block * kRowBlock + i32(lane / 4);
  i32 left = col + i32(lane % 4) * 8 < p.head_dim ? p.seqlen_q - row : 0;
  Element* rows = control.unit.to.base + (row * p.dq.row + col + lane % 4 * 8);
  CF_UNROLL_1
  for (i32 part = 0; part < kRowBlock / 16; ++part) {
    turn_into_rows(from, to, launch.scale);
    CF_UNROLL
    for (i32 h = 0; h < 2; ++h) {
      u32 words[4];
      ld_shared_128(words, own + h * kColumnsBytes);
      if (left > 8 * h) st_global_128(rows, words);
      rows += 8 * opaque(p.dq.row);
    }
    from += 512, to += 512, own += 512, left -= 16;
  }
}

// Whether eight columns of any row of dq may be stored at once.
CF_DEVICE bool is_packed(const Params& p) {
  i64 all = p.dq.row | p.dq.head | p.head_dim;
  CF_UNROLL
  for (i32 axis = 0; axis < kLeadAxes; ++axis) all |= p.dq.lead[axis];
  return p.dq.col == 1 && all % 8 == 0 && reinterpret_cast<i64>(p.call.dq) % 16 == 0;
}

// By a whole warp; rows of odd layouts are left to the consumers.
CF_DEVICE void finish_beside(const Params& p, const Launch& launch, Control& control) {
  if (launch.finish == kFinishedLater || !is_packed(p)) return;
  CF_UNROLL_1
  while (true) {
    warp_barrier();                        // all lanes have read the unit before
    if (thread_index() % 32 == 0) take_unit(control.unit, p, launch), control.blocks = 0;
    warp_barrier();
    if (control.unit.blocks == 0) return;
    CF_UNROLL_1
    while (control.blocks < control.unit.blocks) {
      warp_barrier();                      // all lanes have looked
      if (opaque(thread_index()) % 32 == 0) fetch_sums(control, launch);
      warp_barrier();
      mbarrier_try_wait_parity(shared_address(&control.sums_there), control.fetched.parity());
      if (!control.has_sums) clear_sums(u32(opaque(thread_index())) % 32);
      CF_UNROLL_1
      for (i32 col = 0; col < kHeadDim; col += 32) finish_columns(p, launch, control, col);
      fence_proxy_async();                 // TMA writes there next
      warp_barrier();
      if (opaque(thread_index()) % 32 == 0) control.fetched.advance();
    }
  }
}
