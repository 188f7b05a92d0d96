// Mixtures of a model's distribution and cached text's, as engine/draft/text/mixture.py defines them.
#pragma once
#include <algorithm>

#include "numbers.h"

namespace latebranch {

// Tokens that cached text predicts: their columns and probabilities, and the trust in the prediction.
struct Cached {
  const int64_t* columns;
  const float* odds;
  int64_t count;
  float chance;
};

// logits [num_columns] = the mixture of `cached` and of a model's logits `model` [num_known], up to an additive
// constant. Without a model (null) it is the cached distribution. `is_rather_cached` has for each cached token whether
// most of its probability comes from the cache.
//
// A mixture q = w q_cached + (1 - w) q_model does not change the odds among all other tokens: only the logits of the
// cached tokens change.
inline void mixed(const float* model, int64_t num_known, int64_t num_columns, const Cached& cached, float* logits,
                  uint8_t* is_rather_cached) {
  constexpr double kMostTrust = 0.99;
  const int64_t known = model ? num_known : 0;
  std::copy(model, model + known, logits);
  std::fill(logits + known, logits + num_columns, -std::numeric_limits<float>::infinity());
  if (!model) {
    for (int64_t i = 0; i < cached.count; i++) {
      logits[cached.columns[i]] = std::log(cached.odds[i]);
      is_rather_cached[i] = 1;
    }
    return;
  }
  if (!cached.count)
    return;
  const Floats none = spread(-std::numeric_limits<float>::infinity());
  Floats largest = none;
  for (int64_t i = 0; i < known; i += kLanes)
    largest = larger(largest, load(none, lanes_left(known - i), model + i));
  const float top = most(largest);
  Floats all = spread(0.0f), squares = all;
  for (int64_t i = 0; i < known; i += kLanes) {
    const Mask m = lanes_left(known - i);
    const Floats e = only(m, exponential(load(m, model + i) - spread(top)));
    all = all + e;
    squares = fused(e, e, squares);
  }
  const double total = sum(all), trust = std::min(kMostTrust, sum(squares) / (total * total));
  const double cached_odds = cached.chance / (1.0 - cached.chance), model_odds = trust / (1.0 - trust);
  const double normal = top + std::log(total), to_cached = std::log(cached_odds / model_odds);  // log of w / (1 - w)
  for (int64_t i = 0; i < cached.count; i++) {
    const double own = logits[cached.columns[i]], other = normal + to_cached + std::log((double)cached.odds[i]);
    const double high = std::max(own, other), low = std::min(own, other);
    logits[cached.columns[i]] = (float)(high + std::log1p(std::exp(low - high)));
    is_rather_cached[i] = other > own;
  }
}

}  // namespace latebranch
