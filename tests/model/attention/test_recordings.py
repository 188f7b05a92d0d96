"""Passes padded to shapes and replayed over one buffer: the texts they write are those of passes that run as they come.

On a processor a replay runs the function itself, over the same buffers and with the same padding as a graph.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from engine.attention.packing import pack
from engine.attention.paged import graphs as recordings
from engine.attention.paged import table
from engine.attention.paged.buffer import TableBuffer
from engine.attention.paged.graph_recorder import Unrecorded
from engine.attention.paged.graphs import GraphedFunction, GraphResources
from engine.attention.paged.padding_shapes import PaddingShapes
from engine.attention.paged.reference import attend
from engine.attention.paged.table import Shape, TableColumns
from engine.attention.segments import chain_segment
from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.step_plan import Feeding
from engine.core.tree import Expansion
from engine.draft.models.draft_model import ModelDrafter
from engine.draft.models.early_exit import early_exit_drafter
from engine.draft.models.head_drafter import HeadDrafter
from engine.draft.models.vocab_padding import RepaddedModel
from engine.engine import Engine
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import adopt
from engine.model.passes import RecordedPasses
from engine.testing import FAMILIES, tiny_engine, tiny_module
from tests.model.draft.test_drafters import random_lens
from tests.model.driving import greedy, run
from tests.model.heads import drafter_of, head_engine, learnt_head
from tests.model.mixed import mixed_requests
from tests.model.paged import causal
from tests.model.passes import CPU

CONFIG = SchedulerConfig(max_running=8, max_step_tokens=24, num_slots=90, max_model_len=64)
FREE = FixedExpansion(Expansion(2, 2, 2))


def steps_of(most_tokens: int = CONFIG.max_step_tokens, capacity: int = 4096) -> GraphResources:
    return GraphResources(TableBuffer(capacity, CPU), PaddingShapes(most_tokens), Unrecorded())


def replayed(engine: Engine, steps: GraphResources | None = None) -> Engine:
    """Let an engine's passes be padded and replayed, all shapes having run over padding alone."""
    steps, drafter = steps or steps_of(), engine.drafter
    engine.target.model.attend = attend
    prepared: list[RecordedPasses | GraphedFunction] = [engine.target.record(steps)]
    if isinstance(drafter, ModelDrafter):
        model = drafter._model
        (model._model if isinstance(model, RepaddedModel) else model).attend = attend
        prepared.append(drafter.record(steps))
    if isinstance(drafter, HeadDrafter):
        prepared.append(drafter.record(steps, attend, CONFIG.max_model_len))
    for one in prepared:
        one.prepare()
    return engine


def with_model(family: str) -> Engine:
    target, draft = (adopt(tiny_module(family, seed), CPU) for seed in (0, 0))
    return tiny_engine(target, draft, FREE, config=CONFIG)


def with_wider_model(family: str) -> Engine:
    """A drafter of fewer rows than the target."""
    target, draft = adopt(tiny_module(family), CPU), adopt(tiny_module(family, vocab_size=57), CPU)
    repadded = RepaddedModel(draft, target.vocab_size)
    drafter = ModelDrafter("repadded", repadded, KVCache(CONFIG.num_slots, CPU), Feeding.OWN_CACHE)
    return tiny_engine(target, drafter, FREE, config=CONFIG)


def with_head(family: str) -> Engine:
    return head_engine(learnt_head(family), adopt(tiny_module(family), CPU), FREE, CONFIG)


def early_exit(family: str) -> Engine:
    target = adopt(tiny_module(family), CPU)
    engine = tiny_engine(target, None, FREE, config=CONFIG)
    drafter = early_exit_drafter(target, engine.target.cache, random_lens())
    return Engine(engine.info, CONFIG, engine.target, drafter, FREE)


ENGINES: dict[str, Callable[[str], Engine]] = {"model": with_model, "repadded": with_wider_model, "head": with_head}


def texts(engine: Engine) -> dict[str, list[int]]:
    return run(engine, mixed_requests(max_tokens=16)).texts()


@pytest.mark.usefixtures("poisoned_pools")
@pytest.mark.parametrize("drafter", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_padded_passes_give_equal_completions(family, drafter):
    make = ENGINES[drafter]
    assert texts(replayed(make(family))) == texts(make(family))


def test_first_target_layers_draft_over_its_cache():
    assert texts(replayed(early_exit("llama"))) == texts(early_exit("llama"))


def test_features_equal_those_of_unrecorded_passes():
    """A listener's work is recorded too: a head reads the same features."""
    as_they_come, replays = features_by_step(with_head("llama")), features_by_step(replayed(with_head("llama")))
    assert len(as_they_come) > 10
    assert torch.allclose(torch.stack(as_they_come), torch.stack(replays), atol=1e-4)


def test_padding_states_in_a_slot_are_detected(monkeypatch):
    table_of = table.table_of

    def in_the_last_slot(batch, shape, columns, *rest):
        outputs = (0, CONFIG.num_slots - 1) if len(columns.outputs) > 1 else columns.outputs
        return table_of(batch, shape, TableColumns(columns.tokens, outputs), *rest)

    monkeypatch.setattr(recordings, "table_of", in_the_last_slot)
    with pytest.raises(AssertionError):
        test_features_equal_those_of_unrecorded_passes()


@torch.inference_mode()
def features_by_step(engine: Engine) -> list[torch.Tensor]:
    """Return the contents of each slot after each step. Drafts are accepted, and all slots start empty."""
    pool = drafter_of(engine)._pool
    pool._pool_SW.zero_()
    features: list[torch.Tensor] = []
    session = run(engine, mixed_requests(max_tokens=16), lambda _: features.append(pool.read(torch.arange(CONFIG.num_slots))))
    assert sum(one.num_accepted_tokens for one in session.stats) > 0
    return features


def test_smaller_drafter_reads_target_only_ids():
    requests = [greedy("one", [60, 5, 59, 58, 60])]
    made = [with_wider_model("llama"), replayed(with_wider_model("llama"))]
    texts_of = [run(engine, requests).texts() for engine in made]
    assert texts_of[0] == texts_of[1]


def padding_writes_to_the_first_slot(columns):
    return TableColumns((*columns.tokens[:2], 0, *columns.tokens[3:]), columns.outputs)


def states_of_padding_where_the_first_position_reads(columns):
    return TableColumns(columns.tokens, (0, columns.tokens[-1])) if len(columns.outputs) > 1 else columns


@pytest.mark.parametrize(
    ("mutant", "drafter"),
    [(padding_writes_to_the_first_slot, "model"), (states_of_padding_where_the_first_position_reads, "head")],
)
def test_padding_in_a_used_slot_is_detected(monkeypatch, mutant, drafter):
    table_of = table.table_of
    expected = mean_accepted(ENGINES[drafter]("llama"))
    monkeypatch.setattr(
        recordings, "table_of", lambda batch, shape, columns, *rest: table_of(batch, shape, mutant(columns), *rest)
    )
    assert mean_accepted(replayed(ENGINES[drafter]("llama"))) != expected


def mean_accepted(engine: Engine) -> tuple[dict[str, list[int]], int]:
    """Return texts and how many drafted tokens were accepted: a drafter's mistakes show in the latter alone."""
    session = run(engine, mixed_requests(max_tokens=32))
    return session.texts(), sum(one.num_accepted_tokens for one in session.stats)


def test_a_causal_mask_is_noticed(monkeypatch):
    table_of = table.table_of

    def causally(batch, *rest):
        return table_of(structs.replace(batch, segments=tuple(map(causal, batch.segments))), *rest)

    monkeypatch.setattr(recordings, "table_of", causally)
    assert texts(replayed(with_model("llama"))) != texts(with_model("llama"))


@pytest.mark.parametrize("steps", [lambda: steps_of(most_tokens=4), lambda: steps_of(capacity=300)], ids=["tokens", "capacity"])
def test_oversized_pass_runs_without_recording(steps):
    assert texts(replayed(with_model("llama"), steps())) == texts(with_model("llama"))
    assert texts(replayed(with_head("llama"), steps())) == texts(with_head("llama"))


class Remembering:
    """Keeps the input of the output head."""

    def __init__(self) -> None:
        self.latest: torch.Tensor | None = None

    def kept(self) -> torch.Tensor | None:
        return self.latest

    def keep(self, kept: torch.Tensor | None) -> None:
        self.latest = kept


class Replaying:
    """Behaves like a graph: a replay writes its results into the recorded tensors without calling hooks."""

    name = "as a graph"

    def __init__(self, memory: "Remembering") -> None:
        self.num_recorded = 0
        self._memory = memory

    def record(self, once):
        self.num_recorded += 1
        result = once()

        def replay():
            before = self._memory.latest
            for kept, new in zip(result, once(), strict=True):
                kept.copy_(new)
            self._memory.latest = before
            return result

        return replay


@torch.inference_mode()
def test_hook_gets_its_own_tensor_after_replay():
    """Two shapes in turn: a replay of the first must give back the first one's tensor, with the latest numbers."""
    target, memory = adopt(tiny_module("llama"), CPU), Remembering()
    recorder = Replaying(memory)
    target.attend = attend
    engine = tiny_engine(target, None, FREE, config=CONFIG)
    passes = engine.target.record(GraphResources(TableBuffer(4096, CPU), PaddingShapes(8), recorder))
    target.module.get_output_embeddings().register_forward_pre_hook(lambda _, args: memory.keep(args[0].flatten(0, -2)))
    passes.prepare()
    num_shapes = recorder.num_recorded
    target.memories.append(memory)
    for ids in ([5, 6], [5, 6, 7, 8, 9], [9, 6]):
        rows = [*range(len(ids))]
        logits = passes.run(pack_chain(ids), rows)
        assert memory.latest is not None
        assert torch.equal(target.module.get_output_embeddings()(memory.latest[: len(ids)]).float(), logits)
    assert recorder.num_recorded == num_shapes + 2  # the two that came since


def pack_chain(ids):
    return pack([chain_segment(ids, 0, range(len(ids)))], CPU)


def test_logits_are_the_callers_own():
    """The next pass of the same shape does not write into them."""
    engine = tiny_engine(adopt(tiny_module("llama"), CPU), None, FREE, config=CONFIG)
    engine.target.model.attend = attend
    passes = engine.target.record(steps_of())
    first = passes.run(pack_chain([5, 6]), [0, 1])
    before = first.clone()
    passes.run(pack_chain([9, 7]), [0, 1])
    assert torch.equal(first, before)


@given(st.integers(1, 700), st.data())
def test_shape_fits_pass_with_little_padding(most, data):
    shapes = PaddingShapes(most)
    num_tokens = data.draw(st.integers(1, most))
    num_outputs = data.draw(st.integers(0, num_tokens))
    shape = shapes.shape_of(num_tokens, num_outputs)
    assert shape is not None
    assert shape in shapes.all
    assert num_tokens <= shape.num_tokens <= min(most, max(2 * num_tokens, 1))
    assert num_outputs <= shape.num_outputs <= shape.num_tokens
    assert shapes.all[0].num_tokens == most
    assert shapes.shape_of(most + 1, 1) is None


def test_shapes_are_few_and_largest_first():
    shapes = PaddingShapes(512).all
    assert shapes[0] == Shape(512, 512)
    assert [shape.num_tokens for shape in shapes if shape.num_outputs == shape.num_tokens] == [
        *(512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1)
    ]
    assert len(shapes) == 29
