#!/usr/bin/env bash
# lm-format-enforcer 0.11.3: oneOf of scalars allows nothing but objects.
#
# Guess: `oneOf` of an integer and null allows an integer or null. Overlapping branches may be treated as anyOf.
# Seen: whatever the branches are, the mask asks for `{`, and any object passes. An integer, a string or null cannot be written.
# Silent. anyOf works.
# Harm: "an integer or null" in oneOf, which some generators write for optional fields, comes as an object in every answer.
# xgrammar and outlines-core let overlapping branches through as anyOf does (xgrammar prints a warning); llguidance refuses them.
source "$(dirname "$0")/engines.sh"
engines llguidance xgrammar outlines lmfe

python - <<'PY'
from engines import allows, cannot_write, check, compiled, done, lets_through, refuses, show


def field(schema: dict) -> dict:
    return {"type": "object", "properties": {"v": schema}, "required": ["v"]}


schema = show(field({"oneOf": [{"type": "integer"}, {"type": "null"}]}))
cannot_write("lmfe", schema, '{"v":5}', '{"v":null}')
lets_through("lmfe", schema, '{"v":{}}', '{"v":{"any":[true]}}')
after = compiled("lmfe", schema).next_characters('{"v":')
check("lm-format-enforcer: only { may begin", after - set(" \t\n\r") == {"{"}, after)
for engine in "llguidance", "xgrammar", "outlines":
    allows(engine, schema, '{"v":5}', '{"v":null}')
allows("lmfe", show(field({"anyOf": [{"type": "integer"}, {"type": "null"}]})), '{"v":5}', '{"v":null}')

schema = show(field({"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 10}]}))
lets_through("xgrammar", schema, '{"v":5}', prints="falling back to anyOf semantics")
lets_through("outlines", schema, '{"v":5}')
refuses("llguidance", schema, "oneOf constraints are not supported")
done()
PY
