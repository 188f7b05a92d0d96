"""The publisher of cache events: frames, numbers, replays, what is refused, and that nothing is left of it."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine.core.cache_events import BlockRemoved, BlockStored, CacheEvent
from engine.core.refusal import Refusal
from server import kv_events
from server.app import create_app
from server.kv_events import KvEventPublisher
from server.settings import Settings, SettingsError, load_settings
from tests.e2e.server import free_port
from tests.kv_subscriber import KvSubscriber, replayed


@pytest.fixture
def endpoints(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


@pytest.fixture
def publisher(endpoints: tuple[str, str]) -> Iterator[KvEventPublisher]:
    publisher = KvEventPublisher(*endpoints, topic="kv@replica")
    yield publisher
    publisher.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-replay"]


def stored(number: int) -> tuple[CacheEvent, ...]:
    return (BlockStored((number,), None, (number, number), 2, None, "GPU", None),)


def follow(publisher: KvEventPublisher, subscriber: KvSubscriber) -> None:
    """Publish until the subscriber is connected: a message before that is not sent to it."""
    while not subscriber.read(50):
        publisher.publish(())


def test_late_subscriber_replays_what_it_missed(publisher: KvEventPublisher, endpoints: tuple[str, str]):
    for number in range(3):
        publisher.publish(stored(number))
    with KvSubscriber(*endpoints, topic="kv@replica") as subscriber:
        follow(publisher, subscriber)
        assert subscriber.kinds == ["AllBlocksCleared", *["BlockStored"] * 3]
        assert subscriber.num_replayed >= 4
        publisher.publish((BlockRemoved((0, 1), "GPU"),))
        assert subscriber.read()
    assert [*subscriber.tree.prefixes] == [(None, "", (2, 2))]


def test_topic_is_a_filter(publisher: KvEventPublisher, endpoints: tuple[str, str]):
    with KvSubscriber(endpoints[0], topic="kv@other") as other, KvSubscriber(*endpoints, topic="kv@replica") as subscriber:
        follow(publisher, subscriber)
        assert not other.read(100)


@pytest.mark.parametrize(("first", "count"), [(0, 5), (7, 3), (9, 1), (10, 0), (1 << 63, 0)])
def test_replays_are_bounded_and_end(
    first: int, count: int, endpoints: tuple[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    """Ten messages, of which the last five are kept."""
    monkeypatch.setattr(kv_events, "MAX_KEPT", 5)
    publisher: KvEventPublisher = request.getfixturevalue("publisher")
    for number in range(9):
        publisher.publish(stored(number))
    with zmq.Context() as context:
        messages = replayed(endpoints[1], first, context)
    assert [number for number, _ in messages] == [*range(10)][10 - count :]


@pytest.mark.parametrize("frames", [(b"x",), (b"", b""), (b"", b"1234567"), (b"", b"12345678", b"more"), (b"",)])
def test_wrong_replay_requests_are_ignored(frames: tuple[bytes, ...], publisher: KvEventPublisher, endpoints: tuple[str, str]):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoints[1])
        socket.send_multipart(frames)
        assert len(replayed(endpoints[1], 0, context)) == 1
        assert not socket.poll(50)


def test_publisher_connects_to_a_routers_address():
    """As vLLM's does: a router that waits at one address for all replicas."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        router.subscribe(b"")
        router.bind(address)
        publisher = KvEventPublisher(address)
        while not router.poll(50):
            publisher.publish(())
        assert len(router.recv_multipart()) == 3
        publisher.close()


def test_publishing_waits_for_no_subscriber(publisher: KvEventPublisher, endpoints: tuple[str, str], monkeypatch):
    """A subscriber that never reads loses messages and finds the gap. The publisher sends on."""
    with KvSubscriber(*endpoints, topic="kv@replica") as subscriber:
        follow(publisher, subscriber)
        start = time.perf_counter()
        for number in range(20_000):
            publisher.publish(stored(number))
        assert time.perf_counter() - start < 20
        last = publisher._next_number
        while subscriber.next_number < last and subscriber.read(1000):
            pass
    assert subscriber.next_number == last


def test_unusable_endpoints_are_refused(tmp_path: Path, endpoints: tuple[str, str]):
    """One line names the setting, and the sockets are closed again."""
    with pytest.raises(Refusal, match=r"^kv_events: ipc:///no/such/folder/x cannot be used: No such file or directory$"):
        KvEventPublisher("ipc:///no/such/folder/x")
    first = KvEventPublisher(f"tcp://*:{(port := free_port())}")
    with pytest.raises(Refusal, match=rf"^kv_events_replay: tcp://\*:{port} cannot be used: Address already in use$"):
        KvEventPublisher(endpoints[0], f"tcp://*:{port}")
    first.close()
    with pytest.raises(Refusal, match="kv_events: "):
        create_app(Settings(kv_events="ipc:///no/such/folder/x"))


@pytest.mark.parametrize(
    "values",
    [
        {"kv_events": "5557"},
        {"kv_events": "tcp://*"},
        {"kv_events": "tcp://*:0"},
        {"kv_events": "tcp://*:65536"},
        {"kv_events": "tcp://*:٥٥"},
        {"kv_events": "tcp://:5557"},
        {"kv_events": "inproc://events"},
        {"kv_events": "ipc://"},
        {"kv_events": "tcp://*:1", "kv_events_replay": "*:2"},
        {"kv_events_replay": "tcp://*:5558"},
        {"kv_events_topic": "kv@"},
        {"kv_events": "tcp://*:5557", "prefix_cache": "off"},
    ],
)
def test_settings_without_a_source_are_refused(values: dict[str, str]):
    with pytest.raises(SettingsError, match="kv_events"):
        load_settings(None, values)


def test_engine_records_only_what_is_published():
    """Tokens that cross the network are warned of."""
    quiet = load_settings()
    assert not quiet.to_engine_config().scheduler.has_cache_events
    for endpoint in ("tcp://*:5557", "tcp://router.example:5557", "tcp://[::1]:5557", "ipc:///tmp/events"):
        settings = load_settings(None, {"kv_events": endpoint})
        assert settings.to_engine_config().scheduler.has_cache_events
        assert any("unencrypted" in text and endpoint in text for text in settings.warnings) == endpoint.startswith("tcp")
