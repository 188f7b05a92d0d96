"""docs/api.md describes every route and every field of a request."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from server.schemas.anthropic import CountRequest, MessagesRequest
from server.schemas.chat import ChatRequest
from server.schemas.common import StreamOptions
from server.schemas.completion import CompletionRequest
from server.schemas.infill import InfillRequest
from server.schemas.responses import ResponsesRequest
from server.schemas.speculative import SpeculativeOptions
from server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from tests.api.harness import in_process
from tests.fake_engine import FakeEngine

DOCUMENT = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
GENERATING = [CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, InfillRequest]
BODIES = [*GENERATING, CountRequest, TokenizeRequest, DetokenizeRequest]
MODELS = [*BODIES, StreamOptions, SpeculativeOptions]


async def test_every_route_is_documented():
    async with in_process(FakeEngine()) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    routes = {f"{method.upper()} {path.replace(':path', '')}" for path, methods in paths.items() for method in methods}
    assert routes == set(re.findall(r"`((?:GET|POST|DELETE) [^`]+)`", DOCUMENT))


@pytest.mark.parametrize("model", MODELS)
def test_every_field_is_documented(model: type[BaseModel]):
    documented = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", DOCUMENT))))
    assert set(model.model_fields) - documented == set()
