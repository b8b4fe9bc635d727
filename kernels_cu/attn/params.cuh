// The argument record of every kernel, passed by value. cupyflash/cuda/params.py mirrors it byte for byte.
//
// Strides count elements and may be zero or negative. A batch item is a point of up to four collapsed leading axes.
// The items of a launch are own[] x loop[]: a block owns one point of own[] and walks all points of loop[], so that a
// gradient whose argument was broadcast over an axis is summed by its owner. On every axis own[a] * loop[a] == lead[a].
#pragma once
#include "core/types.cuh"

constexpr i32 kLeadAxes = 4;

struct Strides { i64 lead[kLeadAxes]; i64 head; i64 row; i64 col; };     // an axis that the tensor lacks has stride 0

// An integer a batch item (or batch item and head): `value`, or where its address is given an array of integers.
// `bytes` is the width of an array element, negative when it is unsigned.
struct Integer { i64 lead[kLeadAxes]; i64 head; i64 bytes; };

// Rewritten by every call: addresses (0 where absent), then numbers. Everything below this is fixed by the plan.
struct Call {
  const void *q, *k, *v;
  void *out, *lse;                          // lse is read by the backward
  const void *mask, *bias, *sinks, *slopes;
  const void *q_length, *kv_length, *query_offset, *dropout_t, *dropout_seed, *dropout_offset;
  const void *dout, *dlse, *delta;          // delta: given by the caller, else 0 and formed from out and dout
  void *row_delta;                          // workspace, (batch, heads_q, seqlen_q) in C order: delta - dlse
  void *slope_rows;                         // workspace, same shape: sum over keys of -distance * dS
  void *partials;                           // workspace, what each of the splits gave: of a bias gradient or a forward
  void *row_stats, *dq_sums, *turns;        // workspaces of a backward that owns keys: attn/backward_rows.cuh
  void *q_planes, *k_planes, *v_planes, *dout_planes;      // workspace: those as planes (core/planes.cuh)
  void *dq, *dk, *dv, *dbias, *dsinks, *dslopes;

  double scale, softcap;                    // softcap 0: none
  i64 q_length_value, kv_length_value, query_offset_value, dropout_t_value;
  u64 dropout_seed_value, dropout_offset_value;
  i64 left, right;                          // key j is visible iff p - left <= j <= p + right, p = i + query_offset
  i64 dropout_origin_i, dropout_origin_j;
  i64 dropout_threshold;                    // kept iff the 16-bit random number is below it
};

struct Params {
  Call call;

  Strides q, k, v, out, lse, mask, bias, dout, dlse, delta, dq, dk, dv, dbias;
  Strides k_planes, v_planes;
  Strides sinks, slopes, dsinks, dslopes;   // lead and head alone
  Integer q_length, kv_length, query_offset, dropout_t, dropout_seed, dropout_offset;

  i32 lead[kLeadAxes], own[kLeadAxes], loop[kLeadAxes];
  i32 heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
  i32 own_heads, own_rows, own_cols;        // bias gradient: 1 where that axis of dbias is kept, 0 where it is summed
  i32 splits;                               // a number of the launch's own: parts into which keys, or the sums of a
                                            // bias gradient, are cut; heads that take turns at dq (0: none); rows of
                                            // a query tile (row_stats); columns of dq's sums (what goes with them)
  i32 bottom_right;                         // 1: query_offset is kv length - q length of the item
  i32 accumulate;                           // 1: gradients are added to what their arrays hold
  i32 out_kind, bias_kind, sinks_kind, slopes_kind;                       // Kind
  i32 dq_kind, dk_kind, dv_kind, dbias_kind, dsinks_kind, dslopes_kind;   // Kind
};
