"""A distilled draft head at work: fed a step behind the target's features, asked for a level of every tree at a time.

Features lie in a pool of one row a slot beside the target's cache, written at every pass of the target: whoever keeps a slot
keeps its feature. A drafted node's own state lies in its slot until the target has been there, so that a token always reads what
the slot of the token before it holds:

    slot         [ .. x5   | x6 = root | n1  n2 ]       x6 and the nodes are not cached by the target yet
    pool row     [ .. true | state     | state  ]       x6 reads x5's row, n1 reads x6's, n1's children read n1's
    after a step [ .. true | true      | true   ]       and accepted nodes are fed again, with true features

Shape key: T packed tokens, P proposals, S slots, D target width, W inner width, M head vocabulary, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from engine.attention import AttentionContext, cached_attention
from engine.draft.drafter import FrontierNode, ModelPasses, Proposal
from engine.draft.head import DraftHead, HeadShape
from engine.draft.passes import fed_segments, level_segments, places_of_roots
from engine.kv_cache import KVCache
from engine.linears import prepare_linears, weight_of
from engine.model import CausalModel
from engine.packing import PackedBatch, pack
from engine.plan import Feeding, Row
from engine.segments import chain_segment
from engine.taps import StateTap


class FeaturePool:
    """A feature, or what stands in for it, for each slot. `before_all` names the row of zeros that position 0 reads."""

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.before_all = num_slots
        self._pool_SW = torch.empty(num_slots + 1, width, dtype=dtype, device=device)
        self._pool_SW[self.before_all] = 0.0

    def write(self, slots_T: Int[Tensor, " T"], features_TW: Float[Tensor, "T W"]) -> None:
        """Store the features of T tokens."""
        self._pool_SW.index_copy_(0, slots_T, features_TW)

    def at(self, slots_T: Int[Tensor, " T"]) -> Float[Tensor, "T W"]:
        """Return what the slots hold."""
        return self._pool_SW.index_select(0, slots_T)


class HeadDrafter:
    """Drafts with a head for a target, on its device; raise ValueError if the head does not fit.

    Takes the head over. `linears` as engine.linears names them; `dtype` is the head's precision, the target's if none is given.
    Must be told of every pass of the target (Target.report_to).
    """

    feeding = Feeding.TARGET_FEATURES

    def __init__(
        self,
        name: str,
        head: DraftHead,
        target: CausalModel,
        num_slots: int,
        linears: str = "plain",
        dtype: torch.dtype | None = None,
    ) -> None:
        _require_fit(head.shape, head.vocab_M, target)
        self.name = name
        self._device, self._vocab_size = target.device, target.vocab_size
        self._embeddings_VD: Tensor = target.module.get_input_embeddings().weight  # as they are, where a model scales them
        dtype = dtype or target.module.dtype
        self._head = head.to(self._device, dtype)
        self._layers = head.decoder
        self._dtype = dtype
        self._vocab_M = head.vocab_M.to(torch.int64)
        rows_MD = weight_of(target.module.get_output_embeddings())[self._vocab_M]
        maps = nn.ModuleList([self._head, _output_of(head, rows_MD, dtype)])
        prepare_linears(maps, linears)
        self._output = maps[1]
        self._cache = KVCache(num_slots, self._device)
        self._pool = FeaturePool(num_slots, head.shape.width, dtype, self._device)
        self._tap = StateTap(target, head.shape.feature_layers)

    def on_pass(self, write_slots_T: Int[Tensor, " T"]) -> None:
        """Keep the features of a pass of the target, fused at once."""
        with torch.inference_mode():
            self._pool.write(write_slots_T, self._head.features(self._tap.latest()))

    def features_at(self, slots: Sequence[int]) -> Float[Tensor, "T W"]:
        """Return what tokens read that come after those in these slots, where the target has been."""
        return self._pool.at(torch.tensor(slots, dtype=torch.int64, device=self._device))

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Feed committed tokens by the target's features; propose at the roots."""
        before = [slot for row in rows for slot in self._slots_before(row)]
        asked = [chain_segment(root.tree.token_ids[:1], root.position, root.tree.row.slots) for root in roots]
        fed = _Fed(pack(fed_segments(rows), self._device), before)
        return self._proposal(fed, pack(asked, self._device), places_of_roots(rows, roots))

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Feed some nodes of every tree by their parents' states; propose at each."""
        before = [asked.tree.row.slots[asked.tree.row.root_position + asked.tree.parents[asked.node]] for asked in frontier]
        batch = pack(level_segments(frontier), self._device)
        return self._proposal(_Fed(batch, before), batch, range(len(frontier)))

    def _slots_before(self, row: Row) -> Sequence[int]:
        """Return the slots that the row's committed tokens read."""
        end = row.draft_len + len(row.draft_ids) - 1
        return row.slots[row.draft_len - 1 : end] if row.draft_len else (self._pool.before_all, *row.slots[:end])

    def _proposal(self, fed: "_Fed", asked: PackedBatch, places: Sequence[int]) -> Proposal:
        """Feed tokens, keep the states of those asked about in their slots, and propose at them; `places` says which they are."""
        with torch.inference_mode():
            states_PW = self._states(fed, asked, torch.tensor(places, dtype=torch.int64, device=self._device))
            self._pool.write(asked.write_slots_T, states_PW)
            logits_PM = self._output(self._head.last_norm(states_PW)).float()
            logits_PV = logits_PM.new_full((len(places), self._vocab_size), float("-inf"))
            logits_PV.index_copy_(1, self._vocab_M, logits_PM)
            return Proposal(tuple(range(len(places))), logits_PV, passes=ModelPasses(1, fed.batch.num_tokens))

    def _states(self, fed: "_Fed", asked: PackedBatch, places_P: Int[Tensor, " P"]) -> Float[Tensor, "P W"]:
        """Run the layers. All that is needed of a token not asked about is its keys: the last layer attends for the others."""
        batch = fed.batch
        states_TW = self._pool.at(torch.tensor(fed.before, device=self._device))
        tokens_TW = self._head.tokens(self._embeddings_VD[batch.input_ids_1T[0]].to(self._dtype))
        rotation = self._head.rotary(batch.position_ids_1T[0])
        for index, layer in enumerate(self._layers):
            query, key, value = layer.projected(states_TW, tokens_TW, *rotation)
            self._cache.write(index, batch.write_slots_T, key, value)
            if index == len(self._layers) - 1:
                batch, states_TW, query = asked, states_TW[places_P], query[places_P]
            if batch.num_tokens:
                query_THGK = query.view(len(query), layer.shape.num_kv_heads, -1, layer.shape.head_size)
                context = AttentionContext(batch, self._cache)
                states_TW = layer.finished(states_TW, cached_attention(index, query_THGK, context, layer.shape.head_size**-0.5))
        return states_TW


@dataclass(frozen=True)
class _Fed:
    """Packed tokens, and for each the slot of the token before it."""

    batch: PackedBatch
    before: Sequence[int]


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


def _output_of(head: DraftHead, rows_MD: Float[Tensor, "M D"], dtype: torch.dtype) -> nn.Linear:
    """Return the head's widening and the target's output rows after it as one map, from the inner width to the vocabulary."""
    weight_MW = rows_MD.float() @ head.widen.weight.to(rows_MD.device, torch.float32)
    output = nn.Linear(weight_MW.shape[1], weight_MW.shape[0], bias=False, device="meta")
    output.weight = nn.Parameter(weight_MW.to(dtype), requires_grad=False)
    return output
