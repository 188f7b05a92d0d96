"""Tests. Where there is no GPU Triton's kernels are interpreted, which it decides when it is first imported: before all else."""

import os
from importlib.util import find_spec

import torch

if missing := [name for name in ("httpx", "hypothesis", "openai", "pytest") if find_spec(name) is None]:
    raise SystemExit(f"tests need the extra dev, pip install -e '.[dev]': {', '.join(missing)} cannot be imported")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
