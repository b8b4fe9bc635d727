// Scores into weights, in registers: the optimistic softmax step beside the exact one of attn/softmax.cuh.
//
// The optimistic step takes the exponential against the reference that a row already has, and looks at the sums only
// afterwards: no maximum, no shuffle, no rescaling, and the work can be laid between the products of the next step. A
// reference may be too small by 2^15 in the weights before anything is lost (float16 holds 65504); a row without
// reference, or one so large that a fused multiply-add would not cancel exactly, makes its sums NaN. In these cases the
// warp computes the scores again and takes the exact step.
#pragma once
#include "attn/dropout.cuh"
#include "attn/softmax.cuh"
#include "core/lanes.cuh"
#include "sm80/scores.cuh"

constexpr float kLargestSum = 32768.0f, kLargestReference = 32768.0f;

template <int kRows> struct Weights : OnlineSoftmax<float, kRows, QuadLanes> {
  // -m in base 2, NaN where the optimistic step cannot be taken.
  CF_DEVICE float negative_reference(int u) const {
    const float m_log2 = this->m[u] * kLog2e;
    return absolute(m_log2) < kLargestReference ? -m_log2 : float_of(0x7fc00000u);
  }

  template <int kCols> static CF_DEVICE float top_of(const float (&row)[kCols]) {
    float top = row[0];
    CF_UNROLL
    for (int w = 1; w < kCols; ++w) top = maximum(top, row[w]);
    return QuadLanes::max(top);
  }

  // Rows' maxima take in those of s, whose weights another warp will sum up; `rescale` as in `update`.
  template <int kCols> CF_DEVICE void raise(const float (&s)[kRows][kCols], float (&rescale)[kRows]) {
    CF_UNROLL
    for (int u = 0; u < kRows; ++u) {
      const float new_m = maximum(this->m[u], top_of(s[u]));
      rescale[u] = exponential(this->m[u] - reference_of(new_m));
      this->m[u] = new_m;
      this->l[u] *= rescale[u];
    }
  }

  // A first reference, from the scores times `factor` (natural) of the first step.
  template <int kCols> CF_DEVICE void begin(const float (&s)[kRows][kCols], float factor) {
    CF_UNROLL
    for (int u = 0; u < kRows; ++u) {
      const float top = top_of(s[u]);
      this->m[u] = maximum(this->m[u], top == -Limits<float>::infinity() ? top : times(top, factor));
    }
  }
};

constexpr u32 kSigns = 0x80008000u;      // of both halves of a word

struct Group { i32 query, key; };

template <bool kAligned> struct Aligned {};      // whether groups of a tile are groups of the whole matrix

// Which weights of a tile dropout keeps. A group is 16 x 16 of them, for which each lane has four words.
struct Dropper {
  DropoutStream stream;
  bool aligned;
  u32 row, col, limit;      // the lane's own part of a counter where aligned; words beyond the limit are dropped

  explicit CF_DEVICE Dropper(const DropoutStream& from) : stream(from), aligned(from.aligned()) {
    stream.key0 = uniform(stream.key0);
    stream.key1 = uniform(stream.key1);
    row = u32(stream.origin_i) / 2 + lane_index() / 4;
    col = u32(stream.origin_j) / 4 + lane_index() % 4;
    limit = (stream.threshold << 16) - 1;      // at p = 1 it drops nothing, but then dropout_scale is 0
  }

  // Calls `drop` with what words_at needs to know: a branch around many groups, so that their rounds run side by side.
  template <class Drop> CF_DEVICE void for_alignment(Drop drop) const {
    if (aligned) drop(Aligned<true>{});
    else drop(Aligned<false>{});
  }

  // The words of the group at (query, key), with queries on rows: word [2 a + b] is for row half a and column half b.
  template <bool kAligned> CF_DEVICE Words words_at(i32 query, i32 key, Aligned<kAligned>) const {
    if constexpr (!kAligned) return gathered(query + fragment_row(0), key + fragment_col(0));
    const Words counter{{col + u32(key) / 4, row + u32(query) / 2, stream.t, stream.offset}};
    return philox4x32_7(counter, stream.key0, stream.key1);
  }

  // Flags of kCount groups, up to four, with keys on rows; group(n) says where group n is. What is dropped of word x of its
  // four as an operand of mma says, in either half of the result, bit 7 - 2 n - x / 2 of byte x % 2.
  template <int kCount, class Group> CF_DEVICE u32 turned_flags(Group group) const {
    u32 flags = 0;
    const auto add = [&](int n, auto aligned) {
      const Words words = words_at(group(n).query, group(n).key, aligned);
      u32 signs[2];
      CF_UNROLL
      for (int x = 0; x < 4; x += 2) signs[x / 2] = prmt(reach(words.word[x]), reach(words.word[x + 1]), 0x7351);
      const u32 of_group = selected(0x80808080u, signs[0], signs[1] >> 1);
      flags = n == 0 ? of_group : selected(0x01010101u * (0x100u - (0x100u >> 2 * n)), flags, of_group >> 2 * n);
    };
    if (aligned) {
      CF_UNROLL
      for (int n = 0; n < kCount; ++n) add(n, Aligned<true>{});
    } else {
      CF_UNROLL_1
      for (int n = 0; n < kCount; ++n) add(n, Aligned<false>{});
    }
    return movmatrix_trans(stream.threshold < 65536 ? flags : 0u);
  }

  // Of these flags: the halves of word x of group n that are dropped, all their bits; and whether a half is.
  static CF_DEVICE u32 halves_of(u32 flags, int n, int x) {
    return prmt(flags << (2 * n + x / 2), 0, x % 2 == 0 ? 0xaa88u : 0xbb99u);
  }
  static CF_DEVICE bool flag_of(u32 flags, int n, int x, int half) {
    return (flags >> (16 * half + 8 * (x % 2) + 7 - 2 * n - x / 2)) % 2 != 0;
  }

  // Bits of a where those of the mask are set, else of b.
  static CF_DEVICE u32 selected(u32 mask, u32 a, u32 b) { return lop3<0xca>(mask, a, b); }

  // Whether the lane's element x (of four) of row half a of a group is dropped.
  CF_DEVICE bool drops(const Words& words, int a, int x) const {
    const u32 word = words.word[2 * a + x / 2];
    return (x % 2 == 0 ? word << 16 : word) > limit;
  }

  // The signs of the halves of a word whose 16 bits are not below the threshold, if that is below 65536. Their lower 15 bits
  // are compared by a subtraction in which no half borrows from the other.
  CF_DEVICE u32 reach(u32 word) const {
    const u32 bound = stream.threshold * 0x10001u, low_reach = (word | kSigns) - (bound & ~kSigns);
    return lop3<0xb2>(word, bound, low_reach);      // word & ~bound | ~(word ^ bound) & low_reach
  }

  // The words of a group of this matrix, whose elements fall into other groups of the whole matrix.
  CF_DEVICE Words gathered(i32 i, i32 j) const {
    Words words{};
    CF_UNROLL_1
    for (i32 n = 0; n < 8; ++n) {
      const u32 dropped = stream.kept(i + n / 4 * 8, j + n / 2 % 2 * 8 + n % 2) ? 0u : 0xffffu << (n % 2 * 16);
      words.word[0] |= n / 2 == 0 ? dropped : 0u;
      words.word[1] |= n / 2 == 1 ? dropped : 0u;
      words.word[2] |= n / 2 == 2 ? dropped : 0u;
      words.word[3] |= n / 2 == 3 ? dropped : 0u;
    }
    return words;
  }
};

// A score's weight from the row's lse: `factor` leads from s to base 2, negative_lse is -lse in base 2. An unseen key has
// weight 0 whatever lse is. No weight is above 1: at scores of 1e11 the rounding of lse alone would overflow the power.
CF_DEVICE float weight_from(float s, float factor, float negative_lse) {
  const float power = fused(s, factor, negative_lse);
  const float weight = ex2_approx_ftz(power > 0.0f ? 0.0f : power);
  return kMaskOrBias && s == -Limits<float>::infinity() ? 0.0f : weight;
}

// lse of a query as `weight_from` takes it; a row that saw nothing, or is no row, gets weights of 0.
CF_DEVICE float negative_lse_of(const Params& p, const Item& item, i32 head, i32 row, i32 q_length) {
  if (row >= q_length) return -Limits<float>::infinity();
  return -kLog2e * lse_for_backward(*rows_of<float>(p.call.lse, p.lse, item, head).at(row, 0));
}

// dS from a weight and its gain r * dP - delta. A key that a mask or a bias forbids has weight 0 and gets 0 whatever the
// gain is; what positions and lengths forbid is selected by the caller.
CF_DEVICE float score_gradient(float weight, float gain) { return kMaskOrBias && weight == 0.0f ? 0.0f : weight * gain; }

// Rows are queries: weights s and dP become dS = s * (r * dP - delta), in s. The tile's corner is (row, col).
template <int kRows, int kCols>
CF_DEVICE void score_gradients(float (&s)[kRows][kCols], float (&dp)[kRows][kCols], const float (&delta)[kRows],
                               const Dropper& dropper, float kept_scale, i32 row, i32 col) {
  if constexpr (kDropout) {
    dropper.for_alignment([&](auto aligned) {
      CF_UNROLL
      for (int w = 0; w < kCols; w += 4) {
        CF_UNROLL
        for (int u = 0; u < kRows; u += 2) {
          const Words words = dropper.words_at(row + 8 * u, col + 4 * w, aligned);
          CF_UNROLL
          for (int n = 0; n < 8; ++n) {
            float& x = dp[u + n / 4][w + n % 4];
            x = dropper.drops(words, n / 4, n % 4) ? 0.0f : x * kept_scale;
          }
        }
      }
    });
  }
  CF_UNROLL
  for (int u = 0; u < kRows; ++u) {
    CF_UNROLL
    for (int w = 0; w < kCols; ++w) s[u][w] = score_gradient(s[u][w], dp[u][w] - delta[u]);
  }
}

CF_DEVICE Dropper dropper_of(const Params& p, const Item& item, i32 head) { return Dropper(dropout_of(p, item, head)); }
