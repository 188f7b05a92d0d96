// Follow a tree by the token that is chosen after each node: by the coupled rule that of largest log p + noise, with one
// noise for each depth.
#pragma once
#include <cmath>
#include <vector>

#include "distributions.h"
#include "noise.h"
#include "truncation.h"

namespace latebranch {

// B trees, concatenated, with N nodes in all. `parents` and `path` are numbers in a tree; the root's parent is -1.
struct Walked {
  const int64_t* firsts;                   // [B + 1]
  const int64_t *rows, *parents, *tokens;  // [N]: rows of the logits, parents, tokens
  const float* inverse_temperatures;       // [B]; 0: the likeliest token is chosen
  const Truncation* truncations;           // [B]
  const uint64_t* keys;                    // [N]: of the noise, a tree's by depth
  int64_t* path;                           // [N]
  int64_t *lengths, *extras;  // [B]: nodes of the path, 0 if a distribution is invalid; the token after the path
};

// The largest logit of each row, NaN if any is NaN, and its first token; null if they are not known.
struct Tops {
  const float* values;
  const int64_t* tokens;
};

// The token of largest log p + noise. Return whether p is a distribution. `top` is the largest logit.
inline bool draw(const float* logits, int64_t count, float inverse_temperature, const Truncation& by, float top,
                 uint64_t key, int64_t* chosen) {
  thread_local std::vector<float> shares, kept;
  grow(shares, count);
  const float scale = softmax_shares(truncated(logits, count, inverse_temperature, by, top, kept), count,
                                     inverse_temperature, top, shares.data());
  double score;
  choose(shares.data(), count, scale, key, &score, chosen);
  return std::isfinite(score);
}

// With known tops a tree is refused for any node, also one that is not on its path.
inline void walk(const float* logits, int64_t vocab_size, const Walked& trees, int64_t b, const Tops& tops = {}) {
  const int64_t first = trees.firsts[b], count = trees.firsts[b + 1] - first;
  const float inverse = trees.inverse_temperatures[b];
  trees.lengths[b] = 0;
  for (int64_t node = 0; tops.values && node < count; node++)
    if (!std::isfinite(tops.values[trees.rows[first + node]]))
      return;
  for (int64_t node = 0, depth = 0;; depth++) {
    trees.path[first + depth] = node;
    const int64_t row = trees.rows[first + node];
    float top;
    int64_t chosen;
    if (tops.values) {
      top = tops.values[row];
      chosen = tops.tokens[row];
    } else {
      likeliest(logits + row * vocab_size, vocab_size, &top, &chosen);
    }
    if (inverse ? !draw(logits + row * vocab_size, vocab_size, inverse, trees.truncations[b], top,
                        trees.keys[first + depth], &chosen)
                : !std::isfinite(top))
      return;
    int64_t child = node + 1;
    while (child < count && (trees.parents[first + child] != node || trees.tokens[first + child] != chosen))
      child++;
    if (child == count) {
      trees.lengths[b] = depth + 1;
      trees.extras[b] = chosen;
      return;
    }
    node = child;
  }
}

}  // namespace latebranch
