// Rows of logits: the likeliest token of each, and its distribution at a temperature.
#pragma once
#include "numbers.h"

namespace latebranch {

// The largest logit and its first token; NaN if any logit is NaN.
inline void likeliest(const float* logits, int64_t count, float* value, int64_t* token) {
  const Floats none = spread(-std::numeric_limits<float>::infinity());
  Floats best = none;
  Integers places = ascending32();
  Where broken = nowhere();
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats x = load(none, lanes_left(count - i), logits + i);
    broken = broken | is_nan(x);
    const Where is_better = is_more(x, best);
    best = blend(is_better, best, x);
    places = blend(is_better, places, add32(ascending32(), spread32((int32_t)i)));
  }
  float values[kLanes];
  int32_t tokens[kLanes];
  store(values, best);
  store(tokens, places);
  int first = 0;
  for (int i = 1; i < kLanes; i++)
    if (values[i] > values[first] || (values[i] == values[first] && tokens[i] < tokens[first]))
      first = i;
  *value = bits(broken) ? std::numeric_limits<float>::quiet_NaN() : values[first];
  *token = tokens[first];
}

// shares = softmax(logits / temperature), but for the factor that is returned. `top` is the largest logit.
inline float softmax_shares(const float* logits, int64_t count, float inverse_temperature, float top, float* shares) {
  const Floats inverse = spread(inverse_temperature), largest = spread(top * inverse_temperature);
  Floats total = spread(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Mask m = lanes_left(count - i);
    const Floats e = exponential(inverse * load(m, logits + i) - largest);
    store(shares + i, m, e);
    total = total + only(m, e);
  }
  return 1.0f / sum(total);
}

// out = softmax(logits / temperature)
inline void softmax(const float* logits, int64_t count, float inverse_temperature, float* out) {
  float top;
  int64_t token;
  likeliest(logits, count, &top, &token);
  const Floats scale = spread(softmax_shares(logits, count, inverse_temperature, top, out));
  for (int64_t i = 0; i < count; i += kLanes) {
    const Mask m = lanes_left(count - i);
    store(out + i, m, load(m, out + i) * scale);
  }
}

}  // namespace latebranch
