"""A distilled draft head at work: fed a step behind the target's features, asked for a level of every tree at a time.

What it reads lies in a pool of one row a slot beside the target's cache, and is kept of every pass of the target, by the pass
itself where the library runs both: whoever keeps a slot keeps its feature. A drafted node's own state lies in its slot until the
target has been there, so that a token always reads what the slot of the token before it holds:

    slot         [ .. x5   | x6 = root | n1  n2 ]       x6 and the nodes are not cached by the target yet
    pool row     [ .. true | state     | state  ]       x6 reads x5's row, n1 reads x6's, n1's children read n1's
    after a step [ .. true | true      | true   ]       and accepted nodes are fed again, with true features

Where the library runs the head, what is true and what stands in have a row each (NativeHead): committed tokens read the one,
nodes the other.

Shape key: T packed tokens, P proposals, S slots, D target width, W inner width, M head vocabulary, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.packing import Segment, pack
from engine.attention.paged.attention import Attend
from engine.attention.paged.graphs import Recordings, StaticSteps
from engine.attention.paged.table import WRITE_SLOTS, Columns, PagedBatch
from engine.attention.segments import chain_segment
from engine.core.step_plan import Feeding, Row
from engine.draft.drafter import FrontierNode, ModelPasses, Proposal, TrimmedVocabulary
from engine.draft.models.feature_pool import FeaturePool, Fed
from engine.draft.models.head import DraftHead, HeadShape
from engine.draft.models.native_head import NativeHead
from engine.draft.models.segments import fed_segments, level_segments, places_of_roots
from engine.draft.models.torch_head import LeanHead
from engine.draft.trees.native_growth import NativeTreeGrower
from engine.kv_cache.canary import Canary, NoCanary
from engine.kv_cache.pool import KVCache
from engine.model.causal_lm import CausalModel
from engine.model.hidden_states import StateTap, place_after
from engine.model.linears import NATIVE, weight_of
from engine.native.growth import FedRow, Growing, RankedRow


class HeadDrafter:
    """Drafts with a head for a target, on its device; raise ValueError if the head does not fit.

    `linears` as engine.model.linears names them; `precision` is the head's, the target's if none is given.
    Must follow the target's passes (Target.report_to).
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
        self._device = target.device
        embeddings_VD: Tensor = target.module.get_input_embeddings().weight  # as they are, where a model scales them
        self._vocab = TrimmedVocabulary(head.vocab_M.to(self._device, torch.int64), target.vocab_size)
        self.unqueried_share = head.shape.unqueried_share(len(head.vocab_M))
        rows_MD = weight_of(target.module.get_output_embeddings())[self._vocab.ids_M]
        precision = precision or str(target.module.dtype).removeprefix("torch.")
        self._head: NativeHead | LeanHead
        canary = canary or NoCanary()
        self._has_canary = not isinstance(canary, NoCanary)
        if linears == NATIVE:
            width = len(head.shape.feature_layers) * head.shape.target_width
            states = FeaturePool(num_slots, width, torch.float16, self._device, canary)
            self._head = NativeHead(head, rows_MD, embeddings_VD, precision, states)
        else:
            self._head = LeanHead(head, rows_MD, embeddings_VD, getattr(torch, precision), self._device, linears)
        self._cache = KVCache(num_slots, self._device, canary)
        self._pool = FeaturePool(num_slots, head.shape.width, self._head.dtype, self._device, canary)
        self._target, self._layers = target, head.shape.feature_layers
        self._tap: StateTap | None = None  # where passes leave the features to us
        self._recordings: Recordings | None = None

    def follow(self, cache: KVCache) -> bool:
        """Have each pass that writes to the target's cache followed; return whether passes keep what is read by themselves."""
        native = self._target.native
        if native is None or not isinstance(self._head, NativeHead):
            assert self._tap is None, "followed already"
            self._tap = StateTap(self._target, self._layers)
            return False
        depth = len(self._target.module.model.layers)
        after = [place_after(count, depth) for count in self._layers]
        native.keep_features(cache, self._head.features(after))
        return True

    def record(self, steps: StaticSteps, attend: Attend, end: int) -> Recordings:
        """Replay passes from now on, over positions below `end`; return them, to be prepared."""
        head, pool, cache = self._head, self._pool, self._cache
        assert isinstance(head, LeanHead)
        columns = Columns(tokens=(0, 0, cache.nobody, pool.before_all), asked=(0, pool.nobody))

        def run(batch: PagedBatch) -> Float[Tensor, "P M"]:
            return head.forward_table(pool, batch, cache, attend, end)

        self._recordings = Recordings(steps, columns, run, len(self._vocab.ids_M))
        return self._recordings

    def on_pass(self, write_slots_T: Int[Tensor, " T"]) -> None:
        """Keep what is read of a pass of the target."""
        assert self._tap is not None, "passes that nobody follows"
        with torch.inference_mode():
            self._head.keep_features(self._pool, write_slots_T, self._tap.parts())

    def features_at(self, slots: Sequence[int]) -> Float[Tensor, "T W"]:
        """Return what tokens read that come after those in these slots, where the target has been; for inference alone."""
        with torch.inference_mode():
            return self._head.features_at(self._pool, slots)

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Feed committed tokens by the target's features; propose at the roots."""
        before = [slot for row in rows for slot in self._slots_before(row)]
        batch = pack(fed_segments(rows), self._device)
        fed = Fed(batch, before, are_committed=True)
        places = places_of_roots(rows, [root.tree.row.request_id for root in roots])
        asked = [chain_segment(root.tree.token_ids[:1], root.position, root.tree.row.slots) for root in roots]
        return self._proposal(fed, None if places == list(range(batch.num_tokens)) else asked, places)

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Feed some nodes of every tree by their parents' states; propose at each."""
        before = [asked.tree.row.slots[asked.tree.row.root_position + asked.tree.parents[asked.node]] for asked in frontier]
        batch = pack(level_segments(frontier), self._device)
        fed = Fed(batch, before, are_committed=False)
        return self._proposal(fed, None, range(len(frontier)))

    def native_grower(self) -> NativeTreeGrower | None:
        """Return what grows ranked trees, if the library runs the head; a canary is shown what each pass reads, one by one."""
        if self._has_canary or not isinstance(self._head, NativeHead):
            return None
        return NativeTreeGrower(self._begin, self._vocab, self.unqueried_share)

    def _begin(self, rows: Sequence[Row], ranked: Sequence[RankedRow], request_ids: Sequence[str]) -> Growing:
        assert isinstance(self._head, NativeHead)
        tree_of = {request_id: tree for tree, request_id in enumerate(request_ids)}
        fed = [FedRow(row.draft_ids, row.draft_len, row.slots, tree_of.get(row.request_id)) for row in rows if row.draft_ids]
        return self._head.growing(self._pool, fed, ranked, self._cache, self._vocab.ids_M)

    def _slots_before(self, row: Row) -> Sequence[int]:
        """Return the slots that the row's committed tokens read."""
        end = row.draft_len + len(row.draft_ids) - 1
        return row.slots[row.draft_len - 1 : end] if row.draft_len else (self._pool.before_all, *row.slots[:end])

    def _proposal(self, fed: Fed, asked: Sequence[Segment] | None, places: Sequence[int]) -> Proposal:
        """Feed tokens, keep the states of those asked about in their slots, and propose at them.

        `places` says which they are, `asked` has their own segments where they are not all.
        """
        if (logits_PM := self._replayed(fed, places)) is None:
            with torch.inference_mode():
                logits_PM = self._head.proposed(self._pool, fed, asked, places, self._cache)
        passes = ModelPasses.one(fed.batch.num_tokens, len(places), self.unqueried_share)
        return Proposal(tuple(range(len(places))), logits_PM, passes=passes, vocab=self._vocab)

    def _replayed(self, fed: Fed, places: Sequence[int]) -> Float[Tensor, "P M"] | None:
        """Return the logits by a recorded pass; None if nothing of the size is recorded."""
        if self._recordings is None:
            return None
        slots = fed.batch.tokens_3T[WRITE_SLOTS][[*places]]
        return self._recordings.replay(fed.batch, tokens=[fed.before], asked=[places, slots])


def _require_fit(shape: HeadShape, vocab_M: Tensor, target: CausalModel) -> None:
    """Raise ValueError unless the head reads what the target has and names tokens that it knows."""
    inner: Any = target.module.model
    width, depth = target.module.get_input_embeddings().weight.shape[1], len(inner.layers)
    if shape.target_width != width:
        raise ValueError(f"the head was made for a target of width {shape.target_width}, this one has {width}")
    if not all(0 < count <= depth for count in shape.feature_layers):
        raise ValueError(f"the head reads the state after layers {list(shape.feature_layers)}, the target has {depth}")
    if not len(vocab_M) or vocab_M.min() < 0 or vocab_M.max() >= target.vocab_size or (vocab_M.diff() <= 0).any():
        raise ValueError(f"the head's tokens are not ascending ids of the target's {target.vocab_size}")
