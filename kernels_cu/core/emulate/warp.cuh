// core/warp.cuh on a CPU.
#pragma once
#include "core/emulate/engine.cuh"

namespace emulate {

template <class T> T shuffle_xor(T x, u32 mask, Site site) {
  struct Record { T given, got; u32 mask; } record{x, x, mask};
  wait_for_warp(site, &record, [](void* const* records) CF_UNANNOUNCED {
    for (u32 lane = 0; lane < 32; ++lane) {
      Record& mine = *static_cast<Record*>(records[lane]);
      mine.got = static_cast<const Record*>(records[(lane ^ mine.mask) % 32])->given;
    }
  });
  return record.got;
}

}  // namespace emulate

CF_DEVICE float shuffle_xor(float x, u32 mask, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return emulate::shuffle_xor(x, mask, {"shuffle_xor", file, line});
}
CF_DEVICE double shuffle_xor(double x, u32 mask, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return emulate::shuffle_xor(x, mask, {"shuffle_xor", file, line});
}
