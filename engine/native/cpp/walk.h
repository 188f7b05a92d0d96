// The coupled rule: follow a tree by the token of largest log p + noise after each node, with one noise for each depth.
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
  const float* inverse_temperatures;       // [B]
  const Truncation* truncations;           // [B]
  const uint64_t* keys;                    // [N]: of the noise, a tree's by depth
  int64_t* path;                           // [N]
  int64_t *lengths, *extras;  // [B]: nodes of the path, 0 if a distribution on it is invalid; the token after it
};

inline void walk(const float* logits, int64_t vocab_size, const Walked& trees, int64_t b) {
  thread_local std::vector<float> p, kept;
  grow(p, vocab_size);
  const int64_t first = trees.firsts[b], count = trees.firsts[b + 1] - first;
  for (int64_t node = 0, depth = 0;; depth++) {
    trees.path[first + depth] = node;
    const float inverse = trees.inverse_temperatures[b], *row = logits + trees.rows[first + node] * vocab_size;
    softmax(truncated(row, vocab_size, inverse, trees.truncations[b], kept), vocab_size, inverse, p.data());
    double score;
    choose(p.data(), vocab_size, trees.keys[first + depth], &score, trees.extras + b);
    if (!std::isfinite(score))
      return void(trees.lengths[b] = 0);
    int64_t child = node + 1;
    while (child < count && (trees.parents[first + child] != node || trees.tokens[first + child] != trees.extras[b]))
      child++;
    if (child == count)
      return void(trees.lengths[b] = depth + 1);
    node = child;
  }
}

}  // namespace latebranch
