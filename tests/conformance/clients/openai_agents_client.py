"""openai-agents: whole runs over Responses, its default, and over chat completions. Scripted turns: test_agents_client.py."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from features import BASE, GREETING, KEY, MODEL, PERSON, QUESTION, feature, main
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
called: list[str] = []


class Person(BaseModel):
    name: str
    age: int


@function_tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    called.append(city)
    return f"Rain in {city}."


def agent(kind: type = OpenAIChatCompletionsModel, max_tokens: int = 100, choice: str | None = None, **options) -> Agent:
    client = AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=300)
    # One call: a small model that must call repeats its call until the limit.
    settings = ModelSettings(
        temperature=0, max_tokens=max_tokens, tool_choice=choice, parallel_tool_calls=False if choice else None
    )
    return Agent(name="helper", instructions="Be brief.", model=kind(MODEL, client), model_settings=settings, **options)


async def run_with_tool(kind: type, choice: str | None) -> None:
    called.clear()
    answer = await Runner.run(agent(kind, choice=choice, tools=[weather]), QUESTION)
    assert called, answer.final_output
    assert len(answer.raw_responses) > 1


@feature("chat")
async def chat():
    assert (await Runner.run(agent(max_tokens=32), GREETING)).final_output


@feature("stream")
async def stream():
    answer = Runner.run_streamed(agent(max_tokens=32), GREETING)
    assert [event async for event in answer.stream_events()]
    assert answer.final_output


@feature("tools forced")
async def tools_forced():
    await run_with_tool(OpenAIChatCompletionsModel, "required")


@feature("tools auto")
async def tools_auto():
    await run_with_tool(OpenAIChatCompletionsModel, None)


@feature("structured")
async def structured():
    assert (await Runner.run(agent(output_type=Person), PERSON)).final_output.name


@feature("responses")
async def responses():
    assert (await Runner.run(agent(OpenAIResponsesModel, 100), GREETING)).final_output
    assert (await Runner.run(agent(OpenAIResponsesModel, output_type=Person), PERSON)).final_output.name
    streamed = Runner.run_streamed(agent(OpenAIResponsesModel), GREETING)
    assert [event async for event in streamed.stream_events()]


@feature("agent run")
async def agent_run():
    await run_with_tool(OpenAIResponsesModel, "required")


main("openai-agents")
