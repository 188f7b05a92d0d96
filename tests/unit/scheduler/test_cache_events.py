"""Published changes of the prefix cache: a router that knows nothing else has the engine's own tree, under random work."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from engine.core.cache_events import BlockRemoved, BlockStored
from engine.scheduler import cache_event_log
from engine.scheduler.cache_event_log import CacheEventLog
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.slot_allocator import Block
from tests.prefix_tree import PrefixTree, decoded, prefixes_of
from tests.unit.scheduler.scheduler_machine import SchedulerMachine


class RecordingScheduler(Scheduler):
    def __init__(self, config, feeding):
        super().__init__(replace(config, has_cache_events=True), feeding)


class EventMachine(SchedulerMachine):
    """Submits, steps, aborts, preempts and fails; a subscriber follows."""

    scheduler_class = RecordingScheduler

    @invariant()
    def subscriber_has_the_engines_tree(self):
        if hasattr(self, "scheduler"):
            tree = self.__dict__.setdefault("tree", PrefixTree())
            for event in decoded(self.scheduler.take_cache_events()):
                tree.apply(event)
            assert tree.prefixes == prefixes_of(self.scheduler._prefix_cache)


def run(*phases: Phase, max_examples: int = 150) -> None:
    run_state_machine_as_test(EventMachine, settings=settings(max_examples=max_examples, stateful_step_count=30, phases=phases))


def test_subscriber_has_the_engines_tree():
    """After evictions, aborts, preemptions and failed sequences, whose blocks and all after them are removed."""
    run(Phase.generate, Phase.shrink)


def _is_forgotten(cache: PrefixCache, sequence: Any) -> None:
    for block in sequence.blocks:
        cache._unlist(block)


def _unlist_alone(cache: PrefixCache, block: Block) -> None:
    if cache._is_listed(block):
        del cache._by_key[block.key]


def _forget_salt(parent: int | None, salt: Any, token_ids: tuple[int, ...]) -> int:
    return _HASH(parent, (salt[0], ""), token_ids)


def _forget_parent(parent: int | None, salt: Any, token_ids: tuple[int, ...]) -> int:
    return _HASH(None, salt, token_ids)


_HASH = cache_event_log._hash_of


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (PrefixCache, "_unlist", _unlist_alone),
        (PrefixCache, "invalidate", _is_forgotten),
        (PrefixCache, "_is_listed", lambda cache, block: True),
        (CacheEventLog, "_end_removal", lambda log: None),
        (cache_event_log, "_hash_of", _forget_salt),
        (cache_event_log, "_hash_of", _forget_parent),
    ],
    ids=["removal", "children of failed", "orphans", "removal of logged", "salt", "parent"],
)
def test_a_wrong_record_is_detected(owner: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, KeyError, BaseExceptionGroup, pytest.fail.Exception)):
        run(Phase.generate, max_examples=400)


def _block(serial: int, parent: Any, *token_ids: int) -> Block:
    return Block(serial, (parent, token_ids), (), 1)


def test_events_have_the_published_form():
    """The names, the nulls and the missing fields are those that vLLM's publisher writes."""
    log = CacheEventLog()
    first, second = _block(1, ("lora", "key/salt"), 3, 4), _block(2, 1, 5, 6)
    log.add([first, second], ("lora", "key/salt"))
    log.add([_block(3, (None, "key"), 3, 4)], (None, "key"))
    log.remove(second)
    log.remove(first)
    named, plain, removed = log.take()
    assert isinstance(named, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert decoded((named, plain, removed)) == [
        {
            "type": "BlockStored",
            "block_hashes": list(named.block_hashes),
            "parent_block_hash": None,
            "token_ids": [3, 4, 5, 6],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": "lora",
            "extra_keys": [["lora", "salt"], ["lora"]],
        },
        {
            "type": "BlockStored",
            "block_hashes": [cache_event_log._hash_of(None, (None, "key"), (3, 4))],
            "parent_block_hash": None,
            "token_ids": [3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": [*reversed(named.block_hashes)], "medium": "GPU"},
    ]
    assert log.take() == ()


def test_hashes_are_equal_in_every_engine():
    """Routers index replicas together: a block's hash depends on nothing but what is cached."""
    assert cache_event_log._hash_of(7, (None, ""), (1, 2)) == cache_event_log._hash_of(7, ("lora", "other"), (1, 2))
    assert cache_event_log._hash_of(None, (None, ""), tuple(range(16))) == KNOWN_HASH


KNOWN_HASH = 15762484731379446276
