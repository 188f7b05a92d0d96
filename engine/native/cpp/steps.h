// Several steps of plain decoding in a row: each segment is one token, and its chosen token is the next pass's.
#pragma once
#include <algorithm>
#include <vector>

#include "noise.h"
#include "pass.h"

namespace latebranch {

// B segments. The pass has a tree for each, in order: the token alone.
struct Steps {
  int64_t most;                                // steps
  const int64_t* slots;                        // [B, most - 1]: of each segment's later tokens
  const uint64_t* seeds;                       // [B]
  const int64_t *first_stop, *stop_token_ids;  // [B + 1], and the tokens after which a segment must not continue
  int64_t* tokens;                             // [most, B]: the chosen ones
};

// Runs the steps. Each pass reads the tokens, positions, slots and noise of its own step.
class StepRun {
 public:
  StepRun(const Decoder& decoder, const Pass& first, const Steps& steps, int num_threads)
      : decoder_(decoder), first_(first), steps_(steps), num_threads_(num_threads), count_(first.num_tokens) {
    ids_.assign(first.token_ids, first.token_ids + count_);
    positions_.assign(first.positions, first.positions + count_);
    write_slots_.assign(first.write_slots, first.write_slots + count_);
    noise_keys_.resize(count_);
    first_keys_.resize(count_ + 1);
  }

  // Return the number of steps in which all segments have a token. None follows a step in which any has a stop token.
  int64_t run() {
    for (int64_t step = 0; step < steps_.most; step++) {
      step_pass(step);
      const Walked& walked = *first_.walked;
      if (std::any_of(walked.lengths, walked.lengths + count_, [](int64_t length) { return !length; }))
        return step;
      std::copy_n(walked.extras, count_, steps_.tokens + step * count_);
      if (is_stopped(walked.extras))
        return step + 1;
      for (int64_t b = 0; b < count_ && step + 1 < steps_.most; b++) {
        ids_[b] = walked.extras[b];
        positions_[b]++;
        write_slots_[b] = later_slots(b)[step];
      }
    }
    return steps_.most;
  }

 private:
  const int64_t* later_slots(int64_t b) const { return steps_.slots + b * (steps_.most - 1); }

  void step_pass(int64_t step) {
    key_slots_.clear();
    for (int64_t b = 0; b < count_; b++) {
      const int64_t *keys = first_.segments.key_slots, *begins = first_.segments.first_key;
      first_keys_[b] = key_slots_.size();
      key_slots_.insert(key_slots_.end(), keys + begins[b], keys + begins[b + 1]);
      key_slots_.insert(key_slots_.end(), later_slots(b), later_slots(b) + step);
      noise_keys_[b] = token_key(steps_.seeds[b], positions_[b] + 1);
    }
    first_keys_[count_] = key_slots_.size();
    Walked walked = *first_.walked;
    walked.keys = noise_keys_.data();
    Pass pass = first_;
    pass.token_ids = ids_.data();
    pass.positions = positions_.data();
    pass.write_slots = write_slots_.data();
    pass.segments.first_key = first_keys_.data();
    pass.segments.key_slots = key_slots_.data();
    pass.segments.tail_positions = positions_.data();
    pass.walked = &walked;
    decode(decoder_, pass, num_threads_);
  }

  bool is_stopped(const int64_t* tokens) const {
    const auto is_stop = [&](int64_t b) {
      const int64_t *begin = steps_.stop_token_ids + steps_.first_stop[b],
                    *end = steps_.stop_token_ids + steps_.first_stop[b + 1];
      return std::find(begin, end, tokens[b]) != end;
    };
    for (int64_t b = 0; b < count_; b++)
      if (is_stop(b))
        return true;
    return false;
  }

  const Decoder& decoder_;
  const Pass& first_;
  const Steps& steps_;
  const int num_threads_;
  const int64_t count_;
  std::vector<int64_t> ids_, positions_, write_slots_, first_keys_, key_slots_;
  std::vector<uint64_t> noise_keys_;
};

}  // namespace latebranch
