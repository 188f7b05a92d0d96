"""Changes of the prefix cache, in the form in which vLLM publishes them (its KV events).

A block has a 64-bit hash of its tokens and of all tokens before them. The hash includes what else separates prefixes: the LoRA
adapter and the cache salt. So the same block has the same hash in every engine.
"""

import msgspec

MEDIUM = "GPU"  # of the engine's own cache, whatever the device; other media of vLLM are what it spills to


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Consecutive blocks were added. `extra_keys` has for each block the adapter and, at a text's start, the client's salt."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: tuple[tuple[str, ...] | None, ...] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks were removed, children before parents."""

    block_hashes: tuple[int, ...]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The cache is empty: its engine ended."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
