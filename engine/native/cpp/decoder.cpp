// The functions that Python calls. The caller owns all memory that pointers refer to.
#include <algorithm>

#include "distributions.h"
#include "growth.h"
#include "mixture.h"
#include "noise.h"
#include "pass.h"
#include "ranking.h"
#include "steps.h"
#include "team.h"
#include "texts.h"
#include "truncation.h"
#include "walk.h"

using namespace latebranch;

namespace {

// Threads for rows that are one task each: no more threads than rows.
int threads_for(int64_t num_rows, int num_threads) { return (int)std::min<int64_t>(num_rows, num_threads); }

}  // namespace

extern "C" {

// Sizes of the structures that Python mirrors. With them Python detects a library compiled from another version.
void latebranch_sizes(int64_t* sizes) {
  sizes[0] = sizeof(Linear);
  sizes[1] = sizeof(Layer);
  sizes[2] = sizeof(Decoder);
  sizes[3] = sizeof(Pass);
  sizes[4] = sizeof(RankedRow);
  sizes[5] = sizeof(RequestTexts);
  sizes[6] = sizeof(Walked);
  sizes[7] = sizeof(Features);
  sizes[8] = sizeof(FedRow);
  sizes[9] = sizeof(Fed);
  sizes[10] = sizeof(LowRank);
  sizes[11] = sizeof(AdaptedLayer);
  sizes[12] = sizeof(Steps);
  sizes[13] = sizeof(Growth);
  sizes[14] = sizeof(GrownTrees);
  sizes[15] = sizeof(DraftedRow);
  sizes[16] = sizeof(DraftSteps);
  sizes[17] = kScores;
  sizes[18] = kShares;
  sizes[19] = kNumRates;
  sizes[20] = kLayout;
}

void latebranch_decode(const Decoder* decoder, const Pass* pass, int num_threads) {
  decode(*decoder, *pass, num_threads);
}

// Steps of plain decoding in a row (steps.h). Return the number of complete steps.
int64_t latebranch_steps(const Decoder* decoder, const Pass* pass, const Steps* steps, int num_threads) {
  return StepRun(*decoder, *pass, *steps, num_threads).run();
}

// y [T, out] = layer(x [T, in])
void latebranch_linear(const Linear* linear, const float* x, int64_t num_rows, float* y, int num_threads) {
  ScratchLease scratch;
  Inputs& inputs = (*scratch).inputs;
  inputs.begin(num_rows);
  inputs.reserve(*linear);
  Pool::shared().run(num_threads, [&](Worker& worker) {
    worker.each(num_rows, [&](int64_t t) { inputs.set(t, x + t * linear->in, *linear); });
    all_outputs(worker, *linear, inputs, num_rows, y, false);
  });
}

// Store T tokens' states, each [T, width], in T slots.
void latebranch_keep(const Features* features, const float* const* states, int64_t width, const int64_t* slots,
                     int64_t num_rows) {
  std::vector<float> buffer(width);
  for (int64_t t = 0; t < num_rows; t++)
    for (int64_t i = 0; i < features->num_states; i++)
      features->keep(i, slots[t], states[i] + t * width, width, buffer.data());
}

// out [T, linear.out] = the features of the states in T slots
void latebranch_fuse(const Features* features, const int64_t* slots, int64_t num_rows, float* out, int num_threads) {
  ScratchLease lent;
  Scratch& scratch = *lent;
  scratch.inputs.begin(num_rows);
  scratch.inputs.reserve(features->linear);
  scratch.reserve_threads(num_threads, features->linear.in);
  Pool::shared().run(num_threads, [&](Worker& worker) { fuse(worker, scratch, *features, slots, num_rows, out); });
}

// out [K, count] = Gumbel noise of the first draws of each key, or of the draws `ids`
void latebranch_gumbels(const uint64_t* keys, int64_t num_keys, const int64_t* ids, int64_t count, double* out,
                        int num_threads) {
  constexpr int64_t kTogether = 4096;
  const int64_t parts = (count + kTogether - 1) / kTogether;
  Pool::shared().run(num_threads, [&](Worker& worker) {
    worker.each(num_keys * parts, [&](int64_t task) {
      const int64_t key = task / parts, begin = task % parts * kTogether;
      gumbel_noise(keys[key], ids, begin, std::min(count, begin + kTogether), out + key * count);
    });
  });
}

// The largest of each row of logits [N, V] and its token.
void latebranch_likeliest(const float* logits, int64_t num_rows, int64_t vocab_size, float* values, int64_t* tokens,
                          int num_threads) {
  Pool::shared().run(threads_for(num_rows, num_threads), [&](Worker& worker) {
    worker.each(num_rows, [&](int64_t n) { likeliest(logits + n * vocab_size, vocab_size, values + n, tokens + n); });
  });
}

// probs [count, V] = softmax(logits x inverse temperature), truncated, of each of `rows` of logits [N, V]
void latebranch_probs(const float* logits, int64_t vocab_size, const int64_t* rows, const float* inverse_temperatures,
                      const Truncation* truncations, int64_t count, float* probs, int num_threads) {
  Pool::shared().run(threads_for(count, num_threads), [&](Worker& worker) {
    worker.each(count, [&](int64_t i) {
      thread_local std::vector<float> kept;
      const float inverse = inverse_temperatures[i], *row = logits + rows[i] * vocab_size;
      softmax(truncated(row, vocab_size, inverse, truncations[i], kept), vocab_size, inverse, probs + i * vocab_size);
    });
  });
}

// Of each of `rows` of probs [N, V], the token of largest log p + noise, and that number.
void latebranch_choose(const float* probs, int64_t vocab_size, const int64_t* rows, const uint64_t* keys, int64_t count,
                       double* scores, int64_t* chosen, int num_threads) {
  Pool::shared().run(threads_for(count, num_threads), [&](Worker& worker) {
    worker.each(count, [&](int64_t i) {
      choose(probs + rows[i] * vocab_size, vocab_size, 1.0f, keys[i], scores + i, chosen + i);
    });
  });
}

// Walk down trees (walk.h). Tree b has the nodes [firsts[b], firsts[b + 1]). Its path is written to the same range, and
// the path's length to lengths[b].
void latebranch_walk(const float* logits, int64_t vocab_size, const Walked* trees, int64_t num_trees, int num_threads) {
  Pool::shared().run(threads_for(num_trees, num_threads), [&](Worker& worker) {
    worker.each(num_trees, [&](int64_t b) { walk(logits, vocab_size, *trees, b); });
  });
}

// For each row of logits [P, M]: the best tokens, followed by their number [P, most + 1]; their noise [P, most]; their
// probabilities, followed by the collision [P, most + 1]. `keys` null: without noise.
void latebranch_rank(const float* logits, int64_t num_rows, int64_t num_columns, const float* inverse_temperatures,
                     const Truncation* truncations, const float* sharpness, const uint64_t* keys, const int64_t* tokens,
                     int64_t most, int64_t* best, double* noise, float* odds, int num_threads) {
  constexpr int64_t kAlone = 1 << 14;  // with fewer logits waking another thread costs more than it saves
  Pool::shared().run(num_rows == 1 || num_rows * num_columns <= kAlone ? 1 : num_threads, [&](Worker& worker) {
    worker.each(num_rows, [&](int64_t p) {
      int64_t* row = best + p * (most + 1);
      float* shares = odds + p * (most + 1);
      thread_local std::vector<double> scores;
      grow(scores, most);
      const Ranked out{row, scores.data(), noise + p * most, shares, shares + most, row + most};
      rank({logits + p * num_columns, num_columns, inverse_temperatures[p], tokens, keys != nullptr, sharpness[p],
            keys ? keys[p] : 0, truncations[p]},
           most, out);
    });
  });
}

// logits [P, num_columns] = mixtures of a model's logits and cached text (mixture.h). `rows` [P]: a proposal's row of
// `model` [_, num_known], or -1. `firsts` [P + 1]: each proposal's first cached token.
void latebranch_mix(const float* model, int64_t num_known, const int64_t* rows, int64_t num_rows, const int64_t* firsts,
                    const int64_t* columns, const float* odds, const float* chances, int64_t num_columns, float* logits,
                    uint8_t* is_rather_cached) {
  for (int64_t p = 0; p < num_rows; p++) {
    const int64_t first = firsts[p];
    const Cached cached{columns + first, odds + first, firsts[p + 1] - first, chances[p]};
    mixed(rows[p] < 0 ? nullptr : model + rows[p] * num_known, num_known, num_columns, cached, logits + p * num_columns,
          is_rather_cached + first);
  }
}

// Grow trees of ranked rows (growth.h).
void latebranch_grow(const Growth* growth, const GrownTrees* trees, int num_threads) {
  trees->write(Growing(*growth, num_threads));
}

// Drafting steps in a row (steps.h). Return the number of complete steps.
int64_t latebranch_draft_steps(const Decoder* target, const Pass* pass, const Growth* growth, const GrownTrees* trees,
                               const DraftSteps* steps, int num_threads) {
  return DraftRun(*target, *pass, *growth, *trees, *steps, num_threads).run();
}

// Texts by context (texts.h). The first token of a text follows `context`.
ContextTree* latebranch_new_texts() { return new ContextTree; }

void latebranch_free_texts(ContextTree* tree) { delete tree; }

void latebranch_begin_text(ContextTree* tree, const int64_t* context, int64_t count) { tree->begin(context, count); }

void latebranch_append_text(ContextTree* tree, const int64_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    tree->append(tokens[i]);
}

// Learn a request's new tokens. Return whether a source is sure of the token after them.
int64_t latebranch_learn_text(const RequestTexts* texts) { return learn(*texts); }

// The continuation of a request's texts: `tokens`, `probs` and whether the client predicted them, of the first `most`;
// and its confidence. Return the number of all tokens.
int64_t latebranch_continue_text(const RequestTexts* texts, int64_t most, int64_t* tokens, double* probs,
                                 uint8_t* is_predicted, double* confidence) {
  const Continuation next = continuation(*texts, ending_of(texts->tokens, texts->num_tokens));
  for (int64_t i = 0; i < std::min<int64_t>(most, next.tokens.size()); i++) {
    tokens[i] = next.tokens[i].id;
    probs[i] = next.tokens[i].prob;
    is_predicted[i] = next.tokens[i].is_predicted;
  }
  *confidence = next.confidence;
  return next.tokens.size();
}
}
