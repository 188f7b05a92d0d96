"""Refusals of settings before anything is loaded. Importing this module is fast."""

import errno
import os
import socket
from pathlib import Path

from engine.core.refusal import Refusal
from engine.weights.references import require_usable
from server.settings import DRAFTERS, Settings, or_shipped


def require_startable(settings: Settings) -> None:
    """Raise Refusal for a model or a file that is missing, or an address that cannot be listened on."""
    for reference in (settings.model, settings.draft_model):
        if reference is not None:
            require_usable(reference)
    selector = None if settings.selector == "counting" else settings.selector
    for name, file in (("head", settings.head), ("lens", settings.lens), ("selector", selector)):
        if file is not None and not or_shipped(Path(file)).is_file():
            raise Refusal(f"{name}: there is no file {file}")
    if settings.drafter not in DRAFTERS and not Path(settings.drafter).expanduser().is_dir():
        raise Refusal(f"drafter: {settings.drafter} is no folder with config.json and .safetensors files")
    folder = None if settings.trace_file is None else Path(settings.trace_file).absolute().parent
    if folder is not None and not os.access(folder, os.W_OK):
        raise Refusal(f"trace_file: {folder} is no folder that can be written to")
    require_free(settings.host, settings.port)


def require_free(host: str, port: int) -> None:
    """Raise Refusal unless a server could listen there now. Port 0 is any free one."""
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise Refusal(f"host: {host!r} is no address of this machine ({error.strerror})") from error
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will
            try:
                probe.bind(address)
            except OSError as error:
                raise Refusal(_reason(error, host, port)) from error


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use: stop the server that listens there, or choose another one, as --port {port + 1}"
    if error.errno == errno.EACCES:
        return f"port {port} is reserved for the administrator: choose one above 1023, as --port 8000"
    return f"host: {host} port {port} cannot be listened on: {error.strerror}"
