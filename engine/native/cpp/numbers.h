// Functions of a row of numbers that a decoder needs.
//
// Every result depends on its row alone: sums run over a row in one order, in any batch. Compile without contraction
// (-ffp-contract=off): otherwise the compiler may fuse a product and a sum in one copy of a function and not in
// another.
#pragma once
#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace latebranch {

// Resize a vector to at least `size`; its contents are arbitrary.
template <typename T>
void grow(std::vector<T>& vector, int64_t size) {
  if ((int64_t)vector.size() < size)
    vector.resize(size);
}

inline void store_floats(float* to, Mask m, Floats v) { store(to, m, v); }

// Rounds to the nearest float16, and numbers beyond its range to its largest; NaN and infinities stay as they are.
inline void store_floats(Half* to, Mask m, Floats v) {
  const Floats most = spread(65504.0f);
  store_halves(to, m, blend(is_broken(v), larger(spread(0.0f) - most, smaller(most, v)), v));
}

template <typename Cached>
inline void store_row(const float* from, int64_t n, Cached* to) {
  for (int64_t i = 0; i < n; i += kLanes)
    store_floats(to + i, lanes_left(n - i), load(lanes_left(n - i), from + i));
}

// e^x to within 2 units in the last place; NaN stays NaN, below -104 it is 0.
inline Floats exponential(Floats x) {
  x = larger(spread(-104.0f), smaller(spread(89.0f), x));
  const Floats n = nearest(x * spread(1.44269504f));
  Floats r = fused_from(n, spread(0.693359375f), x);
  r = fused_from(n, spread(-2.12194440e-4f), r);
  Floats p = spread(1.9875691500e-4f);  // Cephes' expf
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fused(p, r, spread(c));
  p = fused(p, r * r, r + spread(1.0f));
  return times_power_of_2(p, n);
}

inline Floats silu(Floats x) { return x / (spread(1.0f) + exponential(spread(0.0f) - x)); }

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), which is x / (1 + e^-2u).
inline Floats gelu_tanh(Floats x) {
  const Floats cube = x * x * x;
  const Floats u = fused(cube, spread(0.044715f), x) * spread(0.7978845608f);
  return x / (spread(1.0f) + exponential(u * spread(-2.0f)));
}

// out = x / sqrt(mean(x^2) + eps) * weight (null: 1)
inline void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  Floats squares = spread(0.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats v = load(lanes_left(n - i), x + i);
    squares = fused(v, v, squares);
  }
  const float inverse = 1.0f / std::sqrt(sum(squares) / (float)n + eps);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Mask m = lanes_left(n - i);
    const Floats v = load(m, x + i) * spread(inverse);
    store(out + i, m, weight ? v * load(m, weight + i) : v);
  }
}

inline void add_to(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Mask m = lanes_left(n - i);
    store(x + i, m, load(m, x + i) + load(m, y + i));
  }
}

// Rotate the halves of a head in place, by the cosines and sines of its position, as transformers does.
inline void rotate(float* x, const float* cosines, const float* sines, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const Mask m = lanes_left(half - i);
    const Floats a = load(m, x + i), b = load(m, x + half + i);
    const Floats turned_a = b * load(m, sines + i), turned_b = a * load(m, sines + half + i);
    store(x + i, m, fused_minus(a, load(m, cosines + i), turned_a));
    store(x + half + i, m, fused(b, load(m, cosines + half + i), turned_b));
  }
}

}  // namespace latebranch
