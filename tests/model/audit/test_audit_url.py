"""`latebranch audit --url` finds each broken server within its bound of requests, and passes sound ones.

One request is sent at a time and first seeds are fixed, so that every score is the same in every run.
"""

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import server.cli.main
from engine.audit.report import AuditVerdict
from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.testing import tiny_engine
from engine.weights.pretrained import load_tokenizer
from engine.worker.inprocess import InProcessEngine
from server.audit_url.client import CompletionClient
from server.audit_url.results import CheckVerdict
from server.audit_url.text import as_json, as_text
from server.cli.audit_url import report_of
from tests.conformance.served import app_of
from tests.conformance.served import served as app_served
from tests.model.audit import stand_in
from tests.model.audit.stand_in import served
from tests.model.folders import model_folder
from tests.model.tiny import own_module, pair

TEXTS = ("w5 w9 w33 w4", "w7 w8 w20 w21 w7 w8", "w11 w12", "w30 w31 w33", "w50 w40 w5 w7", "w41 w41 w42")
LIMITS = SchedulerConfig(max_running=16, num_slots=4096, max_model_len=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), own_module("llama"))


def arguments(url, weights, num_requests, first_seed=3, **more):
    given: dict[str, Any] = {"model": None, "api_key": None, "timeout": 60.0, "concurrency": 1, "alpha": 1e-3, "tie_gap": None}
    given |= {"url": url, "weights": None if weights is None else str(weights), "weights_dtype": "float32"}
    return argparse.Namespace(**{**given, "requests": num_requests, "first_seed": first_seed, "greedy_tokens": 32, **more})


@cache
def words(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def report(made, weights, num_requests, first_seed=3, **more):
    with served(made(own_module("llama")), words) as url:
        found = report_of(TEXTS, arguments(url, weights, num_requests, first_seed, **more))
    assert found.num_requests <= num_requests
    return found


def violations(found) -> set[str]:
    return {one.check for one in found.results if one.at(found.level) is CheckVerdict.VIOLATION}


FAULTS = {
    "WithoutTopP": (300, "impossible tokens"),
    "LooseAtZero": (200, "arg max"),
    "SwappedTokens": (300, "arg max"),
    "ForgetfulPenalties": (500, "repeated tokens"),
    "TruncatedLogprobs": (200, "log-probabilities"),
    "DraftedLogprobs": (200, "log-probabilities"),
    "FirstTokensAlone": (400, "all tokens"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_found(name, folder):
    num_requests, check = FAULTS[name]
    found = report(getattr(stand_in, name), folder, num_requests)
    assert found.verdict is AuditVerdict.VIOLATION
    assert check in violations(found), as_text(found)


OWN_FAULTS = {
    "WithoutTopP": (300, "impossible tokens"),
    "LooseAtZero": (200, "arg max"),
    "TruncatedLogprobs": (300, "alike after the same text"),
    "DraftedLogprobs": (200, "alike after the same text"),
}


@pytest.mark.parametrize("name", OWN_FAULTS)
def test_faults_are_found_without_weights(name):
    num_requests, check = OWN_FAULTS[name]
    assert check in violations(report(getattr(stand_in, name), None, num_requests))


@pytest.mark.parametrize("first_seed", [1, 2, 3])
def test_a_sound_server_has_no_violation(first_seed, folder):
    found = report(stand_in.StandIn, folder, 300, first_seed)
    assert not violations(found), as_text(found)


def test_a_sound_server_passes(folder):
    assert report(stand_in.StandIn, folder, 900).verdict is AuditVerdict.LOSSLESS


def test_a_sound_server_passes_without_weights():
    assert report(stand_in.StandIn, None, 500).verdict is AuditVerdict.LOSSLESS


def test_generate_has_no_violation(folder):
    """Refused fields are not offered, which is no violation."""
    found = report(stand_in.Generate, folder, 300)
    assert not violations(found), as_text(found)
    missing = {one.setting for one in found.results if one.at(found.level) is CheckVerdict.NOT_OFFERED}
    assert {"streams", "stop strings", "n", "temperature 1 presence_penalty 1.5"} <= missing


def test_this_server_has_no_violation(folder):
    engine = InProcessEngine(lambda: tiny_engine(*pair("llama", 0.05), FixedExpansion(Expansion(1, 2, 2)), config=LIMITS), LIMITS)
    with app_served(app_of(engine, tokenizer=load_tokenizer(folder))) as url:
        found = report_of(TEXTS, arguments(url, folder, 400, concurrency=4))
    assert not violations(found), as_text(found)
    assert found.num_accepted > 100
    assert "temperature 0, without speculation" in {one.setting for one in found.results}
    assert not [one for one in found.results if one.at(found.level) is CheckVerdict.NOT_OFFERED]


class ConstantSeed(stand_in.StandIn):
    """Requests without a seed have the seed 0, as in OpenVINO GenAI."""

    def answer(self, body):
        return super().answer({"seed": 0, **body})


def test_a_constant_default_seed_is_no_violation(folder):
    """The bug: equal completions without a seed would fail each frequency test. A few equal ones by chance are no fault."""
    found = report(ConstantSeed, folder, 500)
    assert not violations(found), as_text(found)
    assert "all are alike" in as_text(found)


class CutsFirst(stand_in.StandIn):
    """top-p cuts the distribution at temperature 1, and temperature comes last, as in llama.cpp."""

    def probs(self, row_V, body, prompt, ids):
        if not body["temperature"]:
            return super().probs(row_V, body, prompt, ids)
        probs_V = super().probs(row_V, {**body, "temperature": 1.0}, prompt, ids) ** (1 / body["temperature"])
        return probs_V / probs_V.sum()


def test_the_order_of_cuts_is_the_servers(folder, monkeypatch):
    """The bug: a sound server that cuts before temperature fails, if the other order is assumed."""
    found = report(CutsFirst, folder, 700)
    assert "temperature 1.5 top_p 0.8" in {one.setting for one in found.results if one.at(found.level) is CheckVerdict.VIOLATION}
    read = CompletionClient.read_models

    def as_llamacpp(client):
        read(client)
        client.owner = "llamacpp"

    monkeypatch.setattr(CompletionClient, "read_models", as_llamacpp)
    monkeypatch.setattr(stand_in, "FIELDS", stand_in.FIELDS | {"cache_prompt", "repeat_last_n"})
    found = report(CutsFirst, folder, 400)
    assert not {one.setting for one in found.results if "top_p" in one.setting and one.at(found.level) is CheckVerdict.VIOLATION}


def test_report_is_text_and_json(folder):
    found = report(stand_in.LooseAtZero, folder, 200)
    text, read = as_text(found), json.loads(as_json(found))
    assert "VIOLATION" in text
    assert text.count("finds") > 5
    assert "temperature, then top-k" in text
    assert (read["verdict"], read["report"]["first_seed"]) == ("violation", 3)
    assert max(map(len, text.splitlines())) < 140


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://[", "localhost:9"])
def test_an_absent_server_is_one_sentence(url, capsys):
    assert server.cli.main.main(["audit", "--url", url]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_disconnected_server_is_a_one_line_error(folder):
    class Ending(stand_in.StandIn):
        num_left = 60

        def answer(self, body):
            self.num_left -= 1
            assert self.num_left > 0
            return super().answer(body)

    from server.cli.audit import AuditFailed

    with pytest.raises(AuditFailed, match="cannot be reached"):
        report(Ending, folder, 200)


def test_too_small_a_bound_is_refused(capsys):
    assert server.cli.main.main(["audit", "--url", "http://127.0.0.1:9", "--requests", "10"]) == 2
    assert "at least 200" in capsys.readouterr().err
