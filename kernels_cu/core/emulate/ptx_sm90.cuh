// Of core/ptx_sm90.cuh on a CPU: barriers, and what needs no model of memory beyond them. TMA and wgmma are not here: a
// kernel that uses them does not compile for the CPU. TMA would copy and then call emulate::complete_tx.
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
  if (bar.missing == 0) fault("%s (%s:%d): more threads arrive than the barrier counts", site.word, site.file, site.line);
  publish(&bar);
  bar.bytes += bytes;
  --bar.missing;
  end_phase_if_due(bar);
}
CF_UNANNOUNCED inline void complete_tx(u32 address, i32 bytes) {
  Mbarrier& bar = shared_at<Mbarrier>(address);
  publish(&bar);
  bar.bytes -= bytes;
  end_phase_if_due(bar);
}

}  // namespace emulate

CF_UNANNOUNCED inline void mbarrier_init(u64& bar, u32 count) {
  emulate::shared_at<emulate::Mbarrier>(shared_address(&bar)) = {u16(count), u16(count), 0, 0};
}
CF_DEVICE void fence_mbarrier_init() {}
CF_DEVICE void mbarrier_arrive(u32 bar, CF_HERE) { emulate::arrive(bar, 0, {"mbarrier_arrive", file, line}); }
CF_DEVICE void mbarrier_arrive_expect_tx(u32 bar, u32 bytes, CF_HERE) {
  emulate::arrive(bar, i32(bytes), {"mbarrier_arrive_expect_tx", file, line});
}
CF_DEVICE void mbarrier_try_wait_parity(u32 bar, u32 parity, CF_HERE) {
  struct Wanted { const emulate::Mbarrier* bar; u32 parity; } wanted{&emulate::shared_at<emulate::Mbarrier>(bar), parity};
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

CF_DEVICE float rcp_approx_ftz(float x) { return 1.0f / x; }

#undef CF_HERE
