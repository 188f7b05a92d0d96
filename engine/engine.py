"""The step: the one place where scheduler, policy, drafter, target and verifier meet.

Synchronous and single-threaded; the worker turns its loop. Knows token ids, never text, never HTTP.
"""

import logging
from collections.abc import Callable, Set
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionPolicy
from engine.core.step_plan import Feeding, Row, StepPlan
from engine.core.tree import PLAIN
from engine.core.types import DraftSource, ErrorCode, FinishReason, ModelInfo, Request, StepStats, TokenEvent, TokenLogprobs
from engine.core.validation import refused, require_runnable
from engine.core.verifier_table import verifier_for
from engine.draft.drafter import Drafter, RequestFollower
from engine.draft.trees.calibration import Calibrations
from engine.draft.trees.grow import grow, learn
from engine.draft.trees.grown import Growth, plain_growth
from engine.kv_cache.canary import SlotCanary
from engine.kv_cache.slot_digests import NoWatch, SlotDigests, StepWatch
from engine.model.root_features import Ending, RootFeatures
from engine.model.target import Target
from engine.scheduler.scheduler import RowResult, Scheduler
from engine.scheduler.sequence import Sequence
from engine.structured_output.grammars import CompiledGrammars, no_grammars
from engine.structured_output.masks import GrammarMasks
from engine.structured_output.pending import PendingGrammars
from engine.teacher_forcing import TeacherForcing
from engine.trace.stats import RowOutcome, StepRecord, Stopwatch, feedback_of, stats_of
from engine.trace.tracer import NoTracer, Tracer, traced_rows, with_traces
from engine.trace.tree_probs import traced_probs
from engine.verify.dispatch import NOT_FINITE, Judge, logprobs_of
from engine.verify.prompt_logprobs import NO_SCORES, scored_by, scores_of, with_scores
from engine.verify.verdict import Unjudged, Verdict
from engine.worker.step_log import StepNote, note_of

_logger = logging.getLogger(__name__)

_PATIENCE_S = 0.05  # that an engine without other work waits for a grammar


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step brought: events of requests, and its numbers."""

    events: tuple[TokenEvent, ...]
    stats: StepStats


class Engine:
    """Owns the scheduler and the models. Not thread-safe: one caller adds, aborts and steps."""

    def __init__(
        self,
        info: ModelInfo,
        config: SchedulerConfig,
        target: Target,
        drafter: Drafter | None,
        policy: ExpansionPolicy,
        roots: RootFeatures | None = None,
        grammars: CompiledGrammars | None = None,
    ) -> None:
        self.info = info
        self._config = config
        self._target = target
        self._drafter = drafter
        self._follower: RequestFollower | None = drafter if isinstance(drafter, RequestFollower) else None
        self._policy = policy
        self._roots = roots or RootFeatures(target.model, drafter)
        grammars = grammars or no_grammars()
        self.grammars = GrammarMasks(grammars, 2 * config.max_running)
        self._pending_grammars = PendingGrammars(grammars)
        self._judge = Judge(self.grammars)
        self._tracer: Tracer = NoTracer()
        self._announce: Callable[[StepNote], None] = _ignore_note
        self._watch: StepWatch = NoWatch()
        self._calibrations = Calibrations()
        self._scheduler = Scheduler(config, drafter.feeding if drafter else Feeding.TARGET_CACHE)
        self._ended: list[TokenEvent] = []  # between steps

    @property
    def target(self) -> Target:
        """The target model, for measurements beside the engine's steps."""
        return self._target

    @property
    def drafter(self) -> Drafter | None:
        """What drafts, for measurements beside the engine's steps."""
        return self._drafter

    @property
    def calibrations(self) -> Calibrations:
        """What growth has learnt so far, for measurements beside the engine's steps."""
        return self._calibrations

    @property
    def roots(self) -> RootFeatures:
        """What tells a policy of the places where trees will grow."""
        return self._roots

    @property
    def has_work(self) -> bool:
        """Whether a step would do or say something."""
        return self._scheduler.has_work or bool(self._ended) or not self._pending_grammars.is_empty

    def add(self, request: Request) -> None:
        """Queue a request; raise RequestRefused if it can never run, ValueError if its id is in use."""
        require_runnable(request, self.info)
        if request.request_id in self._scheduler or request.request_id in self._pending_grammars:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if request.sampling.grammar is None:
            self._queue(request)
        else:
            self._pending_grammars.enter(request)

    def _queue(self, request: Request) -> None:
        request = with_end_tokens(request, self.info)
        sequence = Sequence(request, request.seed, request.speculation.verifier or self._verifier_for(request))
        self._scheduler.add(sequence)
        if self._follower is not None:
            self._follower.begin(request, sequence.token_ids)

    def _verifier_for(self, request: Request) -> str:
        """Return the verifier of a request that names none."""
        if request.sampling.seed is not None:
            return "coupled"
        return verifier_for(request.speculation.expansion or PLAIN, self.info.verifier)

    def abort(self, request_id: str) -> None:
        """End a request now; the next step tells of it. Unknown ids are ignored."""
        if self._scheduler.remove(request_id) or self._pending_grammars.remove(request_id):
            self._ended.append(TokenEvent(request_id, finish=FinishReason.ABORT))
            self._let_go(request_id)

    def _let_go(self, request_id: str) -> None:
        if self._follower is not None:
            self._follower.end(request_id)

    def step(self) -> StepOutput:
        """Advance every running sequence by one tree; return the tokens that left the engine."""
        watch = Stopwatch()
        # 1. Who runs, and how far each may speculate.
        self._queue_compiled()
        self._scheduler.admit()
        has_news = self._follower is not None and self._follower.advance(self._scheduler.running_ids)
        watch.lap("follow")
        views = self._scheduler.views()
        views.has_news = has_news
        choice = self._policy.choose(views)
        watch.lap("choose")
        plan = self._scheduler.plan(choice.expansions, keeps_up=choice.keeps_up, prices=choice.prices)
        watch.lap("plan")
        self._announce(note_of(plan, self._pending_grammars.request_ids))
        self._watch.check(plan)
        # 2. A tree for each decoding row.
        growth = self._grow(plan)
        watch.lap("draft")
        # 3. One tree-masked pass of the target over every row.
        scored = scored_by(plan, growth.forest.trees)
        places = [place for one in scored for place in one.places]
        passed_NV = logits_NV = self._target.forward(plan, growth.forest.trees, places)
        self._watch.note(plan, growth.forest.trees)
        prompts = NO_SCORES
        if scored:
            logits_NV, logits_SV = logits_NV.tensor_split([growth.forest.num_nodes])
            prompts = scores_of(scored, logits_SV)
        watch.lap("verify")
        # 4. Judge every tree.
        best = self._target.model.likeliest(passed_NV, growth.forest.num_nodes)
        verdicts = self._judge.judge(plan.decoding, growth.forest, logits_NV, best)
        verdicts = [NOT_FINITE if row.request_id in prompts.broken else one for row, one in zip(plan.decoding, verdicts)]
        watch.lap("judge")
        probs = traced_probs(plan.decoding, growth, verdicts, logits_NV, self.grammars)
        watch.lap("trace")
        # 5. Keep the accepted paths; tokens out.
        self._commit_chunks(plan, prompts.broken)
        committed = self._commit(plan, growth, verdicts)
        if self._roots.is_watching:
            self._roots.note(_endings(committed, growth), logits_NV, growth.forest.draft_probs_RV)
        learn(self._calibrations, plan.decoding, growth, verdicts)
        events = [*self._taken_ends(), *(self._event(one, logits_NV) for one in committed)]
        events = with_scores(events, prompts.told)
        # Its laps go on: this one and the last are still to come.
        record = StepRecord(plan, choice, growth.num_rounds, growth.passes, tuple(committed), watch.laps)
        watch.lap("commit")
        self._policy.observe(feedback_of(record))
        watch.lap("learn")
        stats = stats_of(record, self._scheduler)
        rows = traced_rows(record, probs)
        self._tracer.on_step(stats, rows)
        return StepOutput(with_traces(events, stats, rows), stats)

    def trace_to(self, tracer: Tracer) -> None:
        """Tell `tracer` of every step from now on."""
        self._tracer = tracer
        self._scheduler.traces_all = tracer.wants_rows

    def announce(self, listener: Callable[[StepNote], None]) -> None:
        """Have `listener` told of each step from now on, before it runs."""
        self._announce = listener

    def watch_slots(self, canary: SlotCanary) -> None:
        """Check every slot that is read from now on, by the canary of the caches too; valid before the first request."""
        texts = self._watch = SlotDigests(self._scheduler.pool.num_slots)
        for listener in (canary.on_free, texts.on_free):
            self._scheduler.pool.on_freed_slots(listener)
        canary.begin()

    def check_integrity(self) -> None:
        """Raise IntegrityError if slots, tables and sequences contradict each other. Valid between steps."""
        self._scheduler.check_integrity()

    def forcing(self) -> TeacherForcing:
        """Return what feeds known texts to the target in this engine's slots; valid while the engine has no work of its own."""
        return TeacherForcing(self._scheduler, self._target)

    def _queue_compiled(self) -> None:
        """Queue requests whose grammars are compiled; with nothing else to do, wait a moment for one."""
        is_idle = not (self._scheduler.has_work or self._ended)
        for admission in self._pending_grammars.leave(_PATIENCE_S if is_idle else 0.0):
            if admission.refusal is None:
                self._queue(admission.request)
            else:
                self._ended.append(refused(admission.request.request_id, admission.refusal))

    def _taken_ends(self) -> list[TokenEvent]:
        ended, self._ended = self._ended, []
        return ended

    def _grow(self, plan: StepPlan) -> Growth:
        model = self._target.model
        if self._drafter is None:
            return plain_growth(plan.rows, model.vocab_size, model.device)
        return grow(self._drafter, plan.rows, model.vocab_size, model.device, self._calibrations, self.grammars)

    def _commit_chunks(self, plan: StepPlan, broken: Set[str]) -> None:
        """Commit the chunks of prompts; end the requests whose prompt has broken laws."""
        for row in plan.rows:
            if row.is_decoding:
                continue
            if row.request_id in broken:
                self._scheduler.fail(row.request_id)
                self._let_go(row.request_id)
                self._ended.append(_failure(row, NOT_FINITE))
            else:
                self._scheduler.commit_chunk(row)

    def _commit(self, plan: StepPlan, growth: Growth, verdicts: SequenceOf[Verdict | Unjudged]) -> list[RowOutcome]:
        """Commit paths; return what became of the decoding rows, in order."""
        outcomes = []
        for index, (row, verdict) in enumerate(zip(plan.decoding, verdicts, strict=True)):
            emission = None
            if isinstance(verdict, Unjudged):
                self._end_unjudged(row.request_id, verdict)
            else:
                emission = self._scheduler.commit(row, _row_result(growth, index, verdict))
            if emission is None or emission.finish is not None:
                self._let_go(row.request_id)
            tree, offset = growth.forest.trees[index], growth.forest.offsets[index]
            grown = growth.sources[index], growth.node_values[index], growth.rounds[index]
            outcomes.append(RowOutcome(row, tree, *grown, offset, verdict, emission))
        return outcomes

    def _end_unjudged(self, request_id: str, why: Unjudged) -> None:
        """End a request; only where the model itself is broken is what it shares broken too, else others go on with it."""
        if why.code is ErrorCode.LOGITS_NOT_FINITE:
            self._scheduler.fail(request_id)
        else:
            self._scheduler.remove(request_id)

    def _event(self, outcome: RowOutcome, logits_NV: Float[Tensor, "N V"]) -> TokenEvent:
        """Return the row's event; log-probabilities are read here, where the logits still are."""
        row, emission, verdict = outcome.row, outcome.emission, outcome.verdict
        if isinstance(verdict, Unjudged):
            return _failure(row, verdict)
        assert emission is not None  # a judged row was committed
        logprobs: tuple[TokenLogprobs, ...] = ()
        if row.sampling.num_logprobs is not None and emission.new_ids:
            nodes = [outcome.offset + node for node in verdict.path[: len(emission.new_ids)]]
            logprobs = logprobs_of(logits_NV, nodes, emission.new_ids, row.sampling.num_logprobs)
        return TokenEvent(
            request_id=row.request_id,
            token_ids=emission.new_ids,
            logprobs=logprobs,
            finish=emission.finish,
            stop_token_id=emission.new_ids[-1] if emission.finish is FinishReason.STOP else None,
            queued_s=emission.queued_s,
            num_cached_tokens=emission.num_cached,
            expansion=row.expansion,
            num_draft_tokens=outcome.tree.num_nodes - 1,
            num_accepted_tokens=emission.num_accepted,
            num_predicted_tokens=outcome.sources.count(DraftSource.PREDICTION),
            predicted_places=tuple(
                place for place, source in enumerate(outcome.accepted_sources) if source is DraftSource.PREDICTION
            ),
        )


def _failure(row: Row, why: Unjudged) -> TokenEvent:
    """Return the last event of a request whose step came to nothing."""
    text = f"{why.reason} (at position {row.root_position})"
    _logger.error("request %s: %s", row.request_id, text)
    return TokenEvent(row.request_id, finish=FinishReason.ERROR, error=text, error_code=why.code)


def _ignore_note(_: StepNote) -> None:
    """Stand for a listener where nobody wants to know."""


def _endings(outcomes: SequenceOf[RowOutcome], growth: Growth) -> dict[str, Ending]:
    """Return where the step of each row that goes on has ended."""
    endings = {}
    for outcome, probs_rows in zip(outcomes, growth.forest.probs_rows, strict=True):
        row, verdict, emission = outcome.row, outcome.verdict, outcome.emission
        if isinstance(verdict, Verdict) and emission is not None and emission.finish is None:
            last = verdict.path[-1]
            slot = row.slots[row.root_position + last]
            endings[row.request_id] = Ending(outcome.offset + last, probs_rows[last], slot, verdict.extra_id, row.sampling)
    return endings


def with_end_tokens(request: Request, info: ModelInfo) -> Request:
    """Return the request with the model's end tokens among its stops, unless it ignores them."""
    sampling = request.sampling
    if sampling.ignore_eos:
        return request
    stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *info.eos_token_ids)))
    return replace(request, sampling=replace(sampling, stop_token_ids=stops))


def _row_result(growth: Growth, index: int, verdict: Verdict) -> RowResult:
    fed = growth.fed[index]
    drafted_len = next((i for i, node in enumerate(verdict.path) if node not in fed), len(verdict.path)) if fed else 0
    return RowResult(growth.forest.trees[index], verdict.path, verdict.extra_id, drafted_len)
