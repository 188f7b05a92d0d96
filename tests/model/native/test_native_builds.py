"""One library for several sets of instructions: the best that is there is loaded, and all of them compute the same bits."""

import pytest
import torch

from engine.core.tree import TokenTree
from engine.native import distributions as probs
from engine.native import library, mixture, noise, walks
from tests.model.attention.test_attention import long_scene, ragged_scene
from tests.model.native.test_native_adapters import BATCH, ODD, adapted, logits
from tests.model.native.test_native_linear import layer, rows
from tests.model.native_models import PRECISIONS, native
from tests.model.passes import node_logits

BUILDS = [name for name in library.supported() if library.is_compiled(name)]
several = pytest.mark.skipif(len(BUILDS) < 2, reason="needs a processor that runs two of the libraries")
LOGITS = torch.randn(5, 1003, generator=torch.Generator().manual_seed(7)) * 4.0


@pytest.mark.parametrize(
    ("supported", "compiled", "best"),
    [
        (["AVX-512 VNNI", "AVX2"], ["AVX-512 VNNI", "AVX2"], "AVX-512 VNNI"),
        (["AVX-512 VNNI", "AVX2"], ["AVX2"], "AVX2"),
        (["AVX2"], ["AVX-512 VNNI", "AVX2"], "AVX2"),
        (["AVX-512 VNNI", "AVX2"], [], None),
        ([], ["AVX-512 VNNI", "AVX2"], None),
    ],
)
def test_the_best_that_is_there_is_loaded(monkeypatch, supported, compiled, best):
    sets = {name: lambda name=name: name in supported for name in library.INSTRUCTION_SETS}
    monkeypatch.setattr(library, "INSTRUCTION_SETS", sets)
    monkeypatch.setattr(library, "is_compiled", compiled.__contains__)
    monkeypatch.setattr(library, "instruction_set", library.instruction_set.__wrapped__)  # not what was found for this processor
    assert library.instruction_set() == best
    assert library.is_available() == (best is not None)
    if best is None:
        with pytest.raises(OSError, match="not compiled, or not for this processor"):
            library.library()


def of_each_build(monkeypatch, compute):
    """Return what a function computes by each of the libraries."""
    found = []
    for build in BUILDS:
        monkeypatch.setattr(library, "library", lambda build=build: library.compiled_for(build))
        found.append(compute())
    return found


@several
@pytest.mark.parametrize("precision", PRECISIONS)
def test_layers_are_the_same(monkeypatch, precision):
    for num_rows in (1, 2, 3, 4, 5, 6, 16, 97):
        x = rows(num_rows, 1100)
        one, other = of_each_build(monkeypatch, lambda x=x: layer(precision, 1100, 70)[1](x))
        assert torch.equal(one, other), num_rows


@several
@pytest.mark.parametrize("scene", [ragged_scene, long_scene])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_passes_are_the_same(monkeypatch, precision, scene):
    one, other = of_each_build(monkeypatch, lambda: torch.cat(node_logits(native("gemma3", precision), scene())))
    assert torch.equal(one, other)


@several
@pytest.mark.parametrize("precision", PRECISIONS)
def test_passes_with_adapters_are_the_same(monkeypatch, precision):
    one, other = of_each_build(monkeypatch, lambda: torch.cat(logits(adapted("qwen3", precision, **ODD), BATCH)))
    assert torch.equal(one, other)


@several
def test_distributions_noise_and_rankings_are_the_same(monkeypatch):
    temperatures, keys = [0.3, 0.7, 1.0, 1.5, 2.0], [3, 1 << 63, 5, 7, 11]
    sharpness = [1.0, 2.5, 8.0, 0.25, 1.4]
    kept = [
        probs.KeptTokens(),
        probs.KeptTokens(7),
        probs.KeptTokens(0, 0.8),
        probs.KeptTokens(0, 1, 0.1),
        probs.KeptTokens(50, 0.9, 0.01),
    ]
    one, other = of_each_build(monkeypatch, lambda: probs.probs(LOGITS, range(5), temperatures, kept))
    assert torch.equal(one, other)
    assert len({tuple(found) for found in of_each_build(monkeypatch, lambda: probs.likeliest(LOGITS))}) == 1
    first, second = of_each_build(monkeypatch, lambda: noise.gumbels(keys, 1003))
    assert torch.equal(first, second)
    chosen = of_each_build(monkeypatch, lambda: [token for _, token in noise.choices(one, range(5), keys)])
    assert chosen[0] == chosen[1]
    for keys_or_none in (keys, None):
        given = (LOGITS, temperatures, sharpness, 9, keys_or_none, None, kept)
        ranked = of_each_build(monkeypatch, lambda given=given: noise.rankings(*given))
        assert ranked[0] == ranked[1]


@several
def test_mixtures_and_walks_are_the_same(monkeypatch):
    cached = [
        mixture.Predicted((3, 5, 1003), (0.5, 0.25, 0.25), 0.7),
        mixture.Predicted((), (), 0.0),
        mixture.Predicted((9,), (1.0,), 0.1),
    ]
    (one, first), (other, second) = of_each_build(monkeypatch, lambda: mixture.mixed(LOGITS, [4, 0, None], cached, 1004))
    assert torch.equal(one, other)
    assert first == second
    trees = [TokenTree((-1, 0, 0), (1, 2, 3), ((1, 2), (), ())), TokenTree((-1, 0), (1, 7), ((1,), ()))]
    kept, keys = [probs.KeptTokens(0, 0.9), probs.KeptTokens(5)], [[3, 1 << 63], [5, 7]]
    walked = of_each_build(monkeypatch, lambda: walks.walks(LOGITS, trees, range(5), [0.7, 1.0], keys, kept))
    assert walked[0] == walked[1]
