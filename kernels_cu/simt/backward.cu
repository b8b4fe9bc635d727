// Backward for float on the CUDA cores in one kernel: dk, dv, and dq added to by each block of keys.
constexpr bool kSumsQueries = true;
#include "simt/backward_keys.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) cupyflash_backward(const Params p) {
  backward_of_keys(p);
}
