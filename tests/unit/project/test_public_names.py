"""Names that users depend on stay: metrics, settings, routes and files, listed in public_names.yaml."""

from pathlib import Path

import yaml

from server.settings import Settings
from tests.api.harness import make_app
from tests.dashboards import ROOT, exported_metrics
from tests.fake_engine import FakeEngine

NAMES = yaml.safe_load(Path(__file__).with_name("public_names.yaml").read_text())


def test_metrics_keep_their_names():
    assert set(NAMES["metrics"]) <= exported_metrics()


def test_settings_keep_their_names():
    assert set(NAMES["settings"]) <= Settings.model_fields.keys()


def test_routes_keep_their_paths():
    paths = make_app(FakeEngine()).openapi()["paths"]
    assert set(NAMES["routes"]) <= {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}


def test_files_keep_their_places():
    assert [name for name in NAMES["files"] if not (ROOT / name).is_file()] == []
