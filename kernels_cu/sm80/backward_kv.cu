// Backward on tensor cores by mma.sync, first half: dk and dv of one tile of keys (Dao 2023, Algorithm 2, turned).
//
//   P = exp(S - lse)     dv += (r * P)^T dO     dS = P * (r * dP - delta')     dA = dS * d(c)/d(a)     dk += scale * dA^T q
//
// Warps work in pairs on kPairRows keys: the first of a pair computes S^T = K Q^T and owns dv, the second dP^T = V dO^T
// and owns dk. With keys on rows, P^T and dA^T leave the accumulators as operands of the next product; only P^T crosses
// from one warp to the other, rounded, and its sign says what dropout took. Queries come in tiles of kBlockQ and are
// taken in steps of kStep; all query heads of the group and all items that share the keys follow one another, in order.
//
//   query tile x        | wait for Q, dO, lse, delta of x; start copies of x + 1
//     each step, first  | S^T = K Q^T     P^T -> shared     #   dv += P^T dO
//     each step, second | dP^T = V dO^T                     #   P^T <- shared    dA^T    dk += dA^T Q        # the pair
//
// Shared memory: K, V (later the staging of dv, dk), two tiles of Q and dO, two of P a pair, lse and delta, addends.
#include "attn/schedule.cuh"
#include "sm80/store.cuh"
#include "sm80/weights.cuh"

constexpr i32 kPairs = kWarps / 2, kPairRows = kBlockKV / kPairs, kR = kPairRows / 8, kC = kStep / 4;
constexpr i32 kWideDim = larger(kHeadDim, kHeadDimV);
static_assert(kBlockKV % (16 * kPairs) == 0 && kBlockQ % kStep == 0 && kStep % 16 == 0, "whole fragments");
static_assert(2 * kBlockQ <= kThreads, "a thread fetches one of lse or delta");

using TileK = Tile<kBlockKV, kWideDim>;
using TileV = Tile<kBlockKV, kWideDim>;
using TileQ = Tile<kBlockQ, kHeadDim>;
using TileO = Tile<kBlockQ, kHeadDimV>;
using Scores = float[kR][kC];
using Accumulator = float[kR][kWideDim / 4];
using Weighted = Operand<kR / 2, kStep>;

// Offsets in shared memory.
constexpr i32 kWeightBytes = kPairRows * kStep * 2, kAddendBytes = kMaskOrBias ? kStep * Staging<kPairRows>::kRow * 4 : 0;
constexpr i32 kAtV = TileK::kBytes, kAtQ = kAtV + TileV::kBytes, kAtO = kAtQ + 2 * TileQ::kBytes;
constexpr i32 kAtWeights = kAtO + 2 * TileO::kBytes, kAtRows = kAtWeights + 2 * kPairs * kWeightBytes;
constexpr i32 kAtAddends = kAtRows + 4 * kBlockQ * 4, kAtPass = kAtAddends + kPairs * kAddendBytes, kPassBytes = 128;
constexpr i32 kUsedBytes = kAtPass + kPassBytes;
static_assert(kUsedBytes + 128 == kSharedBytes, "the launch gives as much, and room to align");

// The queries of one batch item that see some of the block's keys, for all heads of the group. It lies in shared memory:
// registers are too dear to hold it.
struct Pass {
  Item item;
  Visibility sight;
  i32 first_row, last_row;    // tile edges
};
static_assert(sizeof(Pass) <= kPassBytes, "there is room");

// A tile of queries: the `number`th of a pass.
struct Cursor {
  i32 number, head, row;
  CF_DEVICE void advance(const Pass& pass) {
    ++number;
    row += kBlockQ;
    if (row < pass.last_row) return;
    row = pass.first_row;
    ++head;
  }
};

struct Backward {
  const Params& p;
  Pass& pass;
  i32 kv_head, group, block_col, col;      // first key of the block, of the pair
  u32 shared;
  i32 pair;
  Reader<TileK, true> read_keys{pair * kPairRows};
  Reader<TileQ, false> read_q;
  Reader<TileO, false> read_o;
  Reader<TileQ, true> sum_q;
  Reader<TileO, true> sum_o;
  float fetched;                           // lse or delta of the next tile

  CF_DEVICE u32 q_tile(i32 x) const { return shared + kAtQ + u32(x) % 2u * TileQ::kBytes; }
  CF_DEVICE u32 o_tile(i32 x) const { return shared + kAtO + u32(x) % 2u * TileO::kBytes; }
  CF_DEVICE u32 weights_of(i32 step) const {
    return shared + kAtWeights + (pair * 2 + step % 2) * kWeightBytes + lane_index() * 16;
  }
  CF_DEVICE u32 row_numbers(i32 x, i32 which) const { return shared + kAtRows + (x % 2 * 2 + which) * kBlockQ * 4; }

  CF_DEVICE void begin_pass(const Item& item) const {
    const Visibility sight = visibility_of(p, item);
    const Interval rows = sight.rows_of_some(block_col, block_col + kBlockKV);
    const bool any = rows.start < rows.stop;
    const i32 first_row = rows.start / kBlockQ * kBlockQ, last_row = any ? rows.stop : first_row;
    pass = {item, sight, first_row, last_row};
  }

  CF_DEVICE void load_keys() const {
    const ElementRows k = rows_of<const Element>(p.call.k, p.k, pass.item, kv_head);
    const ElementRows v = rows_of<const Element>(p.call.v, p.v, pass.item, kv_head);
    load_tile<TileK>(shared, k, block_col, pass.sight.kv_length, p.head_dim, thread_index());
    load_tile<TileV>(shared + kAtV, v, block_col, pass.sight.kv_length, p.head_dim_v, thread_index());
  }

  CF_DEVICE void load_queries(const Cursor& at) {
    if (at.head >= (kv_head + 1) * group) return;
    const ElementRows q_rows = rows_of<const Element>(p.call.q, p.q, pass.item, at.head);
    const ElementRows o_rows = rows_of<const Element>(p.call.dout, p.dout, pass.item, at.head);
    load_tile<TileQ>(q_tile(at.number), q_rows, at.row, pass.sight.q_length, p.head_dim, thread_index());
    load_tile<TileO>(o_tile(at.number), o_rows, at.row, pass.sight.q_length, p.head_dim_v, thread_index());
    const i32 i = at.row + i32(thread_index()) % kBlockQ, which = i32(thread_index()) / kBlockQ;
    if (which == 0) fetched = negative_lse_of(p, pass.item, at.head, i, pass.sight.q_length);
    if (which != 1) return;
    const float* row_delta = static_cast<const float*>(p.call.row_delta) + row_number(p, pass.item, at.head, i);
    fetched = i < pass.sight.q_length ? *row_delta : 0.0f;
  }

  // Waits for the tile at `now`, and starts copies of the one at `next`.
  CF_DEVICE void next_tile(const Cursor& now, const Cursor& next) {
    const i32 which = i32(thread_index()) / kBlockQ;
    if (which < 2) st_shared_32(row_numbers(now.number, which) + thread_index() % kBlockQ * 4, bits_of(fetched));
    cp_async_wait_group<0>();
    block_barrier();        // the tile is there for everyone; nobody reads the one before any more
    load_queries(next);
    cp_async_commit_group();
  }

  // acc = (the pair's rows of a key tile) b^T, for the step's rows of tile b.
  template <class TileB, int kDepth>
  CF_DEVICE void multiply_keys(Scores& acc, u32 keys, u32 b, const Reader<TileB, false>& read_b, i32 step_row) const {
    const auto load = [&](u32(&left)[kR / 2][4], int k) {
      CF_UNROLL
      for (int t = 0; t < kR / 2; ++t) ldmatrix_x4(left[t], read_keys.block(keys, 16 * t, 16 * k));
    };
    multiply_by_transposed<TileB, kDepth>(acc, load, b, read_b, step_row, [](int) {});
  }

  // Pairs that positions and lengths forbid get 0; the step's queries begin at `row`.
  CF_DEVICE void select(Scores& s, i32 row) const {
    if (pass.sight.rows_of_all(col, col + kPairRows).covers(row, smaller(row + kStep, pass.sight.q_length))) return;
    RowBounds::of_key(pass.sight, col).select(s, row, 0.0f);
  }

  // What the first warp of a pair does with a step: weights into shared memory and into dv.
  CF_DEVICE void give_weights(Accumulator& dv, const Cursor& at, i32 step_row, i32 number) const {
    const i32 head = at.head, x = at.number, row = at.row + step_row;
    const ScoreRules<true> rules{score_terms_of<float>(p, pass.item, head), pass.sight};
    Scores s, derivative;
    multiply_keys<TileQ, kHeadDim>(s, shared, q_tile(x), read_q, step_row);
    const u32 staged = shared + kAtAddends + pair * kAddendBytes;
    if constexpr (kMaskOrBias) {
      const AddendSource source{addends_of(p, pass.item, head), pass.sight.q_length, pass.sight.kv_length};
      source.stage<kStep, kPairRows>(staged, row, col);
    }
    if constexpr (!kPlainScores) rules.scale(s, derivative, col, row, staged);
    const float factor = kPlainScores ? rules.terms.scale * kLog2e : kLog2e;
    const u32 lse_at = row_numbers(x, 0) + (step_row + fragment_col(0)) * 4;
    CF_UNROLL
    for (int w = 0; w < kC; w += 2) {
      float negative_lse[2];
      ld_shared_f32x2(negative_lse[0], negative_lse[1], lse_at + w / 2 * 32);
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        CF_UNROLL
        for (int y = 0; y < 2; ++y) {
          s[u][w + y] = weight_from(s[u][w + y], factor, negative_lse[y]);
        }
      }
    }
    select(s, row);
    Weighted given, kept;
    Scores sent;
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kC; ++w) {
        const bool capped = kSoftcapOrAlibi && rules.terms.softcap > 0.0f;
        sent[u][w] = capped ? s[u][w] * derivative[u][w] : s[u][w];
      }
    }
    if constexpr (kDropout) {
      const Dropper dropper = dropper_of(p, pass.item, head);
      CF_UNROLL
      for (int w = 0; w < kC; w += 4) {
        CF_UNROLL
        for (int u = 0; u < kR; u += 2) {
          const Words words = dropper.words_at<true>(row + 4 * w, col + 8 * u);
          CF_UNROLL
          for (int n = 0; n < 8; ++n) {
            const bool drops = dropper.drops(words, n / 4, n % 4);
            float& weight = s[u + n / 4][w + n % 4];
            float& signed_weight = sent[u + n / 4][w + n % 4];
            weight = drops ? 0.0f : weight;
            signed_weight = drops ? -signed_weight : signed_weight;
          }
        }
      }
    }
    round_to(given, sent);
    CF_UNROLL
    for (int n = 0; n < kStep / 16 * (kR / 2); ++n) {
      st_shared_128(weights_of(number) + n * 512, given.word[n / (kR / 2)][n % (kR / 2)]);
    }
    barrier_sync_aligned(1 + pair, 64);      // the weights are there; those of two steps ago have been read
    if constexpr (kSoftcapOrAlibi || kDropout) round_to(kept, s);
    else kept = given;
    multiply<TileO, kStep>(dv, kept, o_tile(x), sum_o, step_row);
  }

  // What the second warp does: dA^T from them, into dk.
  CF_DEVICE void take_weights(Accumulator& dk, const Cursor& at, i32 step_row, i32 number) const {
    const i32 x = at.number;
    Scores dp;
    multiply_keys<TileO, kHeadDimV>(dp, shared + kAtV, o_tile(x), read_o, step_row);
    const float kept_scale = kDropout ? dropout_scale<float>(p) : 1.0f;
    const u32 delta_at = row_numbers(x, 1) + (step_row + fragment_col(0)) * 4;
    float delta[kC];
    CF_UNROLL
    for (int w = 0; w < kC; w += 2) ld_shared_f32x2(delta[w], delta[w + 1], delta_at + w / 2 * 32);
    barrier_sync_aligned(1 + pair, 64);      // as above
    CF_UNROLL
    for (int n = 0; n < kStep / 16 * (kR / 2); ++n) {
      const int k = n / (kR / 2), t = n % (kR / 2);
      u32 words[4];
      ld_shared_128(words, weights_of(number) + n * 512);
      CF_UNROLL
      for (int x4 = 0; x4 < 8; ++x4) {
        const int u = 2 * t + x4 / 2 % 2, w = 4 * k + x4 / 4 * 2 + x4 % 2;
        const float weight = convert<float>(Element{u16(words[x4 / 2] >> (x4 % 2 * 16))});
        float gain = dp[u][w] - delta[w];
        const bool drops = kDropout && (words[x4 / 2] >> (x4 % 2 * 16 + 15)) % 2 != 0;
        if constexpr (kDropout) gain = drops ? -delta[w] : fused(dp[u][w], kept_scale, -delta[w]);
        const float size = kDropout ? absolute(weight) : weight;
        dp[u][w] = score_gradient(size, gain);
      }
    }
    select(dp, at.row + step_row);
    Weighted rounded;
    round_to(rounded, dp);
    multiply<TileQ, kStep>(dk, rounded, q_tile(x), sum_q, step_row);
  }

  // Walks all queries; `acc` is dv in the first warp of a pair and dk in the second.
  CF_DEVICE void walk(Accumulator& acc, u32 own, bool first_of_pair) {
    i32 number = 0;
    CF_UNROLL_1
    for (u32 loop = 0; loop < points(p.loop); ++loop) {
      block_barrier();      // nobody reads the pass, the keys and the tiles of the item before any more
      if (thread_index() == 0) begin_pass(item_at(p, own, loop));
      block_barrier();      // the pass is there
      if (pass.first_row == pass.last_row) continue;
      load_keys();
      Cursor at{0, kv_head * group, pass.first_row}, next = at;
      load_queries(at);
      cp_async_commit_group();
      CF_UNROLL_1
      for (; at.head < (kv_head + 1) * group; at = next) {
        next.advance(pass);
        next_tile(at, next);
        CF_UNROLL_1
        for (i32 step_row = 0; step_row < kBlockQ; step_row += kStep, ++number) {
          if (first_of_pair) give_weights(acc, at, step_row, number);
          else take_weights(acc, at, step_row, number);
        }
      }
    }
  }

  // Writes dv or dk, times `factor`, through the rows of K or V that only the warp itself reads.
  CF_DEVICE void store(Accumulator& acc, float factor, const Target& target, u32 staging) const {
    if (target.base == nullptr) return;
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kWideDim / 4; ++w) acc[u][w] *= factor;
    }
    store_tile<TileK>(acc, target, col, staging, pair * kPairRows);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_backward_kv(const Params p) {
  const TileWork work = tile_work(block_index(), ceil_div(p.seqlen_k, kBlockKV), 1, p.heads_kv, false);
  const i32 pair = i32(warp_index()) % kPairs, block_col = work.tile * kBlockKV, head = work.head;
  const bool first_of_pair = i32(warp_index()) < kPairs, accumulate = p.accumulate != 0;
  u8* const storage = &shared_storage<u8>();
  const u32 shared = tile_address(shared_address(storage));
  Pass& pass = *reinterpret_cast<Pass*>(storage + (shared - shared_address(storage)) + kAtPass);
  Backward backward{p, pass, head, p.heads_q / p.heads_kv, block_col, block_col + pair * kPairRows,
                    shared, pair};
  Accumulator acc;
  clear(acc);
  backward.walk(acc, work.own, first_of_pair);
  const Item item = item_at(p, work.own, 0);
  const Target dv = target_of(p.call.dv, p.dv, p.dv_kind, item, head, p.seqlen_k, p.head_dim_v, accumulate);
  const Target dk = target_of(p.call.dk, p.dk, p.dk_kind, item, head, p.seqlen_k, p.head_dim, accumulate);
  if (first_of_pair) backward.store(acc, kDropout ? dropout_scale<float>(p) : 1.0f, dv, backward.shared);
  else backward.store(acc, float(p.call.scale), dk, backward.shared + kAtV);
}
