"""What a head learns from: texts the target wrote, with its own states at each token, in shards on disk.

A shard is a safetensors file of some texts end to end; a folder of shards can be added to at any time, and a run that was cut off
goes on after its last whole shard. Shape key: T tokens of a text, F feature layers, D target width.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.distill.generation.generate import write
from engine.distill.generation.jobs import Order
from engine.model.causal_lm import CausalModel
from engine.utils.progress_bar import progress_bar

TEMPERATURES = (0.7, 1.0, 0.0, 0.7, 1.0, 0.7)  # of the texts, in turn


@dataclass(frozen=True)
class Text:
    """A prompt with the target's answer, and the target's states at every token but the last (it was never fed), bfloat16.

    `index` is the prompt's place among all.
    """

    index: int
    ids_T: Int[Tensor, " T"]
    num_prompt: int
    states_TFD: Float[Tensor, "T-1 F D"]


def write_texts(
    model: CausalModel, layers: Sequence[int], prompts: Mapping[int, Sequence[int]], max_tokens: int, seed: int, batch: int
) -> Iterator[Text]:
    """Yield prompts with the target's answers as they are done, `batch` at a time; a text's randomness is that of its index."""
    orders = {
        index: Order(prompt, TEMPERATURES[index % len(TEMPERATURES)], seed + index, max_tokens)
        for index, prompt in prompts.items()
    }
    for text in write(model, orders, batch, layers):
        yield Text(text.name, torch.tensor(text.ids, dtype=torch.int32), text.num_prompt, text.states_TFD)


class OtherTexts(ValueError):
    """The folder holds texts that were made differently."""


class Corpus:
    """A folder of shards, and of a note on what they were made with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def bind(self, made_with: Mapping[str, str]) -> None:
        """Note what its texts are made with; raise OtherTexts if those it has were made with something else."""
        note = self.folder / "made_with.json"
        if not self.shards:
            self.folder.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps(dict(made_with), indent=1))
        found = json.loads(note.read_text()) if note.exists() else {}
        other = [name for name, value in made_with.items() if found.get(name) != value]
        if other:
            raise OtherTexts(f"the texts in {self.folder} were made with another {', '.join(other)}; give another folder")

    @property
    def shards(self) -> list[Path]:
        """Whole shards, in order."""
        return sorted(self.folder.glob("shard-*.safetensors"))

    def add(self, texts: Sequence[Text]) -> None:
        """Write one more shard, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.stem.removeprefix("shard-")) for path in self.shards), default=-1)
        path = self.folder / f"shard-{number:05d}.safetensors"
        states = torch.cat([text.states_TFD for text in texts]).cpu()
        tensors = {"ids": torch.cat([text.ids_T for text in texts]), "states": states}
        layout = [(text.index, len(text.ids_T), text.num_prompt) for text in texts]
        save_file(tensors, path.with_suffix(".partial"), metadata={"layout": json.dumps(layout)})
        path.with_suffix(".partial").rename(path)

    def indices(self) -> set[int]:
        """Return the indices of all texts."""
        return {index for path in self.shards for index, _, _ in _layout(path)}

    def texts(self) -> Iterator[Text]:
        """Yield all texts, shard by shard."""
        for path in self.shards:
            layout = _layout(path)
            with safe_open(path, framework="pt") as file:
                ids, states = file.get_tensor("ids"), file.get_tensor("states")
            ids_parts = torch.split(ids, [length for _, length, _ in layout])
            state_parts = torch.split(states, [length - 1 for _, length, _ in layout])
            for (index, _, num_prompt), ids_T, states_TFD in zip(layout, ids_parts, state_parts, strict=True):
                yield Text(index, ids_T, num_prompt, states_TFD)


def collect(
    corpus: Corpus,
    model: CausalModel,
    layers: Sequence[int],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    seed: int,
    batch: int = 256,
    texts_per_shard: int = 128,
) -> None:
    """Let the target answer the prompts that have no answer yet."""
    done = corpus.indices()
    missing = {index: prompt for index, prompt in enumerate(prompts) if index not in done}
    if not missing:
        return
    texts: list[Text] = []
    num_tokens = 0
    with progress_bar(what="writing texts", total=len(prompts), initial=len(done), unit="text") as bar:
        for text in write_texts(model, layers, missing, max_tokens, seed, batch):
            texts.append(text)
            num_tokens += len(text.states_TFD)
            bar.set_postfix(tokens=num_tokens, refresh=False)
            bar.update()
            if len(texts) == texts_per_shard:
                corpus.add(texts)
                texts = []
    if texts:
        corpus.add(texts)


def _layout(path: Path) -> list[tuple[int, int, int]]:
    """Return (index, tokens, prompt tokens) of a shard's texts."""
    with safe_open(path, framework="pt") as file:
        return [(index, length, num_prompt) for index, length, num_prompt in json.loads(file.metadata()["layout"])]
