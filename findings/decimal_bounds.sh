#!/usr/bin/env bash
# xgrammar 0.2.8: a number with a bound has at most six decimals, and so have the bounds. Nothing may be left to write.
#
# Guess: `minimum: 0, maximum: 1` allows every decimal number between them, 0.1234567 too.
# Seen: the seventh decimal is forbidden. A bound's seventh decimal is dropped: the bound 0.00000025 itself cannot be written. Between 0
# (exclusive) and 1e-7 no digit is left and the grammar is the empty text: an object comes as `{"v":}`, which is no JSON. Silent.
# Harm: probabilities and coordinates lose digits that the model would have written; small rates come as no JSON.
# llguidance keeps all digits. outlines-core and lm-format-enforcer, also silent, drop the bounds of any number or integer.
source "$(dirname "$0")/engines.sh"
engines llguidance xgrammar outlines lmfe

python - <<'PY'
from engines import allows, cannot_write, done, forbids, lets_through, show


def field(**keywords: float | str) -> dict:
    return {"type": "object", "properties": {"v": {"type": "number", **keywords}}, "required": ["v"]}


schema = show(field(minimum=0, maximum=1))
allows("xgrammar", schema, '{"v":0.123456}')
cannot_write("xgrammar", schema, '{"v":0.1234567}', '{"v":0.99999999}')
allows("xgrammar", show(field()), '{"v":0.1234567}')
allows("llguidance", schema, '{"v":0.1234567}', '{"v":0.99999999}')
for engine in "outlines", "lmfe":
    lets_through(engine, schema, '{"v":-5}', '{"v":7.5}')

schema = show(field(minimum=0.00000025, maximum=1))
cannot_write("xgrammar", schema, '{"v":0.00000025}')
allows("llguidance", schema, '{"v":0.00000025}')

schema = show(field(exclusiveMinimum=0, maximum=1e-7))
lets_through("xgrammar", schema, '{"v":}')
cannot_write("xgrammar", schema, '{"v":0.0000001}', '{"v":0.00000005}')
allows("llguidance", schema, '{"v":0.0000001}', '{"v":0.00000005}')
forbids("llguidance", schema, '{"v":}')
done()
PY
