"""Trains the selector's network on a CPU in minutes, with early stopping on held-out prompts.

Prompts are split in three, for training, early stopping and evaluation. Each update hides the scalars of the draft distribution
in a random half of the examples, since there is none after a plain step or a fully accepted path. In another random half it
hides all states, as a network would otherwise memorise the few examples by their states.

Shape key: R examples, B examples of an update, M entries.
"""

import copy
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from engine.utils.progress_bar import progress_bar
from selector.network.examples import Examples
from selector.network.features import DRAFT_SCALARS
from selector.network.net import Inputs, NetShape, Objective, SelectorNet
from selector.network.replay import Array, rows_by, static_place

_LEAST_VARIANCE = 0.05  # added to the variance of an entry's tokens


@dataclass(frozen=True, slots=True)
class SelectorTrainingPlan:
    """How to train. `stop_share` and `test_share` of each kind's prompts are held out, at least one of each.

    For the objective "policy" the loss is the negative mean throughput relative to the best static tree, plus a penalty. The
    penalty is `shortfall_weight` times the mean squared shortfall of the worst `worst_share` of the examples (arXiv 2602.16994).
    """

    objective: Objective = "tokens"
    rate: float = 3e-4
    weight_decay: float = 0.05
    batch: int = 32
    max_epochs: int = 200
    patience: int = 30
    stop_share: float = 0.15
    test_share: float = 0.25
    shortfall_weight: float = 1.0
    worst_share: float = 0.1
    seed: int = 1


@dataclass(frozen=True)
class PromptSplit:
    """Prompts for training, for early stopping and for evaluation."""

    train: tuple[str, ...]
    stop: tuple[str, ...]
    test: tuple[str, ...]


@dataclass(frozen=True)
class Trained:
    """A network, how it was made, and its losses by epoch."""

    net: SelectorNet
    recipe: dict[str, object]
    curve: list[dict[str, float]]


def split_of(examples: Examples, plan: SelectorTrainingPlan) -> PromptSplit:
    """Return a split with every kind in all three parts; raise ValueError if a kind has too few prompts."""
    rng = random.Random(plan.seed)
    train: list[str] = []
    stop: list[str] = []
    test: list[str] = []
    for kind, rows in rows_by(examples.kinds).items():
        prompts = sorted({examples.prompts[row] for row in rows.tolist()})
        num_stop, num_test = (max(1, round(share * len(prompts))) for share in (plan.stop_share, plan.test_share))
        if len(prompts) <= num_stop + num_test:
            raise ValueError(f"{len(prompts)} prompts of kind {kind} are too few to hold some out")
        rng.shuffle(prompts)
        test += prompts[:num_test]
        stop += prompts[num_test : num_test + num_stop]
        train += prompts[num_test + num_stop :]
    return PromptSplit(tuple(train), tuple(stop), tuple(test))


def train(examples: Examples, seconds_RM: Array, plan: SelectorTrainingPlan) -> Trained:
    """Return the network with the least loss on the prompts for early stopping. `seconds_RM` are the seconds of the steps."""
    split = split_of(examples, plan)
    rules = tuple(sorted(set(examples.rules)))
    rows = {part: _rows_of(examples, getattr(split, part)) for part in ("train", "stop")}
    objective = _objective(examples, seconds_RM, rows["train"], plan)
    with torch.random.fork_rng():
        torch.manual_seed(plan.seed)
        entries = tuple(str(entry) for entry in examples.menu.entries)
        shape = NetShape(examples.target_RD.shape[1], examples.draft_RW.shape[1], rules, entries, plan.objective)
        net = SelectorNet(shape)
        net.standardise(examples.scalars_RS[rows["train"]])
        parts = {part: _TrainingPart(examples.at(of_part), rules, objective.at(of_part)) for part, of_part in rows.items()}
        curve = _descend(net, parts["train"], parts["stop"], plan)
    recipe: dict[str, object] = {
        "plan": asdict(plan),
        "prompts": asdict(split),
        "num_examples": {part: len(of_part) for part, of_part in rows.items()},
        "num_epochs": len(curve),
        "stop_loss": min(point["stop"] for point in curve),
    }
    return Trained(net.eval().requires_grad_(False), recipe, curve)


def _rows_of(examples: Examples, prompts: Sequence[str]) -> np.ndarray:
    wanted = set(prompts)
    return np.array([row for row, prompt in enumerate(examples.prompts) if prompt in wanted])


@dataclass(frozen=True)
class _Objective:
    """The truth for a network's outputs, [R, M]: tokens with their variance, or throughput relative to the best static tree."""

    truth_RM: Tensor
    variance_M: Tensor
    plan: SelectorTrainingPlan

    def at(self, rows: np.ndarray) -> "_Objective":
        return _Objective(self.truth_RM[torch.from_numpy(rows)], self.variance_M, self.plan)

    def losses(self, outputs_BM: Tensor, rows: Tensor) -> Tensor:
        """Return a loss for each example. The shortfall of the worst examples is common to the batch."""
        truth_BM = self.truth_RM[rows]
        if self.plan.objective == "tokens":
            return ((outputs_BM - truth_BM).square() / self.variance_M)[:, 1:].mean(1)
        ratio_B = (outputs_BM.softmax(-1) * truth_BM).sum(-1)
        num_worst = max(1, round(self.plan.worst_share * len(rows)))
        shortfall = (1.0 - ratio_B).clamp(min=0.0).square().topk(num_worst).values.mean()
        return self.plan.shortfall_weight * shortfall - ratio_B


def _objective(examples: Examples, seconds_RM: Array, train_rows: np.ndarray, plan: SelectorTrainingPlan) -> _Objective:
    truth_RM = examples.tokens_RM.astype(np.float64)
    variance_M = truth_RM[train_rows].var(0) + _LEAST_VARIANCE
    if plan.objective == "policy":
        rates_RM = truth_RM / seconds_RM
        truth_RM = np.empty_like(rates_RM)
        is_train_R = np.isin(np.arange(len(examples)), train_rows)
        for rows in rows_by(examples.rules).values():
            known = rows[is_train_R[rows]]
            place = static_place(examples.tokens_RM[known].astype(np.float64), seconds_RM[known])
            truth_RM[rows] = rates_RM[rows] / rates_RM[rows, place : place + 1]
    return _Objective(torch.from_numpy(truth_RM).float(), torch.from_numpy(variance_M).float(), plan)


class _TrainingPart:
    """Examples as tensors, with their objective."""

    def __init__(self, examples: Examples, rules: tuple[str, ...], objective: _Objective) -> None:
        self.objective = objective
        self._inputs = Inputs.of(examples.features, [rules.index(rule) for rule in examples.rules])

    def __len__(self) -> int:
        return len(self._inputs.rules_B)

    def losses(
        self, net: SelectorNet, rows: Tensor, is_probs_hidden_B: Tensor, is_state_hidden_B: Tensor | None = None
    ) -> Tensor:
        """Return the losses of some examples, with the draft distribution or all states hidden where marked."""
        whole = self._inputs
        scalars_BS = whole.scalars_BS[rows].clone()
        scalars_BS[is_probs_hidden_B, DRAFT_SCALARS] = 0.0
        target_BD, draft_BW = whole.target_BD[rows], whole.draft_BW[rows]
        if is_state_hidden_B is not None:
            target_BD, draft_BW = (one.masked_fill(is_state_hidden_B[:, None], 0.0) for one in (target_BD, draft_BW))
        inputs = Inputs(target_BD, draft_BW, scalars_BS, whole.counted_BM[rows], whole.rules_B[rows])
        return self.objective.losses(net(inputs), rows)

    def mean_loss(self, net: SelectorNet) -> float:
        """Return the mean of the losses with and without the draft distribution."""
        rows = torch.arange(len(self))
        with torch.inference_mode():
            shown, hidden = (self.losses(net, rows, torch.full((len(rows),), hide)) for hide in (False, True))
        return float((shown.mean() + hidden.mean()) / 2)


def _descend(
    net: SelectorNet, learnt: _TrainingPart, stopping: _TrainingPart, plan: SelectorTrainingPlan
) -> list[dict[str, float]]:
    """Train in place and restore the best weights; return the losses by epoch."""
    generator = torch.Generator().manual_seed(plan.seed)
    optimiser = torch.optim.AdamW(net.parameters(), plan.rate, weight_decay=plan.weight_decay)
    hides_states = plan.objective == "tokens"  # the paper's selector always sees them
    curve: list[dict[str, float]] = []
    best, best_weights = float("inf"), copy.deepcopy(net.state_dict())
    with progress_bar(what="training", total=plan.max_epochs, unit="epoch") as bar:
        while len(curve) < plan.max_epochs:
            net.train()
            total = 0.0
            for rows in torch.split(torch.randperm(len(learnt), generator=generator), plan.batch):
                is_probs_hidden_B, is_state_hidden_B = torch.rand((2, len(rows)), generator=generator) < 0.5
                loss = learnt.losses(net, rows, is_probs_hidden_B, is_state_hidden_B if hides_states else None).mean()
                optimiser.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                total += float(loss.detach()) * len(rows)
            net.eval()
            curve.append({"epoch": len(curve) + 1.0, "train": total / len(learnt), "stop": stopping.mean_loss(net)})
            bar.set_postfix(train=curve[-1]["train"], stop=curve[-1]["stop"], refresh=False)
            bar.update()
            if curve[-1]["stop"] < best:
                best, best_weights = curve[-1]["stop"], copy.deepcopy(net.state_dict())
            elif len(curve) - _best_epoch(curve) >= plan.patience:
                break
    net.load_state_dict(best_weights)
    return curve


def _best_epoch(curve: Sequence[dict[str, float]]) -> int:
    return 1 + min(range(len(curve)), key=lambda index: curve[index]["stop"])
