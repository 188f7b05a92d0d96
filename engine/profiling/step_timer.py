"""Times passes and steps of chosen sizes with the engine's own models, before any request arrives.

It runs in the engine's own, still empty caches, and leaves nothing in them that a request reads. Its drafter must keep no other
state that serves requests.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from msgspec import structs

from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionChoice, PassSize, SequenceView, StepFeedback, StepWork
from engine.core.step_plan import Row, StepPlan
from engine.core.tree import Expansion, TokenTree
from engine.core.types import ModelInfo, Request, SamplingParams
from engine.draft.drafter import Drafter
from engine.draft.trees.native_growth import HasNativeGrower
from engine.engine import Engine
from engine.model.passes import NO_DRAWS
from engine.model.target import Target
from engine.native import library
from engine.profiling.machine import machine_facts
from engine.scheduler.run_pacing import LONGEST_RUN_S
from engine.verify.dispatch import Judge, node_draws, pass_walks
from engine.verify.forest import Forest

_DEPTH = 8  # of trees that recurrent layers run, level by level
_NUM_CONTEXT_SLOTS = 64  # with keys; longer contexts read them repeatedly


class StepTimer:
    """Times the target, the judge and whole steps. Valid while no engine over the same caches has work.

    `drafter` is the measured draft model, if any, without cached text, which would replace some of its passes.
    `drafter_weights` names that model's weights.
    """

    def __init__(
        self, info: ModelInfo, config: SchedulerConfig, target: Target, drafter: Drafter | None, drafter_weights: str = ""
    ) -> None:
        self._drafter = drafter
        self._drafter_weights = drafter_weights
        self._info = info
        self._config = config
        self._target = target
        self._judge = Judge()
        self._has_context = False

    @property
    def limits(self) -> SchedulerConfig:
        """Limits of a step; the longest sequence is that of the models."""
        return replace(self._config, max_model_len=self._info.max_model_len)

    @property
    def longest_runs_s(self) -> tuple[float, float]:
        """Seconds for which steps of plain decoding, and steps with drafts of greedy and coupled rows, run in a row.

        0 if each is a call of its own.
        """
        grower = self._drafter.native_grower() if isinstance(self._drafter, HasNativeGrower) else None
        longest_s = LONGEST_RUN_S if self._target.runs_steps else 0.0
        return longest_s, 0.0 if grower is None else longest_s

    @property
    def facts(self) -> dict[str, str]:
        """All that times depend on: machine, threads, library, models, number format. Times with equal facts are comparable."""
        info = self._info
        return {
            **machine_facts(info.device),
            "passes": library.digest() if self._target.model.native is not None else self._target.method,
            "fused": str(self._target.model.fused is not None),
            "same_bits": str(self._target.model.has_same_bits),
            "dtype": info.dtype,
            "target": self._target.model.description,
            "drafter": self._drafter.name if self._drafter else "none",
            "drafter_weights": self._drafter_weights,
            "verifier": info.verifier,
        }

    def time_pass(self, size: PassSize) -> tuple[StepWork, float]:
        """Return the work of a pass of this size, and the seconds of the pass and its judgement."""
        self._write_context()
        rows = [self._row(index, size) for index in range(size.num_rows)]
        trees = tuple(_chain(size.num_nodes, row.certain_ids[0]) for row in rows)
        fed = [_paths(size.num_nodes, tree.token_ids[0], _DEPTH) for tree in trees] if self._target.model.has_states else trees
        probs_RV = torch.full((1, self._info.vocab_size), 1.0 / self._info.vocab_size, device=self._target.model.device)
        probs_rows = tuple(tuple(0 if tree.draws[node] else None for node in range(tree.num_nodes)) for tree in trees)
        forest = Forest(trees, probs_RV, probs_rows)
        self._synchronize()
        begin_s = time.perf_counter()
        draws = node_draws(rows, trees) if self._target.chooses else NO_DRAWS
        walks = pass_walks(rows, forest) if self._target.walks else None
        logits_NV = self._target.forward(StepPlan(0, tuple(rows)), fed, draws=draws, walks=walks.walks if walks else None)
        self._judge.judge(rows, forest, logits_NV, self._target.likeliest(logits_NV, forest.num_nodes), walks)
        seconds = time.perf_counter() - begin_s
        num_keys, num_drawn = size.num_context + 1, size.num_tokens if size.is_drawn else 0
        num_scores = size.num_tokens * num_keys
        return StepWork(size.num_rows, size.num_tokens, num_drawn, size.num_rows * num_keys, num_scores, 0, 0, 0), seconds

    def run_steps(self, num_rows: int, num_prompt: int, expansions: Sequence[Expansion]) -> list[StepFeedback]:
        """Run real steps of greedy sequences, each with the next expansion for every sequence; return their costs.

        Each prompt repeats one token, so that a drafter from cached text finds a draft.
        """
        script = _Script(expansions)
        engine = Engine(self._info, self._config, self._target, self._drafter, script)
        budget = sum(1 + one.max_depth for one in expansions) + 2
        sampling = SamplingParams(temperature=0.0, max_tokens=budget, ignore_eos=True)
        for row in range(num_rows):
            token_id = 3 + row % max(1, self._info.vocab_size - 3)
            engine.add(Request(f"rig-{row}", (token_id,) * num_prompt, sampling))
        while engine.has_work and len(script.feedback) < len(expansions):
            engine.step()
        for row in range(num_rows):
            engine.abort(f"rig-{row}")
        return script.feedback

    def _row(self, index: int, size: PassSize) -> Row:
        own = range(_NUM_CONTEXT_SLOTS + index * size.num_nodes, _NUM_CONTEXT_SLOTS + (index + 1) * size.num_nodes)
        context = tuple(slot % _NUM_CONTEXT_SLOTS for slot in range(size.num_context))
        return Row(
            request_id=f"rig-{index}",
            context_len=size.num_context,
            certain_ids=(index % self._info.vocab_size,),
            num_new_prompt_tokens=0,
            is_decoding=True,
            draft_len=size.num_context,
            draft_ids=(),
            expansion=Expansion(size.num_nodes - 1, 1, 0),
            slots=(*context, *own),
            sampling=SamplingParams(temperature=1.0 if size.is_drawn else 0.0),
            verifier=self._info.verifier,
            seed=index,
            history=(),
            num_prompt_tokens=0,
        )

    def _write_context(self) -> None:
        """Fill the slots that contexts read, once: unwritten memory could hold values that compute slowly."""
        states = self._target.cache.states  # which the steps of an engine drop
        is_lacking = self._target.model.has_states and not all(slot in states for slot in range(_NUM_CONTEXT_SLOTS))
        if is_lacking or not self._has_context:
            self._has_context = True
            row = self._row(0, PassSize(1, _NUM_CONTEXT_SLOTS, 0))
            own = tuple(range(_NUM_CONTEXT_SLOTS))
            self._target.forward(StepPlan(0, (structs.replace(row, slots=own),)), (_paths(_NUM_CONTEXT_SLOTS, 0, _DEPTH),))

    def _synchronize(self) -> None:
        if self._target.model.device.type == "cuda":
            torch.cuda.synchronize(self._target.model.device)


class _Script:
    """A policy that takes each step's choice from a list, once every prompt is computed, and keeps the feedback."""

    name = "script"

    def __init__(self, expansions: Sequence[Expansion]) -> None:
        self.feedback: list[StepFeedback] = []
        self._expansions = iter(expansions)
        self._is_script = False

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        self._is_script = all(view.num_uncached == 1 for view in views)
        wish = next(self._expansions, Expansion(0, 1, 0)) if self._is_script else Expansion(0, 1, 0)
        return ExpansionChoice((wish,) * len(views))

    def observe(self, feedback: StepFeedback) -> None:
        if self._is_script:
            self.feedback.append(feedback)


def _paths(num_nodes: int, root_id: int, depth: int) -> TokenTree:
    """Return a tree of paths of `depth` nodes from the root."""
    parents = (-1, *(0 if node % depth == 0 else node for node in range(num_nodes - 1)))
    draws: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        draws[parent].append(node)
    token_ids = (1 if node % depth else node // depth for node in range(num_nodes - 1))  # siblings have different tokens
    return TokenTree(parents, (root_id, *token_ids), tuple(map(tuple, draws)))


def _chain(num_nodes: int, root_id: int) -> TokenTree:
    """Return a chain of one repeated token."""
    return TokenTree.chain((root_id, *(1,) * (num_nodes - 1)))
