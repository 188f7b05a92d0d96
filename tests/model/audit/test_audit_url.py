"""`latebranch audit --url` finds each broken server within its bound of requests, and passes sound ones.

One request is sent at a time and first seeds are fixed, so that every score is the same in every run.
"""

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

import server.cli.main
from engine.audit.report import AuditVerdict
from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.core.types import SamplingParams
from engine.testing import tiny_engine
from engine.weights.pretrained import load_tokenizer
from engine.worker.inprocess import InProcessEngine
from server.audit_url.audit import ServerAudit
from server.audit_url.client import UNREADABLE, CompletionClient
from server.audit_url.dialect import Meaning
from server.audit_url.draws import DrawTests
from server.audit_url.report import CheckVerdict, as_json, as_text
from server.audit_url.sources import Draw
from server.cli.audit_url import report_of
from tests.conformance.served import app_of
from tests.conformance.served import served as app_served
from tests.model.audit import stand_in
from tests.model.audit.stand_in import served
from tests.model.folders import WORDS, model_folder
from tests.model.tiny import own_module, pair

TEXTS = ("w5 w9 w33 w4", "w7 w8 w20 w21 w7 w8", "w11 w12", "w30 w31 w33", "w50 w40 w5 w7", "w41 w41 w42")
LIMITS = SchedulerConfig(max_running=16, num_slots=4096, max_model_len=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), own_module("llama"))


def arguments(url, weights, num_requests, first_seed=3, **more):
    given: dict[str, Any] = {"model": None, "api_key": None, "timeout": 60.0, "concurrency": 1, "alpha": 1e-3, "tie_gap": None}
    given |= {"chat": False, "skip": (), "wait": 0.0}
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


class LikelyTokens:
    """Token 1 has probability .9 after each text."""

    groups, rest = (), None

    def rows(self, draws, sampling):
        return [torch.tensor([[0.05, 0.9, 0.05]] * len(draw.token_ids)).log() for draw in draws]


LIKELY: Any = LikelyTokens()


@pytest.mark.parametrize(("reported", "gap"), [([-0.1054] * 6, 1e-3), ([-0.1054, 0.0, 0.0, 0.0], 1e-3), ([-0.11] * 4, 0.046)])
def test_gap_is_that_of_rounding(reported, gap):
    """The bug: log-probabilities of 0 for drafted tokens widened the gap to .5, which hides loose rules at temperature 0."""
    audit = ServerAudit(CompletionClient("http://x", "m", None, 1.0, 1, is_chat=False), LIKELY, (), 200, 8, 1e-3, 3)
    audit._drawn = [(SamplingParams(), "", [Draw((5,), (1,) * len(reported), tuple(reported))])] * 2
    assert audit._measured_gap() == pytest.approx(gap, rel=0.01)


@pytest.mark.parametrize(("tolerance", "error", "num_wrong"), [(0.01, 0.05, 0), (0.01, 0.15, 1), (1e-3, 0.05, 1), (0.5, 0.9, 0)])
def test_listed_tokens_may_be_rounded(tolerance, error, num_wrong):
    """The bug: F16's rounding of unlikely tokens in the lists was a violation, because the gap was that of drawn tokens."""
    draw = Draw((5,), (1,), (-0.1054,), ((-0.1054, error - 2.9957, -2.9957),))
    results = DrawTests([draw], LIKELY, Meaning(), SamplingParams(), tolerance, 3).results("")
    assert [one.num_wrong for one in results if one.check == "log-probabilities"] == [num_wrong]


@pytest.mark.parametrize(("shift", "num_wrong"), [(0.015, 0), (0.09, 1)])
def test_likely_tokens_may_move_less(shift, num_wrong):
    """The bug: likely tokens had the limit of unlikely ones, so log-probabilities renormalised after a cut passed as rounding."""
    draw = Draw((5,), (1,), (shift - 0.1054,), ((shift - 0.1054, shift - 2.9957, shift - 2.9957),))
    results = DrawTests([draw], LIKELY, Meaning(), SamplingParams(), 0.014, 3).results("")
    assert [one.num_wrong for one in results if one.check == "log-probabilities"] == [num_wrong]


OWN_FAULTS = {
    "WithoutTopP": (300, "impossible tokens"),
    "LooseAtZero": (200, "arg max"),
    "TruncatedLogprobs": (300, "alike after one text"),
    "DraftedLogprobs": (200, "alike after one text"),
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


def test_either_order_of_cuts_is_sound(folder):
    """The bug: a sound server that cuts before temperature failed unless its kind was known."""
    found = report(CutsFirst, folder, 700)
    assert not violations(found), as_text(found)
    assert "than assumed" in as_text(found)


class NamedTokens(stand_in.StandIn):
    """Tokens are named by their texts, in OpenAI's first format."""

    refused = frozenset({"return_tokens_as_token_ids", "return_token_ids"})

    def form(self, choice):
        listed = choice["logprobs"]
        tops = [{name_of(int(key[9:])): value for key, value in top.items()} for top in listed["top_logprobs"]]
        listed |= {"tokens": [name_of(token_id) for token_id in choice.pop("token_ids")], "top_logprobs": tops}
        return choice


def name_of(token_id: int) -> str:
    return WORDS[token_id] if token_id == stand_in.END else f" {WORDS[token_id]}"


class PartsOfCharacters(stand_in.StandIn):
    """Some tokens end within a character. They are counted but not listed, as in llama.cpp; the next token ends the character."""

    def form(self, choice):
        ids, listed = choice.pop("token_ids"), choice.pop("logprobs")
        entries = [
            {
                "id": token_id,
                "token": UNREADABLE if is_part(previous) else name_of(token_id),
                "logprob": own,
                "top_logprobs": [top_entry(int(key[9:]), value) for key, value in top.items()],
            }
            for previous, token_id, own, top in zip([0, *ids], ids, listed["token_logprobs"], listed["top_logprobs"])
            if not is_part(token_id)
        ]
        return {**choice, "logprobs": {"content": entries}}


def top_entry(token_id: int, logprob: float) -> dict[str, Any]:
    return {"id": token_id, "token": UNREADABLE if is_part(token_id) else name_of(token_id), "logprob": logprob}


def is_part(token_id: int) -> bool:
    return token_id % 16 == 6  # none is in a prompt


class ShiftedParts(PartsOfCharacters, stand_in.FirstTokensAlone):
    """Tokens after the first are too flat, and some are not listed."""


class RoundedLogprobs(stand_in.StandIn):
    """Log-probabilities have two digits, and lists at most three entries, whatever is requested."""

    def _choice(self, body, dice, index):
        return super()._choice({**body, "logprobs": min(3, body.get("logprobs", 1))}, dice, index)

    def form(self, choice):
        listed = choice["logprobs"]
        listed["token_logprobs"] = [round(value, 2) for value in listed["token_logprobs"]]
        listed["top_logprobs"] = [{key: round(value, 2) for key, value in top.items()} for top in listed["top_logprobs"]]
        return choice


class QuantisedCache(stand_in.StandIn):
    """Logits are rounded by one of several batches, as with a quantised cache of keys and values."""

    def row(self, ids):
        return super().row(ids) + 0.01 * torch.randn(61, generator=torch.Generator().manual_seed(hash(ids) % 2**40)).double()


class WithoutLists(stand_in.StandIn):
    """No token is listed."""

    refused = frozenset({"return_tokens_as_token_ids", "return_token_ids", "logprobs", "stop"})

    def form(self, choice):
        text = " ".join(WORDS[token_id] for token_id in choice["token_ids"] if token_id != stand_in.END)
        return {"index": 0, "text": text, "finish_reason": choice["finish_reason"]}


@pytest.fixture(scope="module")
def folder_of_parts(tmp_path_factory) -> Path:
    words = [word + UNREADABLE * is_part(token_id) for token_id, word in enumerate(WORDS)]
    return model_folder(tmp_path_factory.mktemp("parts"), own_module("llama"), words)


@pytest.mark.parametrize("made", [NamedTokens, PartsOfCharacters, RoundedLogprobs, QuantisedCache, WithoutLists])
def test_another_form_is_no_violation(made, folder, folder_of_parts):
    """The bug: tokens that are not listed, or named by text, were taken for others, and rounding for a fault."""
    found = report(made, folder_of_parts if made is PartsOfCharacters else folder, 400)
    assert not violations(found), as_text(found)
    assert "not judged" not in as_text(found)


def test_faults_are_found_among_unlisted_tokens(folder_of_parts):
    assert "all tokens" in violations(report(ShiftedParts, folder_of_parts, 500))


@pytest.mark.parametrize("made", [PartsOfCharacters, RoundedLogprobs, QuantisedCache])
def test_another_form_is_no_violation_without_weights(made):
    found = report(made, None, 400)
    assert not violations(found), as_text(found)


def test_a_server_without_lists_needs_weights(capsys):
    """The bug: without weights and log-probabilities 2,000 requests were spent on a report of nothing."""
    with served(WithoutLists(own_module("llama")), lambda text: [5, 9]) as url:
        assert server.cli.main.main(["audit", "--url", url]) == 2
    assert "--weights" in capsys.readouterr().err


def test_report_is_text_and_json(folder):
    found = report(stand_in.LooseAtZero, folder, 200)
    text, read = as_text(found), json.loads(as_json(found))
    assert "VIOLATION" in text
    assert text.count("finds") > 5
    assert "temperature, then top-k" in text
    assert (read["verdict"], read["report"]["first_seed"]) == ("violation", 3)
    assert max(map(len, text.splitlines())) < 140


@pytest.mark.parametrize(
    ("url", "status", "words"),
    [
        ("http://127.0.0.1:9", 1, "cannot be reached"),
        *((url, 2, "is no address") for url in ("http://[", "localhost:9", "x", "ftp://x")),
    ],
)
def test_an_absent_server_is_one_sentence(url, status, words, capsys):
    assert server.cli.main.main(["audit", "--url", url]) == status
    found = capsys.readouterr().err
    assert words in found
    assert found.count("\n") == 1


class Restarted(stand_in.StandIn):
    """min-p ends the server for three requests."""

    num_left = 0

    def answer(self, body):
        self.num_left = 3 if body.get("min_p") and not self.num_left else max(0, self.num_left - 1)
        assert not self.num_left
        return super().answer(body)


class Ended(Restarted):
    """min-p ends the server for good."""

    def answer(self, body):
        self.num_left *= 100
        return super().answer(body)


def checks(found, setting: str) -> dict[str, CheckVerdict]:
    return {one.check: one.at(found.level) for one in found.results if one.setting == setting}


@pytest.fixture
def without_pauses(monkeypatch):
    monkeypatch.setattr("server.audit_url.audit.time.sleep", lambda seconds: None)


def test_a_server_that_ends_is_a_violation(folder, without_pauses):
    """The bug: a server that died in one test left no verdict on the others."""
    found = report(Restarted, folder, 300, wait=60.0)
    assert checks(found, "temperature 1 min_p 0.1") == {"answers": CheckVerdict.VIOLATION}
    assert violations(found) == {"answers"}
    assert checks(found, "temperature 0, in load") == {"arg max": CheckVerdict.OK}
    assert "cannot be reached" in as_text(found)


def test_tests_after_an_end_are_unjudged(folder, without_pauses):
    found = report(Ended, folder, 300, wait=4.0)
    assert found.verdict is AuditVerdict.VIOLATION
    assert CheckVerdict.OK in checks(found, "temperature 1 top_k 4").values()
    assert checks(found, "temperature 0, in load") == {"arg max": CheckVerdict.NOT_JUDGED}
    assert "no longer answers" in as_text(found)


@pytest.mark.parametrize("part", ["min_p", "min_p 0.1"])
def test_skipped_tests_send_no_request(part, folder):
    found = report(Restarted, folder, 300, skip=["streams", part])
    assert not violations(found), as_text(found)
    assert checks(found, "streams") == {"stream = whole": CheckVerdict.NOT_JUDGED}
    assert checks(found, "temperature 1 min_p 0.1") == {"draws": CheckVerdict.NOT_JUDGED}
    assert CheckVerdict.OK in checks(found, "temperature 1 top_k 4").values()


def test_unknown_test_to_skip_is_refused(capsys):
    assert server.cli.main.main(["audit", "--url", "http://127.0.0.1:9", "--skip", "min-p"]) == 2
    assert "the names are: temperature 1, long;" in capsys.readouterr().err


class Hurried(stand_in.StandIn):
    """Every fifth request is one too many."""

    num = 0

    def answer(self, body):
        self.num += 1
        return stand_in.Busy("7") if self.num % 5 == 0 else super().answer(body)


def test_a_busy_server_is_requested_again(folder, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr("server.audit_url.client.time.sleep", pauses.append)
    found = report(Hurried, folder, 200)
    assert not violations(found), as_text(found)
    assert set(pauses) == {7.0}


class Closing(stand_in.StandIn):
    """Every fifth request finds its connection closed."""

    num = 0

    def answer(self, body):
        self.num += 1
        assert self.num % 5
        return super().answer(body)


def test_closed_connections_are_opened_again(folder):
    """The bug: a server that closed an idle connection ended the audit."""
    found = report(Closing, folder, 200)
    assert not violations(found), as_text(found)


def test_an_untrusted_certificate_is_explained(capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise httpx2.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate")

    monkeypatch.setattr("server.audit_url.client.httpx2.Client.request", refuse)
    assert server.cli.main.main(["audit", "--url", "https://127.0.0.1:9"]) == 1
    assert "SSL_CERT_FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"), [("--api-key", "k\n"), ("--api-key", "k\u00e9"), ("--json", "/nowhere/report.json")]
)
def test_unsuitable_options_are_one_sentence(option, value, capsys):
    """The bug: a key with a line break was reported as an absent server, and a file was opened after all requests."""
    assert server.cli.main.main(["audit", "--url", "http://127.0.0.1:9", option, value]) == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(("refused", "status"), [(401, 2), (404, 2), (429, 1), (503, 1), (301, 1)])
def test_a_refusing_server_is_one_sentence(refused, status, capsys, monkeypatch):
    monkeypatch.setattr("server.audit_url.client.time.sleep", lambda seconds: None)
    monkeypatch.setattr("server.audit_url.client.httpx2.Client.request", lambda *args, **kwargs: httpx2.Response(refused))
    assert server.cli.main.main(["audit", "--url", "http://127.0.0.1:9", "--model", "m"]) == status
    assert capsys.readouterr().err.count("latebranch audit: ") == 1


def test_an_interrupted_audit_is_one_sentence(capsys, monkeypatch):
    """The bug: Ctrl-C printed the traces of all threads."""

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("server.audit_url.audit.ServerAudit._draws", interrupt)
    with served(stand_in.StandIn(own_module("llama")), lambda text: [5, 9]) as url:
        assert server.cli.main.main(["audit", "--url", url]) == 1
    assert "interrupted" in capsys.readouterr().err


def test_chats_are_audited(folder):
    """Answers of /v1/chat/completions are judged by the model's own template."""

    class Chats(stand_in.StandIn):
        refused = frozenset({"return_tokens_as_token_ids", "return_token_ids", "stream", "stop"})

        def answer(self, body):
            prompt = words(body.pop("messages")[0]["content"])
            num_top = body.pop("top_logprobs", 1)
            return super().answer({**body, "prompt": prompt, **({"logprobs": num_top} if body.get("logprobs") else {})})

        def form(self, choice):
            ids, listed = choice["token_ids"], choice["logprobs"]
            rows = zip(ids, listed["token_logprobs"], listed["top_logprobs"])
            content = [
                {
                    "token": name_of(token_id),
                    "logprob": own,
                    "top_logprobs": [{"token": name_of(int(key[9:])), "logprob": value} for key, value in top.items()],
                }
                for token_id, own, top in rows
            ]
            message = {"role": "assistant", "content": choice["text"]}
            return {"index": 0, "message": message, "logprobs": {"content": content}, "finish_reason": choice["finish_reason"]}

    found = report(Chats, folder, 300, chat=True)
    assert not violations(found), as_text(found)


def test_too_small_a_bound_is_refused(capsys):
    assert server.cli.main.main(["audit", "--url", "http://127.0.0.1:9", "--requests", "10"]) == 2
    assert "at least 200" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions", "/v1/models"])
def test_the_address_of_any_route_is_enough(ending):
    """The bug: an address that ended with a route was reported as a server without models."""
    assert CompletionClient(f"https://host/proxy{ending}", None, None, 1.0, 1, is_chat=False).url == "https://host/proxy"
