// Cached text: which tokens followed each context in texts that grow, how often such matches were right, and the
// mixture of all sources' continuations. engine/draft/text/matching.py and suffix_counts.py define the same in Python.
#pragma once
#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace latebranch {

constexpr int64_t kMostContext = 32;  // tokens of a context that are compared

// A token that followed a context, and how often.
struct Follower {
  int64_t token, count;
};

// The longest known end of a text, and the tokens that followed it. Length 0: none.
struct Match {
  int64_t length = 0;
  std::vector<Follower> followers;

  explicit operator bool() const { return length > 0; }
  int64_t total() const {
    int64_t sum = 0;
    for (const Follower& one : followers)
      sum += one.count;
    return sum;
  }
};

inline void count_token(std::vector<Follower>& followers, int64_t token) {
  for (Follower& one : followers)
    if (one.token == token)
      return void(one.count++);
  followers.push_back({token, 1});
}

// Add the counts of other followers. In linear time: a text can have thousands of followers of one context.
inline void add_counts(std::vector<Follower>& followers, const std::vector<Follower>& others) {
  std::unordered_map<int64_t, size_t> places;
  for (const Follower& one : followers)
    places.emplace(one.token, places.size());
  for (const Follower& one : others) {
    const auto [place, is_new] = places.try_emplace(one.token, followers.size());
    if (is_new)
      followers.push_back(one);
    else
      followers[place->second].count += one.count;
  }
}

// The last tokens of a text, the latest first.
class Ending {
 public:
  void push(int64_t token) {
    std::copy_backward(tokens_, tokens_ + kMostContext - 1, tokens_ + kMostContext);
    tokens_[0] = token;
    size_ = std::min(size_ + 1, kMostContext);
  }
  int64_t size() const { return size_; }
  int64_t operator[](int64_t age) const { return tokens_[age]; }

 private:
  int64_t tokens_[kMostContext] = {}, size_ = 0;
};

// Several texts, of which the last can grow: the suffix tree of the reversed texts, cut at a depth. A node is a context
// that occurred more than once, after different tokens or at the largest depth.
class ContextTree {
 public:
  // Begin another text, whose first token follows `context`.
  void begin(const int64_t* context, int64_t count) {
    text_.push_back(kStart);
    begin_ = text_.size();
    text_.insert(text_.end(), context + std::max<int64_t>(0, count - kMostContext), context + count);
  }

  // Add a token to the last text: count it at every node whose context precedes it.
  void append(int64_t token) {
    const int64_t position = text_.size(), deepest = std::min(position - begin_, kMostContext);
    const auto older = [&](int64_t age) { return text_[position - 1 - age]; };
    for (int64_t node = 0; nodes_[node].depth < deepest;) {
      const int64_t depth = nodes_[node].depth;
      const auto [place, is_new] = children_.try_emplace(key(node, older(depth)), ~position);
      if (is_new)
        break;
      int64_t& child = place->second;  // not the iterator: a new node's entry may invalidate it
      if (child < 0 || nodes_[child].depth > depth + 1)
        child = node_on_edge(child, older, depth + 1, deepest);
      node = child;
      count_token(nodes_[node].followers, token);
    }
    text_.push_back(token);
  }

  // The match of a text's end, if it has at least `least` tokens.
  Match match(const Ending& ending, int64_t least) const {
    const auto older = [&](int64_t age) { return ending[age]; };
    int64_t node = 0, depth = 0;
    while (depth < ending.size()) {
      const auto place = children_.find(key(node, older(depth)));
      if (place == children_.end())
        break;
      depth++;
      if (place->second < 0) {
        const int64_t position = ~place->second;
        depth = common_length(older, position, depth, ending.size());
        return depth < least ? Match() : Match{depth, {{text_[position], 1}}};
      }
      node = place->second;
      const int64_t most = nodes_[node].depth;
      if (depth < most &&
          (depth = common_length(older, nodes_[node].position, depth, std::min(ending.size(), most))) < most)
        break;
    }
    return !depth || depth < least ? Match() : Match{depth, nodes_[node].followers};
  }

 private:
  static constexpr int64_t kStart = -1;  // precedes each text; equals no token

  struct Node {
    int64_t depth, position;  // the context is the `depth` tokens before the position
    std::vector<Follower> followers;
  };

  static uint64_t key(int64_t node, int64_t token) { return (uint64_t)node << 32 | (uint32_t)token; }

  // Tokens that the context before a position shares with another: at least `known`, at most `most`.
  template <typename Older>
  int64_t common_length(Older older, int64_t position, int64_t known, int64_t most) const {
    while (known < most && older(known) == text_[position - 1 - known])
      known++;
    return known;
  }

  // The node where another context leaves the edge to a child, or the child if it reaches it.
  template <typename Older>
  int64_t node_on_edge(int64_t child, Older older, int64_t known, int64_t deepest) {
    const int64_t position = child < 0 ? ~child : nodes_[child].position;
    const int64_t depth =
        common_length(older, position, known, child < 0 ? deepest : std::min(deepest, nodes_[child].depth));
    if (child >= 0 && depth == nodes_[child].depth)
      return child;
    const int64_t next = text_[position - 1 - depth], node = nodes_.size();
    std::vector<Follower> followers{{text_[position], 1}};
    if (child >= 0)
      followers = nodes_[child].followers;
    nodes_.push_back({depth, position, std::move(followers)});
    if (depth < kMostContext && next != kStart)
      children_[key(node, next)] = child;
    return node;
  }

  std::vector<int64_t> text_;
  int64_t begin_ = 0;  // of the last text's context
  std::vector<Node> nodes_{{0, 0, {}}};
  std::unordered_map<uint64_t, int64_t> children_;  // by node and next older token: a node, or ~position after it
};

// Where a text comes from.
enum Source { kPrediction, kOwn, kRecent, kSources };

constexpr int64_t kLengths = 10, kTopShares = 5;  // classes of matches
constexpr int64_t kNumRates = kSources * kLengths * kTopShares * 2;
constexpr int64_t kLengthBounds[kLengths - 1] = {2, 3, 4, 5, 7, 9, 13, 17, 25};
constexpr double kTopShareBounds[kTopShares - 1] = {0.4, 0.6, 0.7, 0.85};

// How often matches agreed with the tokens that followed: `rates` [kSources, kLengths, kTopShares, 2] has decaying sums
// of agreement and of observations, 0 before the first.
class Agreement {
 public:
  explicit Agreement(double* rates) : rates_(rates) {}

  double confidence(Source source, const Match& match) const {
    const Rate rate = rate_of(source, match);
    return std::max(1e-3, std::min(0.99, rate.agreed / rate.observed));
  }

  void observe(Source source, const Match& match, int64_t token) {
    constexpr double kDecay = 0.998;
    const Rate rate = rate_of(source, match);
    double share = 0.0;
    for (const Follower& one : match.followers)
      if (one.token == token)
        share = one.count / (double)match.total();
    rate.place[0] = kDecay * rate.agreed + share;
    rate.place[1] = kDecay * rate.observed + 1.0;
  }

 private:
  struct Rate {
    double* place;
    double agreed, observed;
  };

  Rate rate_of(Source source, const Match& match) const {
    constexpr double kPrior = 12.0, kHalfLengths[kSources] = {1.0, 3.0, 3.0};
    int64_t top = 0;
    for (const Follower& one : match.followers)
      top = std::max(top, one.count);
    const double total = match.total();
    const int64_t by_length =
        std::upper_bound(kLengthBounds, kLengthBounds + kLengths - 1, match.length) - kLengthBounds;
    const int64_t by_share =
        std::upper_bound(kTopShareBounds, kTopShareBounds + kTopShares - 1, top / (1 + total)) - kTopShareBounds;
    double* place = rates_ + 2 * ((source * kLengths + by_length) * kTopShares + by_share);
    if (place[1] > 0.0)
      return {place, place[0], place[1]};
    return {place, kPrior * (top / total) * match.length / (match.length + kHalfLengths[source]), kPrior};
  }

  double* rates_;
};

// The texts of a request, null where it has none, and the tokens at the end of its history.
struct RequestTexts {
  ContextTree *prediction, *prompt, *output, *recent[2];
  int64_t least;  // tokens of a match outside the prediction
  double* rates;  // of Agreement
  double sure;    // confidence from which no model is needed
  const int64_t* tokens;
  int64_t num_tokens, num_new;  // of them, and of the last that are not learned yet
};

// Probabilities of the next token, the confidence in them, and which tokens the client predicted. No tokens: no match.
struct Continuation {
  struct Token {
    int64_t id;
    double prob;
    bool is_predicted;
  };
  std::vector<Token> tokens;
  double confidence = 0.0;
};

struct SourceMatch {
  Source source;
  Match match;
};

inline std::vector<SourceMatch> matches_of(const RequestTexts& texts, const Ending& ending) {
  std::vector<SourceMatch> found;
  const auto matched = [&](const ContextTree* tree, int64_t least) {
    return tree ? tree->match(ending, least) : Match();
  };
  if (Match match = matched(texts.prediction, 1))
    found.push_back({kPrediction, std::move(match)});
  Match prompt = matched(texts.prompt, texts.least), own = matched(texts.output, texts.least);
  if (prompt && prompt.length == own.length) {  // prompt and output are one text
    add_counts(prompt.followers, own.followers);
    own = std::move(prompt);
  } else if (prompt.length > own.length) {
    own = std::move(prompt);
  }
  if (own)
    found.push_back({kOwn, std::move(own)});
  for (const ContextTree* tree : texts.recent)
    if (Match match = matched(tree, texts.least))
      found.push_back({kRecent, std::move(match)});
  return found;
}

// The mixture of the sources' continuations, each weighted by the odds of its confidence.
inline Continuation continuation(const RequestTexts& texts, const Ending& ending) {
  Continuation mixed;
  const std::vector<SourceMatch> found = matches_of(texts, ending);
  std::vector<double> chances, weights;
  double total = 0.0, sum = 0.0;
  for (const SourceMatch& one : found) {
    chances.push_back(Agreement(texts.rates).confidence(one.source, one.match));
    weights.push_back(chances.back() / (1.0 - chances.back()));
    total += weights.back();
    sum += chances.back() * weights.back();
  }
  std::unordered_map<int64_t, size_t> places;  // of tokens, if there are several sources
  for (size_t i = 0; i < found.size(); i++) {
    const double share = weights[i] / total / found[i].match.total();
    for (const Follower& one : found[i].match.followers) {
      const size_t next = mixed.tokens.size(),
                   place = found.size() > 1 ? places.try_emplace(one.token, next).first->second : next;
      if (place == next)
        mixed.tokens.push_back({one.token, 0.0, false});
      mixed.tokens[place].prob += share * one.count;
      mixed.tokens[place].is_predicted |= found[i].source == kPrediction;
    }
  }
  if (total > 0.0)
    mixed.confidence = sum / total;
  return mixed;
}

inline Ending ending_of(const int64_t* tokens, int64_t count) {
  Ending ending;
  for (int64_t i = std::max<int64_t>(0, count - kMostContext); i < count; i++)
    ending.push(tokens[i]);
  return ending;
}

// Learn the new tokens, each with the matches before it. Return whether a source is sure of the token after them.
inline bool learn(const RequestTexts& texts) {
  const int64_t first = texts.num_tokens - texts.num_new;
  Agreement agreement(texts.rates);
  Ending ending = ending_of(texts.tokens, first);
  for (int64_t i = first; i < texts.num_tokens; i++) {
    const int64_t token = texts.tokens[i];
    for (const SourceMatch& one : matches_of(texts, ending))
      agreement.observe(one.source, one.match, token);
    if (texts.output)
      texts.output->append(token);
    ending.push(token);
  }
  for (const SourceMatch& one : matches_of(texts, ending))
    if (agreement.confidence(one.source, one.match) >= texts.sure)
      return true;
  return false;
}

}  // namespace latebranch
