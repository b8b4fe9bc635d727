// e^x for x <= 0 where all lanes of a warp ask at once, of double with fewer instructions on doubles.
#pragma once
#include "core/warp.cuh"
#include "attn/decay.cuh"

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
    const double sum = fused(x, kWarpDecay[0], kRound), k = sum - kRound;
    const double r = fused(k, kWarpDecay[2], fused(k, kWarpDecay[1], x));
    double tail = kWarpDecay[3];
    CF_UNROLL
    for (int n = 4; n < 8; ++n) tail = fused(tail, r, kWarpDecay[n]);
    const u32 number = low_word(sum);
    const double part = shuffle(power, number % 32);
    const double result = unbranched(fused(part, fused(times(tail, r), r, r), part));
    return is_far(x) ? 0.0 : double_of(high_word(result) + ((number & ~31u) << 15), low_word(result));
  }
};
