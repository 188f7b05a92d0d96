"""What each verifier costs: one tree judged by all of them in turn, over and over, on one CPU thread.

Knows a tree of independent random distributions; not whether a rule is exact on it (docs/verification.md): only time is measured.
Rules take turns, so that a slow moment of the machine falls on all of them; the median and the quartiles are reported.

    python benchmarks/verify_cost.py --vocab-size 152000 --expansion 3.4.7 --repeats 15

prints a table and, last, one line of JSON.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count

import torch
from torch import Tensor

from engine.core.rng_keys import StepKey
from engine.core.tree import Expansion, TokenTree, parse_expansion
from engine.core.verifier_table import VERIFIER_NAMES
from engine.utils.progress_bar import progress_bar
from engine.verify.forest import Forest
from engine.verify.registry import create_verifier


@dataclass(frozen=True)
class Cost:
    """Time of one call of a verifier: median and quartiles over the repeats."""

    verifier: str
    median_ms: float
    quartile1_ms: float
    quartile3_ms: float


@dataclass(frozen=True)
class Case:
    """One tree with its distributions."""

    forest: Forest
    target_probs_NV: Tensor


def main() -> None:
    """Measure and print."""
    args = _parser().parse_args()
    torch.set_num_threads(1)
    case = _case(args)
    costs = _measure(args.verifiers, case, args.repeats)
    print(_table(costs))
    shape = {"vocab_size": args.vocab_size, "num_nodes": case.forest.num_nodes, "expansion": str(args.expansion)}
    machine = {"torch": torch.__version__, "machine": platform.machine(), "threads": torch.get_num_threads()}
    print(json.dumps({**shape, **machine, "repeats": args.repeats, "costs": [asdict(cost) for cost in costs]}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifiers", nargs="+", choices=VERIFIER_NAMES, default=VERIFIER_NAMES, metavar="NAME")
    parser.add_argument("--vocab-size", type=int, default=152_000)
    parser.add_argument(
        "--expansion", type=parse_expansion, default=Expansion(3, 4, 7), help="trunk.branches.depth (3.4.7: 32 nodes)"
    )
    parser.add_argument("--noise", type=float, default=0.7, help="spread of draft logits around the target's; those have 3")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _case(args: argparse.Namespace) -> Case:
    """Return a delayed tree of tokens drawn from its draft distributions, distinct where it branches: no node is merged."""
    generator = torch.Generator().manual_seed(args.seed)
    draws = _shape(args.expansion)
    target_NV = 3.0 * torch.randn(len(draws), args.vocab_size, generator=generator)
    draft_NV = (target_NV + args.noise * torch.randn(target_NV.shape, generator=generator)).softmax(-1)
    parents, token_ids = [-1] * len(draws), [0] * len(draws)
    for node, children in enumerate(draws):
        drawn = torch.multinomial(draft_NV[node], len(children), generator=generator).tolist() if children else []
        for child, token_id in zip(children, drawn):
            parents[child], token_ids[child] = node, token_id
    tree = TokenTree(tuple(parents), tuple(token_ids), draws)
    probs_rows = tuple(node if children else None for node, children in enumerate(draws))
    return Case(Forest((tree,), draft_NV, (probs_rows,)), target_NV.softmax(-1))


def _shape(expansion: Expansion) -> tuple[tuple[int, ...], ...]:
    """Return the children of each node of a delayed tree, numbered level by level."""
    draws: list[tuple[int, ...]] = []
    numbers = count(1)
    for depth in range(expansion.max_depth + 1):
        is_branch_point = depth == expansion.trunk
        num_children = expansion.width_at(depth + 1) if is_branch_point else min(1, expansion.width_at(depth + 1))
        draws += [tuple(next(numbers) for _ in range(num_children)) for _ in range(expansion.width_at(depth))]
    return tuple(draws)


def _measure(names: Sequence[str], case: Case, repeats: int) -> list[Cost]:
    verifiers = [create_verifier(name) for name in names]
    times_ms: dict[str, list[float]] = {name: [] for name in names}
    for repeat in progress_bar(range(repeats + 1), what="judging", total=repeats + 1, unit="round"):
        for verifier in verifiers:
            begin = time.perf_counter()
            verifier.judge(case.forest, case.target_probs_NV, [StepKey(repeat, 0)])
            elapsed_ms = 1000 * (time.perf_counter() - begin)
            if repeat:  # the first round warms up
                times_ms[verifier.name].append(elapsed_ms)
    return [_cost(name, times_ms[name]) for name in names]


def _cost(name: str, times_ms: Sequence[float]) -> Cost:
    quartile1, median, quartile3 = statistics.quantiles(times_ms, n=4) if len(times_ms) > 1 else times_ms * 3
    return Cost(name, round(median, 3), round(quartile1, 3), round(quartile3, 3))


def _table(costs: Sequence[Cost]) -> str:
    rows = [f"{'verifier':<12}{'median ms':>11}{'quartiles ms':>22}"]
    for cost in costs:
        quartiles = f"{cost.quartile1_ms:.2f} to {cost.quartile3_ms:.2f}"
        rows.append(f"{cost.verifier:<12}{cost.median_ms:>11.2f}{quartiles:>22}")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
