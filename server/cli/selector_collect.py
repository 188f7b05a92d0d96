"""`latebranch selector collect`: measures the expected tokens of every tree of the menu, at roots in texts of the target.

Each prompt has texts of several temperatures, a root every few tokens, and several sampled trees per root. Each sampled tree
contains all trees of the menu. Their tokens are the exact expectation of the verifier. The features that a policy has before
drafting are stored with them.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from server.cli.bench_prompts import BenchError, read_prompts
from server.cli.parser import non_negative_int, number_within, positive_int
from server.settings import SHIPPED_DRAFTERS, Settings, SettingsError, load_settings
from server.text.chat_ids import chat_ids

if TYPE_CHECKING:
    from engine.core.policy import SequenceView
    from engine.core.types import SamplingParams
    from engine.engine import Engine
    from engine.profiling.counterfactual import NestedPoint, TreeOutcome
    from engine.verify.verdict import Verifier
    from selector.acceptance import CountedAcceptance
    from selector.menu import Menu
    from selector.network.examples import Examples
    from selector.profile import Profile


_BATCH = 8  # prompts whose answers are written together


def add_collect_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `collect`."""
    collect = commands.add_parser("collect", help="measure every tree's tokens at roots in texts that the target writes")
    collect.add_argument("--config", type=Path, help="YAML file of settings: models, drafter, verifier, expansion")
    collect.add_argument("--out", type=Path, required=True, help="folder of examples; an interrupted run is continued")
    collect.add_argument(
        "--prompt-grammar", type=Path, default=SHIPPED_DRAFTERS / "prompts.yaml", help="YAML file of templates and fillers"
    )
    collect.add_argument("--prompts", type=Path, help="YAML file of prompts by kind, in place of the grammar's")
    collect.add_argument("--kinds", nargs="*", default=[], help="of prompts; all of them by default")
    collect.add_argument("--num-prompts", type=positive_int, default=24, help="of each kind, at most")
    collect.add_argument("--verifiers", nargs="*", default=[], help="verifiers to measure besides the configured one")
    collect.add_argument("--temperatures", nargs="+", type=number_within(0.0, math.inf, "[)"), default=[0.0, 0.7, 1.0])
    collect.add_argument("--max-tokens", type=positive_int, default=128, help="tokens the target writes after a prompt")
    collect.add_argument("--stride", type=positive_int, default=16, help="tokens between two roots")
    collect.add_argument("--trees", type=positive_int, default=4, help="sampled trees per root")
    collect.add_argument(
        "--seed", type=non_negative_int, default=7, help="of prompts and texts; not that of the head's own training"
    )
    collect.set_defaults(handler=_collect)


def _collect(parsed: argparse.Namespace) -> int:
    from engine.utils.progress_bar import progress_bar
    from engine.weights import resolve
    from engine.weights.fingerprint import tensors_digest
    from engine.weights.pretrained import load_tokenizer
    from selector.network.examples import ExampleFolder

    try:
        settings = load_settings(parsed.config, {"policy": "adaptive"})
        texts = _texts(parsed)
    except (SettingsError, BenchError) as error:
        sys.stderr.write(f"latebranch selector collect: {error}\n")
        return 2
    folder = ExampleFolder(parsed.out)
    prompts = {f"{kind}-{index}": (kind, text) for kind, of_kind in texts.items() for index, text in enumerate(of_kind)}
    missing = {name: prompt for name, prompt in prompts.items() if not folder.has(name)}
    if not missing:
        return 0
    design = Design(tuple(parsed.temperatures), tuple(parsed.verifiers), parsed.max_tokens, parsed.stride, parsed.trees)
    try:
        engine, profile = _measured_engine(settings)
        collector = Collector(engine, settings, design, parsed.seed)
    except ValueError as error:  # of the engine's configuration too
        sys.stderr.write(f"latebranch selector collect: {error}\n")
        return 1
    tokenizer = load_tokenizer(resolve(settings.model).folder)
    coefficients = {"rest": profile.rest, "draft": profile.draft}
    kinds = f" --kinds {' '.join(parsed.kinds)}" if parsed.kinds else ""
    num_prompts: int = parsed.num_prompts
    command = f"{_command(parsed)}{kinds} --num-prompts {num_prompts}"
    made_by = f"{_command(parsed)}, judged by {', '.join(collector.rules)}"  # settings may come from the environment too
    notes = {"command": command, "num_prompts": num_prompts, "design": made_by, "model": settings.model, "prices": coefficients}
    if head := settings.to_tool_config().head:  # a network reads the head's states
        notes["head"] = tensors_digest(Path(head))
        notes["design"] = f"{made_by}, beside the head {notes['head']}"
    if others := folder.designs() - {str(notes["design"])}:
        made = "; ".join(sorted(others))
        sys.stderr.write(f"latebranch selector collect: {parsed.out} has examples that were made differently: {made}\n")
        return 1
    done = len(prompts) - len(missing)
    to_write = [(name, kind, chat_ids(tokenizer, text)) for name, (kind, text) in missing.items()]
    with progress_bar(what="measuring roots", total=len(prompts), initial=done, unit="prompt") as bar:
        for begin in range(0, len(to_write), _BATCH):
            encoded = {name: (kind, ids) for name, kind, ids in to_write[begin : begin + _BATCH]}
            for name, examples in collector.of_prompts(encoded):
                if examples is None:
                    sys.stderr.write(f"latebranch selector collect: the answers to {name} are too short for a root; left out\n")
                else:
                    folder.add(name, examples, notes)
                bar.update()
    return 0


def _texts(parsed: argparse.Namespace) -> Mapping[str, Sequence[str]]:
    """Return user messages by kind."""
    if parsed.prompts is not None:
        return read_prompts(parsed.prompts, parsed.kinds, parsed.num_prompts)
    from engine.distill.prompts import PromptGrammar

    known: list[str] = list(yaml.safe_load(parsed.prompt_grammar.read_text())["templates"])
    if unknown := sorted(set(parsed.kinds) - set(known)):
        raise BenchError(f"{parsed.prompt_grammar.name} has no prompts of kind {', '.join(unknown)}, but {', '.join(known)}")
    wanted = parsed.kinds or known
    grammars = {kind: PromptGrammar.load(parsed.prompt_grammar, {one: int(one == kind) for one in known}) for kind in wanted}
    return {kind: grammar.draw(parsed.num_prompts, parsed.seed) for kind, grammar in grammars.items()}


def _command(parsed: argparse.Namespace) -> str:
    """Return the command line without kinds and number of prompts, which later runs may extend."""
    verifiers = f" --verifiers {' '.join(parsed.verifiers)}" if parsed.verifiers else ""
    temperatures = " ".join(f"{one:g}" for one in parsed.temperatures)
    flags = f"--max-tokens {parsed.max_tokens} --stride {parsed.stride} --trees {parsed.trees} --seed {parsed.seed}"
    config = f" --config {parsed.config.name}" if parsed.config else ""
    prompts = parsed.prompts or parsed.prompt_grammar
    name = "prompts" if parsed.prompts else "prompt-grammar"
    return f"latebranch selector collect{config} --{name} {prompts.name}{verifiers} --temperatures {temperatures} {flags}"


def _measured_engine(settings: Settings) -> "tuple[Engine, Profile]":
    """Return an engine that decodes plainly, and the cost profile of this machine's steps."""
    from engine.build import build_engine
    from engine.core.config import EngineConfig
    from engine.core.policy import ExpansionPolicy, PlainDecoding, RootSource
    from engine.profiling.step_timer import StepTimer
    from engine.weights import WeightsCache, default_root
    from selector.profile import cached_profile

    profiles: list[Profile] = []

    def plain(config: EngineConfig, rig: StepTimer, roots: RootSource) -> ExpansionPolicy:  # noqa: ARG001
        profiles.append(cached_profile(rig, WeightsCache(default_root())))
        return PlainDecoding()

    engine = build_engine(settings.to_tool_config(), plain)
    if not profiles:
        raise ValueError("there is nothing to choose without a drafter")
    return engine, profiles[0]


@dataclass(frozen=True)
class Design:
    """The amount of measurement, and the verifiers besides the configured one."""

    temperatures: tuple[float, ...]
    verifiers: tuple[str, ...]
    max_tokens: int
    stride: int
    num_trees: int


class Collector:
    """Measures prompts one after the other. Acceptance counts carry over from one prompt to the next, as on a server.

    `rules` are the verifiers of sampled texts: the configured one and the requested others.
    """

    def __init__(self, engine: "Engine", settings: Settings, design: Design, seed: int) -> None:
        from engine.core.verifier_table import is_exact
        from engine.profiling.counterfactual import Counterfactual
        from engine.verify.registry import create_verifier
        from selector.acceptance import CountedAcceptance
        from selector.menu import menu_of

        config = settings.to_engine_config()
        self._menu: Menu = menu_of(config.expansion, config.verifier, config.largest_expansion)
        if not all(entry.is_delayed for entry in self._menu.entries):
            raise ValueError(f"the network supports only delayed trees, not those of {config.expansion}")
        self._design, self._seed = design, seed
        self._counterfactual: Counterfactual = Counterfactual(engine)
        self.rules = tuple(dict.fromkeys((config.verifier, *design.verifiers)))
        branching = max(self._menu.entries, key=lambda entry: (entry.branches, entry.max_depth))
        inexact = [name for name in self.rules if not is_exact(branching.kind, name)]
        if inexact:
            raise ValueError(f"{', '.join(inexact)} is not lossless on {branching.tree} trees")
        self._full_tree = replace(branching, trunk=0, depth=max(1, self._menu.deepest))
        self._verifiers: dict[str, Verifier] = {name: create_verifier(name) for name in self.rules}
        self._counting = {name: CountedAcceptance(self._menu) for name in ("greedy", *self.rules)}
        self._seeds = count(seed << 32)

    def of_prompts(self, prompts: "Mapping[str, tuple[str, Sequence[int]]]") -> "Iterator[tuple[str, Examples | None]]":
        """Yield each prompt's name with its examples, None if its answers are too short for a root.

        The answers to all prompts are written first, in one batch.
        """
        from engine.core.types import SamplingParams
        from selector.network.examples import Examples

        ways = [SamplingParams(one, max_tokens=self._design.max_tokens, seed=self._seed) for one in self._design.temperatures]
        texts = iter(self._counterfactual.generate([(prompt, sampling) for _, prompt in prompts.values() for sampling in ways]))
        for name, (kind, prompt) in prompts.items():
            parts = [
                example
                for sampling in ways
                for example in self._of_text((kind, name), next(texts), len(prompt), replace(sampling, seed=None))
            ]
            yield name, Examples.joined(parts) if parts else None

    def _of_text(
        self, labels: tuple[str, str], text: Sequence[int], num_prompt: int, sampling: "SamplingParams"
    ) -> "Iterator[Examples]":
        self._counterfactual.load(text)
        rules = ("greedy",) if sampling.is_greedy else self.rules
        for point in range(num_prompt + 1, len(text) - 1, self._design.stride):
            for rule in rules:
                name = f"{labels[1]}-{sampling.temperature:g}-{rule}"
                yield self._of_root(point, num_prompt, name, rule, sampling, labels)

    def _of_root(
        self, point: int, num_prompt: int, name: str, rule: str, sampling: "SamplingParams", labels: tuple[str, str]
    ) -> "Examples":
        """Return one example, and add the acceptance of its trees to the counts."""
        import numpy as np

        from engine.profiling.counterfactual import TreeSpec
        from selector.network.examples import Examples
        from selector.network.features import features_of

        verifier = rule if rule in self._verifiers else "traversal"
        view = _view(name, point, num_prompt, sampling, verifier, self._design.max_tokens)
        counting = self._counting[rule]
        counted_BM = np.array(counting.estimate([view]).tokens)
        chain = TreeSpec(self._menu.entries[1], verifier, next(self._seeds))
        features = features_of([view], self._counterfactual.facts(point, chain, sampling), counted_BM, self._menu)
        num_trees = 1 if sampling.is_greedy else self._design.num_trees
        plantings = [TreeSpec(self._full_tree, verifier, next(self._seeds)) for _ in range(num_trees)]
        whole = self._counterfactual.nested(point, self._menu.entries, plantings, sampling)
        brought = [whole.tokens(index, self._verifiers.get(rule)) for index in range(num_trees)]
        self._count(counting, name, whole, brought)
        return Examples(
            *(self._menu, (rule,), (labels[0],), (labels[1],)),
            features.target_BD.astype(np.float16),
            features.draft_BW.astype(np.float16),
            features.scalars_BS,
            features.counted_BM,
            np.array([[one.tokens for one in of_tree] for of_tree in brought], dtype=np.float32).mean(0, keepdims=True),
            np.array([[one.tree.num_nodes - 1 for one in of] for of in whole.truncations], dtype=np.float32).mean(
                0, keepdims=True
            ),
            np.array([sampling.temperature], dtype=np.float32),
            np.array([point + 1], dtype=np.float32),
        )

    def _count(
        self, counting: "CountedAcceptance", name: str, whole: "NestedPoint", brought: "Sequence[Sequence[TreeOutcome]]"
    ) -> None:
        """Observe the outcomes that steps since the previous root would report: the longest chain and the widest tree in turn."""
        from engine.core.policy import DraftOutcome

        entries = self._menu.entries
        chain = max(place for place, entry in enumerate(entries) if entry.branches == 1)
        widest = self._menu.num_nodes.index(self._menu.most_nodes)
        for index in range(self._design.num_trees):
            tree, place = index % len(brought), widest if index % 2 else chain
            grown = whole.truncations[tree][place].tree
            depths = (grown.num_nodes - 1, max(grown.depths), brought[tree][place].accepted_depth)
            counting.observe([DraftOutcome(name, entries[place], *depths)])


def _view(name: str, point: int, num_prompt: int, sampling: "SamplingParams", verifier: str, max_tokens: int) -> "SequenceView":
    from engine.core.policy import SequenceView
    from engine.core.types import Speculation

    num_generated = point + 1 - num_prompt
    return SequenceView(name, point + 1, num_generated, max_tokens, 1, sampling, Speculation(), verifier)
