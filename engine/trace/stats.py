"""Statistics of a step, and the feedback that a policy learns from."""

import time
from collections.abc import Callable, Sequence
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
        return len(self.tree.parents) - 1 if self.row.is_drafting else 0

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


class StepRecord(msgspec.Struct, frozen=True):
    """The whole record of a step: its plan, the policy's choice, the outcomes of the decoding rows, and seconds by stage.

    Trees grew in `num_draft_rounds` rounds with `draft_passes` of the draft model. `num_steps` ran in a row. If they decode
    plainly, a row has one outcome for all of them. Else `parts` has a record of each, whose `num_calls` is its part of the call.
    """

    plan: StepPlan
    choice: ExpansionChoice
    num_draft_rounds: int
    draft_passes: ModelPasses
    outcomes: tuple[RowOutcome, ...]
    laps: dict[str, float]
    num_steps: int = 1
    parts: tuple["StepRecord", ...] = ()
    num_calls: float = 1.0

    @property
    def num_target_tokens(self) -> int:
        """Packed tokens of the target's passes."""
        certain = sum([len(row.certain_ids) for row in self.plan.rows])
        return self.num_steps * certain + sum([outcome.num_drafted for outcome in self.outcomes])


class CommittedRecord(msgspec.Struct, frozen=True):
    """A step's record with its tensors, for the time of the step. `make_feedbacks` do not keep the tensors."""

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
    def make_feedbacks(self) -> list[Callable[[], StepFeedback]]:
        """Return the costs and outcomes of the step, also after later steps: of each step with drafts, of the first plain one."""
        return [partial(feedback_of, one) for one in self.record.parts or (self.record,)]

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
        num_tokens=record.num_target_tokens // record.num_steps,
        num_drawn=num_drawn,
        num_keys=num_keys,
        num_scores=num_scores,
        num_passes=passes.num_passes,
        num_draft_tokens=passes.num_fed,
        num_rounds=record.num_draft_rounds,
        num_calls=record.num_calls / record.num_steps,
    )


def _count(counts: dict[str, int], sources: Sequence[DraftSource]) -> None:
    for source in dict.fromkeys(sources):
        counts[source] = counts.get(source, 0) + sources.count(source)


def stats_of(record: StepRecord, scheduler: Scheduler, target: Target) -> StepStats:
    """Return the step's statistics. Gauges are the scheduler's state after the step.

    One loop, because Python functions that ran before the target's pass are slow: the pass has emptied the processor's caches.
    """
    laps, plan, num_steps = record.laps, record.plan, record.num_steps
    num_certain = num_keys = num_new_prompt = 0
    for row in plan.rows:
        num_certain += len(row.certain_ids)
        num_keys += row.context_len
        num_new_prompt += row.num_new_prompt_tokens
    num_draft_tokens = num_undraftable = num_expected = num_realised = num_emitted = 0
    expected_tokens, accepted = 0.0, list[int]()
    labels: dict[int, str] = {}  # of equal objects, since creating a label is slow
    expansions: dict[str, int] = {}
    drafted_by_source: dict[str, int] = {}
    accepted_by_source: dict[str, int] = {}
    for row in plan.decoding:
        if (label := labels.get(id(row.expansion))) is None:
            label = labels[id(row.expansion)] = row.expansion.label
        expansions[label] = expansions.get(label, 0) + 1
        num_undraftable += not row.allows_drafts
    for outcome in record.outcomes:
        verdict, emission, num_drafted = outcome.verdict, outcome.emission, outcome.num_drafted
        if isinstance(verdict, Verdict) and verdict.expected_tokens is not None:
            num_expected, num_realised = num_expected + outcome.num_steps, num_realised + len(verdict.path)
            expected_tokens += verdict.expected_tokens
        if emission is not None:
            num_emitted += len(emission.new_ids)
        if num_drafted:
            num_draft_tokens += num_drafted
            _count(drafted_by_source, outcome.sources)
            _count(accepted_by_source, outcome.accepted_sources)
            accepted.append(0 if emission is None else emission.num_accepted)
    num_target_tokens = num_steps * num_certain + num_draft_tokens
    return StepStats(
        step=plan.step,
        num_steps=num_steps,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_used_slots=scheduler.num_used_slots,
        num_slots=scheduler.pool.num_slots,
        num_prompt_tokens=num_new_prompt,
        num_prefix_queries=plan.num_prefix_queries,
        num_prefix_hits=plan.num_prefix_hits,
        num_generated_tokens=num_emitted,
        num_drafts=len(accepted),
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=sum(accepted),
        num_decoding_rows=len(plan.decoding),
        num_undraftable_rows=num_undraftable,
        num_target_tokens=num_target_tokens,
        num_read_bytes=num_steps * target.traffic.num_bytes(num_keys + num_certain) if plan.rows else 0,
        num_operations=target.traffic.num_operations(num_target_tokens) if plan.rows else 0,
        num_preemptions=plan.num_preempted,
        accepted_per_depth=tuple([sum([a > depth for a in accepted]) for depth in range(max(accepted))]) if accepted else (),
        expansions=expansions,
        drafted_by_source=drafted_by_source,
        accepted_by_source=accepted_by_source,
        num_expected_rows=num_expected,
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
