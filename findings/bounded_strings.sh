#!/usr/bin/env bash
# xgrammar 0.2.8: a string with minLength or maxLength cannot contain a quote, a backslash or a line break.
#
# Guess: `"maxLength": 4000` changes nothing for short strings.
# Seen: with either keyword (`minLength` above 0) no escape can be written: after a backslash nothing may follow, so the mask never
# offers one. At a quotation mark the string must end. A bare tab, which JSON forbids, is allowed instead.
# Harm: an answer of prose, code or a path loses its quotations and paragraphs as soon as its length is bounded, and stays valid.
# Reported to xgrammar as issue 800, open. llguidance, outlines-core and lm-format-enforcer write the escapes.
source "$(dirname "$0")/engines.sh"
engines llguidance xgrammar outlines lmfe

python - <<'PY'
from engines import allows, cannot_write, check, compiled, done, lets_through, show


def field(**keywords: int) -> dict:
    return {"type": "object", "properties": {"v": {"type": "string", **keywords}}, "required": ["v"]}


texts = r'{"v":"say \"yes\""}', r'{"v":"one\ntwo"}', r'{"v":"C:\\dir"}'
allows("xgrammar", show(field()), *texts)
for keywords in {"maxLength": 40}, {"minLength": 1}:
    schema = show(field(**keywords))
    cannot_write("xgrammar", schema, *texts)
    lets_through("xgrammar", schema, '{"v":"a\tb"}')
    check("xgrammar: a backslash may not begin", "\\" not in compiled("xgrammar", schema).next_characters('{"v":"say '))
    for engine in "llguidance", "outlines", "lmfe":
        allows(engine, schema, *texts)
done()
PY
