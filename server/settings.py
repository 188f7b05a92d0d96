"""Every setting of the server, its sources, and the engine configuration that it becomes.

Precedence: command line, then environment (`LATEBRANCH_...`), then the YAML file, then the defaults here. An unknown key or
variable is refused by name. docs/configuration.md lists all settings.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, TypeAdapter, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

from engine.core.config import BLOCK_TOKENS, EngineConfig, SchedulerConfig
from engine.core.refusal import Refusal
from engine.core.tree import parse_expansion
from engine.core.verifier_table import VerifierName, require_exact
from engine.draft.text.suffix_counts import MAX_CONTEXT
from engine.utils.did_you_mean import did_you_mean
from server.http.api_keys import MIN_KEY_CHARS, ApiKey, may_others_read, parsed_keys
from server.http.hosts import is_loopback
from server.http.request_log import RequestLog
from server.reasoning.support import ReasoningParser
from server.schemas.common import MAX_CHOICES
from server.schemas.strict_model import MAX_NAME_CHARS
from server.stored_responses.store import StoreLimits
from server.tool_calls.syntaxes import ToolCallParser

ENV_PREFIX = "LATEBRANCH_"
OTHER_VARIABLES = frozenset({"LATEBRANCH_CACHE"})  # the weights cache; engine.weights reads it
# configs/ is stored beside the packages, in a checkout and where a wheel is installed.
SHIPPED = Path(__file__).parent.parent / "configs"
DRAFTERS = ("auto", "none", "ngram", "early-exit", "head", "model")
SHIPPED_DRAFTERS = SHIPPED / "drafters"


# The defaults of a public server.
PUBLIC: Mapping[str, Any] = {
    "host": "0.0.0.0",
    "max_requests_per_minute": 120,
    "max_concurrent_requests": 8,
    "max_tokens_per_minute": 100_000,
    "max_answer_tokens": 4096,
    "first_token_limit_s": 120.0,
    "request_limit_s": 600.0,
    "client_limit_s": 30.0,
}


class SettingsError(Refusal):
    """A setting that is unknown or wrong."""


def _split(value: Any) -> Any:
    """Return the items of a comma-separated string; a list of a YAML file is returned unchanged."""
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


def _some_keys(value: Any) -> Any:
    """Return the entries of a list of keys; refuse an empty list and blank entries, which would leave the API open."""
    entries = _split(value)
    if not isinstance(entries, list | tuple):
        return entries
    texts = [entry.get_secret_value() if isinstance(entry, SecretStr) else entry for entry in entries]
    if not texts or any(isinstance(text, str) and not text.strip() for text in texts):
        raise ValueError("is set, but has no key, or a blank one; without keys leave it unset")
    return entries


def _lines_of(path: str) -> list[str]:
    """Return the lines of a file of keys; raise ValueError if it has none, which would leave the API open."""
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{path} has no API key")
    return keys


def _is_tracing_installed() -> bool:
    return all(find_spec(name) for name in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"))


def _is_true(value: Any) -> bool:
    """Return whether pydantic reads a value as true. Pydantic refuses an invalid value itself."""
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        return False


def _checked_drafter(value: str) -> str:
    """Return a drafter's name or a folder; raise ValueError for a word that is neither."""
    if value in DRAFTERS or "/" in value or Path(value).exists():
        return value
    raise ValueError(f"{value!r} is none of {', '.join(DRAFTERS)}, and no folder of a checkpoint{did_you_mean(value, DRAFTERS)}")


def _checked_expansion(value: Any) -> Any:
    return str(parse_expansion(value)) if isinstance(value, str) else value


def _checked_endpoint(value: str) -> str:
    """Return a ZeroMQ endpoint; raise ValueError for other text."""
    port = re.fullmatch(r"tcp://(?:[^\s/:]+|\[[0-9A-Fa-f:.%\w]+\]):([0-9]{1,5})", value)
    if not re.fullmatch(r"ipc://\S+", value) and (port is None or not 0 < int(port[1]) < 1 << 16):
        raise ValueError(f"{value!r} is none of tcp://*:PORT, tcp://HOST:PORT and ipc://PATH")
    return value


Endpoint = Annotated[str, AfterValidator(_checked_endpoint)]


def _counting_by_default(selector: str) -> str:
    """Return the selector's name. Files of settings may still have `auto`, another name of counting."""
    return "counting" if selector == "auto" else selector


class Settings(BaseSettings):
    """One server's settings; see each description."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, protected_namespaces=())

    public: bool = Field(
        default=False,
        description="For a networked server: listens on every interface, refuses to start without keys, and sets the limits of "
        "docs/security.md that are unset.",
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 lets the system choose.")
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_some_keys)] = Field(
        default=(),
        validate_default=False,
        description="Keys of the API, comma-separated, each KEY, NAME:KEY or NAME:ROLE:KEY (docs/security.md); unset: the API is "
        "open. /live and /health never need a key.",
    )
    api_keys_file: str | None = Field(
        default=None,
        description="File with more such keys, one per line, # for comments; all users of a machine see keys on a command line.",
    )
    max_requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Requests (POST) per minute of each key, or without keys of all; more are answered 429. Unset: no limit.",
    )
    max_concurrent_requests: int | None = Field(
        default=None,
        ge=1,
        description="Concurrent requests (POST) of each key, or without keys of all; more are answered 429. Unset: no limit.",
    )
    max_tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Tokens per minute, of prompts and answers together, of each key, or without keys of all. Above it, requests "
        "are answered 429 until the excess is refilled. Unset: no limit.",
    )
    ssl_certfile: str | None = Field(default=None, description="Certificate chain in PEM; enables HTTPS. Unset: HTTP.")
    ssl_keyfile: str | None = Field(default=None, description="Its private key in PEM; unset: it is in ssl_certfile.")
    cors_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        default=(), description="Origins whose pages may call the API, comma-separated; * for any."
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        default=(),
        description="Host names that requests may name besides localhost, comma-separated, without port. Unset: on a loopback "
        "address no other name, else any name.",
    )
    playground: bool = Field(
        default=True, description="Serve a page to try the model at /. The page needs no key; its API requests do."
    )
    docs: bool = Field(
        default=True, description="Serve Swagger UI at /docs, without a CDN. The page needs no key; its API requests do."
    )
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024, description="Largest request body.")
    max_unfinished_body_bytes: int = Field(
        default=64 * 2**20,
        ge=1024,
        description="Bytes of incomplete request bodies, all together. Beyond it, bodies larger than an equal share are answered "
        "503. At least max_body_bytes.",
    )
    max_connections: int = Field(
        default=1000,
        ge=1,
        description="Open connections, reduced below the process's limit of file descriptors. For one more, the connection that "
        "waits longest for a request is closed.",
    )
    max_choices: int = Field(
        default=128,
        ge=1,
        le=MAX_CHOICES,
        description="Most choices of one request: prompts times n or best_of; never more than max_running plus max_waiting.",
    )
    max_answer_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens that a request may set for each text, and the default of a chat without a limit. Unset: what "
        "fits.",
    )
    max_tree_tokens: int = Field(default=64, ge=0, description="Most drafted tokens of the tree that a request may set.")
    first_token_limit_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds within which each text of a request must have its first token; else it is answered 503. Unset: no "
        "limit.",
    )
    request_limit_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that a request may take from when it is queued; then it is answered 504. Unset: no limit.",
    )
    client_limit_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds that a client may take to send a request, or may read nothing of its answer; then it is cut off.",
    )
    drain_s: float = Field(default=30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM.")
    max_heartbeat_age_s: float = Field(
        default=10.0, gt=0, description="/ready and /health fail if the engine's last heartbeat is older, in seconds."
    )
    hang_limit_s: float = Field(
        default=60.0,
        ge=2,
        description="Seconds without a heartbeat after which the engine's worker is killed and started again; a step of a long "
        "prefill on a slow machine sends none.",
    )
    max_deaths: int = Field(
        default=3,
        ge=1,
        description="Workers in a row that die during a request, without a new token of it, before it is retried alone; the next "
        "death ends it.",
    )
    spare_worker: bool = Field(
        default=True,
        description="Fork workers from a process that has imported what they need: a dead one is replaced sooner, and they share "
        "that memory. It has no weights.",
    )
    crash_dump_dir: str | None = Field(
        default=None, description="Folder for a JSON file of each death of a worker, the last 100 (docs/faults.md); unset: none."
    )
    crash_dump_texts: bool = Field(
        default=False, description="Write the tokens of prompts and answers, bad words and grammars to crash dumps too."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Lowest level that is logged.")
    log_format: Literal["text", "json"] = Field(default="text", description="Format of log lines.")

    log_requests: RequestLog = Field(
        default="off",
        description="What is logged of requests: nothing, parameters (with only the length of texts), or texts too, cut short.",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="OTLP/HTTP collector that receives a trace of each request, for example http://127.0.0.1:4318; needs the "
        "extra otel. Unset: none.",
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        default=(),
        description="Addresses or networks of proxies whose X-Forwarded-For names the client in the access log, comma-separated; "
        "unset: none.",
    )
    strict: bool = Field(
        default=False,
        description="Refuse every unknown field of a request; else unknown fields that cannot change a text are ignored.",
    )

    model: str = Field(default="smollm2-135m", description="Target model: a preset's name, a folder, a GGUF file or a hub id.")
    model_name: str | None = Field(default=None, description="Name clients use for the model; unset: the value of model.")
    served_model_name: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        default=(),
        description="Several such names, comma-separated, in place of model_name; all are listed, and the first is that of the "
        "metrics.",
    )
    lora: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        default=(),
        description="LoRA adapters, each NAME=FOLDER in PEFT's format; NAME is a further model of requests. The flag may be "
        "repeated. Unset: none.",
    )
    generation_config: Literal["auto", "none"] = Field(
        default="auto",
        description="Defaults of the sampling parameters that a request does not set; auto: those of the model's "
        "generation_config.json; none: the API's own.",
    )
    tool_call_parser: ToolCallParser = Field(
        default="auto",
        description="Markup of tool calls (docs/api.md); auto: as the chat template shows; none: no tools are accepted.",
    )
    reasoning_parser: ReasoningParser = Field(
        default="auto",
        description="How the model writes its reasoning; think: between <think> and </think>; auto: as its chat template or its "
        "tokens show; none: reasoning is not split off.",
    )
    drafter: Annotated[str, AfterValidator(_checked_drafter)] = Field(
        default="auto",
        description="Source of drafted tokens: auto, none, ngram, early-exit, head, model, or the folder of an EAGLE-3, DFlash "
        "or Medusa checkpoint (docs/drafters.md); auto: the shipped head with cached text; without one or with policy plain, "
        "ngram.",
    )
    draft_model: str | None = Field(default=None, description="Draft model, as in model; for drafter model.")
    lens: str | None = Field(default=None, description="Trained exit lens for drafter early-exit: a file; unset: none.")
    head: str | None = Field(default=None, description="Distilled draft head for drafter head: a file; unset: none.")
    cached_text: bool = Field(
        default=False, description="Draft from cached text too, besides a model; drafter ngram always does."
    )
    ngram_min_tokens: int = Field(
        default=2, ge=1, le=MAX_CONTEXT, description="Tokens that must match before cached text is drafted from."
    )
    recent_tokens: int = Field(
        default=16384,
        ge=0,
        description="Tokens of finished answers kept for each user of each API key, to draft later answers from; 0: none.",
    )
    total_recent_tokens: int = Field(
        default=262_144,
        ge=0,
        description="Tokens of finished answers kept for all users together, a few hundred bytes each; the least recently used "
        "are removed first.",
    )
    stored_responses: int = Field(
        default=1000,
        ge=0,
        description="Responses of /v1/responses kept for each key, or without keys for all, unless a request has store false. "
        "Beyond a bound those used least recently are removed. 0: none.",
    )
    stored_responses_bytes: int = Field(
        default=64 * 2**20, ge=1024, description="Bytes of inputs and answers kept for each key; a larger response is not kept."
    )
    stored_responses_age_s: float = Field(default=30 * 86400.0, gt=0, description="Seconds that a response is kept.")
    stored_responses_file: str | None = Field(
        default=None, description="SQLite file that keeps the responses across restarts; unset: they are kept in memory."
    )
    verifier: VerifierName = Field(default="coupled", description="Rule that accepts drafted tokens.")
    policy: Literal["plain", "fixed", "adaptive"] = Field(
        default="adaptive", description="How tree shapes are chosen: none, always expansion, or for each step by expected speed."
    )
    expansion: Annotated[str, BeforeValidator(_checked_expansion)] = Field(
        default="4.1.0",
        description="The fixed tree, or the family of the adaptive policy: trunk.branches.depth of a delayed tree, or "
        "tree.max_nodes, for example heap.16; a noise_aware tree may set an acceptance threshold, as noise_aware.16@0.2.",
    )
    largest_expansion: Annotated[str | None, BeforeValidator(_checked_expansion)] = Field(
        default=None, description="Largest tree of the adaptive policy, of expansion's family; unset: 8.4.8, or 64 nodes."
    )
    selector: Annotated[str, AfterValidator(_counting_by_default)] = Field(
        default="counting",
        description="Estimator of each tree's tokens under policy adaptive: counting (of acceptance), or the file of a trained "
        "network.",
    )
    dtype: Literal["float32", "bfloat16", "fp8", "int8", "compact"] = Field(
        default="float32",
        description="Precision of the target: float32, bfloat16 (rounded weights; without our library, passes of different "
        "widths also round differently), fp8 (8-bit floats, only on a GPU), int8 (8-bit weights, only with our library), or "
        "compact (weights of a GGUF file in its 4 or 6 bits, others in 8, inputs of layers in 8; only with our library); "
        "docs/precision.md.",
    )
    draft_dtype: Literal["auto", "float32", "bfloat16", "int8", "compact"] = Field(
        default="auto",
        description="Number format of a draft model or head, which does not affect the distribution; auto: int8 if our library "
        "runs, else bfloat16 if the processor multiplies it; this saves memory traffic.",
    )
    device: str | None = Field(default=None, description="Device, for example cpu or cuda; unset: cuda if there is one.")
    tensor_parallel: int = Field(
        default=1, ge=1, description="Processes that share out the layers of the target, one for each GPU (docs/scaling.md)."
    )
    num_threads: int | None = Field(default=None, ge=1, description="Threads of the engine; unset: the physical cores.")
    trace_file: str | None = Field(
        default=None, description="File to which every step is appended as JSON lines (docs/traces.md); unset: none."
    )
    max_running: int = Field(default=32, ge=1, description="Sequences that take part in a step.")
    max_waiting: int = Field(default=256, ge=1, description="Sequences that may wait; more are answered 503 with Retry-After.")
    max_waiting_tokens: int = Field(
        default=1 << 20, ge=1, description="Prompt tokens that may wait, except for a single prompt; more are answered 503."
    )
    max_step_tokens: int = Field(default=512, ge=1, description="Packed tokens of one target pass; at least max_running.")
    decode_pace: float = Field(
        default=0.65,
        ge=0,
        lt=1,
        description="Share of their tokens a second that decoding requests keep while prompts longer than a step are read; "
        "0: long prompts are read as fast as possible.",
    )
    num_slots: int = Field(default=32768, ge=1, description="Tokens the key-value cache holds.")
    max_model_len: int = Field(default=8192, ge=1, description="Longest sequence in tokens, prompt and answer together.")
    prefix_cache: Literal["off", "key", "all"] = Field(
        default="key",
        description="Requests that share cached prefixes: those of one API key (and one cache_salt), all, or none; with all, the "
        "time to the first token can reveal the prompts of others.",
    )
    kv_events: Endpoint | None = Field(
        default=None,
        description="ZeroMQ endpoint where changes of the prefix cache are published in vLLM's form, with the tokens of prompts "
        "and answers: tcp://*:5557 or ipc://PATH listens, tcp://HOST:PORT connects to a router. Unset: none.",
    )
    kv_events_replay: Endpoint | None = Field(
        default=None, description="Endpoint that sends missed messages of kv_events again, such as tcp://*:5558. Unset: none."
    )
    kv_events_topic: str | None = Field(
        default=None,
        max_length=MAX_NAME_CHARS,
        description="Topic of these messages; llm-d expects kv@HOST:PORT@MODEL. Unset: empty.",
    )

    deterministic: bool = Field(
        default=False,
        description="Give a token the same bits in passes of any width; refuse to start where that is not possible. Always so "
        "with our library; slower on a GPU.",
    )
    cuda_graphs: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Replay passes as CUDA graphs; auto: on a CUDA device, if they can be captured; on: refuse to start if not.",
    )
    kv_canary: bool = Field(
        default=False,
        description="Check that every cache slot is read by its owner alone, and end a worker that violates this "
        "(docs/faults.md); slower.",
    )

    audit_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of requests whose first tokens are audited while the engine is idle; 0.01 is typical.",
    )
    audit_tokens: int = Field(
        default=32, ge=1, le=128, description="First tokens of such a request that are audited; at most 128."
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_public_defaults(cls, values: Any) -> Any:
        is_public = isinstance(values, dict) and _is_true(values.get("public"))
        return {**PUBLIC, **values} if is_public else values

    @model_validator(mode="after")
    def _public_needs_keys(self) -> Self:
        if self.public and not self.all_api_keys:
            raise ValueError("public needs api_keys or api_keys_file")
        if self.public and "*" in self.cors_origins:
            raise ValueError("public refuses * in cors_origins: name the origins")
        return self

    @model_validator(mode="after")
    def _files_fit_drafter_and_policy(self) -> Self:
        if (self.drafter == "model") != (self.draft_model is not None):
            raise ValueError("draft_model is given with drafter model, and only then")
        if self.lens is not None and self.drafter != "early-exit":
            raise ValueError("lens is given only with drafter early-exit")
        if self.head is not None and self.drafter != "head":
            raise ValueError("head is given only with drafter head")
        if self.selector != "counting" and self.policy != "adaptive":
            raise ValueError("a selector's file is given only with policy adaptive")
        if self.cached_text and self.drafter in ("auto", "none", "ngram"):
            raise ValueError("cached_text is given only with a drafter that is a model")
        return self

    @model_validator(mode="after")
    def _names_can_be_sent(self) -> Self:
        if self.served_model_name and self.model_name is not None:
            raise ValueError("served_model_name and model_name cannot both be given")
        names = self.served_model_name
        if len({*names}) < len(names) or any(len(name) > MAX_NAME_CHARS for name in names):
            raise ValueError(f"served_model_name has names that differ, of at most {MAX_NAME_CHARS} characters")
        return self

    @model_validator(mode="after")
    def _adapters_are_named(self) -> Self:
        for item in self.lora:
            name, _, folder = item.partition("=")
            if not name or not folder or "," in name or len(name) > MAX_NAME_CHARS:
                raise ValueError(f"lora: {item!r} is not NAME=FOLDER, with a name of at most {MAX_NAME_CHARS} characters")
            if name in self.served_names:
                raise ValueError(f"lora: {name} is a name of the model")
        if len(self.adapters) < len(self.lora):
            raise ValueError("lora has a name twice")
        return self

    @model_validator(mode="after")
    def _kv_events_have_a_source(self) -> Self:
        if self.kv_events is None and (self.kv_events_replay or self.kv_events_topic):
            raise ValueError("kv_events_replay and kv_events_topic are given only with kv_events")
        if self.kv_events is not None and self.prefix_cache == "off":
            raise ValueError("kv_events is given only with a prefix cache")
        return self

    @model_validator(mode="after")
    def _tracing_is_installed(self) -> Self:
        if self.otlp_endpoint is not None and not _is_tracing_installed():
            raise ValueError("otlp_endpoint needs the extra otel: pip install 'latebranch[otel]'")
        return self

    @model_validator(mode="after")
    def _secret_files_are_readable(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile is given only with ssl_certfile")
        for path in (self.ssl_certfile, self.ssl_keyfile):
            if path is not None and not os.access(path, os.R_OK):
                raise ValueError(f"{path} cannot be read")
        _ = self.all_api_keys  # raises ValueError for invalid keys
        return self

    @cached_property
    def all_api_keys(self) -> tuple[ApiKey, ...]:
        """The keys of the setting and of the file, each once."""
        entries = [key.get_secret_value() for key in self.api_keys]
        if self.api_keys_file is not None:
            entries += _lines_of(self.api_keys_file)
        return parsed_keys(entries)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about allowed settings that make a server less secure."""
        keys, is_local = self.all_api_keys, is_loopback(self.host)
        secret_files = [path for path in (self.api_keys_file, self.ssl_keyfile) if path is not None]
        num_short = sum(len(key.secret) < MIN_KEY_CHARS for key in keys)
        found = {
            f"no API key is set: every client that reaches {self.host} port {self.port} may use the API": not keys
            and not is_local,
            f"{num_short} of the API keys have fewer than {MIN_KEY_CHARS} characters and can be guessed": num_short > 0,
            f"keys and texts cross the network unencrypted unless a proxy terminates TLS for {self.host}": (
                self.public and self.ssl_certfile is None
            ),
            "cors_origins has *: every web page may call the API": "*" in self.cors_origins,
            f"kv_events sends the tokens of prompts and answers, unencrypted, to whatever subscribes to {self.kv_events}": (
                (self.kv_events or "ipc://").startswith("tcp://")
            ),
            **{f"every user of this machine may read {path}": may_others_read(path) for path in secret_files},
        }
        return tuple(text for text, is_so in found.items() if is_so)

    @model_validator(mode="after")
    def _tree_and_verifier_are_an_exact_pair(self) -> Self:
        expansion = parse_expansion(self.expansion)
        require_exact(expansion, self.verifier)
        if self.largest_expansion is not None:
            largest = parse_expansion(self.largest_expansion)
            require_exact(largest, self.verifier)
            if largest.is_delayed != expansion.is_delayed or (not largest.is_delayed and largest.tree != expansion.tree):
                raise ValueError(f"largest_expansion {largest} is not of the family of expansion {expansion}")
        return self

    @model_validator(mode="after")
    def _every_running_sequence_has_a_token(self) -> Self:
        if self.max_step_tokens < self.max_running:
            raise ValueError(f"max_step_tokens ({self.max_step_tokens}) must be at least max_running ({self.max_running})")
        return self

    @property
    def most_choices(self) -> int:
        """Choices that one request can have. More than an idle engine admits would get 503 on every retry."""
        return min(self.max_choices, self.max_running + self.max_waiting)

    @property
    def store_limits(self) -> StoreLimits:
        """The bounds of stored responses."""
        return StoreLimits(self.stored_responses, self.stored_responses_bytes, self.stored_responses_age_s)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names clients use for the model."""
        return self.served_model_name or (self.model_name or self.model,)

    @cached_property
    def adapters(self) -> Mapping[str, str]:
        """The folders of the LoRA adapters by name."""
        return dict(item.split("=", 1) for item in self.lora)

    @property
    def served_name(self) -> str:
        """The name of the model in metrics and logs."""
        return self.served_names[0]

    def to_tool_config(self) -> EngineConfig:
        """Return the engine's configuration for a tool: one rank, without trace file, audit, canary, prefix cache and adapters.

        Without the prefix cache a tool that repeats prompts measures their prefill each time.
        """
        config = self.to_engine_config()
        scheduler = replace(config.scheduler, prefix_block_tokens=0)
        return replace(config, trace_file=None, audit_share=0.0, kv_canary=False, scheduler=scheduler, lora=(), tensor_parallel=1)

    def to_engine_config(self) -> EngineConfig:
        """Return the engine's configuration."""
        drafter, head, has_cached_text = self.drafter, _named(self.head), self.cached_text
        if drafter == "auto":
            shipped = SHIPPED_DRAFTERS / f"{self.model}-head.safetensors"
            has_cached_text = self.policy != "plain" and "/" not in self.model and shipped.is_file()
            drafter, head = ("head", str(shipped)) if has_cached_text else ("ngram", None)
        checkpoint = None if drafter in DRAFTERS else str(Path(drafter).expanduser())
        return EngineConfig(
            model=self.model,
            model_name=self.served_name,
            generation_config=self.generation_config,
            drafter=drafter if checkpoint is None else "checkpoint",
            checkpoint=checkpoint,
            draft_model=self.draft_model,
            lens=_named(self.lens),
            head=head,
            stand_in="ngram" if self.drafter == "auto" else None,
            cached_text=has_cached_text,
            ngram_min_tokens=self.ngram_min_tokens,
            recent_tokens=self.recent_tokens,
            total_recent_tokens=self.total_recent_tokens,
            verifier=self.verifier,
            policy=self.policy,
            expansion=parse_expansion(self.expansion),
            largest_expansion=None if self.largest_expansion is None else parse_expansion(self.largest_expansion),
            selector=None if self.selector == "counting" else _named(self.selector),
            dtype=self.dtype,
            draft_dtype=None if self.draft_dtype == "auto" else self.draft_dtype,
            device=self.device,
            num_threads=self.num_threads,
            audit_share=self.audit_share,
            audit_tokens=self.audit_tokens,
            trace_file=self.trace_file,
            cuda_graphs=self.cuda_graphs,
            deterministic=self.deterministic,
            kv_canary=self.kv_canary,
            lora=tuple(self.adapters.items()),
            tensor_parallel=self.tensor_parallel,
            scheduler=SchedulerConfig(
                max_running=self.max_running,
                max_waiting=self.max_waiting,
                max_waiting_tokens=self.max_waiting_tokens,
                max_step_tokens=self.max_step_tokens,
                num_slots=self.num_slots,
                max_model_len=self.max_model_len,
                prefix_block_tokens=0 if self.prefix_cache == "off" else BLOCK_TOKENS,
                decode_pace=self.decode_pace,
                has_cache_events=self.kv_events is not None,
            ),
        )


def or_shipped(path: Path) -> Path:
    """Return a path, or the shipped file of that name if the path begins with `configs/` and does not exist."""
    shipped = SHIPPED.parent / path
    return shipped if path.parts[:1] == (SHIPPED.name,) and not path.exists() and shipped.exists() else path


def _named(file: str | None) -> str | None:
    return None if file is None else str(or_shipped(Path(file)))


def load_settings(config_file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of a YAML file, the environment and `overrides` (the command line). Raises SettingsError."""
    config_file = None if config_file is None else or_shipped(config_file)
    if config_file is not None and not config_file.is_file():
        raise SettingsError(f"no such configuration file: {config_file}")
    _refuse_unknown_variables(os.environ)
    try:
        return _settings_from(config_file)(**(overrides or {}))
    except ValidationError as error:
        raise SettingsError("; ".join(map(_sentence, error.errors()))) from error
    except Exception as error:  # the errors of the YAML reader have no common base
        raise SettingsError(f"{config_file or 'environment'}: {error}") from error


def _settings_from(config_file: Path | None) -> type[Settings]:
    """Return Settings that read this file and the environment."""

    class FromFile(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=config_file)

    return FromFile


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields} | OTHER_VARIABLES
    unknown = sorted(name for name in environment if name.upper().startswith(ENV_PREFIX) and name.upper() not in known)
    if unknown:
        raise SettingsError(f"unknown environment variables: {', '.join(unknown)}{did_you_mean(unknown[0], known)}")


def _sentence(error: Mapping[str, Any]) -> str:
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"unknown setting: {name}{did_you_mean(name, Settings.model_fields)}"
    if error["type"] == "literal_error":
        choices = re.findall("'([^']*)'", error["msg"])
        return f"{name}: {error['msg']}{did_you_mean(str(error['input']), choices)}"
    reason = str(error["msg"]).removeprefix("Value error, ")
    return f"{name}: {reason}" if name else reason
