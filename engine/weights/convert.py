"""Convert one GGUF file to a folder that transformers loads in seconds. Run as a program, in its own process.

It completes the result of transformers' GGUF loader, which cannot be saved as it is. The result has one end token, and a chat
model has several. The separate process returns the conversion's memory, and separates its output.
"""

import re
import sys
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

from engine.utils.one_line import one_line
from engine.weights.errors import WeightsError
from engine.weights.gguf_tokenizer import load_tokenizer
from engine.weights.presets import EXACT

# Tokens that llama.cpp treats as ends of generation, if the vocabulary has them.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")

# GGML types that the gguf package can dequantise.
TYPES = [
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "TQ1_0",
    "TQ2_0",
    "MXFP4",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ4_NL",
    "IQ4_XS",
]
_NARROW = (torch.bfloat16, torch.float16)


def convert(gguf: Path, folder: Path, weights: str = EXACT) -> None:
    """Write the model (safetensors), configuration, end tokens and tokenizer of `gguf` to `folder`.

    `weights` is `exact`, for the file's own values, or the format to which they are rounded.
    """
    _read_once()
    tokenizer = load_tokenizer(gguf)
    _refuse_unreadable(gguf)
    model = _load_model(gguf, torch.float32 if weights == EXACT else getattr(torch, weights))
    if weights == EXACT:
        _narrow(model)
    model.generation_config = _generation_config(model.config, tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder, max_shard_size="2GB")
    formats = {parameter.dtype for parameter in model.parameters()}
    # With several formats transformers would write the first one.
    model.config.dtype = formats.pop() if len(formats) == 1 else torch.float32
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class _Reader(GGUFReader):
    """Reads fields from a plain array: a slice of NumPy's memory map takes several times as long, and there are a million."""

    def _get(self, *args: Any, **kwargs: Any) -> Any:
        reader: Any = self
        if isinstance(reader.data, np.memmap):
            reader.data = reader.data.view(np.ndarray)
        return super()._get(*args, **kwargs)


@lru_cache(maxsize=1)
def _reader(path: str, size: int, time_ns: int) -> GGUFReader:
    del size, time_ns  # another file has others
    return _Reader(path)


def _shared_reader(path: Path | str) -> GGUFReader:
    stat = Path(path).stat()
    return _reader(str(path), stat.st_size, stat.st_mtime_ns)


@cache
def _read_once() -> None:
    """Let transformers read the file once in this process. It reads it again for each part, and names tensors for each module."""
    gguf_package.GGUFReader = _shared_reader
    gguf_package.get_tensor_name_map = cache(gguf_package.get_tensor_name_map)


def end_token_ids(first: int | None, tokenizer: Any) -> list[int]:
    """Return the declared end token, then every other special token of the vocabulary that ends a turn or a document."""
    vocabulary = tokenizer.get_vocab()
    known = [vocabulary[token] for token in END_TOKENS if token in vocabulary]
    declared = [] if first is None else [first]
    return list(dict.fromkeys(declared + known))


def _refuse_unreadable(gguf: Path) -> None:
    """Raise WeightsError for tensors of an unsupported type, and for scaled rotary frequencies, which transformers ignores."""
    try:
        reader = gguf_package.GGUFReader(gguf)
    except ValueError as error:
        unknown = re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error))
        if unknown is None:
            raise
        raise WeightsError(_refusal("a tensor", unknown[1])) from error
    for tensor in reader.tensors:
        if (name := tensor.tensor_type.name) not in TYPES:
            raise WeightsError(_refusal(f"tensor {tensor.name}", name))
    scaled = [name for name, field in reader.fields.items() if name.endswith(".rope.scaling.type") and field.contents() != "none"]
    scaled += [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_") and np.any(tensor.data != 1)]
    if scaled:
        raise WeightsError(
            f"{scaled[0]} scales rotary frequencies, which is not supported in GGUF files; use the model's own folder"
        )


def _refusal(what: str, kind: str) -> str:
    return f"{what} has the GGML type {kind}, which is not supported; supported types are {', '.join(TYPES)}"


def _narrow(model: Any) -> None:
    """Store weights in 16 bits if that is exact: all in one format if possible, else each in its own."""
    fits = {parameter: [dtype for dtype in _NARROW if _holds(dtype, parameter)] for parameter in model.parameters()}
    common = [dtype for dtype in _NARROW if all(dtype in dtypes for dtypes in fits.values())]
    for parameter, dtypes in fits.items():
        for dtype in (common or dtypes)[:1]:
            parameter.data = parameter.data.to(dtype)


def _holds(dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def _load_model(gguf: Path, dtype: torch.dtype) -> Any:
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=quantization, dtype=dtype, trust_remote_code=False
    )
    # The weights are dequantised. `save_pretrained` would fail with traces of the quantisation.
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


def main(gguf: str, folder: str, weights: str = EXACT) -> int:
    """Convert; on failure write the reason to stdout, in one line, for the parent process."""
    try:
        convert(Path(gguf), Path(folder), weights)
    except WeightsError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        sys.stdout.write(f"{type(error).__name__}: {one_line(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
