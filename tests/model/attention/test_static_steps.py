"""Which engines replay passes, how much memory that takes, and the messages where they cannot."""

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine import memory_plan as memory
from engine.attention.paged.graph_recorder import CudaGraphs, GraphRefused, Unrecorded
from engine.attention.paged.reference import attend
from engine.build import BadConfiguration, build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.draft.checkpoints.one_pass import DFlashDrafter, MedusaDrafter
from engine.draft.models.head_drafter import HeadDrafter
from engine.graph_setup import record, static_steps, table_capacity
from engine.memory_plan import memory_need
from engine.model.causal_lm import adopt
from engine.testing import tiny_engine, tiny_module
from tests.model.draft.test_checkpoint_drafters import checkpoint_engine
from tests.model.driving import run
from tests.model.folders import model_folder
from tests.model.heads import random_head
from tests.model.mixed import mixed_requests
from tests.model.passes import CPU

LIMITS = SchedulerConfig(max_running=8, max_step_tokens=24, num_slots=90, max_model_len=64)
CONFIG = EngineConfig("tiny", scheduler=LIMITS, cuda_graphs="off")


def model_over_tables():
    model = adopt(tiny_module(), CPU)
    model.attend = attend
    return model


def test_a_processor_replays_nothing():
    model = adopt(tiny_module(), CPU)
    assert static_steps(replace(CONFIG, cuda_graphs="auto"), model) is None
    with pytest.raises(GraphRefused, match="on cpu attention gathers keys"):
        static_steps(replace(CONFIG, cuda_graphs="on"), model)


def test_unsupported_demand_is_refused_at_start(tmp_path):
    folder = str(model_folder(tmp_path))
    with pytest.raises(BadConfiguration, match="cuda_graphs: on: on cpu attention gathers keys"):
        build_engine(replace(CONFIG, model=folder, device="cpu", cuda_graphs="on"))


def test_canary_observes_passes_without_replay():
    assert static_steps(replace(CONFIG, kv_canary=True), model_over_tables()) is None
    with pytest.raises(GraphRefused, match="kv_canary"):
        static_steps(replace(CONFIG, kv_canary=True, cuda_graphs="on"), model_over_tables())


def test_without_graphs_passes_are_padded_alike():
    """So that a text is the same with graphs and without."""
    engine = tiny_engine(model_over_tables(), model_over_tables(), config=LIMITS)
    steps = static_steps(CONFIG, engine.target.model)
    assert steps is not None
    assert isinstance(steps.recorder, Unrecorded)
    assert engine.target.method == "torch's"
    prepared = record(steps, LIMITS, engine.target, engine.drafter)
    assert len(prepared) == 2
    assert engine.target.method == "torch's, padded, no graphs"  # stored times are of one method
    for passes in prepared:
        passes.prepare()
    plain = tiny_engine(adopt(tiny_module(), CPU), adopt(tiny_module(), CPU), config=LIMITS)
    assert run(engine, mixed_requests(max_tokens=16)).texts() == run(plain, mixed_requests(max_tokens=16)).texts()


def test_drafter_without_tables_drafts_as_before():
    engine = tiny_engine(model_over_tables(), adopt(tiny_module(), CPU), config=LIMITS)
    steps = static_steps(CONFIG, engine.target.model)
    assert steps is not None
    assert len(record(steps, LIMITS, engine.target, engine.drafter)) == 1


def test_memory_of_replays_is_counted(tmp_path, monkeypatch):
    folder = str(model_folder(tmp_path))
    config = replace(CONFIG, model=folder, drafter="model", draft_model=folder)
    assert memory_need(config, "float32", CPU).replays == 0
    monkeypatch.setattr(memory, "why_not_replayed", lambda *_: None)
    engine = tiny_engine(model_over_tables(), model_over_tables(), config=LIMITS)
    steps = static_steps(CONFIG, engine.target.model)
    assert steps is not None
    prepared = record(steps, LIMITS, engine.target, engine.drafter)
    rows = sum(vars(getattr(passes, "recordings", passes))["_rows_NM"].nbytes for passes in prepared)
    need = memory_need(config, "float32", CPU)
    assert need.replays == steps.buffer.table.nbytes + rows
    assert need.total == replace(need, replays=0).total + need.replays
    assert "replayed passes" in str(replace(need, replays=10**9))


def test_the_largest_table_has_room():
    """Of all sequences at full length, and of one chunk whose tokens see each other."""
    assert table_capacity(LIMITS) == 8 * 64 + 24 * 24


class Failing(CudaGraphs):
    def __init__(self, is_required: bool) -> None:
        self._is_required, self._is_off = is_required, False

    def _captured(self, run):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")


def test_failed_capture_is_logged_once(caplog):
    graphs, run = Failing(is_required=False), partial(torch.zeros, 1)
    with caplog.at_level(logging.WARNING):
        assert graphs.record(run) is run
        assert graphs.record(run) is run
    assert caplog.messages == ["CUDA graphs are off: operation not permitted when stream is capturing"]


def test_capture_error_is_logged_not_cleanup_error(caplog, monkeypatch):
    def run():
        try:
            raise RuntimeError("it looked at a number")
        finally:
            raise RuntimeError("a capture cannot be ended")

    graphs = Failing(is_required=False)
    monkeypatch.setattr(graphs, "_captured", lambda run: run())
    with caplog.at_level(logging.WARNING):
        graphs.record(run)
    assert caplog.messages == ["CUDA graphs are off: it looked at a number"]


@pytest.mark.parametrize("name", ["medusa", "dflash"])
def test_growth_over_levels_is_recorded(name, tmp_path):
    """By the recorder of the target's passes: graphs share their memory."""
    engine = checkpoint_engine(tmp_path, name, config=LIMITS)
    engine.target.model.attend = attend
    steps = static_steps(CONFIG, engine.target.model)
    assert steps is not None
    record(steps, LIMITS, engine.target, engine.drafter)
    assert isinstance(engine.drafter, DFlashDrafter | MedusaDrafter)
    assert engine.drafter.recorder is steps.recorder


def test_observers_register_before_recording():
    engine = tiny_engine(model_over_tables(), model_over_tables(), config=LIMITS)
    steps = static_steps(CONFIG, engine.target.model)
    assert steps is not None
    record(steps, LIMITS, engine.target, engine.drafter)
    with pytest.raises(RuntimeError, match="add observers before recording"):
        engine.target.report_to(HeadDrafter("head", random_head(), engine.target.model, LIMITS.num_slots))


def test_required_capture_failure_is_an_error():
    with pytest.raises(GraphRefused, match="a pass cannot be captured: operation not permitted"):
        Failing(is_required=True).record(partial(torch.zeros, 1))
