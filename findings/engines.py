"""What an engine's token masks allow for a JSON schema, beside what the jsonschema package says of the same text.

Every engine gets a vocabulary of single bytes or characters and an end token, and is asked token by token, as a decoder asks it.
A finding states what it expects; the process exits with 1 if an engine does anything else.
"""

# ruff: noqa: BLE001, T201
import json
import os
import string
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version

from jsonschema import Draft202012Validator

_ALPHABET = string.printable[:-2] + "éß٣😀"  # without \v and \f
_EOS = 256
_BYTES = [bytes([value]) for value in range(_EOS)]
_PACKAGES = {"llguidance": "llguidance", "xgrammar": "xgrammar", "outlines": "outlines-core", "lmfe": "lm-format-enforcer"}
_wrong: list[str] = []
_taken: set[tuple[str, str]] = set()


@dataclass
class Compiled:
    """A schema in an engine: whether a text is a beginning, whether it is whole, and what the engine printed."""

    begins: Callable[[str], bool]
    is_whole: Callable[[str], bool]
    printed: str

    def next_characters(self, beginning: str) -> set[str]:
        """Return the characters of the alphabet that may follow."""
        return {char for char in _ALPHABET if self.begins(beginning + char)}


def _llguidance(schema: str) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    start = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    if start.is_error():
        raise ValueError(start.get_error())

    def run(text: str) -> LLMatcher | None:
        matcher, tokens = start.deep_copy(), tokenizer.tokenize_str(text)
        return matcher if matcher.try_consume_tokens(tokens) == len(tokens) else None

    return lambda text: run(text) is not None, lambda text: (end := run(text)) is not None and end.is_accepting()


def _xgrammar(schema: str) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
    import xgrammar

    vocabulary = xgrammar.TokenizerInfo([*_BYTES, b"</s>"], stop_token_ids=[_EOS])
    compiled = xgrammar.GrammarCompiler(vocabulary).compile_json_schema(schema)

    def accepts(tokens: list[int]) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return all(matcher.accept_token(token) for token in tokens)

    return lambda text: accepts([*text.encode()]), lambda text: accepts([*text.encode(), _EOS])


def _outlines(schema: str) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
    from outlines_core import Index, Vocabulary
    from outlines_core.json_schema import build_regex_from_schema

    index = Index(build_regex_from_schema(schema), Vocabulary(_EOS, {value: [token] for token, value in enumerate(_BYTES)}))

    def state(text: str) -> int | None:
        now = index.get_initial_state()
        for token in text.encode():
            if now is not None:
                now = index.get_next_state(now, token)
        return now

    return lambda text: state(text) is not None, lambda text: (end := state(text)) is not None and index.is_final_state(end)


def _lmfe(schema: str) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
    from lmformatenforcer import JsonSchemaParser, TokenEnforcer, TokenEnforcerTokenizerData

    eos = len(_ALPHABET)
    words = [(token, char, False) for token, char in enumerate(_ALPHABET)]
    data = TokenEnforcerTokenizerData(words, lambda tokens: "".join(_ALPHABET[token] for token in tokens), eos, False, eos + 1)
    enforcer = TokenEnforcer(data, JsonSchemaParser(json.loads(schema)))

    def accepts(tokens: list[int]) -> bool:
        return all(
            token in enforcer.get_allowed_tokens(tokens[:position]).allowed_tokens for position, token in enumerate(tokens)
        )

    def ids(text: str) -> list[int]:
        return [_ALPHABET.index(char) for char in text]

    enforcer.get_allowed_tokens([])
    return lambda text: accepts(ids(text)), lambda text: accepts([*ids(text), eos])


_ENGINES = {"llguidance": _llguidance, "xgrammar": _xgrammar, "outlines": _outlines, "lmfe": _lmfe}


def compiled(engine: str, schema: dict | str) -> Compiled:
    """Return the schema in an engine; raise what the engine raises."""
    with _stderr() as printed:
        begins, is_whole = _ENGINES[engine](_text(schema))
    return Compiled(begins, is_whole, printed())


def lets_through(engine: str, schema: dict | str, *texts: str, prints: str = "") -> None:
    """State that the engine allows texts that the schema forbids, or that are no JSON."""
    _state(engine, schema, texts, allowed=True, valid=False, prints=prints)


def cannot_write(engine: str, schema: dict | str, *texts: str, prints: str = "") -> None:
    """State that the engine does not allow texts that the schema allows."""
    _state(engine, schema, texts, allowed=False, valid=True, prints=prints)


def allows(engine: str, schema: dict | str, *texts: str, prints: str = "") -> None:
    """State that the engine allows valid texts."""
    _state(engine, schema, texts, allowed=True, valid=True, prints=prints)


def forbids(engine: str, schema: dict | str, *texts: str, prints: str = "") -> None:
    """State that the engine does not allow invalid texts."""
    _state(engine, schema, texts, allowed=False, valid=False, prints=prints)


def refuses(engine: str, schema: dict | str, reason: str) -> None:
    """State that the engine raises an error with these words."""
    try:
        compiled(engine, schema)
    except Exception as error:  # each engine has its own
        check(f"{_name(engine)}  refuses the schema: {reason}", reason in str(error), str(error))
    else:
        check(f"{_name(engine)}  refuses the schema: {reason}", False, "no error")


def show(schema: dict | str) -> dict | str:
    """Print a schema, and return it."""
    print(f"\nschema {_text(schema)}", flush=True)
    return schema


def check(statement: str, is_so: bool, seen: object = "") -> None:
    """Print a statement; remember it if it does not hold."""
    print(f"  {statement}" if is_so else f"! {statement}   NOT SO: {seen}", flush=True)
    if not is_so:
        _wrong.append(statement)


def is_valid(schema: dict | str, text: str) -> bool:
    """Return whether a text is JSON and the jsonschema package finds it valid."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return Draft202012Validator(json.loads(_text(schema))).is_valid(value)


def _state(engine: str, schema: dict | str, texts: tuple[str, ...], *, allowed: bool, valid: bool, prints: str) -> None:
    try:
        found = compiled(engine, schema)
    except Exception as error:  # each engine has its own
        check(f"{_name(engine)}  takes the schema", False, error)
        return
    heard = f"takes it, and prints: {prints}" if prints else "takes it silently"
    if (engine, _text(schema)) not in _taken:
        check(f"{_name(engine)}  {heard}", prints in found.printed if prints else not found.printed, found.printed)
        _taken.add((engine, _text(schema)))
    for text in texts:
        verdicts = (found.is_whole(text), is_valid(schema, text))
        words = f"{'allows' if allowed else 'does not allow'} {'valid' if valid else 'INVALID'}"
        check(f"{_name(engine)}  {words} {_shown(text)}", verdicts == (allowed, valid), verdicts)


def _text(schema: dict | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def _name(engine: str) -> str:
    return f"{_PACKAGES[engine]} {version(_PACKAGES[engine])}".ljust(26)


def _shown(text: str) -> str:
    return text.replace("\n", "<newline>").replace("\t", "<tab>")


@contextmanager
def _stderr() -> Iterator[Callable[[], str]]:
    """Collect what is printed to the error stream, by native code too."""
    kept, text = os.dup(2), ""
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: text
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            text = file.read().decode(errors="replace")


def done() -> None:
    """End the process with 1 if a statement did not hold. The last line of every finding."""
    if _wrong:
        sys.exit(f"\n{len(_wrong)} statements do not hold")
    print("\nevery statement holds")
