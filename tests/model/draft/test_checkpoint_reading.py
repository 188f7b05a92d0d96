"""Checkpoints on disk: the spellings of one network read the same, and what cannot be honoured is refused in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import server.cli.main
from engine.build import BadConfiguration, build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.step_plan import Feeding
from engine.draft.checkpoints.files import UnusableCheckpoint
from engine.draft.checkpoints.read import Checkpoint, read_checkpoint
from engine.draft.checkpoints.shapes import DFlashShape, Eagle3Shape, MedusaShape
from engine.draft.compatibility import compare_checkpoint
from engine.memory_plan import memory_need
from engine.weights.facts import ModelFacts
from tests.model.checkpoints import (
    FACTS,
    KEPT,
    VOCAB,
    WIDTH,
    dflash_files,
    eagle3_files,
    flat_dflash_files,
    flat_eagle3_files,
    medusa_files,
    written,
)
from tests.model.folders import model_folder
from tests.model.passes import CPU

Config = dict[str, Any]
Tensors = dict[str, Tensor]
LIMITS = SchedulerConfig(num_slots=300, max_model_len=128)
MADE = {
    "eagle3": eagle3_files,
    "flat eagle3": flat_eagle3_files,
    "dflash": dflash_files,
    "flat dflash": flat_dflash_files,
    "medusa": medusa_files,
    "causal dflash": lambda: flat_dflash_files(causal=False),
    "reduced dflash": lambda: dflash_files(is_reduced=True),
    "vllm medusa": lambda: medusa_files(is_original=False),
}


def read(folder: Path, files: tuple[Config, Tensors], target: ModelFacts = FACTS) -> Checkpoint:
    return read_checkpoint(written(folder, files), target)


def test_two_spellings_of_eagle3_are_one_network(tmp_path):
    """SpecForge numbers layers by their outputs and names the layer midlayer; speculators numbers them by their inputs."""
    first, second = read(tmp_path / "a", eagle3_files()), read(tmp_path / "b", flat_eagle3_files())
    assert first.shape == second.shape
    assert isinstance(first.shape, Eagle3Shape)
    assert first.shape.after == (1, 2, 3)
    assert first.shape.vocab.ids == tuple(KEPT)
    assert {name: first.files.tensor(name).tolist() for name in first.files.shapes} == {
        name: second.files.tensor(name).tolist() for name in second.files.shapes
    }


def test_two_spellings_of_dflash_are_one_network(tmp_path):
    """They differ in their windows alone: speculators counts from the anchor, the authors from each slot."""
    first, second = read(tmp_path / "a", dflash_files()).shape, read(tmp_path / "b", flat_dflash_files()).shape
    assert isinstance(first, DFlashShape)
    assert isinstance(second, DFlashShape)
    assert (first.after, second.after) == ((1, 2, 3), (1, 2, 3))
    assert {**vars(first), "windows_from_anchor": False} == vars(second)


def test_two_spellings_of_medusa_are_one_network(tmp_path):
    first, second = read(tmp_path / "a", medusa_files()).shape, read(tmp_path / "b", medusa_files(is_original=False)).shape
    assert isinstance(first, MedusaShape)
    assert isinstance(second, MedusaShape)
    assert (first.num_heads, first.num_layers, first.has_biases) == (3, 1, True)
    assert (second.num_heads, second.num_layers, second.has_biases) == (3, 1, False)


def test_layers_are_read_ascending_without_repeats(tmp_path):
    shape = read(tmp_path, eagle3_files(ids=(3, 1, 3))).shape
    assert isinstance(shape, Eagle3Shape)
    assert shape.after == (1, 3)


def test_missing_layers_are_the_common_default(tmp_path):
    deep = ModelFacts(VOCAB, WIDTH, 36, 512, (2,))
    shape = read(tmp_path, eagle3_files(eagle_aux_hidden_state_layer_ids=None), deep).shape
    assert isinstance(shape, Eagle3Shape)
    assert shape.after == (2, 18, 33)


def test_a_rotation_may_be_spelt_twice(tmp_path):
    """SpecForge writes rope_theta, rope_scaling and rope_parameters of the same rotation."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 64}
    keys = {"rope_theta": 500.0, "rope_scaling": llama3, "rope_parameters": {**llama3, "rope_theta": 500.0}}
    shape = read(tmp_path, flat_eagle3_files(**keys)).shape
    assert isinstance(shape, Eagle3Shape)
    table = shape.layers.rotary.table(torch.arange(200))
    plain = read(tmp_path / "plain", flat_eagle3_files()).shape.layers.rotary.table(torch.arange(200))  # type: ignore[union-attr]
    assert torch.equal(table[:, :1], plain[:, :1])
    assert not torch.allclose(table, plain)


def test_keys_that_nothing_reads_are_a_warning(tmp_path):
    assert read(tmp_path, eagle3_files()).warnings == ()
    (warning,) = read(tmp_path, eagle3_files(markov_rank=4, dtype="bfloat16")).warnings
    assert warning.endswith("these keys of config.json are not read: markov_rank")


def layer(**keys: Any) -> Callable[[Config, Tensors], None]:
    return lambda config, _: config["transformer_layer_config"].update(keys)


def top(**keys: Any) -> Callable[[Config, Tensors], None]:
    return lambda config, _: config.update(keys)


def without(*names: str) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        for name in names:
            config.pop(name, None)
            tensors.pop(name, None)

    return change


def tensor(name: str, value: Tensor) -> Callable[[Config, Tensors], None]:
    return lambda _, tensors: tensors.update({name: value})


def inside(key: str, **keys: Any) -> Callable[[Config, Tensors], None]:
    return lambda config, _: config.update({key: {**config.get(key, {}), **keys}})


REFUSED = {
    # The kind of drafter
    (
        "eagle3",
        top(speculators_model_type="peagle"),
    ): "speculators_model_type is 'peagle'; only 'eagle3' or 'dflash' is supported",
    ("eagle3", top(parallel_drafting=True)): "parallel_drafting is True; only False is supported",
    ("eagle3", tensor("mask_hidden", torch.ones(1, 32))): "the tensor mask_hidden has no place",
    ("flat eagle3", without("midlayer.hidden_norm.weight")): "it looks like an EAGLE-1 or EAGLE-2 head",
    ("vllm medusa", without("model_type")): "it is not recognised as EAGLE-3, DFlash or Medusa",
    # The target's sizes
    ("eagle3", layer(vocab_size=64)): "transformer_layer_config.vocab_size is 64, the target has 61",
    ("eagle3", top(target_hidden_size=64)): "target_hidden_size is 64, the target has 32",
    ("flat dflash", top(num_target_layers=4)): "num_target_layers is 4, the target has 3",
    ("eagle3", tensor("embed_tokens.weight", torch.ones(60, 32))): "embed_tokens.weight has shape [60, 32]",
    ("eagle3", tensor("fc.weight", torch.ones(32, 90))): "its inputs are not states of the target's 32",
    # Layer numbers
    ("eagle3", top(eagle_aux_hidden_state_layer_ids=[1, 2, 4])): "is [1, 2, 4], but the target has 3 layers",
    (
        "flat eagle3",
        inside("eagle_config", eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
    ): "but the target has 3 layers",
    ("eagle3", top(eagle_aux_hidden_state_layer_ids=[0, 1, 2])): "layer 0 means the embeddings, which are not supported",
    ("flat eagle3", inside("eagle_config", eagle_aux_hidden_state_layer_ids=[-1, 1, 2])): "layer -1 means the embeddings",
    ("eagle3", top(eagle_aux_hidden_state_layer_ids=[1, 2])): "fc.weight reads 3 states of the target, but",
    ("flat eagle3", top(eagle_aux_hidden_state_layer_ids=[0, 1, 2])): "layer 0 means the embeddings",
    ("flat eagle3", inside("eagle_config", eagle_aux_hidden_state_layer_ids=[0, 2])): "names 2 layers",
    ("dflash", without("aux_hidden_state_layer_ids")): "no target_layer_ids or aux_hidden_state_layer_ids",
    ("dflash", top(target_layer_ids=[1, 2])): "aux_hidden_state_layer_ids and target_layer_ids name different layers",
    # The reduced vocabulary
    ("eagle3", without("d2t", "t2d")): "draft_vocab_size has 52 tokens, not 61; d2t is missing",
    ("eagle3", tensor("d2t", torch.tensor(KEPT))): "d2t and t2d name different tokens: it has target ids, not offsets",
    ("eagle3", tensor("d2t", torch.zeros(52, dtype=torch.int64))): "d2t and t2d name different tokens",
    ("eagle3", tensor("t2d", torch.ones(60, dtype=torch.bool))): "t2d has 60 tokens, the target has 61",
    ("eagle3", top(draft_vocab_size=50)): "draft_vocab_size has 50 tokens, not 52",
    ("reduced dflash", tensor("d2t", torch.full((52,), 20))): "d2t and t2d name different tokens",
    # Norms and rounds
    ("eagle3", without("norm_before_residual")): "norm_before_residual is missing: speculators reads false, vLLM true",
    ("flat eagle3", top(norm_output=True)): "norm_output is true: SpecForge 0.2.0 means a plain head",
    ("eagle3", top(norm_before_fc=True)): "the tensor input_norm.weight is missing",
    ("eagle3", top(fc_norm=True, norm_before_fc=True)): "norm_before_fc and fc_norm cannot both be true",
    ("eagle3", tensor("fc_norm.0.weight", torch.ones(32))): "the tensor fc_norm.0.weight has no place",
    (
        "flat eagle3",
        inside("eagle_config", use_mtp_layernorm=True),
    ): "eagle_config.use_mtp_layernorm is True; only False",
    ("flat eagle3", inside("eagle_config", use_aux_hidden_state=False)): "eagle_config.use_aux_hidden_state is False",
    # The layers
    ("eagle3", layer(model_type="deepseek_v3")): "model_type is 'deepseek_v3'; only 'llama' or 'qwen3' is supported",
    ("eagle3", layer(hidden_act="gelu")): "hidden_act is 'gelu'; only 'silu' is supported",
    ("eagle3", layer(head_dim=16)): "head_dim is 16, but 4 heads have 32 query outputs",
    ("eagle3", layer(num_hidden_layers=2)): "the tensor layers.1.self_attn.q_proj.weight is missing",
    ("eagle3", layer(attention_bias=True)): "the tensor layers.0.self_attn.q_proj.bias is missing",
    ("eagle3", tensor("layers.0.self_attn.q_proj.bias", torch.ones(32))): "q_proj.bias has no place in this kind of drafter",
    ("eagle3", layer(rope_parameters={"rope_type": "dynamic"})): "rope_type is 'dynamic'; only default, linear, llama3, yarn",
    ("flat eagle3", top(rope_theta=10000.0)): "rope_theta and rope_parameters give different thetas: [500.0, 10000.0]",
    ("eagle3", layer(layer_types=["sliding_attention"])): "sliding_window is None, but layer_types has sliding attention",
    ("eagle3", layer(layer_types=["chunked_attention"], sliding_window=4)): "not full or sliding for 1 layers",
    ("flat eagle3", top(use_sliding_window=True, sliding_window=4)): "use_sliding_window is true without layer_types",
    ("eagle3", layer(quantization_config={"bits": 4})): "quantization_config is {'bits': 4}",
    ("eagle3", layer(hidden_size="32")): "hidden_size is '32', which has the wrong type",
    ("eagle3", layer(num_attention_heads=0)): "num_attention_heads is 0, not a positive number",
    # Tensors
    ("eagle3", tensor("fc.weight", torch.ones(32, 96, dtype=torch.int8))): "dtype I8: quantised checkpoints are not supported",
    ("flat eagle3", tensor("layers.0.hidden_norm.weight", torch.ones(32))): "are two names of one tensor",
    # DFlash
    ("dflash", without("block_size")): "block_size is missing: projects differ in its default",
    ("dflash", without("mask_token_id")): "mask_token_id is None, not a token of the target's 61",
    ("dflash", top(mask_token_id=61)): "mask_token_id is 61, not a token",
    ("flat dflash", top(mask_token_id=7)): "mask_token_id and dflash_config.mask_token_id differ: 7, 60",
    ("flat dflash", inside("dflash_config", attention_sink_bias=True)): "dflash_config.attention_sink_bias is True",
    ("flat dflash", inside("dflash_config", mask_token="<m>")): "dflash_config.mask_token is '<m>'",
    ("causal dflash", top(is_causal=True)): "is_causal and dflash_config.causal differ",
    ("flat dflash", inside("dflash_config", shift_label=True)): "dflash_config.shift_label is True; only False is supported",
    ("flat dflash", inside("dflash_config", projector_type="domino")): "dflash_config.projector_type is 'domino'",
    ("dflash", tensor("markov_head.markov_w1.weight", torch.ones(61, 4))): "markov_head.markov_w1.weight has no place",
    # Medusa
    ("vllm medusa", top(truncated_vocab_size=20, vocab_size=61)): "truncated_vocab_size is 20; only 61 is supported",
    ("vllm medusa", tensor("token_map", torch.arange(20))): "the tensor token_map has no place",
    ("vllm medusa", tensor("blocks.0.layers.0.bias", torch.ones(32))): "the tensor blocks.1.layers.0.bias is missing",
    ("medusa", top(medusa_fc_bias=False)): "medusa_fc_bias is false, but the tensor 0.0.linear.bias exists",
    ("medusa", top(medusa_num_heads=4)): "the tensor 3.0.linear.weight is missing",
    ("medusa", top(medusa_num_heads=2)): "the tensor 2.0.linear.bias and 2 more has no place",
}
SENTENCES = [(name, change, words) for (name, change), words in REFUSED.items()]


@pytest.mark.parametrize(("name", "change", "words"), SENTENCES, ids=[words[:40] for _, _, words in SENTENCES])
def test_each_difference_is_refused_by_name(name, change, words, tmp_path):
    """The bug of other readers: a key or tensor that they do not know is dropped in silence, and acceptance is low."""
    config, tensors = MADE[name]()
    config, tensors = json.loads(json.dumps(config)), dict(tensors)
    change(config, tensors)
    with pytest.raises(UnusableCheckpoint) as raised:
        read(tmp_path, (config, tensors))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", MADE)
def test_unchanged_checkpoints_are_read(name, tmp_path):
    assert read(tmp_path, MADE[name]()).warnings == ()
    assert compare_checkpoint(model_folder(tmp_path / "target"), tmp_path).refusals == ()


def test_a_folder_without_tensors_names_its_pickle(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnusableCheckpoint, match=r"it has no \.safetensors file; pytorch_model\.bin is a pickle"):
        read_checkpoint(tmp_path, FACTS)


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), ("{", "it is not JSON"), ("[]", "is not an object")])
def test_an_unreadable_configuration_is_refused(content, words, tmp_path):
    written(tmp_path, eagle3_files())
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnusableCheckpoint, match=words):
        read_checkpoint(tmp_path, FACTS)


def test_a_damaged_file_is_refused(tmp_path):
    written(tmp_path, eagle3_files())
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UnusableCheckpoint, match=r"model\.safetensors cannot be read"):
        read_checkpoint(tmp_path, FACTS)


def test_tensors_of_several_files_are_read(tmp_path):
    config, tensors = eagle3_files()
    whole = read(tmp_path / "whole", (config, tensors)).shape
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for file, kept in parts.items():
        save_file({name: tensors[name] for name in kept}, folder / file)
    places = {name: file for file, kept in parts.items() for name in kept}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert read_checkpoint(folder, FACTS).shape == whole


def served(folder: Path, files: tuple[Config, Tensors]) -> EngineConfig:
    target = model_folder(folder / "target")
    return EngineConfig(str(target), drafter="checkpoint", checkpoint=str(written(folder / "drafter", files)), scheduler=LIMITS)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa"])
def test_a_checkpoint_is_served(kind, tmp_path):
    config = served(tmp_path, MADE[kind]())
    engine = build_engine(config)  # which warms it up
    assert engine.info.drafter == kind
    assert engine.drafter is not None
    assert engine.drafter.feeding is Feeding.TARGET_FEATURES
    need = memory_need(config, "float32", CPU)
    assert need.draft_weights == 4 * sum(tensor.numel() for tensor in MADE[kind]()[1].values())
    assert need.draft_cache > 300 * WIDTH * 4


def test_weight_that_was_never_loaded_is_refused(tmp_path):
    """speculators fills weights with NaN until the verifier's are loaded."""
    config, tensors = eagle3_files()
    with pytest.raises(BadConfiguration, match=r"lm_head\.weight has a NaN or an infinity"):
        build_engine(served(tmp_path, (config, {**tensors, "lm_head.weight": torch.full((52, 32), float("nan"))})))


def test_unfit_checkpoint_is_refused_before_weights_load(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.build.load_model", None)
    with pytest.raises(BadConfiguration, match=r"the drafter does not belong to .*: block_size is missing"):
        build_engine(served(tmp_path, ({**dflash_files()[0], "block_size": None}, dflash_files()[1])))


def test_check_reports_a_checkpoint(tmp_path, capsys):
    config = served(tmp_path, eagle3_files())
    assert config.checkpoint is not None
    arguments = ["drafter", "check", "--model", config.model, "--drafter", config.checkpoint]
    assert server.cli.main.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "EAGLE-3, 1 layers of width 32, 52 tokens" in printed
    assert "reads the target after layers 1, 2, 3" in printed
    written(Path(config.checkpoint), eagle3_files(parallel_drafting=True))
    assert server.cli.main.main(arguments) == 1
    assert "refused: parallel_drafting is True" in capsys.readouterr().out
