// Backward on tensor cores by mma.sync: the gradient of a bias, dS summed over whatever the bias was broadcast over.
//
// A block owns a tile of the bias (attn/bias_grid.cuh), or a few one after the other, and recomputes dS for every (batch
// item, query head, query tile, key tile) that fell on it, in order; long walks are cut into p.splits runs, which
// prepost/sum_partials.cu adds in order. Nothing is held per element of the score matrix but the bias itself. A warp has
// kWarpRows rows of a tile and kStep of its columns: of S, of dP and of the sums, all in registers. Operands come in slices
// of at most 64 columns through a ring of kStages stages, which runs on from tile to tile and from owner to owner.
//
//   visit      | S += Q K^T, by slices   P = exp(S - lse), rounded   dP += dO V^T, by slices   sum += P * (r * dP - delta')
//   each slice | wait for it #   start the copies of the slice kStages - 1 on   multiply
//
// Shared memory: stages of (Q or dO, K or V), each warp's addends, later its results, the plan (attn/bias_plan.cuh).
//
// Ladder (H200, 2026-11-30, bfloat16, 16 heads, L 4096; ms of the gradient alone for a bias (1, 16, L, L) of one item, and
// (1, 1, L, L) of four):                                                                D 128           D 64
//   a tile of 128 x 32 (D 64: x 64) for each block, load, wait, multiply              4.11, 8.29     3.39, 5.33
//   the ring, several owners a block, 128 x 128, addends through registers            2.04, 5.48     1.74, 4.52
//   addends by cp.async as they are; the plan while the tensor cores are busy         1.56, 5.35     1.49, 4.18
//   fewer instructions: rows by shuffles, addresses in the plan,
//     addend and lse in one fused multiply-add, sums by another                       1.28, 3.89     1.03, 2.81
//   64 x 128, two blocks on a multiprocessor                                          1.21, 3.40     0.96, 2.64
// Three stages instead of four at 128 x 128: 1.54, 4.08, and 1.24, 2.98. Two blocks of 128 x 64: 1.28, 3.62, and 1.04, 2.64.
#include "attn/bias_plan.cuh"
#include "attn/bias_sums.cuh"
#include "sm80/store.cuh"
#include "sm80/weights.cuh"

constexpr i32 kWarpRows = 32, kRowWarps = kBlockQ / kWarpRows, kR = kWarpRows / 8, kC = kStep / 4;
static_assert(kBlockQ % kWarpRows == 0 && kBlockKV == kWarps / kRowWarps * kStep && kStep % 16 == 0, "whole fragments");

// Head dims in equal slices of at most 64.
constexpr i32 kWidest = larger(kHeadDim, kHeadDimV), kSlice = round_up(ceil_div(kWidest, ceil_div(kWidest, 64)), 16);
constexpr i32 kSlicesQ = ceil_div(kHeadDim, kSlice), kSlicesO = ceil_div(kHeadDimV, kSlice);

using TileA = Tile<kBlockQ, kSlice>;       // of Q or dO
using TileB = Tile<kBlockKV, kSlice>;      // of K or V
using Part = Tile<64, kSlice>;             // of either
using Staged = Tile<kWarpRows, 64>;        // a warp's results on their way out
using Products = float[kR][kC];
using Sums = BiasSums<kR, kC, kRowWarps, kThreads>;

constexpr i32 kStageBytes = TileA::kBytes + TileB::kBytes, kAtOwn = kStages * kStageBytes;
constexpr i32 kAddendRow = Staging<kStep>::kRow, kOwnBytes = larger(kWarpRows * kAddendRow * 4, Staged::kBytes);
constexpr i32 kAtPlan = kAtOwn + kWarps * kOwnBytes, kPlanBytes = 1024;
static_assert(kAtPlan + kPlanBytes + 128 == kSharedBytes, "the launch gives as much, and room to align");

struct Operands : VisitPlace {
  const Element *q, *k, *dout, *v;      // of the head

  CF_DEVICE void find(const Params& p) {
    const i32 kv_head = head / (p.heads_q / p.heads_kv);
    q = rows_of<const Element>(p.call.q, p.q, item, head).base;
    k = rows_of<const Element>(p.call.k, p.k, item, kv_head).base;
    dout = rows_of<const Element>(p.call.dout, p.dout, item, head).base;
    v = rows_of<const Element>(p.call.v, p.v, item, kv_head).base;
  }
  CF_DEVICE void find_next(const Params& p) {
    q += p.q.head;
    dout += p.dout.head;
    if (head % (p.heads_q / p.heads_kv) != 0) return;
    k += p.k.head;
    v += p.v.head;
  }
};

struct Visit : Operands {
  using Place = Operands;
  bool whole;                // no slice needs a look at lengths or alignment

  CF_DEVICE void begin(const Params& p, const Operands& place) {
    static_cast<Operands&>(*this) = place;
    whole = row + kBlockQ <= sight.q_length && col + kBlockKV <= sight.kv_length && p.head_dim == kSlicesQ * kSlice &&
            p.head_dim_v == kSlicesO * kSlice && ElementRows{q, p.q.row, p.q.col}.packed<8>() &&
            ElementRows{k, p.k.row, p.k.col}.packed<8>() && ElementRows{dout, p.dout.row, p.dout.col}.packed<8>() &&
            ElementRows{v, p.v.row, p.v.col}.packed<8>();
  }
};
static_assert(sizeof(Plan<Visit>) <= kPlanBytes, "there is room");
static_assert(kStages <= 2 * (kSlicesQ + kSlicesO), "what is copied has been planned");

struct Backward {
  const Params& p;
  Plan<Visit>& plan;
  u32 shared;
  i32 number;                // of the visit
  i32 ahead;                 // slices to be begun before the first is used
  u32 stage;                 // the stage that is read next
  i32 fed, fed_slice;        // the visit and the slice, of Q and K, then of dO and V, that are copied next
  Reader<TileA, true> read_a{Sums::row()};
  Reader<TileB, false> read_b{Sums::col()};
  Sums sum;

  CF_DEVICE const Visit& visit() const { return plan.visits[number % 4]; }
  CF_DEVICE i32 row() const { return visit().row + Sums::row(); }
  CF_DEVICE i32 col() const { return visit().col + Sums::col(); }
  CF_DEVICE u32 staging() const { return u32(opaque(shared + kAtOwn + warp_index() * kOwnBytes)); }

  // Begins to copy the slice that comes next into the stage that was read last.
  CF_DEVICE void feed() {
    const Visit& next = plan.visits[fed % 4];
    if (next.owner < plan.stop) {
      const u32 to = stage == shared ? shared + kAtOwn - kStageBytes : stage - kStageBytes;
      const bool scores = fed_slice < kSlicesQ;
      const i32 first = (scores ? fed_slice : fed_slice - kSlicesQ) * kSlice, me = i32(opaque(thread_index()));
      ElementRows a{scores ? next.q : next.dout, scores ? p.q.row : p.dout.row, scores ? p.q.col : p.dout.col};
      ElementRows b{scores ? next.k : next.v, scores ? p.k.row : p.v.row, scores ? p.k.col : p.v.col};
      if (next.whole) {
        const u32 at = to + TileA::place(me / 8, me % 8);
        const i32 chunk = first + me % 8 * 8;
        load_whole_tile<TileA>(at, a.base + (next.row + me / 8) * a.row_stride + chunk, a.row_stride, me);
        load_whole_tile<TileB>(at + TileA::kBytes, b.base + (next.col + me / 8) * b.row_stride + chunk, b.row_stride, me);
      } else {
        const i32 cols = clamp((scores ? p.head_dim : p.head_dim_v) - first, 0, kSlice);
        a.base += first * a.col_stride;
        b.base += first * b.col_stride;
        CF_UNROLL_1
        for (i32 r = 0; r < kBlockQ + kBlockKV; r += Part::kRowCount) {      // code that stands once
          const bool of_a = r < kBlockQ;
          const ElementRows rows{of_a ? a.base : b.base, of_a ? a.row_stride : b.row_stride, of_a ? a.col_stride : b.col_stride};
          load_tile<Part>(to + r * 128, rows, of_a ? next.row + r : next.col + r - kBlockQ,
                          of_a ? next.sight.q_length : next.sight.kv_length, cols, me);
        }
      }
      if (++fed_slice == kSlicesQ + kSlicesO) fed_slice = 0, ++fed;
    }
    cp_async_commit_group();
  }

  // acc = the product of the next slices. The first thread goes on planning where its neighbours keep the tensor core busy.
  template <bool kPlans> CF_DEVICE void multiply(Products& acc, i32 slices) {
    clear(acc);
    CF_UNROLL_1
    for (i32 n = -ahead; n < slices; ++n) {
      cp_async_wait_group<kStages - 2>();
      block_barrier();       // the slice is there for everyone; nobody reads the one before any more
      feed();
      if (n >= 0) {
        if (kPlans && n == 0 && thread_index() == 0) plan.make(p);
        const auto load = [&](u32(&left)[kR / 2][4], int k) {
          CF_UNROLL
          for (int t = 0; t < kR / 2; ++t) ldmatrix_x4(left[t], read_a.block(stage, 16 * t, 16 * k));
        };
        add_product_by_transposed<TileB, kSlice>(acc, load, stage + TileA::kBytes, read_b, 0, [](int) {});
      }
      stage += kStageBytes;
      if (stage == shared + kAtOwn) stage = shared;
    }
    ahead = 0;
  }

  CF_DEVICE AddendSource addends() const { return {addends_of(p, visit().item, visit().head), p.seqlen_q, p.seqlen_k}; }

  // Begins to copy the addends of the warp's part of the tile, or lays them out; they become numbers of the kind returned.
  CF_DEVICE i32 fetch_addends() const {
    const AddendSource source = addends();
    const Addends& from = source.from;
    const i32 bytes = source.bias_bytes();
    warp_barrier();          // the lanes have read what was there
    const bool in_chunks = from.bias_col == 1 && from.bias_row * bytes % 16 == 0 &&
                           (from.bias_kind == KindOf<Element>::value || from.bias_kind == kFloat32) &&
                           reinterpret_cast<u64>(source.bias_at(0, 0)) % 16 == 0;
    if (from.bias != nullptr && from.mask == nullptr && in_chunks) {
      if (bytes == 2) copy_addends<2>(source);
      else copy_addends<4>(source);
      return from.bias_kind;
    }
    CF_UNROLL_1
    for (i32 r = 0; r < kWarpRows; r += 8) {
      source.template stage<8, kStep>(staging() + r * kAddendRow * 4, row() + r, col());
    }
    return kFloat32;
  }

  template <int kBytes> CF_DEVICE void copy_addends(const AddendSource& source) const {
    constexpr i32 kChunks = kStep * kBytes / 16, kRowsAtOnce = 32 / kChunks;
    const i32 r = i32(lane_index()) / kChunks, c = i32(lane_index()) % kChunks * (16 / kBytes);
    const i32 bytes = clamp(source.cols - col() - c, 0, 16 / kBytes) * kBytes;
    const i32 rows = bytes > 0 ? source.rows - row() - r : 0;
    const u32 to = staging() + (r * kAddendRow + c) * kBytes;
    const u8* at = source.bias_at(row() + r, col() + c);
    CF_UNROLL
    for (i32 n = 0; n < kWarpRows; n += kRowsAtOnce) {
      const u8* there = n < rows ? at : static_cast<const u8*>(source.from.bias);
      cp_async_16(to + n * kAddendRow * kBytes, there, n < rows ? bytes : 0);
      at += kRowsAtOnce * source.from.bias_row * kBytes;
    }
  }

  // A lane loads those of one row.
  CF_DEVICE void read_rows(float (&negative_lse)[kR], float (&delta)[kR]) const {
    const i32 i = row() + i32(lane_index()), q_length = visit().sight.q_length;
    const float* row_delta = static_cast<const float*>(p.call.row_delta) + row_number(p, visit().item, visit().head, 0);
    const float own_lse = negative_lse_of(p, visit().item, visit().head, i, q_length);
    const float own_delta = i < q_length ? row_delta[i] : 0.0f;
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      negative_lse[u] = shuffle(own_lse, fragment_row(u));
      delta[u] = shuffle(own_delta, fragment_row(u));
    }
  }

  // Products, or scores without addends, times `factor` become weights; T: what the addends are.
  template <class T> CF_DEVICE void weigh(Products& s, float factor, const float (&negative_lse)[kR]) const {
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kC; w += 2) {
        const u32 at = staging() + (fragment_row(u) * kAddendRow + fragment_col(w)) * i32(sizeof(T));
        float addend[2];
        if constexpr (sizeof(T) == 4) {
          ld_shared_f32x2(addend[0], addend[1], at);
        } else {
          const u32 both = bits_of(ld_shared_f32(at));
          addend[0] = convert<float>(T{u16(both)});
          addend[1] = convert<float>(T{u16(both >> 16)});
        }
        CF_UNROLL
        for (int x = 0; x < 2; ++x) {
          const float power = fused(s[u][w + x], factor, fused(addend[x], kLog2e, negative_lse[u]));
          const float weight = ex2_approx_ftz(power > 0.0f ? 0.0f : power);      // see weight_from
          s[u][w + x] = addend[x] == -Limits<float>::infinity() ? 0.0f : weight;
        }
      }
    }
  }

  // Adds dS of the tile that is visited.
  CF_DEVICE void add() {
    float negative_lse[kR], delta[kR];
    read_rows(negative_lse, delta);
    const i32 addend_kind = fetch_addends();      // they join the copies of the next slice
    Products acc;
    multiply<true>(acc, kSlicesQ);
    cp_async_wait_group<kSlicesQ - 1>();
    warp_barrier();          // the lanes' addends are there
    const ScoreRules<false> rules{score_terms_of<float>(p, visit().item, visit().head), visit().sight};
    float factor = rules.terms.scale * kLog2e;
    if constexpr (kSoftcapOrAlibi) {
      Products unused;
      rules.scale_alone(acc, unused, row(), col());
      factor = kLog2e;
    }
    if (addend_kind == kFloat32) weigh<float>(acc, factor, negative_lse);
    else weigh<Element>(acc, factor, negative_lse);
    const Interval whole = rules.sight.keys_of_all(row(), row() + kWarpRows);
    if (!whole.covers(col(), col() + kStep)) RowBounds::of_query(rules.sight, row()).select(acc, col(), 0.0f);
    Operand<kR / 2, kStep> weights;
    round_to(weights, acc);
    multiply<false>(acc, kSlicesO);
    if constexpr (kDropout) drop(acc);
    CF_UNROLL
    for (int u = 0; u < kR; ++u) {
      CF_UNROLL
      for (int w = 0; w < kC; ++w) {
        const u32 word = weights.word[w / 4][u / 2][w / 2 % 2 * 2 + u % 2];
        const float weight = convert<float>(Element{u16(word >> (w % 2 * 16))});
        float& x = sum.value[u][w];
        x = weight == 0.0f ? x : fused(weight, acc[u][w] - delta[u], x);      // see score_gradient
      }
    }
  }

  CF_DEVICE void drop(Products& dp) const {
    const Dropper dropper = dropper_of(p, visit().item, visit().head);
    const float kept_scale = dropout_scale<float>(p);
    if (!dropper.aligned) {      // one by one: where the elements fall into other groups, code counts for more than time
      u64 dropped = 0;
      CF_UNROLL_1
      for (int n = 0; n < kR * kC; ++n) {
        dropped |= u64(!dropper.stream.kept(row() + fragment_row(n / kC), col() + fragment_col(n % kC))) << n;
      }
      CF_UNROLL
      for (int n = 0; n < kR * kC; ++n) dp[n / kC][n % kC] = (dropped >> n & 1) != 0 ? 0.0f : dp[n / kC][n % kC] * kept_scale;
      return;
    }
    CF_UNROLL
    for (int w = 0; w < kC; w += 4) {
      CF_UNROLL
      for (int u = 0; u < kR; u += 2) {
        const Words words = dropper.words_at(row() + 8 * u, col() + 4 * w, Aligned<true>{});
        CF_UNROLL
        for (int n = 0; n < 8; ++n) {
          float& x = dp[u + n / 4][w + n % 4];
          x = dropper.drops(words, n / 4, n % 4) ? 0.0f : x * kept_scale;
        }
      }
    }
  }

  // The sums to the gradient, or to the partial sums of this run.
  CF_DEVICE void store(u32 owner) {
    Score* const own = &shared_storage<Score>() + (staging() - shared_address(&shared_storage<u8>())) / 4;
    if (!p.own_rows || !p.own_cols) sum.fold(p, own, kOwnBytes / 4);
    const BiasTarget to(p, owner);
    const bool partial = p.splits > 1;
    if (!partial && p.dbias_kind != KindOf<Element>::value && p.dbias_kind != kFloat32) return sum.store<kStep>(to, own);
    const i32 row = to.row() + Sums::row(), col = to.col() + Sums::col(), cols = to.grid.cols;
    Target rows = target_of(p.call.dbias, p.dbias, p.dbias_kind, item_at(p, to.work.own, 0), to.work.head, to.grid.rows,
                            cols - col, p.accumulate != 0);
    if (partial) rows = {to.partials(), cols, 1, kFloat32, to.grid.rows, cols - col, false};
    rows.base = static_cast<char*>(rows.base) + col * rows.col_stride * (rows.kind == kFloat32 ? 4 : 2);
    store_tile<Staged>(sum.value, rows, row, staging(), 0);
  }

  CF_DEVICE void run() {
    u32 owner = plan.first;
    sum.clear();
    CF_UNROLL_1
    for (;; ++number) {
      CF_UNROLL_1
      for (; owner < visit().owner; ++owner) {
        store(owner);
        sum.clear();
      }
      if (owner == plan.stop) return;
      add();
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) cupyflash_backward_bias(const Params p) {
  u8* const storage = &shared_storage<u8>();
  const u32 shared = tile_address(shared_address(storage));
  auto& plan = *reinterpret_cast<Plan<Visit>*>(storage + (shared - shared_address(storage)) + kAtPlan);
  if (thread_index() == 0) plan.begin(p);
  block_barrier();           // the first two visits are there
  Backward backward{p, plan, shared, 0, kStages - 1, shared + kStageBytes};
  backward.run();
}
