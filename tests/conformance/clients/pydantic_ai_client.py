"""pydantic-ai: agents over chat completions, Responses and Messages."""

import contextlib

from features import BASE, GREETING, KEY, MODEL, PERSON, QUESTION, URL, feature, main
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, UnexpectedModelBehavior, capture_run_messages
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

MODELS = {
    "chat": lambda: OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE, api_key=KEY)),
    "responses": lambda: OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=BASE, api_key=KEY)),
    "messages": lambda: AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY)),
}


class Person(BaseModel):
    name: str
    age: int


def agent(api: str = "chat", max_tokens: int = 64, **options) -> Agent:
    return Agent(MODELS[api](), model_settings={"max_tokens": max_tokens, "temperature": 0, "timeout": 300}, **options)


async def with_tool(api: str) -> None:
    called = []
    calls = agent(api, 100)

    @calls.tool_plain
    def weather(city: str) -> str:
        """Return the weather of a city."""
        called.append(city)
        return f"Rain in {city}."

    with (
        capture_run_messages() as turns,
        contextlib.suppress(UnexpectedModelBehavior),
    ):
        await calls.run(QUESTION)
    assert called, turns
    assert len(turns) > 3, turns


@feature("chat")
async def chat():
    assert (await agent(max_tokens=16, instructions="Be brief.").run(GREETING)).output


@feature("stream")
async def stream():
    async with agent(max_tokens=16).run_stream(GREETING) as answer:
        assert [text async for text in answer.stream_text()]


@feature("tools forced")
async def tools_forced():
    assert (await agent(output_type=Person).run(PERSON)).output.name


@feature("structured")
async def structured():
    assert (await agent(output_type=NativeOutput(Person)).run(PERSON)).output.name


@feature("responses")
async def responses():
    assert (await agent("responses", 16).run(GREETING)).output
    assert (await agent("responses", output_type=Person).run(PERSON)).output.name
    assert (await agent("responses", output_type=NativeOutput(Person)).run(PERSON)).output.name
    await with_tool("responses")


@feature("messages")
async def messages():
    assert (await agent("messages", 16).run(GREETING)).output
    assert (await agent("messages", output_type=Person).run(PERSON)).output.name
    await with_tool("messages")


@feature("tools auto")
@feature("agent run")
async def agent_run():
    await with_tool("chat")


main("pydantic-ai-slim")
