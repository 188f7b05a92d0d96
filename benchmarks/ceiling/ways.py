"""Ways to expect every tree's tokens from what is known before drafting, and the examples' own counting.

Shape key: R roots, M entries, D depths, X features.
"""

import random
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from benchmarks.roots import folds
from engine.core.policy import ROOT_SCALARS, DraftOutcome, SequenceView
from engine.core.tree import Expansion
from engine.core.types import SamplingParams, Speculation
from selector.acceptance import CountedAcceptance, _MenuColumns
from selector.menu import Menu
from selector.network.examples import Examples
from selector.network.features import SCALARS
from selector.network.replay import rows_by

Array = NDArray[np.float64]

_NUM_STEPS = 5  # that a server takes between two roots
_MAX_TOKENS = 1 << 20
_RIDGE, _FARTHEST = 0.01, 4.0  # of the number of training roots, for standardised columns; bound of a column
_PRIOR, _MOST_SHIFT = 10.0, 2.0  # of a residual's weights, and of its log-odds
_NUM_COMPONENTS, _NUM_TREES = 5, 80  # of boosting
_NUM_ROOT, _NUM_REQUEST = len(ROOT_SCALARS), SCALARS.index("counted_1")  # ends of their columns


class Shapes:
    """A menu's shapes: from tokens by entry to survival by depth of one entry, and from acceptance by depth to tokens."""

    def __init__(self, menu: Menu) -> None:
        self._entries = menu.entries
        self.chains = [place for place, entry in enumerate(menu.entries) if entry.branches == 1 and not entry.is_plain]
        self._prefixes = [self._prefixes_of(entry, menu) for entry in menu.entries]

    def _prefixes_of(self, entry: Expansion, menu: Menu) -> list[tuple[int, int]]:
        """Return depths and places of the entries that are the beginning of an entry, plain decoding first."""
        chains = [(menu.entries[place].trunk, place) for place in self.chains if menu.entries[place].trunk <= entry.trunk]
        forks = [
            (one.max_depth, place)
            for place, one in enumerate(menu.entries)
            if entry.branches > 1 and (one.trunk, one.branches) == (entry.trunk, entry.branches) and one.depth <= entry.depth
        ]
        return [(0, 0), *chains, *forks]

    def survival_D(self, tokens_M: Array, place: int) -> list[float]:
        """Return the probability that the accepted path of an entry reaches each depth."""
        depths, places = zip(*self._prefixes[place], strict=True)
        tokens = np.interp(np.arange(1 + self._entries[place].max_depth), depths, tokens_M[list(places)])
        return [float(one) for one in np.minimum.accumulate(np.clip(np.diff(tokens), 0.0, 1.0))]


def counted(examples: Examples, seconds_RM: Array, shapes: Shapes, seed: int = 0) -> Array:
    """Return the tokens that counting expects at each root. Between two roots it observes outcomes of the tree that it chose."""
    chance, tokens_RM = random.Random(seed), np.empty(examples.tokens_RM.shape)
    estimator = CountedAcceptance(examples.menu)
    texts = list(rows_by(texts_of(examples)).items())
    chance.shuffle(texts)
    for name, rows in texts:
        for number, row in enumerate(rows.tolist()):
            sampling = SamplingParams(float(examples.temperature_R[row]), max_tokens=_MAX_TOKENS)
            verifier = examples.rules[row] if not sampling.is_greedy else "coupled"
            view = SequenceView(name, int(examples.context_R[row]), 1 + number, _MAX_TOKENS, 1, sampling, Speculation(), verifier)
            tokens_RM[row] = estimator.estimate([view]).tokens[0]
            place = int((tokens_RM[row] / seconds_RM[row]).argmax()) or 1  # a probe where plain decoding is best
            entry, survival_D = examples.menu.entries[place], shapes.survival_D(examples.tokens_RM[row], place)
            for _ in range(_NUM_STEPS):
                drawn = chance.random()
                accepted = sum(drawn < one for one in survival_D)
                estimator.observe([DraftOutcome(name, entry, entry.num_draft_tokens, entry.max_depth, accepted)])
                estimator.estimate([view])
    return tokens_RM


def texts_of(examples: Examples) -> tuple[str, ...]:
    """Return the name of each root's text."""
    temperatures = examples.temperature_R.tolist()
    return tuple(f"{prompt} {temperature:g}" for prompt, temperature in zip(examples.prompts, temperatures, strict=True))


class Residual:
    """Log-odds of acceptance, at the first depth and below it, beyond counting: linear in standardised features, learnt online.

    A step is Newton's on the likelihood of the outcomes so far. Weights begin at zero.
    """

    def __init__(self, num_features: int) -> None:
        self._weights_2X = np.zeros((2, num_features))
        self._precision_2XX = np.tile(_PRIOR * np.eye(num_features), (2, 1, 1))

    def shift_2(self, x_X: Array) -> Array:
        """Return the shifts for a root's features."""
        return np.clip(self._weights_2X @ x_X, -_MOST_SHIFT, _MOST_SHIFT)

    def learn(self, x_X: Array, rates_D: Array, survival_D: Array) -> None:
        """Learn from the probabilities that a chain's path reached each depth, given the rates that were expected."""
        for depth, (reached, accepted) in enumerate(pairwise([1.0, *survival_D.tolist()])):
            part, expected = min(depth, 1), float(rates_D[depth])
            self._precision_2XX[part] += reached * expected * (1.0 - expected) * np.outer(x_X, x_X)
            gradient_X = (accepted - reached * expected) * x_X
            self._weights_2X[part] += np.linalg.solve(self._precision_2XX[part], gradient_X)


def residual(examples: Examples, counted_RM: Array, shapes: Shapes) -> Array:
    """Return the tokens that a residual over counting expects. It sees each root once: it predicts, then learns."""
    columns = _MenuColumns(examples.menu, examples.menu.deepest, [])
    true_RC = np.pad(examples.tokens_RM[:, shapes.chains].astype(np.float64), ((0, 0), (1, 0)), constant_values=1.0)
    increments_RC = np.diff(np.pad(counted_RM[:, [0, *shapes.chains]], ((0, 0), (1, 0))))
    rates_RC = np.clip(increments_RC[:, 1:] / increments_RC[:, :-1], 1e-3, 1.0 - 1e-3)
    rates_RD = np.pad(rates_RC, ((0, 0), (0, examples.menu.deepest - rates_RC.shape[1])), mode="edge")
    x_RX = standardised(examples.scalars_RS[:, :_NUM_ROOT].astype(np.float64))
    learner, tokens_RM = Residual(x_RX.shape[1]), counted_RM.copy()
    for row in random.Random(0).sample(range(len(examples)), len(examples)):
        first, below = learner.shift_2(x_RX[row])
        shift_D = np.array([first, *[below] * (examples.menu.deepest - 1)])
        rates_D = 1.0 / (1.0 + np.exp(-(np.log(rates_RD[row] / (1.0 - rates_RD[row])) + shift_D)))
        tokens_RM[row, columns.by_depth] = columns.expected(rates_D[None], np.ones((1, len(rates_D))))[0, 0]
        learner.learn(x_RX[row], rates_D, np.diff(true_RC[row]))
    return tokens_RM


def standardised(x_RX: Array, known: NDArray[np.int64] | None = None) -> Array:
    """Return the columns without mean and with deviation 1 over the known rows."""
    of_known = x_RX if known is None else x_RX[known]
    return np.asarray(np.clip((x_RX - of_known.mean(0)) / np.maximum(of_known.std(0), 1e-6), -_FARTHEST, _FARTHEST))


Predict = Callable[[Array, Array, NDArray[np.int64], NDArray[np.int64]], Array]


def ridge(x_RX: Array, tokens_RM: Array, train: NDArray[np.int64], tested: NDArray[np.int64]) -> Array:
    """Predict by ridge regression."""
    x_RX, mean_M = standardised(x_RX, train), tokens_RM[train].mean(0)
    gram_XX = x_RX[train].T @ x_RX[train] + _RIDGE * len(train) * np.eye(x_RX.shape[1])
    return np.asarray(mean_M + x_RX[tested] @ np.linalg.solve(gram_XX, x_RX[train].T @ (tokens_RM[train] - mean_M)))


def boosting(x_RX: Array, tokens_RM: Array, train: NDArray[np.int64], tested: NDArray[np.int64]) -> Array:
    """Predict the main components of all tokens by gradient boosting."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    mean_M = tokens_RM[train].mean(0)
    basis_KM = np.linalg.svd(tokens_RM[train] - mean_M, full_matrices=False)[2][:_NUM_COMPONENTS]
    plan = {"max_iter": _NUM_TREES, "learning_rate": 0.06, "max_depth": 3, "min_samples_leaf": 20, "l2_regularization": 5.0}
    found = [
        HistGradientBoostingRegressor(**plan, random_state=0).fit(x_RX[train], truth_R).predict(x_RX[tested])
        for truth_R in ((tokens_RM[train] - mean_M) @ basis_KM.T).T
    ]
    return np.asarray(mean_M + np.stack(found, axis=1) @ basis_KM)


def predictions(examples: Examples, seconds_RM: Array) -> dict[str, Array]:
    """Return the tokens that each way expects of every tree, [R, M]. The examples are of one rule."""
    shapes, tokens_RM = Shapes(examples.menu), examples.tokens_RM.astype(np.float64)
    counted_RM = counted(examples, seconds_RM, shapes)
    root_RX = examples.scalars_RS[:, :_NUM_ROOT].astype(np.float64)
    of_request_RX = np.concatenate([examples.scalars_RS[:, _NUM_ROOT:_NUM_REQUEST], counted_RM[:, shapes.chains[:4]]], axis=1)
    texts = texts_of(examples)
    before_RX = np.array([root_RX[max(0, row - (texts[max(0, row - 1)] == text))] for row, text in enumerate(texts)])
    inputs = {
        "request": of_request_RX,
        "request, root before": np.concatenate([of_request_RX, before_RX], axis=1),
        "request, root": np.concatenate([of_request_RX, root_RX], axis=1),
    }

    def fitted(predict: Predict, x_RX: Array) -> Array:
        found_RM = np.empty_like(tokens_RM)
        for train, tested in folds(examples.prompts):
            found_RM[tested] = predict(x_RX, tokens_RM, train, tested)
        return found_RM

    found = {"counting": counted_RM, "best static tree": np.empty_like(tokens_RM)}
    for rows in rows_by(tuple(f"{one:g}" for one in examples.temperature_R.tolist())).values():
        for train, tested in folds([examples.prompts[row] for row in rows.tolist()]):
            rates_M = tokens_RM[rows[train]].sum(0) / seconds_RM[rows[train]].sum(0)
            found["best static tree"][rows[tested]] = rates_M * seconds_RM[rows[tested]]
    found["residual: root"] = residual(examples, counted_RM, shapes)
    found |= {f"linear: {name}": fitted(ridge, x_RX) for name, x_RX in inputs.items()}
    if find_spec("sklearn"):
        found |= {f"boosting: {name}": fitted(boosting, inputs[name]) for name in ("request", "request, root")}
    return found | {"oracle": tokens_RM}
