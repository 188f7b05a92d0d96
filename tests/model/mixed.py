"""Greedy, coupled and i.i.d. requests with prompts of several lengths, to run together."""

from engine.core.types import Request
from tests.model.driving import greedy, sampled

PROMPTS = [[5 + (7 * row + 3 * i) % 50 for i in range(4 + 9 * row)] for row in range(4)]


def mixed_requests(max_tokens: int) -> list[Request]:
    """Return a request of each way to draw."""
    return [
        greedy("greedy", PROMPTS[0], max_tokens=max_tokens),
        sampled("coupled", PROMPTS[1], seed=1, max_tokens=max_tokens),
        sampled("traversal", PROMPTS[2], seed=2, max_tokens=max_tokens, verifier="traversal"),
        sampled("specinfer", PROMPTS[3], seed=3, max_tokens=max_tokens, verifier="specinfer", temperature=0.3),
    ]
