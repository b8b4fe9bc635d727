// Matrices spread over the registers of a warp: what ldmatrix, movmatrix and mma do with them. An mma's products are
// exact; its sum is cut as measured on an H200.
#pragma once
#include "core/emulate/block.cuh"
#include "core/emulate/numeric.cuh"

namespace emulate {

template <class T, int n> struct alignas(sizeof(T) * n) Elements { T value[n]; };
using Row = Elements<u16, 8>;

template <class T> CF_DEVICE T& shared_at(u32 address) { return *reinterpret_cast<T*>(shared_memory(0) + address); }

CF_DEVICE u32 pair(u16 low, u16 high) { return u32(low) | u32(high) << 16; }

// What an element of a register stands for, and how a float becomes one.
template <class T> struct Format;
template <> struct Format<float16> {
  using Element = u16;
  static CF_DEVICE double value(u16 x) { return cvt_f32_f16(x); }
  static CF_DEVICE u16 nearest(float x) { return cvt_rn_f16_f32(x); }
};
template <> struct Format<bfloat16> {
  using Element = u16;
  static CF_DEVICE double value(u16 x) { return float_of(u32(x) << 16); }
  static CF_DEVICE u16 nearest(float x) {
    const u32 bits = bits_of(x);
    return x == x ? u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : u16(0x7fff);
  }
};
struct TensorFloat32 {};      // a float of which the upper 19 bits count
template <> struct Format<TensorFloat32> {
  using Element = u32;
  static CF_DEVICE double value(u32 x) { return float_of(x & 0xffffe000u); }
};

// The sum of numbers as a tensor core makes it: each is cut to multiples of 2^-25 of the power of 2 in the largest, and
// their sum to a float, both toward zero.
template <int kCount> CF_DEVICE float cut_sum(const double (&x)[kCount]) {
  double largest = 0, plain = 0;
  for (double value : x) largest = __builtin_fmax(largest, __builtin_fabs(value)), plain += value;
  if (largest == 0 || !(largest < __builtin_inf()) || plain != plain) return float(plain);
  const double unit = __builtin_ldexp(1.0, __builtin_ilogb(largest) - 25);
  double sum = 0;
  for (double value : x) sum += __builtin_trunc(value / unit);
  return __builtin_fabs(sum * unit) < 0x1p128 ? cvt_rz_f32_f64(sum * unit) : float(sum * unit);
}

// d += a b for a of 16 x kDepth and b of kDepth x 8. In lane l, with g = l / 4 and t = l % 4: a register of a or b
// holds 4 bytes of neighbours along k, a[0] (g, t), a[1] (g + 8, t), a[2] (g, t + 4), a[3] (g + 8, t + 4), b[0] (t, g),
// b[1] (t + 4, g) in units of registers; d is (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1).
template <class T, int kDepth> void mma_m16n8(float* const (&d)[4], const u32 (&a)[4], const u32 (&b)[2], Site site) {
  struct Record { float* const* d; const u32 *a, *b; } record{d, a, b};
  wait_for_warp(site, &record, [](void* const* records) CF_UNANNOUNCED {
    using Element = typename Format<T>::Element;
    constexpr u32 kPack = 4 / sizeof(Element);
    double rows[16][kDepth], cols[8][kDepth];
    for (u32 lane = 0; lane < 32; ++lane) {
      const Record& mine = *static_cast<const Record*>(records[lane]);
      const u32 g = lane / 4, t = lane % 4;
      for (u32 part = 0; part < kPack; ++part) {
        auto value = [&](u32 x) CF_UNANNOUNCED { return Format<T>::value(Element(x >> (16 * part))); };
        for (u32 n = 0; n < 4; ++n) rows[g + 8 * (n % 2)][kPack * (t + 4 * (n / 2)) + part] = value(mine.a[n]);
        for (u32 n = 0; n < 2; ++n) cols[g][kPack * (t + 4 * n) + part] = value(mine.b[n]);
      }
    }
    for (u32 lane = 0; lane < 32; ++lane) {
      const Record& mine = *static_cast<const Record*>(records[lane]);
      for (u32 n = 0; n < 4; ++n) {
        double addends[kDepth + 1];
        addends[kDepth] = *mine.d[n];
        const double *row = rows[lane / 4 + 8 * (n / 2)], *col = cols[2 * (lane % 4) + n % 2];
        for (int k = 0; k < kDepth; ++k) addends[k] = row[k] * col[k];
        *mine.d[n] = cut_sum(addends);
      }
    }
  });
}

// Every lane reads the row it names, then they exchange.
template <bool kTransposed> void ldmatrix_x4(u32 (&r)[4], u32 address, Site site) {
  if (address % 16 != 0) {
    fault("%s (%s:%d): a row at byte %u, no multiple of 16", site.word, site.file, site.line, address);
  }
  struct Record { Row row; u32 got[4]; } record{shared_at<Row>(address), {}};
  wait_for_warp(site, &record, [](void* const* records) CF_UNANNOUNCED {
    for (u32 lane = 0; lane < 32; ++lane) {
      const u32 g = lane / 4, t = lane % 4;
      for (u32 n = 0; n < 4; ++n) {
        auto element = [&](u32 i, u32 j) CF_UNANNOUNCED {
          return static_cast<const Record*>(records[8 * n + (kTransposed ? j : i)])->row.value[kTransposed ? i : j];
        };
        static_cast<Record*>(records[lane])->got[n] = pair(element(g, 2 * t), element(g, 2 * t + 1));
      }
    }
  });
  for (int n = 0; n < 4; ++n) r[n] = record.got[n];
}

}  // namespace emulate
