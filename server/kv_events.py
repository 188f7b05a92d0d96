"""Publishes the changes of the prefix cache over ZeroMQ, in vLLM's form, for routers that know what each replica has cached.

A message has three frames: the topic, its number (8 bytes, big-endian) and a batch of events in msgpack. ZeroMQ discards
messages of a subscriber that is too far behind, which sees a gap in the numbers. It sends the number of the first missing
message to the replay socket. The answer is the kept messages from there on, and an end mark.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from engine.core.cache_events import AllBlocksCleared, CacheEvent
from engine.core.refusal import Refusal

log = logging.getLogger(__name__)

MAX_KEPT = 10_000  # messages
_MAX_QUEUED = 100_000  # messages for one subscriber
_NUMBER_BYTES = 8
_END_MARK = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_LINGER_MS = 500


class EventBatch(msgspec.Struct, array_like=True):
    """The events of one step. vLLM numbers the engines of one server; this server has one."""

    ts: float
    events: Sequence[CacheEvent]
    data_parallel_rank: int = 0


class KvEventPublisher:
    """Owns the sockets. `publish` never waits; replays have a thread of their own. Raises Refusal for unusable endpoints."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._next_number = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_KEPT)
        self._lock = threading.Lock()  # of `_kept`
        self._context = zmq.Context()
        self._publications = self._context.socket(zmq.PUB)
        self._publications.set_hwm(_MAX_QUEUED)
        self._publications.linger = _LINGER_MS
        self._replay_thread: threading.Thread | None = None
        try:
            _open(self._publications, "kv_events", endpoint)
            if replay_endpoint is not None:
                replays = self._context.socket(zmq.ROUTER)
                replays.set_hwm(MAX_KEPT + 1)  # a whole replay
                replays.linger = 0
                _open(replays, "kv_events_replay", replay_endpoint)
                self._replay_thread = threading.Thread(target=self._serve_replays, args=(replays,), name="kv-replay", daemon=True)
        except Refusal:
            self._context.destroy(linger=0)
            raise
        if self._replay_thread is not None:
            self._replay_thread.start()
        self.publish((AllBlocksCleared(),))  # a server that had this address before may have cached something

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Send the events of one step."""
        payload = self._encoder.encode(EventBatch(time.time(), events))
        number = self._next_number.to_bytes(_NUMBER_BYTES, "big")
        self._next_number += 1
        with self._lock:
            self._kept.append((number, payload))
        self._publications.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is queued for connected subscribers, for a moment, and close the sockets."""
        self._publications.close()
        self._context.term()  # ends the thread's wait
        if self._replay_thread is not None:
            self._replay_thread.join()

    def _serve_replays(self, replays: "zmq.Socket[bytes]") -> None:
        """Answer requests until the context is terminated."""
        try:
            while True:
                self._replay(replays, replays.recv_multipart())
        except zmq.ContextTerminated:
            replays.close()

    def _replay(self, replays: "zmq.Socket[bytes]", request: list[bytes]) -> None:
        """Send the kept messages from a number on. A message that is no such request is ignored."""
        subscriber, first = request[0], request[-1]
        if len(request) != 3 or len(first) != _NUMBER_BYTES:
            log.info("kv_events_replay: a message that is no number was ignored")
            return
        with self._lock:
            kept = [message for message in self._kept if message[0] >= first]
        for number, payload in kept:
            replays.send_multipart((subscriber, b"", self._topic, number, payload))
        replays.send_multipart((subscriber, b"", b"", _END_MARK, b""))


def _open(socket: "zmq.Socket[bytes]", setting: str, endpoint: str) -> None:
    """Bind or connect a socket as vLLM does: a publisher also reaches routers that wait at an address of their own."""
    is_bound = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://") or socket.type == zmq.ROUTER
    try:
        socket.bind(endpoint) if is_bound else socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise Refusal(f"{setting}: {endpoint} cannot be used: {zmq.strerror(error.errno or 0)}") from error
