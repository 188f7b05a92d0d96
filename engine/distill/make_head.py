"""Makes a head from a corpus: vocabulary, training, held-out measurements, recipe."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.distill.corpus import Text
from engine.distill.evaluation import evaluate
from engine.distill.rows import coverage, frequent_tokens
from engine.distill.trainer import Trainer, TrainingPlan
from engine.draft.models.head import DraftHead, HeadShape
from engine.model.causal_lm import CausalModel
from engine.model.linear_backends import weight_of

_HELD_OUT = 20  # one prompt in this many is held out for measurements


class NothingToLearn(ValueError):
    """There is no text to train on."""


@dataclass(frozen=True)
class Distilled:
    """A trained head, its recipe (settings, and measurements on held-out texts), and the curve of its training."""

    head: DraftHead
    recipe: dict[str, object]
    curve: list[dict[str, float]]


def shape_for(model: CausalModel, width: int, num_layers: int, intermediate: int, feature_layers: tuple[int, ...]) -> HeadShape:
    """Return a head's shape for a target: attention heads of 64, a third as many for keys. Raise ValueError if invalid."""
    depth = len(model.module.model.layers)
    if list(feature_layers) != sorted(set(feature_layers)) or feature_layers[0] < 1 or feature_layers[-1] != depth:
        raise ValueError(f"the feature layers must ascend from 1 and end with the last of {depth}, not be {list(feature_layers)}")
    if width < 1 or width % 192:
        raise ValueError(f"the inner width must be a multiple of 192, not {width}")
    target_width = model.module.get_input_embeddings().weight.shape[1]
    heads = width // 64
    return HeadShape(target_width, feature_layers, width, num_layers, heads, heads // 3, 64, intermediate)


def is_held_out(text: Text) -> bool:
    """Return whether a text is held out for measurements. The prompt decides this, so it is the same in every training."""
    return zlib.crc32(text.ids_T[: text.num_prompt].to(torch.int32).numpy().tobytes()) % _HELD_OUT == 0


def distil(
    model: CausalModel,
    texts: Iterable[Text],
    begin: HeadShape | DraftHead,
    vocab_size: int | None,
    plan: TrainingPlan,
    work: Path,
    notes: Mapping[str, object],
    kept_share: float = 0.0,
) -> Distilled:
    """Train a head on texts of the target, from its checkpoint in `work` if there is one. Raises NothingToLearn.

    `begin` is the shape of a new head of `vocab_size` tokens, or a head to train further, in place. An existing head keeps its
    tokens and gets more, up to `vocab_size`. Its new weights are a mean of the old weights, by `kept_share`, and the trained
    weights. So acceptance on other texts falls less (Wortsman et al., arXiv 2109.01903). The head uses embeddings and output head
    of `model`, in their own precision; the layers of `model` do not run.
    """
    texts = sorted(texts, key=lambda text: text.index)
    learned = [text for text in texts if not is_held_out(text) and len(text.ids_T) - text.num_prompt > plan.num_steps]
    held_out = [text for text in texts if is_held_out(text)]
    if not learned or not held_out:
        raise NothingToLearn(f"{len(texts)} texts are too few to train on and to hold out")
    torch.manual_seed(plan.seed)
    if isinstance(begin, HeadShape):
        assert vocab_size is not None, "a new head needs a vocabulary size"
        head = DraftHead(begin, frequent_tokens(model, learned, vocab_size))
    else:
        head = begin
        if vocab_size is not None:
            head.vocab_M = frequent_tokens(model, learned, vocab_size, head.vocab_M).to(head.vocab_M)
    head = head.to(model.device).train().requires_grad_(True)
    vocab_M = head.vocab_M.long()
    embeddings_VD = model.module.get_input_embeddings().weight
    output_VD = weight_of(model.module.get_output_embeddings())
    trainer = Trainer(head, embeddings_VD, output_VD[vocab_M], plan, work)
    begun = {name: weight.detach().clone() for name, weight in head.named_parameters()} if kept_share else {}
    trainer.run(learned)
    with torch.no_grad():
        for name, weight in begun.items():
            head.get_parameter(name).lerp_(weight, kept_share)
    reports = evaluate(head, embeddings_VD, output_VD, held_out)
    recipe = {
        **notes,
        "num_texts": len(learned),
        "num_tokens": sum(len(text.ids_T) - text.num_prompt for text in learned),
        "num_parameters": sum(parameter.numel() for parameter in head.parameters()),
        "coverage": round(coverage(model, held_out, vocab_M), 4),
        "plan": asdict(plan),
        "held_out": [asdict(report) for report in reports],
    }
    return Distilled(head, recipe, trainer.curve)
