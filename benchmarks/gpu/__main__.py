"""What a GPU makes of the engine: exactness first, then times, in one command that ends within ten minutes on an H200.

    python -m benchmarks.gpu --out gpu

writes gpu.jsonl, a figure a line, and gpu.md. Models have random weights, made on the device, so that no download is needed: one
of 7 B shape and one of SmolLM2-135M's. Contenders take turns; ratios are to the first of the same turn, with quartiles. After
`--minutes` nothing more is timed. The exit status is 1 if a kernel or a text is wrong.

It needs torch, triton, transformers, numpy, jaxtyping and safetensors; texts need the wheels of msgspec and llguidance beside,
and without them are left out, by name. `--device cpu --tiny` runs all of it in a minute, passes over tables by the reference; the
kernel is compared only where TRITON_INTERPRET=1 lets it be interpreted.

`python -m benchmarks.gpu session --minutes 12` does the whole list of a GPU that is lent for minutes (session.py).
"""

import argparse
import importlib
import os
import platform
import sys
from pathlib import Path

import torch

from benchmarks.gpu import kernel, passes, session
from benchmarks.gpu.figures import Figures
from benchmarks.gpu.models import SEVEN_B, SMALL, TINY
from benchmarks.gpu.summary import summary


def main() -> None:
    """Measure, and write what was found."""
    if sys.argv[1:2] == ["session"]:
        session.main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--tiny", action="store_true", help="sizes for a processor")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="path of what is written, without its ending")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    figures = Figures(args.out.with_suffix(".jsonl"), args.minutes * 60)
    machine = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else platform.machine()
    figures.add("machine", name=machine, torch=torch.__version__, tiny=args.tiny)
    is_right = _check(figures, args.device, args.tiny)
    _time(figures, args.device, args.tiny, args.turns)
    figures.add("end", seconds=figures.seconds, is_right=is_right)
    figures.close()
    text = summary(figures, machine)
    args.out.with_suffix(".md").write_text(text)
    print(text)
    raise SystemExit(not is_right)


def _check(figures: Figures, device: torch.device, is_tiny: bool) -> bool:
    can_run = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    layers, contexts = (kernel.TINY_LAYERS, (0, 40)) if is_tiny else (kernel.LAYERS, (0, 700, 4000))
    is_exact = kernel.check(figures, layers, device, contexts) if can_run else True
    if not can_run:
        figures.add("kernel", left_out=f"{device} runs no kernel")
    return _check_texts(figures, device, is_tiny) and is_exact


def _check_texts(figures: Figures, device: torch.device, is_tiny: bool) -> bool:
    try:
        texts = importlib.import_module("benchmarks.gpu.texts")
    except ModuleNotFoundError as error:
        figures.add("texts", left_out=f"{error.name} is not installed")
        return True
    cases = [(TINY, torch.float32)] if is_tiny else [(SMALL, torch.float32), (SMALL, torch.bfloat16), (SEVEN_B, torch.bfloat16)]
    are_right = [texts.check(figures, shape, dtype, device, 16 if is_tiny else 64) for shape, dtype in cases]
    return all(are_right)


def _time(figures: Figures, device: torch.device, is_tiny: bool, turns: int) -> None:
    if is_tiny:
        kernel.time_layers(figures, kernel.TINY_LAYERS[0], device, [(2, 3, 40)], turns)
        passes.time_passes(figures, TINY, device, [(1, 20), (2, 40)], [1, 4], turns)
        return
    kernel.time_layers(figures, kernel.LAYERS[0], device, _LAYER_SIZES, turns)
    for shape in (SMALL, SEVEN_B):
        passes.time_passes(figures, shape, device, _ROWS_AND_CONTEXTS, (1, 2, 4, 8, 16, 32, 64), turns)


_ROWS_AND_CONTEXTS = ((1, 512), (1, 4096), (8, 512), (8, 4096), (32, 512))
_LAYER_SIZES = tuple((rows, nodes, context) for rows in (1, 8, 32) for nodes in (1, 16) for context in (512, 4096))


if __name__ == "__main__":
    main()
