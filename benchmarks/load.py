"""Tokens a second by load: plain decoding, one fixed tree and the policy on the same requests, 1 to 32 at a time, kinds mixed.

python -m benchmarks.load run --config configs/default.yaml --out load.jsonl
python -m benchmarks.load report load.jsonl

One engine serves the policy throughout, so it learns as a server does; its first measurement is a warm-up and not counted.
`--useless` gives it a drafter whose weights are shuffled: what it then costs is what the policy takes to find out.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoTokenizer

from benchmarks.drafters.contenders import PLAINLY, Contender, Stable
from benchmarks.drafters.foreign import ForeignCpu
from benchmarks.drafters.report import interval
from engine.progress_bar import progress_bar
from engine.tree import parse_expansion
from engine.types import Request, SamplingParams
from engine.weights import resolve
from server.bench import Run, run_case
from server.bench_prompts import load_prompts
from server.chat_ids import chat_ids
from server.settings import load_settings

_PROMPTS = Path(__file__).parent / "prompts.yaml"
_MAX_FOREIGN_CPUS = 0.2
_FEWEST = 4  # requests of a measurement


@dataclass(frozen=True, slots=True)
class Measured:
    """One contender at one load in one round: tokens a second, tokens a sequence and step, share of the policy's own seconds."""

    round: int
    batch: int
    contender: str
    tokens_per_s: float
    block_efficiency: float
    policy_share: float
    foreign_cpus: float | None

    @classmethod
    def of(cls, round_number: int, batch: int, contender: str, run: Run, foreign_cpus: float | None) -> "Measured":
        """Return a run's figures, prompts' feeding aside."""
        steps = [step for step in run.steps if step.num_prompt_tokens == 0]
        seconds = sum(step.step_s for step in steps)
        tokens = sum(step.num_generated_tokens for step in steps)
        rows = sum(step.num_decoding_rows for step in steps)
        share = sum(step.policy_s for step in steps) / seconds
        return cls(round_number, batch, contender, tokens / seconds, tokens / rows, share, foreign_cpus)


def requests_of(
    prompts: Sequence[tuple[int, ...]], batch: int, round_number: int, contender: Contender, max_tokens: int, verifier: str
) -> Iterator[Request]:
    """Yield requests of every kind and temperature in turn, the same for each contender; texts are equally long."""
    for index in range(max(_FEWEST, batch)):
        place = index + round_number * max(_FEWEST, batch)
        temperature = (0.0, 0.7, 1.0)[place % 3]
        sampling = SamplingParams(temperature, seed=place if temperature else None, max_tokens=max_tokens, ignore_eos=True)
        prompt = prompts[place % len(prompts)]
        yield Request(f"{round_number}-{batch}-{index}", prompt, sampling, contender.speculation(verifier))


def shuffled_head(path: Path, folder: Path) -> str:
    """Write a copy of a head whose weights are all in wrong places; return where."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        metadata = file.metadata()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            order = torch.randperm(tensor.numel(), generator=generator)
            tensors[name] = tensor.flatten()[order].reshape(tensor.shape)
    save_file(tensors, folder / "useless.safetensors", metadata)
    return str(folder / "useless.safetensors")


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Measure round by round, loads ascending and then descending, contenders in an order that changes; append JSON lines."""
    config = load_settings(args.config, {"policy": "adaptive"}).to_tool_config()
    head = shuffled_head(args.head, folder) if args.useless else str(args.head)
    stable = Stable(config, {"draft_model": None, "lens": None, "head": head})
    drafter = "head" if args.useless else "head+ngram"
    contenders = {"plain": PLAINLY, "policy": Contender(drafter, None)}
    if args.static:
        contenders["static"] = Contender(drafter, parse_expansion(args.static))
    tokenizer = AutoTokenizer.from_pretrained(resolve(config.model).folder)
    by_kind = load_prompts(_PROMPTS, args.kinds, args.num_prompts)
    prompts = [chat_ids(tokenizer, one.text) for same in zip(*by_kind.values(), strict=False) for one in same]
    engines = {name: stable.engine(one.drafter) for name, one in contenders.items()}
    loads = [(number, batch) for number in range(args.rounds) for batch in args.batches[:: -1 if number % 2 else 1]]
    with progress_bar(loads, what="measuring", total=len(loads), unit="load") as bar, args.out.open("a") as out:
        for turn, (number, batch) in enumerate(bar):
            for name in random.Random(turn).sample(sorted(contenders), len(contenders)):
                watch = ForeignCpu()
                wanted = requests_of(prompts, batch, number, contenders[name], args.max_tokens, config.verifier)
                run = run_case(engines[name], wanted, batch)
                found = Measured.of(number, batch, name, run, watch.cpus())
                if turn:
                    out.write(json.dumps({name: getattr(found, name) for name in Measured.__slots__}) + "\n")
                    out.flush()


def report(path: Path, max_foreign: float) -> str:
    """Return a Markdown table: each contender's tokens a second over plain decoding's of the same round and load."""
    found = [Measured(**json.loads(line)) for line in path.read_text().splitlines()]
    rounds: dict[tuple[int, int], dict[str, Measured]] = defaultdict(dict)
    for one in found:
        rounds[one.batch, one.round][one.contender] = one
    quiet = {
        key: by_name
        for key, by_name in rounds.items()
        if all((one.foreign_cpus or 0.0) <= max_foreign for one in by_name.values())
    }
    names = [name for name in ("static", "policy") if any(name in by_name for by_name in quiet.values())]
    heads = ["at a time", "rounds", *(f"{name}: block efficiency | over plain" for name in names), "policy's own time"]
    lines = [
        f"{len(rounds) - len(quiet)} of {len(rounds)} rounds left out: others used more than {max_foreign:g} processors.",
        "",
    ]
    lines += [f"| {' | '.join(heads)} |", "|" + "---|" * (3 + 2 * len(names))]
    for batch in sorted({batch for batch, _ in quiet}):
        of_load = [by_name for (one, _), by_name in quiet.items() if one == batch and len(by_name) == 1 + len(names)]
        cells = [str(batch), str(len(of_load))]
        for name in names:
            ratios = [by_name[name].tokens_per_s / by_name["plain"].tokens_per_s for by_name in of_load]
            cells += [
                f"{statistics.mean(by_name[name].block_efficiency for by_name in of_load):.2f}",
                str(interval({"": ratios})),
            ]
        cells.append(f"{statistics.mean(by_name['policy'].policy_share for by_name in of_load):.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description="plain, one tree and the policy, by load")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, one JSON line for each contender, load and round, appended to a file")
    run.add_argument("--config", type=Path, required=True, help="YAML file of settings: target, verifier, threads")
    run.add_argument("--head", type=Path, required=True, help="safetensors file of the draft head")
    run.add_argument("--static", help="the fixed tree, for example noise_aware.8.5.4; none by default")
    run.add_argument("--useless", action="store_true", help="shuffle the head's weights")
    run.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], help="requests at a time")
    run.add_argument("--kinds", nargs="*", default=["code", "maths", "prose"])
    run.add_argument("--num-prompts", type=int, default=6, help="of each kind")
    run.add_argument("--max-tokens", type=int, default=64)
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--out", type=Path, required=True)
    make = commands.add_parser("report", help="print the table of a file of measurements")
    make.add_argument("file", type=Path)
    make.add_argument("--max-foreign", type=float, default=_MAX_FOREIGN_CPUS, help="processors of others that are too many")
    args = parser.parse_args()
    if args.command == "report":
        print(report(args.file, args.max_foreign))
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
