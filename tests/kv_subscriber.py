"""A router's side of the published changes of the prefix cache: frames, gaps, replays and the tree that they give."""

from typing import Any

import msgspec
import zmq

from tests.prefix_tree import PrefixTree

END = (1 << 64) - 1
_WAIT_MS = 30_000


class KvSubscriber:
    """Reads batches in their order. A message that never came is requested from the replay socket."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        self.tree = PrefixTree()
        self.kinds: list[str] = []
        self.num_replayed = 0
        self.next_number = 0
        self._context = zmq.Context()
        self._topic = topic.encode()
        self._events = self._context.socket(zmq.SUB)
        self._events.subscribe(self._topic)
        self._events.connect(endpoint)
        self._replay_endpoint = replay_endpoint

    def __enter__(self) -> "KvSubscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def read(self, wait_ms: int = _WAIT_MS) -> bool:
        """Read one message, after those that are missing before it. Return whether there was one."""
        if not self._events.poll(wait_ms):
            return False
        number, batch = self._decoded(self._events.recv_multipart())
        if number > self.next_number and self._replay_endpoint is not None:
            self._read_replay(self._replay_endpoint)
        if number >= self.next_number:
            self._take(number, batch)
        return True

    def _read_replay(self, endpoint: str) -> None:
        for number, batch in replayed(endpoint, self.next_number, self._context):
            self.num_replayed += 1
            self._take(number, batch)

    def _decoded(self, frames: list[bytes]) -> tuple[int, list[Any]]:
        topic, number, payload = frames
        assert topic == self._topic
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    def _take(self, number: int, batch: list[Any]) -> None:
        self.next_number = number + 1
        _, events, rank = batch
        assert rank == 0
        for event in events:
            self.kinds.append(event["type"])
            self.tree.apply(event)


def replayed(endpoint: str, first: int, context: "zmq.Context[zmq.Socket[bytes]]") -> list[tuple[int, list[Any]]]:
    """Return the kept messages from a number on, until the end mark."""
    with context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        messages: list[tuple[int, list[Any]]] = []
        while True:
            assert socket.poll(_WAIT_MS), "no end mark"
            empty, _, number, payload = socket.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big") == END:
                assert payload == b""
                return messages
            messages.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
