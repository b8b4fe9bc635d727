// Steps over key tiles of scores that options shape, or with dropout. A steady step weighs by the references that there
// are (sm90/steady.cuh); where that fails, at edges, and where no such form exists, weights are found carefully.
#pragma once
#include "sm90/warpgroup.cuh"

struct ShapedSteps : Warpgroup {
  CF_DEVICE void drop_rounded(Operand& weights, const Work& work, i32 col) const {
    if constexpr (kDropout) {
      if (in_groups(work.dropout)) drop_pairs(weights, work.dropout, row_of(work), col);
    }
  }
  CF_DEVICE void drop_others(Scores& s, const Work& work) const {
    if constexpr (kDropout) {
      if (!in_groups(work.dropout)) drop(s, work.dropout, row_of(work), col());
    }
  }

  // Mask and bias: where this warp's rows lie for a step; the way of those for a step, if there is one, over what has
  // been read.
  CF_DEVICE AddendTile addends(i32 step) const {
    return AddendTile(tiles + kAddendsAt + step % kAhead * kAddendStageBytes, 4 * number + thread / 32);
  }
  CF_DEVICE void fetch(const Work& work, Bias bias, i32 step) const {
    if constexpr (kMaskOrBias) {
      warp_barrier();                          // all lanes have read
      const i32 row = work.row + 64 * number + thread / 32 * 16, first = work.tile(step) * kBlockKV;
      if (step >= work.first) fetch_addends(addends(step), p, work.addends, bias, row, first, thread % 32);
      cp_async_commit_group();                 // one for each step
    }
  }

  // Scores become weights by references that suit them; again: `sums` are those that the old references gave. Whether
  // some reference has moved.
  CF_DEVICE bool weigh_carefully(Scores& s, const Work& work, Bias bias, i32 step,
                                 bool left_edge, bool right_edge, bool again, float (&sums)[2]) {
    shape_products(s, p, launch, work, row_of(work), col());
    const auto add_one = [&](int n, float b) { s[n] = with_addend(s[n], b); };
    if (bias == Bias::kComes) {
      for_bias(addends(step), add_one);
    } else if (bias != Bias::kNone) {
      for_bias_in_place(p, work.addends, row_of(work), col(), add_one);
    }
    if (has_mask(p)) apply_mask(s, addends(step), p, work.addends, row_of(work));
    if (left_edge || right_edge) select(s, work, row_of(work), col(), left_edge);
    float top[2];
    bool moved = true;
    Softmax::maxima(s, top);
    if (again) softmax.look_again(top, sums, unit); else moved = softmax.look(top, unit);
    sums[0] = sums[1] = 0.0f;
    softmax.weigh(s, unit, sums);
    return moved;
  }

  // Whether the references serve for key tile n, which all rows see: with ALiBi, where it lies on one side of them and
  // addends fall on the way.
  CF_DEVICE bool is_steady(const Work& work, Bias bias) const {
    if (kMaskOrBias && (!(launch.scale > 0.0f) || bias == Bias::kOneColumn)) return false;
    if (!sloped() || work.terms.slope == 0.0f) return true;
    const bool rises = work.terms.slope < 0.0f;                          // with the distance
    return (is_behind(work) && !rises) || (is_ahead(work) && (rises || work.start < work.last));
  }
  CF_DEVICE bool capped(const Work& work) const { return kSoftcapOrAlibi && work.terms.softcap > 0.0f; }
  CF_DEVICE bool sloped() const { return kSoftcapOrAlibi && p.call.slopes != nullptr; }
  CF_DEVICE i64 first_position(const Work& work) const { return work.row + 64 * number + work.sight.offset; }
  CF_DEVICE bool is_behind(const Work& work) const { return first_position(work) >= (n + 1) * kBlockKV - 1; }
  CF_DEVICE bool is_ahead(const Work& work) const { return first_position(work) + 63 < n * kBlockKV; }

  // Scores become weights by the references as they are. Whether all the warp's rows allow that: else the products are
  // formed again.
  CF_DEVICE bool weigh_steadily(Scores& s, const Work& work, Bias bias, i32 step, float (&sums)[2]) {
    u32 near[2] = {~0u, ~0u};
    if constexpr (kPlainScores) {
      softmax.weigh<true>(s, 0, kScores / 4, unit, sums);
    } else {
      const float first = float(row_of(work) + work.sight.offset - col()), scale = times(launch.scale, kLog2e);
      const Line line(work.terms.slope, first, softmax.fast);
      const AddendTile tile = addends(step);
      const BiasRows rows(p, work.addends, row_of(work), col());
      const Steady steady{softmax.fast, line, tile, rows};
      const Cap cap(work.terms, scale);
      const auto cap_of = [&](int n) { return cap.factor(s[n], near[n / 2 % 2]); };
      float factor = scale;
      if constexpr (kMaskOrBias) {             // the cap first: a mask hides where it does not hold, and code is saved
        if (capped(work)) {
          CF_UNROLL
          for (int n = 0; n < kScores; ++n) s[n] = times(s[n], cap_of(n));
          factor = 1.0f;
        }
        if (has_mask(p)) apply_mask(s, tile, p, work.addends, row_of(work));
        steady.weigh(s, sloped(), bias, sums, [&](int) { return factor; });
      } else if (capped(work)) {
        steady.weigh(s, sloped(), bias, sums, cap_of);
      } else {
        steady.weigh(s, sloped(), bias, sums, [&](int) { return scale; });
      }
    }
    bool holds[2];
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      const bool live = kPlainScores || row_of(work) + 8 * h < work.sight.q_length;
      holds[h] = !live || (i32(near[h]) < 0 && Softmax::in_range(sums[h]));
    }
    if (!vote_any(!holds[0] || !holds[1])) return true;
    form_scores_again(s);
    return false;
  }

  // S of the step; O += P V of the one before runs on.
  CF_DEVICE void shaped_products(Scores& s, Operand& weights, const Work& work) {
    wait_k();
    wait_for_turn();
    scores(s);
    drop_rounded(weights, work, col());
    wait_v();
    output(weights);
    pass_turn();
  }
  CF_DEVICE void use_weights(Scores& s, const Work& work, Bias bias, i32 step, const float (&sums)[2]) {
    free_k();
    fetch(work, bias, step - kAhead);
    softmax.l[0] += sums[0];
    softmax.l[1] += sums[1];
    drop_others(s, work);
  }

  // From S of the first key tile to the weights of the last. Where a step is not to be steady, or turns out not to be
  // it, its weights are found behind the product before, in code that there is only once. patient: no steady step has
  // failed that a softcap may have made fail.
  CF_DEVICE void walk_shaped(Scores& s, Operand& weights, const Work& work, i32 step, i32 steady_from, i32 steady_to) {
    const Bias bias = kMaskOrBias ? bias_of(p, work.addends) : Bias::kNone;
    CF_UNROLL
    for (i32 ahead = 0; ahead < kAhead; ++ahead) fetch(work, bias, step - ahead);
    if constexpr (kMaskOrBias) wait_for_addends();
    bool again = false, patient = true;
    float sums[2];
    CF_UNROLL_1
    while (true) {
      const bool moved = weigh_carefully(s, work, bias, step, n < steady_from, n >= steady_to, again, sums);
      use_weights(s, work, bias, step, sums);
      to_operand(weights, s);
      if (moved) rescale();
      clear_values(work);
      CF_UNROLL_1
      for (--step; step >= work.first; --step) {
        shaped_products(s, weights, work);
        n = work.tile(step);
        if constexpr (kMaskOrBias) wait_for_addends();
        const bool steady = n >= steady_from && n < steady_to && patient && is_steady(work, bias);
        sums[0] = sums[1] = 0.0f;
        wgmma_wait_group<1>();                 // S is there
        if (!steady || !weigh_steadily(s, work, bias, step, sums)) {
          again = steady;
          patient = patient && !(steady && capped(work));
          finish_output();
          break;
        }
        use_weights(s, work, bias, step, sums);
        finish_output();                       // only now may the weights change
        to_operand(weights, s);
        if constexpr (kFromWithin) clear_values(work);
      }
      if (step < work.first) break;
    }
    drop_rounded(weights, work, col());
  }
};
