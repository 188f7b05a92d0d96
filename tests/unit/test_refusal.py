"""Impossible requests are refused with the reason, before they get a place in the queue."""

import math

import pytest

from engine.refusal import RequestRefused, require_runnable
from engine.types import ModelInfo, Request, SamplingParams, Speculation

INFO = ModelInfo("m", 100, 50, 1000, (2,), "float32", "cpu", "none", "traversal", "plain")


def test_what_can_run_passes():
    require_runnable(Request("r", (1, 99), SamplingParams(max_tokens=48)), INFO)
    require_runnable(Request("r", (1,), SamplingParams(temperature=0.0, top_p=1e-9, min_p=1.0, top_k=10**9)), INFO)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (SamplingParams(temperature=math.nan), "temperature"),
        (SamplingParams(temperature=math.inf), "temperature"),
        (SamplingParams(temperature=-0.1), "temperature"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(top_p=math.nan), "top_p"),
        (SamplingParams(min_p=1.1), "min_p"),
        (SamplingParams(top_k=-1), "top_k"),
        (SamplingParams(num_logprobs=-1), "num_logprobs"),
        (SamplingParams(max_tokens=0), "max_tokens"),
        (SamplingParams(max_tokens=50), "exceed 50"),
    ],
)
def test_parameters_without_a_law_are_refused(sampling, reason):
    with pytest.raises(RequestRefused, match=reason):
        require_runnable(Request("r", (1, 2), sampling), INFO)


@pytest.mark.parametrize("prompt", [(), (-1,), (100,)])
def test_impossible_prompts_are_refused(prompt):
    with pytest.raises(RequestRefused):
        require_runnable(Request("r", prompt), INFO)


def test_an_unknown_verifier_is_refused_by_name():
    with pytest.raises(RequestRefused, match="guess"):
        require_runnable(Request("r", (1,), speculation=Speculation(verifier="guess")), INFO)
