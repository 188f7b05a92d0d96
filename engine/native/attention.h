// Tree-masked attention of one layer over slots.
//
// A query's keys are taken in the order of the text: its context, then those of the segment's own tokens it sees. Scores are packed
// without gaps before anything is summed, so a node of a tree adds the same numbers in the same order as plain decoding does.
// What is cached is float32 or float16 (`Cached`); everything computed is float32.
#pragma once
#include <algorithm>
#include <vector>

#include "numbers.h"

namespace latebranch {

struct Segments {
  int64_t count;
  const int64_t* first_token;       // [count + 1] packed tokens
  const int64_t* first_key;         // [count + 1] into key_slots
  const int64_t* first_tail;        // [count + 1] into tail_positions
  const int64_t* first_seen;        // [count] into seen
  const int64_t* key_slots;         // context, then tail
  const int64_t* tail_positions;
  const uint8_t* seen;              // [tokens, tail] of each segment
};

struct Heads {
  int64_t num_query, num_kv, size;
  float scaling;
  int64_t window;  // 0: none
};

class Attention {
 public:
  // Tokens [begin, end) of segment s, all query heads of key-value head h. `queries` [T, row] are rotated; `out` [T, num_query * size].
  template <typename Cached>
  void run(const Segments& segments, const Heads& heads, int64_t s, int64_t h, int64_t begin, int64_t end, const int64_t* positions,
           const Cached* keys, const Cached* values, const float* queries, int64_t row, float* out) {
    const int64_t size = heads.size, shared = heads.num_query / heads.num_kv, tokens = end - begin;
    const int64_t* slots = segments.key_slots + segments.first_key[s];
    const int64_t num_keys = segments.first_key[s + 1] - segments.first_key[s];
    width_ = (num_keys + kLanes - 1) / kLanes * kLanes + kLanes;
    grow(scores_, tokens * shared * width_), grow(seen_slots_, tokens * width_), grow(block_, size * kLanes);
    counts_.assign(tokens, 0), masks_.assign(tokens, 0);
    const int64_t stride = heads.num_kv * size;
    const int64_t oldest = heads.window ? std::max<int64_t>(0, *std::min_element(positions + begin, positions + end) - heads.window + 1) : 0;
    const int64_t num_context = num_keys - (segments.first_tail[s + 1] - segments.first_tail[s]);
    for (int64_t k = std::min(oldest, num_context) / kLanes * kLanes; k < num_keys; k += kLanes) {
      Mask any = 0;
      for (int64_t t = 0; t < tokens; t++) any |= masks_[t] = seen_mask(segments, heads, s, begin + t, positions[begin + t], k, num_context, num_keys);
      if (!any) continue;
      for (int64_t i = k + kLanes; i < std::min(num_keys, k + 2 * kLanes); i++) fetch_row(keys + h * size + slots[i] * stride, size);
      transpose(keys + h * size, stride, slots + k, std::min(kLanes, num_keys - k), size);
      for (int64_t t = 0; t < tokens; t++) {
        if (!masks_[t]) continue;
        const float* query = queries + (begin + t) * row + h * shared * size;
        score(query, shared, size, heads.scaling, masks_[t], scores_.data() + t * shared * width_ + counts_[t]);
        compress(seen_slots_.data() + t * width_ + counts_[t], masks_[t], slots + k, std::min(kLanes, num_keys - k));
        counts_[t] += __builtin_popcount(masks_[t]);
      }
    }
    for (int64_t t = 0; t < tokens; t++) {
      float* to = out + (begin + t) * heads.num_query * size + h * shared * size;
      float* scores = scores_.data() + t * shared * width_;
      for (int64_t g = 0; g < shared; g++) soften(scores + g * width_, counts_[t]);
      for (int64_t g = 0; g < shared; g += kTogether)
        gather(values + h * size, stride, seen_slots_.data() + t * width_, counts_[t], scores + g * width_,
               std::min(kTogether, shared - g), size, to + g * size);
    }
  }

 private:
  static constexpr int64_t kTogether = 4;  // heads that read a key or value together
  static constexpr int64_t kAhead = 16;    // values that are fetched before their turn: slots lie anywhere

  template <typename Cached>
  static void fetch_row(const Cached* row, int64_t size) {
    for (int64_t d = 0; d < size; d += 64 / sizeof(Cached)) _mm_prefetch((const char*)(row + d), _MM_HINT_T0);
  }

  static Mask seen_mask(const Segments& segments, const Heads& heads, int64_t s, int64_t token, int64_t position, int64_t k,
                             int64_t num_context, int64_t num_keys) {
    if (k + kLanes <= num_context && (!heads.window || position - k < heads.window)) return 0xFFFF;
    const int64_t* tail = segments.tail_positions + segments.first_tail[s];
    const int64_t width = segments.first_tail[s + 1] - segments.first_tail[s];
    const uint8_t* seen = segments.seen + segments.first_seen[s] + (token - segments.first_token[s]) * width;
    Mask mask = 0;
    for (int64_t i = 0; i < std::min(kLanes, num_keys - k); i++) {
      const int64_t place = k + i - num_context;
      const int64_t key_position = place < 0 ? k + i : tail[place];
      const bool is_near = !heads.window || position - key_position < heads.window;
      if (is_near && (place < 0 || seen[place])) mask |= (Mask)(1u << i);
    }
    return mask;
  }

  // block_ [size, 16]: number d of 16 keys side by side.
  template <typename Cached>
  void transpose(const Cached* keys, int64_t stride, const int64_t* slots, int64_t count, int64_t size) {
    for (int64_t d = 0; d < size; d += kLanes) {
      const Mask m = lanes_left(size - d);
      Floats r[kLanes];
      for (int64_t i = 0; i < kLanes; i++) r[i] = load(m, keys + slots[std::min(i, count - 1)] * stride + d);
      latebranch::transpose(r);
      for (int64_t i = 0; i < std::min(kLanes, size - d); i++) store(block_.data() + (d + i) * kLanes, r[i]);
    }
  }

  template <int N>
  void score_heads(const float* query, int64_t size, float scaling, Mask mask, float* scores) const {
    alignas(64) float sums[N][kLanes];
    for (int64_t part = 0; part < kLanes; part += kRegister) {
      Register even[N], odd[N];
      for (int g = 0; g < N; g++) even[g] = odd[g] = register_of(0.0f);
      for (int64_t d = 0; d + 1 < size; d += 2) {  // heads have an even number of numbers: halves of them are rotated
        const float* row = block_.data() + d * kLanes + part;
        const Register a = load_register(row), b = load_register(row + kLanes);
        for (int g = 0; g < N; g++) {
          even[g] = fused(a, register_of(query[g * size + d]), even[g]);
          odd[g] = fused(b, register_of(query[g * size + d + 1]), odd[g]);
        }
      }
      for (int g = 0; g < N; g++) store_register(sums[g] + part, (even[g] + odd[g]) * register_of(scaling));
    }
    for (int g = 0; g < N; g++) compress(scores + g * width_, mask, load(sums[g]));
  }

  void score(const float* query, int64_t shared, int64_t size, float scaling, Mask mask, float* scores) const {
    for (int64_t g = 0; g < shared; g += kTogether) {
      const float* q = query + g * size;
      float* to = scores + g * width_;
      switch (std::min(kTogether, shared - g)) {
        case 1: score_heads<1>(q, size, scaling, mask, to); break;
        case 2: score_heads<2>(q, size, scaling, mask, to); break;
        case 3: score_heads<3>(q, size, scaling, mask, to); break;
        default: score_heads<4>(q, size, scaling, mask, to);
      }
    }
  }

  // Scores to weights that sum to 1.
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

  template <int N, typename Cached>
  void gather_heads(const Cached* values, int64_t stride, const int64_t* slots, int64_t count, const float* weights, int64_t size, float* out) const {
    constexpr int kRegisters = N * 4 < kNumRegisters ? 4 : 2;  // of a value at a time, so that all sums are in registers
    for (int64_t d = 0; d < size; d += kRegisters * kRegister) {
      Register sum[N][kRegisters];
      Mask m[kRegisters];
      for (int v = 0; v < kRegisters; v++) m[v] = lanes_left(std::max<int64_t>(0, size - d - v * kRegister));
      for (int g = 0; g < N; g++)
        for (int v = 0; v < kRegisters; v++) sum[g][v] = register_of(0.0f);
      for (int64_t i = 0; i < count; i++) {
        const Cached* from = values + slots[i] * stride + d;
        if (!d && i + kAhead < count) fetch_row(values + slots[i + kAhead] * stride, size);
        for (int v = 0; v < kRegisters; v++) {
          const Register value = load_register(m[v], from + v * kRegister);
          for (int g = 0; g < N; g++) sum[g][v] = fused(value, register_of(weights[g * width_ + i]), sum[g][v]);
        }
      }
      for (int g = 0; g < N; g++)
        for (int v = 0; v < kRegisters; v++) store_register(out + g * size + d + v * kRegister, m[v], sum[g][v]);
    }
  }

  template <typename Cached>
  void gather(const Cached* values, int64_t stride, const int64_t* slots, int64_t count, const float* weights, int64_t heads, int64_t size,
              float* out) const {
    switch (heads) {
      case 1: gather_heads<1>(values, stride, slots, count, weights, size, out); break;
      case 2: gather_heads<2>(values, stride, slots, count, weights, size, out); break;
      case 3: gather_heads<3>(values, stride, slots, count, weights, size, out); break;
      default: gather_heads<4>(values, stride, slots, count, weights, size, out);
    }
  }

  int64_t width_ = 0;  // of a query's scores
  std::vector<float> scores_, block_;
  std::vector<int64_t> seen_slots_, counts_;
  std::vector<Mask> masks_;
};

}  // namespace latebranch
