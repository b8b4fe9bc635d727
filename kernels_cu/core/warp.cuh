// Hardware words of a warp: exchange of registers. Every lane of the warp calls them together.
#pragma once
#include "core/block.cuh"
#include "core/types.cuh"

#ifdef CUPYFLASH_EMULATE
#include "core/emulate/warp.cuh"
#else

CF_DEVICE float shuffle_xor(float x, u32 mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }    // x of lane ^ mask
CF_DEVICE u32 shuffle_xor(u32 x, u32 mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }        // x of lane ^ mask
CF_DEVICE double shuffle_xor(double x, u32 mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }  // x of lane ^ mask
CF_DEVICE u32 shuffle(u32 x, u32 lane) { return __shfl_sync(0xffffffffu, x, lane); }                // x of that lane
CF_DEVICE float shuffle(float x, u32 lane) { return __shfl_sync(0xffffffffu, x, lane); }            // x of that lane
CF_DEVICE double shuffle(double x, u32 lane) { return __shfl_sync(0xffffffffu, x, lane); }          // x of that lane

#endif

// The words a of lanes without the bit `mask` and the words b of those with it stay, the others change places.
CF_DEVICE void exchange(u32& a, u32& b, u32 mask) {
  const bool high = (lane_index() & mask) != 0;
  const u32 got = shuffle_xor(high ? a : b, mask);
  if (high) a = got; else b = got;
}
