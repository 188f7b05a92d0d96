"""The training loop: batches of texts of similar length, chains as in serving, checkpoints that resume.

Shape key: B texts, T positions, C chains a text, N trained positions, F feature layers, D target width, M head vocabulary.
"""

import hashlib
import json
import logging
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

from engine.distill.chains import chain_states
from engine.distill.corpus import Text
from engine.distill.loss import distillation_loss, teacher_probs
from engine.draft.models.head import DraftHead
from engine.utils.progress_bar import progress_bar

_logger = logging.getLogger(__name__)
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Settings of a training. `chain_share` of the positions start chains of `num_steps`.

    The weight of refused mass rises to `refusal_weight` at the end. Matrices are multiplied in `precision`. An update sums the
    gradients of passes of at most `tokens_per_pass` tokens. Matrices are trained by Muon (arXiv 2502.16982), norms by AdamW. Both
    rates rise over `num_warmup` updates, then fall to zero.
    """

    num_epochs: int = 8
    precision: str = "float32"
    tokens_per_update: int = 2_000
    tokens_per_pass: int = 2_000
    num_steps: int = 5
    chain_share: float = 0.2
    matrix_rate: float = 0.01
    norm_rate: float = 2e-3
    num_warmup: int = 20
    refusal_weight: float = 0.0
    checkpoint_every: int = 25
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """Texts padded to one length. `counts_BT`: trained positions, in answers and with a known state of the target."""

    ids_BT: Int[Tensor, "B T"]
    states_BTFD: Float[Tensor, "B T F D"]
    counts_BT: Bool[Tensor, "B T"]


def batched(texts: Sequence[Text], device: torch.device) -> Batch:
    """Pad texts to the longest. Each loses its last token, because the target's distribution after it is unknown."""
    lengths = torch.tensor([len(text.states_TFD) for text in texts])
    ids_BT = pad_sequence([text.ids_T[:-1].long() for text in texts], batch_first=True)
    states = pad_sequence([text.states_TFD for text in texts], batch_first=True)
    position_T = torch.arange(ids_BT.shape[1])
    first_B1 = torch.tensor([max(1, text.num_prompt - 1) for text in texts])[:, None]
    counts_BT = (position_T >= first_B1) & (position_T < lengths[:, None])
    return Batch(ids_BT.to(device), states.to(device), counts_BT.to(device))


def made_ahead(parts: Iterator[Made]) -> Iterator[Made]:
    """Yield an iterator's items; a thread computes the next one meanwhile."""
    with ThreadPoolExecutor(1) as maker:
        ahead = maker.submit(next, parts, None)
        while (made := ahead.result()) is not None:
            ahead = maker.submit(next, parts, None)
            yield made


class Trainer:
    """Trains a head against the target's embeddings and output rows. Owns the optimisers, the curve and the checkpoint.

    Checkpoints are in the folder `work`. Their names depend on the initial head, the plan and the texts, so that only the same
    training resumes from them.
    """

    def __init__(
        self,
        head: DraftHead,
        embeddings_VD: Float[Tensor, "V D"],
        rows_MD: Float[Tensor, "M D"],
        plan: TrainingPlan,
        work: Path,
    ) -> None:
        self.head, self.plan = head, plan
        self.curve: list[dict[str, float]] = []
        self._dtype: torch.dtype = getattr(torch, plan.precision)
        initial = _digest(head.state_dict().values())
        self._training = json.dumps([initial, asdict(plan), asdict(head.shape)])
        self._embeddings_VD, self._rows_MD = embeddings_VD, rows_MD.to(self._dtype)
        self._work = work
        matrices = [parameter for parameter in head.parameters() if parameter.dim() == 2]
        norms = [parameter for parameter in head.parameters() if parameter.dim() == 1]
        self._optimisers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"), plan.matrix_rate),
            (torch.optim.AdamW(norms, weight_decay=0.0), plan.norm_rate),
        ]

    def run(self, texts: Sequence[Text]) -> None:
        """Train to the end of the plan, from the checkpoint if there is one."""
        updates = self._updates(texts)
        name = hashlib.sha256(f"{self._training} {_digest(text.ids_T for text in texts)}".encode()).hexdigest()[:16]
        checkpoint = self._work / f"checkpoint-{name}.pt"
        done = self._resume(checkpoint)
        bar = progress_bar(what="training", total=len(updates), initial=done, unit="update")
        groups = (group for update in updates[done:] for group in update)
        batches = made_ahead(batched([texts[i] for i in group], self._rows_MD.device) for group in groups)
        for index in range(done, len(updates)):
            num_passes = len(updates[index])
            learnt = self._update(islice(batches, num_passes), num_passes, index / len(updates), index)
            self.curve.append({"update": index, **learnt})
            bar.set_postfix(loss=f"{self.curve[-1]['loss']:.3f}", overlap=f"{self.curve[-1]['overlap']:.3f}")
            bar.update()
            if (index + 1) % self.plan.checkpoint_every == 0:
                self._save(checkpoint, index + 1)
        bar.close()

    def _updates(self, texts: Sequence[Text]) -> list[list[list[int]]]:
        """Return the texts of every pass, by update: similar lengths in one pass, passes in random order in each epoch."""
        rng = random.Random(self.plan.seed)
        updates: list[list[list[int]]] = []
        for _ in range(self.plan.num_epochs):
            order = sorted(range(len(texts)), key=lambda i: len(texts[i].ids_T) + rng.uniform(-8, 8))
            groups = list(_packed(order, texts, self.plan.tokens_per_pass))
            rng.shuffle(groups)
            per_update = max(1, self.plan.tokens_per_update // self.plan.tokens_per_pass)
            updates += [groups[i : i + per_update] for i in range(0, len(groups), per_update)]
        return updates

    def _update(self, batches: Iterable[Batch], num_passes: int, progress: float, index: int) -> dict[str, float]:
        rise = min(1.0, (index + 1) / self.plan.num_warmup)
        fall = 1.0 - progress
        for optimiser, rate in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * rise * fall
            optimiser.zero_grad(set_to_none=True)
        loss = overlap = 0.0
        generator = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + index)
        for batch in batches:
            pass_loss, pass_overlap = self._learn(batch, progress, generator, 1.0 / num_passes)
            loss, overlap = loss + pass_loss / num_passes, overlap + pass_overlap / num_passes
        norm = float(clip_grad_norm_(self.head.parameters(), 1.0))
        for optimiser, _ in self._optimisers:
            optimiser.step()
        return {"loss": loss, "overlap": overlap, "norm": norm}

    def _learn(self, batch: Batch, progress: float, generator: torch.Generator, share: float) -> tuple[float, float]:
        """Add one pass's gradient; return its loss and, at step 0, the overlap with the target over the head's vocabulary."""
        plan, device = self.plan, self._rows_MD.device
        probs_NM = teacher_probs(batch.states_BTFD[batch.counts_BT][:, -1].to(self._dtype), self._rows_MD)
        probs_of_BT = batch.counts_BT.flatten().cumsum(0).view_as(batch.counts_BT) - 1
        starts_BC, is_start_BC = sampled_starts(batch.counts_BT, plan.chain_share, plan.num_steps, generator)
        weight = plan.refusal_weight * progress
        total = torch.zeros((), device=device)
        overlap = 0.0
        with torch.autocast(device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            embeddings = self._embeddings_VD[batch.ids_BT].to(self._dtype)
            for step, state in enumerate(chain_states(self.head, batch.states_BTFD, embeddings, starts_BC, plan.num_steps)):
                predicted = self.head.output_states(state)
                if step == 0:
                    kept, probs = predicted[batch.counts_BT], probs_NM
                    overlap = _overlap(kept.detach()[::17], probs[::17], self._rows_MD)
                else:
                    rows = torch.arange(len(starts_BC), device=device)[:, None]
                    kept, probs = predicted[is_start_BC], probs_NM[probs_of_BT[rows, starts_BC + step][is_start_BC]]
                total = total + distillation_loss(kept.to(self._dtype), probs, self._rows_MD, weight)
        loss = total / plan.num_steps
        (loss * share).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), overlap

    def _save(self, checkpoint: Path, done: int) -> None:
        state = {
            "done": done,
            "head": self.head.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser, _ in self._optimisers],
            "curve": self.curve,
        }
        partial = checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(checkpoint)

    def _resume(self, checkpoint: Path) -> int:
        """Load the checkpoint of this training, if there is one; return its number of updates."""
        if not checkpoint.exists():
            self._work.mkdir(parents=True, exist_ok=True)
            if others := len(list(self._work.glob("checkpoint-*.pt"))):
                _logger.warning("training starts from the beginning: %d checkpoints in %s are of others", others, self._work)
            return 0
        state: dict[str, Any] = torch.load(checkpoint, weights_only=True, map_location=self._rows_MD.device)
        self.head.load_state_dict(state["head"])
        for (optimiser, _), saved in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.curve = state["curve"]
        return int(state["done"])


def usual_precision(device: torch.device) -> str:
    """Return the usual number format of a device. A processor without bfloat16 instructions is slow in bfloat16."""
    has_bfloat16 = device.type != "cpu" or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if has_bfloat16 else "float32"


def sampled_starts(
    counts_BT: Bool[Tensor, "B T"], share: float, num_steps: int, generator: torch.Generator
) -> tuple[Int[Tensor, "B C"], Bool[Tensor, "B C"]]:
    """Return the same number of chain starts for each text, and which are valid: all positions of the chain are trained."""
    length = counts_BT.shape[1]
    can_start_BT = counts_BT.clone()
    can_start_BT[:, :-1] &= counts_BT[:, 1:]
    for shift in range(1, min(num_steps, length)):
        can_start_BT[:, : length - shift] &= counts_BT[:, shift:]
    can_start_BT[:, max(0, length - num_steps + 1) :] = False
    num_chains = max(1, math.ceil(share * int(can_start_BT.sum(1).max())))
    noise_BT = torch.rand(counts_BT.shape, generator=generator).to(counts_BT.device)
    starts_BC = noise_BT.masked_fill(~can_start_BT, -1.0).topk(min(num_chains, length)).indices
    is_start_BC = can_start_BT.gather(1, starts_BC)
    return starts_BC.masked_fill(~is_start_BC, 0), is_start_BC


def _packed(order: Sequence[int], texts: Sequence[Text], most: int) -> Iterator[list[int]]:
    """Split an order of texts into groups of at most `most` padded tokens, or of one text."""
    group: list[int] = []
    longest = 0
    for index in order:
        length = len(texts[index].ids_T)
        if group and max(longest, length) * (len(group) + 1) > most:
            yield group
            group, longest = [], 0
        group.append(index)
        longest = max(longest, length)
    if group:
        yield group


def _digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _overlap(predicted_ND: Tensor, probs_NM: Tensor, rows_MD: Tensor) -> float:
    q = (predicted_ND.to(rows_MD.dtype) @ rows_MD.T).float().softmax(-1)
    return float(torch.minimum(q, probs_NM.float()).sum(-1).mean())
