// Forward pass on Hopper's tensor cores: out and lse for 16-bit elements, head dims up to kHeadDim and kHeadDimV.
//
// FlashAttention-3's division of labour (Shah et al. 2024) with a softmax of our own (sm90/softmax.cuh): blocks stay on
// their multiprocessor and take query tiles from a counter. Of warpgroup 0 single threads work, beside dropout a warp: the scheduler prepares
// the next piece of work, producers load by TMA: queries and keys, values, and masks and biases where there are any.
// The other warpgroups are consumers of 64 queries each: scores, weights and the accumulated output live in registers,
// and of weights nothing is ever written to memory.
//
//   block     one query tile (kBlockQ = 64 queries a consumer) of one head at a time
//   thread    two rows: wgmma accumulators as sm90/scores.cuh describes
//   shared    q x kQStages | k x kStages | v x kStagesV | out | biases | masks, sm90/tiles.cuh; barriers and Work besides.
//             Unless kOutApart results leave through the place of their queries
//
//   producers   K9 Q  K8  K7  ...  K0  | K9 Q of the next tile ...                         (keys are walked downward)
//               V9  V8  ...  V0  | V9 of the next ...
//   consumer A  S9 .softmax. | S8 O+=P9V9 .softmax. | ... | O+=P0V0 S9' results .softmax. | ...    under its own PV ...
//   consumer B       S9 .softmax. | S8 O+=P9V9 .softmax. | ...                               ... and under A's products
//
// The scores that a query tile begins with are formed behind the last product of the tile before; with one place for
// queries its results leave first, while the next are on their way. A consumer passes by the key tiles that only others
// see. kPingPong hands the right to start products round (named barriers 1, 2, ...), so that softmaxes and products
// alternate between two consumers; more of them do without, and all walk alike with it.
//
// A careful step looks for the maximum; an optimistic or steady one does not. Where that fails a warp forms its scores
// again, by mma.sync, for wgmma wants all four warps. So each warp frees its places.
//
// What the steps give: speed over the better of cuDNN 9.19 and FlashAttention-3 in the same run, bfloat16, H200,
// 2026-11-29. First head dim 128 and 16384 keys, full / causal, all but the last row on a prototype:
//
//                                                          expected                        measured
//   TMA, producer and consumers, weights in registers      0.81                            0.81 / 0.79
//   + ping-pong                                            + 6 to 14 %                     0.81 / 0.79
//   + softmax under the product before                     + 16 %                          0.99 / 0.95
//   + reference moved only when 2^8 too small              + some %, at head dim 256       1.00 / 0.96
//   + no maximum in the steady loop                        not foreseen                    1.15 / 1.09
//   + blocks that stay, results in a buffer of their own   + 2 to 5 %                      1.18 / 1.15
//   + a scheduler of its own that takes two tiles ahead    nothing                         1.19 / 1.02
//
// The last step lost a tenth of causal speed: tiles taken early lie with a block whatever it has before them. From
// there on, by head dim, at 1024, 4096 and 16384 keys:
//
//                                                    full                          causal
//   128  two tiles ahead                             1.12  1.15  1.19              0.99  1.08  1.02
//        tiles taken late, begun behind the last     1.08  1.19  1.15              1.18  1.13  1.10
//   256  two tiles ahead                             0.98  1.05  1.07              0.88  0.83  0.87
//        taken late, begun early, queries free early 1.13  1.06  1.03              1.15  1.01  1.03
//   64   192 x 128, taken late, begun early          1.09  1.15  1.09              0.84  1.03  1.09
//        four consumers, 256 x 64, unseen tiles left 1.29  1.21  1.11              1.33  1.26  1.19
//   through the API, then                        64  1.22  1.15  1.07              1.21  1.18  1.10
//                                               128  1.02  1.08  1.09              0.97  1.03  1.06
//   as it stands, 2026-11-30, in CUDA graphs     64  1.31  1.20  1.08              1.38  1.26  1.10
//                                               128  1.12  1.14  1.13              1.02  1.25  1.09
//                                               256  1.03  1.03  1.02              1.04  1.09  1.02
//
// The last rows came of a count: a query tile of head dim 128 took 2400 clk a key tile (its products 2048) and 4200
// more, whatever its length: 1500 for rows that end, 500 to 1000 for the next queries and keys, 600 for stores, 1400
// for the first softmax. Microseconds at 512 and 1024 keys, full / causal:
//
//    64  before, now, in one run                                    155 / 113, 142 / 100   267 / 173, 253 / 161
//   128                                                             126 / 109, 116 /  99   240 / 169, 220 / 149
//   256                                                             131 / 104, 122 / 100   202 / 142, 194 / 133
//   128  before, in another run                                     141 / 108              237 / 164
//        values have a producer of their own                        136 / 108              231 / 161
//        results take the place of queries, keys have three places  140 / 109              231 / 158
//        the last product does not wait for the next queries        137 / 107              229 / 156
//        a lane ends a row, a warp sends its rows (a third run)     132 / 100              224 / 149
//   256  results leave before the next queries are awaited          2 to 5 % less
//
// At 512 keys that is 1.09 and 1.12 at head dim 128, 1.08 and 0.98 at 256, 1.32 and 1.33 at 64.
//
// What shapes scores costs time by its instructions, for nothing hides them: a multiply-add more a score takes 0.04 ms
// at head dim 128 (4 x 16 heads, 4096 keys; plain 0.72 ms), 0.09 ms at 64 (plain 0.95). Milliseconds at head dim 128,
// 2026-11-30. At first: one shape after the other, then weights; then one pass of straight code for each shape; later:
//
//                                                                      at first   then   later
//   softcap 30         range told by the sign of a polynomial's place      1.40   1.07   1.02
//   ALiBi              walked from where queries stand: only falls         0.99   0.97   0.88
//   dropout 0.1        rounded pairs by two DPX instructions, in turns     1.35   1.18   1.19
//   mask               bytes by 16-bit loads, not bits by shuffles         1.59   1.31   1.13
//   bias               two key tiles ahead, rows apart, not swizzled       1.83   1.37   1.30
//   bias, float32      in straight code, too                               2.09   2.46   1.84
//   mask + bias                                                            2.69   1.77   1.61
//   mask + softcap     the cap before the mask; key tiles of 112, not 96          1.70   1.44
//   mask + ALiBi       key tiles of 112                                           1.68   1.28
//   mask + dropout                                                                1.76   1.56
//   bias + softcap     key tiles of 112 (96: 1.70)                                1.70   1.55
//   bias + ALiBi       key tiles of 112 (96: 1.46)                                1.67   1.38
//   bias + dropout                                                                1.69   1.68
//   softcap + ALiBi                                                               1.23   1.10
//   softcap + dropout                                                             1.40   1.35
//   ALiBi + dropout                                                               1.36   1.24
//
// Careful steps in one place, behind the product before, cost softcap 3 % and saved a quarter of the code. A count of a
// key tile's instructions then: 195 for plain weights, and 280 more than plain steps have around them, for what is known
// of a piece of work was found again in every step, between scores and weights. Times of plain scores, of 4 x 16 heads
// by turns in one process, before and since (plain 0.70 ms at head dim 128, 0.45 to 0.48 at 64):
//
//                                                                                    128             64
//   ALiBi              found once (sm90/steady.cuh); 64: key tiles of 128, not 112   1.31   1.11     1.42   1.17
//   softcap 30                                                                       1.49   1.41     1.75   1.47
//   mask               no turns, which cost 1 to 5 % beside mask and bias            1.72   1.55     1.99   1.79
//   bias               items that share it go side by side: 1 %                      1.93   1.72     2.25   2.06
//   bias, float32      by cp.async, a tile ahead; side by side: 6 %                  2.66   2.13     3.33   2.65
//   dropout 0.1        64: two consumers of 128 keys in turns                        1.85   1.79     2.37   2.02
//   mask + bias        the mask hides biases before they are floats                  2.29   2.04     2.90   2.84
//   mask + ALiBi                                                                     2.07   1.87     2.50   2.12
//   mask + softcap                                                                   2.21   2.22     2.94   2.48
//   bias + ALiBi                                                                     2.20   1.94     2.81   2.24
//   bias + softcap                                                                   2.39   2.02     3.11   2.56
//   mask + dropout                                                                   2.53   2.51     3.18   2.84
//   bias + dropout                                                                   2.44   2.60     3.35   3.17
//   softcap + dropout  128: key tiles of 128, not 112                                2.10   2.11     3.20   2.54
//   ALiBi + dropout                                                                  2.17   1.91     2.83   2.19
//
// Masks and biases by TMA, by a thread that does nothing else; before, each warp fetched its rows by cp.async between its
// weights and the next products. Times of plain scores in one run, before and since (at head dim 64 tiles of 128 x 128
// beside any mask or bias, not 192 x 80; biases are (1, 16, 4096, 4096), masks (1, 1, 4096, 4096)):
//
//                        128             64            256
//   mask                 1.59   1.53     1.82   1.68   1.48   1.39
//   bias                 1.68   1.41     2.05   1.49   1.42   1.48
//   bias, float32        2.07   1.93     2.60   2.10   1.68   1.79
//   mask + bias          2.05   1.67     2.73   1.79   1.60   1.64
//   mask + ALiBi         1.76   1.62     2.07   1.97   1.59   1.45
//   mask + softcap       2.14   1.95     2.40   2.36   1.81   1.62
//   mask + dropout       2.25   2.12     2.79   2.56   2.06   1.82
//   bias + ALiBi         1.77   1.63     2.19   1.69   1.48   1.52
//   bias + softcap       2.14   1.95     2.38   2.13   1.64   1.80
//   bias + dropout       2.37   1.99     3.12   2.41   2.04   1.74
//
// Of the six products in Philox's first three rounds three depend on the column alone (attn/dropout.cuh). The producer of
// values, a warp beside dropout, lays down what they give with each tile, 16 bytes for each of the column's counters: a
// thread multiplies 72 times for 128 keys, not 98 times, and has 261 instructions between two products, not 322. By the
// compiler's stall counts these take 394 clk, not 630; 460 while keys, limits and the row's part were looked up for each
// tile. Masks without a bias hide under the exponentials, not before them. At head dim 256 a bias comes in boxes of 128
// bytes, not 32. Times of plain scores in three runs, before and since, 2026-11-30 (-: not measured):
//
//                        128             64            256
//   dropout 0.1          1.85   1.61     2.07   1.70   1.47   1.43
//   mask + dropout       2.35   1.98     2.65   2.18   2.03   1.78
//   bias + dropout       2.01   1.95     2.46   2.13   1.91   1.75
//   softcap + dropout    2.00   1.88     2.51   2.24   1.75   1.72
//   ALiBi + dropout      1.83   1.65     2.19   1.90   1.53   1.44
//   mask                 1.51   1.41     1.67   1.50   1.31   1.26
//   mask + ALiBi         1.68   1.61     1.95   1.71   -      -
//   mask + softcap       2.12   1.97     2.45   2.29   1.77   -
//   bias + softcap       1.97   2.06     2.18   2.23   1.84   -     (the same instructions, placed otherwise)
//   bias                 -      -        -      -      1.47   1.30
//
// Time over that of the above, where not said otherwise, at 128 and 64:
//
//   words drawn under the exponentials, pairs beside them     dropout 1.08  1.11; + mask 1.12  0.97; + bias 0.97  0.98
//     spread over them by false dependencies                  dropout 1.02  1.09; + mask 1.05  1.02; + bias 1.02  1.02
//   high and low halves by two instructions                   dropout 0.98  1.04; + mask 1.01  1.01
//   no turns (masks still before the exponentials)            dropout 1.01  1.19; + mask 0.95  0.95; + bias 1.10  1.09
//   192 x 80 for 128 x 128 (as that)                          dropout -     1.10; + softcap -     1.18
//   a mask as what scores are accumulated on                  mask 1.02  1.07; + ALiBi 1.05  1.07
//   a softcap's exponents formed before masks and biases      mask + softcap 1.13  0.97; bias + softcap 0.98  1.01
//
// Clocks that an instruction takes of a warp, one a partition and 64 chains, alone and beside products of another
// warpgroup: FFMA 1.7 to 2.3, 3.3; FADD 1.7, 2.9; EX2 8.7, 11.8; LOP3 2.8, 5.3; IADD 2.2, 4.7; F2FP 3.5, 6.5; IMAD.WIDE
// 7.5, 24 (with its LOP3, many warps: 6, 14); DFMA 2, 10. Beside products of 64 columns from shared memory, which take all
// its bandwidth, FFMA 4.9, LOP3 6.9. FFMA and EX2 of one warp add up. So a score's plain weights take 14 clk, not 9.5, a
// softcap's 18 to 22, not 12. By the same marks a step of plain scores is 2141 clk at head dim 128, products for 2048 of
// them, of a softcap 3062, of dropout (before) 4045, all at 1480 to 1510 MHz: the card stands at its 700 W.
//
// By count, multiprocessors read 4.3 GB of keys and values at head dim 128, 2.1 GB of biases, 1.1 GB of masks. A thread
// has, for 96 keys, 144 instructions of plain weights; a mask 122 more, a bias 108, both 258, Philox 280 (since: 200).
//
// Clocks of a step of one warp at head dim 128, by %clock: ALiBi 2350, of which weights 1160; softcap 2940 and 1530;
// dropout 3990, weights 1170 and Philox 1370; mask + bias (96 keys) 3180, weights 1430 and the way of the next 450 to
// 890; S is there when it is waited for (40), O too (60). The compiler's own stall counts add up to 520 for ALiBi's
// weights, 690 for softcap's, 630 for Philox.
//
// In one process, 2026-11-30, softcap 30 took 1.44 of plain scores' time at head dim 128 and 1.51 at 64, ALiBi 1.14. A
// score with a softcap is 4 multiply-adds, half a LOP3, an exponential and a sum. The same plain weights take 580 clk
// in one consumer and 1070 in the other, by what runs beside them. What changes gave, time over that without them:
//
//   steps of O += P V started between the weights       plain 1.11 (4 + 2 + 2 steps), softcap 1.03 (6 + 2); with
//                                                       more than one such place softcap's kernel never ended
//   weights by 8, 16, 32, sums one such part behind     softcap 1.02, 1.05, 1.08; by 16 ALiBi 1.04, plain 1.05
//   sums as a tree after the exponentials               softcap 1.02
//   softcap: no turns; 192 x 80; 192 x 64               1.06; 1.01; 1.01; at 64, two consumers in turns 1.12
//   softcap: references of 0, so no maxima (bfloat16)   0.99, 0.98 at 1024 keys; values of 2^56 would overflow
//   a turn that ends when S is there                    plain 1.25; softcap, ALiBi, dropout 0.99 to 1.01
//   head dim 256: 4 of 16 steps' queries in registers   1.00 at 4096 and 16384 keys; weights by 8 there: 1.00
//
// What did not help: key tiles of 80 at head dim 256; three consumers at head dim 128 (192 x 64, 192 x 80: 0.92 to
// 1.02 of 128 x 128); key tiles of 64, 80 and 96 there in 5, 4 and 3 places (up to 27 % slower; 64 without turns 1 to
// 3 % faster at 512 and 1024 causal keys, 9 % slower at 4096); ping-pong of three consumers; O finished early at head
// dim 128; the next tile's first loads to the L2 cache beforehand (4 to 7 % slower at 512 causal keys); results that
// leave under the second scores, with or without the next first scores before the last product (up to 6 % slower); to
// pass by the half of a diagonal tile that the first consumer does not see; the first piece prepared beside the
// barriers; other groups of heads; Philox while scores are formed, its bits kept until the weights are there (1.48
// ms); one loop for plain and shaped scores (plain 1 % slower); turns passed before Philox (softcap + dropout 1.57
// ms); no turns beside bias and dropout (27 % slower); a bias in registers before its scores are there (spills); with
// options, at head dim 128: a third place for keys, key tiles of 48, 64, 80, 96 and 144 (3 to 20 % slower), Philox before
// the turn, turns passed before the second product; at 64: four places, four consumers of 256 x 64, 128 x 192, O
// finished early (mask 20 % slower). Three consumers of 192 x 64 at head dim 128, with masks and biases by TMA: 2 to 14 %
// slower, but for mask + softcap (2 % faster) and biases of float32 (4 %). A warpgroup of aids: a lone warp of a scheduler
// has an instruction done in 4 to 6 clocks, and so they are what all wait for. Fetching masks and biases for both consumers
// they gave nothing (mask + bias 1.52 for 1.51 ms); hiding biases as well 1.73, two warpgroups of them 1.80; a mask alone as
// biases of 0 and -inf 13 % slower. Drawing dropout's numbers, bits that consumers apply: all of them 1.34 for 1.26 ms, half
// 1.37 for 1.21; at head dim 64 1.09 for 0.92 and 1.17 for 1.03.
#include "sm90/shaped.cuh"

constexpr bool kShaped = !kPlainScores || kDropout;
// O is finished in the middle of the weights, and later ones are rounded as they come: 0 to 6 % at head dim 64.
// Elsewhere it is finished behind a branch after them: the compiler may move a wait within straight code, and likes it
// early.
constexpr bool kEarly = !kShaped && !kPingPong;
// Where queries have one place, results leave while the next are on their way.
constexpr bool kResultsFirst = kQStages == 1 && !kPingPong;

// One warpgroup. Its steps where nothing shapes the scores; the others are sm90/shaped.cuh's.
struct Consumer : ShapedSteps {
  // S of key tile n; O += P V of the tile before runs on while its softmax is taken.
  CF_DEVICE void products(Scores& s, const Operand& before) {
    wait_k();
    wait_for_turn();
    scores(s);
    wait_v();
    output(before);
    pass_turn();
    wgmma_wait_group<1>();                     // S is there
  }

  // Scores become weights. Whether the references have moved.
  template <bool kFirst> CF_DEVICE bool to_weights(Scores& s, const Work& work, bool left_edge, bool right_edge) {
    if (left_edge || right_edge) select(s, work, row_of(work), col(), left_edge);
    float top[2], sums[2] = {0.0f, 0.0f};
    bool moved = false;
    Softmax::maxima(s, top);
    if (kFirst) softmax.begin(top, row_of(work), work.sight.q_length, unit); else moved = softmax.look(top, unit);
    softmax.weigh(s, unit, sums);
    softmax.l[0] += sums[0];
    softmax.l[1] += sums[1];
    return moved;
  }

  // The reference moves only when it is more than 2^8 too small.
  CF_DEVICE void careful_step(Scores& s, Operand& weights, const Work& work, bool left_edge, bool right_edge) {
    products(s, weights);
    free_k();
    const bool moved = to_weights<false>(s, work, left_edge, right_edge);
    finish_output();                           // only now may the weights change
    to_operand(weights, s);
    if (moved) rescale();
  }

  // The reference stays unless sums leave its range: then the scores are formed again.
  CF_DEVICE void optimistic_step(Scores& s, Operand& weights) {
    constexpr int kAll = kScores / 4, kMiddle = kEarly ? kAll / 2 : kAll;
    float sums[2] = {0.0f, 0.0f};
    products(s, weights);
    softmax.weigh<true>(s, 0, kMiddle, unit, sums);
    if constexpr (kEarly) {
      finish_output();
      softmax.weigh<true>(s, kMiddle, kAll, unit, sums);
      to_operand(weights, s);
    }
    const bool again = vote_any(!Softmax::in_range(sums[0]) || !Softmax::in_range(sums[1]));
    if (again) {
      float top[2];
      form_scores_again(s);
      Softmax::maxima(s, top);
      softmax.look_again(top, sums, unit);
      sums[0] = sums[1] = 0.0f;
      softmax.weigh<false>(s, 0, kAll, unit, sums);
      if constexpr (kEarly) to_operand(weights, s);
    }
    free_k();
    softmax.l[0] += sums[0];
    softmax.l[1] += sums[1];
    if constexpr (!kEarly) {
      finish_output();
      to_operand(weights, s);
    }
    if (again) rescale();
  }

  // From S of the first key tile to the weights of the last.
  CF_DEVICE void walk_keys(Scores& s, Operand& weights, const Work& work) {
    const i32 last = last_tile(work);
    const i32 steady_from = uniform(work.keys[number].steady_from), steady_to = uniform(work.keys[number].steady_to);
    CF_UNROLL_1
    for (i32 unseen = uniform(work.last - last); unseen > 0; --unseen) pass_v();
    accumulated = false;
    n = work.tile(last);
    if constexpr (kShaped) {
      softmax.reset(row_of(work), work.sight.q_length);
      walk_shaped(s, weights, work, last, steady_from, steady_to);
    } else {
      free_k();
      to_weights<true>(s, work, n < steady_from, n >= steady_to);
      to_operand(weights, s);
      clear_values(work);
      free_results(work);
      --n;
      CF_UNROLL_1
      while (n >= work.first) {
        if (n < steady_to && n >= steady_from) {
          CF_UNROLL_1
          do {
            optimistic_step(s, weights);
            --n;
          } while (n >= steady_from);
          continue;
        }
        careful_step(s, weights, work, n < steady_from, n >= steady_to);
        --n;
      }
    }
    free_q();
    wait_v();
  }

  // Piece after piece: the first scores of the next are formed behind the last product of one, while its results are
  // on their way. Both products are started even where there is nothing to multiply, and what they give is not looked
  // at: a branch around them would make the compiler wait for each.
  CF_DEVICE void run(const TensorMaps& maps) {
    Scores s;
    Operand weights;
    Ring<kWorkSlots> slot{0, 0};
    wait_for_work(slot);
    wait_to_begin(control.work[0]);
    wait_for_turn();
    scores(s);
    pass_turn();
    wgmma_wait_group<0>();
    CF_UNROLL_1
    while (true) {
      const Work& work = control.work[slot.stage];
      if (work.number < 0) break;
      const i32 first = work.first, last = last_tile(work);
      if (last >= first) {
        walk_keys(s, weights, work);
      } else {
        softmax.reset(row_of(work), 0);
        pass_by(work);
      }
      const u32 this_slot = slot.stage;
      slot.advance();
      wait_for_turn();
      output(weights);
      if constexpr (kResultsFirst) {
        wgmma_wait_group<0>();                 // O is there
        if (last >= first) free_v();
        leave(work, this_slot, maps.out);
      }
      wait_to_begin(wait_for_work(slot));
      scores(s);
      pass_turn();
      if constexpr (!kResultsFirst) {
        wgmma_wait_group<1>();                 // O is there
        if (last >= first) free_v();
        leave(work, this_slot, maps.out);
      }
      wgmma_wait_group<0>();                   // S is there
    }
    if (warp_leader()) cp_async_bulk_wait_group();       // results must have left before the block ends
  }
};

CF_DEVICE void consume(const Params& p, const TensorMaps& maps, const Launch& launch, Control& control, u32 tiles,
                       i32 number) {
  const i32 thread = thread_index() % 128;
  Consumer c{{{p, launch, control, number, thread, tiles}}};
  c.q = descriptor(tiles + kQAt + number * 8192, 16);
  c.k = descriptor(tiles + kKAt, 16);
  c.v = descriptor(tiles + kVAt, kBlockKV * 128);
  c.unit = kPlainScores ? launch.unit : kLog2e;
  if (kPingPong && number == 0) bar_arrive(1, 256);
  c.run(maps);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    cupyflash_forward(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps,
                      const __grid_constant__ Launch launch) {
  Control& control = static_shared_storage<Control>();
  const u32 tiles = shared_tiles();
  if (thread_index() == 0) initialise(control);
  block_barrier();                             // the barriers are there
  if (warpgroup_index() == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (thread_index() == 0) produce<false>(maps, control, tiles);
    if (kDropout ? thread_index() / 32 == 2 : thread_index() == 64) produce<true>(maps, control, tiles);
    if (thread_index() == 32) schedule<kLead>(p, launch, control);
    if (kMaskOrBias && thread_index() == 96) produce_addends(p, maps, control, tiles + kAddendsAt);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(p, maps, launch, control, tiles, warpgroup_index() - 1);      // not kept across the branch: a register less
  }
}
