"""autogen: the OpenAI client of autogen-ext and an agent of autogen-agentchat."""

import json

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core import CancellationToken
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.agents.openai import OpenAIAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from features import BASE, GREETING, KEY, MODEL, PERSON, QUESTION, feature, main
from openai import AsyncOpenAI
from pydantic import BaseModel

INFO = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}
called: list[str] = []


class Person(BaseModel):
    name: str
    age: int


def weather(city: str) -> str:
    """Return the weather of a city."""
    called.append(city)
    return f"Rain in {city}."


TOOL = FunctionTool(weather, description="The weather of a city.", strict=True)


def client(max_tokens: int = 64) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=MODEL, base_url=BASE, api_key=KEY, model_info=INFO, temperature=0, max_tokens=max_tokens, max_retries=0, timeout=300
    )


def user(text: str) -> list[UserMessage]:
    return [UserMessage(content=text, source="user")]


@feature("chat")
async def chat():
    assert (await client(8).create(user(GREETING))).content


@feature("stream")
async def stream():
    assert [chunk async for chunk in client(8).create_stream(user(GREETING))]


@feature("tools forced")
async def tools_forced():
    answer = await client().create(user(QUESTION), tools=[TOOL], tool_choice=TOOL)
    assert json.loads(answer.content[0].arguments)["city"]


@feature("tools auto")
async def tools_auto():
    answer = await client().create(user(QUESTION), tools=[TOOL])
    assert isinstance(answer.content, list), answer.content


@feature("structured")
async def structured():
    answer = await client().create(user(PERSON), json_output=Person)
    assert Person.model_validate_json(answer.content).name


@feature("responses")
async def responses():
    agent = OpenAIAgent(
        name="helper",
        description="A helper.",
        client=AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=300),
        model=MODEL,
        instructions="Be brief.",
        max_output_tokens=32,
    )
    for text in (GREETING, GREETING):  # the second continues the first by its id
        answer = await agent.on_messages([TextMessage(content=text, source="user")], CancellationToken())
        assert answer.chat_message.to_text()


@feature("agent run")
async def agent_run():
    called.clear()
    agent = AssistantAgent("helper", client(), tools=[TOOL], system_message="Be brief.", reflect_on_tool_use=True)
    answer = await agent.run(task=QUESTION)
    assert called, answer.messages[-1].to_text()


main("autogen-ext", "autogen-agentchat")
