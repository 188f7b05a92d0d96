"""Evaluates features of roots for choosing noise-aware trees, by replaying recorded trees.

python -m benchmarks.roots --config configs/default.yaml

Texts are generated with one large noise-aware tree at each step. It determines every tree with a higher least chance: its
nodes, its rounds and its accepted tokens. Each method to choose a least chance, or plain decoding, is replayed at all roots
with the costs of this machine. The result is tokens a second over plain decoding, for one sequence. Methods are trained on two
thirds of the texts and tested on the rest, each third in turn. The table has the sum over the thirds, and the least and the
greatest of them.

Limits of the replay: counting has seen the largest tree at every step, and trees do not end where a further level would not pay.

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

from benchmarks.markdown import table
from engine.build import build_engine
from engine.core.config import EngineConfig
from engine.core.policy import DraftOutcome, ExpansionChoice, ExpansionPolicy, RootSource, SequenceView, StepFeedback
from engine.core.types import Request, SamplingParams, Speculation
from engine.distill.prompts import PromptGrammar
from engine.profiling.step_timer import StepTimer
from engine.weights import WeightsCache, default_root, resolve
from engine.weights.pretrained import load_tokenizer
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
_RIDGE = 0.001  # of the number of training roots, for standardised columns
_EPOCHS, _RATE, _BATCH, _WIDTHS = 12, 1e-3, 64, (256, 32)
_RULE = "coupled"


class _NodeSums:
    """Probabilities, nodes, rounds and fed nodes of trees, added up by the least chance that admits a node, [4][K]."""

    def __init__(self, least: Sequence[float]) -> None:
        self._likeliest_first = [-chance for chance in least]
        self.sums = [[0.0] * len(least) for _ in range(4)]
        self.accepted = [0.0] * len(least)
        self.num_trees = 0

    def add(self, outcome: DraftOutcome, least: float) -> None:
        """Add a tree that has all nodes down to a least chance."""
        nodes, num_rounds = outcome.nodes, outcome.drafted_depth
        assert nodes is not None, "a tree that does not know its nodes"
        likeliest_first, accepted = self._likeliest_first, self.accepted
        num_known = bisect_right(likeliest_first, -least)
        self.num_trees += 1
        deepest = 0
        chances, counts, rounds, fed = self.sums
        for node in sorted(range(len(nodes.chances)), key=nodes.chances.__getitem__, reverse=True):
            chance, depth = nodes.chances[node], nodes.depths[node]
            place = bisect_left(likeliest_first, -chance)
            if place >= num_known:
                break
            chances[place] += chance
            counts[place] += 1.0
            if node in nodes.accepted:
                accepted[place] += 1.0
            if depth < num_rounds:
                fed[place] += 1.0
                if depth > deepest:
                    rounds[place] += depth - deepest
                    deepest = depth


@dataclass(frozen=True)
class Root:
    """The features of a root before drafting, and the outcome of every tree of the menu there, [K] each."""

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
    """Drafts the largest tree everywhere and records roots and outcomes."""

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

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        """Return the largest tree for every sequence."""
        facts = self._source.facts([view.request_id for view in views])
        states = np.concatenate([facts.target_BD, facts.draft_BW], axis=1)
        tokens_BK, nodes_BK, rounds_BK = np.array(self._counting.estimate(views))
        counted_B4K = np.stack([tokens_BK, nodes_BK, rounds_BK, nodes_BK * self._menu.fed_share], axis=1)
        self._seen = {
            view.request_id: (view, states[row], facts.scalars_BS[row], counted_B4K[row])
            for row, view in enumerate(views)
            if facts.is_known_B[row]
        }
        return ExpansionChoice((self.entries[-1],) * len(views))

    def observe(self, feedback: StepFeedback) -> None:
        """Record the outcomes of the trees."""
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
                *(_whole(1.0, 1.0 + np.cumsum(found.accepted)), _whole(1.0, 1.0 + expected_K), _whole(0.0, nodes_K)),
                *(_whole(0.0, 1.0 + rounds_K), _whole(0.0, fed_K)),
            )
            self.roots.append(root)


def _whole(of_plain: float, of_trees_K: Array) -> Array:
    return np.concatenate([[of_plain], of_trees_K])


@dataclass(frozen=True)
class Known:
    """All roots as arrays, with observed and counted seconds of a step of each tree, [R, K] each."""

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
        """Return the arrays of the roots."""
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
            np.stack([step_s(costs, *one, *counted_3K) for one, counted_3K in zip(requests, counted[:, 1:], strict=True)]),
            np.stack([root.tokens_K for root in roots]),
            np.stack([root.expected_K for root in roots]),
            np.stack([step_s(costs, *one, *trees) for one, *trees in zip(requests, nodes, rounds, fed, strict=True)]),
        )


def most_over_all(tokens_RK: Array, seconds_RK: Array) -> NDArray[np.int64]:
    """Return the entries with the most expected tokens over all seconds, by Dinkelbach's iteration.

    The best tree of a single root may be expensive and bring fewer tokens than its seconds would elsewhere.
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


def _one_for_all(known: Known, train: NDArray[np.int64], tested: NDArray[np.int64]) -> NDArray[np.int64]:
    best = int((known.tokens_RK[train].sum(0) / known.seconds_RK[train].sum(0)).argmax())
    return np.full(len(tested), best)


def _one_a_temperature(known: Known, train: NDArray[np.int64], tested: NDArray[np.int64]) -> NDArray[np.int64]:
    temperatures = np.unique(known.temperature_R)
    groups = [train[known.temperature_R[train] == temperature] for temperature in temperatures]
    sums = [np.stack([truth[group].sum(0) for group in groups]) for truth in (known.tokens_RK, known.seconds_RK)]
    return most_over_all(*sums)[np.searchsorted(temperatures, known.temperature_R[tested])]


def _counting(known: Known, train: NDArray[np.int64], tested: NDArray[np.int64]) -> NDArray[np.int64]:  # noqa: ARG001
    return most_over_all(known.counted_RK[tested], known.counted_s_RK[tested])


def _linear(known: Known, train: NDArray[np.int64], tested: NDArray[np.int64]) -> NDArray[np.int64]:
    truth = np.concatenate([known.tokens_RK, known.seconds_RK], axis=1)
    tokens, seconds = np.split(ridge_predictions(known.features_RX, truth, train, tested), 2, axis=1)
    return most_over_all(tokens, _clipped(seconds, known, train))


def ridge_predictions(x_RX: Array, truth_RY: Array, train: NDArray[np.int64], tested: NDArray[np.int64]) -> Array:
    """Return the test roots' values by ridge regression on standardised features."""
    mean, deviation = x_RX[train].mean(0), x_RX[train].std(0) + 1e-6
    x = np.pad((x_RX - mean) / deviation, ((0, 0), (0, 1)), constant_values=1.0)
    gram = x[train].T @ x[train] + _RIDGE * len(train) * np.eye(x.shape[1])
    return np.asarray(x[tested] @ np.linalg.solve(gram, x[train].T @ truth_RY[train]))


def _clipped(seconds: Array, known: Known, train: NDArray[np.int64]) -> Array:
    return np.asarray(np.maximum(seconds, known.seconds_RK[train].min()))


def _network(known: Known, train: NDArray[np.int64], tested: NDArray[np.int64]) -> NDArray[np.int64]:
    """Predict tokens and seconds from all features of roots."""
    x = np.concatenate([known.features_RX, known.states_RX], axis=1)
    truth = np.concatenate([known.tokens_RK, known.seconds_RK], axis=1)
    tokens, seconds = np.split(network_predictions(x, truth, train, tested), 2, axis=1)
    return most_over_all(tokens, _clipped(seconds, known, train))


def network_predictions(x_RX: Array, truth_RY: Array, train: NDArray[np.int64], tested: NDArray[np.int64]) -> Array:
    """Return the test roots' values by a small network on standardised features."""
    (x_mean, x_deviation), (y_mean, y_deviation) = ((one[train].mean(0), one[train].std(0) + 1e-6) for one in (x_RX, truth_RY))
    inputs, truth = (
        torch.from_numpy((one - mean) / deviation).float()
        for one, mean, deviation in ((x_RX, x_mean, x_deviation), (truth_RY, y_mean, y_deviation))
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wide, narrow = _WIDTHS
        net = nn.Sequential(
            *(nn.Dropout(0.3), nn.Linear(x_RX.shape[1], wide), nn.LayerNorm(wide), nn.GELU()),
            *(nn.Dropout(0.3), nn.Linear(wide, narrow), nn.GELU(), nn.Linear(narrow, truth_RY.shape[1])),
        )
        optimiser = torch.optim.AdamW(net.parameters(), _RATE, weight_decay=0.05)
        for _ in range(_EPOCHS):
            for rows in torch.split(torch.from_numpy(train)[torch.randperm(len(train))], _BATCH):
                loss = (net(inputs[rows]) - truth[rows]).square().mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    with torch.inference_mode():
        predicted = net.eval()(inputs[torch.from_numpy(tested)]).double().numpy()
    return np.asarray(predicted * y_deviation + y_mean)


def _own_chances(known: Known, train: NDArray[np.int64], tested: NDArray[np.int64]) -> NDArray[np.int64]:  # noqa: ARG001
    return most_over_all(known.expected_RK[tested], known.seconds_RK[tested])


def _outcomes(known: Known, train: NDArray[np.int64], tested: NDArray[np.int64]) -> NDArray[np.int64]:  # noqa: ARG001
    return most_over_all(known.tokens_RK[tested], known.seconds_RK[tested])


WAYS: dict[str, Way] = {
    "plain decoding": lambda known, train, tested: np.zeros(len(tested), dtype=np.int64),  # noqa: ARG005
    "one least chance": _one_for_all,
    "one for each temperature": _one_a_temperature,
    "counting": _counting,
    "linear": _linear,
    "network": _network,
    "the grown tree's own chances": _own_chances,
    "what came": _outcomes,
}


def folds(texts: Sequence[str]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield training roots and test roots: every third of the texts is for tests in turn."""
    names = list(dict.fromkeys(texts))
    random.Random(0).shuffle(names)
    fold_of = {name: place % _FOLDS for place, name in enumerate(names)}
    fold_R = np.array([fold_of[text] for text in texts])
    for fold in range(_FOLDS):
        yield np.flatnonzero(fold_R != fold), np.flatnonzero(fold_R == fold)


def replayed(known: Known) -> list[list[str]]:
    """Return a row for each method: rate over plain decoding (least and greatest fold), tokens a step, plain steps."""
    rows = []
    for name, way in WAYS.items():
        sums, ratios = np.zeros(3), []
        num_plain = 0
        for train, tested in folds(known.texts):
            places = way(known, train, tested)
            tokens, seconds = known.tokens_RK[tested, places].sum(), known.seconds_RK[tested, places].sum()
            plain_s = known.seconds_RK[tested, 0].sum()
            ratios.append(tokens / seconds * plain_s / len(tested))
            sums += (tokens, seconds, plain_s)
            num_plain += int((places == 0).sum())
        num_roots = len(known.texts)
        over_plain = sums[0] / sums[1] * sums[2] / num_roots
        spread = f"({min(ratios):.2f}–{max(ratios):.2f})"
        rows.append([name, f"{over_plain:.3f} {spread}", f"{sums[0] / num_roots:.2f}", f"{num_plain / num_roots:.0%}"])
    return rows


def watched(args: argparse.Namespace) -> Known:
    """Generate texts and return the recorded roots."""
    config = load_settings(args.config, {"policy": "adaptive", "verifier": _RULE}).to_tool_config()
    config = replace(config, cached_text=False)  # its trees replace passes of the model
    policies: list[Watching] = []
    costs: list[CostModel] = []

    def make(config: EngineConfig, rig: StepTimer, roots: RootSource) -> ExpansionPolicy:
        costs.append(cached_profile(rig, WeightsCache(default_root())).costs())
        policies.append(Watching(config, roots))
        return policies[-1]

    engine = build_engine(config, make)
    tokenizer = load_tokenizer(resolve(config.model).folder)
    prompts = [chat_ids(tokenizer, text) for text in PromptGrammar.load(args.prompt_grammar).draw(args.num_prompts, args.seed)]

    def requests() -> Iterator[Request]:
        for number, (prompt, temperature) in enumerate(zip(prompts, cycle(args.temperatures), strict=False)):
            sampling = SamplingParams(temperature, seed=number if temperature else None, max_tokens=args.max_tokens)
            yield Request(f"text-{number}", prompt, sampling, Speculation(verifier=_RULE))

    run_case(engine, requests(), args.batch)
    return Known.of(policies[0].roots, costs[0])


def main() -> None:
    """Generate texts, replay, and print a Markdown table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.roots", description="features of roots for choosing noise-aware trees"
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
