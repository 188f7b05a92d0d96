"""How good a choice is on prompts that nothing was learnt from: the network beside the oracle, static trees and lighter ways.

A choice is worth the tokens a second that it brings over all examples: exact expectations over predicted seconds. The oracle
knows what the sampled trees bring, so that a part of what it is ahead is chance that nobody could foresee.

Shape key: R examples, M entries, S scalars, C columns of a linear model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from selector.network.examples import Examples
from selector.network.net import Inputs, SelectorNet
from selector.network.replay import Array, Outcome, Places, best_places, rows_by, static_place

_BUCKETS = 8  # of entropy
_RIDGE = 1.0  # times the number of examples, of standardised columns, over 100
_MEMORY, _CLEARLY_BETTER = 0.7, 1.01  # of a moving average; before its choice is given up
_BINS = 10  # of a calibration


@dataclass(frozen=True)
class Told:
    """What one way to choose says of the examples: its choices, and the tokens it expects, if it expects any."""

    name: str
    places_R: Places
    tokens_RM: Array | None = None


@dataclass(frozen=True)
class Score:
    """One way on one group of examples: tokens a second over plain decoding's, and where that lies between static and oracle."""

    name: str
    group: str
    num_examples: int
    tokens: float  # a step
    speedup: float
    regret: float  # share of the oracle's tokens a second that is lost
    gap_closed: float  # share of the way from the best static tree to the oracle


@dataclass(frozen=True)
class Calibration:
    """Bins of what was expected at the chosen trees, with what came: `error` is their mean distance in tokens."""

    name: str
    expected: tuple[float, ...]
    came: tuple[float, ...]

    @property
    def error(self) -> float:
        """Mean distance of the bins."""
        return float(np.mean(np.abs(np.array(self.expected) - np.array(self.came))))


def ways(known: Examples, known_seconds_RM: Array, asked: Examples, seconds_RM: Array) -> list[Told]:
    """Return the lighter ways and the oracle: learnt from `known`, told of `asked`, rule by rule."""
    expecting: dict[str, Callable[[Examples, Examples], Array]] = {
        "table by entropy": _by_entropy,
        "linear": _linear,
        "counting": lambda _, one: one.counted_RM.astype(np.float64),
        "oracle": lambda _, one: one.tokens_RM.astype(np.float64),
    }
    found = [_static(known, known_seconds_RM, asked), _moving_average(known, asked, seconds_RM)]
    for name, expect in expecting.items():
        tokens_RM = _rule_by_rule(known, asked, expect)
        found.append(Told(name, best_places(tokens_RM, seconds_RM), tokens_RM))
    return found


def told_by(name: str, net: SelectorNet, asked: Examples, seconds_RM: Array) -> Told:
    """Return what a network says; raise ValueError if it has no head for a rule or was trained for another menu."""
    unknown = sorted(set(asked.rules) - set(net.shape.rules))
    if unknown or net.menu.entries != asked.menu.entries:
        raise ValueError(f"the selector was trained for another menu or without {', '.join(unknown) or 'its rules'}")
    with torch.inference_mode():
        outputs_RM = net(Inputs.of(asked.features, [net.shape.rules.index(rule) for rule in asked.rules])).double().numpy()
    if net.shape.objective == "policy":
        return Told(name, np.asarray(outputs_RM.argmax(1)))
    return Told(name, best_places(outputs_RM, seconds_RM), outputs_RM)


def scores(told: Sequence[Told], asked: Examples, seconds_RM: Array) -> list[Score]:
    """Return each way's score over all examples and by rule, temperature and kind. `static` and `oracle` are among the ways."""
    groups = {"all": np.arange(len(asked))}
    for labels in (asked.rules, tuple(f"T={one:g}" for one in asked.temperature_R.tolist()), asked.kinds):
        groups.update(rows_by(labels))
    by_name = {one.name: one for one in told}
    tokens_RM = asked.tokens_RM.astype(np.float64)
    found = []
    for group, rows in groups.items():
        reached = {name: Outcome.of(one.places_R[rows], tokens_RM[rows], seconds_RM[rows]) for name, one in by_name.items()}
        plain = Outcome.of(np.zeros(len(rows), dtype=np.int64), tokens_RM[rows], seconds_RM[rows])
        static, oracle = reached["static"].rate, reached["oracle"].rate
        found += [
            Score(
                *(name, group, len(rows), one.tokens / len(rows), one.rate / plain.rate, 1.0 - one.rate / oracle),
                gap_closed=(one.rate - static) / (oracle - static) if oracle > static else float("nan"),
            )
            for name, one in reached.items()
        ]
    return found


def calibration(told: Told, asked: Examples) -> Calibration:
    """Return how expectations and outcomes compare at the trees chosen, plain decoding aside."""
    assert told.tokens_RM is not None
    rows = np.flatnonzero(told.places_R > 0)
    expected_R = told.tokens_RM[rows, told.places_R[rows]]
    came_R = asked.tokens_RM[rows, told.places_R[rows]]
    bins = [part for part in np.array_split(np.argsort(expected_R, kind="stable"), _BINS) if len(part)]
    means = [(float(expected_R[part].mean()), float(came_R[part].mean())) for part in bins]
    return Calibration(told.name, tuple(one for one, _ in means), tuple(came for _, came in means))


def table(found: Sequence[Score]) -> str:
    """Return a Markdown table: a row for each way, of each group its speed-up and its tokens a step, the gap closed over all."""
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


def _rule_by_rule(known: Examples, asked: Examples, expect: Callable[[Examples, Examples], Array]) -> Array:
    tokens_RM = np.empty(asked.tokens_RM.shape)
    known_rows = rows_by(known.rules)
    for rule, rows in rows_by(asked.rules).items():
        tokens_RM[rows] = expect(known.at(known_rows[rule]), asked.at(rows))
    return tokens_RM


def _static(known: Examples, known_seconds_RM: Array, asked: Examples) -> Told:
    places_R = np.zeros(len(asked), dtype=np.int64)
    known_rows = rows_by(known.rules)
    for rule, rows in rows_by(asked.rules).items():
        of_rule = known_rows[rule]
        places_R[rows] = static_place(known.tokens_RM[of_rule].astype(np.float64), known_seconds_RM[of_rule])
    return Told("static", places_R)


def _moving_average(known: Examples, asked: Examples, seconds_RM: Array) -> Told:
    """Expect what earlier roots of the text brought, of every tree; stay with a choice unless another is clearly better."""
    places_R = np.zeros(len(asked), dtype=np.int64)
    means = {rule: known.tokens_RM[rows].mean(0, dtype=np.float64) for rule, rows in rows_by(known.rules).items()}
    temperatures = asked.temperature_R.tolist()
    texts = tuple(f"{prompt} {rule} {temperatures[row]}" for row, (prompt, rule) in enumerate(zip(asked.prompts, asked.rules)))
    for rows in rows_by(texts).values():
        average_M = means[asked.rules[int(rows[0])]]
        place = -1
        for row in rows.tolist():
            rates_M = average_M / seconds_RM[row]
            best = int(rates_M.argmax())
            place = best if place < 0 or rates_M[best] > _CLEARLY_BETTER * rates_M[place] else place
            places_R[row] = place
            average_M = _MEMORY * average_M + (1.0 - _MEMORY) * asked.tokens_RM[row]
    return Told("moving average", places_R)


def _by_entropy(known: Examples, asked: Examples) -> Array:
    """Expect what roots of like entropy of the target's last law brought."""
    edges = np.quantile(known.scalars_RS[:, 0], np.linspace(0.0, 1.0, _BUCKETS + 1)[1:-1])
    bucket_R = np.searchsorted(edges, known.scalars_RS[:, 0])
    overall_M = known.tokens_RM.mean(0)
    means = [
        known.tokens_RM[bucket_R == bucket].mean(0) if (bucket_R == bucket).any() else overall_M for bucket in range(_BUCKETS)
    ]
    return np.stack(means)[np.searchsorted(edges, asked.scalars_RS[:, 0])].astype(np.float64)


def _linear(known: Examples, asked: Examples) -> Array:
    """Expect by ridge regression on the scalars."""
    x_RC, asked_RC = known.scalars_RS.astype(np.float64), asked.scalars_RS.astype(np.float64)
    mean_C, deviation_C = x_RC.mean(0), np.maximum(x_RC.std(0), 1e-6)
    x_RC, asked_RC = (x_RC - mean_C) / deviation_C, (asked_RC - mean_C) / deviation_C
    mean_M = known.tokens_RM.mean(0, dtype=np.float64)
    gram_CC = x_RC.T @ x_RC + _RIDGE * len(known) / 100 * np.eye(x_RC.shape[1])
    return np.asarray(mean_M + asked_RC @ np.linalg.solve(gram_CC, x_RC.T @ (known.tokens_RM - mean_M)))
