// Before the forward: k and v are split into planes of bfloat16 (core/planes.cuh). A row becomes hi | mid | lo, each of
// as many columns, whole panels of 64, filled up with zeros; rows past the length are zeros, whatever lies there. What is
// broadcast over heads is split once, and over items if all have one length.
#include "attn/mask.cuh"
#include "core/block.cuh"
#include "core/planes.cuh"

constexpr i32 kSplitThreads = 256;
constexpr i32 kColumns = 8;                    // of a thread

CF_DEVICE void read_columns(float (&x)[kColumns], const Rows<const float>& rows, i32 row, i32 col, i32 columns) {
  if (rows.packed<4>() && col + kColumns <= columns) {
    CF_UNROLL
    for (int n = 0; n < kColumns; n += 4) {
      const Packed<float, 4> four = *reinterpret_cast<const Packed<float, 4>*>(rows.at(row, col + n));
      CF_UNROLL
      for (int i = 0; i < 4; ++i) x[n + i] = four.value[i];
    }
  } else {
    CF_UNROLL
    for (int n = 0; n < kColumns; ++n) x[n] = col + n < columns ? *rows.at(row, col + n) : 0.0f;
  }
}

CF_DEVICE void write_planes(bfloat16* to, i32 columns, const float (&x)[kColumns]) {
  PlanePair pair[kColumns / 2];
  CF_UNROLL
  for (int n = 0; n < kColumns / 2; ++n) pair[n] = split_any(x[2 * n], x[2 * n + 1]);
  CF_UNROLL
  for (int plane = 0; plane < kPlanes; ++plane) {
    Packed<u32, kColumns / 2> packed;
    CF_UNROLL
    for (int n = 0; n < kColumns / 2; ++n) packed.value[n] = pair[n].plane[plane];
    *reinterpret_cast<Packed<u32, kColumns / 2>*>(to + plane * columns) = packed;
  }
}

// Numbers of threads and rows are below 2^32: planes of as many would fill any memory.

CF_DEVICE i32 padded(i32 columns) { return round_up(columns, 64); }

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
