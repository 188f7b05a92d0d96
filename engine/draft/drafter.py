"""Who proposes tokens: the Protocol of drafters, and the growing trees they see.

Shape key: P proposals, V vocabulary, M the tokens of it that a drafter knows.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.core.enums import Origin
from engine.core.step_plan import Feeding, Row, SamplingContext
from engine.core.tree import ROOT, TokenTree
from engine.core.types import Request
from engine.utils.host_transfer import integers


@dataclass
class GrowingTree:
    """A tree under construction for one row. Owned by the growth loop.

    Drafters only read it, but for one: whoever feeds ancestors of the nodes asked about notes them in `fed`. `origins` has the
    tokens that cached text foretold, by the drafted tokens before them; `odds`, of a traced row, the draft probabilities of what
    was offered there. Where tokens are ranked with noise log q counts `sharpness` times.
    """

    row: Row
    sharpness: float = 1.0
    parents: list[int] = field(default_factory=lambda: [-1])
    token_ids: list[int] = field(default_factory=list)
    draws: list[list[int]] = field(default_factory=lambda: [[]])
    depths: list[int] = field(default_factory=lambda: [0])
    probs_rows: list[int | None] = field(default_factory=lambda: [None])
    fed: set[int] = field(default_factory=set)
    origins: dict[tuple[int, ...], Mapping[int, Origin]] = field(default_factory=dict)
    odds: dict[tuple[int, ...], Mapping[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.token_ids.append(self.row.certain_ids[-1])

    def add(self, parent: int, token_id: int) -> int:
        """Add a child drawn for `parent` and return its node; a token drawn before is the same node drawn again."""
        for child in self.draws[parent]:
            if self.token_ids[child] == token_id:
                self.draws[parent].append(child)
                return child
        node = len(self.parents)
        self.parents.append(parent)
        self.token_ids.append(token_id)
        self.draws.append([])
        self.depths.append(self.depths[parent] + 1)
        self.probs_rows.append(None)
        self.draws[parent].append(node)
        return node

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`, both included."""
        nodes = [node]
        while nodes[-1] != ROOT:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

    def frozen(self) -> TokenTree:
        """Return the finished tree."""
        return TokenTree(tuple(self.parents), tuple(self.token_ids), tuple(tuple(drawn) for drawn in self.draws))


@dataclass(frozen=True, slots=True)
class FrontierNode:
    """A node that is to get children: `num_draws` of them at most, some of which may coincide.

    `floor`: what a token must gain to be one of a fixed set (children.py).
    """

    tree: GrowingTree
    node: int
    num_draws: int
    floor: float = 0.0

    @property
    def position(self) -> int:
        """Absolute position of the node's token."""
        return self.tree.row.root_position + self.tree.depths[self.node]

    @property
    def sampling_context(self) -> SamplingContext:
        """What the law after the node depends on."""
        return self.tree.row.sampling_context(tuple(self.tree.token_ids[node] for node in self.tree.path(self.node)[1:]))


@dataclass(frozen=True, slots=True)
class ModelPasses:
    """Passes of a draft model, and the tokens fed in them: one that it is not asked about weighs less (FeedsForLess)."""

    num_passes: int = 0
    num_fed: float = 0

    @classmethod
    def one(cls, num_tokens: int, num_asked: int, fed_only_share: float) -> "ModelPasses":
        """Return a pass over tokens of which some are asked about."""
        return cls(1, num_asked + fed_only_share * (num_tokens - num_asked))

    def __add__(self, other: "ModelPasses") -> "ModelPasses":
        return ModelPasses(self.num_passes + other.num_passes, self.num_fed + other.num_fed)


@dataclass(frozen=True, eq=False)
class TrimmedVocabulary:
    """The M tokens that a drafter knows of a vocabulary of `size`, in an order of its own. It never proposes another."""

    ids_M: Int[Tensor, " M"]
    size: int

    @cached_property
    def _column_of(self) -> MutableMapping[int, int]:
        return {token_id: column for column, token_id in enumerate(self.ids_M.tolist())}

    @classmethod
    def of(cls, token_ids: Sequence[int], size: int, device: torch.device) -> "TrimmedVocabulary":
        """Return the vocabulary of these tokens."""
        vocab = cls(integers(token_ids, device), size)
        vocab.__dict__["_column_of"] = {token_id: column for column, token_id in enumerate(token_ids)}
        return vocab

    def columns(self, token_ids: Iterable[int]) -> list[int]:
        """Return the column of each token, -1 for those that are not known."""
        return [self._column_of.get(token_id, -1) for token_id in token_ids]

    def extended(self, token_ids: Sequence[int]) -> "TrimmedVocabulary":
        """Return a vocabulary that knows these too, in columns after the others."""
        both = TrimmedVocabulary(torch.cat([self.ids_M, integers(token_ids, self.ids_M.device)]), self.size)
        added = {token_id: column for column, token_id in enumerate(token_ids, len(self.ids_M))}
        both.__dict__["_column_of"] = ChainMap(added, self._column_of)
        return both

    def widened(self, rows_PM: Float[Tensor, "P M"], filler: float) -> Float[Tensor, "P V"]:
        """Return rows over the whole vocabulary."""
        return rows_PM.new_full((len(rows_PM), self.size), filler).index_copy_(1, self.ids_M, rows_PM)


@dataclass(frozen=True)
class Proposal:
    """Raw draft logits for some of the nodes asked about; the others stay leaves.

    `indices[i]` is the asked node that row i of `logits_PM` (float32) answers; ascending. Its columns are the tokens of `vocab`,
    or all there are. Nodes in `unfed` were answered though they were not fed. `origins[index]` says of tokens that cached
    text foretold where they come from. `passes` of a model were run to answer; cached text needs none.
    """

    indices: tuple[int, ...]
    logits_PM: Float[Tensor, "P M"]
    unfed: frozenset[int] = frozenset()
    origins: Mapping[int, Mapping[int, Origin]] = field(default_factory=dict)
    passes: ModelPasses = ModelPasses()
    vocab: TrimmedVocabulary | None = None

    @property
    def logits_PV(self) -> Float[Tensor, "P V"]:
        """The logits over the whole vocabulary: what the drafter does not know cannot come."""
        return self.logits_PM if self.vocab is None else self.vocab.widened(self.logits_PM, float("-inf"))


class Drafter(Protocol):
    """Proposes laws for the next token. Any law is lossless; a good one is accepted often."""

    name: str
    feeding: Feeding

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Feed the `draft_ids` of the rows (level 0 of every tree) and propose for the roots, in order."""
        ...

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Feed the frontier's nodes, those of one tree side by side and each after its ancestors, and propose for each."""
        ...


@runtime_checkable
class FeedsForLess(Protocol):
    """A drafter for which a token that it is merely fed costs this share of one that it is asked about."""

    fed_only_share: float


def fed_only_share_of(drafter: Drafter | None) -> float:
    """Return that share; most drafters take as long for the one as for the other."""
    return drafter.fed_only_share if isinstance(drafter, FeedsForLess) else 1.0


@runtime_checkable
class RequestFollower(Protocol):
    """A drafter that is told of requests' lives, from the queue to the end, and of the steps between."""

    def begin(self, request: Request, history: Sequence[int]) -> None:
        """Take note of a request whose text, as it is committed, is `history`: it grows and is not to be changed."""
        ...

    def advance(self, running: Iterable[str]) -> bool:
        """Take note of what was committed of these requests, before a step; nothing was of the others.

        What may take longer than a step can wait is done in parts, here. Return whether what is known now is news to who chooses
        trees: a choice that is held is then made anew.
        """
        ...

    def end(self, request_id: str) -> None:
        """Take note that a request has ended, however it did; its history stays as it is now. Unknown ids are ignored."""
        ...
