"""What generation_config.json sets for requests, and what of it is left out."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from engine.core.types import RequestDefaults
from engine.weights.request_defaults import read_request_defaults

ALL = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 99}


def folder_with(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("settings", "defaults"),
    [
        (ALL, RequestDefaults(0.7, 0.8, 20, 0.05, 1.1, 99)),
        ({"temperature": 1, "top_k": 50.0}, RequestDefaults(temperature=1.0, top_k=50)),
        ({"top_k": -1}, RequestDefaults(top_k=0)),
        ({"temperature": 0}, RequestDefaults(temperature=0.0)),
        ({"temperature": None, "top_k": None, "do_sample": True, "eos_token_id": 2, "typical_p": 0.5}, RequestDefaults()),
        ({}, RequestDefaults()),
    ],
)
def test_defaults_are_read_from_the_file(settings: dict[str, Any], defaults: RequestDefaults, tmp_path: Path) -> None:
    """And no more: transformers' own top_k of 50 is none."""
    assert read_request_defaults(folder_with(tmp_path, json.dumps(settings))) == defaults


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-1, "0.7", True, [0.7], 1e9)),
        *(("top_p", value) for value in (0, 1.5)),
        *(("top_k", value) for value in (1.5, "20")),
        *(("repetition_penalty", value) for value in (0, -1.0)),
        *(("max_new_tokens", value) for value in (0, -1, 1.5)),
        ("min_p", 2),
    ],
)
def test_invalid_default_is_left_out(name: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each request would be refused for it."""
    found = read_request_defaults(folder_with(tmp_path, json.dumps({**ALL, name: value})))
    assert sum(getattr(found, field) is None for field in RequestDefaults.__slots__) == 1
    assert name in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"temperature": NaN}', '{"top_k": Infinity}'])
def test_empty_file_sets_nothing(text: str, tmp_path: Path) -> None:
    assert read_request_defaults(folder_with(tmp_path, text)) == RequestDefaults()


def test_a_folder_without_the_file_sets_nothing(tmp_path: Path) -> None:
    assert read_request_defaults(tmp_path) == RequestDefaults()


def test_the_start_logs_the_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        read_request_defaults(folder_with(tmp_path, json.dumps({"temperature": 0.7, "max_new_tokens": 5})))
    assert "defaults of requests, from generation_config.json: temperature 0.7, max_tokens 5" in caplog.text
