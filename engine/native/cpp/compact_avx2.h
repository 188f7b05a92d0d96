// Compact layers by AVX2: pairs of products by vpmaddubsw, in 16 bits. Inputs are at least -127. So two pairs of 6-bit
// codes, and eight pairs of 4-bit codes, fit in 16 bits when added. 8-bit codes are signed: vpmaddubsw gets their
// magnitudes, and the inputs get their signs.
#pragma once
#include "compact.h"

namespace latebranch {

// Registers of columns in a pass over a block: one, so that sums of groups stay in registers. So even one row makes
// eight passes over a stretch, while the next stretch is read from memory.
constexpr int compact_columns(int) { return 1; }

inline __m256i four_of(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return _mm256_set1_epi32(four);
}

// Sums of fours of 16-bit pairs.
inline __m256i in_fours(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

// Not the intrinsics: with them GCC 12 reorders the additions and keeps all terms in registers.
inline void add_pairs(__m256i& sums, __m256i terms) { asm("vpaddw %1, %0, %0" : "+x"(sums) : "x"(terms)); }
inline void add_fours(__m256i& sums, __m256i terms) { asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(terms)); }

// The bytes of 8 outputs, in register `column`, of line `line` of a record.
inline __m256i half_line(const char* record, int line, int column) {
  return _mm256_load_si256((const __m256i*)(record + line * kLine + column % 2 * 32));
}

// dots [R] += products of a group's 4-bit codes and the inputs, by the 8 outputs of register `column`.
template <int R>
LATEBRANCH_INLINE void add_dots_4(const InputGroup* x, const char* record, int column, __m256i (&dots)[R]) {
  const __m256i low = _mm256_set1_epi8(0x0F);
  LATEBRANCH_UNROLLED_FOR (int i = 0; i < 4; i++) {  // eight pairs of at most 2 x 15 x 127 are below 2^15
    const __m256i both = half_line(record, 4 * i + column / 2, column);
    const __m256i first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
      add_pairs(dots[r], _mm256_maddubs_epi16(first, four_of(x[r].inputs + 4 * i)));
      add_pairs(dots[r], _mm256_maddubs_epi16(second, four_of(x[r].inputs + 4 * i + 16)));
    }
  }
  LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
    dots[r] = in_fours(dots[r]);
}

// The same of one of the two parts of a group of 6-bit codes.
template <int R>
LATEBRANCH_INLINE void add_dots_6(const InputGroup* x, const char* record, int part, int column, __m256i (&dots)[R]) {
  const __m256i low = _mm256_set1_epi8(0x0F), high_two = _mm256_set1_epi8(0x30);
  const __m256i twos = half_line(record, 16 + 4 * part + column / 2, column);
  const __m256i two[] = {_mm256_slli_epi16(twos, 4), _mm256_slli_epi16(twos, 2), twos, _mm256_srli_epi16(twos, 2)};
  LATEBRANCH_UNROLLED_FOR (int i = 0; i < 4; i += 2) {  // two pairs of at most 2 x 63 x 127 are below 2^15
    __m256i w[2];
    LATEBRANCH_UNROLLED_FOR (int j = 0; j < 2; j++) {
      const __m256i both = half_line(record, 4 * (i + j) + column / 2, column);
      const __m256i four = part ? _mm256_srli_epi16(both, 4) : both;
      w[j] = _mm256_or_si256(_mm256_and_si256(four, low), _mm256_and_si256(two[i + j], high_two));
    }
    LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
      const int8_t* inputs = x[r].inputs + 16 * part + 4 * i;
      __m256i pairs = _mm256_maddubs_epi16(w[0], four_of(inputs));
      add_pairs(pairs, _mm256_maddubs_epi16(w[1], four_of(inputs + 4)));
      add_fours(dots[r], in_fours(pairs));
    }
  }
}

// The same of a group of 8-bit codes.
template <int R>
LATEBRANCH_INLINE void add_dots_8(const InputGroup* x, const char* record, int column, __m256i (&dots)[R]) {
  LATEBRANCH_UNROLLED_FOR (int quad = 0; quad < 8; quad++) {
    const __m256i codes = half_line(record, 4 * quad + column / 2, column);
    const __m256i w = _mm256_xor_si256(codes, _mm256_set1_epi8((char)0x80)), size = _mm256_abs_epi8(w);
    LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
      const __m256i inputs = _mm256_sign_epi8(four_of(x[r].inputs + 4 * quad), w);
      add_fours(dots[r], in_fours(_mm256_maddubs_epi16(size, inputs)));
    }
  }
}

// R rows by the 8 outputs of a register of a stretch of groups, added to y [R][64].
template <int Bits, int R>
inline void tile_compact(const CompactRows& in, int64_t num_groups, int64_t t, const char* block, int column,
                         Stretch& stretch, float* y) {
  constexpr int kParts = Bits == 6 ? 2 : 1, kLines = lines_of(Bits), kColumns = kBlock / kRegister;
  constexpr int kShare = (kLines + kColumns - 1) / kColumns;  // lines of a record that each column fetches
  static_assert(compact_columns(R) == 1);
  const InputGroup* x = in.groups.data() + in.place(t, stretch.begin, num_groups);
  Register sums[R];
  LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
    sums[r] = load_register(y + r * kBlock + column * kRegister);
  for (int64_t g = stretch.begin; g < stretch.end; g++, x += in.stride) {
    const char *record = block + g * kLines * kLine, *scales = record + (kLines - 4) * kLine;
    LATEBRANCH_UNROLLED_FOR (int line = 0; line < kShare; line++)
      stretch.fetch<R == 1>(line);
    stretch.next += kLines / 4 * stretch.step;
    LATEBRANCH_UNROLLED_FOR (int part = 0; part < kParts; part++) {
      __m256i dots[R];
      LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
        dots[r] = _mm256_set1_epi32(Bits == 6 ? x[r].from_zero[part] : 0);
      if constexpr (Bits == 4) {
        add_dots_4(x, record, column, dots);
      } else if constexpr (Bits == 6) {
        add_dots_6(x, record, part, column, dots);
      } else {
        add_dots_8(x, record, column, dots);
      }
      const Half* halves = (const Half*)scales + part * kBlock + column * kRegister;
      const Register scale =
          Bits == 8 ? load_register((const float*)scales + column * kRegister) : load_register(0xFF, halves);
      LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
        sums[r] = fused(_mm256_cvtepi32_ps(dots[r]) * register_of(x[r].scale), scale, sums[r]);
        if constexpr (Bits == 4)
          sums[r] = fused(register_of(x[r].total), load_register(0xFF, halves + kBlock), sums[r]);
      }
    }
  }
  LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
    store_register(y + r * kBlock + column * kRegister, sums[r]);
}

// R rows by all columns of a stretch of groups, added to y [R][64].
template <int Bits, int R>
inline void compact_by_stretch(const CompactRows& in, int64_t num_groups, int64_t t, const char* block,
                               Stretch& stretch, float* y) {
  for (int c = 0; c < kBlock / kRegister; c++)
    tile_compact<Bits, R>(in, num_groups, t, block, c, stretch, y);
}

}  // namespace latebranch
