"""The shares of chances that come true: of a model's tokens and of cached ones, by chance, each learnt from its own."""

import random
import re
from pathlib import Path

import pytest

from engine import native
from engine.draft.trees.calibration import Reliability
from engine.native.library import NUM_SHARES

RIGHT = {False: 1.2, True: 0.5}  # times as often as their chances predict: a model's tokens, and cached ones


def taught(kind: type[Reliability] = Reliability) -> Reliability:
    found, seed = kind(), random.Random(0)
    for _ in range(20_000):
        chance, is_cached = seed.uniform(0.01, 0.8), seed.random() < 0.3
        found.observe(chance, is_cached, seed.random() < chance * RIGHT[is_cached])
    return found


def check(found: Reliability) -> None:
    for is_cached, right in RIGHT.items():
        for chance in (0.15, 0.3, 0.6):
            assert found.corrected(chance, is_cached) == pytest.approx(chance * right, rel=0.2)


def test_each_source_is_corrected_separately():
    check(taught())


class OneForAll(Reliability):
    def observe(self, chance, is_cached, is_accepted):
        super().observe(chance, False, is_accepted)
        super().observe(chance, True, is_accepted)


class Stubborn(Reliability):
    def observe(self, chance, is_cached, is_accepted):
        pass


@pytest.mark.parametrize("mutant", [OneForAll, Stubborn])
def test_correction_kills(mutant):
    with pytest.raises(AssertionError):
        check(taught(mutant))


def test_corrected_chance_is_at_most_one():
    found = Reliability()
    for _ in range(500):
        found.observe(0.9, False, is_accepted=True)
    assert found.corrected(0.91, False) == 1.0
    assert found.corrected(0.5, False) == 0.5
    assert found.corrected(0.91, True) == pytest.approx(0.75 * 0.91)


def test_shares_determine_corrections():
    found = taught()
    for is_cached in (False, True):
        for place, edge in enumerate(found.EDGES):
            assert found.corrected(edge, is_cached) == pytest.approx(min(1.0, edge * found.shares[is_cached][place + 1]))
            assert found.corrected(edge - 1e-9, is_cached) == pytest.approx(min(1.0, edge * found.shares[is_cached][place]))


def test_old_chances_are_forgotten():
    found = taught()
    for _ in range(20_000):
        found.observe(0.3, True, is_accepted=False)
    assert found.corrected(0.3, True) < 0.01


def test_the_library_has_the_same_edges():
    header = (Path(native.__file__).parent / "cpp" / "ranked_tree.h").read_text()
    (numbers,) = re.findall(r"kShareEdges\[.*\] = \{(.*)\}", header)
    assert tuple(float(number) for number in numbers.split(",")) == Reliability.EDGES
    assert len(Reliability.EDGES) + 1 == NUM_SHARES
