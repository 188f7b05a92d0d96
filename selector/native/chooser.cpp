// What choosing computes over numbers alone, compiled: numpy takes longer to begin than these sums take, most of all right after
// a pass, which has emptied the processor's caches. selector/cost.py, worth.py and allocation.py say the same in numpy, and why.
// All state lies in their arrays. Pointers belong to the caller, who keeps what they point at.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace {

constexpr int64_t kLayout = 2;       // of what Python lays out, where no size tells it
constexpr int64_t kOtherPrices = 9;  // beside those of tokens: of a step, of four things in the rest of it, of four in drafting
constexpr int64_t kMostKnots = 32, kMostPrices = kMostKnots + kOtherPrices;

// What a step runs (engine.policy.StepWork), in its order; expectations need not be whole.
struct Work {
  double rows, tokens, drawn, keys, scores, passes, draft_tokens, rounds;
};

// A cost model's state: seconds of a step, of a token behind each knot, then of what these names say. [K] and [K, K].
struct Costs {
  double *prior, *error, *covariance, *prior_covariance, *prices;
  int64_t* was_clipped;  // of the rest, of drafting
  const double* knots;
  int64_t num_knots;
  double forgetting, noise, most_sigmas, least_factor, forgotten, keys;  // keys and scores are counted by so many

  int64_t num_rest() const { return 1 + num_knots + 4; }
  int64_t num_prices() const { return num_rest() + 4; }
  double step_price() const { return prices[0]; }
  double slope(int64_t knot) const { return prices[1 + knot]; }
  double row() const { return prices[1 + num_knots]; }
  double drawn() const { return prices[2 + num_knots]; }
  double key() const { return prices[3 + num_knots] / keys; }
  double score() const { return prices[4 + num_knots] / keys; }
  double round() const { return prices[5 + num_knots]; }
  double pass(double num_keys) const { return prices[6 + num_knots] + num_keys * (prices[8 + num_knots] / keys); }
  double draft_token() const { return prices[7 + num_knots]; }

  // T(N) less T(1).
  double tokens(double count) const {
    double seconds = 0.0;
    for (int64_t i = 0; i < num_knots && count > knots[i]; i++)
      seconds += slope(i) * ((i + 1 < num_knots ? std::min(count, knots[i + 1]) : count) - knots[i]);
    return seconds;
  }

  double step(const Work& w) const {
    const double rest = step_price() + tokens(w.tokens) + w.rows * row() + w.drawn * drawn() + w.keys * key() + w.scores * score();
    return rest + w.rounds * round() + w.passes * pass(w.keys) + w.draft_tokens * draft_token();
  }

  void forget(double share) {
    const int64_t all = num_prices() * num_prices();
    for (int64_t i = 0; i < all; i++) covariance[i] = covariance[i] * (1.0 - share) + share * prior_covariance[i];
  }

  // Moves prices towards what would have predicted the seconds of a part, whose features are `count` numbers from `first` on.
  void correct(int part, const double* features, int64_t first, int64_t count, double seen) {
    const int64_t n = num_prices();
    double weights[kMostPrices], towards[kMostPrices], scale = 0.0;
    for (int64_t i = 0; i < count; i++) scale += weights[i] = features[i] * prior[first + i];
    if (scale <= 0.0 || !std::isfinite(seen)) return;
    double expected = 1.0, variance = 0.0;
    for (int64_t i = 0; i < count; i++) weights[i] /= scale, expected += weights[i] * error[first + i];
    for (int64_t k = 0; k < n; k++) {
      towards[k] = 0.0;
      for (int64_t i = 0; i < count; i++) towards[k] += covariance[k * n + first + i] * weights[i];
    }
    for (int64_t i = 0; i < count; i++) variance += weights[i] * towards[first + i];
    const double deviation = noise * std::max(expected, least_factor);
    variance += deviation * deviation;
    const double surprise = seen / scale - expected, bound = most_sigmas * std::sqrt(variance);
    const bool is_clipped = std::abs(surprise) > bound;
    if (is_clipped && was_clipped[part]) forget(forgotten);
    was_clipped[part] = is_clipped;
    const double moved = std::min(bound, std::max(-bound, surprise)) / variance;
    for (int64_t k = 0; k < n; k++) {
      error[k] += towards[k] * moved;
      for (int64_t j = 0; j < n; j++) covariance[k * n + j] -= towards[k] / variance * towards[j];
    }
  }

  void learn(const Work& w, double draft_s, double rest_s) {
    double features[kMostPrices];
    forget(1.0 - forgetting);
    features[0] = 1.0;
    for (int64_t i = 0; i < num_knots; i++)
      features[1 + i] = std::max(0.0, (i + 1 < num_knots ? std::min(w.tokens, knots[i + 1]) : w.tokens) - knots[i]);
    double* more = features + 1 + num_knots;
    more[0] = w.rows, more[1] = w.drawn, more[2] = w.keys / keys, more[3] = w.scores / keys;
    correct(0, features, 0, num_rest(), rest_s);
    if (w.passes != 0.0 || w.rounds != 0.0) {
      const double drafting[] = {w.rounds, w.passes, w.draft_tokens, w.passes * w.keys / keys};
      correct(1, drafting, num_rest(), 4, draft_s);
    }
    for (int64_t k = 0; k < num_prices(); k++) prices[k] = prior[k] * std::max(1.0 + error[k], least_factor);
  }
};

// Sums of trees by the least chance that admits a node, the greatest first: of nodes' chances, nodes, rounds and nodes fed.
enum { kChances, kNodes, kRounds, kFed, kSums };

struct Worth {
  int64_t num_chances;                                  // K
  const double *least, *depth, *most_nodes, *start;     // [K], [K], [K], [sums, K]
  double *sums, *trees, *came;                          // of each seat: [sums, K], [K], [2]
  double *kind_sums, *kind_trees, *kind_begun, *kind_came;  // of each kind: [sums, K], [K], [K], [2, K]
  double start_trees, kind_trees_weight, edge, kind_memory, own_memory, came_tokens, came_memory;

  double comes(int64_t kind, int64_t k) const {
    const double* of_kind = kind_came + kind * 2 * num_chances;
    return of_kind[k] / of_kind[num_chances + k];
  }
};

// A tree that has grown: whose, where its nodes and those that were accepted begin, and the rounds that it took.
struct Tree {
  int64_t seat, kind, first, num_nodes, first_accepted, num_accepted, num_rounds;
};

struct Trees {
  const Tree* trees;
  int64_t count;
  const double* least;  // [count, 2]: how likely the nodes are, at least, that each tells of, itself and to its kind
  const double* chances;
  const int64_t *depths, *accepted;
};

// What trees say, added up.
struct Found {
  std::vector<double> sums, came, told;
  int64_t num_trees = 0;

  explicit Found(int64_t k) : sums(kSums * k), came(k), told(k) {}

  void add(const Worth& worth, const Trees& all, const Tree& tree, double least_told, std::vector<int64_t>& order) {
    const int64_t k = worth.num_chances;
    const double* chances = all.chances + tree.first;
    const int64_t* accepted = all.accepted + tree.first_accepted;
    int64_t num_told = 0, deepest = 0, place = 0;
    while (num_told < k && worth.least[num_told] >= least_told) told[num_told++] += 1.0;
    num_trees++;
    order.resize(tree.num_nodes);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return chances[a] > chances[b]; });
    for (int64_t node : order) {
      while (place < k && worth.least[place] > chances[node]) place++;
      if (place >= num_told) break;
      const int64_t depth = all.depths[tree.first + node];
      sums[kChances * k + place] += chances[node];
      sums[kNodes * k + place] += 1.0;
      if (std::find(accepted, accepted + tree.num_accepted, node) != accepted + tree.num_accepted) came[place] += 1.0;
      if (depth >= tree.num_rounds) continue;
      sums[kFed * k + place] += 1.0;
      if (depth > deepest) sums[kRounds * k + place] += (double)(depth - deepest), deepest = depth;
    }
  }

  void add(const Found& other) {
    for (size_t i = 0; i < sums.size(); i++) sums[i] += other.sums[i];
    for (size_t i = 0; i < came.size(); i++) came[i] += other.came[i], told[i] += other.told[i];
    num_trees += other.num_trees;
  }
};

void learn_own(const Worth& worth, const Found& found, int64_t seat, int64_t kind) {
  const int64_t k = worth.num_chances;
  double expected = 0.0, came = 0.0;
  for (int64_t i = 0; i < k; i++) expected += found.sums[i] * worth.comes(kind, i), came += found.came[i];
  const double stays = std::pow(worth.own_memory, (double)found.num_trees);
  double* own = worth.came + 2 * seat;
  own[0] = stays * own[0] + came, own[1] = stays * own[1] + expected;
  for (int64_t i = 0; i < k; i++) {
    const double keeps = std::pow(worth.own_memory, found.told[i]);
    for (int64_t f = 0; f < kSums; f++) {
      double& sum = worth.sums[(seat * kSums + f) * k + i];
      sum = keeps * sum + found.sums[f * k + i];
    }
    double& trees = worth.trees[seat * k + i];
    trees = keeps * trees + found.told[i];
  }
}

void learn_kind(const Worth& worth, const Found& found, int64_t kind) {
  const int64_t k = worth.num_chances;
  const double stays = std::pow(worth.came_memory, (double)found.num_trees);
  double* came = worth.kind_came + kind * 2 * k;
  for (int64_t i = 0; i < k; i++) {
    const double keeps = std::pow(worth.kind_memory, found.told[i]);
    for (int64_t f = 0; f < kSums; f++) {
      double& sum = worth.kind_sums[(kind * kSums + f) * k + i];
      sum = keeps * sum + found.sums[f * k + i];
    }
    double &trees = worth.kind_trees[kind * k + i], &begun = worth.kind_begun[kind * k + i];
    trees = keeps * trees + found.told[i], begun *= keeps;
    came[i] = stays * came[i] + (1.0 - stays) * worth.came_tokens + found.came[i];
    came[k + i] = stays * came[k + i] + (1.0 - stays) * worth.came_tokens + found.sums[i];
  }
}

// What a choice is made from: what each of B rows' M entries would bring and add to the step that runs anyway.
struct Step {
  const Costs* costs;
  const double *tokens, *nodes, *passes, *fed;  // [B, M]
  const uint8_t* is_allowed;                    // [B, M]
  const double *context, *unfed, *draws;        // [B]
  const int64_t *depths, *most_nodes;           // [M]
  const double* levels;  // behind the first, that trees which end by chance have on the mean, by how likely each is to go on
  int64_t num_rows, num_entries, num_levels, is_by_chance;
  Work base;
  double base_tokens, model_share, least_chance;

  double fed_of(int64_t at, int64_t entry, int64_t row) const { return model_share * (fed[at] + (entry ? unfed[row] : 0.0)); }
  // The chance with which a tree of so many expected passes goes on from level to level.
  double odds(double num_passes) const {
    const double more = num_passes - 1.0, last = (double)(num_levels - 1);
    if (!(more > levels[0])) return 0.0;
    if (more >= levels[num_levels - 1]) return 1.0;
    const int64_t above = std::upper_bound(levels, levels + num_levels, more) - levels;
    return ((double)(above - 1) + (more - levels[above - 1]) / (levels[above] - levels[above - 1])) / last;
  }
};

// A step as it is put together, row by row.
struct Sum {
  const Step& step;
  double tokens, nodes = 0.0, drawn = 0.0, scores = 0.0, fed = 0.0, most_passes = 0.0, ends = 1.0;
  int64_t num_more;             // levels behind the first
  std::vector<double> ends_by;  // that no tree reaches each of these

  Sum(const Step& of, int64_t levels_more) : step(of), tokens(of.base_tokens), num_more(levels_more), ends_by(levels_more, 1.0) {}

  void add(int64_t row, int64_t entry, double sign = 1.0) {
    const int64_t at = row * step.num_entries + entry;
    tokens += sign * step.tokens[at], nodes += sign * step.nodes[at], fed += sign * step.fed_of(at, entry, row);
    drawn += sign * step.nodes[at] * step.draws[row], scores += sign * step.nodes[at] * step.context[row];
  }

  void run(int64_t row, int64_t entry) {
    const double passes = step.passes[row * step.num_entries + entry];
    most_passes = std::max(most_passes, passes);
    if (!step.is_by_chance) {
      ends *= 1.0 - std::min(1.0, std::max(0.0, (passes - 1.0) / std::max<double>(1.0, (double)num_more)));
      return;
    }
    if (step.num_rows == 1) return;  // its rounds are those expected of it
    double reaches = 1.0;
    const double goes_on = step.odds(passes);
    for (int64_t level = 0; level < num_more; level++) ends_by[level] *= 1.0 - (reaches *= goes_on);
  }

  double rounds() const {
    if (step.num_rows == 1 && step.is_by_chance) return most_passes;
    double found = std::min(1.0, most_passes);
    if (!step.is_by_chance) return found + (double)num_more * (1.0 - ends);
    for (int64_t level = 0; level < num_more; level++) found += 1.0 - ends_by[level];
    return found;
  }

  double seconds() const {
    Work work = step.base;
    work.tokens += nodes, work.drawn += drawn, work.scores += scores, work.draft_tokens += fed;
    work.rounds = std::max(work.rounds, rounds());
    work.passes = step.model_share * work.rounds;
    return step.costs->step(work);
  }
};

int64_t levels_more(const Step& step, const int64_t* places) {
  if (step.is_by_chance) return std::max<int64_t>(0, step.depths[step.num_entries - 1] - 1);
  int64_t deepest = 0;
  for (int64_t row = 0; row < step.num_rows; row++) deepest = std::max(deepest, step.depths[places[row]]);
  return std::max<int64_t>(0, deepest - 1);
}

Sum sum_of(const Step& step, const int64_t* places) {
  Sum sum(step, levels_more(step, places));
  for (int64_t row = 0; row < step.num_rows; row++) sum.add(row, places[row]), sum.run(row, places[row]);
  return sum;
}

}  // namespace

extern "C" {

// Sizes of what Python lays out, so that it can see whether it was compiled from another version of it.
void selector_sizes(int64_t* sizes) {
  sizes[0] = sizeof(Work), sizes[1] = sizeof(Costs), sizes[2] = sizeof(Worth), sizes[3] = sizeof(Trees), sizes[4] = sizeof(Step);
  sizes[5] = sizeof(Tree) / sizeof(int64_t), sizes[6] = kSums, sizes[7] = kOtherPrices, sizes[8] = kMostKnots, sizes[9] = kLayout;
}

void selector_learn_prices(Costs* costs, const Work* work, double draft_s, double rest_s) { costs->learn(*work, draft_s, rest_s); }

// Learns from trees, all of which are equally recent.
void selector_learn_worth(const Worth* worth, const Trees* trees) {
  struct Of {
    int64_t seat, kind;
    Found own, whole;
  };
  std::vector<Of> seats;
  std::vector<int64_t> order, kinds;
  for (int64_t i = 0; i < trees->count; i++) {
    const Tree& tree = trees->trees[i];
    auto of = std::find_if(seats.begin(), seats.end(), [&](const Of& one) { return one.seat == tree.seat; });
    if (of == seats.end())
      of = seats.insert(of, Of{tree.seat, tree.kind, Found(worth->num_chances), Found(worth->num_chances)});
    of->own.add(*worth, *trees, tree, trees->least[2 * i], order);
    of->whole.add(*worth, *trees, tree, trees->least[2 * i + 1], order);
    if (std::find(kinds.begin(), kinds.end(), tree.kind) == kinds.end()) kinds.push_back(tree.kind);
  }
  for (const Of& one : seats) learn_own(*worth, one.own, one.seat, one.kind);
  for (int64_t kind : kinds) {
    Found all(worth->num_chances);
    for (const Of& one : seats)
      if (one.kind == kind) all.add(one.whole);
    learn_kind(*worth, all, kind);
  }
}

// told [4, B, M]: tokens (the extra one included), nodes, rounds, and nodes fed, of those of M entries that are noise-aware, of which
// entry columns[i] is the one with least chance chances[i].
void selector_expect(
    const Worth* worth, const int64_t* seats, const int64_t* kinds, int64_t num_rows, const int64_t* columns, const int64_t* chances,
    int64_t count, double* told, int64_t num_entries
) {
  const int64_t k = worth->num_chances;
  for (int64_t row = 0; row < num_rows; row++) {
    const int64_t seat = seats[row], kind = kinds[row];
    const double *sums = worth->sums + seat * kSums * k, *trees = worth->trees + seat * k, *came = worth->came + 2 * seat;
    const double *of_kind = worth->kind_sums + kind * kSums * k, *kind_trees = worth->kind_trees + kind * k;
    const double* begun = worth->kind_begun + kind * k;
    double begun_sum = 0.0, grown = 0.0, foretold = 0.0;
    for (int64_t i = 1; i < k; i++)
      begun_sum += worth->start[i], grown += of_kind[i], foretold += worth->start[i] * kind_trees[i];
    begun_sum = worth->start_trees * begun_sum + worth->edge;
    const double scale = (grown + begun_sum) / (foretold + begun_sum);
    const double own_share = (came[0] + worth->came_tokens) / (came[1] + worth->came_tokens);
    double up_to[kSums] = {};
    for (int64_t i = 0, place = 0; i < k && place < count; i++) {
      for (int64_t f = 0; f < kSums; f++) {
        const double usual = (of_kind[f * k + i] + scale * begun[i] * worth->start[f * k + i]) / (kind_trees[i] + begun[i]);
        const double mine = (sums[f * k + i] + worth->kind_trees_weight * usual) / (trees[i] + worth->kind_trees_weight);
        up_to[f] += f == kChances ? mine * worth->comes(kind, i) * own_share : mine;
      }
      if (chances[place] != i) continue;
      double* at = told + row * num_entries + columns[place++];
      const int64_t next = num_rows * num_entries;
      at[0] = 1.0 + std::min(up_to[kChances], worth->depth[i]);
      at[next] = std::min(up_to[kNodes], worth->most_nodes[i]);
      at[2 * next] = std::min(1.0 + up_to[kRounds], worth->depth[i]);
      at[3 * next] = std::min(up_to[kFed], worth->most_nodes[i]);
    }
  }
}

// Whether all that is expected is a finite number.
int64_t selector_is_finite(const Step* step) {
  double all = 0.0;
  for (int64_t i = 0; i < step->num_rows * step->num_entries; i++) all += step->tokens[i] + step->nodes[i] + step->passes[i] + step->fed[i];
  return std::isfinite(all);
}

// tokens, seconds [C]: what is expected of each of C choices, places [C, B]
void selector_price(const Step* step, const int64_t* places, int64_t count, double* tokens, double* seconds) {
  for (int64_t i = 0; i < count; i++) {
    const Sum sum = sum_of(*step, places + i * step->num_rows);
    tokens[i] = sum.tokens, seconds[i] = sum.seconds();
  }
}

// tokens, seconds: what is expected of a choice, places [B], with each of the entries that are asked about for the rows that are. A
// question is how many rows and how many entries, then these.
void selector_try(
    const Step* step, const int64_t* places, const int64_t* asked, int64_t num_questions, double* tokens, double* seconds
) {
  for (int64_t i = 0; i < num_questions; i++) {
    const int64_t num_rows = asked[0], num_entries = asked[1], *rows = asked + 2, *entries = rows + num_rows;
    std::vector<int64_t> changed(places, places + step->num_rows);
    for (int64_t j = 0; j < num_entries; j++) {
      for (int64_t row = 0; row < num_rows; row++) changed[rows[row]] = entries[j];
      const Sum sum = sum_of(*step, changed.data());
      *tokens++ = sum.tokens, *seconds++ = sum.seconds();
    }
    asked = entries + num_entries;
  }
}

// The best choice of one entry for all who may have it, or for those of them first that gain most: places [B], and its tokens and
// seconds.
void selector_best_alike(const Step* step, int64_t* places, double* found) {
  const int64_t num_rows = step->num_rows, num_entries = step->num_entries;
  double best = -std::numeric_limits<double>::infinity();
  std::vector<int64_t> order(num_rows);
  std::vector<double> gains(num_rows);
  const auto consider = [&](const Sum& sum) {
    const double seconds = sum.seconds();
    if (!(sum.tokens / seconds > best)) return false;
    best = sum.tokens / seconds, found[0] = sum.tokens, found[1] = seconds;
    return true;
  };
  if (num_rows == 1) {
    for (int64_t entry = 0; entry < num_entries; entry++)
      if (step->is_allowed[entry] && consider(sum_of(*step, &entry))) places[0] = entry;
    return;
  }
  const std::vector<int64_t> plain(num_rows, 0);
  const Sum nobody = sum_of(*step, plain.data());
  for (int64_t entry = 1; entry < num_entries; entry++) {
    for (int64_t row = 0; row < num_rows; row++) {
      const int64_t at = row * num_entries + entry;
      const double spent = std::max(1e-9, step->nodes[at] + step->fed_of(at, entry, row));
      gains[row] = (step->is_allowed[at] ? step->tokens[at] - 1.0 : -1.0) / spent;
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return gains[a] > gains[b]; });
    Sum sum = nobody;
    if (!step->is_by_chance) sum.num_more = std::max<int64_t>(0, step->depths[entry] - 1);
    for (int64_t count = 0; count < num_rows; count++) {
      const int64_t row = order[count];
      if (step->is_allowed[row * num_entries + entry]) sum.add(row, 0, -1.0), sum.add(row, entry), sum.run(row, entry);
      if (!consider(sum)) continue;
      std::fill(places, places + num_rows, 0);
      for (int64_t i = 0; i <= count; i++)
        if (step->is_allowed[order[i] * num_entries + entry]) places[order[i]] = entry;
    }
  }
}

// What a node and a level more cost in a choice's step, and behind them each tree's first node, its second and so on; returns how
// many of these there are. `spread` are deviations of what the other trees have.
int64_t selector_growth_prices(
    const Step* step, const int64_t* places, double rate, int64_t num_sharing, const double* spread, int64_t num_spread, double* prices
) {
  const Costs& costs = *step->costs;
  const double num_rows = (double)step->num_rows;
  double num_nodes = 0.0, draws = 0.0, context = 0.0;
  int64_t num_drafting = 0, most = 0;
  for (int64_t row = 0; row < step->num_rows; row++) {
    num_nodes += step->nodes[row * step->num_entries + places[row]];
    draws += step->draws[row], context += step->context[row];
    if (places[row]) num_drafting++, most = std::max(most, step->most_nodes[places[row]]);
  }
  const double size = step->base.tokens, all = size + num_nodes;
  const double shared = (costs.drawn() * draws + costs.score() * context) / num_rows;
  const double level = costs.round() + step->model_share * costs.pass(step->base.keys);
  prices[0] = (costs.tokens(all + 1.0) - costs.tokens(all) + shared) * rate;
  prices[1] = (level / (double)std::max<int64_t>(1, num_sharing) + step->model_share * costs.draft_token()) * rate;
  if (!num_drafting) return 0;
  const double own = num_nodes / (double)num_drafting, num_others = (double)(num_drafting - 1);
  const int64_t num_values = num_others > 0.0 ? num_spread : 1;
  std::vector<double> seconds(most + 1);
  for (int64_t z = 0; z < num_values; z++) {
    const double others = num_others > 0.0 ? std::max(0.0, num_others * own + spread[z] * own * std::sqrt(num_others)) : 0.0;
    for (int64_t i = 0; i <= most; i++) seconds[i] += costs.tokens(size + (double)i + others) / (double)num_values;
  }
  // None below the one before: what costs less than what has to be bought first is bought with it, at their mean price.
  std::vector<std::pair<double, int64_t>> blocks;
  for (int64_t i = 0; i < most; i++) {
    double mean = std::max((shared + seconds[i + 1] - seconds[i]) * rate, step->least_chance);
    int64_t count = 1;
    for (; !blocks.empty() && blocks.back().first >= mean; blocks.pop_back()) {
      const int64_t together = blocks.back().second + count;
      mean = (blocks.back().first * (double)blocks.back().second + mean * (double)count) / (double)together, count = together;
    }
    blocks.emplace_back(mean, count);
  }
  double* next = prices + 2;
  for (const auto& [mean, count] : blocks) next = std::fill_n(next, count, mean);
  return most;
}

// Tokens a second of the best number of nodes if every one came and drafting cost nothing.
double selector_ceiling(const Step* step) {
  const double draws = *std::min_element(step->draws, step->draws + step->num_rows);
  const double context = *std::min_element(step->context, step->context + step->num_rows);
  const double most = (double)(step->num_rows * step->depths[step->num_entries - 1]);
  double best = 0.0;
  for (double nodes = 1.0; nodes <= most; nodes += 1.0) {
    Work work = step->base;
    work.tokens += nodes, work.drawn += nodes * draws, work.scores += nodes * context;
    work.passes = step->model_share * work.rounds;
    best = std::max(best, (step->base_tokens + (double)step->num_rows + nodes) / step->costs->step(work));
  }
  return best;
}
}
