// Steps over key tiles of scores that options shape, or with dropout. A steady step weighs by the references that there
// are (sm90/steady.cuh); where that fails, at edges, and where no such form exists, weights are found carefully.
#pragma once
#include "sm90/warpgroup.cuh"

// Beyond this slope a thread may have no key near enough for a sum when references go ahead.
constexpr float kSteep = 2.0f, kLeastSum = 9.5367431640625e-7f;         // 2^-20

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

  // Mask and bias: where this warp's rows lie; what has come of the mask for key tile n; the way of those for another,
  // if there is one, over what has been read.
  CF_DEVICE AddendTile addends() const { return AddendTile(tiles + kAddendsAt, 4 * number + thread / 32); }
  CF_DEVICE void take_mask(MaskBits& mask, const Work& work) const {
    if constexpr (kMaskOrBias) {
      wait_for_addends();
      read_mask(mask, addends(), p, work.addends, row_of(work));
    }
  }
  CF_DEVICE void fetch(const Work& work, i32 tile) const {
    if (!kMaskOrBias || tile < work.first) return;
    warp_barrier();                            // all lanes have read
    fetch_addends(addends(), p, work.addends, work.row + 64 * number + thread / 32 * 16, tile * kBlockKV, thread % 32);
  }

  // Scores become weights by references that suit them; again: `sums` are those that the old references gave. Whether
  // some reference has moved.
  CF_DEVICE bool weigh_carefully(Scores& s, const Work& work, const MaskBits& mask, bool left_edge, bool right_edge,
                                 bool again, float (&sums)[2]) {
    shape_products(s, p, launch, work, row_of(work), col());
    if (bias_comes(p, work.addends)) {
      for_bias(addends(), [&](int n, float b) { s[n] = with_addend(s[n], b); });
    } else if (has_bias(p)) {
      add_bias_in_place(s, p, work.addends, row_of(work), col());
    }
    if (has_mask(p)) apply_mask(s, mask);
    if (left_edge || right_edge) select(s, work, row_of(work), col(), left_edge);
    float top[2];
    bool moved = true;
    Softmax::maxima(s, top);
    if (again) softmax.look_again(top, sums, unit); else moved = softmax.look(top, unit);
    sums[0] = sums[1] = 0.0f;
    softmax.weigh(s, unit, sums);
    return moved;
  }

  // Whether the references serve for key tile n, which all rows see: with ALiBi, where it lies on one side of them.
  CF_DEVICE bool is_steady(const Work& work) const {
    if (kMaskOrBias && !(launch.scale > 0.0f && (!has_bias(p) || bias_comes(p, work.addends)))) return false;
    return !sloped() || (absolute(work.terms.slope) <= kSteep && (is_behind(work) || is_ahead(work)));
  }
  CF_DEVICE bool sloped() const { return kSoftcapOrAlibi && p.call.slopes != nullptr; }
  CF_DEVICE i64 first_position(const Work& work) const { return work.row + 64 * number + work.sight.offset; }
  CF_DEVICE bool is_behind(const Work& work) const { return first_position(work) >= (n + 1) * kBlockKV - 1; }
  CF_DEVICE bool is_ahead(const Work& work) const { return first_position(work) + 63 < n * kBlockKV; }

  // By how much ALiBi's addends grow from the tile before to this one.
  CF_DEVICE float rise(const Work& work) const {
    const float slope = work.terms.slope;
    return sloped() && is_ahead(work) == slope > 0.0f ? absolute(slope) * float(kBlockKV) : 0.0f;
  }

  // Scores become weights by the references as they are. Whether all the warp's rows allow that: else the scores are as
  // before, either untouched or formed again.
  enum class Weighed { kYes, kNot, kOutOfRange };
  CF_DEVICE Weighed weigh_steadily(Scores& s, const Work& work, const MaskBits& mask, bool gone_ahead,
                                   float (&sums)[2]) {
    bool in_range[2];
    if constexpr (kPlainScores) {
      softmax.weigh<true>(s, 0, kScores / 4, unit, sums);
      CF_UNROLL
      for (int h = 0; h < 2; ++h) in_range[h] = Softmax::in_range(sums[h]);
    } else {
      const float first = float(row_of(work) + work.sight.offset - col()), scale = times(launch.scale, kLog2e);
      const AddendTile tile = addends();
      const Line line(work.terms.slope, first, softmax.fast);
      const Steady steady{scale, softmax.fast, Cap(work.terms, scale), line, tile};
      const bool live[2] = {row_of(work) < work.sight.q_length, row_of(work) + 8 < work.sight.q_length};
      const bool capped = kSoftcapOrAlibi && work.terms.softcap > 0.0f;
      if (capped && !steady.cap.holds(s, live)) return Weighed::kNot;
      if (has_mask(p)) apply_mask(s, mask);
      steady.weigh(s, capped, sloped(), has_bias(p), sums);
      CF_UNROLL
      for (int h = 0; h < 2; ++h) {
        in_range[h] = !live[h] || (Softmax::in_range(sums[h]) && (sums[h] >= kLeastSum || !gone_ahead));
      }
    }
    if (!vote_any(!in_range[0] || !in_range[1])) return Weighed::kYes;
    form_scores_again(s);
    return Weighed::kOutOfRange;
  }

  CF_DEVICE void first_shaped_step(Scores& s, Operand& weights, const Work& work, bool left_edge, bool right_edge) {
    MaskBits mask;
    fetch(work, n);
    take_mask(mask, work);
    weigh_carefully(s, work, mask, left_edge, right_edge, false, softmax.l);
    fetch(work, n - 1);
    drop_others(s, work);
    to_operand(weights, s);
  }

  // The references stay, or go ahead of ALiBi, where that serves; else they move when more than 2^8 too small.
  CF_DEVICE void shaped_step(Scores& s, Operand& weights, const Work& work, bool left_edge, bool right_edge) {
    float sums[2] = {0.0f, 0.0f};
    MaskBits mask;
    wait_k();
    wait_for_turn();
    scores(s);
    drop_rounded(weights, work, col() + kBlockKV);
    wait_v();
    output(weights);
    pass_turn();
    take_mask(mask, work);
    const bool steady = !left_edge && !right_edge && is_steady(work);
    const Softmax before = softmax;
    const float growth = steady ? rise(work) : 0.0f;
    bool moved = growth > 0.0f;
    if (moved) softmax.go_ahead(growth, unit);
    wgmma_wait_group<1>();                     // S is there
    Weighed weighed = Weighed::kNot;
    if (steady) weighed = weigh_steadily(s, work, mask, moved, sums);
    if (weighed != Weighed::kYes) {
      const bool again = !moved && weighed == Weighed::kOutOfRange;
      if (moved) softmax = before;
      moved = weigh_carefully(s, work, mask, left_edge, right_edge, again, sums);
    }
    free_k();
    fetch(work, n - 1);
    softmax.l[0] += sums[0];
    softmax.l[1] += sums[1];
    drop_others(s, work);
    finish_output();                           // only now may the weights change
    to_operand(weights, s);
    if (moved) rescale();
  }
};
