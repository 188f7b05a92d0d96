// The low-rank terms of LoRA adapters: outputs y of a row under an adapter become y + b (a x), in float32.
//
// Each sum runs over its own row's numbers in one order, so a row has the same bits in any batch. Outputs of rows
// without an adapter are not touched.
//
//   a  [rank][in]            inputs padded to 16
//   b  [out / 16][rank][16]  the adapter's scale included; outputs padded to 16
//
// Ranks are padded to 4.
#pragma once
#include <algorithm>
#include <vector>

#include "numbers.h"

namespace latebranch {

constexpr int64_t kRanks = 4;  // sums that run together

// The term of one linear layer. Rank 0: the adapter does not change the layer.
struct LowRank {
  const float *a, *b;
  int64_t rank;

  // inner [kRanks] = the product of x and the rows of a from `first` on
  void project(const float* x, int64_t in, int64_t first, float* inner) const {
    const int64_t stride = (in + kLanes - 1) / kLanes * kLanes;
    const float* rows = a + first * stride;
    Floats sums[kRanks] = {spread(0.0f), spread(0.0f), spread(0.0f), spread(0.0f)};
    for (int64_t i = 0; i < in; i += kLanes) {
      const Floats v = load(lanes_left(in - i), x + i);
      LATEBRANCH_UNROLLED_FOR (int64_t r = 0; r < kRanks; r++)
        sums[r] = fused(load(rows + r * stride + i), v, sums[r]);
    }
    LATEBRANCH_UNROLLED_FOR (int64_t r = 0; r < kRanks; r++)
      inner[r] = sum(sums[r]);
  }

  // v, which are 16 outputs from `first` on, plus the term
  Floats added(const float* inner, int64_t first, Floats v) const {
    const float* columns = b + first * rank;
    Floats sums[kRanks] = {spread(0.0f), spread(0.0f), spread(0.0f), spread(0.0f)};
    for (int64_t r = 0; r < rank; r += kRanks)
      LATEBRANCH_UNROLLED_FOR (int64_t i = 0; i < kRanks; i++)
        sums[i] = fused(load(columns + (r + i) * kLanes), spread(inner[r + i]), sums[i]);
    return v + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
};

// An adapter's terms of a decoder layer.
struct AdaptedLayer {
  LowRank query, key, value, output, gate, up, down;
};

using AdaptedPart = LowRank AdaptedLayer::*;

// The adapters of some rows.
struct AdaptedRows {
  std::vector<const AdaptedLayer*> layers;  // of each row's adapter, or null; empty if no row has one
  std::vector<int64_t> rows;                // that have one

  void add(const AdaptedLayer* of) {
    if (of)
      rows.push_back(layers.size());
    layers.push_back(of);
  }
  const AdaptedLayer* of(int64_t t) const { return rows.empty() ? nullptr : layers[t]; }
};

// What is added to the outputs of a linear layer, by row. Row t's products with a are at inner + t x stride.
struct Terms {
  const AdaptedRows* rows = nullptr;  // null: nothing is added
  int64_t layer = 0;
  AdaptedPart part = nullptr;
  const float* inner = nullptr;
  int64_t stride = 0;

  // Row t's 16 outputs from `first` on, v without the term
  Floats added(int64_t t, int64_t first, Floats v) const {
    const AdaptedLayer* layers = rows ? rows->of(t) : nullptr;
    if (!layers || !(layers[layer].*part).rank)
      return v;
    return (layers[layer].*part).added(inner + t * stride, first, v);
  }
};

}  // namespace latebranch
