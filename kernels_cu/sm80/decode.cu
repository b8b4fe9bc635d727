// Forward for few queries and many keys by mma.sync: bound by the memory that keys and values come from.
//
// The rows of a tile are the queries of all heads of a group, kTileRows of them, 8 or 16: the columns of S^T = K Q^T and of
// O^T = V^T P^T, so that no product is wasted on rows that are not there. Run r of p.splits takes the tiles of kBlockKV keys
// r, r + p.splits, ...; slice w of each of them, kSlice keys, belongs to strand w of the run. Each warp streams slices through
// stages of its own in shared memory. The warps of a block take the strands of a run and meet at the end, when these are joined
// in order; or (kHeadWarps) each takes a head, and its strands one after the other: the same bits, fewer blocks, no meeting.
// prepost/combine.cu joins the runs.
//
//   warp, slice n | wait for n; start copies of n + kStages - 1    S^T = K Q^T    P = exp(S), dropout    O^T += V^T P^T
//   block         | # sums, O^T of all strands # joined
//
// Measured (H200, 2026-11-30, bfloat16, us with the joining; D 128, 8 heads of keys, four queries each: 16 x 8192 keys, heads
// of a key side by side, then apart; 1 x 8192; 64 x 4096; 1 x 131072; at last D 64, 32 heads of one query, 32768 keys):
//   16 rows always, as rows, 16 of 64 keys a warp         136.7  136.6  23.8  266.0  133.2  74.0    (cuDNN 124.4 first)
//   8 rows as columns, contiguous runs and strands        135.9  137.3  24.0  266.8  134.1  73.8
//   the same where warps part heads                       132.8  135.6  61.4  267.4  132.7  71.4
//   by turns, and no selection where all is seen          133.6  133.4  20.8  263.9  131.1  70.9
//   the same where warps part heads                       130.4  132.4  52.2  262.1  131.3  70.5
// Groups of 16 queries 80.6 before and after, D 256 81.7 to 78.2. The joining as a dependent launch (griddepcontrol) would take
// 0.5 to 1.5 more off: 129.8 and 132.1, 20.0, 259.7; where the next call's launch depends, too, 195 instead of 133 for 131072
// keys, for blocks that wait keep others out. Eight warps that part heads, or that take all runs of a head and join them, in
// one block a multiprocessor: 131.9 and 132.4 where four took 132.8; four stages 137.9.
// Copies alone, no joining: 120 to 122 in every order of blocks, runs and warps, heads side by side or apart, but for
// contiguous runs of warps that part heads lying apart (130 to 132); rows by bulk copies 127 and more. From before: keys and
// values that leave the L2 cache first gained 3 %; copies of K and V one by one, the L2 cache asked for 256 bytes at a time,
// two stages, runs of 512 or 2048 keys, joining by the last blocks of the launch: nothing or worse.
//
// Copies with a cache hint whose shared address ptxas (NVRTC 12.9 and 13.0) knows as a lane's number plus a uniform one are
// encoded as illegal instructions (LDGSTS [R + UR], desc[UR]): the address goes through a shuffle.
//
// Shared memory: the stages of each warp (K, V), which its O takes at the end; queries that registers cannot hold; the sums.
#include "sm80/decode_place.cuh"

struct Decode {
  const Params& p;
  const Place& at;
  Visibility sight;
  u32 shared;
  i32 start, stop;                     // the first key of the warp; where all end
  i32 slices, a_strand;                // of the warp, of a strand
  Interval whole;                      // keys that all queries see
  ElementRows k, v;
  Reader<TileK, true> read_k;
  Reader<TileV, false> read_v;
  u32 q[kN][kHeadDim / 8];
  OnlineSoftmax<float, 2 * kN, ColumnLanes> softmax;
  Output out;
  Sums joined_sums[2 * kN];
  float joined[kN][kWalks ? kHeadDimV / 16 : 1][4];

  CF_DEVICE Query query(int u) const { return Query(p, at, tile_row(u), sight.q_length); }

  CF_DEVICE u32 stored_query(int n, int c) const {      // only the lane that stored it reads it
    return shared + kAtQueries + at.warp * kQueryBytes + (c / 2 * kN + n) * 256 + lane_index() * 8 + c % 2 * 4;
  }

  CF_DEVICE void load_queries() {
    CF_UNROLL
    for (int n = 0; n < kN; ++n) {
      const Query of(p, at, 8 * n + lane_index() / 4, sight.q_length);
      const ElementRows rows = rows_of<const Element>(p.call.q, p.q, at.item, of.head);
      const i32 own = i32(lane_index()) % 4 * 2;
      if (of.live && rows.packed<2>() && p.head_dim == kHeadDim) {
        const u32* from = reinterpret_cast<const u32*>(rows.at(of.row, own));
        CF_UNROLL
        for (int c = 0; c < kHeadDim / 8; ++c) q[n][c] = from[4 * c];
      } else {
        CF_UNROLL
        for (int c = 0; c < kHeadDim / 8; ++c) {
          const i32 col = 8 * c + own;
          const u32 low = of.live && col < p.head_dim ? rows.at(of.row, col)->bits : 0;
          const u32 high = of.live && col + 1 < p.head_dim ? rows.at(of.row, col + 1)->bits : 0;
          q[n][c] = low | high << 16;
        }
      }
      if constexpr (kStored) {
        CF_UNROLL
        for (int c = 0; c < kHeadDim / 8; ++c) st_shared_32(stored_query(n, c), q[n][c]);
      }
    }
  }

  // Where a slice begins, and how many are left of its strand.
  struct Slice { i32 key, left; };
  CF_DEVICE void advance(Slice& slice) const {
    const i32 stride = p.splits * kBlockKV;
    slice.key += stride;
    if (!kWalks || --slice.left > 0) return;
    slice = {slice.key - a_strand * stride + kSlice, a_strand};
  }

  CF_DEVICE u32 stages_of(i32 warp) const { return shared + warp * kWarpBytes; }
  CF_DEVICE u32 stage(i32 n) const { return stages_of(at.warp) + n % kStages * kStageBytes; }

  CF_DEVICE void load_slice(i32 n, Slice& slice) const {
    if (n < slices && slice.key < stop) {
      const i32 end = smaller(stop, sight.kv_length), lane = lane_index();
      const u32 to = shuffle(stage(n), lane);      // in no uniform register
      load_tile<TileK, 32, true>(to, k, slice.key, end, p.head_dim, lane);
      load_tile<TileV, 32, true>(to + TileK::kBytes, v, slice.key, end, p.head_dim_v, lane);
    }
    cp_async_commit_group();
    advance(slice);
  }

  // Natural scores of a slice from products, -inf where a row does not see a key.
  CF_DEVICE void select(Scores& s, i32 col) const {
    if (kPlainScores && whole.covers(col, col + kSlice)) {
      const float scale = score_terms_of<float>(p, at.item, 0).scale;
      CF_UNROLL
      for (int u = 0; u < 2 * kN; ++u) s[u][0] = times(scale, s[u][0]), s[u][1] = times(scale, s[u][1]);
      return;
    }
    CF_UNROLL
    for (int u = 0; u < 2 * kN; ++u) {
      const Query of = query(u);
      const Interval keys = of.live ? sight.keys_of(of.row) : Interval{0, 0};
      const ScoreTerms<float> terms = score_terms_of<float>(p, at.item, of.head);
      const Addends addends = addends_of(p, at.item, of.head);
      CF_UNROLL
      for (int h = 0; h < 2; ++h) {
        const i32 j = col + tile_key(h);
        float x = times(terms.scale, s[u][h]), unused;
        if constexpr (kSoftcapOrAlibi) {
          if (terms.softcap > 0.0f) x = terms.capped(x, unused);
          if (terms.slope != 0.0f) x = fused(-terms.slope, absolute(float(of.row + sight.offset - j)), x);
        }
        const bool seen = keys.contains(j) && j < stop;
        if constexpr (kMaskOrBias) {
          if (seen) {
            const u8 allowed = addends.mask ? addends.mask[of.row * addends.mask_row + j * addends.mask_col] : u8(1);
            const i64 bias_at = addends.bias_first + of.row * addends.bias_row + j * addends.bias_col;
            const float bias = addends.bias ? load_kind<float>(addends.bias, addends.bias_kind, bias_at) : 0.0f;
            x = with_addend(x, masked(bias, allowed));
          }
        }
        s[u][h] = seen ? x : -Limits<float>::infinity();
      }
    }
  }

  CF_DEVICE void drop(Scores& s, i32 col) const {
    CF_UNROLL
    for (int u = 0; u < 2 * kN; ++u) {
      const Query of = query(u);
      const DropoutStream stream = dropout_of(p, at.item, of.head);
      CF_UNROLL
      for (int h = 0; h < 2; ++h) s[u][h] = stream.kept(of.row, col + tile_key(h)) ? s[u][h] : 0.0f;
    }
  }

  static CF_DEVICE void add_product(float (&acc)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_m16n8k16<Element>(acc[0], acc[1], acc[2], acc[3], a, b0, b1);
  }

  // S^T = K Q^T: two sums, so that each product waits for the last but one.
  CF_DEVICE void multiply_keys(Scores& s, u32 tile) const {
    float acc[kN][2][4] = {};
    CF_UNROLL
    for (int c = 0; c < kHeadDim / 16; ++c) {
      u32 keys[4];
      ldmatrix_x4(keys, read_k.block(tile, 0, 16 * c));
      CF_UNROLL
      for (int n = 0; n < kN; ++n) {
        if constexpr (kStored) {
          float low, high;
          ld_shared_f32x2(low, high, stored_query(n, 2 * c));
          add_product(acc[n][c % 2], keys, bits_of(low), bits_of(high));
        } else {
          add_product(acc[n][c % 2], keys, q[n][2 * c], q[n][2 * c + 1]);
        }
      }
    }
    CF_UNROLL
    for (int u = 0; u < 2 * kN; ++u) {
      CF_UNROLL
      for (int h = 0; h < 2; ++h) s[u][h] = acc[u / 2][0][2 * h + u % 2] + acc[u / 2][1][2 * h + u % 2];
    }
  }

  // O^T += V^T P^T
  CF_DEVICE void multiply_values(const Scores& s, u32 tile) {
    u32 weights[kN][2];
    CF_UNROLL
    for (int n = 0; n < kN; ++n) {
      CF_UNROLL
      for (int h = 0; h < 2; ++h) weights[n][h] = movmatrix_trans(cvt_rn_x2<Element>(s[2 * n][h], s[2 * n + 1][h]));
    }
    CF_UNROLL
    for (int m = 0; m < kHeadDimV / 16; ++m) {
      u32 values[4];
      ldmatrix_x4_trans(values, read_v.block(tile, 0, 16 * m));
      CF_UNROLL
      for (int n = 0; n < kN; ++n) add_product(out[n][m], values, weights[n][0], weights[n][1]);
    }
  }

  CF_DEVICE void step(i32 n, i32 key) {
    Scores s;
    multiply_keys(s, stage(n));
    select(s, key);
    float rescale[2 * kN];
    softmax.update(s, rescale);
    bool any = false;
    CF_UNROLL
    for (int u = 0; u < 2 * kN; ++u) any = any || rescale[u] != 1.0f;
    if (vote_any(any)) {
      CF_UNROLL
      for (int m = 0; m < kHeadDimV / 16; ++m) {
        CF_UNROLL
        for (int x = 0; x < 4 * kN; ++x) out[x / 4][m][x % 4] *= rescale[x / 4 * 2 + x % 2];
      }
    }
    if (kDropout && p.call.dropout_threshold < 65536) drop(s, key);
    multiply_values(s, stage(n) + TileK::kBytes);
  }

  CF_DEVICE void reset() {
    softmax.reset();
    CF_UNROLL
    for (int n = 0; n < kN; ++n) clear(out[n]);
  }

  CF_DEVICE void run() {
    Slice coming{start, a_strand}, slice = coming;
    CF_UNROLL_1
    for (i32 n = 0; n < kStages - 1; ++n) load_slice(n, coming);
    load_queries();
    CF_UNROLL_1
    for (i32 n = 0; n < slices; ++n) {
      cp_async_wait_group<kStages - 2>();
      warp_barrier();        // all lanes' copies of slice n are there; nobody reads the one before any more
      load_slice(n + kStages - 1, coming);
      if (!kWalks || slice.key < stop) step(n, slice.key);
      if (kWalks && slice.left == 1) join_strand(n < a_strand);
      advance(slice);
    }
    cp_async_wait_group<0>();
  }

  CF_DEVICE Sums sums(int u) { return {softmax.m[u], ColumnLanes::sum(softmax.l[u])}; }

  // A walking warp's strand has ended.
  CF_DEVICE void join_strand(bool is_first) {
    if constexpr (kWalks) {
      CF_UNROLL
      for (int u = 0; u < 2 * kN; ++u) {
        const Sums own = sums(u);
        float mine = 0.0f, others = 1.0f;
        if (is_first) joined_sums[u] = own;
        else joined_sums[u].join(own, mine, others);
        CF_UNROLL
        for (int m = 0; m < kHeadDimV / 16; ++m) {
          CF_UNROLL
          for (int x = u % 2; x < 4; x += 2) {
            float& to = joined[u / 2][m][x];
            to = is_first ? out[u / 2][m][x] : weighed(to, mine, out[u / 2][m][x], others);
          }
        }
      }
      reset();
    }
  }

  CF_DEVICE u32 sums_of(i32 warp, i32 row) const { return shared + kAtSums + (warp * kTileRows + row) * 8; }
  CF_DEVICE u32 out_of(i32 warp, int n, int m) const {
    return stages_of(warp) + (m * kN + n) * 512 + lane_index() * 16;
  }

  // The strands of a run are joined in order, and go where prepost/combine.cu reads them.
  CF_DEVICE void finish() {
    if constexpr (kWalks) {
      if (slices <= 0) {
        CF_UNROLL
        for (int u = 0; u < 2 * kN; ++u) joined_sums[u] = {-Limits<float>::infinity(), 0.0f};
        CF_UNROLL
        for (int n = 0; n < kN; ++n) clear(joined[n]);
      }
      CF_UNROLL
      for (int u = 0; u < 2 * kN; ++u) {
        const Row to = row_of(u);
        CF_UNROLL
        for (int m = 0; m < kHeadDimV / 16; ++m) {
          to.write(m, joined[u / 2][m][u % 2], joined[u / 2][m][2 + u % 2]);
        }
        if (lane_index() / 4 == 0) to.write_lse(joined_sums[u]);
      }
    } else {
      join_warps();
    }
  }

  CF_DEVICE void join_warps() {
    warp_barrier();          // the warp's stages have been read
    CF_UNROLL
    for (int u = 0; u < 2 * kN; ++u) {
      const Sums own = sums(u);
      if (lane_index() / 4 == 0) st_shared_f32x2(sums_of(at.warp, tile_row(u)), own.m, own.l);
    }
    CF_UNROLL
    for (int m = 0; m < kHeadDimV / 16; ++m) {
      CF_UNROLL
      for (int n = 0; n < kN; ++n) {
        const float(&x)[4] = out[n][m];
        st_shared_128(out_of(at.warp, n, m), {bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3])});
      }
    }
    block_barrier();         // all strands are there
    CF_UNROLL
    for (int u = 0; u < 2 * kN; ++u) {
      float mine[kStrands], others[kStrands];
      CF_UNROLL
      for (int n = 0; n < kStrands; ++n) {
        Sums own;
        ld_shared_f32x2(own.m, own.l, sums_of(n, tile_row(u)));
        if (n == 0) joined_sums[u] = own;
        else joined_sums[u].join(own, mine[n], others[n]);
      }
      const Row to = row_of(u);
      CF_UNROLL_1
      for (int m = at.warp; m < kHeadDimV / 16; m += kWarps) {
        float all[2];
        CF_UNROLL
        for (int n = 0; n < kStrands; ++n) {
          CF_UNROLL
          for (int y = 0; y < 2; ++y) {
            const float x = ld_shared_f32(out_of(n, u / 2, m) + (2 * y + u % 2) * 4);
            all[y] = n == 0 ? x : weighed(all[y], mine[n], x, others[n]);
          }
        }
        to.write(m, all[0], all[1]);
      }
      if (at.warp == 0 && lane_index() / 4 == 0) to.write_lse(joined_sums[u]);
    }
  }

  CF_DEVICE Row row_of(int u) const {
    const Query of = query(u);
    const i64 all = i64(points(p.own)) * p.heads_q * p.seqlen_q;
    const i64 row = at.split * all + row_number(p, at.item, of.head, of.row);
    float* outs = static_cast<float*>(p.call.partials);
    const float l = joined_sums[u].l, kept = kDropout ? dropout_scale<float>(p) : 1.0f;
    return {of.exists ? outs + row * p.head_dim_v : nullptr, outs + p.splits * all * p.head_dim_v + row, p.head_dim_v,
            l == 0.0f ? 0.0f : kept / l};
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_decode(const Params p) {
  const Place at(p, block_index());
  const Visibility sight = visibility_of(p, at.item);
  const Interval some = sight.keys_of_some(0, p.seqlen_q);
  const i32 first = some.start / kBlockKV, tiles = larger(0, ceil_div(some.stop, kBlockKV) - first);
  const i32 a_strand = tiles > at.split ? ceil_div(tiles - at.split, p.splits) : 0;
  const i32 start = (first + at.split) * kBlockKV + (kWalks ? 0 : at.warp * kSlice), stop = some.stop;
  const i32 slices = kWalks ? kStrands * a_strand : larger(0, ceil_div(stop - start, p.splits * kBlockKV));
  const u32 shared = tile_address(shared_address(&shared_storage<u8>()));
  Decode decode{p, at, sight, shared, start, stop, slices, a_strand, sight.keys_of_all(0, p.seqlen_q),
                rows_of<const Element>(p.call.k, p.k, at.item, at.kv_head),
                rows_of<const Element>(p.call.v, p.v, at.item, at.kv_head)};
  decode.reset();
  if (slices > 0) decode.run();
  decode.finish();
}
