// Instructions that exist from sm_90 on: one function, one instruction (or one loop around a try), under its own name.
// wgmma itself is generated, one wrapper per shape and element type: cupyflash/cuda/wgmma.py. Shared memory is named by
// 32-bit addresses within the block's window.
#pragma once
#include "core/ptx_sm80.cuh"

#ifdef CUPYFLASH_EMULATE
#include "core/emulate/ptx_sm90.cuh"
#else

// A TMA descriptor, made by the driver on the host; lives in the kernel's parameters alone.
struct alignas(64) TensorMap { u64 opaque[16]; };

// Number of this warpgroup in its block. The shuffle makes it uniform for the compiler: what is computed from it may
// live in uniform registers (16 fewer moves a key tile, H200).
CF_DEVICE i32 warpgroup_index() { return __shfl_sync(0xffffffffu, i32(threadIdx.x / 128), 0); }
CF_DEVICE u32 grid_size() { return gridDim.x; }

// The block's static shared memory, seen as one T: for what is not addressed by descriptors.
template <class T> CF_DEVICE T& static_shared_storage() {
  static __shared__ T storage;
  return storage;
}

// First 1024-byte boundary of the block's dynamic shared memory: swizzled tiles begin there.
CF_DEVICE u32 shared_tiles() {
  extern __shared__ char dynamic_shared_bytes[];
  return (shared_address(dynamic_shared_bytes) + 1023u) & ~1023u;
}

// What lies in memory is read again after this: the compiler keeps nothing of it in registers.
CF_DEVICE void forget() { asm volatile("" ::: "memory"); }
// Accesses of this thread before it come before those after it, for the block; ptxas keeps them apart, too.
CF_DEVICE void fence_acq_rel_cta() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// --- mbarriers: a phase ends when `count` threads have arrived and all expected bytes have landed
CF_DEVICE void mbarrier_init(u64& bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&bar)), "r"(count) : "memory");
}
CF_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
CF_DEVICE void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
CF_DEVICE void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Returns once the phase of that parity has ended.
CF_DEVICE void mbarrier_try_wait_parity(u32 bar, u32 parity) {
  asm volatile("{ .reg .pred done;\n again_%=:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               " @done bra over_%=;\n bra again_%=;\n over_%=:\n }" ::"r"(bar), "r"(parity) : "memory");
}

// --- TMA: boxes of five-dimensional tensors; what lies outside the tensor is loaded as zeros and not stored
CF_DEVICE void cp_async_bulk_tensor_5d_load(u32 to, const TensorMap& map, u32 bar, i32 c0, i32 c1, i32 c2, i32 c3,
                                            i32 c4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
               ::"r"(to), "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(bar) : "memory");
}
CF_DEVICE void cp_async_bulk_tensor_5d_store(const TensorMap& map, u32 from, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
               "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}
// Consecutive bytes, a multiple of 16 at an address that is one.
CF_DEVICE void cp_async_bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
// Floats of shared memory take the place of consecutive ones in global memory, or are added to them.
CF_DEVICE void cp_async_bulk_store(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
CF_DEVICE void cp_reduce_async_bulk_add_f32(float* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
CF_DEVICE void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All stores of this thread have read shared memory / are done.
CF_DEVICE void cp_async_bulk_wait_group_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
CF_DEVICE void cp_async_bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Ordinary accesses of this thread to shared memory before it come before TMA's and wgmma's after it.
CF_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Those of this thread to global memory, of either kind, in the order of the program.
CF_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// --- named barriers 1 to 15 of `threads` threads, whole warps: `bar_arrive` does not wait
CF_DEVICE void bar_sync(i32 id, i32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
CF_DEVICE void bar_arrive(i32 id, i32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- registers move between warpgroups; all warps of a warpgroup call these together
template <int N> CF_DEVICE void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> CF_DEVICE void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// --- wgmma: accumulators and register operands of a group in flight must not be touched
CF_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CF_DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// At most the N youngest groups are still in flight.
template <int N> CF_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Four 8x8 matrices of 16-bit elements to shared memory; lane 8 i + r gives the address of row r of matrix i.
CF_DEVICE void stmatrix_x4(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// The old value of a counter in global memory, which grows by one.
CF_DEVICE u32 atom_inc(u32* counter) { return atomicAdd(counter, 1u); }
// The old value, which `to` replaces where it was `from`.
CF_DEVICE u32 atom_cas(u32* counter, u32 from, u32 to) { return atomicCAS(counter, from, to); }

// A number through which blocks speak: what its writer (and all who met the writer at barriers) did before the release
// is seen by those who have waited for it.
CF_DEVICE void st_release_gpu(u32* to, u32 x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// The larger halves, as unsigned numbers; and max(min(a + b, c), 0) of signed halves.
CF_DEVICE u32 max_u16x2(u32 a, u32 b) { return __vmaxu2(a, b); }
CF_DEVICE u32 add_min_relu_s16x2(u32 a, u32 b, u32 c) { return __viaddmin_s16x2_relu(a, b, c); }

CF_DEVICE void st_shared_f32x4(u32 to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

#endif
