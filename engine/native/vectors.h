// Vectors of 16 floats, of 8 doubles and of as many integers, by AVX-512 or by AVX2: what everything else here is
// written in.
//
// Both compute the same bits: each lane by the same operations, sums of lanes in the same order. Masks have a bit a
// lane.
//
//   spread(x)              every lane x; spread32 and spread64 make integers
//   load, store            16 floats, or those of a mask (others read as 0, or as `otherwise`, and are not written)
//   fused(a, b, c)         a b + c, rounded once; fused_minus: a b - c; fused_from: c - a b
//   larger, smaller        the second where either is NaN, as the processor has it
//   sum, most              of all lanes
//   Where                  where a comparison of floats holds; bits(where) is its mask, blend(where, no, yes) takes by
//   it Register               as many floats as the processor holds in one: loops that must keep all their sums in
//   registers
//                          use it (`kRegister` lanes, a divisor of 16; 64 bytes or 32)
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace latebranch {

constexpr int64_t kLanes = 16;
constexpr int64_t kDoubles = 8;

using Mask = uint16_t;

inline Mask lanes_left(int64_t count) { return count >= kLanes ? 0xFFFF : (Mask)((1u << count) - 1); }

// float16, as caches may hold it.
struct Half {
  uint16_t bits;
};

}  // namespace latebranch

#ifdef __AVX512F__
#include "avx512.h"
#else
#include "avx2.h"
#endif
