// The best tokens of a draft law, by log q or by log q plus the noise of their position.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "noise.h"
#include "numbers.h"

namespace latebranch {

struct Ranked {
  int64_t* tokens;   // [most], best first
  double* scores;    // [most]
  float* odds;       // [most]: q
  float* collision;  // the sum of q^2
  int64_t* count;    // how many of `most` are there: tokens that can come
};

// `logits` [count]; `tokens` names what each column is, or is null where they are in order. Logits that make no law (a NaN, an
// infinity, nothing but -infinity) have a collision of NaN and no best tokens.
//
// Noise is -log(-log u), no more than -log(1 - u): most draws need no logarithm, those whose q / (1 - u) is below the least of the
// best so far.
inline void rank(const float* logits, int64_t count, float inverse_temperature, bool has_noise, uint64_t key, const int64_t* tokens,
                 int64_t most, const Ranked& out) {
  const __m512 inverse = _mm512_set1_ps(inverse_temperature), least = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 largest = least;
  __mmask16 broken = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const __m512 x = _mm512_mask_loadu_ps(least, lanes_left(count - i), logits + i);
    broken |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    largest = _mm512_max_ps(largest, _mm512_mul_ps(inverse, x));
  }
  const float top = _mm512_reduce_max_ps(largest);
  if (broken || !std::isfinite(top)) {
    *out.collision = std::numeric_limits<float>::quiet_NaN(), *out.count = 0;
    return;
  }
  thread_local std::vector<float> shares;  // of the likeliest token's probability
  grow(shares, count + kLanes);
  __m512 sum = _mm512_setzero_ps(), squares = sum;
  for (int64_t i = 0; i < count; i += kLanes) {
    const __mmask16 m = lanes_left(count - i);
    const __m512 e = _mm512_maskz_mov_ps(
        m, exponential(_mm512_sub_ps(_mm512_mul_ps(inverse, _mm512_maskz_loadu_ps(m, logits + i)), _mm512_set1_ps(top))));
    _mm512_storeu_ps(shares.data() + i, e);
    sum = _mm512_add_ps(sum, e), squares = _mm512_fmadd_ps(e, e, squares);
  }
  const float total = _mm512_reduce_add_ps(sum);
  const double normal = (double)top + std::log((double)total);
  *out.collision = _mm512_reduce_add_ps(squares) / total / total;
  const __m512d lowest = _mm512_set1_pd((double)top - 87.0);  // below it q is nothing beside the likeliest token's
  using Entry = std::pair<double, int64_t>;                    // score, and the column's negative: of equals the first wins
  std::vector<Entry> best;
  best.reserve(most);
  double threshold = -std::numeric_limits<double>::infinity();
  __m512d enough = _mm512_setzero_pd();  // e to the threshold over the likeliest token's share, all but what rounding may take
  for (int64_t i = 0; i < count; i += kDoubles) {
    const __mmask8 m = (__mmask8)lanes_left(count - i);
    const __m256 x = _mm256_mul_ps(_mm512_castps512_ps256(inverse), _mm256_maskz_loadu_ps(m, logits + i));
    __m512d score = _mm512_cvtps_pd(x);
    const __mmask8 can_come = m & _mm512_cmp_pd_mask(score, lowest, _CMP_GE_OQ);
    if (!can_come) continue;
    if (has_noise) {
      const __m512i draws = tokens ? _mm512_maskz_loadu_epi64(m, tokens + i) : _mm512_add_epi64(ascending(), _mm512_set1_epi64(i));
      const __m512d u = uniform_noise(key, draws), share = _mm512_cvtps_pd(_mm256_loadu_ps(shares.data() + i));
      const __m512d wanted = _mm512_mul_pd(enough, _mm512_sub_pd(_mm512_set1_pd(1.0), u));
      if (!(can_come & _mm512_cmp_pd_mask(share, wanted, _CMP_GE_OQ))) continue;
      score = _mm512_sub_pd(score, logarithm(exponential_of(u)));
    }
    __mmask8 is_better = can_come;
    if ((int64_t)best.size() == most) is_better &= _mm512_cmp_pd_mask(score, _mm512_set1_pd(threshold), _CMP_GT_OQ);
    if (!is_better) continue;
    alignas(64) double scores[kDoubles];
    _mm512_store_pd(scores, score);
    for (int lane = 0; lane < kDoubles; lane++) {
      if (!(is_better >> lane & 1)) continue;
      const Entry entry(scores[lane], -(i + lane));
      if ((int64_t)best.size() == most) {
        if (entry < best.front()) continue;
        std::pop_heap(best.begin(), best.end(), std::greater<>());
        best.back() = entry;
      } else {
        best.push_back(entry);
      }
      std::push_heap(best.begin(), best.end(), std::greater<>());
      threshold = best.front().first;
      // A share is off by what x - top, a float of up to 87, is rounded by (4e-6) and by the exponential (2e-7).
      if (has_noise && (int64_t)best.size() == most) enough = _mm512_set1_pd(std::exp(threshold - (double)top) * (1.0 - 1e-5));
    }
  }
  std::sort(best.begin(), best.end(), std::greater<>());
  *out.count = (int64_t)best.size();
  for (size_t rank = 0; rank < best.size(); rank++) {
    const int64_t column = -best[rank].second;
    out.tokens[rank] = tokens ? tokens[column] : column, out.scores[rank] = best[rank].first - normal;
    out.odds[rank] = (float)std::exp((double)(logits[column] * inverse_temperature) - normal);
  }
}

}  // namespace latebranch
