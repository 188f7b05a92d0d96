#!/usr/bin/env bash
# llguidance 1.9.1 and xgrammar 0.2.8 let an escaped spelling of a name overwrite the property, and count a repeated name twice.
#
# Guess: where other properties are allowed, their names are kept apart from the declared ones: `"a"` cannot come again.
# Seen: `"a"` cannot, but `"\u0061"`, which is the same name to every JSON parser, can. It has the schema of additionalProperties, and
# the last one wins: a declared integer ends up as a string. Among the other properties a name may be repeated as it is, and each time
# counts for `minProperties`.
# Harm: the parsed object breaks the schema although the mask was followed; a map of "at least two" has one entry.
# outlines-core and lm-format-enforcer do not write other properties beside declared ones. In a plain map all four repeat names.
source "$(dirname "$0")/engines.sh"
engines llguidance xgrammar outlines lmfe

python - <<'PY'
import json

from engines import cannot_write, check, done, forbids, lets_through, show

schema = show(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": {"type": "string"}}
)
for engine in "llguidance", "xgrammar":
    forbids(engine, schema, '{"a":1,"a":"x"}')
    lets_through(engine, schema, r'{"a":1,"\u0061":"x"}')
for engine in "outlines", "lmfe":
    cannot_write(engine, schema, '{"a":1,"b":"x"}')
check("Python parses it as {'a': 'x'}", json.loads(r'{"a":1,"\u0061":"x"}') == {"a": "x"})

schema = show({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2})
for engine in "llguidance", "xgrammar", "outlines", "lmfe":
    lets_through(engine, schema, '{"a":1,"a":2}')
for engine in "llguidance", "xgrammar":
    forbids(engine, schema, '{"a":1}')
for engine in "outlines", "lmfe":
    lets_through(engine, schema, '{"a":1}')
forbids("outlines", schema, "{}")
lets_through("lmfe", schema, "{}")
done()
PY
