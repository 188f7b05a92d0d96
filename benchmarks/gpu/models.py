"""Models of known shapes with random weights, made on the device: nothing is fetched."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from engine.attention.paged.reference import attend
from engine.model.causal_lm import CausalModel, adopt
from engine.model.fused.decoder import FusedDecoder
from engine.model.fused.reference import TorchOperations


@dataclass(frozen=True)
class ModelShape:
    """A model of a family, its sizes, and the number format that it is run in."""

    name: str
    family: str
    sizes: Mapping[str, int]
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Width of its states."""
        return self.sizes["hidden_size"]


_POSITIONS = {"max_position_embeddings": 8192}
SEVEN_B = ModelShape(
    "7b",
    "qwen2",
    {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    torch.bfloat16,
)
SMALL = ModelShape(
    "135m",
    "llama",
    {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    torch.bfloat16,
)
TINY = ModelShape(
    "tiny",
    "llama",
    {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    torch.float32,
)
LLAMA_1B = ModelShape(
    "llama-1b",
    "llama",
    {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    torch.bfloat16,
)
QWEN_8B = ModelShape(
    "qwen3-8b",
    "qwen3",
    {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    torch.bfloat16,
)
_CONFIGURATIONS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}


def model_of(shape: ModelShape, device: torch.device, seed: int = 0, sharpness: float = 1.0) -> CausalModel:
    """Return a model of the shape, compared with transformers' own pass; a sharper one has less uniform distributions.

    Where there is no kernel it runs passes over tables by the reference.
    """
    model = adopt(_module(shape, device, seed, sharpness), device)
    model.attend = model.attend or attend
    return model


def counting_model(shape: ModelShape, device: torch.device, linears: str = "plain") -> CausalModel:
    """Return a model of the shape whose likeliest token after a token is the next number, by far, in any number format.

    Its output head is its embeddings, rolled by one, and its layers add little. So its answers are known without a record.
    """
    module = _module(shape, device, seed=0, sharpness=1.0)
    with torch.no_grad():
        module.lm_head.weight.copy_(module.model.embed_tokens.weight.roll(1, 0))
        for name, parameter in module.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(_LITTLE)
    model = adopt(module, device, linears)
    if model.attend is None:
        model.attend = attend
        model.fused = FusedDecoder(model.module, TorchOperations(), attend)
    return model


_LITTLE = 0.05  # of the weights that add to the states


@torch.no_grad()
def _module(shape: ModelShape, device: torch.device, seed: int, sharpness: float) -> PreTrainedModel:
    config = _CONFIGURATIONS[shape.family](**shape.sizes, **_POSITIONS, tie_word_embeddings=False)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=shape.dtype)
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2:
                gain = sharpness if "lm_head" in name else 1.0
                parameter.normal_(0.0, gain * parameter.shape[1] ** -0.5)
    return module.eval()
