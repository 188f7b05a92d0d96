// int8 layers by AVX2: inputs are 16-bit integers, multiplied by vpmaddwd with weights widened to 16 bits.
//
// Sums of 512 inputs, and so those of a stretch, fit in 32 bits (512 x 255 x 127 x 128 < 2^31). Sums of stretches are
// doubles, which hold them exactly.
#pragma once
#include <vector>

#include "numbers.h"

namespace latebranch {

constexpr int kVectorRows = 6;
constexpr bool kMayTile = false;
constexpr int kPartRows = 4 * kVectorRows;  // at most

// Registers of columns in a pass over a block, by its rows. float32 and bfloat16: as many as keep every sum in a
// register. int8: by measurement.
constexpr int float32_columns(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 2; }
constexpr int bfloat16_columns(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
constexpr int int8_columns(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : rows <= 5 ? 2 : 1; }

// Rows of the next pass over a block: even shares of the remaining rows for compact layers, else as many as possible.
inline int next_rows(const Linear& l, int left) {
  return l.is_compact() ? even_share(left, kVectorRows) : std::min(kVectorRows, left);
}

// The number of rows to compute for a part of `rows` rows that reads its weights from memory.
inline int computed_rows(const Linear&, int rows) { return rows; }

// Sums of products of a row and a block.
struct WholeSums {
  alignas(64) double all[kBlock];
};

// Rows rounded to 15 bits, as integers of -127 * 128 to 127 * 128.
struct RoundedRows {
  std::vector<int16_t> values;  // [T, padded]: of four inputs the first and the third, then the second and the fourth
  std::vector<double> sum;      // [T]: 128 times the sum of a row, which unsigned weights add

  void reserve(int64_t rows, int64_t padded) {
    grow(values, rows * padded);
    grow(sum, rows);
  }

  // Row t: x [n] times `steps`, rounded.
  void set(int64_t t, const float* x, int64_t n, int64_t padded, float steps) {
    __m256i total = _mm256_setzero_si256();
    int16_t* row = values.data() + t * padded;
    const __m128i crossed = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    for (int64_t i = 0; i < padded; i += 8) {
      const Mask m = lanes_left(std::max<int64_t>(0, n - i));
      const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(load_register(m, x + i), _mm256_set1_ps(steps)));
      total = _mm256_add_epi32(total, q);
      const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
      _mm_storeu_si128((__m128i*)(row + i), _mm_shuffle_epi8(words, crossed));
    }
    alignas(32) int32_t lanes[8];
    _mm256_store_si256((__m256i*)lanes, total);
    double whole = 0;
    for (const int32_t lane : lanes)
      whole += lane;
    sum[t] = 128 * whole;
  }

  // y [64] = the results of row t's sums, minus the offset of unsigned weights.
  void joined(int64_t t, const WholeSums& sums, float* y) const {
    const __m256d added = _mm256_set1_pd(sum[t]);
    for (int c = 0; c < kBlock; c += 4)
      _mm_storeu_ps(y + c, _mm256_cvtpd_ps(_mm256_sub_pd(_mm256_load_pd(sums.all + c), added)));
  }
};

// R rows of n inputs by C registers of 8 outputs of a stretch, from register `column` on, added to sums [R].
template <int R, int C>
inline void tile_int8(const RoundedRows& in, int64_t n, int64_t t, const char* block, int column, Stretch& stretch,
                      WholeSums* sums) {
  static_assert(4 * kStretch <= 512);  // inputs whose sums fit in 32 bits
  const char* w = block + column * 32;
  const int16_t* x = in.values.data() + t * n;
  __m256i some[R][C];
  LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
      some[r][c] = _mm256_setzero_si256();
  for (int64_t k = 4 * stretch.begin; k < 4 * stretch.end; k += 4) {
    stretch.fetch_some<C * kRegister == kBlock>();
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++) {
      const __m256i four = _mm256_load_si256((const __m256i*)(w + k * kBlock + c * 32));
      const __m256i even = _mm256_and_si256(four, _mm256_set1_epi16(0xFF)), odd = _mm256_srli_epi16(four, 8);
      LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
        int32_t two_even, two_odd;
        std::memcpy(&two_even, x + r * n + k, 4);
        std::memcpy(&two_odd, x + r * n + k + 2, 4);
        some[r][c] = _mm256_add_epi32(some[r][c], _mm256_madd_epi16(even, _mm256_set1_epi32(two_even)));
        some[r][c] = _mm256_add_epi32(some[r][c], _mm256_madd_epi16(odd, _mm256_set1_epi32(two_odd)));
      }
    }
  }
  LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++) {
      const __m256d low = _mm256_cvtepi32_pd(_mm256_castsi256_si128(some[r][c])),
                    high = _mm256_cvtepi32_pd(_mm256_extracti128_si256(some[r][c], 1));
      double* so_far = sums[r].all + (column + c) * 8;
      _mm256_store_pd(so_far, _mm256_add_pd(_mm256_load_pd(so_far), low));
      _mm256_store_pd(so_far + 4, _mm256_add_pd(_mm256_load_pd(so_far + 4), high));
    }
  }
}

inline bool is_tiled(const Linear&, int64_t) { return false; }

}  // namespace latebranch
