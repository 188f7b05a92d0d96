"""Models as the library reads them, stored in the cache once they have passed the model check.

A start reads such a file in place of the weights: nothing is converted, transformers is not imported, and the check is not
repeated. The file's name has a digest of everything on which the check and the packed weights depend: weights, code, library,
processor, versions of torch and transformers. Only a process of its own writes a file, after the check and after a comparison of
the stored model with the checked one. So a mismatch is never stored.

A file is a safetensors file. Its sizes and the sum of its words are compared when it is read; a damaged file is made again.
Linear layers are read into huge pages. Embeddings stay in the file: a pass reads a row for each token.

Run as a program, this module stores a model.
"""

import json
import logging
import math
import mmap
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor

import engine
from engine.attention.packing import pack
from engine.attention.segments import chain_segment
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel, load_model
from engine.model.linear_backends import NATIVE, fastest_linears
from engine.native import library
from engine.native.decoder import DecoderParts, LayerParts, NativeDecoder, Rotation, UnknownDecoder, rotations_of
from engine.native.linear import PackedWeights
from engine.utils import huge_pages
from engine.utils.one_line import one_line
from engine.utils.progress_bar import long_work
from engine.weights import WeightsCache, WeightsError, default_root
from engine.weights.fingerprint import weights_digest
from engine.weights.separate_process import reported, run_apart
from engine.weights.vocabulary import digest_of
from engine.weights.weight_headers import num_parameters

_logger = logging.getLogger(__name__)

_VERSION = 1  # of the file's form
_FEWEST_PARAMETERS = 10_000_000  # of a stored model: a smaller one loads as fast as transformers is imported
_MOST_BYTES = 8  # of a parameter in the file, embeddings and a copied output head included
_SPARE_BYTES = 4 << 30  # of the disk, which are left free
_KEPT_FILES = 2  # of a model and a precision: this code's and another checkout's
_CODE = ("attention", "kv_cache", "model", "native", "utils", "weights")  # packages whose files decide a pass or the check
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, FileNotFoundError)  # raised by reading a damaged file
_WORD = np.dtype(np.uint64)
_EMBEDDINGS = "embeddings"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}


class StoredModel(CausalModel):
    """A model of a stored file. It has no module of transformers, so nothing but the library can run it."""

    def __init__(self, parts: DecoderParts, facts: "_ModelFacts", precision: str) -> None:
        self.device, self.attend, self.memories = torch.device("cpu"), None, []
        self.native = NativeDecoder(parts, precision)
        self._parts, self._facts = parts, facts

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return self._facts.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest context that the model can run."""
        return self._facts.max_positions

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        return self._facts.eos_token_ids

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self._parts.layers)

    @property
    def description(self) -> str:
        """The configuration, as JSON."""
        return self._facts.description

    @property
    def precision(self) -> str:
        """The number format in which it computes, as a name."""
        return self._facts.precision

    @property
    def embeddings_VD(self) -> Float[Tensor, "V D"]:
        """The embeddings of tokens, unscaled."""
        return self._parts.embeddings_VD

    def output_rows(self, ids_M: Int[Tensor, " M"]) -> Float[Tensor, "M D"]:
        """Return the output layer's weights of some tokens, ascending."""
        return self._parts.head.rows(ids_M)


@dataclass(frozen=True, slots=True)
class _ModelFacts:
    """The fields of transformers' configuration that a CausalModel reads."""

    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    description: str
    precision: str


def load_stored(folder: Path, precision: str, device: torch.device) -> StoredModel | None:
    """Return the stored model of a folder, made first if it is missing; None if it is not to be stored.

    Small models, models that the library cannot run, and models for which the disk lacks space are not stored.
    Raises the errors of the model check.
    """
    if fastest_linears(device) != NATIVE or (count := num_parameters(folder)) < _FEWEST_PARAMETERS:
        return None
    store = WeightsCache(default_root())
    entry = store.packed(_name(folder, precision))
    try:
        for _ in range(2):
            if not entry.exists() and not _has_space(store, count):
                return None
            store.obtain(entry, lambda target, _: _make(folder, precision, target, entry.parent))
            try:
                return read_stored(entry, precision)
            except _DAMAGE as error:
                _logger.warning("%s is damaged (%s) and is made again", entry, one_line(error))
                entry.unlink(missing_ok=True)
    except OSError as error:
        _logger.warning("the model cannot be stored in %s, so each start converts it: %s", store.root, one_line(error))
    return None


def forget_stored(folder: Path, precision: str) -> None:
    """Delete the stored model of a folder, so that the next load checks it again. Raises OSError."""
    if fastest_linears(torch.device("cpu")) == NATIVE:
        WeightsCache(default_root()).packed(_name(folder, precision)).unlink(missing_ok=True)


def _has_space(store: WeightsCache, num_parameters: int) -> bool:
    root = next(path for path in (store.root, *store.root.parents) if path.exists())
    wanted, free = num_parameters * _MOST_BYTES + _SPARE_BYTES, shutil.disk_usage(root).free
    if free < wanted:
        _logger.warning("the packed model is not stored: %s has %.1f GB free, %.1f are wanted", root, free / 1e9, wanted / 1e9)
    return free >= wanted


def _name(folder: Path, precision: str) -> str:
    """Return the file's name, with a digest of everything that the check and the packed weights depend on."""
    files = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.json"))]
    parts = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode() for path in files]
    parts += [(folder / name).read_bytes() for name in ("config.json", "generation_config.json") if (folder / name).is_file()]
    parts += [weights_digest(folder).encode(), precision.encode(), _digest_of_code().encode(), str(_VERSION).encode()]
    return f"{_prefix(folder, precision)}{digest_of(parts)}"


def _prefix(folder: Path, precision: str) -> str:
    return f"{folder.name}-{precision}-"


@cache
def _digest_of_code() -> str:
    """Return a digest of this code, the libraries and the processor."""
    from importlib.metadata import version

    root = Path(engine.__file__).parent
    files = [path for package in _CODE for path in sorted((root / package).rglob("*.py"))]
    versions = [torch.__version__, version("transformers"), library.digest(), str(library.instruction_set()), library.processor()]
    return digest_of([*(path.read_bytes() for path in files), *(one.encode() for one in versions)])


def _make(folder: Path, precision: str, target: Path, entries: Path) -> None:
    """Write the file of a model, and delete old files."""
    with long_work(f"packing {folder.name} in {precision} and checking it, once for all starts"):
        _store_in_process(folder, precision, target)
    _delete_old(entries, _prefix(folder, precision))


def _store_in_process(folder: Path, precision: str, target: Path) -> None:
    """Check and store a model in a process of its own, which frees the memory of transformers and of the weights."""
    run_apart(__spec__.name, str(folder), precision, str(target))


def _delete_old(folder: Path, prefix: str) -> None:
    """Delete all but the latest files of a model and a precision, before the next one is added."""
    if folder.is_dir():
        found = sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        same = [path for path in found if path.name.startswith(prefix) and "-" not in path.stem.removeprefix(prefix)]
        for path in same[: max(0, len(same) - _KEPT_FILES + 1)]:
            path.unlink(missing_ok=True)


def store(folder: Path, precision: str, target: Path) -> None:
    """Load and check a model with transformers, and write it as a stored file. Raises the errors of the check.

    A model that the library cannot run gives a file without tensors.
    """
    model = load_model(folder, precision, torch.device("cpu"), NATIVE)
    if model.native is None:
        _write(target, {}, {"native": False})
        return
    try:
        rotations = rotations_of(model.module)
    except UnknownDecoder as error:
        _logger.info("%s", error)
        _write(target, {}, {"native": False})
        return
    parts = model.native.parts
    facts = {
        "vocab_size": model.vocab_size,
        "max_positions": model.max_positions,
        "eos_token_ids": model.eos_token_ids,
        "description": model.description,
        "precision": model.precision,
    }
    tensors, content = _flattened(parts, rotations)
    _write(target, tensors, {"native": True, "facts": facts, **content})
    copy = read_stored(target, precision)
    if copy is None or not torch.equal(_sample(copy), _sample(model)):
        raise WeightsError(f"the stored model of {folder} gives other logits than the model")


def _sample(model: CausalModel) -> Tensor:
    """Return logits of a short sequence."""
    ids = [(index * 131 + 7) % model.vocab_size for index in range(24)]
    batch = pack([chain_segment(ids, 0, range(len(ids)))], model.device)
    return model.forward(batch, KVCache(len(ids), model.device, dtype=model.cache_dtype), torch.arange(len(ids)))


def _flattened(parts: DecoderParts, rotations: list[Rotation]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a decoder by name, and the rest as JSON."""
    tensors: dict[str, Tensor] = {_EMBEDDINGS: parts.embeddings_VD, "last_norm": parts.last_norm}

    def linear(name: str, weights: PackedWeights) -> list[int]:
        found = {"packed": weights.packed, "scale": weights.scale_O, "bias": weights.bias_O}
        tensors.update({f"{name}.{part}": tensor for part, tensor in found.items() if tensor is not None})
        return [weights.num_inputs, weights.num_outputs, weights.number]

    layers = []
    for index, layer in enumerate(parts.layers):
        linears = {name: linear(f"{index}.{name}", weights) for name, weights in layer.linears.items()}
        tensors.update({f"{index}.{name}": norm for name, norm in layer.norms.items()})
        layers.append({"linears": linears, "norms": [*layer.norms], "window": layer.window, "rotation": layer.rotation})
    for index, rotation in enumerate(rotations):
        tensors[f"rotation.{index}"] = rotation.frequencies_F
    head = linear("head", parts.head)
    return tensors, {
        "sizes": dict(parts.sizes),
        "head": head,
        "layers": layers,
        "scalings": [rotation.scaling for rotation in rotations],
    }


def _write(target: Path, tensors: Mapping[str, Tensor], content: dict[str, Any]) -> None:
    """Write a stored file; its metadata have the sum of the tensors' words."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    sums = {name: _sum_of(tensor.view(torch.uint8).flatten().numpy()) for name, tensor in whole.items()}
    described = json.dumps({"content": content, "sums": sums, "shapes": {name: [*one.shape] for name, one in whole.items()}})
    metadata = {"version": str(_VERSION), "described": described, "digest": digest_of([described.encode()])}
    save_file(whole, target, metadata)
    target.chmod(0o600)


def _sum_of(octets: "np.ndarray[Any, Any]") -> int:
    """Return the sum of all words, modulo 2^64. It reads at the speed of memory, and shows lost and changed bytes."""
    end = len(octets) // _WORD.itemsize * _WORD.itemsize
    return (int(octets[:end].view(_WORD).sum(dtype=_WORD)) + int(octets[end:].sum(dtype=_WORD))) % (1 << 64)


def read_stored(path: Path, precision: str) -> StoredModel | None:
    """Return the model of a stored file, None if the library cannot run it. Raises one of _DAMAGE for another file."""
    with path.open("rb") as file:
        header, begin = _header(file, path.stat().st_size)
        metadata = header.pop("__metadata__")
        if metadata["version"] != str(_VERSION):
            raise ValueError(f"no stored model of version {_VERSION}")
        if digest_of([metadata["described"].encode()]) != metadata["digest"]:
            raise ValueError("its digest differs")
        described = json.loads(metadata["described"])
        content = described["content"]
        if {name: entry["shape"] for name, entry in header.items()} != described["shapes"]:
            raise ValueError("its shapes differ")
        if content["native"] is not True:
            return None
        tensors = dict(_tensors(file, header, begin, described["sums"]))
    facts = _ModelFacts(**{**content["facts"], "eos_token_ids": tuple(content["facts"]["eos_token_ids"])})
    return StoredModel(_parts(content, tensors), facts, precision)


def _header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file and the offset of its first tensor; raise ValueError for another size."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= size:
        raise ValueError("it is no safetensors file")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("it is no safetensors file")
    begin = 8 + length
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if begin + max(ends, default=0) != size:
        raise ValueError(f"it has {size} bytes and not {begin + max(ends, default=0)}")
    return header, begin


def _tensors(file: BinaryIO, header: Mapping[str, Any], begin: int, sums: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors: embeddings in the file, others in memory. Raise ValueError for another sum."""
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        first, end = entry["data_offsets"]
        if end - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} has another size")
        if name == _EMBEDDINGS:
            yield name, _mapped(file, begin + first, end - first, dtype, shape, sums[name])
            continue
        tensor = huge_pages.empty(shape, dtype)
        octets = tensor.view(torch.uint8).flatten().numpy() if tensor.dim() else np.empty(0, np.uint8)
        file.seek(begin + first)
        if file.readinto(octets) != end - first or _sum_of(octets) != sums[name]:  # type: ignore[attr-defined]
            raise ValueError(f"the content of {name} differs")
        yield name, tensor


def _mapped(file: BinaryIO, offset: int, num_bytes: int, dtype: torch.dtype, shape: tuple[int, ...], expected: int) -> Tensor:
    """Return a tensor whose pages are read from the file when they are needed."""
    whole = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    octets = np.frombuffer(whole, dtype=np.uint8, count=num_bytes, offset=offset)
    if _sum_of(octets) != expected:
        raise ValueError("the content of the embeddings differs")
    whole.madvise(mmap.MADV_DONTNEED)  # the pages that the sum has read
    return torch.frombuffer(whole, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)


def _parts(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> DecoderParts:
    def linear(name: str, sizes: list[int]) -> PackedWeights:
        num_inputs, num_outputs, number = sizes
        found = tensors[f"{name}.packed"], tensors.get(f"{name}.scale"), tensors.get(f"{name}.bias")
        return PackedWeights(num_inputs, num_outputs, number, *found)

    layers = [
        LayerParts(
            linears={name: linear(f"{index}.{name}", sizes) for name, sizes in layer["linears"].items()},
            norms={name: tensors[f"{index}.{name}"] for name in layer["norms"]},
            window=layer["window"],
            rotation=layer["rotation"],
        )
        for index, layer in enumerate(content["layers"])
    ]
    return DecoderParts(
        sizes=content["sizes"],
        embeddings_VD=tensors[_EMBEDDINGS],
        last_norm=tensors["last_norm"],
        head=linear("head", content["head"]),
        layers=layers,
        rotations=[Rotation(tensors[f"rotation.{index}"], scaling) for index, scaling in enumerate(content["scalings"])],
    )


def main(folder: str, precision: str, target: str) -> int:
    """Store a model for `_store_in_process`."""

    def work() -> str:
        store(Path(folder), precision, Path(target))
        return ""

    return reported(work)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
