// A tree of a row that ranks, as it grows: engine/draft/trees/best_first.py's noise-aware tree, without the laws.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace latebranch {

constexpr int64_t kLayout = 3;   // of what a row means, where no size tells it
constexpr int64_t kScores = 64;  // best scores of a node that are compared: the rest weighs nothing in their softmax
constexpr int64_t kShares = 9;   // by chance, between these edges
constexpr double kShareEdges[kShares - 1] = {0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.92, 0.985};

struct RankedRow {
  int64_t root_position;
  const int64_t* slots;  // by position, those of the tree behind the root's
  int64_t max_nodes, depth, branches;
  uint64_t seed;
  int64_t has_noise;
  const double* least_chances;  // [max_nodes], of the likeliest node, the next one...: none less than the one before
  double level_price;
  double offered,
      continued;         // a prior: of so many offers so many have a token that is accepted, given that their node is
  double scale;          // of s log q + g
  const double* shares;  // [2, kShares] of the chances that it gives a model's tokens, and cached ones: what is to be
                         // kept of them
  double temperature, sharpness;
};

// One tree; nodes are numbered as they are fed. Candidates are tokens that could be nodes, in the order in which they
// were offered.
class RankedTree {
 public:
  explicit RankedTree(const RankedRow& row)
      : row_(row), least_(1.0 / (row.max_nodes + 1)), continued_(row.continued), num_offers_(row.offered) {}

  struct Node {
    int64_t parent, token, depth;
    int64_t candidate;   // -1: the root
    int64_t offer = -1;  // place of what it was offered, if anything
    bool is_fed = false;
  };

  const RankedRow& row() const { return row_; }
  const std::vector<Node>& nodes() const { return nodes_; }

  // Nodes to ask about: the best candidates that would be kept if this were the end and that have not been fed.
  std::vector<int64_t> asks() {
    if (++num_rounds_ == 1)
      return {0};
    std::vector<int64_t> asked;
    if (num_rounds_ > row_.depth)
      return asked;
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
      if (asked.size() == most || !(candidates_[i].value > least_))
        break;
      asked.push_back(i);
      sum += candidates_[i].value;
    }
    if (sum * continued_ / num_offers_ < row_.level_price)
      return {};
    for (int64_t& one : asked)
      one = add(one);
    return asked;
  }

  // Make the best tokens of a node's law candidates; `offer` says where they are kept, `is_cached` of which more is
  // cached text's.
  template <typename IsCached>
  void take(int64_t node, int64_t offer, const int64_t* tokens, const double* scores, int64_t count, bool is_fed,
            IsCached is_cached) {
    nodes_[node].offer = offer;
    nodes_[node].is_fed = is_fed;
    num_offers_++;
    double all = 0.0, offered = 0.0;
    double weights[kScores];
    for (int64_t i = 0; i < count; i++)
      all += weights[i] = std::exp(scores[i] / row_.scale - scores[0] / row_.scale);
    const int64_t from = nodes_[node].candidate;
    for (int64_t i = 0; i < std::min(count, row_.branches); i++) {
      const double chance = weights[i] / all, worth = corrected(chance, is_cached(tokens[i]));
      offered += worth;
      const double value = (from < 0 ? 1.0 : candidates_[from].value) * std::min(1.0, worth);
      candidates_.push_back({value, chance, from, tokens[i], nodes_[node].depth + 1});
    }
    continued_ += std::min(1.0, offered);
  }

  // Write the kept nodes behind the root: fed ones first, as they were fed; where their tokens come from the best go
  // first. A node keeps its slot if its number is what it was. `by_age` are their numbers in the order in which they
  // were offered, `chances` those to be accepted (the root's is 1); what is `given_parent` is uncorrected.
  int64_t finish(int64_t* parents, int64_t* tokens, int64_t* offers, int64_t* keeps_slot, int64_t* by_age,
                 double* chances, double* given_parent) const {
    std::vector<size_t> order = kept();
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      const int64_t one = candidates_[a].node, other = candidates_[b].node;
      return one >= 0 && (other < 0 || one < other);
    });
    std::vector<int64_t> number(candidates_.size(), 0);
    for (size_t i = 0; i < order.size(); i++)
      number[order[i]] = i + 1;
    const auto write = [&](int64_t at, int64_t node) {
      const Node* one = node < 0 ? nullptr : &nodes_[node];
      offers[at] = one ? one->offer : -1;
      keeps_slot[at] = one && node == at && one->is_fed;
    };
    parents[0] = -1;
    tokens[0] = -1;
    chances[0] = given_parent[0] = 1.0;
    write(0, 0);
    for (size_t i = 0; i < order.size(); i++) {
      const Candidate& one = candidates_[order[i]];
      parents[i + 1] = one.parent < 0 ? 0 : number[one.parent];
      tokens[i + 1] = one.token;
      chances[i + 1] = one.value;
      given_parent[i + 1] = one.chance;
      write(i + 1, one.node);
    }
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < order.size(); i++)
      by_age[i] = number[order[i]];
    return order.size() + 1;
  }

 private:
  struct Candidate {
    double value, chance;          // to be accepted; given its parent, uncorrected
    int64_t parent, token, depth;  // the parent's place, -1: the root
    int64_t node = -1;             // once it is fed
  };

  // Places of the best candidates that are worth a node, best first. A parent is always older than its children and as
  // good.
  std::vector<size_t> kept() const {
    std::vector<size_t> worthy;
    for (size_t i = 0; i < candidates_.size(); i++)
      if (candidates_[i].value >= row_.least_chances[0])
        worthy.push_back(i);
    std::stable_sort(worthy.begin(), worthy.end(),
                     [&](size_t a, size_t b) { return candidates_[a].value > candidates_[b].value; });
    int64_t count = 0;
    const int64_t most = std::min<int64_t>(worthy.size(), row_.max_nodes);
    while (count < most && candidates_[worthy[count]].value >= row_.least_chances[count])
      count++;
    worthy.resize(count);
    return worthy;
  }

  double corrected(double chance, bool is_cached) const {
    const double* own = row_.shares + (is_cached ? kShares : 0);
    return std::min(1.0, chance * own[std::upper_bound(kShareEdges, kShareEdges + kShares - 1, chance) - kShareEdges]);
  }

  int64_t add(size_t place) {
    Candidate& one = candidates_[place];
    one.node = nodes_.size();
    nodes_.push_back({one.parent < 0 ? 0 : candidates_[one.parent].node, one.token, one.depth, (int64_t)place});
    return one.node;
  }

  const RankedRow row_;
  std::vector<Node> nodes_{{-1, -1, 0, -1}};
  std::vector<Candidate> candidates_;
  int64_t num_rounds_ = 0;
  double least_, continued_,
      num_offers_;  // chances that an offer has a token that is accepted, added up, and of how many offers
};

}  // namespace latebranch
