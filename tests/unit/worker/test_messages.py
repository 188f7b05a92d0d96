"""What is decoded is what was encoded, and nothing else is ever decoded."""

import pickle
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.core.tree import Expansion
from engine.core.types import (
    ErrorCode,
    FinishReason,
    ModelInfo,
    Request,
    SamplingParams,
    Speculation,
    StepStats,
    TokenEvent,
    TokenLogprobs,
)
from engine.worker.messages import (
    Abort,
    Add,
    Command,
    Failed,
    Heartbeat,
    Ready,
    Shutdown,
    StepResult,
    WorkerEvent,
    decode_command,
    decode_event,
    encode_message,
)

# The run-time type checker of the tests looks at a random item of each container, also of records built inside a strategy.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

texts = st.text("aé\n\0", max_size=6)
token_ids = st.lists(st.integers(0, 2**20), max_size=6).map(tuple)
seconds = st.floats(0, 1e6)
expansions = st.builds(Expansion, st.integers(0, 9), st.integers(1, 9), st.integers(0, 9))
samplings = st.builds(
    SamplingParams,
    temperature=seconds,
    top_p=seconds,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=token_ids,
    num_logprobs=st.none() | st.integers(0, 20),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.5, 2),
    logit_bias=st.lists(st.tuples(st.integers(0, 9), st.floats(-100, 100)), max_size=3).map(tuple),
    allowed_token_ids=st.none() | token_ids,
    bad_words=st.lists(token_ids, max_size=3).map(tuple),
    typical_p=seconds,
    num_prompt_logprobs=st.none() | st.integers(0, 20),
    min_tokens=st.integers(0, 9),
)
speculations = st.builds(Speculation, st.booleans(), st.none() | expansions, st.none() | texts)
requests = st.builds(Request, texts, token_ids, samplings, speculations)
logprobs = st.builds(TokenLogprobs, st.floats(allow_nan=False), token_ids, st.lists(seconds, max_size=3).map(tuple))
events = st.builds(
    TokenEvent,
    texts,
    token_ids,
    st.lists(logprobs, max_size=3).map(tuple),
    st.none() | st.sampled_from(FinishReason),
    st.none() | st.integers(0, 9),
    st.none() | texts,
    st.none() | st.sampled_from(ErrorCode),
    st.none() | seconds,
    st.integers(0, 9),
    st.none() | expansions,
    prompt_logprobs=st.lists(logprobs, max_size=3).map(tuple),
)
stats = st.builds(StepStats, *[st.integers(0, 2**40)] * 5, expansions=st.dictionaries(texts, st.integers(0, 9)), draft_s=seconds)
infos = st.builds(ModelInfo, *[texts, *[st.integers(0, 9)] * 3, token_ids, *[texts] * 5])

commands: st.SearchStrategy[Command] = st.builds(Add, requests) | st.builds(Abort, texts) | st.just(Shutdown())
reports: st.SearchStrategy[WorkerEvent] = st.one_of(
    st.just(Heartbeat()),
    st.builds(Ready, infos),
    st.builds(StepResult, st.lists(events, max_size=4).map(tuple), st.none() | stats),
    st.builds(Failed, texts),
)


def check_survives(message: Command | WorkerEvent, code: Callable[[Command | WorkerEvent], bytes] = encode_message) -> None:
    decode: Callable[[bytes], Command | WorkerEvent] = decode_command if isinstance(message, Command) else decode_event
    arrived = decode(code(message))
    assert arrived == message
    assert type(arrived) is type(message)


@given(commands)
def test_letters_survive(command: Command) -> None:
    check_survives(command)


@given(reports)
@settings(deadline=None)
def test_reports_survive(report: WorkerEvent) -> None:
    check_survives(report)


def test_a_codec_that_drops_logprobs_is_detected() -> None:
    """The mutant: log-probabilities thought too bulky for the wire."""

    def lossy(message: Command | WorkerEvent) -> bytes:
        assert isinstance(message, StepResult)
        return encode_message(StepResult(tuple(structs.replace(event, logprobs=()) for event in message.events), message.stats))

    with pytest.raises(AssertionError):
        check_survives(StepResult((TokenEvent("r", (1,), (TokenLogprobs(-0.5),)),)), lossy)


@pytest.mark.parametrize(
    "data", [b"", b"nonsense", pickle.dumps(Abort), encode_message(Heartbeat()), encode_message(Failed("x"))]
)
def test_invalid_message_is_refused(data: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
        decode_command(data)


def test_values_are_checked_on_arrival() -> None:
    wild = msgspec.msgpack.encode({"type": "add", "request": {"request_id": 3, "prompt_ids": "abc"}})
    with pytest.raises(msgspec.ValidationError):
        decode_command(wild)
    bad_shape = msgspec.msgpack.encode(
        {"type": "add", "request": {"request_id": "r", "prompt_ids": [], "speculation": {"expansion": [0, 0, 0]}}}
    )
    with pytest.raises(msgspec.ValidationError):
        decode_command(bad_shape)


def test_integer_over_64_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        encode_message(Add(Request("r", (1,), SamplingParams(seed=2**70))))
