// The best tokens of a draft law, by log q or by log q and the noise of their position.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "noise.h"
#include "numbers.h"

namespace latebranch {

struct Ranked {
  int64_t* tokens;   // [most], best first
  double* scores;    // [most]: s log q + g
  double* noise;     // [most]: g, or 0
  float* odds;       // [most]: q
  float* collision;  // the sum of q^2
  int64_t* count;    // how many of `most` are there: tokens that can come
};

// `logits` [count]; `tokens` names what each column is, or is null where they are in order. Logits that make no law (a
// NaN, an infinity, nothing but -infinity) have a collision of NaN and no best tokens. Of equals the token of the
// smallest id wins, whatever its column.
//
// The law counts `sharpness` (s) times. Noise is -log(-log u), no more than -log(1 - u): most draws need no logarithm,
// those whose q^s / (1 - u) is below the least of the best so far.
inline void rank(const float* logits, int64_t count, float inverse_temperature, bool has_noise, float sharpness,
                 uint64_t key, const int64_t* tokens, int64_t most, const Ranked& out) {
  const Floats inverse = spread(inverse_temperature), least = spread(-std::numeric_limits<float>::infinity());
  Floats largest = least;
  Where broken = nowhere();
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats x = load(least, lanes_left(count - i), logits + i);
    broken = broken | is_nan(x);
    largest = larger(largest, inverse * x);
  }
  const float top = latebranch::most(largest);
  if (bits(broken) || !std::isfinite(top)) {
    *out.collision = std::numeric_limits<float>::quiet_NaN(), *out.count = 0;
    return;
  }
  thread_local std::vector<float>
      shares;  // of the likeliest token's probability, to the power of the sharpness (with noise)
  grow(shares, count + kLanes);
  Floats all = spread(0.0f), squares = all;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Mask m = lanes_left(count - i);
    const Floats below = inverse * load(m, logits + i) - spread(top), e = only(m, exponential(below));
    store(shares.data() + i, !has_noise || sharpness == 1.0f
                                 ? e
                                 : only(m, exponential(larger(spread(-87.0f), spread(sharpness) * below))));
    all = all + e;
    squares = fused(e, e, squares);
  }
  const float total = sum(all);
  const double normal = (double)top + std::log((double)total);
  *out.collision = sum(squares) / total / total;
  const Doubles lowest = spread((double)top - 87.0);  // below it q is nothing beside the likeliest token's
  struct Entry {
    double score, noise;  // of the law, not yet normalised
    int64_t token, column;
    bool operator>(const Entry& other) const {
      return score > other.score || (score == other.score && token < other.token);
    }
  };
  std::vector<Entry> best;
  best.reserve(most);
  double threshold = -std::numeric_limits<double>::infinity();
  Doubles enough =
      spread(0.0);  // e to the threshold over that of the likeliest token's law, all but what rounding may take
  for (int64_t i = 0; i < count; i += kDoubles) {
    const Mask m = lanes_left(count - i);
    Doubles score = load_doubles(m, logits + i, inverse_temperature), gumbel = spread(0.0);
    const Mask can_come = m & no_less(score, lowest);
    if (!can_come)
      continue;
    score = spread((double)sharpness) * score;
    if (has_noise) {
      const Integers draws = tokens ? load_longs(m, tokens + i) : add64(ascending64(), spread64(i));
      const Doubles u = uniform_noise(key, draws), share = load_doubles(0xFF, shares.data() + i);
      if (!(can_come & no_less(share, enough * (spread(1.0) - u))))
        continue;
      gumbel = spread(0.0) - logarithm(exponential_of(u));
      score = score + gumbel;
    }
    Mask is_better = can_come;
    if ((int64_t)best.size() == most)
      is_better &= no_less(score, spread(threshold));
    if (!is_better)
      continue;
    double scores[kDoubles], gumbels[kDoubles];
    store(scores, score);
    store(gumbels, gumbel);
    for (int lane = 0; lane < kDoubles; lane++) {
      if (!(is_better >> lane & 1))
        continue;
      const Entry entry{scores[lane], gumbels[lane], tokens ? tokens[i + lane] : i + lane, i + lane};
      if ((int64_t)best.size() == most) {
        if (!(entry > best.front()))
          continue;
        std::pop_heap(best.begin(), best.end(), std::greater<>());
        best.back() = entry;
      } else {
        best.push_back(entry);
      }
      std::push_heap(best.begin(), best.end(), std::greater<>());
      threshold = best.front().score;
      // A share is off by what s (x - top), of up to 87 as x - top is, is rounded by (4e-6 s and 4e-6) and by the
      // exponential (2e-7).
      if (has_noise && (int64_t)best.size() == most)
        enough = spread(std::exp(threshold - sharpness * (double)top) * (1.0 - 5e-6 * (1.0 + sharpness)));
    }
  }
  std::sort(best.begin(), best.end(), std::greater<>());
  *out.count = (int64_t)best.size();
  for (size_t rank = 0; rank < best.size(); rank++) {
    out.tokens[rank] = best[rank].token;
    out.scores[rank] = best[rank].score - sharpness * normal;
    out.noise[rank] = best[rank].noise;
    out.odds[rank] = (float)std::exp((double)(logits[best[rank].column] * inverse_temperature) - normal);
  }
}

}  // namespace latebranch
