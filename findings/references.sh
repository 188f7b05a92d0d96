#!/usr/bin/env bash
# $ref that leads elsewhere: lm-format-enforcer 0.11.3 by its last word, xgrammar 0.2.8 to anything, outlines-core 0.2.14 not to the end.
#
# Guess: a reference is followed, or refused with an error.
# Seen: lm-format-enforcer looks up only the last word of the path among the root's definitions: `#/$defs/order/$defs/id` gives
# `#/$defs/id`, another schema, silently. xgrammar takes a reference by `$anchor` for "any JSON", with a warning that native code prints.
# outlines-core unrolls a recursive reference three times and silently leaves out what is deeper: a fourth reply cannot be written.
# Harm: fields of another type; trees and threads that end too early, and look complete.
# llguidance follows all three.
source "$(dirname "$0")/engines.sh"
engines llguidance xgrammar outlines lmfe

python - <<'PY'
from engines import allows, cannot_write, done, forbids, lets_through, refuses, show


def field(reference: str, definitions: dict) -> dict:
    return {"$defs": definitions, "type": "object", "properties": {"v": {"$ref": reference}}, "required": ["v"]}


schema = show(field("#/$defs/order/$defs/id", {"id": {"type": "string"}, "order": {"$defs": {"id": {"type": "integer"}}}}))
lets_through("lmfe", schema, '{"v":"x"}')
cannot_write("lmfe", schema, '{"v":1}')
for engine in "llguidance", "xgrammar", "outlines":
    allows(engine, schema, '{"v":1}')
    forbids(engine, schema, '{"v":"x"}')

schema = show(field("#count", {"c": {"$anchor": "count", "type": "integer"}}))
lets_through("xgrammar", schema, '{"v":"x"}', '{"v":null}', prints="URI should either be '#' or start with '#/'")
refuses("outlines", schema, "Invalid reference path")
allows("llguidance", schema, '{"v":1}')
forbids("llguidance", schema, '{"v":"x"}')

post = {"type": "object", "properties": {"n": {"type": "integer"}, "reply": {"$ref": "#/$defs/post"}}, "required": ["n"]}
schema = show({"$defs": {"post": post}, "$ref": "#/$defs/post"})


def thread(posts: int) -> str:
    return '{"n":1,"reply":' * (posts - 1) + '{"n":1}' + "}" * (posts - 1)


allows("outlines", schema, *map(thread, range(1, 5)))
cannot_write("outlines", schema, thread(5), thread(6))
for engine in "llguidance", "xgrammar", "lmfe":
    allows(engine, schema, thread(5), thread(6))
done()
PY
