"""Trees over recurrent layers beside plain decoding, by turns, on random models of such families.

    python -m benchmarks.recurrent --families qwen3_next lfm2 mamba2 --width 512 --layers 8 --rounds 3

Chains of the recorded answer are all accepted: they show the most that speculation can gain. The policy chooses its own trees,
once with the recorded answer as the request's prediction and once with a wrong one. With the wrong one plain decoding is faster.
Prints times as fast as plain decoding, the median over rounds, and the share of later steps with a draft; the last line
is JSON.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.markdown import table
from engine.build import Models
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.tree import PLAIN, Expansion
from engine.core.types import Request, Speculation
from engine.engine import Engine
from engine.testing import tiny_module
from engine.utils.progress_bar import progress_bar
from server.adaptive_engine import tool_engine
from server.cli.bench_compare import CHAINS, BenchLoad, Case, Run, require_equal, run_case
from server.cli.bench_run import oracle_engine

_FAMILIES = ("qwen3_next", "lfm2", "mamba2", "falcon_h1")
_PROMPT_TOKENS, _VOCAB_SIZE = 48, 2000
_PLAIN = Case("coupled", PLAIN)
_POLICY = ("policy, recorded answer", "policy, wrong answer")


@dataclass(frozen=True, slots=True)
class Figure:
    """A way of decoding a family: times as fast as plain decoding of the same round, and steps with drafts."""

    family: str
    how: str
    ratio: float
    low: float
    high: float
    tokens_per_s: float
    drafting_share: float


def main() -> None:
    """Print a table of all families, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(_FAMILIES[:3]), choices=[*_FAMILIES, "llama"])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--chains", type=int, nargs="+", default=[chain.trunk for chain in CHAINS[:4]])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figures = [figure for family in args.families for figure in _figures(family, args)]
    numbers = ((f"{one.ratio:.2f}", f"{one.low:.2f}-{one.high:.2f}", f"{one.tokens_per_s:.1f}") for one in figures)
    rows = ([one.family, one.how, *cells, f"{one.drafting_share:.0%}"] for one, cells in zip(figures, numbers, strict=True))
    print(table(["family", "how", "over plain", "rounds", "tokens/s", "later steps with drafts"], rows))
    print(json.dumps([{name: getattr(one, name) for name in Figure.__slots__} for one in figures]))


def _figures(family: str, args: argparse.Namespace) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        served, oracle = _engines(family, args, Path(folder))
    rng = random.Random(0)
    prompts = tuple(tuple(rng.choices(range(3, _VOCAB_SIZE), k=_PROMPT_TOKENS)) for _ in range(args.requests))
    load = BenchLoad(prompts, 0.0, args.max_tokens, args.concurrency)
    names = [_PLAIN.name, *(f"chain of {length}" for length in args.chains), *_POLICY]
    rounds: list[list[Run]] = []
    for number in progress_bar(range(args.rounds), what=family, total=args.rounds, unit="round"):
        rounds.append(list(_runs(served, oracle, load, args.chains, number)))
        require_equal(names, rounds[-1])
    for index, name in enumerate(names):
        runs = [one[index] for one in rounds]
        ratios = [one[index].tokens_per_s / one[0].tokens_per_s for one in rounds]
        speed = statistics.median(run.tokens_per_s for run in runs)
        yield Figure(family, name, statistics.median(ratios), min(ratios), max(ratios), speed, _drafting_share(runs))


def _engines(family: str, args: argparse.Namespace, folder: Path) -> tuple[Engine, Engine]:
    """Return the engine of a random model with the adaptive policy, and one that drafts recorded answers."""
    sizes = {"hidden_size": args.width, "intermediate_size": 3 * args.width, "head_dim": 64}
    heads = {"num_attention_heads": args.width // 64, "num_key_value_heads": max(1, args.width // 128)}
    delta = {"linear_num_value_heads": args.width // 32, "linear_num_key_heads": args.width // 64} if "qwen" in family else {}
    delta |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "moe_intermediate_size": args.width} if delta else {}
    module = tiny_module(family, 0, args.layers, _VOCAB_SIZE, **sizes, **heads, **delta)
    for parameter in module.parameters():  # the tiny models' weights are too large for this width
        if parameter.dim() == 2:
            parameter.data.mul_(3 / args.width**0.5)
    module.generation_config.eos_token_id = None
    module.save_pretrained(folder)
    words = {f"w{token_id}": token_id for token_id in range(_VOCAB_SIZE)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    limits = SchedulerConfig(num_slots=4096, max_model_len=512)
    config = EngineConfig(
        model=str(folder),
        drafter="ngram",
        policy="adaptive",
        verifier="coupled",
        expansion=Expansion(4, 1, 0),
        num_threads=args.threads,
        scheduler=limits,
    )
    models: Models = {}
    return tool_engine(config, models), oracle_engine(config, models)


def _runs(served: Engine, oracle: Engine, load: BenchLoad, chains: Sequence[int], number: int) -> Iterator[Run]:
    plain = run_case(oracle, load.requests(_PLAIN, number), load.concurrency)
    yield plain
    for length in chains:
        case = Case("coupled", Expansion(length, 1, 0))
        yield run_case(oracle, _predicting(load.requests(case, number), plain, is_right=True), load.concurrency)
    for is_right in (True, False):
        free = (replace(request, speculation=Speculation()) for request in load.requests(_PLAIN, number))
        yield run_case(served, _predicting(free, plain, is_right), load.concurrency)


def _predicting(requests: Iterator[Request], plain: Run, is_right: bool) -> Iterator[Request]:
    """Yield the requests with their recorded answers as predictions, or with answers of which every second token is wrong."""
    for request in requests:
        ids = plain.texts[request.request_id]
        wrong = [token_id if place % 2 else (token_id + 7) % _VOCAB_SIZE for place, token_id in enumerate(ids)]
        yield replace(request, prediction_ids=tuple(ids if is_right else wrong))


def _drafting_share(runs: Sequence[Run]) -> float:
    """Return the share of decoding steps with a draft, in the second half of the runs: a policy learns in the first one."""
    steps = [step for run in runs for step in run.steps if step.num_decoding_rows]
    steps = steps[len(steps) // 2 :]
    return sum(step.num_draft_tokens > 0 for step in steps) / len(steps)


if __name__ == "__main__":
    main()
