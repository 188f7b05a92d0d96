"""Who is compared: every peer's ways of running one model, and ours. Knows commands and what a request says; starts nothing."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import setup
from benchmarks.peers.processes import PORT, Launch
from benchmarks.peers.report import OURS
from engine.core.tree import Expansion
from engine.native.linear import QUANTISED
from engine.weights.references import LocalWeights

PRECISIONS = ("float32", "bfloat16", *QUANTISED)
_GIB = 2**30
_LIBRARIES_BYTES = _GIB // 2  # what a process holds beside weights and cache, roughly
_GGUF_BITS = {  # the file as it came, and requantised from it
    "llama.cpp": {"shipped": 5.0, "Q8_0": 8.5, "BF16": 16.0},
    "ik_llama.cpp": {
        "Q8_0": 8.5,
        "IQ4_K": 4.5,
        "Q4_0_R8": 4.5,
    },  # not Q4_1: findings/ik_llama_prompts.sh
}
_ADAPTERS = "benchmarks.peers.adapters"


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the comparison. Contenders of one launch share its process; `fields` tell their requests apart.

    `peer` is what must have been set up, None for ours; `conversions` make the files that the launch names.
    """

    name: str
    peer: str | None
    launch: Launch
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    max_concurrency: int | None = None
    conversions: tuple[setup.Conversion, ...] = ()


@dataclass(frozen=True, slots=True)
class Subject:
    """What all of them run: the weights, and how much at a time."""

    model: LocalWeights
    draft: LocalWeights | None
    config: Path
    tree: Expansion
    precisions: Sequence[str]
    threads: int
    max_concurrency: int
    context_tokens: int  # of one sequence

    def weights_bytes(self, bits: float, has_draft: bool = False) -> int:
        """Return the size of the weights, stored in bfloat16, in so many bits each."""
        folders = [self.model.folder, *([self.draft.folder] if self.draft and has_draft else [])]
        stored = sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
        return int(stored * bits / 16)


def contenders_of(subject: Subject) -> list[Contender]:
    """Return everybody who can run the subject, set up or not."""
    makers: list[Callable[[Subject], Iterator[Contender]]] = [_transformers, _llama_cpp, _openvino, _exported, _vllm, _ours]
    return [contender for maker in makers for contender in maker(subject)]


def those_ready(asked: Sequence[Contender]) -> tuple[list[Contender], list[str]]:
    """Return those whose peer is set up, and a line for each peer that is not."""
    missing = dict.fromkeys(one.peer for one in asked if one.peer is not None and not setup.is_set_up(one.peer))
    why = [f"{peer} is not set up (python -m benchmarks.peers setup {peer})" for peer in missing]
    return [one for one in asked if one.peer not in missing], why


def _transformers(subject: Subject) -> Iterator[Contender]:
    for dtype, bits in (("float32", 32), ("bfloat16", 16)):
        for draft in (None, subject.draft) if subject.draft else (None,):
            words = [str(subject.model.folder), dtype, str(subject.threads), *([str(draft.folder)] if draft else [])]
            launch = _adapter("transformers", "generate", words, subject.weights_bytes(bits, has_draft=draft is not None))
            name = f"transformers.{dtype}" + (".assisted" if draft else "")
            yield Contender(name, "transformers", launch, max_concurrency=1 if draft else None)
        words = [str(subject.model.folder), dtype, *map(str, (subject.threads, subject.max_concurrency, subject.context_tokens))]
        launch = _adapter("transformers", "continuous", words, subject.weights_bytes(bits) + _GIB)
        yield Contender(f"transformers.continuous.{dtype}", "transformers", launch)


def _openvino(subject: Subject) -> Iterator[Contender]:
    if subject.model.gguf:
        cache_gib = 1 + subject.max_concurrency * subject.context_tokens // 32768
        words = [str(subject.model.gguf), str(subject.threads), str(cache_gib)]
        yield Contender(
            "openvino", "openvino", _adapter("openvino", "openvino", words, subject.weights_bytes(16) + cache_gib * _GIB)
        )


def _exported(subject: Subject) -> Iterator[Contender]:
    """Yield the libraries that export the model for themselves; they take one request at a time here."""
    for peer, module in (("onnxruntime-genai", "onnxruntime"), ("mnn", "mnn")):
        for num_bits in (8, 4):
            exported = setup.exported(peer, subject.model.folder, num_bits)
            words = [str(exported.target), str(subject.threads)]
            launch = _adapter(peer, module, words, 2 * subject.weights_bytes(num_bits + 1))
            yield Contender(f"{peer}.int{num_bits}", peer, launch, max_concurrency=1, conversions=(exported,))


def _adapter(peer: str, module: str, words: Sequence[str], weights_bytes: int) -> Launch:
    command = (str(setup.python(peer)), "-m", f"{_ADAPTERS}.{module}", *words)
    threads = {"OMP_NUM_THREADS": words[2 if peer == "transformers" else 1]}
    return Launch(command, "lines", weights_bytes + _LIBRARIES_BYTES, threads)


def _llama_cpp(subject: Subject) -> Iterator[Contender]:
    """Yield llama.cpp and its fork: plain, and llama.cpp with a draft model."""
    if not subject.model.gguf:
        return
    for peer, bits_of in _GGUF_BITS.items():
        drafts = [subject.draft.gguf] if peer == "llama.cpp" and subject.draft and subject.draft.gguf else []
        for kind, bits in bits_of.items():
            for draft in (None, *drafts):
                sources = [subject.model.gguf, *([draft] if draft else [])]
                made = () if kind == "shipped" else tuple(setup.requantised(peer, source, kind) for source in sources)
                files = [one.target for one in made] or sources
                size = subject.weights_bytes(bits, has_draft=draft is not None) + _GIB
                yield Contender(
                    name=f"{peer}.{kind.lower()}" + (".draft" if draft else ""),
                    peer=peer,
                    launch=Launch(_llama_server(peer, subject, files), "http", size),
                    fields={"top_k": 0, "min_p": 0.0, "cache_prompt": False},
                    conversions=made,
                )


def _llama_server(peer: str, subject: Subject, files: Sequence[Path]) -> tuple[str, ...]:
    """Return the command for a target, and a draft model if there is a second file."""
    where = ["--model", str(files[0]), "--host", "127.0.0.1", "--port", PORT]
    size = ["--parallel", str(subject.max_concurrency), "--ctx-size", str(subject.max_concurrency * subject.context_tokens)]
    how = ["--threads", str(subject.threads), "--flash-attn", "on", "--cache-ram", "0"]
    how += ["--log-disable"] if peer == "ik_llama.cpp" else []  # it writes a file into the working folder
    drafting = ["--spec-type", "draft-simple", "--spec-draft-model", str(files[1])] if files[1:] else []
    return (str(setup.llama_program("llama-server", peer)), *where, *size, *how, *drafting)


def _vllm(subject: Subject) -> Iterator[Contender]:
    cores = ",".join(map(str, range(subject.threads)))
    for dtype, bits in (("bfloat16", 16), ("float32", 32)):
        where = ["--model", str(subject.model.folder), "--host", "127.0.0.1", "--port", PORT, "--dtype", dtype]
        size = ["--max-num-seqs", str(subject.max_concurrency), "--max-model-len", str(subject.context_tokens)]
        how = ["--no-enable-prefix-caching", "--generation-config", "vllm"]
        yield Contender(
            name=f"vllm.{dtype}",
            peer="vllm",
            launch=Launch(
                (str(setup.python("vllm")), "-m", "vllm.entrypoints.openai.api_server", *where, *size, *how),
                "http",
                subject.weights_bytes(bits) + 3 * _GIB,
                {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_NO_USAGE_STATS": "1"},
            ),
            fields={"model": str(subject.model.folder), "return_token_ids": True},
        )


def _ours(subject: Subject) -> Iterator[Contender]:
    told = {"model": OURS, "return_token_ids": True}
    for precision in subject.precisions:
        plain, adaptive = (_our_server(subject, precision, policy) for policy in ("plain", "adaptive"))
        yield Contender(f"{OURS}.{precision}.plain", None, plain, told)
        yield Contender(f"{OURS}.{precision}.fixed", None, adaptive, {**told, "speculative": _wish(subject.tree)})
        yield Contender(f"{OURS}.{precision}.adaptive", None, adaptive, told)


def _our_server(subject: Subject, precision: str, policy: str) -> Launch:
    where = ["--config", str(subject.config), "--host", "127.0.0.1", "--port", PORT, "--model-name", OURS]
    size = ["--max-running", str(subject.max_concurrency), "--num-threads", str(subject.threads)]
    how = ["--dtype", precision, "--policy", policy, "--prefix-cache", "off"]
    command = (str(Path(sys.executable).parent / OURS), "serve", *where, *size, *how)
    bits = {"float32": 48, "bfloat16": 32}.get(precision, 40)  # at most, while layers are packed: others are loaded in float32
    return Launch(command, "http", subject.weights_bytes(bits) + 3 * _GIB)


def _wish(tree: Expansion) -> dict[str, Any]:
    """Return a tree as a request asks for it; its verifier is one that is exact on it."""
    shape: dict[str, Any] = {"tree": tree.tree, "branches": tree.branches, "depth": tree.depth}
    return {**shape, "trunk": tree.trunk} if tree.is_delayed else {**shape, "max_nodes": tree.max_nodes}
