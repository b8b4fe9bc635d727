// Before the backward: q, k, v and dout are split into planes of bfloat16 (prepost/split.cuh). Rows of a head are
// filled up to whole tiles of 64, and those at or past the length are zeros, whatever lies there. Lse and delta of rows
// go to tiles of their own (attn/backward_rows.cuh), natural, with the largest float as lse where a row saw nothing or
// is none, so that its weights are 0.
#include "attn/backward_rows.cuh"
#include "prepost/split.cuh"

constexpr i32 kTileRows = 64;

// Whether the thread has a share of that tensor; if not, its number counts on from there.
template <bool kOfKeys>
CF_DEVICE bool split_tensor(const Params& p, u32& thread, const void* from, const Strides& strides, i32 columns,
                            void* to) {
  const u32 heads = kOfKeys ? p.heads_kv : p.heads_q, rows = round_up(kOfKeys ? p.seqlen_k : p.seqlen_q, kTileRows);
  const u32 across = padded(columns) / kColumns, threads = points(p.lead) * heads * rows * across;
  if (thread >= threads) {
    thread -= threads;
    return false;
  }
  const u32 number = thread / across, matrix = number / rows;
  const i32 col = i32(thread - number * across) * kColumns, row = i32(number - matrix * rows);
  const Item item = item_at(p, matrix / heads, 0);
  float x[kColumns] = {};
  if (row < (kOfKeys ? kv_length_of(p, item) : q_length_of(p, item))) {
    read_columns(x, rows_of<const float>(from, strides, item, i32(matrix % heads)), row, col, columns);
  }
  write_planes(static_cast<bfloat16*>(to) + i64(number) * kPlanes * padded(columns) + col, padded(columns), x);
  return true;
}

CF_DEVICE void numbers_of_row(const Params& p, u32 number) {
  const u32 rows = u32(padded_rows(p));
  const i32 row = i32(number % rows), head = i32(number / rows % p.heads_q);
  const Item item = item_at(p, number / rows / p.heads_q, 0);
  const float none = float_of(0x7f7fffffu);      // finite: sm90_wide/backward_scores.cuh
  float lse = none, delta = 0.0f;
  if (row < q_length_of(p, item)) {
    lse = *rows_of<const float>(p.call.lse, p.lse, item, head).at(row, 0);
    if (lse == -Limits<float>::infinity()) lse = none;
    delta = static_cast<const float*>(p.call.row_delta)[row_number(p, item, head, row)];
  }
  float* of_tile = row_stats_of(p, item, head) + row / kTileRows * 2 * kTileRows + row % kTileRows;
  of_tile[0] = lse, of_tile[kTileRows] = delta;
}

extern "C" __global__ void __launch_bounds__(kSplitThreads) cupyflash_split_all(const Params p) {
  u32 thread = block_index() * kSplitThreads + thread_index();
  if (split_tensor<false>(p, thread, p.call.q, p.q, p.head_dim, p.call.q_planes)) return;
  if (split_tensor<false>(p, thread, p.call.dout, p.dout, p.head_dim_v, p.call.dout_planes)) return;
  if (split_tensor<true>(p, thread, p.call.k, p.k, p.head_dim, p.call.k_planes)) return;
  if (split_tensor<true>(p, thread, p.call.v, p.v, p.head_dim_v, p.call.v_planes)) return;
  if (thread < points(p.lead) * p.heads_q * u32(padded_rows(p))) numbers_of_row(p, thread);
}
