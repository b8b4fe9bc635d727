// Backward on the CUDA cores, second half: dk and dv.
constexpr bool kSumsQueries = false;
#include "simt/backward_keys.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) cupyflash_backward_kv(const Params p) {
  backward_of_keys(p);
}
