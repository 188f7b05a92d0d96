"""A flag for every setting, for the commands that start a server or examine its settings."""

import argparse
from collections.abc import Container, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from server.settings import Settings, SettingsError, load_settings

# The groups of the help, in its order. Each setting is in one of them.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "model": (
        *("model", "dtype", "lora", "model_name", "served_model_name", "generation_config"),
        *("tool_call_parser", "reasoning_parser", "device", "tensor_parallel", "num_threads", "cuda_graphs"),
        "deterministic",
    ),
    "address and keys": (
        *("host", "port", "public", "api_keys", "api_keys_file", "ssl_certfile", "ssl_keyfile", "cors_origins", "allowed_hosts"),
        *("trusted_proxies", "playground", "docs"),
    ),
    "drafts": (
        *("drafter", "draft_model", "draft_dtype", "head", "lens", "cached_text", "ngram_min_tokens", "recent_tokens"),
        *("total_recent_tokens", "verifier", "policy", "expansion", "largest_expansion", "selector"),
    ),
    "size": (
        *("num_slots", "max_model_len", "max_running", "max_waiting", "max_waiting_tokens", "max_step_tokens", "decode_pace"),
        *("prefix_cache", "spare_worker", "kv_events", "kv_events_replay", "kv_events_topic"),
    ),
    "limits of requests": (
        *("max_requests_per_minute", "max_concurrent_requests", "max_tokens_per_minute", "max_body_bytes"),
        *("max_unfinished_body_bytes", "max_connections", "max_choices", "max_answer_tokens", "max_tree_tokens"),
        *("first_token_limit_s", "request_limit_s", "client_limit_s", "strict"),
        *("stored_responses", "stored_responses_bytes", "stored_responses_age_s", "stored_responses_file"),
    ),
    "life": (
        *("drain_s", "max_heartbeat_age_s", "hang_limit_s", "max_deaths", "crash_dump_dir", "crash_dump_texts"),
        *("kv_canary", "audit_share", "audit_tokens"),
    ),
    "logs and traces": ("log_level", "log_format", "log_requests", "otlp_endpoint", "trace_file"),
}
_KINDS: Mapping[Any, str] = {int: "N", float: "NUMBER", bool: "{true,false}"}

_REPEATED = frozenset({"lora"})  # settings whose flag may be given several times
_MANY = 8  # choices that are listed in the description


def add_settings_flags(command: argparse.ArgumentParser, honoured: Container[str] = Settings.model_fields) -> None:
    """Add `--config` and the flags of the `honoured` settings. Flags that are not given are absent from the parsed arguments.

    The model may also be named first, without its flag.
    """
    command.usage = "%(prog)s [MODEL] [flags]"
    command.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model; before all flags")
    others = [name for name in Settings.model_fields if not any(name in names for names in GROUPS.values())]
    for title, names in {**GROUPS, "others": tuple(others)}.items():
        group = command.add_argument_group(title)
        for name in filter(honoured.__contains__, names):
            field = Settings.model_fields[name]
            flag, kind = f"--{name.replace('_', '-')}", _kind(field.annotation)
            choices = f" One of {', '.join(get_args(field.annotation))}." if kind == "NAME" else ""
            text = _help(f"{field.description}{choices}", field.default)
            if name in _REPEATED:
                group.add_argument(flag, default=argparse.SUPPRESS, metavar=kind, help=text, action="append")
            elif field.annotation is bool:  # a flag alone is true
                group.add_argument(flag, default=argparse.SUPPRESS, metavar=kind, help=text, nargs="?", const="true")
            else:
                group.add_argument(flag, default=argparse.SUPPRESS, metavar=kind, help=text)
    files = command.add_argument_group("settings from a file or the environment")
    about = "YAML file of settings; flags and variables LATEBRANCH_NAME come before it"
    files.add_argument("--config", type=Path, default=argparse.SUPPRESS, metavar="FILE", help=about)


def _kind(annotation: Any) -> str:
    """Return the value of a flag for its help: its choices, or its kind."""
    if get_origin(annotation) is Literal:
        names = [*map(str, get_args(annotation))]
        return "{" + ",".join(names) + "}" if len(names) < _MANY else "NAME"
    if get_origin(annotation) in (Union, UnionType):
        return _kind(next(one for one in get_args(annotation) if one is not type(None)))
    return _KINDS.get(annotation, "VALUE")


def given_flags(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given as flags, and the model. Raises SettingsError if it is named twice."""
    flags = {name: value for name, value in vars(parsed).items() if name in Settings.model_fields}
    if parsed.positional_model is None:
        return flags
    if flags.get("model", parsed.positional_model) != parsed.positional_model:
        raise SettingsError("the model is named twice, as an argument and by --model")
    return {**flags, "model": parsed.positional_model}


def settings_of(parsed: argparse.Namespace) -> Settings:
    """Return the settings of the flags, the environment and the file; raise SettingsError."""
    return load_settings(getattr(parsed, "config", None), given_flags(parsed))


def _help(description: str, default: object) -> str:
    text = f"{description} Default: {default}" if default not in (None, ()) else description
    return text.replace("%", "%%")
