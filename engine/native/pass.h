// One pass of a decoder over packed tokens. Pointers belong to the caller, who keeps what they point at.
#pragma once
#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "numbers.h"
#include "team.h"

namespace latebranch {

constexpr int64_t kTokensTogether = 16;  // of a segment, that read its keys together, at most
constexpr int64_t kFewestTogether = 2;   // for which they are not read more often, so that no thread waits

struct Layer {
  Linear query, key, value, output, gate, up, down;
  const float *attention_norm, *after_attention_norm, *mlp_norm, *after_mlp_norm;  // the second and the last or null
  const float *query_norm, *key_norm;                                              // or null
  int64_t window;                                                                  // 0: none
  int64_t rotation;                                                                // which of a pass's rotations
};

// The layers that a token goes through before attention, as one run of blocks; without queries, where no token attends.
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

  // Which layer a block is of, and which of its blocks.
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

// A model, or a draft head: that is given a state for each token, which its first layer reads beside the token's
// embedding, each normed by itself. `attention_norm` of that layer has the token's weights first.
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

// What a draft head reads of a model's tokens: a layer of a token's states after some layers side by side, each scaled
// to a mean square of 1. A model's pass keeps the states of each token in its slot; the head makes a feature of them
// when it is fed the next.
struct Features {
  Linear linear;
  int64_t num_states;
  const int64_t* after;  // [num_states]: l: after layer l; num_layers: after the last norm
  float eps;
  Half* kept;  // [S, linear.in]

  // Keep the i-th state of the token in a slot; `room` is as wide as it.
  void keep(int64_t i, int64_t slot, const float* state, int64_t width, float* room) const {
    rms_norm(state, nullptr, eps, width, room);
    store_row(room, width, kept + slot * linear.in + i * width);
  }
};

struct Pass {
  int64_t num_tokens, num_rows;
  const int64_t *token_ids, *positions, *write_slots;
  float* pool;  // of a draft head, a state a slot [S, width]: what the last layer makes of the tokens whose logits are
                // wanted
  const int64_t* before;  // [T] each token is given the state of this slot; with `features` that of what is kept there
  Segments segments;
  void *const *keys, *const *values;           // pools of each layer [kv heads, S, size], float32 or float16
  int64_t apart;                               // numbers from a head's part of a pool to the next one's
  const float *const *cosines, *const *sines;  // of each rotation [positions, size]
  const int64_t* rows;                         // [num_rows] whose logits are wanted
  float* states;                               // [num_rows, width]: what the head reads
  float* logits;                               // [num_rows, V]
  float* largest;                              // [num_rows] of a row's logits, NaN if any is; or null
  int64_t* likeliest;                          // [num_rows] the first token that has it
  float* const* kept;        // [num_layers + 1]: states after each layer [T, width], or null; the last: after its norm
  const Features* features;  // of a model: to be kept of all tokens; of a head: to be given to them; or null
  int64_t is_cached_in_half;
};

// The largest logit of a row among those that a thread has made.
struct Largest {
  float value = -std::numeric_limits<float>::infinity();
  int64_t token = std::numeric_limits<int64_t>::max();
  bool is_broken = false;  // whether any logit is NaN

  // Of `count` logits side by side, from token `first` on; where several are largest the first token is kept. Most
  // blocks have no larger one, and are not searched: `likeliest` of each takes a twentieth of a compact pass of 16
  // tokens longer.
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
  std::vector<std::vector<float>> normed;  // of each thread
  Inputs inputs;
  std::vector<Attention> attention;           // of each thread
  std::vector<std::vector<Largest>> largest;  // of each thread and row
  std::vector<float> logits, states, mixed;   // of a draft head that grows trees

  // Make room for a row of so many numbers for each thread.
  void lend_rooms(int num_threads, int64_t size) {
    normed.resize(std::max<size_t>(normed.size(), num_threads));
    for (auto& room : normed)
      grow(room, size);
  }
};

// out [T, linear.out] = the features of what is kept in T slots
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
    kv_width_ = d_.num_kv_heads * d_.head_size;
    q_width_ = d_.num_heads * d_.head_size;
    row_ = q_width_ + 2 * kv_width_;
    grow(s_.x, T * d_.width);
    grow(s_.qkv, T * row_);
    grow(s_.attended, T * q_width_);
    grow(s_.hidden, T * d_.inner);
    grow(s_.branch, T * d_.width);
    s_.attention.resize(std::max<size_t>(s_.attention.size(), num_threads));
    if (p_.largest)
      s_.largest.assign(num_threads, std::vector<Largest>(p_.num_rows));
    s_.lend_rooms(num_threads, std::max(2 * d_.width, p_.features ? p_.features->linear.in : 0));
    s_.inputs.begin(std::max(T, p_.num_rows));  // a row may be asked for twice
    if (d_.is_head())
      s_.inputs.reserve(d_.token);
    for (int64_t l = 0; l < d_.num_layers; l++)
      for (const Linear* one : {&d_.layers[l].query, &d_.layers[l].output, &d_.layers[l].gate, &d_.layers[l].down})
        s_.inputs.reserve(*one);
    s_.inputs.reserve(d_.head);
    keeps_last_ = p_.kept[d_.num_layers];
    if (const Features* f = p_.features) {
      if (d_.is_head()) {
        s_.inputs.reserve(f->linear);
      } else {
        keeps_last_ |= std::count(f->after, f->after + f->num_states, d_.num_layers) > 0;
      }
    }
    int64_t together = kTokensTogether;
    make_spans(together);
    while (together > kFewestTogether && would_wait(num_threads))
      make_spans(together /= 2);
    if (!wants_all())
      find_last(together);
  }

  void work(Worker& worker) {
    if (d_.is_head()) {
      begin_head(worker);
    } else {
      begin_model(worker);
    }
    Going going{s_.x.data(), p_.num_tokens};
    for (int64_t l = 0; l < d_.num_layers; l++) {
      const Layer& layer = d_.layers[l];
      const bool is_last = l + 1 == d_.num_layers;
      if (p_.is_cached_in_half) {
        write(worker, l, (Half*)p_.keys[l], (Half*)p_.values[l]);
        going = attend(worker, l, (Half*)p_.keys[l], (Half*)p_.values[l]);
      } else {
        write(worker, l, (float*)p_.keys[l], (float*)p_.values[l]);
        going = attend(worker, l, (float*)p_.keys[l], (float*)p_.values[l]);
      }
      const float* after = layer.after_attention_norm;
      expect(worker, layer.gate);
      add(worker, layer.output, going, after);
      worker.each(going.count, [&](int64_t t) {
        if (after)
          add_normed(worker, going, t, after);
        read(worker, going, t, layer.mlp_norm, layer.gate);
      });
      expect(worker, layer.down);
      gate(worker, layer, going.count);
      worker.each(going.count, [&](int64_t t) { s_.inputs.set(t, s_.hidden.data() + t * d_.inner, layer.down); });
      if (is_last) {
        expect(worker, d_.head);
      } else {
        expect(worker, projections(l + 1));
      }
      add(worker, layer.down, going, layer.after_mlp_norm);
      if (is_last && is_trimmed_ && !layer.after_mlp_norm)
        continue;
      worker.each(going.count, [&](int64_t t) {
        if (layer.after_mlp_norm)
          add_normed(worker, going, t, layer.after_mlp_norm);
        if (is_last && is_trimmed_)
          return;  // nobody keeps what it is
        const float* x = going.x + t * d_.width;
        keep(worker, l, t, x);
        if (!is_last) {
          read(worker, going, t, d_.layers[l + 1].attention_norm, d_.layers[l + 1].query);
        } else if (keeps_last_) {
          float* normed = s_.normed[worker.id].data();
          rms_norm(x, d_.last_norm, d_.eps, d_.width, normed);
          keep(worker, l + 1, t, normed);
        }
      });
    }
    worker.each(p_.num_rows, [&](int64_t n) {
      float* state = p_.states + n * d_.width;
      const float* x = going.x + (is_trimmed_ ? place_in_last(p_.rows[n]) : p_.rows[n]) * d_.width;
      if (p_.pool)
        std::copy(x, x + d_.width, p_.pool + p_.write_slots[p_.rows[n]] * d_.width);
      rms_norm(x, d_.last_norm, d_.eps, d_.width, state);
      s_.inputs.set(n, state, d_.head);
    });
    if (p_.largest) {
      logits(worker);
    } else {
      all_outputs(worker, d_.head, s_.inputs, p_.num_rows, p_.logits, false);
    }
  }

  // When all are through: tell of the likeliest tokens.
  void finish() {
    for (int64_t n = 0; p_.largest && n < p_.num_rows; n++) {
      Largest all;
      for (const auto& of_thread : s_.largest)
        all.see(of_thread[n]);
      p_.largest[n] = all.is_broken ? std::numeric_limits<float>::quiet_NaN() : all.value;
      p_.likeliest[n] = all.is_broken ? 0 : all.token;
    }
  }

 private:
  // Tokens that go on through a layer: all of them, or behind the last layer's keys and values those whose states
  // anybody reads.
  struct Going {
    float* x;  // [count, width]
    int64_t count;
  };

  // The output head, and of each row the likeliest token while its logits are near.
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

  // Note a token's state after so many layers for whoever wants it.
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
      read(worker, {s_.x.data(), p_.num_tokens}, t, d_.layers[0].attention_norm, d_.layers[0].query);
    });
  }

  // The states that tokens are given go to `x`.
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

  void read(Worker& worker, const Going& going, int64_t t, const float* norm, const Linear& linear) {
    float* normed = s_.normed[worker.id].data();
    rms_norm(going.x + t * d_.width, norm, d_.eps, d_.width, normed);
    s_.inputs.set(t, normed, linear);
  }

  // Have the block that a thread's share of a later phase begins with fetched while it waits for others.
  template <typename Blocks>
  static void expect(Worker& worker, const Blocks& blocks) {
    const int64_t count = blocks.num_blocks(), first = worker.first_of(count);
    if (first < count)
      worker.expect(blocks.block(first), blocks.block_bytes());
  }

  // x += layer(inputs); if a norm comes between, its input is left in `branch`.
  void add(Worker& worker, const Linear& linear, const Going& going, const float* norm) {
    all_outputs(worker, linear, s_.inputs, going.count, norm ? s_.branch.data() : going.x, !norm);
  }

  void add_normed(Worker& worker, const Going& going, int64_t t, const float* norm) {
    float* normed = s_.normed[worker.id].data();
    rms_norm(s_.branch.data() + t * d_.width, norm, d_.eps, d_.width, normed);
    add_to(going.x + t * d_.width, normed, d_.width);
  }

  // What a layer's tokens go through before attention; where none goes on they need no queries.
  Projections projections(int64_t l) const {
    return {d_.layers[l], !(l + 1 == d_.num_layers && is_trimmed_ && last_.empty())};
  }

  // Make a layer's queries, keys and values; keep the keys and values.
  template <typename Cached>
  void write(Worker& worker, int64_t l, Cached* keys, Cached* values) {
    const Layer& layer = d_.layers[l];
    const Projections parts = projections(l);
    const int64_t begins[] = {0, q_width_, q_width_ + kv_width_};
    expect(worker, layer.output);
    each_block(worker, p_.num_tokens, parts.num_blocks(), [&](int64_t panel, int64_t b, int64_t next) {
      const auto [part, own] = parts.place(b);
      const char* following = next < 0 ? nullptr : parts.block(next);
      linear_task(parts[part], s_.inputs, p_.num_tokens, panel, own, following, s_.qkv.data() + begins[part], row_,
                  false);
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
        const int64_t place = h * p_.apart + p_.write_slots[t] * d_.head_size;
        const float* key = qkv + q_width_ + h * d_.head_size;
        store_row(key, d_.head_size, keys + place);
        store_row(key + kv_width_, d_.head_size, values + place);
      }
    });
  }

  // Attend to a layer's keys and values; return who goes on.
  template <typename Cached>
  Going attend(Worker& worker, int64_t l, Cached* keys, Cached* values) {
    const Layer& layer = d_.layers[l];
    const bool is_trimmed = l + 1 == d_.num_layers && is_trimmed_;
    const std::vector<Span>& spans = is_trimmed ? last_spans_ : spans_;
    const Heads heads{d_.num_heads, d_.num_kv_heads, d_.head_size, p_.apart, d_.scaling, layer.window};
    worker.each(spans.size() * d_.num_kv_heads, [&](int64_t task) {
      const Span span = spans[task / d_.num_kv_heads];
      s_.attention[worker.id].run(p_.segments, heads, span.segment, task % d_.num_kv_heads, span.begin, span.end,
                                  p_.positions, keys, values, s_.qkv.data(), row_, s_.attended.data());
    });
    const Going going = is_trimmed ? Going{s_.last.data(), (int64_t)last_.size()} : Going{s_.x.data(), p_.num_tokens};
    worker.each(going.count, [&](int64_t i) {
      const int64_t t = is_trimmed ? last_[i] : i;
      if (is_trimmed)
        std::copy_n(s_.x.data() + t * d_.width, d_.width, going.x + i * d_.width);
      s_.inputs.set(i, s_.attended.data() + t * q_width_, layer.output);
    });
    return going;
  }

  void gate(Worker& worker, const Layer& layer, int64_t num_tokens) {
    each_block(worker, num_tokens, layer.gate.num_blocks(), [&](int64_t panel, int64_t b, int64_t next) {
      gate_task(layer, num_tokens, panel, b, next < 0 ? nullptr : layer.gate.block(next));
    });
  }

  void gate_task(const Layer& layer, int64_t num_tokens, int64_t panel, int64_t b, const char* next) {
    float gate[kPartRows * kBlock];
    each_part(layer.gate, num_tokens, panel, [&](const Part& part) {
      part_outputs(layer.gate, s_.inputs, part, b, part.is_first ? layer.up.block(b) : nullptr,
                   [&](int r, int column, Mask, Floats v) {
                     store(gate + r * kBlock + column, d_.activation == kSiLU ? silu(v) : gelu_tanh(v));
                   });
      float* hidden = s_.hidden.data() + part.row * d_.inner + b * kBlock;
      part_outputs(layer.up, s_.inputs, part, b, part.is_last ? next : nullptr,
                   [&](int r, int column, Mask m, Floats v) {
                     store(hidden + r * d_.inner + column, m, load(gate + r * kBlock + column) * v);
                   });
    });
  }

  // Tokens of a segment that read its keys together.
  struct Span {
    int64_t segment, begin, end;
  };

  // Whether more than a sixth of all threads' time would go by with no head of a span left to attend to.
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

  // Whether the states of all tokens after the last layer are wanted, and not only of those whose logits are.
  bool wants_all() const {
    const Features* f = d_.is_head() ? nullptr : p_.features;
    return keeps_last_ || p_.kept[d_.num_layers - 1] ||
           (f && std::count(f->after, f->after + f->num_states, d_.num_layers - 1));
  }

  // Who goes on behind the last layer's keys and values, if not all do.
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
  const Pass& p_;
  Scratch& s_;
  int64_t kv_width_, q_width_, row_;
  bool keeps_last_;  // whether anybody wants states after the last norm
  std::vector<Span> spans_;
  bool is_trimmed_ = false;  // whether only some tokens go on behind the last layer's keys and values:
  std::vector<int64_t> last_;
  std::vector<Span> last_spans_;
};

// Scratch is lent to one pass at a time; passes side by side (a draft model's, an audit's) get one each. It is this
// library's own: an inline variable would be shared with one compiled for other instructions, whose layout is another.
namespace {
std::mutex scratch_mutex;
std::vector<std::unique_ptr<Scratch>> scratch_free;
}  // namespace

class LentScratch {
 public:
  LentScratch() {
    std::lock_guard<std::mutex> hold(scratch_mutex);
    if (scratch_free.empty())
      scratch_free.push_back(std::make_unique<Scratch>());
    scratch_ = std::move(scratch_free.back());
    scratch_free.pop_back();
  }
  ~LentScratch() {
    std::lock_guard<std::mutex> hold(scratch_mutex);
    scratch_free.push_back(std::move(scratch_));
  }
  Scratch& operator*() { return *scratch_; }

 private:
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace latebranch
