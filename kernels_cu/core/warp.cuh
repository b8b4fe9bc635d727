// Hardware words of a warp: exchange of registers. Every lane of the warp calls them together.
#pragma once
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
