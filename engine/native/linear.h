// Linear layers over packed weights, in one of three formats; float32 in and out.
//
// Weights lie in blocks of 64 outputs, so that a block is one stream through memory. Each output of each row is one sum over the
// inputs in their order, however many rows there are: a row's result does not depend on its neighbours.
//
//   float32   [block][input][64]           inputs padded to 2, so that it reads the rows that bfloat16 does
//   bfloat16  [block][input / 2][64][2]    inputs padded to 2; widened to float32 as they are read
//   int8      [block][input / 4][64][4]    unsigned: a weight + 128, with a scale for each output; inputs padded to 64
//
// In int8 a row is rounded to 15 bits by its own largest magnitude and cut in two bytes, q = 128 hi + lo; both are multiplied with
// the weights in 32-bit integers, exactly: few rows by vpdpbusd, more by the tiles of AMX where a processor has them.
#pragma once
#include <cstring>
#include <vector>

#include "numbers.h"
#include "team.h"
#include "tiles.h"

namespace latebranch {

constexpr int64_t kBlock = 64;
constexpr int kTileTokens = 8;  // of AMX: 16 rows of bytes, two a token
constexpr int64_t kPanel = 96;  // rows whose inputs stay near while all weights pass
constexpr float kLargest = 127.0f * 128.0f;

enum Format : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

struct Linear {
  const void* weight;
  const float* scale;    // int8: of each output
  const float* bias;     // or null
  int64_t in, out;
  int32_t format;

  bool exists() const { return weight != nullptr; }
  int64_t num_blocks() const { return (out + kBlock - 1) / kBlock; }
  int64_t multiple() const { return format == kInt8 ? 64 : 2; }
  int64_t padded_in() const { return (in + multiple() - 1) / multiple() * multiple(); }
  int64_t block_bytes() const { return padded_in() * kBlock * (format == kInt8 ? 1 : format == kBFloat16 ? 2 : 4); }
};

// Rows as linear layers read them.
struct Inputs {
  std::vector<float> values;  // float32 and bfloat16 [T, padded]
  std::vector<int8_t> bytes;  // int8 [T, 2, padded]: hi, then lo
  std::vector<float> scale;   // int8 [T]
  std::vector<int32_t> sum_hi, sum_lo;  // int8 [T]: 128 times the sum of a row, which unsigned weights add

  void reserve(int64_t rows, const Linear& linear) {
    const size_t size = (size_t)(rows * linear.padded_in());
    if (linear.format != kInt8) {
      if (values.size() < size) values.resize(size);
      return;
    }
    const size_t whole = (size_t)(2 * (rows + 2 * kTileTokens) * linear.padded_in());  // tiles read beyond the last row
    if (bytes.size() < whole) bytes.resize(whole);
    if ((int64_t)scale.size() < rows) scale.resize(rows), sum_hi.resize(rows), sum_lo.resize(rows);
  }

  // Take row t of what `linear` (and others with the same inputs) is to read.
  void set(int64_t t, const float* x, const Linear& linear) {
    const int64_t n = linear.in, padded = linear.padded_in();
    if (linear.format != kInt8) {
      float* row = values.data() + t * padded;
      std::memcpy(row, x, n * sizeof(float));
      std::fill(row + n, row + padded, 0.0f);
      return;
    }
    const __m512 sign = _mm512_set1_ps(-0.0f);
    __m512 largest = _mm512_setzero_ps();
    __mmask16 broken = 0;
    for (int64_t i = 0; i < n; i += kLanes) {
      const __m512 v = _mm512_maskz_loadu_ps(lanes_left(n - i), x + i);
      largest = _mm512_max_ps(largest, _mm512_andnot_ps(sign, v));
      broken |= _mm512_fpclass_ps_mask(v, 0x99);  // NaN or infinite
    }
    const float range = _mm512_reduce_max_ps(largest);
    const __m512 steps = _mm512_set1_ps(range > 0.0f ? kLargest / range : 0.0f);
    __m512i high_sum = _mm512_setzero_si512(), low_sum = high_sum;
    int8_t *high = bytes.data() + 2 * t * padded, *low = high + padded;
    for (int64_t i = 0; i < n; i += kLanes) {
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(lanes_left(n - i), x + i), steps));
      const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
      const __m512i l = _mm512_sub_epi32(q, _mm512_slli_epi32(h, 7));
      high_sum = _mm512_add_epi32(high_sum, h), low_sum = _mm512_add_epi32(low_sum, l);
      _mm512_mask_cvtepi32_storeu_epi8(high + i, lanes_left(n - i), h);
      _mm512_mask_cvtepi32_storeu_epi8(low + i, lanes_left(n - i), l);
    }
    std::fill(high + n, high + padded, 0), std::fill(low + n, low + padded, 0);
    scale[t] = broken ? std::numeric_limits<float>::quiet_NaN() : range / kLargest;
    sum_hi[t] = 128 * _mm512_reduce_add_epi32(high_sum), sum_lo[t] = 128 * _mm512_reduce_add_epi32(low_sum);
  }
};

// Sums stay in registers only where every loop over them is unrolled.
#define LATEBRANCH_UNROLL _Pragma("GCC unroll 8")

constexpr int64_t kAhead = 4096;  // bytes a stream of weights is fetched ahead of its use

inline void fetch(const void* address) { _mm_prefetch((const char*)address, _MM_HINT_T0); }

// sums += products of 4 unsigned by 4 signed bytes. Not the intrinsic: GCC 12 copies its sums between registers, and out of them.
inline void add_dots(__m512i& sums, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "v"(signed_bytes));
}

// R rows by C vectors of 16 outputs of one block, from vector `column` on, into y [R][64].
template <int R, int C>
inline void tile_float32(const Linear& l, const Inputs& in, int64_t t, const char* block, int column, float* y) {
  const int64_t n = l.padded_in();
  const float* w = (const float*)block + column * kLanes;
  const float* x = in.values.data() + t * n;
  __m512 sum[R][C];
  LATEBRANCH_UNROLL for (int r = 0; r < R; r++)
    LATEBRANCH_UNROLL for (int c = 0; c < C; c++) sum[r][c] = _mm512_setzero_ps();
  for (int64_t k = 0; k < n; k++) {
    __m512 weights[C];
    LATEBRANCH_UNROLL for (int c = 0; c < C; c++) {
      weights[c] = _mm512_load_ps(w + k * kBlock + c * kLanes);
      fetch((const char*)(w + k * kBlock + c * kLanes) + kAhead);
    }
    LATEBRANCH_UNROLL for (int r = 0; r < R; r++) {
      const __m512 v = _mm512_set1_ps(x[r * n + k]);
      LATEBRANCH_UNROLL for (int c = 0; c < C; c++) sum[r][c] = _mm512_fmadd_ps(weights[c], v, sum[r][c]);
    }
  }
  LATEBRANCH_UNROLL for (int r = 0; r < R; r++)
    LATEBRANCH_UNROLL for (int c = 0; c < C; c++) _mm512_store_ps(y + r * kBlock + (column + c) * kLanes, sum[r][c]);
}

template <int R, int C>
inline void tile_bfloat16(const Linear& l, const Inputs& in, int64_t t, const char* block, int column, float* y) {
  const int64_t n = l.padded_in();
  const char* w = block + column * 64;
  const float* x = in.values.data() + t * n;
  __m512 sum[R][C];
  LATEBRANCH_UNROLL for (int r = 0; r < R; r++)
    LATEBRANCH_UNROLL for (int c = 0; c < C; c++) sum[r][c] = _mm512_setzero_ps();
  for (int64_t k = 0; k < n; k += 2) {
    LATEBRANCH_UNROLL for (int c = 0; c < C; c++) {
      const __m512i pair = _mm512_load_si512(w + k * kBlock * 2 + c * 64);
      fetch(w + k * kBlock * 2 + c * 64 + kAhead);
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32((int)0xFFFF0000)));
      LATEBRANCH_UNROLL for (int r = 0; r < R; r++) {
        sum[r][c] = _mm512_fmadd_ps(even, _mm512_set1_ps(x[r * n + k]), sum[r][c]);
        sum[r][c] = _mm512_fmadd_ps(odd, _mm512_set1_ps(x[r * n + k + 1]), sum[r][c]);
      }
    }
  }
  LATEBRANCH_UNROLL for (int r = 0; r < R; r++)
    LATEBRANCH_UNROLL for (int c = 0; c < C; c++) _mm512_store_ps(y + r * kBlock + (column + c) * kLanes, sum[r][c]);
}

// 128 hi + lo, without what unsigned weights add.
inline __m512 joined(__m512i high, __m512i low, int32_t sum_hi, int32_t sum_lo) {
  const __m512 h = _mm512_cvtepi32_ps(_mm512_sub_epi32(high, _mm512_set1_epi32(sum_hi)));
  const __m512 l = _mm512_cvtepi32_ps(_mm512_sub_epi32(low, _mm512_set1_epi32(sum_lo)));
  return _mm512_fmadd_ps(h, _mm512_set1_ps(128.0f), l);
}

template <int R, int C>
inline void tile_int8(const Linear& l, const Inputs& in, int64_t t, const char* block, int column, float* y) {
  const int64_t n = l.padded_in();
  const char* w = block + column * 64;
  const int8_t *hi = in.bytes.data() + 2 * t * n, *lo = hi + n;
  __m512i high[R][C], low[R][C];
  LATEBRANCH_UNROLL for (int r = 0; r < R; r++)
    LATEBRANCH_UNROLL for (int c = 0; c < C; c++) high[r][c] = low[r][c] = _mm512_setzero_si512();
  for (int64_t k = 0; k < n; k += 4) {
    __m512i weights[C];
    LATEBRANCH_UNROLL for (int c = 0; c < C; c++) {
      weights[c] = _mm512_load_si512(w + k * kBlock + c * 64);
      fetch(w + k * kBlock + c * 64 + kAhead);
    }
    LATEBRANCH_UNROLL for (int r = 0; r < R; r++) {
      int32_t four_high, four_low;
      std::memcpy(&four_high, hi + 2 * r * n + k, 4), std::memcpy(&four_low, lo + 2 * r * n + k, 4);
      const __m512i h = _mm512_set1_epi32(four_high), o = _mm512_set1_epi32(four_low);
      LATEBRANCH_UNROLL for (int c = 0; c < C; c++) {
        add_dots(high[r][c], weights[c], h);
        add_dots(low[r][c], weights[c], o);
      }
    }
  }
  LATEBRANCH_UNROLL for (int r = 0; r < R; r++)
    LATEBRANCH_UNROLL for (int c = 0; c < C; c++)
      _mm512_store_ps(y + r * kBlock + (column + c) * kLanes, joined(high[r][c], low[r][c], in.sum_hi[t + r], in.sum_lo[t + r]));
}

// Two passes over half a block keep six rows' sums in registers; four rows or fewer need one.
template <int R>
inline void rows_by_block(const Linear& l, const Inputs& in, int64_t t, const char* block, float* y) {
  if (l.format == kFloat32) return tile_float32<R, 4>(l, in, t, block, 0, y);
  if constexpr (R <= 4) {
    if (l.format == kBFloat16) return tile_bfloat16<R, 4>(l, in, t, block, 0, y);
  } else if (l.format == kBFloat16) {
    tile_bfloat16<R, 2>(l, in, t, block, 0, y), tile_bfloat16<R, 2>(l, in, t, block, 2, y);
    return;
  }
  if constexpr (R <= 3) {
    tile_int8<R, 4>(l, in, t, block, 0, y);
  } else {
    tile_int8<R, 2>(l, in, t, block, 0, y), tile_int8<R, 2>(l, in, t, block, 2, y);
  }
}

inline void rows_by_vectors(const Linear& l, const Inputs& in, int64_t t, int rows, const char* block, float* y) {
  switch (rows) {
    case 1: return rows_by_block<1>(l, in, t, block, y);
    case 2: return rows_by_block<2>(l, in, t, block, y);
    case 3: return rows_by_block<3>(l, in, t, block, y);
    case 4: return rows_by_block<4>(l, in, t, block, y);
    case 5: return rows_by_block<5>(l, in, t, block, y);
    default: return rows_by_block<6>(l, in, t, block, y);
  }
}

constexpr int kVectorRows = 6;
constexpr int kFewestTiled = 4;  // rows below which vectors are as fast

inline bool is_tiled(const Linear& l, int64_t rows) { return l.format == kInt8 && rows >= kFewestTiled && has_tiles(); }

// What is computed together: some rows, and some outputs of one block. `is_first` of those that read these weights in a panel.
struct Part {
  int64_t row;
  int rows, column, columns;
  bool is_first;
};

// What becomes of sums of an int8 layer, and what is added to all: 16 outputs of one block.
struct Outputs {
  __mmask16 mask;
  __m512 scale, bias;

  Outputs(const Linear& l, int64_t first) {
    mask = lanes_left(std::max<int64_t>(0, std::min(kLanes, l.out - first)));
    bias = l.bias ? _mm512_maskz_loadu_ps(mask, l.bias + first) : _mm512_setzero_ps();
    scale = l.format == kInt8 ? _mm512_maskz_loadu_ps(mask, l.scale + first) : bias;
  }
  __m512 of_int8(__m512 sum, float row_scale) const {
    return _mm512_add_ps(_mm512_mul_ps(_mm512_mul_ps(sum, scale), _mm512_set1_ps(row_scale)), bias);
  }
};

// By tiles of 16 rows of bytes by 64 inputs, and of 64 inputs by 16 outputs: 8 rows by 64 outputs, or 16 by 32, where each tile of
// weights that is loaded is used twice.
template <typename Put>
inline void part_by_tiles(const Linear& l, const Inputs& in, const Part& part, int64_t b, const Put& put) {
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
      for (int64_t i = 0; i < 64 * kBlock; i += 64) fetch(w + i + kAhead);
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
      const __m512i high = _mm512_load_si512(tile[2 * (r % kTileTokens)]), low = _mm512_load_si512(tile[2 * (r % kTileTokens) + 1]);
      const int64_t t = part.row + r;
      put(r, column, outputs.mask, outputs.of_int8(joined(high, low, in.sum_hi[t], in.sum_lo[t]), in.scale[t]));
    }
  }
}

// Call put(row of the part, output of the block, mask, 16 outputs), scales and biases included.
template <typename Put>
inline void part_outputs(const Linear& l, const Inputs& in, const Part& part, int64_t b, const Put& put) {
  if (is_tiled(l, part.rows)) return part_by_tiles(l, in, part, b, put);
  alignas(64) float y[kVectorRows * kBlock];
  rows_by_vectors(l, in, part.row, part.rows, (const char*)l.weight + b * l.block_bytes(), y);
  for (int column = 0; column < kBlock; column += kLanes) {
    const Outputs outputs(l, b * kBlock + column);
    for (int r = 0; r < part.rows; r++) {
      const __m512 v = _mm512_load_ps(y + r * kBlock + column);
      put(r, column, outputs.mask, l.format == kInt8 ? outputs.of_int8(v, in.scale[part.row + r]) : _mm512_add_ps(v, outputs.bias));
    }
  }
}

// Call use(part) for all rows of panel p and one block; rows that would leave a tile nearly empty are by themselves.
template <typename Use>
inline void each_part(const Linear& l, int64_t num_rows, int64_t panel, const Use& use) {
  const int64_t begin = panel * kPanel, end = std::min(num_rows, begin + kPanel);
  if (!is_tiled(l, end - begin)) {
    for (int64_t t = begin; t < end; t += kVectorRows) use(Part{t, (int)std::min<int64_t>(kVectorRows, end - t), 0, kBlock, t == begin});
    return;
  }
  begin_tiles();
  for (int64_t t = begin; t < end;) {
    const int64_t left = end - t;
    const bool is_one_tile = left < kTileTokens + kFewestTiled;
    const int rows = (int)std::min<int64_t>(left, is_one_tile ? kTileTokens : 2 * kTileTokens), columns = is_one_tile ? kBlock : kBlock / 2;
    for (int column = 0; column < kBlock; column += columns) use(Part{t, rows, column, columns, t == begin && !column});
    t += rows;
  }
  _tile_release();
}

inline int64_t num_panels(int64_t rows) { return (rows + kPanel - 1) / kPanel; }

// y [T, stride], the outputs of one layer from `y` on; adds to what is there if `is_added`.
inline void linear_task(const Linear& l, const Inputs& in, int64_t rows, int64_t panel, int64_t b, float* y, int64_t stride, bool is_added) {
  each_part(l, rows, panel, [&](const Part& part) {
    float* block = y + part.row * stride + b * kBlock;
    part_outputs(l, in, part, b, [&](int r, int column, __mmask16 mask, __m512 v) {
      float* to = block + r * stride + column;
      _mm512_mask_storeu_ps(to, mask, is_added ? _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), v) : v);
    });
  });
}

// y [T, out], all outputs of a layer: one phase of a team.
inline void all_outputs(Worker& worker, const Linear& l, const Inputs& in, int64_t rows, float* y, bool is_added) {
  const int64_t blocks = l.num_blocks();
  worker.each(num_panels(rows) * blocks, [&](int64_t task) { linear_task(l, in, rows, task / blocks, task % blocks, y, l.out, is_added); });
}

}  // namespace latebranch
