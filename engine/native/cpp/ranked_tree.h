// The growing tree of a ranked row: engine/draft/trees/best_first.py's noise-aware tree, without distributions.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "texts.h"
#include "truncation.h"

namespace latebranch {

constexpr int64_t kLayout = 9;   // version of the interface, for changes that no structure's size shows
constexpr int64_t kScores = 64;  // best scores of a node that are compared: the others weigh nothing in their softmax
constexpr int64_t kShares = 9;   // corrections of probabilities, by the intervals between these edges
constexpr double kShareEdges[kShares - 1] = {0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.92, 0.985};

constexpr int64_t kIsRatherCached = 1,
                  kIsPredicted = 2;  // origins of tokens: most of its probability is cached text's,
                                     // or the client predicted it

struct RankedRow {
  int64_t root_position;
  const int64_t* slots;  // by position; the tree's slots follow the root's
  int64_t max_nodes, depth, branches;
  uint64_t seed;
  int64_t has_noise;
  const double*
      least_chances;  // [max_nodes], ascending: acceptance thresholds of the likeliest node, the next one, ...
  double level_cost;
  double offered;        // a prior: the number of offers,
  double continued;      // and how many of them have an accepted token, given that their node is accepted
  double scale;          // of s log q + g
  const double* shares;  // [2, kShares]: factors that correct the probabilities of a model's and of cached tokens
  double temperature, sharpness;
  Truncation truncation;
  const RequestTexts* texts;  // null: none
};

// One tree; nodes are numbered as they are fed. Candidates are tokens that may become nodes, in the order of offers.
class RankedTree {
 public:
  explicit RankedTree(const RankedRow& row)
      : row_(row), least_(1.0 / (row.max_nodes + 1)), continued_(row.continued), num_offers_(row.offered) {}

  struct Node {
    int64_t parent, token, depth;
    int64_t candidate;   // -1: the root
    int64_t offer = -1;  // place of the node's offer, if any
    bool is_fed = false;
  };

  const RankedRow& row() const { return row_; }
  const std::vector<Node>& nodes() const { return nodes_; }

  // The nodes of the next round: the best candidates that are kept so far and not fed yet.
  std::vector<int64_t> next_frontier() {
    if (++num_rounds_ == 1)
      return {0};
    std::vector<int64_t> frontier;
    if (num_rounds_ > row_.depth)
      return frontier;
    std::vector<size_t> unfed = kept();
    unfed.erase(
        std::remove_if(unfed.begin(), unfed.end(),
                       [&](size_t i) { return candidates_[i].node >= 0 || candidates_[i].depth >= row_.depth; }),
        unfed.end());
    if (!unfed.empty())
      least_ = std::min(least_, candidates_[unfed[0]].value / 2);
    const size_t most = std::min(row_.branches, row_.max_nodes - ((int64_t)nodes_.size() - 1));
    double sum = 0.0;
    for (size_t i : unfed) {
      if (frontier.size() == most || !(candidates_[i].value > least_))
        break;
      frontier.push_back(i);
      sum += candidates_[i].value;
    }
    if (sum * continued_ / num_offers_ < row_.level_cost)
      return {};
    for (int64_t& candidate : frontier)
      candidate = add(candidate);
    return frontier;
  }

  // Add the best tokens after a node as candidates. `offer` is their place, `origin` returns a token's origin.
  template <typename Origin>
  void take(int64_t node, int64_t offer, const int64_t* tokens, const double* scores, int64_t count, bool is_fed,
            Origin origin) {
    nodes_[node].offer = offer;
    nodes_[node].is_fed = is_fed;
    num_offers_++;
    double all = 0.0, offered = 0.0;
    double weights[kScores];
    for (int64_t i = 0; i < count; i++)
      all += weights[i] = std::exp(scores[i] / row_.scale - scores[0] / row_.scale);
    const int64_t from = nodes_[node].candidate;
    for (int64_t i = 0; i < std::min(count, row_.branches); i++) {
      const int64_t from_texts = origin(tokens[i]);
      const double chance = weights[i] / all, expected = corrected(chance, from_texts & kIsRatherCached);
      offered += expected;
      const double value = (from < 0 ? 1.0 : candidates_[from].value) * std::min(1.0, expected);
      candidates_.push_back({value, chance, from, tokens[i], nodes_[node].depth + 1, from_texts});
    }
    continued_ += std::min(1.0, offered);
  }

  // Write the root and the kept nodes: first fed nodes, as they were fed, then the others, best first. A node keeps its
  // slot if its number did not change. `by_age` are the nodes' numbers in the order of offers, `origins` the origins of
  // their tokens. `chances` are acceptance probabilities (the root's is 1). Those `given_parent` are conditional on the
  // parent, and uncorrected.
  int64_t finish(int64_t* parents, int64_t* tokens, int64_t* offers, int64_t* keeps_slot, int64_t* by_age,
                 int64_t* origins, double* chances, double* given_parent) const {
    std::vector<size_t> order = kept();
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      const int64_t node = candidates_[a].node, other = candidates_[b].node;
      return node >= 0 && (other < 0 || node < other);
    });
    std::vector<int64_t> number(candidates_.size(), 0);
    for (size_t i = 0; i < order.size(); i++)
      number[order[i]] = i + 1;
    const auto write = [&](int64_t at, int64_t number_when_fed) {
      const Node* node = number_when_fed < 0 ? nullptr : &nodes_[number_when_fed];
      offers[at] = node ? node->offer : -1;
      keeps_slot[at] = node && number_when_fed == at && node->is_fed;
    };
    parents[0] = -1;
    tokens[0] = -1;
    chances[0] = given_parent[0] = 1.0;
    write(0, 0);
    for (size_t i = 0; i < order.size(); i++) {
      const Candidate& candidate = candidates_[order[i]];
      parents[i + 1] = candidate.parent < 0 ? 0 : number[candidate.parent];
      tokens[i + 1] = candidate.token;
      chances[i + 1] = candidate.value;
      given_parent[i + 1] = candidate.chance;
      origins[i] = candidate.origin;
      write(i + 1, candidate.node);
    }
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < order.size(); i++)
      by_age[i] = number[order[i]];
    return order.size() + 1;
  }

 private:
  struct Candidate {
    double value, chance;          // acceptance probability; the same given its parent, uncorrected
    int64_t parent, token, depth;  // the parent's place, -1: the root
    int64_t origin;
    int64_t node = -1;  // its number, once it is a node
  };

  // Places of the best candidates above their acceptance thresholds, best first. A parent is always older than its
  // children, and at least as good.
  std::vector<size_t> kept() const {
    std::vector<size_t> good;
    for (size_t i = 0; i < candidates_.size(); i++)
      if (candidates_[i].value >= row_.least_chances[0])
        good.push_back(i);
    std::stable_sort(good.begin(), good.end(),
                     [&](size_t a, size_t b) { return candidates_[a].value > candidates_[b].value; });
    int64_t count = 0;
    const int64_t most = std::min<int64_t>(good.size(), row_.max_nodes);
    while (count < most && candidates_[good[count]].value >= row_.least_chances[count])
      count++;
    good.resize(count);
    return good;
  }

  double corrected(double chance, bool is_cached) const {
    const double* own = row_.shares + (is_cached ? kShares : 0);
    return std::min(1.0, chance * own[std::upper_bound(kShareEdges, kShareEdges + kShares - 1, chance) - kShareEdges]);
  }

  int64_t add(size_t place) {
    Candidate& candidate = candidates_[place];
    candidate.node = nodes_.size();
    nodes_.push_back({candidate.parent < 0 ? 0 : candidates_[candidate.parent].node, candidate.token, candidate.depth,
                      (int64_t)place});
    return candidate.node;
  }

  const RankedRow row_;
  std::vector<Node> nodes_{{-1, -1, 0, -1}};
  std::vector<Candidate> candidates_;
  int64_t num_rounds_ = 0;
  double least_;       // value below which no candidate is fed
  double continued_;   // sum over offers of the probability that one of its tokens is accepted
  double num_offers_;  // of that sum
};

}  // namespace latebranch
