// Top-k, top-p and min-p, as engine/sampling/distributions.py defines them: tokens of equal probability are kept or
// dropped together.
#pragma once
#include <algorithm>
#include <functional>
#include <vector>

#include "distributions.h"

namespace latebranch {

// With 0, 1 and 0 nothing is truncated.
struct Truncation {
  double top_k, top_p, min_p;

  bool is_none() const { return top_k == 0 && top_p >= 1 && min_p == 0; }
};

// best = the shares above a floor, largest first
inline void shares_above(const float* shares, int64_t count, float floor, std::vector<float>& best) {
  best.clear();
  for (int64_t i = 0; i < count; i += kLanes) {
    const Mask m = lanes_left(count - i);
    for (uint32_t above = bits(is_more(load(m, shares + i), spread(floor))); above; above &= above - 1)
      best.push_back(shares[i + __builtin_ctz(above)]);
  }
  std::sort(best.begin(), best.end(), std::greater<>());
}

// The least share that is kept. `shares` [count] are probabilities relative to the likeliest token's, `all` their sum.
//
// The edge is searched among the likeliest tokens, since sorting all of them takes longer than a pass of a small model. It
// is final if lower shares cannot move it.
inline float least_kept(const float* shares, int64_t count, double all, const Truncation& by) {
  const bool has_top_k = by.top_k > 0 && by.top_k < count;
  if (!has_top_k && by.top_p >= 1)
    return (float)by.min_p;
  thread_local std::vector<float> best;
  for (const float floor : {0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-25f, 0x1p-32f, 0x1p-50f, 0.0f}) {
    shares_above(shares, count, floor, best);
    if (best.empty())  // the shares are not finite
      continue;
    size_t allowed = best.size();
    double mass = all;
    if (has_top_k) {
      if (allowed >= by.top_k)  // tokens of the last one's share too
        allowed =
            std::upper_bound(best.begin(), best.end(), best[(size_t)by.top_k - 1], std::greater<>()) - best.begin();
      else if (floor)
        continue;
      mass = 0.0;
      for (size_t i = 0; i < allowed; i++)
        mass += best[i];
    }
    size_t kept = allowed;
    if (by.top_p < 1) {
      double before = 0.0;
      for (kept = 0; kept < allowed && before < by.top_p * mass; kept++)
        before += best[kept];
      if (floor && !has_top_k && before < by.top_p * mass)
        continue;
    }
    return std::max((float)by.min_p, best[std::max<size_t>(kept, 1) - 1]);
  }
  return 0.0f;  // not reached: the last floor decides
}

// The logits, those of dropped tokens replaced by -infinity in `buffer`; unchanged if they make no distribution. `top` is
// the largest, which is kept.
inline const float* truncated(const float* logits, int64_t count, float inverse_temperature, const Truncation& by,
                              float top, std::vector<float>& buffer) {
  if (by.is_none() || !std::isfinite(top))
    return logits;
  grow(buffer, count + kLanes);
  const Floats inverse = spread(inverse_temperature), largest = spread(top * inverse_temperature);
  Floats all = spread(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Mask m = lanes_left(count - i);
    const Floats e = exponential(inverse * load(m, logits + i) - largest);
    store(buffer.data() + i, m, e);
    all = all + only(m, e);
  }
  const Floats least = spread(least_kept(buffer.data(), count, sum(all), by));
  const Floats none = spread(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < count; i += kLanes) {
    const Mask m = lanes_left(count - i);
    const Where is_dropped = is_more(least, load(m, buffer.data() + i));
    store(buffer.data() + i, m, blend(is_dropped, load(m, logits + i), none));
  }
  return buffer.data();
}

inline const float* truncated(const float* logits, int64_t count, float inverse_temperature, const Truncation& by,
                              std::vector<float>& buffer) {
  if (by.is_none())
    return logits;
  float top;
  int64_t token;
  likeliest(logits, count, &top, &token);
  return truncated(logits, count, inverse_temperature, by, top, buffer);
}

}  // namespace latebranch
