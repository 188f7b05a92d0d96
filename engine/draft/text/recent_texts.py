"""What was said lately to each tenant, within bounds: of one tenant, of the tenants of one group, and of all together.

Tenants least lately used are forgotten first. A tenant's name up to its first slash is that of its group (an API key; its users
are the tenants), so that whoever names many users drives out others' texts no farther than the bounds let him. Knows token ids.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.types import group_of
from engine.draft.text.suffix_counts import ContextTree
from engine.draft.text.text_index import Indexer, Text, TextIndex, text_after

_LEAST_OUTPUT = 4  # tokens of an output that is remembered: a shorter one would save a step or two


@dataclass(frozen=True, slots=True)
class RecentLimits:
    """How much is remembered: tokens of each tenant and of all tenants, tenants of one group and of all groups.

    Tokens are those that are stored: an output's, and up to MAX_CONTEXT before it. No tokens remember nothing.
    """

    tokens_of_tenant: int = 0
    tokens: int = 262_144
    tenants_of_group: int = 64
    tenants: int = 256


class _Generation:
    """Outputs that are forgotten together."""

    def __init__(self) -> None:
        self.index = TextIndex()
        self.num_tokens = 0
        self._known: set[int] = set()  # hashes: who finds his own taken loses a draft and no more

    def has(self, text: Text) -> bool:
        return hash(text) in self._known

    def add(self, text: Text, indexer: Indexer) -> None:
        self._known.add(hash(text))
        self.num_tokens += _num_stored(text)
        indexer.add(self.index, text)


class _Tenant:
    """One tenant's outputs in two generations: when the younger has half the tokens, the elder is forgotten."""

    def __init__(self) -> None:
        self.young, self.elder = _Generation(), _Generation()

    @property
    def num_tokens(self) -> int:
        return self.young.num_tokens + self.elder.num_tokens

    def add(self, text: Text, most_tokens: int, indexer: Indexer) -> None:
        """Remember an output of at most half the tokens, unless it is among the younger ones."""
        if self.young.has(text):
            return
        if self.young.num_tokens + _num_stored(text) > most_tokens // 2:
            self.young, self.elder = _Generation(), self.young
        self.young.add(text, indexer)


class RecentTexts:
    """Owns what is remembered of finished outputs."""

    def __init__(self, limits: RecentLimits, indexer: Indexer) -> None:
        self._limits = limits
        self._most_of_tenant = min(limits.tokens_of_tenant, limits.tokens)
        self._indexer = indexer
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens stored of all tenants."""
        return self._num_tokens

    def trees_of(self, tenant: str) -> tuple[ContextTree, ...]:
        """Return what a tenant may draft from; nothing is known of one that was never told anything, or was forgotten."""
        known = self._tenants.get(tenant)
        return () if known is None else (known.young.index.tree, known.elder.index.tree)

    def use(self, tenant: str) -> None:
        """Note that a tenant is there: others are forgotten before it."""
        if tenant in self._tenants:
            self._tenants.move_to_end(tenant)

    def add(self, tenant: str, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Remember an output that followed a prompt, or the last of it that there is room for; nothing is for nobody."""
        text = _last_of(text_after(prompt, output), self._most_of_tenant // 2)
        if not tenant or len(text.token_ids) < _LEAST_OUTPUT:
            return
        known = self._tenants.setdefault(tenant, _Tenant())
        self._tenants.move_to_end(tenant)
        self._num_tokens -= known.num_tokens
        known.add(text, self._most_of_tenant, self._indexer)
        self._num_tokens += known.num_tokens
        self._forget_beyond_limits(tenant)

    def _forget_beyond_limits(self, latest: str) -> None:
        of_group = [tenant for tenant in self._tenants if group_of(tenant) == group_of(latest)]
        for tenant in of_group[: -self._limits.tenants_of_group]:
            self._forget(tenant)
        while len(self._tenants) > self._limits.tenants or self._num_tokens > self._limits.tokens:
            self._forget(next(iter(self._tenants)))

    def _forget(self, tenant: str) -> None:
        self._num_tokens -= self._tenants.pop(tenant).num_tokens


def _num_stored(text: Text) -> int:
    return len(text.context) + len(text.token_ids)


def _last_of(text: Text, most_tokens: int) -> Text:
    """Return the last tokens of a text, its context cut before them."""
    num_cut = max(0, _num_stored(text) - most_tokens)
    return Text(text.context[num_cut:], text.token_ids[max(0, num_cut - len(text.context)) :])
