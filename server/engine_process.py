"""The engine process of a server's settings, and the tokenizer of its weights. Does not know HTTP."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from engine.core.cache_events import CacheEvent
from engine.core.service import EngineService
from engine.weights import resolve
from engine.worker.client import WorkerClient
from engine.worker.crash_dump import CrashDumps
from engine.worker.process import ProcessLauncher
from engine.worker.restart_limits import Supervision
from server.adaptive_engine import served_engine
from server.http.logs import configure_logging
from server.launch import TEMPLATE
from server.settings import Settings
from server.text.codec import Tokenizer, load_tokenizer


def engine_process(settings: Settings, on_cache_events: Callable[[Sequence[CacheEvent]], None] | None = None) -> EngineService:
    """Return the client of an engine process, which is not started yet. Changes of its prefix cache go to `on_cache_events`."""
    config = settings.to_engine_config()
    supervision = Supervision(hang_limit_s=settings.hang_limit_s, max_deaths=settings.max_deaths)
    dumps = CrashDumps(Path(settings.crash_dump_dir), settings.crash_dump_texts) if settings.crash_dump_dir else None
    configure = partial(configure_logging, settings.log_level, settings.log_format, is_worker=True)
    launcher = ProcessLauncher(config, served_engine, TEMPLATE if settings.spare_worker else None, configure)
    client = WorkerClient(launcher, config.scheduler, supervision, dumps)
    if on_cache_events is not None:
        client.add_cache_listener(on_cache_events)
    return client


def tokenizer_of(reference: str) -> Tokenizer:
    """Return the tokenizer of a model's weights."""
    return load_tokenizer(str(resolve(reference).folder))
