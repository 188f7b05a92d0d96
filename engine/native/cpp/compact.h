// Compact layers: weights in groups of 32 inputs, in as few bits as they need, and inputs rounded to 8 bits by the
// largest magnitude of their group.
//
// A group of a block is one record; a quad is four inputs of an output. A line holds a quad of each of 16 outputs. The
// four lines of a quad are adjacent, and quads are in order. A record:
//
//   4 bits  16 lines   quads 0 to 3 in the low halves of bytes, quads 4 to 7 in the high halves
//           2 + 2      scales and offsets of 64 outputs, float16: a weight is scale x code + offset
//   6 bits  16 lines   the four low bits, as with 4 bits
//           4 + 4      the two high bits: a byte has the bits of quads 0 to 3, lowest first; the next four lines 4 to 7
//           2 + 2      scales of the first 16 inputs, and of the others: a weight is scale x (code - 32)
//   8 bits  32 lines   quads 0 to 7
//           4          scales, float32: a weight is scale x (code - 128)
//
// Products of a group are added in integers, groups in float32 in their order:
// y = sum over groups of (input scale x weight scale x integer + offset x sum of inputs).
#pragma once
#include <algorithm>
#include <vector>

#include "numbers.h"

namespace latebranch {

constexpr int64_t kGroup = 32;         // inputs
constexpr int64_t kRowsTogether = 24;  // rows stored together: no part of a pass has more
constexpr float kLeastInput = 1e-30f;  // smaller ranges count as 0, so that 127 / range is finite
constexpr int lines_of(int bits) { return bits == 4 ? 20 : bits == 6 ? 28 : 36; }  // of a record

// A row's part of a group: one cache line, because threads write adjacent rows.
struct alignas(64) InputGroup {
  int8_t inputs[kGroup];
  float scale, total;    // factor of the integers; sum of the rounded inputs
  int32_t from_zero[2];  // of each half: the sum if all codes were 0, which means -32
};

// Rows as compact layers read them: rows that are computed together are adjacent, group by group.
//
//   rows 0 to 23    group 0: row 0, row 1, ... row 23; group 1: row 0, ...
//   rows 24 to 47   group 0: row 24, ...
struct CompactRows {
  std::vector<InputGroup> groups;  // [T / 24 rounded up, padded / 32, stride]
  int64_t stride = 1;              // rows stored together: 24, or all if there are fewer

  void begin(int64_t rows) { stride = std::min(rows, kRowsTogether); }
  void reserve(int64_t rows, int64_t padded) {
    grow(groups, (rows + kRowsTogether - 1) / kRowsTogether * stride * (padded / kGroup));
  }

  // The index of row t's group g. The same group of the next row follows it; the row's next group is a stride further.
  int64_t place(int64_t t, int64_t g, int64_t num_groups) const {
    return (t / kRowsTogether * num_groups + g) * stride + t % kRowsTogether;
  }

  // Row t: x [n], rounded.
  void set(int64_t t, const float* x, int64_t n, int64_t padded) {
    InputGroup* group = groups.data() + place(t, 0, padded / kGroup);
    for (int64_t i = 0; i < padded; i += kGroup, group += stride) {
      const Floats first = load(lanes_left(std::max<int64_t>(0, n - i)), x + i);
      const Floats second = load(lanes_left(std::max<int64_t>(0, n - i - kLanes)), x + i + kLanes);
      const float range = most(larger(magnitude(first), magnitude(second)));
      const bool is_whole = !bits(is_broken(first) | is_broken(second)), is_empty = !(range > kLeastInput);
      const Floats steps = spread(is_whole && !is_empty ? 127.0f / range : 0.0f);
      const int32_t halves[2] = {store_rounded(group->inputs, is_whole ? first * steps : spread(0.0f)),
                                 store_rounded(group->inputs + kLanes, is_whole ? second * steps : spread(0.0f))};
      group->from_zero[0] = -32 * halves[0];
      group->from_zero[1] = -32 * halves[1];
      group->scale = !is_whole ? std::numeric_limits<float>::quiet_NaN() : is_empty ? 0.0f : range / 127.0f;
      group->total = group->scale * (float)(halves[0] + halves[1]);
    }
  }
};

}  // namespace latebranch
