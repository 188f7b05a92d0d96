"""The tokens of deterministic rules for a seed, and the log-probabilities that an engine reports."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.core.policy import FixedExpansion
from engine.core.rng_keys import Stream, stream_key
from engine.core.tree import DELAYED_TREES, Expansion
from engine.core.types import Request, SamplingParams, Speculation, TokenLogprobs
from engine.core.verifier_table import default_tree
from engine.sampling.noise import gumbels
from engine.testing import tiny_engine
from engine.verify.dispatch import Judge
from engine.verify.verdict import Verdict
from tests.enumeration import Context, batch_of
from tests.model.driving import run
from tests.model.parameters.texts import PROMPT, RequestedModel, accepted, growths, request_row
from tests.model.tiny import own_logits, pair

SEEDS = range(4)
TOLERANCE = 1e-4


def texts_differ(model: RequestedModel) -> int:
    """Count the trees, over some seeds, after which the coupled rule (or greedy choice) differs from plain decoding."""
    trees = [tree for grown in growths(model).values() for tree in grown]
    forest, logits_NV = batch_of(model, trees).forest, model.raw_logits(trees)
    num_differ = 0
    for seed in SEEDS:
        verdicts = Judge(model.grammars).judge([request_row(model, "coupled", seed)] * len(trees), forest, logits_NV)
        expected = _plain_text(model, seed)
        for tree, verdict in zip(trees, verdicts, strict=True):
            assert isinstance(verdict, Verdict)
            found = accepted(model.request, (*tree.contexts[verdict.path[-1]], verdict.extra_id))
            num_differ += found != expected[: len(found)]
    return num_differ


def _plain_text(model: RequestedModel, seed: int) -> Context:
    """Return plain decoding's tokens: the likeliest ones, or the arg max of log probability plus the position's noise."""
    text: Context = ()
    while len(text) < model.sampling.max_tokens and not (text and text[-1] in model.sampling.stop_token_ids):
        with np.errstate(divide="ignore"):
            scores = np.log(model.target(text))
        if not model.sampling.is_greedy:
            key = stream_key(seed, len(PROMPT) + len(text), Stream.TOKEN)
            scores = scores + gumbels([key], model.vocab_size)[0].numpy()
        text = (*text, int(scores.argmax()))
    return text


# Parameters beside which log-probabilities are still the model's own.
_BESIDE = SamplingParams(
    temperature=0.8, top_k=12, frequency_penalty=0.9, logit_bias=((9, 2.0),), max_tokens=10, ignore_eos=True, seed=4
)
_TEXT = tuple(3 + (11 * i) % 7 for i in range(12))
_NUM_TOP = 3


def check_numbers(verifier: str) -> None:
    """Run a tiny engine with that verifier. Compare its log-probabilities of answer and prompt with one plain pass."""
    tree = default_tree(verifier)
    expansion = Expansion(1, 2, 2, tree) if tree in DELAYED_TREES else Expansion(0, 2, 3, tree, 5)
    sampling = replace(_BESIDE, num_logprobs=_NUM_TOP, num_prompt_logprobs=_NUM_TOP)
    engine = tiny_engine(*pair("llama", noise=0.05), FixedExpansion(expansion), verifier)
    session = run(engine, [Request("r", _TEXT, sampling, Speculation(verifier=verifier, expansion=expansion))])
    assert sum(stats.num_accepted_tokens for stats in session.stats), "something was accepted"
    outcome = session.outcomes["r"]
    reported = [one for event in outcome.events for one in event.prompt_logprobs] + outcome.logprobs
    _check([*_TEXT, *outcome.ids], reported)


def _check(ids: Sequence[int], reported: Sequence[TokenLogprobs]) -> None:
    probs_TV = torch.log_softmax(own_logits("llama", [ids])[0, :-1].double(), -1)
    assert len(reported) == len(probs_TV)
    for probs_V, token_id, one in zip(probs_TV, ids[1:], reported, strict=True):
        assert one.logprob == pytest.approx(float(probs_V[token_id]), abs=TOLERANCE)
        assert list(one.top_logprobs) == pytest.approx(probs_V.topk(_NUM_TOP).values.tolist(), abs=TOLERANCE)
