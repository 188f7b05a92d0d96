// vectors.h by AVX-512: a vector is a register.
#pragma once

namespace latebranch {

using Floats = __m512;
using Doubles = __m512d;
using Integers = __m512i;
using Where = __mmask16;
using Register = __m512;

constexpr int64_t kRegister = 16;
constexpr int kNumRegisters = 32;

inline Floats spread(float x) { return _mm512_set1_ps(x); }
inline Doubles spread(double x) { return _mm512_set1_pd(x); }
inline Integers spread32(int32_t x) { return _mm512_set1_epi32(x); }
inline Integers spread64(int64_t x) { return _mm512_set1_epi64(x); }
inline Integers ascending32() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
inline Integers ascending64() { return _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0); }

// Floats

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(Mask m, const float* from) { return _mm512_maskz_loadu_ps(m, from); }
inline Floats load(Floats otherwise, Mask m, const float* from) { return _mm512_mask_loadu_ps(otherwise, m, from); }
inline Floats load(Mask m, const Half* from) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, from)); }
inline void store(float* to, Floats v) { _mm512_storeu_ps(to, v); }
inline void store(float* to, Mask m, Floats v) { _mm512_mask_storeu_ps(to, m, v); }

inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fused_minus(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline Floats fused_from(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats magnitude(Floats v) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), v); }
inline Floats nearest(Floats v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power_of_2(Floats v, Floats n) { return _mm512_scalef_ps(v, n); }  // n whole
inline float sum(Floats v) { return _mm512_reduce_add_ps(v); }
inline float most(Floats v) { return _mm512_reduce_max_ps(v); }

inline Where is_nan(Floats v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }
inline Where is_broken(Floats v) { return _mm512_fpclass_ps_mask(v, 0x99); }  // NaN or infinite
inline Where is_more(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Where nowhere() { return 0; }
inline Mask bits(Where where) { return where; }
inline Floats blend(Where where, Floats no, Floats yes) { return _mm512_mask_mov_ps(no, where, yes); }
inline Integers blend(Where where, Integers no, Integers yes) { return _mm512_mask_mov_epi32(no, where, yes); }
inline Floats only(Mask m, Floats v) { return _mm512_maskz_mov_ps(m, v); }

inline void store_halves(Half* to, Mask m, Floats v) {
  _mm256_mask_storeu_epi16(to, m, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Stores numbers of -127 to 127 as bytes; returns their sum.
inline int32_t store_rounded(int8_t* to, Floats v) {
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)), shift = _mm_set1_epi8((char)0x80);
  _mm_storeu_si128((__m128i*)to, bytes);
  const __m128i eights = _mm_sad_epu8(_mm_xor_si128(bytes, shift), _mm_setzero_si128());
  return _mm_cvtsi128_si32(eights) + _mm_extract_epi16(eights, 4) - 16 * 128;
}

// Store the lanes of a mask contiguously; up to 16 numbers may be overwritten.
inline void compress(float* to, Mask m, Floats v) { _mm512_storeu_ps(to, _mm512_maskz_compress_ps(m, v)); }
inline void compress(int64_t* to, Mask m, const int64_t* from, int64_t count) {
  const __m512i low = _mm512_maskz_loadu_epi64((__mmask8)lanes_left(count), from);
  const __m512i high = _mm512_maskz_loadu_epi64((__mmask8)(lanes_left(count) >> 8), from + 8);
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi64((__mmask8)m, low));
  _mm512_storeu_si512(to + __builtin_popcount(m & 0xFF), _mm512_maskz_compress_epi64((__mmask8)(m >> 8), high));
}

inline void transpose(Floats (&r)[16]) {
  Floats u[16];
  for (int i = 0; i < 16; i += 2) {
    u[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    u[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    const __m512d a = _mm512_castps_pd(u[i]), b = _mm512_castps_pd(u[i + 1]), c = _mm512_castps_pd(u[i + 2]),
                  e = _mm512_castps_pd(u[i + 3]);
    r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, e));
    r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, e));
  }
  for (int i = 0; i < 4; i++) {
    u[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    u[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    u[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    u[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_f32x4(u[i], u[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(u[i], u[i + 8], 0xdd);
  }
}

// Registers

inline Register register_of(float x) { return spread(x); }
inline Register load_register(const float* from) { return load(from); }
inline void store_register(float* to, Register v) { store(to, v); }
inline Register load_register(Mask m, const float* from) { return load(m, from); }
inline Register load_register(Mask m, const Half* from) { return load(m, from); }
inline void store_register(float* to, Mask m, Register v) { store(to, m, v); }

inline void add_product(Register& sum, Register a, Register b) { sum = fused(a, b, sum); }

// The even and the odd numbers of adjacent bfloat16 numbers, as floats.
inline Register load_even(const char* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(from), 16));
}
inline Register load_odd(const char* from) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32((int)0xFFFF0000)));
}

// Pairs of bfloat16 numbers in lanes of 32 bits, as floats that are only moved. `kHardware`: by AVX-512 BF16, which the
// library is not compiled for. It treats numbers below 2^-126 as 0.

inline bool has_pair_products() {
  static const bool has = [] {
    uint32_t a, b, c, d;
    asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(1));
    return (a >> 5 & 1) != 0;
  }();
  return has;
}

// Numbers whose high halves are the nearest bfloat16 numbers.
inline __m512i nearest_halves(Floats v) {
  const __m512i bits = _mm512_castps_si512(v), is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), spread32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, spread32(0x7FFF)), is_odd);
  return _mm512_mask_mov_epi32(rounded, is_nan(v), spread32(0x7FC00000));
}

// Bfloat16 numbers of `first`, then of `second`.
template <bool kHardware>
inline Floats pairs_of(Floats first, Floats second) {
  if constexpr (kHardware) {
    Floats pairs;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(pairs) : "v"(first), "v"(second));
    return pairs;
  }
  const __m256i low = _mm512_cvtepi32_epi16(_mm512_srli_epi32(nearest_halves(first), 16)),
                high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(nearest_halves(second), 16));
  return _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

// Pairs of the numbers of two registers, by lane.
template <bool kHardware>
inline Register joined_pairs(Register even, Register odd) {
  if constexpr (kHardware) {
    const __m512i order =
        _mm512_or_si512(ascending32(), _mm512_slli_epi32(_mm512_add_epi32(ascending32(), spread32(16)), 16));
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, _mm512_castps_si512(pairs_of<true>(even, odd))));
  }
  return _mm512_castsi512_ps(
      _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(nearest_halves(even), 16), nearest_halves(odd)));
}

// The odd or the even numbers of pairs.
inline Register odd_of(Register pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), spread32((int)0xFFFF0000)));
}
inline Register even_of(Register pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}

// sum += products of the odd numbers, then of the even numbers.
template <bool kHardware>
inline void add_pair_products(Register& sum, Register a, Register b) {
  if constexpr (kHardware) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return;
  }
  add_product(sum, odd_of(a), odd_of(b));
  add_product(sum, even_of(a), even_of(b));
}

inline Register even_alone(Register pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), spread32(0xFFFF)));
}

// Doubles

inline Doubles load_doubles(Mask m, const float* from) {
  return _mm512_cvtps_pd(_mm256_maskz_loadu_ps((__mmask8)m, from));
}
inline Doubles load_doubles(Mask m, const float* from, float factor) {  // rounded to floats
  return _mm512_cvtps_pd(_mm256_mul_ps(_mm256_set1_ps(factor), _mm256_maskz_loadu_ps((__mmask8)m, from)));
}
inline void store(double* to, Doubles v) { _mm512_storeu_pd(to, v); }
inline void store(double* to, Mask m, Doubles v) { _mm512_mask_storeu_pd(to, (__mmask8)m, v); }
inline Doubles fused(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
inline Doubles fused_minus(Doubles a, Doubles b, Doubles c) { return _mm512_fmsub_pd(a, b, c); }
inline double most(Doubles v) { return _mm512_reduce_max_pd(v); }
inline Mask more(Doubles a, Doubles b) { return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ); }
inline Mask no_less(Doubles a, Doubles b) { return _mm512_cmp_pd_mask(a, b, _CMP_GE_OQ); }
inline Mask not_zero(Doubles v) { return _mm512_cmp_pd_mask(v, _mm512_setzero_pd(), _CMP_NEQ_UQ); }  // NaN too
inline Mask nan_lanes(Doubles v) { return _mm512_cmp_pd_mask(v, v, _CMP_UNORD_Q); }
inline Doubles blend_doubles(Mask m, Doubles no, Doubles yes) { return _mm512_mask_mov_pd(no, (__mmask8)m, yes); }
inline Integers blend_longs(Mask m, Integers no, Integers yes) { return _mm512_mask_mov_epi64(no, (__mmask8)m, yes); }

// v = mantissa x 2^exponent of a normal positive number, 1 <= mantissa < 2.
inline Doubles exponent_of(Doubles v) { return _mm512_getexp_pd(v); }
inline Doubles mantissa_of(Doubles v) { return _mm512_getmant_pd(v, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src); }

// Integers

// sums += products of 4 unsigned by 4 signed bytes. Not the intrinsic: with it GCC 12 copies and spills the sums.
inline void add_dots(__m512i& sums, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "v"(signed_bytes));
}

inline Integers add32(Integers a, Integers b) { return _mm512_add_epi32(a, b); }
inline Integers load_longs(Mask m, const int64_t* from) { return _mm512_maskz_loadu_epi64((__mmask8)m, from); }
inline void store(int32_t* to, Integers v) { _mm512_storeu_si512(to, v); }
inline void store(int64_t* to, Integers v) { _mm512_storeu_si512(to, v); }
inline Integers add64(Integers a, Integers b) { return _mm512_add_epi64(a, b); }
inline Integers times64(Integers a, Integers b) { return _mm512_mullo_epi64(a, b); }
inline Integers exclusive_or(Integers a, Integers b) { return _mm512_xor_si512(a, b); }
template <int N>
inline Integers shifted_right64(Integers a) {
  return _mm512_srli_epi64(a, N);
}
inline Doubles doubles_of(Integers a) { return _mm512_cvtepi64_pd(a); }  // of 0 to 2^52 - 1

}  // namespace latebranch
