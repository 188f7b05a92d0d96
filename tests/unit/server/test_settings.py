"""Settings: where they come from, which wins, what is refused, and that all are documented."""

from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.tree import Expansion, parse_expansion
from server.preflight import require_startable
from server.settings import ENV_PREFIX, PUBLIC, Settings, SettingsError, load_settings

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return path


def test_settings_sources_have_fixed_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = _file(tmp_path, "port: 1\nmax_running: 1\nmax_waiting: 1\n")
    monkeypatch.setenv("LATEBRANCH_PORT", "2")
    monkeypatch.setenv("LATEBRANCH_MAX_RUNNING", "2")
    settings = load_settings(path, {"port": "3"})
    assert (settings.port, settings.max_running, settings.max_waiting, settings.max_step_tokens) == (3, 2, 1, 512)


def test_unknown_settings_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match="unknown setting: prot"):
        load_settings(_file(tmp_path, "prot: 1\n"))
    with pytest.raises(SettingsError, match="no such configuration file"):
        load_settings(tmp_path / "missing.yaml")
    monkeypatch.setenv("LATEBRANCH_CACHE", "/somewhere")
    load_settings()
    monkeypatch.setenv("LATEBRANCH_PROT", "1")
    with pytest.raises(SettingsError, match="LATEBRANCH_PROT"):
        load_settings()


WRONG = [
    "port: [",
    "- port",
    "port: x",
    "port: 70000",
    "verifier: magic",
    "expansion: 4.1",
    "expansion: 4.0.1",
    "max_choices: 1025",
    "max_waiting: 0",
]


@pytest.mark.parametrize("text", WRONG)
def test_invalid_settings_are_refused(tmp_path: Path, text: str):
    with pytest.raises(SettingsError):
        load_settings(_file(tmp_path, text + "\n"))


def test_lists_are_split_at_commas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = _file(tmp_path, "cors_origins: [https://a.test, https://b.test]\n")
    monkeypatch.setenv("LATEBRANCH_API_KEYS", "key-1, key-2")
    settings = load_settings(path)
    assert settings.cors_origins == ("https://a.test", "https://b.test")
    assert [key.get_secret_value() for key in settings.api_keys] == ["key-1", "key-2"]
    assert "key-1" not in repr(settings)


def test_a_drafter_may_be_a_folder(tmp_path: Path):
    """A word that is neither a drafter nor a folder is refused, with the most similar name."""
    for folder in (str(tmp_path), "./head", "~/drafter/"):
        config = load_settings(None, {"drafter": folder}).to_engine_config()
        assert (config.drafter, config.checkpoint) == ("checkpoint", str(Path(folder).expanduser()))
        assert (config.stand_in, config.head, config.cached_text) == (None, None, False)
    assert load_settings(None, {"drafter": str(tmp_path), "cached_text": True}).to_engine_config().cached_text
    with pytest.raises(SettingsError, match=r"'heads' is none of auto, .*, and no folder of a checkpoint; did you mean head\?"):
        load_settings(None, {"drafter": "heads"})
    with pytest.raises(SettingsError, match="head is given only with drafter head"):
        load_settings(None, {"drafter": str(tmp_path), "head": "x"})


CONTRADICTIONS: list[dict[str, object]] = [
    {"drafter": "model"},
    {"drafter": "none", "draft_model": "x"},
    {"lens": "x"},
    {"head": "x"},
    {"cached_text": True},
]


@pytest.mark.parametrize("values", CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, object]):
    with pytest.raises(SettingsError, match=r"draft_model|lens|head|cached_text"):
        load_settings(None, values)


def test_too_small_step_is_a_settings_error():
    """The bug: `serve` ended in the ValueError of the engine's configuration."""
    with pytest.raises(SettingsError, match=r"^max_step_tokens \(4\) must be at least max_running \(5\)$"):
        load_settings(None, {"max_running": "5", "max_step_tokens": "4"})
    load_settings(None, {"max_running": "5", "max_step_tokens": "5", "max_waiting": "1"}).to_engine_config()


def test_the_engine_gets_its_part():
    pair = {"model": "big", "drafter": "model", "draft_model": "small"}
    config = load_settings(None, {**pair, "expansion": "2.3.4", "max_running": "5"}).to_engine_config()
    assert (config.model, config.model_name, config.draft_model) == ("big", "big", "small")
    assert (config.expansion, config.scheduler.max_running) == (Expansion(2, 3, 4), 5)
    assert load_settings(None, {"model": "big", "model_name": "public"}).to_engine_config().model_name == "public"


def test_every_engine_field_is_a_setting():
    fields = {*EngineConfig.__dataclass_fields__, *SchedulerConfig.__dataclass_fields__} - {
        "scheduler",
        "stand_in",
        "checkpoint",  # by drafter
        "is_restart",
        "prefix_block_tokens",  # prefix_cache
        "has_cache_events",  # kv_events
    }
    assert fields <= set(Settings.model_fields)


def test_default_file_equals_built_in_defaults():
    assert load_settings(ROOT / "configs" / "default.yaml").model_dump() == load_settings().model_dump()


@pytest.mark.parametrize("name", ["default.yaml", "qwen-coder.yaml", "qwen-coder-head.yaml", "smollm2-early-exit.yaml"])
def test_the_files_to_start_from_load(name: str):
    load_settings(ROOT / "configs" / name).to_engine_config()


@pytest.mark.parametrize(
    ("expansion", "largest"),
    [("heap.16", "8.2.2"), ("4.1.0", "heap.32"), ("heap.16", "calibrated.32"), ("4.1.0", "greedy_sample.8")],
)
def test_the_largest_tree_is_of_the_family(expansion: str, largest: str):
    with pytest.raises(SettingsError, match=r"largest_expansion|not lossless"):
        load_settings(None, {"expansion": expansion, "largest_expansion": largest})
    config = load_settings(None, {"expansion": "heap.16", "largest_expansion": "heap.32.4"}).to_engine_config()
    assert config.largest_expansion == Expansion(0, 4, 4, "heap", 32)


def test_inexact_tree_for_verifier_is_refused():
    with pytest.raises(SettingsError, match="'specinfer' is not lossless on 'heap' trees"):
        load_settings(None, {"verifier": "specinfer", "expansion": "heap.16"})
    assert load_settings(None, {"verifier": "univer", "expansion": "greedy_sample.12.6"}).expansion == "greedy_sample.12.6.4"


@pytest.mark.parametrize("text", ["", "4", "4.1", "4.1.0.0", "a.b.c", "-1.1.0", "1.0.1", "4.1.٣"])
def test_invalid_shapes_are_refused(text: str):
    with pytest.raises(ValueError, match="expansion"):
        parse_expansion(text)


def documented_table() -> str:
    """Return the table that docs/configuration.md must have."""
    rows = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        assert field.default is not PydanticUndefined
        default = "unset" if field.default in (None, ()) else f"`{field.default}`"
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(rows)


def test_every_setting_is_documented():
    text = (ROOT / "docs" / "configuration.md").read_text()
    begin, end = text.index("<!-- settings: begin"), text.index("<!-- settings: end -->")
    assert text[text.index("\n", begin) : end].strip() == documented_table()


def test_shipped_head_is_the_default_drafter() -> None:
    config = load_settings().to_engine_config()
    assert config.drafter == "head"
    assert config.head is not None
    assert Path(config.head).name == "smollm2-135m-head.safetensors"
    assert config.cached_text
    without = load_settings(overrides={"model": "gemma3-270m"}).to_engine_config()
    assert (without.drafter, without.head, without.cached_text) == ("ngram", None, False)
    named = load_settings(overrides={"drafter": "ngram"}).to_engine_config()
    assert (named.drafter, named.head, named.cached_text) == ("ngram", None, False)
    plain = load_settings(overrides={"policy": "plain"}).to_engine_config()
    assert (plain.drafter, plain.head, plain.cached_text) == ("ngram", None, False)
    assert (config.stand_in, named.stand_in) == ("ngram", None), "only a default drafter may be replaced"


def test_named_network_replaces_counting() -> None:
    for verifier in ("coupled", "traversal"):
        assert load_settings(overrides={"verifier": verifier}).to_engine_config().selector is None
    assert load_settings(overrides={"selector": "own.safetensors"}).to_engine_config().selector == "own.safetensors"


@pytest.mark.parametrize("policy", ["adaptive", "fixed", "plain"])
def test_selector_auto_counts(policy: str) -> None:
    """The bug: `auto`, which files of settings may have, was taken for a file's name after the checks before loading."""
    settings = load_settings(overrides={"selector": "auto", "policy": policy, "port": 0})
    require_startable(settings)
    assert settings.to_engine_config().selector is None


def test_network_without_adaptive_policy_is_refused() -> None:
    with pytest.raises(SettingsError, match="only with policy adaptive"):
        load_settings(overrides={"selector": "own.safetensors", "policy": "fixed"})


def test_shipped_files_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The bug: `--config configs/NAME.yaml`, and files that it names, were found from the checkout's folder alone."""
    monkeypatch.chdir(tmp_path)
    config = load_settings(Path("configs/smollm2-early-exit.yaml")).to_engine_config()
    assert config.lens == str(ROOT / "configs/drafters/smollm2-135m-lens.safetensors")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "default.yaml").write_text("port: 9000\n")
    assert load_settings(Path("configs/default.yaml")).port == 9000  # the working folder comes first
    with pytest.raises(SettingsError, match=r"file: default\.yaml"):
        load_settings(Path("default.yaml"))
    with pytest.raises(SettingsError, match=r"file: configs/no-such\.yaml"):
        load_settings(Path("configs/no-such.yaml"))


def test_public_is_closed_and_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match="public needs api_keys"):
        load_settings(None, {"public": "true"})
    with pytest.raises(SettingsError, match="public refuses"):
        load_settings(None, {"public": "true", "api_keys": "k", "cors_origins": "https://a.test,*"})
    with pytest.raises(SettingsError, match="public"):
        load_settings(None, {"public": "perhaps"})
    monkeypatch.setenv("LATEBRANCH_API_KEYS", "a:use:0123456789abcdef")
    assert load_settings(None, {"public": "false"}).host == "127.0.0.1"
    for settings in (load_settings(None, {"public": "true"}), load_settings(_file(tmp_path, "public: true"))):
        assert settings.model_dump(include=set(PUBLIC)) == dict(PUBLIC)
        (warning,) = settings.warnings
        assert "TLS" in warning
    mine = load_settings(_file(tmp_path, "public: true\nhost: 127.0.0.1\n"), {"max_answer_tokens": "7"})
    assert (mine.host, mine.max_answer_tokens, mine.client_limit_s) == ("127.0.0.1", 7, 30.0)
    text = (ROOT / "docs" / "security.md").read_text()
    documented = {name: value if isinstance(value, str) else f"{value:.0f}" for name, value in PUBLIC.items()}
    assert all(f"| `{name}` | {value} |" in text for name, value in documented.items())
