"""The registry of verifiers and the one table of which tree each is exact on."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from engine.verify.coupled import Coupled
from engine.verify.directions import BottomUp, Direction, TopDown
from engine.verify.duels import Duels
from engine.verify.errors import InexactPairError, UnknownVerifierError
from engine.verify.first_path import FirstPath
from engine.verify.k_seq import KSeq
from engine.verify.masses import TwoPhase
from engine.verify.one_token import AcceptChosen, OneToken, Selection
from engine.verify.plans import LocalPlan, TargetDraw, WithoutReplacement, WithReplacement
from engine.verify.selections import BestRanked, FirstDraw
from engine.verify.set_plus_sample import SetPlusSample
from engine.verify.verdict import Verifier


class TreeKind(StrEnum):
    """How a tree's children were chosen; what a verifier is exact on depends on nothing else."""

    PATH = "path"  # one child a node, drawn from a known law
    IID = "iid"  # draws from one law, duplicates merged: delayed trees
    WITHOUT_REPLACEMENT = "without_replacement"  # distinct draws: static and heap trees
    SET_PLUS_SAMPLE = "set_plus_sample"  # a fixed set and one draw off it
    DETERMINISTIC = "deterministic"  # chosen by value, no law: beams, look-ups


@dataclass(frozen=True)
class _Rule:
    """One line of the table: the verifier, the trees it is grown if nothing else is said, and the others it is exact on."""

    create: Callable[[], Verifier]
    default: TreeKind
    also: tuple[TreeKind, ...] = ()

    @property
    def exact_on(self) -> tuple[TreeKind, ...]:
        return (self.default, *self.also)


_PATH, _IID, _DISTINCT = TreeKind.PATH, TreeKind.IID, TreeKind.WITHOUT_REPLACEMENT
_SET, _FIXED = TreeKind.SET_PLUS_SAMPLE, TreeKind.DETERMINISTIC


def _two_phase(name: str, plan: LocalPlan, direction: Direction) -> Callable[[], Verifier]:
    return lambda: TwoPhase(name, plan, direction)


def _chosen(name: str, selection: Selection, direction: Direction) -> Callable[[], Verifier]:
    return _two_phase(name, OneToken(AcceptChosen(selection)), direction)


# A rule is a local plan x a direction; the coupled rule is its own. gbv and univer are reconstructions: docs/verification.md.
_TABLE: dict[str, _Rule] = {
    "nss": _Rule(_two_phase("nss", TargetDraw(), TopDown()), _IID, (_PATH, _DISTINCT, _SET, _FIXED)),
    "naive": _Rule(_two_phase("naive", FirstPath(), TopDown()), _PATH, (_IID, _DISTINCT)),
    "naive_tree": _Rule(_chosen("naive_tree", FirstDraw(), TopDown()), _IID, (_PATH, _DISTINCT)),
    "spectr": _Rule(_two_phase("spectr", OneToken(KSeq()), TopDown()), _IID, (_PATH,)),
    "specinfer": _Rule(_two_phase("specinfer", WithReplacement(), TopDown()), _IID, (_PATH,)),
    "khisti": _Rule(_chosen("khisti", Duels(), TopDown()), _IID, (_PATH,)),
    "tournament": _Rule(_chosen("tournament", BestRanked(), TopDown()), _IID, (_PATH,)),
    "rrsw": _Rule(_two_phase("rrsw", WithoutReplacement(), TopDown()), _IID, (_PATH, _DISTINCT)),
    "block": _Rule(_two_phase("block", FirstPath(), BottomUp()), _PATH, (_IID, _DISTINCT)),
    "traversal": _Rule(_two_phase("traversal", WithoutReplacement(), BottomUp()), _IID, (_PATH, _DISTINCT)),
    "gbv": _Rule(_chosen("gbv", BestRanked(), BottomUp()), _IID, (_PATH,)),
    "hu": _Rule(_two_phase("hu", SetPlusSample(), TopDown()), _SET, (_PATH,)),
    "univer": _Rule(_two_phase("univer", SetPlusSample(), BottomUp()), _SET, (_PATH,)),
    "coupled": _Rule(Coupled, _IID, (_PATH, _DISTINCT, _SET, _FIXED)),
}

VERIFIER_NAMES = tuple(_TABLE)


def create_verifier(name: str) -> Verifier:
    """Return the verifier of that name; raise UnknownVerifierError if there is none."""
    return _rule(name).create()


def default_tree_kind(verifier_name: str) -> TreeKind:
    """Return the kind of tree to grow for a verifier named alone: one that it is exact on and makes use of.

    Raises UnknownVerifierError.
    """
    return _rule(verifier_name).default


def require_exact(tree_kind: TreeKind, verifier_name: str) -> None:
    """Raise InexactPairError unless the verifier keeps the target's law on such trees, UnknownVerifierError if there is none."""
    if tree_kind not in _rule(verifier_name).exact_on:
        fitting = ", ".join(name for name, rule in _TABLE.items() if tree_kind in rule.exact_on)
        raise InexactPairError(f"verifier {verifier_name!r} is not lossless on {tree_kind.value!r} trees; {fitting} are")


def _rule(name: str) -> _Rule:
    if name not in _TABLE:
        raise UnknownVerifierError(f"no verifier is named {name!r}; there are {', '.join(VERIFIER_NAMES)}")
    return _TABLE[name]
