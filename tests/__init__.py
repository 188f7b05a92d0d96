"""Tests. Where there is no GPU Triton's kernels are interpreted, which it decides when it is first imported: before all else."""

import os
import sys
from importlib.util import find_spec

import torch

# The tests of a GPU run without conftest.py on a machine that has torch and pytest alone (benchmarks/gpu/session.py).
_NEEDED = () if "--noconftest" in sys.argv else ("httpx", "hypothesis", "openai", "pytest")
if missing := [name for name in _NEEDED if find_spec(name) is None]:
    raise SystemExit(f"tests need the extra dev, pip install -e '.[dev]': {', '.join(missing)} cannot be imported")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
