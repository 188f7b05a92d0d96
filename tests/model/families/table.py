"""The families of models, each with a tiny random model of it. docs/models.md is made from them (tests.model.families.page).

A configuration has the fields of its family that differ from `_SIZES`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 128
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_GROUPS = {**_EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
_OLD_NAMES = {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}

LIBRARY, TORCH = "the native library", "torch"
EVERY = ("text", "model", "head", "checkpoint", "early-exit")
NO_HEAD = ("text", "model", "checkpoint", "early-exit")  # logits are not the output rows times the last state
RECURRENT = ("text", "model", "checkpoint")  # no drafter is trained here for recurrent layers
NO_STATES = ("text", "model")  # layers have other names than those that drafters of states read


@dataclass(frozen=True)
class Family:
    """A family: its public name, transformers' model type, fields of the tiny configuration, what runs it, drafters that fit."""

    name: str
    model_type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    runs_by: str = TORCH
    drafters: tuple[str, ...] = EVERY

    def module(self) -> PreTrainedModel:
        """Return the tiny random model, as transformers runs it. Biases and norms affect the output."""
        config = CONFIG_MAPPING[self.model_type](**{**_SIZES, **self.fields})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
            torch.manual_seed(0)  # so that initialisation has no influence
            for parameter in module.parameters():
                if parameter.dim() == 2:
                    parameter.data.normal_(0.0, 0.6)
                else:
                    parameter.data.add_(torch.randn(parameter.shape) * 0.1)
        return module.eval()


@dataclass(frozen=True)
class Refused:
    """Model types that are refused, the reason, and fields of their configuration."""

    model_types: tuple[str, ...]
    reason: str
    fields: Mapping[str, Any] = field(default_factory=dict)


SERVED = (
    Family("Llama 2, 3", "llama", runs_by=LIBRARY),
    Family("Mistral", "mistral", {"sliding_window": 6}, LIBRARY),
    Family("Qwen 2, 2.5", "qwen2", runs_by=LIBRARY),
    Family("Qwen 3", "qwen3", runs_by=LIBRARY),
    Family("Gemma 3", "gemma3_text", _WINDOWS, LIBRARY),
    Family("Gemma 1", "gemma"),
    Family("Gemma 2", "gemma2", _WINDOWS),
    Family(
        "Gemma 3n",
        "gemma3n_text",
        {
            **_WINDOWS,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0, 0.0],
            "intermediate_size": [48, 48],
        },
    ),
    Family("gpt-oss (attention sinks)", "gpt_oss", {**_EXPERTS, **_WINDOWS}),
    Family("Mixtral", "mixtral", _EXPERTS),
    Family("Ministral", "ministral", _WINDOWS),
    Family("Ministral 3", "ministral3"),
    Family("Qwen 2 MoE", "qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 16}),
    Family("Qwen 3 MoE", "qwen3_moe", _EXPERTS),
    Family("DeepSeek V2", "deepseek_v2", {**_GROUPS, **_LATENT}),
    Family("DeepSeek V3, R1", "deepseek_v3", {**_GROUPS, **_LATENT}),
    Family("Phi 1, 2", "phi", drafters=NO_STATES),
    Family("Phi 3, 4", "phi3"),
    Family("Phi 3.5 MoE", "phimoe", _EXPERTS),
    Family("SmolLM 3", "smollm3", {"no_rope_layers": [1, 0]}),
    Family("OLMo", "olmo"),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", _WINDOWS),
    Family("OLMoE", "olmoe", _EXPERTS),
    Family("FlexOlmo", "flex_olmo", _EXPERTS),
    Family("Granite 3", "granite"),
    Family("Granite MoE", "granitemoe", _EXPERTS),
    Family("Granite with windows (attention sinks)", "granite_swa", _WINDOWS),
    Family(
        "MiMo V2 Flash (attention sinks)",
        "mimo_v2_flash",
        {
            **_GROUPS,
            **_WINDOWS,
            "v_head_dim": 8,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 8,
            "swa_v_head_dim": 8,
        },
    ),
    Family("MiniMax M2", "minimax_m2", _EXPERTS),
    Family("GLM 4 (9B, 2024)", "glm", {"partial_rotary_factor": 0.5}),
    Family("GLM 4", "glm4"),
    Family("GLM 4.5, 4.6", "glm4_moe", _GROUPS),
    Family("EXAONE 4", "exaone4", _WINDOWS),
    Family("EXAONE MoE", "exaone_moe", {**_GROUPS, **_WINDOWS}),
    Family("Seed-OSS", "seed_oss"),
    Family("Hunyuan", "hunyuan_v1_dense"),
    Family("Hunyuan MoE", "hunyuan_v1_moe", {**_EXPERTS, "moe_topk": 2}),
    Family("ERNIE 4.5", "ernie4_5"),
    Family(
        "ERNIE 4.5 MoE",
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
    Family("Command R", "cohere", drafters=NO_HEAD),
    Family("Command A", "cohere2", _WINDOWS, drafters=NO_HEAD),
    Family(
        "LongCat Flash",
        "longcat_flash",
        {
            **_EXPERTS,
            **_LATENT,
            "num_hidden_layers": 4,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "moe_topk": 2,
            "zero_expert_num": 1,
        },
    ),
    Family("MiniCPM 3", "minicpm3", _LATENT, drafters=NO_HEAD),
    Family("AFM (Arcee)", "arcee"),
    Family("Trinity (Arcee)", "afmoe", {**_EXPERTS, **_WINDOWS, "num_shared_experts": 1, "num_dense_layers": 1}),
    Family("Apertus", "apertus"),
    Family("Helium", "helium"),
    Family("BitNet", "bitnet"),
    Family("StarCoder 2", "starcoder2"),
    Family("GPT-2", "gpt2", _OLD_NAMES, drafters=NO_STATES),
    Family("GPT-BigCode", "gpt_bigcode", _OLD_NAMES, drafters=NO_STATES),
    Family("GPT-NeoX, Pythia", "gpt_neox", drafters=NO_STATES),
    Family("OPT", "opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, drafters=NO_STATES),
    Family("Qwen 3 Next", "qwen3_next", {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 16}, drafters=RECURRENT),
    Family("Qwen 3.5", "qwen3_5_text", _DELTA, drafters=RECURRENT),
    Family(
        "Qwen 3.5 MoE",
        "qwen3_5_moe_text",
        {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 16},
        drafters=RECURRENT,
    ),
    Family("OLMo Hybrid", "olmo_hybrid", {**_DELTA, "linear_num_key_heads": 4}, drafters=RECURRENT),
    Family("Ling 2.5", "bailing_hybrid", {**_GROUPS, **_LATENT, "layer_types": _DELTA["layer_types"]}, drafters=RECURRENT),
    Family(
        "Granite 4",
        "granitemoehybrid",
        {
            **_MAMBA,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_intermediate_size": 48,
            "num_local_experts": 0,
        },
        drafters=RECURRENT,
    ),
    Family("Bamba", "bamba", {**_MAMBA, "attn_layer_indices": [1]}, drafters=NO_STATES),
    Family("Falcon-H1", "falcon_h1", {**_MAMBA, "mamba_d_ssm": 64}, drafters=NO_STATES),
    Family("Mamba 2", "mamba2", {"num_heads": 8, "n_groups": 1, "state_size": 8, "chunk_size": 8}, drafters=NO_STATES),
    Family("LFM 2", "lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, drafters=NO_STATES),
    Family(
        "LFM 2 MoE",
        "lfm2_moe",
        {
            **_EXPERTS,
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
        },
        drafters=NO_STATES,
    ),
    Family(
        "LFM 2 without convolutions",
        "lfm2",
        {"layer_types": ["full_attention"] * 2, "block_auto_adjust_ff_dim": False},
        drafters=NO_STATES,
    ),
)
_STATE = "its recurrent state cannot be computed exactly for each node of a tree"
REFUSED = (
    Refused(
        (
            *(
                "mamba",
                "falcon_mamba",
                "jamba",
                "recurrent_gemma",
                "minimax",
                "kimi_linear",
                "zamba",
                "zamba2",
                "nemotron_h",
                "zaya",
            ),
            *("rwkv", "xlstm"),
        ),
        _STATE,
    ),
    Refused(
        ("mamba2", "falcon_h1", "bamba"),
        "its time_step_limit holds in prompts alone, not token by token",
        {"time_step_limit": [0.001, 0.1]},
    ),
    Refused(("deepseek_v32", "glm_moe_dsa"), "layers of type indexed_attention cannot be driven"),
    Refused(
        ("deepseek_v4",),
        "layers of type compressed_sparse_attention, heavily_compressed_attention cannot be driven",
    ),
    Refused(("llama4_text",), "layers of type chunked_attention cannot be driven"),
    Refused(
        ("phi3",),
        "rotary embeddings of type longrope depend on the longest text of a batch",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [3.0] * 4,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
                "factor": 4.0,
            },
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
        },
    ),
)
# Refused once a pass is compared with the model's own.
DIFFERENT = (
    Refused(
        ("bloom",),
        "a tree-masked pass differs from the model's own",
        {"n_layer": 2, "n_head": 4},
    ),
    Refused(
        ("gptj",),
        "a tree-masked pass differs from the model's own",
        {
            **_OLD_NAMES,
            "rotary_dim": 4,
            "n_inner": 48,
        },
    ),
    Refused(
        ("nemotron", "stablelm"),
        "it cannot be driven: this attention needs its context and makes its own masks",
    ),
    Refused(("doge",), "it cannot be driven: this attention needs its context and makes its own masks"),
    Refused(("diffllama",), "a tree-masked pass differs from the model's own"),
)
