"""The fused kernels compile for an H100 without one: registers and spills are what the assembler reports."""

import os
import subprocess
import sys

import pytest

from tests.model.paged import needs_triton

pytestmark = needs_triton
MOST_SHARED_BYTES, MOST_SPILLED_BYTES = 227 * 1024, 64


@pytest.mark.parametrize("match", ["8B fp8, 1 tokens", "8B, 128 tokens", "choose", "merge", "complete"])
def test_kernels_compile_without_spills(match, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.gpu.compiled", "--match", match]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if match in line]
    assert len(rows) in (1, 2, 4)
    for _, _, registers, spilled, shared in rows:
        assert int(registers) <= 255
        assert int(spilled) <= MOST_SPILLED_BYTES
        assert int(shared) <= MOST_SHARED_BYTES
