// Counter-based noise: draw i of key k is splitmix64's output number i + 1 from state k, as engine/noise.py defines it, and the
// Gumbel noise -log(-log u) of its uniform. Logarithms are within 1 unit in the last place (fdlibm's).
#pragma once
#include "numbers.h"

namespace latebranch {

constexpr int64_t kDoubles = 8;

inline __m512d logarithm(__m512d x) {
  const __m512d one = _mm512_set1_pd(1.0);
  __m512d exponent = _mm512_getexp_pd(x);
  __m512d m = _mm512_getmant_pd(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);  // 1 to 2
  const __mmask8 is_large = _mm512_cmp_pd_mask(m, _mm512_set1_pd(1.4142135623730951), _CMP_GT_OQ);
  m = _mm512_mask_mul_pd(m, is_large, m, _mm512_set1_pd(0.5));
  exponent = _mm512_mask_add_pd(exponent, is_large, exponent, one);
  const __m512d f = _mm512_sub_pd(m, one), s = _mm512_div_pd(f, _mm512_add_pd(f, _mm512_set1_pd(2.0))), z = _mm512_mul_pd(s, s);
  __m512d r = _mm512_set1_pd(1.479819860511658591e-01);
  for (const double c : {1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01, 2.857142874366239149e-01,
                         3.999999999940941908e-01, 6.666666666666735130e-01})
    r = _mm512_fmadd_pd(r, z, _mm512_set1_pd(c));
  r = _mm512_mul_pd(r, z);
  const __m512d half_square = _mm512_mul_pd(_mm512_set1_pd(0.5), _mm512_mul_pd(f, f));
  const __m512d low = _mm512_fmadd_pd(s, _mm512_add_pd(half_square, r), _mm512_mul_pd(exponent, _mm512_set1_pd(1.90821492927058770002e-10)));
  const __m512d rest = _mm512_sub_pd(_mm512_sub_pd(half_square, low), f);
  return _mm512_fmsub_pd(exponent, _mm512_set1_pd(6.93147180369123816490e-01), rest);
}

// The uniforms u of draws i of a key, eight at a time.
inline __m512d uniform_noise(uint64_t key, __m512i draws) {
  const auto times = [](__m512i x, uint64_t y) { return _mm512_mullo_epi64(x, _mm512_set1_epi64((long long)y)); };
  const auto mixed = [](__m512i x, int shift) { return _mm512_xor_si512(x, _mm512_srli_epi64(x, shift)); };
  __m512i bits = times(_mm512_add_epi64(draws, _mm512_set1_epi64(1)), 0x9E3779B97F4A7C15ull);
  bits = _mm512_add_epi64(bits, _mm512_set1_epi64((long long)key));
  bits = times(mixed(bits, 30), 0xBF58476D1CE4E5B9ull);
  bits = mixed(times(mixed(bits, 27), 0x94D049BB133111EBull), 31);
  const __m512d whole = _mm512_cvtepi64_pd(_mm512_srli_epi64(bits, 12));
  return _mm512_mul_pd(_mm512_add_pd(whole, _mm512_set1_pd(0.5)), _mm512_set1_pd(0x1p-52));
}

inline __m512d exponential_of(__m512d u) { return _mm512_sub_pd(_mm512_setzero_pd(), logarithm(u)); }

// -log u: exponential noise.
inline __m512d exponential_noise(uint64_t key, __m512i draws) { return exponential_of(uniform_noise(key, draws)); }

inline __m512i ascending() { return _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0); }

// Gumbel noise of draws [begin, end) of a key, or of the draws `ids` names there.
inline void gumbel_noise(uint64_t key, const int64_t* ids, int64_t begin, int64_t end, double* out) {
  for (int64_t i = begin; i < end; i += kDoubles) {
    const __mmask8 m = (__mmask8)lanes_left(end - i);
    const __m512i draws = ids ? _mm512_maskz_loadu_epi64(m, ids + i) : _mm512_add_epi64(ascending(), _mm512_set1_epi64(i));
    _mm512_mask_storeu_pd(out + i, m, _mm512_sub_pd(_mm512_setzero_pd(), logarithm(exponential_noise(key, draws))));
  }
}

// The draw of largest log p + Gumbel noise, which is that of largest p / -log u, and that score; NaN where p has NaN.
//
// As -log u is no less than 1 - u, most draws need no logarithm: those whose p / (1 - u) is below the best so far.
inline void choose(const float* law, int64_t count, uint64_t key, double* score, int64_t* chosen) {
  __m512d best = _mm512_set1_pd(-1.0);
  __m512i best_draws = _mm512_setzero_si512();
  __m512d enough = _mm512_setzero_pd();  // of the best of all lanes, all but what rounding may take
  __mmask8 broken = 0;
  for (int64_t i = 0; i < count; i += kDoubles) {
    const __mmask8 m = (__mmask8)lanes_left(count - i);
    const __m512d p = _mm512_cvtps_pd(_mm256_maskz_loadu_ps(m, law + i));
    if (!_mm512_cmp_pd_mask(p, _mm512_setzero_pd(), _CMP_NEQ_UQ)) continue;  // nothing here can come
    const __m512i draws = _mm512_add_epi64(ascending(), _mm512_set1_epi64(i));
    const __m512d u = uniform_noise(key, draws);
    broken |= _mm512_cmp_pd_mask(p, p, _CMP_UNORD_Q);
    if (!(m & _mm512_cmp_pd_mask(p, _mm512_mul_pd(enough, _mm512_sub_pd(_mm512_set1_pd(1.0), u)), _CMP_GE_OQ))) continue;
    const __m512d ratio = _mm512_div_pd(p, exponential_of(u));
    const __mmask8 is_better = m & _mm512_cmp_pd_mask(ratio, best, _CMP_GT_OQ);
    best = _mm512_mask_mov_pd(best, is_better, ratio);
    best_draws = _mm512_mask_mov_epi64(best_draws, is_better, draws);
    enough = _mm512_set1_pd(_mm512_reduce_max_pd(best) * (1.0 - 1e-9));
  }
  alignas(64) double ratios[kDoubles];
  alignas(64) int64_t places[kDoubles];
  _mm512_store_pd(ratios, best), _mm512_store_si512(places, best_draws);
  int first = 0;
  for (int i = 1; i < kDoubles; i++)
    if (ratios[i] > ratios[first] || (ratios[i] == ratios[first] && places[i] < places[first])) first = i;
  *score = broken ? std::numeric_limits<double>::quiet_NaN() : std::log(std::max(0.0, ratios[first]));
  *chosen = places[first];
}

}  // namespace latebranch
