"""What crosses the process border: letters to the worker, reports from it, and their msgpack encoding.

Knows records and bytes. Does not know sockets, processes or engines. Nothing is pickled: bytes that are not one of these
records are refused with msgspec.ValidationError or msgspec.DecodeError.
"""

from dataclasses import dataclass

import msgspec

from engine.core.types import ModelInfo, Request, StepStats, TokenEvent


@dataclass(frozen=True, slots=True)
class Addresses:
    """The two one-way streets between a client and its worker, as ZeroMQ endpoints, each bound by its reader; and the file
    that the worker leaves its notes in (engine.worker.step_log).
    """

    commands: str
    reports: str
    step_log: str


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Generate for this request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End this request; an id that has ended already is ignored."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the worker after the step that runs, finishing nothing."""


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """The worker is alive and has nothing else to say."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The models are loaded; requests are served from now on."""

    info: ModelInfo


class StepResult(msgspec.Struct, frozen=True, tag="turn"):
    """Everything that one turn of the worker's loop made; `stats` is None if no step ran in it."""

    events: tuple[TokenEvent, ...]
    stats: StepStats | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker's last words: why it cannot go on."""

    error: str


Letter = Add | Abort | Shutdown
Report = Heartbeat | Ready | StepResult | Failed

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Letter] = msgspec.msgpack.Decoder(Letter)
_report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encoded(message: Letter | Report) -> bytes:
    """Return the message's bytes; raise OverflowError for an integer beyond 64 bits."""
    return _encoder.encode(message)


def decoded_command(data: bytes) -> Letter:
    """Return the letter these bytes hold."""
    return _command_decoder.decode(data)


def decoded_report(data: bytes) -> Report:
    """Return the report these bytes hold."""
    return _report_decoder.decode(data)
