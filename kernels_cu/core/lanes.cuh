// Reductions over lanes of a warp, in a fixed order.
#pragma once
#include "core/numeric.cuh"
#include "core/warp.cuh"

// Of the lanes whose numbers differ in the bits kFirst, 2 kFirst, ... below kEnd alone; all of them get the result.
template <u32 kFirst, u32 kEnd> struct Lanes {
  template <class T, class Op> static CF_DEVICE T reduce(T x, Op op) {
    CF_UNROLL
    for (u32 mask = kFirst; mask < kEnd; mask *= 2) x = op(x, shuffle_xor(x, mask));
    return x;
  }
  template <class T> static CF_DEVICE T max(T x) {
    return reduce(x, [](T a, T b) { return maximum(a, b); });
  }
  template <class T> static CF_DEVICE T sum(T x) {
    return reduce(x, [](T a, T b) { return a + b; });
  }
};

// The four neighbours that share a row of an accumulator of mma or wgmma.
using QuadLanes = Lanes<1, 4>;
