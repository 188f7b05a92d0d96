"""The prefix cache: blocks of committed tokens whose slots sequences with the same prefix share.

A slot's content depends on its token and on every token before it. So the key of a block is its parent, the block before it, and
its own tokens. Tokens are compared, not only hashed, so two texts cannot collide. The first block's parent is the salt; texts of
different salts share nothing. Blocks consist of committed tokens whose keys the target has cached, never of drafted tokens.

    text        [ t0 ..... t15 | t16 .... t31 | t32 .. t40 | root ]      blocks of 16
    blocks      [   block 0    |   block 1    ]                          shared, never written again by the target
    own slots                                 [ .......... ]             the sequence's alone

An unused block stays until its slots are needed. The least recently used block is evicted first, children before parents. A block
that is not known to be finite is freed with its last user. Knows sequences and blocks; the scheduler owns the slot pool.
"""

from collections import OrderedDict
from collections.abc import Iterable

from engine.scheduler.cache_event_log import CacheEventLog
from engine.scheduler.sequence import Sequence
from engine.scheduler.slot_allocator import Block, BlockKey, IntegrityError


class PrefixCache:
    """Owns the blocks of `block_tokens` tokens each. Sequences without a salt neither use nor add blocks."""

    def __init__(self, block_tokens: int, log: CacheEventLog | None = None) -> None:
        self._block_tokens = block_tokens
        self._log = log  # of changes of the lookup
        self._by_key: dict[BlockKey, Block] = {}  # blocks that can be looked up
        self._unused: OrderedDict[Block, None] = OrderedDict()  # the least recently used first
        self._num_made = 0

    @property
    def num_unused_slots(self) -> int:
        """Slots of unused blocks, which can be evicted."""
        return len(self._unused) * self._block_tokens

    def adopt(self, sequence: Sequence) -> None:
        """Append cached blocks to a sequence's table, up to the root, and update how much the drafter has cached."""
        while not sequence.has_own_slots and (key := self.lookup_key(sequence)) is not None:
            block = self._by_key.get(key)
            if block is None:
                break
            self._unused.pop(block, None)
            block.num_users += 1
            sequence.blocks.append(block)
            sequence.slots.extend(block.slots)
        size = self._block_tokens
        while sequence.draft_len < sequence.num_shared and sequence.blocks[sequence.draft_len // size].is_drafted:
            sequence.draft_len = (sequence.draft_len // size + 1) * size

    def lookup_key(self, sequence: Sequence) -> BlockKey | None:
        """Return the key of the next block that the sequence could use; None if there is none before the root."""
        if not sequence.reads_prefixes or (len(sequence.blocks) + 1) * self._block_tokens >= sequence.num_tokens:
            return None
        return self._next_key(sequence)

    def _next_key(self, sequence: Sequence) -> BlockKey:
        start = sequence.num_shared
        parent = sequence.blocks[-1].serial if sequence.blocks else sequence.salt
        return parent, tuple(sequence.token_ids[start : start + self._block_tokens])

    def publish(self, sequence: Sequence) -> None:
        """Add blocks for a sequence's newly cached tokens. If a block exists already, the sequence keeps its own slots.

        Nothing is added below a block that was invalidated, because it could not be found.
        """
        if sequence.salt is None:
            return
        size, num_drafted = self._block_tokens, sequence.draft_len // self._block_tokens
        if len(sequence.slots) < (len(sequence.blocks) + 1) * size and num_drafted == sequence.num_marked:
            return  # no block is complete
        added: list[Block] = []
        while sequence.target_len >= sequence.num_shared + size:
            key = self._next_key(sequence)
            if key in self._by_key or (sequence.blocks and not self._is_listed(sequence.blocks[-1])):
                break
            self._num_made += 1
            start = sequence.num_shared
            block = Block(self._num_made, key, tuple(sequence.slots[start : start + size]), num_users=1)
            self._by_key[key] = block
            sequence.blocks.append(block)
            added.append(block)
        if added and self._log is not None:
            self._log.add(added, sequence.salt)
        num_drafted = min(len(sequence.blocks), num_drafted)
        for block in sequence.blocks[sequence.num_marked : num_drafted]:
            block.is_drafted = True
        sequence.num_marked = num_drafted

    def mark_finite(self, sequence: Sequence) -> None:
        """Mark a sequence's blocks as finite, after a distribution that attends to all of them was finite."""
        for block in reversed(sequence.blocks):
            if block.is_finite:
                break
            block.is_finite = True

    def release(self, sequence: Sequence) -> list[int]:
        """Release a sequence's blocks. Finite blocks stay cached; return the slots of the other unused blocks.

        The sequence's table is not changed.
        """
        freed: list[int] = []
        for block in reversed(sequence.blocks):
            block.num_users -= 1
            if not block.num_users and block.is_finite:
                self._unused[block] = None
            elif not block.num_users:
                self._unlist(block)
                freed += block.slots
        return freed

    def invalidate(self, sequence: Sequence) -> None:
        """Remove a sequence's blocks, and all blocks after them, from the lookup, because their content is not trusted."""
        serials = {block.serial for block in sequence.blocks}
        found: list[Block] = []
        for block in self._by_key.values():  # parents come before children
            if block.serial in serials or block.key[0] in serials:
                serials.add(block.serial)
                found.append(block)
        for block in reversed(found):
            self._unlist(block)

    def evict(self) -> tuple[int, ...]:
        """Evict the block that has been unused for longest. Return its slots."""
        block, _ = self._unused.popitem(last=False)
        self._unlist(block)
        return block.slots

    def _is_listed(self, block: Block) -> bool:
        return self._by_key.get(block.key) is block

    def _unlist(self, block: Block) -> None:
        if self._is_listed(block):
            del self._by_key[block.key]
            if self._log is not None:
                self._log.remove(block)

    def check(self, sequences: Iterable[Sequence]) -> list[int]:
        """Return the slots of all blocks. Raise IntegrityError unless they agree with the sequences' tokens and tables."""
        users: dict[Block, int] = dict.fromkeys(self._unused, 0)
        for sequence in sequences:
            size = self._block_tokens
            for index, block in enumerate(sequence.blocks):
                users[block] = users.get(block, 0) + 1
                own = slice(index * size, (index + 1) * size)
                if tuple(sequence.slots[own]) != block.slots or tuple(sequence.token_ids[own]) != block.key[1]:
                    raise IntegrityError(f"{sequence.request_id} has other slots or tokens than its block {index}")
        if any(block.num_users != count for block, count in users.items()):
            raise IntegrityError("a block has other users than it counts")
        if not all(block.is_finite for block in self._unused):
            raise IntegrityError("an unused block is cached although it is not known to be finite")
        if any(block not in users for block in self._by_key.values()):
            raise IntegrityError("a block in the lookup is neither used nor unused")
        return [slot for block in users for slot in block.slots]
