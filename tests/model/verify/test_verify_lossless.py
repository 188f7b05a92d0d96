"""Losslessness by enumeration: every tree, every outcome, float64. The mutants that must break it: test_verify_mutants.py."""

import pytest

from engine.core.tree import Expansion, TreeKind, parse_expansion
from engine.core.verifier_table import is_exact
from tests.enumeration import (
    DrawnTree,
    Shape,
    TinyModel,
    beam_trees,
    delayed_trees,
    distinct_trees,
    heap_trees,
    set_and_sample_trees,
    shaped_trees,
)
from tests.model.verify.rules_under_test import EXACT, ON_DELAYED, RULES, loss_of

EXPANSIONS = ["0.1.0", "1.1.0", "3.1.0", "0.2.1", "0.3.1", "0.4.1", "0.2.2", "0.2.3", "0.3.2", "1.2.1", "1.2.2", "1.3.1", "2.2.1"]
FLAVOURS = ["generic", "sparse", "equal", "peaked"]


def expansion(text: str) -> Expansion:
    return parse_expansion(text)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("shape", EXPANSIONS)
def test_rules_keep_distribution_on_delayed_trees(shape: str, flavour: str) -> None:
    model = TinyModel(3, seed=len(shape) + 17, flavour=flavour)
    trees = delayed_trees(model, expansion(shape))
    assert sum(drawn.probability for drawn in trees) == pytest.approx(1.0, abs=EXACT)
    for rule in ON_DELAYED.values():
        assert loss_of(rule, model, trees) < EXACT, rule.name


@pytest.mark.parametrize("shape", ["0.3.1", "0.2.2", "1.3.1"])
def test_rules_keep_distribution_over_four_tokens(shape: str) -> None:
    model = TinyModel(4, seed=5)
    for rule in ON_DELAYED.values():
        assert loss_of(rule, model, delayed_trees(model, expansion(shape))) < EXACT, rule.name


def trees_of(kind: TreeKind, model: TinyModel) -> list[list[DrawnTree]]:
    """Return a few ways to grow trees of a kind."""
    return {
        TreeKind.PATH: [delayed_trees(model, Expansion(3, 1, 0))],
        TreeKind.IID: [delayed_trees(model, Expansion(0, 3, 1)), delayed_trees(model, Expansion(1, 2, 2))],
        TreeKind.WITHOUT_REPLACEMENT: [heap_trees(model, 2), heap_trees(model, 3)],
        TreeKind.FIXED_DISTINCT: [
            *(distinct_trees(model, widths) for widths in [(2, 2), (3, 1), (1, 2, 1)]),  # static, and delayed with a trunk
            *(shaped_trees(model, shape) for shape in [(((),), ()), ((), ((), ())), (((), ()), ((),), ())]),
        ],
        TreeKind.SET_PLUS_SAMPLE: [set_and_sample_trees(model, sizes) for sizes in [(1,), (2,), (1, 1), (0, 1, 1)]],
        TreeKind.DETERMINISTIC: [beam_trees(model, 2, 2)],
    }[kind]


@pytest.mark.parametrize("kind", [kind for kind in TreeKind if kind is not TreeKind.SHARED_NOISE])
@pytest.mark.parametrize("name", RULES)
def test_exact_pairs_table_equals_enumeration(name: str, kind: TreeKind) -> None:
    """Both ways: an admitted pair loses nothing, a refused one is lossy (each refused pair is its own mutant)."""
    losses = [loss_of(RULES[name], model, trees) for model in map(_generic, range(3)) for trees in trees_of(kind, model)]
    if is_exact(kind, name):
        assert max(losses) < EXACT
    else:
        assert max(losses) > 1e-3


def _generic(seed: int) -> TinyModel:
    return TinyModel(3, seed)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("kind", [TreeKind.WITHOUT_REPLACEMENT, TreeKind.FIXED_DISTINCT, TreeKind.SET_PLUS_SAMPLE])
def test_distributions_with_zeros_and_peaks_change_nothing(kind: TreeKind, flavour: str) -> None:
    model = TinyModel(3, seed=2, flavour=flavour)
    for trees in trees_of(kind, model):
        for name, rule in RULES.items():
            assert not is_exact(kind, name) or loss_of(rule, model, trees) < EXACT, name


@pytest.mark.parametrize("sizes", [(1,), (2,), (1, 1)])
def test_set_plus_sample_keeps_four_token_distribution(sizes: tuple[int, ...]) -> None:
    model = TinyModel(4, seed=5)
    for name in ("hu", "univer"):
        assert loss_of(RULES[name], model, set_and_sample_trees(model, sizes)) < EXACT


FIXED_SHAPES: list[Shape] = [((), ()), ((), (), ()), (((),), ()), ((), ((),)), (((), ()),), (((), ()), ((), ()))]


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(("vocab_size", "shape"), [*((3, shape) for shape in FIXED_SHAPES), (4, ((), (), ())), (4, ((), ((),)))])
@pytest.mark.parametrize("name", ["hu", "univer"])
def test_set_rules_are_exact_on_fixed_widths(name: str, vocab_size: int, shape: Shape, flavour: str) -> None:
    """Such pairs were refused: given the others, the last of a fixed number of draws is a draw off them."""
    model = TinyModel(vocab_size, seed=len(shape), flavour=flavour)
    assert loss_of(RULES[name], model, shaped_trees(model, shape)) < EXACT


def last_only_where_likely(model: TinyModel) -> list[DrawnTree]:
    """The mutant: a third sibling is drawn where the second one was unlikely, so that tokens decide the width."""
    is_wide = [odds < 0.3 for odds in model.draft(())]
    narrow, wide = distinct_trees(model, (2,)), distinct_trees(model, (3,))
    return [
        drawn for trees, width in ((narrow, False), (wide, True)) for drawn in trees if is_wide[drawn.tree.token_ids[2]] == width
    ]


@pytest.mark.parametrize("name", ["hu", "univer"])
def test_widths_that_tokens_decide_are_noticed(name: str) -> None:
    losses = [
        loss_of(RULES[name], model, trees)
        for model in (TinyModel(4, seed) for seed in range(2))
        for trees in (last_only_where_likely(model), heap_trees(model, 3))
    ]
    assert min(losses) > 1e-3
    assert not is_exact(TreeKind.WITHOUT_REPLACEMENT, name)
