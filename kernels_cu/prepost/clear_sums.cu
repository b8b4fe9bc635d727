// Before a backward that adds the gradients of queries in no order: its sums (attn/backward_rows.cuh) at zero; a block
// for kRowBlock rows of p.splits columns.
#include "attn/backward_rows.cuh"
#include "core/block.cuh"

constexpr i32 kClearThreads = 256;

extern "C" __global__ void __launch_bounds__(kClearThreads) cupyflash_clear_sums(const Params p) {
  float* sums = static_cast<float*>(p.call.dq_sums) + i64(block_index()) * kRowBlock * p.splits;
  CF_UNROLL_1
  for (i32 n = 4 * thread_index(); n < kRowBlock * p.splits; n += 4 * kClearThreads) {
    *reinterpret_cast<Packed<float, 4>*>(sums + n) = Packed<float, 4>{};
  }
}
