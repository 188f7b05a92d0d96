"""Networks of checkpoints against the logits of speculators' own classes, layer by layer, round by round."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention.packing import pack
from engine.attention.segments import chain_segment
from engine.attention.tree_attention import GatheredAttention
from engine.draft.checkpoints import decoder_layer, eagle3, read
from engine.draft.checkpoints.decoder_layer import CheckpointLayer
from engine.draft.checkpoints.dflash import Anchor, DFlashNetwork
from engine.draft.checkpoints.eagle3 import Eagle3Network
from engine.draft.checkpoints.read import Checkpoint, read_checkpoint
from engine.draft.checkpoints.shapes import DFlashShape, Eagle3Shape
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel, adopt
from engine.model.linear_backends import NATIVE
from engine.testing import tiny_module
from engine.utils.host_transfer import integers
from engine.weights.facts import ModelFacts
from tests.model.checkpoints import Book, stored
from tests.model.passes import CPU
from tests.needs import needs_library

MADE = Path(__file__).parents[2] / "conformance" / "speculators"
EAGLE3 = ("eagle3-plain", "eagle3-normed", "eagle3-each-normed", "eagle3-two-layers", "eagle3-sliding")
DFLASH = ("dflash-full", "dflash-sliding", "dflash-not-causal")
TARGET = ModelFacts(vocab_size=37, width=16, num_layers=3, max_positions=None, eos_token_ids=())
EXACT, WRONG = 5e-5, 1e-2  # of logits of size 1 to 5
LINEARS = ["plain", pytest.param(NATIVE, marks=needs_library)]


def made(name: str) -> tuple[Checkpoint, dict[str, Tensor]]:
    return read_checkpoint(MADE / name, TARGET), load_file(MADE / name / "expected.safetensors")


@cache
def target_module() -> PreTrainedModel:
    return tiny_module("llama", vocab_size=37, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)


def target_of(expected: dict[str, Tensor]) -> CausalModel:
    """Return a target with these embeddings and this output layer, if they are given."""
    model = adopt(target_module(), CPU)
    for name, module in (("embeddings", model.module.get_input_embeddings()), ("output", model.module.get_output_embeddings())):
        if name in expected and expected[name].shape == module.weight.shape:
            module.weight.data.copy_(expected[name])
    return model


class LayerOutputs:
    """Keeps what each layer returned in the latest pass."""

    def __init__(self, network: Any) -> None:
        self.latest: dict[int, Tensor] = {}
        for index, layer in enumerate(network.layers):
            layer.after_attention = self._kept(index, layer.after_attention)

    def _kept(self, index: int, after: Any) -> Any:
        def kept(*args: Tensor) -> Tensor:
            self.latest[index] = after(*args)
            return self.latest[index]

        return kept


class Chain:
    """An EAGLE-3 network at work on one text."""

    def __init__(self, checkpoint: Checkpoint, expected: dict[str, Tensor], linears: str) -> None:
        assert isinstance(checkpoint.shape, Eagle3Shape)
        self.network = Eagle3Network(checkpoint.files, checkpoint.shape, target_of(expected), linears, "float32")
        self.outputs = LayerOutputs(self.network)
        self._cache = KVCache(64, CPU)

    def fed(self, states_TW: Tensor, ids: list[int], first: int) -> tuple[Tensor, Tensor]:
        batch = pack([chain_segment(ids, first, [*range(40)])], CPU)
        context = GatheredAttention(batch, self._cache)
        rotation = self.network.rotation(batch.position_ids_1T[0], batch.end)
        found: tuple[Tensor, Tensor] = self.network(states_TW, batch.input_ids_1T[0], rotation, None, context, context)
        return found


@torch.inference_mode()
def eagle3_error(name: str, linears: str = "plain") -> float:
    """Return the largest difference of any round's logits and layers, over all positions."""
    checkpoint, expected = made(name)
    chain, errors = Chain(checkpoint, expected, linears), []
    ids, num_layers, window = expected["ids"].tolist(), len(chain.network.layers), chain.network.shape.layers.windows[0]
    features = chain.network.features([*expected["states"].unbind(1)])
    for length in range(1, len(ids) - 1):
        logits, states = chain.fed(features[:length], ids[:length], 0)
        state = states[-1:]
        errors.append((logits - expected["logits.0"][:length]).abs().max())
        for step in (1, 2):
            if length + step > min(len(ids), window or len(ids)):
                break  # the trainer's window stays at the first round's position, the engines' moves on
            logits, state = chain.fed(state, ids[length + step - 1 : length + step], length + step - 1)
            errors.append((logits[0] - expected[f"logits.{step}"][length - 1]).abs().max())
            for layer in range(num_layers):
                own = chain.outputs.latest[layer][0]
                errors.append((own - expected[f"layers.{layer}.{step}"][length - 1]).abs().max())
    return float(torch.stack(errors).max())


@torch.inference_mode()
def dflash_error(name: str, linears: str = "plain") -> float:
    """Return the largest difference of the logits and layers of any slot that predicts."""
    checkpoint, expected = made(name)
    shape = checkpoint.shape
    assert isinstance(shape, DFlashShape)
    network = DFlashNetwork(checkpoint.files, shape, target_of(expected), linears, "float32", 64, None)
    outputs = LayerOutputs(network)
    slots = [*range(20, 32)]
    network.cache_context(network.features([*expected["states"].unbind(1)]), slots, range(len(slots)))
    anchors = [Anchor(int(expected["ids"][place]), place, slots) for place in expected["anchors"].tolist()]
    first = 0 if shape.starts_at_anchor else 1
    errors = [(network.level_logits(anchors, shape.num_levels) - expected["logits"][:, first:]).abs().max()]
    for layer in range(2):
        errors.append((outputs.latest[layer].view_as(expected[f"layers.{layer}"]) - expected[f"layers.{layer}"]).abs().max())
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("linears", LINEARS)
@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_logits_equal_speculators(name, linears):
    """True features, then two rounds of the head's own states: norms, residual, windows, two layers, both model types."""
    assert eagle3_error(name, linears) < EXACT


@torch.inference_mode()
def test_eagle3_logits_equal_specforge():
    """A flat configuration, `midlayer`, and layers numbered by their outputs."""
    checkpoint, expected = made("specforge-eagle3")
    assert isinstance(checkpoint.shape, Eagle3Shape)
    assert checkpoint.shape.after == (1, 2, 3)
    assert not checkpoint.warnings
    chain = Chain(checkpoint, expected, "plain")
    features = chain.network.features([*expected["states"].unbind(1)])
    logits, _ = chain.fed(features, expected["ids"].tolist(), 0)
    assert float((logits - expected["logits.0"]).abs().max()) < EXACT


@pytest.mark.parametrize("linears", LINEARS)
@pytest.mark.parametrize("name", DFLASH)
def test_dflash_logits_equal_speculators(name, linears):
    """Blocks at two anchors: full and sliding layers, causal and not, with the anchor's own prediction."""
    assert dflash_error(name, linears) < EXACT


@torch.inference_mode()
def book_error(name: str) -> float:
    """Return how far the plain functions of tests/model/checkpoints.py are from speculators."""
    book, expected = Book(*stored(MADE / name)), load_file(MADE / name / "expected.safetensors")
    fused = book.fused(expected["states"])
    if name in EAGLE3:
        embeddings = book.tensors["embed_tokens.weight"][expected["ids"]]
        return float((book.eagle3(fused, embeddings)[0] - expected["logits.0"]).abs().max())
    output = book.tensors.get("lm_head.weight", expected["output"])
    errors = []
    for block, anchor in enumerate(expected["anchors"].tolist()):
        ids = torch.tensor([int(expected["ids"][anchor]), *[book.config["mask_token_id"]] * 3])
        errors.append((book.dflash(fused[:anchor], expected["embeddings"][ids], output) - expected["logits"][block]).abs().max())
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("name", [*EAGLE3, *DFLASH])
def test_reference_functions_equal_speculators(name):
    assert book_error(name) < EXACT


def hidden_first(network, index, layer, states_TW, ids_T):
    x, residual = READ(network, index, layer, states_TW, ids_T)
    return (x if index else torch.cat([*reversed(x.chunk(2, -1))], -1)), residual


def normed_without_weight(files, name, eps):
    norm = STORED_NORM(files, name, eps)
    if name.endswith(("hidden_norm", "input_norm", "fc_norm.1")):
        norm.weight.data.fill_(1.0)
    return norm


def key_where_it_differs(key):
    def other(config):
        return not config.get(key, bool, False)

    return other


READ, STORED_NORM = Eagle3Network._read, decoder_layer.stored_norm


@pytest.mark.parametrize(
    ("where", "name", "mutant", "checkpoints"),
    [
        (Eagle3Network, "_read", hidden_first, EAGLE3),
        (eagle3, "stored_norm", normed_without_weight, EAGLE3),
        (read, "_is_residual_normed", key_where_it_differs("norm_before_residual"), EAGLE3),
        (read, "_feeds_normed", key_where_it_differs("norm_output"), EAGLE3),
        (CheckpointLayer, "window", None, EAGLE3[-1:]),
        (read, "_causal_layers", lambda config, flash, windows: (True,) * len(windows), DFLASH),
        (read, "_causal_layers", lambda config, flash, windows: (False,) * len(windows), DFLASH[1:2]),
    ],
)
def test_speculators_logits_detect_mutants(where, name, mutant, checkpoints, monkeypatch):
    """Each is a reading of the keys that another engine has, or had."""
    if mutant is None:
        monkeypatch.setattr(where, name, property(lambda _: None, lambda *_: None), raising=False)
    else:
        monkeypatch.setattr(where, name, mutant)
    for checkpoint in checkpoints:
        error = eagle3_error(checkpoint) if checkpoint in EAGLE3 else dflash_error(checkpoint)
        assert error > WRONG, checkpoint


@torch.inference_mode()
def test_speculators_window_ends_at_each_slot():
    """speculators counts a window from the anchor, the engines from each query: the last slots see less context."""
    checkpoint, expected = made("dflash-sliding")
    shape, slots = checkpoint.shape, [*range(12)]
    assert isinstance(shape, DFlashShape)
    found = []
    for is_flat in (False, True):
        other = DFlashShape(**{**vars(shape), "windows_from_anchor": not is_flat})
        network = DFlashNetwork(checkpoint.files, other, target_of(expected), "plain", "float32", 64, None)
        segment = network._segment(0, Anchor(5, 8, slots), is_causal=True, window=4)
        context = segment.tail_visible_TW[:, :-4].sum(1).tolist()
        found.append(context)
        assert integers(segment.key_slots, CPU).tolist() == [4, 5, 6, 7, 64, 65, 66, 67]
    assert found == [[4, 4, 4, 4], [3, 2, 1, 0]]
