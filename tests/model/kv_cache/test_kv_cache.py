"""The caches return what was written. After any steps they equal a pass over the committed tokens."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention import packing
from engine.attention.packing import pack
from engine.attention.segments import chain_segment
from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionChoice
from engine.core.tree import Expansion
from engine.core.types import FinishReason
from engine.draft.models.draft_model import ModelDrafter
from engine.draft.models.vocab_padding import RepaddedModel
from engine.engine import Engine
from engine.kv_cache.kv_cache import BLOCK_BITS, KVCache
from engine.model.causal_lm import CausalModel
from engine.scheduler.scheduler import Scheduler
from engine.testing import FAMILIES, tiny_engine
from tests.model.driving import run
from tests.model.mixed import mixed_requests
from tests.model.passes import CPU
from tests.model.tiny import pair

EXACT = 1e-4
WRONG = 1e-2
NUM_SLOTS = 90
SIZES = 30, 3, 64  # layers, heads, and the size of one
PAGE_BYTES = 2 << 20


@given(st.permutations(range(8)), st.integers(1, 8), st.integers(0, 2**31), st.booleans())
def test_cache_returns_what_was_written(places, count, seed, is_native):
    cache, slots = KVCache(2000, CPU), [250 * place for place in places]
    if is_native:
        cache.pools(6, 2, 3, torch.float32)
    keys, values = torch.randn(2, count, 2, 3, generator=torch.Generator().manual_seed(seed))
    cache.write(4, torch.tensor(slots[:count]), keys, values)
    order = torch.tensor([[slots[i % count] for i in range(6)]])
    read_keys, read_values = cache.gather(4, order)
    expected = torch.tensor([i % count for i in range(6)])
    assert torch.equal(read_keys[0], keys[expected])
    assert torch.equal(read_values[0], values[expected])


def test_pools_are_created_at_first_write():
    cache = KVCache(5, CPU)
    assert (cache.num_layers, cache.num_bytes) == (0, 0)
    for layer in (0, 3):
        cache.write(layer, torch.tensor([1]), torch.ones(1, 2, 4), torch.ones(1, 2, 6))
    assert cache.num_layers == 2
    assert cache.num_bytes == 2 * (5 + 1) * 2 * (4 + 6) * 4  # and the dummy slot
    keys, values = cache.gather(3, torch.tensor([[1, 1, 1]]))
    assert keys.sum((2, 3)).tolist() == [[8.0, 8.0, 8.0]]
    assert values.shape == (1, 3, 2, 6)


def num_huge_pages(num_slots: int) -> int:
    """Return the number of huge pages that the first slots of a cache have in all layers."""
    slots, pages = torch.arange(num_slots), set()
    for pool in (pool for pools in KVCache(32_768, CPU).pools(*SIZES, torch.float16) for pool in pools):
        for head in range(pool.shape[2]):
            rows = slots // pool.shape[1] * pool.stride(0) + slots % pool.shape[1] * pool.stride(1) + head * pool.stride(2)
            pages |= {*((pool.data_ptr() + rows * pool.itemsize) // PAGE_BYTES).tolist()}
    return len(pages)


def most_huge_pages(num_slots: int) -> int:
    """Return how many huge pages the first slots may have: those of whole blocks, and one."""
    num_layers, num_heads, head_size = SIZES
    num_slots_of_blocks = -(-num_slots >> BLOCK_BITS) << BLOCK_BITS
    num_bytes = num_slots_of_blocks * (2 * num_layers * num_heads + 1) * head_size * torch.float16.itemsize
    return -(-num_bytes // PAGE_BYTES) + 1


@pytest.mark.parametrize("num_slots", [1, 512, 513, 1500])
def test_cache_uses_few_huge_pages(num_slots):
    """The bug: each head of each layer had its own pages, so that one token took 180 huge pages."""
    assert num_huge_pages(num_slots) <= most_huge_pages(num_slots)


@pytest.mark.parametrize("sizes", [(30, 3, 64), (1, 4, 32)])
def test_blocks_begin_at_odd_parts(sizes):
    """The bug: a head's keys were powers of two apart, so that they evicted each other from the processor's cache."""
    num_layers, num_heads, head_size = sizes
    ((keys, _), *_) = KVCache(2000, CPU).pools(num_layers, num_heads, head_size, torch.float32)
    num_parts, rest = divmod(keys.stride(0), keys.stride(2))
    assert (num_parts % 2, rest) == (1, 0)


def test_pools_by_layer_have_more_huge_pages(monkeypatch):
    monkeypatch.setattr(KVCache, "_make_blocks", lambda *_: None)
    assert num_huge_pages(1) > most_huge_pages(1500)


class RandomExpansion:
    """A policy that wishes anything."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, views):
        return ExpansionChoice(
            tuple(Expansion(self._rng.randint(0, 3), self._rng.randint(1, 3), self._rng.randint(0, 3)) for _ in views)
        )

    def observe(self, feedback):
        pass


def cache_error(model: CausalModel | RepaddedModel, cache: KVCache, token_ids: list[int], slots: Sequence[int]) -> float:
    """Return how far the cache at the slots is from that of feeding the tokens in one chain."""
    if not slots:
        return 0.0
    fresh = KVCache(len(token_ids), CPU)
    model.forward(pack([chain_segment(token_ids, 0, range(len(token_ids)))], CPU), fresh, [0])
    where, there = torch.tensor([slots]), torch.arange(len(slots))[None]
    layers = range(fresh.num_layers)
    pairs = [(mine, own) for i in layers for mine, own in zip(cache.gather(i, where), fresh.gather(i, there), strict=True)]
    return max(float((mine - own).abs().max()) for mine, own in pairs)


class CacheErrors:
    """The largest error of either cache over a run, for every sequence after each step."""

    def __init__(self) -> None:
        self.target = self.draft = 0.0
        self.num_checked = 0

    def look(self, engine: Engine) -> None:
        target, drafter = engine._target, engine._drafter
        assert isinstance(drafter, ModelDrafter)
        for sequence in engine._scheduler._by_id.values():
            ids = sequence.token_ids
            self.target = max(self.target, cache_error(target.model, target.cache, ids[: sequence.target_len], sequence.slots))
            draft_len = sequence.draft_len
            error = cache_error(drafter._model, drafter._cache, ids[:draft_len], sequence.slots[:draft_len])
            self.draft = max(self.draft, error)
            self.num_checked += draft_len > len(sequence.request.prompt_ids)


def errors_over_a_run(family: str) -> CacheErrors:
    """Run greedy, coupled and i.i.d. rows together through chunks, random trees and preemption."""
    config = SchedulerConfig(max_running=8, max_step_tokens=24, num_slots=NUM_SLOTS, max_model_len=64)
    engine = tiny_engine(*pair(family), policy=RandomExpansion(3), config=config)
    errors = CacheErrors()
    session = run(engine, mixed_requests(max_tokens=24), errors.look)
    assert all(outcome.finish is FinishReason.LENGTH for outcome in session.outcomes.values())
    assert sum(stats.num_preemptions for stats in session.stats)
    return errors


@pytest.mark.usefixtures("poisoned_pools")
@pytest.mark.parametrize("family", FAMILIES)
def test_caches_contain_the_committed_tokens(family):
    errors = errors_over_a_run(family)
    assert errors.num_checked > 20
    assert errors.target < EXACT
    assert errors.draft < EXACT


def keeps_the_first_nodes(scheduler, sequence, num_kept, path_slots):
    _KEEP(scheduler, sequence, num_kept, sequence.slots[num_kept : num_kept + len(path_slots)])


def keeps_the_path_backwards(scheduler, sequence, num_kept, path_slots):
    _KEEP(scheduler, sequence, num_kept, path_slots[::-1])


_KEEP = Scheduler._keep
_DRAFT_LEN_AFTER = Scheduler._draft_len_after


@pytest.mark.usefixtures("poisoned_pools")
def test_poisoned_pools_detect_padding_with_foreign_slots(monkeypatch):
    """Padded keys must be slots the row has written: padding with any free slot would gather NaN."""
    tables_of = packing._tables

    def padded_with_the_last_slot(segments, starts):
        integers, visible = tables_of(segments, starts)
        integers[1][~visible.any(1)] = NUM_SLOTS - 1
        return integers, visible

    monkeypatch.setattr(packing, "_tables", padded_with_the_last_slot)
    with pytest.raises(AssertionError):
        errors_over_a_run("llama")


@pytest.mark.parametrize("mutant", [keeps_the_first_nodes, keeps_the_path_backwards])
def test_compaction_detects_mutants(mutant, monkeypatch):
    monkeypatch.setattr(Scheduler, "_keep", mutant)
    errors = errors_over_a_run("llama")
    assert errors.target > WRONG


def accepted_leaf_never_fed(scheduler, row, result):
    return min(_DRAFT_LEN_AFTER(scheduler, row, result) + 1, row.root_position + len(result.path))


def draft_cache_forgotten(scheduler, row, result):
    """The drafter is believed to have every accepted token although plain steps fed it nothing."""
    return row.root_position + len(result.path)


@pytest.mark.parametrize("mutant", [accepted_leaf_never_fed, draft_cache_forgotten])
def test_draft_catch_up_detects_mutants(mutant, monkeypatch):
    """The text would be right still, as any draft is lossless: only the cache shows it."""
    monkeypatch.setattr(Scheduler, "_draft_len_after", mutant)
    errors = errors_over_a_run("llama")
    assert errors.draft > WRONG
    assert errors.target < EXACT
