"""Checks that a drafter fits a target: vocabulary, end tokens, maximum length. Reads configurations and tokenizers, no weights.

A drafter proposes token ids of the target. A draft model whose tokens differ drafts text. A drafter that would be useless or
cannot run is refused, with each difference listed. A difference that only lowers acceptance is a warning, because no draft can
change the target's distribution.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.core.config import EngineConfig
from engine.draft.checkpoints.files import UnusableCheckpoint
from engine.draft.checkpoints.read import read_checkpoint
from engine.draft.models.token_map import token_map
from engine.weights import WeightsError, resolve
from engine.weights.facts import ModelFacts, read_facts
from engine.weights.fingerprint import RECIPE_KEY, Fingerprint, fingerprint
from engine.weights.vocabulary import Vocabulary, read_vocabulary

_MAX_LISTED = 3  # differences of one kind; further differences are counted


class UnreadableDrafter(ValueError):
    """A lens or head file cannot be read. The message is one line."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """The compared facts and the differences, one line each. Without refusals the two models can run together."""

    facts: tuple[str, ...]
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __add__(self, other: "Compatibility") -> "Compatibility":
        return Compatibility(self.facts + other.facts, self.refusals + other.refusals, self.warnings + other.warnings)


def check_drafter(config: EngineConfig) -> Compatibility:
    """Compare a configuration's drafter with its target. Raises UnreadableDrafter, WeightsError."""
    target = resolve(config.model).folder
    found = Compatibility(())
    if config.draft_model is not None:
        found += compare_models(target, resolve(config.draft_model).folder, config.scheduler.max_model_len)
    for file in filter(None, [config.lens, config.head]):
        found += compare_fingerprint(target, Path(file))
    if config.checkpoint is not None:
        found += compare_checkpoint(target, Path(config.checkpoint))
    return found


def compare_checkpoint(target: Path, folder: Path) -> Compatibility:
    """Compare a checkpoint of another project with the target. Raises WeightsError."""
    facts = read_facts(target)
    about = f"target: {facts.num_layers} layers of width {facts.width}, {facts.vocab_size} output rows"
    try:
        checkpoint = read_checkpoint(folder, facts)
    except UnusableCheckpoint as error:
        return Compatibility((about,), refusals=(str(error),))
    return Compatibility((about, f"drafter: {checkpoint.description}"), warnings=checkpoint.warnings)


def compare_models(target: Path, draft: Path, max_model_len: int) -> Compatibility:
    """Compare a draft model's folder with the target's, for sequences of `max_model_len` tokens. Raises WeightsError."""
    target_facts, draft_facts = read_facts(target), read_facts(draft)
    target_vocab, draft_vocab = read_vocabulary(target), read_vocabulary(draft)
    ends = (
        f"target {_strings(target_facts.eos_token_ids, target_vocab)}, drafter {_strings(draft_facts.eos_token_ids, draft_vocab)}"
    )
    splits_differently = target_vocab.tokens == draft_vocab.tokens and target_vocab.splitting != draft_vocab.splitting
    facts = (_facts_line("target", target_facts, target_vocab), _facts_line("drafter", draft_facts, draft_vocab))
    too_short = tuple(_too_short(target_facts, draft_facts, max_model_len))
    unmatched_ends = tuple(_unmatched_ends(target_facts, draft_facts, ends))
    differences = (*_token_differences(target_vocab, draft_vocab), *_special_differences(target_vocab, draft_vocab))
    if differences:
        return Compatibility(facts, too_short) + _compare_bytes(target, draft, (*differences, *unmatched_ends))
    warnings = tuple(_model_warnings(target_facts, draft_facts, ends, splits_differently))
    return Compatibility(facts, (*unmatched_ends, *too_short), warnings)


def have_same_tokens(target: Vocabulary, draft: Vocabulary) -> bool:
    """Return whether every token id has the same string in both models, and is special in both or neither."""
    return not (any(_token_differences(target, draft)) or any(_special_differences(target, draft)))


def _compare_bytes(target: Path, draft: Path, differences: tuple[str, ...]) -> Compatibility:
    """Compare tokenizers that differ by the bytes of their tokens. The differences are refused if these are unknown."""
    try:
        num_shared = len(token_map(target, draft).draft_id_of)
    except WeightsError as error:
        return Compatibility((), differences, (str(error),))
    return Compatibility(
        (), warnings=(f"the tokenizers differ, so the drafter drafts text: they have {num_shared} tokens in common",)
    )


def compare_fingerprint(target: Path, file: Path) -> Compatibility:
    """Compare the model that a lens or head was made for with the target. Raises UnreadableDrafter, WeightsError."""
    made_for = recorded_fingerprint(file)
    if made_for is None:
        unknown = f"{file.name} does not record the model it was made for, so only its sizes can be checked"
        return Compatibility((), warnings=(unknown,))
    now = fingerprint(target)
    facts = (f"target: {now.as_text()}", f"{file.name} was made for: {made_for.as_text()}")
    refusals = tuple(_size_differences(now, made_for, file.name))
    is_tuned = not refusals and now.weights != made_for.weights
    tuned = f"{file.name} was made for other weights of this shape; output stays exact but fewer drafts may be accepted"
    return Compatibility(facts, refusals, (tuned,) if is_tuned else ())


def recorded_fingerprint(file: Path) -> Fingerprint | None:
    """Return the fingerprint of the model that a lens or head was made for, if recorded. Raises UnreadableDrafter."""
    try:
        with safe_open(file, framework="np") as opened:
            recipe: dict[str, Any] = json.loads((opened.metadata() or {}).get("recipe", "{}"))
        return Fingerprint.from_text(recipe[RECIPE_KEY]) if RECIPE_KEY in recipe else None
    except (OSError, ValueError, SafetensorError) as error:
        raise UnreadableDrafter(f"the drafter's file {file} cannot be read: {error}") from error


def _token_differences(target: Vocabulary, draft: Vocabulary) -> Iterator[str]:
    shared = [token_id for token_id in sorted(target.tokens) if token_id in draft.tokens]
    different = [token_id for token_id in shared if target.tokens[token_id] != draft.tokens[token_id]]
    if different:
        listed = _listed(f"{i} is {target.tokens[i]!r} in the target and {draft.tokens[i]!r} in the drafter" for i in different)
        yield f"{len(different)} of {len(shared)} token ids decode to different strings: {listed}"
    for one, other, side in ((target, draft, "target"), (draft, target, "drafter")):
        if alone := [token_id for token_id in sorted(one.tokens) if token_id not in other.tokens]:
            listed = _listed(f"{i} is {one.tokens[i]!r}" for i in alone)
            totals = f"{len(target.tokens)} and {len(draft.tokens)} in all"
            yield f"{len(alone)} token ids ({totals}) exist only in the {side}: {listed}"


def _special_differences(target: Vocabulary, draft: Vocabulary) -> Iterator[str]:
    for one, other, side in ((target, draft, "target"), (draft, target, "drafter")):
        if alone := sorted(one.special_ids - other.special_ids):
            yield f"special only in the {side}: {_listed(f'{one.tokens[token_id]!r} ({token_id})' for token_id in alone)}"


def _unmatched_ends(target: ModelFacts, draft: ModelFacts, ends: str) -> Iterator[str]:
    if target.eos_token_ids and draft.eos_token_ids and not set(target.eos_token_ids) & set(draft.eos_token_ids):
        yield f"no end token in common: {ends}"


def _too_short(target: ModelFacts, draft: ModelFacts, max_model_len: int) -> Iterator[str]:
    longest = min(max_model_len, target.max_positions or max_model_len)
    if draft.max_positions is not None and draft.max_positions < longest:
        yield (
            f"the drafter is limited to {draft.max_positions} tokens, the target must serve {longest}: "
            f"set max_model_len to {draft.max_positions} or less"
        )


def _model_warnings(target: ModelFacts, draft: ModelFacts, ends: str, splits_differently: bool) -> Iterator[str]:
    one, other = set(target.eos_token_ids), set(draft.eos_token_ids)
    if one != other and (one & other or not (one and other)):
        yield f"end tokens differ, the target's are used: {ends}"
    if splits_differently:
        yield "the tokens are equal but the tokenizers differ (merges, normaliser or pre-tokenizer); the target's is used"


def _size_differences(now: Fingerprint, made_for: Fingerprint, name: str) -> Iterator[str]:
    """Yield the differences that prevent the use of a file. Digests cannot show which tokens differ."""
    sizes = {"num_tokens": "tokens", "width": "dimensions", "num_layers": "layers"}
    for field, unit in sizes.items():
        if getattr(now, field) != getattr(made_for, field):
            yield f"the target has {getattr(now, field)} {unit}, {name} was made for {getattr(made_for, field)}"
    if now.num_tokens == made_for.num_tokens and now.tokenizer != made_for.tokenizer:
        yield f"{name} was made for another vocabulary of {now.num_tokens} tokens"
    if now.special_tokens != made_for.special_tokens:
        yield f"{name} was made for a vocabulary with other special tokens"


def _facts_line(side: str, facts: ModelFacts, vocab: Vocabulary) -> str:
    longest = "any number of" if facts.max_positions is None else facts.max_positions
    return (
        f"{side}: {len(vocab.tokens)} tokens (digest {vocab.tokens_digest}), {len(vocab.special_ids)} of them special, "
        f"{facts.vocab_size} output rows, end tokens {_strings(facts.eos_token_ids, vocab)}, {longest} positions"
    )


def _strings(token_ids: Sequence[int], vocab: Vocabulary) -> str:
    return ", ".join(f"{vocab.tokens.get(token_id, '')!r} ({token_id})" for token_id in token_ids) or "none"


def _listed(differences: Iterable[str]) -> str:
    """Return the first differences and the number of the rest."""
    every = list(differences)
    rest = f" and {len(every) - _MAX_LISTED} more" if len(every) > _MAX_LISTED else ""
    return "; ".join(every[:_MAX_LISTED]) + rest
