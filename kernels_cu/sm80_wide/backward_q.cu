// Backward for float and double on tensor cores: dq of one tile of queries.
constexpr bool kOwnsQueries = true;
#include "sm80_wide/backward_queries.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_backward_q(const Params p) {
  backward_of_queries(p);
}
