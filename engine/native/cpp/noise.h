// Counter-based noise, as engine/sampling/noise.py defines it: draw i of key k is splitmix64's output number i + 1 from
// state k, and its Gumbel noise is -log(-log u) of its uniform u. Logarithms (fdlibm's) are within 1 unit in the last
// place.
#pragma once
#include "numbers.h"

namespace latebranch {

// The logarithm of a normal positive number.
inline Doubles logarithm(Doubles x) {
  const Doubles one = spread(1.0);
  Doubles exponent = exponent_of(x), m = mantissa_of(x);
  const Mask is_large = more(m, spread(1.4142135623730951));
  m = blend_doubles(is_large, m, m * spread(0.5));
  exponent = blend_doubles(is_large, exponent, exponent + one);
  const Doubles f = m - one, s = f / (f + spread(2.0)), z = s * s;
  Doubles r = spread(1.479819860511658591e-01);
  for (const double c : {1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
                         2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01})
    r = fused(r, z, spread(c));
  r = r * z;
  const Doubles half_square = spread(0.5) * (f * f);
  const Doubles low = fused(s, half_square + r, exponent * spread(1.90821492927058770002e-10));
  return fused_minus(exponent, spread(6.93147180369123816490e-01), half_square - low - f);
}

// The uniforms u of draws i of a key, eight at a time.
inline Doubles uniform_noise(uint64_t key, Integers draws) {
  const auto times = [](Integers x, uint64_t y) { return times64(x, spread64((int64_t)y)); };
  Integers bits = times(add64(draws, spread64(1)), 0x9E3779B97F4A7C15ull);
  bits = add64(bits, spread64((int64_t)key));
  bits = times(exclusive_or(bits, shifted_right64<30>(bits)), 0xBF58476D1CE4E5B9ull);
  bits = times(exclusive_or(bits, shifted_right64<27>(bits)), 0x94D049BB133111EBull);
  bits = exclusive_or(bits, shifted_right64<31>(bits));
  return (doubles_of(shifted_right64<12>(bits)) + spread(0.5)) * spread(0x1p-52);
}

// engine/core/rng_keys.py's key of the noise that decides the token at a position.
inline uint64_t token_key(uint64_t seed, int64_t position) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  };
  return mix(mix(mix(seed + kGolden) + (uint64_t)position * kGolden) + kGolden);
}

// -log u: exponential noise.
inline Doubles exponential_of(Doubles u) { return spread(0.0) - logarithm(u); }

// Gumbel noise of draws [begin, end) of a key, or of the draws in `ids` [begin, end).
inline void gumbel_noise(uint64_t key, const int64_t* ids, int64_t begin, int64_t end, double* out) {
  for (int64_t i = begin; i < end; i += kDoubles) {
    const Mask m = lanes_left(end - i);
    const Integers draws = ids ? load_longs(m, ids + i) : add64(ascending64(), spread64(i));
    store(out + i, m, exponential_of(exponential_of(uniform_noise(key, draws))));
  }
}

// The draw of largest log p + Gumbel noise, which is that of largest p / -log u, and that score; NaN where p has NaN.
// p = shares x scale.
//
// As -log u is at least 1 - u, most draws need no logarithm: those whose p / (1 - u) is below the best so far.
inline void choose(const float* shares, int64_t count, float scale, uint64_t key, double* score, int64_t* chosen) {
  Doubles best = spread(-1.0);
  Integers best_draws = spread64(0);
  Doubles enough = spread(0.0);  // the best ratio of all lanes, less the rounding error
  Mask broken = 0;
  for (int64_t i = 0; i < count; i += kDoubles) {
    const Mask m = lanes_left(count - i);
    const Doubles p = load_doubles(m, shares + i, scale);
    if (!not_zero(p))
      continue;
    const Integers draws = add64(ascending64(), spread64(i));
    const Doubles u = uniform_noise(key, draws);
    broken |= nan_lanes(p);
    if (!(m & no_less(p, enough * (spread(1.0) - u))))
      continue;
    const Doubles ratio = p / exponential_of(u);
    const Mask is_better = m & more(ratio, best);
    best = blend_doubles(is_better, best, ratio);
    best_draws = blend_longs(is_better, best_draws, draws);
    enough = spread(most(best) * (1.0 - 1e-9));
  }
  double ratios[kDoubles];
  int64_t places[kDoubles];
  store(ratios, best);
  store(places, best_draws);
  int first = 0;
  for (int i = 1; i < kDoubles; i++)
    if (ratios[i] > ratios[first] || (ratios[i] == ratios[first] && places[i] < places[first]))
      first = i;
  *score = broken ? std::numeric_limits<double>::quiet_NaN() : std::log(std::max(0.0, ratios[first]));
  *chosen = places[first];
}

}  // namespace latebranch
