#!/usr/bin/env bash
# Simple schemas whose texts are no JSON: outlines-core 0.2.14 and lm-format-enforcer 0.11.3.
#
# Guess: whatever else an engine gets wrong, what it lets through can be parsed.
# Seen: outlines-core puts a pattern into the string as it is: for `^.+$` it allows a bare quote and a bare backslash, for `[^,]+` a
# bare line break. It puts the name of a property there unescaped too: `5" disk` can only be written as `"5" disk"`. lm-format-enforcer
# writes the booleans of an enum as Python does, `True`; it allows a bare tab in any string, and puts the line break of a `const` or an
# enum into the text as it is.
# Harm: json.loads fails on answers that were to be safe, and for the names and literals on every answer.
# llguidance escapes all of these. xgrammar does too, but for patterns it offers no escape.
source "$(dirname "$0")/engines.sh"
engines llguidance xgrammar outlines lmfe

python - <<'PY'
from engines import allows, cannot_write, done, forbids, lets_through, show


def field(schema: dict, name: str = "v") -> dict:
    return {"type": "object", "properties": {name: schema}, "required": [name]}


schema = show(field({"type": "string", "pattern": "^.+$"}))
texts = '{"v":"say "yes""}', r'{"v":"C:\dir"}'
lets_through("outlines", schema, *texts)
for engine in "llguidance", "xgrammar", "lmfe":
    forbids(engine, schema, *texts)
allows("llguidance", schema, r'{"v":"say \"yes\""}')
for engine in "xgrammar", "lmfe":
    cannot_write(engine, schema, r'{"v":"say \"yes\""}')

schema = show(field({"type": "string", "pattern": "^[^,]+$"}))
lets_through("outlines", schema, '{"v":"a\nb"}')
for engine in "llguidance", "xgrammar":
    forbids(engine, schema, '{"v":"a\nb"}')

cannot_write("xgrammar", schema, r'{"v":"a\nb"}')

schema = show(field({"type": "integer"}, '5" disk'))
lets_through("outlines", schema, '{"5" disk":3}')
cannot_write("outlines", schema, r'{"5\" disk":3}')
for engine in "llguidance", "xgrammar":
    allows(engine, schema, r'{"5\" disk":3}')

schema = show(field({"enum": [True]}))
lets_through("lmfe", schema, '{"v":True}')
cannot_write("lmfe", schema, '{"v":true}')
for engine in "llguidance", "xgrammar", "outlines":
    allows(engine, schema, '{"v":true}')

schema = show(field({"type": "string"}))
lets_through("lmfe", schema, '{"v":"a\tb"}')
for engine in "llguidance", "xgrammar", "outlines":
    forbids(engine, schema, '{"v":"a\tb"}')

schema = show(field({"enum": ["a\nb"]}))
lets_through("lmfe", schema, '{"v":"a\nb"}')
cannot_write("lmfe", schema, r'{"v":"a\nb"}')
for engine in "llguidance", "xgrammar", "outlines":
    allows(engine, schema, r'{"v":"a\nb"}')
done()
PY
