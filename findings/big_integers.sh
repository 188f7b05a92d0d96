#!/usr/bin/env bash
# llguidance 1.9.1 rounds integers of a schema to doubles: the text is held to another number than the one that was asked for.
#
# Guess: `const`, `enum` and bounds of an integer are exact, since they are written as text into a grammar. At worst a number beyond
# 2^53 is refused, as llguidance refuses whatever else it cannot keep.
# Seen: the const 9007199254740993 (2^53 + 1) allows only 9007199254740992, and 1234567890123456789 only 1234567890123456768.
# `minimum` and `maximum` round too. A `maximum` of 2^64 - 1 ends at 2^63 - 1. Nothing is printed and nothing is raised.
# Harm: such numbers are identifiers (of posts, of orders, of rows), and a list of allowed ones is a usual enum. The model cannot write
# the right one and must write another, which may exist too.
# xgrammar and outlines-core keep the digits of const and enum. lm-format-enforcer has no numbers in const: it logs an exception and ends
# the text before its first character.
source "$(dirname "$0")/engines.sh"
engines llguidance xgrammar outlines lmfe

python - <<'PY'
from engines import allows, cannot_write, done, forbids, lets_through, refuses, show

schema = show({"const": 9007199254740993})
cannot_write("llguidance", schema, "9007199254740993")
lets_through("llguidance", schema, "9007199254740992")
for engine in "xgrammar", "outlines":
    allows(engine, schema, "9007199254740993")
    forbids(engine, schema, "9007199254740992")
lets_through("lmfe", schema, "", prints="Unknown LMFormatEnforcer Problem")

schema = show({"type": "object", "properties": {"id": {"enum": [1234567890123456789, 7]}}, "required": ["id"]})
cannot_write("llguidance", schema, '{"id":1234567890123456789}')
lets_through("llguidance", schema, '{"id":1234567890123456768}')
for engine in "xgrammar", "outlines", "lmfe":
    allows(engine, schema, '{"id":1234567890123456789}')

schema = show({"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740993})
cannot_write("llguidance", schema, "9007199254740993")
lets_through("llguidance", schema, "9007199254740992")
allows("xgrammar", schema, "9007199254740993")
forbids("xgrammar", schema, "9007199254740992")

for engine in "outlines", "lmfe":
    lets_through(engine, schema, "9007199254740992", "5")

schema = show({"type": "integer", "minimum": 0, "maximum": 18446744073709551615})
allows("llguidance", schema, "9223372036854775807")
cannot_write("llguidance", schema, "9223372036854775808", "18446744073709551615")
refuses("xgrammar", schema, "Integer exceeds maximum limit")
done()
PY
