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
// Cached keys and values are float32 or float16 (`Cached`); all results are float32.
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
  template <typename Cached>
  void run(const Segments& segments, const Heads& heads, int64_t s, int64_t h, int64_t begin, int64_t end,
           const int64_t* positions, const Cached* keys, const Cached* values, const float* queries, int64_t row,
           float* out) {
    const int64_t size = heads.size, shared = heads.num_query / heads.num_kv, tokens = end - begin;
    const int64_t num_keys = segments.first_key[s + 1] - segments.first_key[s];
    const int64_t num_context = num_keys - (segments.first_tail[s + 1] - segments.first_tail[s]);
    const auto [least, most] = std::minmax_element(positions + begin, positions + end);
    const int64_t common = heads.window && *most >= heads.window ? 0 : num_context / kLanes * kLanes;
    const int64_t oldest = heads.window ? std::max<int64_t>(0, *least - heads.window + 1) : 0;
    Task<Cached> task{segments, heads, s, begin, tokens, positions, size, shared};
    task.num_keys = num_keys;
    task.num_context = num_context;
    task.common = common;
    task.first_masked = std::max(common, std::min(oldest, num_context) / kLanes * kLanes);
    task.slots = segments.key_slots + segments.first_key[s];
    task.keys = keys + h * heads.head_stride;
    task.values = values + h * heads.head_stride;
    task.queries = queries + begin * row + h * shared * size;
    task.row = row;
    task.out = out + (begin * heads.num_kv + h) * shared * size;
    task.out_row = heads.num_query * size;
    width_ = (num_keys + kLanes - 1) / kLanes * kLanes + kLanes;
    grow(scores_, tokens * shared * width_);
    grow(seen_slots_, tokens * width_);
    grow(block_, size * kKeys);
    grow(values_, size * kKeys);
    counts_.assign(tokens, common);
    masks_.assign(tokens, 0);
    score_common(task);
    score_masked(task);
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t g = 0; g < shared; g++)
        soften(scores_of(t, shared, g), counts_[t]);
    gather_common(task);
    for (int64_t t = 0; t < tokens; t++)
      gather(task.values, seen_slots_.data() + t * width_, counts_[t] - common, shared, size, t, common,
             task.out + t * task.out_row, !common);
  }

 private:
  static constexpr int64_t kTogether = 4;       // heads that read a key or value together
  static constexpr int64_t kKeys = 2 * kLanes;  // common keys that are read at a time
  static constexpr int64_t kFewestWidened = 4;  // tokens from which on common values are converted to floats once
  static constexpr int64_t kAhead = 16;         // values between prefetch and use: slots are scattered

  // The arguments of `run`, and the ranges of keys that follow from them.
  template <typename Cached>
  struct Task {
    const Segments& segments;
    const Heads& heads;
    int64_t segment, begin, tokens;
    const int64_t* positions;
    int64_t size, shared;  // numbers of a head; query heads that share the key-value head
    int64_t num_keys, num_context;
    int64_t common, first_masked;  // the number of common keys; the first masked key that a window does not hide
    const int64_t* slots;          // of the segment's keys
    const Cached *keys, *values;   // of the key-value head, as `queries` and `out` are
    const float* queries;
    int64_t row;
    float* out;
    int64_t out_row;
  };

  float* scores_of(int64_t t, int64_t shared, int64_t g) { return scores_.data() + (t * shared + g) * width_; }

  // Scores of the common keys, for all tokens at a time.
  template <typename Cached>
  void score_common(const Task<Cached>& task) {
    // Copies, because vector stores might alias the task.
    const int64_t size = task.size, shared = task.shared, row = task.row, common = task.common;
    const int64_t num_keys = task.num_keys, tokens = task.tokens, *slots = task.slots;
    const Cached *keys = task.keys, *values = task.values;
    const float *queries = task.queries, scaling = task.heads.scaling;
    for (int64_t k = 0; k < common; k += kKeys) {
      const int64_t count = std::min(kKeys, common - k);
      for (int64_t i = 0; i < count; i += kLanes) {
        const int64_t* ahead = slots + std::min(k + i + kKeys, num_keys - kLanes);
        transpose(keys, slots + k + i, kLanes, size, i, [&](int64_t r, int64_t d) {
          _mm_prefetch((const char*)(keys + ahead[r] * size + d), _MM_HINT_T0);
          _mm_prefetch((const char*)(values + slots[k + i + r] * size + d), _MM_HINT_T1);
        });
      }
      for (int64_t t = 0; t < tokens; t++)
        each_heads(shared, [&](auto n, int64_t g) {
          const float* query = queries + t * row + g * size;
          float* to = scores_of(t, shared, g) + k;
          if (count == kKeys) {
            score_heads<n, 2>(query, size, scaling, to, width_);
          } else {
            score_heads<n, 1>(query, size, scaling, to, width_);
          }
        });
    }
  }

  // Scores of the masked keys: each token keeps those that it sees, and their slots.
  template <typename Cached>
  void score_masked(const Task<Cached>& task) {
    const int64_t size = task.size, shared = task.shared, row = task.row, common = task.common, tokens = task.tokens;
    const int64_t num_keys = task.num_keys, *slots = task.slots;
    const Cached* keys = task.keys;
    const float *queries = task.queries, scaling = task.heads.scaling;
    for (int64_t k = task.first_masked; k < num_keys; k += kLanes) {
      Mask any = 0;
      for (int64_t t = 0; t < tokens; t++)
        any |= masks_[t] = seen_mask(task.segments, task.heads, task.segment, task.begin + t,
                                     task.positions[task.begin + t], k, task.num_context, num_keys);
      if (!any)
        continue;
      for (int64_t i = k + kLanes; i < std::min(num_keys, k + 2 * kLanes); i++)
        fetch_row(keys + slots[i] * size, size);
      transpose(keys, slots + k, std::min(kLanes, num_keys - k), size, 0, [](int64_t, int64_t) {});
      for (int64_t t = 0; t < tokens; t++) {
        if (!masks_[t])
          continue;
        each_heads(shared, [&](auto n, int64_t g) {
          alignas(64) float sums[n * kLanes];
          score_heads<n, 1>(queries + t * row + g * size, size, scaling, sums, kLanes);
          for (int i = 0; i < n; i++)
            compress(scores_of(t, shared, g + i) + counts_[t], masks_[t], load(sums + i * kLanes));
        });
        compress(seen_slots_.data() + t * width_ + counts_[t] - common, masks_[t], slots + k,
                 std::min(kLanes, num_keys - k));
        counts_[t] += __builtin_popcount(masks_[t]);
      }
    }
  }

  // Weighted sums of the common values, into the outputs.
  template <typename Cached>
  void gather_common(const Task<Cached>& task) {
    const int64_t size = task.size, shared = task.shared, common = task.common, tokens = task.tokens;
    const int64_t out_row = task.out_row, *slots = task.slots;
    const Cached* values = task.values;
    float* out = task.out;
    if (tokens < kFewestWidened) {
      for (int64_t t = 0; t < tokens; t++)
        gather(values, slots, common, shared, size, t, 0, out + t * out_row, true);
      return;
    }
    for (int64_t k = 0; k < common; k += kKeys) {
      const int64_t count = std::min(kKeys, common - k);
      for (int64_t i = k + count; i < std::min(common, k + count + kKeys); i++)
        fetch_row(values + slots[i] * size, size);
      for (int64_t i = 0; i < count; i++)
        widen(values + slots[k + i] * size, size, values_.data() + i * size);
      for (int64_t t = 0; t < tokens; t++)
        gather(values_.data(), nullptr, count, shared, size, t, k, out + t * out_row, !k);
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

  template <typename Cached>
  static void fetch_row(const Cached* row, int64_t size) {
    for (int64_t d = 0; d < size; d += 64 / sizeof(Cached))
      _mm_prefetch((const char*)(row + d), _MM_HINT_T0);
  }

  template <typename Cached>
  static void widen(const Cached* row, int64_t size, float* to) {
    for (int64_t d = 0; d < size; d += kLanes)
      store(to + d, lanes_left(size - d), load(lanes_left(size - d), row + d));
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

  // Write 16 keys to the columns from `first` on of block_ [size, 32].
  template <typename Cached, typename Fetch>
  void transpose(const Cached* keys, const int64_t* slots, int64_t count, int64_t size, int64_t first,
                 const Fetch& fetch) {
    for (int64_t d = 0; d < size; d += kLanes) {
      const Mask m = lanes_left(size - d);
      Floats r[kLanes];
      for (int64_t i = 0; i < kLanes; i++) {
        r[i] = load(m, keys + slots[std::min(i, count - 1)] * size + d);
        if (d % (64 / (int64_t)sizeof(Cached)) == 0)
          fetch(i, d);
      }
      latebranch::transpose(r);
      for (int64_t i = 0; i < std::min(kLanes, size - d); i++)
        store(block_.data() + (d + i) * kKeys + first, r[i]);
    }
  }

  // to [N, stride] = scores of N heads and V vectors of keys.
  template <int N, int V>
  void score_heads(const float* query, int64_t size, float scaling, float* to, int64_t stride) const {
    constexpr int kAtOnce = kRegister == kLanes ? V : 1;  // registers of keys, so that all sums are in registers
    for (int64_t part = 0; part < V * kLanes; part += kAtOnce * kRegister) {
      Register even[N][kAtOnce], odd[N][kAtOnce];
      for (int g = 0; g < N; g++)
        for (int v = 0; v < kAtOnce; v++)
          even[g][v] = odd[g][v] = register_of(0.0f);
      for (int64_t d = 0; d + 1 < size; d += 2) {  // heads have an even number of numbers: halves of them are rotated
        const float* row = block_.data() + d * kKeys + part;
        for (int v = 0; v < kAtOnce; v++) {
          const Register a = load_register(row + v * kRegister), b = load_register(row + kKeys + v * kRegister);
          for (int g = 0; g < N; g++) {
            even[g][v] = fused(a, register_of(query[g * size + d]), even[g][v]);
            odd[g][v] = fused(b, register_of(query[g * size + d + 1]), odd[g][v]);
          }
        }
      }
      for (int g = 0; g < N; g++)
        for (int v = 0; v < kAtOnce; v++)
          store_register(to + g * stride + part + v * kRegister, (even[g][v] + odd[g][v]) * register_of(scaling));
    }
  }

  // Replace scores by weights that sum to 1.
  static void soften(float* scores, int64_t count) {
    Floats largest = spread(-std::numeric_limits<float>::infinity());
    Where broken = nowhere();
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats v = load(largest, lanes_left(count - i), scores + i);
      broken = broken | is_nan(v);
      largest = larger(largest, v);
    }
    const float top = bits(broken) ? std::numeric_limits<float>::quiet_NaN() : most(largest);
    Floats total = spread(0.0f);
    for (int64_t i = 0; i < count; i += kLanes) {
      const Mask m = lanes_left(count - i);
      const Floats e = only(m, exponential(load(m, scores + i) - spread(top)));
      store(scores + i, m, e);
      total = total + e;
    }
    const Floats share = spread(1.0f / sum(total));
    for (int64_t i = 0; i < count; i += kLanes) {
      const Mask m = lanes_left(count - i);
      store(scores + i, m, load(m, scores + i) * share);
    }
  }

  // Add `count` weighted values to out [N, size], or store them if `is_first`. Values are contiguous, or in `slots`.
  template <int N, typename Cached>
  void gather_heads(const Cached* values, const int64_t* slots, int64_t count, const float* weights, int64_t size,
                    float* out, bool is_first) const {
    constexpr int kRegisters =
        N * 4 < kNumRegisters ? 4 : 2;  // of a value at a time, so that all sums are in registers
    for (int64_t d = 0; d < size; d += kRegisters * kRegister) {
      Register sum[N][kRegisters];
      Mask m[kRegisters];
      for (int v = 0; v < kRegisters; v++)
        m[v] = lanes_left(std::max<int64_t>(0, size - d - v * kRegister));
      for (int g = 0; g < N; g++)
        for (int v = 0; v < kRegisters; v++)
          sum[g][v] = is_first ? register_of(0.0f) : load_register(m[v], out + g * size + d + v * kRegister);
      for (int64_t i = 0; i < count; i++) {
        const Cached* from = values + (slots ? slots[i] : i) * size + d;
        if (slots && !d && i + kAhead < count)
          fetch_row(values + slots[i + kAhead] * size, size);
        for (int v = 0; v < kRegisters; v++) {
          const Register value = load_register(m[v], from + v * kRegister);
          for (int g = 0; g < N; g++)
            sum[g][v] = fused(value, register_of(weights[g * width_ + i]), sum[g][v]);
        }
      }
      for (int g = 0; g < N; g++)
        for (int v = 0; v < kRegisters; v++)
          store_register(out + g * size + d + v * kRegister, m[v], sum[g][v]);
    }
  }

  // The same for all heads of token t. Their weights of these values begin at `first`.
  template <typename Cached>
  void gather(const Cached* values, const int64_t* slots, int64_t count, int64_t shared, int64_t size, int64_t t,
              int64_t first, float* out, bool is_first) {
    each_heads(shared, [&](auto n, int64_t g) {
      gather_heads<n>(values, slots, count, scores_of(t, shared, g) + first, size, out + g * size, is_first);
    });
  }

  int64_t width_ = 0;  // of a query's scores
  std::vector<float> scores_, block_, values_;
  std::vector<int64_t> seen_slots_, counts_;
  std::vector<Mask> masks_;
};

}  // namespace latebranch
