// Tree-masked attention of one layer over slots.
//
// The keys of a segment, by key slot, and the keys that its tokens see (x):
//
//            context: positions 0, 1, 2, ...              tail: the segment's tokens
//            0              16             32       40    41   42   43   44
//   token 0  x x x x x x x  x x x x x x x  x x x x  x     x
//   token 1  x x x x x x x  x x x x x x x  x x x x  x     x    x
//   token 2  x x x x x x x  x x x x x x x  x x x x  x     x         x
//   token 3  x x x x x x x  x x x x x x x  x x x x  x     x    x         x
//            |--- common: whole vectors ---|---- masked: the rest -----------|
//
// All tokens see the common keys, so these are read once for all tokens. Of the masked keys each token keeps those that
// it sees. A window has no common keys if it hides a key from a token.
//
//   scores of a token and head   [ common | its masked keys, without gaps ]
//
// Keys are in the order of positions on a node's path, and scores have no gaps when they are summed. So a node of a
// tree adds the same numbers in the same order as plain decoding. Where the common keys end does not change any sum.
//
// Tokens of a prompt see all keys before them. They are computed with tokens in the lanes of vectors: keys need not be
// transposed, and each key and value is read once for three heads of sixteen tokens. Each number is the same sum in
// the same order.
//
// The output of a token and head, of keys k = 0, 1, ... with scores s (logarithms of base 2, by scaled queries):
//
//   score        even terms of the dot product in order, plus odd terms in order
//   weight(k)    2^(s(k) - largest s), or 0 below 2^-100
//   total        sixteen sums, of weights k = i modulo 16 in order; then halves are added
//   output       sum of weight(k) value(k) in order, divided by the total
//
// A term is a product (`FloatTerms`), or in compact that of a pair of bfloat16 numbers (`PairTerms`): of adjacent numbers
// of a key, or of two keys. A pair's odd product is added first.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "numbers.h"

namespace latebranch {

struct Segments {
  int64_t count;
  const int64_t* first_token;  // [count + 1] packed tokens
  const int64_t* first_key;    // [count + 1] into key_slots
  const int64_t* first_tail;   // [count + 1] into tail_positions
  const int64_t* first_seen;   // [count] into seen
  const int64_t* key_slots;    // context, then tail; where attention runs: the slots' rows in the pools
  const int64_t* tail_positions;
  const uint8_t* seen;  // [tokens, tail] of each segment
};

// Which of 32 numbers, from number d of a row on, exist.
struct Left {
  Mask first, second;
  Left(int64_t size, int64_t d)
      : first(lanes_left(std::max<int64_t>(0, size - d))),
        second(lanes_left(std::max<int64_t>(0, size - d - kLanes))) {}
};

// Numbers that are multiplied together: one float32, or one float16 as float32.
template <typename Number>
struct FloatTerms {
  using Cached = Number;
  static constexpr int64_t kNumbers = 1;
  static constexpr int kParts = 1;
  static constexpr float kPowers[] = {1.53533616e-4f, 1.33988745e-3f, 9.61843736e-3f,  // 2^r to 2^-28
                                      5.55033247e-2f, 2.40226479e-1f, 6.93147203e-1f};

  // 16 terms of a row of numbers, from term i on; `left` are the numbers that exist.
  static Floats of_row(const Cached* row, int64_t i, const Left& left) { return load(left.first, row + i); }
  static Floats of_query(const float* row, int64_t i, const Left& left, float scaling) {
    return load(left.first, row + i) * spread(scaling);
  }
  static Floats of_weights(Floats first, Floats) { return first; }
  static Register of_values(Mask m, const Cached* first, const Cached*) { return load_register(m, first); }
  static Register first_alone(Register terms) { return terms; }
  static Floats joined(Floats first, Floats) { return first; }
  static void add(Register& sum, Register a, Register b) { add_product(sum, a, b); }
};

// Two numbers of bfloat16. `kHardware`: if the processor multiplies them. Numbers too small for its products are 0.
template <bool kHardware>
struct PairTerms {
  using Cached = Half;
  static constexpr int64_t kNumbers = 2;
  static constexpr int kParts = kHardware ? 1 : 2;  // of a term in lanes: its odd and its even number, as floats
  static constexpr float kPowers[] = {9.58285246e-3f, 5.59064255e-2f, 2.40240986e-1f, 6.93124193e-1f};  // to 2^-18

  static Floats of_row(const Half* row, int64_t i, const Left& left) {
    return pairs_of<kHardware>(load(left.first, row + 2 * i), load(left.second, row + 2 * i + kLanes));
  }
  static Floats of_query(const float* row, int64_t i, const Left& left, float scaling) {
    const auto part = [&](Mask m, const float* from) {
      const Floats v = load(m, from) * spread(scaling);
      return blend(is_more(spread(0x1p-60f), magnitude(v)), v, spread(0.0f));
    };
    return pairs_of<kHardware>(part(left.first, row + 2 * i), part(left.second, row + 2 * i + kLanes));
  }
  static Floats of_weights(Floats first, Floats second) { return pairs_of<kHardware>(first, second); }
  static Register of_values(Mask m, const Half* first, const Half* second) {
    return joined_pairs<kHardware>(load_register(m, first), load_register(second ? m : 0, second ? second : first));
  }
  static Register first_alone(Register terms) { return even_alone(terms); }
  static Floats joined(Floats first, Floats second) { return joined_pairs<kHardware>(first, second); }
  static void add(Register& sum, Register a, Register b) { add_pair_products<kHardware>(sum, a, b); }
};

// Cached keys or values of a head by their place in a segment: only this function depends on how slots are stored.
template <typename Cached>
struct Rows {
  const Cached* first;
  const int64_t* slots;
  int64_t size;

  const Cached* operator[](int64_t k) const { return first + slots[k] * size; }
  template <_mm_hint kHint>
  LATEBRANCH_INLINE void fetch(int64_t k) const {
    const Cached* row = (*this)[k];
    for (int64_t d = 0; d < size; d += 64 / sizeof(Cached))
      _mm_prefetch((const char*)(row + d), kHint);
  }
};

struct Heads {
  int64_t num_query, num_kv, size;
  int64_t head_stride;  // numbers from a key of one head to that of the next; a head's keys are contiguous
  float scaling;
  int64_t window;  // 0: none
};

class Attention {
 public:
  // Tokens [begin, end) of segment s, all query heads of key-value head h. `queries` [T, row] are rotated; `out` is
  // [T, num_query * size].
  template <typename Terms>
  void run(const Segments& segments, const Heads& heads, int64_t s, int64_t h, int64_t begin, int64_t end,
           const int64_t* positions, const typename Terms::Cached* keys, const typename Terms::Cached* values,
           const float* queries, int64_t row, float* out) {
    const int64_t size = heads.size, shared = heads.num_query / heads.num_kv, tokens = end - begin;
    const int64_t num_keys = segments.first_key[s + 1] - segments.first_key[s];
    const int64_t num_context = num_keys - (segments.first_tail[s + 1] - segments.first_tail[s]);
    const auto [least, most] = std::minmax_element(positions + begin, positions + end);
    const bool is_hidden = heads.window && *most >= heads.window;
    const int64_t common = is_hidden ? 0 : num_context / kLanes * kLanes;
    const int64_t oldest = heads.window ? std::max<int64_t>(0, *least - heads.window + 1) : 0;
    Task<Terms> task{segments, heads, s, begin, tokens, positions, size, shared};
    task.num_terms = ((size + Terms::kNumbers - 1) / Terms::kNumbers + 1) / 2 * 2;
    task.num_keys = num_keys;
    task.num_context = num_context;
    task.common = common;
    task.first_masked = std::max(common, std::min(oldest, num_context) / kLanes * kLanes);
    const int64_t* slots = segments.key_slots + segments.first_key[s];
    task.keys = {keys + h * heads.head_stride, slots, size};
    task.values = {values + h * heads.head_stride, slots, size};
    task.queries = queries + begin * row + h * shared * size;
    task.row = row;
    task.out = out + (begin * heads.num_kv + h) * shared * size;
    task.out_row = heads.num_query * size;
    if (tokens * shared >= kFewestRows && !is_hidden && is_text(task)) {
      run_in_lanes(task);
    } else {
      for (int64_t t = 0; t < tokens; t += kTokensByKey)
        run_by_token(task.part(t, std::min(kTokensByKey, tokens - t)));
    }
  }

 private:
  static constexpr int64_t kTokensByKey = 16;    // tokens that share transposed keys
  static constexpr int64_t kTogether = 4;        // heads that read a key or value together
  static constexpr int64_t kKeys = 2 * kLanes;   // keys that are read at a time
  static constexpr int64_t kFewestKept = 4;      // tokens from which on terms of common values are computed once
  static constexpr float kLeastTop = -0x1p100f;  // below all scores
  static constexpr int64_t kAhead = 16;          // values between prefetch and use: slots are scattered

  // The arguments of `run`, and the ranges of keys that follow from them.
  template <typename Terms>
  struct Task {
    using Cached = typename Terms::Cached;
    const Segments& segments;
    const Heads& heads;
    int64_t segment, begin, tokens;
    const int64_t* positions;
    int64_t size, shared;  // numbers of a head; query heads that share the key-value head
    int64_t num_terms;     // of a head, even
    int64_t num_keys, num_context;
    int64_t common, first_masked;  // the number of common keys; the first masked key that a window does not hide
    Rows<Cached> keys, values;     // of the key-value head, as `queries` and `out` are
    const float* queries;
    int64_t row;
    float* out;
    int64_t out_row;

    // The same of some of the tokens.
    Task part(int64_t first, int64_t count) const {
      Task task = *this;
      task.begin += first;
      task.tokens = count;
      task.queries += first * row;
      task.out += first * out_row;
      return task;
    }
  };

  // 2^(scores - top) of a whole top. The fractions of weights do not depend on it, so another top gives exact multiples.
  template <typename Terms>
  static Floats weights_of(Floats scores, Floats top) {
    const Floats n = nearest(scores), r = scores - n, power = n - top;
    Floats p = spread(Terms::kPowers[0]);
    for (size_t i = 1; i < std::size(Terms::kPowers); i++)
      p = fused(p, r, spread(Terms::kPowers[i]));
    return blend(is_more(spread(-100.0f), power), times_power_of_2(fused(p, r, spread(1.0f)), power), spread(0.0f));
  }

  // Queries are scaled so that weights are powers of 2.
  static float query_scaling(const Heads& heads) { return heads.scaling * 1.44269504f; }

  // By token: keys are in the lanes of vectors

  template <typename Terms>
  void run_by_token(const Task<Terms>& task) {
    const int64_t shared = task.shared, size = task.size, tokens = task.tokens, terms = task.num_terms;
    width_ = (task.num_keys + kLanes - 1) / kLanes * kLanes + kLanes;
    grow(scores_, tokens * shared * width_);
    grow(seen_slots_, tokens * width_);
    grow(block_, (terms + kLanes) * kKeys);
    grow(values_, size * kKeys);
    grow(query_terms_, tokens * shared * terms + kLanes);
    counts_.assign(tokens, task.common);
    masks_.assign(tokens, 0);
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t g = 0; g < shared; g++)
        for (int64_t i = 0; i < terms; i += kLanes)
          store(query_terms_.data() + (t * shared + g) * terms + i,
                Terms::of_query(task.queries + t * task.row + g * size, i, Left(size, i * Terms::kNumbers),
                                query_scaling(task.heads)));
    score_common(task);
    score_masked(task);
    shares_.clear();
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t g = 0; g < shared; g++)
        shares_.push_back(soften<Terms>(scores_of(t, shared, g), counts_[t]));
    gather_common(task);
    for (int64_t t = 0; t < tokens; t++) {
      float* out = task.out + t * task.out_row;
      gather_slots(task, t, seen_slots_.data() + t * width_, counts_[t] - task.common, task.common, !task.common);
      for (int64_t g = 0; g < shared; g++)
        for (int64_t d = 0; d < size; d += kLanes)
          store(out + g * size + d, lanes_left(size - d),
                load(lanes_left(size - d), out + g * size + d) * spread(shares_[t * shared + g]));
    }
  }

  float* scores_of(int64_t t, int64_t shared, int64_t g) { return scores_.data() + (t * shared + g) * width_; }

  // Scores of the common keys, for all tokens at a time.
  template <typename Terms>
  void score_common(const Task<Terms>& task) {
    // Copies, because vector stores might alias the task.
    const int64_t shared = task.shared, common = task.common, num_keys = task.num_keys, tokens = task.tokens;
    const int64_t terms = task.num_terms;
    const auto keys = task.keys, values = task.values;
    for (int64_t k = 0; k < common; k += kKeys) {
      const int64_t count = std::min(kKeys, common - k);
      for (int64_t i = 0; i < count; i += kLanes) {
        const int64_t ahead = std::min(k + i + kKeys, num_keys - kLanes);
        transpose<Terms>(keys, terms, k + i, kLanes, block_.data() + i, [=](int64_t r, int64_t d) LATEBRANCH_INLINED {
          _mm_prefetch((const char*)(keys[ahead + r] + d), _MM_HINT_T0);
          _mm_prefetch((const char*)(values[k + i + r] + d), _MM_HINT_T1);
        });
      }
      for (int64_t t = 0; t < tokens; t++)
        each_heads(shared, [&](auto n, int64_t g) {
          const float* query = query_terms_.data() + (t * shared + g) * terms;
          float* to = scores_of(t, shared, g) + k;
          if (count == kKeys) {
            score_heads<Terms, n, 2>(query, terms, to, width_);
          } else {
            score_heads<Terms, n, 1>(query, terms, to, width_);
          }
        });
    }
  }

  // Scores of the masked keys: each token keeps the visible keys and their slots.
  template <typename Terms>
  void score_masked(const Task<Terms>& task) {
    const int64_t shared = task.shared, common = task.common, tokens = task.tokens;
    const int64_t num_keys = task.num_keys, terms = task.num_terms;
    const auto keys = task.keys;
    for (int64_t k = task.first_masked; k < num_keys; k += kLanes) {
      Mask any = 0;
      for (int64_t t = 0; t < tokens; t++)
        any |= masks_[t] = seen_mask(task.segments, task.heads, task.segment, task.begin + t,
                                     task.positions[task.begin + t], k, task.num_context, num_keys);
      if (!any)
        continue;
      for (int64_t i = k + kLanes; i < std::min(num_keys, k + 2 * kLanes); i++)
        keys.template fetch<_MM_HINT_T0>(i);
      transpose<Terms>(keys, terms, k, std::min(kLanes, num_keys - k), block_.data(), [](int64_t, int64_t) {});
      for (int64_t t = 0; t < tokens; t++) {
        if (!masks_[t])
          continue;
        each_heads(shared, [&](auto n, int64_t g) {
          alignas(64) float sums[n * kLanes];
          score_heads<Terms, n, 1>(query_terms_.data() + (t * shared + g) * terms, terms, sums, kLanes);
          for (int i = 0; i < n; i++)
            compress(scores_of(t, shared, g + i) + counts_[t], masks_[t], load(sums + i * kLanes));
        });
        compress(seen_slots_.data() + t * width_ + counts_[t] - common, masks_[t], keys.slots + k,
                 std::min(kLanes, num_keys - k));
        counts_[t] += __builtin_popcount(masks_[t]);
      }
    }
  }

  // Weighted sums of the common values, into the outputs.
  template <typename Terms>
  void gather_common(const Task<Terms>& task) {
    const int64_t size = task.size, common = task.common, tokens = task.tokens;
    if (tokens < kFewestKept) {
      for (int64_t t = 0; t < tokens; t++)
        gather_slots(task, t, task.values.slots, common, 0, true);
      return;
    }
    for (int64_t k = 0; k < common; k += kKeys) {
      const int64_t count = std::min(kKeys, common - k);
      for (int64_t i = k + count; i < std::min(common, k + count + kKeys); i++)
        task.values.template fetch<_MM_HINT_T0>(i);
      keep_values<Terms>(task.values, k, count, size);
      for (int64_t t = 0; t < tokens; t++)
        gather<Terms>(task, t, count / Terms::kNumbers, k / Terms::kNumbers, !k, KeptValues{values_.data(), size});
    }
  }

  // Add `count` weighted values in `slots` to the outputs of token t, or store them if `is_first`. Their weights begin
  // at that of key `first`.
  template <typename Terms>
  void gather_slots(const Task<Terms>& task, int64_t t, const int64_t* slots, int64_t count, int64_t first,
                    bool is_first) {
    constexpr int64_t kNumbers = Terms::kNumbers;
    const Rows<typename Terms::Cached> values{task.values.first, slots, task.size};
    gather<Terms>(task, t, (count + kNumbers - 1) / kNumbers, first / kNumbers, is_first,
                  SlotValues<Terms>{values, count});
  }

  // Terms of values, computed once.
  struct KeptValues {
    const float* terms;
    int64_t stride;

    const float* row(int64_t i, bool) const { return terms + i * stride; }
    static Register load(const float* row, int64_t d, Mask m) { return load_register(m, row + d); }
  };

  // Terms of values in slots, computed as they are read.
  template <typename Terms>
  struct SlotValues {
    Rows<typename Terms::Cached> values;
    int64_t count;
    struct Row {
      const typename Terms::Cached *first, *second;
    };

    Row row(int64_t i, bool fetches) const {
      const int64_t k = i * Terms::kNumbers;
      for (int64_t j = 0; fetches && j < Terms::kNumbers; j++)
        if (k + kAhead + j < count)
          values.template fetch<_MM_HINT_T0>(k + kAhead + j);
      return {values[k], Terms::kNumbers == 2 && k + 1 < count ? values[k + 1] : nullptr};
    }
    static Register load(const Row& row, int64_t d, Mask m) {
      return Terms::of_values(m, row.first + d, row.second ? row.second + d : nullptr);
    }
  };

  // Call use(part, numbers) for the parts of terms, which are multiplied one after the other.
  template <int kParts, typename Vector, typename Use>
  static void each_part(Vector terms, const Use& use) {
    if constexpr (kParts == 1) {
      use(0, terms);
    } else {
      use(0, odd_of(terms));
      use(1, even_of(terms));
    }
  }

  // values_ [terms, parts, stride] = terms of `count` values.
  template <typename Terms, int kParts = 1>
  void keep_values(const Rows<typename Terms::Cached> values, int64_t k, int64_t count, int64_t stride) {
    const int64_t size = values.size;
    for (int64_t i = 0; i < count; i += Terms::kNumbers) {
      const auto *first = values[k + i], *second = i + 1 < count ? values[k + i + 1] : nullptr;
      float* to = values_.data() + i / Terms::kNumbers * kParts * stride;
      for (int64_t d = 0; d < size; d += kRegister) {
        const Mask m = lanes_left(size - d);
        each_part<kParts>(Terms::of_values(m, first + d, second ? second + d : nullptr),
                          [&](int64_t part, Register v) { store_register(to + part * stride + d, m, v); });
      }
    }
  }

  // Call use(n, g) for heads [g, g + n): n is a constant.
  template <typename Use>
  static void each_heads(int64_t shared, const Use& use) {
    for (int64_t g = 0; g < shared; g += kTogether) {
      switch (std::min(kTogether, shared - g)) {
        case 1:
          use(std::integral_constant<int, 1>(), g);
          break;
        case 2:
          use(std::integral_constant<int, 2>(), g);
          break;
        case 3:
          use(std::integral_constant<int, 3>(), g);
          break;
        default:
          use(std::integral_constant<int, 4>(), g);
      }
    }
  }

  static Mask seen_mask(const Segments& segments, const Heads& heads, int64_t s, int64_t token, int64_t position,
                        int64_t k, int64_t num_context, int64_t num_keys) {
    if (k + kLanes <= num_context && (!heads.window || position - k < heads.window))
      return 0xFFFF;
    const int64_t* tail = segments.tail_positions + segments.first_tail[s];
    const int64_t width = segments.first_tail[s + 1] - segments.first_tail[s];
    const uint8_t* seen = segments.seen + segments.first_seen[s] + (token - segments.first_token[s]) * width;
    Mask mask = 0;
    for (int64_t i = 0; i < std::min(kLanes, num_keys - k); i++) {
      const int64_t place = k + i - num_context;
      const int64_t key_position = place < 0 ? k + i : tail[place];
      const bool is_near = !heads.window || position - key_position < heads.window;
      if (is_near && (place < 0 || seen[place]))
        mask |= (Mask)(1u << i);
    }
    return mask;
  }

  // to [terms, 32] = 16 keys by terms. Not inlined: within a larger function GCC 12 spills registers.
  template <typename Terms, typename Fetch>
  __attribute__((noinline)) static void transpose(const Rows<typename Terms::Cached> keys, int64_t terms, int64_t k,
                                                  int64_t count, float* to, const Fetch fetch) {
    const typename Terms::Cached* rows[kLanes];
    for (int64_t i = 0; i < kLanes; i++)
      rows[i] = keys[k + std::min(i, count - 1)];
    for (int64_t t = 0; t < terms; t += kLanes) {
      const Left left(keys.size, t * Terms::kNumbers);
      Floats r[kLanes];
      LATEBRANCH_UNROLLED_FOR (int64_t i = 0; i < kLanes; i++) {
        r[i] = Terms::of_row(rows[i], t, left);
        fetch(i, t * Terms::kNumbers);
      }
      latebranch::transpose(r);
      LATEBRANCH_UNROLLED_FOR (int64_t i = 0; i < kLanes; i++)
        store(to + (t + i) * kKeys, r[i]);
    }
  }

  // to [N, stride] = scores of N heads and V vectors of keys.
  template <typename Terms, int N, int V>
  void score_heads(const float* query, int64_t terms, float* to, int64_t stride) const {
    constexpr int kAtOnce = kRegister == kLanes ? V : 1;  // registers of keys, so that all sums are in registers
    for (int64_t part = 0; part < V * kLanes; part += kAtOnce * kRegister) {
      Register even[N][kAtOnce], odd[N][kAtOnce];
      for (int g = 0; g < N; g++)
        for (int v = 0; v < kAtOnce; v++)
          even[g][v] = odd[g][v] = register_of(0.0f);
      for (int64_t i = 0; i < terms; i += 2) {
        const float* row = block_.data() + i * kKeys + part;
        for (int v = 0; v < kAtOnce; v++) {
          const Register a = load_register(row + v * kRegister), b = load_register(row + kKeys + v * kRegister);
          for (int g = 0; g < N; g++) {
            Terms::add(even[g][v], a, register_of(query[g * terms + i]));
            Terms::add(odd[g][v], b, register_of(query[g * terms + i + 1]));
          }
        }
      }
      for (int g = 0; g < N; g++)
        for (int v = 0; v < kAtOnce; v++)
          store_register(to + g * stride + part + v * kRegister, even[g][v] + odd[g][v]);
    }
  }

  // Replace scores by terms of weights; return 1 / their total.
  template <typename Terms>
  static float soften(float* scores, int64_t count) {
    Floats largest = spread(kLeastTop);
    for (int64_t i = 0; i < count; i += kLanes)
      largest = larger(largest, load(largest, lanes_left(count - i), scores + i));
    const Floats top = nearest(spread(most(largest)));
    Floats total = spread(0.0f);
    const auto weights = [&](int64_t i) {
      const Mask m = lanes_left(std::max<int64_t>(0, count - i));
      const Floats w = only(m, weights_of<Terms>(load(m, scores + i), top));
      total = total + w;
      return w;
    };
    for (int64_t i = 0; i < count; i += Terms::kNumbers * kLanes) {
      const Floats first = weights(i);
      store(scores + i / Terms::kNumbers, Terms::of_weights(first, Terms::kNumbers == 2 ? weights(i + kLanes) : first));
    }
    return 1.0f / sum(total);
  }

  // Add `count` weighted terms of values to out [N, size], or store them if `is_first`.
  template <typename Terms, int N, typename Values>
  __attribute__((noinline)) void gather_heads(const Values values, int64_t count, const float* weights, int64_t size,
                                              float* out, bool is_first) const {
    constexpr int kRegisters =
        N * 4 < kNumRegisters ? 4 : 2;  // of a value at a time, so that all sums are in registers
    const int64_t stride = width_;
    for (int64_t d = 0; d < size; d += kRegisters * kRegister) {
      Register sum[N][kRegisters];
      Mask m[kRegisters];
      for (int v = 0; v < kRegisters; v++)
        m[v] = lanes_left(std::max<int64_t>(0, size - d - v * kRegister));
      LATEBRANCH_UNROLLED_FOR (int g = 0; g < N; g++)
        LATEBRANCH_UNROLLED_FOR (int v = 0; v < kRegisters; v++)
          sum[g][v] = is_first ? register_of(0.0f) : load_register(m[v], out + g * size + d + v * kRegister);
      for (int64_t i = 0; i < count; i++) {
        const auto row = values.row(i, !d);
        LATEBRANCH_UNROLLED_FOR (int v = 0; v < kRegisters; v++) {
          const Register x = values.load(row, d + v * kRegister, m[v]);
          LATEBRANCH_UNROLLED_FOR (int g = 0; g < N; g++)
            Terms::add(sum[g][v], x, register_of(weights[g * stride + i]));
        }
      }
      LATEBRANCH_UNROLLED_FOR (int g = 0; g < N; g++)
        LATEBRANCH_UNROLLED_FOR (int v = 0; v < kRegisters; v++)
          store_register(out + g * size + d + v * kRegister, m[v], sum[g][v]);
    }
  }

  // The same for all heads of token t. Their weights begin at that of term `first`.
  template <typename Terms, typename Values>
  void gather(const Task<Terms>& task, int64_t t, int64_t count, int64_t first, bool is_first, const Values& values) {
    each_heads(task.shared, [&](auto n, int64_t g) {
      gather_heads<Terms, n>(values, count, scores_of(t, task.shared, g) + first, task.size,
                             task.out + t * task.out_row + g * task.size, is_first);
    });
  }

  // In lanes: a row is a token and a head, and the lane of a vector

  static constexpr int64_t kFewestRows = 24;
  static constexpr int64_t kMostKeys = 64;                         // that are read at a time
  static constexpr int64_t kMostVectors = 3;                       // of rows that read a key or value together
  static constexpr int kKeysAtOnce = kNumRegisters == 32 ? 4 : 2;  // so that all sums are in registers
  static constexpr int kRowsAtOnce = 4;
  static constexpr int kValuesAtOnce = kNumRegisters == 32 ? 4 : 2;  // registers of a value
  static constexpr int64_t kStride = kValuesAtOnce * kRegister;

  // Whether each token sees the keys before a place, and no others; find these places.
  template <typename Terms>
  bool is_text(const Task<Terms>& task) {
    const int64_t width = task.num_keys - task.num_context;
    const uint8_t* seen = task.segments.seen + task.segments.first_seen[task.segment] +
                          (task.begin - task.segments.first_token[task.segment]) * width;
    counts_.clear();
    for (int64_t t = 0; t < task.tokens; t++, seen += width) {
      const void* hidden = std::memchr(seen, 0, width);
      const int64_t count = hidden ? (const uint8_t*)hidden - seen : width;
      if (std::memchr(seen + count, 1, width - count))
        return false;
      counts_.push_back(task.num_context + count);
    }
    return *std::min_element(counts_.begin(), counts_.end()) > 0;
  }

  // A token and a head: its query and output, and the number of keys that the token sees.
  struct Row {
    const float* query;
    float* out;
    int64_t num_keys;
  };

  // Up to 48 rows whose scores are computed together.
  struct RowGroup {
    int64_t first, num_rows, num_vectors;
    int64_t num_common, num_keys;  // that all rows see, and that any row sees
  };

  template <typename Terms>
  static void store_parts(float* to, int64_t stride, Floats terms) {
    each_part<Terms::kParts>(terms, [&](int64_t part, Floats v) { store(to + part * stride, v); });
  }

  template <typename Terms>
  static void add_part(Register& sum, Register a, Register b) {
    if constexpr (Terms::kParts == 1) {
      Terms::add(sum, a, b);
    } else {
      add_product(sum, a, b);
    }
  }

  // Keys are processed 64 at a time, which are converted once for all rows.
  template <typename Terms>
  void run_in_lanes(const Task<Terms>& task) {
    set_rows(task);
    const int64_t padded = padded_ = (task.size + kStride - 1) / kStride * kStride, num_rows = rows_.size();
    key_stride_ = (task.num_terms + kLanes) * Terms::kParts;
    grow(block_, key_stride_ * num_rows);
    grow(values_, padded * kMostKeys);
    grow(keys_, key_stride_ * kMostKeys);
    grow(sums_, num_rows * padded);
    std::fill_n(sums_.begin(), num_rows * padded, 0.0f);
    totals_.assign(num_rows * kLanes, 0.0f);
    tops_.assign(num_rows, kLeastTop);
    int64_t most = 0;
    for (const RowGroup& group : groups_) {
      by_vectors(group, [&](auto v) { set_queries<v>(task, group); });
      most = std::max(most, group.num_keys);
    }
    for (int64_t k = 0; k < most; k += kMostKeys) {
      const int64_t count = std::min(kMostKeys, most - k);
      for (int64_t i = k + kMostKeys; i < std::min(most, k + 2 * kMostKeys); i++) {
        task.keys.template fetch<_MM_HINT_T0>(i);
        task.values.template fetch<_MM_HINT_T0>(i);
      }
      keep_values<Terms, Terms::kParts>(task.values, k, count, padded);
      for (int64_t i = 0; i < kMostKeys; i++)
        key_rows_[i] = key_terms(task, k + std::min(i, count - 1), i);
      for (const RowGroup& group : groups_)
        if (k < group.num_keys)
          by_vectors(group, [&](auto v) { add_keys<Terms, v>(group, task.num_terms, k, count); });
    }
    for (const RowGroup& group : groups_)
      by_vectors(group, [&](auto v) { finish<v>(group, task.size); });
  }

  // Lanes without a row repeat the last one.
  template <typename Terms>
  void set_rows(const Task<Terms>& task) {
    const int64_t tokens = task.tokens, num_rows = tokens * task.shared;
    rows_.resize((num_rows + kLanes - 1) / kLanes * kLanes);
    for (int64_t r = 0; r < (int64_t)rows_.size(); r++) {
      const int64_t own = std::min(r, num_rows - 1), t = own % tokens, g = own / tokens;
      rows_[r] = {task.queries + t * task.row + g * task.size, task.out + t * task.out_row + g * task.size, counts_[t]};
    }
    groups_.clear();
    for (int64_t r = 0; r < num_rows; r += kMostVectors * kLanes) {
      const int64_t vectors = std::min<int64_t>(kMostVectors, (rows_.size() - r) / kLanes);
      const auto by_keys = [](const Row& a, const Row& b) { return a.num_keys < b.num_keys; };
      const auto [least, most] = std::minmax_element(&rows_[r], &rows_[r] + vectors * kLanes, by_keys);
      groups_.push_back({r, std::min(num_rows - r, vectors * kLanes), vectors, least->num_keys, most->num_keys});
    }
  }

  // Call use(V) for the vectors of a group: a constant.
  template <typename Use>
  static void by_vectors(const RowGroup& group, const Use& use) {
    if (group.num_vectors == 3) {
      use(std::integral_constant<int, 3>());
    } else if (group.num_vectors == 2) {
      use(std::integral_constant<int, 2>());
    } else {
      use(std::integral_constant<int, 1>());
    }
  }

  // Add up to 64 keys to the sums of a group. If a row's largest score becomes larger, its sums so far are multiplied by a
  // power of 2, which is exact.
  template <typename Terms, int V>
  void add_keys(const RowGroup& group, int64_t terms, int64_t k, int64_t count) {
    constexpr int64_t kRows = V * kLanes;
    alignas(64) float scores[kMostKeys][kRows], weights[kMostKeys / Terms::kNumbers * Terms::kParts][kRows];
    const Row* rows = &rows_[group.first];
    float *totals = &totals_[group.first * kLanes], *sums = &sums_[group.first * padded_];
    for (int64_t j = 0; j < count; j += kKeysAtOnce)
      score_keys<Terms, V>(key_rows_ + j, &block_[group.first * key_stride_], terms, scores[j]);
    if (k + count > group.num_common)
      hide<V>(rows, k, count, scores[0]);
    for (int v = 0; v < V; v++) {
      float* tops = &tops_[group.first + v * kLanes];
      const Floats top = load(tops), largest = nearest(larger(top, largest_of<V>(scores[0] + v * kLanes, count)));
      if (bits(is_more(largest, top)))
        rescale<V>(larger(spread(-200.0f), top - largest), totals + v * kLanes, sums + v * kLanes * padded_);
      store(tops, largest);
      weigh<Terms, V>(scores[0] + v * kLanes, count, largest, totals + v * kLanes, weights[0] + v * kLanes);
    }
    if (k + count <= group.num_common) {
      for (int64_t r = 0; r < kRows; r += kRowsAtOnce)
        for (int64_t d = 0; d < padded_; d += kStride)
          gather_terms<Terms, kRowsAtOnce>(values_.data() + d, padded_, (count + Terms::kNumbers - 1) / Terms::kNumbers,
                                           false, weights[0] + r, kRows, sums + r * padded_ + d);
    } else {
      for (int64_t r = 0; r < group.num_rows; r += kRowsAtOnce)
        gather_rows<Terms>(rows + r, k, count, weights[0] + r, kRows, sums + r * padded_);
    }
  }

  template <int V>
  void finish(const RowGroup& group, int64_t size) {
    float* totals = &totals_[group.first * kLanes];
    for (int64_t half = kLanes / 2 * V * kLanes; half >= V * kLanes; half /= 2)
      for (int64_t i = 0; i < half; i += kLanes)
        store(totals + i, load(totals + i) + load(totals + half + i));
    for (int64_t r = 0; r < group.num_rows; r++) {
      const Floats share = spread(1.0f / totals[r]);
      const float* sums = &sums_[(group.first + r) * padded_];
      for (int64_t d = 0; d < size; d += kLanes)
        store(rows_[group.first + r].out + d, lanes_left(size - d), load(sums + d) * share);
    }
  }

  // block_ [terms, parts, V, 16] of a group = terms of queries.
  template <int V, typename Terms>
  void set_queries(const Task<Terms>& task, const RowGroup& group) {
    float* to = &block_[group.first * key_stride_];
    for (int v = 0; v < V; v++)
      for (int64_t i = 0; i < task.num_terms; i += kLanes) {
        const Left left(task.size, i * Terms::kNumbers);
        Floats r[kLanes];
        for (int64_t t = 0; t < kLanes; t++)
          r[t] = Terms::of_query(rows_[group.first + v * kLanes + t].query, i, left, query_scaling(task.heads));
        latebranch::transpose(r);
        for (int64_t j = 0; j < kLanes; j++)
          store_parts<Terms>(to + ((i + j) * Terms::kParts * V + v) * kLanes, V * kLanes, r[j]);
      }
  }

  // Multiply totals [16, V, 16] and sums [16, padded] of 16 rows by powers of 2.
  template <int V>
  void rescale(Floats powers, float* totals, float* sums) const {
    const Floats factors = times_power_of_2(spread(1.0f), powers);
    alignas(64) float factor[kLanes];
    store(factor, factors);
    for (int64_t i = 0; i < kLanes; i++, totals += V * kLanes, sums += padded_) {
      store(totals, load(totals) * factors);
      for (int64_t d = 0; factor[i] != 1.0f && d < padded_; d += kLanes)
        store(sums + d, load(sums + d) * spread(factor[i]));
    }
  }

  // The lanes of rows that see key k.
  static Mask lanes_after(const Row* rows, int64_t k) {
    Mask mask = 0;
    for (int64_t i = 0; i < kLanes; i++)
      mask |= (Mask)((rows[i].num_keys > k) << i);
    return mask;
  }

  // Replace scores of keys that rows do not see, of scores [count, V, 16] of keys from k on: their weights are 0.
  template <int V>
  static void hide(const Row* rows, int64_t k, int64_t count, float* scores) {
    for (int64_t i = 0; i < count; i++)
      for (int v = 0; v < V; v++) {
        float* own = scores + (i * V + v) * kLanes;
        store(own, load(spread(kLeastTop), lanes_after(rows + v * kLanes, k + i), own));
      }
  }

  // The largest of scores [count, V, 16] of each lane.
  template <int V>
  static Floats largest_of(const float* scores, int64_t count) {
    Floats even = load(scores), odd = even;
    for (int64_t i = 1; i + 1 < count; i += 2) {
      even = larger(even, load(scores + i * V * kLanes));
      odd = larger(odd, load(scores + (i + 1) * V * kLanes));
    }
    return larger(larger(even, odd), load(scores + (count - 1) * V * kLanes));
  }

  // Terms of weights [terms, parts, V, 16] of scores; adds the weights to totals [16, V, 16].
  template <typename Terms, int V>
  __attribute__((noinline)) static void weigh(const float* scores, int64_t count, const Floats top, float* totals,
                                              float* weights) {
    constexpr int64_t kNumbers = Terms::kNumbers, kRows = V * kLanes, kTerm = Terms::kParts * kRows;
    int64_t k = 0;
    for (; k + 2 * kLanes <= count; k += 2 * kLanes, scores += 2 * kLanes * kRows) {
      float* to = weights + k / kNumbers * kTerm;
      for (int64_t i = 0; i < kLanes; i += kNumbers) {
        Floats low[kNumbers], high[kNumbers];
        LATEBRANCH_UNROLLED_FOR (int j = 0; j < kNumbers; j++) {
          low[j] = weights_of<Terms>(load(scores + (i + j) * kRows), top);
          high[j] = weights_of<Terms>(load(scores + (i + j + kLanes) * kRows), top);
          store(totals + (i + j) * kRows, load(totals + (i + j) * kRows) + low[j] + high[j]);
        }
        store_parts<Terms>(to + i / kNumbers * kTerm, kRows, Terms::joined(low[0], low[kNumbers - 1]));
        store_parts<Terms>(to + (i + kLanes) / kNumbers * kTerm, kRows, Terms::joined(high[0], high[kNumbers - 1]));
      }
    }
    scores -= k * kRows;
    for (int64_t i = k; i < count; i += kNumbers) {
      Floats some[2] = {spread(0.0f), spread(0.0f)};
      for (int64_t j = i; j < std::min(count, i + kNumbers); j++) {
        float* total = totals + j % kLanes * kRows;
        some[j - i] = weights_of<Terms>(load(scores + j * kRows), top);
        store(total, load(total) + some[j - i]);
      }
      store_parts<Terms>(weights + i / kNumbers * kTerm, kRows, Terms::joined(some[0], some[1]));
    }
  }

  // Terms of a key: the cached numbers themselves, or row i of keys_ [keys, parts, num_terms + 16].
  template <typename Terms>
  const float* key_terms(const Task<Terms>& task, int64_t k, int64_t i) {
    if constexpr (std::is_same_v<typename Terms::Cached, float>) {
      return task.keys[k];
    } else {
      float* to = keys_.data() + i * key_stride_;
      const auto* row = task.keys[k];
      for (int64_t j = 0, terms = task.num_terms, size = task.size; j < terms; j += kLanes)
        store_parts<Terms>(to + j, terms + kLanes, Terms::of_row(row, j, Left(size, j * Terms::kNumbers)));
      return to;
    }
  }

  // to [keys, V, 16] = scores of some keys. Not inlined: within a larger function GCC 12 spills sums.
  template <typename Terms, int V>
  __attribute__((noinline)) static void score_keys(const float* const* rows, const float* queries, int64_t terms,
                                                   float* to) {
    const float* row[kKeysAtOnce];
    LATEBRANCH_UNROLLED_FOR (int i = 0; i < kKeysAtOnce; i++)
      row[i] = rows[i];
    for (int64_t part = 0; part < V * kLanes; part += V * kRegister) {
      Register sum[2][kKeysAtOnce][V];  // of even and of odd terms
      LATEBRANCH_UNROLLED_FOR (int i = 0; i < kKeysAtOnce; i++)
        LATEBRANCH_UNROLLED_FOR (int v = 0; v < V; v++)
          sum[0][i][v] = sum[1][i][v] = register_of(0.0f);
      const float* query = queries + part;
      for (int64_t t = 0; t < terms; t += 2)
        LATEBRANCH_UNROLLED_FOR (int place = 0; place < 2 * Terms::kParts; place++, query += V * kLanes) {
          const int odd = place / Terms::kParts;
          Register q[V];
          LATEBRANCH_UNROLLED_FOR (int v = 0; v < V; v++)
            q[v] = load_register(query + v * kRegister);
          LATEBRANCH_UNROLLED_FOR (int i = 0; i < kKeysAtOnce; i++) {
            const Register key = register_of(row[i][place % Terms::kParts * (terms + kLanes) + t + odd]);
            LATEBRANCH_UNROLLED_FOR (int v = 0; v < V; v++)
              add_part<Terms>(sum[odd][i][v], q[v], key);
          }
        }
      LATEBRANCH_UNROLLED_FOR (int i = 0; i < kKeysAtOnce; i++)
        LATEBRANCH_UNROLLED_FOR (int v = 0; v < V; v++)
          store_register(to + i * V * kLanes + part + v * kRegister, sum[0][i][v] + sum[1][i][v]);
    }
  }

  // Add weighted values of keys [k, k + count) to sums [4, padded].
  template <typename Terms>
  void gather_rows(const Row* rows, int64_t k, int64_t count, const float* weights, int64_t stride, float* sums) const {
    constexpr int64_t kNumbers = Terms::kNumbers;
    const auto seen = [&](int64_t r) { return std::clamp<int64_t>(rows[r].num_keys - k, 0, count); };
    const int64_t least = std::min({seen(0), seen(1), seen(2), seen(3)});
    const int64_t common = least == count ? (count + kNumbers - 1) / kNumbers : least / kNumbers;
    for (int64_t d = 0; d < padded_; d += kStride)
      gather_terms<Terms, kRowsAtOnce>(values_.data() + d, padded_, common, false, weights, stride, sums + d);
    for (int64_t r = 0; r < kRowsAtOnce; r++)
      for (int64_t d = 0; common * kNumbers < seen(r) && d < padded_; d += kStride)
        gather_terms<Terms, 1>(values_.data() + common * Terms::kParts * padded_ + d, padded_,
                               (seen(r) + kNumbers - 1) / kNumbers - common, seen(r) % kNumbers != 0,
                               weights + common * Terms::kParts * stride + r, stride, sums + r * padded_ + d);
  }

  // Add `count` weighted terms of values [terms, parts, padded] to sums [R, padded]. `is_half`: the last term has one
  // key.
  template <typename Terms, int R>
  __attribute__((noinline)) static void gather_terms(const float* values, int64_t padded, int64_t count, bool is_half,
                                                     const float* weights, int64_t stride, float* sums) {
    Register sum[R][kValuesAtOnce];
    LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
      LATEBRANCH_UNROLLED_FOR (int v = 0; v < kValuesAtOnce; v++)
        sum[r][v] = load_register(sums + r * padded + v * kRegister);
    for (int64_t i = 0; i < (count - is_half) * Terms::kParts; i++, values += padded, weights += stride) {
      Register value[kValuesAtOnce];
      LATEBRANCH_UNROLLED_FOR (int v = 0; v < kValuesAtOnce; v++)
        value[v] = load_register(values + v * kRegister);
      LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++) {
        const Register weight = register_of(weights[r]);
        LATEBRANCH_UNROLLED_FOR (int v = 0; v < kValuesAtOnce; v++)
          add_part<Terms>(sum[r][v], value[v], weight);
      }
    }
    if (is_half) {
      constexpr int kLast = Terms::kParts - 1;  // the part of the even numbers
      LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
        LATEBRANCH_UNROLLED_FOR (int v = 0; v < kValuesAtOnce; v++) {
          const Register value = load_register(values + kLast * padded + v * kRegister);
          add_part<Terms>(sum[r][v], kLast ? value : Terms::first_alone(value),
                          register_of(weights[kLast * stride + r]));
        }
    }
    LATEBRANCH_UNROLLED_FOR (int r = 0; r < R; r++)
      LATEBRANCH_UNROLLED_FOR (int v = 0; v < kValuesAtOnce; v++)
        store_register(sums + r * padded + v * kRegister, sum[r][v]);
  }

  int64_t width_ = 0;                    // of a query's scores
  int64_t padded_ = 0, key_stride_ = 0;  // floats of a part of a kept value, and of a kept key
  const float* key_rows_[kMostKeys] = {};
  std::vector<float> scores_, block_, keys_, values_, query_terms_, shares_, sums_, totals_, tops_;
  std::vector<Row> rows_;
  std::vector<RowGroup> groups_;
  std::vector<int64_t> seen_slots_, counts_;
  std::vector<Mask> masks_;
};

}  // namespace latebranch
