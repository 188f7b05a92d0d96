// Linear layers over packed weights, in one of four formats; float32 in and out.
//
// Weights are stored in blocks of 64 outputs, so that a block is one stream through memory. Each output of each row is
// one sum over the inputs in their order, for any number of rows: a row's result does not depend on other rows.
//
//   float32   [block][input][64]           inputs padded to 2, so that it reads the same rows as bfloat16
//   bfloat16  [block][input / 2][64][2]    inputs padded to 2; widened to float32 as they are read
//   int8      [block][input / 4][64][4]    unsigned: a weight + 128, a scale for each output; inputs padded to 64
//   compact   [block][input / 32][record]  4, 6 or 8 bits (compact.h), a scale for each output; inputs padded to 32
//
// In int8 a row is rounded to 15 bits by its own largest magnitude, and multiplied with the weights exactly, in
// integers. int8_avx512.h and int8_avx2.h implement this.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "compact.h"
#include "low_rank.h"
#include "numbers.h"
#include "team.h"

namespace latebranch {

constexpr int64_t kBlock = 64;
constexpr int64_t kPanel = 4 * kRowsTogether;  // rows whose inputs stay in cache while all weights are read
constexpr float kLargest = 127.0f * 128.0f;
constexpr int64_t kLine = 64;    // bytes of a cache line
constexpr int64_t kWidth = 256;  // bytes of a block that all columns read at a time

enum Format : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kCompact4 = 3, kCompact6 = 4, kCompact8 = 5 };

struct Linear {
  const void* weight;
  const float* scale;  // int8, compact: of each output
  const float* bias;   // or null
  int64_t in, out;
  int32_t format;

  bool exists() const { return weight != nullptr; }
  int64_t num_blocks() const { return (out + kBlock - 1) / kBlock; }
  bool is_compact() const { return format >= kCompact4; }
  int64_t multiple() const { return is_compact() ? kGroup : format == kInt8 ? 64 : 2; }
  int64_t padded_in() const { return (in + multiple() - 1) / multiple() * multiple(); }
  const char* block(int64_t b) const { return (const char*)weight + b * block_bytes(); }
  int64_t block_bytes() const {
    if (is_compact())
      return padded_in() / kGroup * unit();
    return padded_in() * kBlock * (format == kInt8 ? 1 : format == kBFloat16 ? 2 : 4);
  }
  // Stretches of a block are multiples of this many bytes.
  int64_t unit() const { return is_compact() ? kLine * lines_of(4 + 2 * (format - kCompact4)) : kWidth; }
};

// Rows and outputs of one block that are computed together. `is_first` and `is_last`: among the parts of a panel that
// read these weights.
struct Part {
  int64_t row;
  int rows, column, columns;
  bool is_first, is_last;
};

// Scales and biases of 16 outputs of one block.
struct Outputs {
  Mask mask;
  Floats scale, bias;

  Outputs(const Linear& l, int64_t first) {
    mask = lanes_left(std::max<int64_t>(0, std::min(kLanes, l.out - first)));
    bias = l.bias ? load(mask, l.bias + first) : spread(0.0f);
    scale = l.scale ? load(mask, l.scale + first) : bias;
  }
  Floats of_int8(Floats sum, float row_scale) const { return sum * scale * spread(row_scale) + bias; }
  Floats of_compact(Floats sum) const { return sum * scale + bias; }
};

constexpr int64_t kAhead = 4096;         // bytes between prefetch and use of weights that one pass reads
constexpr int64_t kCompactAhead = 8192;  // the same of compact layers, which only AVX-512 reads in one pass
constexpr int64_t kStretch = 64;         // most widths of a block that stay in cache while all rows use them

// Whether weights that one pass reads are best prefetched past the outer caches: on AMD's processors. A Cascade Lake
// evicts such lines before they are read, so no other processor does it.
inline bool fetches_past_caches() {
  static const bool is_amd = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
  return is_amd;
}

// A stretch of a block: widths [begin, end), or records of compact layers. While it is in use, the memory that is read
// next is prefetched, a little at every width of every pass. Without such memory `step` is 0 and a cached line is
// prefetched again, which is faster than a branch.
struct Stretch {
  int64_t begin, end;
  const char* next;
  int64_t step;          // bytes
  bool may_pass_caches;  // fetches_past_caches()

  // Fetch a line of the memory that is read next. `kOnce`: lines that are read once, or again very soon.
  template <bool kOnce>
  LATEBRANCH_INLINE void fetch(int64_t line) const {
    if (kOnce && may_pass_caches) {
      _mm_prefetch(next + line * kLine, _MM_HINT_NTA);
    } else {
      _mm_prefetch(next + line * kLine, _MM_HINT_T0);
    }
  }

  // Fetch two lines, or four in a pass over all columns, which may be the only pass: at least a step.
  template <bool kAllColumns>
  void fetch_some() {
    for (int64_t line = 0; line < (kAllColumns ? 4 : 2); line++)
      fetch<kAllColumns>(line);
    next += step;
  }
};

// Rows of the next pass, at most `most`. Passes are as even as possible, because a pass of few rows waits for memory.
inline int even_share(int left, int most) {
  const int passes = (left + most - 1) / most;
  return (left + passes - 1) / passes;
}

}  // namespace latebranch

#ifdef __AVX512F__
#include "compact_avx512.h"
#include "int8_avx512.h"
#else
#include "compact_avx2.h"
#include "int8_avx2.h"
#endif

namespace latebranch {

static_assert(kPartRows == kRowsTogether);

// Rows as linear layers read them.
struct Inputs {
  std::vector<float> values;  // float32 and bfloat16 [T, padded]
  RoundedRows rounded;        // int8
  std::vector<float> scale;   // int8 [T]
  CompactRows compact;
  int64_t rows = 0;

  // Begin with at most `count` rows; call this before `reserve`.
  void begin(int64_t count) { rows = count, compact.begin(count); }

  // Allocate the inputs of `linear`.
  void reserve(const Linear& linear) {
    if (linear.is_compact()) {
      compact.reserve(rows, linear.padded_in());
    } else if (linear.format == kInt8) {
      rounded.reserve(rows, linear.padded_in());
      grow(scale, rows);
    } else {
      grow(values, (rows + 1) * linear.padded_in());  // one more may be computed
    }
  }

  // Set row t of the inputs of `linear`, and of other layers with the same inputs.
  void set(int64_t t, const float* x, const Linear& linear) {
    const int64_t n = linear.in, padded = linear.padded_in();
    if (linear.is_compact())
      return compact.set(t, x, n, padded);
    if (linear.format != kInt8) {
      float* row = values.data() + t * padded;
      std::memcpy(row, x, n * sizeof(float));
      std::fill(row + n, row + padded, 0.0f);
      return;
    }
    Floats largest = spread(0.0f);
    Where broken = nowhere();
    for (int64_t i = 0; i < n; i += kLanes) {
      const Floats v = load(lanes_left(n - i), x + i);
      largest = larger(largest, magnitude(v));
      broken = broken | is_broken(v);
    }
    const float range = most(largest);
    rounded.set(t, x, n, padded, range > 0.0f ? kLargest / range : 0.0f);
    scale[t] = bits(broken) ? std::numeric_limits<float>::quiet_NaN() : range / kLargest;
  }
};

// R rows by C registers of outputs of a stretch, from register `column` on, added to y [R][64].
template <int R, int C>
inline void tile_float32(const Linear& l, const Inputs& in, int64_t t, const char* block, int column, Stretch& stretch,
                         float* y) {
  const int64_t n = l.padded_in();
  const float* w = (const float*)block + column * kRegister;
  const float* x = in.values.data() + t * n;
  Register sum[R][C];
  LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
      sum[r][c] = load_register(y + r * kBlock + (column + c) * kRegister);
  for (int64_t k = stretch.begin; k < stretch.end; k++) {
    Register weights[C];
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
      weights[c] = load_register(w + k * kBlock + c * kRegister);
    stretch.fetch_some<C * kRegister == kBlock>();
    LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
      const Register v = register_of(x[r * n + k]);
      LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
        add_product(sum[r][c], weights[c], v);
    }
  }
  LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
      store_register(y + r * kBlock + (column + c) * kRegister, sum[r][c]);
}

template <int R, int C>
inline void tile_bfloat16(const Linear& l, const Inputs& in, int64_t t, const char* block, int column, Stretch& stretch,
                          float* y) {
  const int64_t n = l.padded_in();
  const char* w = block + column * kRegister * 4;
  const float* x = in.values.data() + t * n;
  Register sum[R][C];
  LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
      sum[r][c] = load_register(y + r * kBlock + (column + c) * kRegister);
  for (int64_t k = 2 * stretch.begin; k < 2 * stretch.end; k += 2) {
    const char* pairs = w + k * kBlock * 2;
    stretch.fetch_some<C * kRegister == kBlock>();
    // One input after the other, each for all columns: this needs fewer registers than both together.
    LATEBRANCH_UNROLLED_FOR (int odd = 0; odd < 2; odd++) {
      Register weights[C];
      LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++) {
        const char* from = pairs + c * kRegister * 4;
        weights[c] = odd ? load_odd(from) : load_even(from);
      }
      LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
        const Register v = register_of(x[r * n + k + odd]);
        LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
          add_product(sum[r][c], weights[c], v);
      }
    }
  }
  LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
    LATEBRANCH_UNROLLED_FOR (int c = 0; c < C; c++)
      store_register(y + r * kBlock + (column + c) * kRegister, sum[r][c]);
}

// The number of passes over a block for `rows` rows.
inline int num_passes(const Linear& l, int rows) {
  constexpr int kColumns = kBlock / kRegister;
  const auto columns = [&](int some) {
    if (l.is_compact())
      return compact_columns(some);
    return l.format == kFloat32    ? float32_columns(some)
           : l.format == kBFloat16 ? bfloat16_columns(some)
                                   : int8_columns(some);
  };
  int passes = 0;
  for (int left = rows; left; left -= next_rows(l, left))
    passes += kColumns / columns(next_rows(l, left));
  return passes;
}

template <int R>
inline void rows_by_stretch(const Linear& l, const Inputs& in, int64_t t, const char* block, Stretch& stretch, float* y,
                            WholeSums* whole) {
  constexpr int kColumns = kBlock / kRegister, kFloats = float32_columns(R), kPairs = bfloat16_columns(R),
                kBytes = int8_columns(R);
  const int64_t num_groups = l.padded_in() / kGroup;
  if (l.format == kFloat32) {
    for (int c = 0; c < kColumns; c += kFloats)
      tile_float32<R, kFloats>(l, in, t, block, c, stretch, y);
  } else if (l.format == kBFloat16) {
    for (int c = 0; c < kColumns; c += kPairs)
      tile_bfloat16<R, kPairs>(l, in, t, block, c, stretch, y);
  } else if (l.format == kInt8) {
    for (int c = 0; c < kColumns; c += kBytes)
      tile_int8<R, kBytes>(in.rounded, l.padded_in(), t, block, c, stretch, whole);
  } else if (l.format == kCompact4) {
    compact_by_stretch<4, R>(in.compact, num_groups, t, block, stretch, y);
  } else if (l.format == kCompact6) {
    compact_by_stretch<6, R>(in.compact, num_groups, t, block, stretch, y);
  } else {
    compact_by_stretch<8, R>(in.compact, num_groups, t, block, stretch, y);
  }
}

// y [computed_rows][64] = sums of a part's rows and one block. All passes over a stretch evenly prefetch the next
// stretch. `next` is the memory that this thread reads after these rows, or null.
inline void rows_by_vectors(const Linear& l, const Inputs& in, const Part& part, const char* block, const char* next,
                            float* y) {
  WholeSums whole[kPartRows];
  const int64_t unit = l.unit(), num_units = l.block_bytes() / unit, most = kStretch * kWidth / unit,
                num_stretches = (num_units + most - 1) / most;
  const bool may_pass_caches = fetches_past_caches();
  const int rows = part.is_first ? computed_rows(l, part.rows) : part.rows, passes = num_passes(l, rows);
  if (l.format == kInt8) {
    std::memset(whole, 0, rows * sizeof(WholeSums));
  } else {
    std::memset(y, 0, rows * kBlock * sizeof(float));
  }
  for (int64_t s = 0; s < num_stretches; s++) {
    Stretch stretch{s * num_units / num_stretches, (s + 1) * num_units / num_stretches, block, 0, may_pass_caches};
    const bool is_end = s + 1 == num_stretches;
    if (part.is_first && passes == 1) {
      stretch.next = block + stretch.begin * unit + (l.is_compact() ? kCompactAhead : kAhead);
      stretch.step = kWidth;
    } else if (is_end ? next != nullptr : part.is_first) {
      stretch.next = is_end ? next : block + stretch.end * unit;
      stretch.step = kWidth / passes;
    }
    for (int r = 0; r < rows; r += next_rows(l, rows - r)) {
      const int64_t t = part.row + r;
      float* some = y + r * kBlock;
      switch (next_rows(l, rows - r)) {
        case 1:
          rows_by_stretch<1>(l, in, t, block, stretch, some, whole + r);
          break;
        case 2:
          rows_by_stretch<2>(l, in, t, block, stretch, some, whole + r);
          break;
        case 3:
          rows_by_stretch<3>(l, in, t, block, stretch, some, whole + r);
          break;
        case 4:
          rows_by_stretch<4>(l, in, t, block, stretch, some, whole + r);
          break;
        case 5:
          rows_by_stretch<5>(l, in, t, block, stretch, some, whole + r);
          break;
        default:
          rows_by_stretch<6>(l, in, t, block, stretch, some, whole + r);
      }
    }
  }
  if (l.format == kInt8)
    for (int r = 0; r < part.rows; r++)
      in.rounded.joined(part.row + r, whole[r], y + r * kBlock);
}

// Call put(row of the part, output of the block, mask, 16 outputs), scales and biases included.
template <typename Put>
inline void part_outputs(const Linear& l, const Inputs& in, const Part& part, int64_t b, const char* next,
                         const Put& put) {
  if constexpr (kMayTile) {
    if (is_tiled(l, part.rows))
      return part_by_tiles(l, in.rounded, in.scale.data(), part, b, put);
  }
  alignas(64) float y[kPartRows * kBlock];
  rows_by_vectors(l, in, part, l.block(b), next, y);
  for (int column = 0; column < kBlock; column += kLanes) {
    const Outputs outputs(l, b * kBlock + column);
    for (int r = 0; r < part.rows; r++) {
      const Floats v = load(y + r * kBlock + column);
      put(r, column, outputs.mask,
          l.is_compact()      ? outputs.of_compact(v)
          : l.format == kInt8 ? outputs.of_int8(v, in.scale[part.row + r])
                              : v + outputs.bias);
    }
  }
}

// Call use(part) for all rows of panel p and one block.
template <typename Use>
inline void each_part(const Linear& l, int64_t num_rows, int64_t panel, const Use& use) {
  const int64_t begin = panel * kPanel, end = std::min(num_rows, begin + kPanel);
  if constexpr (kMayTile) {
    if (is_tiled(l, end - begin))
      return each_tiled_part(begin, end, use);
  }
  for (int64_t t = begin; t < end; t += kPartRows)
    use(Part{t, (int)std::min<int64_t>(kPartRows, end - t), 0, kBlock, t == begin, t + kPartRows >= end});
}

inline int64_t num_panels(int64_t rows) { return (rows + kPanel - 1) / kPanel; }

// y [T, stride] = the outputs of one layer, with their terms; added to y if `is_added`.
inline void linear_task(const Linear& l, const Inputs& in, int64_t rows, int64_t panel, int64_t b, const char* next,
                        float* y, int64_t stride, bool is_added, const Terms& terms = {}) {
  each_part(l, rows, panel, [&](const Part& part) {
    float* block = y + part.row * stride + b * kBlock;
    part_outputs(l, in, part, b, part.is_last ? next : nullptr, [&](int r, int column, Mask m, Floats v) {
      float* to = block + r * stride + column;
      const Floats whole = terms.added(part.row + r, b * kBlock + column, v);
      store(to, m, is_added ? load(m, to) + whole : whole);
    });
  });
}

// One phase of a team: call use(panel, block, next) for all panels and blocks. `next` is the block that this thread
// takes after it, or -1 if it is not known.
template <typename Use>
inline void each_block(Worker& worker, int64_t rows, int64_t blocks, const Use& use) {
  worker.each_with_next(num_panels(rows) * blocks, [&](int64_t task, int64_t next) {
    use(task / blocks, task % blocks, next < 0 ? -1 : next % blocks);
  });
}

// y [T, out], all outputs of a layer: one phase of a team.
inline void all_outputs(Worker& worker, const Linear& l, const Inputs& in, int64_t rows, float* y, bool is_added,
                        const Terms& terms = {}) {
  each_block(worker, rows, l.num_blocks(), [&](int64_t panel, int64_t b, int64_t next) {
    linear_task(l, in, rows, panel, b, next < 0 ? nullptr : l.block(next), y, l.out, is_added, terms);
  });
}

}  // namespace latebranch
