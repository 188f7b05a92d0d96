"""Replays selectors: each chooses a tree at every root from what is known before drafting, and learns from other prompts alone.

Counting has every tree's tokens at the earlier roots of the text. A server's counts know the drafted trees alone. The others
predict what counting misses: `linear` by ridge regression on scalars, `network` from both models' states as well. Seconds are
the training roots' means. Shape key: R roots, M shapes, K rules, X features.
"""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper.design import FAMILIES, SHAPES
from benchmarks.roots import folds, most_over_all, network_predictions, ridge_predictions

Array = NDArray[np.float64]
Line = Mapping[str, Any]

WAYS = ("counting", "linear", "network")
_RULES = tuple((name, family.name) for family in FAMILIES for name in family.verifiers)
_WEIGHT = 4.0  # of the training roots' mean, in roots of the text


def prompt_of(line: Line) -> str:
    """Return the name of the prompt of a root's text."""
    return "-".join(line["text"].split("-")[:2])


def with_choices(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the roots of a pair, each with the chosen shape of each rule and way: for tokens a step, then for speed."""
    lines = sorted(lines, key=lambda line: (line["text"], line["point"]))
    tokens_RKM = np.array([[line["tokens"]["/".join(rule)][: len(SHAPES)] for rule in _RULES] for line in lines])
    seconds_RKM = np.array([[line["seconds"][family][: len(SHAPES)] for _, family in _RULES] for line in lines])
    known = np.array(
        [[*line["scalars"], line["temperature"], line["top_p"], np.log1p(line["point"])] for line in lines], dtype=np.float64
    )
    states = np.stack([np.frombuffer(b64decode(line["states"]), dtype="<f2") for line in lines]).astype(np.float64)
    places = {way: np.zeros((len(lines), len(_RULES), 2), dtype=np.int64) for way in WAYS}
    for train, tested in folds([prompt_of(line) for line in lines]):
        if not len(train):
            continue
        counted_RKM = _counted(lines, tokens_RKM, train)
        missed = (tokens_RKM - counted_RKM).reshape(len(lines), -1)
        found = {"counting": counted_RKM[tested]}
        x = np.concatenate([known, counted_RKM[:, :, :: len(SHAPES) // 2].reshape(len(lines), -1)], axis=1)
        for way, predicted in (
            ("linear", ridge_predictions(x, missed, train, tested)),
            ("network", network_predictions(np.concatenate([x, states], axis=1), missed, train, tested)),
        ):
            found[way] = found["counting"] + predicted.reshape(-1, *tokens_RKM.shape[1:])
        for way, of_way in found.items():
            for rule in range(len(_RULES)):
                seconds = np.broadcast_to(seconds_RKM[train, rule].mean(0), of_way[:, rule].shape)
                places[way][tested, rule, 0] = of_way[:, rule].argmax(1)
                places[way][tested, rule, 1] = most_over_all(of_way[:, rule], seconds)
    return [
        {
            **line,
            "chosen": {
                way: {"/".join(rule): places[way][row, place].tolist() for place, rule in enumerate(_RULES)} for way in WAYS
            },
        }
        for row, line in enumerate(lines)
    ]


def _counted(lines: Sequence[Line], tokens_RKM: Array, train: NDArray[np.int64]) -> Array:
    """Return the tokens that counting expects: the mean of the training roots and of the text's earlier roots."""
    settings = [(line["temperature"], line["top_p"]) for line in lines]
    means = {
        setting: tokens_RKM[[row for row in train.tolist() if settings[row] == setting] or train].mean(0)
        for setting in set(settings)
    }
    counted = np.empty_like(tokens_RKM)
    for _, rows in groupby(range(len(lines)), key=lambda row: lines[row]["text"]):
        for place, row in enumerate(of_text := [*rows]):
            earlier = tokens_RKM[of_text[:place]].sum(0)
            counted[row] = (_WEIGHT * means[settings[row]] + earlier) / (_WEIGHT + place)
    return counted
