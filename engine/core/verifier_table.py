"""The table of which verifier is lossless on which kind of tree, and the default partner of a verifier or a tree.

Knows names, no tensors. Source: docs/verification.md; tests show every allowed pair exact and every refused one lossy.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from engine.core.tree import DELAYED_TREES, Expansion, TreeKind, TreeName

VerifierName = Literal[
    "nss",
    "naive",
    "naive_tree",
    "spectr",
    "specinfer",
    "khisti",
    "tournament",
    "rrsw",
    "block",
    "traversal",
    "gbv",
    "hu",
    "univer",
    "coupled",
]
VERIFIER_NAMES: tuple[str, ...] = get_args(VerifierName)


class InexactPairError(ValueError):
    """A verifier that is not lossless on a kind of tree."""


class UnknownVerifierError(ValueError):
    """No verifier has that name."""


@dataclass(frozen=True)
class _Exactness:
    """One line of the table: a verifier's default tree, the kind it was designed for, and other kinds it is exact on."""

    tree: TreeName
    kind: TreeKind
    also: tuple[TreeKind, ...] = ()

    @property
    def kinds(self) -> tuple[TreeKind, ...]:
        return (self.kind, *self.also)


_PATH, _IID, _DISTINCT, _FIXED_DISTINCT = TreeKind.PATH, TreeKind.IID, TreeKind.WITHOUT_REPLACEMENT, TreeKind.FIXED_DISTINCT
_SET, _RANKED, _SHARED = TreeKind.SET_PLUS_SAMPLE, TreeKind.DETERMINISTIC, TreeKind.SHARED_NOISE

_TABLE: dict[str, _Exactness] = {
    "nss": _Exactness("beam", _RANKED, (_PATH, _IID, _DISTINCT, _FIXED_DISTINCT, _SET)),
    "naive": _Exactness("delayed", _PATH, (_IID, _DISTINCT, _FIXED_DISTINCT)),
    "naive_tree": _Exactness("delayed", _IID, (_PATH, _DISTINCT, _FIXED_DISTINCT)),
    "spectr": _Exactness("delayed", _IID, (_PATH,)),
    "specinfer": _Exactness("delayed", _IID, (_PATH,)),
    "khisti": _Exactness("delayed", _IID, (_PATH,)),
    "tournament": _Exactness("delayed", _IID, (_PATH,)),
    "rrsw": _Exactness("delayed_distinct", _FIXED_DISTINCT, (_PATH, _IID, _DISTINCT)),
    "block": _Exactness("delayed", _PATH, (_IID, _DISTINCT, _FIXED_DISTINCT)),
    "traversal": _Exactness("delayed_distinct", _FIXED_DISTINCT, (_PATH, _IID, _DISTINCT)),
    "gbv": _Exactness("delayed", _IID, (_PATH,)),
    "hu": _Exactness("greedy_sample", _SET, (_PATH, _FIXED_DISTINCT)),
    "univer": _Exactness("greedy_sample", _SET, (_PATH, _FIXED_DISTINCT)),
    "coupled": _Exactness("delayed_distinct", _SHARED, (_PATH, _IID, _DISTINCT, _FIXED_DISTINCT, _SET, _RANKED)),
}
# The verifier of a tree kind on which the server's verifier is not exact.
_VERIFIER_OF: dict[TreeKind, VerifierName] = {_SET: "univer", _RANKED: "nss", _SHARED: "coupled"}


def is_exact(kind: TreeKind, verifier: str) -> bool:
    """Return whether the verifier preserves the target's distribution on such trees. Raises UnknownVerifierError."""
    return kind in _line(verifier).kinds


def require_exact(expansion: Expansion, verifier: str) -> None:
    """Raise InexactPairError, with both names, unless the verifier is lossless on that tree. Raises UnknownVerifierError."""
    if not is_exact(expansion.kind, verifier):
        fitting = ", ".join(name for name, line in _TABLE.items() if expansion.kind in line.kinds)
        raise InexactPairError(f"verifier {verifier!r} is not lossless on {expansion.tree!r} trees; {fitting} are")


def default_tree(verifier: str) -> TreeName:
    """Return the tree for a verifier without an expansion; the verifier is exact on it. Raises UnknownVerifierError."""
    return _line(verifier).tree


def verifier_for(expansion: Expansion, preferred: str) -> str:
    """Return the verifier for an expansion without a verifier: the preferred one if it is exact there."""
    return preferred if is_exact(expansion.kind, preferred) else _VERIFIER_OF.get(expansion.kind, "traversal")


def fitted(expansion: Expansion, verifier: str) -> Expansion:
    """Return the expansion if the verifier is exact on it, else the verifier's default tree of about the same size."""
    if expansion.is_plain or is_exact(expansion.kind, verifier):
        return expansion
    tree, num_nodes, depth = default_tree(verifier), expansion.num_draft_tokens, expansion.max_depth
    if tree in DELAYED_TREES:
        return _delayed_within(tree, num_nodes, depth)
    return Expansion(0, max(2, expansion.branches), depth, tree, num_nodes)


def _delayed_within(tree: TreeName, num_nodes: int, max_depth: int) -> Expansion:
    """Return a delayed tree whose trunk has a quarter of the nodes. Return a chain if there is no room for two branches."""
    trunk = min(num_nodes // 4, max_depth // 2)
    depth = max(1, min(max_depth - trunk, (num_nodes - trunk) // 2))
    branches = min(16, (num_nodes - trunk) // depth)
    return Expansion(trunk, branches, depth, tree) if branches > 1 else Expansion(min(num_nodes, max_depth), 1, 0, tree)


def _line(verifier: str) -> _Exactness:
    if verifier not in _TABLE:
        raise UnknownVerifierError(f"no verifier is named {verifier!r}; there are {', '.join(VERIFIER_NAMES)}")
    return _TABLE[verifier]
