"""What is known of a root before its tree grows, and what that is worth where trees place their nodes by chance.

python -m benchmarks.roots --config configs/default.yaml

Texts are written with one large noise-aware tree at each step, which says what every tree of likelier nodes would have been: its
nodes, its rounds, and what of it came. So each way to choose a least chance, or plain decoding, is replayed at all roots at this
machine's costs: tokens a second over plain decoding's, as if one sequence were served. Ways learn from two thirds of the texts
and are told of the rest, each third in turn. Sums over the three, and the least and the greatest of them.

Replayed, not served: counting has seen the largest tree at every step, which no server drafts, and trees do not end where one
more level would not pay.

Shape key: R roots, K trees of a menu (plain decoding first), X features.
"""

import argparse
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoTokenizer

from benchmarks.markdown import table
from engine.build import build_engine
from engine.core.config import EngineConfig
from engine.core.policy import Choice, DraftOutcome, ExpansionPolicy, RootSource, SequenceView, StepFeedback
from engine.core.types import Request, SamplingParams, Speculation
from engine.distill.prompts import PromptGrammar
from engine.profiling.step_timer import StepTimer
from engine.weights import WeightsCache, default_root, resolve
from selector.acceptance import CountedAcceptance
from selector.cost import CostModel
from selector.menu import menu_for_all, menu_with
from selector.network.replay import best_places, step_s
from selector.profile import cached_profile
from server.cli.bench_compare import run_case
from server.settings import SHIPPED_DRAFTERS, load_settings
from server.text.chat_ids import chat_ids

Array = NDArray[np.float64]

_FOLDS = 3
_RIDGE = 0.001  # of the number of roots learnt from, for standardised columns
_EPOCHS, _RATE, _BATCH, _WIDTHS = 12, 1e-3, 64, (256, 32)
_RULE = "coupled"


class _NodeSums:
    """Chances, nodes, rounds and fed nodes of trees, added up by the least chance that admits a node, [4][K]."""

    def __init__(self, least: Sequence[float]) -> None:
        self._dearest_first = [-chance for chance in least]
        self.sums = [[0.0] * len(least) for _ in range(4)]
        self.came = [0.0] * len(least)
        self.num_trees = 0

    def add(self, outcome: DraftOutcome, least_told: float) -> None:
        """Add a tree, which tells of nodes of some chance at least."""
        nodes, num_rounds = outcome.nodes, outcome.drafted_depth
        assert nodes is not None, "a tree that does not know its nodes"
        dearest_first, came = self._dearest_first, self.came
        num_told = bisect_right(dearest_first, -least_told)
        self.num_trees += 1
        deepest = 0
        chances, counts, rounds, fed = self.sums
        for node in sorted(range(len(nodes.chances)), key=nodes.chances.__getitem__, reverse=True):
            chance, depth = nodes.chances[node], nodes.depths[node]
            place = bisect_left(dearest_first, -chance)
            if place >= num_told:
                break
            chances[place] += chance
            counts[place] += 1.0
            if node in nodes.accepted:
                came[place] += 1.0
            if depth < num_rounds:
                fed[place] += 1.0
                if depth > deepest:
                    rounds[place] += depth - deepest
                    deepest = depth


@dataclass(frozen=True)
class Root:
    """A root as it was seen before its tree grew, and what every tree of the menu was there, [K] each."""

    text: str
    temperature: float
    num_context: int
    states_X: NDArray[np.float32]
    scalars_X: NDArray[np.float32]
    counted_4K: Array
    tokens_K: Array
    expected_K: Array
    nodes_K: Array
    rounds_K: Array
    fed_K: Array


class Watching:
    """Grows the largest tree everywhere; notes roots before and trees after."""

    name = "watching"

    def __init__(self, config: EngineConfig, roots: RootSource) -> None:
        menu = menu_for_all(config.expansion, config.verifier, config.largest_expansion)
        self.entries = [entry for entry in menu.entries if entry.least_chance]
        self.roots: list[Root] = []
        self._least = [entry.least_chance for entry in self.entries]
        self._menu = menu_with(self.entries)
        self._counting = CountedAcceptance(self._menu)
        self._source = roots
        self._seen: dict[str, tuple[SequenceView, NDArray[np.float32], NDArray[np.float32], Array]] = {}
        roots.watch()

    def choose(self, views: Sequence[SequenceView]) -> Choice:
        """Return the largest tree for all."""
        facts = self._source.facts([view.request_id for view in views])
        states = np.concatenate([facts.target_BD, facts.draft_BW], axis=1)
        counted = self._counting.estimate(views)
        told_B4K = np.stack([counted.tokens, counted.nodes, counted.rounds, counted.nodes * self._menu.fed_share], axis=1)
        self._seen = {
            view.request_id: (view, states[row], facts.scalars_BS[row], told_B4K[row])
            for row, view in enumerate(views)
            if facts.is_known_B[row]
        }
        return Choice((self.entries[-1],) * len(views))

    def observe(self, feedback: StepFeedback) -> None:
        """Note what the trees were."""
        self._counting.observe(feedback.outcomes)
        for outcome in feedback.outcomes:
            if outcome.nodes is None or outcome.request_id not in self._seen:
                continue
            view, states, scalars, counted = self._seen[outcome.request_id]
            found = _NodeSums(self._least)
            found.add(outcome, self._least[-1])
            expected_K, nodes_K, rounds_K, fed_K = np.array(found.sums).cumsum(1)
            root = Root(
                *(view.request_id, view.sampling.temperature, view.num_committed, states, scalars, counted),
                *(_whole(1.0, 1.0 + np.cumsum(found.came)), _whole(1.0, 1.0 + expected_K), _whole(0.0, nodes_K)),
                *(_whole(0.0, 1.0 + rounds_K), _whole(0.0, fed_K)),
            )
            self.roots.append(root)


def _whole(of_plain: float, of_trees_K: Array) -> Array:
    return np.concatenate([[of_plain], of_trees_K])


@dataclass(frozen=True)
class Known:
    """All roots as arrays, with the seconds of a step of each tree: as it was, and as it was counted to be. [R, K] each."""

    texts: tuple[str, ...]
    temperature_R: Array
    features_RX: Array  # scalars of the root, of the request, and tokens counted of four of the trees
    states_RX: NDArray[np.float32]
    counted_RK: Array
    counted_s_RK: Array
    tokens_RK: Array
    expected_RK: Array
    seconds_RK: Array

    @classmethod
    def of(cls, roots: Sequence[Root], costs: CostModel) -> "Known":
        """Return them."""
        counted = np.stack([root.counted_4K for root in roots])
        temperature_R = np.array([root.temperature for root in roots])
        context_R = np.array([float(root.num_context) for root in roots])
        scalars = np.stack([root.scalars_X for root in roots])
        request = np.stack([temperature_R, temperature_R > 0.0, np.log1p(context_R)], axis=1)
        requests = list(zip(context_R.tolist(), (temperature_R > 0.0).tolist(), strict=True))
        nodes, rounds, fed = (np.stack(rows) for rows in zip(*((one.nodes_K, one.rounds_K, one.fed_K) for one in roots)))
        return cls(
            tuple(root.text for root in roots),
            temperature_R,
            np.concatenate([scalars, request, counted[:, 0, 1::3]], axis=1),
            np.stack([root.states_X for root in roots]),
            counted[:, 0],
            np.stack([step_s(costs, *one, *told_3K) for one, told_3K in zip(requests, counted[:, 1:], strict=True)]),
            np.stack([root.tokens_K for root in roots]),
            np.stack([root.expected_K for root in roots]),
            np.stack([step_s(costs, *one, *trees) for one, *trees in zip(requests, nodes, rounds, fed, strict=True)]),
        )


def most_over_all(tokens_RK: Array, seconds_RK: Array) -> NDArray[np.int64]:
    """Return the entries that together bring the most tokens over all seconds, if expectations are true.

    A dear tree that is the best of its root may still bring fewer tokens than its seconds do elsewhere: Dinkelbach's iteration.
    """
    rows = np.arange(len(tokens_RK))
    best = best_places(tokens_RK, seconds_RK)
    rate = float(tokens_RK[rows, best].sum() / seconds_RK[rows, best].sum())
    while True:
        places = (tokens_RK - rate * seconds_RK).argmax(1)
        better = float(tokens_RK[rows, places].sum() / seconds_RK[rows, places].sum())
        if not better > rate * (1.0 + 1e-9):
            return np.asarray(best)
        rate, best = better, places


Way = Callable[[Known, NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]


def _one_for_all(known: Known, learnt: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.int64]:
    best = int((known.tokens_RK[learnt].sum(0) / known.seconds_RK[learnt].sum(0)).argmax())
    return np.full(len(asked), best)


def _one_a_temperature(known: Known, learnt: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.int64]:
    temperatures = np.unique(known.temperature_R)
    groups = [learnt[known.temperature_R[learnt] == temperature] for temperature in temperatures]
    sums = [np.stack([truth[group].sum(0) for group in groups]) for truth in (known.tokens_RK, known.seconds_RK)]
    return most_over_all(*sums)[np.searchsorted(temperatures, known.temperature_R[asked])]


def _counting(known: Known, learnt: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.int64]:  # noqa: ARG001
    return most_over_all(known.counted_RK[asked], known.counted_s_RK[asked])


def _linear(known: Known, learnt: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.int64]:
    mean, deviation = known.features_RX[learnt].mean(0), known.features_RX[learnt].std(0) + 1e-6
    x = np.pad((known.features_RX - mean) / deviation, ((0, 0), (0, 1)), constant_values=1.0)
    gram = x[learnt].T @ x[learnt] + _RIDGE * len(learnt) * np.eye(x.shape[1])
    tokens, seconds = (
        x[asked] @ np.linalg.solve(gram, x[learnt].T @ truth[learnt]) for truth in (known.tokens_RK, known.seconds_RK)
    )
    return most_over_all(tokens, _clipped(seconds, known, learnt))


def _clipped(seconds: Array, known: Known, learnt: NDArray[np.int64]) -> Array:
    return np.asarray(np.maximum(seconds, known.seconds_RK[learnt].min()))


def _network(known: Known, learnt: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.int64]:
    """Learn tokens and seconds from all that is known of roots."""
    x = np.concatenate([known.features_RX, known.states_RX], axis=1)
    y = np.concatenate([known.tokens_RK, known.seconds_RK], axis=1)
    (x_mean, x_deviation), (y_mean, y_deviation) = ((one[learnt].mean(0), one[learnt].std(0) + 1e-6) for one in (x, y))
    inputs, truth = (
        torch.from_numpy((one - mean) / deviation).float()
        for one, mean, deviation in ((x, x_mean, x_deviation), (y, y_mean, y_deviation))
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wide, narrow = _WIDTHS
        net = nn.Sequential(
            *(nn.Dropout(0.3), nn.Linear(x.shape[1], wide), nn.LayerNorm(wide), nn.GELU()),
            *(nn.Dropout(0.3), nn.Linear(wide, narrow), nn.GELU(), nn.Linear(narrow, y.shape[1])),
        )
        optimiser = torch.optim.AdamW(net.parameters(), _RATE, weight_decay=0.05)
        for _ in range(_EPOCHS):
            for rows in torch.split(torch.from_numpy(learnt)[torch.randperm(len(learnt))], _BATCH):
                loss = (net(inputs[rows]) - truth[rows]).square().mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    with torch.inference_mode():
        told = net.eval()(inputs[torch.from_numpy(asked)]).double().numpy() * y_deviation + y_mean
    tokens, seconds = np.split(told, 2, axis=1)
    return most_over_all(tokens, _clipped(seconds, known, learnt))


def _own_chances(known: Known, learnt: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.int64]:  # noqa: ARG001
    return most_over_all(known.expected_RK[asked], known.seconds_RK[asked])


def _outcomes(known: Known, learnt: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.int64]:  # noqa: ARG001
    return most_over_all(known.tokens_RK[asked], known.seconds_RK[asked])


WAYS: dict[str, Way] = {
    "plain decoding": lambda known, learnt, asked: np.zeros(len(asked), dtype=np.int64),  # noqa: ARG005
    "one least chance": _one_for_all,
    "one for each temperature": _one_a_temperature,
    "counting": _counting,
    "linear": _linear,
    "network": _network,
    "the grown tree's own chances": _own_chances,
    "what came": _outcomes,
}


def folds(texts: Sequence[str]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield roots to learn from and roots to ask about: every third of the texts in turn."""
    names = list(dict.fromkeys(texts))
    random.Random(0).shuffle(names)
    fold_of = {name: place % _FOLDS for place, name in enumerate(names)}
    fold_R = np.array([fold_of[text] for text in texts])
    for fold in range(_FOLDS):
        yield np.flatnonzero(fold_R != fold), np.flatnonzero(fold_R == fold)


def replayed(known: Known) -> list[list[str]]:
    """Return a row for each way: rate over plain decoding's (least and greatest of the folds), tokens a step, plain steps."""
    rows = []
    for name, way in WAYS.items():
        sums, ratios = np.zeros(3), []
        num_plain = 0
        for learnt, asked in folds(known.texts):
            places = way(known, learnt, asked)
            tokens, seconds = known.tokens_RK[asked, places].sum(), known.seconds_RK[asked, places].sum()
            plain_s = known.seconds_RK[asked, 0].sum()
            ratios.append(tokens / seconds * plain_s / len(asked))
            sums += (tokens, seconds, plain_s)
            num_plain += int((places == 0).sum())
        num_roots = len(known.texts)
        over_plain = sums[0] / sums[1] * sums[2] / num_roots
        spread = f"({min(ratios):.2f}–{max(ratios):.2f})"
        rows.append([name, f"{over_plain:.3f} {spread}", f"{sums[0] / num_roots:.2f}", f"{num_plain / num_roots:.0%}"])
    return rows


def watched(args: argparse.Namespace) -> Known:
    """Write texts and return what was seen."""
    config = load_settings(args.config, {"policy": "adaptive", "verifier": _RULE}).to_tool_config()
    config = replace(config, cached_text=False)  # whose trees spare the model some passes, and which sees copied text come
    policies: list[Watching] = []
    costs: list[CostModel] = []

    def make(config: EngineConfig, rig: StepTimer, roots: RootSource) -> ExpansionPolicy:
        costs.append(cached_profile(rig, WeightsCache(default_root())).costs())
        policies.append(Watching(config, roots))
        return policies[-1]

    engine = build_engine(config, make)
    tokenizer = AutoTokenizer.from_pretrained(resolve(config.model).folder)
    prompts = [chat_ids(tokenizer, text) for text in PromptGrammar.load(args.prompt_grammar).draw(args.num_prompts, args.seed)]

    def requests() -> Iterator[Request]:
        for number, (prompt, temperature) in enumerate(zip(prompts, cycle(args.temperatures), strict=False)):
            sampling = SamplingParams(temperature, seed=number if temperature else None, max_tokens=args.max_tokens)
            yield Request(f"text-{number}", prompt, sampling, Speculation(verifier=_RULE))

    run_case(engine, requests(), args.batch)
    return Known.of(policies[0].roots, costs[0])


def main() -> None:
    """Write texts, replay, and print a Markdown table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.roots", description="what roots tell, where trees know their nodes"
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file of settings")
    parser.add_argument("--prompt-grammar", type=Path, default=SHIPPED_DRAFTERS / "prompts.yaml")
    parser.add_argument("--num-prompts", type=int, default=150)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0], help="of the texts, in turn")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="texts written at a time: too many trees are cut to a step's tokens")
    parser.add_argument("--seed", type=int, default=77, help="of the prompts")
    known = watched(parser.parse_args())
    print(f"{len(known.texts)} roots of {len(set(known.texts))} texts\n")
    print(table(["way", "over plain decoding", "tokens a step", "plain steps"], replayed(known)))


if __name__ == "__main__":
    main()
