// Compact layers by AVX-512 VNNI.
#pragma once
#include "compact.h"

namespace latebranch {

// Vectors of columns in a pass over a block, by its rows: as many as keep the products of a group and all sums in registers.
constexpr int compact_columns(int rows) { return rows <= 2 ? 4 : 2; }

// The codes of quad `quad` of 16 outputs, column `c`. `twos` are the high bits of the 6-bit codes of its four quads.
template <int Bits>
LATEBRANCH_INLINE __m512i quad_codes(const char* record, int quad, int c, __m512i twos) {
  const __m512i bytes = _mm512_load_si512(record + (4 * (Bits == 8 ? quad : quad % 4) + c) * kLine);
  const __m512i four = Bits < 8 && quad >= 4 ? _mm512_srli_epi16(bytes, 4) : bytes;
  const __m512i low = _mm512_set1_epi8(0x0F);
  if constexpr (Bits == 8) {
    return bytes;
  } else if constexpr (Bits == 4) {
    return _mm512_and_si512(four, low);
  } else {
    const __m512i two[] = {_mm512_slli_epi16(twos, 4), _mm512_slli_epi16(twos, 2), twos, _mm512_srli_epi16(twos, 2)};
    constexpr int kEither = 0xEA;  // a b | c
    return _mm512_ternarylogic_epi64(four, low, _mm512_and_si512(two[quad % 4], _mm512_set1_epi8(0x30)), kEither);
  }
}

// dots [R][C] = integer products of a part of a group, summed. Fetches an even share of the next record at each quad.
template <int Bits, int R, int C>
LATEBRANCH_INLINE void group_dots(const InputGroup* x, const char* record, int part, Stretch& stretch,
                                  __m512i (&dots)[R][C]) {
  constexpr int kAll = 8, kQuads = Bits == 6 ? 4 : 8, kFetches = lines_of(Bits) / 4;  // quads of a group, and of a part
  LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
    const int32_t from = Bits == 4   ? 0
                         : Bits == 6 ? x[r].from_zero[part]
                                     : 4 * (x[r].from_zero[0] + x[r].from_zero[1]);  // 128 is 4 x 32
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
      dots[r][c] = _mm512_set1_epi32(from);
  }
  __m512i twos[C] = {};
  if constexpr (Bits == 6)
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
      twos[c] = _mm512_load_si512(record + (16 + 4 * part + c) * kLine);
  LATEBRANCH_UNROLLED_FOR (int i = 0; i < kQuads; i++) {
    const int step = kQuads * part + i;
    LATEBRANCH_UNROLLED_FOR (int f = step * kFetches / kAll; f < (step + 1) * kFetches / kAll; f++)
      stretch.fetch_some<C * kLanes == kBlock>();
    const int quad = Bits == 4 ? i / 2 + i % 2 * 4 : step;  // with 4 bits, both quads of a line in turn
    __m512i w[C];
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
      w[c] = quad_codes<Bits>(record, quad, c, twos[c]);
    LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
      int32_t inputs;
      std::memcpy(&inputs, x[r].inputs + 4 * quad, 4);
      const __m512i four = _mm512_set1_epi32(inputs);
      LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
        add_dots(dots[r][c], w[c], four);
    }
  }
}

// Add a part's dots, scaled, to the sums.
template <int Bits, int R, int C>
LATEBRANCH_INLINE void add_scaled(const InputGroup* x, const char* scales, int part, const __m512i (&dots)[R][C],
                                  Floats (&sums)[R][C]) {
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
      sums[r][c] = fused(_mm512_cvtepi32_ps(dots[r][c]) * input_scale, scale[c], sums[r][c]);
      if constexpr (Bits == 4)
        sums[r][c] = fused(total, offset[c], sums[r][c]);
    }
  }
}

// R rows by C vectors of columns of a stretch of groups, from vector `column` on, added to y [R][64]. The inputs of a row
// are read once for all columns. Not inlined: within a larger function GCC 12 spills more registers.
template <int Bits, int R, int C>
__attribute__((noinline)) void tile_compact(const CompactRows& in, int64_t num_groups, int64_t t, const char* block,
                                            int column, Stretch& stretch, float* y) {
  constexpr int kLines = lines_of(Bits), kParts = Bits == 6 ? 2 : 1;  // parts of a group have a scale each
  constexpr int kScale = Bits == 8 ? 64 : 32;                         // bytes of 16 scales
  const InputGroup* x = in.groups.data() + in.place(t, stretch.begin, num_groups);
  y += column * kLanes;
  Floats sums[R][C];
  LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
      sums[r][c] = load(y + r * kBlock + c * kLanes);
  for (int64_t g = stretch.begin; g < stretch.end; g++, x += in.stride) {
    const char* record = block + g * kLines * kLine;
    LATEBRANCH_UNROLLED_FOR (int part = 0; part < kParts; part++) {
      __m512i dots[R][C];
      group_dots<Bits>(x, record + column * kLine, part, stretch, dots);
      add_scaled<Bits>(x, record + (kLines - 4) * kLine + column * kScale, part, dots, sums);
    }
  }
  LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
      store(y + r * kBlock + c * kLanes, sums[r][c]);
}

// R rows by all columns of a stretch of groups, added to y [R][64].
template <int Bits, int R>
inline void compact_by_stretch(const CompactRows& in, int64_t num_groups, int64_t t, const char* block,
                               Stretch& stretch, float* y) {
  constexpr int C = compact_columns(R);
  for (int c = 0; c * kLanes < kBlock; c += C)
    tile_compact<Bits, R, C>(in, num_groups, t, block, c, stretch, y);
}

}  // namespace latebranch
