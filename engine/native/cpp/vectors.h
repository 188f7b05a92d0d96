// Vectors of 16 floats, of 8 doubles and of as many integers, by AVX-512 or by AVX2. All other headers use them.
//
// Both instruction sets give the same bits: the same operations in each lane, and sums of lanes in the same order. A
// mask has one bit for each lane.
//
//   spread(x)              every lane x; spread32 and spread64 make integers
//   load, store            16 floats, or the floats of a mask (others read as 0, or as `otherwise`, and are not written)
//   fused(a, b, c)         a b + c, rounded once; fused_minus: a b - c; fused_from: c - a b
//   larger, smaller        the second argument if either is NaN, as in the processor
//   sum, most              of all lanes
//   Where                  the lanes where a comparison holds; bits(where): its mask; blend(where, no, yes): by lane
//   Register               the floats of one register (kRegister: 16 or 8), for loops with all sums in registers
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

// For functions with arrays of registers as arguments: these stay in registers only if the function is inlined.
// So do functions that only prefetch: GCC removes calls of functions without effects.
#define LATEBRANCH_INLINED __attribute__((always_inline))
#define LATEBRANCH_INLINE inline LATEBRANCH_INLINED

// Sums stay in registers only if every loop over them is unrolled.
#define LATEBRANCH_UNROLLED_FOR(...) _Pragma("GCC unroll 16") for (__VA_ARGS__)

namespace latebranch {

constexpr int64_t kLanes = 16;
constexpr int64_t kDoubles = 8;

using Mask = uint16_t;

inline Mask lanes_left(int64_t count) { return count >= kLanes ? 0xFFFF : (Mask)((1u << count) - 1); }

// float16, a format of caches.
struct Half {
  uint16_t bits;
};

}  // namespace latebranch

#ifdef __AVX512F__
#include "avx512.h"
#else
#include "avx2.h"
#endif
