"""How the tokens of one step are shared out: between prompts and trees, and between the rows of each, by max-min fairness.

Plain arithmetic over wishes; knows no sequences and no slots.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Wish(NamedTuple):
    """What a row could use: uncached tokens (the root included) and drafted nodes."""

    num_uncached: int
    num_draft_tokens: int


class Share(NamedTuple):
    """What a row gets: at least one certain token, and at most so many drafted nodes."""

    num_certain: int
    max_draft_tokens: int


_NOTHING_MORE, _GRANTED = Wish(1, 0), Share(1, 0)  # a row that decodes plainly


def fair_shares(wants: Sequence[int], total: int) -> list[int]:
    """Return integers below `wants` that sum to at most `total`: small wants are met whole, the others get equal parts."""
    if sum(wants) <= total:
        return [*wants]
    shares = [0] * len(wants)
    left = max(0, total)
    for rank, index in enumerate(sorted(range(len(wants)), key=lambda i: wants[i])):
        shares[index] = min(wants[index], left // (len(wants) - rank))
        left -= shares[index]
    return shares


def share_out(wishes: Sequence[Wish], max_step_tokens: int) -> list[Share]:
    """Return each row's share of a step.

    Every row has one token for granted. Prompts that wait to be fed have a claim on half of the step and on what trees do not
    want; a row whose prompt ends in this step may draft from what is left.
    """
    if all(wish == _NOTHING_MORE for wish in wishes):
        return [_GRANTED] * len(wishes)
    tokens = max_step_tokens - len(wishes)
    prompts = [wish.num_uncached - 1 for wish in wishes]
    decoding_trees = sum(wish.num_draft_tokens for wish in wishes if wish.num_uncached == 1)
    for_trees = min(decoding_trees, tokens - min(sum(prompts), max_step_tokens // 2))
    fed = fair_shares(prompts, tokens - max(0, for_trees))
    tree_wants = [wish.num_draft_tokens if got == want else 0 for wish, got, want in zip(wishes, fed, prompts, strict=True)]
    trees = fair_shares(tree_wants, tokens - sum(fed))
    return [Share(got + 1, tree) for got, tree in zip(fed, trees, strict=True)]
