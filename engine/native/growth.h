// Trees of rows that rank, grown round by round by a draft head: best_first.py's noise-aware trees, with all of a round in one call.
//
// A round asks about some nodes of every tree. Python says what cached text foretells there; the head is run over those that it
// can be fed; their laws, the cache's or mixtures are ranked, and say which nodes the next round asks about.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "mixture.h"
#include "pass.h"
#include "ranking.h"

namespace latebranch {

constexpr int64_t kScores = 64;  // best scores of a node that are compared: the rest weighs nothing in their softmax

struct GrowingRow {
  int64_t root_position;
  const int64_t* slots;  // by position, those of the tree behind the root's
  int64_t max_nodes, depth, branches;
  uint64_t seed;
  int64_t has_noise;
  double node_price, level_price;
  double scale;  // of agreement
  double temperature;
};

// What cached text foretells at the nodes asked about: `firsts` says where each one's tokens begin. Columns behind those that the
// head knows are of `unknown`. Where a law `is_sure` the head is not asked.
struct Told {
  const int64_t *firsts, *columns;  // [A + 1], [E]
  const float *odds, *chances;      // [E], [A]
  const uint8_t* is_sure;           // [A]
  const int64_t* unknown;
  int64_t num_unknown;
  uint8_t* is_rather_cached;  // [E], to be written
};

struct Ask {
  int64_t tree, node;
};

// One tree; nodes are numbered as they are fed. Candidates are tokens that could be nodes, in the order in which they were offered.
class RankedTree {
 public:
  explicit RankedTree(const GrowingRow& row) : row_(row), least_(1.0 / (row.max_nodes + 1)) {}

  struct Node {
    int64_t parent, token, depth;
    int64_t candidate;   // -1: the root
    int64_t offer = -1;  // place of what it was offered, if anything
    bool is_fed = false;
  };

  const GrowingRow& row() const { return row_; }
  const std::vector<Node>& nodes() const { return nodes_; }

  // Nodes to ask about: the best candidates that would be kept if this were the end and that have not been fed.
  std::vector<int64_t> asks() {
    if (++num_rounds_ == 1) return {0};
    std::vector<int64_t> asked;
    if (num_rounds_ > row_.depth) return asked;
    std::vector<size_t> unfed = kept();
    unfed.erase(std::remove_if(unfed.begin(), unfed.end(),
                               [&](size_t i) { return candidates_[i].node >= 0 || candidates_[i].depth >= row_.depth; }),
                unfed.end());
    if (!unfed.empty()) least_ = std::min(least_, candidates_[unfed[0]].value / 2);
    const size_t most = std::min(row_.branches, row_.max_nodes - ((int64_t)nodes_.size() - 1));
    double sum = 0.0;
    for (size_t i : unfed) {
      if (asked.size() == most || !(candidates_[i].value > least_)) break;
      asked.push_back(i), sum += candidates_[i].value;
    }
    if (sum * continued_ / (kOffered + num_offers_) < row_.level_price) return {};
    for (int64_t& one : asked) one = add(one);
    return asked;
  }

  // Make the best tokens of a node's law candidates; `offer` says where they are kept.
  void take(int64_t node, int64_t offer, const int64_t* tokens, const double* scores, int64_t count, bool is_fed) {
    nodes_[node].offer = offer, nodes_[node].is_fed = is_fed, num_offers_++;
    double all = 0.0, offered = 0.0;
    double weights[kScores];
    for (int64_t i = 0; i < count; i++) all += weights[i] = std::exp(scores[i] / row_.scale - scores[0] / row_.scale);
    const int64_t from = nodes_[node].candidate;
    for (int64_t i = 0; i < std::min(count, row_.branches); i++) {
      const double chance = weights[i] / all;
      offered += chance;
      candidates_.push_back({(from < 0 ? 1.0 : candidates_[from].value) * std::min(1.0, chance), from, tokens[i], nodes_[node].depth + 1});
    }
    continued_ += std::min(1.0, offered);
  }

  // Write the kept nodes behind the root: fed ones first, as they were fed; where their tokens come from the best go first. A node
  // keeps its slot if its number is what it was. `by_age` are their numbers in the order in which they were offered.
  int64_t finish(int64_t* parents, int64_t* tokens, int64_t* offers, int64_t* keeps_slot, int64_t* by_age) const {
    std::vector<size_t> order = kept();
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      const int64_t one = candidates_[a].node, other = candidates_[b].node;
      return one >= 0 && (other < 0 || one < other);
    });
    std::vector<int64_t> number(candidates_.size(), 0);
    for (size_t i = 0; i < order.size(); i++) number[order[i]] = i + 1;
    const auto write = [&](int64_t at, int64_t node) {
      const Node* one = node < 0 ? nullptr : &nodes_[node];
      offers[at] = one ? one->offer : -1, keeps_slot[at] = one && node == at && one->is_fed;
    };
    parents[0] = -1, tokens[0] = -1, write(0, 0);
    for (size_t i = 0; i < order.size(); i++) {
      const Candidate& one = candidates_[order[i]];
      parents[i + 1] = one.parent < 0 ? 0 : number[one.parent], tokens[i + 1] = one.token, write(i + 1, one.node);
    }
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < order.size(); i++) by_age[i] = number[order[i]];
    return order.size() + 1;
  }

 private:
  struct Candidate {
    double value;
    int64_t parent, token, depth;  // the parent's place, -1: the root
    int64_t node = -1;             // once it is fed
  };

  // Places of the best candidates that are worth a node, best first. A parent is always older than its children and as good.
  std::vector<size_t> kept() const {
    std::vector<size_t> worthy;
    for (size_t i = 0; i < candidates_.size(); i++)
      if (candidates_[i].value >= row_.node_price) worthy.push_back(i);
    std::stable_sort(worthy.begin(), worthy.end(), [&](size_t a, size_t b) { return candidates_[a].value > candidates_[b].value; });
    if ((int64_t)worthy.size() > row_.max_nodes) worthy.resize(row_.max_nodes);
    return worthy;
  }

  int64_t add(size_t place) {
    Candidate& one = candidates_[place];
    one.node = nodes_.size();
    nodes_.push_back({one.parent < 0 ? 0 : candidates_[one.parent].node, one.token, one.depth, (int64_t)place});
    return one.node;
  }

  static constexpr double kOffered = 1.0, kContinued = 0.6;  // of a node's children one is accepted, given that the node is: a prior, in nodes

  const GrowingRow row_;
  std::vector<Node> nodes_{{-1, -1, 0, -1}};
  std::vector<Candidate> candidates_;
  int64_t num_rounds_ = 0;
  double least_, continued_ = kOffered * kContinued, num_offers_ = 0;
};

// The trees of a step. `head` and `tokens`, which its columns are, are the caller's.
class Growing {
 public:
  Growing(const Decoder& head, const int64_t* tokens, const GrowingRow* rows, int64_t num_rows)
      : head_(head), tokens_(tokens), trees_(rows, rows + num_rows) {
    ask();
  }

  const std::vector<Ask>& asks() const { return asks_; }
  const std::vector<RankedTree>& trees() const { return trees_; }
  const std::vector<int64_t>& offered_tokens() const { return offered_tokens_; }
  const std::vector<double>& offered_scores() const { return offered_scores_; }

  // Answer the nodes asked about, and find those to ask about next; return how many were fed.
  //
  // `pass` says where everything lies. Of the first round it has the committed tokens, `roots` the place of each tree's root among
  // them; of later ones (null) its tokens and segments are not looked at.
  int64_t round(const Told& told, Pass pass, const int64_t* roots, int num_threads) {
    std::vector<int64_t> fed, answer(asks_.size(), -1);  // asks that the head answers; the row of each one's answer
    for (size_t i = 0; i < asks_.size(); i++)
      if (!told.is_sure[i] && can_be_fed(asks_[i])) answer[i] = fed.size(), fed.push_back(i);
    const int64_t known = head_.head.out, columns = known + told.num_unknown;
    grow(logits_, fed.size() * known), grow(states_, fed.size() * head_.width), grow(mixed_, asks_.size() * columns);
    const std::vector<int64_t> with_unknown = tokens_with(told);
    const int64_t* all_tokens = told.num_unknown ? with_unknown.data() : tokens_;
    const int64_t num_fed = roots ? pass.num_tokens : (int64_t)fed.size();
    std::vector<int64_t> rows;
    for (int64_t i : fed) rows.push_back(roots ? roots[asks_[i].tree] : (int64_t)rows.size());
    Level level;
    if (!roots) set_level(level, pass, fed);
    pass.num_rows = fed.size(), pass.rows = rows.data(), pass.logits = logits_.data(), pass.states = states_.data();
    const int64_t first = offered_tokens_.size() / (kScores + 1), most = std::min(kScores, columns);
    offered_tokens_.resize((first + asks_.size()) * (kScores + 1)), offered_scores_.resize((first + asks_.size()) * kScores);
    std::vector<float> odds(asks_.size() * kScores);
    std::vector<int64_t> counts(asks_.size(), 0);
    const auto rank_one = [&](int64_t i) {
      const int64_t begin = told.firsts[i], count = told.firsts[i + 1] - begin, offer = first + i;
      const float* law = answer[i] < 0 ? nullptr : logits_.data() + answer[i] * known;
      if (!law && !count) return;
      if (count) {
        float* out = mixed_.data() + i * columns;
        mixed(law, known, columns, {told.columns + begin, told.odds + begin, count, told.chances[i]}, out, told.is_rather_cached + begin);
        law = out;
      }
      const RankedTree& tree = trees_[asks_[i].tree];
      const int64_t position = tree.row().root_position + tree.nodes()[asks_[i].node].depth;
      float collision;
      const Ranked out{offered_tokens_.data() + offer * (kScores + 1), offered_scores_.data() + offer * kScores, odds.data() + i * kScores, &collision,
                       counts.data() + i};
      rank(law, count ? columns : known, 1.0f / (float)tree.row().temperature, tree.row().has_noise, token_key(tree.row().seed, position + 1),
           count ? all_tokens : tokens_, std::min(most, count ? columns : known), out);
    };
    LentScratch scratch;
    if (num_fed) {
      Run run(head_, pass, *scratch, num_threads);
      Pool::shared().run(num_threads, [&](Worker& worker) {
        run.work(worker);
        worker.each(asks_.size(), rank_one);
      });
    } else {
      for (size_t i = 0; i < asks_.size(); i++) rank_one(i);
    }
    for (size_t i = 0; i < asks_.size(); i++) {
      const int64_t offer = first + i;
      int64_t* tokens = offered_tokens_.data() + offer * (kScores + 1);
      tokens[kScores] = counts[i];
      if (counts[i]) trees_[asks_[i].tree].take(asks_[i].node, offer, tokens, offered_scores_.data() + offer * kScores, counts[i], answer[i] >= 0);
    }
    ask();
    return num_fed;
  }

 private:
  // What a pass over a level points at.
  struct Level {
    std::vector<int64_t> token_ids, positions, write_slots, before, first_token{0}, first_key{0}, first_tail{0}, first_seen{0}, key_slots, tail_positions;
    std::vector<uint8_t> seen;
  };

  void ask() {
    asks_.clear();
    for (size_t t = 0; t < trees_.size(); t++)
      for (int64_t node : trees_[t].asks()) asks_.push_back({(int64_t)t, node});
  }

  // Whether the state that the node would read is there.
  bool can_be_fed(const Ask& ask) const {
    const auto& nodes = trees_[ask.tree].nodes();
    return !ask.node || nodes[nodes[ask.node].parent].is_fed;
  }

  std::vector<int64_t> tokens_with(const Told& told) const {
    if (!told.num_unknown) return {};
    std::vector<int64_t> all(tokens_, tokens_ + head_.head.out);
    all.insert(all.end(), told.unknown, told.unknown + told.num_unknown);
    return all;
  }

  // Feed some nodes of every tree by their parents' states: each sees the context, its ancestors and itself.
  void set_level(Level& level, Pass& pass, const std::vector<int64_t>& fed) const {
    for (size_t begin = 0, end; begin < fed.size(); begin = end) {
      const int64_t t = asks_[fed[begin]].tree;
      const RankedTree& tree = trees_[t];
      const auto& nodes = tree.nodes();
      const GrowingRow& row = tree.row();
      std::vector<uint8_t> has_keys(nodes.size());
      for (size_t v = 0; v < nodes.size(); v++) has_keys[v] = nodes[v].is_fed;
      for (end = begin; end < fed.size() && asks_[fed[end]].tree == t; end++) has_keys[asks_[fed[end]].node] = 1;
      level.key_slots.insert(level.key_slots.end(), row.slots, row.slots + row.root_position);
      std::vector<int64_t> tail;
      for (size_t v = 0; v < nodes.size(); v++)
        if (has_keys[v]) tail.push_back(v), level.key_slots.push_back(row.slots[row.root_position + v]), level.tail_positions.push_back(row.root_position + nodes[v].depth);
      for (size_t i = begin; i < end; i++) {
        const int64_t node = asks_[fed[i]].node;
        level.token_ids.push_back(nodes[node].token), level.positions.push_back(row.root_position + nodes[node].depth);
        level.write_slots.push_back(row.slots[row.root_position + node]), level.before.push_back(row.slots[row.root_position + nodes[node].parent]);
        std::vector<uint8_t> is_seen(nodes.size());
        for (int64_t v = node; v >= 0; v = nodes[v].parent) is_seen[v] = 1;
        for (int64_t v : tail) level.seen.push_back(is_seen[v]);
      }
      level.first_token.push_back(level.token_ids.size()), level.first_key.push_back(level.key_slots.size());
      level.first_tail.push_back(level.tail_positions.size()), level.first_seen.push_back(level.seen.size());
    }
    pass.num_tokens = fed.size(), pass.token_ids = level.token_ids.data(), pass.positions = level.positions.data();
    pass.write_slots = level.write_slots.data(), pass.before = level.before.data();
    pass.segments = {(int64_t)level.first_token.size() - 1, level.first_token.data(), level.first_key.data(), level.first_tail.data(), level.first_seen.data(),
                     level.key_slots.data(), level.tail_positions.data(), level.seen.data()};
  }

  const Decoder& head_;
  const int64_t* tokens_;
  std::vector<RankedTree> trees_;
  std::vector<Ask> asks_;
  std::vector<int64_t> offered_tokens_;  // [offers, kScores + 1], the last: how many
  std::vector<double> offered_scores_;   // [offers, kScores]
  std::vector<float> logits_, states_, mixed_;
};

}  // namespace latebranch
