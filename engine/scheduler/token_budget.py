"""The token budget of one step, divided between prompts and trees, and among the rows of each, by max-min fairness.

Plain arithmetic over demands, without sequences and slots.
"""

from collections.abc import Sequence

import msgspec


class TokenDemand(msgspec.Struct, frozen=True):
    """A row's demand: uncached tokens (the root included) and drafted nodes."""

    num_uncached: int
    num_draft_tokens: int


class TokenShare(msgspec.Struct, frozen=True):
    """A row's share of the budget: certain tokens, at least one, and a maximum of drafted nodes."""

    num_certain: int
    max_draft_tokens: int


PLAIN_SHARE = TokenShare(1, 0)  # of a row that decodes plainly


def fair_shares(demands: Sequence[int], total: int) -> list[int]:
    """Return max-min fair shares of `total`: small demands are met in full, the others get equal parts."""
    if sum(demands) <= total:
        return [*demands]
    shares = [0] * len(demands)
    left = max(0, total)
    for rank, index in enumerate(sorted(range(len(demands)), key=lambda i: demands[i])):
        shares[index] = min(demands[index], left // (len(demands) - rank))
        left -= shares[index]
    return shares


def share_tokens(demands: Sequence[TokenDemand], max_step_tokens: int) -> list[TokenShare]:
    """Return each row's share of a step.

    Every row gets one token. Unfed prompts have priority on half of the step, and also get the tokens that trees do not need. A
    row whose prompt ends in this step may draft within the rest.
    """
    if sum([demand.num_uncached + demand.num_draft_tokens for demand in demands]) <= max_step_tokens:
        return [TokenShare(demand.num_uncached, demand.num_draft_tokens) for demand in demands]
    tokens = max_step_tokens - len(demands)
    prompts = [demand.num_uncached - 1 for demand in demands]
    decoding_trees = sum(demand.num_draft_tokens for demand in demands if demand.num_uncached == 1)
    for_trees = min(decoding_trees, tokens - min(sum(prompts), max_step_tokens // 2))
    fed = fair_shares(prompts, tokens - max(0, for_trees))
    is_fed = [num_fed == num_needed for num_fed, num_needed in zip(fed, prompts, strict=True)]
    tree_demands = [demand.num_draft_tokens if ends else 0 for demand, ends in zip(demands, is_fed, strict=True)]
    trees = fair_shares(tree_demands, tokens - sum(fed))
    return [TokenShare(num_fed + 1, num_nodes) for num_fed, num_nodes in zip(fed, trees, strict=True)]
