"""The drafter with a distilled head: feeds committed tokens with the target's features, and trees one level at a time.

A pool beside the target's cache has one row for each slot. Each pass of the target stores its features there. If the native
library runs both models, the pass does so itself. A drafted node's own state is in its slot until the target has cached the
node's token. So each token reads the row of the slot before it:

    slot         [ .. x5      | x6 = root | n1  n2  ]   x6 and the nodes are not cached by the target yet
    pool row     [ .. feature | state     | state   ]   x6 reads x5's row, n1 reads x6's, n1's children read n1's
    after a step [ .. feature | feature   | feature ]   and accepted nodes are fed again with features

If the native library runs the head, features and states are in different pools (NativeHead): committed tokens read features,
nodes read states.

Shape key: T packed tokens, P proposals, S slots, D target width, W inner width, M head vocabulary, V vocabulary.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.packing import Segment, pack
from engine.attention.paged.attention import Attend, size_reason
from engine.attention.paged.graphs import GraphedFunction, GraphResources
from engine.attention.paged.table import WRITE_SLOTS, PagedBatch, TableColumns
from engine.attention.segments import chain_segment
from engine.core.step_plan import Feeding, Row
from engine.draft.drafter import FrontierNode, LevelPasses, ModelPasses, Proposal, TrimmedVocabulary
from engine.draft.models.drafter_segments import fed_segments, level_segments, places_of_roots
from engine.draft.models.feature_pool import FeaturePool, FedTokens
from engine.draft.models.head import DraftHead, HeadShape
from engine.draft.models.native_head import NativeHead
from engine.draft.models.torch_head import TorchHead
from engine.draft.trees.native_growth import NativeTreeGrower
from engine.kv_cache.canary import Canary, NoCanary
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from engine.model.hidden_states import StateTap, place_after
from engine.model.linear_backends import NATIVE
from engine.native.growth import FedRow, GrownTrees, RankedRow


class HeadDrafter:
    """Drafts with a head for a target, on its device; raise ValueError if the head does not fit.

    `linears` is a name of engine.model.linear_backends. `precision` is the head's, by default the target's. The drafter must
    observe the target's passes (Target.report_to).
    """

    feeding = Feeding.TARGET_FEATURES

    def __init__(
        self,
        name: str,
        head: DraftHead,
        target: CausalModel,
        num_slots: int,
        linears: str = "plain",
        precision: str | None = None,
        canary: Canary | None = None,
    ) -> None:
        _require_fit(head.shape, head.vocab_M, target)
        self.name = name
        self._shape = head.shape
        self._device = target.device
        embeddings_VD = target.embeddings_VD
        self._vocab = TrimmedVocabulary(head.vocab_M.to(self._device, torch.int64), target.vocab_size)
        self.fed_only_share = head.shape.fed_only_share(len(head.vocab_M))
        rows_MD = target.output_rows(self._vocab.ids_M)
        precision = precision or target.precision
        self._head: NativeHead | TorchHead
        canary = canary or NoCanary()
        self._has_canary = not isinstance(canary, NoCanary)
        if linears == NATIVE:
            width = len(head.shape.feature_layers) * head.shape.target_width
            states = FeaturePool(num_slots, width, torch.float16, self._device, canary)
            self._head = NativeHead(head, rows_MD, embeddings_VD, precision, states)
        else:
            self._head = TorchHead(head, rows_MD, embeddings_VD, getattr(torch, precision), self._device, linears)
        self._cache = KVCache(num_slots, self._device, canary)
        self._pool = FeaturePool(num_slots, head.shape.width, self._head.dtype, self._device, canary)
        self._target, self._layers = target, head.shape.feature_layers
        self._tap: StateTap | None = None  # None if the target's passes store the features themselves
        self._recordings: GraphedFunction | None = None

    def follow(self, cache: KVCache) -> bool:
        """Observe the passes that write to the target's cache; return whether these passes store the features themselves."""
        native = self._target.native
        if native is None or not isinstance(self._head, NativeHead):
            assert self._tap is None, "the target is observed already"
            self._tap = StateTap(self._target, self._layers)
            return False
        depth = self._target.depth
        after = [place_after(count, depth) for count in self._layers]
        native.keep_features(cache, self._head.features(after))
        return True

    @property
    def kernel_reason(self) -> str | None:
        """Why the kernel cannot attend with its heads, None if it can."""
        return size_reason(self._shape.head_size, self._shape.num_heads // self._shape.num_kv_heads)

    def record(self, steps: GraphResources, attend: Attend, end: int) -> GraphedFunction:
        """Replay passes over positions below `end` from now on; return the recordings, which the caller must prepare."""
        head, pool, cache = self._head, self._pool, self._cache
        assert isinstance(head, TorchHead)
        columns = TableColumns(tokens=(0, 0, cache.dummy_slot, pool.zero_row), outputs=(0, pool.padding_row))

        def run(batch: PagedBatch) -> Float[Tensor, "P M"]:
            return head.forward_table(pool, batch, cache, attend, end)

        self._recordings = GraphedFunction(steps, columns, run, len(self._vocab.ids_M))
        return self._recordings

    @property
    def level_passes(self) -> LevelPasses | None:
        """The recorded passes, if there are any."""
        return None if self._recordings is None else LevelPasses(self._recordings, self._vocab, self._cache.dummy_slot)

    def on_pass(self, write_slots_T: Int[Tensor, " T"]) -> None:
        """Store the features of a pass of the target."""
        assert self._tap is not None, "the target is not observed"
        with torch.inference_mode():
            self._head.keep_features(self._pool, write_slots_T, self._tap.parts())

    def features_at(self, slots: Sequence[int]) -> Float[Tensor, "T W"]:
        """Return the features of slots that the target has cached; the next token reads them. For inference alone."""
        with torch.inference_mode():
            return self._head.features_at(self._pool, slots)

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Feed committed tokens with the target's features; propose at the roots."""
        previous_slots = [slot for row in rows for slot in self._slots_before(row)]
        batch = pack(fed_segments(rows), self._device)
        fed = FedTokens(batch, previous_slots, are_committed=True)
        places = places_of_roots(rows, [root.tree.row.request_id for root in roots])
        queried = [chain_segment(root.tree.token_ids[:1], root.position, root.tree.row.slots) for root in roots]
        return self._proposal(fed, None if places == list(range(batch.num_tokens)) else queried, places)

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Feed the frontier's nodes with their parents' states; propose at each."""
        previous_slots = [one.tree.row.slots[one.tree.row.root_position + one.tree.parents[one.node]] for one in frontier]
        batch = pack(level_segments(frontier), self._device)
        fed = FedTokens(batch, previous_slots, are_committed=False)
        return self._proposal(fed, None, range(len(frontier)))

    def native_grower(self) -> NativeTreeGrower | None:
        """Return the grower of ranked trees if the library runs the head and no canary must check each pass."""
        if self._has_canary or not isinstance(self._head, NativeHead):
            return None
        return NativeTreeGrower(self._grow_trees, self._vocab, self.fed_only_share)

    def _grow_trees(self, rows: Sequence[Row], ranked: Sequence[RankedRow], request_ids: Sequence[str]) -> GrownTrees:
        assert isinstance(self._head, NativeHead)
        tree_of = dict(zip(request_ids, range(len(request_ids))))
        fed = [FedRow(row.draft_ids, row.draft_len, row.slots, tree_of.get(row.request_id)) for row in rows if row.draft_ids]
        return self._head.grown_trees(self._pool, fed, ranked, self._cache, self._vocab.ids_M)

    def _slots_before(self, row: Row) -> Sequence[int]:
        """Return the slots that the row's committed tokens read."""
        end = row.draft_len + len(row.draft_ids) - 1
        return row.slots[row.draft_len - 1 : end] if row.draft_len else (self._pool.zero_row, *row.slots[:end])

    def _proposal(self, fed: FedTokens, queried: Sequence[Segment] | None, places: Sequence[int]) -> Proposal:
        """Feed tokens; propose at `places` and store the states there.

        `queried` are the segments of the tokens at `places` alone, or None if these are all tokens.
        """
        if (logits_PM := self._replayed(fed, places)) is None:
            with torch.inference_mode():
                logits_PM = self._head.draft_logits(self._pool, fed, queried, places, self._cache)
        passes = ModelPasses.one(fed.batch.num_tokens, len(places), self.fed_only_share)
        return Proposal(tuple(range(len(places))), logits_PM, passes=passes, vocab=self._vocab)

    def _replayed(self, fed: FedTokens, places: Sequence[int]) -> Float[Tensor, "P M"] | None:
        """Return the logits from a recorded pass, or None if no pass of this size is recorded."""
        if self._recordings is None:
            return None
        slots = fed.batch.tokens_3T[WRITE_SLOTS][[*places]]
        return self._recordings.replay(fed.batch, tokens=[fed.previous_slots], outputs=[places, slots])


def _require_fit(shape: HeadShape, vocab_M: Tensor, target: CausalModel) -> None:
    """Raise ValueError unless the head's width, feature layers and vocabulary fit the target."""
    width, depth = target.embeddings_VD.shape[1], target.depth
    if shape.target_width != width:
        raise ValueError(f"the head was made for a target of width {shape.target_width}, this one has {width}")
    if not all(0 < count <= depth for count in shape.feature_layers):
        raise ValueError(f"the head reads the state after layers {list(shape.feature_layers)}, the target has {depth}")
    if not len(vocab_M) or vocab_M.min() < 0 or vocab_M.max() >= target.vocab_size or (vocab_M.diff() <= 0).any():
        raise ValueError(f"the head's tokens are not ascending ids of the target's {target.vocab_size}")
