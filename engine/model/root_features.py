"""Features of the next roots, computed on request from passes that have already run.

A step ends each row's tree at one node, followed by one more token, the next root. At that node the target's state and
distribution are known, and the features that the drafter will read at the root. The drafter's distribution is often known too.
This module keeps references to them until the next step, and computes a policy's inputs for the requested sequences only.

Shape key: B requested sequences, C columns of scalars, N nodes with logits, R stored draft distributions, D target width,
W width of the drafter's inputs, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from engine.core.policy import ROOT_SCALARS, RootFacts
from engine.core.step_observer import CommittedStep, Ending, StepObserver
from engine.model.causal_lm import CausalModel
from engine.utils.host_transfer import column, integers

_NUM_COMPARED = 4  # the last ROOT_SCALARS, which need a draft distribution
_LEAST_LOG = -14.0  # lower bound of a log-probability


@runtime_checkable
class SlotFeatures(Protocol):
    """A drafter that reads features of the target, stored by slot."""

    def features_at(self, slots: Sequence[int]) -> Float[Tensor, "B W"]:
        """Return the features in these slots, which the target has written."""
        ...


class RootFeatures(StepObserver):
    """Returns features of the roots after the latest noted step. Passes are observed, at a cost, only after `watch`.

    `drafter` may read features of the target (SlotFeatures).
    """

    def __init__(self, model: CausalModel, drafter: object) -> None:
        self._model = model
        self._drafter = drafter if isinstance(drafter, SlotFeatures) else None
        self._embeddings_VD: Tensor = model.embeddings_VD
        self._endings: Mapping[str, Ending] = {}
        self._head_inputs_ND: Tensor | None = None  # inputs of the output head in the latest pass
        self._states_ND = self._logits_NV = self._probs_RV = torch.empty((0, 0))
        self._is_watching = False

    @property
    def is_watching(self) -> bool:
        """Whether steps are to be noted."""
        return self._is_watching

    def watch(self) -> None:
        """Begin to observe passes."""
        if not self._is_watching:
            self._is_watching = True
            for runner in self._model.runners:
                runner.watch((), lambda output: self.keep(output.head_inputs_ND))
            if self._model.native is None:
                head = self._model.module.get_output_embeddings()
                head.register_forward_pre_hook(lambda _, args: self.keep(args[0].flatten(0, -2)))
                self._model.memories.append(self)

    def keep(self, kept: Float[Tensor, "N D"] | None) -> None:
        """Keep the output head's inputs of the latest pass."""
        self._head_inputs_ND = kept

    def kept(self) -> Float[Tensor, "N D"] | None:
        """Return the output head's inputs of the latest pass."""
        return self._head_inputs_ND

    def after_commit(self, step: CommittedStep) -> None:
        """Keep the step if roots are watched."""
        if self._is_watching:
            self.note(step.endings, step.logits_NV, step.draft_probs_RV)

    def note(self, endings: Mapping[str, Ending], logits_NV: Float[Tensor, "N V"], probs_RV: Float[Tensor, "R V"]) -> None:
        """Keep the step whose pass has just run, in place of the step before."""
        self._endings = endings
        if endings:
            assert self._head_inputs_ND is not None
            # Nodes come first. The scored places of prompts follow; they are no roots.
            self._states_ND, self._logits_NV, self._probs_RV = self._head_inputs_ND[: len(logits_NV)], logits_NV, probs_RV

    def facts(self, request_ids: Sequence[str]) -> RootFacts:
        """Return the features of these sequences' roots."""
        with torch.inference_mode():
            found = [self._endings.get(request_id) for request_id in request_ids]
            endings = [ending for ending in found if ending is not None]
            is_known_B = np.array([ending is not None for ending in found], dtype=np.bool_)
            nodes = integers([ending.node for ending in endings], self._model.device)
            width = self._embeddings_VD.shape[1]
            target_BD = self._states_ND.index_select(0, nodes) if endings else torch.empty((0, width))
            return RootFacts(
                is_known_B,
                _spread(target_BD, is_known_B),
                _spread(self._drafter_reads(endings), is_known_B),
                _spread(self._scalars(endings, nodes), is_known_B),
            )

    def _drafter_reads(self, endings: Sequence[Ending]) -> Float[Tensor, "B W"]:
        """Return the feature before each root and the root's embedding."""
        root_ids = integers([ending.root_id for ending in endings], self._model.device)
        embeddings_BD = self._embeddings_VD.index_select(0, root_ids).float()
        if self._drafter is None:
            return embeddings_BD
        features_BW = self._drafter.features_at([ending.slot for ending in endings]).float()
        return torch.cat([features_BW, embeddings_BD], dim=-1)

    def _scalars(self, endings: Sequence[Ending], nodes: Tensor) -> Float[Tensor, "B C"]:
        """Return ROOT_SCALARS. Distributions are by temperature alone: a truncation would cost a sort."""
        if not endings:
            return torch.empty((0, len(ROOT_SCALARS)))
        device = self._logits_NV.device
        temperatures = [ending.sampling.temperature or 1.0 for ending in endings]
        logits_BV = self._logits_NV.index_select(0, nodes)
        if any(temperature != 1.0 for temperature in temperatures):
            logits_BV = logits_BV / column(temperatures, logits_BV)
        probs_BV = logits_BV.softmax(-1)
        root_ids = integers([ending.root_id for ending in endings], device)[:, None]
        top_B1 = probs_BV.amax(-1, keepdim=True)
        # With log p = logits - c, and c known from the likeliest token: H = c - sum of p x logits.
        normaliser_B1 = logits_BV.amax(-1, keepdim=True) - top_B1.log()
        entropy_B1 = normaliser_B1 - torch.linalg.vecdot(probs_BV, logits_BV)[:, None]
        root_log_B1 = logits_BV.gather(1, root_ids) - normaliser_B1
        of_draft_BC = torch.zeros((len(endings), _NUM_COMPARED), device=device)
        known = [place for place, ending in enumerate(endings) if ending.probs_row is not None]
        if known:
            rows = integers([row for ending in endings if (row := ending.probs_row) is not None], device)
            index = integers(known, device)
            drafted_BV = self._probs_RV.index_select(0, rows)
            known_BV = probs_BV if len(known) == len(endings) else probs_BV.index_select(0, index)
            of_draft_BC[index] = _compared(known_BV, drafted_BV, root_ids[index])
        return torch.cat([entropy_B1, top_B1, root_log_B1.clamp(min=_LEAST_LOG), of_draft_BC], dim=-1)


def _compared(target_BV: Tensor, draft_BV: Tensor, root_ids_B1: Tensor) -> Float[Tensor, "B C"]:
    """Return 1 (known), the draft's greatest probability, its distance from the target, and its log-probability of the root."""
    parts = [
        torch.ones(len(target_BV), device=target_BV.device),
        draft_BV.amax(-1),
        2.0 - 2.0 * torch.minimum(target_BV, draft_BV).sum(-1),
        draft_BV.gather(1, root_ids_B1)[:, 0].log().clamp(min=_LEAST_LOG),
    ]
    return torch.stack(parts, dim=-1)


def _spread(known: Tensor, is_known_B: np.ndarray) -> np.ndarray:
    """Return float32 rows for all sequences; zeros for sequences without features."""
    spread = np.zeros((len(is_known_B), known.shape[1]), dtype=np.float32)
    spread[is_known_B] = known.float().cpu().numpy()
    return spread
