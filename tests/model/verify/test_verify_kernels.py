"""How often a judgement calls on the device: kernels by depth and sibling rank, never by tree, and two waits for their numbers.

A kernel costs microseconds whatever its size, and a wait more: with small trees they are what verification costs.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.core.rng_keys import StepKey
from engine.core.tree import Expansion
from engine.verify.forest import Forest
from engine.verify.node_plans import AcceptanceSplit, NodeFamilies, WithoutReplacement
from engine.verify.two_phase import TwoPhase
from tests.enumeration import Batch, TinyModel, batch_of, delayed_trees
from tests.model.verify.rules_under_test import RULES, TRAVERSAL

MOVES_NOTHING = ("view", "slice", "select", "unsqueeze", "split", "detach", "alias", "expand", "t.", "_unsafe")
MOST_OF_A_CHAIN = 75  # of a chain of two drafted tokens; there were three times as many


class Kernels(TorchDispatchMode):
    """Counts the calls that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.num: int = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += not func.__name__.startswith(MOVES_NOTHING)
        return func(*args, **(kwargs or {}))


def one_tree(shape: Expansion) -> Batch:
    model = TinyModel(4, seed=3)
    return batch_of(model, [max(delayed_trees(model, shape), key=lambda drawn: drawn.tree.num_nodes)], torch.float32)


def judge(rule: TwoPhase, batch: Batch, count: int) -> None:
    """Judge `count` copies of the batch's tree; eight keys come round, so that paths end where they do in eight of them."""
    forest = batch.forest
    copies = Forest(forest.trees * count, forest.draft_probs_RV, forest.probs_rows * count)
    rule.judge(copies, batch.target_probs_NV.repeat(count, 1), [StepKey(b % 8, 5) for b in range(count)])


def kernels_of(rule: TwoPhase, batch: Batch, count: int) -> int:
    kernels = Kernels()
    with kernels:
        judge(rule, batch, count)
    return kernels.num


CHAIN, BRANCHES = Expansion(2, 1, 0), Expansion(0, 3, 2)


@pytest.mark.parametrize("shape", [Expansion(0, 1, 0), CHAIN, BRANCHES], ids=str)
@pytest.mark.parametrize("name", ["traversal", "specinfer", "naive", "nss", "tournament"])
def test_kernels_do_not_grow_with_the_trees(name: str, shape: Expansion) -> None:
    batch = one_tree(shape)
    assert kernels_of(RULES[name], batch, 8) == kernels_of(RULES[name], batch, 64)


def test_levels_of_few_nodes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.verify.layout._CPU_ENTRIES", 4 * 8)  # eight rows
    with pytest.raises(AssertionError):
        test_kernels_do_not_grow_with_the_trees("traversal", CHAIN)


def test_two_node_chain_needs_few_kernels() -> None:
    assert kernels_of(TRAVERSAL, one_tree(CHAIN), 1) <= MOST_OF_A_CHAIN


def waits_of(judging: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often numbers of tensors are read on the host."""
    waits: list[Tensor] = []
    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
            patch.setattr(Tensor, name, _noted(getattr(Tensor, name), waits))
        judging()
    return len(waits)


def _noted(method: Callable[..., object], waits: list[Tensor]) -> Callable[..., object]:
    def noted(self: Tensor, *args: object, **options: object) -> object:
        waits.append(self)
        return method(self, *args, **options)

    return noted


@pytest.mark.parametrize("name", ["traversal", "specinfer", "naive", "nss", "tournament"])
def test_the_host_waits_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the odds of path ends, including invalid distributions, and for the extra tokens."""
    batch = one_tree(BRANCHES)
    assert waits_of(lambda: judge(RULES[name], batch, 6), monkeypatch) == 2


def test_a_look_at_each_level_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, split = one_tree(BRANCHES), WithoutReplacement.split

    def looking(plan: WithoutReplacement, families: NodeFamilies) -> AcceptanceSplit:
        found = split(plan, families)
        found.final_M.max().item()
        return found

    monkeypatch.setattr(WithoutReplacement, "split", looking)
    assert waits_of(lambda: judge(TRAVERSAL, batch, 6), monkeypatch) > 2
