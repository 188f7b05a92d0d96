"""The load benchmark mixes kinds and temperatures evenly, and all contenders get the same requests."""

import argparse
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import load_checkouts
from benchmarks.load import Way, requests_of, room_for
from engine.core.types import Speculation
from engine.testing import tiny_engine, tiny_pair

KINDS, TEMPERATURES = ("code", "maths", "prose"), (0.0, 0.7, 1.0)


@pytest.fixture(scope="module")
def way():
    return Way("policy", tiny_engine(*tiny_pair()), Speculation())


def arguments(kinds=KINDS, temperatures=TEMPERATURES):
    return argparse.Namespace(kinds=kinds, temperatures=temperatures, max_tokens=8)


def prompts_of(kinds, num_prompts=2):
    """Return prompts of alternating kinds. The first token of each encodes its kind."""
    return [(kind, number) for number in range(num_prompts) for kind in range(len(kinds))]


def mix(way, kinds, temperatures, batch, num_rounds):
    args = arguments(kinds, temperatures)
    rounds = (requests_of(prompts_of(kinds), batch, number, way, args) for number in range(num_rounds))
    return [request for of_round in rounds for request in of_round]


@pytest.mark.parametrize(("kinds", "temperatures"), [(KINDS, TEMPERATURES), (KINDS[:2], TEMPERATURES), (KINDS, (0.0, 1.0))])
def test_kinds_and_temperatures_combine_equally_often(way, kinds, temperatures):
    """The bug: where there were as many kinds as temperatures, a kind had one temperature alone."""
    whole = len(kinds) * len(temperatures)
    requests = islice(mix(way, kinds, temperatures, batch=1, num_rounds=whole), 2 * whole)
    pairs = Counter((request.prompt_ids[0], request.sampling.temperature) for request in requests)
    assert len(pairs) == whole
    assert set(pairs.values()) == {2}


def test_rounds_differ_in_seeds_contenders_do_not(way):
    requests = mix(way, KINDS, TEMPERATURES, batch=4, num_rounds=3)
    seeds = [request.sampling.seed for request in requests if request.sampling.temperature]
    assert len(set(seeds)) == len(seeds)
    of_ways = [
        [replace(one, request_id="") for one in requests_of(prompts_of(KINDS), 4, 1, replace(way, name=name), arguments())]
        for name in ("policy", "plain")
    ]
    assert of_ways[0] == of_ways[1]


@pytest.mark.parametrize(("batches", "running", "tokens"), [((1, 4), 32, 512), ((256, 1), 256, 512), ((64, 700), 700, 700)])
def test_steps_have_room_for_every_load(batches, running, tokens):
    """The bug: a load above `max_running` ended with an error, because no step had all its sequences."""
    assert room_for(Path("configs/default.yaml"), batches) == {"max_running": running, "max_step_tokens": tokens}


def test_given_settings_precede_the_room(monkeypatch):
    words = ["load_checkouts", "before", "--config", "configs/default.yaml", "--batches", "64", "--set", "max_running=99"]
    monkeypatch.setattr("sys.argv", words)
    given = dict(one.split("=") for one in load_checkouts._arguments().set)
    assert given == {"max_running": "99", "max_step_tokens": "512"}
