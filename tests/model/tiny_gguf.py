"""A GGUF file of a tiny Llama or Qwen2 with random weights, written as llama.cpp's converter writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("ĠĠ", "Ġ1", "12")  # pairs of bytes that the splitters treat differently
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


def tokens() -> list[str]:
    """The vocabulary: specials first, then every byte, then three merged pairs."""
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *WORDS]


def tiny_model(architecture: str, *, is_tied: bool, width: int = 64) -> Any:
    """A random model whose every number of inputs is a multiple of its width, as it must be of a quantisation block."""
    shape: dict[str, Any] = {
        "vocab_size": len(tokens()),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": is_tied,
    }
    torch.manual_seed(0)
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**shape)).eval()


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    splitter: str,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    extra: Callable[[gguf.GGUFWriter], None] = lambda _: None,
) -> dict[str, np.ndarray]:
    """Write the model with its matrices in a type; return the tensors' dequantized values, by transformers' names.

    Matrices of a type that gguf cannot make are of random bytes. `extra` may add fields and tensors.
    """
    writer = gguf.GGUFWriter(path, architecture)
    _write_shape(writer, model.config)
    _write_tokenizer(writer, splitter)
    extra(writer)
    dequantized = {
        name: _write_tensor(writer, model.config, architecture, name, one, kind) for name, one in _stored(model).items()
    }
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dequantized


def _stored(model: Any) -> dict[str, torch.Tensor]:
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def _write_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: gguf.GGUFWriter, splitter: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens())
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens()])
    writer.add_token_merges([f"{word[0]} {word[1]}" for word in WORDS])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _write_tensor(
    writer: gguf.GGUFWriter, config: Any, architecture: str, name: str, tensor: torch.Tensor, of_matrices: GGMLQuantizationType
) -> np.ndarray:
    values = tensor.detach().numpy()
    kind = of_matrices if values.ndim == 2 else GGMLQuantizationType.F32
    blocks = _blocks(values, kind)
    dequantized = gguf.quants.dequantize(blocks, kind)
    laid_out = _interleave(blocks, _num_heads(config, name)) if architecture == "llama" else blocks
    writer.add_tensor(_gguf_name(architecture, config, name), laid_out, raw_dtype=kind)
    return np.asarray(dequantized)


def _blocks(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    try:
        return np.asarray(gguf.quants.quantize(values, kind))
    except NotImplementedError:
        block_size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(len(values))
        # Without bytes that begin an infinite scale in float16, wherever a block has its scales.
        shape = (len(values), values.shape[1] // block_size * num_bytes)
        return rng.choice(np.array([byte for byte in range(256) if byte & 0x70 != 0x70], dtype=np.uint8), size=shape)


def _num_heads(config: Any, name: str) -> int | None:
    """The heads of a tensor whose rows llama.cpp reorders."""
    if "q_proj.weight" in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if "k_proj.weight" in name else None


def _interleave(rows: np.ndarray, num_heads: int | None) -> np.ndarray:
    """The order of rows for llama.cpp's rotary embedding, which pairs neighbours and not halves."""
    if num_heads is None:
        return rows
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _gguf_name(architecture: str, config: Any, name: str) -> str:
    numbers = {kind: number for number, kind in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], config.num_hidden_layers)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)
