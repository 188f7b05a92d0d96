#!/usr/bin/env bash
# allOf of two schemas: xgrammar 0.2.8 allows any JSON, outlines-core 0.2.14 writes one part behind the other.
#
# Guess: two object schemas under allOf are merged, or refused.
# Seen: xgrammar replaces them by "any JSON": a string or a number passes for the object. It says so in a warning that its native code
# prints to the error stream; no exception, no Python warning. With only one schema under allOf it keeps that one and drops, silently,
# the properties beside it. outlines-core makes a regular expression of the first part followed by the second: the only
# texts that it allows, `{"a":1}{"b":2}`, are no JSON at all, and it is silent.
# Harm: allOf is how code generators write a class that extends another. Texts that the schema forbids come with no error.
# llguidance and lm-format-enforcer merge these schemas.
source "$(dirname "$0")/engines.sh"
engines llguidance xgrammar outlines lmfe

python - <<'PY'
from engines import allows, cannot_write, done, forbids, lets_through, show

base = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
extension = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}

schema = show({"allOf": [base, extension]})
lets_through("xgrammar", schema, '"hello"', "5", "[]", '{"a":1}', prints="Support for allOf with multiple options is still ongoing")
lets_through("outlines", schema, '{"a":1}{"b":2}')
cannot_write("outlines", schema, '{"a":1,"b":2}')
for engine in "llguidance", "lmfe":
    allows(engine, schema, '{"a":1,"b":2}')
    forbids(engine, schema, '"hello"', '{"a":1}{"b":2}', '{"a":1}')

schema = show({"type": "integer", "allOf": [{"minimum": 5}, {"maximum": 7}]})
lets_through("xgrammar", schema, "4", "8", '"hello"', prints="Support for allOf with multiple options is still ongoing")
forbids("llguidance", schema, "4", "8", '"hello"')

schema = show({**base, "allOf": [{"properties": {"b": {"type": "integer"}}, "required": ["b"]}]})
lets_through("xgrammar", schema, '{"b":2}')
cannot_write("xgrammar", schema, '{"a":1,"b":2}')
lets_through("outlines", schema, '{"a":1}')
cannot_write("outlines", schema, '{"a":1,"b":2}')
allows("llguidance", schema, '{"a":1,"b":2}')
done()
PY
