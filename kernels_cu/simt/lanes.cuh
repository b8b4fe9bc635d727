// How a block's threads share a score tile, and in which order rows of a tile lie in shared memory.
//
// Threads form a grid of kLanesY x kLanesX. In a product of two tiles, thread (y, x) computes rows y + n * kLanesY
// and columns x + n * kLanesX: these numbers are *slots*, the places of rows in shared memory. Slots are a
// permutation of the sequence such that the elements of one thread are whole dropout groups (attn/dropout.cuh):
// consecutive slots, not consecutive rows, belong to consecutive lanes, and reads stay free of bank conflicts.
//
// In a warp, y takes bit 1 (and 3) of the lane and x the others. Lanes that differ in bit 0 then share a row and lanes
// that differ in bit 1 share a column, and a 16-byte load of either costs two wavefronts instead of four.
#pragma once
#include "core/block.cuh"
#include "core/warp.cuh"

constexpr i32 kLanesY = kThreads / kLanesX;
constexpr i32 kWarpLanesY = 32 / kLanesX;
constexpr i32 kVec = 16 / sizeof(Score);            // scores in a 16-byte load
static_assert(kLanesX == 8 || kLanesX == 16, "a warp is 4 x 8 or 2 x 16");
static_assert(kThreads % 32 == 0, "whole warps");

CF_DEVICE i32 lane_x() {
  const i32 lane = lane_index();
  if (kLanesX == 8) return (lane & 1) | (lane >> 1 & 2) | (lane >> 2 & 4);
  return (lane & 1) | (lane >> 1 & 14);
}

CF_DEVICE i32 lane_y() {
  const i32 lane = lane_index(), first = warp_index() * kWarpLanesY;
  return first + (kLanesX == 8 ? (lane >> 1 & 1) | (lane >> 2 & 2) : lane >> 1 & 1);
}

// Reduction over the threads of one row, all in one warp. The order is fixed.
struct RowLanes {
  template <class Op> static CF_DEVICE Score reduce(Score x, Op op) {
    x = op(x, shuffle_xor(x, 1));
    x = op(x, shuffle_xor(x, 4));
    if (kLanesX == 16) x = op(x, shuffle_xor(x, 8));
    return op(x, shuffle_xor(x, 16));
  }
  static CF_DEVICE Score max(Score x) {
    return reduce(x, [](Score a, Score b) { return maximum(a, b); });
  }
  static CF_DEVICE Score sum(Score x) {
    return reduce(x, [](Score a, Score b) { return a + b; });
  }
};

// Query in slot s when kLanes lanes share the tile's queries: lane l has l % 8 + 16 * (l / 8) and that plus 8, ...
template <i32 kLanes> struct QuerySlots {
  static_assert(kLanes % 8 == 0, "a dropout group spans rows i and i + 8");
  static CF_DEVICE i32 index(i32 slot) {
    const i32 lane = slot % kLanes, n = slot / kLanes;
    return 16 * (lane / 8 + kLanes / 8 * (n / 2)) + 8 * (n % 2) + lane % 8;
  }
};

// Key in slot s: lane l has the pair at 2 * (l % 4) + 16 * (l / 4), that pair plus 8, ...
template <i32 kLanes> struct KeySlots {
  static_assert(kLanes % 4 == 0, "a dropout group spans columns j, j + 1, j + 8, j + 9");
  static CF_DEVICE i32 index(i32 slot) {
    const i32 lane = slot % kLanes, n = slot / kLanes;
    return 16 * (lane / 4 + kLanes / 4 * (n / 4)) + 8 * (n / 2 % 2) + 2 * (lane % 4) + n % 2;
  }
};
