"""Evaluates choices on held-out prompts: the network, lighter baselines, static trees and an oracle.

A choice is scored by its tokens a second over all examples: exact expectations over predicted seconds. The oracle has the outcome
of the sampled trees, so part of its lead is chance and cannot be predicted.

Shape key: R examples, M entries, S scalars, C columns of a linear model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from selector.network.examples import Examples
from selector.network.net import Inputs, SelectorNet
from selector.network.replay import Array, Places, Totals, best_places, rows_by, static_place

_BUCKETS = 8  # of entropy
_RIDGE = 0.01  # times the number of examples, for standardised columns
_MEMORY, _CLEARLY_BETTER = 0.7, 1.01  # of a moving average; the ratio at which its choice changes
_BINS = 10  # of a calibration


@dataclass(frozen=True)
class Chosen:
    """The choices of one method for the examples, and the tokens that it expects, if it predicts any."""

    name: str
    places_R: Places
    tokens_RM: Array | None = None


@dataclass(frozen=True)
class Score:
    """One method on one group of examples: tokens a second over plain decoding, and relative to static trees and the oracle."""

    name: str
    group: str
    num_examples: int
    tokens: float  # a step
    speedup: float
    regret: float  # share of the oracle's tokens a second that is lost
    gap_closed: float  # share of the way from the best static tree to the oracle


@dataclass(frozen=True)
class CalibrationCurve:
    """Mean expected and observed tokens of the chosen trees, in bins of the expectation."""

    name: str
    expected: tuple[float, ...]
    observed: tuple[float, ...]

    @property
    def error(self) -> float:
        """Mean absolute difference over the bins, in tokens."""
        return float(np.mean(np.abs(np.array(self.expected) - np.array(self.observed))))


def baselines(known: Examples, known_seconds_RM: Array, tested: Examples, seconds_RM: Array) -> list[Chosen]:
    """Return the choices of lighter methods and of the oracle for `tested`. The methods learn from `known`, for each rule."""
    predictors: dict[str, Callable[[Examples, Examples], Array]] = {
        "table by entropy": _by_entropy,
        "linear": _linear,
        "counting": lambda _, examples: examples.counted_RM.astype(np.float64),
        "oracle": lambda _, examples: examples.tokens_RM.astype(np.float64),
    }
    found = [_static(known, known_seconds_RM, tested), _moving_average(known, tested, seconds_RM)]
    for name, predict in predictors.items():
        tokens_RM = _by_rule(known, tested, predict)
        found.append(Chosen(name, best_places(tokens_RM, seconds_RM), tokens_RM))
    return found


def chosen_by(name: str, net: SelectorNet, tested: Examples, seconds_RM: Array) -> Chosen:
    """Return a network's choices; raise ValueError if it has no head for a rule or was trained for another menu."""
    unknown = sorted(set(tested.rules) - set(net.shape.rules))
    if unknown or net.menu.entries != tested.menu.entries:
        raise ValueError(f"the selector was trained for another menu or without {', '.join(unknown) or 'its rules'}")
    with torch.inference_mode():
        outputs_RM = net(Inputs.of(tested.features, [net.shape.rules.index(rule) for rule in tested.rules])).double().numpy()
    if net.shape.objective == "policy":
        return Chosen(name, np.asarray(outputs_RM.argmax(1)))
    return Chosen(name, best_places(outputs_RM, seconds_RM), outputs_RM)


def scores(chosen: Sequence[Chosen], tested: Examples, seconds_RM: Array) -> list[Score]:
    """Return the score of each method over all examples and by rule, temperature and kind. Needs `static` and `oracle`."""
    groups = {"all": np.arange(len(tested))}
    for labels in (tested.rules, tuple(f"T={one:g}" for one in tested.temperature_R.tolist()), tested.kinds):
        groups.update(rows_by(labels))
    by_name = {one.name: one for one in chosen}
    tokens_RM = tested.tokens_RM.astype(np.float64)
    found = []
    for group, rows in groups.items():
        totals = {name: Totals.of(one.places_R[rows], tokens_RM[rows], seconds_RM[rows]) for name, one in by_name.items()}
        plain = Totals.of(np.zeros(len(rows), dtype=np.int64), tokens_RM[rows], seconds_RM[rows])
        static, oracle = totals["static"].rate, totals["oracle"].rate
        found += [
            Score(
                *(name, group, len(rows), one.tokens / len(rows), one.rate / plain.rate, 1.0 - one.rate / oracle),
                gap_closed=(one.rate - static) / (oracle - static) if oracle > static else float("nan"),
            )
            for name, one in totals.items()
        ]
    return found


def calibration(chosen: Chosen, tested: Examples) -> CalibrationCurve:
    """Return expected and observed tokens at the chosen trees, without plain decoding."""
    assert chosen.tokens_RM is not None
    rows = np.flatnonzero(chosen.places_R > 0)
    expected_R = chosen.tokens_RM[rows, chosen.places_R[rows]]
    observed_R = tested.tokens_RM[rows, chosen.places_R[rows]]
    bins = [part for part in np.array_split(np.argsort(expected_R, kind="stable"), _BINS) if len(part)]
    expected, observed = (tuple(float(values_R[part].mean()) for part in bins) for values_R in (expected_R, observed_R))
    return CalibrationCurve(chosen.name, expected, observed)


def table(found: Sequence[Score]) -> str:
    """Return a Markdown table with a row for each method: speed-up and tokens a step by group, regret and gap closed over all."""
    groups = list(dict.fromkeys(score.group for score in found))
    names = list(dict.fromkeys(score.name for score in found))
    by_both = {(score.name, score.group): score for score in found}
    counts = " | ".join(f"{group} ({by_both[names[0], group].num_examples})" for group in groups)
    lines = [f"| chooser | regret | gap closed | {counts} |", "|---|" + "---|" * (2 + len(groups))]
    for name in names:
        over_all = by_both[name, "all"]
        cells = " | ".join(f"{by_both[name, group].speedup:.3f}, {by_both[name, group].tokens:.2f}" for group in groups)
        lines.append(f"| {name} | {over_all.regret:.1%} | {over_all.gap_closed:.0%} | {cells} |")
    return "\n".join(lines)


def _by_rule(known: Examples, tested: Examples, predict: Callable[[Examples, Examples], Array]) -> Array:
    tokens_RM = np.empty(tested.tokens_RM.shape)
    known_rows = rows_by(known.rules)
    for rule, rows in rows_by(tested.rules).items():
        tokens_RM[rows] = predict(known.at(known_rows[rule]), tested.at(rows))
    return tokens_RM


def _static(known: Examples, known_seconds_RM: Array, tested: Examples) -> Chosen:
    """Choose the best tree for all known examples."""
    places_R = np.zeros(len(tested), dtype=np.int64)
    known_rows = rows_by(known.rules)
    for rule, rows in rows_by(tested.rules).items():
        of_rule = known_rows[rule]
        places_R[rows] = static_place(known.tokens_RM[of_rule].astype(np.float64), known_seconds_RM[of_rule])
    return Chosen("static", places_R)


def _moving_average(known: Examples, tested: Examples, seconds_RM: Array) -> Chosen:
    """Predict every tree's tokens from earlier roots of the text. Keep a choice unless another is clearly better."""
    places_R = np.zeros(len(tested), dtype=np.int64)
    means = {rule: known.tokens_RM[rows].mean(0, dtype=np.float64) for rule, rows in rows_by(known.rules).items()}
    temperatures = tested.temperature_R.tolist()
    prompts_and_rules = enumerate(zip(tested.prompts, tested.rules, strict=True))
    texts = tuple(f"{prompt} {rule} {temperatures[row]}" for row, (prompt, rule) in prompts_and_rules)
    for rows in rows_by(texts).values():
        average_M = means[tested.rules[int(rows[0])]]
        place = -1
        for row in rows.tolist():
            rates_M = average_M / seconds_RM[row]
            best = int(rates_M.argmax())
            place = best if place < 0 or rates_M[best] > _CLEARLY_BETTER * rates_M[place] else place
            places_R[row] = place
            average_M = _MEMORY * average_M + (1.0 - _MEMORY) * tested.tokens_RM[row]
    return Chosen("moving average", places_R)


def _by_entropy(known: Examples, tested: Examples) -> Array:
    """Predict the mean of roots with a similar entropy of the target's last distribution."""
    edges = np.quantile(known.scalars_RS[:, 0], np.linspace(0.0, 1.0, _BUCKETS + 1)[1:-1])
    bucket_R = np.searchsorted(edges, known.scalars_RS[:, 0])
    overall_M = known.tokens_RM.mean(0)
    means = [
        known.tokens_RM[bucket_R == bucket].mean(0) if (bucket_R == bucket).any() else overall_M for bucket in range(_BUCKETS)
    ]
    return np.stack(means)[np.searchsorted(edges, tested.scalars_RS[:, 0])].astype(np.float64)


def _linear(known: Examples, tested: Examples) -> Array:
    """Predict by ridge regression on the scalars."""
    x_RC, tested_RC = known.scalars_RS.astype(np.float64), tested.scalars_RS.astype(np.float64)
    mean_C, deviation_C = x_RC.mean(0), np.maximum(x_RC.std(0), 1e-6)
    x_RC, tested_RC = (x_RC - mean_C) / deviation_C, (tested_RC - mean_C) / deviation_C
    mean_M = known.tokens_RM.mean(0, dtype=np.float64)
    gram_CC = x_RC.T @ x_RC + _RIDGE * len(known) * np.eye(x_RC.shape[1])
    return np.asarray(mean_M + tested_RC @ np.linalg.solve(gram_CC, x_RC.T @ (known.tokens_RM - mean_M)))
