"""A server over a tiny real engine, in this process: real models, real trees, no network but the loopback."""

import contextlib
import threading
from collections.abc import Iterator
from functools import cache

import uvicorn
from fastapi import FastAPI
from transformers import PreTrainedModel

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.service import EngineService
from engine.core.tree import Expansion
from engine.model.causal_lm import CausalModel
from engine.structured_output.grammars import CompiledGrammars, source_of
from engine.testing import tiny_engine, tiny_module, tiny_pair
from engine.worker.inprocess import InProcessEngine
from server.app import create_app
from server.settings import Settings
from server.text.codec import Tokenizer
from tests.tokenizers_for_tests import byte_level

MODEL = "tiny"
VOCAB_SIZE = 400  # the tokenizer's, or a little more
PATIENCE_S = 60.0  # of a client on a busy machine
LIMITS = SchedulerConfig(num_slots=4096, max_model_len=1536)


@cache
def _pair() -> tuple[CausalModel, CausalModel]:
    return tiny_pair(noise=0.05, vocab_size=VOCAB_SIZE)


@cache
def target_module() -> PreTrainedModel:
    """Return the target as transformers runs it."""
    return tiny_module(vocab_size=VOCAB_SIZE)


def real_engine(limits: SchedulerConfig = LIMITS) -> InProcessEngine:
    """Return an engine, not started, whose model drafts for its target by trees of two paths."""
    grammars = CompiledGrammars(source_of(byte_level(), VOCAB_SIZE, _pair()[0].eos_token_ids).load)
    policy = FixedExpansion(Expansion(1, 2, 2))
    return InProcessEngine(lambda: tiny_engine(*_pair(), policy, config=limits, grammars=grammars), limits)


def app_of(engine: EngineService, tokenizer: Tokenizer | None = None, **settings: object) -> FastAPI:
    """Return an app over an engine."""
    return create_app(Settings.model_validate({"model": MODEL, **settings}), engine, tokenizer or byte_level())


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Yield the address of a server that runs in a thread, ready."""
    server = _QuietServer(uvicorn.Config(app, port=0, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        while not (server.started and app.state.runtime.is_ready):
            assert thread.is_alive(), "the server ended before it was ready"
            threading.Event().wait(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
