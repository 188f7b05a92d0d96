"""Selects the texts with the highest mean log-probability of a token, as OpenAI's best_of does.

The mean, not the sum: a sum would prefer short texts. Log-probabilities are the model's own, before edits and temperature.
"""

from collections.abc import Sequence


def best_of(means: Sequence[float], num_samples: int, num_answers: int) -> list[int]:
    """Return the indices of the texts to keep: of each prompt's `num_samples` the best `num_answers`, the best first.

    `means` has the mean log-probability of every text, prompt after prompt. If all are kept, their order is kept. The earlier of
    two equal texts is better.
    """
    if num_samples == num_answers:
        return list(range(len(means)))
    prompts = (range(start, start + num_samples) for start in range(0, len(means), num_samples))
    return [at for texts in prompts for at in sorted(texts, key=lambda at: -means[at])[:num_answers]]
