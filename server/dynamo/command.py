"""`latebranch dynamo-worker`: a model behind the frontend of NVIDIA Dynamo. server.dynamo does the rest."""

import argparse
import sys
from importlib.util import find_spec

from engine.core.refusal import Refusal
from engine.worker.fork_template import start_template
from server.cli.settings_flags import GROUPS, add_settings_flags, settings_of
from server.http.logs import configure_logging
from server.launch import TEMPLATE
from server.preflight import require_startable

# Settings of the engine process. All others are of HTTP and of text, which are the frontend's.
HONOURED = frozenset(
    (
        *("model", "model_name", "dtype", "generation_config", "device", "num_threads", "cuda_graphs", "deterministic"),
        *GROUPS["drafts"],
        *GROUPS["size"],
        *("drain_s", "hang_limit_s", "max_deaths", "crash_dump_dir", "crash_dump_texts", "kv_canary"),
        *("audit_share", "audit_tokens", "log_level", "log_format", "trace_file"),
    )
)


def add_dynamo_worker_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `dynamo-worker`, with a flag for each setting of the engine."""
    about = "Serve a model behind NVIDIA Dynamo's frontend (docs/scaling.md). DYN_FILE_KV names the folder that they share."
    command = subparsers.add_parser("dynamo-worker", help="serve a model behind NVIDIA Dynamo's frontend", description=about)
    command.add_argument("--namespace", default="dynamo", help="Dynamo's namespace of the worker. Default: dynamo")
    routing = "publish what the prefix cache has, for a frontend with --router-mode kv"
    command.add_argument("--kv-routing", action="store_true", help=routing)
    add_settings_flags(command, HONOURED)
    command.set_defaults(handler=_serve_dynamo)


def _serve_dynamo(parsed: argparse.Namespace) -> int:
    settings = settings_of(parsed)
    if others := sorted(settings.model_fields_set - HONOURED):
        raise Refusal(f"{', '.join(others)}: not of a worker behind Dynamo's frontend, which does HTTP, keys and text")
    if parsed.kv_routing and settings.prefix_cache == "off":
        raise Refusal("kv_routing is given only with a prefix cache")
    if not _is_installed():
        raise Refusal("Dynamo is not installed: docs/scaling.md has the commands")
    configure_logging(settings.log_level, settings.log_format)
    require_startable(settings.model_copy(update={"port": 0}))
    if settings.spare_worker:
        start_template(TEMPLATE)
    from server.dynamo.llm_engine import serve_dynamo  # here, because it is an extra

    reason = serve_dynamo(settings, parsed.namespace, parsed.kv_routing)  # raises Refusal
    if reason is not None:
        sys.stderr.write(f"latebranch dynamo-worker: {reason}\n")
    return 0 if reason is None else 1


def _is_installed() -> bool:
    """Return whether both packages are there: the runtime, and ai-dynamo with its Python modules."""
    try:
        return find_spec("dynamo.common.backend") is not None
    except ModuleNotFoundError:
        return False
