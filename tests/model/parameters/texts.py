"""The distribution of whole sequences: of plain decoding by transformers' processors, and of the engine by enumeration.

Plain decoding uses no code of the engine: raw distributions are numpy's, edits and truncation transformers', ends
this module's. The engine provides the drafter's distributions, the Judge's inputs to a verifier, the verifier's masses, and
the ends of sequences.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from msgspec import structs
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from engine.core.rng_keys import StepKey
from engine.core.step_plan import Row, SamplingContext
from engine.core.tree import PLAIN, Expansion, TreeKind
from engine.core.types import ModelInfo, Request, SamplingParams
from engine.core.verifier_table import is_exact
from engine.engine import with_end_tokens
from engine.sampling.distributions import warped_probs
from engine.sampling.logits_processors import edited_logits
from engine.scheduler.sequence import Sequence as EngineSequence
from engine.structured_output.grammars import CompiledGrammars, Vocabulary, source_of
from engine.structured_output.masks import GrammarMasks
from engine.verify.dispatch import Judge
from engine.verify.forest import Forest
from engine.verify.two_phase import TwoPhase
from engine.verify.verdict import Verdict
from tests.enumeration import (
    Batch,
    Context,
    Distribution,
    DrawnTree,
    TinyModel,
    batch_of,
    beam_trees,
    delayed_trees,
    distinct_trees,
    heap_trees,
    set_and_sample_trees,
)
from tests.model.edits import processors_of
from tests.model.parameters.subjects import END_ID, GRAMMATICAL, LETTERS
from tests.model.rows import decoding_row
from tests.model.verify.rules_under_test import outcomes_of

VOCAB_SIZE, MODEL_SEED = 3, 23
PROMPT = (0, 1, 0, 2)
INFO = ModelInfo("tiny", VOCAB_SIZE, 64, 64, (END_ID,), "float64", "cpu", "enumerated", "traversal", "fixed")

SequenceProbs = dict[Context, float]


class RequestedModel(TinyModel):
    """Target and drafter of one request. `target` is plain decoding's distribution by transformers, `draft` the engine's own."""

    def __init__(self, sampling: SamplingParams) -> None:
        super().__init__(VOCAB_SIZE, MODEL_SEED)
        self.request = with_end_tokens(Request("r", PROMPT, sampling), INFO)
        self.grammars = GrammarMasks(CompiledGrammars(_vocabulary))
        raw_target, raw_draft = self.target, self.draft
        self.raw_target = raw_target
        self.target = cache(lambda context: _plain_probs(self.sampling, raw_target(context), context))
        self.draft = cache(lambda context: self._engine_probs(raw_draft(context), context))

    def raw_logits(self, trees: Sequence[DrawnTree]) -> Tensor:
        """Return the target's logits after every node of the trees, before any edit."""
        return torch.from_numpy(np.log(np.stack([self.raw_target(context) for tree in trees for context in tree.contexts])))

    @property
    def sampling(self) -> SamplingParams:
        """The request's parameters, the model's end tokens among the stops."""
        return self.request.sampling

    def _engine_probs(self, raw: Distribution, context: Context) -> Distribution:
        """Return the drafter's processed distribution: the one that is sampled and given to the verifier."""
        contexts = [SamplingContext(self.sampling, PROMPT, len(PROMPT), context)]
        edited_1V = edited_logits(torch.from_numpy(np.log(raw))[None], contexts, self.grammars)
        return np.asarray(warped_probs(edited_1V, [self.sampling])[0].double())


class _Grammatical(LogitsProcessor):
    """Restricts a sequence to the few that a grammar allows, spelled out. After an end any token may follow."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        edited = scores.clone()
        for row, ids in enumerate(input_ids[:, len(PROMPT) :].tolist()):
            if END_ID not in ids:
                text = "".join(LETTERS[i] for i in ids)
                nexts = [any(whole.startswith(text + letter) for whole in GRAMMATICAL) for letter in LETTERS]
                is_allowed_V = torch.tensor([*nexts, text in GRAMMATICAL])
                edited[row] = scores[row].masked_fill(~is_allowed_V & is_allowed_V.any(), float("-inf"))
        return edited


@cache
def _vocabulary() -> Vocabulary:
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)} | {"<end>": END_ID}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return source_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>"), VOCAB_SIZE, [END_ID]).load()


def _plain_probs(sampling: SamplingParams, raw: Distribution, context: Context) -> Distribution:
    """Return the distribution of the next token as in transformers' `generate`, in float64."""
    processors = processors_of(sampling, len(PROMPT))
    if sampling.grammar is not None:
        processors.append(_Grammatical())
    if not sampling.is_greedy:
        processors.extend(_warpers(sampling))
    scores_1V = processors(torch.tensor([[*PROMPT, *context]]), torch.from_numpy(np.log(raw))[None])
    return np.asarray(torch.softmax(scores_1V.double(), -1)[0])


def _warpers(sampling: SamplingParams) -> LogitsProcessorList:
    warpers = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.typical_p < 1.0:
        warpers.append(TypicalLogitsWarper(sampling.typical_p))
    return LogitsProcessorList(warpers)


def plain_texts(model: RequestedModel) -> SequenceProbs:
    """Return the distribution of plain decoding's sequences."""
    return _continued(model, ())


def _continued(model: RequestedModel, text: Context) -> SequenceProbs:
    """Return the distribution of plain decoding after this prefix. This module decides where sequences end."""
    if len(text) >= model.sampling.max_tokens or (text and text[-1] in model.sampling.stop_token_ids):
        return {text: 1.0}
    distribution: SequenceProbs = {}
    for token_id, chance in enumerate(model.target(text).tolist()):
        if chance > 0.0:
            for whole, share in _continued(model, (*text, token_id)).items():
                distribution[whole] = distribution.get(whole, 0.0) + chance * share
    return distribution


class Watcher:
    """Replaces a verifier and keeps its inputs from the Judge."""

    name = "watcher"

    def __init__(self) -> None:
        self.probs_NV = torch.zeros(0)

    def judge(self, forest: Forest, target_probs_NV: Tensor, keys: Sequence[StepKey]) -> list[Verdict]:
        self.probs_NV = target_probs_NV
        return [Verdict((0,), 0)] * len(forest.trees)


class Enumeration:
    """All trees of a few growths for one request, and what the Judge makes of them."""

    def __init__(self, model: RequestedModel) -> None:
        self._model = model
        grown = growths(model)
        self._growth_of = [name for name, trees in grown.items() for _ in trees]
        self._batch = self._judged([tree for trees in grown.values() for tree in trees])

    def texts(self, rule: TwoPhase) -> dict[str, SequenceProbs]:
        """Return the distribution of the engine's sequences under a rule, for each growth that it is exact on."""
        chosen = [b for b, growth in enumerate(self._growth_of) if is_exact(KINDS[growth], rule.name)]
        weights: dict[str, SequenceProbs] = {}
        batch = self._subset(chosen)
        stop_N, extra_NV = outcomes_of(rule, batch)
        nodes = iter(zip(stop_N.tolist(), extra_NV.tolist(), strict=True))
        for b, tree in zip(chosen, batch.trees, strict=True):
            distribution = weights.setdefault(self._growth_of[b], {})
            for context in tree.contexts:
                stop, extra = next(nodes)
                for token_id, share in enumerate(extra):
                    text = (*context, token_id)
                    distribution[text] = distribution.get(text, 0.0) + tree.probability * stop * share
        return {growth: self._ended(distribution) for growth, distribution in weights.items()}

    def _judged(self, trees: list[DrawnTree]) -> Batch:
        """Return the trees with the distributions that the Judge gives to a verifier."""
        batch, watcher, judge = batch_of(self._model, trees), Watcher(), Judge(self._model.grammars)
        judge._verifiers["traversal"] = watcher
        judge.judge([request_row(self._model, "traversal")] * len(trees), batch.forest, self._model.raw_logits(trees))
        return replace(batch, target_probs_NV=watcher.probs_NV)

    def _subset(self, chosen: Sequence[int]) -> Batch:
        offsets = self._batch.forest.offsets
        rows = [node for b in chosen for node in range(offsets[b], offsets[b + 1])]
        trees = tuple(self._batch.trees[b] for b in chosen)
        return Batch(trees, self._batch.forest.subset(chosen), self._batch.target_probs_NV[torch.tensor(rows)])

    def _ended(self, weights: SequenceProbs) -> SequenceProbs:
        """Return the distribution of whole sequences: the accepted path and extra token, then plain decoding."""
        distribution: SequenceProbs = {}
        for text, weight in weights.items():
            if weight > 0.0:
                for whole, share in _continued(self._model, accepted(self._model.request, text)).items():
                    distribution[whole] = distribution.get(whole, 0.0) + weight * share
        return distribution


def request_row(model: RequestedModel, verifier: str, seed: int = 0) -> Row:
    """Return the row of the request in its first step."""
    return structs.replace(decoding_row(PROMPT, PLAIN, model.sampling, verifier, seed), num_prompt_tokens=len(PROMPT))


def accepted(request: Request, text: Context) -> Context:
    """Return what the engine keeps of the first tokens of a request."""
    kept, _ = EngineSequence(request, 0, "").accept(list(text))
    return tuple(kept)


KINDS = {
    "chain": TreeKind.PATH,
    "i.i.d.": TreeKind.IID,
    "distinct": TreeKind.FIXED_DISTINCT,
    "heap": TreeKind.WITHOUT_REPLACEMENT,
    "set and sample": TreeKind.SET_PLUS_SAMPLE,
    "beam": TreeKind.DETERMINISTIC,
}


def growths(model: TinyModel) -> dict[str, list[DrawnTree]]:
    """Return every tree of one small growth of each kind, two levels deep."""
    return {
        "chain": delayed_trees(model, Expansion(2, 1, 0)),
        "i.i.d.": delayed_trees(model, Expansion(0, 2, 2)),
        "distinct": distinct_trees(model, (2, 1)),
        "heap": heap_trees(model, 3),
        "set and sample": set_and_sample_trees(model, (1, 1)),
        "beam": beam_trees(model, 2, 2),
    }


def distance(distribution: SequenceProbs, other: SequenceProbs) -> float:
    """Return the largest difference of two distributions of sequences."""
    return max(abs(distribution.get(text, 0.0) - other.get(text, 0.0)) for text in {*distribution, *other})
