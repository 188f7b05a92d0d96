"""Texts of JSON that a grammar admits, byte by byte: whether one is, and random ones."""

import json
import random
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from engine.core.types import Grammar, GrammarKind
from engine.structured_output.grammars import compiled

_END = ord('"')


@cache
def bytes_vocabulary() -> LLTokenizer:
    return LLTokenizer("byte")


def matcher_of(schema: Any) -> LLMatcher:
    return compiled(bytes_vocabulary(), Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def admits(matcher: LLMatcher, text: str) -> bool:
    matcher, data = matcher.deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def admits_string(matcher: LLMatcher, value: str) -> bool:
    return admits(matcher, json.dumps(value, ensure_ascii=False))


def random_strings(matcher: LLMatcher, count: int, most_bytes: int = 400) -> list[str]:
    """Return strings that a schema admits, each byte drawn from those allowed; strings that grow too long are left out."""
    rng, found = random.Random(0), []
    for _ in range(count):
        one, text, ending = matcher.deep_copy(), bytearray(), rng.choice([0.5, 0.1, 0.02])
        while len(text) < most_bytes and not (len(text) > 1 and one.is_accepting()):
            allowed = _allowed(one)
            others = [byte for byte in allowed if byte != _END]
            ends = _END in allowed and (not others or not text or rng.random() < ending)
            text.append(_END if ends else rng.choice(others))
            assert one.try_consume_tokens([text[-1]]) == 1
        if len(text) > 1 and one.is_accepting():
            found.append(json.loads(text))
    return found


def _allowed(matcher: LLMatcher) -> list[int]:
    words_1W = allocate_token_bitmask(1, bytes_vocabulary().vocab_size)
    fill_next_token_bitmask(matcher, words_1W)
    assert not matcher.is_error(), matcher.get_error()
    allowed: list[int] = np.unpackbits(words_1W[0].view(np.uint8), bitorder="little")[:256].nonzero()[0].tolist()
    return allowed
