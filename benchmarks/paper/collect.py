"""Measures roots: the exact E[tau + 1 | tree] of every verifier on every shape, and the agreement of the models by depth.

Texts are written by the target, several at a time. A text's roots are appended to the file together, so an interrupted run is
continued. The seeds of a root's trees depend on its text and place alone.
"""

import hashlib
import json
import os
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.design import CHAIN, FAMILIES, HEAPS, SHAPES, Pair
from engine.build import build_engine
from engine.core.config import EngineConfig
from engine.core.policy import ExpansionPolicy, FixedExpansion, RootSource
from engine.core.tree import Expansion
from engine.core.types import SamplingParams
from engine.engine import Engine
from engine.profiling.counterfactual import Counterfactual, NestedPoint, TreeSpec
from engine.profiling.step_timer import StepTimer
from engine.utils.progress_bar import progress_bar
from engine.verify.registry import create_verifier
from engine.weights import WeightsCache, default_root, resolve
from engine.weights.pretrained import load_tokenizer
from selector.cost import CostModel
from selector.menu import fed_share
from selector.network.replay import step_s
from selector.profile import cached_profile
from server.text.chat_ids import chat_ids

_ALL_SHAPES = (*SHAPES, *HEAPS)
_FED_SHARE = np.array([fed_share(one) for one in _ALL_SHAPES])
_AT_A_TIME = 8  # texts


@dataclass(frozen=True)
class Amount:
    """Settings of sampling, and how many texts and roots each has."""

    samplings: tuple[tuple[float, float], ...]  # temperature, top_p
    num_texts: int  # of each prompt
    max_tokens: int
    stride: int
    most_roots: int  # of a text


class Roots:
    """Measures the roots of texts with one pair's engine."""

    def __init__(self, engine: Engine, costs: CostModel) -> None:
        self._counterfactual, self._costs = Counterfactual(engine), costs
        self._verifiers = {name: create_verifier(name) for family in FAMILIES for name in family.verifiers}

    def texts(self, prompts: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[tuple[int, ...]]:
        """Return each prompt with the target's continuation."""
        return self._counterfactual.generate(prompts)

    def of_text(
        self, name: str, text: Sequence[int], num_prompt: int, sampling: SamplingParams, amount: Amount
    ) -> Iterator[dict[str, Any]]:
        """Yield the measurements of each root."""
        self._counterfactual.load(text)
        for point in [*range(num_prompt + 1, len(text) - 1, amount.stride)][: amount.most_roots]:
            yield {"point": point, **self._root(f"{name}-{point}", point, sampling)}

    def _root(self, name: str, point: int, sampling: SamplingParams) -> dict[str, Any]:
        seeds = [int.from_bytes(hashlib.sha256(f"{name}-{family.name}".encode()).digest()[:4]) for family in FAMILIES]
        specs = [TreeSpec(family.whole, family.verifiers[-1], seed) for family, seed in zip(FAMILIES, seeds, strict=True)]
        of_heaps = [
            TreeSpec(heap, "coupled" if family.name == "ranked" else "traversal", seed)
            for family, seed in zip(FAMILIES, seeds, strict=True)
            for heap in HEAPS
        ]
        nested = self._counterfactual.nested(point, SHAPES, specs, sampling, of_heaps)
        rounds = np.array(nested.others.growth.rounds if nested.others else (), dtype=np.float64).reshape(len(specs), len(HEAPS))
        found: dict[str, Any] = {"tokens": {}, "seconds": {}}
        for index, family in enumerate(FAMILIES):
            nodes = [float(cut.tree.num_nodes - 1) for cut in nested.truncations[index]]
            depths = [float(shape.max_depth) for shape in SHAPES]
            sizes = nodes + [float(heap.max_nodes) for heap in HEAPS], depths + rounds.mean(0).tolist()
            found["seconds"][family.name] = self._seconds(point, sampling, *sizes)
            for name in family.verifiers:
                tokens: list[float | None] = [one.tokens for one in nested.tokens(index, self._verifiers[name])]
                tokens += self._of_heaps(nested, index, name) if name in family.heap_verifiers else [None] * len(HEAPS)
                found["tokens"][f"{name}/{family.name}"] = _rounded(tokens)
        return {**found, **_by_depth(nested), **self._features(point, specs[0], sampling)}

    def _of_heaps(self, nested: NestedPoint, family: int, verifier: str) -> list[float]:
        """Return the tokens of the heaps of a family."""
        heaps, found = nested.others, []
        assert heaps is not None
        for index in range(family * len(HEAPS), (family + 1) * len(HEAPS)):
            forest, key = heaps.growth.forest.subset([index]), heaps.rows[index].key
            verdict = self._verifiers[verifier].judge(forest, heaps.target_probs_NV(index), [key])[0]
            found.append(verdict.expected_tokens or float(len(verdict.path)))
        return found

    def _features(self, point: int, spec: TreeSpec, sampling: SamplingParams) -> dict[str, Any]:
        """Return what a selector knows before drafting: scalars, and the states of both models."""
        facts = self._counterfactual.facts(point, replace(spec, expansion=Expansion(1, 1, 0)), sampling)
        states = np.concatenate([facts.target_BD[0], facts.draft_BW[0]]).astype("<f2")
        return {"scalars": _rounded(facts.scalars_BS[0].tolist()), "states": b64encode(states.tobytes()).decode()}

    def _seconds(self, point: int, sampling: SamplingParams, nodes: Sequence[float], passes: Sequence[float]) -> list[float]:
        """Return the predicted seconds of a step with each tree over those of plain decoding."""
        nodes_M, passes_M = (np.array([0.0, *values]) for values in (nodes, passes))
        fed_M = nodes_M * np.concatenate([[0.0], _FED_SHARE])
        seconds = step_s(self._costs, point + 1, not sampling.is_greedy, nodes_M, passes_M, fed_M)
        return _rounded((seconds[1:] / seconds[0]).tolist())


def _rounded(values: Sequence[float | None]) -> list[Any]:
    return [None if value is None else round(value, 4) for value in values]


def _by_depth(nested: NestedPoint) -> dict[str, list[float]]:
    """Return for each depth of a drafted chain the overlap of the models' distributions, and the chance of getting there.

    The chance is that of the top-down rule for one path: each token is accepted with min(1, p / q).
    """
    cut, growth = nested.truncations[0][CHAIN], nested.whole.growth
    target_NV, rows = nested.whole.target_probs_NV(0), growth.forest.probs_rows[0]
    overlaps, chances = [], [1.0]
    for parent, node in zip(cut.nodes, cut.nodes[1:], strict=False):
        p_V, q_V = target_NV[parent], growth.forest.draft_probs_RV[rows[parent]]
        token_id = growth.forest.trees[0].token_ids[node]
        overlaps.append(float(p_V.minimum(q_V).sum()))
        chances.append(chances[-1] * min(1.0, float(p_V[token_id] / q_V[token_id])))
    return {"overlaps": _rounded(overlaps), "chances": _rounded(chances[:-1])}


def collect(pair: Pair, prompts: Mapping[str, Sequence[str]], amount: Amount, out: Path) -> None:
    """Append the roots of all texts that the file does not have, kinds and settings in turn."""
    done = {line["text"] for line in read(out)}
    texts = [
        (f"{kind}-{index}-{seed}-{temperature:g}-{top_p:g}", kind, prompt, SamplingParams(temperature, top_p, seed=seed))
        for seed in range(amount.num_texts)
        for index in range(max(map(len, prompts.values())))
        for kind, of_kind in prompts.items()
        for prompt in of_kind[index : index + 1]
        for temperature, top_p in amount.samplings
    ]
    texts = [one for one in texts if one[0] not in done]
    if not texts:
        return
    engine, costs = measured_engine(pair.engine_config())
    roots, tokenizer = Roots(engine, costs), load_tokenizer(resolve(engine.info.name).folder)
    batches = [texts[first : first + _AT_A_TIME] for first in range(0, len(texts), _AT_A_TIME)]
    with progress_bar(batches, what=pair.name, total=len(batches), unit="batch") as bar:
        for batch in bar:
            prompted = [chat_ids(tokenizer, prompt) for _, _, prompt, _ in batch]
            requests = [replace(sampling, max_tokens=amount.max_tokens) for *_, sampling in batch]
            written = roots.texts([*zip(prompted, requests, strict=True)])
            for (name, kind, _, sampling), ids, text in zip(batch, prompted, written, strict=True):
                facts = {"text": name, "kind": kind, "temperature": sampling.temperature, "top_p": sampling.top_p}
                found = roots.of_text(name, text, len(ids), replace(sampling, seed=None), amount)
                _append(out, [{**facts, **root} for root in found] or [facts])


def _append(out: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Append lines in one write."""
    file = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
    finally:
        os.close(file)


def measured_engine(config: EngineConfig) -> tuple[Engine, CostModel]:
    """Return an engine that drafts chains while it writes, and the costs of this machine's steps."""
    costs: list[CostModel] = []

    def chains(config: EngineConfig, rig: StepTimer, roots: RootSource) -> ExpansionPolicy:  # noqa: ARG001
        costs.append(cached_profile(rig, WeightsCache(default_root())).costs())
        return FixedExpansion(Expansion(4, 1, 0))

    return build_engine(config, chains), costs[0]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
