"""The end of a rank ends rank 0 by the same cause, whichever of its threads sees it first."""

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.build import build_engine
from engine.core.config import EngineConfig
from engine.model.causal_lm import CausalModel
from engine.model.ranks import Ranks, _Part
from engine.testing import tiny_module
from engine.weights import UnsupportedModel
from tests.model.driving import greedy, run
from tests.model.folders import model_folder

LIMIT_S = 240.0  # much less than the limits of gloo
LATE_S = 0.5

End = Callable[[Ranks], None]


class Call:
    """A message whose receiver calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def killed(number: signal.Signals, ranks: Ranks) -> None:
    os.kill(ranks.pids[0], number)


def ended(ranks: Ranks) -> None:
    ranks._post(ranks._processes[:1], Call(os._exit, 0))  # type: ignore[arg-type]


def failed(ranks: Ranks) -> None:
    ranks._post(ranks._processes[:1], "no message")  # type: ignore[arg-type]


def lead(folder: Path, num_ranks: int, end: End, is_busy: bool = True) -> None:
    """Be rank 0, which sees late that another rank was killed: passes of the surviving ranks have failed by then."""
    wait = subprocess.Popen.wait

    def late(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        status = wait(process, timeout)
        if status < 0:
            time.sleep(LATE_S)
        return status

    subprocess.Popen.wait = late  # type: ignore[method-assign, assignment]
    engine = build_engine(EngineConfig(str(folder), device="cpu", num_threads=1, tensor_parallel=num_ranks, drafter="none"))
    assert engine.target.model.ranks is not None
    end(engine.target.model.ranks)
    while is_busy:
        run(engine, [greedy("r", (3, 4, 5))])
    time.sleep(2 * LIMIT_S)


def lead_refusing(folder: Path) -> None:
    """Be rank 0, whose checks of the model fail because another rank was killed."""
    load = Ranks.load

    def refusing(ranks: Ranks, own: _Part) -> CausalModel:
        def refuse(_: _Part) -> CausalModel:
            killed(signal.SIGTERM, ranks)
            time.sleep(LATE_S)
            raise UnsupportedModel("Connection closed by peer")

        _Part.load = refuse  # type: ignore[method-assign, assignment]
        return load(ranks, own)

    Ranks.load = refusing  # type: ignore[method-assign, assignment]
    lead(folder, 2, ended)


def exit_code(target: Callable[..., None], *arguments: Any) -> int | None:
    """Return how rank 0 ended; None if it did not."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join(LIMIT_S)
    code = process.exitcode
    process.kill()
    process.join()
    return code


def test_killed_rank_kills_all(tmp_path: Path) -> None:
    """The bug: a pass of rank 0 or 2, which failed of the death, was taken for its cause if it was seen first."""
    folder = model_folder(tmp_path, tiny_module(hidden_size=48, num_attention_heads=6, num_key_value_heads=3))
    assert exit_code(lead, folder, 3, partial(killed, signal.SIGTERM)) == -signal.SIGTERM


def test_rank_killed_while_loading_kills_all(tmp_path: Path) -> None:
    """The bug: the model was refused, and never loaded again."""
    assert exit_code(lead_refusing, model_folder(tmp_path)) == -signal.SIGTERM


@pytest.mark.parametrize(("end", "is_busy"), [(ended, False), (failed, True)])
def test_rank_ending_alone_ends_all(end: End, is_busy: bool, tmp_path: Path) -> None:
    """The bug: a rank that ended with status 0 was not missed until the hang limit."""
    assert exit_code(lead, model_folder(tmp_path), 2, end, is_busy) == 1
