"""What the kernels compile to for an H100, without one: registers, spills and shared memory, by the assembler of triton.

    python -m benchmarks.gpu.compiled [--match TEXT]

prints a table of the kernels whose names have the text. Sizes are those of Llama 3.2 1B and Qwen3 8B.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.markdown import table
from engine.attention.paged import completion_kernel
from engine.attention.paged import kernels as attention
from engine.attention.paged import launch as attention_launch
from engine.model.fused import kernels
from engine.model.fused.launch import ProductBlocks
from engine.sampling import choice_kernels

_TARGET, _GPU = GPUTarget("cuda", 90, 32), "sm_90a"
_FP8 = "*fp8e4nv"
_POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float8_e4m3fn: _FP8}


@dataclass(frozen=True)
class Case:
    """A kernel with its types and constants."""

    name: str
    function: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Figures:
    """What the assembler reports of a kernel."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


def cases() -> Iterator[Case]:
    """Yield the kernels of a step at 1, 32 and 128 tokens, of both sizes."""
    for name, width, inner, heads, num_key, size, has_norms in (
        ("1B", 2048, 8192, 32, 8, 64, False),
        ("8B", 4096, 12288, 32, 8, 128, True),
    ):
        for num_tokens in (1, 32, 128):
            for weights in (torch.bfloat16, torch.float8_e4m3fn) if num_tokens == 1 else (torch.bfloat16,):
                for function, num_rows, constants in (
                    (
                        kernels.rotated,
                        size // 2,
                        {"NUM_QUERY": heads, "NUM_KEY": num_key, "K": size, "HAS_BIAS": False, "HAS_HEAD_NORMS": has_norms},
                    ),
                    (kernels.gated, 32, {"INNER": inner}),
                    (kernels.product, 16, {"HAS_NORM": False, "IS_ADDED": True}),
                    (kernels.product, 64, {"HAS_NORM": True, "IS_ADDED": False}),
                ):
                    yield _fused(name, function, num_tokens, num_rows, constants | {"WIDTH": width}, weights)
    for tokens, shared, heads, size in ((1, 4, 8, 64), (1, 4, 8, 128), (128, 4, 8, 128)):
        yield _attend(tokens, shared, heads, size)
    places = {"logits": "*fp32", "inverse_temperatures": "*fp64", "keys": "*i64", "partial": "*fp64", "out": "*fp64"}
    for function, constants in (
        (choice_kernels.choose, {"BLOCK": choice_kernels.BLOCK}),
        (choice_kernels.merge, {"BLOCK_P": choice_kernels.MOST_PARTS}),
    ):
        types = {name: places.get(name, "i32") for name in function.arg_names}
        yield Case(function.__name__, function, types, constants, 4, 1)
    for num_nodes in (16, 128):
        function = completion_kernel.complete_trees
        numbers = dict.fromkeys(("tokens", "parents", "depths", "keys", "rooms"), "*i64")
        types = {name: numbers.get(name, "i32") for name in function.arg_names} | {"table": "*i32"}
        yield Case(f"complete trees of {num_nodes} nodes", function, types, {"NODES": num_nodes}, 4, 1)


def _fused(name: str, function: Any, num_tokens: int, num_rows: int, constants: dict[str, Any], weights: torch.dtype) -> Case:
    blocks = ProductBlocks.of(num_tokens, torch.bfloat16, num_rows)
    if function is kernels.rotated:
        blocks = blocks._replace(num_rows=num_rows)
    constants |= {name: value for name, value in blocks.constants.items() if name.startswith("BLOCK")}
    constants["HAS_SCALES"] = weights == torch.float8_e4m3fn
    pointers = {"states", "query", "keys", "values", "bias"}
    is_logits = constants.get("IS_ADDED") is False
    types = dict.fromkeys(function.arg_names, "i32")
    types |= dict.fromkeys(pointers, "*bf16") | dict.fromkeys(("norm", "scales", "head_norms", "frequencies"), "*fp32")
    types |= {"weight": _POINTERS[weights], "table": "*i32", "out": "*fp32" if is_logits else "*bf16"}
    types |= {"eps": "fp32", "rotary_scale": "fp32"}
    kind = "logits" if is_logits else function.__name__
    bits = " fp8" if constants["HAS_SCALES"] else ""
    return Case(f"{kind} {name}{bits}, {num_tokens} tokens", function, types, constants, blocks.num_warps, blocks.num_stages)


def _attend(num_tokens: int, shared: int, heads: int, size: int) -> Case:
    tile_len = 1 if num_tokens == 1 else 16
    rows, is_split = max(16, triton.next_power_of_2(tile_len * shared)), num_tokens == 1
    blocks, block = attention_launch.Blocks.of(torch.bfloat16, rows, size), max(16, triton.next_power_of_2(size))
    made = "*fp32" if is_split else "*bf16"
    types = dict.fromkeys(attention.attend.arg_names, "i32")
    types |= {"query": "*bf16", "keys": "*bf16", "values": "*bf16", "table": "*i32", "out": made, "logs": made}
    types |= {"scale": "fp32", "softcap": "fp32", "sinks": "*bf16"}
    constants = {"G": shared, "NUM_HEADS": heads, "K": size, "V": size, "TILE_LEN": tile_len, "IS_SPLIT": is_split}
    constants |= {"BLOCK_M": rows, "BLOCK_N": blocks.num_columns, "BLOCK_K": block, "BLOCK_V": block}
    constants |= {"HAS_SOFTCAP": False, "HAS_WINDOW": False, "HAS_SINKS": False}
    name = f"attend, heads of {size}, {num_tokens} tokens"
    return Case(name, attention.attend, types, constants, blocks.num_warps, blocks.num_stages)


def compiled(case: Case) -> Figures:
    """Compile a kernel and assemble it again, for the assembler's report."""
    function, constants = case.function, case.constants
    signature = {name: "constexpr" if name in constants else case.types[name] for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(function.arg_names) if signature[name][0] == "*"}
    source = ASTSource(fn=function, signature=signature, constexprs=places, attrs=aligned)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    kernel = triton.compile(source, target=_TARGET, options=options)
    return Figures(*_assembled(kernel.asm["ptx"]), kernel.metadata.shared)


def _assembled(code: str) -> tuple[int, int]:
    """Return registers of a thread and bytes that it spills."""
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(code)
        command = [str(assembler), "-v", f"--gpu-name={_GPU}", str(path), "-o", str(path.with_suffix(".cubin"))]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    if registers is None or spilled is None:
        raise ValueError(f"the assembler reports no registers: {report}")
    return int(registers[1]), int(spilled[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="part of the names of kernels")
    match, rows = parser.parse_args().match, []
    for case in (case for case in cases() if match in case.name):
        found = compiled(case)
        rows.append([case.name, *map(str, (case.num_warps, found.registers, found.spilled_bytes, found.shared_bytes))])
    print(f"triton {triton.__version__}, {_GPU}\n")
    print(table(["kernel", "warps", "registers", "spilled bytes", "shared bytes"], rows))


if __name__ == "__main__":
    main()
