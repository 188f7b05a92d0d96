#!/usr/bin/env bash
# A required name that is not among the properties: ignored by xgrammar 0.2.8 and outlines-core 0.2.14; no complete text in
# lm-format-enforcer 0.11.3.
#
# Guess: the name is written with any value, as JSON Schema says, or the schema is refused.
# Seen: xgrammar and outlines-core allow the object without it, and forbid the object with it. lm-format-enforcer waits for it, but
# allows no other name than the declared ones: after the last of them only white space may follow, so no text is ever whole.
# All three are silent.
# Harm: a typing error in `required`, or a schema whose fields are declared in another branch, gives answers without the field, or
# answers that are cut off by max_tokens.
# llguidance writes the name.
source "$(dirname "$0")/engines.sh"
engines llguidance xgrammar outlines lmfe

python - <<'PY'
from engines import allows, cannot_write, check, compiled, done, forbids, lets_through, show

schema = show({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a", "b"]})
for engine in "xgrammar", "outlines":
    lets_through(engine, schema, '{"a":true}')
    cannot_write(engine, schema, '{"a":true,"b":2}')

cannot_write("lmfe", schema, '{"a":true,"b":2}')
forbids("lmfe", schema, '{"a":true}', "{}")
after = compiled("lmfe", schema).next_characters('{"a":true')
check("lm-format-enforcer: after the value only white space may follow", after == set(" \t\n\r"), after)

allows("llguidance", schema, '{"a":true,"b":2}')
forbids("llguidance", schema, '{"a":true}')
done()
PY
