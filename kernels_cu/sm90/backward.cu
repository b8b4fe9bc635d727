// Backward on Hopper's tensor cores, head dims up to 128: dk and dv of one tile of keys, and its share of dq.
//
//   P = exp(S - lse)     dv += (r * P)^T dO     dS = P * (r * dP - delta')     dA = dS * d(c)/d(a)     dk += scale * dA^T q
//
// FlashAttention-3's turned form (Shah et al. 2024): two warpgroups own 64 keys each and compute S^T = K Q^T and dP^T =
// V dO^T, so that P^T and dA^T leave the accumulators as register operands. Only dA crosses through shared memory, for
// dq = dA K; that product is taken one query tile late, from a second buffer, so that no warpgroup waits for the other.
// dq's columns are split between the warpgroups, or its rows where a query tile has 128. Shares of dq go through shared
// memory to sums in float32, in the order of the key tiles, without the consumers (sm90/backward_shares.cuh). A warp beside
// them turns the sums into dq when they are complete (sm90/backward_beside.cuh), and so do the consumers when there is no
// more work (sm90/backward_finish.cuh). When dv and dq have ended, the share is written and the scores of the next tile
// begin, all under dk; what else the next weights need (lse, the bits of dropout) is fetched and drawn under those scores.
// The consumers start dv, dq and dk in turns. Blocks stay on their multiprocessor and take work by ticket.
//
//   producer      K Q9 V dO9   Q8 dO8   Q7 dO7 ...                                  (query tiles are walked downward, and round)
//   consumers     S9 | dP9 .weights, dA. dv9 dk9 S8 | dP8 .weights, dA. dv8 dq9 dk8 .share of 9. S7 .bits. | ...
//   usher         turn of 9?                 turn of 8? ...                        herald: adds 9, next block's turn
//   and a warp    sums of a head of before -> dq
//
// Shared memory: K | V | Q x kStages | dO x kStages | dA x 2 | share of dq | sums; barriers and row numbers beside them.
//
// TFLOP/s at 16384 keys, full / causal, all launches of a backward together (H200, 2026-11-29, bfloat16). cuDNN 9.19 beside
// them: 557 / 535 and 452 / 418 in the first row, 588 / 568 and 469 / 442 in the next two, then 570 / 587 and 483 / 451.
//
//                                                                    head dim 128          head dim 64
//   dq in turn, added by the consumers straight from registers        499 / 484             463 / 438
//   shares through shared memory, added by the herald                 520 / 531             460 / 473
//     in no order                                                     538 / 541             476 / 482
//   scores of the next tile under dk                                  540 / 548             519 / 497
//     in no order                                                     556 / 553             522 / 506
//     without dq                                                      669 / 652             604 / 593
//   two shares in shared memory                                       546 / 553
//
// On 2026-11-30, at 16384 / 4096 / 1024 keys, head dim 128, without and with a causal mask (cuDNN 607 574 450 / 585 489 322):
//
//   the above                                                         531 506 414 / 543 473 304
//   dk and dv in whole rows, faster row_stats and finish_queries      514 506 430 / 535 484 331
//   products in turns, a herald for each consumer                     549 526 438 / 555 492 328
//     in any order                                                    583 560 447 / 574 510 336
//     without dq                                                      655 641 513 / 650 581 381
//   in turns, one herald, at (4, 16, 4096, 128)                       541, in any order 557
//
// A tile of both consumers took 4900 clk, of which its products are 2560: both weighed at once (1400), took gradients at
// once (250) and waited for products at once; turns part them. Products of 64 x 64 read 128 bytes of shared memory a clk, all
// that there is, and clock marks say that the next one is not even taken until those before have begun: whatever stands
// between two products of a warpgroup costs its time. The second row keeps what does not change from tile to tile in
// registers (there were about twelve looks into shared memory a tile, each awaited), fetches lse a tile ahead and stores dA
// before the turn; the third writes the share before the next scores, under dk, and not after them: 4050 clk a tile. cuDNN
// beside them 558 572 450 / 589 487 321:
//
//   in turns, one herald                                              542 534 438 / 575 505 328
//   nothing is looked up between products                               - 527 443 /   - 513 332
//   shares before scores                                              608 584 461 / 625 535 340
//     in any order                                                    630 611 467 / 639 553 340
//     without turns                                                   617 577 460 / 624 534 339
//     weights rounded first                                           629 580 459 / 617 532 339
//
// Head dim 64 in the same run (cuDNN 464 460 372 / 452 387 251): 522 503 394 / 505 419 281, then 546 538 418 / 543 439 294;
// without turns 506 493 398 / 499 418 285.
//
// Dropout of 0.1 at (4, 16, 4096, 128), against the time without: 1.39, words of one 16 x 16 group after the other behind a
// branch, signs in the weights; 1.21, four groups in step into one word of bits, turned at once (one movmatrix for 16), keys
// in uniform registers; 1.18, gradients from weights that are not rounded. The bits before the scores 1.27, before dP 1.26.
// Head dim 64: 2.07, 1.81, with dq before dv 1.66.
//
// What gave nothing or less: dP of the next tile after its scores (4 % less: nothing of a warpgroup's own runs while it
// weighs), turns that end after both (13 % less), exponentials held before dP is awaited (the last four rows are with it; at
// 4096 keys 583 / 531 without), dq before dv at head dim 128, dv started before dP is awaited, scores of the next tile before
// dk (registers), dq added straight from registers, three stages, two heralds by tile or by consumer (head dim 64: 5 % less),
// the next tile's queries awaited and its lse looked at under dv (13 to 28 % less).
//
// In turn each block of a head runs as fast as the slowest before it: under a causal mask, the fewer of a head run at once,
// the less it costs. A choice of 16 to 64 heads side by side gave 1 to 4 % (sm90_backward.py), at head dim 64 twice as many
// 5 % at 4096 keys and 3 % at 16384.
//
// Where the time goes: a key tile of 16 query tiles (1024 keys, head dim 128) takes 68k clk, each of those 3.6k, the first
// scores 1.3k, the last share 1 to 2k, dk and dv 4.3k on their way out, the keys that come next 0.4k, in any order 2.4k.
// Head dim 64, eight query tiles: 40k, 4.1k, 1.3k, 2k, 2k, 0.3k.
//
// What was tried between pieces of work (2026-11-30, the time of the above in the same process divided by its own, in any
// order, c: causal mask; all results were right, none is kept):
//
//                                                                    head dim 64               head dim 128
//                                                              1024c  1024 16384c 16384   1024c  1024 16384c 16384
//   next scores under the last dk, keys where values were       0.99  0.95  0.98  0.95    0.95  0.96  0.97  0.98
//     no product with zeros for the first tile                     -     -     -     -    0.95  0.96  0.97  0.98
//   two places for keys, the last dq with the next tile         1.02  0.97  0.98  0.95    0.95  0.96  0.92  0.94
//     dv and dk without 64 queries that see none of the keys    0.99  0.93  0.94  0.91    0.92  0.91  0.89  0.89
//     sums finished as they come, a ticket a piece              0.97  0.93  0.97  0.95    0.89  0.88  0.94  0.95
//   who adds the last share under a causal mask finishes it     0.98     -  0.99     -    0.97     -  0.99     -
//     a piece of work later, brought by the herald              0.92     -  0.99     -       -     -     -     -
//
// (The two indented rows, and at head dim 128 three places and one share, are with the third; there, at 128, scores go the
// first row's way.) The loop decides: keys whose place changes, and what looks ahead, are 18 to 56 instructions of a tile's
// 1683 and 1066 and cost 2 to 5 % where there is no end of work to gain by. Bounds at 1024 keys with a causal mask, wrong
// results: without finishing 0.88 of the time at both head dims, without storing dk and dv 0.93 and 1.02. Why finishing
// elsewhere saves nothing is not known: all blocks of a head are at a diagonal tile at once, so that who adds last may wait
// for the others' shares, and 32 KB that TMA brings at an end may wait behind shares and the next tiles. ptxas spills up
// to 1000 bytes where scores, dP or dq are started behind a branch; parts of dv and dk may be, with a fence of their own.
//
// Sums turned into dq by the consumers at the end, against a kernel for it: without a mask 1 to 2 % less time in turn and 0
// to 2 % in any order, with one nothing sure. By the scheduler's warp beside the products, straight from global memory to
// 24 registers: up to twice the time at 1024 keys. dk and dv by TMA: nothing.
//
// By a warp beside the products to which TMA brings the sums (H200, 2026-11-30; all launches of a backward together; time
// of finishing at the end divided by its own; c: causal mask, t: in turn, the others in any order; runs differ by 0.01):
//
//                                                       head dim 64                      head dim 128
//                                            1024c 1024 4096c 4096 1024ct   1024c 1024 4096c 4096 1024ct
//   one block a ticket, shuffles of columns   1.02 1.02    -  0.98  1.01     1.04 1.02    -    -   0.98
//   four blocks, reads in a lane's own order  1.06 1.05 1.00  0.98  1.06     1.04 1.03 1.02  1.00  1.02
//   rows by stmatrix in the sums' place       1.08 1.04 1.00  1.00  1.07     1.03 1.03 1.02  1.00  1.03
//     brought and not stored (wrong)          1.10 1.06 1.03  1.01  1.10     1.08 1.07 1.04  1.01  1.09
//   not finished at all (wrong)               1.12 1.07    -  1.02  1.14     1.17 1.07 1.02    -   1.13
//
// At 16384 keys 1.00 (head dim 64) and 1.01 (128c). With dropout 1.05 (64, 1024c). What counts is the warp's instructions:
// 110, 87 and 55 for 16 rows and 32 columns, and 1000 to take a ticket. The second share in shared memory gave way to the
// sums at head dim 128, where it gave nothing any more (0.99 to 1.02). For the warp the producer finds its work itself.
//
// Sums that are not written to DRAM: the kernel at 1024c reads 468 MB there and writes 382 (head dim 128: 594 and 451), of
// which 272 and 201 are arguments and results. Sums discarded when they are finished, and a third (a quarter) as many heads
// side by side: 276 and 195 (356 and 281), in 0.97 and 0.99 of the speed, in turn 0.91 and 0.93: bandwidth is not what is
// short, and a ring of sums would save memory alone. Discarded alone: 0.98 to 1.02.
//
// Programmatic dependent launch after row_stats (griddepcontrol.wait before all reads, or only before its results): 1 us a
// launch, 1.003 on average of 14 cells from 1024 to 16384 keys.
//
// What a tile without edges executes, 658 (head dim 64) and 491 (128) instructions a thread, became 544 and 395: gains
// begin as -delta in dP's accumulators, whether there is an edge is one comparison, edges are bits of a word, places and
// parities stand in registers, descriptors are one sum, dO comes with Q, and turns say that dA is there. Time of the above
// divided by its own, in any order and in turn together (H200, 2026-11-30; the first row of two runs, which differ by
// 0.015, at 1024 keys by 0.04):
//
//                                                        head dim 64                      head dim 128
//                                             1024c 1024 4096c 4096 16kc 16k    1024c 1024 4096c 4096 16kc 16k
//   all of it                                  1.04 0.99 1.01 0.99 1.00 0.99     1.01 1.00 1.02 1.01 1.01 1.01
//     -delta read twice, not copied            0.98 0.97 0.94 0.92 0.93 0.94     1.00 1.01 1.03 1.01 1.01 1.01
//     read under the scores before             1.01 0.98 1.00 0.97 0.98 0.98     1.00 0.99 0.99 0.96 0.97 0.97
//       turns until the share is written       1.02 0.98 0.98 1.00 0.97 0.98     1.00 0.97 0.98 0.97 0.97 0.99
//       until the next scores are started      1.00 0.94 0.92 0.93 0.88 0.90     0.94 0.88 0.87 0.84 0.86 0.88
//       until these are there                  0.99 0.90 0.89 0.88 0.86 0.88     0.92 0.86 0.86 0.81 0.82 0.86
//
// So instructions are not what counts. Clock marks at 4096 keys, in any order, 4.0k clk a tile (head dim 64), 3.6k (128):
// weights 1060 and 630, dP awaited and gradients 330 and 270, turn awaited and dv dq dk started 820 and 480, share 510 and
// 650, next scores started 630 and 970, and there after 340 and 370 more. The consumers are 700 clk apart, the length of a
// turn, so that products meet products and weights meet weights. Turns until the next scores part them by 1200 and 1400 and
// the weights of 128 take 455, but then those scores wait 800 to 1300 clk for queries, which two stages hold too late.
// Against the first row, means of all cells, at 64 and 128: a third stage of queries 1.00 and 1.00, with such turns 1.00 and
// 0.95; queries freed as soon as dk is there 0.98 and 1.01.
//
// Heads side by side (32 and 16 with a causal mask before, 4 to 30 without one), and where their blocks begin: each row is
// divided by the one above, in any order (H200, 2026-12-01; runs differ by 0.015):
//
//                                                        head dim 64                      head dim 128
//                                             1024c 1024 4096c 4096 16kc 16k    1024c 1024 4096c 4096 16kc 16k
//   as many as fill the GPU, or two            1.01 1.00 1.00 1.01 1.02 1.03     1.03 1.02 1.04 1.00 1.03 1.01
//   queries freed as soon as dk is there          -    -    -    -    -    -     1.02 1.01 1.01 1.01 1.02 1.02
//   blocks begin at query tiles apart             -    - 0.99 1.01 0.99 1.01        -    - 0.93 1.01 0.98 1.03
//
// So blocks begin apart without a bound to the right alone. The first row gives 1.00 to 1.03 in turn there. At head dim 64
// query tiles of 64 instead of 128 give 0.83, dq before dv spills.
//
// What limits then is power. Called for a second on end the card stands at 690 of 700 W and 1665 MHz (128) or 1770 (64), of
// 1980, with 0.65 and 0.53 of the products that fit: 1.15 and 1.33 pJ a FLOP, FlashAttention-4's 1.13 and 1.33. In any order
// it is 0.98 to 1.03 times as fast as that then, at 1024 to 16384 keys (1.00 in the median), and in its first 20 ms 0.97 to
// 1.07 (1.01). Without any traffic of queries and shares (wrong) the speed is 1.00 to 1.06 of this; if turns last until
// the next scores are started, too, 1.03 and 0.99, with that traffic 0.96 and 0.82.
#include "sm90/backward_consumer.cuh"
#include "sm90/backward_shares.cuh"

constexpr bool kSplitRows = kBlockQ == 128;        // of dq between the warpgroups, else its columns
constexpr u32 kAddendsAt = kGradientAt + 2 * kGradientBytes;
static_assert(kAddendsAt + (kMaskOrBias ? 8 * kAddendBytes : 0) == kShareAt, "the launch gives what the kernel uses");
static_assert(kBlockKV == 128 && kThreads == 384, "64 keys a consumer");
static_assert(kSplitRows ? kHeadDim == 64 : kBlockQ == 64, "a consumer computes 64 rows of dq, all columns or half of them");

constexpr bool kStoreFirst = kBlockQ == 64;      // dA before the turn; else registers are too few
constexpr bool kQueriesFirst = kBlockQ == 64 && kHeadDim == 64;      // dq before dv
// Queries make way as soon as dk is there. Behind the last tile scores for nobody may still read them.
constexpr bool kFreesSooner = kHeadDim == 128;
enum : i32 { kTurn = 2 };      // named barrier of the first consumer; that of the second follows
using Output = float[kHeadDim / 2];
using Queries = float[kSplitRows ? kHeadDim / 2 : kHeadDim / 4];

struct Consumer : ConsumerBase {
  Output dk, dv;
  Scores s;                                // of the tile that comes next
  Weighing weighing;                       // what they are turned into weights with
  RowNumbers lse;
  u32 dropped;                             // the weights that dropout removes
  // Where the walk stands. It is kept here, and whatever else does not change from tile to tile: between two products
  // every look into shared memory takes its time.
  i32 head, tile, left;                    // of the query tile; how many there are from it on
  Round round;
  i32 wanting;                             // shares are handed on while less tiles are left: not of none before the first
  i32 plain, plains;                       // the first tile without edges, and how many there are
  Cursor at;                               // of the tile: what `ring` says
  Cursor step{0, 1};                       // of the next dA, as its place becomes free: one for every tile and piece of work
  u32 units;                               // where tiles lie, as descriptors name it
  u32 own_gradients;                       // where the thread stores dA, if registers allow to keep it

  // Descriptors are made where they are needed: registers are few. One sum each: of `descriptor` the lower half, whose
  // parts do not meet, and the upper one, which is the same for all.
  CF_DEVICE u64 operand(u32 from, u32 stride, u32 more) const {
    return (descriptor(0, 0) >> 32 << 32) | u64(units + (from / 16 + (stride / 16 << 16)) + more);
  }
  CF_DEVICE u64 own_keys(u32 from) const { return operand(from, 16, number * (64 * 128 / 16)); }
  CF_DEVICE u64 queries(u32 from, const Cursor& of) const { return operand(from, 16, of.at * (kQueryBytes / 16)); }
  CF_DEVICE u64 queries_by_rows(u32 from) const { return operand(from, kBlockQ * 128, at.at * (kQueryBytes / 16)); }
  CF_DEVICE u64 gradients(const Cursor& of) const {
    const u32 own_rows = kSplitRows ? number * (kBlockKV * 128 / 16) : 0;
    return operand(kGradientAt, kBlockKV * 128, of.at * (kGradientBytes / 16) + own_rows);
  }
  CF_DEVICE u64 keys_by_rows() const {
    constexpr i32 half = kHeadDim / 2, panel = half / 64 * kBlockKV * 128, column = half % 64 * 2;
    return operand(kKAt, kBlockKV * 128, kSplitRows ? 0 : number * ((panel + column) / 16));
  }

  CF_DEVICE AddendTile addends() const { return {tiles + kAddendsAt + (4 * number + thread / 32) * kAddendBytes}; }
  CF_DEVICE bool at_last() const { return left == 1; }
  // dq of the tile before. Of none it is anything, and not handed on.
  CF_DEVICE void start_queries_before(Queries& dq) const { start_queries(dq, gradients(step.before()), keys_by_rows()); }
  // The next dA, for both consumers: the other one reads it in its next turn, which comes after this one's.
  CF_DEVICE void give_gradients(const Operand& ds) const {
    mbarrier_try_wait_parity(step.in(control.ds_free), step.phase);
    if constexpr (kBlockQ == 64) store_gradients(ds, own_gradients + step.at * kGradientBytes);
    else store_gradients(ds, tiles + kGradientAt + step.at * kGradientBytes, 64 * number);
  }

  // dq has been computed from those before; each warp says it for itself.
  CF_DEVICE void free_gradients() const {
    if (thread % 32 == 0) mbarrier_arrive(step.before().in(control.ds_free));
  }

  // The share of the tile before goes to where the herald fetches it, half of it from each consumer.
  CF_DEVICE void prepare_share() const {
    mbarrier_try_wait_parity(shared_address(&control.share_free), at.at);      // of the share before
  }
  CF_DEVICE void hand_on(const Queries& dq) const {
    constexpr int kEntries = sizeof(Queries) / 4;
    static_assert(kEntries * 4 * 256 == kShareBytes, "of 256 threads");
    const u32 to = tiles + kShareAt + number * (kShareBytes / 2) + i32(opaque(thread)) * 16;
    CF_UNROLL
    for (int n = 0; n < kEntries / 4; ++n) st_shared_f32x4(to + n * 2048, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
    fence_proxy_async();
    warp_barrier();
    if (thread % 32 == 0) mbarrier_arrive(at.before().in(control.share_there));
  }

  CF_DEVICE Place place_of(i32 head, i32 tile) const {
    const i32 own = i32(opaque(thread));   // what follows from it is computed here: registers are few
    const i32 key = work().tile * kBlockKV + number * 64 + own / 32 * 16 + own % 32 / 4;
    return {p, work(), head, tile * kBlockQ + own % 4 * 2, key};
  }

  CF_DEVICE void clear() {
    CF_UNROLL
    for (int n = 0; n < kHeadDim / 2; ++n) dk[n] = dv[n] = 0.0f;
  }
  // Before the first tile: the pipeline begins with whatever dA lies there.
  CF_DEVICE void begin() {
    const Work& w = work();
    head = w.head_kv * launch.group, tile = w.round.start, left = i32(w.end - w.begin);
    round = w.round, plain = w.plain[number].start, plains = w.plain[number].stop - plain;
    wanting = launch.queries != kNotWanted ? left : 0;
    fetch(addends(), first_place(), 64 * number);
    step.advance();
    start_next(at, tile, tile == round.last);
    prepare(at, head, tile);
    wgmma_wait_group<0>();
  }
  // The scores of a tile.
  CF_DEVICE void start_next(const Cursor& at, i32 tile, bool clears) {
    mbarrier_try_wait_parity(at.in(control.q_ready), at.phase);
    if (clears) clear_queries(at.at, at.phase, work().sight.q_length, tile);
    start_scores(s, own_keys(kKAt), queries(kQAt, at));
  }
  // What the weights of a tile need besides, while its scores are computed.
  CF_DEVICE void prepare(const Cursor& at, i32 head, i32 tile) {
    if constexpr (kDropout) dropped = draw(place_of(head, tile), thread % 32);
    weighing = weighing_of(control.lse_of(at.at), shared_address(control.zeros), launch.unit, thread);
    if constexpr (kLoadEarly) lse.load(weighing.lse_log2, thread);
  }

  CF_DEVICE void query_tile() {
    Scores dp;                             // or gains
    Operand weights, ds, derivative;
    Queries dq;
    Seen seen;
    const auto here = [&] { return place_of(head, tile); };
    if constexpr (kGainsAtOnce) begin_gains(dp, control.less_delta_of(at.at), thread);
    if constexpr (kPlainScores) start_scores<kGainsAtOnce>(dp, own_keys(kVAt), queries(kOAt, at));
    const i32 row = tile * kBlockQ;
    const bool edge = u32(tile - plain) >= u32(plains);
    if constexpr (!kPlainScores) shape(s, derivative, launch.scale, here(), addends());      // needs the registers of dP
    if (edge) seen = select(s, here());
    weigh(s, weighing, lse, control.lse_of(at.at), launch.unit, thread);
    if constexpr (kRoundedWeights) round_to(weights, s);
    if constexpr (!kPlainScores) start_scores(dp, own_keys(kVAt), queries(kOAt, at));
    if (kMaskOrBias && !at_last()) fetch(addends(), next_place(), 64 * number);
    RowNumbers less_delta;
    const u32 less_delta_at = control.less_delta_of(at.at);
    if constexpr (kLoadEarly && !kGainsAtOnce) less_delta.load(less_delta_at, thread);
    wgmma_wait_group<0>();                 // dP is there
    const auto weight = [&](int n) { return kRoundedWeights ? entry_of(weights, n) : s[n]; };
    const auto removed = [&](int n) { return is_dropped(dropped, n); };
    if constexpr (kGainsAtOnce) {
      round_gradients(ds, weights, s, dp, seen, edge);
    } else {
      gradients_of(ds, dp, weight, removed, derivative, here(), edge, less_delta, less_delta_at, shared_address(control.zeros), thread);
    }
    if constexpr (kWritesBias) store_bias_entries(dp, here());
    if constexpr (!kRoundedWeights && !kGainsAtOnce) round_to(weights, s), round_to(ds, dp);
    if (kRemovedLate && edge) remove_unseen(ds, weights);
    if constexpr (kDropout) remove_dropped(weights, dropped);
    if constexpr (kStoreFirst) give_gradients(ds);
    bar_sync(kTurn + number, 256);
    if constexpr (kQueriesFirst) start_queries_before(dq);
    start_gradient(dv, weights, queries_by_rows(kOAt));
    if constexpr (!kQueriesFirst) start_queries_before(dq);
    if constexpr (!kStoreFirst) give_gradients(ds);
    start_gradient(dk, ds, queries_by_rows(kQAt));
    bar_arrive(kTurn + 1 - number, 256);
    if (left < wanting) prepare_share();
    wgmma_wait_group<kQueriesFirst ? 2 : 1>();      // dq is there
    free_gradients();
    Cursor next = at;
    const i32 head_now = head;
    const bool more = !at_last();
    if (more) {                            // else the scores of this tile once more, for nobody
      next.advance();
      const QueryTile to = round.after({head, tile});
      head = to.head, tile = to.tile;
    }
    if (left < wanting) hand_on(dq);
    if constexpr (kQueriesFirst) wgmma_wait_group<1>();
    start_next(next, tile, more && tile == round.last);
    prepare(next, head, tile);
    if constexpr (kWritesBias) store_bias_tile(64 * number, head_now, row, tiles + kGradientAt + step.at * kGradientBytes);
    wgmma_wait_group<kFreesSooner ? 1 : 0>();       // dk is there
    if (leader()) mbarrier_arrive(at.in(control.q_free));
    if constexpr (kFreesSooner) wgmma_wait_group<0>();
    ring.advance();
    at.advance(), step.advance(), left -= 1;
  }

  CF_DEVICE void end() {
    Queries dq;
    bar_sync(kTurn + number, 256);
    start_queries_before(dq);
    bar_arrive(kTurn + 1 - number, 256);
    if (launch.queries != kNotWanted) prepare_share();
    wgmma_wait_group<0>();
    free_gradients();
    if (leader()) mbarrier_arrive(shared_address(&control.k_free));
    if (leader()) mbarrier_arrive(shared_address(&control.v_free));
    if (launch.queries != kNotWanted) hand_on(dq);
  }

  CF_DEVICE void query_tiles() {
    clear_unseen_bias(64 * number);
    if (!work().any()) return;
    begin();
    CF_UNROLL_1
    while (left > 0) query_tile();
    end();
  }

  CF_DEVICE void store() {
    const i32 own = i32(opaque(thread)), warp_row = 64 * number + own / 32 * 16, lane = own % 32;
    const u32 staging = tiles + kGradientAt + warp_row * 128;      // over the warp's own rows of dA
    const Target to_v{p.call.dv, &p.dv, p.dv_kind, p.head_dim_v}, to_k{p.call.dk, &p.dk, p.dk_kind, p.head_dim};
    const float dv_scale = kDropout ? dropout_scale<float>(p) : 1.0f;
    meet();                                // both consumers have read dA
    store_rows(dv, dv_scale, to_v, p, work(), warp_row, staging, lane);
    store_rows(dk, launch.scale, to_k, p, work(), warp_row, staging, lane);
  }

  // When there is no more work.
  CF_DEVICE void finish() const {
    meet();                                // both have read the rows' numbers, in whose place units are prepared
    static_assert(sizeof(Unit) <= sizeof(control.lse_log2[0]), "room for one");
    finish_rows(p, launch, *reinterpret_cast<Unit*>(control.lse_log2[number]), number);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    cupyflash_backward(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps,
                       const __grid_constant__ Launch launch) {
  Control& control = static_shared_storage<Control>();
  initialise(control, launch.queries != kNotWanted);
  if (warpgroup_index() == 0) return serve_shares(p, maps, launch, control);
  setmaxnreg_inc<kConsumerRegisters>();
  Consumer consumer{{p, launch, control, warpgroup_index() - 1, i32(thread_index()) % 128, shared_tiles()}};
  consumer.own_gradients = unbranched(consumer.place_of_gradients(consumer.tiles + kGradientAt, 64 * consumer.number));
  consumer.units = uniform((consumer.tiles & 0x3ffffu) / 16);
  if (consumer.number == 1) bar_arrive(kTurn, 256);      // the first one begins
  consumer.walk(consumer);
  consumer.finish();
}
