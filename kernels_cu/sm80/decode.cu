// Forward for few queries and many keys by mma.sync: bound by the memory that keys and values come from.
//
// The rows of a tile are the queries of all heads of a group, kTileRows of them; a block walks one of p.splits runs of
// keys. Its warps part the keys, not the rows: each streams slices of kSlice keys through stages of its own in shared
// memory and meets the others only at the end, when their results are joined. prepost/combine.cu joins the runs.
//
//   warp, slice n | wait for n; start copies of n + kStages - 1    S = Q K^T    P = exp(S), dropout    O += P V
//   block         | # lse, O of all warps # joined
//
// Measured (H200, 2026-11-30, bfloat16, 32 heads over 8, D 128; 16 x 8192 keys, then 1 x 8192, us with the joining): as it is
// 138.6, 23.7; four blocks of two warps 137.9, 36.4; runs of 2048 keys 135.7, 37.0; of 512 142.7, 24.2; four stages, or six
// blocks of two warps and two stages 148 and 152. Of that 6 and 4 us go to the joining.
// Then (another run, 16 x 8192 keys, with the joining): keys and values that leave the L2 cache first 140.4 to 136.0, for the
// joining finds its numbers there; in two more runs 142.0 to 137.4 and 140.8 to 136.8. Copies without any computing 134.3.
// Nothing gained: copies of K and V one by one, each as soon as its place has been read, 138.2 where this takes 137.4; the
// L2 cache asked for 256 bytes at a time 149; other orders of the blocks; two stages, and three blocks.
// Joined by the last blocks of the launch instead, which wait for the others, 138.8 instead of 137.0, and 1 x 8192 keys 23.6
// instead of 24.1. With that, warps that part heads instead of keys, their queries in registers: 132.2 where the heads of a
// key lie side by side, but 144.5 instead of 140.0 where they do not; runs of 2048 keys 134.8 and 36.7; blocks of eight warps
// 144.6; copies without any computing 130.5, cuDNN 127.1. Where a block took its number from a ticket, so that ptxas did not
// know it to be one number, copies with a cache hint were encoded as illegal instructions (NVRTC 12.9 and 13.0).
//
// Shared memory: Q; the stages of each warp (K, V), which its O takes at the end; lse.
#include "attn/schedule.cuh"
#include "sm80/weights.cuh"

constexpr i32 kTileRows = 16, kSlice = 16, kTileKeys = kWarps * kSlice;
using TileQ = Tile<kTileRows, kHeadDim>;
using TileK = Tile<kSlice, kHeadDim>;
using TileV = Tile<kSlice, kHeadDimV>;
using Scores = float[2][kSlice / 4];

// Offsets in shared memory.
constexpr i32 kStageBytes = TileK::kBytes + TileV::kBytes, kWarpBytes = kStages * kStageBytes;
constexpr i32 kAtStages = TileQ::kBytes, kAtLse = kAtStages + kWarps * kWarpBytes, kUsedBytes = kAtLse + kWarps * kTileRows * 4;
static_assert(kUsedBytes + 128 == kSharedBytes, "the launch gives as much, and room to align");
static_assert(kTileRows * kHeadDimV * 4 <= kWarpBytes, "a warp's output fits its stages");

// What a block works on: `rows` in all (query i of head h of the group is row h * seqlen_q + i), from `first_row`.
struct Place {
  Item item;
  i32 kv_head, first_row, rows, split;

  CF_DEVICE Place(const Params& p, u32 block) {
    rows = p.heads_q / p.heads_kv * p.seqlen_q;
    Digits digits{block};      // all heads of a run together: often their keys lie side by side
    first_row = rows <= kTileRows ? 0 : digits.take(ceil_div(rows, kTileRows)) * kTileRows;
    kv_head = digits.take(p.heads_kv);
    split = digits.take(p.splits);
    item = item_at(p, digits.rest, 0);
  }
};

// A row of the tile.
struct Query {
  i32 head, row;
  bool exists, live;      // is there such a row; is it below the query length

  CF_DEVICE Query(const Params& p, const Place& at, i32 tile_row, i32 q_length) {
    const i32 number = at.first_row + tile_row, last = smaller(number, at.rows - 1);
    const i32 of_group = p.seqlen_q == 1 ? last : last / p.seqlen_q;
    head = at.kv_head * (p.heads_q / p.heads_kv) + of_group;
    row = last - of_group * p.seqlen_q;
    exists = number < at.rows;
    live = exists && row < q_length;
  }
};

struct Decode {
  const Params& p;
  const Place& at;
  Visibility sight;
  u32 shared;
  i32 start, stop;                     // keys of the run
  ElementRows k, v;
  Reader<TileK, false> read_k;
  Reader<TileV, true> read_v;
  Reader<TileQ, true> read_q;
  OnlineSoftmax<float, 2, QuadLanes> softmax;
  float out[2][kHeadDimV / 4];

  CF_DEVICE Query query(int u) const { return Query(p, at, fragment_row(u), sight.q_length); }

  CF_DEVICE void load_queries() {
    constexpr i32 kChunks = kHeadDim / 8;
    CF_UNROLL_1
    for (i32 n = thread_index(); n < kTileRows * kChunks; n += kThreads) {
      const i32 r = n / kChunks, col = n % kChunks * 8;
      const Query of(p, at, r, sight.q_length);
      const ElementRows rows = rows_of<const Element>(p.call.q, p.q, at.item, of.head);
      u32 words[4] = {};
      if (of.live && rows.packed<8>() && col + 8 <= p.head_dim) {
        const Packed<u32, 4> chunk = *reinterpret_cast<const Packed<u32, 4>*>(rows.at(of.row, col));
        CF_UNROLL
        for (int x = 0; x < 4; ++x) words[x] = chunk.value[x];
      } else if (of.live) {
        CF_UNROLL
        for (i32 x = 0; x < 8; ++x) {
          if (col + x < p.head_dim) words[x / 2] |= u32(rows.at(of.row, col + x)->bits) << (x % 2 * 16);
        }
      }
      st_shared_128(shared + TileQ::place(r, n % kChunks), words);
    }
    block_barrier();       // the queries are there
  }

  CF_DEVICE i32 slice(i32 n) const { return start + (n * kWarps + i32(warp_index())) * kSlice; }
  CF_DEVICE u32 stage(i32 n) const { return stages_of(warp_index()) + n % kStages * kStageBytes; }
  CF_DEVICE u32 stages_of(i32 warp) const { return shared + kAtStages + warp * kWarpBytes; }

  CF_DEVICE void load_slice(i32 n) const {
    if (slice(n) < stop) {
      const i32 end = smaller(stop, sight.kv_length), lane = lane_index();
      load_tile<TileK, 32, true>(stage(n), k, slice(n), end, p.head_dim, lane);
      load_tile<TileV, 32, true>(stage(n) + TileK::kBytes, v, slice(n), end, p.head_dim_v, lane);
    }
    cp_async_commit_group();
  }

  // Natural scores of a slice from products, -inf where a row does not see a key.
  CF_DEVICE void select(Scores& s, i32 col) const {
    CF_UNROLL
    for (int u = 0; u < 2; ++u) {
      const Query of = query(u);
      const Interval keys = of.live ? sight.keys_of(of.row) : Interval{0, 0};
      const ScoreTerms<float> terms = score_terms_of<float>(p, at.item, of.head);
      const Addends addends = addends_of(p, at.item, of.head);
      CF_UNROLL
      for (int w = 0; w < kSlice / 4; ++w) {
        const i32 j = col + fragment_col(w);
        float x = times(terms.scale, s[u][w]), unused;
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
        s[u][w] = seen ? x : -Limits<float>::infinity();
      }
    }
  }

  CF_DEVICE void drop(Scores& s, i32 col) const {
    CF_UNROLL
    for (int u = 0; u < 2; ++u) {
      const Query of = query(u);
      const DropoutStream stream = dropout_of(p, at.item, of.head);
      CF_UNROLL
      for (int w = 0; w < kSlice / 4; ++w) s[u][w] = stream.kept(of.row, col + fragment_col(w)) ? s[u][w] : 0.0f;
    }
  }

  CF_DEVICE void step(i32 n) {
    Scores s;
    const auto load = [&](u32(&left)[1][4], int k) { ldmatrix_x4(left[0], read_q.block(shared, 0, 16 * k)); };
    multiply_by_transposed<TileK, kHeadDim>(s, load, stage(n), read_k, 0, [](int) {});
    select(s, slice(n));
    float rescale[2];
    softmax.update(s, rescale);
    if (vote_any(rescale[0] != 1.0f || rescale[1] != 1.0f)) {
      CF_UNROLL
      for (int w = 0; w < kHeadDimV / 4; ++w) out[0][w] *= rescale[0], out[1][w] *= rescale[1];
    }
    if constexpr (kDropout) drop(s, slice(n));
    Operand<1, kSlice> rounded;
    round_to(rounded, s);
    multiply<TileV, kSlice>(out, rounded, stage(n) + TileK::kBytes, read_v, 0);
  }

  CF_DEVICE void run() {
    CF_UNROLL_1
    for (i32 n = 0; n < kStages - 1; ++n) load_slice(n);
    load_queries();
    CF_UNROLL_1
    for (i32 n = 0; slice(n) < stop; ++n) {
      cp_async_wait_group<kStages - 2>();
      warp_barrier();        // all lanes' copies of slice n are there; nobody reads the one before any more
      load_slice(n + kStages - 1);
      step(n);
    }
    cp_async_wait_group<0>();
  }

  CF_DEVICE u32 lse_of(i32 warp, i32 tile_row) const { return shared + kAtLse + (warp * kTileRows + tile_row) * 4; }
  CF_DEVICE u32 out_of(i32 warp, i32 tile_row) const { return stages_of(warp) + tile_row * kHeadDimV * 4; }

  // The warps' results are joined as prepost/combine.cu does it, and go where it reads them.
  CF_DEVICE void finish() {
    const float none = -Limits<float>::infinity(), kept = kDropout ? dropout_scale<float>(p) : 1.0f;
    warp_barrier();          // the warp's stages have been read
    CF_UNROLL
    for (int u = 0; u < 2; ++u) {
      float factor, lse;
      softmax.finish(u, none, factor, lse);
      if (lane_index() % 4 == 0) st_shared_32(lse_of(warp_index(), fragment_row(u)), bits_of(lse));
      CF_UNROLL
      for (int w = 0; w < kHeadDimV / 4; w += 2) {
        const u32 to = out_of(warp_index(), fragment_row(u)) + fragment_col(w) * 4;
        st_shared_f32x2(to, out[u][w] * factor * kept, out[u][w + 1] * factor * kept);
      }
    }
    block_barrier();         // all warps' results are there
    const i64 all = i64(points(p.own)) * p.heads_q * p.seqlen_q;
    float* outs = static_cast<float*>(p.call.partials);
    CF_UNROLL_1
    for (i32 r = warp_index(); r < kTileRows; r += kWarps) {
      const Query of(p, at, r, sight.q_length);
      if (!of.exists) continue;
      float top = none, total = 0.0f, weight[kWarps];
      CF_UNROLL
      for (i32 n = 0; n < kWarps; ++n) top = maximum(top, weight[n] = ld_shared_f32(lse_of(n, r)));
      const float reference = reference_of(top);
      CF_UNROLL
      for (i32 n = 0; n < kWarps; ++n) total += weight[n] = exponential(weight[n] - reference);
      const i64 to = at.split * all + row_number(p, at.item, of.head, of.row);
      CF_UNROLL_1
      for (i32 col = lane_index(); col < p.head_dim_v; col += 32) {
        float sum = 0.0f;
        CF_UNROLL
        for (i32 n = 0; n < kWarps; ++n) {
          if (weight[n] != 0.0f) sum = fused(weight[n] / total, ld_shared_f32(out_of(n, r) + col * 4), sum);
        }
        outs[to * p.head_dim_v + col] = sum;
      }
      const float lse = top == Limits<float>::infinity() || top == none ? top : top + logarithm(total);
      if (lane_index() == 0) outs[p.splits * all * p.head_dim_v + to] = lse;
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_decode(const Params p) {
  const Place at(p, block_index());
  const Visibility sight = visibility_of(p, at.item);
  const Interval some = sight.keys_of_some(0, p.seqlen_q);
  const i32 first = some.start / kTileKeys, tiles = larger(0, ceil_div(some.stop, kTileKeys) - first);
  const i32 start = (first + part_start(tiles, at.split, p.splits)) * kTileKeys;
  const i32 stop = smaller((first + part_start(tiles, at.split + 1, p.splits)) * kTileKeys, some.stop);
  const u32 shared = tile_address(shared_address(&shared_storage<u8>()));
  Decode decode{p, at, sight, shared, start, stop,
                rows_of<const Element>(p.call.k, p.k, at.item, at.kv_head),
                rows_of<const Element>(p.call.v, p.v, at.item, at.kv_head)};
  decode.softmax.reset();
  clear(decode.out);
  if (start < stop) decode.run();
  decode.finish();
}
