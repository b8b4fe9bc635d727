// Backward for float and double on tensor cores in one kernel: dk, dv, and dq added to by each block of keys.
constexpr bool kSumsQueries = true;
#include "sm80_wide/backward_keys.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_backward(const Params p) {
  backward_of_keys(p);
}
