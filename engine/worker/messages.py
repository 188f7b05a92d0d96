"""Messages between the client and its worker process, encoded with msgpack: commands to the worker and events from it.

Knows records and bytes. Does not know sockets, processes or engines. Nothing is pickled. Bytes that are none of these
records raise msgspec.ValidationError or msgspec.DecodeError.
"""

from dataclasses import dataclass

import msgspec

from engine.core.cache_events import CacheEvent
from engine.core.types import ModelInfo, Request, StepStats, TokenEvent


@dataclass(frozen=True, slots=True)
class Addresses:
    """The ZeroMQ endpoints between a client and its worker, each bound by its reader, and the path of the step log."""

    commands: str
    events: str
    step_log: str


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Generate for this request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Abort this request. Ids of ended requests are ignored."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the worker after the current step, without finishing any request."""


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """The worker is alive and has no other event."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The models are loaded. The worker now accepts requests."""

    info: ModelInfo


class StepResult(msgspec.Struct, frozen=True, tag="turn"):
    """All output of one iteration of the worker's loop, or statistics alone if a later message has its events too.

    `stats` is None if no step ran.
    """

    events: tuple[TokenEvent, ...]
    stats: StepStats | None = None
    cache_events: tuple[CacheEvent, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker's last event: the error that ends it. `is_refusal`: the configuration cannot be served (Refusal)."""

    error: str
    is_refusal: bool = False


Command = Add | Abort | Shutdown
WorkerEvent = Heartbeat | Ready | StepResult | Failed

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[WorkerEvent] = msgspec.msgpack.Decoder(WorkerEvent)


def encode_message(message: Command | WorkerEvent) -> bytes:
    """Return the message as bytes. Raises OverflowError for an integer beyond 64 bits."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Return the command that these bytes encode."""
    return _command_decoder.decode(data)


def decode_event(data: bytes) -> WorkerEvent:
    """Return the event that these bytes encode."""
    return _event_decoder.decode(data)
