"""The engine: its step combines scheduler, policy, drafter, target and verifier.

Synchronous and single-threaded. The worker's loop calls it. Knows token ids, no text and no HTTP.
"""

import logging
from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import accumulate

import msgspec
import torch
from jaxtyping import Float
from msgspec import structs
from torch import Tensor

from engine.core.cache_events import CacheEvent
from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionChoice, ExpansionPolicy
from engine.core.row_trace import TreeProbs
from engine.core.step_observer import PolicySteps, StepObserver
from engine.core.step_plan import Feeding, Row, StepPlan
from engine.core.tree import PLAIN
from engine.core.types import DraftSource, ErrorCode, FinishReason, ModelInfo, Request, StepStats, TokenEvent, TokenLogprobs
from engine.core.validation import refusal_event, require_runnable
from engine.core.verifier_table import verifier_for
from engine.draft.drafter import Drafter, RequestFollower
from engine.draft.trees.calibration import Calibrations
from engine.draft.trees.grow import growers_of, learn, start_growth
from engine.draft.trees.grower import Growth, UnreadGrowth
from engine.draft.trees.native_growth import DraftedStep, NativeTreeGrower
from engine.draft_runs import committed_outcomes, run_record
from engine.kv_cache.canary import SlotCanary
from engine.kv_cache.slot_digests import SlotDigests
from engine.model.passes import NO_DRAWS, UnreadPass
from engine.model.root_features import RootFeatures
from engine.model.target import Target
from engine.sampling import device_choice
from engine.sampling.device_choice import NodeChoice
from engine.scheduler.run_pacing import RunPacing
from engine.scheduler.scheduler import ONE_STEP, RowResult, Scheduler
from engine.scheduler.sequence import Sequence
from engine.structured_output.grammars import CompiledGrammars, no_grammars
from engine.structured_output.masks import GrammarMasks
from engine.structured_output.pending import PendingGrammars
from engine.teacher_forcing import TeacherForcing
from engine.trace.stats import CommittedRecord, RowOutcome, StepRecord, Stopwatch, stats_of
from engine.trace.tracer import traced_rows, with_traces
from engine.trace.tree_probs import traced_probs
from engine.utils.host_transfer import arrays_of
from engine.verify.dispatch import NOT_FINITE, Judge, PassWalks, logprobs_of, node_draws, pass_walks
from engine.verify.forest import Forest
from engine.verify.prompt_logprobs import (
    NO_PROMPT_LOGPROBS,
    PromptLogprobs,
    score_prompt_tokens,
    scored_prompt_tokens,
    with_prompt_logprobs,
)
from engine.verify.verdict import Verdict, VerificationFailure
from engine.worker.step_log import StepNote, StepNotes

_logger = logging.getLogger(__name__)

_GRAMMAR_WAIT_S = 0.05  # for which an engine without other work waits for a grammar


class StepOutput(msgspec.Struct, frozen=True):
    """The events of requests in one step, its statistics, and changes of the prefix cache since the last step."""

    events: tuple[TokenEvent, ...]
    stats: StepStats
    cache_events: tuple[CacheEvent, ...] = ()


class _TargetPass(msgspec.Struct, frozen=True):
    """The output of the target's pass: logits of all its places, of the trees' nodes only, the scores of prompts, and paths.

    `run_verdicts` are those of several steps in a row.
    """

    all_NV: Float[Tensor, "N V"]
    nodes_NV: Float[Tensor, "N V"]
    prompts: PromptLogprobs
    choices: SequenceOf[NodeChoice] | None = None  # at the nodes, if they are read
    walks: PassWalks | None = None
    run_verdicts: list[Verdict | VerificationFailure] | None = None

    @property
    def num_steps(self) -> int:
        """The steps that ran in a row."""
        return self.walks.num_steps if self.walks and self.run_verdicts else 1


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
        self._growers = growers_of(drafter, target.model.vocab_size, target.model.device)
        self._native_grower = next((one for one in self._growers if isinstance(one, NativeTreeGrower)), None)
        self._follower: RequestFollower | None = drafter if isinstance(drafter, RequestFollower) else None
        self._policy = PolicySteps(policy)
        self._roots = roots or RootFeatures(target.model, drafter)
        grammars = grammars or no_grammars()
        self.grammars = GrammarMasks(grammars, 2 * config.max_running)
        self._pending_grammars = PendingGrammars(grammars)
        self._judge = Judge(self.grammars)
        self._observers: list[StepObserver] = [self._roots, self._policy]
        self._calibrations = Calibrations()
        if target.model.has_states:
            config = replace(config, prefix_block_tokens=0)  # a block of keys has no state to continue from
        self._scheduler = Scheduler(config, drafter.feeding if drafter else Feeding.TARGET_CACHE)
        if target.model.has_states:
            self._scheduler.pool.on_freed_slots(target.cache.states.drop)
        self._runs = RunPacing(drafts_run=self._native_grower is not None)
        self._observers += [self._scheduler.pacing, self._runs]
        self._no_logits = torch.empty((0, target.model.vocab_size))
        self._ended: list[TokenEvent] = []  # requests that ended between steps

    @property
    def target(self) -> Target:
        """The target model, for measurements outside the engine's steps."""
        return self._target

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, for measurements outside the engine's steps."""
        return self._drafter

    @property
    def calibrations(self) -> Calibrations:
        """The calibrations of tree growth so far, for measurements outside the engine's steps."""
        return self._calibrations

    @property
    def roots(self) -> RootFeatures:
        """The features of roots that a policy can use."""
        return self._roots

    @property
    def has_work(self) -> bool:
        """Whether a step would change anything or return events."""
        return self._scheduler.has_work or bool(self._ended) or not self._pending_grammars.is_empty

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused if it can never run, ValueError if its id is in use."""
        require_runnable(request, self.info)
        if request.request_id in self._scheduler or request.request_id in self._pending_grammars:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if request.sampling.grammar is None:
            self._queue(request)
        else:
            self._pending_grammars.submit(request)

    def _queue(self, request: Request) -> None:
        request = with_end_tokens(request, self.info)
        sequence = Sequence(request, request.seed, request.speculation.verifier or self._verifier_for(request))
        self._scheduler.add(sequence)
        if self._follower is not None:
            self._follower.begin(request, sequence.token_ids)

    def _verifier_for(self, request: Request) -> str:
        """Return the verifier of a request that does not name one."""
        if request.sampling.seed is not None:
            return "coupled"
        return verifier_for(request.speculation.expansion or PLAIN, self.info.verifier)

    def abort(self, request_id: str) -> None:
        """End a request now. The next step returns its ABORT event. Unknown ids are ignored."""
        if self._scheduler.remove(request_id) or self._pending_grammars.remove(request_id):
            self._ended.append(TokenEvent(request_id, finish=FinishReason.ABORT))
            self._stop_following(request_id)

    def _stop_following(self, request_id: str) -> None:
        if self._follower is not None:
            self._follower.end(request_id)

    def step(self) -> StepOutput:
        """Advance every running sequence by one tree, or by several steps in a row. Return events and statistics."""
        watch = Stopwatch()
        choice, plan = self._plan(watch)  # 1. Admit sequences and choose their expansions.
        for observer in self._observers:
            observer.before_step(plan)
        if plan.num_steps > 1 and any(row.is_drafting for row in plan.rows):
            if (drafted := self._run_drafts(plan)) is not None:
                return self._finish(*self._commit_drafts(plan, choice, drafted, watch), watch)
            plan = structs.replace(plan, num_steps=1)
        grown = self._grow(plan)  # 2. Grow a tree for each decoding row.
        watch.lap("draft")
        growth, passed = self._forward(plan, grown)  # 3. Run one tree-masked pass of the target over all rows.
        watch.lap("forward")
        if isinstance(grown, UnreadGrowth):
            watch.shift("forward", "draft", grown.clock.seconds - watch.laps["draft"])
        verdicts = self._verify(plan, growth.forest, passed)  # 4. Verify each tree.
        watch.lap("verify")
        is_traced = any(row.is_traced for row in plan.decoding)
        probs = traced_probs(plan.decoding, growth, verdicts, passed.nodes_NV, self.grammars) if is_traced else None
        watch.lap("trace")
        outcomes, events = self._commit(plan, growth, passed, verdicts)  # 5. Keep the accepted paths and emit their tokens.
        laps = watch.laps  # later laps are added to it
        record = StepRecord(plan, choice, growth.num_rounds, growth.passes, tuple(outcomes), laps, passed.num_steps)
        watch.lap("commit")
        return self._finish(CommittedRecord(record, growth.forest, passed.nodes_NV), events, watch, probs)

    def _finish(
        self, committed: CommittedRecord, events: list[TokenEvent], watch: Stopwatch, probs: Mapping[str, TreeProbs] | None = None
    ) -> StepOutput:
        """Have the observers learn from a committed step, and return its output. `probs` are those of traced rows, if any."""
        for observer in self._observers:
            observer.after_commit(committed)
        watch.lap("learn")
        record = committed.record
        stats = stats_of(record, self._scheduler, self._target)
        rows = [] if probs is None else traced_rows(record, probs)
        for observer in self._observers:
            observer.after_step(stats, rows)
        return StepOutput(with_traces(events, stats, rows, self.info.peaks), stats, self.take_cache_events())

    def add_observer(self, observer: StepObserver) -> None:
        """Call the observer in every step from now on."""
        self._observers.append(observer)
        self._scheduler.traces_all |= observer.wants_rows

    def add_step_listener(self, listener: Callable[[StepNote], None]) -> None:
        """Call `listener` with a note of each step from now on, before the step runs."""
        notes = StepNotes(listener, lambda: self._pending_grammars.request_ids)
        self._observers.insert(0, notes)  # first, so that the note exists if another observer fails the step

    def watch_slots(self, canary: SlotCanary) -> None:
        """Check the ownership of every slot that is read from now on. Must be called before the first request."""
        digests = SlotDigests(self._scheduler.pool.num_slots)
        self.add_observer(digests)
        for listener in (canary.on_free, digests.on_free):
            self._scheduler.pool.on_freed_slots(listener)
        canary.begin()

    def check_integrity(self) -> None:
        """Raise IntegrityError if slots, tables and sequences are inconsistent. Valid between steps."""
        self._scheduler.check_integrity()

    def take_cache_events(self) -> tuple[CacheEvent, ...]:
        """Return the changes of the prefix cache since the last call. `step` returns them itself."""
        return self._scheduler.take_cache_events()

    def forcing(self) -> TeacherForcing:
        """Return a TeacherForcing that uses this engine's slots. It may run only while the engine has no work."""
        return TeacherForcing(self._scheduler, self._target)

    def _queue_compiled(self) -> None:
        """Queue requests whose grammars are compiled. An idle engine waits up to _GRAMMAR_WAIT_S for one."""
        is_idle = not (self._scheduler.has_work or self._ended)
        for admission in self._pending_grammars.ready(_GRAMMAR_WAIT_S if is_idle else 0.0):
            if admission.refusal is None:
                self._queue(admission.request)
            else:
                self._ended.append(refusal_event(admission.request.request_id, admission.refusal))

    def _plan(self, watch: Stopwatch) -> tuple[ExpansionChoice, StepPlan]:
        """Admit sequences, have the policy choose their expansions, and plan the step."""
        self._queue_compiled()
        self._scheduler.admit()
        views = self._scheduler.views()
        choice = self._policy.reused(views)
        if choice is None:
            views.has_news = self._follower is not None and self._follower.advance(self._scheduler.running_ids)
        watch.lap("follow")
        choice = choice or self._policy.choose(views)
        watch.lap("choose")
        most_steps = self._runs.most_steps(len(views), self._policy.most_steps) if self._target.runs_steps else ONE_STEP
        plan = self._scheduler.plan(
            choice.expansions, keeps_up=choice.keeps_up, growth_costs=choice.growth_costs, most_steps=most_steps
        )
        watch.lap("plan")
        return choice, plan

    def _run_drafts(self, plan: StepPlan) -> list[DraftedStep] | None:
        """Run drafting steps in a row. None if the library cannot, or if a row has no distribution: then nothing changed."""
        grower = self._native_grower
        if grower is None or not grower.can_grow(plan.rows):
            return None
        steps = grower.start_steps(plan.rows, self._calibrations, plan.num_steps)
        self._target.run_drafts(steps)
        return grower.finish_steps(plan.rows, steps) or None

    def _commit_drafts(
        self, plan: StepPlan, choice: ExpansionChoice, drafted: SequenceOf[DraftedStep], watch: Stopwatch
    ) -> tuple[CommittedRecord, list[TokenEvent]]:
        """Commit drafting steps in a row, and learn from each. Return their record and all events."""
        watch.lap("forward")
        watch.laps |= {"draft": 0.0, "verify": 0.0, "trace": 0.0}
        watch.shift("forward", "draft", sum(one.draft_s for one in drafted))
        outcomes = committed_outcomes(plan.rows, drafted, self._scheduler)
        for one, of_step in zip(drafted, outcomes, strict=True):
            learn(self._calibrations, plan.rows, one.growth, [outcome.verdict for outcome in of_step])
        for outcome in outcomes[-1]:
            if outcome.emission and outcome.emission.finish is not None:
                self._stop_following(outcome.row.request_id)
        (events, self._ended), logits_NV = (self._ended, []), self._no_logits
        events += [self._event(outcome, logits_NV) for of_step in outcomes for outcome in of_step]
        watch.lap("commit")
        record = run_record(plan, choice, drafted, outcomes, watch.laps)
        return CommittedRecord(record, drafted[-1].growth.forest, logits_NV), events

    def _grow(self, plan: StepPlan) -> Growth | UnreadGrowth:
        return start_growth(self._growers, plan.rows, self._calibrations, self.grammars)

    def _forward(self, plan: StepPlan, grown: Growth | UnreadGrowth) -> tuple[Growth, _TargetPass]:
        """Run the target over all rows and score prompt tokens whose log-probabilities are requested. Return the trees too.

        Trees that a device has grown are read with the tokens that the pass has chosen, if it can choose and has room for them.
        """
        trees = grown.trees if isinstance(grown, UnreadGrowth) else grown.forest.trees
        scored = scored_prompt_tokens(plan, trees)
        places = [place for one in scored for place in one.sources] if scored else []
        draws = node_draws(plan.decoding, trees) if self._target.chooses else NO_DRAWS
        choices = walks = run_verdicts = None
        if isinstance(grown, Growth):
            growth = grown
            walks = pass_walks(plan.decoding, growth.forest, plan.num_steps) if self._target.walks else None
            all_NV = self._target.forward(plan, trees, places, draws, walks.walks if walks else None)
            if walks and walks.num_steps:
                forest, run_verdicts = walks.chains(plan.decoding, growth.forest)
                growth = structs.replace(growth, forest=forest)
        elif (unread := self._target.forward_unread(plan, trees, places, draws, grown.nodes)) is not None:
            growth, all_NV, choices = _read(grown, unread, len(places))
        else:
            return self._forward(plan, grown.read(arrays_of(grown.results)))
        for observer in self._observers:
            observer.after_forward(plan, growth.forest.trees)
        if not scored:
            return growth, _TargetPass(all_NV, all_NV, NO_PROMPT_LOGPROBS, choices, walks, run_verdicts)
        nodes_NV, scored_SV = all_NV.tensor_split([growth.forest.num_nodes])
        return growth, _TargetPass(all_NV, nodes_NV, score_prompt_tokens(scored, scored_SV), choices, walks)

    def _verify(self, plan: StepPlan, forest: Forest, passed: _TargetPass) -> list[Verdict | VerificationFailure]:
        """Verify the tree of each decoding row. A row whose prompt has non-finite logits fails."""
        if passed.run_verdicts is not None:
            return passed.run_verdicts
        walks = passed.walks if passed.walks is not None and self._target.followed(passed.all_NV) else None
        best = passed.choices or (lambda: self._target.likeliest(passed.all_NV, forest.num_nodes))
        verdicts = self._judge.judge(plan.decoding, forest, passed.nodes_NV, best, walks)
        if not (broken := passed.prompts.failed):
            return verdicts
        return [NOT_FINITE if row.request_id in broken else one for row, one in zip(plan.decoding, verdicts)]

    def _commit(
        self, plan: StepPlan, growth: Growth, passed: _TargetPass, verdicts: SequenceOf[Verdict | VerificationFailure]
    ) -> tuple[list[RowOutcome], list[TokenEvent]]:
        """Commit chunks and paths, and learn from the verdicts. Return the outcomes of the decoding rows, and all events."""
        if len(plan.decoding) < len(plan.rows):
            self._commit_chunks(plan, passed.prompts.failed)
        outcomes = self._commit_paths(plan, growth, verdicts)
        learn(self._calibrations, plan.decoding, growth, verdicts)
        events, self._ended = self._ended, []
        events += [self._event(one, passed.nodes_NV) for one in outcomes]
        return outcomes, with_prompt_logprobs(events, passed.prompts.logprobs)

    def _commit_chunks(self, plan: StepPlan, broken: Set[str]) -> None:
        """Commit the chunks of prompts. End the requests whose prompt has non-finite logits."""
        for row in plan.rows:
            if row.is_decoding:
                continue
            if row.request_id in broken:
                self._scheduler.fail(row.request_id)
                self._stop_following(row.request_id)
                self._ended.append(_failure_event(row, NOT_FINITE))
            else:
                self._target.end_step(row)
                self._scheduler.commit_chunk(row)

    def _commit_paths(
        self, plan: StepPlan, growth: Growth, verdicts: SequenceOf[Verdict | VerificationFailure]
    ) -> list[RowOutcome]:
        """Commit accepted paths. Return the outcomes of the decoding rows, in order."""
        outcomes, has_states, offset = [], self._target.model.has_states, 0
        grown = zip(growth.forest.trees, growth.sources, growth.node_values, growth.rounds, growth.fed, strict=True)
        for row, verdict, (tree, sources, values, num_rounds, fed) in zip(plan.decoding, verdicts, grown, strict=True):
            emission = None
            if isinstance(verdict, VerificationFailure):
                self._end_failed(row.request_id, verdict)
            else:
                path = verdict.path
                if has_states:
                    self._target.end_step(row, path)
                drafted_len = next((i for i, node in enumerate(path) if node not in fed), len(path)) if fed else 0
                emission = self._scheduler.commit(row, RowResult(tree, path, verdict.extra_id, drafted_len))
            if emission is None or emission.finish is not None:
                self._stop_following(row.request_id)
            outcomes.append(RowOutcome(row, tree, sources, values, num_rounds, offset, verdict, emission))
            offset += len(tree.parents)
        return outcomes

    def _end_failed(self, request_id: str, why: VerificationFailure) -> None:
        """End a request. If its logits are not finite, its cached prefix is invalidated for other requests too."""
        if why.code is ErrorCode.LOGITS_NOT_FINITE:
            self._scheduler.fail(request_id)
        else:
            self._scheduler.remove(request_id)

    def _event(self, outcome: RowOutcome, logits_NV: Float[Tensor, "N V"]) -> TokenEvent:
        """Return the row's event, with log-probabilities if they are requested."""
        row, emission, verdict = outcome.row, outcome.emission, outcome.verdict
        if isinstance(verdict, VerificationFailure):
            return _failure_event(row, verdict)
        assert emission is not None  # a verified row was committed
        logprobs: tuple[TokenLogprobs, ...] = ()
        new_ids, sources, num_drafted = emission.new_ids, outcome.sources, outcome.num_drafted
        if row.sampling.num_logprobs is not None and new_ids:
            nodes = [outcome.offset + node for node in verdict.path[: len(new_ids)]]
            logprobs = logprobs_of(logits_NV, nodes, new_ids, row.sampling.num_logprobs)
        return TokenEvent(
            request_id=row.request_id,
            token_ids=new_ids,
            logprobs=logprobs,
            finish=emission.finish,
            stop_token_id=new_ids[-1] if emission.finish is FinishReason.STOP else None,
            queued_s=emission.queued_s,
            num_cached_tokens=emission.num_cached,
            expansion=row.expansion,
            num_draft_tokens=num_drafted,
            num_accepted_tokens=emission.num_accepted,
            num_predicted_tokens=sources.count(DraftSource.PREDICTION),
            predicted_places=_predicted_places(outcome) if DraftSource.PREDICTION in sources else (),
            num_steps=1 if num_drafted else outcome.num_steps,
        )


def _read(grown: UnreadGrowth, passed: UnreadPass, num_places: int) -> tuple[Growth, Float[Tensor, "N V"], list[NodeChoice]]:
    """Return the step's trees, the logits of their nodes and of further places, and the nodes' choices: the step's one wait."""
    *results, choices_N3 = arrays_of([*grown.results, passed.choices_N3])
    growth = grown.read(results)
    firsts = [*accumulate((tree.num_nodes for tree in grown.trees), initial=0)]
    trees = zip(firsts, growth.forest.trees)
    nodes = [first + node for first, tree in trees for node in range(tree.num_nodes)]
    places = range(firsts[-1], firsts[-1] + num_places)
    return growth, passed.logits([*nodes, *places]), device_choice.read(choices_N3[nodes])


def _predicted_places(outcome: RowOutcome) -> tuple[int, ...]:
    """Return the indices of a row's emitted tokens that were drafted from its request's prediction."""
    return tuple(place for place, source in enumerate(outcome.accepted_sources) if source is DraftSource.PREDICTION)


def _failure_event(row: Row, why: VerificationFailure) -> TokenEvent:
    """Return the last event of a request whose step failed."""
    text = f"{why.reason} (at position {row.root_position})"
    _logger.error("request %s: %s", row.request_id, text)
    return TokenEvent(row.request_id, finish=FinishReason.ERROR, error=text, error_code=why.code)


def with_end_tokens(request: Request, info: ModelInfo) -> Request:
    """Return the request with the model's end tokens added to its stop tokens, unless it ignores them."""
    sampling = request.sampling
    if sampling.ignore_eos:
        return request
    stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *info.eos_token_ids)))
    return replace(request, sampling=replace(sampling, stop_token_ids=stops))
