#!/usr/bin/env bash
# A pattern without both anchors is taken as the whole string by xgrammar 0.2.8, outlines-core 0.2.14 and lm-format-enforcer 0.11.3.
#
# Guess: `"pattern": "^INV-"` allows what JSON Schema says, any string that contains a match: here any that begins with INV-.
# Seen: in xgrammar and lm-format-enforcer "INV-" is then the only string that the text can have. In outlines-core "[0-9]+" means digits
# alone too, and an anchor on one side is an error of the index, not of the schema. xgrammar reads `patternProperties` in the same way:
# "^x-" allows one name, `x-`, and `additionalProperties: false` forbids the others, so a map of headers is empty or has that name.
# Harm: every invoice has the number "INV-". The answer is valid, so no check finds it.
# llguidance searches, as JSON Schema says.
source "$(dirname "$0")/engines.sh"
engines llguidance xgrammar outlines lmfe

python - <<'PY'
from engines import allows, cannot_write, compiled, done, check, forbids, refuses, show


def field(pattern: str) -> dict:
    return {"type": "object", "properties": {"v": {"type": "string", "pattern": pattern}}, "required": ["v"]}


schema = show(field("^INV-"))
for engine in "xgrammar", "lmfe":
    allows(engine, schema, '{"v":"INV-"}')
    cannot_write(engine, schema, '{"v":"INV-2024-17"}')
    after = compiled(engine, schema).next_characters('{"v":"INV-')
    check(f"{engine}: after INV- only the closing quote may follow", after == {'"'}, after)
refuses("outlines", schema, "The vocabulary provided is incompatible with the regex")
allows("llguidance", schema, '{"v":"INV-2024-17"}')
forbids("llguidance", schema, '{"v":"INVOICE"}')

schema = show(field("[0-9]+"))
for engine in "xgrammar", "outlines", "lmfe":
    allows(engine, schema, '{"v":"12"}')
    cannot_write(engine, schema, '{"v":"room 12"}')
allows("llguidance", schema, '{"v":"room 12"}')

schema = show({"type": "object", "patternProperties": {"^x-": {"type": "string"}}, "additionalProperties": False})
allows("xgrammar", schema, "{}", '{"x-":"a"}')
cannot_write("xgrammar", schema, '{"x-trace":"a"}')
allows("llguidance", schema, '{"x-trace":"a"}')
done()
PY
