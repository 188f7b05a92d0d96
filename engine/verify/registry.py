"""The registry of verifiers by name. engine.core.verifier_table lists the trees on which each is exact."""

from collections.abc import Callable

from engine.core.verifier_table import UnknownVerifierError
from engine.verify.coupled import Coupled
from engine.verify.directions import BottomUp, Direction, TopDown
from engine.verify.first_path import FirstPath
from engine.verify.k_seq import KSeq
from engine.verify.khisti import Duels
from engine.verify.node_plans import NodePlan, TargetDraw, WithoutReplacement, WithReplacement
from engine.verify.one_token import AcceptChosen, OneToken, Selection
from engine.verify.selections import BestRanked, FirstDraw
from engine.verify.set_plus_sample import SetPlusSample
from engine.verify.two_phase import TwoPhase
from engine.verify.verdict import Verifier


def _two_phase(name: str, plan: NodePlan, direction: Direction) -> Callable[[], Verifier]:
    return lambda: TwoPhase(name, plan, direction)


def _chosen(name: str, selection: Selection, direction: Direction) -> Callable[[], Verifier]:
    return _two_phase(name, OneToken(AcceptChosen(selection)), direction)


# A rule is a node plan x a direction, except the coupled rule. gbv and univer are reconstructions: docs/verification.md.
_REGISTRY: dict[str, Callable[[], Verifier]] = {
    "nss": _two_phase("nss", TargetDraw(), TopDown()),
    "naive": _two_phase("naive", FirstPath(), TopDown()),
    "naive_tree": _chosen("naive_tree", FirstDraw(), TopDown()),
    "spectr": _two_phase("spectr", OneToken(KSeq()), TopDown()),
    "specinfer": _two_phase("specinfer", WithReplacement(), TopDown()),
    "khisti": _chosen("khisti", Duels(), TopDown()),
    "tournament": _chosen("tournament", BestRanked(), TopDown()),
    "rrsw": _two_phase("rrsw", WithoutReplacement(), TopDown()),
    "block": _two_phase("block", FirstPath(), BottomUp()),
    "traversal": _two_phase("traversal", WithoutReplacement(), BottomUp()),
    "gbv": _chosen("gbv", BestRanked(), BottomUp()),
    "hu": _two_phase("hu", SetPlusSample(), TopDown()),
    "univer": _two_phase("univer", SetPlusSample(), BottomUp()),
    "coupled": Coupled,
}


def create_verifier(name: str) -> Verifier:
    """Return the verifier of that name; raise UnknownVerifierError if there is none."""
    if name not in _REGISTRY:
        raise UnknownVerifierError(f"no verifier is named {name!r}; there are {', '.join(_REGISTRY)}")
    return _REGISTRY[name]()
