"""The wheel alone serves: built from the source distribution, installed in a fresh environment, run outside the checkout."""

import json
import os
import shutil
import subprocess
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from engine.native import library
from engine.weights.presets import load_presets
from tests.e2e.server import running_server

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.so", "*.egg-info", "build", "dist")
SHIPPED = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*") if path.is_file()}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@dataclass(frozen=True)
class Installed:
    """Both distributions, and an environment that has the wheel and sees third-party packages of this one."""

    sdist: Path
    wheel: Path
    folder: Path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(command, cwd=self.folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)

    def printed(self, program: str, *arguments: str) -> str:
        done = self.run(program, *arguments)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder, source, out = (tmp_path_factory.mktemp(name) for name in ("environment", "source", "out"))
    shutil.copytree(ROOT, source, ignore=NOT_COPIED, dirs_exist_ok=True)
    venv.create(folder, with_pip=True)
    here = Installed(out, out, folder)
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    here.printed("python", *pip, "install", *PROJECT["build-system"]["requires"])
    build = f"import os; os.chdir({str(source)!r}); from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    here.printed("python", "-c", build)
    (sdist,) = out.glob("*.tar.gz")
    here.printed("python", *pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(sdist))
    (wheel,) = out.glob("*.whl")
    here.printed("python", *pip, "install", "--no-deps", str(wheel))
    shutil.rmtree(source)
    # A line of a path file adds a folder, not the path files in it: the checkout, installed there to be edited, is not seen.
    purelib = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(purelib, "third_party.pth").write_text(sysconfig.get_path("purelib"))
    return Installed(sdist, wheel, folder)


def test_wheel_has_serving_files_only(installed: Installed) -> None:
    """The bug: `configs/` was missing, and the first command failed."""
    with zipfile.ZipFile(installed.wheel) as archive:
        names = set(archive.namelist())
    info = f"latebranch-{PROJECT['project']['version']}.dist-info"
    assert names >= SHIPPED | {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"}
    assert {name.partition("/")[0] for name in names} == {"configs", "engine", "selector", "server", info}
    kernels = {name for name in names if name.endswith(sysconfig.get_config_var("EXT_SUFFIX"))}
    assert len(kernels) == len(library.MODULES) or library.instruction_set() is None
    assert {path.name for path in (ROOT / "server" / "playground").iterdir()} <= {Path(name).name for name in names}


def test_source_distribution_has_the_wheel_inputs(installed: Installed) -> None:
    with tarfile.open(installed.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= SHIPPED | {
        "LICENSE",
        "NOTICE",
        "pyproject.toml",
        "engine/native/cpp/decoder.cpp",
        "engine/native/cpp/vectors.h",
    }


def test_commands_of_the_wheel_run_anywhere(installed: Installed) -> None:
    where = "import configs, engine, selector, server; print(*(m.__path__[0] for m in (configs, engine, selector, server)))"
    assert all(Path(path).is_relative_to(installed.folder) for path in installed.printed("python", "-c", where).split())
    assert installed.printed("latebranch", "--version") == f"latebranch {PROJECT['project']['version']}\n"
    kernels = installed.printed("python", "-c", "from engine.native import library; print(library.instruction_set())")
    assert kernels.strip() == str(library.instruction_set())
    listed = installed.printed("latebranch", "weights", "list")
    assert all(name in listed for name in load_presets())
    assert installed.printed("latebranch", "weights", "fetch", "smollm2-135m").startswith("smollm2-135m: ")


@pytest.mark.parametrize(
    ("name", "file"), [("default", "smollm2-135m-head"), ("qwen-coder-head", ""), ("smollm2-early-exit", "smollm2-135m-lens")]
)
def test_shipped_settings_are_found(installed: Installed, name: str, file: str) -> None:
    """`--config configs/NAME.yaml` and the files that it names, from a working folder without `configs/`."""
    report = json.loads(installed.run("latebranch", "doctor", "--json", "--config", f"configs/{name}.yaml").stdout)
    assert report["can_serve"], report["findings"]
    drafter = " ".join(finding["text"] for finding in report["findings"] if finding["part"] == "drafter")
    assert f"{file}.safetensors" in drafter or not file


def test_wheel_serves_with_the_shipped_head(installed: Installed, tmp_path: Path) -> None:
    body = {"model": "smollm2-135m", "prompt": "One, two, three, four,", "max_tokens": 24, "temperature": 0}
    program = installed.folder / "bin" / "latebranch"
    log = tmp_path / "log"
    with running_server(log, program=program, environment=ENVIRONMENT) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
        assert "five" in answer["choices"][0]["text"]
        assert server.get("/version").json()["version"] == PROJECT["project"]["version"]
        assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
        assert 'drafter="head' in server.get("/metrics").text
