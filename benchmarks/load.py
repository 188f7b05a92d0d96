"""Tokens a second by load: ways to choose trees beside plain decoding, on the same requests, 1 to 256 at a time, kinds mixed.

python -m benchmarks.load run --config configs/default.yaml --head HEAD --contenders policy static:beam.8 --out load.jsonl
python -m benchmarks.load report load.jsonl

A contender is `policy`, `whole` (the policy without growth costs, so that trees are grown whole) or `static:TREE`. A suffix as
in `policy/traversal` sets another verifier. Each contender has its own engine over the same models, which learns throughout as
a server's does. The first load is a warm-up and is not counted. The contender with the fewest tokens takes the next step, so a
machine that is slow for some seconds is slow for all. `--useless` shuffles the head's weights. The table then shows what the
policy loses to a useless head.
"""

import argparse
import gc
import json
import math
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.drafters.contenders import Stable
from benchmarks.drafters.report import interval
from benchmarks.foreign import MAX_FOREIGN_CPUS, ForeignCpu
from benchmarks.markdown import table
from engine.core.policy import ExpansionChoice, ExpansionPolicy, SequenceView, StepFeedback
from engine.core.tree import FREE_GROWTH, parse_expansion
from engine.core.types import Request, SamplingParams, Speculation, StepStats
from engine.core.verifier_table import verifier_for
from engine.engine import Engine
from engine.model.causal_lm import CausalModel
from engine.utils.progress_bar import progress_bar
from engine.weights import resolve
from engine.weights.pretrained import load_tokenizer
from server.cli.bench_compare import Run, stepped
from server.cli.bench_prompts import BENCH_PROMPTS, load_prompts
from server.settings import load_settings
from server.text.chat_ids import chat_ids

_FEWEST = 4  # requests of a measurement
_DONE = object()


def is_full(step: StepStats, batch: int) -> bool:
    """Return whether a step has all of a load's sequences and feeds no prompt."""
    return step.num_prompt_tokens == 0 and step.num_decoding_rows == batch


class GrownWhole:
    """A policy's choices without its growth costs."""

    def __init__(self, policy: ExpansionPolicy) -> None:
        self.name = f"{policy.name}, grown whole"
        self._policy = policy

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        """Return the policy's expansions."""
        return replace(self._policy.choose(views), growth_costs=FREE_GROWTH)

    def observe(self, feedback: StepFeedback) -> None:
        """Let the policy learn."""
        self._policy.observe(feedback)


@dataclass(frozen=True, slots=True)
class Way:
    """A contender: its name, its engine, and the options of its requests."""

    name: str
    engine: Engine
    speculation: Speculation

    @classmethod
    def of(cls, name: str, engine: Engine, verifier: str) -> "Way":
        """Return the contender of that name; raise ValueError if there is none."""
        way, _, other = name.partition("/")
        verifier = other or verifier
        kind, _, tree = way.partition(":")
        if kind == "static":
            expansion = parse_expansion(tree)
            return cls(name, engine, Speculation(expansion=expansion, verifier=verifier_for(expansion, verifier)))
        if kind == "whole":
            engine._policy._policy = GrownWhole(engine._policy._policy)
        elif kind != "policy":
            raise ValueError(f"a contender is policy, whole or static:TREE, not {name!r}")
        return cls(name, engine, Speculation(verifier=verifier))


@dataclass(frozen=True, slots=True)
class Measured:
    """One contender at one load in one round: tokens a second, tokens a sequence and step, share of the policy's own seconds."""

    run: str
    round: int
    batch: int
    contender: str
    tokens_per_s: float
    block_efficiency: float
    policy_share: float
    foreign_cpus: float | None

    @classmethod
    def of(cls, name: str, round_number: int, batch: int, contender: str, run: Run, foreign_cpus: float | None) -> "Measured":
        """Return a run's figures at its load: of steps that feed no prompt and have all sequences.

        Raises ValueError where no step has. Texts that are equally long end together without drafts, and one after the other
        with drafts.
        """
        steps = [step for step in run.steps if is_full(step, batch)]
        if not steps:
            raise ValueError(f"no step had all {batch} sequences and fed no prompt: longer texts (--max-tokens) would overlap")
        seconds = sum(step.step_s for step in steps)
        tokens = sum(step.num_generated_tokens for step in steps)
        rows = sum(step.num_row_steps for step in steps)
        share = sum(step.policy_s for step in steps) / seconds
        return cls(name, round_number, batch, contender, tokens / seconds, tokens / rows, share, foreign_cpus)


def mixed_prompts(model: str, kinds: Sequence[str], num_prompts: int) -> list[tuple[int, ...]]:
    """Return so many prompts of each kind, kinds by turns, as a model's chat template has them."""
    tokenizer = load_tokenizer(resolve(model).folder)
    by_kind = load_prompts(BENCH_PROMPTS, kinds, num_prompts)
    return [chat_ids(tokenizer, one.text) for same in zip(*by_kind.values(), strict=False) for one in same]


def requests_of(
    prompts: Sequence[tuple[int, ...]],
    batch: int,
    round_number: int,
    way: Way,
    args: argparse.Namespace,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Iterator[Request]:
    """Yield requests of every kind and temperature in turn, the same for each contender; texts are equally long.

    Each time that kinds and temperatures meet again as they did, temperatures are shifted by one: every kind has them all.
    """
    count, num_temperatures = max(_FEWEST, 2 * batch), len(args.temperatures)
    turn = math.lcm(len(args.kinds), num_temperatures)
    for place in range(round_number * count, (1 + round_number) * count):
        temperature = args.temperatures[(place + place // turn) % num_temperatures]
        seed = place if temperature else None
        sampling = SamplingParams(temperature, top_p, top_k, seed=seed, max_tokens=args.max_tokens, ignore_eos=True)
        yield Request(f"{way.name}-{place}", prompts[place % len(prompts)], sampling, way.speculation)


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


def room_for(path: Path, batches: Sequence[int]) -> dict[str, int]:
    """Return the settings that give the largest load room in a step, where a configuration has less."""
    settings, largest = load_settings(path, {}), max(batches)
    return {name: max(getattr(settings, name), largest) for name in ("max_running", "max_step_tokens")}


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Measure round by round, loads ascending and then descending, contenders in an order that changes; append JSON lines."""
    config = load_settings(args.config, {"policy": "adaptive", **room_for(args.config, args.batches)}).to_tool_config()
    head = shuffled_head(args.head, folder) if args.useless else str(args.head)
    models: dict[tuple[str, str], CausalModel] = {}

    def engine(drafter: str) -> Engine:
        return Stable(config, {"draft_model": None, "lens": None, "head": head}, models).engine(drafter)

    drafter = "head" if args.useless else "head+ngram"
    ways = [Way.of(name, engine(drafter), config.verifier) for name in args.contenders]
    ways.append(Way("plain", engine("none"), Speculation(is_enabled=False)))
    prompts = mixed_prompts(config.model, args.kinds, args.num_prompts)
    gc.collect()
    gc.freeze()  # as a worker does: else a collection takes tenths of a second of whatever step it falls into
    loads = [(number, batch) for number in range(args.rounds) for batch in args.batches[:: -1 if number % 2 else 1]]
    loads.insert(0, (args.rounds, args.batches[0]))
    begun = time.strftime("%Y-%m-%dT%H:%M:%S")
    with progress_bar(loads, what="measuring", total=len(loads), unit="load") as bar, args.out.open("a") as out:
        for turn, (number, batch) in enumerate(bar):
            watch = ForeignCpu()
            order = random.Random(turn).sample(ways, len(ways))
            kept = {"top_p": args.top_p, "top_k": args.top_k}
            runs = in_turns(
                {way.name: (way.engine, requests_of(prompts, batch, number, way, args, **kept)) for way in order}, batch
            )
            foreign_cpus = watch.cpus()
            for name, run in runs.items() if turn else ():
                out.write(json.dumps(asdict(Measured.of(begun, number, batch, name, run, foreign_cpus))) + "\n")
            out.flush()


def in_turns(loads: Mapping[str, tuple[Engine, Iterator[Request]]], batch: int) -> dict[str, Run]:
    """Run each engine's requests, that one's next step first whose texts have come least far; return what each did."""
    runs = {name: Run() for name in loads}
    going = {name: stepped(engine, requests, batch, runs[name]) for name, (engine, requests) in loads.items()}
    num_tokens = dict.fromkeys(loads, 0)
    while going:
        name = min(going, key=lambda one: num_tokens[one])
        if next(going[name], _DONE) is _DONE:
            del going[name]
        else:
            num_tokens[name] += runs[name].steps[-1].num_generated_tokens
    return runs


def report(path: Path, max_foreign: float) -> str:
    """Return a Markdown table: tokens a second over plain decoding's in the same round at the same load, mean and interval."""
    rounds: dict[tuple[int, str, int], dict[str, Measured]] = defaultdict(dict)
    for line in path.read_text().splitlines():
        one = Measured(**json.loads(line))
        rounds[one.batch, one.run, one.round][one.contender] = one
    names = [name for name in dict.fromkeys(name for by_name in rounds.values() for name in by_name) if name != "plain"]
    whole = {key: by_name for key, by_name in rounds.items() if len(by_name) == 1 + len(names)}
    quiet = {key: by_name for key, by_name in whole.items() if _foreign(by_name.values()) <= max_foreign}
    left_out = (
        f"{len(whole) - len(quiet)} of {len(whole)} measurements left out: others used more than {max_foreign:g} processors."
    )
    heads = ["at a time", "rounds"]
    heads += [head for name in names for head in (f"{name}: block efficiency", "over plain", "choosing")]
    rows = []
    for batch in sorted({batch for batch, *_ in quiet}):
        of_load = [by_name for (one, *_), by_name in quiet.items() if one == batch]
        rows.append([str(batch), str(len(of_load)), *(cell for name in names for cell in _cells(name, of_load))])
    return f"{left_out}\n\n{table(heads, rows)}"


def _foreign(measured: Iterable[Measured]) -> float:
    return max(one.foreign_cpus or 0.0 for one in measured)


def _cells(name: str, of_load: Sequence[Mapping[str, Measured]]) -> list[str]:
    ratios = [by_name[name].tokens_per_s / by_name["plain"].tokens_per_s for by_name in of_load]
    tokens = statistics.mean(by_name[name].block_efficiency for by_name in of_load)
    share = statistics.mean(by_name[name].policy_share for by_name in of_load)
    return [f"{tokens:.2f}", str(interval({"": ratios})), f"{share:.1%}"]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description="plain, one tree and the policy, by load")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, one JSON line for each contender, load and round, appended to a file")
    run.add_argument("--config", type=Path, required=True, help="YAML file of settings: target, verifier, threads")
    run.add_argument("--head", type=Path, required=True, help="safetensors file of the draft head")
    run.add_argument(
        "--contenders", nargs="+", default=["policy"], help="policy, whole or static:TREE, each may end in /VERIFIER"
    )
    run.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    run.add_argument("--top-p", type=float, default=1.0)
    run.add_argument("--top-k", type=int, default=0)
    run.add_argument("--useless", action="store_true", help="shuffle the head's weights")
    run.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], help="requests at a time")
    run.add_argument("--kinds", nargs="+", default=["code", "maths", "prose"])
    run.add_argument("--num-prompts", type=int, default=6, help="of each kind")
    run.add_argument("--max-tokens", type=int, default=64)
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--out", type=Path, default=Path("load.jsonl"))
    make = commands.add_parser("report", help="print the table of a file of measurements")
    make.add_argument("file", type=Path)
    make.add_argument("--max-foreign", type=float, default=MAX_FOREIGN_CPUS, help="processors of others that are too many")
    args = parser.parse_args()
    if args.command == "report":
        print(report(args.file, args.max_foreign))
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
