"""Trees that a pass of the library follows itself: the verdicts that judging its logits afterwards reaches, in any batch."""

import random

import pytest
import torch

from engine.core.step_plan import Row, StepPlan
from engine.core.tree import PLAIN, Expansion, TokenTree
from engine.core.types import ErrorCode, SamplingParams
from engine.model.causal_lm import adopt
from engine.model.linear_backends import NATIVE
from engine.model.target import Target
from engine.native import library
from engine.native.distributions import KeptTokens
from engine.native.walks import walks
from engine.testing import tiny_module
from engine.verify import dispatch
from engine.verify.coupled import depth_keys
from engine.verify.dispatch import Judge, PassWalks, pass_walks
from engine.verify.forest import Forest
from engine.verify.verdict import Verdict, VerificationFailure
from tests.model.passes import CPU
from tests.model.rows import decoding_row
from tests.needs import needs_library

Judged = list[Verdict | VerificationFailure]

pytestmark = needs_library
V = 12
EDITED, TYPICAL = SamplingParams(logit_bias=((3, 2.0),)), SamplingParams(typical_p=0.7)
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7, top_k=3),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=0.8, top_k=6, top_p=0.9, min_p=0.1),
    SamplingParams(min_p=1.0),
    EDITED,
    TYPICAL,
]


def target_with_ties() -> Target:
    """Return a target that gives every two adjacent tokens the same logit, to the bit."""
    module = tiny_module("qwen2", vocab_size=V, tie_word_embeddings=False)
    with torch.no_grad():
        weight_VD = module.lm_head.weight
        weight_VD[1::2] = weight_VD[::2]
        weight_VD *= 0.5
    return Target(adopt(module, CPU, NATIVE, "float32"), 1 << 12)


def any_tree(rng: random.Random, root_id: int) -> TokenTree:
    """Return a tree of any shape, whose siblings differ; half of the trees are roots."""
    parents, tokens = [-1], [root_id]
    for _ in range(rng.choice([0, 0, rng.randint(1, 14)])):
        parent, token_id = rng.randrange(len(parents)), rng.randrange(V)
        if (parent, token_id) not in zip(parents[1:], tokens[1:]):
            parents.append(parent)
            tokens.append(token_id)
    draws = [tuple(v for v in range(1, len(parents)) if parents[v] == node) for node in range(len(parents))]
    return TokenTree(tuple(parents), tuple(tokens), tuple(draws))


def any_step(rng: random.Random, num_rows: int, samplings=SAMPLINGS) -> tuple[list[Row], Forest]:
    """Return rows of all kinds, and their trees."""
    rows, trees, first_slot = [], [], 0
    for index in range(num_rows):
        text = [rng.randrange(V) for _ in range(rng.randint(1, 5))]
        trees.append(any_tree(rng, text[-1]))
        verifier = "coupled" if rng.random() < 0.8 or trees[-1].num_nodes == 1 else "traversal"
        kind = Expansion(trees[-1].num_nodes - 1, 1, 0)
        row = decoding_row(text, kind, rng.choice(samplings), verifier, rng.getrandbits(63), f"r{index}", first_slot)
        rows.append(row)
        first_slot += len(row.slots)
    probs_RV = torch.full((1, V), 1.0 / V)
    probs_rows = tuple(tuple(0 if tree.draws[node] else None for node in range(tree.num_nodes)) for tree in trees)
    return rows, Forest(tuple(trees), probs_RV, probs_rows)


def both(target: Target, rows: list[Row], forest: Forest) -> tuple[Judged, Judged, PassWalks]:
    """Return the verdicts of the pass and those of the judge alone, and what the pass was given."""
    given = pass_walks(rows, forest)
    logits_NV = target.forward(StepPlan(0, tuple(rows)), forest.trees, walks=given.walks)
    best = target.likeliest(logits_NV, forest.num_nodes)
    return Judge().judge(rows, forest, logits_NV, best, given), Judge().judge(rows, forest, logits_NV), given


def count_of_differences(num_steps: int, num_rows: int) -> int:
    rng, target, found, paths = random.Random(3), target_with_ties(), 0, set()
    for _ in range(num_steps):
        rows, forest = any_step(rng, num_rows)
        of_pass, of_judge, given = both(target, rows, forest)
        known = given.verdicts(rows)
        assert [one is not None for one in known] == [
            row.sampling not in (EDITED, TYPICAL) and (row.sampling.is_greedy or row.verifier == "coupled" or tree.num_nodes == 1)
            for row, tree in zip(rows, forest.trees, strict=True)
        ]
        paths |= {len(one.path) for one in known if one is not None}
        found += sum(one != other for one, other in zip(of_pass, of_judge, strict=True))
    assert max(paths) > 1
    return found


@pytest.mark.parametrize("num_threads", [1, 3])
def test_choices_of_pass_are_the_judge_s(num_threads, monkeypatch):
    """Thousands of rows of all kinds, with ties in all logits."""
    monkeypatch.setattr(library, "num_threads", lambda: num_threads)
    assert count_of_differences(num_steps=60, num_rows=40) == 0


def without_depth(tree, key):
    return depth_keys(tree, key)[:1] * 40


def without_truncation(_):
    return KeptTokens()


@pytest.mark.parametrize(("name", "mutant"), [("depth_keys", without_depth), ("truncation", without_truncation)])
def test_comparison_detects_wrong_draws(name, mutant, monkeypatch):
    """The judge's own choices use these functions for other rows, so only those of passes are broken."""
    own = pass_walks

    def broken(rows, forest):
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, name, mutant)
            return own(rows, forest)

    monkeypatch.setitem(globals(), "pass_walks", broken)
    assert count_of_differences(num_steps=6, num_rows=40) > 0


def test_last_of_equal_logits_is_another_choice():
    """The ties matter: greedy rows would differ."""
    target, rng = target_with_ties(), random.Random(1)
    rows, forest = any_step(rng, 20, SAMPLINGS[:1])
    logits_NV = target.forward(StepPlan(0, tuple(rows)), forest.trees)
    tops = logits_NV.max(-1, keepdim=True).values
    assert ((logits_NV == tops).sum(-1) == 2).all()


def test_wide_rows_are_drawn_alike():
    """A vocabulary of several registers and an odd rest, over many keys."""
    rng, width = random.Random(8), 5003
    target = Target(adopt(tiny_module("llama", vocab_size=width), CPU, NATIVE, "float32"), 1 << 10)
    for _ in range(20):
        drawn = [(rng.randrange(width), rng.choice(SAMPLINGS[:7]), rng.getrandbits(63)) for _ in range(30)]
        rows = [decoding_row((root,), PLAIN, one, "coupled", seed, str(i), i) for i, (root, one, seed) in enumerate(drawn)]
        trees = tuple(TokenTree.single(root) for root, _, _ in drawn)
        of_pass, of_judge, _ = both(target, rows, Forest(trees, torch.empty(0, width), ((None,),) * 30))
        assert of_pass == of_judge


def test_infinite_logits_fail_their_tree_alone():
    """The embedding of one token is NaN: each tree that contains the token fails, as by the judge alone."""
    target, rng = target_with_ties(), random.Random(5)
    assert target.model.native is not None
    target.model.native.parts.embeddings_VD[7] = float("nan")
    rows, forest = any_step(rng, 60, SAMPLINGS[:7])
    of_pass, of_judge, given = both(target, rows, forest)
    assert of_pass == of_judge
    failed = [isinstance(one, VerificationFailure) and one.code is ErrorCode.LOGITS_NOT_FINITE for one in of_pass]
    assert failed == [7 in (*row.certain_ids, *tree.token_ids) for row, tree in zip(rows, forest.trees, strict=True)]
    assert 0 < sum(failed) < 60
    assert [one is None for one in given.walks.paths()] == [failed[index] for index in given.indices]


def test_paths_of_other_logits_are_not_used():
    """The bug: verdicts of a pass were used for logits that had been replaced after it."""
    rng, target = random.Random(9), target_with_ties()
    rows, forest = any_step(rng, 8, SAMPLINGS[:1])
    given = pass_walks(rows, forest)
    logits_NV = target.forward(StepPlan(0, tuple(rows)), forest.trees, walks=given.walks)
    assert target.followed(logits_NV)
    other_NV = logits_NV.clone()
    assert target.likeliest(other_NV, forest.num_nodes) is None
    assert not target.followed(other_NV)


def test_temperature_of_zero_takes_likeliest_tokens():
    """Also without a pass."""
    logits_NV = torch.randn(4, 100, generator=torch.Generator().manual_seed(3))
    trees = [TokenTree.single(0)] * 4
    found = walks(logits_NV, trees, range(4), [0.0] * 4, [()] * 4)
    assert [one.extra_id for one in found if one is not None] == logits_NV.argmax(-1).tolist()
