// Trees of ranked rows, grown round by round by a draft head and cached text.
//
// A round handles the frontier: some nodes of every tree. Cached text may predict the tokens after these nodes. The
// head runs on the nodes that it can be fed. The distributions of the head, of cached text, or their mixtures are
// ranked, and the ranked tokens decide the next frontier.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "mixture.h"
#include "pass.h"
#include "ranked_tree.h"
#include "ranking.h"
#include "texts.h"

namespace latebranch {

// Cached text's predictions after the A nodes of the frontier, with E tokens in all: `firsts` has each node's first
// token. Columns after the head's are tokens of `unknown`, ascending. The head does not run on nodes whose prediction
// `is_sure`.
struct Predictions {
  std::vector<int64_t> firsts{0}, tokens, columns, unknown;  // [A + 1], [E], [E]
  std::vector<float> odds, chances;                          // [E], [A]
  std::vector<uint8_t> is_sure, is_predicted;                // [A], [E]
  std::vector<uint8_t> is_rather_cached;  // [E]: whether most of a token's probability comes from cached text
};

// Committed tokens that the head is fed before a tree grows, or to keep up with a sequence.
struct FedRow {
  int64_t num_tokens, first_position;
  const int64_t *token_ids, *slots;  // [num_tokens]; by position, from 0 on
  int64_t tree;                      // the tree whose root is the last token; -1: none
};

struct FrontierEntry {
  int64_t tree, node;
};

// The number of tokens that a round fed to the head, and of those among them that need a distribution.
struct Fed {
  int64_t num_tokens, num_queried;
};

// What the trees of a step grow from. `tokens` are those of the head's columns, ascending. A token at position 0 reads
// the slot `before_all`. `pass` has the addresses of caches; its tokens and segments are ignored.
struct Growth {
  const Decoder* head;
  const int64_t* tokens;
  const RankedRow* rows;
  int64_t num_rows;
  const FedRow* fed_rows;
  int64_t num_fed_rows, before_all;
  const Pass* pass;
};

// The trees of a step. The caller owns all that the growth points to.
class Growing {
 public:
  Growing(const Growth& growth, int num_threads)
      : head_(*growth.head),
        tokens_(growth.tokens),
        trees_(growth.rows, growth.rows + growth.num_rows),
        fed_rows_(growth.fed_rows, growth.fed_rows + growth.num_fed_rows),
        before_all_(growth.before_all) {
    for (set_frontier(); !frontier_.empty(); set_frontier())
      fed_.push_back(round(*growth.pass, num_threads));
  }

  const std::vector<Fed>& fed() const { return fed_; }
  const std::vector<int64_t>& rounds() const { return rounds_; }
  const std::vector<RankedTree>& trees() const { return trees_; }
  const std::vector<int64_t>& offered_tokens() const { return offered_tokens_; }
  const std::vector<float>& offered_odds() const { return offered_odds_; }
  const std::vector<double>& offered_noise() const { return offered_noise_; }

 private:
  // Rank tokens after the frontier's nodes; return the counts fed. The first round feeds committed tokens, among them
  // the trees' roots.
  Fed round(Pass pass, int num_threads) {
    const bool is_first = offered_tokens_.empty();
    Predictions predicted = predictions();
    std::vector<int64_t> fed;  // indices of the nodes on which the head runs
    answers_.assign(frontier_.size(), -1);
    for (size_t i = 0; i < frontier_.size(); i++)
      if (!predicted.is_sure[i] && can_be_fed(frontier_[i])) {
        answers_[i] = fed.size();
        fed.push_back(i);
      }
    Level level;
    std::vector<int64_t> roots(trees_.size());
    if (is_first) {
      set_committed(level, roots);
    } else {
      set_nodes(level, fed);
      pass.features = nullptr;  // nodes read the head's own states
    }
    level.lend(pass);
    const int64_t num_fed = pass.num_tokens;
    std::vector<int64_t> rows;
    for (int64_t i : fed)
      rows.push_back(is_first ? roots[frontier_[i].tree] : (int64_t)rows.size());
    ScratchLease lease;
    Scratch& scratch = *lease;
    grow(scratch.logits, fed.size() * head_.head.out);
    grow(scratch.states, fed.size() * head_.width);
    pass.num_rows = fed.size();
    pass.rows = rows.data();
    pass.logits = scratch.logits.data();
    pass.states = scratch.states.data();
    const Ranking ranking = begin_ranking(predicted, scratch);
    if (num_fed) {
      Run run(head_, pass, scratch, num_threads);
      Pool::shared().run(num_threads, [&](Worker& worker) {
        run.work(worker);
        worker.each(frontier_.size(), [&](int64_t i) { rank_one(predicted, ranking, i); });
      });
    } else {
      for (size_t i = 0; i < frontier_.size(); i++)
        rank_one(predicted, ranking, i);
    }
    for (size_t i = 0; i < frontier_.size(); i++) {
      const int64_t offer = ranking.first + i, *tokens = offered_tokens_.data() + offer * (kScores + 1),
                    count = tokens[kScores];
      const auto origin = [&](int64_t token) { return origin_of(predicted, i, token); };
      const double* scores = ranking.scores + i * kScores;
      if (count)
        trees_[frontier_[i].tree].take(frontier_[i].node, offer, tokens, scores, count, answers_[i] >= 0, origin);
    }
    return {num_fed, (int64_t)fed.size()};
  }

  // Cached text's predictions after the nodes of the frontier.
  Predictions predictions() const {
    Predictions all;
    for (const FrontierEntry& entry : frontier_) {
      const RankedTree& tree = trees_[entry.tree];
      const RequestTexts* texts = tree.row().texts;
      Continuation next;
      if (texts)
        next = continuation(*texts, ending_at(*texts, tree, entry.node));
      for (const Continuation::Token& one : next.tokens) {
        all.tokens.push_back(one.id);
        all.columns.push_back(column_of(one.id));
        all.odds.push_back(one.prob);
        all.is_predicted.push_back(one.is_predicted);
        if (all.columns.back() < 0)
          all.unknown.push_back(one.id);
      }
      all.firsts.push_back(all.tokens.size());
      all.chances.push_back(next.confidence);
      all.is_sure.push_back(texts && next.confidence >= texts->sure);
    }
    std::sort(all.unknown.begin(), all.unknown.end());
    all.unknown.erase(std::unique(all.unknown.begin(), all.unknown.end()), all.unknown.end());
    for (size_t e = 0; e < all.tokens.size(); e++)
      if (all.columns[e] < 0)
        all.columns[e] = head_.head.out + place_in(all.unknown.data(), all.unknown.size(), all.tokens[e]);
    all.is_rather_cached.resize(all.tokens.size());
    return all;
  }

  static int64_t place_in(const int64_t* ascending, int64_t count, int64_t token) {
    return std::lower_bound(ascending, ascending + count, token) - ascending;
  }

  // The head's column of a token, -1: none.
  int64_t column_of(int64_t token) const {
    const int64_t place = place_in(tokens_, head_.head.out, token);
    return place < head_.head.out && tokens_[place] == token ? place : -1;
  }

  // The last tokens of the history and of the path to a node.
  static Ending ending_at(const RequestTexts& texts, const RankedTree& tree, int64_t node) {
    std::vector<int64_t> path;
    for (; node; node = tree.nodes()[node].parent)
      path.push_back(tree.nodes()[node].token);
    Ending ending = ending_of(texts.tokens, texts.num_tokens);
    for (auto token = path.rbegin(); token != path.rend(); token++)
      ending.push(*token);
    return ending;
  }

  // The tokens and segments of a pass over a level of the trees.
  struct Level {
    std::vector<int64_t> token_ids, positions, write_slots, before, key_slots, tail_positions;
    std::vector<int64_t> first_token{0}, first_key{0}, first_tail{0}, first_seen{0};
    std::vector<uint8_t> seen;

    void end_segment() {
      first_token.push_back(token_ids.size());
      first_key.push_back(key_slots.size());
      first_tail.push_back(tail_positions.size());
      first_seen.push_back(seen.size());
    }

    void lend(Pass& pass) const {
      pass.num_tokens = token_ids.size();
      pass.token_ids = token_ids.data();
      pass.positions = positions.data();
      pass.write_slots = write_slots.data();
      pass.before = before.data();
      pass.segments = {(int64_t)first_token.size() - 1,
                       first_token.data(),
                       first_key.data(),
                       first_tail.data(),
                       first_seen.data(),
                       key_slots.data(),
                       tail_positions.data(),
                       seen.data()};
    }
  };

  // The inputs of a round's rankings, and memory for their results.
  struct Ranking {
    int64_t first;
    std::vector<int64_t> with_unknown;  // tokens of all columns, if there are more than the head's
    const float* logits;                // of the head
    float* mixed;
    double* scores;  // [frontier, kScores]
  };

  Ranking begin_ranking(const Predictions& predicted, Scratch& scratch) {
    const int64_t first = offered_tokens_.size() / (kScores + 1), end = first + frontier_.size();
    offered_tokens_.resize(end * (kScores + 1));
    offered_odds_.resize(end * kScores);
    offered_noise_.resize(end * kScores);
    scores_.resize(frontier_.size() * kScores);
    if (!predicted.tokens.empty())
      grow(scratch.mixed, frontier_.size() * (head_.head.out + predicted.unknown.size()));
    std::vector<int64_t> with_unknown;
    if (!predicted.unknown.empty()) {
      with_unknown.assign(tokens_, tokens_ + head_.head.out);
      with_unknown.insert(with_unknown.end(), predicted.unknown.begin(), predicted.unknown.end());
    }
    return {first, std::move(with_unknown), scratch.logits.data(), scratch.mixed.data(), scores_.data()};
  }

  // Offer the best tokens after a node: none without a distribution of the head or of cached text, or if it is invalid.
  void rank_one(Predictions& predicted, const Ranking& ranking, int64_t i) {
    const int64_t begin = predicted.firsts[i], num_predicted = predicted.firsts[i + 1] - begin, known = head_.head.out,
                  offer = ranking.first + i;
    int64_t *tokens = offered_tokens_.data() + offer * (kScores + 1), *count = tokens + kScores, columns = known;
    const float* logits = answers_[i] < 0 ? nullptr : ranking.logits + answers_[i] * known;
    *count = 0;
    if (!logits && !num_predicted)
      return;
    if (num_predicted) {
      columns += predicted.unknown.size();
      float* out = ranking.mixed + i * columns;
      mixed(logits, known, columns,
            {predicted.columns.data() + begin, predicted.odds.data() + begin, num_predicted, predicted.chances[i]}, out,
            predicted.is_rather_cached.data() + begin);
      logits = out;
    }
    const RankedTree& tree = trees_[frontier_[i].tree];
    const RankedRow& row = tree.row();
    float collision;
    const Ranked out{tokens,
                     ranking.scores + i * kScores,
                     offered_noise_.data() + offer * kScores,
                     offered_odds_.data() + offer * kScores,
                     &collision,
                     count};
    const uint64_t key = token_key(row.seed, row.root_position + tree.nodes()[frontier_[i].node].depth + 1);
    const RankedLogits ranked{logits,
                              columns,
                              1.0f / (float)row.temperature,
                              columns > known ? ranking.with_unknown.data() : tokens_,
                              row.has_noise != 0,
                              (float)row.sharpness,
                              key,
                              row.truncation};
    rank(ranked, std::min(kScores, columns), out);
  }

  // The origin of a token after a node.
  static int64_t origin_of(const Predictions& predicted, int64_t i, int64_t token) {
    for (int64_t e = predicted.firsts[i]; e < predicted.firsts[i + 1]; e++)
      if (predicted.tokens[e] == token)
        return kIsRatherCached * predicted.is_rather_cached[e] + kIsPredicted * predicted.is_predicted[e];
    return 0;
  }

  void set_frontier() {
    frontier_.clear();
    rounds_.resize(trees_.size());
    for (size_t t = 0; t < trees_.size(); t++) {
      const std::vector<int64_t> nodes = trees_[t].next_frontier();
      for (int64_t node : nodes)
        frontier_.push_back({(int64_t)t, node});
      rounds_[t] += !nodes.empty();
    }
  }

  // Whether the state that the node would read exists.
  bool can_be_fed(const FrontierEntry& entry) const {
    const auto& nodes = trees_[entry.tree].nodes();
    return !entry.node || nodes[nodes[entry.node].parent].is_fed;
  }

  // Feed committed tokens, a chain for each row; `roots` gets the indices of the trees' roots among them.
  void set_committed(Level& level, std::vector<int64_t>& roots) const {
    for (const FedRow& row : fed_rows_) {
      const int64_t first = row.first_position, end = first + row.num_tokens;
      level.key_slots.insert(level.key_slots.end(), row.slots, row.slots + end);
      for (int64_t position = first; position < end; position++) {
        level.token_ids.push_back(row.token_ids[position - first]);
        level.positions.push_back(position);
        level.tail_positions.push_back(position);
        level.write_slots.push_back(row.slots[position]);
        level.before.push_back(position ? row.slots[position - 1] : before_all_);
        for (int64_t other = first; other < end; other++)
          level.seen.push_back(other <= position);
      }
      level.end_segment();
      if (row.tree >= 0)
        roots[row.tree] = level.token_ids.size() - 1;
    }
  }

  // Feed some nodes of every tree, with their parents' states. A node attends to the context, its ancestors and itself.
  void set_nodes(Level& level, const std::vector<int64_t>& fed) const {
    for (size_t begin = 0, end; begin < fed.size(); begin = end) {
      const int64_t t = frontier_[fed[begin]].tree;
      const RankedTree& tree = trees_[t];
      const auto& nodes = tree.nodes();
      const RankedRow& row = tree.row();
      std::vector<uint8_t> has_keys(nodes.size());
      for (size_t v = 0; v < nodes.size(); v++)
        has_keys[v] = nodes[v].is_fed;
      for (end = begin; end < fed.size() && frontier_[fed[end]].tree == t; end++)
        has_keys[frontier_[fed[end]].node] = 1;
      level.key_slots.insert(level.key_slots.end(), row.slots, row.slots + row.root_position);
      std::vector<int64_t> tail;
      for (size_t v = 0; v < nodes.size(); v++)
        if (has_keys[v])
          tail.push_back(v);
      for (int64_t v : tail) {
        level.key_slots.push_back(row.slots[row.root_position + v]);
        level.tail_positions.push_back(row.root_position + nodes[v].depth);
      }
      for (size_t i = begin; i < end; i++) {
        const int64_t node = frontier_[fed[i]].node;
        level.token_ids.push_back(nodes[node].token);
        level.positions.push_back(row.root_position + nodes[node].depth);
        level.write_slots.push_back(row.slots[row.root_position + node]);
        level.before.push_back(row.slots[row.root_position + nodes[node].parent]);
        std::vector<uint8_t> is_seen(nodes.size());
        for (int64_t v = node; v >= 0; v = nodes[v].parent)
          is_seen[v] = 1;
        for (int64_t v : tail)
          level.seen.push_back(is_seen[v]);
      }
      level.end_segment();
    }
  }

  const Decoder& head_;
  const int64_t* tokens_;
  std::vector<RankedTree> trees_;
  const std::vector<FedRow> fed_rows_;
  const int64_t before_all_;
  std::vector<FrontierEntry> frontier_;
  std::vector<Fed> fed_;                 // by round
  std::vector<int64_t> rounds_;          // of each tree
  std::vector<int64_t> offered_tokens_;  // [offers, kScores + 1], the last: how many
  std::vector<float> offered_odds_;      // [offers, kScores]
  std::vector<double> offered_noise_;    // [offers, kScores]
  std::vector<double> scores_;           // [frontier, kScores], of a round
  std::vector<int64_t> answers_;         // of the frontier: the head's row of each node, -1: none
};

// Memory for the R trees of each step, with at most `most` nodes in all, roots included, and `most_rounds` rounds.
struct GrownTrees {
  int64_t most, most_rounds;
  int64_t *counts, *rounds;  // [steps, R]: nodes, and rounds of growth
  // [steps, 6, most], tree after tree: parents, tokens, places of offers (-1: none), whether a node keeps its slot, the
  // nodes by age, and the nodes' origins (both without the root: a tree's last entry is unused).
  int64_t* nodes;
  double* chances;  // [steps, 2, most]: acceptance probabilities, and uncorrected ones given the parent
  // For each place of an offer: tokens [steps, most, kScores + 1], the last their number, and [steps, most, kScores].
  int64_t* tokens;
  float* odds;
  double* noise;
  Fed* fed;          // [steps, most_rounds]
  int64_t* num_fed;  // [steps]: rounds

  GrownTrees at(int64_t step, int64_t num_trees) const {
    GrownTrees own = *this;
    own.counts += step * num_trees;
    own.rounds += step * num_trees;
    own.nodes += step * 6 * most;
    own.chances += step * 2 * most;
    own.tokens += step * most * (kScores + 1);
    own.odds += step * most * kScores;
    own.noise += step * most * kScores;
    own.fed += step * most_rounds;
    own.num_fed += step;
    return own;
  }

  // Write the trees of the first step.
  void write(const Growing& growing) const {
    int64_t first = 0, place = 0;
    for (const RankedTree& tree : growing.trees()) {
      int64_t* of = nodes + first;
      const int64_t count = tree.finish(of, of + most, of + 2 * most, of + 3 * most, of + 4 * most, of + 5 * most,
                                        chances + first, chances + most + first);
      counts[place++] = count;
      first += count;
    }
    std::copy(growing.rounds().begin(), growing.rounds().end(), rounds);
    std::copy(growing.offered_tokens().begin(), growing.offered_tokens().end(), tokens);
    std::copy(growing.offered_odds().begin(), growing.offered_odds().end(), odds);
    std::copy(growing.offered_noise().begin(), growing.offered_noise().end(), noise);
    std::copy(growing.fed().begin(), growing.fed().end(), fed);
    *num_fed = growing.fed().size();
  }
};

}  // namespace latebranch
