"""The device, and the mark of tests that run kernels on it."""

import pytest
import torch

from engine.attention.paged.attention import unsupported_reason

CUDA = torch.device("cuda")
NEEDS_KERNELS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or unsupported_reason(CUDA, 64, 1, torch.float32) is not None,
        reason="needs a CUDA device and triton",
    ),
]
