#!/usr/bin/env bash
# Two keywords in one schema, one of them dropped: xgrammar 0.2.8, outlines-core 0.2.14, lm-format-enforcer 0.11.3.
#
# Guess: an engine that supports two keywords keeps both where they stand side by side, or refuses.
# Seen, all of it silent:
# - beside `anyOf`: xgrammar drops `properties` and `required`, outlines-core drops the anyOf;
# - beside `$ref`: xgrammar, outlines-core and lm-format-enforcer drop maxLength, which draft 2019-09 made legal there;
# - beside `enum`: xgrammar and outlines-core drop `type` and `minimum`;
# - beside `format`: xgrammar drops `pattern`;
# - beside a list of types: lm-format-enforcer drops everything, so that "an object with `a`, or null" allows any object; outlines-core
#   drops the list's other types where there are `properties`, so that null cannot be written.
# Harm: "one of these two extra fields, and always an id" comes without the id; the optional object of every strict schema is free in
# one engine and never null in another.
# llguidance keeps them all.
source "$(dirname "$0")/engines.sh"
engines llguidance xgrammar outlines lmfe

python - <<'PY'
from engines import allows, cannot_write, done, forbids, lets_through, show

schema = show(
    {
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "required": ["id"],
        "anyOf": [
            {"properties": {"mail": {"type": "string"}}, "required": ["mail"]},
            {"properties": {"phone": {"type": "string"}}, "required": ["phone"]},
        ],
    }
)
lets_through("xgrammar", schema, '{"mail":"x"}')
cannot_write("xgrammar", schema, '{"id":1,"mail":"x"}')
lets_through("outlines", schema, '{"id":1}')
cannot_write("outlines", schema, '{"id":1,"mail":"x"}')
allows("llguidance", schema, '{"id":1,"mail":"x"}')
forbids("llguidance", schema, '{"mail":"x"}', '{"id":1}')

reference = {"$ref": "#/$defs/s", "maxLength": 2}
schema = show({"$defs": {"s": {"type": "string"}}, "type": "object", "properties": {"v": reference}, "required": ["v"]})
for engine in "xgrammar", "outlines", "lmfe":
    lets_through(engine, schema, '{"v":"abc"}')
forbids("llguidance", schema, '{"v":"abc"}')

schema = show({"type": "integer", "enum": [1, 5, "none"], "minimum": 3})
for engine in "xgrammar", "outlines":
    lets_through(engine, schema, "1", '"none"')
forbids("llguidance", schema, "1", '"none"')

schema = show({"type": "string", "format": "date", "pattern": "^20"})
lets_through("xgrammar", schema, '"1999-01-01"')
forbids("llguidance", schema, '"1999-01-01"')

inner = {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
schema = show({"type": "object", "properties": {"v": inner}, "required": ["v"]})
lets_through("lmfe", schema, '{"v":{}}', '{"v":{"b":"x"}}')
cannot_write("outlines", schema, '{"v":null}')
for engine in "llguidance", "xgrammar":
    allows(engine, schema, '{"v":null}', '{"v":{"a":1}}')
    forbids(engine, schema, '{"v":{}}', '{"v":{"b":"x"}}')
done()
PY
