"""What a precision changes: distributions in each against float32's, over texts that the model wrote in float32 itself.

    python -m benchmarks.precision --models smollm2-135m qwen2.5-coder-1.5b

prints two tables and, last, one line of JSON. The first has the mean KL divergence from float32's distribution (nats), the mean
total variation, and how often the arg max agrees. It counts the rows whose logits differ between passes of one token and one
pass of all; there are none where our library runs the model. Rows of a GPU are computed here, by torch operations that round as
its passes do, in one pass a text: which rows a GPU changes by the width of a pass is not known here. The second table has how
many times faster than bfloat16 a pass over so many tokens is, precisions in turn. It shows the median over the repeats of the
ratio within one, and its quartiles.
"""

import argparse
import json
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.packing import pack
from engine.attention.paged.reference import attend
from engine.attention.segments import chain_segment
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel, adopt, load_model, weights_dtype
from engine.model.fused.decoder import FusedDecoder
from engine.model.fused.reference import TorchOperations
from engine.model.linear_backends import FP8, fastest_linears
from engine.native.decoder import UnknownDecoder
from engine.native.linear import QUANTISED
from engine.utils.progress_bar import progress_bar
from engine.weights import resolve
from engine.weights.pretrained import load_module, load_tokenizer
from server.cli.bench_prompts import load_prompts
from server.text.chat_ids import chat_ids

_CPU = torch.device("cpu")
_PRECISIONS = ("float32", "bfloat16", *QUANTISED)
_OF_GPU = {"GPU bfloat16": "bfloat16", "GPU fp8": FP8}
_CONTEXT = 128  # tokens before those of a timed pass


@dataclass(frozen=True)
class Difference:
    """Of one precision from float32, over all rows."""

    model: str
    precision: str
    num_rows: int
    divergence: float
    variation: float
    agreement: float
    changed_rows: float | None  # None for a GPU's, which are computed in one pass


@dataclass(frozen=True)
class Speed:
    """A pass of one width: bfloat16's time over this precision's, median and quartiles."""

    model: str
    precision: str
    num_tokens: int
    ratio: float
    low: float
    high: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--prompts", default="configs/bench_prompts.yaml")
    parser.add_argument("--num-prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--widths", type=int, nargs="*", default=[1, 8, 16, 64], help="tokens of a timed pass")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    found = [one for name in args.models for one in differences(name, Path(args.prompts), args.num_prompts, args.max_tokens)]
    print(f"{'model':<20}{'precision':<14}{'rows':>6}{'KL':>9}{'TV':>8}{'arg max':>9}{'changed':>9}")
    for one in found:
        changed = "" if one.changed_rows is None else f"{one.changed_rows:.3f}"
        figures = f"{one.divergence:>9.4f}{one.variation:>8.4f}{one.agreement:>9.3f}{changed:>9}"
        print(f"{one.model:<20}{one.precision:<14}{one.num_rows:>6}{figures}")
    speeds = [one for name in args.models for one in _speeds(name, args.widths, args.repeats)]
    print(f"\n{'model':<20}{'precision':<14}{'tokens':>7}{'times as fast as bfloat16':>34}")
    for speed in speeds:
        spread = f"{speed.ratio:.2f} ({speed.low:.2f} to {speed.high:.2f})"
        print(f"{speed.model:<20}{speed.precision:<14}{speed.num_tokens:>7}{spread:>34}")
    print(json.dumps({"laws": [asdict(one) for one in found], "speeds": [asdict(one) for one in speeds]}))


def differences(name: str, prompts: Path, num_prompts: int, max_tokens: int) -> list[Difference]:
    """Return what each precision makes of one model."""
    folder = resolve(name).folder
    tokenizer = load_tokenizer(folder)
    starts = [chat_ids(tokenizer, one.text) for of_kind in load_prompts(prompts, (), num_prompts).values() for one in of_kind]
    exact = load_model(folder, "float32", _CPU, fastest_linears(_CPU))
    written = progress_bar(starts, what=f"{name}, writing", total=len(starts), unit="text")
    texts = [_written(exact, list(ids), max_tokens) for ids in written]
    probs = [_logits(exact, text, len(text)).log_softmax(-1) for text in texts]
    del exact
    return [_difference(name, folder, precision, texts, probs) for precision in (*_PRECISIONS, *_OF_GPU)]


def of_gpu(folder: Path, dtype: str) -> CausalModel:
    """Return a model whose passes round as on a GPU: in bfloat16, by fused layers if its family is known."""
    module = load_module(folder, dtype=weights_dtype(dtype), attn_implementation="eager")
    model = adopt(module, _CPU, FP8 if dtype == FP8 else "plain")
    with suppress(UnknownDecoder):
        model.fused = FusedDecoder(model.module, TorchOperations(), attend)
        model.attend = attend
    return model


def _difference(name: str, folder: Path, precision: str, texts: list[list[int]], probs: list[Tensor]) -> Difference:
    is_own = precision in _PRECISIONS
    model = load_model(folder, precision, _CPU, fastest_linears(_CPU)) if is_own else of_gpu(folder, _OF_GPU[precision])
    rows = []
    pairs = list(zip(texts, probs, strict=True))
    for text, exact_TV in progress_bar(pairs, what=f"{name}, {precision}", total=len(pairs), unit="text"):
        logits_TV = _logits(model, text, len(text))
        probs_TV = logits_TV.log_softmax(-1)
        divergence_T = (exact_TV.exp() * (exact_TV - probs_TV)).sum(-1)
        variation_T = (exact_TV.exp() - probs_TV.exp()).abs().sum(-1) / 2
        agrees_T = exact_TV.argmax(-1) == probs_TV.argmax(-1)
        changed_T = (_logits(model, text, 1) != logits_TV).any(-1) if is_own else torch.zeros(len(text))
        rows.append(torch.stack([divergence_T, variation_T, agrees_T.float(), changed_T.float()]))
    divergence, variation, agreement, changed = torch.cat(rows, dim=-1).mean(-1).tolist()
    return Difference(name, precision, sum(map(len, texts)), divergence, variation, agreement, changed if is_own else None)


def _speeds(name: str, widths: list[int], repeats: int) -> list[Speed]:
    folder = resolve(name).folder
    models = {precision: load_model(folder, precision, _CPU, fastest_linears(_CPU)) for precision in _PRECISIONS}
    caches = {precision: KVCache(_CONTEXT + max(widths, default=1), _CPU) for precision in _PRECISIONS}
    for precision, model in models.items():
        timed_pass(model, caches[precision], 0, _CONTEXT)
    return [
        speed
        for width in widths
        for speed in _ratios(
            name,
            width,
            [
                {precision: timed_pass(model, caches[precision], _CONTEXT, width) for precision, model in models.items()}
                for _ in progress_bar(range(repeats + 1), what=f"{name}, {width} tokens", total=repeats + 1, unit="round")
            ][1:],
        )
    ]


def _ratios(name: str, width: int, repeats: list[dict[str, float]]) -> list[Speed]:
    """Return each precision's speed over bfloat16's, from seconds by precision of every repeat."""
    found = []
    for precision in repeats[0]:
        low, median, high = statistics.quantiles([one["bfloat16"] / one[precision] for one in repeats], n=4)
        found.append(Speed(name, precision, width, median, low, high))
    return found


def timed_pass(model: CausalModel, cache: KVCache, done: int, num_tokens: int) -> float:
    """Return the seconds of a pass over some tokens after `done` others, with all their logits."""
    ids = [(97 * place + 11) % model.vocab_size for place in range(num_tokens)]
    batch = pack([chain_segment(ids, done, range(done + num_tokens))], _CPU)
    start = time.perf_counter()
    model.forward(batch, cache, torch.arange(num_tokens))
    return time.perf_counter() - start


def _written(model: CausalModel, ids: list[int], num_tokens: int) -> list[int]:
    """Return the prompt with what the model writes after it, drawn at temperature 1."""
    generator = torch.Generator().manual_seed(len(ids))
    cache = KVCache(len(ids) + num_tokens, _CPU)
    done = 0
    for _ in range(num_tokens):
        batch = pack([chain_segment(ids[done:], done, range(len(ids)))], _CPU)
        logits_NV = model.forward(batch, cache, torch.tensor([len(ids) - done - 1]))
        done = len(ids)
        ids = [*ids, int(torch.multinomial(logits_NV[0].softmax(-1), 1, generator=generator))]
    return ids


def _logits(model: CausalModel, text: list[int], width: int) -> Tensor:
    """Return the logits [T, V] after each token of the text, `width` tokens a pass."""
    cache = KVCache(len(text), _CPU)
    parts = []
    for first in range(0, len(text), width):
        ids = text[first : first + width]
        parts.append(model.forward(pack([chain_segment(ids, first, range(len(text)))], _CPU), cache, torch.arange(len(ids))))
    return torch.cat(parts)


if __name__ == "__main__":
    main()
