"""Turn one GGUF file into a folder that transformers loads in seconds. Run as a program, in a process of its own.

Knows transformers' GGUF loader and what it leaves undone: its result cannot be saved as it is, its tokenizer splits text by
default rules for some vocabularies, and it names one end token where a chat model has several. Knows no cache and no presets.
A process of its own gives the memory of the conversion back, and keeps its output apart.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

# What llama.cpp, too, takes for the end of a generation, where the vocabulary holds it.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")


def convert(gguf: Path, folder: Path) -> None:
    """Write the model (bfloat16 safetensors), configuration, end tokens and tokenizer of `gguf` into `folder`."""
    tokenizer = load_tokenizer(gguf)
    model = _load_model(gguf)
    model.generation_config = _generation_config(model.config, tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder, max_shard_size="2GB")
    tokenizer.save_pretrained(folder)


def load_tokenizer(gguf: Path) -> Any:
    """The tokenizer of the file, splitting text as its vocabulary was trained to."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    _split_as_trained(tokenizer, _pre_tokenizer_name(gguf))
    return tokenizer


def end_token_ids(first: int | None, tokenizer: Any) -> list[int]:
    """The declared end token, then every other special token of the vocabulary that ends a turn or a document."""
    vocabulary = tokenizer.get_vocab()
    known = [vocabulary[token] for token in END_TOKENS if token in vocabulary]
    declared = [] if first is None else [first]
    return list(dict.fromkeys(declared + known))


def _split_as_trained(tokenizer: Any, name: str) -> None:
    """Mend the two splitters that transformers reads as a plain one: a wrong split costs quality, silently."""
    backend = tokenizer.backend_tokenizer
    if name == "smollm":  # SmolLM's tokenizer.json: every digit alone, then GPT-2's rule
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name == "qwen2":  # Qwen2's tokenizer.json composes characters first
        backend.normalizer = normalizers.NFC()


def _pre_tokenizer_name(gguf: Path) -> str:
    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())


def _load_model(gguf: Path) -> Any:
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=quantization, dtype=torch.bfloat16, trust_remote_code=False
    )
    # The weights are plain by now; what remembers the quantisation would make `save_pretrained` refuse.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _generation_config(config: Any, tokenizer: Any) -> GenerationConfig:
    return GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=end_token_ids(config.eos_token_id, tokenizer),
        pad_token_id=config.pad_token_id,
    )


def main(gguf: str, folder: str) -> int:
    """Convert; on failure write the reason to stdout, in one line, for the process that asked."""
    try:
        convert(Path(gguf), Path(folder))
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        sys.stdout.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
