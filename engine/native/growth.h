// Trees of rows that rank, grown round by round by a draft head, with all of a round in one call.
//
// A round asks about some nodes of every tree. Python says what cached text foretells there; the head is run over those
// that it can be fed; their laws, the cache's or mixtures are ranked, and say which nodes the next round asks about.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "mixture.h"
#include "pass.h"
#include "ranked_tree.h"
#include "ranking.h"

namespace latebranch {

// What cached text foretells at the nodes asked about: `firsts` says where each one's tokens begin. Columns behind
// those that the head knows are of `unknown`. Where a law `is_sure` the head is not asked.
struct Told {
  const int64_t *firsts, *columns;  // [A + 1], [E]
  const float *odds, *chances;      // [E], [A]
  const uint8_t* is_sure;           // [A]
  const int64_t* unknown;
  int64_t num_unknown;
  uint8_t* is_rather_cached;  // [E], to be written
};

// Committed tokens that the head is fed before a tree grows, or so that it does not fall behind a text.
struct FedRow {
  int64_t num_tokens, first_position;
  const int64_t *token_ids, *slots;  // [num_tokens]; by position, from 0 on
  int64_t tree;                      // whose root the last of them is, -1: of none
};

struct Ask {
  int64_t tree, node;
};

// What a round fed the head, and about how many of these tokens it was asked.
struct Fed {
  int64_t num_tokens, num_asked;
};

// The trees of a step. `head`, `tokens`, which its columns are, and the `fed` rows are the caller's. Who is fed from
// position 0 on reads the slot `before_all`.
class Growing {
 public:
  Growing(const Decoder& head, const int64_t* tokens, const RankedRow* rows, int64_t num_rows, const FedRow* fed,
          int64_t num_fed, int64_t before_all)
      : head_(head),
        tokens_(tokens),
        trees_(rows, rows + num_rows),
        fed_rows_(fed, fed + num_fed),
        before_all_(before_all) {
    ask();
  }

  const std::vector<Ask>& asks() const { return asks_; }
  const std::vector<RankedTree>& trees() const { return trees_; }
  const std::vector<int64_t>& offered_tokens() const { return offered_tokens_; }
  const std::vector<float>& offered_odds() const { return offered_odds_; }
  const std::vector<double>& offered_noise() const { return offered_noise_; }

  // Answer the nodes asked about, and find those to ask about next; return what was fed: in the first round committed
  // tokens, of which some are the trees' roots. `pass` says where everything lies; its tokens and segments are not
  // looked at.
  Fed round(const Told& told, Pass pass, int num_threads) {
    const bool is_first = offered_tokens_.empty();
    std::vector<int64_t> fed;  // asks that the head answers
    answers_.assign(asks_.size(), -1);
    for (size_t i = 0; i < asks_.size(); i++)
      if (!told.is_sure[i] && can_be_fed(asks_[i])) {
        answers_[i] = fed.size();
        fed.push_back(i);
      }
    Level level;
    std::vector<int64_t> roots(trees_.size());
    if (is_first) {
      set_committed(level, roots);
    } else {
      set_nodes(level, fed);
      pass.features = nullptr;  // nodes are given the head's own states
    }
    level.lend(pass);
    const int64_t num_fed = pass.num_tokens;
    std::vector<int64_t> rows;
    for (int64_t i : fed)
      rows.push_back(is_first ? roots[asks_[i].tree] : (int64_t)rows.size());
    LentScratch lent;
    Scratch& scratch = *lent;
    grow(scratch.logits, fed.size() * head_.head.out);
    grow(scratch.states, fed.size() * head_.width);
    pass.num_rows = fed.size();
    pass.rows = rows.data();
    pass.logits = scratch.logits.data();
    pass.states = scratch.states.data();
    const Ranking ranking = begin_ranking(told, scratch);
    if (num_fed) {
      Run run(head_, pass, scratch, num_threads);
      Pool::shared().run(num_threads, [&](Worker& worker) {
        run.work(worker);
        worker.each(asks_.size(), [&](int64_t i) { rank_one(told, ranking, i); });
      });
    } else {
      for (size_t i = 0; i < asks_.size(); i++)
        rank_one(told, ranking, i);
    }
    for (size_t i = 0; i < asks_.size(); i++) {
      const int64_t offer = ranking.first + i, *tokens = offered_tokens_.data() + offer * (kScores + 1),
                    count = tokens[kScores];
      const auto is_cached = [&](int64_t token) { return is_rather_cached(told, i, token); };
      const double* scores = ranking.scores + i * kScores;
      if (count)
        trees_[asks_[i].tree].take(asks_[i].node, offer, tokens, scores, count, answers_[i] >= 0, is_cached);
    }
    ask();
    return {num_fed, (int64_t)fed.size()};
  }

 private:
  // What a pass over a level points at.
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

  // What ranks a round's laws: where its offers begin, what its columns are, and room.
  struct Ranking {
    int64_t first;
    std::vector<int64_t> with_unknown;  // tokens of all columns, if there are others than the head's
    const float* logits;                // of the head
    float* mixed;
    double* scores;  // [asks, kScores]
  };

  Ranking begin_ranking(const Told& told, Scratch& scratch) {
    const int64_t first = offered_tokens_.size() / (kScores + 1), end = first + asks_.size();
    offered_tokens_.resize(end * (kScores + 1));
    offered_odds_.resize(end * kScores);
    offered_noise_.resize(end * kScores);
    scores_.resize(asks_.size() * kScores);
    if (told.firsts[asks_.size()])
      grow(scratch.mixed, asks_.size() * (head_.head.out + told.num_unknown));
    std::vector<int64_t> with_unknown;
    if (told.num_unknown) {
      with_unknown.assign(tokens_, tokens_ + head_.head.out);
      with_unknown.insert(with_unknown.end(), told.unknown, told.unknown + told.num_unknown);
    }
    return {first, std::move(with_unknown), scratch.logits.data(), scratch.mixed.data(), scores_.data()};
  }

  // Offer the best tokens at a node: none where nobody says anything, or the law is none.
  void rank_one(const Told& told, const Ranking& ranking, int64_t i) {
    const int64_t begin = told.firsts[i], num_told = told.firsts[i + 1] - begin, known = head_.head.out,
                  offer = ranking.first + i;
    int64_t *tokens = offered_tokens_.data() + offer * (kScores + 1), *count = tokens + kScores, columns = known;
    const float* law = answers_[i] < 0 ? nullptr : ranking.logits + answers_[i] * known;
    *count = 0;
    if (!law && !num_told)
      return;
    if (num_told) {
      columns += told.num_unknown;
      float* out = ranking.mixed + i * columns;
      mixed(law, known, columns, {told.columns + begin, told.odds + begin, num_told, told.chances[i]}, out,
            told.is_rather_cached + begin);
      law = out;
    }
    const RankedTree& tree = trees_[asks_[i].tree];
    const RankedRow& row = tree.row();
    float collision;
    const Ranked out{tokens,
                     ranking.scores + i * kScores,
                     offered_noise_.data() + offer * kScores,
                     offered_odds_.data() + offer * kScores,
                     &collision,
                     count};
    const uint64_t key = token_key(row.seed, row.root_position + tree.nodes()[asks_[i].node].depth + 1);
    rank(law, columns, 1.0f / (float)row.temperature, row.has_noise, (float)row.sharpness, key,
         columns > known ? ranking.with_unknown.data() : tokens_, std::min(kScores, columns), out);
  }

  // Whether more of a token's chance at a node is cached text's.
  bool is_rather_cached(const Told& told, int64_t i, int64_t token) const {
    for (int64_t e = told.firsts[i]; e < told.firsts[i + 1]; e++) {
      const int64_t column = told.columns[e], known = head_.head.out;
      if ((column < known ? tokens_[column] : told.unknown[column - known]) == token)
        return told.is_rather_cached[e];
    }
    return false;
  }

  void ask() {
    asks_.clear();
    for (size_t t = 0; t < trees_.size(); t++)
      for (int64_t node : trees_[t].asks())
        asks_.push_back({(int64_t)t, node});
  }

  // Whether the state that the node would read is there.
  bool can_be_fed(const Ask& ask) const {
    const auto& nodes = trees_[ask.tree].nodes();
    return !ask.node || nodes[nodes[ask.node].parent].is_fed;
  }

  // Feed committed tokens, each row's a chain; `roots` are the places of the trees' roots among them.
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

  // Feed some nodes of every tree by their parents' states: each sees the context, its ancestors and itself.
  void set_nodes(Level& level, const std::vector<int64_t>& fed) const {
    for (size_t begin = 0, end; begin < fed.size(); begin = end) {
      const int64_t t = asks_[fed[begin]].tree;
      const RankedTree& tree = trees_[t];
      const auto& nodes = tree.nodes();
      const RankedRow& row = tree.row();
      std::vector<uint8_t> has_keys(nodes.size());
      for (size_t v = 0; v < nodes.size(); v++)
        has_keys[v] = nodes[v].is_fed;
      for (end = begin; end < fed.size() && asks_[fed[end]].tree == t; end++)
        has_keys[asks_[fed[end]].node] = 1;
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
        const int64_t node = asks_[fed[i]].node;
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
  std::vector<Ask> asks_;
  std::vector<int64_t> offered_tokens_;  // [offers, kScores + 1], the last: how many
  std::vector<float> offered_odds_;      // [offers, kScores]
  std::vector<double> offered_noise_;    // [offers, kScores]
  std::vector<double> scores_;           // [asks, kScores], of a round
  std::vector<int64_t> answers_;         // of the asks: which row of the head's is the answer, -1: none
};

}  // namespace latebranch
