// The score of a query and a key, from their product, and its derivative.
//
//   a = scale * product;   c = softcap * tanh(a / softcap), or a;   s = c + bias - slope * |i + offset - j|
//
// in this order, then selection: what is not allowed becomes -inf whatever its value was.
#pragma once
#include "attn/mask.cuh"
#include "attn/tangent.cuh"

template <class Score> struct ScoreTerms {
  Score scale, softcap, inverse_softcap, slope;

  // c, and d(c)/d(a) in `derivative`.
  CF_DEVICE Score capped(Score a, Score& derivative) const {
    const Score part = tangent(a * inverse_softcap);
    derivative = fused(-part, part, Score(1));
    return times(softcap, part);
  }
};

template <class Score> CF_DEVICE ScoreTerms<Score> score_terms_of(const Params& p, const Item& item, i32 head) {
  const Score softcap = Score(p.call.softcap);
  Score slope = Score(0);
  if (p.call.slopes != nullptr) {
    slope = load_kind<Score>(p.call.slopes, p.slopes_kind, head_index(p.slopes, item, head));
  }
  return {Score(p.call.scale), softcap, softcap > Score(0) ? Score(1) / softcap : Score(0), slope};
}

// Mask and bias join the score as one addend, -inf where the mask forbids: their addresses for one score matrix.
struct Addends {
  const u8* mask;          // or null
  const void* bias;        // or null; element (0, 0) is bias_first elements on
  i64 mask_row, mask_col, bias_row, bias_col, bias_first;
  i32 bias_kind;
};

CF_DEVICE Addends addends_of(const Params& p, const Item& item, i32 head) {
  const u8* mask = static_cast<const u8*>(p.call.mask);
  if (mask != nullptr) mask += lead_offset(p.mask.lead, item) + p.mask.head * head;
  const i64 bias_first = lead_offset(p.bias.lead, item) + p.bias.head * head;
  return {mask, p.call.bias, p.mask.row, p.mask.col, p.bias.row, p.bias.col, bias_first, p.bias_kind};
}

template <class Score> CF_DEVICE Score masked(Score bias, u8 allowed) {
  return allowed == 0 ? -Limits<Score>::infinity() : bias;
}

// The addend joins the score; one of -inf selects it away, so that a NaN score under it is never seen.
template <class Score> CF_DEVICE Score with_addend(Score c, Score addend) {
  return addend == -Limits<Score>::infinity() ? addend : c + addend;
}
