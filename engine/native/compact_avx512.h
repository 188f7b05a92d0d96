// Compact layers by AVX-512 VNNI.
#pragma once
#include "compact.h"

namespace latebranch {

// Vectors that a pass over a block takes of its columns: all, as sums of groups need not stay in registers.
constexpr int kCompactColumns = 4;

// R rows by all columns of a stretch of groups, added to y [R][64]. Products of a group stay in registers, and four
// inputs of a row are read once for all columns. Sums of groups stay there too if there is room, and rest in y if not.
template <int Bits, int R>
inline void compact_by_stretch(const CompactRows& in, int64_t num_groups, int64_t t, const char* block,
                               Stretch& stretch, float* y) {
  constexpr int C = kCompactColumns;
  static_assert(C * kLanes == kBlock);
  constexpr int kLines = lines_of(Bits), kParts = Bits == 6 ? 2 : 1;      // of a group, that have a scale each
  constexpr int kAll = 8, kQuads = kAll / kParts, kFetches = kLines / 4;  // quads of a group, and of a part
  const InputGroup* x = in.groups.data() + in.place(t, stretch.begin, num_groups);
  const __m512i low = _mm512_set1_epi8(0x0F), high_two = _mm512_set1_epi8(0x30);
  const auto fetch_now = [&](int step) {  // evenly over a record
    LATEBRANCH_UNROLLED_FOR (int i = step * kFetches / kAll; i < (step + 1) * kFetches / kAll; i++)
      stretch.fetch_some<true>();
  };
  constexpr bool kStay = R <= 2;
  Floats sums[R][C];
  LATEBRANCH_UNROLLED_FOR (int r = 0; kStay && r < R; r++)
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
      sums[r][c] = load(y + r * kBlock + c * kLanes);
  for (int64_t g = stretch.begin; g < stretch.end; g++, x += in.stride) {
    const char* record = block + g * kLines * kLine;
    const char* scales = record + (kLines - 4) * kLine;
    LATEBRANCH_UNROLLED_FOR (int part = 0; part < kParts; part++) {
      __m512i dots[R][C];
      LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
        const int32_t from = Bits == 4   ? 0
                             : Bits == 6 ? x[r].from_zero[part]
                                         : 4 * (x[r].from_zero[0] + x[r].from_zero[1]);  // 128 is 4 x 32
        LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
          dots[r][c] = _mm512_set1_epi32(from);
      }
      __m512i twos[C];
      if constexpr (Bits == 6)
        LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
          twos[c] = _mm512_load_si512(record + (16 + 4 * part + c) * kLine);
      LATEBRANCH_UNROLLED_FOR (int i = 0; i < kQuads; i++) {
        fetch_now(kQuads * part + i);
        const int quad =
            Bits == 4 ? i / 2 + i % 2 * 4 : kQuads * part + i;  // of 4 bits both that a line has, one after the other
        __m512i w[C];
        LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++) {
          const __m512i bytes = _mm512_load_si512(record + (4 * (Bits == 8 ? quad : quad % 4) + c) * kLine);
          const __m512i four = Bits < 8 && quad >= 4 ? _mm512_srli_epi16(bytes, 4) : bytes;
          if constexpr (Bits == 8) {
            w[c] = bytes;
          } else if constexpr (Bits == 4) {
            w[c] = _mm512_and_si512(four, low);
          } else {
            const __m512i two[] = {_mm512_slli_epi16(twos[c], 4), _mm512_slli_epi16(twos[c], 2), twos[c],
                                   _mm512_srli_epi16(twos[c], 2)};
            constexpr int kEither = 0xEA;  // a b | c
            w[c] = _mm512_ternarylogic_epi64(four, low, _mm512_and_si512(two[i], high_two), kEither);
          }
        }
        LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
          int32_t inputs;
          std::memcpy(&inputs, x[r].inputs + 4 * quad, 4);
          const __m512i four = _mm512_set1_epi32(inputs);
          LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
            add_dots(dots[r][c], w[c], four);
        }
      }
      Floats scale[C], offset[C];
      LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++) {
        scale[c] = Bits == 8 ? load((const float*)scales + c * kLanes)
                             : load(0xFFFF, (const Half*)(scales + part * 128) + c * kLanes);
        if constexpr (Bits == 4)
          offset[c] = load(0xFFFF, (const Half*)(scales + 128) + c * kLanes);
      }
      LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
        const Floats input_scale = spread(x[r].scale), total = spread(x[r].total);
        LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++) {
          float* to = y + r * kBlock + c * kLanes;
          Floats sum = fused(_mm512_cvtepi32_ps(dots[r][c]) * input_scale, scale[c], kStay ? sums[r][c] : load(to));
          if constexpr (Bits == 4)
            sum = fused(total, offset[c], sum);
          if constexpr (kStay) {
            sums[r][c] = sum;
          } else {
            store(to, sum);
          }
        }
      }
    }
  }
  LATEBRANCH_UNROLLED_FOR (int r = 0; kStay && r < R; r++)
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
      store(y + r * kBlock + c * kLanes, sums[r][c]);
}

}  // namespace latebranch
