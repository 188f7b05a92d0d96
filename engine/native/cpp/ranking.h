// The best tokens of a draft distribution, by log q, or by log q plus the noise of their position.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "noise.h"
#include "numbers.h"
#include "truncation.h"

namespace latebranch {

// The results of a ranking, in the caller's memory.
struct Ranked {
  int64_t* tokens;   // [most], best first
  double* scores;    // [most]: s log q + g
  double* noise;     // [most]: g, or 0
  float* odds;       // [most]: q
  float* collision;  // the sum of q^2
  int64_t* count;    // number of tokens, at most `most`; tokens of probability 0 are left out
};

// A row of logits. `tokens` has the token of each column; null: a column's index is its token. `sharpness` (s) is the
// weight of log q in a score. Tokens that are truncated are not ranked.
struct RankedLogits {
  const float* logits;
  int64_t count;
  float inverse_temperature;
  const int64_t* tokens;
  bool has_noise;
  float sharpness;
  uint64_t key;  // of the noise
  Truncation truncation;
};

// A token with its unnormalised score.
struct RankedToken {
  double score, noise;
  int64_t token, column;

  // Among equal scores the smaller token is better, whatever its column.
  bool operator>(const RankedToken& other) const {
    return score > other.score || (score == other.score && token < other.token);
  }
};

// A heap of the best `most` tokens, with the worst of them in front.
class BestTokens {
 public:
  explicit BestTokens(int64_t most) : most_(most) { heap_.reserve(most); }

  bool is_full() const { return (int64_t)heap_.size() == most_; }
  double worst() const { return heap_.front().score; }

  // Insert a token; return false if it is no better than the worst of a full heap.
  bool insert(const RankedToken& token) {
    if (is_full()) {
      if (!(token > heap_.front()))
        return false;
      std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      heap_.back() = token;
    } else {
      heap_.push_back(token);
    }
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
    return true;
  }

  const std::vector<RankedToken>& sorted() {
    std::sort(heap_.begin(), heap_.end(), std::greater<>());
    return heap_;
  }

 private:
  const int64_t most_;
  std::vector<RankedToken> heap_;
};

// The largest logit, divided by the temperature; NaN if any logit is NaN.
inline float largest_logit(const RankedLogits& in) {
  const Floats inverse = spread(in.inverse_temperature), least = spread(-std::numeric_limits<float>::infinity());
  Floats largest = least;
  Where broken = nowhere();
  for (int64_t i = 0; i < in.count; i += kLanes) {
    const Floats x = load(least, lanes_left(in.count - i), in.logits + i);
    broken = broken | is_nan(x);
    largest = larger(largest, inverse * x);
  }
  return bits(broken) ? std::numeric_limits<float>::quiet_NaN() : most(largest);
}

// Sums of probabilities and of their squares, relative to the likeliest token's probability.
struct ShareSums {
  float all, squares;
};

// shares [count] = probabilities relative to the likeliest token's; with noise, to the power of the sharpness.
inline ShareSums relative_shares(const RankedLogits& in, float top, float* shares) {
  const Floats inverse = spread(in.inverse_temperature);
  Floats all = spread(0.0f), squares = all;
  for (int64_t i = 0; i < in.count; i += kLanes) {
    const Mask m = lanes_left(in.count - i);
    const Floats below = inverse * load(m, in.logits + i) - spread(top), e = only(m, exponential(below));
    const bool is_plain = !in.has_noise || in.sharpness == 1.0f;
    store(shares + i, is_plain ? e : only(m, exponential(larger(spread(-87.0f), spread(in.sharpness) * below))));
    all = all + e;
    squares = fused(e, e, squares);
  }
  return {sum(all), sum(squares)};
}

// Insert the best tokens. Noise is -log(-log u), no more than -log(1 - u). So most draws need no logarithm: those whose
// q^s / (1 - u) is below the worst of a full heap.
inline void find_best(const RankedLogits& in, float top, const float* shares, BestTokens& best) {
  const Doubles lowest = spread((double)top - 87.0);  // below it q is 0 relative to the likeliest token's
  double threshold = -std::numeric_limits<double>::infinity();
  Doubles enough = spread(0.0);  // e^threshold relative to the likeliest token's share, less the rounding error
  for (int64_t i = 0; i < in.count; i += kDoubles) {
    const Mask m = lanes_left(in.count - i);
    Doubles score = load_doubles(m, in.logits + i, in.inverse_temperature), gumbel = spread(0.0);
    const Mask is_possible = m & no_less(score, lowest);
    if (!is_possible)
      continue;
    score = spread((double)in.sharpness) * score;
    if (in.has_noise) {
      const Integers draws = in.tokens ? load_longs(m, in.tokens + i) : add64(ascending64(), spread64(i));
      const Doubles u = uniform_noise(in.key, draws), share = load_doubles(0xFF, shares + i);
      if (!(is_possible & no_less(share, enough * (spread(1.0) - u))))
        continue;
      gumbel = spread(0.0) - logarithm(exponential_of(u));
      score = score + gumbel;
    }
    Mask is_better = is_possible;
    if (best.is_full())
      is_better &= no_less(score, spread(threshold));
    if (!is_better)
      continue;
    double scores[kDoubles], gumbels[kDoubles];
    store(scores, score);
    store(gumbels, gumbel);
    for (int lane = 0; lane < kDoubles; lane++) {
      const int64_t column = i + lane;
      if (!(is_better >> lane & 1) ||
          !best.insert({scores[lane], gumbels[lane], in.tokens ? in.tokens[column] : column, column}))
        continue;
      threshold = best.worst();
      // The error of a share has three sources: the rounding of s (x - top) and of x - top, which are at most 87 s and
      // 87 (4e-6 s and 4e-6), and the exponential (2e-7).
      if (in.has_noise && best.is_full())
        enough = spread(std::exp(threshold - in.sharpness * (double)top) * (1.0 - 5e-6 * (1.0 + in.sharpness)));
    }
  }
}

// Rank at most `most` tokens. Logits that make no distribution (a NaN, an infinity, or all -infinity) have a collision
// of NaN and no best tokens.
inline void rank(RankedLogits in, int64_t most, const Ranked& out) {
  thread_local std::vector<float> kept;
  in.logits = truncated(in.logits, in.count, in.inverse_temperature, in.truncation, kept);
  const float top = largest_logit(in);
  if (!std::isfinite(top)) {
    *out.collision = std::numeric_limits<float>::quiet_NaN();
    *out.count = 0;
    return;
  }
  thread_local std::vector<float> shares;
  grow(shares, in.count + kLanes);
  const ShareSums sums = relative_shares(in, top, shares.data());
  const double normaliser = (double)top + std::log((double)sums.all);
  *out.collision = sums.squares / sums.all / sums.all;
  BestTokens heap(most);
  find_best(in, top, shares.data(), heap);
  const std::vector<RankedToken>& best = heap.sorted();
  *out.count = (int64_t)best.size();
  for (size_t i = 0; i < best.size(); i++) {
    out.tokens[i] = best[i].token;
    out.scores[i] = best[i].score - in.sharpness * normaliser;
    out.noise[i] = best[i].noise;
    out.odds[i] = (float)std::exp((double)(in.logits[best[i].column] * in.inverse_temperature) - normaliser);
  }
}

}  // namespace latebranch
