"""Whether a drafter belongs to a target: vocabulary, end tokens, longest text. Reads configurations and tokenizers, no weights.

A drafter proposes token ids, so every id must stand for the same string in both models. What would be useless or cannot be run is
refused, each difference by name; what only makes drafts worse is a warning, since no draft can change the target's law.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.core.config import EngineConfig
from engine.weights import resolve
from engine.weights.facts import ModelFacts, read_facts
from engine.weights.fingerprint import RECIPE_KEY, Fingerprint, fingerprint
from engine.weights.vocabulary import Vocabulary, read_vocabulary

_MOST_NAMED = 3  # differences of one sort that are spelt out; the others are counted


class UnreadableDrafter(ValueError):
    """A lens or a head cannot be read. The message is one line."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What was compared, one line each, and what differs. Without a refusal the two can be run together."""

    facts: tuple[str, ...]
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __add__(self, other: "Compatibility") -> "Compatibility":
        return Compatibility(self.facts + other.facts, self.refusals + other.refusals, self.warnings + other.warnings)


def check_drafter(config: EngineConfig) -> Compatibility:
    """Compare every model and file that drafts in a configuration with its target. Raises UnreadableDrafter, WeightsError."""
    target = resolve(config.model).folder
    found = Compatibility(())
    if config.draft_model is not None:
        found += compare_models(target, resolve(config.draft_model).folder, config.scheduler.max_model_len)
    for file in filter(None, [config.lens, config.head]):
        found += compare_made_for(target, Path(file))
    return found


def compare_models(target: Path, draft: Path, max_model_len: int) -> Compatibility:
    """Compare the folder of a draft model with the target's, to serve texts of `max_model_len` tokens. Raises WeightsError."""
    target_facts, draft_facts = read_facts(target), read_facts(draft)
    target_words, draft_words = read_vocabulary(target), read_vocabulary(draft)
    ends = (
        f"target {_strings(target_facts.eos_token_ids, target_words)}, drafter {_strings(draft_facts.eos_token_ids, draft_words)}"
    )
    is_split_otherwise = target_words.tokens == draft_words.tokens and target_words.splitting != draft_words.splitting
    refusals = [
        *_token_differences(target_words, draft_words),
        *_special_differences(target_words, draft_words),
        *_unmatched_ends(target_facts, draft_facts, ends),
        *_too_short(target_facts, draft_facts, max_model_len),
    ]
    facts = (_told("target", target_facts, target_words), _told("drafter", draft_facts, draft_words))
    return Compatibility(facts, tuple(refusals), tuple(_model_warnings(target_facts, draft_facts, ends, is_split_otherwise)))


def compare_made_for(target: Path, file: Path) -> Compatibility:
    """Compare a file that was made for one model, a lens or a head, with the target. Raises UnreadableDrafter, WeightsError."""
    made_for = recorded_fingerprint(file)
    if made_for is None:
        unknown = f"{file.name} does not say what model it was made for, so that only its sizes can be checked"
        return Compatibility((), warnings=(unknown,))
    now = fingerprint(target)
    facts = (f"target: {now.as_text()}", f"{file.name} was made for: {made_for.as_text()}")
    refusals = tuple(_size_differences(now, made_for, file.name))
    is_tuned = not refusals and now.weights != made_for.weights
    tuned = f"{file.name} was made for a model of this shape with other weights; drafts stay exact but may be accepted less often"
    return Compatibility(facts, refusals, (tuned,) if is_tuned else ())


def recorded_fingerprint(file: Path) -> Fingerprint | None:
    """Return the fingerprint of the model that a lens or head was made for, None if it has none. Raises UnreadableDrafter."""
    try:
        with safe_open(file, framework="np") as opened:
            recipe: dict[str, Any] = json.loads((opened.metadata() or {}).get("recipe", "{}"))
        return Fingerprint.from_text(recipe[RECIPE_KEY]) if RECIPE_KEY in recipe else None
    except (OSError, ValueError, SafetensorError) as error:
        raise UnreadableDrafter(f"the drafter's file {file} cannot be read: {error}") from error


def _token_differences(target: Vocabulary, draft: Vocabulary) -> Iterator[str]:
    shared = [token_id for token_id in sorted(target.tokens) if token_id in draft.tokens]
    unlike = [token_id for token_id in shared if target.tokens[token_id] != draft.tokens[token_id]]
    if unlike:
        named = _named(f"{i} is {target.tokens[i]!r} in the target and {draft.tokens[i]!r} in the drafter" for i in unlike)
        yield f"{len(unlike)} of {len(shared)} token ids stand for other strings: {named}"
    for one, other, whose in ((target, draft, "target"), (draft, target, "drafter")):
        if alone := [token_id for token_id in sorted(one.tokens) if token_id not in other.tokens]:
            named = _named(f"{i} is {one.tokens[i]!r}" for i in alone)
            yield f"{len(alone)} token ids ({len(target.tokens)} and {len(draft.tokens)} in all) are the {whose}'s alone: {named}"


def _special_differences(target: Vocabulary, draft: Vocabulary) -> Iterator[str]:
    for one, other, whose in ((target, draft, "target"), (draft, target, "drafter")):
        if alone := sorted(one.special_ids - other.special_ids):
            yield f"special in the {whose} alone: {_named(f'{one.tokens[token_id]!r} ({token_id})' for token_id in alone)}"


def _unmatched_ends(target: ModelFacts, draft: ModelFacts, ends: str) -> Iterator[str]:
    if target.eos_token_ids and draft.eos_token_ids and not set(target.eos_token_ids) & set(draft.eos_token_ids):
        yield f"no end token in common: {ends}"


def _too_short(target: ModelFacts, draft: ModelFacts, max_model_len: int) -> Iterator[str]:
    longest = min(max_model_len, target.max_positions or max_model_len)
    if draft.max_positions is not None and draft.max_positions < longest:
        yield (
            f"the drafter's texts end at {draft.max_positions} tokens, the target is to serve {longest}: "
            f"set max_model_len to {draft.max_positions} or less"
        )


def _model_warnings(target: ModelFacts, draft: ModelFacts, ends: str, is_split_otherwise: bool) -> Iterator[str]:
    one, other = set(target.eos_token_ids), set(draft.eos_token_ids)
    if one != other and (one & other or not (one and other)):
        yield f"end tokens differ, the target's count: {ends}"
    if is_split_otherwise:
        yield "text is split into the same tokens by other rules (merges, normaliser or pre-tokenizer); the target's are used"


def _size_differences(now: Fingerprint, made_for: Fingerprint, name: str) -> Iterator[str]:
    """Yield what a file cannot be used with; digests cannot tell which tokens differ."""
    sizes = {"num_tokens": "tokens", "width": "numbers in a state", "num_layers": "layers"}
    for field, words in sizes.items():
        if getattr(now, field) != getattr(made_for, field):
            yield f"the target has {getattr(now, field)} {words}, {name} was made for {getattr(made_for, field)}"
    if now.num_tokens == made_for.num_tokens and now.tokenizer != made_for.tokenizer:
        yield f"{name} was made for another vocabulary of {now.num_tokens} tokens"
    if now.special_tokens != made_for.special_tokens:
        yield f"{name} was made for a vocabulary with other special tokens"


def _told(whose: str, facts: ModelFacts, words: Vocabulary) -> str:
    longest = "any number of" if facts.max_positions is None else facts.max_positions
    return (
        f"{whose}: {len(words.tokens)} tokens (digest {words.tokens_digest}), {len(words.special_ids)} of them special, "
        f"{facts.vocab_size} output rows, end tokens {_strings(facts.eos_token_ids, words)}, {longest} positions"
    )


def _strings(token_ids: Sequence[int], words: Vocabulary) -> str:
    return ", ".join(f"{words.tokens.get(token_id, '')!r} ({token_id})" for token_id in token_ids) or "none"


def _named(differences: Iterable[str]) -> str:
    """Return the first differences and the number of the others."""
    every = list(differences)
    rest = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return "; ".join(every[:_MOST_NAMED]) + rest
