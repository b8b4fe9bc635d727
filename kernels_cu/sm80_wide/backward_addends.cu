// Backward for float and double on tensor cores: the gradients of what is added to scores, a bias that was not broadcast
// and ALiBi slopes, whose sums over keys prepost/sum_rows.cu sums up.
constexpr bool kOwnsQueries = false;
#include "sm80_wide/backward_queries.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_backward_addends(const Params p) {
  backward_of_queries(p);
}
