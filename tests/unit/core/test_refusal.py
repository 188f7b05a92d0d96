"""Impossible requests are refused with the reason, before they get a place in the queue."""

import math
from dataclasses import replace

import pytest

from engine.core.tree import Expansion
from engine.core.types import ModelInfo, Request, SamplingParams, Speculation
from engine.core.validation import RequestRefused, require_runnable

INFO = ModelInfo("m", 100, 50, 1000, (2,), "float32", "cpu", "none", "traversal", "plain")


def test_runnable_requests_pass():
    require_runnable(Request("r", (1, 99), SamplingParams(max_tokens=48)), INFO)
    bias = ((0, -100.0), (99, 100.0))
    require_runnable(Request("r", (1,), SamplingParams(logit_bias=bias, allowed_token_ids=(0, 99), min_tokens=16)), INFO)
    ends = SamplingParams(allowed_token_ids=(2, 3), stop_token_ids=(3,), ignore_eos=True, min_tokens=1)
    require_runnable(Request("r", (1,), ends), INFO)
    require_runnable(Request("r", (1,), replace(ends, ignore_eos=False, min_tokens=0)), INFO)
    require_runnable(Request("r", (1,), SamplingParams(temperature=0.0, top_p=1e-9, min_p=1.0, top_k=10**9)), INFO)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (SamplingParams(temperature=math.nan), "temperature"),
        (SamplingParams(temperature=math.inf), "temperature"),
        (SamplingParams(temperature=1.0001e4), "temperature"),
        (SamplingParams(temperature=-0.1), "temperature"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(top_p=math.nan), "top_p"),
        (SamplingParams(min_p=1.1), "min_p"),
        (SamplingParams(top_k=-1), "top_k"),
        (SamplingParams(num_logprobs=-1), "num_logprobs"),
        (SamplingParams(presence_penalty=math.nan), "presence_penalty"),
        (SamplingParams(frequency_penalty=math.inf), "frequency_penalty"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(repetition_penalty=math.nan), "repetition_penalty"),
        (SamplingParams(repetition_penalty=math.inf), "repetition_penalty"),
        (SamplingParams(logit_bias=((100, 1.0),)), "100 in logit_bias is outside the vocabulary"),
        (SamplingParams(logit_bias=((-1, 1.0),)), "-1 in logit_bias"),
        (SamplingParams(logit_bias=((5, 1.0), (5, 1.0))), "twice"),
        (SamplingParams(logit_bias=((5, math.nan),)), "a bias in"),
        (SamplingParams(logit_bias=((5, -math.inf),)), "a bias in"),
        (SamplingParams(allowed_token_ids=()), "no token would be possible"),
        (SamplingParams(typical_p=0.0), "typical_p must be"),
        (SamplingParams(bad_words=((3,), ())), "a bad word has no tokens"),
        (SamplingParams(bad_words=((100, 3),)), "100 in bad_words"),
        (SamplingParams(bad_words=((1, 2),) * 2049), "more than 4096 tokens"),
        (SamplingParams(bad_words=tuple((token_id,) for token_id in range(100))), "forbid every possible token"),
        (SamplingParams(bad_words=((2,), (3,)), allowed_token_ids=(2, 3)), "forbid every possible token"),
        (
            SamplingParams(min_tokens=1, bad_words=((2,),), allowed_token_ids=(2, 3), stop_token_ids=(3,)),
            "forbids every token",
        ),
        (SamplingParams(allowed_token_ids=(5, 100)), "100 in allowed_token_ids"),
        (SamplingParams(allowed_token_ids=(-1,)), "-1 in allowed_token_ids"),
        (SamplingParams(min_tokens=-1), "min_tokens"),
        (SamplingParams(min_tokens=17), "min_tokens must be in"),
        (SamplingParams(min_tokens=1, allowed_token_ids=(2, 3), stop_token_ids=(3,)), "forbids every token"),
        (SamplingParams(min_tokens=1, stop_token_ids=tuple(range(100))), "forbids every token"),
        (SamplingParams(max_tokens=-1), "max_tokens"),
        (SamplingParams(max_tokens=50), "exceed 50"),
    ],
)
def test_parameters_without_a_distribution_are_refused(sampling, reason):
    with pytest.raises(RequestRefused, match=reason):
        require_runnable(Request("r", (1, 2), sampling), INFO)


@pytest.mark.parametrize("prompt", [(), (-1,), (100,)])
def test_impossible_prompts_are_refused(prompt):
    with pytest.raises(RequestRefused):
        require_runnable(Request("r", prompt), INFO)


def test_an_unknown_verifier_is_refused_by_name():
    with pytest.raises(RequestRefused, match="guess"):
        require_runnable(Request("r", (1,), speculation=Speculation(verifier="guess")), INFO)


def test_lossy_pair_is_refused_with_both_names():
    heap = Expansion(0, 3, 4, "heap", 8)
    with pytest.raises(RequestRefused, match="'specinfer' is not lossless on 'heap' trees"):
        require_runnable(Request("r", (1,), speculation=Speculation(expansion=heap, verifier="specinfer")), INFO)
    require_runnable(Request("r", (1,), speculation=Speculation(expansion=heap, verifier="rrsw")), INFO)
    require_runnable(Request("r", (1,), speculation=Speculation(expansion=heap)), INFO)
