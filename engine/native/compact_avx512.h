// Compact layers by AVX-512 VNNI.
#pragma once
#include "compact.h"

namespace latebranch {

// Vectors that a pass over a block takes of its columns: sums and a group's products of them stay in registers.
constexpr int compact_columns(int rows) { return rows <= 3 ? 4 : 2; }

// sums += products of 4 unsigned bytes by the same 4 signed ones.
inline void add_dots(__m512i& sums, __m512i unsigned_bytes, const int8_t* four) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "m"(*(const int8_t(*)[4])four));
}

// R rows by C vectors of 16 outputs of a stretch of groups, from vector `column` on, added to y [R][64].
template <int Bits, int R, int C>
inline void tile_compact(const CompactRows& in, int64_t num_groups, int64_t t, const char* block, int column, Stretch& stretch, float* y) {
  constexpr int kLines = lines_of(Bits), kParts = Bits == 6 ? 2 : 1;  // of a group, that have a scale each
  const InputGroup* rows = in.groups.data() + t * num_groups;
  const __m512i low = _mm512_set1_epi8(0x0F), high_two = _mm512_set1_epi8(0x30);
  constexpr int kSteps = C * (Bits == 4 ? 4 : 8), kFetches = kLines / 4;
  const auto fetch_now = [&](int step) {  // evenly over a record
    if ((step + 1) * kFetches / kSteps > step * kFetches / kSteps) stretch.fetch_some<C * kLanes == kBlock>();
  };
  Floats sum[R][C];
  LATEBRANCH_UNROLL for (int r = 0; r < R; r++)
    LATEBRANCH_UNROLL for (int c = 0; c < C; c++) sum[r][c] = load(y + r * kBlock + (column + c) * kLanes);
  for (int64_t g = stretch.begin; g < stretch.end; g++) {
    const char* record = block + g * kLines * kLine;
    const char* scales = record + (kLines - 4) * kLine + column * (Bits == 8 ? 64 : 32);
    LATEBRANCH_UNROLL for (int part = 0; part < kParts; part++) {
      __m512i dots[R][C];
      LATEBRANCH_UNROLL for (int r = 0; r < R; r++) {
        const InputGroup& x = rows[r * num_groups + g];
        const int32_t from = Bits == 4 ? 0 : Bits == 6 ? -32 * x.sums[part] : -128 * (x.sums[0] + x.sums[1]);
        LATEBRANCH_UNROLL for (int c = 0; c < C; c++) dots[r][c] = _mm512_set1_epi32(from);
      }
      LATEBRANCH_UNROLL for (int c = 0; c < C; c++) {
        if constexpr (Bits == 8) {
          LATEBRANCH_UNROLL for (int quad = 0; quad < 8; quad++) {
            fetch_now(8 * c + quad);
            const __m512i w = _mm512_load_si512(record + (8 * (column + c) + quad) * kLine);
            LATEBRANCH_UNROLL for (int r = 0; r < R; r++) add_dots(dots[r][c], w, rows[r * num_groups + g].inputs + 4 * quad);
          }
        } else {
          __m512i twos;
          if constexpr (Bits == 6) twos = _mm512_load_si512(record + (16 + 2 * (column + c) + part) * kLine);
          LATEBRANCH_UNROLL for (int i = 0; i < 4; i++) {
            fetch_now(4 * (C * part + c) + i);
            const __m512i both = _mm512_load_si512(record + (4 * (column + c) + i) * kLine);
            if constexpr (Bits == 4) {
              const __m512i first = _mm512_and_si512(both, low), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
              LATEBRANCH_UNROLL for (int r = 0; r < R; r++) {
                add_dots(dots[r][c], first, rows[r * num_groups + g].inputs + 4 * i);
                add_dots(dots[r][c], second, rows[r * num_groups + g].inputs + 4 * i + 16);
              }
            } else {
              const __m512i four = part ? _mm512_srli_epi16(both, 4) : both;
              const __m512i two = i == 0 ? _mm512_slli_epi16(twos, 4) : i == 1 ? _mm512_slli_epi16(twos, 2) : i == 2 ? twos : _mm512_srli_epi16(twos, 2);
              constexpr int kEither = 0xEA;  // a b | c
              const __m512i w = _mm512_ternarylogic_epi64(four, low, _mm512_and_si512(two, high_two), kEither);
              LATEBRANCH_UNROLL for (int r = 0; r < R; r++) add_dots(dots[r][c], w, rows[r * num_groups + g].inputs + 4 * i + 16 * part);
            }
          }
        }
      }
      LATEBRANCH_UNROLL for (int c = 0; c < C; c++) {
        const Floats scale = Bits == 8 ? load((const float*)scales + c * kLanes) : load(0xFFFF, (const Half*)(scales + part * 128) + c * kLanes);
        LATEBRANCH_UNROLL for (int r = 0; r < R; r++) {
          const InputGroup& x = rows[r * num_groups + g];
          sum[r][c] = fused(_mm512_cvtepi32_ps(dots[r][c]) * spread(x.scale), scale, sum[r][c]);
        }
        if constexpr (Bits == 4) {
          const Floats offset = load(0xFFFF, (const Half*)(scales + 128) + c * kLanes);
          LATEBRANCH_UNROLL for (int r = 0; r < R; r++) sum[r][c] = fused(spread(rows[r * num_groups + g].total), offset, sum[r][c]);
        }
      }
    }
  }
  LATEBRANCH_UNROLL for (int r = 0; r < R; r++)
    LATEBRANCH_UNROLL for (int c = 0; c < C; c++) store(y + r * kBlock + (column + c) * kLanes, sum[r][c]);
}

}  // namespace latebranch
