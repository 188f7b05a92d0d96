"""Requests under LoRA adapters, by the library and by torch, and requests of the base beside loaded adapters, by turns.

    python -m benchmarks.lora --model smollm2-135m --dtype float32 --rank 16 --concurrency 4 --rounds 5

Random adapters of all linear layers; plain decoding. `adapters` gives the requests to several adapters in turn, `base` to none.
Prints times as fast as the first contender of the group, the median over rounds with the lowest and the highest; the last line
is JSON. Torch takes part in float32 and bfloat16.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.markdown import table
from engine.build import Models, build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.tree import PLAIN
from engine.core.types import Request
from engine.engine import Engine
from engine.model.causal_lm import CausalModel, load_model
from engine.model.linear_backends import torch_linears
from engine.native.linear import QUANTISED
from engine.utils.progress_bar import progress_bar
from engine.weights import resolve
from engine.weights.pretrained import empty_module
from server.cli.bench_compare import BenchLoad, Case, run_case

_PLAIN = Case("coupled", PLAIN)
_NUM_ADAPTERS, _PROMPT_TOKENS = 3, 32


def main() -> None:
    """Print a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lora = write_adapters(Path(folder), args.model, args.rank)
        engines = _engines(args, lora)
    names = [name for name, _ in lora]
    rng = random.Random(0)
    prompts = tuple(tuple(rng.choices(range(100, 2000), k=_PROMPT_TOKENS)) for _ in range(args.requests))
    load = BenchLoad(prompts, 0.0, args.max_tokens, args.concurrency)
    groups = {"adapters": [name for name in ("torch", "library") if name in engines], "base": ["without adapters", "library"]}
    places = [(group, name) for group, contenders in groups.items() for name in contenders]
    speeds: dict[tuple[str, str], list[float]] = {place: [] for place in places}
    for number in progress_bar(range(args.rounds + 1), what=args.model, total=args.rounds + 1, unit="round"):
        for group, name in places if number % 2 else places[::-1]:
            used = names if group == "adapters" else [None]
            run = run_case(engines[name], _under(load.requests(_PLAIN, number), used), args.concurrency)
            if number:  # the first round warms up
                speeds[group, name].append(run.tokens_per_s)
    figures = [
        {"requests": group, "how": name, "over": contenders[0], **_ratio(speeds[group, name], speeds[group, contenders[0]])}
        for group, contenders in groups.items()
        for name in contenders
    ]
    heads = ["requests", "how", "over", "ratio", "low", "high", "tokens_per_s"]
    print(table(heads, ([str(figure[head]) for head in heads] for figure in figures)))
    print(json.dumps({"arguments": vars(args), "figures": figures}))


def _engines(args: argparse.Namespace, lora: tuple[tuple[str, str], ...]) -> dict[str, Engine]:
    config = EngineConfig(
        model=args.model, dtype=args.dtype, num_threads=args.threads, scheduler=SchedulerConfig(num_slots=4096, max_model_len=512)
    )
    models: Models = {}
    engines = {"without adapters": build_engine(config), "library": build_engine(replace(config, lora=lora), models=models)}
    if args.dtype not in QUANTISED:
        engines["torch"] = build_engine(replace(config, lora=lora), load=_by_torch)
    return engines


def _by_torch(folder: Path, dtype: str, device: torch.device) -> CausalModel:
    return load_model(folder, dtype, device, torch_linears(device))


def write_adapters(folder: Path, model: str, rank: int) -> tuple[tuple[str, str], ...]:
    """Write random adapters of all linear layers but the output layer in PEFT's format; return their names and folders."""
    module = empty_module(resolve(model).folder)
    layers = {name: one for name, one in module.named_modules() if type(one) is nn.Linear and ".layers." in name}
    names = [_write_adapter(folder, number, rank, layers) for number in range(_NUM_ADAPTERS)]
    return tuple((name, f"{folder}/{name}") for name in names)


def _write_adapter(folder: Path, number: int, rank: int, layers: Mapping[str, nn.Linear]) -> str:
    generator, tensors = torch.Generator().manual_seed(number), {}
    for name, layer in layers.items():
        shapes = {"A": (rank, layer.in_features), "B": (layer.out_features, rank)}
        for part, shape in shapes.items():
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = torch.randn(*shape, generator=generator) * 0.01
    name = f"adapter-{number}"
    (folder / name).mkdir()
    save_file(tensors, folder / name / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / name / "adapter_config.json").write_text(json.dumps(config))
    return name


def _under(requests: Iterator[Request], adapters: "list[str] | list[None]") -> Iterator[Request]:
    for index, request in enumerate(requests):
        yield replace(request, adapter=adapters[index % len(adapters)])


def _ratio(speeds: list[float], first: list[float]) -> dict[str, float]:
    ratios = [one / other for one, other in zip(speeds, first, strict=True)]
    found = {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
    return {name: round(value, 3) for name, value in {**found, "tokens_per_s": statistics.median(speeds)}.items()}


if __name__ == "__main__":
    main()
