"""Records what enters and leaves the prefix cache, for routers that send a prompt where its beginning is cached.

Knows blocks and their salts. Does not know where the events go.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from engine.core.cache_events import MEDIUM, BlockRemoved, BlockStored, CacheEvent
from engine.scheduler.slot_allocator import Block, Salt


class CacheEventLog:
    """Owns the events since the last `take`, and the hashes of all blocks that are in the cache."""

    def __init__(self) -> None:
        self._hashes: dict[int, int] = {}  # by serial
        self._events: list[CacheEvent] = []
        self._removed: list[int] = []  # since the last event

    def add(self, blocks: Sequence[Block], salt: Salt) -> None:
        """Record blocks that were added, each the parent of the next."""
        self._end_removal()
        first_parent = blocks[0].key[0]
        parent = self._hashes[first_parent] if isinstance(first_parent, int) else None
        hashes: list[int] = []
        for block in blocks:
            hashes.append(_hash_of(hashes[-1] if hashes else parent, salt, block.key[1]))
            self._hashes[block.serial] = hashes[-1]
        adapter, cache_salt = salt
        keys = () if adapter is None else (adapter,)
        own_salt = cache_salt.partition("/")[2]  # what a router reads in the client's request
        first_keys = (*keys, own_salt) if own_salt and parent is None else keys
        self._events.append(
            BlockStored(
                block_hashes=tuple(hashes),
                parent_block_hash=parent,
                token_ids=tuple(token_id for block in blocks for token_id in block.key[1]),
                block_size=len(blocks[0].key[1]),
                lora_id=None,
                medium=MEDIUM,
                lora_name=adapter,
                extra_keys=(first_keys, *[keys or None] * (len(blocks) - 1)) if first_keys else None,
            )
        )

    def remove(self, block: Block) -> None:
        """Record a block that was removed."""
        self._removed.append(self._hashes.pop(block.serial))

    def take(self) -> tuple[CacheEvent, ...]:
        """Return the events since the last call, oldest first."""
        self._end_removal()
        events, self._events = tuple(self._events), []
        return events

    def _end_removal(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(tuple(self._removed), MEDIUM))
            self._removed = []


def _hash_of(parent: int | None, salt: Salt, token_ids: tuple[int, ...]) -> int:
    """Return the hash of a block. A first block has no parent, and its salt takes the parent's place."""
    before = repr(salt).encode() if parent is None else parent.to_bytes(8, "little")
    return int.from_bytes(blake2b(before + array("q", token_ids).tobytes(), digest_size=8).digest(), "little")
