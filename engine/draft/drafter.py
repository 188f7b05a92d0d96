"""The Protocol of drafters, and the growing trees that drafters read.

Shape key: P proposals, B roots, L levels, V vocabulary, M the tokens of it that a drafter knows.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import msgspec
import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.paged.graph_recorder import Recorder
from engine.attention.paged.graphs import GraphedFunction
from engine.core.enums import Origin
from engine.core.step_plan import Feeding, Row, SamplingContext
from engine.core.tree import ROOT, TokenTree
from engine.core.types import Request
from engine.utils.host_transfer import integers


@dataclass
class GrowingTree:
    """A tree under construction for one row. Owned by the growth loop.

    Drafters only read it, with one exception: a drafter that feeds ancestors of frontier nodes adds them to `fed`. `origins` maps
    the drafted tokens of a path to the tokens that cached text predicts after it. `draft_probs` maps the same paths to draft
    probabilities of candidate children, for traced rows. `sharpness` is the weight of log q where tokens are ranked by log q plus
    noise.
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
    draft_probs: dict[tuple[int, ...], Mapping[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.token_ids.append(self.row.certain_ids[-1])

    def add(self, parent: int, token_id: int) -> int:
        """Add a child of `parent` and return its node. A repeated token is the same node, listed again in `draws`."""
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
    """A node to be expanded by at most `num_draws` children, some of which may coincide.

    `floor` is the least gain of a token in a fixed set (engine.draft.trees.sampling).
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
        """The context of the distribution after the node."""
        return self.tree.row.sampling_context(tuple(self.tree.token_ids[node] for node in self.tree.path(self.node)[1:]))


class ModelPasses(msgspec.Struct, frozen=True):
    """Passes of a draft model, and the tokens fed in them. Tokens without a proposal may weigh less."""

    num_passes: int = 0
    num_fed: float = 0

    @classmethod
    def one(cls, num_tokens: int, num_queried: int, fed_only_share: float) -> "ModelPasses":
        """Return one pass over `num_tokens` tokens that proposes after `num_queried` of them."""
        return cls(1, num_queried + fed_only_share * (num_tokens - num_queried))

    def __add__(self, other: "ModelPasses") -> "ModelPasses":
        return ModelPasses(self.num_passes + other.num_passes, self.num_fed + other.num_fed)


@dataclass(frozen=True, eq=False)
class TrimmedVocabulary:
    """The M tokens of a vocabulary of `size` that a drafter can propose, in an order of its own."""

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
        """Return the column of each token, -1 if it has none."""
        return [self._column_of.get(token_id, -1) for token_id in token_ids]

    def extended(self, token_ids: Sequence[int]) -> "TrimmedVocabulary":
        """Return the vocabulary with these tokens added, in columns after the others."""
        both = TrimmedVocabulary(torch.cat([self.ids_M, integers(token_ids, self.ids_M.device)]), self.size)
        added = {token_id: column for column, token_id in enumerate(token_ids, len(self.ids_M))}
        both.__dict__["_column_of"] = ChainMap(added, self._column_of)
        return both

    def widened(self, rows_PM: Float[Tensor, "P M"], filler: float) -> Float[Tensor, "P V"]:
        """Return rows over the whole vocabulary."""
        return rows_PM.new_full((len(rows_PM), self.size), filler).index_copy_(1, self.ids_M, rows_PM)


@dataclass(frozen=True)
class Proposal:
    """Raw draft logits for some of the frontier nodes. The other nodes stay leaves.

    Row i of `logits_PM` (float32) belongs to frontier node `indices[i]`; the indices ascend. The columns are the tokens of
    `vocab`, or all tokens. Nodes in `unfed` have a proposal although they were not fed. `origins[index]` has the origins of
    tokens that cached text predicted. `passes` of the model were run; cached text needs no pass.
    """

    indices: tuple[int, ...]
    logits_PM: Float[Tensor, "P M"]
    unfed: frozenset[int] = frozenset()
    origins: Mapping[int, Mapping[int, Origin]] = field(default_factory=dict)
    passes: ModelPasses = ModelPasses()
    vocab: TrimmedVocabulary | None = None

    @property
    def logits_PV(self) -> Float[Tensor, "P V"]:
        """The logits over the full vocabulary, -inf for tokens outside `vocab`."""
        return self.logits_PM if self.vocab is None else self.vocab.widened(self.logits_PM, float("-inf"))


class Drafter(Protocol):
    """Proposes distributions of the next token. Any distribution is lossless; a better one is accepted more often."""

    name: str
    feeding: Feeding

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Feed the `draft_ids` of the rows (level 0 of every tree) and propose for the roots, in order."""
        ...

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Feed the frontier's nodes and propose for each. A tree's nodes are neighbours, ancestors first."""
        ...


@dataclass(frozen=True)
class LevelProposal:
    """Raw draft logits of the levels after some of the roots, float32: row i belongs to root `indices[i]`."""

    indices: tuple[int, ...]
    logits_BLM: Float[Tensor, "B L M"]
    passes: ModelPasses
    vocab: TrimmedVocabulary | None


@runtime_checkable
class LevelDrafter(Protocol):
    """A drafter whose proposals after a node depend on the node's root and depth alone."""

    def feed_levels(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> LevelProposal:
        """Feed the `draft_ids` of the rows and propose all levels after the roots."""
        ...


@dataclass(frozen=True)
class LevelPasses:
    """A drafter's recorded passes, for nodes that are chosen on its device: one output row for each token.

    Keys are written at positions from `first_position` on. Padding writes to `dummy_slot`.
    """

    recordings: GraphedFunction
    vocab: TrimmedVocabulary | None
    dummy_slot: int
    first_position: int = 0


@runtime_checkable
class RecordedDrafter(Drafter, Protocol):
    """A drafter that can feed nodes which the host has not seen, once its passes are recorded."""

    @property
    def level_passes(self) -> LevelPasses | None:
        """The passes, None if they are not recorded."""
        ...


@runtime_checkable
class RecordedLevelDrafter(LevelDrafter, Protocol):
    """A drafter of levels over which rounds of growth can be recorded, once there is a recorder."""

    recorder: Recorder | None


@runtime_checkable
class RequestFollower(Protocol):
    """A drafter that follows requests from the queue to their end."""

    def begin(self, request: Request, history: Sequence[int]) -> None:
        """Register a request. `history` is its committed tokens: it grows with the request and is read-only."""
        ...

    def advance(self, running: Iterable[str]) -> bool:
        """Process the newly committed tokens of these requests before a step in which the policy chooses; others have none.

        Long work is split into parts over several calls. Return whether a policy should choose trees again instead of reusing
        its cached choice.
        """
        ...

    def end(self, request_id: str) -> None:
        """End a request. Its history does not change any more. Unknown ids are ignored."""
        ...
