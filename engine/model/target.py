"""The target model and its cache: the one tree-masked pass of a step.

Shape key: T packed tokens, N nodes of all decoding rows' trees (tree after tree) and queried places, V vocabulary.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.packing import PackedBatch, Segment, pack
from engine.attention.paged.completion import GrownNodes
from engine.attention.paged.graphs import GraphResources
from engine.attention.segments import tree_segment
from engine.core.step_plan import Row, StepPlan
from engine.core.tree import ROOT, TokenTree
from engine.kv_cache.canary import Canary
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from engine.model.passes import NO_DRAWS, DirectPasses, RecordedPasses, UnreadPass, WrittenSlots
from engine.model.traffic import Traffic, traffic_of
from engine.native.draft_steps import DraftSteps
from engine.native.walks import Walks
from engine.sampling import device_choice
from engine.sampling.argmax import RowArgMax
from engine.sampling.device_choice import NodeChoice, NodeDraws

_MOST_ROOM = 128  # nodes for which a pass has room although they may be absent: it reads its weights for about as long


class PassObserver(Protocol):
    """Stores data of each pass beside the cache, by slot."""

    def follow(self, cache: KVCache) -> bool:
        """Begin to store data of passes that write to this cache; return whether the passes store it without `on_pass`."""
        ...

    def on_pass(self, write_slots_T: Int[Tensor, " T"]) -> None:
        """Store data of the pass that has just run: its token t was cached in slot `write_slots_T[t]`."""
        ...


class Target:
    """The model whose distribution is served. Owns its cache's contents; the scheduler assigns slots."""

    def __init__(self, model: CausalModel, num_slots: int, canary: Canary | None = None) -> None:
        self.model = model
        self.cache = KVCache(num_slots, model.device, canary, model.cache_dtype)
        self._observers: list[PassObserver] = []
        self._passes: DirectPasses | RecordedPasses = DirectPasses(model, self.cache, self._report)

    def report_to(self, observer: PassObserver) -> None:
        """Report every later pass to `observer`, unless passes store its data by themselves. Call this before `record`."""
        if isinstance(self._passes, RecordedPasses):
            raise RuntimeError("passes are recorded with their observers: add observers before recording")
        if not observer.follow(self.cache):
            self._observers.append(observer)

    def record(self, steps: GraphResources) -> RecordedPasses:
        """Replay passes from now on; return them, so that the caller can prepare them."""
        chooses = device_choice.can_choose_on(self.model.device)
        self._passes = recorded = RecordedPasses(self.model, self.cache, steps, self._report, chooses)
        return recorded

    @property
    def walks(self) -> bool:
        """Whether passes follow trees themselves, if they are given to them."""
        return self.model.native is not None and not isinstance(self._passes, RecordedPasses)

    @property
    def runs_steps(self) -> bool:
        """Whether the steps of Walks can follow a pass: each pass would have to be observed."""
        return self.walks and not self._observers and self.model.native is not None and not self.model.native.is_watched

    @property
    def chooses(self) -> bool:
        """Whether passes choose tokens themselves, if they are given the draws."""
        return isinstance(self._passes, RecordedPasses) and self._passes.chooses

    def followed(self, logits_NV: Float[Tensor, "N V"]) -> bool:
        """Return whether the latest pass made these logits and followed trees by them, if they were given to it."""
        return self.model.native is not None and self.model.native.made(logits_NV)

    def likeliest(self, logits_NV: Float[Tensor, "N V"], count: int) -> Sequence[RowArgMax] | Sequence[NodeChoice] | None:
        """Return the arg maxes or choices of the first `count` rows if the latest pass made them from these logits, else None."""
        if isinstance(self._passes, RecordedPasses) and self._passes.chooses:
            return self._passes.choices(logits_NV, count)
        return self.model.likeliest(logits_NV, count)

    @property
    def method(self) -> str:
        """How torch's passes run (Passes.method)."""
        return self._passes.method

    @cached_property
    def traffic(self) -> Traffic:
        """What passes read and multiply. Valid after the first pass."""
        return traffic_of(self.model, self.cache)

    def _report(self, batch: WrittenSlots) -> None:
        for observer in self._observers:
            observer.on_pass(batch.write_slots_T)

    def end_step(self, row: Row, path: Sequence[int] = (ROOT,)) -> None:
        """Drop the recurrent states that no later pass continues from: all of a row's kept tokens but the last.

        `path` are the accepted nodes. The states of other nodes are dropped as the scheduler frees their slots.
        """
        if self.model.has_states:
            self.cache.states.drop(row.slots[max(0, row.context_len - 1) : row.root_position])
            self.cache.states.drop(row.slots[row.root_position + node] for node in path[:-1])

    def forward(
        self,
        plan: StepPlan,
        trees: Sequence[TokenTree],
        places: Sequence[int] = (),
        draws: NodeDraws = NO_DRAWS,
        walks: Walks | None = None,
    ) -> Float[Tensor, "N V"]:
        """Feed every row's certain tokens and tree in one pass; return raw logits after each node of the decoding rows' trees.

        The logits after the packed tokens at `places` follow. `draws` are of the nodes, `walks` of the trees.
        """
        if not plan.rows:  # a step that only reports aborts
            return torch.empty((0, self.model.vocab_size), device=self.model.device)
        batch, logit_rows = self._packed(plan, trees, places)
        if isinstance(self._passes, RecordedPasses):
            return self._passes.run(batch, logit_rows, draws)
        return self._passes.run(batch, logit_rows, walks)

    def run_drafts(self, steps: DraftSteps) -> None:
        """Run drafting steps in a row; valid if the target `runs_steps`."""
        assert self.model.native is not None
        self.model.native.run_drafts(steps, self.cache)

    def forward_unread(
        self, plan: StepPlan, trees: Sequence[TokenTree], places: Sequence[int], draws: NodeDraws, nodes: GrownNodes
    ) -> UnreadPass | None:
        """Feed trees that the device has grown into the rooms of `trees`, without a wait. None if passes cannot, and none ran."""
        if not isinstance(self._passes, RecordedPasses) or sum(tree.num_nodes - 1 for tree in trees) > _MOST_ROOM:
            return None
        return self._passes.run_unread(*self._packed(plan, trees, places), draws, nodes)

    def _packed(self, plan: StepPlan, trees: Sequence[TokenTree], places: Sequence[int]) -> tuple[PackedBatch, list[int]]:
        """Return every row's tokens, and the packed tokens whose logits are returned."""
        remaining, end = iter(trees), 0
        segments: list[Segment] = []
        logit_rows: list[int] = []
        for row in plan.rows:
            certain_ids = row.certain_ids
            tree = next(remaining) if row.is_decoding else TokenTree.single(certain_ids[-1])
            segments.append(tree_segment(certain_ids, tree, row.context_len, row.slots, row.adapter))
            num_nodes = len(tree.parents)
            end += len(certain_ids) + num_nodes - 1
            if row.is_decoding:
                logit_rows.extend(range(end - num_nodes, end))
        return pack(segments, self.model.device), [*logit_rows, *places]
