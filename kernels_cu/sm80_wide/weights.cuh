// From products to scores and weights, for a tile that a warp holds in registers, rows queries, or keys if kTurned.
#pragma once
#include "core/warp.cuh"
#include "attn/decay.cuh"
#include "sm80_wide/product.cuh"
#include "sm80_wide/work.cuh"

// The four lanes of a group share a row.
struct GroupLanes {
  static CF_DEVICE Score max(Score x) {
    x = maximum(x, shuffle_xor(x, 1));
    return maximum(x, shuffle_xor(x, 2));
  }
  static CF_DEVICE Score sum(Score x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
  }
};

// attn/softmax.cuh's step with this family's exponential.
template <int kRows> struct Softmax : OnlineSoftmax<Score, kRows, GroupLanes> {
  template <int kCols> CF_DEVICE void update(Score (&s)[kRows][kCols], Score (&rescale)[kRows]) {
    CF_UNROLL
    for (int u = 0; u < kRows; ++u) {
      Score top = s[u][0];
      CF_UNROLL
      for (int w = 1; w < kCols; ++w) top = maximum(top, s[u][w]);
      top = maximum(this->m[u], GroupLanes::max(top));
      const Score reference = reference_of(top);
      rescale[u] = decay(this->m[u] - reference);
      this->m[u] = top;
      Score sum = Score(0);
      CF_UNROLL
      for (int w = 0; w < kCols; ++w) {
        s[u][w] = decay(s[u][w] - reference);
        sum += s[u][w];
      }
      this->l[u] = fused(this->l[u], rescale[u], sum);
    }
  }
};

// 2^(j / 32); then 32 log2(e), -log(2) / 32 in two parts of which the first has few bits, and (e^r - 1 - r) / r^2 for
// |r| <= log(2) / 64, from the fourth power down: its polynomial through the zeros of Chebyshev's.
CF_CONSTANT double kPowers[32] = {
    1.0, 1.0218971486541166, 1.0442737824274138, 1.0671404006768237, 1.0905077326652577, 1.1143867425958924,
    1.1387886347566916, 1.1637248587775775, 1.189207115002721, 1.215247359980469, 1.241857812073484, 1.2690509571917332,
    1.2968395546510096, 1.3252366431597413, 1.3542555469368927, 1.383909881963832, 1.4142135623730951, 1.4451808069770467,
    1.4768261459394993, 1.5091644275934228, 1.5422108254079407, 1.5759808451078865, 1.6104903319492543, 1.645755478153965,
    1.681792830507429, 1.718619298122478, 1.7562521603732995, 1.7947090750031072, 1.8340080864093424, 1.8741676341103,
    1.9152065613971474, 1.9571441241754002};
CF_CONSTANT double kWarpDecay[8] = {
    46.16624130844683,     -0.021660849392446835, -5.145609244655338e-14, 0.0013888925253674347, 0.00833336242517118,
    0.04166666666656003, 0.16666666666581356,   0.5};

// decay (attn/decay.cuh) where all lanes of a warp ask at once. Of double with two thirds of the instructions, whose pipe is
// that of tensor cores: each lane holds a power, and they ask each other. Within 1 last place as well.
template <class T> struct WarpDecay {
  CF_DEVICE T operator()(T x) const { return decay(x); }
};
template <> struct WarpDecay<double> {
  double power = kPowers[u32(opaque(lane_index()))];

  CF_DEVICE double operator()(double x) const {
    constexpr double kRound = 6755399441055744.0;      // as in decay
    constexpr u32 kFarthest = 0xc0861000u, kInfinite = 0xfff00000u;
    const double sum = fused(x, kWarpDecay[0], kRound), k = sum - kRound;
    const double r = fused(k, kWarpDecay[2], fused(k, kWarpDecay[1], x));
    double tail = kWarpDecay[3];
    CF_UNROLL
    for (int n = 4; n < 8; ++n) tail = fused(tail, r, kWarpDecay[n]);
    const u32 number = low_word(sum);
    const double part = shuffle(power, number % 32);
    const double result = unbranched(fused(part, fused(times(tail, r), r, r), part));
    const bool far = high_word(x) - kFarthest - 1u < kInfinite - kFarthest;
    return far ? 0.0 : double_of(high_word(result) + ((number & ~31u) << 15), low_word(result));
  }
};

// x, or 0 where it is above.
CF_DEVICE float at_most_zero(float x) { return x > 0.0f ? 0.0f : x; }
CF_DEVICE double at_most_zero(double x) { return high_word(x) <= 0x7ff00000u ? 0.0 : x; }      // not by the pipe of doubles

// The backward's weight of a score s, from s - lse: none is above 1, and an unseen key has 0 whatever lse is.
template <class Decay> CF_DEVICE Score weight_by(Score s, Score power, const Decay& decay_of) {
  const Score weight = decay_of(at_most_zero(power));
  return kMaskOrBias && s == -Limits<Score>::infinity() ? Score(0) : weight;
}
CF_DEVICE Score weight_from(Score s, Score lse) {
  return weight_by(s, s - lse, [](Score x) { return decay(x); });
}

// dS from a weight and its gain r * dP - delta; a key that a mask or a bias forbids gets 0 whatever the gain is, and what
// positions and lengths forbid is selected by the caller.
CF_DEVICE Score score_gradient(Score weight, Score gain) {
  return kMaskOrBias && weight == Score(0) ? Score(0) : weight * gain;
}

// |i + offset - j| of entry (u, w) of the tile at (row, col).
template <bool kTurned> CF_DEVICE Score distance(const Work& work, i32 row, i32 col, int u, int w) {
  const Score ahead = Score(kTurned ? col + work.sight.offset - row : row + work.sight.offset - col);
  const Score r = Score(fragment_row(u)), c = Score(score_col(w));
  return absolute(kTurned ? ahead + c - r : ahead + r - c);
}

// Natural scores from products, not yet selected and without addends; (row, col) is the tile's corner. `derivative`
// (d(c) / d(a)) is left alone when nothing caps.
template <bool kTurned, int kRows, int kCols>
CF_DEVICE void scale_scores(Score (&s)[kRows][kCols], Score (&derivative)[kRows][kCols], const Work& work, i32 row,
                            i32 col) {
  const Score scale = work.terms.scale;
  CF_UNROLL
  for (int u = 0; u < kRows; ++u) {
    CF_UNROLL
    for (int w = 0; w < kCols; ++w) s[u][w] = times(scale, s[u][w]);
  }
  if constexpr (kSoftcapOrAlibi) {
    const ScoreTerms<Score> terms = work.terms;
    if (terms.softcap > Score(0)) {
      CF_UNROLL
      for (int u = 0; u < kRows; ++u) {
        CF_UNROLL
        for (int w = 0; w < kCols; ++w) s[u][w] = terms.capped(s[u][w], derivative[u][w]);
      }
    }
    if (terms.slope != Score(0)) {
      CF_UNROLL
      for (int u = 0; u < kRows; ++u) {
        CF_UNROLL
        for (int w = 0; w < kCols; ++w) s[u][w] = fused(-terms.slope, distance<kTurned>(work, row, col, u, w), s[u][w]);
      }
    }
  }
}

// Elements become `hidden` where positions and lengths forbid.
template <bool kTurned, int kRows, int kCols>
CF_DEVICE void select(Score (&s)[kRows][kCols], const Work& work, i32 row, i32 col, Score hidden) {
  CF_UNROLL
  for (int u = 0; u < kRows; ++u) {
    const i32 i = row + fragment_row(u);
    const Interval seen = kTurned ? work.sight.rows_of_some(i, i + 1) : work.sight.keys_of(i);
    const i32 first = seen.start - col - score_col(0), last = seen.stop - col - score_col(0);
    CF_UNROLL
    for (int w = 0; w < kCols; ++w) {
      const int at = w / 2 * 8 + w % 2;
      s[u][w] = at >= first && at < last ? s[u][w] : hidden;
    }
  }
}

// Mask and bias of a tile, as one addend for each score: -inf where they forbid.
template <int kRows, int kCols> struct TileAddends {
  Score value[kRows][kCols];

  // use(value, query, key) for every entry of the tile at (row, col) that lies below the lengths.
  template <bool kTurned, class Use> CF_DEVICE void for_entries(const Work& work, i32 row, i32 col, Use use) {
    CF_UNROLL
    for (int u = 0; u < kRows; ++u) {
      CF_UNROLL
      for (int w = 0; w < kCols; ++w) {
        const i32 own_row = row + fragment_row(u), own_col = col + score_col(w);
        const i32 i = kTurned ? own_col : own_row, j = kTurned ? own_row : own_col;
        if (i < work.sight.q_length && j < work.sight.kv_length) use(value[u][w], i, j);
      }
    }
  }

  template <class Bias, bool kTurned> CF_DEVICE void load_bias(const Work& work, i32 row, i32 col) {
    const Addends& from = work.addends;
    const Bias* bias = static_cast<const Bias*>(from.bias) + from.bias_first;
    for_entries<kTurned>(work, row, col, [&](Score& x, i32 i, i32 j) {
      x = convert<Score>(bias[i * from.bias_row + j * from.bias_col]);
    });
  }

  // Of the tile at (row, col); nothing past the lengths is touched. False if they forbid every score of the warp.
  template <bool kTurned> CF_DEVICE bool load(const Work& work, i32 row, i32 col) {
    const Addends& from = work.addends;
    CF_UNROLL
    for (int n = 0; n < kRows * kCols; ++n) value[n / kCols][n % kCols] = Score(0);
    if (from.bias != nullptr) {
      switch (from.bias_kind) {
        case kFloat16: load_bias<float16, kTurned>(work, row, col); break;
        case kBFloat16: load_bias<bfloat16, kTurned>(work, row, col); break;
        case kFloat32: load_bias<float, kTurned>(work, row, col); break;
        default: load_bias<double, kTurned>(work, row, col);
      }
    }
    if (from.mask != nullptr) {
      for_entries<kTurned>(work, row, col, [&](Score& x, i32 i, i32 j) {
        if (from.mask[i * from.mask_row + j * from.mask_col] == 0) x = -Limits<Score>::infinity();
      });
    }
    bool any = false;
    CF_UNROLL
    for (int n = 0; n < kRows * kCols; ++n) any = any || value[n / kCols][n % kCols] != -Limits<Score>::infinity();
    return vote_any(any);
  }

  CF_DEVICE void add_to(Score (&s)[kRows][kCols]) const {
    CF_UNROLL
    for (int u = 0; u < kRows; ++u) {
      CF_UNROLL
      for (int w = 0; w < kCols; ++w) s[u][w] = with_addend(s[u][w], value[u][w]);
    }
  }
};

// Which of the lane's eight scores in the 16 x 16 block at (row, col) dropout keeps: bit 4 (row half) + column entry.
template <bool kTurned> CF_DEVICE u32 kept_bits(const DropoutStream& stream, i32 row, i32 col) {
  const i32 r = row + fragment_row(0), c = col + score_col(0);
  u32 bits = 0;
  if (!stream.aligned()) {
    CF_UNROLL_1
    for (i32 n = 0; n < 8; ++n) {
      const i32 own_row = r + n / 4 * 8, own_col = c + n / 2 % 2 * 8 + n % 2;
      bits |= u32(stream.kept(kTurned ? own_col : own_row, kTurned ? own_row : own_col)) << n;
    }
    return bits;
  }
  if constexpr (!kTurned) {
    return stream.group(r, c);
  } else {
    CF_UNROLL
    for (int x = 0; x < 2; ++x) {      // the two queries; keys r and r + 8 are both odd or both even
      const u32 group = stream.group(c + x, r - r % 2) >> (r % 2);
      CF_UNROLL
      for (int n = 0; n < 4; ++n) bits |= (group >> (4 * (n % 2) + 2 * (n / 2)) & 1u) << (4 * (n / 2) + 2 * (n % 2) + x);
    }
    return bits;
  }
}

// f(x, keeps) for every entry of a tile at (row, col).
template <bool kTurned, int kRows, int kCols, class F>
CF_DEVICE void for_kept(Score (&x)[kRows][kCols], const DropoutStream& stream, i32 row, i32 col, F f) {
  CF_UNROLL
  for (int u = 0; u < kRows; u += 2) {
    CF_UNROLL
    for (int w = 0; w < kCols; w += 4) {
      const u32 bits = kept_bits<kTurned>(stream, row + 8 * u, col + 4 * w);
      CF_UNROLL
      for (int n = 0; n < 8; ++n) f(u + n / 4, w + n % 4, (bits >> n & 1u) != 0);
    }
  }
}
