// int8 layers by AVX-512 VNNI. An input is split into two bytes, q = 128 hi + lo, and both are multiplied with the
// weights exactly, in 32-bit integers: few rows by vpdpbusd, more rows by the tiles of AMX if the processor has them.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "numbers.h"

namespace latebranch {

constexpr int kVectorRows = 6;
constexpr int kTileTokens = 8;   // of AMX: 16 rows of bytes, two a token
constexpr int kFewestTiled = 4;  // rows below which vectors are as fast
constexpr bool kMayTile = true;
constexpr int kPartRows = 4 * kVectorRows;  // at most
static_assert(kPartRows >= 2 * kTileTokens);

// Request the tiles' state from Linux, once.
inline bool has_tiles() {
  static const bool has = [] {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    uint32_t a, b, c, d;
    asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    const bool is_there = (d >> 24 & 1) && (d >> 25 & 1);  // AMX-TILE, AMX-INT8
    return is_there && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
}

// Eight tiles of 16 rows of 64 bytes. A thread configures and releases them around each use, because other libraries in
// the process configure other shapes.
inline void begin_tiles() {
  alignas(64) static const struct Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shape;
  _tile_loadconfig(&shape);
}

// Vectors of columns in a pass over a block, by its rows: as many as keep every sum in a register.
constexpr int float32_columns(int) { return 4; }
constexpr int bfloat16_columns(int) { return 4; }
constexpr int int8_columns(int rows) { return rows <= 3 ? 4 : 2; }

// Rows of the next pass over a block: even shares of the rows that are left. With five a compact layer's products of a
// group stay in registers.
inline int next_rows(const Linear& l, int left) { return even_share(left, kVectorRows); }

// The number of rows to compute for a part of `rows` rows that reads its weights from memory. Seven rows of bfloat16
// may take longer than eight, so one unused row is added.
inline int computed_rows(const Linear& l, int rows) { return l.format == kBFloat16 && rows == 7 ? 8 : rows; }

// Sums of products of a row and a block, of its two bytes.
struct WholeSums {
  alignas(64) int32_t high[kBlock], low[kBlock];
};

// Rows rounded to 15 bits, as integers of -127 * 128 to 127 * 128.
struct RoundedRows {
  std::vector<int8_t> bytes;            // [T, 2, padded]: hi, then lo
  std::vector<int32_t> sum_hi, sum_lo;  // [T]: 128 times the sum of a row, which unsigned weights add

  void reserve(int64_t rows, int64_t padded) {
    grow(bytes, 2 * (rows + 2 * kTileTokens) * padded);  // tiles read beyond the last row
    grow(sum_hi, rows);
    grow(sum_lo, rows);
  }

  // Row t: x [n] times `steps`, rounded.
  void set(int64_t t, const float* x, int64_t n, int64_t padded, float steps) {
    __m512i high_sum = _mm512_setzero_si512(), low_sum = high_sum;
    int8_t *high = bytes.data() + 2 * t * padded, *low = high + padded;
    for (int64_t i = 0; i < n; i += kLanes) {
      const __m512i q = _mm512_cvtps_epi32(load(lanes_left(n - i), x + i) * spread(steps));
      const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
      const __m512i l = _mm512_sub_epi32(q, _mm512_slli_epi32(h, 7));
      high_sum = _mm512_add_epi32(high_sum, h);
      low_sum = _mm512_add_epi32(low_sum, l);
      _mm512_mask_cvtepi32_storeu_epi8(high + i, lanes_left(n - i), h);
      _mm512_mask_cvtepi32_storeu_epi8(low + i, lanes_left(n - i), l);
    }
    std::fill(high + n, high + padded, 0);
    std::fill(low + n, low + padded, 0);
    sum_hi[t] = 128 * _mm512_reduce_add_epi32(high_sum);
    sum_lo[t] = 128 * _mm512_reduce_add_epi32(low_sum);
  }

  // y [64] = the results of row t's sums.
  void joined(int64_t t, const WholeSums& sums, float* y) const {
    for (int c = 0; c < kBlock; c += kLanes)
      store(y + c, joined(t, _mm512_load_si512(sums.high + c), _mm512_load_si512(sums.low + c)));
  }

  // 128 hi + lo of row t's sums, minus the offset of unsigned weights.
  Floats joined(int64_t t, __m512i high, __m512i low) const {
    const __m512 h = _mm512_cvtepi32_ps(_mm512_sub_epi32(high, _mm512_set1_epi32(sum_hi[t])));
    const __m512 l = _mm512_cvtepi32_ps(_mm512_sub_epi32(low, _mm512_set1_epi32(sum_lo[t])));
    return fused(h, spread(128.0f), l);
  }
};

// R rows of n inputs by C vectors of 16 outputs of a stretch, from vector `column` on, added to sums [R].
template <int R, int C>
inline void tile_int8(const RoundedRows& in, int64_t n, int64_t t, const char* block, int column, Stretch& stretch,
                      WholeSums* sums) {
  const char* w = block + column * 64;
  const int8_t *hi = in.bytes.data() + 2 * t * n, *lo = hi + n;
  __m512i high[R][C], low[R][C];
  LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++) {
      high[r][c] = _mm512_load_si512(sums[r].high + (column + c) * kLanes);
      low[r][c] = _mm512_load_si512(sums[r].low + (column + c) * kLanes);
    }
  for (int64_t k = 4 * stretch.begin; k < 4 * stretch.end; k += 4) {
    __m512i weights[C];
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
      weights[c] = _mm512_load_si512(w + k * kBlock + c * 64);
    stretch.fetch_some<C * kLanes == kBlock>();
    LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
      int32_t four_high, four_low;
      std::memcpy(&four_high, hi + 2 * r * n + k, 4);
      std::memcpy(&four_low, lo + 2 * r * n + k, 4);
      const __m512i h = _mm512_set1_epi32(four_high), o = _mm512_set1_epi32(four_low);
      LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++) {
        add_dots(high[r][c], weights[c], h);
        add_dots(low[r][c], weights[c], o);
      }
    }
  }
  LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++) {
      _mm512_store_si512(sums[r].high + (column + c) * kLanes, high[r][c]);
      _mm512_store_si512(sums[r].low + (column + c) * kLanes, low[r][c]);
    }
}

// By tiles, for layers in int8

inline bool is_tiled(const Linear& l, int64_t rows) { return l.format == kInt8 && rows >= kFewestTiled && has_tiles(); }

// Tiles of 16 rows of bytes by 64 inputs, and of 64 inputs by 16 outputs: for 8 rows by 64 outputs, or for 16 rows by
// 32 outputs, where each loaded tile of weights is used twice.
template <typename Put>
inline void part_by_tiles(const Linear& l, const RoundedRows& in, const float* scales, const Part& part, int64_t b,
                          const Put& put) {
  const int64_t n = l.padded_in();
  const int8_t* x = in.bytes.data() + 2 * part.row * n;
  const char* block = (const char*)l.weight + b * l.block_bytes();
  const bool is_wide = part.columns == kBlock;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < n; k += 64) {
    const char* w = block + k * kBlock + part.column * 4;
    _tile_loadd(4, x + k, n);
    _tile_loadd(5, w, 256);
    _tile_dpbsud(0, 4, 5);
    _tile_loadd(6, w + 64, 256);
    _tile_dpbsud(1, 4, 6);
    if (is_wide) {
      _tile_loadd(5, w + 128, 256);
      _tile_dpbsud(2, 4, 5);
      _tile_loadd(6, w + 192, 256);
      _tile_dpbsud(3, 4, 6);
    } else {
      _tile_loadd(7, x + 2 * kTileTokens * n + k, n);
      _tile_dpbsud(2, 7, 5);
      _tile_dpbsud(3, 7, 6);
    }
    if (part.is_first)
      for (int64_t i = 0; i < 64 * kBlock; i += kLine)
        _mm_prefetch(w + i + kAhead, _MM_HINT_T0);
  }
  alignas(64) int32_t sums[4][2 * kTileTokens][kLanes];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  for (int c = 0; c < part.columns / kLanes; c++) {
    const int column = part.column + c * (int)kLanes;
    const Outputs outputs(l, b * kBlock + column);
    for (int r = 0; r < part.rows; r++) {
      const auto& tile = sums[is_wide ? c : c + 2 * (r / kTileTokens)];
      const __m512i high = _mm512_load_si512(tile[2 * (r % kTileTokens)]),
                    low = _mm512_load_si512(tile[2 * (r % kTileTokens) + 1]);
      const int64_t t = part.row + r;
      put(r, column, outputs.mask, outputs.of_int8(in.joined(t, high, low), scales[t]));
    }
  }
}

// Call use(part) for rows [begin, end). Two tiles of rows are used together unless the second would be nearly empty.
template <typename Use>
inline void each_tiled_part(int64_t begin, int64_t end, const Use& use) {
  begin_tiles();
  for (int64_t t = begin; t < end;) {
    const int64_t left = end - t;
    const bool is_one_tile = left < kTileTokens + kFewestTiled;
    const int rows = (int)std::min<int64_t>(left, is_one_tile ? kTileTokens : 2 * kTileTokens),
              columns = is_one_tile ? kBlock : kBlock / 2;
    for (int column = 0; column < kBlock; column += columns)
      use(Part{t, rows, column, columns, t == begin && !column, t + rows >= end});
    t += rows;
  }
  _tile_release();
}

}  // namespace latebranch
