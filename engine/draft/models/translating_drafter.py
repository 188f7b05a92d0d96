"""A draft model with another tokenizer: it drafts texts, and the target's tokenizer makes tokens of them.

The model reads the committed text as its own tokenizer encodes it (token_map.py), and continues it with its likeliest tokens. The
target's tokens of this text are a chain. At a node of the chain where a token of the model ends too, the model's distribution is
known. Its tokens that the target has as well become siblings, and the probability of its likeliest token is the chain's next
token's. Elsewhere that token is certain. These are functions of committed tokens alone, and what is sampled is what the verifier
reads. So every verifier stays exact. Nodes outside the chain stay leaves.

    committed       | the model's tokens    | return |  x | )  | \\n |
                    | the target's tokens   | return |  x |   )\\n   |      at ` x` the siblings of `)\\n` are the model's of `)`

Shape key: N places, V the model's vocabulary, P proposals, M tokens that both tokenizers have, E other tokens of chains.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from engine.attention.packing import Segment, pack
from engine.attention.segments import chain_segment
from engine.core.step_plan import Feeding, Row
from engine.core.types import Request
from engine.draft.drafter import FrontierNode, LevelPasses, ModelPasses, Proposal, TrimmedVocabulary
from engine.draft.models.draft_model import ModelDrafter
from engine.draft.models.token_map import TokenMap, TranslatedText
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from engine.scheduler.slot_allocator import OutOfSlots, SlotAllocator
from engine.utils.host_transfer import integers, rows_to_host

_MAX_FED = 512  # committed tokens in a step, of all sequences; a longer prompt is fed in several steps
_MAX_STORED = 64  # texts of ended requests

Path = tuple[int, ...]  # drafted tokens after the root


class _Best(NamedTuple):
    """The logits of shared tokens, and the model's likeliest token with its logit."""

    logits_M: Tensor
    draft_id: int
    logit: float


@dataclass(frozen=True, slots=True)
class _ChainNode:
    """The proposal at a node of the chain.

    `best` has the model's logits and its likeliest token, None inside a token of the model. `token_id` is the next one of the
    chain, None if the target has no such token.
    """

    best: _Best | None
    token_id: int | None


@dataclass(eq=False)
class _Text:
    """One sequence in the model's cache: the committed text, the tokens with keys and their slots, and the last step's chain.

    Keys of drafted tokens follow those of committed tokens. They are kept as far as the next committed text has the same tokens.
    """

    salt: str | None
    translated: TranslatedText
    cached_ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    nodes: dict[Path, _ChainNode] = field(default_factory=dict)

    @property
    def num_missing(self) -> int:
        """Committed tokens without keys."""
        return max(0, len(self.translated.draft_ids) - len(self.cached_ids))


@dataclass(eq=False)
class _Lookahead:
    """The model's continuation of a text."""

    text: _Text
    depth: int
    least_chance: float
    chance: float = 1.0
    best: list[_Best] = field(default_factory=list)


class TranslatingDrafter(ModelDrafter):
    """Drafts with a model and a cache of its own, in which it allocates the slots."""

    def __init__(self, name: str, model: CausalModel, num_slots: int, tokens: TokenMap, vocab_size: int) -> None:
        super().__init__(name, model, KVCache(num_slots, model.device), Feeding.TARGET_CACHE)
        self._tokens, self._max_positions = tokens, model.max_positions
        self._num_tokens = min(tokens.num_draft_tokens, model.vocab_size)
        shared = {
            target: draft for target, draft in tokens.draft_id_of.items() if target < vocab_size and draft < self._num_tokens
        }
        self._draft_columns_M = integers([*shared.values()], model.device)
        self._column_of = {draft: column for column, draft in enumerate(shared.values())}
        self._vocab = TrimmedVocabulary.of([*shared], vocab_size, model.device)
        self.pool = SlotAllocator(num_slots)
        self._salts: dict[str, str | None] = {}  # of requests between `begin` and `end`
        self._texts: dict[str, _Text] = {}
        self._stored: OrderedDict[int, _Text] = OrderedDict()  # of ended requests, the least recent first
        self._num_stored = 0

    @property
    def level_passes(self) -> LevelPasses | None:
        """None: a node's proposals are those of a text in other tokens."""
        return None

    # The life of a request

    def begin(self, request: Request, history: Sequence[int]) -> None:
        """Register a request; it has no keys until it drafts."""
        del history
        self._salts[request.request_id] = request.cache_salt

    def advance(self, running: Iterable[str]) -> bool:
        """Release the slots of requests that do not run, such as preempted ones. No chain of cached text begins here."""
        for request_id in self._texts.keys() - set(running):
            self._release(request_id)
        return False

    def end(self, request_id: str) -> None:
        """Release a request's slots."""
        self._release(request_id)
        self._salts.pop(request_id, None)

    def _release(self, request_id: str) -> None:
        """Keep the keys of a text for later requests of the same salt, until their slots are needed."""
        text = self._texts.pop(request_id, None)
        if text is None:
            return
        text.nodes = {}
        if text.salt is None:
            self.pool.free(text.slots)
            return
        self._num_stored += 1
        self._stored[self._num_stored] = text
        if len(self._stored) > _MAX_STORED:
            self._evict()

    def _evict(self) -> None:
        _, text = self._stored.popitem(last=False)
        self.pool.free(text.slots)

    # Drafting

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Feed committed tokens, continue the texts of the roots, and propose at the roots. A text without all keys gets none."""
        queried = {root.tree.row.request_id for root in roots}
        texts = sorted(((self._followed(row), row) for row in rows), key=lambda entry: entry[0].num_missing)
        segments: list[Segment] = []
        ahead: list[_Lookahead] = []
        places: list[int] = []
        num_fed = 0
        for text, row in texts:
            segment = self._fed(text, text.translated.draft_ids[len(text.slots) :][: _MAX_FED - num_fed])
            if segment is None:
                continue
            segments.append(segment)
            num_fed += segment.num_tokens
            if not text.num_missing and row.request_id in queried:
                ahead.append(_Lookahead(text, row.expansion.max_depth, row.growth_costs.level))
                places.append(num_fed - 1)
        passes = self._look_ahead(segments, ahead, places)
        for one in ahead:
            one.text.nodes = self._chain(one)
        return replace(self.extend(roots), passes=passes)

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Propose at the nodes of the chains. No pass is run."""
        nodes = {
            index: text.nodes[path]
            for index, one in enumerate(frontier)
            if (text := self._texts.get(one.tree.row.request_id)) is not None
            and (path := one.sampling_context.path_ids) in text.nodes
        }
        token_ids = sorted({node.token_id for node in nodes.values() if node.token_id is not None})
        missing = [token_id for token_id, column in zip(token_ids, self._vocab.columns(token_ids), strict=True) if column < 0]
        vocab = self._vocab.extended(missing) if missing else self._vocab
        logits_PM = torch.full((len(nodes), len(vocab.ids_M)), -torch.inf, device=self._model.device)
        for row_M, node in zip(logits_PM, nodes.values(), strict=True):
            self._propose_at(row_M, node, vocab)
        return Proposal(tuple(nodes), logits_PM, vocab=vocab)

    def _propose_at(self, row_M: Float[Tensor, " M"], node: _ChainNode, vocab: TrimmedVocabulary) -> None:
        """Write a node's logits: the model's, with the likeliest token's at the chain's next token."""
        column = -1 if node.token_id is None else vocab.columns([node.token_id])[0]
        if node.best is None:
            row_M[column] = 0.0
            return
        row_M[: len(node.best.logits_M)] = node.best.logits_M
        own_column = self._column_of.get(node.best.draft_id, -1)
        if column >= 0 and column != own_column:
            row_M[column] = row_M[column].logaddexp(row_M.new_tensor(node.best.logit))
            if own_column >= 0:
                row_M[own_column] = -torch.inf

    def _followed(self, row: Row) -> _Text:
        """Return a row's text with the new committed tokens, and the keys that are cached for them.

        The last token is fed again even if it has keys, because its distribution is needed.
        """
        text = self._texts.get(row.request_id)
        if text is None or row.request_id not in self._salts or text.translated.num_read > len(row.history):
            self._release(row.request_id)
            text = self._texts[row.request_id] = self._begun(row)
        else:
            text.translated.follow(row.history)
        kept = _common_length(text.cached_ids, text.translated.draft_ids[:-1])
        self.pool.free(text.slots[kept:])
        del text.slots[kept:], text.cached_ids[kept:]
        text.nodes = {}
        return text

    def _begun(self, row: Row) -> _Text:
        """Return the text of a new row, with the keys of the ended text that has the longest prefix in common.

        Its other keys are freed. So a text of which less than half would be kept is not taken.
        """
        text = _Text(self._salts.get(row.request_id, ""), TranslatedText(self._tokens))
        text.translated.follow(row.history)
        lengths = {
            number: _common_length(stored.cached_ids, text.translated.draft_ids)
            for number, stored in self._stored.items()
            if stored.salt == text.salt
        }
        best = max(lengths, key=lengths.__getitem__, default=None)
        if best is not None and 2 * lengths[best] >= len(self._stored[best].slots):
            stored = self._stored.pop(best)
            text.cached_ids, text.slots = stored.cached_ids, stored.slots
        return text

    def _fed(self, text: _Text, new_ids: Sequence[int]) -> Segment | None:
        """Return the segment that feeds tokens after the cached ones, None if there is no room for their keys."""
        num_cached = len(text.slots)
        slots = self._allocated(len(new_ids)) if num_cached + len(new_ids) <= self._max_positions else None
        if not slots:
            return None
        text.slots += slots
        text.cached_ids += new_ids
        return chain_segment(new_ids, num_cached, text.slots)

    def _look_ahead(self, segments: Sequence[Segment], ahead: Sequence[_Lookahead], places: Sequence[int]) -> ModelPasses:
        """Run the segments and continue the texts whose distributions are at the places. Return the passes.

        A text ends at its depth, at a special token, or where its probability falls below the cost of a pass.
        """
        passes = ModelPasses()
        while segments:
            batch = pack(segments, self._model.device)
            logits_NV = self._passes.run(batch, [*places])[:, : self._num_tokens]
            passes += ModelPasses(1, batch.num_tokens)
            shared_NM = logits_NV.index_select(-1, self._draft_columns_M)
            likeliest = logits_NV.max(-1, keepdim=True)
            probs_N1 = (likeliest.values - logits_NV.logsumexp(-1, keepdim=True)).exp()
            found = rows_to_host([probs_N1, likeliest.values, likeliest.indices])
            segments, going_on = [], []
            for one, logits_M, ((prob,), (logit,), (draft_id,)) in zip(ahead, shared_NM, found, strict=True):
                one.best.append(_Best(logits_M, int(draft_id), logit))
                one.chance *= prob
                is_over = len(one.best) >= one.depth or one.chance < one.least_chance
                if is_over or self._tokens.is_special(int(draft_id)):
                    continue
                if (segment := self._fed(one.text, [int(draft_id)])) is not None:
                    segments.append(segment)
                    going_on.append(one)
            ahead, places = going_on, range(len(going_on))
        return passes

    def _chain(self, ahead: _Lookahead) -> dict[Path, _ChainNode]:
        """Return the nodes of a continuation in the target's tokens, by path."""
        draft_ids = [best.draft_id for best in ahead.best]
        parts = [b"" if self._tokens.is_special(draft_id) else self._tokens.decoded([draft_id]) for draft_id in draft_ids]
        best_at = dict(zip(accumulate(map(len, parts[:-1]), initial=0), ahead.best, strict=True))
        token_ids: list[int | None] = [*self._tokens.target_ids(b"".join(parts))]
        if not parts[-1]:
            token_ids.append(self._tokens.target_id_of.get(draft_ids[-1]))
        nodes: dict[Path, _ChainNode] = {}
        path: Path = ()
        end = 0
        for token_id in token_ids:
            nodes[path] = _ChainNode(best_at.get(end), token_id)
            if token_id is None:
                break
            path, end = (*path, token_id), end + self._tokens.num_bytes(token_id)
        return nodes

    # Slots

    def _allocated(self, count: int) -> list[int] | None:
        """Return slots, evicting stored texts if too few are free; None if running requests have too many."""
        while self.pool.num_free < count and self._stored:
            self._evict()
        try:
            return self.pool.allocate(count)
        except OutOfSlots:
            return None

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the texts own each used slot exactly once."""
        self.pool.check([text.slots for text in (*self._texts.values(), *self._stored.values())])


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
