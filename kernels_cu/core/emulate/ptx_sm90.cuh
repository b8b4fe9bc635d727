// core/ptx_sm90.cuh on a CPU: barriers, TMA and wgmma, each of which is done when it is issued, but for what TMA loads.
#pragma once
#include "core/emulate/ptx_sm80.cuh"

#define CF_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace emulate {

// The 64 bits of an mbarrier: a phase ends when nobody is missing and no bytes are awaited.
struct Mbarrier {
  u16 missing, count;
  i32 bytes : 31;
  u32 phase : 1;
};
static_assert(sizeof(Mbarrier) == 8, "as in hardware");

CF_UNANNOUNCED inline void end_phase_if_due(Mbarrier& bar) {
  if (bar.missing != 0 || bar.bytes != 0) return;
  bar.phase ^= 1;
  bar.missing = bar.count;
}
CF_UNANNOUNCED inline void arrive(u32 address, i32 bytes, Site site) {
  Mbarrier& bar = shared_at<Mbarrier>(address);
  if (bar.missing == 0) {
    fault("%s (%s:%d): more threads arrive than the barrier counts", site.word, site.file, site.line);
  }
  publish(&bar);
  bar.bytes += bytes;
  --bar.missing;
  end_phase_if_due(bar);
}
// What has been loaded to `to` arrives, sooner or later, and the barrier knows.
CF_UNANNOUNCED inline void complete_tx(u32 to, u32 address, i32 bytes) {
  Mbarrier& bar = shared_at<Mbarrier>(address);
  publish(&bar);
  arrive_later(to, u32(bytes), &bar, [](void* at, i32 bytes) CF_UNANNOUNCED {
    Mbarrier& bar = *static_cast<Mbarrier*>(at);
    bar.bytes -= bytes;
    end_phase_if_due(bar);
  });
}

// The element at a byte of a tile whose rows are swizzled by their width; a fault beyond the block's shared memory.
template <class T> CF_UNANNOUNCED T& swizzled_at(u32 byte, u32 row_bytes = 128) {
  const u32 place = byte ^ (byte >> 7 & (row_bytes / 16 - 1)) << 4;
  return *reinterpret_cast<T*>(shared_memory(place + sizeof(T)) + place);
}

// What TMA reads of global memory: an access of the kernel's, whose place is checked.
inline u16 element_at(u64 address) { return *reinterpret_cast<const u16*>(address); }
inline void store_at(u64 address, u16 element) { *reinterpret_cast<u16*>(address) = element; }

// Where a wgmma's descriptor says that an element of its operand lies: the operand is `across` x 16 deep.
template <bool kByRows> CF_UNANNOUNCED u16 operand(u64 descriptor, u32 across, u32 deep) {
  const u32 tile = (u32(descriptor) & 0x3fff) << 4, panel = (u32(descriptor >> 16) & 0x3fff) << 4;
  if (u32(descriptor >> 32) != (1024 >> 4 | 1u << 30)) fault("wgmma: a descriptor %llx of another layout", descriptor);
  if (kByRows) return swizzled_at<u16>(tile + across / 64 * panel + deep * 128 + across % 64 * 2);
  return swizzled_at<u16>(tile + across * 128 + deep * 2);
}

// A row of `a`: from a descriptor, or from the registers of the four lanes that share it.
template <class T, bool kByRows> CF_UNANNOUNCED void rows_of_a(float (&rows)[2][16], u64 a, u32 row) {
  for (u32 h = 0; h < 2; ++h) {
    for (u32 k = 0; k < 16; ++k) rows[h][k] = float(Format<T>::value(operand<kByRows>(a, row + 8 * h, k)));
  }
}
template <class T, bool kByRows> CF_UNANNOUNCED void rows_of_a(float (&rows)[2][16], const u32* a, u32) {
  struct Record { const u32* a; u32 all[4][4]; } record{a, {}};
  wait_for_warp({"wgmma", "", 0}, &record, [](void* const* records) CF_UNANNOUNCED {
    for (u32 lane = 0; lane < 32; ++lane) {
      for (u32 n = 0; n < 16; ++n) {
        static_cast<Record*>(records[lane])->all[n / 4][n % 4] =
            static_cast<const Record*>(records[lane / 4 * 4 + n / 4])->a[n % 4];
      }
    }
  });
  for (u32 h = 0; h < 2; ++h) {
    for (u32 k = 0; k < 16; ++k) {
      rows[h][k] = float(Format<T>::value(u16(record.all[k % 8 / 2][h + k / 8 * 2] >> (k % 2 * 16))));
    }
  }
}

// d += a b of 64 x columns, 16 deep, as a warp's lanes hold it; sums are cut toward zero.
template <class T, bool kAByRows, bool kBByRows, int kCount, class A>
CF_UNANNOUNCED void wgmma(float (&d)[kCount], A a, u64 b, bool accumulate) {
  const u32 lane = thread_index() % 32, row = thread_index() % 128 / 32 * 16 + lane / 4;
  float rows[2][16];
  rows_of_a<T, kAByRows>(rows, a, row);
  for (u32 n = 0; n < kCount / 2; ++n) {
    const u32 column = n / 2 * 8 + lane % 4 * 2 + n % 2;
    double column_of_b[16];
    for (u32 k = 0; k < 16; ++k) column_of_b[k] = Format<T>::value(operand<kBByRows>(b, column, k));
    for (u32 h = 0; h < 2; ++h) {
      float& sum = d[n / 2 * 4 + 2 * h + n % 2];
      double exact = accumulate ? double(sum) : 0.0;
      for (u32 k = 0; k < 16; ++k) exact += rows[h][k] * column_of_b[k];
      sum = __builtin_fabs(exact) < 0x1p128 ? cvt_rz_f32_f64(exact) : float(exact);
    }
  }
}

}  // namespace emulate

// As `plain_map` of cupyflash/cuda/tensormap.py writes it.
struct alignas(64) TensorMap { u64 address, sizes[5], strides[4]; u32 box[2], itemsize; };

CF_DEVICE i32 warpgroup_index() { return i32(thread_index() / 128); }
CF_DEVICE u32 grid_size() { return emulate::who().blocks; }
CF_DEVICE void forget() {}
CF_DEVICE void fence_acq_rel_cta() {}
template <int N> CF_DEVICE void setmaxnreg_dec() {}
template <int N> CF_DEVICE void setmaxnreg_inc() {}
CF_DEVICE void fence_proxy_async_global() {}
CF_DEVICE u32 atom_inc(u32* counter) { return emulate::increment(counter); }
CF_UNANNOUNCED inline u32 atom_cas(u32* counter, u32 from, u32 to) {
  emulate::load_acquire(counter);
  __atomic_compare_exchange_n(counter, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return from;
}
CF_UNANNOUNCED inline void st_release_gpu(u32* to, u32 x) {
  emulate::load_acquire(to);
  __atomic_store_n(to, x, __ATOMIC_RELEASE);
}

// Static shared memory is the first 4096 bytes of the block's: 3072 are there for it, and 1024 that on a GPU align what
// follows.
template <class T> CF_DEVICE T& static_shared_storage() {
  static_assert(sizeof(T) <= 4096, "room for it");
  return *reinterpret_cast<T*>(emulate::shared_memory(4096));
}
CF_DEVICE u32 shared_tiles() { return 4096; }

CF_DEVICE void wgmma_fence(CF_HERE) { emulate::wait_for_warp_in_order({"wgmma_fence", file, line}); }
CF_DEVICE void wgmma_commit_group() {}
// A product is the warpgroup's: none is done before all four warps have started it. Barriers 12 to 15 are kept for that.
template <int N> CF_DEVICE void wgmma_wait_group(CF_HERE) {
  emulate::wait_for_named({"wgmma_wait_group", file, line}, 12 + thread_index() / 128 % 4, 128);
}

namespace emulate {

// use(shared, address) for all two-byte elements of a box: in the swizzled tile, and in the tensor, 0 outside it.
template <class Use> CF_UNANNOUNCED void for_box(u32 tile, const TensorMap& map, const i32 (&corner)[5], Use use) {
  if (tile % 1024 != 0) fault("TMA: a swizzled tile at byte %u", tile);
  for (u32 r = 0; r < map.box[1]; ++r) {
    for (u32 c = 0; c < map.box[0]; ++c) {
      const i64 at[5] = {corner[0] + i32(c), corner[1] + i32(r), corner[2], corner[3], corner[4]};
      u64 address = map.address + at[0] * map.itemsize;
      bool inside = true;
      for (int n = 0; n < 5; ++n) inside = inside && at[n] >= 0 && u64(at[n]) < map.sizes[n];
      for (int n = 1; n < 5; ++n) address += at[n] * map.strides[n - 1];
      const u32 row_bytes = map.box[0] * 2;
      use(swizzled_at<u16>(tile + r * row_bytes + c * 2, row_bytes), inside ? address : 0);
    }
  }
}

}  // namespace emulate

// What is loaded over is not checked: who reads it must have waited for the barrier.
CF_UNANNOUNCED inline void cp_async_bulk_tensor_5d_load(u32 to, const TensorMap& map, u32 bar, i32 c0, i32 c1, i32 c2,
                                                        i32 c3, i32 c4) {
  emulate::for_box(to, map, {c0, c1, c2, c3, c4}, [](u16& shared, u64 address) CF_UNANNOUNCED {
    shared = address != 0 ? emulate::element_at(address) : u16(0);
  });
  emulate::complete_tx(to, bar, i32(map.box[0] * map.box[1] * map.itemsize));
}
CF_UNANNOUNCED inline void cp_async_bulk_tensor_5d_store(const TensorMap& map, u32 from, i32 c0, i32 c1, i32 c2, i32 c3,
                                                         i32 c4) {
  emulate::for_box(from, map, {c0, c1, c2, c3, c4}, [](u16& shared, u64 address) CF_UNANNOUNCED {
    if (address != 0) emulate::store_at(address, shared);
  });
}

namespace emulate {

// use(shared, global) for all words of consecutive bytes in both.
template <class T, class Use> CF_UNANNOUNCED void for_words(u32 shared, T* global, u32 bytes, Use use) {
  if (shared % 16 != 0 || u64(global) % 16 != 0 || bytes % 16 != 0) fault("TMA: %u bytes that are no chunks", bytes);
  for (u32 n = 0; n < bytes / 4; ++n) use(*reinterpret_cast<T*>(shared_memory(shared + 4 * n + 4) + shared + 4 * n), global + n);
}
inline float word_at(const float* p) { return *p; }
inline void store_word(float* p, float x) { *p = x; }

}  // namespace emulate

CF_UNANNOUNCED inline void cp_async_bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
  emulate::for_words(to, static_cast<const float*>(from), bytes, [](const float& shared, const float* p) CF_UNANNOUNCED {
    const_cast<float&>(shared) = emulate::word_at(p);
  });
  emulate::complete_tx(to, bar, i32(bytes));
}
CF_UNANNOUNCED inline void cp_async_bulk_store(void* to, u32 from, u32 bytes) {
  emulate::for_words(from, static_cast<float*>(to), bytes, [](float& shared, float* p) CF_UNANNOUNCED {
    emulate::store_word(p, shared);
  });
}
CF_UNANNOUNCED inline void cp_reduce_async_bulk_add_f32(float* to, u32 from, u32 bytes) {
  emulate::for_words(from, to, bytes, [](float& shared, float* p) CF_UNANNOUNCED { emulate::add(p, shared); });
}
CF_DEVICE void cp_async_bulk_commit_group() {}
CF_DEVICE void cp_async_bulk_wait_group_read() {}
CF_DEVICE void cp_async_bulk_wait_group() {}

CF_UNANNOUNCED inline void mbarrier_init(u64& bar, u32 count) {
  emulate::shared_at<emulate::Mbarrier>(shared_address(&bar)) = {u16(count), u16(count), 0, 0};
}
CF_DEVICE void fence_mbarrier_init() {}
CF_DEVICE void mbarrier_arrive(u32 bar, CF_HERE) { emulate::arrive(bar, 0, {"mbarrier_arrive", file, line}); }
CF_DEVICE void mbarrier_arrive_expect_tx(u32 bar, u32 bytes, CF_HERE) {
  emulate::arrive(bar, i32(bytes), {"mbarrier_arrive_expect_tx", file, line});
}
CF_DEVICE void mbarrier_try_wait_parity(u32 bar, u32 parity, CF_HERE) {
  struct Wanted { const emulate::Mbarrier* bar; u32 parity; };
  const Wanted wanted{&emulate::shared_at<emulate::Mbarrier>(bar), parity};
  emulate::wait_until({"mbarrier_try_wait_parity", file, line}, [](const void* subject) CF_UNANNOUNCED {
    const Wanted& wanted = *static_cast<const Wanted*>(subject);
    return wanted.bar->phase != wanted.parity;
  }, &wanted);
  emulate::observe(wanted.bar);
}
CF_DEVICE void fence_proxy_async() {}

CF_DEVICE void bar_sync(i32 id, i32 threads, CF_HERE) {
  emulate::wait_for_named({"bar_sync", file, line}, u32(id), u32(threads));
}
CF_DEVICE void bar_arrive(i32 id, i32 threads, CF_HERE) {
  emulate::arrive_at_named({"bar_arrive", file, line}, u32(id), u32(threads));
}

CF_DEVICE void stmatrix_x4(u32 to, u32 a, u32 b, u32 c, u32 d, CF_HERE) {
  struct Record { u32 given[4]; emulate::Row got; } record{{a, b, c, d}, {}};
  emulate::wait_for_warp({"stmatrix_x4", file, line}, &record, [](void* const* records) CF_UNANNOUNCED {
    for (u32 lane = 0; lane < 32; ++lane) {
      for (u32 n = 0; n < 8; ++n) {
        const u32 word = static_cast<const Record*>(records[lane % 8 * 4 + n / 2])->given[lane / 8];
        static_cast<Record*>(records[lane])->got.value[n] = u16(word >> (16 * (n % 2)));
      }
    }
  });
  emulate::shared_at<emulate::Row>(to) = record.got;
}

CF_DEVICE void st_shared_f32x4(u32 to, float a, float b, float c, float d) {
  emulate::shared_at<emulate::Elements<float, 4>>(to) = {{a, b, c, d}};
}

CF_DEVICE u32 max_u16x2(u32 a, u32 b) { return larger(a >> 16, b >> 16) << 16 | larger(a & 0xffff, b & 0xffff); }
CF_DEVICE u32 add_min_relu_s16x2(u32 a, u32 b, u32 c) {
  const auto half = [](u16 a, u16 b, u16 c) { return u32(u16(larger(smaller(i32(i16(a + b)), i32(i16(c))), 0))); };
  return half(a >> 16, b >> 16, c >> 16) << 16 | half(a, b, c);
}

#undef CF_HERE
