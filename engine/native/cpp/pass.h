// One pass of a decoder over packed tokens. The caller owns all memory that pointers refer to.
//
//   embeddings (a model), or slot states and embeddings (a draft head)
//     |
//     x [T, width] --- norm --- query, key, value --- rotate --+--- keys and values to slots
//     |                                                        |
//     + <------------------ output --- attended [T, heads] ----+    (attention.h)
//     |
//     + <------------------ down --- hidden = activation(gate) * up --- norm
//     |
//     next layer
//     |
//     rows with requested logits --- norm --- states [num_rows, width] --- head --- logits [num_rows, V]
//     |
//     paths of trees whose tokens the logits choose    (walk.h)
//
// Each step is a phase of a team of threads (team.h); linear layers are phases of panels and blocks (linear.h). After
// the last layer's keys and values only the rows with requested states continue ("trimmed").
#pragma once
#include <algorithm>
#include <initializer_list>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "low_rank.h"
#include "numbers.h"
#include "team.h"
#include "walk.h"

namespace latebranch {

constexpr int64_t kTokensTogether = 64;    // tokens of a segment that read its keys together, if there are as many,
constexpr int64_t kQueriesTogether = 384;  // or more, up to as many queries of a key-value head
constexpr int64_t kFewestTogether = 2;     // with fewer, keys are read too often, even if threads would be idle

struct Layer {
  Linear query, key, value, output, gate, up, down;
  const float *attention_norm, *after_attention_norm, *mlp_norm, *after_mlp_norm;  // the second and the last or null
  const float *query_norm, *key_norm;                                              // or null
  int64_t window;                                                                  // 0: none
  int64_t rotation;                                                                // which of a pass's rotations
};

// The layers before attention as one sequence of blocks; without queries if no token attends.
class Projections {
 public:
  enum Part : int64_t { kQuery, kKey, kValue, kEnd };

  Projections(const Layer& layer, bool has_queries)
      : parts_{&layer.query, &layer.key, &layer.value}, first_(has_queries ? kQuery : kKey) {}

  bool has_queries() const { return first_ == kQuery; }
  int64_t num_blocks() const {
    int64_t count = 0;
    for (int64_t part = first_; part < kEnd; part++)
      count += parts_[part]->num_blocks();
    return count;
  }
  const char* block(int64_t b) const {
    const auto [part, own] = place(b);
    return parts_[part]->block(own);
  }
  int64_t block_bytes() const { return parts_[first_]->block_bytes(); }
  const Linear& operator[](int64_t part) const { return *parts_[part]; }

  // The layer of a block, and the block's index in it.
  std::pair<int64_t, int64_t> place(int64_t b) const {
    int64_t part = first_;
    while (b >= parts_[part]->num_blocks())
      b -= parts_[part++]->num_blocks();
    return {part, b};
  }

 private:
  const Linear* parts_[kEnd];
  int64_t first_;
};

enum Activation : int64_t { kSiLU = 0, kGeluTanh = 1 };

// A model or a draft head. A head reads a state for each token: its first layer's input is the token's embedding and
// that state, each normed by itself. `attention_norm` of that layer has the embedding's weights first.
struct Decoder {
  int64_t num_layers, width, num_heads, num_kv_heads, head_size, inner, activation;
  int64_t embedding_width;  // of `embeddings`; a model's own width
  float eps, scaling, embedding_scale;
  const float* embeddings;  // [V, embedding_width]
  const float* last_norm;
  const Layer* layers;
  Linear head;
  Linear token;  // of a draft head: embedding_width to width

  bool is_head() const { return token.exists(); }
};

// A draft head's features of a model's tokens: a linear layer of the concatenated states after some layers, each scaled
// to a mean square of 1. A model's pass stores the states of each token in its slot. The head computes the feature when
// it is fed the next token.
struct Features {
  Linear linear;
  int64_t num_states;
  const int64_t* after;  // [num_states]: l: after layer l; num_layers: after the last norm
  float eps;
  Half* kept;  // [S, linear.in]

  // Store the i-th state of the token in a slot; `buffer` has the size of the state.
  void keep(int64_t i, int64_t slot, const float* state, int64_t width, float* buffer) const {
    rms_norm(state, nullptr, eps, width, buffer);
    store_row(buffer, width, kept + slot * linear.in + i * width);
  }
};

// Where slots are in a head's part of the pools, in rows of the head's size.
struct Blocks {
  int64_t bits;  // a block has 2^bits slots
  int64_t gap;   // rows from a block's end to the next one's begin

  int64_t row_of(int64_t slot) const { return slot + (slot >> bits) * gap; }
};

struct Pass {
  int64_t num_tokens, num_rows;
  const int64_t *token_ids, *positions, *write_slots;
  float* pool;            // of a draft head: states by slot [S, width], written for the requested rows
  const int64_t* before;  // [T] of a draft head: the slot whose state, or feature, each token reads
  Segments segments;
  void *const *keys, *const *values;  // pools of each layer, blocks of [kv heads, slots, size], float32 or float16
  int64_t head_stride;                // numbers from a head's part of a block to the next head's
  Blocks blocks;
  const float *const *cosines, *const *sines;  // of each rotation [positions, size]
  const int64_t* rows;                         // [num_rows] tokens whose logits are requested
  float* states;                               // [num_rows, width]: inputs of the output head
  float* logits;                               // [num_rows, V]
  float* largest;                              // [num_rows] largest logit of a row, NaN if any is NaN; or null
  int64_t* likeliest;                          // [num_rows] the first token with the largest logit
  float* const* kept;        // [num_layers + 1]: states after each layer [T, width], or null; the last: after its norm
  const Features* features;  // of a model: stored for all tokens; of a head: its inputs; or null
  int64_t is_cached_in_half;
  const AdaptedLayer* const* adapters;  // [T] of a model: the layers of each token's adapter, or null; null if none has
  int64_t most_rank;                    // of the adapters
  const Walked* walked;                 // trees to follow by the logits, which need `largest`
  int64_t num_trees;
};

// The largest logit of a row that a thread has computed.
struct Largest {
  float value = -std::numeric_limits<float>::infinity();
  int64_t token = std::numeric_limits<int64_t>::max();
  bool is_broken = false;  // whether any logit is NaN

  // Observe `count` contiguous logits, from token `first` on; among equal logits the first token counts. Most blocks
  // have no larger logit, and are not searched for its place.
  void see(const float* logits, int64_t first, int64_t count) {
    const Floats none = spread(-std::numeric_limits<float>::infinity());
    Floats most_of = none;
    Where broken = nowhere();
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats x = load(none, lanes_left(count - i), logits + i);
      broken = broken | is_nan(x);
      most_of = larger(most_of, x);
    }
    const float found = most(most_of);
    if (bits(broken)) {
      is_broken = true;
    } else if (found > value || (found == value && first < token)) {
      value = found;
      token = first + (std::find(logits, logits + count, found) - logits);
    }
  }

  void see(const Largest& other) {
    is_broken |= other.is_broken;
    if (other.value > value || (other.value == value && other.token < token)) {
      value = other.value;
      token = other.token;
    }
  }
};

struct Scratch {
  std::vector<float> x, last, qkv, attended, hidden, branch;
  std::vector<float> given, inner;  // of rows under adapters: a layer's inputs, and their products with `a`
  std::vector<int64_t> key_rows;
  std::vector<std::vector<float>> normed;  // of each thread
  Inputs inputs;
  std::vector<Attention> attention;           // of each thread
  std::vector<std::vector<Largest>> largest;  // of each thread and row
  std::vector<float> logits, states, mixed;   // of a draft head that grows trees

  // Allocate a row of `size` numbers for each thread.
  void reserve_threads(int num_threads, int64_t size) {
    normed.resize(std::max<size_t>(normed.size(), num_threads));
    for (auto& row : normed)
      grow(row, size);
  }
};

// out [T, linear.out] = the features of the states in T slots
inline void fuse(Worker& worker, Scratch& s, const Features& f, const int64_t* slots, int64_t T, float* out) {
  worker.each(T, [&](int64_t t) {
    float* states = s.normed[worker.id].data();
    const Half* kept = f.kept + slots[t] * f.linear.in;
    for (int64_t i = 0; i < f.linear.in; i += kLanes) {
      const Mask m = lanes_left(f.linear.in - i);
      store(states + i, m, load(m, kept + i));
    }
    s.inputs.set(t, states, f.linear);
  });
  all_outputs(worker, f.linear, s.inputs, T, out, false);
}

class Run {
 public:
  Run(const Decoder& decoder, const Pass& pass, Scratch& scratch, int num_threads)
      : d_(decoder), p_(pass), s_(scratch) {
    const int64_t T = p_.num_tokens;
    find_key_rows();
    kv_width_ = d_.num_kv_heads * d_.head_size;
    q_width_ = d_.num_heads * d_.head_size;
    row_ = q_width_ + 2 * kv_width_;
    grow(s_.x, T * d_.width);
    grow(s_.qkv, T * row_);
    grow(s_.attended, T * q_width_);
    grow(s_.hidden, T * d_.inner);
    grow(s_.branch, T * d_.width);
    most_inputs_ = std::max({d_.width, q_width_, d_.inner});
    for (int64_t t = 0; p_.adapters && t < T; t++)
      adapted_.add(p_.adapters[t]);
    if (p_.adapters) {
      grow(s_.given, T * most_inputs_);
      grow(s_.inner, T * kMostParts * p_.most_rank);
    }
    s_.attention.resize(std::max<size_t>(s_.attention.size(), num_threads));
    if (p_.largest)
      s_.largest.assign(num_threads, std::vector<Largest>(p_.num_rows));
    s_.reserve_threads(num_threads, std::max(2 * d_.width, p_.features ? p_.features->linear.in : 0));
    s_.inputs.begin(std::max(T, p_.num_rows));  // a row may be requested twice
    if (d_.is_head())
      s_.inputs.reserve(d_.token);
    for (int64_t l = 0; l < d_.num_layers; l++)
      for (const Linear* linear : {&d_.layers[l].query, &d_.layers[l].output, &d_.layers[l].gate, &d_.layers[l].down})
        s_.inputs.reserve(*linear);
    s_.inputs.reserve(d_.head);
    keeps_last_ = p_.kept[d_.num_layers];
    if (const Features* f = p_.features) {
      if (d_.is_head()) {
        s_.inputs.reserve(f->linear);
      } else {
        keeps_last_ |= std::count(f->after, f->after + f->num_states, d_.num_layers) > 0;
      }
    }
    int64_t together = std::max(kTokensTogether, kQueriesTogether / (d_.num_heads / d_.num_kv_heads));
    make_spans(together);
    while (together > kFewestTogether && would_wait(num_threads))
      make_spans(together /= 2);
    if (!wants_all())
      find_last(together);
  }

  // One thread's part of the pass.
  void work(Worker& worker) {
    if (d_.is_head()) {
      begin_head(worker);
    } else {
      begin_model(worker);
    }
    ActiveRows active = all_rows();
    for (int64_t l = 0; l < d_.num_layers; l++) {
      active = attention_layer(worker, l);
      mlp_layer(worker, l, active);
      finish_layer(worker, l, active);
    }
    output_head(worker, active);
  }

 private:
  // The tokens of a layer: all, or after the last layer's keys and values only those whose states are requested.
  struct ActiveRows {
    float* x;  // [count, width]
    int64_t count;
    const AdaptedRows* adapted;
  };
  ActiveRows all_rows() { return {s_.x.data(), p_.num_tokens, &adapted_}; }

  static constexpr int64_t kMostParts = 3;  // linear layers with the same inputs

  // Set row t of a layer's inputs, and keep it if the row has an adapter.
  void set(const AdaptedRows& adapted, int64_t t, const float* x, const Linear& linear) {
    s_.inputs.set(t, x, linear);
    if (adapted.of(t))
      std::copy_n(x, linear.in, s_.given.data() + t * most_inputs_);
  }

  // Multiply the inputs of rows under adapters with `a` of each of these parts, which have the same inputs.
  void project(Worker& worker, const AdaptedRows& adapted, int64_t l, int64_t in,
               std::initializer_list<AdaptedPart> parts) {
    const int64_t num_rows = adapted.rows.size(), num_groups = p_.most_rank / kRanks;
    worker.each(num_rows ? parts.size() * num_groups * num_rows : 0, [&](int64_t task) {
      const int64_t t = adapted.rows[task % num_rows], group = task / num_rows % num_groups,
                    place = task / num_rows / num_groups;
      const LowRank& low = adapted.of(t)[l].*parts.begin()[place];
      if (group * kRanks < low.rank)
        low.project(s_.given.data() + t * most_inputs_, in, group * kRanks,
                    s_.inner.data() + (t * kMostParts + place) * p_.most_rank + group * kRanks);
    });
  }

  // The terms of a part. `place` is its place among the parts that were projected together.
  Terms terms(const AdaptedRows& adapted, int64_t l, AdaptedPart part, int64_t place = 0) const {
    if (adapted.rows.empty())
      return {};
    return {&adapted, l, part, s_.inner.data() + place * p_.most_rank, kMostParts * p_.most_rank};
  }

  // A layer up to and including attention; returns the active rows, with the inputs of the output layer set.
  ActiveRows attention_layer(Worker& worker, int64_t l) {
    if (!p_.is_cached_in_half)
      return attention_layer<FloatTerms<float>>(worker, l);
    if (!d_.layers[l].query.is_compact())
      return attention_layer<FloatTerms<Half>>(worker, l);
    return has_pair_products() ? attention_layer<PairTerms<true>>(worker, l)
                               : attention_layer<PairTerms<false>>(worker, l);
  }

  template <typename Terms>
  ActiveRows attention_layer(Worker& worker, int64_t l) {
    using Cached = typename Terms::Cached;
    write(worker, l, (Cached*)p_.keys[l], (Cached*)p_.values[l]);
    return attend<Terms>(worker, l, (Cached*)p_.keys[l], (Cached*)p_.values[l]);
  }

  // The rest of a layer, except for the states after it.
  void mlp_layer(Worker& worker, int64_t l, const ActiveRows& active) {
    const Layer& layer = d_.layers[l];
    const float* after = layer.after_attention_norm;
    expect(worker, layer.gate);
    add(worker, l, layer.output, &AdaptedLayer::output, active, after);
    worker.each(active.count, [&](int64_t t) {
      if (after)
        add_normed(worker, active, t, after);
      read(worker, active, t, layer.mlp_norm, layer.gate);
    });
    expect(worker, layer.down);
    gate(worker, l, active);
    worker.each(active.count, [&](int64_t t) { set(*active.adapted, t, s_.hidden.data() + t * d_.inner, layer.down); });
    if (l + 1 == d_.num_layers) {
      expect(worker, d_.head);
    } else {
      expect(worker, projections(l + 1));
    }
    add(worker, l, layer.down, &AdaptedLayer::down, active, layer.after_mlp_norm);
  }

  // Store the states after a layer, and set the inputs of the next one.
  void finish_layer(Worker& worker, int64_t l, const ActiveRows& active) {
    const Layer& layer = d_.layers[l];
    const bool is_last = l + 1 == d_.num_layers, is_trimmed = is_last && is_trimmed_;
    if (is_trimmed && !layer.after_mlp_norm)
      return;
    worker.each(active.count, [&](int64_t t) {
      if (layer.after_mlp_norm)
        add_normed(worker, active, t, layer.after_mlp_norm);
      if (is_trimmed)
        return;
      const float* x = active.x + t * d_.width;
      keep(worker, l, t, x);
      if (!is_last) {
        read(worker, active, t, d_.layers[l + 1].attention_norm, d_.layers[l + 1].query);
      } else if (keeps_last_) {
        float* normed = s_.normed[worker.id].data();
        rms_norm(x, d_.last_norm, d_.eps, d_.width, normed);
        keep(worker, l + 1, t, normed);
      }
    });
  }

  // The last norm and the output head for the requested rows.
  void output_head(Worker& worker, const ActiveRows& active) {
    worker.each(p_.num_rows, [&](int64_t n) {
      float* state = p_.states + n * d_.width;
      const float* x = active.x + (is_trimmed_ ? place_in_last(p_.rows[n]) : p_.rows[n]) * d_.width;
      if (p_.pool)
        std::copy(x, x + d_.width, p_.pool + p_.write_slots[p_.rows[n]] * d_.width);
      rms_norm(x, d_.last_norm, d_.eps, d_.width, state);
      s_.inputs.set(n, state, d_.head);
    });
    if (p_.largest) {
      logits(worker);
      choices(worker);
    } else {
      all_outputs(worker, d_.head, s_.inputs, p_.num_rows, p_.logits, false);
    }
  }

  // Logits, and the likeliest token of each row while its logits are in cache.
  void logits(Worker& worker) {
    const int64_t vocab_size = d_.head.out;
    each_block(worker, p_.num_rows, d_.head.num_blocks(), [&](int64_t panel, int64_t b, int64_t next) {
      linear_task(d_.head, s_.inputs, p_.num_rows, panel, b, next < 0 ? nullptr : d_.head.block(next), p_.logits,
                  vocab_size, false);
      const int64_t first = b * kBlock, count = std::min(kBlock, vocab_size - first),
                    end = std::min(p_.num_rows, (panel + 1) * kPanel);
      for (int64_t n = panel * kPanel; n < end; n++)
        s_.largest[worker.id][n].see(p_.logits + n * vocab_size + first, first, count);
    });
  }

  // The likeliest token of each row, and the trees' paths.
  void choices(Worker& worker) {
    worker.each(p_.num_rows, [&](int64_t n) {
      Largest all;
      for (const auto& of_thread : s_.largest)
        all.see(of_thread[n]);
      p_.largest[n] = all.is_broken ? std::numeric_limits<float>::quiet_NaN() : all.value;
      p_.likeliest[n] = all.is_broken ? 0 : all.token;
    });
    const Tops tops{p_.largest, p_.likeliest};
    worker.each(p_.num_trees, [&](int64_t b) { walk(p_.logits, d_.head.out, *p_.walked, b, tops); });
  }

  // Store a token's state after layer l where it is requested.
  void keep(Worker& worker, int64_t l, int64_t t, const float* state) {
    if (p_.kept[l])
      std::copy(state, state + d_.width, p_.kept[l] + t * d_.width);
    const Features* f = d_.is_head() ? nullptr : p_.features;
    for (int64_t i = 0; f && i < f->num_states; i++)
      if (f->after[i] == l)
        f->keep(i, p_.write_slots[t], state, d_.width, s_.normed[worker.id].data() + d_.width);
  }

  void begin_model(Worker& worker) {
    worker.each(p_.num_tokens, [&](int64_t t) {
      const float* from = d_.embeddings + p_.token_ids[t] * d_.embedding_width;
      float* x = s_.x.data() + t * d_.width;
      for (int64_t i = 0; i < d_.width; i += kLanes) {
        const Mask m = lanes_left(d_.width - i);
        store(x + i, m, load(m, from + i) * spread(d_.embedding_scale));
      }
      read(worker, all_rows(), t, d_.layers[0].attention_norm, d_.layers[0].query);
    });
  }

  // Sets `x` to the states or features that tokens read.
  void begin_head(Worker& worker) {
    if (p_.features)
      fuse(worker, s_, *p_.features, p_.before, p_.num_tokens, s_.x.data());
    worker.each(p_.num_tokens, [&](int64_t t) {
      if (!p_.features) {
        const float* given = p_.pool + p_.before[t] * d_.width;
        std::copy(given, given + d_.width, s_.x.data() + t * d_.width);
      }
      s_.inputs.set(t, d_.embeddings + p_.token_ids[t] * d_.embedding_width, d_.token);
    });
    all_outputs(worker, d_.token, s_.inputs, p_.num_tokens, s_.branch.data(), false);
    worker.each(p_.num_tokens, [&](int64_t t) {
      const float *norm = d_.layers[0].attention_norm, *given = s_.x.data() + t * d_.width;
      float* normed = s_.normed[worker.id].data();
      rms_norm(s_.branch.data() + t * d_.width, norm, d_.eps, d_.width, normed);
      rms_norm(given, norm + d_.width, d_.eps, d_.width, normed + d_.width);
      s_.inputs.set(t, normed, d_.layers[0].query);
    });
  }

  void read(Worker& worker, const ActiveRows& active, int64_t t, const float* norm, const Linear& linear) {
    float* normed = s_.normed[worker.id].data();
    rms_norm(active.x + t * d_.width, norm, d_.eps, d_.width, normed);
    set(*active.adapted, t, normed, linear);
  }

  // Prefetch the first block of the thread's share of a later phase while it waits for other threads.
  template <typename Blocks>
  static void expect(Worker& worker, const Blocks& blocks) {
    const int64_t count = blocks.num_blocks(), first = worker.first_of(count);
    if (first < count)
      worker.expect(blocks.block(first), blocks.block_bytes());
  }

  // x += layer(inputs). If a norm follows the layer, `branch` = layer(inputs) instead.
  void add(Worker& worker, int64_t l, const Linear& linear, AdaptedPart part, const ActiveRows& active,
           const float* norm) {
    project(worker, *active.adapted, l, linear.in, {part});
    all_outputs(worker, linear, s_.inputs, active.count, norm ? s_.branch.data() : active.x, !norm,
                terms(*active.adapted, l, part));
  }

  void add_normed(Worker& worker, const ActiveRows& active, int64_t t, const float* norm) {
    float* normed = s_.normed[worker.id].data();
    rms_norm(s_.branch.data() + t * d_.width, norm, d_.eps, d_.width, normed);
    add_to(active.x + t * d_.width, normed, d_.width);
  }

  // The layers before attention; without queries if no row is active after the keys and values.
  Projections projections(int64_t l) const {
    return {d_.layers[l], !(l + 1 == d_.num_layers && is_trimmed_ && last_.empty())};
  }

  // Compute a layer's queries, keys and values; write keys and values to their slots.
  template <typename Cached>
  void write(Worker& worker, int64_t l, Cached* keys, Cached* values) {
    const Layer& layer = d_.layers[l];
    const Projections parts = projections(l);
    const int64_t begins[] = {0, q_width_, q_width_ + kv_width_};
    const AdaptedPart adapted[] = {&AdaptedLayer::query, &AdaptedLayer::key, &AdaptedLayer::value};
    project(worker, adapted_, l, d_.width, {adapted[0], adapted[1], adapted[2]});
    expect(worker, layer.output);
    each_block(worker, p_.num_tokens, parts.num_blocks(), [&](int64_t panel, int64_t b, int64_t next) {
      const auto [part, own] = parts.place(b);
      const char* following = next < 0 ? nullptr : parts.block(next);
      linear_task(parts[part], s_.inputs, p_.num_tokens, panel, own, following, s_.qkv.data() + begins[part], row_,
                  false, terms(adapted_, l, adapted[part], part));
    });
    worker.each(p_.num_tokens, [&](int64_t t) {
      float* qkv = s_.qkv.data() + t * row_;
      const int64_t turn = p_.positions[t] * d_.head_size;
      const float *cosines = p_.cosines[layer.rotation] + turn, *sines = p_.sines[layer.rotation] + turn;
      for (int64_t h = parts.has_queries() ? 0 : d_.num_heads; h < d_.num_heads + d_.num_kv_heads; h++) {
        float* head = qkv + h * d_.head_size;
        const float* norm = h < d_.num_heads ? layer.query_norm : layer.key_norm;
        if (norm)
          rms_norm(head, norm, d_.eps, d_.head_size, head);
        rotate(head, cosines, sines, d_.head_size);
      }
      for (int64_t h = 0; h < d_.num_kv_heads; h++) {
        const int64_t place = h * p_.head_stride + p_.blocks.row_of(p_.write_slots[t]) * d_.head_size;
        const float* key = qkv + q_width_ + h * d_.head_size;
        store_row(key, d_.head_size, keys + place);
        store_row(key + kv_width_, d_.head_size, values + place);
      }
    });
  }

  // Attend to a layer's keys and values; return the active rows.
  template <typename Terms, typename Cached>
  ActiveRows attend(Worker& worker, int64_t l, Cached* keys, Cached* values) {
    const Layer& layer = d_.layers[l];
    const bool is_trimmed = l + 1 == d_.num_layers && is_trimmed_;
    const std::vector<Span>& spans = is_trimmed ? last_spans_ : spans_;
    const Heads heads{d_.num_heads, d_.num_kv_heads, d_.head_size, p_.head_stride, d_.scaling, layer.window};
    // By head: later tokens of a prompt see more keys, so threads would have different work by spans.
    worker.each(spans.size() * d_.num_kv_heads, [&](int64_t task) {
      const Span span = spans[task % spans.size()];
      s_.attention[worker.id].template run<Terms>(p_.segments, heads, span.segment, task / spans.size(), span.begin,
                                                  span.end, p_.positions, keys, values, s_.qkv.data(), row_,
                                                  s_.attended.data());
    });
    const ActiveRows active =
        is_trimmed ? ActiveRows{s_.last.data(), (int64_t)last_.size(), &last_adapted_} : all_rows();
    worker.each(active.count, [&](int64_t i) {
      const int64_t t = is_trimmed ? last_[i] : i;
      if (is_trimmed)
        std::copy_n(s_.x.data() + t * d_.width, d_.width, active.x + i * d_.width);
      set(*active.adapted, i, s_.attended.data() + t * q_width_, layer.output);
    });
    return active;
  }

  void gate(Worker& worker, int64_t l, const ActiveRows& active) {
    const Layer& layer = d_.layers[l];
    project(worker, *active.adapted, l, d_.width, {&AdaptedLayer::gate, &AdaptedLayer::up});
    const Terms gates = terms(*active.adapted, l, &AdaptedLayer::gate),
                ups = terms(*active.adapted, l, &AdaptedLayer::up, 1);
    each_block(worker, active.count, layer.gate.num_blocks(), [&](int64_t panel, int64_t b, int64_t next) {
      gate_task(layer, active.count, panel, b, next < 0 ? nullptr : layer.gate.block(next), gates, ups);
    });
  }

  void gate_task(const Layer& layer, int64_t num_tokens, int64_t panel, int64_t b, const char* next, const Terms& gates,
                 const Terms& ups) {
    float gate[kPartRows * kBlock];
    each_part(layer.gate, num_tokens, panel, [&](const Part& part) {
      part_outputs(layer.gate, s_.inputs, part, b, part.is_first ? layer.up.block(b) : nullptr,
                   [&](int r, int column, Mask, Floats v) {
                     const Floats x = gates.added(part.row + r, b * kBlock + column, v);
                     store(gate + r * kBlock + column, d_.activation == kSiLU ? silu(x) : gelu_tanh(x));
                   });
      float* hidden = s_.hidden.data() + part.row * d_.inner + b * kBlock;
      part_outputs(layer.up, s_.inputs, part, b, part.is_last ? next : nullptr,
                   [&](int r, int column, Mask m, Floats v) {
                     const Floats x = ups.added(part.row + r, b * kBlock + column, v);
                     store(hidden + r * d_.inner + column, m, load(gate + r * kBlock + column) * x);
                   });
    });
  }

  // Tokens of a segment that read its keys together.
  struct Span {
    int64_t segment, begin, end;
  };

  // Whether attention would leave threads idle for more than a sixth of their time.
  bool would_wait(int64_t num_threads) const {
    const int64_t tasks = spans_.size() * d_.num_kv_heads, idle = (num_threads - tasks % num_threads) % num_threads;
    return 5 * idle > tasks;
  }

  void make_spans(int64_t together) {
    spans_.clear();
    for (int64_t s = 0; s < p_.segments.count; s++) {
      const int64_t end = p_.segments.first_token[s + 1];
      for (int64_t t = p_.segments.first_token[s]; t < end; t += together)
        spans_.push_back({s, t, std::min(t + together, end)});
    }
  }

  // Whether the states of all tokens after the last layer are requested, not only those with logits.
  bool wants_all() const {
    const Features* f = d_.is_head() ? nullptr : p_.features;
    return keeps_last_ || p_.kept[d_.num_layers - 1] ||
           (f && std::count(f->after, f->after + f->num_states, d_.num_layers - 1));
  }

  // Attention reads rows of the pools in place of slots.
  void find_key_rows() {
    const int64_t *slots = p_.segments.key_slots, count = p_.segments.first_key[p_.segments.count];
    grow(s_.key_rows, count);
    std::transform(slots, slots + count, s_.key_rows.begin(),
                   [blocks = p_.blocks](int64_t slot) { return blocks.row_of(slot); });
    p_.segments.key_slots = s_.key_rows.data();
  }

  // Find the rows that are active after the last layer's keys and values, if not all rows are.
  void find_last(int64_t together) {
    last_.assign(p_.rows, p_.rows + p_.num_rows);
    std::sort(last_.begin(), last_.end());
    last_.erase(std::unique(last_.begin(), last_.end()), last_.end());
    is_trimmed_ = (int64_t)last_.size() < p_.num_tokens;
    if (!is_trimmed_)
      return;
    grow(s_.last, last_.size() * d_.width);
    int64_t segment = 0;
    for (int64_t t : last_) {
      if (p_.adapters)
        last_adapted_.add(p_.adapters[t]);
      const bool is_new = t >= p_.segments.first_token[segment + 1];
      while (t >= p_.segments.first_token[segment + 1])
        segment++;
      if (is_new || last_spans_.empty() || last_spans_.back().end < t || t - last_spans_.back().begin >= together) {
        last_spans_.push_back({segment, t, t + 1});
      } else {
        last_spans_.back().end++;
      }
    }
  }

  int64_t place_in_last(int64_t t) const { return std::lower_bound(last_.begin(), last_.end(), t) - last_.begin(); }

  const Decoder& d_;
  Pass p_;  // the caller's, but for `key_slots`
  Scratch& s_;
  int64_t kv_width_, q_width_, row_, most_inputs_;
  bool keeps_last_;  // whether states after the last norm are requested
  std::vector<Span> spans_;
  bool is_trimmed_ = false;  // whether only some rows are active after the last layer's keys and values:
  std::vector<int64_t> last_;
  std::vector<Span> last_spans_;
  AdaptedRows adapted_, last_adapted_;
};

// One pass at a time uses a Scratch; concurrent passes (a draft model's, an audit's) have one each. The list has
// internal linkage: an inline variable would be shared with a library for other instructions, whose layout differs.
namespace {
std::mutex scratch_mutex;
std::vector<std::unique_ptr<Scratch>> scratch_free;
}  // namespace

class ScratchLease {
 public:
  ScratchLease() {
    std::lock_guard<std::mutex> hold(scratch_mutex);
    if (scratch_free.empty())
      scratch_free.push_back(std::make_unique<Scratch>());
    scratch_ = std::move(scratch_free.back());
    scratch_free.pop_back();
  }
  ~ScratchLease() {
    std::lock_guard<std::mutex> hold(scratch_mutex);
    scratch_free.push_back(std::move(scratch_));
  }
  Scratch& operator*() { return *scratch_; }

 private:
  std::unique_ptr<Scratch> scratch_;
};

inline void decode(const Decoder& decoder, const Pass& pass, int num_threads) {
  ScratchLease scratch;
  Run run(decoder, pass, *scratch, num_threads);
  Pool::shared().run(num_threads, [&](Worker& worker) { run.work(worker); });
}

}  // namespace latebranch
