// Steps over key tiles of scores that options shape, or with dropout. A steady step weighs by the references that there
// are (sm90/steady.cuh); where that fails, at edges, and where no such form exists, weights are found carefully.
#pragma once
#include "sm90/warpgroup.cuh"

struct ShapedSteps : Warpgroup {
  Ring<kPlaces> addends_ring{0, 0};

  // Values must be there, for with them comes what is known of their columns.
  CF_DEVICE void drop_rounded(Operand& weights, const Dropping& dropping) const {
    if (kDropout && dropping.grouped) drop_pairs(weights, dropping, control.columns_at(v_ring.stage, thread % 4));
  }
  CF_DEVICE void drop_others(Scores& s, const Work& work, const Dropping& dropping) const {
    if constexpr (kDropout) {
      if (!dropping.grouped) drop(s, work.dropout, row_of(work), col());
    }
  }

  // Mask and bias of a key tile. Each warp gives its place back for itself.
  CF_DEVICE AddendPlace addends() const { return AddendPlace(tiles + kAddendsAt, number, addends_ring.stage); }
  CF_DEVICE void wait_addends() const {
    if (kMaskOrBias) mbarrier_try_wait_parity(barrier(control.addends_ready[number], addends_ring.stage), addends_ring.parity);
  }
  CF_DEVICE void free_addends(Bias bias) {
    if constexpr (kMaskOrBias) {
      warp_barrier();                          // all lanes have read
      if (warp_leader()) mbarrier_arrive(barrier(control.addends_free[number], addends_ring.stage));
      if (bias == Bias::kFloat) addends_ring.parity ^= 1; else addends_ring.advance();
    }
  }

  // Scores become weights by references that suit them; again: `sums` are those that the old references gave. Whether
  // some reference has moved.
  CF_DEVICE bool weigh_carefully(Scores& s, const Work& work, Bias bias, bool left_edge,
                                 bool right_edge, bool again, float (&sums)[2]) {
    shape_products(s, p, launch, work, row_of(work), col());
    const auto add_one = [&](int n, float b) { s[n] = with_addend(s[n], b); };
    if (bias == Bias::kOwn) {
      for_bias(addends(), add_one);
    } else if (bias == Bias::kFloat) {
      for_wide_bias(addends(), add_one);
    } else if (bias != Bias::kNone) {
      for_bias_in_place(p, work.addends, row_of(work), col(), add_one);
    }
    if (has_mask(p)) apply_mask(s, addends(), p, work.addends, row_of(work));
    if (left_edge || right_edge) select(s, work, row_of(work), col(), left_edge);
    float top[2];
    bool moved = true;
    Softmax::maxima(s, top);
    if (again) softmax.look_again(top, sums, unit); else moved = softmax.look(top, unit);
    sums[0] = sums[1] = 0.0f;
    softmax.weigh(s, unit, sums);
    return moved;
  }

  CF_DEVICE bool capped(const Work& work) const { return kSoftcapOrAlibi && work.terms.softcap > 0.0f; }
  CF_DEVICE bool sloped() const { return kSoftcapOrAlibi && p.call.slopes != nullptr; }

  // The references serve for key tiles that all rows see: with ALiBi, where they lie on one side of the rows, distances
  // are exact, and addends fall on the way.
  CF_DEVICE Course course_of(const Work& work, Bias bias, i32 steady_from, i32 steady_to) const {
    Course course;
    course.start = uniform(work.start), course.turned = course.start + uniform(work.last);
    course.from = steady_from, course.to = steady_to;
    if (kMaskOrBias && (!(launch.scale > 0.0f) || bias == Bias::kOneColumn)) course.to = course.from;
    course.behind = 0x7fffffff, course.ahead = 0x7fffffff;
    course.first = course.slope = 0.0f;
    if (kSoftcapOrAlibi && sloped() && work.terms.slope != 0.0f) {
      constexpr i64 kExact = 1 << 23;
      const bool rises = work.terms.slope < 0.0f;                        // with the distance
      const i64 at = work.row + 64 * number + work.sight.offset;         // of the warpgroup's first query
      const bool exact = at < kExact && at > -kExact && p.seqlen_k < kExact;
      const i32 near = exact ? i32(at) : 0;
      course.slope = times(work.terms.slope, kLog2e);
      course.first = float(near + (row_of(work) - work.row - 64 * number) - thread % 4 * 2);
      course.behind = exact && !rises ? uniform((near + 1 - kBlockKV >= 0 ? (near + 1) / kBlockKV : 0)) : 0;
      if (exact && (rises || course.start < uniform(work.last))) {
        course.ahead = uniform(near + 63 < 0 ? 0 : (near + 63) / kBlockKV + 1);
      }
    }
    course.rows = work.sight.q_length - row_of(work);
    return course;
  }

  // Scores become weights by the references as they are. Whether all the warp's rows allow that: else the products are
  // formed again.
  CF_DEVICE bool weigh_steadily(Scores& s, const Work& work, const Course& course, const Line& line, Bias bias, bool cap,
                                bool masked, float (&sums)[2]) {
    u32 near[2] = {~0u, ~0u};
    if constexpr (kPlainScores) {
      softmax.weigh<true>(s, 0, kScores / 4, unit, sums);
    } else {
      const float scale = times(launch.scale, kLog2e);
      const AddendPlace tile = addends();
      const Steady steady{softmax.fast, line, tile};
      const auto cap_of = [&](int n) { return cap_factor(launch, s[n], near[n / 2 % 2]); };
      float factor = scale;
      bool together = false;
      if constexpr (kMaskOrBias) {             // the cap first: a mask hides where it does not hold, and code is saved
        if (cap) {
          CF_UNROLL
          for (int n = 0; n < kScores; ++n) s[n] = times(s[n], cap_of(n));
          factor = 1.0f;
        }
        together = masked && bias != Bias::kFloat;
        if (has_mask(p) && !together) apply_mask(s, tile, p, work.addends, row_of(work));
      }
      if (!kMaskOrBias && cap) {
        steady.weigh(s, sloped(), bias, false, sums, cap_of);
      } else {
        steady.weigh(s, sloped(), bias, together, sums, [&](int) { return factor; });
      }
    }
    bool holds[2];
    CF_UNROLL
    for (int h = 0; h < 2; ++h) {
      const bool live = kPlainScores || 8 * h < course.rows;
      holds[h] = !live || (i32(near[h]) < 0 && Softmax::in_range(sums[h]));
    }
    if (!vote_any(!holds[0] || !holds[1])) {
      CF_UNROLL
      for (int h = 0; h < 2; ++h) {
        if (kSoftcapOrAlibi) sums[h] = fused(sums[h], line.lost[h], sums[h]);
      }
      return true;
    }
    form_scores_again(s);
    return false;
  }

  // S of the step; O += P V of the one before runs on.
  CF_DEVICE void shaped_products(Scores& s, Operand& weights, const Dropping& dropping) {
    wait_k();
    wait_for_turn();
    scores(s);
    wait_v();
    drop_rounded(weights, dropping);
    output(weights);
    pass_turn();
  }
  CF_DEVICE void use_weights(Scores& s, const Work& work, const Dropping& dropping, const float (&sums)[2]) {
    free_k();
    softmax.l[0] += sums[0];
    softmax.l[1] += sums[1];
    drop_others(s, work, dropping);
  }

  // From S of the first key tile to the weights of the last. Where a step is not to be steady, or turns out not to be
  // it, its weights are found behind the product before, in code that there is only once. A steady step that failed where
  // a softcap may have made it fail is the last.
  CF_DEVICE void walk_shaped(Scores& s, Operand& weights, const Work& work, i32 step, i32 steady_from, i32 steady_to) {
    const Bias bias = kMaskOrBias ? bias_of(p, work.addends) : Bias::kNone;
    const i32 first = uniform(work.first), last = step, cleared = work.v_rows < kBlockKV ? uniform(work.last) : -1;
    const bool cap = capped(work);
    const bool masked = kMaskOrBias && mask_comes(p, work.addends);
    Course course = course_of(work, bias, steady_from, steady_to);
    const Dropping dropping = dropping_of(work.dropout, row_of(work));
    wait_addends();
    bool again = false;
    float sums[2];
    CF_UNROLL_1
    while (true) {
      const bool moved = weigh_carefully(s, work, bias, n < steady_from, n >= steady_to, again, sums);
      use_weights(s, work, dropping, sums);
      free_addends(bias);
      to_operand(weights, s);
      if (moved) rescale();
      clear_values(work);
      if (!kOutApart && step == last) free_results(work);
      CF_UNROLL_1
      for (--step; step >= first; --step) {
        shaped_products(s, weights, dropping);
        n = course.tile(step);
        const Line line(course, n, softmax.fast);
        wait_addends();
        const bool steady = course.steady(n);
        sums[0] = sums[1] = 0.0f;
        wgmma_wait_group<1>();                 // S is there
        if (!steady || !weigh_steadily(s, work, course, line, bias, cap, masked, sums)) {
          again = steady;
          if (steady && cap) course.to = course.from;
          finish_output();
          break;
        }
        use_weights(s, work, dropping, sums);
        free_addends(bias);
        finish_output();                       // only now may the weights change
        to_operand(weights, s);
        if (kFromWithin && n == cleared) clear_values(work);
      }
      if (step < first) break;
    }
    if (kDropout) wait_v();
    drop_rounded(weights, dropping);
  }
};
