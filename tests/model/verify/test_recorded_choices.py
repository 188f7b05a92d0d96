"""Choices that a recorded pass makes itself: the host's texts and verdicts, one read a step, nothing that a graph cannot hold."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.paged.table import PagedBatch, Shape, TableColumns, halves_of
from engine.core.policy import PlainDecoding
from engine.core.tree import Expansion, TokenTree
from engine.core.types import SamplingParams
from engine.engine import Engine
from engine.model.causal_lm import adopt
from engine.model.passes import RecordedPasses
from engine.native import distributions, noise
from engine.sampling import choice_reference, device_choice
from engine.sampling.device_choice import NodeDraws
from engine.testing import tiny_engine, tiny_module
from engine.verify.coupled import noise_keys
from engine.verify.dispatch import Judge, node_draws
from engine.verify.forest import Forest
from engine.verify.verdict import Verdict
from tests.model.attention.test_capturable import Recording, steps_with, target_of
from tests.model.attention.test_recordings import CONFIG, replayed, steps_of
from tests.model.attention.test_static_steps import LIMITS
from tests.model.driving import greedy, run, sampled
from tests.model.kv_cache.test_kv_cache import RandomExpansion
from tests.model.mixed import PROMPTS, mixed_requests
from tests.model.paged import needs_triton, random_tree
from tests.model.passes import CPU
from tests.model.rows import GREEDY, decoding_row
from tests.model.sampling.test_device_choice import KEYS, TEMPERATURES, logits_of
from tests.model.utils.test_host_waits import READS

REQUESTS = [
    *mixed_requests(max_tokens=16),
    sampled("penalties", PROMPTS[1], seed=4, max_tokens=9, frequency_penalty=0.5),
    sampled("nucleus", PROMPTS[2], seed=5, max_tokens=9, top_p=0.7),
]


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a processor for a GPU whose kernels are their reference."""
    monkeypatch.setattr(distributions, "can_read", lambda _: False)
    monkeypatch.setattr(noise, "can_choose", lambda _: False)
    monkeypatch.setattr(device_choice, "can_choose_on", lambda _: True)
    monkeypatch.setattr(device_choice, "chosen", choice_reference.chosen)


def engine_of(policy=None) -> Engine:
    return tiny_engine(adopt(tiny_module(), CPU), adopt(tiny_module(), CPU), policy or RandomExpansion(3), config=CONFIG)


def texts(engine: Engine) -> dict[str, list[int]]:
    return run(engine, REQUESTS).texts()


def test_choices_of_passes_give_equal_texts(request):
    """Rows of every rule together, with prompt chunks beside them; edited rows are chosen for again."""
    expected = texts(engine_of())
    request.getfixturevalue("on_a_device")
    engine = replayed(engine_of())
    assert engine.target.chooses
    assert texts(engine) == expected


def test_oversized_pass_is_chosen_for_afterwards(request):
    expected = texts(engine_of())
    request.getfixturevalue("on_a_device")
    assert texts(replayed(engine_of(), steps_of(most_tokens=4))) == expected


def high_halves_first(numbers):
    return halves_of(numbers)[::-1]


def draws_without_depth(rows, trees):
    draws = dispatch_draws(rows, trees)
    keys = [key for row, tree in zip(rows, trees, strict=True) for key in noise_keys(tree, row.key)[:1] * tree.num_nodes]
    return draws._replace(keys=keys)


dispatch_draws = node_draws


def choices_in_reverse(passes, _, count):
    return device_choice.read(passes._choices_N3[:count].flip(0))


@pytest.mark.parametrize("mutant", ["halves", "depths", "order"])
def test_wrong_draws_change_texts(mutant, on_a_device, monkeypatch):
    """Draws of 64 bits in two columns, of each depth, of each node."""
    from engine import engine as stepping

    expected = texts(replayed(engine_of()))
    if mutant == "halves":
        monkeypatch.setattr(device_choice, "halves_of", high_halves_first)
    elif mutant == "depths":
        monkeypatch.setattr(stepping, "node_draws", draws_without_depth)
    else:
        monkeypatch.setattr(RecordedPasses, "choices", choices_in_reverse)
    found = texts(replayed(engine_of()))
    assert found != expected


def test_choices_of_another_pass_are_not_used(on_a_device):
    """The tensor is overwritten by the next pass: logits that are not the latest have no choices."""
    engine = replayed(engine_of(PlainDecoding()))
    passes: Any = engine.target._passes
    run(engine, [greedy("one", [5, 9, 33], max_tokens=3)])
    assert passes._latest is not None
    assert engine.target.likeliest(torch.zeros(1, engine.info.vocab_size), 1) is None


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_choices_can_be_captured(family, on_a_device):
    """They neither look at numbers nor bring any: temperatures and keys come in the table."""
    recording = Recording()
    target = tiny_engine(target_of(family), None, config=LIMITS).target
    target.record(steps_with(recording)).prepare()
    assert target.chooses
    assert recording.watched.num_operations > 100
    assert recording.watched.seen == []


@pytest.mark.parametrize("kind", ["greedy", "seeded", "both"])
def test_plain_step_reads_once(kind, on_a_device, monkeypatch):
    """One wait a step: the numbers of the choices."""
    requests = {"greedy": [greedy("one", [5, 9, 33])], "seeded": [sampled("two", [7, 8], seed=1, max_tokens=9)]}
    requests["both"] = [*requests["greedy"], *requests["seeded"]]
    engine, reads = tiny_engine(target_of("llama"), None, config=CONFIG), Counter[str]()  # the reference of attention reads
    engine.target.record(steps_of()).prepare()

    def counting(name, original):
        def read(*args, **kwargs):
            reads[name] += 1
            return original(*args, **kwargs)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
    session = run(engine, requests[kind])
    assert reads == {"tolist": len(session.stats)}


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), st.integers(0, 3))
def test_wide_columns_keep_all_bits(numbers, padding):
    """At odd offsets too, which a view of 64 bits could not have."""
    count = len(numbers)
    columns = TableColumns(tokens=(0,), outputs=(0, 0, 0))
    low, high = halves_of(np.array(numbers, dtype=np.int64))
    parts = [np.zeros(padding + count), np.zeros(count), low, high]
    batch = PagedBatch(torch.from_numpy(np.concatenate(parts).astype(np.int32)), Shape(padding + count, count), columns)
    assert batch.wide_outputs(1).tolist() == [numbers]


@needs_triton
@pytest.mark.parametrize("padding", [0, 1, 3])
def test_kernels_choose_by_the_table(padding):
    """By Triton's interpreter; rows of padding, whose columns are zeros, choose their arg max."""
    count = len(KEYS) + padding
    logits_NV, shape = logits_of(count), Shape(count, count)
    parts = [np.zeros(count, dtype=np.int64), *NodeDraws(TEMPERATURES, KEYS).columns(count)]
    columns = TableColumns(tokens=(), outputs=(0,) * len(parts))
    batch = PagedBatch(torch.from_numpy(np.concatenate(parts).astype(np.int32)), shape, columns)
    found = device_choice.read(device_choice.chosen_of_table(logits_NV, batch))
    assert found[: len(KEYS)] == device_choice.choices(logits_NV[: len(KEYS)], TEMPERATURES, KEYS)
    assert [one.token_id for one in found[len(KEYS) :]] == logits_NV[len(KEYS) :].argmax(-1).tolist()


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_device_verdicts_are_the_hosts(seed):
    """On trees of any shape, whose tokens are often the ones that are chosen."""
    rng, vocab_size = random.Random(seed), 6
    kinds = [(GREEDY, "coupled"), (SamplingParams(temperature=0.7), "coupled"), (SamplingParams(), "coupled")]
    rows, trees = [], []
    for index in range(rng.randint(1, 4)):
        sampling, verifier = rng.choice(kinds)
        rows.append(decoding_row((1, 2), Expansion(1, 2, 2), sampling, verifier, seed=rng.randrange(99), request_id=str(index)))
        trees.append(_with_tokens(random_tree(rng, rng.randint(1, 12)), rng, vocab_size))
    forest = Forest(tuple(trees), torch.empty(0, vocab_size), tuple((None,) * tree.num_nodes for tree in trees))
    logits_NV = torch.randn(forest.num_nodes, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    draws = node_draws(rows, trees)
    inverse_N, keys_N = torch.tensor(draws.inverse_temperatures, dtype=torch.float64), torch.tensor(draws.signed_keys)
    made = device_choice.read(choice_reference.chosen(logits_NV, inverse_N, keys_N))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributions, "can_read", lambda _: False)
        expected = Judge().judge(rows, forest, logits_NV)
        patch.setattr(device_choice, "can_choose_on", lambda _: True)
        found = Judge().judge(rows, forest, logits_NV, made)
    paths = [[(one.path, one.extra_id) for one in verdicts if isinstance(one, Verdict)] for verdicts in (found, expected)]
    assert paths[0] == paths[1]
    assert len(paths[0]) == len(rows)


def _with_tokens(tree: TokenTree, rng: random.Random, vocab_size: int) -> TokenTree:
    """Return the tree with other tokens, distinct among siblings."""
    ids = [rng.randrange(vocab_size)] * tree.num_nodes
    for children in tree.children:
        for child, token_id in zip(children, rng.sample(range(vocab_size + 12), len(children)), strict=True):
            ids[child] = token_id
    return TokenTree(tree.parents, tuple(ids), tree.draws)
