// Plain types that every other header speaks in. No hardware words: the same text serves the GPU and the emulation.
#pragma once

#ifdef CUPYFLASH_EMULATE
#define CF_DEVICE inline
#define CF_UNROLL
#define CF_UNROLL_1
#define CF_UNROLL_2
#define CF_UNROLL_BY(n)
#define CF_CONSTANT static const
#else
#define CF_DEVICE __device__ __forceinline__     // a function that is inlined into its kernel
#define CF_UNROLL _Pragma("unroll")              // a loop whose counter indexes registers
#define CF_UNROLL_1 _Pragma("unroll 1")          // a loop that stays a loop, to keep the code short
#define CF_UNROLL_2 _Pragma("unroll 2")          // a loop that stays a loop of pairs
#define CF_UNROLL_BY(n) CF_PRAGMA(unroll n)      // of n at a time
#define CF_PRAGMA(text) _Pragma(#text)
#define CF_CONSTANT __constant__                 // a table that instructions read as an operand
#endif

using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

struct float16 { u16 bits; };     // IEEE binary16, storage only
struct bfloat16 { u16 bits; };    // the upper half of a float, storage only

// Element types of arrays whose dtype is known at run time alone; cupyflash/cuda/params.py holds the same numbers.
enum Kind : i32 { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

template <class T> struct KindOf;
template <> struct KindOf<float16> { static constexpr Kind value = kFloat16; };
template <> struct KindOf<bfloat16> { static constexpr Kind value = kBFloat16; };
template <> struct KindOf<float> { static constexpr Kind value = kFloat32; };
template <> struct KindOf<double> { static constexpr Kind value = kFloat64; };

// N values that one instruction moves; N * sizeof(T) is at most 16 bytes, and the address is a multiple of it.
template <class T, int N> struct alignas(sizeof(T) * N) Packed { T value[N]; };

template <class T> CF_DEVICE constexpr T smaller(T a, T b) { return a < b ? a : b; }              // integers
template <class T> CF_DEVICE constexpr T larger(T a, T b) { return a > b ? a : b; }               // integers
template <class T> CF_DEVICE constexpr T clamp(T a, T low, T high) { return smaller(larger(a, low), high); }
CF_DEVICE constexpr i32 ceil_div(i32 a, i32 b) { return a / b + (a % b != 0); }                   // a >= 0, b > 0
CF_DEVICE constexpr i32 round_up(i32 a, i32 b) { return ceil_div(a, b) * b; }
