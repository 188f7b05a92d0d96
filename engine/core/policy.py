"""Who chooses each sequence's expansion: the Protocol, what it sees and learns, and the choices that need no thought.

Knows what a policy may see (SequenceView), what it says (Choice) and what it learns afterwards (StepFeedback). The policy that
weighs tokens against seconds is the selector's and implements the same Protocol; the engine never imports it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from engine.core.tree import FREE_GROWTH, PLAIN, Expansion, GrowthCosts
from engine.core.types import SamplingParams, Speculation


class Reason(StrEnum):
    """Why a step's expansions are what they are; a label of metrics."""

    FIXED = "fixed"  # nobody chose
    SPECULATION_PAYS = "speculation_pays"
    PLAIN_IS_BEST = "plain_is_best"
    PROBE = "probe"  # plain is best as far as is known, and one sequence drafts to see whether it still is
    COPIED_TEXT = "copied_text"  # sequences repeat text so surely that they have chains of it, whatever was chosen
    FALLBACK = "fallback"  # what to expect could not be told: the fixed expansion


class SequenceView(NamedTuple):
    """What a policy may see of a sequence before drafting.

    `num_uncached` tokens must be fed to the target (the root included; more than 1 while a prompt is fed).
    """

    request_id: str
    num_committed: int
    num_generated: int
    num_remaining: int
    num_uncached: int
    sampling: SamplingParams
    speculation: Speculation
    verifier: str

    @property
    def is_free(self) -> bool:
        """Whether the request leaves the choice to the policy: it asks neither for a tree nor for none."""
        return self.speculation.is_enabled and self.speculation.expansion is None


class BatchViews(Sequence[SequenceView]):
    """What a policy may see of a step's sequences, oldest first; made when somebody looks.

    Steps of one `composition` have the same sequences, all of which decode, and expansions for one are expansions for the others:
    who stays with a choice need not look. There is none while a prompt is fed. `has_news` says whether cached text may know what
    comes next in any of them.
    """

    def __init__(self, make: Callable[[], list[SequenceView]], count: int, composition: int | None) -> None:
        self.composition = composition
        self.has_news = True
        self._make, self._count = make, count

    @cached_property
    def _views(self) -> list[SequenceView]:
        return self._make()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> SequenceView: ...
    @overload
    def __getitem__(self, index: slice) -> list[SequenceView]: ...
    def __getitem__(self, index: int | slice) -> SequenceView | list[SequenceView]:
        return self._views[index]

    def __iter__(self) -> Iterator[SequenceView]:
        return iter(self._views)


def composition_of(views: Sequence[SequenceView]) -> int | None:
    """Return what tells that the sequences are those of an earlier step, if that is known."""
    return views.composition if type(views) is BatchViews else None


# Of the last law before a root: the target's (at the request's temperature, 1 for a greedy one), and the drafter's where the
# step before drew from it (else zeros): entropy, greatest probabilities, log-probabilities of the root's token, and the L1
# distance of the two.
ROOT_SCALARS = (
    "entropy",
    "top",
    "root_log",
    "has_draft",
    "draft_top",
    "distance",
    "draft_root_log",
)


@dataclass(frozen=True, slots=True)
class RootFacts:
    """What passes that have run say of B sequences' roots, float32; rows of which nothing is known are zeros.

    `target_BD` is the target's last state before the root, `draft_BW` what the drafter will read there (the root's embedding,
    and where it has features the one before), `scalars_BS` are ROOT_SCALARS.
    """

    is_known_B: NDArray[np.bool_]
    target_BD: NDArray[np.float32]
    draft_BW: NDArray[np.float32]
    scalars_BS: NDArray[np.float32]


class RootSource(Protocol):
    """Tells what is known of roots before anything is drafted from them."""

    def watch(self) -> None:
        """Begin to keep what is needed; before, nothing is known of any root."""
        ...

    def facts(self, request_ids: Sequence[str]) -> RootFacts:
        """Return what is known of these sequences' roots, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """One expansion for each view, in order, and what its chooser expects of the step.

    `speedup` is tokens a second over plain decoding's, `step_s` the step's seconds, the chooser's own aside; a chooser that
    expects nothing leaves them. `growth_costs` are the costs of further nodes and levels. `keeps_up` has drafters fed now and
    then while their sequences are plain, so that they do not fall far behind. The choice holds for `num_steps`, its own
    included, as long as the same sequences run and all of them decode (engine.choice_cache).
    """

    expansions: tuple[Expansion, ...]
    reason: Reason = Reason.FIXED
    speedup: float = 1.0
    step_s: float | None = None
    growth_costs: GrowthCosts = FREE_GROWTH
    keeps_up: bool = True
    num_steps: int = 1


class NodeChances(NamedTuple):
    """What a noise-aware tree took its nodes to be worth, the root aside: chances to be accepted, and depths from 1.

    `accepted` are the places of those that were, in order. Of nodes at least as likely as `least` it has all that there were.
    """

    chances: tuple[float, ...]
    depths: tuple[int, ...]
    accepted: tuple[int, ...]
    least: float


class DraftOutcome(NamedTuple):
    """What became of a decoding row: the tree it was to grow, what grew (the root aside), how deep, how deep it was accepted.

    Of a tree that finds its own shape `drafted_depth` is the rounds it took to grow; the last levels it may not have kept. Of a
    noise-aware one there is more to tell of its `nodes`.
    """

    request_id: str
    expansion: Expansion
    num_nodes: int
    drafted_depth: int
    accepted_depth: int
    nodes: NodeChances | None = None


class StepWork(NamedTuple):
    """What a step runs, as far as its seconds depend on it; sums over its rows.

    `num_tokens` are packed tokens of the target's forward, `num_drawn` those of them that are nodes of rows that draw (the root
    included), `num_keys` the cached tokens its rows see and `num_scores` pairs of a token and a key it sees. A draft pass is one
    of the model that drafts; `num_draft_tokens` are fed to it in all of them together, the roots' included; one that it is
    not asked about weighs less. Trees grow in `num_rounds`, a level of every tree in each; where cached text is
    sure of a level its round takes no pass.
    """

    num_rows: int
    num_tokens: int
    num_drawn: int
    num_keys: int
    num_scores: int
    num_passes: float
    num_draft_tokens: float
    num_rounds: int


@dataclass(frozen=True, slots=True)
class PassSize:
    """A pass of the target to be timed, over rows that are alike: a chain of nodes (the root included) on so much context."""

    num_rows: int
    num_nodes: int
    num_context: int
    is_drawn: bool = False

    @property
    def num_tokens(self) -> int:
        """Packed tokens."""
        return self.num_rows * self.num_nodes


@dataclass(eq=False, slots=True)
class StepFeedback:
    """What a step ran, cost and brought. `rest_s` is all but drafting: the two are told apart on every device.

    Trees of its `num_rows` grew in `num_rounds`, with `num_passes` of a model. What else it ran and brought takes time to tell,
    and is told when it is first asked for, and kept: nothing else changes.
    """

    draft_s: float
    rest_s: float
    has_prefill: bool
    num_rows: int
    num_rounds: int
    num_passes: int
    make_work: Callable[[], StepWork]
    make_outcomes: Callable[[], tuple[DraftOutcome, ...]]
    _work: StepWork | None = field(default=None, init=False)
    _outcomes: tuple[DraftOutcome, ...] | None = field(default=None, init=False)

    @property
    def has_drafted(self) -> bool:
        """Whether any row was to grow a tree: to find nothing takes a round too."""
        return self.num_rounds > 0

    @property
    def work(self) -> StepWork:
        """What it ran."""
        if self._work is None:
            self._work = self.make_work()
        return self._work

    @property
    def outcomes(self) -> tuple[DraftOutcome, ...]:
        """What became of its decoding rows."""
        if self._outcomes is None:
            self._outcomes = self.make_outcomes()
        return self._outcomes


class ExpansionPolicy(Protocol):
    """Chooses one expansion for every sequence and step. It changes speed, never the law.

    `choose` is called before every step, unless the policy stands behind a CachedChoice, and `observe` after it.
    """

    name: str

    def choose(self, views: Sequence[SequenceView]) -> Choice:
        """Return one expansion for each view, in order."""
        ...

    def observe(self, feedback: StepFeedback) -> None:
        """Learn from the step that ran."""
        ...


class FixedExpansion:
    """Always the same shape."""

    def __init__(self, expansion: Expansion) -> None:
        self.name = f"fixed {expansion}"
        self._expansion = expansion

    def choose(self, views: Sequence[SequenceView]) -> Choice:
        """Return the fixed shape for every view."""
        return Choice((self._expansion,) * len(views))

    def observe(self, feedback: StepFeedback) -> None:
        """Learn nothing."""


class PlainDecoding(FixedExpansion):
    """Speculation switched off: the trivial policy."""

    def __init__(self) -> None:
        super().__init__(PLAIN)
        self.name = "plain"

    def choose(self, views: Sequence[SequenceView]) -> Choice:
        """Return plain decoding for every view; drafters wait until a request asks for a tree itself."""
        return Choice((PLAIN,) * len(views), keeps_up=False)
