"""A router's copy of a prefix cache, kept by the published events alone, and the cache that it must equal."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from engine.core.cache_events import CacheEvent
from engine.scheduler.prefix_cache import PrefixCache

Prefix = tuple[str | None, str, tuple[int, ...]]  # the adapter, the client's salt, all tokens up to a block's end


class PrefixTree:
    """Prefixes by the hash of their last block. Events that contradict earlier ones are errors."""

    def __init__(self) -> None:
        self._by_hash: dict[int, Prefix] = {}
        self._parents: dict[int, int | None] = {}

    @property
    def prefixes(self) -> Counter[Prefix]:
        """How often each prefix is stored: once for each API key."""
        return Counter(self._by_hash.values())

    def apply(self, event: dict[str, Any]) -> None:
        """Take a decoded event."""
        match event["type"]:
            case "BlockStored":
                self._store(event)
            case "BlockRemoved":
                for block in event["block_hashes"]:
                    del self._by_hash[block], self._parents[block]
                    assert block not in self._parents.values(), "removed before its children"
            case "AllBlocksCleared":
                self.__init__()  # type: ignore[misc]
            case kind:
                raise AssertionError(kind)

    def _store(self, event: dict[str, Any]) -> None:
        size, blocks, tokens, adapter = (event[name] for name in ("block_size", "block_hashes", "token_ids", "lora_name"))
        keys = event.get("extra_keys") or [None] * len(blocks)
        assert (len(tokens), len(keys)) == (size * len(blocks), len(blocks))
        parent = event["parent_block_hash"]
        for index, block in enumerate(blocks):
            names = list(keys[index] or ())
            assert adapter is None or names.pop(0) == adapter
            salt, before = (names.pop() if names else "", ()) if parent is None else self._by_hash[parent][1:]
            assert not names
            assert block not in self._by_hash, "stored twice"
            self._by_hash[block] = (adapter, salt, before + tuple(tokens[index * size : (index + 1) * size]))
            self._parents[block] = parent
            parent = block


def decoded(events: tuple[CacheEvent, ...]) -> list[dict[str, Any]]:
    """Return events as a subscriber without our types reads them."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(events))  # type: ignore[no-any-return]


def prefixes_of(cache: PrefixCache) -> Counter[Prefix]:
    """Return the prefixes that a sequence could find in an engine's cache."""
    by_serial: dict[int, Prefix] = {}
    for (parent, tokens), block in cache._by_key.items():
        assert parent is not None
        adapter, salt, before = by_serial[parent] if isinstance(parent, int) else (parent[0], parent[1].partition("/")[2], ())
        by_serial[block.serial] = (adapter, salt, before + tokens)
    return Counter(by_serial.values())


def write_prefixes(cache: PrefixCache, path: Path) -> None:
    """Write the prefixes for a test in another process, all or none."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps([*prefixes_of(cache).elements()]))
    part.replace(path)


def read_prefixes(path: Path) -> Counter[Prefix]:
    return Counter((adapter, salt, tuple(tokens)) for adapter, salt, tokens in json.loads(path.read_text()))
