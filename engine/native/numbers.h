// Vectors of 16 floats, and the few functions of rows that a decoder needs.
//
// Every number here depends on its row alone: sums run over a row in one order, whatever lies beside it. Compile without
// contraction (-ffp-contract=off), or the compiler fuses a product and a sum in one copy of a function and not in another.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace latebranch {

constexpr int64_t kLanes = 16;

// Make room for so many; what is there may be anything.
template <typename T>
void grow(std::vector<T>& room, int64_t size) {
  if ((int64_t)room.size() < size) room.resize(size);
}

inline __mmask16 lanes_left(int64_t count) { return count >= kLanes ? 0xFFFF : (__mmask16)((1u << count) - 1); }

// float16, as caches may hold it.
struct Half {
  uint16_t bits;
};

inline __m512 load_floats(__mmask16 m, const float* from) { return _mm512_maskz_loadu_ps(m, from); }
inline __m512 load_floats(__mmask16 m, const Half* from) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, from)); }
inline void store_floats(__mmask16 m, float* to, __m512 v) { _mm512_mask_storeu_ps(to, m, v); }

// Rounded to the nearest, what is beyond its range to the last number in it; what is no number or infinite stays so.
inline void store_floats(__mmask16 m, Half* to, __m512 v) {
  const __m512 most = _mm512_set1_ps(65504.0f);
  const __mmask16 is_number = ~_mm512_fpclass_ps_mask(v, 0x99);
  v = _mm512_mask_max_ps(v, is_number, _mm512_sub_ps(_mm512_setzero_ps(), most), _mm512_mask_min_ps(v, is_number, most, v));
  _mm256_mask_storeu_epi16(to, m, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

template <typename Cached>
inline void store_row(const float* from, int64_t n, Cached* to) {
  for (int64_t i = 0; i < n; i += kLanes) store_floats(lanes_left(n - i), to + i, _mm512_maskz_loadu_ps(lanes_left(n - i), from + i));
}

// e^x to within 2 units in the last place; NaN stays NaN, below -104 it is 0.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0f), _mm512_min_ps(_mm512_set1_ps(89.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);  // Cephes' expf
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

inline __m512 silu(__m512 x) {
  const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), which is x / (1 + e^-2u).
inline __m512 gelu_tanh(__m512 x) {
  const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
  const __m512 u = _mm512_mul_ps(_mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x), _mm512_set1_ps(0.7978845608f));
  const __m512 e = exponential(_mm512_mul_ps(u, _mm512_set1_ps(-2.0f)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

// out = x / sqrt(mean(x^2) + eps) * weight (null: 1)
inline void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += kLanes) {
    const __m512 v = _mm512_maskz_loadu_ps(lanes_left(n - i), x + i);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const float inverse = 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / (float)n + eps);
  for (int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 m = lanes_left(n - i);
    const __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(m, x + i), _mm512_set1_ps(inverse));
    _mm512_mask_storeu_ps(out + i, m, weight ? _mm512_mul_ps(v, _mm512_maskz_loadu_ps(m, weight + i)) : v);
  }
}

inline void add_to(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 m = lanes_left(n - i);
    _mm512_mask_storeu_ps(x + i, m, _mm512_add_ps(_mm512_maskz_loadu_ps(m, x + i), _mm512_maskz_loadu_ps(m, y + i)));
  }
}

// Rotate halves of a head in place: cosines and sines of its position, as transformers has them.
inline void rotate(float* x, const float* cosines, const float* sines, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const __mmask16 m = lanes_left(half - i);
    const __m512 a = _mm512_maskz_loadu_ps(m, x + i), b = _mm512_maskz_loadu_ps(m, x + half + i);
    const __m512 turned_a = _mm512_mul_ps(b, _mm512_maskz_loadu_ps(m, sines + i));
    const __m512 turned_b = _mm512_mul_ps(a, _mm512_maskz_loadu_ps(m, sines + half + i));
    _mm512_mask_storeu_ps(x + i, m, _mm512_fmsub_ps(a, _mm512_maskz_loadu_ps(m, cosines + i), turned_a));
    _mm512_mask_storeu_ps(x + half + i, m, _mm512_fmadd_ps(b, _mm512_maskz_loadu_ps(m, cosines + half + i), turned_b));
  }
}

}  // namespace latebranch
