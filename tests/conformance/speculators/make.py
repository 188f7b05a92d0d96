"""Makes the checkpoints beside this file with the classes of speculators, and their outputs for a text.

    python -m venv v && v/bin/pip install speculators==0.9.0 torch==2.13.0 transformers==5.19.0 && v/bin/python make.py

Each folder has a checkpoint as `save_pretrained` writes it. `expected.safetensors` has the inputs and outputs of its network: the
target's states, token ids, and the logits. Weights are random. Shape key: T positions, F states, D width, M drafter's vocabulary.
"""

# ruff: noqa: T201
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

HERE = Path(__file__).parent
VOCAB, WIDTH, LENGTH, ROUNDS, STATES = 37, 16, 12, 3, 3
KEPT = [token_id for token_id in range(VOCAB) if token_id % 5]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}


def method(algorithm: str) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path="", architectures=["LlamaForCausalLM"]),
    )


def layer_config(kind: type, num_layers: int, window: int | None) -> LlamaConfig | Qwen3Config:
    config = kind(**SIZES, num_hidden_layers=num_layers)
    if window is not None:
        config.sliding_window, config.layer_types = window, ["sliding_attention", "full_attention"][:num_layers]
    config._attn_implementation = "eager"
    return config


def filled(model: torch.nn.Module, is_reduced: bool) -> torch.nn.Module:
    """Give every weight a random value that affects the outputs."""
    for name, parameter in model.named_parameters():
        size = parameter.shape[-1] ** -0.5
        noise = torch.randn(parameter.shape)
        parameter.data.copy_(noise * 1.5 * size if parameter.dim() == 2 else 1 + 0.3 * noise)
        assert torch.isfinite(parameter).all(), name
    if is_reduced:
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[KEPT] = True
        model.t2d.copy_(mask)
        model.d2t.copy_(torch.tensor(KEPT) - torch.arange(len(KEPT)))
    return model.eval()


def outputs_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Collect the later outputs of a module."""
    found: list[torch.Tensor] = []
    module.register_forward_hook(lambda _module, _args, output: found.append(output[0] if isinstance(output, tuple) else output))
    return found


@torch.no_grad()
def eagle3(
    name: str, kind: type, *, num_layers: int = 1, window: int | None = None, is_reduced: bool = True, **keys: bool
) -> None:
    """Rounds beyond the first feed the true next tokens and the head's own states."""
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(kind, num_layers, window),
        draft_vocab_size=len(KEPT) if is_reduced else VOCAB,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=method("eagle3"),
        **keys,
    )
    model = filled(Eagle3DraftModel(config), is_reduced)
    logits, layers = outputs_of(model.lm_head), [outputs_of(layer) for layer in model.layers]
    states, ids = torch.randn(1, LENGTH, STATES * WIDTH), torch.randint(VOCAB, (1, LENGTH))
    model(states, ids, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=ROUNDS)
    assert len(logits) == ROUNDS
    expected = {"states": states[0].unflatten(-1, (STATES, WIDTH)), "ids": ids[0]}
    expected |= {f"logits.{step}": logits[step][0] for step in range(ROUNDS)}
    expected |= {f"layers.{layer}.{step}": layers[layer][step][0] for layer in range(num_layers) for step in range(ROUNDS)}
    save(name, model, expected)


@torch.no_grad()
def dflash(name: str, *, window: int | None = None, is_reduced: bool = False, **keys: bool) -> None:
    """Blocks begin at two anchors; slot 0 is the anchor."""
    anchors = [3, 6]
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer_config(Qwen3Config, 2, window),
        draft_vocab_size=len(KEPT) if is_reduced else VOCAB,
        aux_hidden_state_layer_ids=[1, 2, 3],
        block_size=4,
        mask_token_id=VOCAB - 1,
        speculators_config=method("dflash"),
        **keys,
    )
    model = filled(DFlashDraftModel(config), is_reduced)
    logits, layers = outputs_of(model.lm_head), [outputs_of(layer) for layer in model.layers]
    states, ids = torch.randn(1, LENGTH, STATES * WIDTH), torch.randint(VOCAB - 1, (1, LENGTH))
    mask = torch.zeros(1, LENGTH)
    mask[:, anchors] = 1
    documents = torch.zeros(1, LENGTH, dtype=torch.long)
    model._backbone_forward(states, ids, mask, torch.randn(1, LENGTH, WIDTH), documents, max_anchors=len(anchors))
    expected = {"states": states[0].unflatten(-1, (STATES, WIDTH)), "ids": ids[0], "anchors": torch.tensor(anchors)}
    expected |= {"logits": logits[0][0].unflatten(0, (len(anchors), -1)), "embeddings": model.embed_tokens.weight}
    expected |= {f"layers.{layer}": layers[layer][0][0].unflatten(0, (len(anchors), -1)) for layer in range(2)}
    save(name, model, expected | {"output": model.lm_head.weight})


def save(name: str, model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    folder = HERE / name
    model.save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)
    save_file({key: tensor.detach().clone().contiguous() for key, tensor in expected.items()}, folder / "expected.safetensors")
    print(name, sum(path.stat().st_size for path in folder.iterdir()), "bytes")


if __name__ == "__main__":
    torch.manual_seed(0)
    eagle3("eagle3-plain", LlamaConfig)
    eagle3("eagle3-normed", LlamaConfig, norm_before_residual=True, norm_before_fc=True, norm_output=True)
    eagle3("eagle3-each-normed", LlamaConfig, is_reduced=False, fc_norm=True)
    eagle3("eagle3-two-layers", Qwen3Config, num_layers=2, norm_output=True)
    eagle3("eagle3-sliding", LlamaConfig, window=4)
    dflash("dflash-full")
    dflash("dflash-sliding", window=4, is_reduced=True)
    dflash("dflash-not-causal", window=4, sliding_window_non_causal=True, sample_from_anchor=True)
