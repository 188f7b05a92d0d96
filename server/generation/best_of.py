"""Which of several texts are best: those whose tokens had the highest log-probability on average, as OpenAI's best_of has it.

The mean, not the sum: a sum would prefer whatever ends first. It is the model's own, before edits and temperature.
"""

from collections.abc import Sequence


def best_of(means: Sequence[float], num_samples: int, num_answers: int) -> list[int]:
    """Return which texts are kept, by index: of each prompt's `num_samples` the best `num_answers`, the best first.

    `means` has the mean log-probability of every text, prompt after prompt. Where all are kept they stay in order; of equals the
    earlier one is better.
    """
    if num_samples == num_answers:
        return list(range(len(means)))
    prompts = (range(start, start + num_samples) for start in range(0, len(means), num_samples))
    return [at for texts in prompts for at in sorted(texts, key=lambda at: -means[at])[:num_answers]]
