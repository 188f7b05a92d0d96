"""The kernels compile for an H100 without one: no test here runs them there, but a program that cannot be built is seen."""

import json
import os
import subprocess
import sys

from tests.model.paged import needs_triton

pytestmark = needs_triton
MOST_SHARED_BYTES = 227 * 1024  # of a block, compute capability 9.0

PROGRAM = """
import json, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.attention.paged import kernels, launch

POINTER = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}

def shared_bytes(function, types, constants, warps, stages):
    signature = {name: "constexpr" if name in constants else types[name] for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=places)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared

def attend(dtype, shared, heads, size, tile_len, is_split):
    rows = max(16, triton.next_power_of_2(tile_len * shared))
    block = max(16, triton.next_power_of_2(size))
    blocks = launch.Blocks.of(dtype, rows, block)
    given, made = POINTER[dtype], "*fp32" if is_split else POINTER[dtype]
    types = {name: "i32" for name in kernels.attend.arg_names}
    types |= {"query": given, "keys": given, "values": given, "table": "*i32", "out": made, "logs": made}
    types |= {"scale": "fp32", "softcap": "fp32", "sinks": given}
    constants = {"G": shared, "NUM_HEADS": heads, "K": size, "V": size, "TILE_LEN": tile_len, "IS_SPLIT": is_split}
    constants |= {"BLOCK_M": rows, "BLOCK_N": blocks.num_columns, "BLOCK_K": block, "BLOCK_V": block}
    constants |= {"HAS_SOFTCAP": is_split, "HAS_WINDOW": is_split, "HAS_SINKS": is_split}
    return shared_bytes(kernels.attend, types, constants, blocks.num_warps, blocks.num_stages)

def merge():
    types = {"parts": "*fp32", "logs": "*fp32", "out": "*bf16", "num_rows": "i32", "num_parts": "i32"}
    return shared_bytes(kernels.merge, types, {"V": 128, "BLOCK_P": 32, "BLOCK_V": 128}, 4, 1)

print(json.dumps([merge(), *(attend(*case) for case in (
    (torch.bfloat16, 7, 4, 128, 8, False),
    (torch.bfloat16, 8, 8, 128, 16, True),
    (torch.bfloat16, 4, 1, 256, 8, True),
    (torch.float32, 3, 3, 64, 8, True),
    (torch.float32, 7, 4, 128, 8, False),
    (torch.float32, 4, 1, 256, 16, False),
))]))
"""


def test_the_kernels_compile_for_compute_capability_9(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(json.loads(done.stdout)) <= MOST_SHARED_BYTES
