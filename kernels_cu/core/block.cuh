// Hardware words of a thread block: who am I, shared memory, barriers.
#pragma once
#include "core/types.cuh"

#ifdef CUPYFLASH_EMULATE
#include "core/emulate/block.cuh"
#else

CF_DEVICE u32 thread_index() { return threadIdx.x; }             // number of this thread in its block
CF_DEVICE u32 block_index() { return blockIdx.x; }               // number of this block in the grid; only x is used
CF_DEVICE u32 lane_index() { return threadIdx.x % 32; }          // number of this thread in its warp
CF_DEVICE u32 warp_index() { return threadIdx.x / 32; }          // number of this warp in its block

// The block's dynamic shared memory, seen as one T; the launch gives sizeof(T) bytes. 16-byte aligned.
template <class T> CF_DEVICE T& shared_storage() {
  extern __shared__ __align__(16) char dynamic_shared_memory[];
  return *reinterpret_cast<T*>(dynamic_shared_memory);
}

CF_DEVICE void block_barrier() { __syncthreads(); }              // all threads of the block; orders shared memory
CF_DEVICE void warp_barrier() { __syncwarp(); }                  // all 32 lanes of the warp; orders shared memory

// x of lane 0, and of every lane: what is computed from it alone may stay in registers that a warp shares.
CF_DEVICE u32 uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }
CF_DEVICE i32 uniform(i32 x) { return __shfl_sync(0xffffffffu, x, 0); }

// p, known to point to global memory: kept in shared memory it would be read by slower generic loads.
template <class T> CF_DEVICE T* in_global(T* p) {
  __builtin_assume(__isGlobal(p));
  return p;
}

// x, of which the optimiser knows nothing: what is computed from it stays where it is used, instead of being computed
// before a loop and holding registers through it.
CF_DEVICE i64 opaque(i64 x) {
  asm volatile("" : "+l"(x));
  return x;
}

// x, computed here and not in a branch that a later choice might make.
CF_DEVICE double unbranched(double x) {
  asm volatile("" : "+d"(x));
  return x;
}
CF_DEVICE u32 unbranched(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

#endif
