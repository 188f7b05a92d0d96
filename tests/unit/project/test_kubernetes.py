"""The manifests of deploy/kubernetes agree with each other, the image, the settings and the metrics. No cluster is needed."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.app import create_app
from server.http.auth import OPEN_PATHS
from server.settings import Settings, SettingsError, load_settings
from tests.dashboards import exported_metrics
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import byte_level

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
LISTS = sorted(FOLDER.rglob("kustomization.yaml"))
# What the endpoint pickers of llm-d and of the Gateway API's inference extension scrape of vLLM's pods.
PICKED = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
)


def manifests() -> dict[str, Any]:
    """Return the resources by kind, of which there is one each."""
    files = [path for path in FOLDER.rglob("*.yaml") if path not in LISTS]
    found = {document["kind"]: document for path in files for document in yaml.safe_load_all(path.read_text())}
    assert len(found) == len(files)
    return found


def pod() -> dict[str, Any]:
    return manifests()["Deployment"]["spec"]["template"]  # type: ignore[no-any-return]


def container() -> dict[str, Any]:
    (one,) = pod()["spec"]["containers"]
    return one  # type: ignore[no-any-return]


def environment() -> dict[str, str]:
    """Return the variables as a container has them: an address and a number of processors are the cluster's."""
    values: dict[str, str] = {}
    for variable in container()["env"]:
        filled = {"fieldRef": "10.0.0.7", "resourceFieldRef": "4"}.get(next(iter(variable.get("valueFrom", [""]))), "")
        text = variable.get("value", filled)
        values[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], text)
    return values


def test_every_manifest_is_applied():
    for path in LISTS:
        listed = {str((path.parent / name).resolve()) for name in yaml.safe_load(path.read_text())["resources"]}
        beside = {*path.parent.glob("*.yaml")} - {path} | {one.parent for one in LISTS if one.parent.parent == path.parent}
        assert listed == {*map(str, beside)}


def test_selectors_choose_the_replicas():
    found, labels = manifests(), pod()["metadata"]["labels"].items()
    for selector in (
        found["Deployment"]["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        found["PodMonitor"]["spec"]["selector"]["matchLabels"],
        found["InferencePool"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector
        assert selector.items() <= labels
    target = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert [found[target["kind"]]["metadata"]["name"], found[target["kind"]]["apiVersion"]] == [
        target["name"],
        target["apiVersion"],
    ]
    (backend,) = found["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    pool = found[backend["kind"]]
    assert (pool["metadata"]["name"], pool["apiVersion"]) == (backend["name"], f"{backend['group']}/v1")


def test_endpoint_pickers_read_vllms_metrics():
    labels = pod()["metadata"]["labels"]
    assert {labels[f"{group}/engine-type"] for group in ("llm-d.ai", "inference.networking.k8s.io")} == {"vllm"}


@pytest.mark.parametrize("name", PICKED)
def test_each_picked_metric_is_exported(name: str):
    assert name in exported_metrics()


def test_autoscaler_reads_an_exported_metric():
    for metric in manifests()["HorizontalPodAutoscaler"]["spec"]["metrics"]:
        assert metric["pods"]["metric"]["name"] in exported_metrics()


def test_ports_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch):
    """Each variable is a setting with a valid value, and every port that is named is listened on."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.kv_events is not None
    assert settings.kv_events_replay is not None
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {
        "http": settings.port,
        "kv-events": int(settings.kv_events.rpartition(":")[2]),
        "kv-replay": int(settings.kv_events_replay.rpartition(":")[2]),
    }
    assert settings.kv_events_topic == f"kv@10.0.0.7:{settings.port}@{settings.served_name}"
    assert pod()["metadata"]["labels"]["llm-d.ai/model"] == settings.served_name
    found = manifests()
    assert [one["number"] for one in found["InferencePool"]["spec"]["targetPorts"]] == [settings.port]
    assert {one["port"] for one in found["PodMonitor"]["spec"]["podMetricsEndpoints"]} <= ports.keys()
    assert {one["targetPort"] for one in found["Service"]["spec"]["ports"]} <= ports.keys()


def test_probes_and_scrapes_request_existing_paths():
    app = create_app(Settings(), engine=FakeEngine(), tokenizer=byte_level())
    probes = {name: container()[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/live", "liveness": "/live", "readiness": "/ready"}
    assert "/live" in OPEN_PATHS
    scraped = {one["path"] for one in manifests()["PodMonitor"]["spec"]["podMetricsEndpoints"]}
    assert {*probes.values(), *scraped} <= app.openapi()["paths"].keys()


def test_pods_leave_endpoints_before_they_drain():
    """SIGTERM closes the port at once, so a pod that got it first would refuse requests that are still sent to it."""
    wait_s = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert wait_s > 0
    assert pod()["spec"]["terminationGracePeriodSeconds"] >= wait_s + Settings.model_fields["drain_s"].default + 10


def test_pods_have_no_more_rights_than_containers():
    dockerfile = (ROOT / "Dockerfile").read_text()
    number = re.search(r"^USER (\d+)$", dockerfile, re.MULTILINE)
    cache = re.search(r"LATEBRANCH_CACHE=(\S+)", dockerfile)
    assert number is not None
    assert cache is not None
    spec, own = pod()["spec"], container()["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == int(number[1])
    assert (own["readOnlyRootFilesystem"], own["allowPrivilegeEscalation"]) == (True, False)
    assert own["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container()["volumeMounts"]}
    assert mounts.keys() == {cache[1], "/tmp"}
    assert {volume["name"] for volume in spec["volumes"]} == {*mounts.values()}
    claims = [one["persistentVolumeClaim"]["claimName"] for one in spec["volumes"] if "persistentVolumeClaim" in one]
    assert claims == [manifests()["PersistentVolumeClaim"]["metadata"]["name"]]


def test_service_variables_are_no_settings(monkeypatch: pytest.MonkeyPatch):
    """The bug: for a Service of this name Kubernetes sets LATEBRANCH_PORT to tcp://..., and no pod would start."""
    name = manifests()["Service"]["metadata"]["name"].upper()
    monkeypatch.setenv(f"{name}_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(SettingsError):
        load_settings()
    assert pod()["spec"]["enableServiceLinks"] is False


def test_image_is_of_this_version():
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert container()["image"] == f"latebranch:{number}"
    (image,) = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["images"]
    assert (image["name"], image["newTag"]) == ("latebranch", number)
