// After the backward: the runs of a bias gradient (simt/backward_bias.cu), added in order; one thread an element.
#include "attn/bias_grid.cuh"
#include "core/block.cuh"

constexpr i32 kPartialThreads = 256;

extern "C" __global__ void __launch_bounds__(kPartialThreads) cupyflash_sum_partials(const Params p) {
  const BiasGrid grid = bias_grid(p, 1, 1);
  const i64 elements = grid.elements(p), number = i64(block_index()) * kPartialThreads + thread_index();
  if (number >= elements) return;
  const Score* partials = static_cast<const Score*>(p.call.partials) + number;
  Score sum = Score(0);
  for (i32 split = 0; split < p.splits; ++split) sum += partials[split * elements];
  const i32 col = i32(number % grid.cols), row = i32(number / grid.cols % grid.rows);
  const i64 matrix = number / grid.cols / grid.rows;
  store_bias_gradient(p, item_at(p, u32(matrix / grid.heads), 0), i32(matrix % grid.heads), row, col, sum);
}
