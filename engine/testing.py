"""Tiny models with random weights, of the presets' families: real architectures without mocks, milliseconds per pass.

Their distributions are peaked like a trained model's (a random head over large embeddings), so that acceptance and arg max are
meaningful.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionPolicy, FixedExpansion
from engine.core.step_plan import Feeding
from engine.core.tree import Expansion
from engine.core.types import ModelInfo
from engine.draft.drafter import Drafter
from engine.draft.models.draft_model import ModelDrafter
from engine.engine import Engine
from engine.kv_cache.canary import SlotCanary
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel, adopt
from engine.model.target import Target
from engine.structured_output.grammars import CompiledGrammars

_COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_TABLE_SIZE = 8
_WINDOW = 6
FAMILIES = ("llama", "qwen2", "gemma3")  # of the presets; `tiny_module` supports more


def _windowed(common: Mapping[str, int]) -> dict[str, Any]:
    """Return fields of a configuration whose layers with and without windows alternate."""
    layer_types = ["sliding_attention", "full_attention"] * common["num_hidden_layers"]
    return {"sliding_window": _WINDOW, **common, "layer_types": layer_types[: common["num_hidden_layers"]]}


def _recurrent(kind: str, common: Mapping[str, int]) -> list[str]:
    """Return types of layers: recurrent ones around one with attention."""
    return [kind, "full_attention", *[kind] * common["num_hidden_layers"]][: common["num_hidden_layers"]]


def _gemma3(common: Mapping[str, int]) -> PretrainedConfig:
    # Untied: Gemma scales embeddings by sqrt(width), so a random tied head would always repeat its input.
    return Gemma3TextConfig(**_windowed(common), query_pre_attn_scalar=8, tie_word_embeddings=False)


_CONFIGURATIONS: dict[str, Callable[[Mapping[str, int]], PretrainedConfig]] = {
    "llama": lambda common: LlamaConfig(**common),
    "mistral": lambda common: MistralConfig(**{"sliding_window": _WINDOW, **common}),
    "qwen2": lambda common: Qwen2Config(**common),
    "qwen3": lambda common: Qwen3Config(**common),
    "gemma3": _gemma3,
    "qwen3_next": lambda common: Qwen3NextConfig(
        **{**_DELTA, **_EXPERTS, **common, "layer_types": _recurrent("linear_attention", common)}
    ),
    "lfm2": lambda common: Lfm2Config(
        **{**common, "layer_types": _recurrent("conv", common)}, block_auto_adjust_ff_dim=False, tie_word_embeddings=False
    ),
    "falcon_h1": lambda common: FalconH1Config(
        **common,
        mamba_d_ssm=common["hidden_size"],
        mamba_n_heads=common["hidden_size"] // 8,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_chunk_size=8,
    ),
    "mamba2": lambda common: Mamba2Config(
        **{**common, "num_heads": 2 * common["hidden_size"] // common["head_dim"]},
        n_groups=1,
        state_size=8,
        chunk_size=8,
        tie_word_embeddings=False,
    ),
    "gpt_oss": lambda common: GptOssConfig(**_windowed(common), num_local_experts=4, num_experts_per_tok=2),
}


def tiny_module(family: str = "llama", seed: int = 0, num_layers: int = 3, vocab_size: int = 61, **sizes: int) -> PreTrainedModel:
    """Return a random float32 model. Mistral's layers and every second one of gemma3's and gpt_oss's have windows of 6 tokens."""
    config = _CONFIGURATIONS[family]({**_COMMON, "num_hidden_layers": num_layers, "vocab_size": vocab_size, **sizes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(0.0, 0.35)
            else:  # biases and norms must affect the output, so that a test notices if one is ignored
                parameter.data.add_(torch.randn(parameter.shape) * 0.1)
    return module.eval()


def tiny_model(family: str = "llama", seed: int = 0, num_layers: int = 3) -> CausalModel:
    """Return the same model as a CausalModel."""
    return adopt(tiny_module(family, seed, num_layers), torch.device("cpu"))


def tiny_pair(family: str = "llama", seed: int = 0, noise: float = 0.01, vocab_size: int = 61) -> tuple[CausalModel, CausalModel]:
    """Return a target and a drafter that often agree: the drafter has the target's weights plus noise."""
    target, draft = (tiny_module(family, seed, vocab_size=vocab_size) for _ in range(2))
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in draft.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return adopt(target, torch.device("cpu")), adopt(draft, torch.device("cpu"))


ProbsAfter = Callable[[int], Sequence[float]]  # the probabilities of tokens 3, 4 and 5 after a token


def table_pair(target_distribution: ProbsAfter, draft_distribution: ProbsAfter) -> tuple[CausalModel, CausalModel]:
    """Return a target and a drafter that are Markov chains over the tokens 3, 4 and 5 of 8, with any positive probabilities."""
    device = torch.device("cpu")
    return adopt(table_module(target_distribution), device), adopt(table_module(draft_distribution), device)


def table_module(probs_after: ProbsAfter) -> PreTrainedModel:
    """Return a Llama whose logits are a table. Its layer adds nothing, so the state is the embedding, 10 I, normed to sqrt(V).

    lm_head[v, x] = log p(v | x) / sqrt(V). The probability of every other token is about exp(-30).
    """
    width = _TABLE_SIZE
    config = LlamaConfig(
        **{**_COMMON, "vocab_size": width, "hidden_size": width, "num_hidden_layers": 1}, tie_word_embeddings=False
    )
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    head_VV = torch.full((width, width), -30.0)
    for token_id in range(width):
        head_VV[3:6, token_id] = torch.tensor([math.log(value) for value in probs_after(token_id)])
    with torch.no_grad():
        module.model.embed_tokens.weight.copy_(torch.eye(width) * 10.0)
        module.model.layers[0].self_attn.o_proj.weight.zero_()
        module.model.layers[0].mlp.down_proj.weight.zero_()
        module.model.norm.weight.fill_(1.0)
        module.lm_head.weight.copy_(head_VV / math.sqrt(width))
    return module.eval()


def tiny_engine(
    target: CausalModel,
    draft: CausalModel | Drafter | None = None,
    policy: ExpansionPolicy | None = None,
    verifier: str = "traversal",
    config: SchedulerConfig | None = None,
    grammars: CompiledGrammars | None = None,
    has_canary: bool = False,
) -> Engine:
    """Return an engine over the given models. A model as drafter gets its own cache."""
    canary = SlotCanary() if has_canary else None
    config = config or SchedulerConfig(num_slots=2048, max_model_len=256)
    drafter: Drafter | None
    if isinstance(draft, CausalModel):
        drafter = ModelDrafter("tiny", draft, KVCache(config.num_slots, draft.device, canary), Feeding.OWN_CACHE)
    else:
        drafter = draft
    policy = policy or FixedExpansion(Expansion(2, 2, 2))
    info = ModelInfo(
        name="tiny",
        vocab_size=target.vocab_size,
        max_model_len=config.max_model_len,
        num_slots=config.num_slots,
        eos_token_ids=target.eos_token_ids,
        dtype="float32",
        device="cpu",
        drafter=drafter.name if drafter else "none",
        verifier=verifier,
        policy=policy.name,
        adapters=target.adapter_names,
    )
    engine = Engine(info, config, Target(target, config.num_slots, canary), drafter, policy, grammars=grammars)
    if canary is not None:
        engine.watch_slots(canary)
    return engine
