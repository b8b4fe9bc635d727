// core/block.cuh on a CPU.
#pragma once
#include "core/emulate/engine.cuh"

namespace emulate {

CF_UNANNOUNCED inline Thread who() { return *self; }

}  // namespace emulate

CF_DEVICE u32 thread_index() { return emulate::who().index; }
CF_DEVICE u32 block_index() { return emulate::who().block; }
CF_DEVICE u32 lane_index() { return emulate::who().index % 32; }
CF_DEVICE u32 warp_index() { return emulate::who().index / 32; }

template <class T> CF_DEVICE T& shared_storage() { return *reinterpret_cast<T*>(emulate::shared_memory(sizeof(T))); }

CF_DEVICE void block_barrier(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulate::wait_for_block({"block_barrier", file, line});
}
CF_DEVICE void warp_barrier(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulate::wait_for_warp_in_order({"warp_barrier", file, line});
}

template <class T> CF_DEVICE T* in_global(T* p) { return p; }
CF_DEVICE u32 uniform(u32 x) { return x; }
CF_DEVICE i32 uniform(i32 x) { return x; }
CF_DEVICE long long opaque(long long x) { return x; }
CF_DEVICE double unbranched(double x) { return x; }
CF_DEVICE u32 unbranched(u32 x) { return x; }
