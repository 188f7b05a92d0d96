"""The manifests of deploy/ against the published schemas of Kubernetes, and the compose file of replicas against its own."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT_IN = ("base/*.yaml", "monitoring/autoscaler.yaml")  # the other kinds have definitions of their own


def program(name: str) -> Path:
    """Return a program of the environment CLUSTER_VENV. Skip the test without it."""
    path = Path(os.environ.get("CLUSTER_VENV", "")) / "bin" / name
    if not path.is_absolute() or not path.exists():
        pytest.skip(f"CLUSTER_VENV names no environment with {name} (make cluster-test)")
    return path


def files() -> list[Path]:
    found = [path for pattern in BUILT_IN for path in (ROOT / "deploy" / "kubernetes").glob(pattern)]
    return [path for path in found if path.name != "kustomization.yaml"]


def validated(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [str(program("kubernetes-validate")), "--strict", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_manifests_follow_kubernetes_schemas(tmp_path: Path) -> None:
    result = validated(*files())
    assert (result.returncode, result.stdout.count(" passed ")) == (0, 5), result.stdout + result.stderr
    wrong = tmp_path / "deployment.yaml"
    text = next(path for path in files() if path.name == "deployment.yaml").read_text()
    for field in ("readOnlyRootFilesystem", "terminationGracePeriodSeconds", "failureThreshold"):
        wrong.write_text(text.replace(field, f"{field}s"))
        assert validated(wrong).returncode, field


def test_compose_file_follows_its_schema(tmp_path: Path) -> None:
    check = "import sys, compose_spec; compose_spec.PyCompose.from_yaml(open(sys.argv[1]).read()).validate()"
    file, wrong = ROOT / "deploy" / "compose.replicas.yml", tmp_path / "wrong.yml"
    wrong.write_text(file.read_text().replace("healthcheck:", "healthchecks:"))
    ran = [subprocess.run([program("python"), "-c", check, path], capture_output=True, check=False) for path in (file, wrong)]
    assert [one.returncode for one in ran] == [0, 1], ran[0].stderr
    assert b"healthchecks" in ran[1].stderr
