"""Models under our attention: their properties, and the refusal by name of models that cannot be driven exactly."""

import pytest
import torch
from msgspec import structs
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
)

from engine.attention.packing import Group
from engine.attention.segments import tree_segment
from engine.model import causal_lm as engine_model
from engine.model import check as model_check
from engine.model.causal_lm import CausalModel, adopt, load_model
from engine.model.linear_backends import prepare_linears
from engine.testing import FAMILIES, tiny_module
from engine.weights import UnsupportedModel
from engine.weights.pretrained import refuse_by_configuration
from tests.model.tiny import model, own_logits

CPU = torch.device("cpu")
_SMALL = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def random_module(config: PreTrainedConfig):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_model_properties_are_read(family):
    one = model(family)
    assert (one.vocab_size, one.max_positions, one.eos_token_ids) == (61, 512, (2,))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(7, 2, (7,)), ([7, 8], 2, (7, 8)), (None, 2, (2,)), (None, [3, 4], (3, 4)), (None, None, ())],
)
def test_end_tokens_come_from_generation_settings_first(generation, config, expected):
    module = tiny_module("llama")
    module.generation_config.eos_token_id = generation
    module.config.eos_token_id = config
    assert CausalModel(module, CPU).eos_token_ids == expected


def test_learned_positions_can_be_driven():
    """Positions reach the model as an argument, so a table of them is no obstacle."""
    assert (
        adopt(random_module(GPT2Config(n_positions=64, vocab_size=40, n_embd=32, n_layer=2, n_head=2)), CPU).max_positions == 64
    )


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=2),
        MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, state_size=4),
    ],
    ids=["attention with biases of its own", "recurrent state"],
)
def test_models_we_cannot_drive_are_refused(config):
    with pytest.raises(UnsupportedModel):
        adopt(random_module(config), CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_check_detects_broken_mask(family, monkeypatch):
    """A pass in which all tokens see each other differs from the model's own, and the check reports it."""
    monkeypatch.setattr(
        Group, "bias", lambda group, window, dtype: torch.zeros_like(group.visible_BTL[:, None, None], dtype=dtype)
    )
    with pytest.raises(UnsupportedModel, match="differs from the model's own"):
        adopt(tiny_module(family), CPU)


def rounding_module(family: str, sharpness: float):
    """A model in bfloat16 whose attention is so sharp that what scores round to decides."""
    module = tiny_module(family)
    for layer in module.model.layers:
        layer.self_attn.q_proj.weight.data *= sharpness
    return module.bfloat16()


def test_tolerance_is_the_noise_of_the_model(monkeypatch):
    module = rounding_module("llama", 300.0)
    one = CausalModel(module, CPU)
    ids = model_check.check_text(one)
    eager, sdpa = (model_check.own_logits(one, ids, attention) for attention in ("eager", "sdpa"))
    noise = float((eager - sdpa).abs().max() / eager.abs().max())
    assert noise > 0.05, "a model that rounds little shows nothing"
    tolerance = model_check.tolerance_of(one, ids, eager)
    assert tolerance == pytest.approx(min(0.5, 3 * noise))
    monkeypatch.setattr(model_check, "_driven_logits", lambda *_: sdpa)
    model_check.require_equal(one, ids, eager, tolerance)
    monkeypatch.setattr(model_check, "_driven_logits", lambda *_: eager + 4 * noise * eager.abs().max())
    with pytest.raises(UnsupportedModel, match="differs from the model's own"):
        model_check.require_equal(one, ids, eager, tolerance)


def test_damage_by_preparation_is_not_model_noise(monkeypatch):
    """Both of its own passes are made before."""

    def break_one(module, kind, *rest):
        prepare_linears(module, kind, *rest)
        module.model.layers[0].mlp.down_proj.weight.data *= 1.5

    monkeypatch.setattr("engine.model.causal_lm.prepare_linears", break_one)
    with pytest.raises(UnsupportedModel, match="differs from the model's own"):
        adopt(tiny_module("llama").bfloat16(), CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_check_detects_broken_mask_in_bfloat16(family, monkeypatch):
    monkeypatch.setattr(
        Group, "bias", lambda group, window, dtype: torch.zeros_like(group.visible_BTL[:, None, None], dtype=dtype)
    )
    with pytest.raises(UnsupportedModel, match="differs from the model's own"):
        adopt(tiny_module(family).bfloat16(), CPU)


def test_check_detects_wrong_positions(monkeypatch):
    def by_index(*arguments):
        segment = tree_segment(*arguments)
        return structs.replace(segment, positions=range(segment.positions[0], segment.positions[0] + segment.num_tokens))

    monkeypatch.setattr(model_check, "tree_segment", by_index)
    with pytest.raises(UnsupportedModel, match="differs from the model's own"):
        adopt(tiny_module("llama"), CPU)


@pytest.mark.parametrize("linears", ["plain", "packed"])
def test_a_model_is_loaded_from_its_folder(tmp_path, linears):
    tiny_module("qwen2").save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "float32", CPU, linears)
    ids = torch.tensor([[4, 5, 6, 7, 8]])
    loaded.module.set_attn_implementation("eager")
    assert torch.allclose(loaded.module(input_ids=ids).logits[0], own_logits("qwen2", ids.tolist())[0], atol=1e-4)


def long_rope_module():
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
    }
    config = LlamaConfig(**_SMALL, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, rope_parameters=rope)
    module = random_module(config)
    for parameter in module.parameters():
        parameter.data.mul_(15.0 if parameter.dim() == 2 else 1.0)
    return module


def test_batch_dependent_rotary_embeddings_are_refused():
    """They passed once: the check's text was short, and transformers goes by the longest position of the whole batch."""
    with pytest.raises(UnsupportedModel, match="depend on the longest text"):
        adopt(long_rope_module(), CPU)


def test_the_comparison_itself_sees_them(monkeypatch):
    """Without the refusal by name, the far token of the compared pass gives them away."""
    monkeypatch.setattr(engine_model, "refuse_by_configuration", lambda config: None)
    with pytest.raises(UnsupportedModel, match="differs from the model's own"):
        adopt(long_rope_module(), CPU)


def test_chunked_attention_is_refused_by_name():
    config = tiny_module("llama").config
    config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        refuse_by_configuration(config)


def test_window_longer_than_old_check_is_checked(monkeypatch):
    """The mutant ignores windows: a window of 40 tokens went unseen while the text had nine."""
    honest = Group.bias
    monkeypatch.setattr(Group, "bias", lambda group, window, dtype: honest(group, None, dtype))
    config = tiny_module("gemma3").config
    config.sliding_window = 40
    with pytest.raises(UnsupportedModel, match="differs from the model's own"):
        adopt(random_module(config), CPU)


def test_check_compares_the_serving_pass(monkeypatch):
    """The linears were replaced after the comparison; a broken replacement must not pass."""

    def broken(model, kind):
        model.lm_head = torch.nn.Linear(32, 61, bias=False)

    monkeypatch.setattr(engine_model, "prepare_linears", broken)
    with pytest.raises(UnsupportedModel, match="differs from the model's own"):
        adopt(tiny_module("llama"), CPU)
