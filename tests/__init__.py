"""Tests. Where there is no GPU Triton's kernels are interpreted, which it decides when it is first imported: before all else."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
