// What a pair of warps does in a backward that owns keys: dv and dk of kPairRows of them, from a step of queries at a time.
//
//   P = exp(S - lse)     dv += (r * P)^T dO     dS = P * (r * dP - delta')     dA = dS * d(c)/d(a)     dk += scale * dA^T q
//
// The first warp of a pair computes S^T = K Q^T and owns dv, the second dP^T = V dO^T and owns dk. With keys on rows, P^T
// and dA^T leave the accumulators as operands of the next product; P^T crosses from one warp to the other, rounded. What
// dropout takes each warp works out for half of a step, ahead of its product, and leaves to the other as a word a lane.
//
//   a step  | first warp   flags -> shared    S^T = K Q^T     P^T -> shared     # pair    dv += (r * P)^T dO
//           | second warp  flags -> shared    dP^T = V dO^T                     # pair    P^T <- shared    dA^T    dk += dA^T Q
//
// Shared memory: K, V (later the staging of dv, dk), two tiles of Q and dO, P of each pair, lse and delta, addends, the flags
// of dropout (in V's place where the keys are in registers), the pass.
#pragma once
#include "sm80/backward_pass.cuh"
#include "sm80/store.cuh"
#include "sm80/weights.cuh"

constexpr i32 kWideDim = larger(kHeadDim, kHeadDimV);
// What stays in registers, where they have room: the pair's keys; where a lane reads tiles.
constexpr bool kKeysInRegisters = kWideDim <= 64 && kPlainScores, kReaders = kWideDim <= 128 && !kDropout;
static_assert(kBlockKV % (16 * kPairs) == 0 && kBlockQ % kStep == 0 && kStep % 16 == 0, "whole fragments");

using TileK = Tile<kBlockKV, kWideDim>;
using TileV = Tile<kBlockKV, kWideDim>;
using TileQ = Tile<kBlockQ, kHeadDim>;
using TileO = Tile<kBlockQ, kHeadDimV>;
using Scores = float[kR][kC];
using Accumulator = float[kR][kWideDim / 4];
using Weighted = Operand<kR / 2, kStep>;
constexpr int kGroups = kStep / 16 * (kR / 2), kOwnGroups = ceil_div(kGroups, 2);      // of 16 x 16, of a step and of a warp
static_assert(kOwnGroups <= 4, "their flags fit a word");

// Offsets in shared memory.
constexpr i32 kWeightBytes = kPairRows * kStep * 2, kAddendBytes = kMaskOrBias ? kStep * Staging<kPairRows>::kRow * 4 : 0;
constexpr i32 kAtV = TileK::kBytes, kAtQ = kAtV + TileV::kBytes, kAtO = kAtQ + 2 * TileQ::kBytes;
constexpr i32 kWeightStages = kStep < kBlockQ ? 2 : 1;      // a pair meets at each step, the block at each tile
constexpr i32 kAtWeights = kAtO + 2 * TileO::kBytes, kAtRows = kAtWeights + kWeightStages * kPairs * kWeightBytes;
constexpr i32 kAtAddends = kAtRows + 4 * kBlockQ * 4, kAtFlags = kAtAddends + kPairs * kAddendBytes;
constexpr i32 kFlagBytes = kDropout ? kWeightStages * kWarps * 128 : 0;
constexpr i32 kAtPass = kAtFlags + (kKeysInRegisters ? 0 : kFlagBytes);      // then flags take the place of V
constexpr i32 kPairsEnd = kAtPass + kPassBytes;

struct Pair {
  const Params& p;
  Pass& pass;
  u32 shared;
  i32 pair;
  Reader<TileK, true> read_keys{pair * kPairRows};
  Reader<TileQ, false> read_q;
  Reader<TileO, false> read_o;
  Operand<kR / 2, kKeysInRegisters ? kWideDim : 16> own_keys;      // of the pair: K in its first warp, V in the second

  // Registers are too dear to hold what follows from it.
  CF_DEVICE static u32 own_lane() { return u32(opaque(lane_index())); }

  CF_DEVICE u32 q_tile(i32 x) const { return shared + kAtQ + u32(x) % 2u * TileQ::kBytes; }
  CF_DEVICE u32 o_tile(i32 x) const { return shared + kAtO + u32(x) % 2u * TileO::kBytes; }
  CF_DEVICE u32 weights_of(i32 step) const {
    return shared + kAtWeights + (pair * kWeightStages + step % kWeightStages) * kWeightBytes + lane_index() * 16;
  }
  CF_DEVICE u32 flags_of(i32 step) const {
    const i32 stage = pair * kWeightStages + step % kWeightStages;
    return shared + (kKeysInRegisters ? kAtV : kAtFlags) + stage * 256 + lane_index() * 8;
  }
  CF_DEVICE u32 row_stats(i32 x) const { return shared + kAtRows + u32(x) % 2u * (2 * kBlockQ * 4); }      // lse, -delta

  CF_DEVICE i32 col() const { return pass.col() + pair * kPairRows; }      // the first key of the pair

  // Whether all queries of tile x see every key of the pair.
  CF_DEVICE bool sees_whole(i32 x) const {
    const i32 row = pass.at(x).row;
    return pass.whole[pair].covers(row, smaller(row + kBlockQ, pass.sight.q_length));
  }

  // Between two barriers: the pass is there, and nobody asks for its tiles yet.
  CF_DEVICE void begin_keys() const {
    if (thread_index() == 32 * kPairs) pass.begin_first_tile(p);
    if (thread_index() < 32 * kPairs && lane_index() == 0) pass.begin_pair(pair);
    load_keys();
  }

  CF_DEVICE void load_keys() const {
    const ElementRows k = rows_of<const Element>(p.call.k, p.k, pass.item, pass.work.head);
    const ElementRows v = rows_of<const Element>(p.call.v, p.v, pass.item, pass.work.head);
    const i32 me = kWideDim > 128 ? i32(opaque(thread_index())) : i32(thread_index());
    load_tile<TileK>(shared, k, pass.col(), pass.sight.kv_length, p.head_dim, me);
    load_tile<TileV>(shared + kAtV, v, pass.col(), pass.sight.kv_length, p.head_dim_v, me);
  }

  // The keys of the block are there.
  CF_DEVICE void hold_keys(bool first_of_pair) {
    load_operand(own_keys, first_of_pair ? shared : shared + kAtV, read_keys, 0);
    if constexpr (kDropout) block_barrier();      // nobody reads V any more
  }

  // Starts copies of tile x, in the first warps of the pairs.
  CF_DEVICE void load_queries(i32 x) const {
    constexpr i32 kCopying = 32 * kPairs;
    const Head& head = pass.head(x);
    const i32 me = i32(opaque(thread_index())), row = pass.at(x).row, q_length = pass.sight.q_length;
    if (head.packed && row + kBlockQ <= q_length) {
      const u32 to = TileQ::place(me / 8, me % 8);
      const Element* q_from = head.q + ((row + me / 8) * p.q.row + me % 8 * 8);
      const Element* o_from = head.dout + ((row + me / 8) * p.dout.row + me % 8 * 8);
      load_whole_tile<TileQ, kCopying>(q_tile(x) + to, q_from, p.q.row, me);
      load_whole_tile<TileO, kCopying>(o_tile(x) + to, o_from, p.dout.row, me);
    } else {
      load_tile<TileQ, kCopying>(q_tile(x), {head.q, p.q.row, p.q.col}, row, q_length, p.head_dim, me);
      load_tile<TileO, kCopying>(o_tile(x), {head.dout, p.dout.row, p.dout.col}, row, q_length, p.head_dim_v, me);
    }
  }

  // acc = (the pair's rows of a key tile) b^T, for the step's rows of tile b.
  template <class TileB, int kDepth>
  CF_DEVICE void multiply_keys(Scores& acc, u32 keys, u32 b, const Reader<TileB, false>& read_b, i32 step_row) const {
    const u32 tile = u32(opaque(keys));
    const auto load = [&](u32(&left)[kR / 2][4], int k) {
      CF_UNROLL
      for (int t = 0; t < kR / 2; ++t) {
        if constexpr (kKeysInRegisters) {
          CF_UNROLL
          for (int n = 0; n < 4; ++n) left[t][n] = own_keys.word[k][t][n];
        } else {
          ldmatrix_x4(left[t], read_keys.block(tile, 16 * t, 16 * k));
        }
      }
    };
    multiply_by_transposed<TileB, kDepth>(acc, load, b, read_b, step_row, [](int) {});
  }

  // Pairs that positions and lengths forbid get 0; the step's queries begin at `row`.
  CF_DEVICE void select(Scores& s, i32 row) const { RowBounds::of_key(pass.sight, col()).select(s, row, 0.0f); }

  // What dropout takes of a step: flags of the groups that each warp of the pair worked out, the last kOwnGroups by the second.
  struct Flags {
    u32 of[2];

    static CF_DEVICE int owner(int group) { return group < kOwnGroups ? 0 : 1; }
    static CF_DEVICE int number(int group) { return owner(group) == 0 ? group : group - (kGroups - kOwnGroups); }
    CF_DEVICE u32 halves(int group, int x) const { return Dropper::halves_of(of[owner(group)], number(group), x); }
    CF_DEVICE bool drops(int group, int x, int half) const {
      return Dropper::flag_of(of[owner(group)], number(group), x, half);
    }
  };

  // One warp of the pair works its flags out; when the pair has met, both take all.
  template <int kWarpOfPair> CF_DEVICE void leave_flags(i32 x, i32 step_row) const {
    if constexpr (!kDropout) return;
    const Dropper dropper = dropper_of(p, pass.item, pass.at(x).head);
    const i32 row = pass.at(x).row + step_row;
    const u32 flags = dropper.turned_flags<kOwnGroups>([&](int n) {
      const int group = n + (kWarpOfPair == 0 ? 0 : kGroups - kOwnGroups);
      return Group{row + group / (kR / 2) * 16, col() + group % (kR / 2) * 16};
    });
    st_shared_32(flags_of(step_number(x, step_row)) + 4 * kWarpOfPair, flags);
  }
  CF_DEVICE Flags take_flags(i32 x, i32 step_row) const {
    float first = 0.0f, second = 0.0f;
    if constexpr (kDropout) ld_shared_f32x2(first, second, flags_of(step_number(x, step_row)));
    return {{bits_of(first), bits_of(second)}};
  }

  static CF_DEVICE i32 step_number(i32 x, i32 step_row) { return x * (kBlockQ / kStep) + step_row / kStep; }

  CF_DEVICE AddendSource addends_of_pass(i32 head) const {
    return {addends_of(p, pass.item, head), pass.sight.q_length, pass.sight.kv_length};
  }

  // What the first warp of a pair does with a step: weights into shared memory and into dv.
  CF_DEVICE void give_weights(Accumulator& dv, i32 x, i32 step_row, bool whole) const {
    const i32 head = pass.at(x).head, row = pass.at(x).row + step_row;
    leave_flags<0>(x, step_row);
    const ScoreRules<true> rules{score_terms_of<float>(p, pass.item, head), pass.sight};
    Scores s, derivative;
    AddendBatch<kStep, kMaskOrBias ? kPairRows : 16> addends;
    if constexpr (kMaskOrBias) addends_of_pass(head).fetch(addends, row, col());
    const Reader<TileQ, false> own_read = kReaders ? read_q : Reader<TileQ, false>(0, 0, own_lane());
    multiply_keys<TileQ, kHeadDim>(s, shared, q_tile(x), own_read, step_row);
    const u32 staged = shared + kAtAddends + pair * kAddendBytes;
    if constexpr (kMaskOrBias) addends_of_pass(head).lay_out(addends, staged, row, col());
    if constexpr (!kPlainScores) rules.scale(s, derivative, col(), row, staged);
    const float factor = kPlainScores ? rules.terms.scale * kLog2e : kLog2e;
    const u32 lse_at = row_stats(x) + (step_row + fragment_col(0)) * 4;
    CF_UNROLL
    for (int w = 0; w < kC; w += 2) {
      float lse[2];
      ld_shared_f32x2(lse[0], lse[1], lse_at + w / 2 * 32);
      CF_UNROLL
      for (int u = 0; u < kR; ++u) {
        CF_UNROLL
        for (int y = 0; y < 2; ++y) {
          s[u][w + y] = weight_from(s[u][w + y], factor, -lse[y]);
        }
      }
    }
    if (!whole) select(s, row);
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
    round_to(given, sent);
    if constexpr (kSoftcapOrAlibi) round_to(kept, s);
    else kept = given;
    const u32 to = weights_of(step_number(x, step_row));
    CF_UNROLL
    for (int n = 0; n < kGroups; ++n) st_shared_128(to + n * 512, given.word[n / (kR / 2)][n % (kR / 2)]);
    barrier_sync_aligned(1 + pair, 64);      // weights and flags are there; those of two steps ago have been read
    if constexpr (kDropout) drop(kept, take_flags(x, step_row));
    multiply<TileO, kStep>(dv, kept, o_tile(x), Reader<TileO, true>(0, 0, own_lane()), step_row);
  }

  static CF_DEVICE void drop(Weighted& kept, const Flags& flags) {
    CF_UNROLL
    for (int n = 0; n < kGroups; ++n) {
      CF_UNROLL
      for (int x = 0; x < 4; ++x) kept.word[n / (kR / 2)][n % (kR / 2)][x] &= ~flags.halves(n, x);
    }
  }

  // What the second warp does: dA^T from them, into dk. `meanwhile` is called after the first
  // product, `leave` with dA^T.
  template <class Meanwhile, class Leave>
  CF_DEVICE void take_weights(Accumulator& dk, i32 x, i32 step_row, bool whole, Meanwhile meanwhile, Leave leave) const {
    Scores dp;
    leave_flags<1>(x, step_row);
    const Reader<TileO, false> own_read = kReaders ? read_o : Reader<TileO, false>(0, 0, own_lane());
    multiply_keys<TileO, kHeadDimV>(dp, shared + kAtV, o_tile(x), own_read, step_row);
    meanwhile();
    const float kept_scale = kDropout ? dropout_scale<float>(p) : 1.0f;
    const u32 delta_at = row_stats(x) + (kBlockQ + step_row + fragment_col(0)) * 4;
    float less_delta[kC];
    CF_UNROLL
    for (int w = 0; w < kC; w += 2) ld_shared_f32x2(less_delta[w], less_delta[w + 1], delta_at + w / 2 * 32);
    barrier_sync_aligned(1 + pair, 64);      // as above
    const Flags flags = take_flags(x, step_row);
    CF_UNROLL
    for (int n = 0; n < kGroups; ++n) {
      const int k = n / (kR / 2), t = n % (kR / 2);
      u32 words[4];
      ld_shared_128(words, weights_of(step_number(x, step_row)) + n * 512);
      CF_UNROLL
      for (int x4 = 0; x4 < 8; ++x4) {
        const int u = 2 * t + x4 / 2 % 2, w = 4 * k + x4 / 4 * 2 + x4 % 2;
        const float weight = convert<float>(Element{u16(words[x4 / 2] >> (x4 % 2 * 16))});
        float gain = dp[u][w] + less_delta[w];
        if constexpr (kDropout) gain = flags.drops(n, x4 / 2, x4 % 2) ? less_delta[w] : fused(dp[u][w], kept_scale, less_delta[w]);
        dp[u][w] = score_gradient(weight, gain);
      }
    }
    if (!whole) select(dp, pass.at(x).row + step_row);
    Weighted rounded;
    round_to(rounded, dp);
    leave(rounded);
    multiply<TileQ, kStep>(dk, rounded, q_tile(x), Reader<TileQ, true>(0, 0, own_lane()), step_row);
  }

  // Writes dv or dk, times `factor`, through the rows of K or V that only the warp itself reads.
  CF_DEVICE void store(Accumulator& acc, float factor, const Target& target, u32 staging) const {
    if (target.base == nullptr) return;
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kWideDim / 4; ++w) acc[u][w] *= factor;
    }
    store_tile<TileK>(acc, target, col(), staging, pair * kPairRows);
  }

  CF_DEVICE void finish(Accumulator& acc, bool first_of_pair) const {
    const Item item = item_at(p, pass.work.own, 0);
    const bool accumulate = p.accumulate != 0;
    block_barrier();         // nobody reads the keys any more
    const Target dv = target_of(p.call.dv, p.dv, p.dv_kind, item, pass.work.head, p.seqlen_k, p.head_dim_v, accumulate);
    const Target dk = target_of(p.call.dk, p.dk, p.dk_kind, item, pass.work.head, p.seqlen_k, p.head_dim, accumulate);
    if (first_of_pair) store(acc, kDropout ? dropout_scale<float>(p) : 1.0f, dv, shared);
    else store(acc, float(p.call.scale), dk, shared + kAtV);
  }
};
