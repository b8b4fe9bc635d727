// core/warp.cuh on a CPU.
#pragma once
#include "core/emulate/engine.cuh"

namespace emulate {

template <class T> T shuffle_from(T x, u32 lane, Site site) {
  struct Record { T given, got; u32 from; } record{x, x, lane};
  wait_for_warp(site, &record, [](void* const* records) CF_UNANNOUNCED {
    for (u32 lane = 0; lane < 32; ++lane) {
      Record& mine = *static_cast<Record*>(records[lane]);
      mine.got = static_cast<const Record*>(records[mine.from % 32])->given;
    }
  });
  return record.got;
}

CF_UNANNOUNCED inline u32 own_index() { return self->index; }

}  // namespace emulate

#define CF_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
CF_DEVICE float shuffle_xor(float x, u32 mask, CF_HERE) {
  return emulate::shuffle_from(x, emulate::own_index() ^ mask, {"shuffle_xor", file, line});
}
CF_DEVICE u32 shuffle_xor(u32 x, u32 mask, CF_HERE) {
  return emulate::shuffle_from(x, emulate::own_index() ^ mask, {"shuffle_xor", file, line});
}
CF_DEVICE double shuffle_xor(double x, u32 mask, CF_HERE) {
  return emulate::shuffle_from(x, emulate::own_index() ^ mask, {"shuffle_xor", file, line});
}
CF_DEVICE u32 shuffle(u32 x, u32 lane, CF_HERE) {
  return emulate::shuffle_from(x, lane, {"shuffle", file, line});
}
CF_DEVICE float shuffle(float x, u32 lane, CF_HERE) {
  return emulate::shuffle_from(x, lane, {"shuffle", file, line});
}
CF_DEVICE double shuffle(double x, u32 lane, CF_HERE) {
  return emulate::shuffle_from(x, lane, {"shuffle", file, line});
}
#undef CF_HERE
