// vectors.h by AVX2, with its fused products (FMA) and float16 (F16C): a vector is two registers.
#pragma once

namespace latebranch {

struct Floats {
  __m256 low, high;
};
struct Doubles {
  __m256d low, high;
};
struct Integers {
  __m256i low, high;
};
using Where = Floats;  // all bits of a lane
using Register = __m256;

constexpr int64_t kRegister = 8;
constexpr int kNumRegisters = 16;

inline Floats spread(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Doubles spread(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
inline Integers spread32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Integers spread64(int64_t x) { return {_mm256_set1_epi64x(x), _mm256_set1_epi64x(x)}; }
inline Integers ascending32() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
inline Integers ascending64() { return {_mm256_setr_epi64x(0, 1, 2, 3), _mm256_setr_epi64x(4, 5, 6, 7)}; }

// The lanes of 8 bits, and of 4.
inline __m256i lanes_of(uint32_t m) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int32_t)m), bits), bits);
}
inline __m256i wide_lanes_of(uint32_t m) {
  const __m256i bits = _mm256_setr_epi64x(1, 2, 4, 8);
  return _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x((int64_t)m), bits), bits);
}

// Registers

inline Register register_of(float x) { return _mm256_set1_ps(x); }
inline Register load_register(const float* from) { return _mm256_loadu_ps(from); }
inline void store_register(float* to, Register v) { _mm256_storeu_ps(to, v); }
inline Register load_register(Mask m, const float* from) {
  return (m & 0xFF) == 0xFF ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, lanes_of(m));
}
inline Register load_register(Mask m, const Half* from) {
  if ((m & 0xFF) == 0xFF)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
  Half some[8] = {};
  for (int i = 0; i < 8; i++)
    if (m >> i & 1)
      some[i] = from[i];
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)some));
}
inline void store_register(float* to, Mask m, Register v) {
  if ((m & 0xFF) == 0xFF) {
    _mm256_storeu_ps(to, v);
  } else {
    _mm256_maskstore_ps(to, lanes_of(m), v);
  }
}

// sum += a b. Not the intrinsic: GCC 12 copies its sums between registers, and out of them.
inline void add_product(Register& sum, Register a, Register b) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
}

// The even and the odd numbers of adjacent bfloat16 numbers, as floats.
inline Register load_even(const char* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)from), 16));
}
inline Register load_odd(const char* from) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(_mm256_loadu_si256((const __m256i*)from), _mm256_set1_epi32((int)0xFFFF0000)));
}

// Floats

inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Floats load(Mask m, const float* from) { return {load_register(m, from), load_register(m >> 8, from + 8)}; }
inline Floats load(Mask m, const Half* from) { return {load_register(m, from), load_register(m >> 8, from + 8)}; }
inline void store(float* to, Floats v) {
  _mm256_storeu_ps(to, v.low);
  _mm256_storeu_ps(to + 8, v.high);
}
inline void store(float* to, Mask m, Floats v) {
  store_register(to, m, v.low);
  store_register(to + 8, m >> 8, v.high);
}

inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Register fused(Register a, Register b, Register c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats fused(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats fused_minus(Floats a, Floats b, Floats c) {
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
inline Floats fused_from(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats smaller(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Floats magnitude(Floats v) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, v.low), _mm256_andnot_ps(sign, v.high)};
}
inline Floats nearest(Floats v) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(v.low, kNearest), _mm256_round_ps(v.high, kNearest)};
}

// In two steps of half the power: both powers are normal numbers, so that a denormal result is rounded once. n is -252
// to 254, or NaN if v is NaN.
inline __m256 times_power_of_2(__m256 v, __m256 n) {
  const __m256i power = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(power, 1), rest = _mm256_sub_epi32(power, half);
  const auto to_the = [](__m256i k) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(k, _mm256_set1_epi32(127)), 23));
  };
  return _mm256_mul_ps(_mm256_mul_ps(v, to_the(half)), to_the(rest));
}
inline Floats times_power_of_2(Floats v, Floats n) {
  return {times_power_of_2(v.low, n.low), times_power_of_2(v.high, n.high)};
}

// The order of AVX-512's reductions: halves, then quarters, then each lane with the one two beyond it, then those two.
inline float sum(Floats v) {
  const __m256 eight = _mm256_add_ps(v.high, v.low);
  const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_movehdup_ps(two));
}
inline float most(Floats v) {
  const __m256 eight = _mm256_max_ps(v.high, v.low);
  const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline Where is_nan(Floats v) {
  return {_mm256_cmp_ps(v.low, v.low, _CMP_UNORD_Q), _mm256_cmp_ps(v.high, v.high, _CMP_UNORD_Q)};
}
inline Where is_more(Floats a, Floats b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ)};
}
inline Where is_broken(Floats v) {  // NaN or infinite: not less than infinity
  const Floats size = magnitude(v), infinite = spread(__builtin_inff());
  return {_mm256_cmp_ps(size.low, infinite.low, _CMP_NLT_UQ), _mm256_cmp_ps(size.high, infinite.high, _CMP_NLT_UQ)};
}
inline Where nowhere() { return spread(0.0f); }
inline Where operator|(Where a, Where b) { return {_mm256_or_ps(a.low, b.low), _mm256_or_ps(a.high, b.high)}; }
inline Mask bits(Where where) { return (Mask)(_mm256_movemask_ps(where.low) | _mm256_movemask_ps(where.high) << 8); }
inline Floats blend(Where where, Floats no, Floats yes) {
  return {_mm256_blendv_ps(no.low, yes.low, where.low), _mm256_blendv_ps(no.high, yes.high, where.high)};
}
inline Integers blend(Where where, Integers no, Integers yes) {
  return {_mm256_blendv_epi8(no.low, yes.low, _mm256_castps_si256(where.low)),
          _mm256_blendv_epi8(no.high, yes.high, _mm256_castps_si256(where.high))};
}
inline Where where(Mask m) { return {_mm256_castsi256_ps(lanes_of(m)), _mm256_castsi256_ps(lanes_of(m >> 8))}; }
inline Floats load(Floats otherwise, Mask m, const float* from) {
  return m == 0xFFFF ? load(from) : blend(where(m), otherwise, load(m, from));
}
inline Floats only(Mask m, Floats v) { return m == 0xFFFF ? v : blend(where(m), spread(0.0f), v); }

inline void store_halves(Half* to, Mask m, Floats v) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m128i low = _mm256_cvtps_ph(v.low, kNearest), high = _mm256_cvtps_ph(v.high, kNearest);
  if (m == 0xFFFF) {
    _mm_storeu_si128((__m128i*)to, low);
    _mm_storeu_si128((__m128i*)(to + 8), high);
    return;
  }
  Half all[kLanes];
  _mm_storeu_si128((__m128i*)all, low);
  _mm_storeu_si128((__m128i*)(all + 8), high);
  for (int i = 0; i < kLanes; i++)
    if (m >> i & 1)
      to[i] = all[i];
}

// Stores numbers of -127 to 127 as bytes; returns their sum.
inline int32_t store_rounded(int8_t* to, Floats v) {
  const __m256i low = _mm256_cvtps_epi32(v.low), high = _mm256_cvtps_epi32(v.high);
  const __m128i first = _mm_packs_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  const __m128i second = _mm_packs_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  const __m128i bytes = _mm_packs_epi16(first, second), shift = _mm_set1_epi8((char)0x80);
  _mm_storeu_si128((__m128i*)to, bytes);
  const __m128i eights = _mm_sad_epu8(_mm_xor_si128(bytes, shift), _mm_setzero_si128());
  return _mm_cvtsi128_si32(eights) + _mm_extract_epi16(eights, 4) - 16 * 128;
}

// Store the lanes of a mask contiguously; up to 16 numbers may be overwritten.
inline void compress(float* to, Mask m, Floats v) {
  if (m == 0xFFFF)
    return store(to, v);
  float all[kLanes];
  store(all, v);
  for (int i = 0; i < kLanes; i++)
    if (m >> i & 1)
      *to++ = all[i];
}
inline void compress(int64_t* to, Mask m, const int64_t* from, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (m >> i & 1)
      *to++ = from[i];
}

// Four squares of 8 rows by 8 lanes.
inline void transpose(Floats (&r)[16]) {
  const auto square = [](__m256(&s)[8]) {
    __m256 u[8];
    for (int i = 0; i < 8; i += 2) {
      u[i] = _mm256_unpacklo_ps(s[i], s[i + 1]);
      u[i + 1] = _mm256_unpackhi_ps(s[i], s[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      s[i] = _mm256_shuffle_ps(u[i], u[i + 2], 0x44);
      s[i + 1] = _mm256_shuffle_ps(u[i], u[i + 2], 0xee);
      s[i + 2] = _mm256_shuffle_ps(u[i + 1], u[i + 3], 0x44);
      s[i + 3] = _mm256_shuffle_ps(u[i + 1], u[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
      u[i] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
      u[i + 4] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++)
      s[i] = u[i];
  };
  __m256 a[8], b[8], c[8], d[8];
  for (int i = 0; i < 8; i++) {
    a[i] = r[i].low;
    b[i] = r[i].high;
    c[i] = r[i + 8].low;
    d[i] = r[i + 8].high;
  }
  square(a);
  square(b);
  square(c);
  square(d);
  for (int i = 0; i < 8; i++) {
    r[i] = {a[i], c[i]};
    r[i + 8] = {b[i], d[i]};
  }
}

// Pairs of bfloat16 numbers (avx512.h): AVX2 has no instructions for them.

inline bool has_pair_products() { return false; }

inline __m256i nearest_halves(Register v) {
  const __m256i bits = _mm256_castps_si256(v),
                is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), is_odd);
  const __m256i nan = _mm256_set1_epi32(0x7FC00000), where = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, nan, where);
}

inline Register pairs_of(Register first, Register second) {
  const __m256i halves =
      _mm256_packus_epi32(_mm256_srli_epi32(nearest_halves(first), 16), _mm256_srli_epi32(nearest_halves(second), 16));
  return _mm256_castsi256_ps(_mm256_permute4x64_epi64(halves, 0xD8));
}
template <bool kHardware>
inline Floats pairs_of(Floats first, Floats second) {
  return {pairs_of(first.low, first.high), pairs_of(second.low, second.high)};
}

template <bool kHardware>
inline Register joined_pairs(Register even, Register odd) {
  return _mm256_castsi256_ps(
      _mm256_blend_epi16(_mm256_srli_epi32(nearest_halves(even), 16), nearest_halves(odd), 0xAA));
}
template <bool kHardware>
inline Floats joined_pairs(Floats even, Floats odd) {
  return {joined_pairs<kHardware>(even.low, odd.low), joined_pairs<kHardware>(even.high, odd.high)};
}

inline Register odd_of(Register pairs) {
  return _mm256_and_ps(pairs, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xFFFF0000)));
}
inline Register even_of(Register pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
}
inline Floats odd_of(Floats pairs) { return {odd_of(pairs.low), odd_of(pairs.high)}; }
inline Floats even_of(Floats pairs) { return {even_of(pairs.low), even_of(pairs.high)}; }

template <bool kHardware>
inline void add_pair_products(Register& sum, Register a, Register b) {
  add_product(sum, odd_of(a), odd_of(b));
  add_product(sum, even_of(a), even_of(b));
}

inline Register even_alone(Register pairs) {
  return _mm256_and_ps(pairs, _mm256_castsi256_ps(_mm256_set1_epi32(0xFFFF)));
}

// Doubles

inline Doubles doubles_of(__m256 v) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1))};
}
inline Doubles load_doubles(Mask m, const float* from) { return doubles_of(load_register(m, from)); }
inline Doubles load_doubles(Mask m, const float* from, float factor) {  // rounded to floats
  return doubles_of(_mm256_mul_ps(_mm256_set1_ps(factor), load_register(m, from)));
}
inline void store(double* to, Doubles v) {
  _mm256_storeu_pd(to, v.low);
  _mm256_storeu_pd(to + 4, v.high);
}
inline void store(double* to, Mask m, Doubles v) {
  if ((m & 0xFF) == 0xFF)
    return store(to, v);
  _mm256_maskstore_pd(to, wide_lanes_of(m), v.low);
  _mm256_maskstore_pd(to + 4, wide_lanes_of(m >> 4), v.high);
}
inline Doubles operator+(Doubles a, Doubles b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
inline Doubles operator-(Doubles a, Doubles b) { return {_mm256_sub_pd(a.low, b.low), _mm256_sub_pd(a.high, b.high)}; }
inline Doubles operator*(Doubles a, Doubles b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
inline Doubles operator/(Doubles a, Doubles b) { return {_mm256_div_pd(a.low, b.low), _mm256_div_pd(a.high, b.high)}; }
inline Doubles fused(Doubles a, Doubles b, Doubles c) {
  return {_mm256_fmadd_pd(a.low, b.low, c.low), _mm256_fmadd_pd(a.high, b.high, c.high)};
}
inline Doubles fused_minus(Doubles a, Doubles b, Doubles c) {
  return {_mm256_fmsub_pd(a.low, b.low, c.low), _mm256_fmsub_pd(a.high, b.high, c.high)};
}
inline double most(Doubles v) {
  const __m256d four = _mm256_max_pd(v.low, v.high);
  const __m128d two = _mm_max_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_max_sd(two, _mm_unpackhi_pd(two, two)));
}
template <int kComparison>
inline Mask compared(Doubles a, Doubles b) {
  return (Mask)(_mm256_movemask_pd(_mm256_cmp_pd(a.low, b.low, kComparison)) |
                _mm256_movemask_pd(_mm256_cmp_pd(a.high, b.high, kComparison)) << 4);
}
inline Mask more(Doubles a, Doubles b) { return compared<_CMP_GT_OQ>(a, b); }
inline Mask no_less(Doubles a, Doubles b) { return compared<_CMP_GE_OQ>(a, b); }
inline Mask not_zero(Doubles v) { return compared<_CMP_NEQ_UQ>(v, spread(0.0)); }  // NaN too
inline Mask nan_lanes(Doubles v) { return compared<_CMP_UNORD_Q>(v, v); }
inline Doubles blend_doubles(Mask m, Doubles no, Doubles yes) {
  return {_mm256_blendv_pd(no.low, yes.low, _mm256_castsi256_pd(wide_lanes_of(m))),
          _mm256_blendv_pd(no.high, yes.high, _mm256_castsi256_pd(wide_lanes_of(m >> 4)))};
}
inline Integers blend_longs(Mask m, Integers no, Integers yes) {
  return {_mm256_blendv_epi8(no.low, yes.low, wide_lanes_of(m)),
          _mm256_blendv_epi8(no.high, yes.high, wide_lanes_of(m >> 4))};
}

// Integers

inline Integers add32(Integers a, Integers b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
inline Integers load_longs(Mask m, const int64_t* from) {
  return {_mm256_maskload_epi64((const long long*)from, wide_lanes_of(m)),
          _mm256_maskload_epi64((const long long*)from + 4, wide_lanes_of(m >> 4))};
}
inline void store(int32_t* to, Integers v) {
  _mm256_storeu_si256((__m256i*)to, v.low);
  _mm256_storeu_si256((__m256i*)(to + 8), v.high);
}
inline void store(int64_t* to, Integers v) {
  _mm256_storeu_si256((__m256i*)to, v.low);
  _mm256_storeu_si256((__m256i*)(to + 4), v.high);
}
inline Integers add64(Integers a, Integers b) {
  return {_mm256_add_epi64(a.low, b.low), _mm256_add_epi64(a.high, b.high)};
}
inline Integers exclusive_or(Integers a, Integers b) {
  return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)};
}
template <int N>
inline Integers shifted_right64(Integers a) {
  return {_mm256_srli_epi64(a.low, N), _mm256_srli_epi64(a.high, N)};
}

// By products of 32 bits: the products of the high halves are beyond 64.
inline __m256i times64(__m256i a, __m256i b) {
  const __m256i crossed =
      _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), b), _mm256_mul_epu32(a, _mm256_srli_epi64(b, 32)));
  return _mm256_add_epi64(_mm256_mul_epu32(a, b), _mm256_slli_epi64(crossed, 32));
}
inline Integers times64(Integers a, Integers b) { return {times64(a.low, b.low), times64(a.high, b.high)}; }

// Of 0 to 2^52 - 1: with the exponent of 2^52 the integer is the mantissa.
inline __m256d doubles_of(__m256i a) {
  const __m256d shift = _mm256_set1_pd(0x1p52);
  return _mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(a, _mm256_castpd_si256(shift))), shift);
}
inline Doubles doubles_of(Integers a) { return {doubles_of(a.low), doubles_of(a.high)}; }

// v = mantissa x 2^exponent of a normal positive number, 1 <= mantissa < 2.
inline Doubles exponent_of(Doubles v) {
  const Integers biased = shifted_right64<52>({_mm256_castpd_si256(v.low), _mm256_castpd_si256(v.high)});
  return doubles_of(biased) - spread(1023.0);
}
inline Doubles mantissa_of(Doubles v) {
  const __m256d fraction = _mm256_castsi256_pd(_mm256_set1_epi64x(0x000FFFFFFFFFFFFF)), one = _mm256_set1_pd(1.0);
  return {_mm256_or_pd(_mm256_and_pd(v.low, fraction), one), _mm256_or_pd(_mm256_and_pd(v.high, fraction), one)};
}

}  // namespace latebranch
