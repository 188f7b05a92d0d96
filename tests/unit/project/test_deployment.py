"""Container, Prometheus and version files agree with each other and with the project; no Docker is needed to see it."""

import contextlib
import fnmatch
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from engine.native import library
from server.app import create_app
from server.cli.main import main
from server.settings import Settings, load_settings
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import byte_level

ROOT = Path(__file__).parents[3]


COMPOSE_FILES = (ROOT / "docker-compose.yml", ROOT / "deploy" / "compose.replicas.yml")


def _compose(path: Path = COMPOSE_FILES[0]):
    return yaml.safe_load(path.read_text())


def _pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {_canonical(name): version for name, _, version in (line.partition("==") for line in lines)}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _copied() -> list[str]:
    """What the Dockerfile takes from the project's folder."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    return [source for line in lines for source in line.split()]


def test_prometheus_scrapes_the_compose_server():
    job = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    service, _, port = job["static_configs"][0]["targets"][0].partition(":")
    assert service in _compose()["services"]
    assert port == str(Settings.model_fields["port"].default)
    assert job["metrics_path"] == "/metrics"


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_compose_mounts_exist_and_volumes_are_declared(path: Path):
    compose = _compose(path)
    for name, service in compose["services"].items():
        assert {"build", "image"} & service.keys(), name
        assert service["healthcheck"]["test"][0] == "CMD"
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"]


def test_compose_publishes_to_this_machine_only():
    """The server requires no key by default, so a port open to other machines must be an explicit decision."""
    for path in COMPOSE_FILES:
        ports = [port for service in _compose(path)["services"].values() for port in service.get("ports", ())]
        assert ports
        assert all(port.startswith("127.0.0.1:") for port in ports)


def test_compose_waits_longer_than_the_server_drains():
    grace_s = int(_compose()["services"]["server"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > Settings.model_fields["drain_s"].default


def test_gateway_presents_the_replicas_key():
    """smg reads loads with its own key and admits that key alone, so the replicas have it; each is a worker of the gateway."""
    services = _compose(COMPOSE_FILES[1])["services"]
    gateway = services.pop("gateway")
    key = next(flag for flag in gateway["command"] if flag.startswith("--api-key=")).partition("=")[2]
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for service in services.values():
        assert service["environment"]["LATEBRANCH_API_KEYS"] == key
        assert service["image"] == f"latebranch:{number}"
        assert int(service["stop_grace_period"].removesuffix("s")) > Settings.model_fields["drain_s"].default
        assert not service.get("ports")
    urls = gateway["command"][gateway["command"].index("--worker-urls") + 1 :]
    assert urls == [f"http://{name}:{Settings.model_fields['port'].default}" for name in services]
    assert len(urls) == 3
    assert gateway["depends_on"].keys() == services.keys()
    assert "smg==" + gateway["image"].partition(":")[2] in gateway["build"]["dockerfile_inline"]
    assert re.findall(r"smg==\S+", gateway["build"]["dockerfile_inline"]) == re.findall(
        r"smg==\S+", (ROOT / "tests" / "cluster" / "gateway.txt").read_text()
    )


def test_dockerignore_allows_every_copied_file():
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert {"engine", "server", "selector", "configs", "constraints.txt", "LICENSE", "NOTICE"} <= set(_copied())
    for source in _copied():
        assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), source


def test_image_has_library_but_no_compiler():
    _, build, image = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    assert build.index("g++") < build.index("pip install -c constraints.txt .")
    assert "g++" not in image
    assert "COPY --from=build /opt/latebranch /opt/latebranch" in image
    assert "**/*.so" in (ROOT / ".dockerignore").read_text().splitlines()


def test_version_is_one_number_everywhere(capsys: pytest.CaptureFixture[str]):
    """`pyproject.toml` has it: the installed package, the command, the API, the image and the change log give the same."""
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version("latebranch") == number
    for arguments in (["--version"], ["version"]):
        with contextlib.suppress(SystemExit):
            main(arguments)
        assert capsys.readouterr().out == f"latebranch {number}\n"
    assert create_app(Settings(), engine=FakeEngine(), tokenizer=byte_level()).version == number
    assert _compose()["services"]["server"]["image"] == f"latebranch:{number}"
    assert re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == number


def test_every_source_of_the_library_is_declared():
    """setuptools compiles it anew when one of them has changed."""
    extensions = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    assert {extension["name"] for extension in extensions} == {*library.MODULES.values()}
    for extension in extensions:
        folder = ROOT.joinpath(*extension["name"].split(".")[:-1], "cpp")
        sources = {str(path.relative_to(ROOT)) for pattern in ("*.cpp", "*.h") for path in folder.glob(pattern)}
        assert {*extension["sources"], *extension.get("depends", ())} == sources
        assert "-ffp-contract=off" in extension["extra-compile-args"]
        assert extension["optional"]


def test_image_drops_root_and_mounts_weights():
    dockerfile = (ROOT / "Dockerfile").read_text()
    cache = re.search(r"LATEBRANCH_CACHE=(\S+)", dockerfile)
    assert cache is not None
    assert f"VOLUME {cache[1]}\n" in dockerfile
    assert _compose()["services"]["server"]["volumes"] == [f"weights:{cache[1]}"]
    user = re.search(r"useradd --uid (\d+)", dockerfile)
    assert user is not None
    number = f"\nUSER {user[1]}\n"  # a number: Kubernetes cannot see that a name is not root
    assert dockerfile.index(number) < dockerfile.index("\nENTRYPOINT ")


def test_containers_can_gain_no_privileges():
    """The bug: Prometheus and Grafana kept the default capabilities, which neither needs."""
    for path in COMPOSE_FILES:
        for name, service in _compose(path)["services"].items():
            assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"]), name


def test_every_dependency_has_an_allowed_pin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    pins = _pins()
    for requirement in map(Requirement, wanted):
        assert Version(pins[_canonical(requirement.name)]) in requirement.specifier, requirement


FIXED = {  # the first release without a known advisory
    "accelerate": "1.15",  # CVE-2026-69112
    "h11": "0.16.0",  # CVE-2025-43859
    "jinja2": "3.1.6",  # CVE-2025-27516
    "playwright": "1.55.1",  # CVE-2025-59288
    "pydantic-settings": "2.14.2",  # GHSA-4xgf-cpjx-pc3j
    "pytest": "9.0.3",  # CVE-2025-71176
    "sentencepiece": "0.2.1",  # CVE-2026-1260
    "setuptools": "78.1.1",  # CVE-2025-47273
    "starlette": "1.3.1",  # CVE-2026-54283, CVE-2026-48818, CVE-2026-48710
    "torch": "2.12.1",  # CVE-2025-3000, CVE-2026-24747
    "tqdm": "4.66.3",  # CVE-2024-34062
    "transformers": "5.5.0",  # CVE-2026-5241, CVE-2026-4372
}


def test_lower_bounds_have_no_known_advisory():
    """The bug: an installation without constraints.txt could resolve to releases with known faults."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = content["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"] + content["build-system"]["requires"]
    bounded = {_canonical(requirement.name): requirement.specifier for requirement in map(Requirement, wanted)}
    assert bounded.keys() >= FIXED.keys()
    for name, first in FIXED.items():
        (bound,) = bounded[name]
        assert bound.operator == ">="
        assert Version(bound.version) >= Version(first), name


def test_pins_are_exact_without_local_builds():
    pins = _pins()
    assert pins["torch"] == "2.13.0"
    assert all(Version(version).local is None for version in pins.values())


def test_compose_has_no_default_keys():
    """The bug: the server of the compose file required no key, and Grafana's admin had the password `admin`."""
    services = _compose()["services"]
    for service, name in (("server", "LATEBRANCH_API_KEYS"), ("grafana", "GF_SECURITY_ADMIN_PASSWORD")):
        value = services[service]["environment"][name]
        assert re.fullmatch(r"(\$\{\w+:\?[^}]+\}|,prometheus:scrape:)+", value), "refused where the variable is unset or empty"
    job = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    (secret,) = services["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret['source']}"
    assert _compose()["secrets"][secret["source"]] == {"environment": "LATEBRANCH_SCRAPE_KEY"}


@pytest.mark.parametrize("wanted", ["", "api.test", "api.test,other.test"])
def test_more_hosts_leave_prometheus_its_own(wanted: str):
    """The bug: a host name in `.env` took the place of `server`, and every scrape was answered 400."""
    template = _compose()["services"]["server"]["environment"]["LATEBRANCH_ALLOWED_HOSTS"]
    hosts = load_settings(None, {"allowed_hosts": template.replace("${LATEBRANCH_ALLOWED_HOSTS:-}", wanted)}).allowed_hosts
    assert hosts == ("server", *filter(None, wanted.split(",")))
    job = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert job["static_configs"][0]["targets"][0].partition(":")[0] in hosts


def test_script_keys_match_the_compose_file(tmp_path: Path):
    (tmp_path / "deploy").mkdir()
    script = shutil.copy(ROOT / "deploy" / "keys.sh", tmp_path / "deploy")
    subprocess.run(["sh", script], check=True, capture_output=True)
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0
    values = dict(line.split("=") for line in (tmp_path / ".env").read_text().splitlines())
    template = _compose()["services"]["server"]["environment"]["LATEBRANCH_API_KEYS"]
    settings = load_settings(None, {"api_keys": re.sub(r"\$\{(\w+):\?[^}]+\}", lambda found: values[found[1]], template)})
    assert [(key.name, key.role) for key in settings.all_api_keys] == [
        ("user", "use"),
        ("admin", "admin"),
        ("prometheus", "scrape"),
    ]
    assert settings.warnings == ()
    assert set(re.findall(r"\$\{(\w+):\?", "".join(path.read_text() for path in COMPOSE_FILES))) == set(values)
    assert values["LATEBRANCH_ADMIN_KEY"] == settings.all_api_keys[1].secret
    assert subprocess.run(["sh", script], check=False, capture_output=True).returncode == 1, "keys are never replaced"
    assert "/.env" in (ROOT / ".gitignore").read_text().splitlines()
