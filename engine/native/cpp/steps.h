// Several steps in a row: of plain decoding, where each segment is one token and its chosen token is the next pass's, or
// with drafts, where each accepted path is kept and new trees grow from the tokens after the paths.
#pragma once
#include <algorithm>
#include <chrono>
#include <vector>

#include "growth.h"
#include "noise.h"
#include "pass.h"

namespace latebranch {

// B segments. The pass has a tree for each, in order: the token alone.
struct Steps {
  int64_t most;                                // steps
  const int64_t* slots;                        // [B, most - 1]: of each segment's later tokens
  const uint64_t* seeds;                       // [B]
  const int64_t *first_stop, *stop_token_ids;  // [B + 1], and the tokens after which a segment must not continue
  int64_t* tokens;                             // [most, B]: the chosen ones
};

// Runs the steps. Each pass reads the tokens, positions, slots and noise of its own step.
class StepRun {
 public:
  StepRun(const Decoder& decoder, const Pass& first, const Steps& steps, int num_threads)
      : decoder_(decoder), first_(first), steps_(steps), num_threads_(num_threads), count_(first.num_tokens) {
    ids_.assign(first.token_ids, first.token_ids + count_);
    positions_.assign(first.positions, first.positions + count_);
    write_slots_.assign(first.write_slots, first.write_slots + count_);
    noise_keys_.resize(count_);
    first_keys_.resize(count_ + 1);
  }

  // Return the number of steps in which all segments have a token. None follows a step in which any has a stop token.
  int64_t run() {
    for (int64_t step = 0; step < steps_.most; step++) {
      step_pass(step);
      const Walked& walked = *first_.walked;
      if (std::any_of(walked.lengths, walked.lengths + count_, [](int64_t length) { return !length; }))
        return step;
      std::copy_n(walked.extras, count_, steps_.tokens + step * count_);
      if (is_stopped(walked.extras))
        return step + 1;
      for (int64_t b = 0; b < count_ && step + 1 < steps_.most; b++) {
        ids_[b] = walked.extras[b];
        positions_[b]++;
        write_slots_[b] = later_slots(b)[step];
      }
    }
    return steps_.most;
  }

 private:
  const int64_t* later_slots(int64_t b) const { return steps_.slots + b * (steps_.most - 1); }

  void step_pass(int64_t step) {
    key_slots_.clear();
    for (int64_t b = 0; b < count_; b++) {
      const int64_t *keys = first_.segments.key_slots, *begins = first_.segments.first_key;
      first_keys_[b] = key_slots_.size();
      key_slots_.insert(key_slots_.end(), keys + begins[b], keys + begins[b + 1]);
      key_slots_.insert(key_slots_.end(), later_slots(b), later_slots(b) + step);
      noise_keys_[b] = token_key(steps_.seeds[b], positions_[b] + 1);
    }
    first_keys_[count_] = key_slots_.size();
    Walked walked = *first_.walked;
    walked.keys = noise_keys_.data();
    Pass pass = first_;
    pass.token_ids = ids_.data();
    pass.positions = positions_.data();
    pass.write_slots = write_slots_.data();
    pass.segments.first_key = first_keys_.data();
    pass.segments.key_slots = key_slots_.data();
    pass.segments.tail_positions = positions_.data();
    pass.walked = &walked;
    decode(decoder_, pass, num_threads_);
  }

  bool is_stopped(const int64_t* tokens) const {
    const auto is_stop = [&](int64_t b) {
      const int64_t *begin = steps_.stop_token_ids + steps_.first_stop[b],
                    *end = steps_.stop_token_ids + steps_.first_stop[b + 1];
      return std::find(begin, end, tokens[b]) != end;
    };
    for (int64_t b = 0; b < count_; b++)
      if (is_stop(b))
        return true;
    return false;
  }

  const Decoder& decoder_;
  const Pass& first_;
  const Steps& steps_;
  const int num_threads_;
  const int64_t count_;
  std::vector<int64_t> ids_, positions_, write_slots_, first_keys_, key_slots_;
  std::vector<uint64_t> noise_keys_;
};

// A sequence of drafting steps, with its state before the first of them.
struct DraftedRow {
  int64_t tree;  // its place among the trees, -1: it decodes plainly
  int64_t root_token, root_position;
  int64_t* slots;         // by position, with room for all steps; reordered, so that those of kept tokens come first
  int64_t num_remaining;  // tokens that it may still have
  uint64_t seed;
  float inverse_temperature;  // 0: the likeliest token is chosen
  Truncation truncation;
  const int64_t* stop_token_ids;  // tokens after which it must not continue
  int64_t num_stops;
};

// The steps of B sequences, and their results. The nodes of a step are packed, tree after tree.
struct DraftSteps {
  int64_t most, num_rows, most_nodes;  // steps; B; nodes of a step
  const DraftedRow* rows;              // [B]
  int64_t* paths;                      // [most, most_nodes]: the nodes of each tree's path, in the tree's range
  int64_t *lengths, *extras;           // [most, B]: of each path its nodes, and the token after it
  int64_t *num_learned, *is_sure;      // [trees]: new tokens that cached text has learned, and whether it is sure now
  double* seconds;                     // [most, 2]: of growing trees, and of the target's pass
};

// Runs steps with drafts. The target's pass follows all trees itself.
class DraftRun {
 public:
  DraftRun(const Decoder& target, const Pass& pass, const Growth& growth, const GrownTrees& grown,
           const DraftSteps& steps, int num_threads)
      : target_(target),
        pass_(pass),
        growth_(growth),
        grown_(grown),
        steps_(steps),
        num_threads_(num_threads),
        rows_(steps.rows, steps.rows + steps.num_rows),
        ranked_(growth.rows, growth.rows + growth.num_rows),
        fed_(growth.num_rows),
        texts_(growth.num_rows),
        histories_(growth.num_rows),
        new_tokens_(growth.num_rows) {
    growth_.rows = ranked_.data();
    for (size_t t = 0; t < ranked_.size(); t++) {
      const RequestTexts* texts = ranked_[t].texts;
      if (!texts)
        continue;
      texts_[t] = *texts;
      histories_[t].assign(texts->tokens, texts->tokens + texts->num_tokens);
      ranked_[t].texts = &texts_[t];
    }
  }

  // Return the number of steps in which every row has a token. No step follows one after which a row has a stop token or
  // has no tokens left for its tree, or cached text is sure of the next token: a chain of it may be better.
  int64_t run() {
    for (int64_t step = 0; step < steps_.most; step++) {
      const auto begin = std::chrono::steady_clock::now();
      const GrownTrees trees = grown_.at(step, ranked_.size());
      trees.write(Growing(growth_, num_threads_));
      const auto middle = std::chrono::steady_clock::now();
      verify(trees, step);
      const std::chrono::duration<double> draft = middle - begin, rest = std::chrono::steady_clock::now() - middle;
      steps_.seconds[2 * step] = draft.count();
      steps_.seconds[2 * step + 1] = rest.count();
      const int64_t* lengths = lengths_of(step);
      if (std::any_of(lengths, lengths + rows_.size(), [](int64_t length) { return !length; }))
        return step;
      if (!keep(step) || step + 1 == steps_.most || learn_texts())
        return step + 1;
    }
    return steps_.most;
  }

 private:
  // The packed nodes of a step.
  struct Packed {
    std::vector<int64_t> tokens, positions, write_slots, key_slots, parents, rows;
    std::vector<int64_t> first_token{0}, first_key{0}, first_seen{0};
    std::vector<uint8_t> seen;
    std::vector<uint64_t> keys;
  };

  int64_t* lengths_of(int64_t step) const { return steps_.lengths + step * rows_.size(); }
  int64_t* extras_of(int64_t step) const { return steps_.extras + step * rows_.size(); }
  int64_t* paths_of(int64_t step) const { return steps_.paths + step * steps_.most_nodes; }

  // Run the target over all trees, and follow them.
  void verify(const GrownTrees& trees, int64_t step) {
    packed_ = Packed();
    std::vector<float> inverse_temperatures;
    std::vector<Truncation> truncations;
    std::vector<int64_t> firsts(1 + ranked_.size());
    for (size_t t = 0; t < ranked_.size(); t++)
      firsts[t + 1] = firsts[t] + trees.counts[t];
    for (const DraftedRow& row : rows_) {
      const int64_t root_parent = -1;
      if (row.tree < 0)
        pack(row, &root_parent, nullptr, 1);
      else
        pack(row, trees.nodes + firsts[row.tree], trees.nodes + trees.most + firsts[row.tree], trees.counts[row.tree]);
      inverse_temperatures.push_back(row.inverse_temperature);
      truncations.push_back(row.truncation);
    }
    const int64_t count = packed_.tokens.size();
    for (int64_t node = 0; node < count; node++)
      packed_.rows.push_back(node);
    const Walked walked{packed_.first_token.data(),
                        packed_.rows.data(),
                        packed_.parents.data(),
                        packed_.tokens.data(),
                        inverse_temperatures.data(),
                        truncations.data(),
                        packed_.keys.data(),
                        paths_of(step),
                        lengths_of(step),
                        extras_of(step)};
    ScratchLease lease;
    Scratch& scratch = *lease;
    grow(scratch.logits, count * target_.head.out);
    grow(scratch.states, count * target_.width);
    std::vector<float> largest(count);
    std::vector<int64_t> likeliest(count);
    Pass pass = pass_;
    pass.num_tokens = pass.num_rows = count;
    pass.token_ids = packed_.tokens.data();
    pass.positions = packed_.positions.data();
    pass.write_slots = packed_.write_slots.data();
    pass.segments = {(int64_t)rows_.size(),      packed_.first_token.data(), packed_.first_key.data(),
                     packed_.first_token.data(), packed_.first_seen.data(),  packed_.key_slots.data(),
                     packed_.positions.data(),   packed_.seen.data()};
    pass.rows = packed_.rows.data();
    pass.states = scratch.states.data();
    pass.logits = scratch.logits.data();
    pass.largest = largest.data();
    pass.likeliest = likeliest.data();
    pass.walked = &walked;
    pass.num_trees = rows_.size();
    decode(target_, pass, num_threads_);
  }

  // Add a row's tree as a segment, whose tail is the tree.
  void pack(const DraftedRow& row, const int64_t* parents, const int64_t* tokens, int64_t count) {
    const size_t first = packed_.seen.size();
    std::vector<int64_t> depths(count);
    packed_.seen.resize(first + count * count);
    for (int64_t node = 0; node < count; node++) {
      uint8_t* seen = packed_.seen.data() + first + node * count;
      if (node) {
        depths[node] = depths[parents[node]] + 1;
        std::copy_n(seen + (parents[node] - node) * count, count, seen);
      }
      seen[node] = 1;
      packed_.tokens.push_back(node ? tokens[node] : row.root_token);
      packed_.parents.push_back(parents[node]);
      packed_.positions.push_back(row.root_position + depths[node]);
      packed_.keys.push_back(token_key(row.seed, row.root_position + node + 1));  // of the depth with this number
    }
    const int64_t *root = row.slots + row.root_position, *end = root + count;
    packed_.write_slots.insert(packed_.write_slots.end(), root, end);
    packed_.key_slots.insert(packed_.key_slots.end(), static_cast<const int64_t*>(row.slots), end);
    packed_.first_token.push_back(packed_.tokens.size());
    packed_.first_key.push_back(packed_.key_slots.size());
    packed_.first_seen.push_back(packed_.seen.size());
  }

  // Move the rows behind their paths. Return whether all of them can have another step.
  bool keep(int64_t step) {
    bool may_continue = true;
    growth_.fed_rows = fed_.data();
    growth_.num_fed_rows = fed_.size();
    for (size_t b = 0; b < rows_.size(); b++) {
      DraftedRow& row = rows_[b];
      const int64_t first = packed_.first_token[b], count = packed_.first_token[b + 1] - first,
                    length = lengths_of(step)[b], *path = paths_of(step) + first;
      std::vector<int64_t> tokens;
      for (int64_t i = 1; i < length; i++)
        tokens.push_back(packed_.tokens[first + path[i]]);
      tokens.push_back(extras_of(step)[b]);
      put_first(row.slots + row.root_position, count, path, length);
      row.root_position += length;
      row.root_token = tokens.back();
      row.num_remaining -= length;
      const int64_t* stops = row.stop_token_ids;
      const bool is_stopped =
          std::find_first_of(tokens.begin(), tokens.end(), stops, stops + row.num_stops) != tokens.end();
      may_continue &= !is_stopped && row.num_remaining > (row.tree < 0 ? 0 : 1);
      if (row.tree < 0)
        continue;
      RankedRow& ranked = ranked_[row.tree];
      ranked.root_position = row.root_position;
      ranked.depth = std::min(ranked.depth, row.num_remaining - 1);
      std::vector<int64_t>& fed = new_tokens_[row.tree] = std::move(tokens);
      fed_[row.tree] = {(int64_t)fed.size(), row.root_position + 1 - length, fed.data(), row.slots, row.tree};
    }
    return may_continue;
  }

  // Reorder a tree's slots: first the path's, which ascends.
  static void put_first(int64_t* slots, int64_t count, const int64_t* path, int64_t length) {
    const std::vector<int64_t> old(slots, slots + count);
    for (int64_t i = 0; i < length; i++)
      *slots++ = old[path[i]];
    for (int64_t node = 0; node < count; node++)
      if (!std::binary_search(path, path + length, node))
        *slots++ = old[node];
  }

  // Have cached text learn the new tokens. Return whether it is sure of the next token of a row.
  bool learn_texts() {
    bool is_sure = false;
    for (size_t t = 0; t < ranked_.size(); t++) {
      if (!ranked_[t].texts)
        continue;
      std::vector<int64_t>& history = histories_[t];
      history.insert(history.end(), new_tokens_[t].begin(), new_tokens_[t].end());
      RequestTexts& texts = texts_[t];
      texts.tokens = history.data();
      texts.num_tokens = history.size();
      texts.num_new += new_tokens_[t].size();  // those before the first step are not learned either
      steps_.num_learned[t] += texts.num_new;
      is_sure |= (bool)(steps_.is_sure[t] = learn(texts));
      texts.num_new = 0;
    }
    return is_sure;
  }

  const Decoder& target_;
  const Pass& pass_;
  Growth growth_;
  const GrownTrees& grown_;
  const DraftSteps& steps_;
  const int num_threads_;
  std::vector<DraftedRow> rows_;
  std::vector<RankedRow> ranked_;
  std::vector<FedRow> fed_;  // of the steps after the first
  std::vector<RequestTexts> texts_;
  std::vector<std::vector<int64_t>> histories_, new_tokens_;
  Packed packed_;
};

}  // namespace latebranch
