#!/usr/bin/env bash
# outlines-core 0.2.14: a text that begins with another whole text is often forbidden, by the order of the choices and by the tokens.
#
# Guess: `New|New York City` allows both, and `{"type": "number"}` allows 1.5, whatever the order and the tokens are.
# Seen: the index follows a search that prefers the first alternative. Where the shorter choice comes first, the longer one is lost: after
# `New` only the end token may come. Behind a text that is whole, a token of one byte is dropped too, unless the text is whole again:
# after the digit of a number no `.` may come, so that `{"type": "number"}` and `[0-9]+(\.[0-9]+)?` have whole numbers only, if no
# token such as `.5` exists. No error, no warning.
# Harm: a label is never chosen; prices lose their cents with one model and keep them with another.
# The same expression as a field of a JSON object is right, since the object goes on after it. llguidance allows all of these.
source "$(dirname "$0")/engines.sh"
engines llguidance outlines

python - <<'PY'
from llguidance import LLMatcher, LLTokenizer
from outlines_core import Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

from engines import allows, cannot_write, check, done, show

WORDS = ["New", " York", " City", " York City", "1", "2", ".", ".5"]
EOS = len(WORDS)


def after(expression: str, *text: str, without: tuple[str, ...] = ()) -> set[str]:
    """Return the tokens that the index allows after a text, <end> among them."""
    ids = {word: [token] for token, word in enumerate(WORDS) if word not in without}
    index = Index(expression, Vocabulary(EOS, ids))
    state = index.get_initial_state()
    for word in text:
        state = index.get_next_state(state, WORDS.index(word))
    return {[*WORDS, "<end>"][token] for token in index.get_allowed_tokens(state)}


for without in (), (" York City",):
    seen = after("New|New York City", "New", without=without)
    check(f"outlines-core: New|New York City: after New only the end may come, without {[*without]}", seen == {"<end>"}, seen)
seen = after("New York City|New", "New")
check("outlines-core: New York City|New: after New the rest may come", seen == {" York", " York City", "<end>"}, seen)

number = build_regex_from_schema('{"type": "number"}')
for expression in r"[0-9]+(\.[0-9]+)?", number:
    seen = after(expression, "1", without=(".5",))
    check(f"outlines-core: {expression}: after 1 no point may follow", seen == {"1", "2", "<end>"}, seen)
seen = after(number, "1")
check("outlines-core: with the token .5 that may follow", seen == {"1", "2", ".5", "<end>"}, seen)

tokenizer = LLTokenizer("byte")
for expression, text in ("New|New York City", "New York City"), (r"[0-9]+(\.[0-9]+)?", "1.5"):
    matcher, tokens = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(expression)), tokenizer.tokenize_str(text)
    is_whole = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    check(f"llguidance: {expression}: allows {text}", is_whole)

schema = show({"type": "number"})
cannot_write("outlines", schema, "1.5", "1e+5")
allows("llguidance", schema, "1.5", "1e+5")
schema = show({"type": "object", "properties": {"v": {"type": "number"}}, "required": ["v"]})
allows("outlines", schema, '{"v":1.5}')
done()
PY
