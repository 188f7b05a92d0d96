"""A causal model as drafter: a draft model with its own cache, or the target's first layers with the target's cache.

Committed tokens are fed first, then one level of every tree in each round.
"""

from collections.abc import Sequence

from engine.attention.packing import Segment, pack
from engine.attention.paged.graphs import GraphResources
from engine.core.step_plan import Feeding, Row
from engine.draft.drafter import FrontierNode, LevelPasses, ModelPasses, Proposal
from engine.draft.models.drafter_segments import fed_segments, level_segments, places_of_roots
from engine.draft.models.vocab_padding import RepaddedModel
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from engine.model.passes import DirectPasses, Passes, RecordedPasses


class ModelDrafter:
    """Drafts with `model` and `cache`; `feeding` states whether the cache is its own or the target's."""

    def __init__(self, name: str, model: CausalModel | RepaddedModel, cache: KVCache, feeding: Feeding) -> None:
        self.name = name
        self.feeding = feeding
        self._model = model
        self._cache = cache
        self._passes: Passes = DirectPasses(model, cache)

    @property
    def reads_tables(self) -> bool:
        """Whether its passes can be recorded as CUDA graphs."""
        return self._model.reads_tables

    def record(self, steps: GraphResources) -> RecordedPasses:
        """Replay passes from now on; return the recordings, which the caller must prepare."""
        self._passes = recorded = RecordedPasses(self._model, self._cache, steps)
        return recorded

    @property
    def level_passes(self) -> LevelPasses | None:
        """The recorded passes, if there are any."""
        passes = self._passes
        return LevelPasses(passes.recordings, None, self._cache.dummy_slot) if isinstance(passes, RecordedPasses) else None

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Feed committed tokens; propose at the roots."""
        return self._propose(fed_segments(rows), places_of_roots(rows, [root.tree.row.request_id for root in roots]))

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Feed the frontier's nodes; propose at each."""
        return self._propose(level_segments(frontier), list(range(len(frontier))))

    def _propose(self, segments: Sequence[Segment], logit_rows: list[int]) -> Proposal:
        batch = pack(segments, self._model.device)
        logits_PV = self._passes.run(batch, logit_rows)
        return Proposal(tuple(range(len(logit_rows))), logits_PV, passes=ModelPasses(1, batch.num_tokens))
