// Backward for float and double on tensor cores, first half, where dq comes from backward_q.cu: dk and dv.
constexpr bool kSumsQueries = false;
#include "sm80_wide/backward_keys.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_backward_kv(const Params p) {
  backward_of_keys(p);
}
