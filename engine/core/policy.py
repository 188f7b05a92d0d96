"""The protocol of policies, the records that they receive and return, and two trivial policies.

A policy receives SequenceViews, chooses an expansion for each (ExpansionChoice) and observes StepFeedback afterwards. The
adaptive policy is in the selector package, which the engine never imports.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from engine.core.tree import FREE_GROWTH, PLAIN, Expansion, GrowthCosts
from engine.core.types import SamplingParams, Speculation

MOST_UNOBSERVED = 8  # steps of plain decoding in a row, and after which cached text is searched again


class Reason(StrEnum):
    """Why a policy chose a step's expansions; a label of metrics."""

    FIXED = "fixed"  # the policy has no alternative
    SPECULATION_PAYS = "speculation_pays"
    PLAIN_IS_BEST = "plain_is_best"
    PROBE = "probe"  # a tree that does not look best is drafted, to learn from it
    COMPARISON = "comparison"  # plain decoding in place of drafts, to compare their speeds
    COPIED_TEXT = "copied_text"  # sequences repeat cached text reliably, so chains of it replace the choice
    FALLBACK = "fallback"  # the policy failed to predict the step, so the fixed expansion is used


class SequenceView(NamedTuple):
    """A policy's view of a sequence before drafting.

    `num_uncached` tokens must be fed to the target: the root alone, or more while a prompt is fed. If it `needs_host`, its steps
    of plain decoding cannot run in a row.
    """

    request_id: str
    num_committed: int
    num_generated: int
    num_remaining: int
    num_uncached: int
    sampling: SamplingParams
    speculation: Speculation
    verifier: str
    needs_host: bool = False

    @property
    def is_free(self) -> bool:
        """Whether the request leaves the choice to the policy: it neither sets a tree nor disables speculation."""
        return self.speculation.is_enabled and self.speculation.expansion is None


class BatchViews(Sequence[SequenceView]):
    """A policy's views of a step's sequences, oldest first; created on first access.

    Steps with the same `composition` have the same sequences in the same order, all decoding. So a policy can reuse a choice
    without reading the views. It is None while a prompt is fed. `has_news`: cached text may predict the next tokens of a
    sequence. `num_steps` ran since the last choice.
    """

    def __init__(self, make: Callable[[], list[SequenceView]], count: int, composition: Hashable) -> None:
        self.composition = composition
        self.has_news, self.num_steps = True, 1
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


def composition_of(views: Sequence[SequenceView]) -> Hashable:
    """Return the composition of a step, or None if it is unknown."""
    return views.composition if type(views) is BatchViews else None


# Features of the distributions from which a root token came. The target's is at the request's temperature, or 1 if greedy. The
# drafter's is known if the last step sampled from it, else its features are zeros. The features are the target's entropy, the
# largest probabilities, the log-probabilities of the root token, and the L1 distance of the two distributions.
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
    """Features of B sequences' roots from earlier passes, float32. Rows of roots without features are zeros.

    `target_BD` is the target's last hidden state before the root. `draft_BW` is the drafter's input there: the root's embedding
    and, for a drafter that reads features, the feature before it. `scalars_BS` are ROOT_SCALARS.
    """

    is_known_B: NDArray[np.bool_]
    target_BD: NDArray[np.float32]
    draft_BW: NDArray[np.float32]
    scalars_BS: NDArray[np.float32]


class RootSource(Protocol):
    """Provides features of roots before drafting."""

    def watch(self) -> None:
        """Start to record features. No root has features before."""
        ...

    def facts(self, request_ids: Sequence[str]) -> RootFacts:
        """Return the features of these sequences' roots, in order."""
        ...


@dataclass(frozen=True, slots=True)
class ExpansionChoice:
    """One expansion for each view, in order, and the policy's prediction of the step.

    `speedup` is the predicted ratio of tokens per second to plain decoding, `step_s` the predicted seconds without the policy's
    own. A policy without predictions leaves the defaults. `growth_costs` are the costs of further nodes and levels. With
    `keeps_up`, drafters are fed from time to time while their sequences decode plainly, so that they do not fall far behind. The
    choice can be reused for `num_steps` steps, the first included, as long as the same sequences run and all decode
    (engine.choice_cache).
    """

    expansions: tuple[Expansion, ...]
    reason: Reason = Reason.FIXED
    speedup: float = 1.0
    step_s: float | None = None
    growth_costs: GrowthCosts = FREE_GROWTH
    keeps_up: bool = True
    num_steps: int = 1


class NodeChances(NamedTuple):
    """Acceptance probabilities of a noise-aware tree's nodes without the root, and their depths, starting at 1.

    `accepted` are the indices of the accepted nodes, in order. The tree is complete above `least`: it has every node that is at
    least that likely.
    """

    chances: tuple[float, ...]
    depths: tuple[int, ...]
    accepted: tuple[int, ...]
    least: float


class DraftOutcome(NamedTuple):
    """The outcome of a decoding row: the requested tree, its drafted nodes, and the depths drafted and accepted.

    If the drafter chooses the tree's shape, `drafted_depth` is the number of growth rounds, and the last levels may be missing
    from the tree. `nodes` is set for noise-aware trees only.
    """

    request_id: str
    expansion: Expansion
    num_nodes: int
    drafted_depth: int
    accepted_depth: int
    nodes: NodeChances | None = None


class StepWork(NamedTuple):
    """The amounts of work in a step that determine its duration, summed over its rows.

    `num_tokens` are packed tokens of the target's forward. `num_drawn` of them are nodes of sampled rows, roots included.
    `num_keys` are the cached tokens that the rows attend to, `num_scores` the pairs of a token and a key. `num_passes` counts
    passes of the draft model. `num_draft_tokens` are fed in all of these passes, roots included; a token whose logits are not
    needed counts less. Trees grow in `num_rounds`, one level of every tree in each. A round answered by cached text needs no
    pass. `num_calls` is below 1 if several steps of plain decoding run in one call.
    """

    num_rows: int
    num_tokens: int
    num_drawn: int
    num_keys: int
    num_scores: int
    num_passes: float
    num_draft_tokens: float
    num_rounds: int
    num_calls: float = 1.0


@dataclass(frozen=True, slots=True)
class PassSize:
    """A pass of the target to be timed: rows that are chains of `num_nodes` nodes, root included, after `num_context` tokens."""

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
    """The work, duration and outcomes of a step. `rest_s` is the step's duration without drafting.

    The trees of `num_rows` rows grew in `num_rounds` rounds with `num_passes` passes of the draft model. `work` and `outcomes`
    are computed on first access, since they take time and not every policy needs them. The feedback of a plain step is for
    `num_steps`, of which it is the first.
    """

    draft_s: float
    rest_s: float
    has_prefill: bool
    num_rows: int
    num_rounds: int
    num_passes: int
    make_work: Callable[[], StepWork]
    make_outcomes: Callable[[], tuple[DraftOutcome, ...]]
    num_steps: int = 1
    _work: StepWork | None = field(default=None, init=False)
    _outcomes: tuple[DraftOutcome, ...] | None = field(default=None, init=False)

    @property
    def has_drafted(self) -> bool:
        """Whether a tree was to grow. A round that finds no token counts too."""
        return self.num_rounds > 0

    @property
    def work(self) -> StepWork:
        """The amounts of work in the step."""
        if self._work is None:
            self._work = self.make_work()
        return self._work

    @property
    def outcomes(self) -> tuple[DraftOutcome, ...]:
        """The outcomes of the decoding rows."""
        if self._outcomes is None:
            self._outcomes = self.make_outcomes()
        return self._outcomes


class ExpansionPolicy(Protocol):
    """Chooses one expansion for every sequence and step. It affects speed, never the distribution.

    `choose` is called before every step, or less often if the policy is wrapped in a CachedChoice. `observe` is called after it.
    """

    name: str

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        """Return one expansion for each view, in order."""
        ...

    def observe(self, feedback: StepFeedback) -> None:
        """Learn from the step that ran."""
        ...


class FixedExpansion:
    """Always chooses the same expansion."""

    def __init__(self, expansion: Expansion) -> None:
        self.name = f"fixed {expansion}"
        self._expansion = expansion

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        """Return the fixed expansion for every view."""
        return ExpansionChoice((self._expansion,) * len(views), num_steps=MOST_UNOBSERVED)

    def observe(self, feedback: StepFeedback) -> None:
        """Learn nothing."""


class PlainDecoding(FixedExpansion):
    """The policy that disables speculation."""

    def __init__(self) -> None:
        super().__init__(PLAIN)
        self.name = "plain"

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        """Return plain decoding for every view. Drafters are fed only for requests that set a tree themselves."""
        return ExpansionChoice((PLAIN,) * len(views), keeps_up=False, num_steps=MOST_UNOBSERVED)
