"""The drafter with an EAGLE-3 head: a pass for each level of the trees.

As in training, token t is fed with the feature of token t - 1, and the first token of a text is not fed. So the head's positions
begin with the second token. A drafted token is fed with the head's own state at its parent. That state is in the parent's slot
until the target has cached the parent's token. Shape key: T packed tokens, P proposals, M drafter's vocabulary.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from engine.attention.packing import Segment, pack
from engine.attention.paged.attention import Attend, PagedContext, size_reason
from engine.attention.paged.graphs import GraphedFunction, GraphResources
from engine.attention.paged.table import WRITE_SLOTS, PagedBatch, TableColumns
from engine.attention.segments import chain_segment, level_segment
from engine.attention.tree_attention import GatheredAttention
from engine.core.step_plan import Row
from engine.draft.checkpoints.eagle3 import Eagle3Network
from engine.draft.checkpoints.target_features import FeatureDrafter
from engine.draft.drafter import FrontierNode, LevelPasses, ModelPasses, Proposal, TrimmedVocabulary
from engine.draft.models.drafter_segments import trees_of_level
from engine.kv_cache.canary import Canary
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from engine.utils.host_transfer import integers


class Eagle3Drafter(FeatureDrafter):
    """Drafts with a head for a target, on its device."""

    def __init__(self, network: Eagle3Network, target: CausalModel, num_slots: int, canary: Canary | None = None) -> None:
        shape = network.shape
        super().__init__("eagle3", network, shape.layers.width, target, shape.after, num_slots, canary)
        self._network = network
        self._cache = KVCache(num_slots, target.device, canary)
        ids = shape.vocab.ids
        self._vocab = None if ids is None else TrimmedVocabulary(integers(ids, target.device), shape.vocab.size)
        self.fed_only_share = network.fed_only_share
        self._recordings: GraphedFunction | None = None

    @property
    def kernel_reason(self) -> str | None:
        """Why the kernel cannot attend with its heads, None if it can."""
        layers = self._network.shape.layers
        return size_reason(layers.head_size, layers.num_heads // layers.num_kv_heads)

    def record(self, steps: GraphResources, attend: Attend, end: int) -> GraphedFunction:
        """Replay passes over positions below `end` from now on; return the recordings, which the caller must prepare."""
        network, pool, cache, shape = self._network, self._pool, self._cache, self._network.shape
        columns = TableColumns(tokens=(0, 0, cache.dummy_slot, pool.zero_row), outputs=(0, pool.padding_row))

        def run(batch: PagedBatch) -> Float[Tensor, "P M"]:
            (ids_T, positions_T, _, previous_T), (places_P, slots_P) = batch.tokens, batch.outputs
            fed = pool.read(previous_T), ids_T, network.rotation(positions_T, end)
            logits_PM, states_PW = network(*fed, places_P, PagedContext(batch, cache, attend), None)
            pool.write(slots_P, states_PW)
            return logits_PM  # type: ignore[no-any-return]

        self._recordings = GraphedFunction(steps, columns, run, shape.vocab.num_known)
        return self._recordings

    @property
    def level_passes(self) -> LevelPasses | None:
        """The recorded passes, if there are any."""
        if self._recordings is None:
            return None
        return LevelPasses(self._recordings, self._vocab, self._cache.dummy_slot, first_position=1)

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Feed committed tokens with the target's features; propose at the roots. A root without a token before it has none."""
        segments: list[Segment] = []
        previous: list[int] = []
        end_of: dict[str, int] = {}
        for row in rows:
            skipped = 0 if row.draft_len else 1
            first, ids = row.draft_len + skipped, row.draft_ids[skipped:]
            if ids:
                segments.append(chain_segment(ids, first - 1, row.slots[1:]))
                previous.extend(row.slots[first - 1 : first - 1 + len(ids)])
            end_of[row.request_id] = len(previous)
        indices = [index for index, root in enumerate(roots) if root.position]
        proposing = [roots[index] for index in indices]
        queried = [chain_segment(one.tree.token_ids[:1], one.position - 1, one.tree.row.slots[1:]) for one in proposing]
        places = [end_of[one.tree.row.request_id] - 1 for one in proposing]
        return self._proposal(segments, previous, indices, places, queried)

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Feed the frontier's nodes with their parents' states; propose at each."""
        previous = [one.tree.row.slots[one.tree.row.root_position + one.tree.parents[one.node]] for one in frontier]
        segments = [
            level_segment(nodes, tree, tree.row.root_position - 1, tree.row.slots[1:]) for tree, nodes in trees_of_level(frontier)
        ]
        everything = range(len(frontier))
        return self._proposal(segments, previous, everything, everything, segments)

    def _proposal(
        self,
        segments: Sequence[Segment],
        previous_slots: Sequence[int],
        indices: Sequence[int],
        places: Sequence[int],
        queried: Sequence[Segment],
    ) -> Proposal:
        """Feed tokens; propose at `places` and store the states there. `queried` are the segments of these tokens alone."""
        num_known = self._network.shape.vocab.num_known
        if not segments:
            return Proposal((), torch.empty(0, num_known, device=self._target.device), vocab=self._vocab)
        if (logits_PM := self._replayed(segments, previous_slots, places)) is None:
            with torch.inference_mode():
                logits_PM = self._logits(segments, previous_slots, places, queried)
        passes = ModelPasses.one(len(previous_slots), len(places), self.fed_only_share)
        return Proposal(tuple(indices), logits_PM, passes=passes, vocab=self._vocab)

    def _replayed(
        self, segments: Sequence[Segment], previous_slots: Sequence[int], places: Sequence[int]
    ) -> Float[Tensor, "P M"] | None:
        """Return the logits from a recorded pass, or None if no pass of this size is recorded."""
        if self._recordings is None:
            return None
        batch = pack(segments, self._target.device)
        slots = batch.tokens_3T[WRITE_SLOTS][[*places]]
        return self._recordings.replay(batch, tokens=[previous_slots], outputs=[places, slots])

    def _logits(
        self, segments: Sequence[Segment], previous_slots: Sequence[int], places: Sequence[int], queried: Sequence[Segment]
    ) -> Float[Tensor, "P M"]:
        device = self._target.device
        batch = pack(segments, device)
        is_all = len(places) == batch.num_tokens
        places_P = None if is_all else integers(places, device)
        context = GatheredAttention(batch, self._cache)
        last_context = context if is_all else GatheredAttention(pack(queried, device), self._cache)
        rotation_TR = self._network.rotation(batch.position_ids_1T[0], batch.end)
        fed = (self._pool.read_checked(previous_slots), batch.input_ids_1T[0], rotation_TR)
        logits_PM, states_PW = self._network(*fed, places_P, context, last_context)
        written = batch.write_slots_T if places_P is None else batch.write_slots_T.index_select(0, places_P)
        self._pool.write(written, states_PW)
        return logits_PM  # type: ignore[no-any-return]
