"""Statistics of a step, and the feedback that a policy learns from."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from jaxtyping import Float
from torch import Tensor

from engine.core.policy import DraftOutcome, ExpansionChoice, NodeChances, StepFeedback, StepWork
from engine.core.step_observer import Ending
from engine.core.step_plan import Row, StepPlan
from engine.core.tree import ROOT, TokenTree
from engine.core.types import DraftSource, FinishReason, StepStats
from engine.draft.drafter import ModelPasses
from engine.draft.trees.grower import NodeValues
from engine.model.target import Target
from engine.scheduler.scheduler import Emission, Scheduler
from engine.verify.forest import Forest
from engine.verify.verdict import Verdict, VerificationFailure


class Stopwatch:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Record the time since the last lap as `name`."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now

    def shift(self, source: str, sink: str, seconds: float) -> None:
        """Count a part of one lap as another's, at most all of it."""
        seconds = min(max(0.0, seconds), self.laps[source])
        self.laps[source] -= seconds
        self.laps[sink] += seconds


class RowOutcome(msgspec.Struct, frozen=True):
    """A decoding row after the step. `offset` is the index of its root among the packed nodes.

    `sources` and, for a noise-aware tree, `node_values` describe the tree's nodes without the root. The tree took
    `num_rounds` to grow. A row whose verification failed emits nothing and ends.
    """

    row: Row
    tree: TokenTree
    sources: tuple[DraftSource, ...]
    node_values: NodeValues | None
    num_rounds: int
    offset: int
    verdict: Verdict | VerificationFailure
    emission: Emission | None

    @property
    def num_steps(self) -> int:
        """Steps in a row that a row without drafts took."""
        return len(self.verdict.path) if isinstance(self.verdict, Verdict) and not self.row.is_drafting else 1

    @property
    def num_drafted(self) -> int:
        """The number of drafted tokens. Tokens of plain steps in a row are not drafted."""
        return self.tree.num_nodes - 1 if self.row.is_drafting else 0

    @property
    def accepted_depth(self) -> int:
        """Drafted tokens on the accepted path, before limits cut it."""
        return len(self.verdict.path) - 1 if isinstance(self.verdict, Verdict) and self.row.is_drafting else 0

    @property
    def accepted_sources(self) -> list[DraftSource]:
        """The sources of the emitted tokens that were drafted, in order."""
        if not isinstance(self.verdict, Verdict) or self.emission is None:
            return []
        return [self.sources[node - 1] for node in self.verdict.path[1 : 1 + self.emission.num_accepted]]

    @property
    def expected_tokens(self) -> float | None:
        """E[tau + 1 | tree], the mean of `accepted_depth` + 1, if the verifier computes it."""
        return self.verdict.expected_tokens if isinstance(self.verdict, Verdict) else None

    def ending(self, probs_rows: Sequence[int | None]) -> Ending | None:
        """Return where the step ended, None for a request that does not continue."""
        if not isinstance(self.verdict, Verdict) or self.emission is None or self.emission.finish is not None:
            return None
        last = self.verdict.path[-1]
        slot = self.row.slots[self.row.root_position + last]
        return Ending(self.offset + last, probs_rows[last], slot, self.verdict.extra_id, self.row.sampling)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The whole record of a step: its plan, the policy's choice, the outcomes of the decoding rows, and seconds by stage.

    Trees grew in `num_draft_rounds` rounds with `draft_passes` of the draft model. `num_steps` ran in a row: several only if all
    rows decode plainly.
    """

    plan: StepPlan
    choice: ExpansionChoice
    num_draft_rounds: int
    draft_passes: ModelPasses
    outcomes: tuple[RowOutcome, ...]
    laps: dict[str, float]
    num_steps: int = 1

    @property
    def num_target_tokens(self) -> int:
        """Packed tokens of the target's forward, in a run of the first step's."""
        certain = sum([len(row.certain_ids) for row in self.plan.rows])
        return certain + sum([outcome.num_drafted for outcome in self.outcomes])

    @property
    def num_emitted(self) -> int:
        """Tokens emitted in the step."""
        return sum([len(outcome.emission.new_ids) for outcome in self.outcomes if outcome.emission])


@dataclass(frozen=True, slots=True)
class CommittedRecord:
    """A step's record with its tensors, for the time of the step. `make_feedback` does not keep the tensors."""

    record: StepRecord
    forest: Forest
    logits_NV: Float[Tensor, "N V"]

    @property
    def num_steps(self) -> int:
        """The steps that ran in a row."""
        return self.record.num_steps

    @property
    def has_drafted(self) -> bool:
        """Whether a tree was to grow."""
        return self.record.num_draft_rounds > 0

    @property
    def make_feedback(self) -> Callable[[], StepFeedback]:
        """Returns the costs and outcomes of the step, also after later steps."""
        return partial(feedback_of, self.record)

    @property
    def endings(self) -> dict[str, Ending]:
        """Where the step ended for each request that continues."""
        rows = zip(self.record.outcomes, self.forest.probs_rows, strict=True)
        endings = ((outcome.row.request_id, outcome.ending(probs_rows)) for outcome, probs_rows in rows)
        return {request_id: ending for request_id, ending in endings if ending is not None}

    @property
    def draft_probs_RV(self) -> Float[Tensor, "R V"]:
        """The distributions from which drafted tokens were sampled."""
        return self.forest.draft_probs_RV


def feedback_of(record: StepRecord) -> StepFeedback:
    """Return the step's feedback for the policy, of several in a row that of one. The seconds do not include the policy's own."""
    laps, rows = record.laps, record.plan.rows
    return StepFeedback(
        draft_s=laps["draft"] / record.num_steps,
        rest_s=(laps["follow"] + laps["plan"] + laps["forward"] + laps["verify"] + laps["commit"]) / record.num_steps,
        has_prefill=any(len(row.certain_ids) > 1 for row in rows),
        num_rows=len(rows),
        num_rounds=record.num_draft_rounds,
        num_passes=record.draft_passes.num_passes,
        make_work=lambda: _work_of(record),
        make_outcomes=lambda: tuple(map(_draft_outcome, record.outcomes)),
        num_steps=record.num_steps,
    )


def _draft_outcome(outcome: RowOutcome) -> DraftOutcome:
    """Return a row's outcome for the policy. Tokens accepted after a stop token do not count."""
    row, tree, emission, values, verdict = outcome.row, outcome.tree, outcome.emission, outcome.node_values, outcome.verdict
    path = verdict.path if isinstance(verdict, Verdict) else (ROOT,)
    accepted_depth, expansion = outcome.accepted_depth, row.expansion
    if emission is not None and emission.finish is FinishReason.STOP:
        accepted_depth = emission.num_accepted
    drafted_depth, nodes = outcome.num_rounds, None
    if values is not None:
        accepted = tuple([node - 1 for node in path[1 : 1 + accepted_depth]])
        nodes = NodeChances(values.chances, tree.depths[1:], accepted, row.growth_costs.complete_above(expansion, values.chances))
    elif expansion.is_delayed:
        drafted_depth = max(tree.depths) if row.is_drafting else 0
    return DraftOutcome(row.request_id, expansion, outcome.num_drafted, drafted_depth, accepted_depth, nodes)


def _work_of(record: StepRecord) -> StepWork:
    """Return the amounts of work in the step. A round that found no token counts too."""
    rows = record.plan.rows
    num_drawn = num_keys = num_scores = 0
    for row in rows:
        end = row.end
        num_keys += end
        num_scores += len(row.certain_ids) * end
    for outcome in record.outcomes:
        row, num_drafted = outcome.row, outcome.num_drafted
        num_scores += num_drafted * row.end
        num_drawn += 0 if row.sampling.is_greedy else 1 + num_drafted
    passes = record.draft_passes
    return StepWork(
        num_rows=len(rows),
        num_tokens=record.num_target_tokens,
        num_drawn=num_drawn,
        num_keys=num_keys,
        num_scores=num_scores,
        num_passes=passes.num_passes,
        num_draft_tokens=passes.num_fed,
        num_rounds=record.num_draft_rounds,
        num_calls=1.0 / record.num_steps,
    )


def _count(counts: dict[str, int], sources: Iterable[DraftSource]) -> None:
    for source in sources:
        counts[source.value] = counts.get(source.value, 0) + 1


def stats_of(record: StepRecord, scheduler: Scheduler, target: Target) -> StepStats:
    """Return the step's statistics. Gauges are the scheduler's state after the step.

    One loop, because Python functions that ran before the target's pass are slow: the pass has emptied the processor's caches.
    """
    laps, rows, num_steps = record.laps, record.plan.rows, record.num_steps
    num_target_tokens = num_steps * record.num_target_tokens
    num_draft_tokens = num_undraftable = num_expected = num_realised = 0
    expected_tokens, accepted = 0.0, list[int]()
    labels: dict[int, str] = {}  # of equal objects, since creating a label is slow
    expansions: dict[str, int] = {}
    drafted_by_source: dict[str, int] = {}
    accepted_by_source: dict[str, int] = {}
    num_drafts = 0
    for outcome in record.outcomes:
        expansion, num_drafted, expected = outcome.row.expansion, outcome.num_drafted, outcome.expected_tokens
        if (label := labels.get(id(expansion))) is None:
            label = labels[id(expansion)] = expansion.label
        expansions[label] = expansions.get(label, 0) + 1
        num_undraftable += not outcome.row.allows_drafts
        if expected is not None and isinstance(outcome.verdict, Verdict):
            num_expected, num_realised = num_expected + 1, num_realised + len(outcome.verdict.path)
            expected_tokens += expected
        if num_drafted:
            num_drafts, num_draft_tokens = num_drafts + 1, num_draft_tokens + num_drafted
            _count(drafted_by_source, outcome.sources)
            _count(accepted_by_source, outcome.accepted_sources)
            if outcome.emission:
                accepted.append(outcome.emission.num_accepted)
    return StepStats(
        step=record.plan.step,
        num_steps=num_steps,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_used_slots=scheduler.num_used_slots,
        num_slots=scheduler.pool.num_slots,
        num_prompt_tokens=sum([row.num_new_prompt_tokens for row in rows]),
        num_prefix_queries=record.plan.num_prefix_queries,
        num_prefix_hits=record.plan.num_prefix_hits,
        num_generated_tokens=record.num_emitted,
        num_drafts=num_drafts,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=sum(accepted),
        num_decoding_rows=len(record.outcomes),
        num_undraftable_rows=num_undraftable,
        num_target_tokens=num_target_tokens,
        num_read_bytes=num_steps * target.traffic.num_bytes(sum([row.end for row in rows])) if rows else 0,
        num_operations=target.traffic.num_operations(num_target_tokens) if rows else 0,
        num_preemptions=record.plan.num_preempted,
        accepted_per_depth=tuple([sum([a > depth for a in accepted]) for depth in range(max(accepted, default=0))]),
        expansions=expansions,
        drafted_by_source=drafted_by_source,
        accepted_by_source=accepted_by_source,
        num_expected_rows=num_steps * num_expected,
        expected_tokens=expected_tokens,
        num_realised_tokens=num_realised,
        draft_s=laps["draft"],
        verify_s=laps["forward"],
        judge_s=laps["verify"],
        policy_s=laps["choose"] + laps["learn"],
        host_s=laps["follow"] + laps["plan"] + laps["trace"] + laps["commit"],
        step_s=sum(laps.values()),
        policy_reason=record.choice.reason,
        predicted_s=None if record.choice.step_s is None else num_steps * record.choice.step_s,
        predicted_speedup=record.choice.speedup,
        running_adapters=scheduler.running_adapters,
        waiting_adapters=scheduler.waiting_adapters,
    )
