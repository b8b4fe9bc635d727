// core/ptx_sm80.cuh on a CPU.
#pragma once
#include "core/emulate/fragments.cuh"

#define CF_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace emulate {

// The source is read now, and the target becomes NaN: who reads it too early, or too late, will see. The elements
// arrive when the group is waited for.
template <class T> void cp_async(u32 to, const void* source, u32 bytes, Site site) {
  if (to % sizeof(T) != 0 || reinterpret_cast<u64>(source) % sizeof(T) != 0 || bytes > sizeof(T)) {
    fault("%s (%s:%d): to byte %u from %p, %u bytes: not aligned", site.word, site.file, site.line, to, source, bytes);
  }
  T arriving{}, nothing;
  __builtin_memset(&nothing, 0xff, sizeof nothing);
  if (bytes == sizeof(T)) arriving = *static_cast<const T*>(source);
  else for (u32 n = 0; n < bytes; ++n) reinterpret_cast<u8*>(&arriving)[n] = static_cast<const u8*>(source)[n];
  shared_at<T>(to) = nothing;
  put_off(to, &arriving, sizeof arriving);
}

}  // namespace emulate

CF_DEVICE u32 shared_address(const void* p) { return u32(static_cast<const char*>(p) - emulate::shared_memory(0)); }

CF_DEVICE void cp_async_16(u32 to, const void* source, u32 bytes, CF_HERE) {
  emulate::cp_async<emulate::Row>(to, source, bytes, {"cp_async_16", file, line});
}
CF_DEVICE void cp_async_16(u32 to, const void* source, CF_HERE) { cp_async_16(to, source, 16, file, line); }
CF_DEVICE void cp_async_16_once(u32 to, const void* source, CF_HERE) { cp_async_16(to, source, 16, file, line); }
CF_DEVICE void cp_async_4(u32 to, const void* source, u32 bytes, CF_HERE) {
  emulate::cp_async<u32>(to, source, bytes, {"cp_async_4", file, line});
}
CF_DEVICE void prefetch_l2(const void*) {}
CF_DEVICE void cp_async_commit_group() { emulate::close_group(); }
template <int N> CF_DEVICE void cp_async_wait_group() {
  emulate::Row row;
  u32 to, bytes;
  while (emulate::take_up(N, &to, &row, &bytes)) {
    if (bytes == 16) emulate::shared_at<emulate::Row>(to) = row;
    else __builtin_memcpy(&emulate::shared_at<u32>(to), &row, 4);
  }
}

CF_DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address, CF_HERE) {
  emulate::ldmatrix_x4<false>(r, address, {"ldmatrix_x4", file, line});
}
CF_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address, CF_HERE) {
  emulate::ldmatrix_x4<true>(r, address, {"ldmatrix_x4_trans", file, line});
}

template <class T>
CF_DEVICE void mma_m16n8k16(float& low0, float& low1, float& high0, float& high1, const u32 (&a)[4], u32 b0, u32 b1,
                            CF_HERE) {
  emulate::mma_m16n8<T, 16>({&low0, &low1, &high0, &high1}, a, {b0, b1}, {"mma_m16n8k16", file, line});
}
CF_DEVICE void mma_m16n8k8_tf32(float& low0, float& low1, float& high0, float& high1, const u32 (&a)[4], u32 b0, u32 b1,
                                CF_HERE) {
  emulate::mma_m16n8<emulate::TensorFloat32, 8>({&low0, &low1, &high0, &high1}, a, {b0, b1},
                                                {"mma_m16n8k8_tf32", file, line});
}
// a is (l / 4, l % 4), b (l % 4, l / 4), d0 and d1 (l / 4, 2 (l % 4)) and the one beside it.
CF_DEVICE void mma_m8n8k4_f64(double& d0, double& d1, double a, double b, CF_HERE) {
  struct Record { double* d[2]; double a, b; } record{{&d0, &d1}, a, b};
  emulate::wait_for_warp({"mma_m8n8k4_f64", file, line}, &record, [](void* const* records) CF_UNANNOUNCED {
    for (u32 lane = 0; lane < 32; ++lane) {
      for (u32 n = 0; n < 2; ++n) {
        double& sum = *static_cast<Record*>(records[lane])->d[n];
        for (u32 k = 0; k < 4; ++k) {
          const Record& row = *static_cast<const Record*>(records[lane / 4 * 4 + k]);
          const Record& col = *static_cast<const Record*>(records[(2 * (lane % 4) + n) * 4 + k]);
          sum = fused(row.a, col.b, sum);
        }
      }
    }
  });
}

CF_DEVICE void mma_m16n8k8_f64(double (&d)[4], double a0, double a1, double a2, double a3, double b0, double b1,
                               CF_HERE) {
  mma_m8n8k4_f64(d[0], d[1], a0, b0, file, line);
  mma_m8n8k4_f64(d[2], d[3], a1, b0, file, line);
  mma_m8n8k4_f64(d[0], d[1], a2, b1, file, line);
  mma_m8n8k4_f64(d[2], d[3], a3, b1, file, line);
}

CF_DEVICE u32 movmatrix_trans(u32 x, CF_HERE) {
  struct Record { u32 given, got; } record{x, 0};
  emulate::wait_for_warp({"movmatrix_trans", file, line}, &record, [](void* const* records) CF_UNANNOUNCED {
    for (u32 lane = 0; lane < 32; ++lane) {
      const u32 g = lane / 4, t = lane % 4;
      auto element = [&](u32 i) CF_UNANNOUNCED {
        return u16(static_cast<const Record*>(records[4 * i + g / 2])->given >> (16 * (g % 2)));
      };
      static_cast<Record*>(records[lane])->got = emulate::pair(element(2 * t), element(2 * t + 1));
    }
  });
  return record.got;
}

template <class T> CF_DEVICE u32 cvt_rn_x2(float low, float high) {
  return emulate::pair(emulate::Format<T>::nearest(low), emulate::Format<T>::nearest(high));
}

CF_DEVICE void st_global_x4(float* p, float x0, float x1, float x2, float x3) {
  *reinterpret_cast<emulate::Elements<float, 4>*>(p) = {{x0, x1, x2, x3}};
}
CF_DEVICE void st_global_128(void* p, const u32 (&x)[4]) {
  *static_cast<emulate::Elements<u32, 4>*>(p) = {{x[0], x[1], x[2], x[3]}};
}
CF_DEVICE void st_shared_32(u32 address, u32 x) { emulate::shared_at<u32>(address) = x; }
CF_DEVICE void st_shared_f32x2(u32 address, float x, float y) {
  emulate::shared_at<emulate::Elements<float, 2>>(address) = {{x, y}};
}
CF_DEVICE void st_shared_128(u32 address, const u32 (&x)[4]) {
  emulate::shared_at<emulate::Elements<u32, 4>>(address) = {{x[0], x[1], x[2], x[3]}};
}
CF_DEVICE void ld_shared_128(u32 (&x)[4], u32 address) {
  const emulate::Elements<u32, 4> all = emulate::shared_at<emulate::Elements<u32, 4>>(address);
  for (int n = 0; n < 4; ++n) x[n] = all.value[n];
}
CF_DEVICE void st_shared_f64x2(u32 address, const double (&x)[2]) {
  emulate::shared_at<emulate::Elements<double, 2>>(address) = {{x[0], x[1]}};
}
CF_DEVICE void st_shared_f64(u32 address, double x) { emulate::shared_at<double>(address) = x; }
CF_DEVICE double ld_shared_f64(u32 address) { return emulate::shared_at<double>(address); }
CF_DEVICE void ld_shared_f64x2(double (&x)[2], u32 address) {
  const emulate::Elements<double, 2> both = emulate::shared_at<emulate::Elements<double, 2>>(address);
  x[0] = both.value[0], x[1] = both.value[1];
}
CF_DEVICE u32 ld_shared_u16(u32 address) { return emulate::shared_at<u16>(address); }
CF_DEVICE float ld_shared_f32(u32 address) { return emulate::shared_at<float>(address); }
CF_DEVICE void ld_shared_f32x2(float& x, float& y, u32 address) {
  const emulate::Elements<float, 2> both = emulate::shared_at<emulate::Elements<float, 2>>(address);
  x = both.value[0], y = both.value[1];
}

CF_DEVICE float min_nan(float a, float b) { return a != a || a < b ? a : b; }

CF_DEVICE float rcp_approx_ftz(float x) { return 1.0f / x; }
CF_DEVICE double rcp_approx_ftz(double x) { return double_of(high_word(1.0 / x), 0); }
CF_DEVICE float ex2_approx_ftz(float x) {
  const float r = __builtin_exp2f(x);
  return r < 0x1p-126f ? 0.0f : r;
}

CF_DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
  u32 r = 0;
  for (u32 n = 0; n < 4; ++n) {
    const u32 nibble = selector >> (4 * n) & 15, byte = u32((u64(b) << 32 | a) >> (nibble % 8 * 8)) & 0xff;
    r |= (nibble < 8 ? byte : byte < 0x80 ? 0u : 0xffu) << (8 * n);
  }
  return r;
}

template <u32 kTable> CF_DEVICE u32 lop3(u32 a, u32 b, u32 c) {
  u32 r = 0;
  for (u32 n = 0; n < 32; ++n) r |= (kTable >> ((a >> n & 1) * 4 + (b >> n & 1) * 2 + (c >> n & 1)) & 1) << n;
  return r;
}

CF_DEVICE void barrier_sync_aligned(i32 id, i32 threads, CF_HERE) {
  emulate::wait_for_named({"barrier_sync_aligned", file, line}, u32(id), u32(threads));
}
CF_DEVICE void barrier_arrive_aligned(i32 id, i32 threads, CF_HERE) {
  emulate::arrive_at_named({"barrier_arrive_aligned", file, line}, u32(id), u32(threads));
}

CF_DEVICE bool vote_any(bool x, CF_HERE) {
  struct Record { bool given, got; } record{x, false};
  emulate::wait_for_warp({"vote_any", file, line}, &record, [](void* const* records) CF_UNANNOUNCED {
    bool any = false;
    for (u32 lane = 0; lane < 32; ++lane) any |= static_cast<const Record*>(records[lane])->given;
    for (u32 lane = 0; lane < 32; ++lane) static_cast<Record*>(records[lane])->got = any;
  });
  return record.got;
}

// red.global.add: *p += x, in no particular order with other threads.
CF_DEVICE void red_add(float* p, float x) { emulate::add(p, x); }
CF_DEVICE void red_add(double* p, double x) { emulate::add(p, x); }
CF_DEVICE void red_add_x4(float* p, float x0, float x1, float x2, float x3) {
  emulate::add(p, x0), emulate::add(p + 1, x1), emulate::add(p + 2, x2), emulate::add(p + 3, x3);
}

CF_DEVICE void red_release_increment(u32* p) { emulate::increment(p); }
CF_DEVICE u32 load_acquire(const u32* p) { return emulate::load_acquire(p); }
CF_DEVICE u32 load_relaxed(const u32* p) { return emulate::load_acquire(p); }
CF_DEVICE void wait_for_count(const u32* p, u32 x, CF_HERE) {
  emulate::wait_for_count({"wait_for_count", file, line}, p, x);
}
CF_DEVICE u32 increment(u32* p) { return emulate::increment(p); }

#undef CF_HERE
