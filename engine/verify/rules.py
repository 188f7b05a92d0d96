"""The registry of verifiers and the one table of which tree each is exact on."""

from collections.abc import Callable
from enum import StrEnum

from engine.verify.coupled import Coupled
from engine.verify.directions import BottomUp, TopDown
from engine.verify.errors import InexactPairError, UnknownVerifierError
from engine.verify.masses import TwoPhase
from engine.verify.plans import Naive, WithoutReplacement, WithReplacement
from engine.verify.verdict import Verifier


class TreeKind(StrEnum):
    """How a tree's children were chosen; what a verifier is exact on depends on nothing else."""

    PATH = "path"  # one child a node, drawn from a known law
    IID = "iid"  # draws from one law, duplicates merged: delayed trees
    WITHOUT_REPLACEMENT = "without_replacement"  # distinct draws: static and heap trees
    SET_PLUS_SAMPLE = "set_plus_sample"  # a fixed set and one draw off it
    DETERMINISTIC = "deterministic"  # chosen by value, no law: beams, look-ups


# A rule is a local plan x a direction; the coupled rule is its own.
_RULES: dict[str, Callable[[], Verifier]] = {
    "traversal": lambda: TwoPhase("traversal", WithoutReplacement(), BottomUp()),
    "specinfer": lambda: TwoPhase("specinfer", WithReplacement(), TopDown()),
    "nss": lambda: TwoPhase("nss", Naive(), TopDown()),
    "coupled": Coupled,
}

_EXACT: dict[str, tuple[TreeKind, ...]] = {
    "traversal": (TreeKind.PATH, TreeKind.IID, TreeKind.WITHOUT_REPLACEMENT),
    "specinfer": (TreeKind.PATH, TreeKind.IID),
    "nss": tuple(TreeKind),
    "coupled": tuple(TreeKind),
}

VERIFIER_NAMES = tuple(_RULES)


def create_verifier(name: str) -> Verifier:
    """Return the verifier of that name; raise UnknownVerifierError if there is none."""
    if name not in _RULES:
        raise UnknownVerifierError(f"no verifier is named {name!r}; there are {', '.join(VERIFIER_NAMES)}")
    return _RULES[name]()


def require_exact(tree_kind: TreeKind, verifier_name: str) -> None:
    """Raise InexactPairError unless the verifier keeps the target's law on such trees."""
    exact = _EXACT.get(verifier_name)
    if exact is None:
        raise UnknownVerifierError(f"no verifier is named {verifier_name!r}; there are {', '.join(VERIFIER_NAMES)}")
    if tree_kind not in exact:
        fitting = ", ".join(name for name, kinds in _EXACT.items() if tree_kind in kinds)
        raise InexactPairError(f"verifier {verifier_name!r} is not lossless on {tree_kind.value!r} trees; {fitting} are")
