"""Every setting of the server, where it may come from, and the engine configuration it becomes.

Precedence: command line, then environment (`LATEBRANCH_...`), then the YAML file, then the defaults here. A key or a
variable that is not a setting is refused by name. docs/configuration.md lists them all.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, TypeAdapter, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

from engine.core.config import BLOCK_TOKENS, EngineConfig, SchedulerConfig
from engine.core.tree import parse_expansion
from engine.core.verifier_table import VerifierName, require_exact
from engine.draft.text.suffix_counts import MAX_CONTEXT
from server.http.api_keys import MIN_KEY_CHARS, ApiKey, may_others_read, parsed_keys
from server.http.hosts import is_loopback
from server.http.request_log import RequestLog
from server.schemas.common import MAX_CHOICES
from server.tool_calls.syntaxes import ToolCallParser

ENV_PREFIX = "LATEBRANCH_"
OTHER_VARIABLES = frozenset({"LATEBRANCH_CACHE"})  # the weights cache; engine.weights reads it
# configs/ is stored beside the packages, in a checkout and where a wheel is installed.
SHIPPED = Path(__file__).parent.parent / "configs"
SHIPPED_DRAFTERS, SHIPPED_SELECTORS = SHIPPED / "drafters", SHIPPED / "selectors"


# What `public` sets unless something else does: for servers that others reach.
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


class SettingsError(Exception):
    """A setting that is unknown or wrong."""


def _split(value: Any) -> Any:
    """Return the items of a comma-separated string; lists of a YAML file pass."""
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
    if not any(lines):
        raise ValueError(f"{path} has no API key")
    return [line for line in lines if line]


def _is_tracing_installed() -> bool:
    return all(find_spec(name) for name in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"))


def _is_true(value: Any) -> bool:
    """Return whether pydantic reads a value as true; what it reads as nothing it refuses itself."""
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        return False


def _checked_expansion(value: Any) -> Any:
    return str(parse_expansion(value)) if isinstance(value, str) else value


class Settings(BaseSettings):
    """One server's settings; see each description."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, protected_namespaces=())

    public: bool = Field(
        default=False,
        description="For a server that others reach: listens on every interface, refuses to start without keys, and sets the "
        "limits of docs/security.md where they are not set.",
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 lets the system choose.")
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_some_keys)] = Field(
        default=(),
        validate_default=False,
        description="Keys that open the API, comma-separated, each KEY, NAME:KEY or NAME:ROLE:KEY (docs/security.md); unset: it "
        "is open. /live and /health never need one.",
    )
    api_keys_file: str | None = Field(
        default=None,
        description="File with more such keys, one a line: a command line shows its keys to every user of the machine.",
    )
    max_requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Requests (POST) a minute of each key, or without keys of all; more are answered 429. Unset: any.",
    )
    max_concurrent_requests: int | None = Field(
        default=None,
        ge=1,
        description="Requests (POST) of each key, or without keys of all, that are answered at a time. Unset: any.",
    )
    max_tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Tokens a minute, of prompts and answers together, of each key, or without keys of all; a key that has used "
        "more is answered 429 until its bucket has recovered. Unset: any.",
    )
    ssl_certfile: str | None = Field(default=None, description="Certificate chain in PEM; HTTPS is spoken with it. Unset: HTTP.")
    ssl_keyfile: str | None = Field(default=None, description="Its private key in PEM; unset: it is in ssl_certfile.")
    cors_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        default=(), description="Origins whose pages may call the API, comma-separated; * for any."
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        default=(),
        description="Host names that requests may name beside localhost, comma-separated, without port. Unset: on a loopback "
        "address no other, else any.",
    )
    playground: bool = Field(
        default=True, description="Serve a page to try the model on at /; the page needs no key, its requests do."
    )
    docs: bool = Field(
        default=True, description="Serve Swagger UI at /docs, from here alone; the page needs no key, its requests do."
    )
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024, description="Largest request body.")
    max_unfinished_body_bytes: int = Field(
        default=64 * 2**20,
        ge=1024,
        description="Bytes of bodies that have not come whole, all together; beyond, those larger than their share are answered "
        "503. At least max_body_bytes.",
    )
    max_connections: int = Field(
        default=1000,
        ge=1,
        description="Open connections, at most some hundred below the process's limit of descriptors; for one more, the one that "
        "waits longest for a request is closed.",
    )
    max_choices: int = Field(
        default=128,
        ge=1,
        le=MAX_CHOICES,
        description="Most choices of one request: prompts times n or best_of; never more than may run and wait.",
    )
    max_answer_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens that a request may set for each text, and the number of a chat that sets none. Unset: what "
        "fits.",
    )
    max_tree_tokens: int = Field(default=64, ge=0, description="Most drafted tokens of the tree that a request may set.")
    first_token_limit_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds within which each text of a request must have its first token; else it is answered 503. Unset: any.",
    )
    request_limit_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds from when it is queued that a request may take at most; then it is answered 504. Unset: any.",
    )
    client_limit_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds that a client may take to send a request, or take nothing of what it was sent; then it is cut off.",
    )
    drain_s: float = Field(default=30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM.")
    max_heartbeat_age_s: float = Field(
        default=10.0, gt=0, description="/ready and /health fail if the engine has been silent for longer."
    )
    hang_limit_s: float = Field(
        default=60.0,
        ge=2,
        description="Seconds of silence after which the engine's worker is killed and started again; a long prefill on a slow "
        "machine is one silent step.",
    )
    max_deaths: int = Field(
        default=3,
        ge=1,
        description="Workers in a row that die over a request, without a token of it in between, before it is tried alone; the "
        "next one ends it.",
    )
    spare_worker: bool = Field(
        default=True,
        description="Keep a process that has imported what a worker needs: a dead one is replaced sooner, for 0.3 GB of memory.",
    )
    crash_dump_dir: str | None = Field(
        default=None, description="Folder for a JSON file of each death of a worker, the last 100 (docs/faults.md); unset: none."
    )
    crash_dump_texts: bool = Field(
        default=False, description="Write the tokens of prompts and answers, bad words and grammars to crash dumps too."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least severe log line written.")
    log_format: Literal["text", "json"] = Field(default="text", description="How a log line is written.")

    log_requests: RequestLog = Field(
        default="off",
        description="What is logged of requests: nothing, parameters (texts by their length alone), or texts too, cut short.",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="OTLP/HTTP collector that is sent a trace of each request, for example http://127.0.0.1:4318; needs the "
        "extra otel. Unset: none.",
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        default=(),
        description="Addresses or networks of proxies whose X-Forwarded-For names the client in the access log, comma-separated; "
        "unset: none.",
    )
    strict: bool = Field(
        default=False, description="Refuse every unknown field of a request; else those that cannot change a text are ignored."
    )

    model: str = Field(default="smollm2-135m", description="Target model: a preset's name, a folder, a GGUF file or a hub id.")
    model_name: str | None = Field(default=None, description="Name clients use for the model; unset: the value of model.")
    generation_config: Literal["auto", "none"] = Field(
        default="auto",
        description="What a request gets that leaves a sampling parameter open; auto: what the model's generation_config.json "
        "sets; none: the API's own defaults.",
    )
    tool_call_parser: ToolCallParser = Field(
        default="auto",
        description="How the model writes tool calls; auto: as its chat template does; none: no tools are accepted.",
    )
    drafter: Literal["auto", "none", "ngram", "early-exit", "head", "model"] = Field(
        default="auto",
        description="What drafts tokens; auto: the shipped head, with cached text, or else (or under policy plain) ngram.",
    )
    draft_model: str | None = Field(default=None, description="Draft model, as in model; for drafter model.")
    lens: str | None = Field(default=None, description="Trained exit lens for drafter early-exit: a file; unset: none.")
    head: str | None = Field(default=None, description="Distilled draft head for drafter head: a file; unset: none.")
    cached_text: bool = Field(
        default=False, description="Draft from earlier text too, beside a model; drafter ngram does nothing else."
    )
    ngram_min_tokens: int = Field(
        default=2, ge=1, le=MAX_CONTEXT, description="Tokens that must match for cached text to be drafted from."
    )
    recent_tokens: int = Field(
        default=16384,
        ge=0,
        description="Tokens of finished answers kept for each user of each API key, to draft their later ones from; 0: none.",
    )
    total_recent_tokens: int = Field(
        default=262_144,
        ge=0,
        description="Tokens kept so for all users together, a few hundred bytes each; the least lately used are forgotten first.",
    )
    verifier: VerifierName = Field(default="coupled", description="Rule that accepts drafted tokens.")
    policy: Literal["plain", "fixed", "adaptive"] = Field(default="adaptive", description="What chooses tree shapes.")
    expansion: Annotated[str, BeforeValidator(_checked_expansion)] = Field(
        default="4.1.0",
        description="Tree: trunk.branches.depth of a delayed one, or tree.max_nodes, for example heap.16; "
        "a noise_aware one may set the chance that a node must have, as noise_aware.16@0.2: the fixed one, or "
        "one of the family that the adaptive policy chooses from.",
    )
    largest_expansion: Annotated[str | None, BeforeValidator(_checked_expansion)] = Field(
        default=None, description="Largest tree of the adaptive policy, of expansion's family; unset: 8.4.8, or 64 nodes."
    )
    selector: str = Field(
        default="auto",
        description="What expects tokens of each tree under policy adaptive: counting (of acceptance), or the file of a trained "
        "network; auto: where the server's rule draws (any but coupled), the network that ships for the model and its shipped "
        "head, if one does; or else counting.",
    )
    dtype: Literal["float32", "bfloat16", "int8", "compact"] = Field(
        default="float32",
        description="Precision of the target: float32, bfloat16 (weights are rounded; where our library runs, that is all, and "
        "elsewhere passes of different widths round differently), int8 (8-bit weights, by our library alone), "
        "or compact (weights of a GGUF file in the 4 or 6 bits they have there, others in 8, inputs of layers in 8; by our "
        "library alone); "
        "docs/precision.md.",
    )
    draft_dtype: Literal["auto", "float32", "bfloat16", "int8", "compact"] = Field(
        default="auto",
        description="Number format of a draft model or head, which changes no distribution; auto: int8 where our library "
        "runs, else bfloat16 where the processor multiplies it; a half to a quarter of the memory traffic.",
    )
    device: str | None = Field(default=None, description="Device, for example cpu or cuda; unset: cuda if there is one.")
    num_threads: int | None = Field(default=None, ge=1, description="Threads of the engine; unset: the physical cores.")
    trace_file: str | None = Field(
        default=None, description="File to which every step is appended as JSON lines (docs/traces.md); unset: none."
    )
    max_running: int = Field(default=32, ge=1, description="Sequences that take part in a step.")
    max_waiting: int = Field(default=256, ge=1, description="Sequences that may wait; more are answered 503 with Retry-After.")
    max_waiting_tokens: int = Field(
        default=1 << 20, ge=1, description="Tokens of the prompts that may wait, unless one waits alone; more are answered 503."
    )
    max_step_tokens: int = Field(default=512, ge=1, description="Packed tokens of one target forward; at least max_running.")
    num_slots: int = Field(default=32768, ge=1, description="Tokens the key-value cache holds.")
    max_model_len: int = Field(default=8192, ge=1, description="Longest sequence in tokens, prompt and answer together.")
    prefix_cache: Literal["off", "key", "all"] = Field(
        default="key",
        description="Requests that share cached prefixes: those of one API key (of one cache_salt), all, or none; how fast an "
        "answer begins reveals the prompts that share with it.",
    )

    cuda_graphs: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Replay passes as CUDA graphs; auto: on a CUDA device, if they can be captured; on: refuse to start if not.",
    )
    kv_canary: bool = Field(
        default=False,
        description="Check every cache slot that is read to be the reader's own, and end a worker that reads another "
        "(docs/faults.md); slower.",
    )

    audit_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of requests whose first tokens are checked in idle moments; 0.01 is typical.",
    )
    audit_tokens: int = Field(
        default=32, ge=1, le=128, description="Tokens of such a request that are checked, its first ones; at most 128."
    )

    @model_validator(mode="before")
    @classmethod
    def _public_has_defaults_of_its_own(cls, values: Any) -> Any:
        is_public = isinstance(values, dict) and _is_true(values.get("public"))
        return {**PUBLIC, **values} if is_public else values

    @model_validator(mode="after")
    def _public_is_closed(self) -> Self:
        if self.public and not self.all_api_keys:
            raise ValueError("public needs api_keys or api_keys_file")
        if self.public and "*" in self.cors_origins:
            raise ValueError("public refuses * in cors_origins: name the origins")
        return self

    @model_validator(mode="after")
    def _files_belong_to_what_reads_them(self) -> Self:
        if (self.drafter == "model") != (self.draft_model is not None):
            raise ValueError("draft_model is given with drafter model, and only then")
        if self.lens is not None and self.drafter != "early-exit":
            raise ValueError("lens is given only with drafter early-exit")
        if self.head is not None and self.drafter != "head":
            raise ValueError("head is given only with drafter head")
        if self.selector not in ("auto", "counting") and self.policy != "adaptive":
            raise ValueError("a selector's file is given only with policy adaptive")
        if self.cached_text and self.drafter in ("auto", "none", "ngram"):
            raise ValueError("cached_text is given only with a drafter that is a model")
        return self

    @model_validator(mode="after")
    def _tracing_is_installed(self) -> Self:
        if self.otlp_endpoint is not None and not _is_tracing_installed():
            raise ValueError("otlp_endpoint needs the extra otel: pip install 'latebranch[otel]'")
        return self

    @model_validator(mode="after")
    def _files_of_secrets_can_be_read(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile is given only with ssl_certfile")
        for path in (self.ssl_certfile, self.ssl_keyfile):
            if path is not None and not os.access(path, os.R_OK):
                raise ValueError(f"{path} cannot be read")
        _ = self.all_api_keys  # raises what is wrong with them
        return self

    @cached_property
    def all_api_keys(self) -> tuple[ApiKey, ...]:
        """The keys themselves, those of the file too, each once."""
        entries = [key.get_secret_value() for key in self.api_keys]
        if self.api_keys_file is not None:
            entries += _lines_of(self.api_keys_file)
        return parsed_keys(entries)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed, but leaves a server less safe than it could be."""
        keys, is_local = self.all_api_keys, is_loopback(self.host)
        secret_files = [path for path in (self.api_keys_file, self.ssl_keyfile) if path is not None]
        num_short = sum(len(key.secret) < MIN_KEY_CHARS for key in keys)
        found = {
            f"no API key is set: whoever reaches {self.host} port {self.port} may use the API": not keys and not is_local,
            f"{num_short} of the API keys have fewer than {MIN_KEY_CHARS} characters and can be guessed": num_short > 0,
            f"keys and texts cross the network unencrypted unless a proxy speaks TLS for {self.host}": (
                self.public and self.ssl_certfile is None
            ),
            "cors_origins has *: every page that a browser shows may call the API": "*" in self.cors_origins,
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
        """Choices that one request can have: what more than fit into an idle engine would be told to try again for ever."""
        return min(self.max_choices, self.max_running + self.max_waiting)

    @property
    def served_name(self) -> str:
        """The name clients use for the model."""
        return self.model_name or self.model

    def to_tool_config(self) -> EngineConfig:
        """Return the engine's part for a tool: the server's trace is not its to write, no audit, no canary.

        Nor are prompts that it repeats fed for nothing.
        """
        config = self.to_engine_config()
        scheduler = replace(config.scheduler, prefix_block_tokens=0)
        return replace(config, trace_file=None, audit_share=0.0, kv_canary=False, scheduler=scheduler)

    def _selector(self, drafter: str) -> str | None:
        """Return the network's file, None for counting.

        One that ships is for servers whose rule draws: rows that rank their tokens have trees that it does not know, and are what
        a server of the coupled rule runs.
        """
        if self.selector != "auto":
            return None if self.selector == "counting" else _named(self.selector)
        shipped = SHIPPED_SELECTORS / f"{self.model}-head.safetensors"
        is_known = self.drafter == "auto" and drafter == "head" and "/" not in self.model
        return str(shipped) if is_known and self.verifier != "coupled" and shipped.is_file() else None

    def to_engine_config(self) -> EngineConfig:
        """Return the engine's part."""
        drafter, head, has_cached_text = self.drafter, _named(self.head), self.cached_text
        if drafter == "auto":
            shipped = SHIPPED_DRAFTERS / f"{self.model}-head.safetensors"
            has_cached_text = self.policy != "plain" and "/" not in self.model and shipped.is_file()
            drafter, head = ("head", str(shipped)) if has_cached_text else ("ngram", None)
        selector = self._selector(drafter)
        return EngineConfig(
            model=self.model,
            model_name=self.served_name,
            generation_config=self.generation_config,
            drafter=drafter,
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
            selector=selector,
            is_selector_optional=self.selector == "auto",
            dtype=self.dtype,
            draft_dtype=None if self.draft_dtype == "auto" else self.draft_dtype,
            device=self.device,
            num_threads=self.num_threads,
            audit_share=self.audit_share,
            audit_tokens=self.audit_tokens,
            trace_file=self.trace_file,
            cuda_graphs=self.cuda_graphs,
            kv_canary=self.kv_canary,
            scheduler=SchedulerConfig(
                max_running=self.max_running,
                max_waiting=self.max_waiting,
                max_waiting_tokens=self.max_waiting_tokens,
                max_step_tokens=self.max_step_tokens,
                num_slots=self.num_slots,
                max_model_len=self.max_model_len,
                prefix_block_tokens=0 if self.prefix_cache == "off" else BLOCK_TOKENS,
            ),
        )


def or_shipped(path: Path) -> Path:
    """Return a path; if the working folder lacks it and it begins with `configs/`, the file of that name that ships."""
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
    except Exception as error:  # what the YAML reader raises has no common base
        raise SettingsError(f"{config_file or 'environment'}: {error}") from error


def _settings_from(config_file: Path | None) -> type[Settings]:
    """Return Settings that read this file beside the environment."""

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
        raise SettingsError(f"unknown environment variables: {', '.join(unknown)}")


def _sentence(error: Mapping[str, Any]) -> str:
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"unknown setting: {name}"
    return f"{name}: {error['msg']}" if name else str(error["msg"])
