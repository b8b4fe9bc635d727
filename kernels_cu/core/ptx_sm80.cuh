// Instructions that exist from sm_80 on: one function, one instruction, under its own name. Every lane of a warp calls
// ldmatrix, mma, movmatrix and votes together. Shared memory is named by 32-bit addresses within the block's window.
#pragma once
#include "core/types.cuh"

#ifdef CUPYFLASH_EMULATE
#include "core/emulate/ptx_sm80.cuh"
#else

CF_DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// cp.async 16 bytes to shared memory.
CF_DEVICE void cp_async_16(u32 to, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(source) : "memory");
}
// The same of bytes that nobody else will read: they are the first to leave the L2 cache.
CF_DEVICE void cp_async_16_once(u32 to, const void* source) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(source), "l"(policy)
               : "memory");
}
// cp.async 16 / 4 bytes to shared memory, of which the first `bytes` come from `source` and the others are zeros.
CF_DEVICE void cp_async_16(u32 to, const void* source, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(source), "r"(bytes) : "memory");
}
CF_DEVICE void cp_async_4(u32 to, const void* source, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(source), "r"(bytes) : "memory");
}
// The 128 bytes around an address of global memory are brought to the L2 cache.
CF_DEVICE void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
CF_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's groups are in flight.
template <int N> CF_DEVICE void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Four 8x8 matrices of 16-bit elements; lane 8 i + r gives the address of row r of matrix i. Lane l receives elements
// 2 (l % 4), 2 (l % 4) + 1 of row l / 4 of each; .trans: of the transposed matrices.
CF_DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
CF_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// d += a b for a of 16x16, b of 16x8, d of 16x8. Lane l holds of d: (row l / 4, columns 2 (l % 4), + 1) in low0, low1
// and row l / 4 + 8 in high0, high1.
template <class T>
CF_DEVICE void mma_m16n8k16(float& low0, float& low1, float& high0, float& high1, const u32 (&a)[4], u32 b0, u32 b1);
template <>
CF_DEVICE void mma_m16n8k16<bfloat16>(float& low0, float& low1, float& high0, float& high1, const u32 (&a)[4], u32 b0,
                                      u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(low0), "+f"(low1), "+f"(high0), "+f"(high1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
CF_DEVICE void mma_m16n8k16<float16>(float& low0, float& low1, float& high0, float& high1, const u32 (&a)[4], u32 b0,
                                     u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(low0), "+f"(low1), "+f"(high0), "+f"(high1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same for a of 16x8 and b of 8x8, of which the upper 19 bits count. In lane l, with g = l / 4 and t = l % 4, a is
// (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4), b is (t, g), (t + 4, g).
CF_DEVICE void mma_m16n8k8_tf32(float& low0, float& low1, float& high0, float& high1, const u32 (&a)[4], u32 b0,
                                u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(low0), "+f"(low1), "+f"(high0), "+f"(high1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same in double for a of 8x4, b of 4x8 and d of 8x8: a is (g, t), b (t, g), d0 and d1 (g, 2 t), (g, 2 t + 1).
CF_DEVICE void mma_m8n8k4_f64(double& d0, double& d1, double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(d0), "+d"(d1) : "d"(a), "d"(b));
}
// The same for a of 16x8 and d of 16x8, from sm_90 on: a0 is (g, t), a1 (g + 8, t), a2 and a3 four columns on.
CF_DEVICE void mma_m16n8k8_f64(double (&d)[4], double a0, double a1, double a2, double a3, double b0, double b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3]) : "d"(a0), "d"(a1), "d"(a2), "d"(a3), "d"(b0), "d"(b1));
}

// Transposes an 8x8 matrix of 16-bit elements held as ldmatrix leaves it.
CF_DEVICE u32 movmatrix_trans(u32 x) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// Byte n of the result is byte `selector` nibble n of a (0 to 3) and b (4 to 7); with 8 added, eight times its sign bit.
CF_DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// Bit n of the result is bit 4 a + 2 b + c of kTable, where a, b and c are the bits n of the operands.
template <u32 kTable> CF_DEVICE u32 lop3(u32 a, u32 b, u32 c) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return r;
}

// Two floats rounded to nearest even; `low` comes first in memory.
template <class T> CF_DEVICE u32 cvt_rn_x2(float low, float high);
template <> CF_DEVICE u32 cvt_rn_x2<bfloat16>(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <> CF_DEVICE u32 cvt_rn_x2<float16>(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Four neighbours, 16-byte aligned.
CF_DEVICE void st_global_x4(float* p, float x0, float x1, float x2, float x3) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x0), "f"(x1), "f"(x2), "f"(x3) : "memory");
}
CF_DEVICE void st_global_128(void* p, const u32 (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
CF_DEVICE void st_shared_32(u32 address, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
CF_DEVICE void st_shared_f32x2(u32 address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
CF_DEVICE void st_shared_128(u32 address, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
CF_DEVICE void ld_shared_128(u32 (&x)[4], u32 address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address) : "memory");
}
CF_DEVICE void st_shared_f64x2(u32 address, const double (&x)[2]) {
  asm volatile("st.shared.v2.f64 [%0], {%1, %2};" ::"r"(address), "d"(x[0]), "d"(x[1]) : "memory");
}
CF_DEVICE void st_shared_f64(u32 address, double x) {
  asm volatile("st.shared.f64 [%0], %1;" ::"r"(address), "d"(x) : "memory");
}
CF_DEVICE double ld_shared_f64(u32 address) {
  double x;
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(address) : "memory");
  return x;
}
CF_DEVICE void ld_shared_f64x2(double (&x)[2], u32 address) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(x[0]), "=d"(x[1]) : "r"(address) : "memory");
}
CF_DEVICE u32 ld_shared_u16(u32 address) {
  u16 x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
  return x;
}
CF_DEVICE float ld_shared_f32(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
CF_DEVICE void ld_shared_f32x2(float& x, float& y, u32 address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}

// The smaller one; NaN if either is.
CF_DEVICE float min_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// 2^x within 2 units in the last place; 2^-inf = 0, results below 2^-126 are 0.
CF_DEVICE float ex2_approx_ftz(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// 1 / x within 1 unit in the last place.
CF_DEVICE float rcp_approx_ftz(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// 1 / x to 20 bits: the low word is 0.
CF_DEVICE double rcp_approx_ftz(double x) {
  double r;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(x));
  return r;
}

// Named barrier 1 to 15 of `threads` threads, whole warps; orders shared memory among them.
CF_DEVICE void barrier_sync_aligned(i32 id, i32 threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

CF_DEVICE void barrier_arrive_aligned(i32 id, i32 threads) {      // does not wait
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// red.global.add: *p += x, in no particular order with other threads.
CF_DEVICE void red_add(float* p, float x) { asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory"); }
CF_DEVICE void red_add(double* p, double x) {
  asm volatile("red.global.add.f64 [%0], %1;" ::"l"(p), "d"(x) : "memory");
}
// The same for four neighbours, 16-byte aligned.
CF_DEVICE void red_add_x4(float* p, float x0, float x1, float x2, float x3) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x0), "f"(x1), "f"(x2), "f"(x3) : "memory");
#else
  red_add(p, x0);
  red_add(p + 1, x1);
  red_add(p + 2, x2);
  red_add(p + 3, x3);
#endif
}

// A count through which blocks speak: what a thread (and all who met it at barriers) did before it adds to the count is
// seen by those who have seen the count.
CF_DEVICE void red_release_increment(u32* p) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}
CF_DEVICE u32 load_acquire(const u32* p) {
  u32 r;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
CF_DEVICE u32 load_relaxed(const u32* p) {      // without the second half of that
  u32 r;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
CF_DEVICE void wait_for_count(const u32* p, u32 x) {              // until *p is at least x
  while (load_acquire(p) < x) {
  }
}
CF_DEVICE u32 increment(u32* p) { return atomicAdd(p, 1u); }      // *p += 1 in one piece; what it was before

CF_DEVICE bool vote_any(bool x) { return __any_sync(0xffffffffu, x); }       // whether x holds in some lane

#endif
