"""How often a step on a device makes its host wait for numbers: once a round of growth, once or so to judge.

A processor has nothing to wait for, so the reads that would wait on a GPU are counted, with our library and what is cheaper on a
processor left out.
"""

from collections import Counter

import pytest
import torch
from torch import Tensor

from engine.core.policy import FixedExpansion
from engine.core.tree import parse_expansion
from engine.draft.trees import grow as growth
from engine.draft.trees import sampling as children
from engine.model.causal_lm import adopt
from engine.native import distributions as probs
from engine.native import noise
from engine.sampling import argmax as likeliest
from engine.sampling import choice_reference, device_choice
from engine.testing import tiny_engine, tiny_module
from tests.model.driving import greedy, run, sampled
from tests.model.passes import CPU

READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy")  # that wait


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count reads, once models are loaded and where the device is taken for a GPU."""
    counted: Counter[str] = Counter()

    def counting(name, original):
        def read(*args, **kwargs):
            counted[name] += 1
            return original(*args, **kwargs)

        return read

    monkeypatch.setattr(probs, "can_read", lambda _: False)
    monkeypatch.setattr(noise, "can_choose", lambda _: False)
    monkeypatch.setattr(children, "_possible_tokens", lambda probs_PM: torch.arange(probs_PM.shape[-1]))
    monkeypatch.setattr(likeliest, "_is_on_host", lambda _: False)
    for name in READS:
        monkeypatch.setattr(Tensor, name, counting(name, getattr(Tensor, name)))
    return counted


def reads_of(requests, waits: Counter[str], monkeypatch: pytest.MonkeyPatch, tree: str) -> tuple[int, int, int]:
    """Return how often a run's steps read, how many rounds of growth they had, and how many steps there were."""
    engine = tiny_engine(adopt(tiny_module(), CPU), adopt(tiny_module(), CPU), FixedExpansion(parse_expansion(tree)))
    rounds = []

    def counted(*args):
        rounds.append(args)
        return children.candidates_of(*args)

    monkeypatch.setattr(growth, "candidates_of", counted)
    waits.clear()
    session = run(engine, requests)
    return sum(waits.values()), len(rounds), len(session.stats)


@pytest.mark.parametrize("tree", ["3.2.2", "beam.6.2.3"])
def test_greedy_step_reads_per_round_and_verdict(waits, monkeypatch, tree):
    reads, num_rounds, num_steps = reads_of([greedy("one", [5, 9, 33]), greedy("two", [7])], waits, monkeypatch, tree)
    assert num_rounds > num_steps
    assert reads == num_rounds + num_steps


def test_seeded_step_reads_per_round_and_depth(waits, monkeypatch):
    """And once for the logit facts that all rules use."""
    requests = [sampled("one", [5, 9, 33], seed=1, max_tokens=12)]
    reads, num_rounds, num_steps = reads_of(requests, waits, monkeypatch, "3.1.0")
    assert reads == num_rounds + num_steps + 12  # a depth for each token


@pytest.mark.parametrize("requests", ["greedy", "seeded", "both"])
def test_choices_on_a_device_are_read_once(requests, waits, monkeypatch):
    """Of all depths and of both rules, where kernels choose. Growth reads once for each way to rank tokens."""
    monkeypatch.setattr(device_choice, "can_choose_on", lambda _: True)
    monkeypatch.setattr(device_choice, "chosen", choice_reference.chosen)
    seeded, plain = sampled("one", [5, 9, 33], seed=1, max_tokens=12), greedy("two", [7])
    given = {"greedy": [plain], "seeded": [seeded], "both": [seeded, plain]}[requests]
    reads, num_rounds, num_steps = reads_of(given, waits, monkeypatch, "3.1.0")
    assert reads == len(given) * num_rounds + num_steps


def test_allowed_token_count_would_block_the_host(waits, monkeypatch):
    monkeypatch.setattr(children, "_possible_tokens", lambda probs_PM: probs_PM.amax(0).nonzero()[:, 0])
    with pytest.raises(AssertionError):
        test_greedy_step_reads_per_round_and_verdict(waits, monkeypatch, "3.2.2")


def test_drawing_rule_reads_twice_per_round(waits, monkeypatch):
    """Validity of draft distributions and draws; the likeliest tokens, the validity of sums, and the accepted token."""
    requests = [sampled("one", [5, 9, 33], seed=1, verifier="traversal")]
    reads, num_rounds, num_steps = reads_of(requests, waits, monkeypatch, "2.2.1")
    assert reads == 2 * num_rounds + 3 * num_steps
