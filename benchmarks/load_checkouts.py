"""Tokens per second of the adaptive policy in other checkouts of this repository and in this one, on the same requests.

    git worktree add ../before COMMIT && make -C ../before install
    python -m benchmarks.load_checkouts ../before --config configs/default.yaml --set dtype=compact --batches 1 8 32 --rounds 5

Each checkout has one process, which runs that checkout's code and its own copy of this file. It holds two engines over the
same weights: the adaptive policy and plain decoding. Only one engine steps at a time. The next one is always the one that has
generated the fewest tokens, so that machine noise affects all of them alike. `--head FILE` drafts from that head and from cached
text. Without it the configuration's own drafter is used. `--useless` shuffles the weights of the head: the ratio to plain
decoding then shows what the policy costs.

Figures come from steps that decode a whole batch and feed no prompt. Ratios are taken within a round, and the table has medians
over rounds. "plain here/before" compares plain decoding in the two processes: its distance from 1 is a difference that the
policies do not explain. "choosing" is the policy's share of the seconds. The last line is JSON.
"""

import argparse
import gc
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.drafters.contenders import Stable
from benchmarks.foreign import MAX_FOREIGN_CPUS, ForeignCpu
from benchmarks.load import Measured, Way, mixed_prompts, requests_of, shuffled_head
from benchmarks.markdown import table
from engine.core.types import Speculation
from engine.model.causal_lm import CausalModel
from engine.utils.progress_bar import progress_bar
from server.adaptive_engine import tool_engine
from server.cli.bench_compare import Run, stepped
from server.settings import load_settings

_HERE = Path(__file__).resolve().parents[1]
_MEASURE = "--measure"  # first argument of a checkout's process; the second is the options as JSON
_POLICY, _PLAIN = "policy", "plain"
_STEPS_PER_TURN = 4  # a turn's first step finds the caches cold


@dataclass(frozen=True, slots=True)
class Figures:
    """One contender at one batch size in one round. `choosing` is the share of the policy's own seconds."""

    tokens_per_s: float
    block_efficiency: float
    choosing: float

    @classmethod
    def of(cls, run: Run, batch: int) -> "Figures":
        """Return the figures of a run's full steps; raise ValueError if it has none."""
        one = Measured.of("", 0, batch, "", run, None)
        return cls(one.tokens_per_s, one.block_efficiency, one.policy_share)


Cell = Sequence[Mapping[str, Figures]]  # by checkout, then by contender


class CheckoutProcess:
    """A process that runs a checkout's own copy of this file, whose imports fit the checkout, and computes only on request."""

    def __init__(self, checkout: Path, options: str) -> None:
        self.checkout = checkout
        python = checkout / ".venv/bin/python"
        script = checkout / "benchmarks/load_checkouts.py"
        if not script.exists():
            raise SystemExit(
                f"{script} does not exist; copy a version whose imports fit: git show 0fac7f01:benchmarks/load_checkouts.py"
            )
        # -P: the folder of this file must not be on the path, which begins with the checkout.
        command = [str(python if python.exists() else sys.executable), "-P", str(script), _MEASURE, options]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=checkout, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def receive(self) -> Any:
        """Return the next answer; raise SystemExit if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.checkout} has failed")
        return json.loads(line)

    def request(self, *words: str | int) -> Any:
        """Send a command and return its answer."""
        assert self._process.stdin is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)
        return self.receive()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Measure all checkouts by turns and print the table, then one line of JSON."""
    if sys.argv[1:2] == [_MEASURE]:
        _answer(argparse.Namespace(**json.loads(sys.argv[2])))
        return
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        head = shuffled_head(args.head, Path(folder)) if args.useless else args.head and str(args.head.resolve())
        options = json.dumps({**vars(args), "config": str(args.config.resolve()), "head": head, "checkouts": []})
        processes: list[CheckoutProcess] = []
        try:
            digests = set()
            for checkout in [*(one.resolve() for one in args.checkouts), _HERE]:  # one by one: engines time passes at start
                processes.append(CheckoutProcess(checkout, options))
                digests.add(processes[-1].receive())
            if len(digests) > 1:
                raise SystemExit("the checkouts have different prompts")
            cells, num_noisy = _measured(processes, args)
        finally:
            for process in processes:
                process.end()
    _report(args.checkouts, cells, num_noisy)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, help="folders of other checkouts, each installed")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of settings, used for every checkout")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings in place of the file's")
    parser.add_argument("--threads", type=int, help="threads of an engine; default: the setting num_threads")
    parser.add_argument("--head", type=Path, help="safetensors file of the draft head")
    parser.add_argument("--useless", action="store_true", help="shuffle the head's weights; cached text is not used")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], help="requests at a time")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    parser.add_argument("--kinds", nargs="+", default=["code", "maths", "prose"])
    parser.add_argument("--num-prompts", type=int, default=6, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.useless and args.head is None:
        parser.error("--useless needs --head")
    if not all("=" in setting for setting in args.set):
        parser.error("--set needs NAME=VALUE")
    from benchmarks.load import room_for  # here, because another checkout's benchmarks may not have it

    args.set = [*(f"{name}={value}" for name, value in room_for(Path(args.config), args.batches).items()), *args.set]
    return args


def _measured(processes: Sequence[CheckoutProcess], args: argparse.Namespace) -> tuple[dict[int, list[Cell]], int]:
    """Return the rounds of each batch size, and how many measurements had too much foreign load."""
    loads = [(number, batch) for number in range(args.rounds) for batch in args.batches[:: -1 if number % 2 else 1]]
    loads.insert(0, (args.rounds, args.batches[0]))  # warm-up
    cells: dict[int, list[Cell]] = {batch: [] for batch in args.batches}
    num_noisy = 0
    for place, (number, batch) in enumerate(progress_bar(loads, what="measuring", total=len(loads), unit="load")):
        foreign = ForeignCpu(lambda: time.process_time() + sum(float(process.request("cpu_s")) for process in processes))
        cell = _by_turns(processes, number, batch, random.Random(place))
        if place:
            cells[batch].append(cell)
            num_noisy += (foreign.cpus() or 0.0) > MAX_FOREIGN_CPUS
    return cells, num_noisy


def _by_turns(processes: Sequence[CheckoutProcess], number: int, batch: int, order: random.Random) -> Cell:
    """Serve a round's requests with every contender of every checkout; return the figures."""
    for process in processes:
        process.request("begin", number, batch)
    contenders = [(process, name) for process in processes for name in (_POLICY, _PLAIN)]
    num_tokens = dict.fromkeys(order.sample(contenders, len(contenders)), 0)
    while num_tokens:
        process, name = contender = min(num_tokens, key=lambda one: num_tokens[one])
        num_new, is_done = process.request("step", name)
        num_tokens[contender] += num_new
        if is_done:
            del num_tokens[contender]
    return [{name: Figures(**found) for name, found in process.request("figures").items()} for process in processes]


def _compared(here: Mapping[str, Figures], before: Mapping[str, Figures]) -> dict[str, float]:
    """Return a round's ratios and figures of this checkout and another, by heading."""
    return {
        "here/before": here[_POLICY].tokens_per_s / before[_POLICY].tokens_per_s,
        "plain here/before": here[_PLAIN].tokens_per_s / before[_PLAIN].tokens_per_s,
        "here/plain": here[_POLICY].tokens_per_s / here[_PLAIN].tokens_per_s,
        "before/plain": before[_POLICY].tokens_per_s / before[_PLAIN].tokens_per_s,
        "tokens/step here": here[_POLICY].block_efficiency,
        "tokens/step before": before[_POLICY].block_efficiency,
        "choosing here": here[_POLICY].choosing,
        "choosing before": before[_POLICY].choosing,
    }


def _report(checkouts: Sequence[Path], cells: Mapping[int, Sequence[Cell]], num_noisy: int) -> None:
    """Print a row for each batch size and other checkout, the noise count, and the medians as JSON."""
    rows: list[dict[str, str]] = []
    found: list[dict[str, Any]] = []
    for batch, rounds in cells.items():
        for place, checkout in enumerate(checkouts):
            compared = [_compared(cell[-1], cell[place]) for cell in rounds]
            medians = {head: statistics.median(one[head] for one in compared) for head in compared[0]}
            ratios = sorted(one["here/before"] for one in compared)
            rows.append({"batch": str(batch), "before is": checkout.name} | {head: f"{it:.3f}" for head, it in medians.items()})
            rows[-1]["here/before"] += f" [{ratios[0]:.3f}, {ratios[-1]:.3f}]"
            found.append({"batch": batch, "checkout": str(checkout), "ratios": ratios, **medians})
    num_cells = sum(map(len, cells.values()))
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"\nforeign load above {MAX_FOREIGN_CPUS} processors in {num_noisy} of {num_cells} measurements")
    print(json.dumps({"medians": found, "num_noisy": num_noisy, "num_measurements": num_cells}))


def _answer(args: argparse.Namespace) -> None:
    """Load the engines of this process's checkout, then answer a command per line of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other prints go to stderr
    overrides = dict(setting.split("=", 1) for setting in args.set) | {"policy": "adaptive"}
    if args.threads is not None:
        overrides["num_threads"] = args.threads
    config = load_settings(Path(args.config), overrides).to_tool_config()
    models: dict[tuple[str, str], CausalModel] = {}
    parts = {"draft_model": None, "lens": None, "head": args.head}
    drafter = "head" if args.useless else "head+ngram"
    adaptive = Stable(config, parts, models).engine(drafter) if args.head else tool_engine(config, models)
    plain = Stable(config, parts, models).engine("none")
    ways = [Way(_POLICY, adaptive, Speculation(verifier=config.verifier)), Way(_PLAIN, plain, Speculation(is_enabled=False))]
    prompts = mixed_prompts(config.model, args.kinds, args.num_prompts)
    gc.collect()
    gc.freeze()  # a collection takes tenths of a second
    answer: Any = hashlib.sha256(repr(prompts).encode()).hexdigest()
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        match json.loads(sys.stdin.readline() or '["end"]'):
            case ["begin", number, batch]:
                runs = {way.name: Run() for way in ways}
                loads = {way.name: requests_of(prompts, batch, number, way, args) for way in ways}
                going = {way.name: stepped(way.engine, loads[way.name], batch, runs[way.name]) for way in ways}
                answer = None
            case ["step", name]:
                num_before = len(runs[name].steps)
                is_done = sum(1 for _ in islice(going[name], _STEPS_PER_TURN)) < _STEPS_PER_TURN
                answer = sum(step.num_generated_tokens for step in runs[name].steps[num_before:]), is_done
            case ["figures"]:
                answer = {name: asdict(Figures.of(run, batch)) for name, run in runs.items()}
            case ["cpu_s"]:
                answer = time.process_time()
            case _:
                return


if __name__ == "__main__":
    main()
