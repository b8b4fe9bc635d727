// Before the forward: k and v are split into planes of bfloat16 (prepost/split.cuh). Rows past the length are zeros,
// whatever lies there. What is broadcast over heads is split once, and over items if all have one length.
#include "prepost/split.cuh"

// Numbers of threads and rows are below 2^32: planes of as many would fill any memory.

// How many points of an axis a tensor of planes has of its own.
CF_DEVICE i32 own(i64 stride, i32 size) { return stride != 0 ? size : 1; }

CF_DEVICE u32 threads_for(const Params& p, const Strides& planes, i32 columns) {
  u32 rows = u32(own(planes.head, p.heads_kv)) * p.seqlen_k;
  CF_UNROLL
  for (int axis = 0; axis < kLeadAxes; ++axis) rows *= own(planes.lead[axis], p.lead[axis]);
  return rows * (padded(columns) / kColumns);
}

// The share of one of those threads.
CF_DEVICE void split_tensor(const Params& p, u32 thread, const void* from, const Strides& strides, i32 columns,
                            void* to, const Strides& planes) {
  const u32 threads = padded(columns) / kColumns, heads = own(planes.head, p.heads_kv);
  u32 number = thread / threads;
  const i32 col = i32(thread - number * threads) * kColumns, row = i32(number % u32(p.seqlen_k));
  number /= u32(p.seqlen_k);
  const i32 head = i32(number % heads);
  number /= heads;
  Item item{};
  CF_UNROLL
  for (int axis = kLeadAxes - 1; axis >= 0; --axis) {
    const u32 size = own(planes.lead[axis], p.lead[axis]);
    if (size == 1) continue;                   // divisions are slow
    item.at[axis] = i32(number % size);
    number /= size;
  }
  float x[kColumns] = {};
  if (row < kv_length_of(p, item)) read_columns(x, rows_of<const float>(from, strides, item, head), row, col, columns);
  write_planes(rows_of<bfloat16>(to, planes, item, head).at(row, col), padded(columns), x);
}

extern "C" __global__ void __launch_bounds__(kSplitThreads) cupyflash_split(const Params p) {
  const u32 thread = block_index() * kSplitThreads + thread_index(), of_k = threads_for(p, p.k_planes, p.head_dim);
  if (thread < of_k) {
    split_tensor(p, thread, p.call.k, p.k, p.head_dim, p.call.k_planes, p.k_planes);
  } else if (thread - of_k < threads_for(p, p.v_planes, p.head_dim_v)) {
    split_tensor(p, thread - of_k, p.call.v, p.v, p.head_dim_v, p.call.v_planes, p.v_planes);
  }
}
