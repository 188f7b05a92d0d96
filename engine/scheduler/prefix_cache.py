"""Slots of committed tokens that others can use: blocks of a text, found again by what stands before them.

What a slot holds depends on its token and on every token before it. So a block is found by its parent, the block before it, and
by its own tokens, compared one by one: no two texts can meet by a hash. The first block's parent is the salt; texts of different
salts share nothing. Blocks are made of committed tokens whose keys the target has cached, never of a draft's.

    text        [ t0 ..... t15 | t16 .... t31 | t32 .. t40 | root ]      blocks of 16
    blocks      [   block 0    |   block 1    ]                          shared, never written again by the target
    own slots                                 [ .......... ]             the sequence's alone

A block whose last user has gone stays until its slots are needed: the least lately used goes first, children before parents. One
that no finite law has proven goes with its last user. Knows sequences and blocks; the pool is the scheduler's.
"""

from collections import OrderedDict
from collections.abc import Iterable

from engine.scheduler.sequence import Sequence
from engine.scheduler.slot_pool import Block, BlockKey, IntegrityError


class PrefixCache:
    """Owns the blocks, of `block_tokens` tokens each. Sequences without a salt neither find nor leave any."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._by_key: dict[BlockKey, Block] = {}  # those that can be found
        self._unused: OrderedDict[Block, None] = OrderedDict()  # the least lately used first
        self._num_made = 0

    @property
    def num_unused_slots(self) -> int:
        """Slots of blocks that nobody uses: as good as free."""
        return len(self._unused) * self._block_tokens

    def adopt(self, sequence: Sequence) -> None:
        """Let a sequence go on from what is cached after its own blocks, the root aside, and from what the drafter has of it."""
        while not sequence.has_own_slots and (key := self.wanted(sequence)) is not None:
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

    def wanted(self, sequence: Sequence) -> BlockKey | None:
        """Return what finds the next block of a text that would spare a sequence work; None if there can be none."""
        if not sequence.reads_prefixes or (len(sequence.blocks) + 1) * self._block_tokens >= sequence.num_tokens:
            return None
        return self._next_key(sequence)

    def _next_key(self, sequence: Sequence) -> BlockKey:
        start = sequence.num_shared
        parent = sequence.blocks[-1].serial if sequence.blocks else sequence.salt
        return parent, tuple(sequence.token_ids[start : start + self._block_tokens])

    def publish(self, sequence: Sequence) -> None:
        """Make blocks of what a sequence has cached since; where another has made the same, the sequence keeps its own slots."""
        if sequence.salt is None:
            return
        size = self._block_tokens
        while sequence.target_len >= sequence.num_shared + size:
            key = self._next_key(sequence)
            if key in self._by_key:
                break
            self._num_made += 1
            start = sequence.num_shared
            block = Block(self._num_made, key, tuple(sequence.slots[start : start + size]), num_users=1)
            self._by_key[key] = block
            sequence.blocks.append(block)
        num_drafted = min(len(sequence.blocks), sequence.draft_len // size)
        for block in sequence.blocks[sequence.num_marked : num_drafted]:
            block.is_drafted = True
        sequence.num_marked = num_drafted

    def prove(self, sequence: Sequence) -> None:
        """Note that a law that looks at all of a sequence's blocks is finite."""
        for block in reversed(sequence.blocks):
            if block.is_proven:
                break
            block.is_proven = True

    def release(self, sequence: Sequence) -> list[int]:
        """Take a sequence's blocks back; those that are proven stay for others. Return the slots of those that do not.

        The sequence's table is not touched.
        """
        freed: list[int] = []
        for block in reversed(sequence.blocks):
            block.num_users -= 1
            if not block.num_users and block.is_proven:
                self._unused[block] = None
            elif not block.num_users:
                self._lose(block)
                freed += block.slots
        return freed

    def forget(self, sequence: Sequence) -> None:
        """Let nobody find a sequence's blocks any more: what they hold is not to be trusted."""
        for block in sequence.blocks:
            self._lose(block)

    def evict(self) -> tuple[int, ...]:
        """Give up the block that has been unused for longest; return its slots."""
        block, _ = self._unused.popitem(last=False)
        self._lose(block)
        return block.slots

    def _lose(self, block: Block) -> None:
        if self._by_key.get(block.key) is block:
            del self._by_key[block.key]

    def check(self, sequences: Iterable[Sequence]) -> list[int]:
        """Return the slots of all blocks; raise IntegrityError unless users, texts and tables agree with them."""
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
        if not all(block.is_proven for block in self._unused):
            raise IntegrityError("a block is kept that nobody has proven")
        if any(block not in users for block in self._by_key.values()):
            raise IntegrityError("a block that can be found is neither used nor unused")
        return [slot for block in users for slot in block.slots]
