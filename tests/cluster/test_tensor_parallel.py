"""A target in several processes: real weights, other families, and servers whose ranks are killed."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from engine.audit.reference import load_reference
from engine.core.config import EngineConfig
from engine.engine import Engine
from engine.testing import tiny_module
from engine.weights import resolve
from engine.weights.pretrained import load_tokenizer
from server.adaptive_engine import served_engine
from server.settings import load_settings
from tests.conformance.folder import served_folder
from tests.e2e.prompts import PROMPTS
from tests.e2e.server import RunningServer, running_server, sse
from tests.model.driving import greedy, run
from tests.model.folders import model_folder

pytestmark = pytest.mark.skipif("CLUSTER_VENV" not in os.environ, reason="make cluster-test runs it")

MODEL = "smollm2-135m"
NUM_TOKENS = 24
TIE = 1e-3  # of logits
WHOLE = ("--device", "cpu", "--drafter", "ngram", "--policy", "fixed")
FLAGS = (*WHOLE, "--tensor-parallel", "2")
END_S, RESTART_S = 20.0, 200.0


@contextmanager
def sharded_engine(config: EngineConfig) -> Iterator[Engine]:
    engine = served_engine(config)
    assert isinstance(engine, Engine)
    try:
        yield engine
    finally:
        assert engine.target.model.ranks is not None
        engine.target.model.ranks.close()


@pytest.mark.weights
def test_real_weights_give_one_processs_texts() -> None:
    """SmolLM2's three key-value heads on three ranks, with the settings of `serve`."""
    folder = resolve(MODEL).folder
    tokenizer = load_tokenizer(folder)
    prompts = [
        tuple(tokenizer.encode(f"{prefix}{prompt}")) for prefix in ("", "Here is an example. ", "1. ") for prompt in PROMPTS
    ]
    config = load_settings(None, {"device": "cpu", "tensor_parallel": 3})
    with sharded_engine(config.to_engine_config()) as engine:
        requests = [greedy(str(number), prompt, NUM_TOKENS) for number, prompt in enumerate(prompts)]
        session = run(engine, requests)
    assert sum(stats.num_accepted_tokens for stats in session.stats) > len(prompts)
    reference = load_reference(folder, "float32", "cpu")
    ties = []
    for number, prompt in enumerate(prompts):
        text = session.outcomes[str(number)].ids
        (logits_NV,) = reference.logits([(*prompt, *text)], len(text) + 1)
        ties += [
            float(row_V.max() - row_V[token]) for row_V, token in zip(logits_NV, text, strict=False) if row_V.argmax() != token
        ]
    print(f"{len(ties)} tokens of {len(prompts)} texts differ at near ties: {ties}")  # noqa: T201
    assert max(ties, default=0.0) < TIE


def generated(module: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    out = module.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


TIED = [("mistral", False), ("qwen2", False), ("qwen3", True), ("gemma3", False), ("llama", True)]


@pytest.mark.parametrize(("family", "is_tied"), TIED)
def test_families_give_their_own_texts(family: str, is_tied: bool, tmp_path: Path) -> None:
    """The draft model is the whole target, on rank 0."""
    module = tiny_module(family, tie_word_embeddings=True) if is_tied else tiny_module(family)
    folder = str(model_folder(tmp_path, module))
    config = EngineConfig(folder, device="cpu", tensor_parallel=2, drafter="model", draft_model=folder)
    prompts = [tuple(3 + (11 * i + number) % 7 for i in range(9 + number)) for number in range(4)]
    with sharded_engine(config) as engine:
        texts = run(engine, [greedy(str(number), prompt) for number, prompt in enumerate(prompts)]).texts()
    assert list(texts.values()) == [generated(module, prompt) for prompt in prompts]


def processes_of(server: RunningServer) -> dict[str, list[int]]:
    """Return the ids of a server's descendants by name."""
    waiting, found = [server.process.pid], dict[str, list[int]]()
    while waiting:
        pid = waiting.pop()
        for thread in Path(f"/proc/{pid}/task").iterdir():
            waiting += map(int, (thread / "children").read_text().split())
        found.setdefault(Path(f"/proc/{pid}/comm").read_text().strip(), []).append(pid)
    return found


def is_running(pid: int) -> bool:
    """Return whether a process runs: it exists, and not only until its parent reads its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pids: Sequence[int]) -> None:
    end = time.monotonic() + END_S
    while any(map(is_running, pids)):
        assert time.monotonic() < end, [pid for pid in pids if is_running(pid)]
        time.sleep(0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(served_folder(tmp_path_factory.mktemp("served")))


def lines(server: RunningServer, model: str, num_tokens: int) -> Iterator[str]:
    """Yield the parts of a seeded text as they are streamed."""
    body = {"model": model, "prompt": "The sea", "max_tokens": num_tokens, "seed": 11, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as answer:
        for event in sse(answer.iter_lines()):
            if event is not None and event["choices"]:
                yield event["choices"][0]["text"]


@pytest.mark.parametrize(
    ("name", "number"),
    [("latebranch-rank", signal.SIGKILL), ("latebranch-rank", signal.SIGSTOP), ("latebranch-work", signal.SIGKILL)],
)
def test_streams_resume_after_a_killed_rank(name: str, number: signal.Signals, folder: str, tmp_path: Path) -> None:
    """`latebranch-work` is rank 0. All start again, also after a rank hangs; the text is that of one process."""
    with running_server(tmp_path / "whole.log", "--model", folder, *WHOLE) as whole:
        expected = "".join(lines(whole, folder, 200))
    with running_server(tmp_path / "log", "--model", folder, "--hang-limit-s", "10", *FLAGS) as server:
        texts = lines(server, folder, 200)
        first = next(texts)
        before = processes_of(server)
        assert len(before["latebranch-rank"]) == len(before["latebranch-work"]) == 1
        os.kill(before[name][0], number)
        assert "".join([first, *texts]) == expected
        assert server.metric("latebranch_engine_restarts_total") == 1
        assert server.metric("latebranch_resumed_requests_total") == 1
        wait_for_end(before["latebranch-rank"] + before["latebranch-work"])
        after = processes_of(server)
        assert len(after["latebranch-rank"]) == 1
    wait_for_end([pid for pids in after.values() for pid in pids])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_idle_server_replaces_a_dead_rank(number: signal.Signals, folder: str, tmp_path: Path) -> None:
    with running_server(tmp_path / "log", "--model", folder, *FLAGS) as server:
        before = processes_of(server)
        os.kill(before["latebranch-rank"][0], number)
        wait_for_end(before["latebranch-rank"] + before["latebranch-work"])
        end = time.monotonic() + RESTART_S
        while server.metric("latebranch_engine_restarts_total") != 1 or server.get("/ready").status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.2)
        assert len("".join(lines(server, folder, 8))) > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_server_leaves_no_rank(number: signal.Signals, folder: str, tmp_path: Path, monkeypatch) -> None:
    """Sockets end with their processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running_server(tmp_path / "log", "--model", folder, *FLAGS) as server:
        pids = [pid for pids in processes_of(server).values() for pid in pids]
        server.process.send_signal(number)
        server.process.wait(60)
        wait_for_end(pids)
    if number == signal.SIGTERM:
        assert list(tmp_path.glob("latebranch-run-*")) == []
