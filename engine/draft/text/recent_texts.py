"""Recent outputs of each tenant, bounded for a tenant, for the tenants of a group, and in total.

The least recently used tenants are evicted first. A tenant's group is its name up to the first slash: an API key, whose users are
its tenants. The bound of a group limits how many other tenants a key with many users can evict.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.types import group_of
from engine.draft.text.matching import TextTree
from engine.draft.text.text_index import Indexer, TextIndex, TextWithContext, text_with_context

_MIN_OUTPUT = 4  # tokens; a shorter output would save a step or two


@dataclass(frozen=True, slots=True)
class RecentLimits:
    """Limits: tokens of each tenant and in total, tenants of one group and in total.

    All stored tokens count: an output's, and up to MAX_CONTEXT before it. A limit of 0 tokens stores nothing.
    """

    tokens_of_tenant: int = 0
    tokens: int = 262_144
    tenants_of_group: int = 64
    tenants: int = 256


class _Generation:
    """Outputs that are evicted together."""

    def __init__(self, index: TextIndex) -> None:
        self.index = index
        self.num_tokens = 0
        self._hashes: set[int] = set()  # a collision only loses drafts

    def has(self, text: TextWithContext) -> bool:
        return hash(text) in self._hashes

    def add(self, text: TextWithContext, indexer: Indexer) -> None:
        self._hashes.add(hash(text))
        self.num_tokens += _num_stored(text)
        indexer.add(self.index, text)


class _TenantOutputs:
    """One tenant's outputs in two generations. When the young one has half the tokens, the old one is evicted."""

    def __init__(self, indexer: Indexer) -> None:
        self._indexer = indexer
        self.young, self.old = _Generation(indexer.new_index()), _Generation(indexer.new_index())

    @property
    def num_tokens(self) -> int:
        return self.young.num_tokens + self.old.num_tokens

    def add(self, text: TextWithContext, max_tokens: int) -> None:
        """Store an output of at most half of `max_tokens`, unless the young generation has it."""
        if self.young.has(text):
            return
        if self.young.num_tokens + _num_stored(text) > max_tokens // 2:
            self.young, self.old = _Generation(self._indexer.new_index()), self.young
        self.young.add(text, self._indexer)


class RecentTexts:
    """Stores finished outputs by tenant."""

    def __init__(self, limits: RecentLimits, indexer: Indexer) -> None:
        self._limits = limits
        self._max_tenant_tokens = min(limits.tokens_of_tenant, limits.tokens)
        self._indexer = indexer
        self._tenants: OrderedDict[str, _TenantOutputs] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Stored tokens of all tenants."""
        return self._num_tokens

    def trees_of(self, tenant: str) -> tuple[TextTree, ...]:
        """Return the trees from which a tenant may draft; an empty result if it has no stored outputs."""
        outputs = self._tenants.get(tenant)
        return () if outputs is None else (outputs.young.index.tree, outputs.old.index.tree)

    def touch(self, tenant: str) -> None:
        """Mark a tenant as the most recently used."""
        if tenant in self._tenants:
            self._tenants.move_to_end(tenant)

    def add(self, tenant: str, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Store the last tokens of an output that followed a prompt. Outputs without a tenant ("") are not stored."""
        text = _last_of(text_with_context(prompt, output), self._max_tenant_tokens // 2)
        if not tenant or len(text.token_ids) < _MIN_OUTPUT:
            return
        outputs = self._tenants.setdefault(tenant, _TenantOutputs(self._indexer))
        self._tenants.move_to_end(tenant)
        self._num_tokens -= outputs.num_tokens
        outputs.add(text, self._max_tenant_tokens)
        self._num_tokens += outputs.num_tokens
        self._evict_beyond_limits(tenant)

    def _evict_beyond_limits(self, latest: str) -> None:
        of_group = [tenant for tenant in self._tenants if group_of(tenant) == group_of(latest)]
        for tenant in of_group[: -self._limits.tenants_of_group]:
            self._evict(tenant)
        while len(self._tenants) > self._limits.tenants or self._num_tokens > self._limits.tokens:
            self._evict(next(iter(self._tenants)))

    def _evict(self, tenant: str) -> None:
        self._num_tokens -= self._tenants.pop(tenant).num_tokens


def _num_stored(text: TextWithContext) -> int:
    return len(text.context) + len(text.token_ids)


def _last_of(text: TextWithContext, max_tokens: int) -> TextWithContext:
    """Return the last tokens of a text. The context is cut first."""
    num_cut = max(0, _num_stored(text) - max_tokens)
    return TextWithContext(text.context[num_cut:], text.token_ids[max(0, num_cut - len(text.context)) :])
