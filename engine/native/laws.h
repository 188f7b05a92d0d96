// Rows of logits: the likeliest token of each, and the law that a temperature makes of it.
#pragma once
#include "numbers.h"

namespace latebranch {

// The first of the largest logits and which it is; NaN if any logit is.
inline void likeliest(const float* logits, int64_t count, float* value, int64_t* token) {
  const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const __m512i ascending = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512 best = none;
  __m512i places = ascending;
  __mmask16 broken = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const __m512 x = _mm512_mask_loadu_ps(none, lanes_left(count - i), logits + i);
    broken |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __mmask16 is_better = _mm512_cmp_ps_mask(x, best, _CMP_GT_OQ);
    best = _mm512_mask_mov_ps(best, is_better, x);
    places = _mm512_mask_add_epi32(places, is_better, ascending, _mm512_set1_epi32((int)i));
  }
  alignas(64) float values[kLanes];
  alignas(64) int32_t tokens[kLanes];
  _mm512_store_ps(values, best), _mm512_store_si512(tokens, places);
  int first = 0;
  for (int i = 1; i < kLanes; i++)
    if (values[i] > values[first] || (values[i] == values[first] && tokens[i] < tokens[first])) first = i;
  *value = broken ? std::numeric_limits<float>::quiet_NaN() : values[first];
  *token = tokens[first];
}

// out = softmax(logits / temperature)
inline void law(const float* logits, int64_t count, float inverse_temperature, float* out) {
  const __m512 inverse = _mm512_set1_ps(inverse_temperature);
  float value;
  int64_t token;
  likeliest(logits, count, &value, &token);
  const __m512 top = _mm512_set1_ps(value * inverse_temperature);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; i += kLanes) {
    const __mmask16 m = lanes_left(count - i);
    const __m512 x = _mm512_mul_ps(inverse, _mm512_maskz_loadu_ps(m, logits + i));
    const __m512 e = exponential(_mm512_sub_ps(x, top));
    _mm512_mask_storeu_ps(out + i, m, e);
    sum = _mm512_mask_add_ps(sum, m, sum, e);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
  for (int64_t i = 0; i < count; i += kLanes) {
    const __mmask16 m = lanes_left(count - i);
    _mm512_mask_storeu_ps(out + i, m, _mm512_mul_ps(_mm512_maskz_loadu_ps(m, out + i), scale));
  }
}

}  // namespace latebranch
